# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver fails: every call, at every position, and the whole device.

No test here has a control by lying queries: each asks what happens to the bookkeeping when a call fails, and checks the
bytes only of what is reported as done.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading

import pytest
import torch

import pinstage
from pinstage import DriverError, LeaseStateError, PinstageError
from pinstage.testing import SimulatedDevice, latch

OUT_OF_MEMORY, INVALID_HANDLE, LAUNCH_FAILED, UNKNOWN = 2, 400, 719, 999
KB = 1024


class Scenario:
    """A bit of everything, twice. Steps that fail are skipped; `wrong` names the others whose bytes did not arrive."""

    def __init__(self, dev):
        self.dev = dev
        self.pool = pinstage.StagingPool(dev, initial_bytes=4 * KB, max_bytes=64 * KB)
        self.arrived = []  # (dst, value) of steps that reported success
        self.errors = []
        self.value = 0

    def run(self):
        for _ in range(2):
            for step in (
                self.copy, self.copy, self.cast, self.transposed, self.rows, self.pitched, self.repeated, self.batch,
                self.uneven_batch, self.list, self.lease, self.cancelled, self.retired, self.buffer, self.reserve,
                self.kept, self.reclaim, self.large, self.bulk, self.bulk_cast, self.bulk_rows, self.trim,
            ):  # fmt: skip
                self.value += 1
                try:
                    step()
                except PinstageError as error:
                    self.errors.append(error.with_traceback(None))  # whose frames would keep tensors alive
                    error.__context__ = None
                assert self.pool._consistent(), step
        return self

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


@functools.cache
def calls_of_a_good_run():
    with SimulatedDevice() as dev:
        scenario = Scenario(dev).run()
        assert scenario.errors == []
        return {name: count for name, count in dev.calls.items() if count}


def in_a_thread(body):
    """A thread of its own: one that failed to leave the RELAXED capture mode stays in it."""
    errors = []

    def run():
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
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


# get_error_name and get_error_string are called only on the way to an error.
ENTRIES = [
    "cuCtxGetCurrent", "cuCtxSynchronize", "cuEventCreate", "cuEventQuery", "cuEventRecord", "cuMemFreeHost",
    "cuMemGetAddressRange", "cuMemHostAlloc", "cuMemHostGetDevicePointer", "cuMemcpy2DAsync", "cuMemcpy3DAsync",
    "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync", "cuStreamGetId", "cuStreamIsCapturing", "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
]  # fmt: skip


def test_scenario_makes_every_call_that_is_made_to_fail():
    assert set(calls_of_a_good_run()) == set(ENTRIES)


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, LAUNCH_FAILED, pytest.param(UNKNOWN, marks=pytest.mark.slow)])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("most", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_failure_of_any_call_at_any_position_loses_nothing_and_reuses_nothing_pending(entry, status, most):
    """Cases 25 and 26. Of calls that are made hundreds of times, the quick set takes the first ones and a sample."""
    count = calls_of_a_good_run()[entry]
    for nth in sorted({*range(1, min(most, count + 1)), *range(1, count + 1, max(1, count // most))}):
        in_a_thread(lambda nth=nth: fail_at(entry, nth, status))


def fail_at(entry, nth, status):
    with SimulatedDevice() as dev:
        scenario = Scenario(dev)
        dev.fail(entry, nth, status)
        scenario.run()
        for error in scenario.errors:
            assert isinstance(error, DriverError), f"{entry} number {nth}: {error!r}"
            assert error.status == status or "make a new buffer" in str(error)
        stats = heal(dev, scenario)
        fatal_free = entry == "cuMemFreeHost" and status != OUT_OF_MEMORY  # the context is said to be gone
        assert fatal_free or (dev.host_allocations > 0) == (stats.quarantined_bytes > 0)
        may_quarantine = entry == "cuEventRecord" or (status != OUT_OF_MEMORY and entry != "cuMemHostAlloc")
        assert stats.quarantined_bytes == 0 or may_quarantine, f"{entry} number {nth}: {stats}"


@pytest.mark.parametrize("entry", ["cuCtxPushCurrent", "cuCtxPopCurrent"])
def test_failure_to_make_the_context_current_loses_nothing(entry):
    """The scenario runs with another device current, so that each call of ours has to."""
    for nth in range(1, 12):
        with SimulatedDevice(0) as dev, SimulatedDevice(1) as current:
            scenario = Scenario(dev)
            current.make_current()
            dev.fail(entry, nth, OUT_OF_MEMORY)
            scenario.run()
            assert all(isinstance(error, DriverError) for error in scenario.errors)
            dev.make_current()
            heal(dev, scenario)


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


# --- what the messages say --------------------------------------------------------------------------------------------


def test_refused_pinning_names_the_bytes_and_the_remedy(dev):
    """Case 25."""
    pool = pinstage.StagingPool(dev, initial_bytes=64 * KB)
    dev.fail("cuMemHostAlloc", times=2)  # the slab, and the smaller one that would do
    before = pool.stats()
    with pytest.raises(
        DriverError, match=r"cuMemHostAlloc failed.*OUT_OF_MEMORY.*4096 bytes.*ulimit -l.*max_bytes"
    ) as e:
        pool.lease(100, torch.uint8)
    assert e.value.status == OUT_OF_MEMORY
    assert pool.stats() == before
    pool.lease(100, torch.uint8).cancel()  # no latched error


def test_refused_slab_is_tried_smaller_before_giving_up(dev):
    """Case 25."""
    pool = pinstage.StagingPool(dev, initial_bytes=64 * KB)
    dev.fail("cuMemHostAlloc")
    pool.lease(100, torch.uint8).cancel()
    assert pool.stats().capacity_bytes == 4 * KB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("fails", "times"), [("cuMemcpyHtoDAsync", 1), ("cuEventCreate", 1), ("cuMemHostAlloc", 2)])
def test_copy_that_enqueued_nothing_gives_its_slot_back(dev, fails, times, dtype):
    """Case 25."""
    pool = pinstage.StagingPool(dev, initial_bytes=64 * KB)
    dev.fail(fails, times=times)
    with pytest.raises(DriverError, match=f"{fails} failed"):
        pinstage.copy_(dev.empty(64), torch.ones(64, dtype=dtype), pool=pool)
    assert pool.stats().free_bytes == pool.stats().capacity_bytes
    assert dev.pending() == 0


def test_lease_whose_copy_was_refused_is_as_before(dev):
    pool, dst = pinstage.StagingPool(dev), dev.zeros(64)
    pinstage.copy_(dst, torch.zeros(64), pool=pool)  # there are events
    lease = pool.lease(64, torch.float32)
    lease.tensor.fill_(1)
    before = pool.stats()
    dev.fail("cuMemcpyHtoDAsync")
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync failed"):
        lease.copy_to(dst)
    assert pool.stats() == before
    dev.synchronize()
    pool.reclaim()
    lease.cancel()
    assert pool.stats().free_bytes == pool.stats().capacity_bytes


def test_lease_whose_only_copy_was_refused_is_parked_when_left(dev):
    """Case 3: it declared no reader."""
    pool, dst = pinstage.StagingPool(dev), dev.zeros(64)
    dev.fail("cuMemcpyHtoDAsync")
    lease = pool.lease(64, torch.float32)
    with pytest.raises(DriverError):
        lease.copy_to(dst)
    with pytest.raises(pinstage.LeaseStateError, match="parked"):
        lease.close()
    assert pool.stats().parked_bytes == 256


# --- fences that could not be had -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["copy_", "copy_to", "retire", "second_copy_to"])
def test_slot_whose_fence_could_not_be_recorded_is_quarantined_and_counted(dev, call):
    """Case 26."""
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(256, torch.int32) for _ in range(3)]
    with latch(dev.default_stream):
        lease = pool.lease(256, torch.int32)
        lease.tensor.fill_(1)
        if call == "second_copy_to":
            lease.copy_to(dsts[0])
        dev.fail("cuEventRecord")
        if call == "copy_":
            lease.cancel()
        ones = torch.ones(256, dtype=torch.int32)
        submit = {
            "copy_": lambda: pinstage.copy_(dsts[1], ones, pool=pool),
            "retire": lambda: lease.retire(dev.default_stream),
        }.get(call, lambda: lease.copy_to(dsts[1]))
        with pytest.raises(DriverError, match="cuEventRecord failed"):
            submit()
        if call != "copy_":
            lease.close()
        assert pool.stats().quarantined_bytes == KB
        for value in (2, 3):
            pinstage.copy_(dsts[2], torch.full((256,), value, dtype=torch.int32), pool=pool)
    dev.synchronize()
    pool.reclaim(synchronize=True)
    assert pool.stats().quarantined_bytes == KB
    assert dsts[1].tolist() == [0 if call == "retire" else 1] * 256
    assert dsts[2].tolist() == [3] * 256
    pool.close()
    assert dev.violations == 0
    assert pool.stats().capacity_bytes == pool.stats().quarantined_bytes + pool.stats().free_bytes


def test_buffer_whose_fence_could_not_be_recorded_refuses_that_slot(dev):
    """Case 26."""
    buffer, dst = pinstage.DoubleBuffer(64, torch.int32, dev, depth=1), dev.empty(64, torch.int32)
    with buffer.fill() as host:
        host.fill_(1)
    dev.fail("cuEventRecord")
    with pytest.raises(DriverError):
        buffer.copy_to(dst)
    with pytest.raises(DriverError, match=r"no fence could be recorded.*make a new buffer"), buffer.fill():
        pass
    pool = pinstage.default_pool(dev)
    del buffer, host
    gc.collect()
    assert pool.stats().quarantined_bytes == 256


def test_lost_device_is_told_and_blocks_nothing(capfd):
    """Case 26: every call raises or does nothing, destructors included."""
    dev = SimulatedDevice()
    dev.make_current()
    gate = latch(dev.default_stream, timeout=60)
    use_and_lose(dev)
    gc.collect()
    gate.release()
    dev.close()
    assert capfd.readouterr().err == ""


def use_and_lose(dev):
    pool, dst = pinstage.StagingPool(dev), dev.zeros(256, torch.int32)
    with pool.lease(256, torch.int32) as lease:
        ticket = lease.copy_to(dst)
        view = lease.tensor
    opened = pool.lease(256, torch.int32)
    buffer = pinstage.DoubleBuffer(256, torch.int32, dev, pool=pool)
    with buffer.fill():
        pass
    buffer.copy_to(dst)
    dev.lose()
    for call in (
        ticket.done,
        ticket.wait,
        lambda: ticket.wait_on(dev.default_stream),
        lambda: opened.copy_to(dst),
        lambda: opened.retire(dev.default_stream),
        lambda: pinstage.copy_(dst, torch.zeros(256, dtype=torch.int32), pool=pool),
        lambda: pinstage.keep_alive(view, dev.default_stream),
    ):
        with pytest.raises(DriverError) as error:
            call()
        assert error.value.status == LAUNCH_FAILED
    pool.reclaim()
    stats = pool.stats()
    assert (stats.quarantined_bytes, stats.open_bytes) == (KB, 3 * KB)
    assert pool._consistent()
    opened.cancel()
    with contextlib.suppress(DriverError):
        pool.close()


def test_query_that_fails_for_a_moment_frees_nothing_early(dev):
    pool, dst = pinstage.StagingPool(dev), dev.zeros(256, torch.int32)
    with latch(dev.default_stream):
        pinstage.copy_(dst, torch.ones(256, dtype=torch.int32), pool=pool)
        dev.fail("cuEventQuery", status=OUT_OF_MEMORY, times=3)
        for value in (2, 3, 4):
            lease = pool.lease(256, torch.int32)
            lease.tensor.fill_(value)
            lease.cancel()
        assert pool.stats().in_flight_bytes == KB
    dev.synchronize()
    assert dst.tolist() == [1] * 256
    assert pool.reclaim() == KB
