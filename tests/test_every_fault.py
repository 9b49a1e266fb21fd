# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Every driver call fails at every position of a scenario, with every class of status; the device is lost at each.

Generated from a good run, which tells the calls that there are. No test here has a control by lying queries: each asks
what happens to the bookkeeping when a call fails, and checks the bytes only of what is reported as done.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading

import pytest
import torch

import pinstage
from pinstage import DriverError, LeaseStateError, PinstageError, _core
from pinstage.testing import SimulatedDevice

OUT_OF_MEMORY, INVALID_VALUE, NOT_READY, LAUNCH_FAILED, ILLEGAL_ADDRESS, DEINITIALIZED = 2, 1, 600, 719, 700, 4
FATAL = {LAUNCH_FAILED, ILLEGAL_ADDRESS, DEINITIALIZED}
KB, MB = 1024, 1 << 20


class Scenario:
    """A bit of everything, twice. Steps that fail are skipped; `wrong` names the others whose bytes did not arrive."""

    largest = 64 * KB

    def __init__(self, dev):
        self.dev = dev
        self.pool = pinstage.StagingPool(dev, initial_bytes=4 * KB, max_bytes=self.largest)
        self.arrived = []  # (dst, value) of steps that reported success
        self.done_for_sure = []  # of those that waited for it
        self.errors = []
        self.value = 0

    def run(self, rounds=2):
        for _ in range(rounds):
            self.do([
                self.copy, self.copy, self.cast, self.transposed, self.rows, self.segments, self.pitched,
                self.repeated, self.batch,
                self.uneven_batch, self.list, self.lease, self.cancelled, self.retired, self.buffer, self.reserve,
                self.kept, self.reclaim, self.large, self.bulk, self.bulk_cast, self.bulk_rows, self.trim,
            ])  # fmt: skip
        return self

    def do(self, steps):
        for step in steps:
            self.value += 1
            try:
                step()
            except PinstageError as error:
                self.errors.append(error.with_traceback(None))  # whose frames would keep tensors alive
                error.__context__ = None
            assert self.pool._consistent(), step

    def dst(self, shape=(16, 8), dtype=torch.int32):
        return self.dev.zeros(shape, dtype)

    def source(self, shape=(16, 8), dtype=torch.int32):
        return torch.full(shape, self.value, dtype=dtype)

    def done(self, dst, source=None):
        self.arrived.append((dst, self.value))
        if source is not None:
            source.fill_(-1)

    def copied(self, dst, source):
        pinstage.copy_(dst, source, pool=self.pool)
        self.done(dst, source)

    def copy(self):
        self.copied(self.dst(), self.source())

    def cast(self):
        self.copied(self.dst(), self.source(dtype=torch.float64))

    def transposed(self):
        self.copied(self.dst((32, 32)).t(), self.source((32, 32)))

    def pitched(self):
        self.copied(self.dst((16, 64))[:, :20], self.source((16, 20)))

    def repeated(self):
        self.copied(self.dst((3, 4, 5, 64))[:, :2, :3, :20], self.source((3, 2, 3, 20)))

    def rows(self):
        dst, source = self.dst((4, 8)), self.source()
        pinstage.copy_rows_(dst, source, [3, 1, 3, 0], pool=self.pool)
        self.done(dst, source)

    def segments(self):
        dst, sources = self.dst((5, 8)), [self.source((2, 8)), self.source((3, 8))]
        pinstage.copy_rows_(dst, sources, pool=self.pool)
        self.done(dst)
        for source in sources:
            source.fill_(-1)

    def batch(self):
        dsts = [*self.dst(), self.dst(100)]  # 16 rows of one buffer, and one beside them
        self.batched(dsts)

    def uneven_batch(self):
        with self.dev.stream():
            self.batched([self.dst(100 + i) for i in range(6)])

    def batched(self, dsts):
        sources = [self.source(dst.shape) for dst in dsts]
        pinstage.copy_batch_(dsts, sources, pool=self.pool)
        for dst, source in zip(dsts, sources, strict=True):
            self.done(dst, source)

    def list(self):
        self.done(pinstage.to_device([self.value] * 64, self.dev, torch.int32, pool=self.pool))

    def large(self):
        self.copied(self.dst((30 * KB,), torch.uint8), self.source((30 * KB,), torch.uint8))

    def bulk(self):
        self.copied(self.dst((18 * KB,)), self.source((18 * KB,)))

    def bulk_cast(self):
        self.copied(self.dst((18, KB)), self.source((18, KB), torch.int64))

    def bulk_rows(self):
        dst, source = self.dst((36, 600)), self.source((16, 600))
        pinstage.copy_rows_(dst, source, [3, 1, 3, 0] * 9, pool=self.pool)
        self.done(dst, source)

    def lease(self):
        dsts = self.dst(), self.dst()
        with self.pool.lease((16, 8), torch.int32, timeout=5) as lease:
            lease.tensor.fill_(self.value)
            for dst in dsts:
                with self.dev.stream():
                    lease.copy_to(dst)
                self.done(dst)

    def cancelled(self):
        self.pool.lease(5 * KB, torch.uint8, timeout=5).cancel()

    def retired(self):
        dst = self.dst()
        with self.pool.lease((16, 8), torch.int32, timeout=5) as lease:
            lease.tensor.fill_(self.value)
            view = lease.device_view
            self.dev.launch(lambda view=view: dst.copy_(view))
            del view
            lease.retire(self.dev.current_stream)
            self.done(dst)

    def buffer(self):
        buffer = pinstage.DoubleBuffer((16, 8), torch.int32, self.dev, pool=self.pool)
        for _ in range(3):
            dst = self.dst()
            with buffer.fill(timeout=5) as host:
                host.fill_(self.value)
            buffer.copy_to(dst).wait(5)
            self.done(dst)
            self.done_for_sure.append((dst, self.value))

    def reserve(self):
        self.pool.reserve(min(self.pool.stats().capacity_bytes + 4 * KB, 64 * KB))

    def kept(self):
        pinstage.keep_alive(object(), self.dev.default_stream).wait_on(self.dev.current_stream)

    def reclaim(self):
        lease = self.pool.lease(16, torch.int32)
        with contextlib.suppress(LeaseStateError):
            lease.close()  # parked: only a synchronized device gives it back
        self.pool.reclaim(synchronize=True)

    def trim(self):
        self.pool.trim()

    def wrong(self):
        return [value for dst, value in self.arrived if not bool((dst == value).all())]


class Elsewhere(Scenario):
    """The scenario on a device that is not current, so that each call has to make it so."""

    def run(self, rounds=2):
        with SimulatedDevice(1) as current:
            current.make_current()
            try:
                return super().run(rounds)
            finally:
                assert _core.SimulatedDevice.current() is current._core, "the thread was left with another device"
                self.dev.make_current()


class Registered(Scenario):
    """A slab that is large enough to be registered rather than allocated, and comes and goes."""

    largest = 8 * MB

    def run(self, rounds=2):
        self.do([self.reserve_all, self.copy, self.trim_all, self.copy, self.trim_all])
        return self

    def reserve_all(self):
        self.pool.reserve(8 * MB)

    def trim_all(self):
        self.pool.reclaim(synchronize=True)
        self.pool.trim()


class WithoutKernel(Scenario):
    """A driver that declined to launch: the pieces of a slot travel as a batch of copies."""

    def run(self, rounds=2):
        pinstage.devices.resolve(self.dev).refuses_scatter = True
        for _ in range(rounds):
            self.do([self.uneven_batch, self.batch])
        return self


SCENARIOS = {"here": Scenario, "elsewhere": Elsewhere, "registered": Registered, "without kernel": WithoutKernel}
# No call of ours: events are left to the driver's own end (I8), and no wait blocks inside the driver (I6).
NEVER_CALLED = {"cuEventSynchronize", "cuEventDestroy"}
# Only on the way to an error.
TOLD = {"cuGetErrorName", "cuGetErrorString"}


@functools.cache
def calls_of_a_good_run(kind, rounds=2):
    with SimulatedDevice() as dev:
        scenario = SCENARIOS[kind](dev).run(rounds)
        calls = {name: count for name, count in dev.calls.items() if count}
        dev.synchronize()
        assert scenario.errors == []
        assert scenario.wrong() == []
        return calls


def test_scenarios_make_every_call_of_the_table():
    made = {entry for kind in SCENARIOS for entry in calls_of_a_good_run(kind)}
    with SimulatedDevice() as dev:
        assert made | NEVER_CALLED | TOLD == set(dev.calls)
    assert not made & NEVER_CALLED
    assert sum(calls_of_a_good_run("here", 1).values()) >= 200


def positions(first_round, count, each):
    """Calls to fail: each of the first round, of a cold pool, and a spread of the second; or a spread of all."""
    if each:
        return [*range(1, first_round + 1), *range(first_round + 1, count + 1, 5)]
    return sorted({*range(1, min(5, count) + 1), *range(1, count + 1, max(1, count // 6)), count})


def cases(kind, each):
    """(entry, position): all entries in the plain scenario, in the others those that only they call."""
    first = calls_of_a_good_run(kind, 1)
    known = {} if kind == "here" else calls_of_a_good_run("here")
    for entry, count in calls_of_a_good_run(kind).items():
        if entry not in known:
            for nth in positions(first.get(entry, 0), count, each):
                yield entry, nth


def in_a_thread(body):
    """A thread of its own, that must come back: one that failed to leave the RELAXED capture mode stays in it."""
    errors = []

    def run():
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def heal(dev, scenario):
    """Afterwards everything comes back, but for what no fence covers."""
    dev.synchronize()
    assert scenario.wrong() == []
    assert dev.violations == 0
    pool = scenario.pool
    pool.reclaim(synchronize=True)
    stats = pool.stats()
    assert stats.free_bytes + stats.quarantined_bytes == stats.capacity_bytes
    assert pool._consistent()
    dst, source = dev.zeros(256, torch.int32), torch.full((256,), 7, dtype=torch.int32)
    pinstage.copy_(dst, source, pool=pool)
    source.fill_(-1)
    dev.synchronize()
    assert dst.tolist() == [7] * 256
    pool.close()
    assert pool.stats().capacity_bytes == 0 or stats.quarantined_bytes > 0
    return stats


def check_errors(scenario, status, where):
    """Typed, with the status, and with what the caller can do."""
    for error in scenario.errors:
        text = str(error)
        assert isinstance(error, DriverError), f"{where}: {error!r}"
        assert error.status == status or "make a new buffer" in text, f"{where}: {error!r}"
        remedies = {
            DEINITIALIZED: "before the process exits", LAUNCH_FAILED: "restart it", ILLEGAL_ADDRESS: "restart it",
            OUT_OF_MEMORY: "Free memory", NOT_READY: "Call again", INVALID_VALUE: "call again",
        }  # fmt: skip
        of_the_simulation = text.startswith(("creating a stream", "launching a"))
        assert remedies[status] in text or "make a new buffer" in text or of_the_simulation, text


# One status of each class, of the fatal ones in turn.
CLASSES = {
    "out_of_memory": [OUT_OF_MEMORY],
    "invalid_value": [INVALID_VALUE],
    "not_ready": [NOT_READY],
    "lost": [LAUNCH_FAILED, ILLEGAL_ADDRESS],
    "deinitialized": [DEINITIALIZED],
}
# The quick set takes a spread of the positions.
EXTENT = pytest.mark.parametrize(
    "each", [pytest.param(False, id="spread"), pytest.param(True, id="each", marks=pytest.mark.slow)]
)


@EXTENT
@pytest.mark.parametrize("kind", SCENARIOS)
@pytest.mark.parametrize("name", CLASSES)
def test_failure_of_any_call_at_any_position_loses_nothing_and_reuses_nothing_pending(name, kind, each):
    """Cases 25 and 26."""
    statuses, unreached = itertools.cycle(CLASSES[name]), []
    for (entry, nth), status in zip(cases(kind, each), statuses, strict=False):
        in_a_thread(lambda entry=entry, nth=nth, status=status: fail_at(kind, entry, nth, status, unreached))
    # What other tests left to be kept alive may have added a call or two to the good run.
    assert len(unreached) <= 5, unreached


def fail_at(kind, entry, nth, status, unreached):
    where = f"{entry} number {nth}"
    times = 30 if (entry, status) == ("cuEventQuery", NOT_READY) else 1  # a fence that takes long
    with SimulatedDevice() as dev:
        dev.fail(entry, nth, status, times)
        scenario = SCENARIOS[kind](dev)  # opens the device, which loads a kernel
        scenario.run()
        if dev.calls[entry] < nth:
            unreached.append(where)
            return
        check_errors(scenario, status, where)
        stats = heal(dev, scenario)
        leaked = entry in ("cuMemFreeHost", "cuMemHostUnregister") and status in FATAL  # the context is said to be gone
        assert leaked or (dev.host_allocations > 0) == (stats.quarantined_bytes > 0), where
        may_quarantine = entry == "cuEventRecord" or (status != OUT_OF_MEMORY and entry != "cuMemHostAlloc")
        assert stats.quarantined_bytes == 0 or may_quarantine, f"{where}: {stats}"


@EXTENT
def test_device_lost_at_any_call_blocks_nothing_and_frees_nothing_that_it_may_read(each):
    """Case 26."""
    calls = sum(calls_of_a_good_run("here", 1).values())
    statuses = itertools.cycle([LAUNCH_FAILED, DEINITIALIZED])
    for after, status in zip(range(1, calls + 1, 1 if each else calls // 100), statuses, strict=False):
        in_a_thread(lambda after=after, status=status: lose_after(after, status))


def lose_after(after, status):
    dev = SimulatedDevice()
    dev.make_current()
    scenario = Scenario(dev)
    dev.lose(status, after=after)
    scenario.run(rounds=1)
    scenario.do([scenario.copy])  # a failed free is not worth an error, the next copy is
    assert scenario.errors
    assert dev._core.sticky_status == status
    check_errors(scenario, status, f"lost after call {after}")
    assert [value for dst, value in scenario.done_for_sure if not bool((dst == value).all())] == []
    pool = scenario.pool
    before = pool.stats()
    with contextlib.suppress(DriverError):
        pool.reclaim(synchronize=True)
    with contextlib.suppress(DriverError):
        pool.trim()
    with contextlib.suppress(DriverError):
        pool.close()
    stats = pool.stats()
    assert pool._consistent()
    states = [stats.open_bytes, stats.in_flight_bytes, stats.held_bytes, stats.parked_bytes, stats.quarantined_bytes]
    assert sum(states) + stats.free_bytes == stats.capacity_bytes, before
    assert dev.violations == 0
    del scenario, pool
    dev.close()


def test_lost_while_it_tells_of_a_failure(dev):
    """The calls that name an error fail as well: the number is left."""
    pool = pinstage.StagingPool(dev)
    for entry in TOLD:
        dev.fail(entry)
    dev.fail("cuMemcpyHtoDAsync", status=INVALID_VALUE)
    with pytest.raises(DriverError, match=r"cuMemcpyHtoDAsync failed on simulated:0: unknown error \(1\)") as error:
        pinstage.copy_(dev.empty(4), torch.zeros(4), pool=pool)
    assert error.value.status == INVALID_VALUE
    assert pool.stats().free_bytes == pool.stats().capacity_bytes


def test_failed_mode_exchange_leaves_the_threads_mode_alone(dev):
    """A thread left RELAXED would no longer be told of unsafe calls in captures of its own."""
    pool, dst = pinstage.StagingPool(dev), dev.empty(4)

    def copy_and_capture(nth):
        dev.make_current()
        dev.fail("cuThreadExchangeStreamCaptureMode", nth)
        pinstage.copy_(dst, torch.zeros(4), pool=pool)
        with pytest.raises(DriverError, match="900"), dev.capture():
            dev.synchronize()
        dev.synchronize()

    in_a_thread(lambda: copy_and_capture(1))  # going RELAXED; to pin memory, or to query
    pool.trim()
    in_a_thread(lambda: copy_and_capture(3))
