# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Bulk: snapshots that go through a pipeline of pieces, because one slot is too small for them."""

from __future__ import annotations

import contextlib
import random
import signal
import threading

import numpy as np
import pytest
import torch

import pinstage
from pinstage import CaptureError, DriverError, PoolExhausted, _core
from pinstage.bulk import regions
from pinstage.testing import SimulatedDevice, latch

KB, MB = 1 << 10, 1 << 20
SCHEDULES = ["late", "eager", "random"]


def numbers(*shape, dtype=torch.int32):
    return torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape).to(dtype)


def pick(rows, count):
    return torch.randint(0, rows, (count,), generator=torch.manual_seed(count))


def plain(dst, src, pool):
    pinstage.copy_(dst, src, pool=pool)


def of_rows(dim, index):
    return lambda dst, src, pool: pinstage.copy_rows_(dst, src, index, dim=dim, pool=pool)


# name: (source, shape of the memory on the device, the part of it that is written, the copy)
COPIES = {
    "dense": (numbers(64, 128), (64, 128), lambda b: b, plain),
    "odd": (numbers(32001, dtype=torch.uint8), (32001,), lambda b: b, plain),
    "pitched": (numbers(64, 128), (64, 200), lambda b: b[:, 8:136], plain),
    "planes": (numbers(8, 8, 128), (8, 12, 200), lambda b: b[:, 2:10, :128], plain),
    "repeated": (numbers(3, 4, 5, 136), (3, 7, 9, 200), lambda b: b[:, :4, 3:8, :136], plain),
    "wide_rows": (numbers(3, 3000), (3, 4000), lambda b: b[:, :3000], plain),
    "transposed_dst": (numbers(64, 128), (128, 64), lambda b: b.t(), plain),
    "cast": (numbers(64, 128, dtype=torch.float64), (64, 128), lambda b: b, plain),
    "cast_to_pitched": (numbers(64, 128, dtype=torch.int64), (64, 200), lambda b: b[:, :128], plain),
    "strided_src": (numbers(64, 256)[:, ::2], (64, 128), lambda b: b, plain),
    "broadcast": (numbers(128), (64, 128), lambda b: b, plain),
    "one_row": (numbers(1, 1, 8192, dtype=torch.int64), (1, 1, 8192), lambda b: b, plain),
    "numpy": (numbers(64, 128).numpy(), (64, 128), lambda b: b, plain),
    "rows": (numbers(50, 32), (300, 32), lambda b: b, of_rows(0, pick(50, 300))),
    "odd_rows": (numbers(50, 101, dtype=torch.uint8), (300, 101), lambda b: b, of_rows(0, pick(50, 300))),
    "large_rows": (numbers(5, 3000), (4, 3000), lambda b: b, of_rows(0, pick(5, 4))),
    "rows_of_dim_1": (numbers(6, 50, 32), (6, 60, 32), lambda b: b, of_rows(1, pick(50, 60).int())),
    "rows_to_pitched": (numbers(50, 32), (300, 40), lambda b: b[:, :32], of_rows(0, pick(50, 300))),
    "rows_cut_by_pitch": (numbers(50, 4, 32), (60, 4, 40), lambda b: b[:, :, :32], of_rows(0, pick(50, 60))),
    "strided_rows": (numbers(50, 64)[:, ::2], (300, 32), lambda b: b, of_rows(0, pick(50, 300))),
    "strided_rows_of_dim_2": (numbers(4, 6, 80).transpose(0, 1), (6, 4, 400), lambda b: b, of_rows(2, pick(80, 400))),
}


def expected_of(src, shape, view, copy, base):
    """The whole of the destination's memory, as a copy on the host leaves it."""
    host = torch.full(shape, base, dtype=torch.uint8 if src.dtype == torch.uint8 else torch.int32)
    copy(view(host), src, None)
    return host


def as_tensor(src):
    return torch.from_numpy(src) if isinstance(src, np.ndarray) else src


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("max_bytes", [2 * KB, 5000, 16 * KB])
@pytest.mark.parametrize("name", COPIES)
def test_any_copy_arrives_through_a_pool_that_is_smaller(name, max_bytes, schedule):
    """Sources of 24 to 48 KB; every byte of the destination's memory is compared."""
    src, shape, view, copy = COPIES[name]
    src = as_tensor(src).clone(memory_format=torch.preserve_format)
    expected = expected_of(src, shape, view, copy, 99)
    with SimulatedDevice(schedule=schedule, seed=max_bytes) as dev:
        pool = pinstage.StagingPool(dev, max_bytes=max_bytes)
        memory = dev.empty(shape, expected.dtype).fill_(99)
        copy(view(memory), src, pool)
        if src.is_contiguous():
            src.fill_(0)  # at once
        assert dev.calls["cuEventRecord"] > 1
        dev.synchronize()
        assert torch.equal(memory, expected)
        assert pool.stats().capacity_bytes <= max_bytes
        pool.reclaim()
        assert pool.stats().free_bytes == pool.stats().capacity_bytes
        assert pool._consistent()
        pool.close()
        assert (dev.violations, dev.host_allocations) == (0, 0)


@pytest.mark.raced
@pytest.mark.parametrize("name", ["dense", "pitched", "cast", "rows", "strided_rows"])
def test_source_may_be_written_as_soon_as_the_call_returns(rig, name):
    """Case 1, in three pieces each."""
    src, shape, view, copy = COPIES[name]
    src = src.clone()
    pool = rig.pool()
    originals = [src + step for step in range(3)]
    memories = [rig.filled(shape, torch.int32, 99) for _ in originals]
    pool._most_piece_bytes = 13 * KB
    with rig.stream(), rig.gate():
        for original, memory in zip(originals, memories, strict=True):
            src.copy_(original)
            copy(view(memory), src, pool)
            src.fill_(-5)
        assert pool.stats().copies == 9
    for original, memory in zip(originals, memories, strict=True):
        rig.expect(memory, expected_of(original, shape, view, copy, 99))


@pytest.mark.raced
@pytest.mark.parametrize("name", ["dense", "pitched", "cast", "rows", "strided_rows"])
def test_snapshot_waits_for_its_own_oldest_piece(rig, name, until):
    """A held stream takes four pieces; the others are written into slots that the device has read."""
    src, shape, view, copy = COPIES[name]
    src = src.clone()
    expected = expected_of(src, shape, view, copy, 99)
    pool, memory = rig.pool(), rig.filled(shape, torch.int32, 99)
    pool._most_piece_bytes = 4 * KB
    pool.reserve(64 * KB)

    with rig.stream() as stream:

        def run():
            rig.make_current()
            with rig.stream(stream):
                copy(view(memory), src, pool)
            src.fill_(-5)

        thread = threading.Thread(target=run)
        with rig.gate():
            thread.start()
            until(lambda: not thread.is_alive() or pool.stats().copies == 4)
            if rig.lying:
                thread.join()
            copies, alive, high_water = pool.stats().copies, thread.is_alive(), pool.stats().high_water_bytes
        thread.join()
    assert (copies, alive) == (_core.PIECES_IN_FLIGHT, True)
    assert high_water <= 4 * 4 * KB
    rig.expect(memory, expected)
    assert pool.stats().high_water_bytes <= 4 * 4 * KB
    assert pool.stats().waits == 0  # nobody lacked room


@pytest.mark.both  # no control: the two copies are far from filling the pool
@pytest.mark.parametrize("name", ["dense", "cast", "rows"])
def test_source_of_32_mb_does_not_wait_for_the_stream(rig, name):
    """Case 28. Rows of 3.6 MB make five pieces: it is bytes that count. (The first goes in eight parts, or whole.)"""
    pool, dst = rig.pool(), rig.filled((9, 910 * KB), torch.int32, 0)
    src, index = numbers(9, 910 * KB), torch.arange(8, -1, -1)
    expected = src.flip(0) if name == "rows" else src.clone()
    with rig.stream(), rig.gate():
        if name == "rows":
            pinstage.copy_rows_(dst, src, index, pool=pool)
        else:
            pinstage.copy_(dst, src if name == "dense" else src.long(), pool=pool)
        src.zero_()
    assert pool.stats().copies == {"dense": 7 + 4, "rows": 7 + 5, "cast": 5}[name]
    rig.expect(dst, expected)


@pytest.mark.parametrize("seed", range(30))
def test_random_copies_arrive_whole(seed):
    """Shapes, pitches, piece sizes and schedules by the seed."""
    dice = random.Random(seed)
    with SimulatedDevice(schedule=dice.choice(SCHEDULES), seed=seed) as dev:
        pool = pinstage.StagingPool(dev, max_bytes=dice.choice([KB, 4 * KB, 64 * KB]))
        pool._most_piece_bytes = dice.choice([256, 1000, 4096])
        for _ in range(10):
            shape = tuple(dice.choice([1, 2, 3, 7, 16]) for _ in range(dice.randrange(4)))
            shape += (dice.choice([1, 65, 128, 1000]),)
            room = tuple(size + dice.choice([0, 0, 3]) for size in shape)
            region = tuple(slice(0, size) for size in shape)
            memory, host = dev.empty(room, torch.int32).fill_(-1), torch.full(room, -1, dtype=torch.int32)
            if dice.random() < 0.5:
                src = torch.randint(0, 1 << 30, shape, dtype=torch.int32)
                host[region] = src
                pinstage.copy_(memory[region], src, pool=pool)
            else:
                dim = dice.randrange(len(shape))
                src = torch.randint(0, 1 << 30, (*shape[:dim], 9, *shape[dim + 1 :]), dtype=torch.int32)
                index = torch.randint(0, 9, (shape[dim],), dtype=dice.choice([torch.int32, torch.int64]))
                host[region] = src.index_select(dim, index)
                pinstage.copy_rows_(memory[region], src, index, dim=dim, pool=pool)
                index.fill_(0)
            src.fill_(0)
            dev.synchronize()
            assert torch.equal(memory, host), (seed, shape, room)
            assert pool._consistent()


def test_pieces_are_even_and_each_has_one_copy_and_one_fence(dev):
    pool = pinstage.StagingPool(dev)
    pool._most_piece_bytes = 64 * KB
    dst = dev.empty(1 << 18, torch.uint8)
    pinstage.copy_(dst, torch.zeros(1 << 18, dtype=torch.uint8), pool=pool)
    assert (dev.calls["cuMemcpyHtoDAsync"], dev.calls["cuEventRecord"], pool.stats().copies) == (4, 4, 4)
    assert pool.stats().high_water_bytes == 1 << 18
    pinstage.copy_(dst[:65537], torch.zeros(65537, dtype=torch.uint8), pool=pool)
    assert pool.stats().copies == 6


@pytest.mark.parametrize(
    ("nbytes", "max_bytes", "piece"),
    [
        (8 * MB, 1 << 30, 8 * MB),  # one slot
        (8 * MB + 1, 1 << 30, 2 * MB + 64 * KB),
        (29 * MB, 1 << 30, 7 * MB + 320 * KB),  # in flight as a whole: it never waits
        (1 << 30, 1 << 30, 8 * MB),
        (1 << 30, 16 * MB, 4 * MB),
        (16 * MB, 16 * MB, 4 * MB),
        (4 * MB, 4 * MB, 4 * MB),
        (4 * MB + 1, 4 * MB, MB),
        (257, 256, 256),
    ],
)
def test_pieces_fit_the_source_and_the_pool(dev, nbytes, max_bytes, piece):
    assert pinstage.StagingPool(dev, max_bytes=max_bytes)._piece_bytes(nbytes) == piece
    assert pinstage.StagingPool(dev, max_bytes=max_bytes, when_full="raise")._piece_bytes(nbytes) == nbytes


@pytest.mark.parametrize(
    ("shape", "most", "parts"),
    [
        ((), 4, 1),
        ((10,), 40, 1),
        ((10,), 16, 3),
        ((4, 10), 80, 2),
        ((4, 10), 39, 8),
        ((2, 1, 3, 5), 20, 6),
        ((1, 1, 100), 100, 4),
    ],
)
def test_regions_cover_a_tensor_once_in_order(shape, most, parts):
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    found = [tensor[region] for region in regions(shape, 4, most)]
    assert torch.equal(torch.cat([part.flatten() for part in found]), tensor.flatten())
    assert len(found) == parts
    assert max(part.numel() * 4 for part in found) <= most


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_threads_that_share_a_small_pool_do_not_block_one_another(schedule):
    """Each waits for room that others' pieces take; a lease beside them takes half of it for a while."""
    threads, copies = 6, 8
    with SimulatedDevice(schedule=schedule, seed=7) as dev:
        pool = pinstage.StagingPool(dev, max_bytes=16 * KB)
        sources = [numbers(10 * KB) + thread for thread in range(threads)]
        dsts = [[dev.zeros(10 * KB, torch.int32) for _ in range(copies)] for _ in range(threads)]
        streams = [dev.stream() for _ in range(threads)]
        start, errors = threading.Barrier(threads), []

        def run(thread):
            try:
                dev.make_current()
                start.wait()
                with streams[thread]:
                    for step, dst in enumerate(dsts[thread]):
                        src = (sources[thread] + step).long() if thread % 2 else sources[thread] + step
                        pinstage.copy_(dst, src, pool=pool)
                        src.fill_(-1)
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
        for thread in running:
            thread.start()
        for _ in range(20):
            pool.lease(8 * KB, torch.uint8).cancel()
        for thread in running:
            thread.join()
        dev.synchronize()
        assert errors == []
        for thread, row in enumerate(dsts):
            for step, dst in enumerate(row):
                assert torch.equal(dst, sources[thread] + step)
        assert pool.stats().capacity_bytes <= 16 * KB
        assert pool._consistent()


# --- errors -----------------------------------------------------------------------------------------------------------


def sources():
    return {"dense": numbers(10 * KB), "cast": numbers(10 * KB, dtype=torch.float64)}


@pytest.mark.parametrize("name", ["dense", "cast"])
def test_interrupt_leaves_the_pool_whole_and_what_was_enqueued_fenced(dev, name, until):
    pool, dst = pinstage.StagingPool(dev, max_bytes=16 * KB), dev.zeros(10 * KB, torch.int32)
    main = threading.main_thread().ident

    def interrupt():
        until(lambda: pool.stats().copies == 4)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with latch(dev.default_stream):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pinstage.copy_(dst, sources()[name], pool=pool)
        stats = pool.stats()
        assert (stats.in_flight_bytes, stats.free_bytes, stats.copies) == (16 * KB, 0, 4)
        assert pool._consistent()
    thread.join()
    dev.synchronize()
    assert pool.reclaim() == 16 * KB
    assert torch.equal(dst[: 4 * KB], numbers(4 * KB))
    assert not dst[4 * KB :].any()


@pytest.mark.parametrize("name", ["dense", "cast"])
@pytest.mark.parametrize("entry", ["cuMemcpyHtoDAsync", "cuStreamIsCapturing", "cuMemHostAlloc"])
def test_error_in_the_middle_says_that_dst_is_a_mixture(dev, name, entry):
    pool, dst = pinstage.StagingPool(dev, initial_bytes=4 * KB, max_bytes=64 * KB), dev.zeros(10 * KB, torch.int32)
    pool._most_piece_bytes = 8 * KB
    with latch(dev.default_stream):
        dev.fail(entry, 3 if entry != "cuStreamIsCapturing" or name == "dense" else 4, times=2)
        with pytest.raises(DriverError, match=rf"{entry} failed.* 16384 of 40960 bytes.*mixture") as error:
            pinstage.copy_(dst, sources()[name], pool=pool)
        assert error.value.status == 2
        assert pool.stats().in_flight_bytes == 16 * KB
        assert pool._consistent()
    dev.synchronize()
    pool.reclaim()
    assert pool.stats().free_bytes == pool.stats().capacity_bytes
    assert torch.equal(dst[: 4 * KB], numbers(4 * KB))


@pytest.mark.parametrize("name", ["dense", "cast"])
def test_error_before_the_first_piece_changes_nothing(dev, name):
    pool, dst = pinstage.StagingPool(dev, max_bytes=16 * KB), dev.zeros(10 * KB, torch.int32)
    pinstage.copy_(dst, sources()[name], pool=pool)
    dev.synchronize()
    pool.reclaim()
    before = pool.stats()
    dev.fail("cuMemcpyHtoDAsync")
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync failed") as error:
        pinstage.copy_(dst, sources()[name], pool=pool)
    assert "mixture of old and new" not in str(error.value)
    assert pool.stats() == before


@pytest.mark.parametrize("name", ["dense", "cast"])
def test_wait_that_could_not_end_raises(name):
    with SimulatedDevice(schedule="manual") as dev:
        pool, dst = pinstage.StagingPool(dev, max_bytes=16 * KB), dev.zeros(10 * KB, torch.int32)
        with pytest.raises(DriverError, match=r"would never end.* 16384 of 40960 bytes.*mixture"):
            pinstage.copy_(dst, sources()[name], pool=pool)
        dev.run()
        assert pool.reclaim() == 16 * KB


@pytest.mark.both  # no control: nothing is enqueued
@pytest.mark.parametrize("name", ["dense", "cast", "rows", "strided_rows"])
def test_capture_is_told_before_anything_is_enqueued(rig, name):
    src, shape, view, copy = COPIES[name]
    pool, memory = rig.pool(max_bytes=16 * KB), rig.filled(shape, torch.int32, 99)
    counter = rig.filled((), torch.int64, 0)
    with rig.capture(), rig.unchanged(pool):
        rig.launch(lambda: counter.add_(1))
        with pytest.raises(CaptureError):
            copy(view(memory), src, pool)
    rig.expect(memory, 99)


@pytest.mark.both
@pytest.mark.parametrize("name", ["dense", "cast"])
def test_pool_that_raises_takes_a_copy_whole_or_not_at_all(rig, name):
    pool = rig.pool(max_bytes=64 * KB, when_full="raise")
    pool._most_piece_bytes = 4 * KB
    dst, large = rig.filled(10 * KB, torch.int32, 0), rig.filled(20 * KB, torch.int32, 0)
    pinstage.copy_(dst, sources()[name], pool=pool)
    rig.expect(dst, numbers(10 * KB))
    pool.reclaim()
    assert pool.stats().copies == 1
    with rig.unchanged(pool), pytest.raises(PoolExhausted, match="larger than max_bytes"):
        pinstage.copy_(large, numbers(20 * KB, dtype=sources()[name].dtype), pool=pool)


@pytest.mark.parametrize("name", ["dense", "cast"])
def test_own_leases_in_the_way_are_an_error_before_anything_is_enqueued(dev, name):
    pool, dst = pinstage.StagingPool(dev, max_bytes=16 * KB), dev.zeros(10 * KB, torch.int32)
    lease = pool.lease(14 * KB, torch.uint8)
    before = pool.stats()
    with pytest.raises(PoolExhausted, match="nothing is in flight"):
        pinstage.copy_(dst, sources()[name], pool=pool)
    assert pool.stats().copies == before.copies == 0
    lease.cancel()
    pinstage.copy_(dst, sources()[name], pool=pool)
    dev.synchronize()
    assert torch.equal(dst, numbers(10 * KB))


def is_closed(pool):
    try:
        assert pool.try_lease(1, torch.uint8) is None
    except pinstage.LeaseStateError:
        return True
    return False


def test_closed_pool_in_the_middle_is_an_error(dev, until):
    """Another thread closes the pool while the pipeline waits."""
    pool, dst = pinstage.StagingPool(dev, max_bytes=16 * KB), dev.zeros(10 * KB, torch.int32)
    errors = []

    def run():
        dev.make_current()
        with contextlib.suppress(pinstage.LeaseStateError):
            pinstage.copy_(dst, sources()["dense"], pool=pool)
            errors.append("it went through")

    thread = threading.Thread(target=run)
    with latch(dev.default_stream) as gate:
        thread.start()
        until(lambda: pool.stats().copies == 4)
        closing = threading.Thread(target=pool.close)
        closing.start()
        until(lambda: is_closed(pool))
        gate.release()
        thread.join()
        closing.join()
    assert errors == []
    assert pool.stats().capacity_bytes == 0
    assert dev.violations == 0
