# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Forks, exits, interrupts, callbacks that raise, and pools and devices that end in any order.

No test here has a control by lying queries: what is asked is whether a process lives and ends, not what is read when.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage import DriverError, PinstageError
from pinstage.testing import SimulatedDevice, latch

TESTS = Path(__file__).parent  # not the repository's root: `python -c` would find the source folder there
KB, MB = 1024, 1 << 20


def run(program, **environment):
    # A hang is ended by the alarm, with a status that tells; a busy machine is not taken for one.
    program = "import signal\nsignal.alarm(30)\n" + program
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=False, cwd=TESTS, env={**os.environ, **environment},
    )  # fmt: skip


SETTING = """
import atexit, os, sys, threading, torch, pinstage
from pinstage.testing import SimulatedDevice, latch
dev = SimulatedDevice()
dev.make_current()
pool = pinstage.StagingPool(dev, max_bytes=64 << 20)
dst, source = dev.zeros(1 << 20, torch.int32), torch.full((1 << 20,), 7, dtype=torch.int32)
"""


# --- the end of the process -------------------------------------------------------------------------------------------

LEFTOVERS = {
    "copies_in_flight": "pinstage.copy_(dst, source, pool=pool)",
    "copies_behind_a_gate": "gate = latch(dev.default_stream, timeout=60)\npinstage.copy_(dst, source, pool=pool)",
    "lease_open": "lease = pool.lease(100, torch.int32)",
    "lease_submitted": "lease = pool.lease(100, torch.int32)\nlease.copy_to(dst[:100])",
    "view_held": """
with pool.lease(100, torch.int32) as lease:
    view = lease.tensor.numpy()
    lease.copy_to(dst[:100])""",
    "buffer": """
buffer = pinstage.DoubleBuffer(100, torch.int32, dev)
with buffer.fill():
    pass
buffer.copy_to(dst[:100])""",
    "kept": "pinstage.keep_alive(source, dev.default_stream)",
    "team_spinning": "pinstage.set_num_threads(2)\nfor _ in range(3):\n    pinstage.copy_(dst, source, pool=pool)",
    "thread_waiting": """
gate = latch(dev.default_stream, timeout=60)
pinstage.copy_(dst, source, pool=pool)
ticket = pinstage.keep_alive(source, dev.default_stream)
begun = threading.Event()
def wait():
    begun.set()
    ticket.wait()
threading.Thread(target=wait, daemon=True).start()
begun.wait()""",
    # Of parts made before: a slice made while the interpreter goes away would abort in torch (Python before 3.14).
    "thread_copying": """
part, few = dst[:100], source[:100]
def copies():
    while True:
        pinstage.copy_(part, few, pool=pool)
threading.Thread(target=copies, daemon=True).start()
while pool.stats().copies < 100:
    pass""",
    "device_lost": "pinstage.copy_(dst, source, pool=pool)\ndev.lose()",
    "copy_at_exit": "atexit.register(lambda: pinstage.copy_(dst, source, pool=pool))",
}
# Without the copy at exit, which rightly waits where the copying thread has filled the pool behind the gate.
LEFTOVERS["everything"] = "\n".join(
    LEFTOVERS[name] for name in LEFTOVERS if name not in ("device_lost", "copy_at_exit")
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "everything")) for name in LEFTOVERS]
)
def test_process_ends_with_status_0_whatever_is_left(name):
    """Case 24. A lease that is left undeclared may warn: at exit, nobody is there to read it."""
    done = run(SETTING + LEFTOVERS[name])
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


# --- forks ------------------------------------------------------------------------------------------------------------

FORK = """
lease = pool.lease(100, torch.int32)
lease.tensor.fill_(5)
view, small = lease.tensor, dev.zeros(100, torch.int32)
buffer = pinstage.DoubleBuffer(100, torch.int32, dev, pool=pool)
with buffer.fill() as host:
    host.fill_(6)
ticket = buffer.copy_to(small)
pinstage.copy_(dst, source, pool=pool)  # in flight while the child lives and dies
pid = os.fork()
if pid == 0:
    calls = {
        "copy_": lambda: pinstage.copy_(dst, source, pool=pool),
        "copy_rows_": lambda: pinstage.copy_rows_(dst[:4], source, [0, 1, 2, 3], pool=pool),
        "copy_batch_": lambda: pinstage.copy_batch_([dst[:4]], [source[:4]], pool=pool),
        "to_device": lambda: pinstage.to_device([1, 2], dev, pool=pool),
        "lease": lambda: pool.lease(4, torch.int32),
        "try_lease": lambda: pool.try_lease(4, torch.int32),
        "copy_to": lambda: lease.copy_to(small),
        "retire": lambda: lease.retire(0),
        "lease.close": lease.close,
        "cancel": lease.cancel,
        "fill": lambda: buffer.fill().__enter__(),
        "buffer.copy_to": lambda: buffer.copy_to(small),
        "keep_alive": lambda: pinstage.keep_alive(1, 0, device=dev),
        "done": ticket.done,
        "wait": ticket.wait,
        "wait_on": lambda: ticket.wait_on(0),
        "stats": pool.stats,
        "reclaim": pool.reclaim,
        "reserve": lambda: pool.reserve(1),
        "trim": pool.trim,
        "pool.close": pool.close,
        "StagingPool": lambda: pinstage.StagingPool(dev).lease(4, torch.int32),
        "DoubleBuffer": lambda: pinstage.DoubleBuffer(4, torch.int32, dev),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except pinstage.ForkedError as error:
            if "spawn" not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(f"{name}: no error")
    if wrong:
        print(*wrong, sep="\\n")
    view.fill_(-1)  # the child's own pages
    del lease, view, buffer, host, ticket, calls, call
    sys.exit(len(wrong))  # the whole way out, atexit and all
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
lease.copy_to(small)
dev.synchronize()
assert bool((dst == 7).all())
assert bool((small == 5).all())
assert bool((view == 5).all())
lease.close()
del view
pool.reclaim()
stats = pool.stats()
assert pool._consistent() and stats.in_flight_bytes == stats.held_bytes == 0, stats
"""


def test_forked_child_gets_a_clear_error_from_every_call_and_the_parent_is_unharmed():
    """Case 23."""
    done = run(SETTING + FORK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_forked_child_may_set_up_a_device_of_its_own():
    """As after a fork before the first use."""
    program = """
pid = os.fork()
if pid == 0:
    with SimulatedDevice() as own:
        made = pinstage.to_device([1, 2, 3], own)
        own.synchronize()
        assert made.tolist() == [1, 2, 3]
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    done = run(SETTING + "pinstage.copy_(dst, source, pool=pool)" + program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_child_forked_while_a_device_is_opened_may_open_its_own():
    program = """
from threading import Event, Thread
from pinstage import devices
held, over = Event(), Event()
def opener():
    with devices._opening:
        held.set()
        over.wait()
thread = Thread(target=opener)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    with SimulatedDevice() as own:
        pinstage.to_device([1, 2, 3], own)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
over.set()
thread.join()
assert os.waitstatus_to_exitcode(status) == 0
"""
    done = run(SETTING + program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_children_forked_while_threads_copy_get_the_error_too_and_may_open_their_own():
    """The locks that those threads held at the fork are free in the child."""
    program = """
ended = threading.Event()
def copier():
    mine = dev.zeros(64, torch.int32)
    while not ended.is_set():
        pinstage.copy_(mine, source[:64], pool=pool)
threads = [threading.Thread(target=copier) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a hang ends the child
        try:
            pinstage.copy_(dst, source, pool=pool)
        except pinstage.ForkedError:
            with SimulatedDevice() as own:
                made = pinstage.to_device([1, 2, 3], own)
                own.synchronize()
                os._exit(0 if made.tolist() == [1, 2, 3] else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
ended.set()
for thread in threads:
    thread.join()
"""
    done = run(SETTING + program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def stage_in_worker(numbers):
    """Run in another process."""
    with SimulatedDevice() as dev:
        made = pinstage.to_device(numbers, dev)
        dev.synchronize()
        return made.tolist()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing(method, monkeypatch):
    if method == "spawn":  # the child imports this module by name
        monkeypatch.syspath_prepend(str(TESTS))
        import test_process_life as module
    else:
        module = sys.modules[__name__]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads, which Python gives from 3.12 on
        with multiprocessing.get_context(method).Pool(2) as workers:
            given = [[i, i + 1] for i in range(4)]
            assert workers.map(module.stage_in_worker, given) == given


class Rows(torch.utils.data.Dataset):
    """Rows that workers make, in processes of their own, forked while copies are in flight."""

    def __init__(self, pool):
        self.pool = pool

    def __len__(self):
        return 32

    def __getitem__(self, i):
        if self.pool is not None:
            self.pool.stats()
        return torch.full((64,), i, dtype=torch.int32)


def test_batches_of_data_loader_workers_are_staged(dev):
    pool, busy = pinstage.StagingPool(dev), dev.zeros(64, torch.int32)
    received = []
    with latch(dev.default_stream, timeout=60):
        pinstage.copy_(busy, torch.ones(64, dtype=torch.int32), pool=pool)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in torch.utils.data.DataLoader(Rows(None), 4, num_workers=2, multiprocessing_context="fork"):
                received.append(dev.empty(batch.shape, batch.dtype))
                pinstage.copy_(received[-1], batch, pool=pool)
                batch.fill_(-1)
    dev.synchronize()
    assert torch.equal(torch.cat(received)[:, 0], torch.arange(32, dtype=torch.int32))
    assert bool((busy == 1).all())


def test_data_loader_worker_that_uses_the_parents_pool_raises_its_error(dev):
    pool = pinstage.StagingPool(dev)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(Rows(pool), 4, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(pinstage.ForkedError, match="spawn"):
            next(iter(loader))
    gc.collect()  # the loader's workers end here, rather than in the middle of another test
    assert pool.stats().capacity_bytes == 0


# --- interrupts -------------------------------------------------------------------------------------------------------

WAITS = {
    "lease": lambda c: c.pool.lease(64 * KB, torch.uint8),
    "copy_": lambda c: pinstage.copy_(c.dst, c.source, pool=c.pool),
    "copy_ cast": lambda c: pinstage.copy_(c.dst, c.source.to(torch.int16), pool=c.pool),
    "copy_rows_": lambda c: pinstage.copy_rows_(c.dst, c.source, list(range(32 * KB)), pool=c.pool),
    "copy_batch_": lambda c: pinstage.copy_batch_([c.dst, c.dst], [c.source, c.source], pool=c.pool),
    "to_device": lambda c: pinstage.to_device(c.source, c.dev, pool=c.pool),
    "to_device list": lambda c: pinstage.to_device([1] * 8000, c.dev, pool=c.pool),
    "fill": lambda c: c.buffer.fill().__enter__(),
    "DoubleBuffer": lambda c: pinstage.DoubleBuffer(64 * KB, torch.uint8, c.dev, pool=c.pool),
    "ticket": lambda c: c.ticket.wait(),
    "reclaim": lambda c: c.pool.reclaim(synchronize=True),
    "close": lambda c: c.pool.close(),
}


class Full:
    """A pool of 64 KB that is full of what waits behind a gate."""

    def __init__(self, dev):
        self.dev = dev
        self.pool = pinstage.StagingPool(dev, max_bytes=64 * KB)
        self.dst, self.source = dev.zeros(32 * KB, torch.uint8), torch.ones(32 * KB, dtype=torch.uint8)
        self.buffer = pinstage.DoubleBuffer(16 * KB, torch.uint8, dev, depth=1, pool=self.pool)
        self.small = dev.zeros(16 * KB, torch.uint8)

    def fill(self):
        with self.buffer.fill() as host:
            host.fill_(1)
        self.ticket = self.buffer.copy_to(self.small)
        pinstage.copy_(self.dst, self.source, pool=self.pool)
        pinstage.copy_(self.small, self.source[: 16 * KB], pool=self.pool)


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_ends_every_wait_and_leaves_the_pool_whole(dev, name, until):
    full = Full(dev)
    with latch(dev.default_stream, timeout=60) as gate:
        full.fill()
        before, polls, main = full.pool.stats(), dev.calls["cuEventQuery"], threading.get_ident()

        def interrupt():
            until(lambda: dev.calls["cuEventQuery"] > polls + 50)  # more than any call makes but one that waits
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            WAITS[name](full)
        thread.join()
        after = full.pool.stats()
        assert full.pool._consistent()
        assert (after.in_flight_bytes, after.open_bytes) == (before.in_flight_bytes, before.open_bytes)
        assert after.free_bytes == before.free_bytes
    assert gate.held
    dev.synchronize()
    assert bool((full.dst == 1).all())
    assert bool((full.small == 1).all())
    if name != "close":
        pinstage.copy_(full.dst, full.source.fill_(2), pool=full.pool)
        dev.synchronize()
        assert bool((full.dst == 2).all())
    del full.buffer
    full.pool.close()
    assert full.pool.stats().capacity_bytes == 0


# --- callbacks that raise ---------------------------------------------------------------------------------------------


class Refuses:
    """Its finalizer raises."""

    def __del__(self):
        raise RuntimeError("a finalizer that raises")


@pytest.fixture
def unraisable(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: seen.append(str(event.exc_value)))
    return seen


def test_finalizer_of_a_kept_object_that_raises_disturbs_nothing(dev, unraisable):
    pool = pinstage.StagingPool(dev)
    for _ in range(3):
        pinstage.keep_alive(Refuses(), dev.default_stream).wait()
    dst = dev.zeros(4)
    pinstage.copy_(dst, torch.ones(4), pool=pool)
    pool.reclaim(synchronize=True)
    assert unraisable == ["a finalizer that raises"] * 3
    assert dst.tolist() == [1.0] * 4
    assert pool.stats().free_bytes == pool.stats().capacity_bytes


def test_object_behind_a_tensor_whose_finalizer_raises_disturbs_nothing(dev, unraisable):
    """The last view of a slot dies together with an object that raises."""
    pool, dst = pinstage.StagingPool(dev), dev.zeros(64)
    lease = pool.lease(64, torch.float32)
    view = lease.tensor.fill_(1)
    view.friend = Refuses()
    lease.copy_to(dst)
    lease.close()
    del lease, view
    pool.reclaim(synchronize=True)
    assert unraisable == ["a finalizer that raises"]
    assert pool.stats().free_bytes == pool.stats().capacity_bytes


class Explodes(torch.Tensor):
    """A source whose copy raises, in the middle of a snapshot."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise ArithmeticError("no copy of me")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_source_that_raises_while_it_is_read_leaves_the_pool_as_it_was(dev):
    pool, dst = pinstage.StagingPool(dev), dev.zeros(64)
    pinstage.copy_(dst, torch.ones(64), pool=pool)
    pool.reclaim(synchronize=True)
    before = pool.stats()
    with pytest.raises(ArithmeticError, match="no copy of me"):
        pinstage.copy_(dst, torch.zeros(64).as_subclass(Explodes), pool=pool)
    with pytest.raises(ZeroDivisionError):
        pool._snapshot(dst, lambda slot: 1 // 0)
    assert pool.stats() == before
    assert dst.tolist() == [1.0] * 64


def test_kernel_that_raises_while_the_core_waits_becomes_a_driver_error():
    dev = SimulatedDevice()
    dev.make_current()
    pool, dst = pinstage.StagingPool(dev), dev.zeros(64)
    dev.launch(lambda: 1 // 0)
    pinstage.copy_(dst, torch.ones(64), pool=pool)
    with pytest.raises(DriverError, match="restart it"):
        pinstage.keep_alive(0, dev.default_stream, device=dev).wait()
    lease = pool.lease(64, torch.float32)
    with pytest.raises(DriverError):
        lease.copy_to(dst)
    lease.cancel()
    with pytest.raises(ZeroDivisionError):
        dev.synchronize()
    dev.close()


# --- the end of pools and devices, in every order ---------------------------------------------------------------------


class Ending:
    """What may end, each by itself."""

    def __init__(self):
        self.dev = SimulatedDevice()
        self.dev.make_current()
        self.pools = [pinstage.StagingPool(self.dev, initial_bytes=4 * KB) for _ in range(2)]
        dst = self.dst = self.dev.zeros(64)
        for pool in self.pools:
            pinstage.copy_(dst, torch.ones(64), pool=pool)
        self.lease = self.pools[0].lease(64, torch.float32)
        self.view = self.lease.tensor.fill_(3)
        self.lease.copy_to(dst)
        self.buffer = pinstage.DoubleBuffer(64, torch.float32, self.dev, pool=self.pools[1])
        with self.buffer.fill() as host:
            host.fill_(4)
        self.buffer.copy_to(dst)

    def pool_0(self):
        self.pools[0].close()

    def pool_1(self):
        self.pools[1] = None

    def handed_over(self):
        self.lease.close()

    def view_dropped(self):
        assert bool((self.view == 3).all())
        self.view = None

    def buffer_dropped(self):
        self.buffer = None

    def device(self):
        self.dev.close()

    def lost(self):
        self.dev.lose()


@pytest.mark.parametrize("end", ["device", "lost"])
def test_pools_buffers_views_and_devices_end_in_any_order(end):
    """Cases 35 and 24, and torch.cuda device resets: 720 orders."""
    names = ["pool_0", "pool_1", "handed_over", "view_dropped", "buffer_dropped", end]
    for order in itertools.permutations(names):
        ending = Ending()
        for name in order:
            gone = order.index(name) > order.index(end)
            with contextlib.suppress(*[PinstageError] * gone):  # a device that is gone may be told
                getattr(ending, name)()
        ending.dev.close()
        assert ending.dev.violations == 0, order
        if end == "device" and order[-1] == end:
            assert ending.dev.host_allocations == 0, order
        del ending


def test_device_ends_although_its_fences_cannot_be_asked_for():
    """A fence that is pending when its device closes outlives the pool of its slot by nothing."""
    for end in ("close", "collect"):
        dev = SimulatedDevice()
        dev.make_current()
        pool, dst = pinstage.StagingPool(dev), dev.zeros(64)
        pinstage.copy_(dst, torch.ones(64), pool=pool)
        core = pool.device
        dev.fail("cuEventQuery", times=2)
        del pool
        dev.close()
        if end == "collect":
            del dev, dst
            gc.collect()
        core.shutdown()  # once more: as when the last reference to it dies
        del core
