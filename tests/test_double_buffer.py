# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`DoubleBuffer`: each fill waits for the fence of its own slot, and for nothing else."""

from __future__ import annotations

import gc

import pytest
import torch

import pinstage
from pinstage import DoubleBuffer, LeaseStateError, PoolExhausted, WaitTimeout
from pinstage.testing import SimulatedDevice, latch


def fill(buffer, value, timeout=None):
    with buffer.fill(timeout) as host:
        host.fill_(value)
    return host


@pytest.mark.raced
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_fill_waits_for_its_slots_fence_and_never_counts(rig, depth):
    """Case 4: the fill after `depth` copies, none of them complete."""
    dsts = [rig.filled(64, torch.int32, 0) for _ in range(depth)]
    buffer = DoubleBuffer(64, torch.int32, rig.device, depth=depth, pool=rig.pool())
    with rig.stream():
        with rig.gate():
            for step, dst in enumerate(dsts):
                fill(buffer, step + 1)
                buffer.copy_to(dst)
            with pytest.raises(WaitTimeout, match="still being read"):
                fill(buffer, 99, timeout=0)
        fill(buffer, 100)
    for step, dst in enumerate(dsts):
        rig.expect(dst, step + 1)


# No control: nothing may hold the streams, or the third fill would wait for ever; on a GPU the copies may win the race.
@pytest.mark.both
def test_each_consumer_sees_its_own_fill(rig):
    """Case 5: K fills of one workspace inside one step, more than it is deep."""
    dsts = [rig.filled(64, torch.int32, 0) for _ in range(8)]
    buffer = DoubleBuffer(64, torch.int32, rig.device, depth=2, pool=rig.pool())
    with rig.stream() as a, rig.stream() as b:
        for step, dst in enumerate(dsts):
            with rig.stream((a, b)[step % 2]):
                fill(buffer, step + 1)
                buffer.copy_to(dst)
    for step, dst in enumerate(dsts):
        rig.expect(dst, step + 1)


@pytest.mark.raced
def test_fill_waits_for_no_other_slot(rig):
    """Case 4: the next slot is done, the one after it is held."""
    quick_dst, slow_dst = (rig.filled(64, torch.int32, 0) for _ in range(2))
    buffer = DoubleBuffer(64, torch.int32, rig.device, depth=2, pool=rig.pool())
    with rig.stream() as quick, rig.stream() as slow, rig.gate(slow):
        with rig.stream(quick):
            fill(buffer, 1)
            buffer.copy_to(quick_dst)
            quick.synchronize()
        with rig.stream(slow):
            fill(buffer, 2)
            held = buffer.copy_to(slow_dst)
        fill(buffer, 3, timeout=0)
        assert not held.done()
    rig.expect(quick_dst, 1)
    rig.expect(slow_dst, 2)


@pytest.mark.raced
def test_slot_waits_for_every_destination_and_retired_stream(rig):
    dsts = [rig.filled(64, torch.int32, 0) for _ in range(2)]
    buffer = DoubleBuffer(64, torch.int32, rig.device, depth=1, pool=rig.pool())
    with rig.stream() as a, rig.stream() as b:
        for held in (a, b):
            fill(buffer, 1)
            with rig.gate(held):
                with rig.stream(a):
                    buffer.copy_to(dsts[0])
                    buffer.copy_to(dsts[1])
                buffer.retire(b)
                with pytest.raises(WaitTimeout):
                    fill(buffer, 9, timeout=0)
    for dst in dsts:
        rig.expect(dst, 1)


def abandoned_fill(buffer):
    with buffer.fill() as host:
        host.fill_(99)
        raise KeyError


@pytest.mark.both  # no control: nothing is in flight when the values are read
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("abandon", [None, "exception", "unsubmitted"])
def test_carry_starts_from_the_last_finished_contents(rig, depth, abandon):
    buffer = DoubleBuffer(4, torch.int32, rig.device, depth=depth, carry=True, pool=rig.pool())
    dst = rig.filled(4, torch.int32, 0)
    fill(buffer, 0)
    buffer.copy_to(dst)
    expected = [0, 0, 0, 0]
    for step in range(1, 7):
        if abandon == "exception":
            with pytest.raises(KeyError):
                abandoned_fill(buffer)
        elif abandon == "unsubmitted":
            fill(buffer, 99)
        if abandon == "unsubmitted" or (abandon == "exception" and depth == 1):  # one buffer: as it was left
            expected = [99, 99, 99, 99]
        with buffer.fill() as host:
            assert host.tolist() == expected
            host[step % 4] = step
        expected[step % 4] = step
        buffer.copy_to(dst)
        rig.expect(dst, torch.tensor(expected))


@pytest.mark.raced
def test_fill_entered_late_waits_for_the_slot_that_it_hands_out(rig):
    dsts = [rig.filled(64, torch.int32, 0) for _ in range(2)]
    buffer = DoubleBuffer(64, torch.int32, rig.device, depth=2, pool=rig.pool())
    with rig.stream() as stream, latch(stream) as gate:
        fill(buffer, 1)
        buffer.copy_to(dsts[0])
        fill(buffer, 2)
        late = buffer.fill(timeout=0)
        buffer.copy_to(dsts[1])  # the next slot is now the one that is held
        try:
            with late as host:
                host.fill_(9)
        except (WaitTimeout, LeaseStateError):
            assert gate.held
    rig.expect(dsts[0], 1)
    rig.expect(dsts[1], 2)


@pytest.mark.both
def test_unsubmitted_fill_is_filled_again_in_place(rig):
    buffer = DoubleBuffer(4, torch.int32, rig.device, depth=3, pool=rig.pool())
    first = fill(buffer, 1).data_ptr()
    with buffer.fill() as host:
        assert host.data_ptr() == first
        assert host.tolist() == [1] * 4
    dst = rig.empty(4, torch.int32)
    buffer.copy_to(dst)
    assert fill(buffer, 2).data_ptr() != first
    rig.expect(dst, 1)


@pytest.mark.both
def test_addresses_are_stable_and_nothing_is_pinned_in_the_steady_state(rig):
    pool, dst = rig.pool(), rig.empty(1000)
    buffer = DoubleBuffer(1000, torch.float32, rig.device, depth=3, pool=pool)
    seen = set()
    for step in range(30):
        seen.add(fill(buffer, step).data_ptr())
        buffer.copy_to(dst)
        buffer.copy_to(dst)
    assert len(seen) == 3
    assert pool.stats().host_allocations == 1
    assert (buffer.shape, buffer.dtype, buffer.depth) == ((1000,), torch.float32, 3)


@pytest.mark.both
def test_exception_inside_a_fill_submits_nothing(rig):
    buffer = DoubleBuffer(4, torch.int32, rig.device, pool=rig.pool())
    with pytest.raises(KeyError), buffer.fill():
        raise KeyError
    with pytest.raises(LeaseStateError, match="no finished fill"):
        buffer.copy_to(rig.empty(4, torch.int32))
    fill(buffer, 1)


def test_fill_that_was_never_entered_changes_nothing(dev):
    buffer = DoubleBuffer(4, torch.int32, dev)
    buffer.fill()
    fill(buffer, 1)


def test_two_fills_cannot_be_open_at_once(dev):
    buffer = DoubleBuffer(4, torch.int32, dev)
    first, second = buffer.fill(), buffer.fill()
    with first, pytest.raises(LeaseStateError, match="still open"):
        second.__enter__()
    buffer.copy_to(dev.empty(4, torch.int32))


@pytest.mark.parametrize("use", ["copy_to", "retire", "device_view", "nested"])
def test_use_out_of_turn_raises(dev, use):
    buffer = DoubleBuffer(4, torch.int32, dev)
    uses = {
        "copy_to": lambda: buffer.copy_to(dev.empty(4, torch.int32)),
        "retire": lambda: buffer.retire(dev.default_stream),
        "device_view": lambda: buffer.device_view,
        "nested": lambda: fill(buffer, 2),
    }
    if use != "nested":
        with pytest.raises(LeaseStateError, match="no finished fill"):
            uses[use]()
    with buffer.fill(), pytest.raises(LeaseStateError, match="still open" if use == "nested" else "no finished fill"):
        uses[use]()


@pytest.mark.raced
def test_dropped_buffer_gives_its_slots_back_once_they_are_read(rig):
    """Case 11, and case 35: it does not block."""
    pool, dst = rig.pool(), rig.filled(64, torch.int32, 0)
    buffer = DoubleBuffer(64, torch.int32, rig.device, depth=3, pool=pool)
    with rig.stream() as stream:
        with rig.gate():
            fill(buffer, 1)
            buffer.copy_to(dst)
            del buffer
            gc.collect()
            pool.reclaim()
            assert (pool.stats().in_flight_bytes, pool.stats().open_bytes) == (256, 0)
            for _ in range(5):
                with pool.lease(64, torch.int32) as lease:
                    lease.tensor.fill_(2)
                    lease.cancel()
        stream.synchronize()
    pool.reclaim()
    assert pool.stats().free_bytes == pool.stats().capacity_bytes
    rig.expect(dst, 1)


def test_buffer_that_does_not_fit_gives_back_what_it_took(dev):
    pool = pinstage.StagingPool(dev, max_bytes=4096)
    with pytest.raises(PoolExhausted) as error:
        DoubleBuffer(1024, torch.uint8, dev, depth=5, pool=pool)
    assert error.tb  # which holds the frame of the constructor
    assert pool.stats().free_bytes == pool.stats().capacity_bytes


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"depth": 0}, ValueError, "depth must be at least 1, not 0"),
        ({"depth": -1}, ValueError, "depth must be at least 1, not -1"),
        ({"shape": (-1,)}, ValueError, "negative"),
        ({"dtype": torch.quint8}, TypeError, "cannot hold torch.quint8"),
    ],
)
def test_bad_arguments_change_nothing(dev, options, error, match):
    pool = pinstage.StagingPool(dev)
    before = pool.stats()
    with pytest.raises(error, match=match):
        DoubleBuffer(**{"shape": 4, "dtype": torch.int32, "device": dev, "pool": pool, **options})
    assert pool.stats() == before


def test_submitted_buffer_counts_as_in_flight_until_its_fence_passed():
    with SimulatedDevice() as dev:
        pool, dst = pinstage.StagingPool(dev), dev.empty(64, torch.int32)
        buffer = DoubleBuffer(64, torch.int32, dev, pool=pool)
        with buffer.fill() as host:
            host.fill_(1)
        ticket = buffer.copy_to(dst)
        assert (pool.stats().open_bytes, pool.stats().in_flight_bytes) == (256, 256)
        ticket.wait()
        pool.reclaim()
        assert (pool.stats().open_bytes, pool.stats().in_flight_bytes) == (512, 0)
