# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The staging pool: growth, its bound, waiting, and giving memory back."""

from __future__ import annotations

import gc
import random
import signal
import threading

import pytest
import torch

import pinstage
from pinstage import LeaseStateError, PoolExhausted, budget
from pinstage.testing import SimulatedDevice, latch

KB = 1024


def total(stats):
    return (
        stats.open_bytes + stats.in_flight_bytes + stats.held_bytes + stats.parked_bytes + stats.captured_bytes
        + stats.quarantined_bytes + stats.free_bytes
    )  # fmt: skip


def fill_up(pool, dst, max_bytes=64 * KB):
    """Leaves no room, with everything in flight on the current stream: by as many copies as fit, and no more."""
    for _ in range(max_bytes // (dst.numel() * dst.element_size())):
        with pool.lease(dst.shape, dst.dtype) as lease:
            lease.copy_to(dst)


# --- reuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.raced
def test_slow_stream_does_not_hold_back_a_fast_one(rig):
    """Case 14: a thousand copies reserve the bytes of two."""
    slow_dst, dst = (rig.filled(256, torch.int32, 0) for _ in range(2))
    pool = rig.pool()
    with rig.stream() as slow, rig.stream() as fast:
        with rig.gate(slow):
            with rig.stream(slow):
                pinstage.copy_(slow_dst, torch.full((256,), -1, dtype=torch.int32), pool=pool)
            for step in range(1000):
                with pool.lease(256, torch.int32) as lease:
                    lease.tensor.fill_(step)
                    lease.copy_to(dst)
                fast.synchronize()
            assert pool.stats().high_water_bytes == 2 * KB
        rig.expect(slow_dst, -1)
        rig.expect(dst, 999)


@pytest.mark.raced
def test_slots_that_are_done_are_served_without_growth_although_nobody_polled(rig):
    """Case 17; before they are done nothing is served."""
    dst = rig.empty(16 * KB, torch.uint8)
    pool = rig.pool(max_bytes=64 * KB)
    pool.reserve(64 * KB)
    with rig.stream() as stream:
        with rig.gate():
            fill_up(pool, dst)
            early = pool.try_lease(1, torch.uint8)
            if early is not None:
                early.cancel()
            assert early is None
        stream.synchronize()
    pool.try_lease(64 * KB, torch.uint8).cancel()
    assert (pool.stats().slabs, pool.stats().host_allocations) == (1, 1)


@pytest.mark.both  # no control: all is done before the large lease, so that true and false answers agree
@pytest.mark.parametrize("seed", range(5))
def test_lease_of_nearly_the_capacity_is_served_whatever_came_before(rig, seed):
    """Case 18."""
    dice = random.Random(seed)
    pool = rig.pool(initial_bytes=4 * KB, max_bytes=256 * KB)
    dst = rig.empty(64 * KB, torch.uint8)
    for _ in range(60):
        size = int(2 ** dice.uniform(0, 16))
        with pool.lease(size, torch.uint8) as lease:
            lease.copy_to(dst[:size])
    rig.synchronize()
    pool.lease(255 * KB, torch.uint8).cancel()
    assert pool.stats().capacity_bytes <= 256 * KB


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_returns_strands_bytes(dev, seed):
    """Case 18: when all slots are back, one lease as large as the slab needs no new one."""
    dice = random.Random(seed)
    pool = pinstage.StagingPool(dev, max_bytes=256 * KB, when_full="raise")
    pool.reserve(256 * KB)
    leases = []
    for _ in range(500):
        if leases and dice.random() < 0.5:
            leases.pop(dice.randrange(len(leases))).cancel()
        elif (lease := pool.try_lease(int(2 ** dice.uniform(0, 15)), torch.uint8)) is not None:
            leases.append(lease)
        assert pool._consistent()
    for lease in leases:
        lease.cancel()
    pool.lease(256 * KB, torch.uint8).cancel()
    assert pool.stats().host_allocations == 1


@pytest.mark.parametrize("exponent", range(11, 24))
def test_reserved_bytes_are_at_most_an_eighth_more_than_leased(dev, exponent):
    """Case 15. No control: arithmetic."""
    pool, size = pinstage.StagingPool(dev), 2**exponent + 1
    lease = pool.lease(size, torch.uint8)
    assert size <= pool.stats().open_bytes <= 1.125 * size
    lease.cancel()


@pytest.mark.both  # no control: it counts calls
def test_steady_state_pins_nothing_and_creates_no_event(rig):
    """Case 16."""
    dice = random.Random(16)
    pool, dst, source = rig.pool(), rig.empty(64 * KB, torch.uint8), torch.zeros(64 * KB, dtype=torch.uint8)

    def steps(count, largest):
        for step in range(count):
            size = dice.randint(1, largest)
            pinstage.copy_(dst[:size], source[:size], pool=pool)
            with pool.lease(size, torch.uint8) as lease:
                lease.copy_to(dst[:size])
            if step % 8 == 7:
                rig.synchronize()

    for _ in range(3):
        steps(8, 1)
    pool.reserve(4 << 20)
    before = pool.stats()
    steps(400, 64 * KB)
    after = pool.stats()
    assert (after.host_allocations, after.events_created) == (before.host_allocations, before.events_created)


# --- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.raced
def test_full_pool_raises_with_the_numbers_if_told_so(rig):
    dst = rig.empty(16 * KB, torch.uint8)
    pool = rig.pool(max_bytes=64 * KB, when_full="raise")
    with rig.stream(), rig.gate():
        fill_up(pool, dst)
        with (
            rig.unchanged(pool),
            pytest.raises(PoolExhausted, match=r'100 bytes.*"raise".*max_bytes 65536.*flight 65536'),
        ):
            pool.lease(100, torch.uint8).cancel()
        with rig.unchanged(pool), pytest.raises(PoolExhausted, match="Raise max_bytes, hand leases over sooner"):
            pinstage.copy_(dst, torch.zeros(16 * KB, dtype=torch.uint8), pool=pool)


@pytest.mark.raced
@pytest.mark.parametrize("timeout", [0, 0.01])
def test_lease_gives_up_after_its_timeout(rig, timeout):
    dst = rig.empty(16 * KB, torch.uint8)
    pool = rig.pool(max_bytes=64 * KB)
    with rig.stream(), rig.gate():
        fill_up(pool, dst)
        before = pool.stats()
        with pytest.raises(PoolExhausted, match=r"the timeout of 0\.0\d* s passed"):
            pool.lease(100, torch.uint8, timeout=timeout).cancel()
        after = pool.stats()
        assert after.waits == before.waits + 1
        assert (after.free_bytes, after.in_flight_bytes) == (before.free_bytes, before.in_flight_bytes)


@pytest.mark.raced
def test_full_pool_waits_until_the_device_has_read_a_slot(rig, until):
    dsts = [rig.filled(16 * KB, torch.uint8, 0) for _ in range(8)]
    source = torch.empty(16 * KB, dtype=torch.uint8)
    pool = rig.pool(max_bytes=64 * KB)
    with rig.stream() as stream:
        submitted = threading.Event()

        def release_once_waiting():
            until(lambda: pool.stats().waits > 0 or submitted.is_set())
            gate.release()

        with latch(stream) as gate:
            releaser = threading.Thread(target=release_once_waiting)
            releaser.start()
            for step, dst in enumerate(dsts):
                pinstage.copy_(dst, source.fill_(step), pool=pool)
            source.fill_(99)
            submitted.set()
            releaser.join()
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)
    assert pool.stats().waits >= 1
    assert pool.stats().wait_seconds > 0


@pytest.mark.parametrize("hold", ["open", "held"])
def test_wait_that_could_not_end_raises_at_once(dev, hold):
    """I6: only this thread's own leases and tensors take the room."""
    pool = pinstage.StagingPool(dev, max_bytes=4 * KB)
    lease = pool.lease(4 * KB, torch.uint8)
    if hold == "held":
        view = lease.tensor
        lease.copy_to(dev.empty(4 * KB, torch.uint8))
        lease.close()
        dev.synchronize()
        pool.reclaim()
    before = pool.stats()
    with pytest.raises(PoolExhausted, match="nothing is in flight, so waiting could not help"):
        pool.lease(1, torch.uint8)
    assert pool.try_lease(1, torch.uint8) is None
    assert pool.stats() == before
    if hold == "held":
        del view
    else:
        lease.cancel()
    pool.lease(1, torch.uint8).cancel()


def test_wait_for_another_threads_lease_ends_when_it_hands_back(dev, until):
    """I6: another thread's OPEN bytes may yet come back."""
    pool = pinstage.StagingPool(dev, max_bytes=4 * KB)
    taken = threading.Event()

    def other():
        lease = pool.lease(4 * KB, torch.uint8)
        taken.set()
        until(lambda: pool.stats().waits > 0)
        lease.cancel()

    thread = threading.Thread(target=other)
    thread.start()
    taken.wait()
    pool.lease(1, torch.uint8).cancel()
    thread.join()
    assert pool.stats().waits == 1


def test_wait_is_interrupted_by_a_signal(dev, until):
    pool = pinstage.StagingPool(dev, max_bytes=4 * KB)
    main = threading.get_ident()

    def interrupt():
        until(lambda: pool.stats().waits > 0)
        signal.pthread_kill(main, signal.SIGINT)

    with latch(dev.default_stream):
        fill_up(pool, dev.empty(4 * KB, torch.uint8), 4 * KB)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pool.lease(1, torch.uint8)
        thread.join()
    assert pool._consistent()
    pool.lease(1, torch.uint8).cancel()


@pytest.fixture
def default_limit(monkeypatch):
    monkeypatch.setenv("PINSTAGE_MAX_BYTES", str(1 << 20))
    for name in budget._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)


def test_waiting_for_the_default_limit_warns_once(dev, default_limit):
    pool, dst = pinstage.StagingPool(dev), dev.empty(1 << 20, torch.uint8)
    fill_up(pool, dst, 1 << 20)
    source = torch.zeros(1 << 20, dtype=torch.uint8)
    with pytest.warns(RuntimeWarning, match=r"default max_bytes of 1048576 is too small"):
        pinstage.copy_(dst, source, pool=pool)
    pinstage.copy_(dst, source, pool=pool)  # warnings are errors
    assert pool.stats().waits == 2


def test_waiting_for_a_chosen_limit_does_not_warn(dev):
    pool, dst = pinstage.StagingPool(dev, max_bytes=1 << 20), dev.empty(1 << 20, torch.uint8)
    fill_up(pool, dst, 1 << 20)
    pool.lease(1, torch.uint8).cancel()  # warnings are errors
    assert pool.stats().waits == 1


@pytest.mark.parametrize("call", ["lease", "copy_"])
def test_warning_that_is_an_error_leaks_nothing(dev, default_limit, monkeypatch, call):
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)  # a copy under way cannot be called off
    pool, dst = pinstage.StagingPool(dev), dev.zeros(1 << 20, torch.uint8)
    fill_up(pool, dst, 1 << 20)
    try:
        if call == "lease":
            pool.lease(100, torch.uint8).cancel()
        else:
            pinstage.copy_(dst, torch.ones(1 << 20, dtype=torch.uint8), pool=pool)
    except RuntimeWarning:
        pass
    dev.synchronize()
    pool.reclaim()
    assert pool.stats().free_bytes == 1 << 20


# --- growth ---------------------------------------------------------------------------------------------------------


def test_memory_is_pinned_when_first_needed_and_doubles_up_to_the_bound(dev):
    pool = pinstage.StagingPool(dev, initial_bytes=4 * KB, max_bytes=20 * KB)
    assert (pool.stats().capacity_bytes, dev.host_allocations) == (0, 0)
    leases, capacities = [], []
    while (lease := pool.try_lease(4 * KB, torch.uint8)) is not None:
        leases.append(lease)
        capacities.append(pool.stats().capacity_bytes // KB)
    assert capacities == [4, 8, 16, 16, 20]
    for lease in leases:
        lease.cancel()


@pytest.mark.parametrize("max_bytes", [256, 257, 1000, 4095, 4096, 5000, 10_000])
def test_capacity_never_passes_max_bytes(dev, max_bytes):
    pool = pinstage.StagingPool(dev, max_bytes=max_bytes, when_full="raise")
    leases = []
    while (lease := pool.try_lease(1, torch.uint8)) is not None:
        leases.append(lease)
    assert 256 * len(leases) <= pool.stats().capacity_bytes <= max_bytes
    assert len(leases) >= 1
    for lease in leases:
        lease.cancel()
    pool.trim()
    pool.reserve(max_bytes // 256 * 256)
    assert pool.stats().capacity_bytes <= max_bytes


def test_reserve_pins_what_is_missing_ahead_of_time(dev):
    pool = pinstage.StagingPool(dev)
    pool.reserve(1 << 20)
    pool.reserve(1 << 19)
    assert pool.stats().capacity_bytes == 1 << 20
    pool.lease(1 << 20, torch.uint8).cancel()
    assert pool.stats().host_allocations == 1


# --- giving back ----------------------------------------------------------------------------------------------------


def test_trim_unpins_what_is_wholly_free(dev):
    pool = pinstage.StagingPool(dev, initial_bytes=4 * KB)
    leases = [pool.lease(4 * KB, torch.uint8) for _ in range(4)]
    assert pool.stats().slabs == 3
    leases[0].cancel()
    leases[1].cancel()
    assert pool.trim() == 8 * KB
    assert (pool.stats().capacity_bytes, dev.host_allocations) == (8 * KB, 1)
    for lease in leases[2:]:
        lease.cancel()
    assert pool.trim() == 8 * KB
    assert dev.host_allocations == 0
    pool.lease(1, torch.uint8).cancel()  # a trimmed pool pins anew


@pytest.mark.both
def test_close_waits_for_the_copies_in_flight(rig):
    dst = rig.filled(1000, torch.int32, 0)
    with rig.stream(), rig.pool() as pool:
        pinstage.copy_(dst, torch.full((1000,), 5, dtype=torch.int32), pool=pool)
    assert pool.stats().capacity_bytes == 0
    rig.expect(dst, 5)
    pool.close()  # again: harmless
    with pytest.raises(LeaseStateError, match="closed"):
        pool.lease(1, torch.uint8)
    assert not rig.simulated or (rig.device.violations, rig.device.host_allocations) == (0, 0)


def test_dropped_pool_frees_nothing_under_a_copy_in_flight(dev):
    pool, dst = pinstage.StagingPool(dev), dev.zeros(1000, torch.int32)
    pinstage.copy_(dst, torch.full((1000,), 5, dtype=torch.int32), pool=pool)
    del pool
    gc.collect()
    another = pinstage.StagingPool(dev)  # sweeps what it may
    assert (dev.host_allocations, dev.violations) == (1, 0)
    dev.synchronize()
    assert dst.tolist() == [5] * 1000
    another.reclaim()
    assert (dev.host_allocations, dev.violations) == (0, 0)


@pytest.mark.both
def test_default_pool_is_one_a_device_and_made_anew_once_closed(rig):
    pool = pinstage.default_pool(rig.device)
    assert pinstage.default_pool(rig.device) is pool
    pool.close()
    again = pinstage.default_pool(rig.device)
    assert again is not pool
    dst = rig.filled(4, torch.float32, 0)
    pinstage.copy_(dst, torch.ones(4))
    rig.expect(dst, 1)
    assert again.stats().copies == 1
    again.close()


def test_stats_add_up_to_the_capacity_in_every_state(dev):
    """I1."""
    pool, dst = pinstage.StagingPool(dev), dev.empty(256, torch.int32)
    held, in_flight, opened, parked = (pool.lease(256 * 2**i, torch.int32) for i in range(4))
    view = held.tensor
    held.retire(dev.default_stream)
    held.close()
    dev.synchronize()
    pool.reclaim()
    in_flight.retire(dev.default_stream)
    in_flight.close()
    with pytest.raises(LeaseStateError):
        parked.close()
    stats = pool.stats()
    assert [stats.held_bytes, stats.in_flight_bytes, stats.open_bytes, stats.parked_bytes] == [1024, 2048, 4096, 8192]
    assert total(stats) == stats.capacity_bytes
    assert pool._consistent()
    opened.cancel()
    del view, dst


def test_threads_wait_for_each_others_unfinished_snapshots():
    """A snapshot that is still being written counts as in flight, yet is not queued: no wait may give up on it."""
    threads, copies, width = 6, 40, 1 << 16
    with SimulatedDevice(schedule="late") as dev:
        pool = pinstage.StagingPool(dev, max_bytes=3 * 4 * width)
        dsts = [[dev.zeros(width, torch.int32) for _ in range(copies)] for _ in range(threads)]
        errors = []

        def run(thread):
            try:
                for step, dst in enumerate(dsts[thread]):
                    pinstage.copy_(dst, torch.full((width,), thread * copies + step, dtype=torch.int32), pool=pool)
            except Exception as error:
                errors.append(error)

        running = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        dev.synchronize()
        assert errors == []
        for thread, row in enumerate(dsts):
            for step, dst in enumerate(row):
                assert int(dst[0]) == int(dst[-1]) == thread * copies + step


def test_closed_simulated_device_gives_its_slabs_back():
    with SimulatedDevice() as dev:
        pinstage.copy_(dev.zeros(4), torch.ones(4))
        core = dev._core
    assert core.host_allocations == 0
