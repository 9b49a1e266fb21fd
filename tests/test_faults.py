# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver fails: what is said, and what becomes of the slot. test_every_fault.py has every call at every position.

No test here has a control by lying queries: each asks what happens to the bookkeeping when a call fails, and checks the
bytes only of what is reported as done.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import pinstage
from pinstage import DriverError
from pinstage.testing import SimulatedDevice, latch

OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719
KB = 1024


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


def test_pool_that_a_lost_device_emptied_says_so_rather_than_ask_for_more_memory(dev):
    """Case 26."""
    pool, dst = pinstage.StagingPool(dev, max_bytes=64 * KB), dev.zeros(32 * KB, torch.uint8)
    for _ in range(2):
        pinstage.copy_(dst, torch.ones(32 * KB, dtype=torch.uint8), pool=pool)
    dev.fail("cuEventQuery", status=LAUNCH_FAILED, times=4)
    with pytest.raises(DriverError, match=r"no room for 32768 bytes.*the device failed under .*restart it") as error:
        pool.lease(32 * KB, torch.uint8)
    assert error.value.status == LAUNCH_FAILED
    with pytest.raises(pinstage.PoolExhausted, match="larger than max_bytes"):
        pool.lease(65 * KB, torch.uint8)
