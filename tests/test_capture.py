# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA graph capture: what would use a slot raises, what only looks leaves the capture alone.

No test here has a control by lying queries: they say when work has run, and no work of ours runs in a capture.
`test_unsafe_calls_break_a_capture` shows instead that these captures can be broken.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

import pinstage
from pinstage import CaptureError, DriverError

MODES = ["global", "thread_local", "relaxed"]


@contextmanager
def captured(rig, mode="global"):
    """A capture that must end intact: its one operation runs at the replay."""
    counter = rig.filled((), torch.int64, 0)
    with rig.capture(mode=mode) as graph:
        rig.launch(lambda: counter.add_(1))
        yield graph
    graph.replay()
    rig.expect(counter, 1)


def test_unsafe_calls_break_a_capture(dev):
    with pytest.raises(DriverError, match="900"), dev.capture():
        dev.synchronize()


class Bench:
    """All that a submission needs, made before the capture."""

    def __init__(self, rig):
        self.pool = rig.pool()
        self.dst = rig.filled((64, 64), torch.int32, 0)
        self.source = torch.ones((64, 64), dtype=torch.int32)
        self.lease = self.pool.lease((64, 64), torch.int32)
        self.lease.tensor.fill_(1)
        self.narrow = self.pool.lease((64, 32), torch.int32)
        self.narrow.tensor.fill_(1)
        self.buffer = pinstage.DoubleBuffer((64, 64), torch.int32, rig.device, pool=self.pool)
        with self.buffer.fill() as host:
            host.fill_(1)
        self.rig = rig

    @property
    def stream(self):
        return self.rig.current_stream()


SUBMISSIONS = {
    "copy_": lambda b: pinstage.copy_(b.dst, b.source, pool=b.pool),
    "copy_cast": lambda b: pinstage.copy_(b.dst, b.source.double(), pool=b.pool),
    "copy_transposed": lambda b: pinstage.copy_(b.dst.t(), b.source, pool=b.pool),
    "copy_blocking": lambda b: pinstage.copy_(b.dst, b.source, False, pool=b.pool),
    "copy_default_pool": lambda b: pinstage.copy_(b.dst, b.source),
    "copy_rows_": lambda b: pinstage.copy_rows_(b.dst, b.source, list(range(64)), pool=b.pool),
    "copy_rows_dim_1": lambda b: pinstage.copy_rows_(b.dst, b.source, torch.arange(64), dim=-1, pool=b.pool),
    "lease_copy_to": lambda b: b.lease.copy_to(b.dst),
    "lease_copy_to_strided": lambda b: b.narrow.copy_to(b.dst[:, ::2]),
    "lease_retire": lambda b: b.lease.retire(b.stream),
    "buffer_copy_to": lambda b: b.buffer.copy_to(b.dst),
    "buffer_retire": lambda b: b.buffer.retire(b.stream),
    "keep_alive": lambda b: pinstage.keep_alive(b.source, b.stream, device=b.rig.device),
}


@pytest.mark.both
@pytest.mark.parametrize("name", SUBMISSIONS)
def test_submission_on_a_capturing_stream_raises_and_enqueues_nothing(rig, name):
    """Case 10: captured correctly or an error; the copy never vanishes."""
    bench = Bench(rig)
    with captured(rig):
        before = bench.pool.stats()
        with pytest.raises(CaptureError, match="captured"):
            SUBMISSIONS[name](bench)
        assert bench.pool.stats() == before
        assert not rig.simulated or rig.device.pending() == 0
    rig.expect(bench.dst, 0)
    SUBMISSIONS[name](bench)  # all is as it was: afterwards the call works
    if "copy" in name:
        rig.synchronize()
        assert bench.dst.cpu().sum() == (2048 if "lease_copy_to_strided" in name else 4096)
    for lease in (bench.lease, bench.narrow):
        if lease._lease.is_open():
            lease.retire(bench.stream)
            lease.close()


@pytest.mark.both
def test_lease_stays_open_and_usable_through_a_refused_copy(rig):
    """Case 10."""
    bench = Bench(rig)
    with captured(rig):
        with pytest.raises(CaptureError):
            bench.lease.copy_to(bench.dst)
        bench.lease.tensor.fill_(2)
    bench.lease.copy_to(bench.dst)
    bench.lease.close()
    bench.narrow.cancel()
    rig.expect(bench.dst, 2)


@pytest.mark.both
def test_lease_left_by_a_capture_error_is_parked_until_the_readers_are_known_to_have_ended(rig):
    bench = Bench(rig)
    with captured(rig), pytest.raises(CaptureError), bench.pool.lease(64, torch.int32) as lease:
        lease.copy_to(bench.dst[0])
    assert bench.pool.stats().parked_bytes == 256
    assert bench.pool.reclaim(synchronize=True) == 256
    bench.lease.cancel()
    bench.narrow.cancel()


def look_around(pool, tickets, device):
    """All that polls, allocates or frees, but submits nothing."""
    pool.reclaim()
    [ticket.done() for ticket in tickets]
    pool.stats()
    pool.reserve(pool.stats().capacity_bytes + (1 << 20))  # pins
    pool.lease(1000, torch.uint8).cancel()
    pool.try_lease(1000, torch.uint8).cancel()
    pinstage.StagingPool(device).lease(10, torch.uint8).cancel()


@pytest.mark.both
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["this_thread", "another_thread"])
def test_polling_and_allocating_leave_a_capture_intact(rig, mode, where):
    """Case 8."""
    pool, dst = rig.pool(initial_bytes=4096), rig.filled(64, torch.int32, 0)
    tickets, errors = [], []
    with rig.stream() as busy:
        pass
    pinned = pool.lease(64, torch.int32)  # handed back inside the capture
    with captured(rig, mode):
        gate = pinstage.testing.latch(busy)
        with rig.stream(busy):
            for step in range(3):
                with pool.lease(64, torch.int32) as lease:
                    lease.tensor.fill_(step)
                    tickets.append(lease.copy_to(dst))

        def look():
            try:
                look_around(pool, tickets, rig.device)
                pinned.cancel()
                gate.release()
                pool.trim()  # unpins, for which a GPU may wait until it is idle
            except BaseException as error:
                errors.append(error)

        if where == "this_thread":
            look()
        else:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
    assert gate.held
    assert errors == []
    rig.expect(dst, 2)


@pytest.mark.both
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["this_thread", "another_thread"])
def test_copies_beside_a_capture_work_and_leave_it_intact(rig, mode, where):
    """Case 8: on a stream that is not captured; events are created for it."""
    pool, source = rig.pool(), torch.empty(64, dtype=torch.int32)
    dsts = [rig.filled(64, torch.int32, -1) for _ in range(5)]
    scattered = [rig.filled(size, torch.int32, -1) for size in (150, 7, 200, 33)]  # no two are neighbours
    errors = []
    with rig.stream() as side:
        pass

    def copy():
        try:
            rig.make_current()
            with rig.stream(side):
                for step, dst in enumerate(dsts):
                    pinstage.copy_(dst, source.fill_(step), pool=pool)
                pinstage.copy_batch_(scattered, [torch.full(dst.shape, 9, dtype=torch.int32) for dst in scattered],
                                     pool=pool)  # fmt: skip
        except BaseException as error:
            errors.append(error)

    with captured(rig, mode):
        if where == "this_thread":
            copy()
        else:
            thread = threading.Thread(target=copy)
            thread.start()
            thread.join()
    assert errors == []
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)
    for dst in scattered:
        rig.expect(dst, 9)


@contextmanager
def blocking_capture(rig):
    """A capture on a stream that the legacy default stream synchronizes with."""
    if rig.simulated:
        with rig.capture(), rig.stream(rig.device.default_stream):
            yield
        return
    from cuda.bindings import driver

    def check(result):
        assert int(result[0]) == 0, result
        return result[1] if len(result) > 1 else None

    stream = check(driver.cuStreamCreate(0))
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    yield
    check(driver.cuGraphDestroy(check(driver.cuStreamEndCapture(stream))))
    check(driver.cuStreamDestroy(stream))


@pytest.mark.both
@pytest.mark.parametrize("name", [name for name in SUBMISSIONS if "default_pool" not in name])
def test_default_stream_beside_a_capture_raises_and_leaves_it_intact(rig, name):
    """Case 10: work on stream 0 would be drawn into the capture, implicitly."""
    bench = Bench(rig)
    with blocking_capture(rig):
        before = bench.pool.stats()
        with pytest.raises(CaptureError, match=r"another stream of .* is being captured"):
            SUBMISSIONS[name](bench)
        assert bench.pool.stats() == before
    bench.lease.cancel()
    bench.narrow.cancel()
    rig.expect(bench.dst, 0)


@pytest.mark.both
def test_wait_on_a_capturing_stream_raises(rig):
    pool, dst = rig.pool(), rig.filled(64, torch.int32, 0)
    with rig.stream() as busy:
        pass
    with captured(rig):
        gate = pinstage.testing.latch(busy)
        with rig.stream(busy), pool.lease(64, torch.int32) as lease:
            lease.tensor.fill_(1)
            ticket = lease.copy_to(dst)
        with pytest.raises(CaptureError):
            ticket.wait_on(rig.current_stream())
        gate.release()
    rig.expect(dst, 1)


def test_host_copies_do_not_mind_a_capture(dev):
    with dev.capture():
        dst = torch.zeros(4)
        pinstage.copy_(dst, torch.ones(4))
        assert dst.tolist() == [1] * 4
        assert pinstage.gather_rows(torch.eye(2), [1]).tolist() == [[0, 1]]
