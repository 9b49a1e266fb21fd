# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`copy_batch_`: what torch._foreach_copy_ does, as one submission, with sources that may be written at once."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pinstage
from pinstage import CaptureError, DriverError, PoolExhausted, devices
from pinstage.testing import SimulatedDevice

INT, LONG, FLOAT, BYTE = torch.int32, torch.int64, torch.float32, torch.uint8
KB = 1024
MANY = 16
KERNEL, BATCH, ONE = "cuLaunchKernel", "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync"
PITCHED, FENCE = "cuMemcpy2DAsync", "cuEventRecord"


def made_by(dev, body):
    """What `body` returns, and the calls that copy or fence which it made."""
    before = dev.calls
    result = body()
    made = {name: count - before[name] for name, count in dev.calls.items()}
    return result, {name: made[name] for name in made if made[name] and ("Memcpy" in name or name in (KERNEL, FENCE))}


def without_kernel(dev):
    """As where the driver declined to launch it (scatter.h)."""
    devices.resolve(dev).refuses_scatter = True


# --- the race ---------------------------------------------------------------------------------------------------------

# name: (shape, dtype) of the device memory and the views of it that are written
LAYOUTS = {
    "rows": [((MANY, 64), INT, lambda b: list(b))],
    "every_second_row": [((2 * MANY, 64), INT, lambda b: list(b[::2]))],
    "separate": [((size,), INT, lambda b: [b]) for size in range(10, 10 + MANY)],
    "adjacent_of_many_sizes": [((55,), INT, lambda b: list(b.split([1, 5, 9, 40])))],
    "reversed": [((MANY, 64), INT, lambda b: list(b)[::-1])],
    "interleaved_buffers": [((8, 16), INT, lambda b: list(b)), ((8, 16), FLOAT, lambda b: list(b))],
    "mixed_dtypes": [((33,), dtype, lambda b: [b]) for dtype in (INT, LONG, FLOAT, BYTE, torch.bfloat16, torch.bool)],
    "pitched": [
        ((7, 64), FLOAT, lambda b: [b[:, 3:40]]),
        ((3, 5, 64), FLOAT, lambda b: [b[:, :3, :30], b[:, :3, 30:]]),
    ],
    "one": [((64,), INT, lambda b: [b])],
    "two": [((64,), INT, lambda b: [b]), ((3,), LONG, lambda b: [b])],
    "large_beside_small": [((300_000,), INT, lambda b: [b]), ((5,), INT, lambda b: [b]), ((7,), INT, lambda b: [b])],
}


@pytest.mark.raced
@pytest.mark.parametrize("stream", ["own stream", "default stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sources_may_be_written_as_soon_as_the_call_returns(rig, layout, stream):
    """Cases 1 and 19."""
    steps = range(3)
    buffers = [[rig.filled(shape, dtype, 0) for shape, dtype, _ in LAYOUTS[layout]] for _ in steps]
    twins = [[torch.zeros(shape, dtype=dtype) for shape, dtype, _ in LAYOUTS[layout]] for _ in steps]

    def views(made):
        return [view for buffer, (_, _, cut) in zip(made, LAYOUTS[layout], strict=True) for view in cut(buffer)]

    sources = [torch.empty(dst.shape, dtype=dst.dtype) for dst in views(twins[0])]
    pool = rig.pool(initial_bytes=16 << 20)
    pool.reserve(16 << 20)
    with rig.stream(None if stream == "own stream" else rig.current_stream()), rig.gate():
        for step in steps:
            for i, source in enumerate(sources):
                source.fill_((10 * step + i) % 100 + 1)
            torch._foreach_copy_(views(twins[step]), sources)
            pinstage.copy_batch_(views(buffers[step]), sources, pool=pool)
        for source in sources:
            source.fill_(0)
    for step in steps:
        for buffer, twin in zip(buffers[step], twins[step], strict=True):
            rig.expect(buffer, twin)


@pytest.mark.raced
def test_default_pool_and_tuples_do_too(rig):
    """Case 1."""
    dsts, source = [rig.filled(64, INT, 0) for _ in range(6)], torch.empty(64, dtype=INT)
    with rig.stream(), rig.gate():
        for step in range(3):
            pinstage.copy_batch_(tuple(dsts[2 * step : 2 * step + 2]), (source.fill_(step), source))
        source.fill_(-1)
    for i, dst in enumerate(dsts):
        rig.expect(dst, i // 2)


@pytest.mark.raced
def test_threads_share_a_pool(rig):
    """Case 13."""
    rounds, wrong = 10, []
    pool = rig.pool(initial_bytes=1 << 20)
    pool.reserve(1 << 20)

    def work(number):
        rig.make_current()
        dsts = [[rig.empty(64, INT) for _ in range(8)] for _ in range(rounds)]
        source = torch.empty(64, dtype=INT)
        with rig.stream() as stream:
            with rig.gate(stream):
                for step in range(rounds):
                    pinstage.copy_batch_(dsts[step], [source.fill_(100 * number + step)] * 8, pool=pool)
                    source.fill_(-1)
            stream.synchronize()
        for step in range(rounds):
            wrong.extend(int(dst[0]) for dst in dsts[step] if not bool((dst == 100 * number + step).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool._consistent()


@pytest.mark.parametrize(("choice", "launches"), [("auto", 1), ("never", 0)])
def test_kernel_can_be_done_without(monkeypatch, choice, launches):
    """A kernel that fills the GPU and waits for these bytes would wait for ever for this one."""
    monkeypatch.setenv("PINSTAGE_KERNEL", choice)
    with SimulatedDevice() as dev:
        room = dev.empty(8 * 512, torch.uint8).view(8, 512)
        dsts = [room[i, : i + 1] for i in range(8)]
        pinstage.copy_batch_(dsts, [torch.full((i + 1,), i, dtype=torch.uint8) for i in range(8)])
        dev.synchronize()
        assert [dst.unique().tolist() for dst in dsts] == [[i] for i in range(8)]
        assert dev.calls["cuLaunchKernel"] == launches


def test_unknown_choice_of_kernels_is_refused(monkeypatch):
    monkeypatch.setenv("PINSTAGE_KERNEL", "sometimes")
    with SimulatedDevice() as dev, pytest.raises(ValueError, match='"auto" or "never"'):
        pinstage.copy_(dev.empty(4, torch.int64), torch.arange(4))


@pytest.mark.both  # no control: it shows that tensors outlive the wait, not what a fence says
def test_lists_may_change_and_tensors_die_while_the_call_waits_for_room(rig):
    pool = rig.pool(max_bytes=4 * KB)
    dsts = [rig.filled(256, INT, 0) for _ in range(4)]
    sources = [torch.full((256,), i, dtype=INT) for i in range(4)]
    kept = list(dsts)
    with rig.stream() as stream, rig.gate():
        pinstage.copy_(rig.empty(KB, INT), torch.zeros(KB, dtype=INT), pool=pool)  # the pool is full

        def submit():
            rig.make_current()
            with rig.stream(stream):
                pinstage.copy_batch_(dsts, sources, pool=pool)

        thread = threading.Thread(target=submit)
        thread.start()
        while pool.stats().waits == 0:
            pass
        dsts.clear()
        sources.clear()
    thread.join()
    for i, dst in enumerate(kept):
        rig.expect(dst, i)


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.both  # no control: no slot is reused here
@pytest.mark.parametrize("backwards", [False, True])
def test_of_overlapping_destinations_the_later_pair_wins(rig, backwards):
    device, host = rig.filled(100, INT, 0), torch.zeros(100, dtype=INT)
    cuts = [slice(start, start + 20) for start in range(0, 80, 10)][:: -1 if backwards else 1]
    sources = [torch.full((20,), i + 1, dtype=INT) for i in range(len(cuts))]
    with rig.stream():
        pinstage.copy_batch_([device[cut] for cut in cuts], sources)
        torch._foreach_copy_([host[cut] for cut in cuts], sources)
        rig.expect(device, host)


@st.composite
def batches(draw):
    count = draw(st.integers(1, 24))
    return [(draw(st.integers(0, 63)) * draw(st.sampled_from([1, 16])), draw(st.integers(1, 40))) for _ in range(count)]


@settings(max_examples=150)
@given(batches(), st.sampled_from(["late", "eager", "random"]), st.booleans())
def test_any_batch_leaves_what_a_loop_leaves(pieces, schedule, own_stream):
    """A batch call of the simulated driver runs its copies in reverse or shuffled."""
    with SimulatedDevice(schedule=schedule, seed=len(pieces)) as dev:
        dev.make_current()
        device, host = dev.zeros(1100, INT), torch.zeros(1100, dtype=INT)
        sources = [torch.full((size,), i + 1, dtype=INT) for i, (_, size) in enumerate(pieces)]
        with dev.stream(None if own_stream else dev.default_stream):
            pinstage.copy_batch_([device[start : start + size] for start, size in pieces], sources)
            torch._foreach_copy_([host[start : start + size] for start, size in pieces], sources)
            for source in sources:
                source.fill_(-1)
            dev.synchronize()
        assert torch.equal(device, host)


# --- one submission ---------------------------------------------------------------------------------------------------

# name: destinations; the calls with the kernel, without it, and without it on the default stream
SUBMISSIONS = {
    "separate": (lambda dev: [dev.empty(65 + i, INT) for i in range(MANY)], {KERNEL: 1}, {BATCH: 1}, {ONE: MANY}),
    "adjacent": (lambda dev: list(dev.empty((MANY, 64), INT)), {ONE: 1}, {ONE: 1}, {ONE: 1}),
    "rows": (lambda dev: list(dev.empty((MANY, 64), INT)[:, :60]), {PITCHED: 1}, {PITCHED: 1}, {PITCHED: 1}),
    "backwards": (lambda dev: list(dev.empty((MANY, 64), INT))[::-1], {ONE: 1}, {ONE: 1}, {ONE: 1}),
    "rows_and_separate": (
        lambda dev: [*dev.empty((MANY, 64), INT)[:, :60], *(dev.empty(65 + i, INT) for i in range(4))],
        {PITCHED: 1, KERNEL: 1},
        {PITCHED: 1, BATCH: 1},
        {PITCHED: 1, ONE: 4},
    ),
    "two": (lambda dev: [dev.empty(64, INT), dev.empty(6, INT)], {ONE: 2}, {ONE: 2}, {ONE: 2}),
    "pitched": (
        lambda dev: [dev.empty((4, 64), INT)[:, :60] for _ in range(3)], {PITCHED: 3}, {PITCHED: 3}, {PITCHED: 3},
    ),
    "many_bytes": (lambda dev: [dev.empty((400 + i) * KB, BYTE) for i in range(3)], {BATCH: 1}, {BATCH: 1}, {ONE: 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", SUBMISSIONS)
@pytest.mark.parametrize("own_stream", [True, False])
@pytest.mark.parametrize("kernel", [True, False])
def test_batch_is_as_few_driver_calls_as_can_be_and_one_fence(dev, name, own_stream, kernel):
    """Case 19: a batch call would be refused on the default stream, a kernel is not."""
    make, by_kernel, on_stream, on_default = SUBMISSIONS[name]
    if not kernel:
        without_kernel(dev)
    pool, dsts = pinstage.StagingPool(dev), make(dev)
    sources = [torch.ones(dst.shape, dtype=dst.dtype) for dst in dsts]
    with dev.stream(None if own_stream else dev.default_stream):
        copies = pool.stats().copies
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
        expected = by_kernel if kernel else on_stream
        if expected == on_stream and not own_stream:
            expected = on_default
        assert made == {**expected, FENCE: 1}
        assert pool.stats().copies == copies + 1
        dev.synchronize()
    assert all(bool((dst == 1).all()) for dst in dsts)


def test_destinations_of_two_allocations_are_never_one_copy(dev):
    """Whatever lies between them: the driver may refuse a copy that reaches over an allocation's end."""
    blocks = sorted((dev.empty(64, INT) for _ in range(60)), key=lambda block: block.data_ptr())
    gaps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(blocks)}
    assert len(gaps) < len(blocks) - 1  # many are equally spaced
    with dev.stream():
        for call in (KERNEL, BATCH):
            _, made = made_by(dev, lambda: pinstage.copy_batch_(blocks, [torch.ones(64, dtype=INT)] * len(blocks)))
            assert made == {call: 1, FENCE: 1}
            without_kernel(dev)


@pytest.mark.both
def test_batch_on_two_devices_is_one_submission_each(rig, other):
    """Case 36."""
    dsts = [(rig, other)[i % 2].filled(64, INT, 0) for i in range(8)]
    sources = [torch.full((64,), i, dtype=INT) for i in range(8)]
    pools = [pinstage.default_pool(each.device) for each in (rig, other)]
    with rig.stream(), other.stream():
        before = [pool.stats().copies for pool in pools]
        pinstage.copy_batch_(dsts, sources)
        assert [pool.stats().copies - count for pool, count in zip(pools, before, strict=True)] == [1, 1]
        for source in sources:
            source.fill_(-1)
        for i, dst in enumerate(dsts):
            (rig, other)[i % 2].expect(dst, i)


def test_batch_larger_than_the_pool_goes_in_several_slots(dev):
    pool = pinstage.StagingPool(dev, max_bytes=4 * KB)
    dsts, source = [dev.zeros(257 + i, INT) for i in range(MANY)], torch.ones(300, dtype=INT)
    with dev.stream():
        pinstage.copy_batch_(dsts, [source[: 257 + i] for i in range(MANY)], pool=pool)
        source.fill_(2)
        dev.synchronize()
    assert all(bool((dst == 1).all()) for dst in dsts)
    assert pool.stats().capacity_bytes <= 4 * KB
    assert pool.stats().copies > 1


def test_batch_of_many_bytes_goes_in_several_slots(dev):
    """So that the device reads one while the next is filled."""
    pool = pinstage.StagingPool(dev)
    dsts, source = [dev.zeros(256 * KB, BYTE) for _ in range(40)], torch.ones(256 * KB, dtype=BYTE)
    pinstage.copy_batch_(dsts, [source] * 40, pool=pool)
    assert pool.stats().copies == 3
    dev.synchronize()
    assert all(bool((dst == 1).all()) for dst in dsts)


# --- drivers without the kernel, or without batches -------------------------------------------------------------------


@pytest.mark.parametrize("status", [1, 801, 209, 218, 701])
@pytest.mark.parametrize("entry", [KERNEL, "cuMemHostGetDevicePointer"])
def test_refused_kernel_goes_piece_by_piece_and_the_next_is_not_tried(dev, status, entry):
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(3 * KB + i, INT) for i in range(MANY)]
    sources = [torch.ones(dst.shape, dtype=INT) for dst in dsts]
    with dev.stream():
        dev.fail(entry, status=status)
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
        made.pop(KERNEL, None)
        assert made == {ONE: 2 * MANY, FENCE: 1}
        dev.synchronize()
        assert all(bool((dst == 1).all()) for dst in dsts)
        sources[0].fill_(2)
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
        assert made == {BATCH: 1, FENCE: 1}
        sources[0].fill_(3)
        dev.synchronize()
    assert bool((dsts[0] == 2).all())


@pytest.mark.parametrize("entry", ["cuModuleLoadData", "cuModuleGetFunction", "cuCtxGetCurrent"])
@pytest.mark.parametrize("status", [2, 221, 719])
def test_device_whose_driver_compiles_no_kernel_batches(entry, status):
    """Of an error nobody is told: the kernel is one of several ways."""
    with SimulatedDevice() as dev:
        dev.fail(entry, status=status)
        pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
        assert devices.resolve(dev).refuses_scatter
        with dev.stream():
            sources = [torch.ones(dst.shape, dtype=INT) for dst in dsts]
            _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
            assert made == {BATCH: 1, FENCE: 1}
            dev.synchronize()
        assert all(bool((dst == 1).all()) for dst in dsts)


def test_refused_kernel_whose_pieces_are_refused_too_is_tried_again(dev):
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
    sources = [torch.ones(dst.shape, dtype=INT) for dst in dsts]
    pinstage.copy_batch_(dsts, sources, pool=pool)
    dev.synchronize()
    pool.reclaim()
    before = pool.stats()
    dev.fail(KERNEL, status=1)
    dev.fail(ONE, status=1)
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync failed"):
        pinstage.copy_batch_(dsts, sources, pool=pool)
    assert pool.stats() == before
    dev.fail(KERNEL, status=1)
    dev.fail(ONE, 3, status=1)
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync failed"):
        pinstage.copy_batch_(dsts, sources, pool=pool)
    assert pool.stats().in_flight_bytes > 0  # two pieces are under way, and fenced
    _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
    assert made == {KERNEL: 1, FENCE: 1}


@pytest.mark.parametrize(("status", "comes_back"), [(2, True), (900, True), (700, False)])
def test_kernel_that_fails_otherwise_is_an_error(dev, status, comes_back):
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
    dev.fail(KERNEL, status=status)
    with pytest.raises(DriverError, match="cuLaunchKernel failed"):
        pinstage.copy_batch_(dsts, [torch.ones(dst.shape, dtype=INT) for dst in dsts], pool=pool)
    assert (pool.stats().in_flight_bytes == 0) == comes_back
    assert not devices.resolve(dev).refuses_scatter
    assert pool._consistent()


@pytest.mark.parametrize("status", [1, 801])
def test_refused_batch_goes_one_by_one_and_the_next_is_not_tried(dev, status):
    without_kernel(dev)
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
    sources = [torch.ones(dst.shape, dtype=INT) for dst in dsts]
    with dev.stream():
        dev.fail(BATCH, status=status)
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
        assert made == {BATCH: 1, ONE: MANY, FENCE: 1}
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
        assert made == {ONE: MANY, FENCE: 1}
        dev.synchronize()
    assert all(bool((dst == 1).all()) for dst in dsts)


@pytest.mark.parametrize("refused", [False, True])
def test_batch_from_pageable_memory_goes_one_by_one(dev, monkeypatch, refused):
    """Case 27. Where the driver refuses to pin, the first batch is what finds out."""
    if refused:
        for entry in ("cuMemHostRegister", "cuMemHostAlloc"):
            dev.fail(entry, status=801)
    else:
        monkeypatch.setenv("PINSTAGE_PINNED", "never")
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
    source = torch.ones(100, dtype=INT)
    with dev.stream():
        with pytest.warns(RuntimeWarning, match="pageable"):
            pinstage.copy_batch_(dsts, [source[: 65 + i] for i in range(MANY)], pool=pool)
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, [source[: 65 + i] for i in range(MANY)], pool=pool))
        assert made == {ONE: MANY, FENCE: 1}
        assert dev.calls["cuMemcpyBatchAsync"] == 0
        source.fill_(2)
        dev.synchronize()
    assert all(bool((dst == 1).all()) for dst in dsts)


def test_batch_refused_for_its_copies_is_tried_again(dev):
    without_kernel(dev)
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
    sources = [torch.ones(dst.shape, dtype=INT) for dst in dsts]
    with dev.stream():
        dev.fail(BATCH, status=1)
        dev.fail(ONE, status=1)
        with pytest.raises(DriverError, match="cuMemcpyHtoDAsync failed"):
            pinstage.copy_batch_(dsts, sources, pool=pool)
        assert pool.stats().free_bytes == pool.stats().capacity_bytes
        _, made = made_by(dev, lambda: pinstage.copy_batch_(dsts, sources, pool=pool))
        assert made == {BATCH: 1, FENCE: 1}


@pytest.mark.parametrize(("status", "comes_back"), [(2, True), (900, True), (700, False)])
def test_batch_that_fails_otherwise_is_an_error(dev, status, comes_back):
    """In capture a rejected batch would else be lost in silence."""
    without_kernel(dev)
    pool, dsts = pinstage.StagingPool(dev), [dev.zeros(65 + i, INT) for i in range(MANY)]
    versions = [dst._version for dst in dsts]
    with dev.stream():
        dev.fail(BATCH, status=status)
        with pytest.raises(DriverError, match="cuMemcpyBatchAsync failed"):
            pinstage.copy_batch_(dsts, [torch.ones(dst.shape, dtype=INT) for dst in dsts], pool=pool)
    # What may have been enqueued is fenced.
    assert (pool.stats().in_flight_bytes == 0) == comes_back
    assert versions < [dst._version for dst in dsts]
    assert pool._consistent()


# --- every pair that copy_ takes --------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    pass


# name: dst from a rig, src
PAIRS = {
    "plain": lambda rig: (rig.filled(8, INT, 0), torch.arange(8, dtype=INT)),
    "cast": lambda rig: (rig.filled(8, INT, 0), torch.arange(8)),
    "to_float16": lambda rig: (rig.filled(8, torch.float16, 0), torch.arange(8)),
    "broadcast": lambda rig: (rig.filled((3, 8), INT, 0), torch.arange(8, dtype=INT)),
    "strided_source": lambda rig: (rig.filled(4, INT, 0), torch.arange(8, dtype=INT)[::2]),
    "large_cast": lambda rig: (rig.filled(30_000, INT, 0), torch.arange(30_000)),
    "negated": lambda rig: (rig.filled(8, FLOAT, 0), torch._neg_view(torch.arange(8.0))),
    "conjugated": lambda rig: (rig.filled(8, torch.complex64, 0), (torch.arange(8) * 1j).to(torch.complex64).conj()),
    "transposed_dst": lambda rig: (rig.filled((4, 40), INT, 0).t(), torch.arange(160, dtype=INT).reshape(40, 4)),
    "numpy": lambda rig: (rig.filled(8, LONG, 0), np.arange(8)),
    "no_elements": lambda rig: (rig.filled((0, 3), INT, 0), torch.empty(0, 3, dtype=INT)),
    "zero_dim": lambda rig: (rig.filled((), INT, 0), torch.tensor(5, dtype=INT)),
    "subclass": lambda rig: (rig.filled(8, INT, 0), torch.arange(8, dtype=INT).as_subclass(Tagged)),
    "host_to_host": lambda rig: (torch.zeros(8, dtype=INT), torch.arange(8, dtype=INT)),
}


@pytest.mark.both
@pytest.mark.parametrize("name", PAIRS)
def test_pair_of_any_kind_among_plain_ones(rig, name):
    rows = rig.filled((2 * MANY, 8), INT, 0)
    dst, src = PAIRS[name](rig)
    dsts = [*rows[:MANY], dst, *rows[MANY:]]
    sources = [*(torch.full((8,), i, dtype=INT) for i in range(MANY)), src]
    sources += [torch.full((8,), i, dtype=INT) for i in range(MANY, 2 * MANY)]
    versions = rows._version, dst._version
    with rig.stream():
        pinstage.copy_batch_(dsts, sources)
        rig.expect(rows, torch.arange(2 * MANY, dtype=INT)[:, None].expand(2 * MANY, 8))
        twin = torch.zeros(dst.shape, dtype=dst.dtype).copy_(torch.as_tensor(src))
        rig.expect(dst, twin.as_subclass(torch.Tensor))
    assert (rows._version, dst._version) == (versions[0] + 2 * MANY, versions[1] + 1)


@pytest.mark.both
def test_every_kind_of_pair_at_once(rig):
    pairs = [PAIRS[name](rig) for name in PAIRS for _ in range(2)]
    with rig.stream():
        pinstage.copy_batch_([dst for dst, _ in pairs], [src for _, src in pairs])
        for dst, src in pairs:
            rig.expect(
                dst, torch.zeros(dst.shape, dtype=dst.dtype).copy_(torch.as_tensor(src)).as_subclass(torch.Tensor)
            )


@pytest.mark.both
def test_host_pair_is_read_by_the_pairs_after_it(rig):
    """As in a loop: list order holds where one pair's dst is another's src."""
    host, dst = torch.zeros(8, dtype=LONG), rig.filled(8, INT, 7)
    pinstage.copy_batch_([host, dst, host], [torch.ones(8), host, torch.full((8,), 2)])
    rig.expect(dst, 1)
    assert host.tolist() == [2] * 8


@pytest.mark.both
def test_version_counters_move_as_torch_moves_them(rig):
    device, host = [rig.filled(8, FLOAT, 0) for _ in range(2)], [torch.zeros(8) for _ in range(2)]
    before = [tensor._version for tensor in (*device, *host)]
    source = torch.ones(8)
    with torch.no_grad():
        pinstage.copy_batch_([*device, device[0]], [source] * 3)
        torch._foreach_copy_([*host, host[0]], [source] * 3)
    moved = [tensor._version - version for tensor, version in zip((*device, *host), before, strict=True)]
    assert moved == [2, 1, 2, 1]


@pytest.mark.both
def test_inference_tensors_can_be_written_in_inference_mode(rig):
    with torch.inference_mode():
        dsts = [rig.empty(8) for _ in range(4)]
        pinstage.copy_batch_(dsts, [torch.ones(8)] * 4)
    for dst in dsts:
        rig.expect(dst, 1)


@pytest.mark.both
def test_gradients_flow_through_the_pairs_that_have_some(rig):
    source = torch.ones(4, requires_grad=True)
    dsts = [rig.filled(4, FLOAT, 0) for _ in range(3)]
    pinstage.copy_batch_(dsts, [torch.ones(4), source, torch.ones(4)])
    dsts[1].sum().backward()
    assert source.grad.tolist() == [1] * 4


# --- nothing is done in part ------------------------------------------------------------------------------------------


def inference_tensor(rig):
    with torch.inference_mode():
        return rig.empty(4)


# name: the pair that is wrong, from a rig; the error that torch raises, of a twin on the CPU
REFUSED = {
    "shape": lambda rig: (rig.empty(4), torch.ones(5)),
    "more_dims": lambda rig: (rig.empty(4), torch.ones(2, 2, 4)),
    "inference_tensor": lambda rig: (inference_tensor(rig), torch.ones(4)),
    "leaf": lambda rig: (rig.filled(4, FLOAT, 0).requires_grad_(), torch.ones(4)),
    "expanded": lambda rig: (rig.filled(1, FLOAT, 0).expand(4), torch.ones(4)),
    "source_of_numbers": lambda rig: (rig.empty(4), 1.0),
    "no_source": lambda rig: (rig.empty(4), None),
    "no_dst": lambda rig: (None, torch.ones(4)),
}


class Host:
    """A rig for torch's own error."""

    empty = staticmethod(torch.empty)

    @staticmethod
    def filled(shape, dtype, value):
        return torch.full((shape,), value, dtype=dtype)


@pytest.mark.both
@pytest.mark.parametrize("place", [0, 3, 8])
@pytest.mark.parametrize("name", REFUSED)
def test_one_bad_pair_raises_as_torch_raises_it_and_changes_nothing(rig, name, place):
    good, pool = [rig.filled(4, FLOAT, 7) for _ in range(8)], rig.pool()
    pinstage.copy_batch_(good, [torch.full((4,), 7.0)] * 8, pool=pool)
    rig.synchronize()
    pool.reclaim()
    dst, src = REFUSED[name](rig)
    dsts, sources = [*good], [torch.ones(4)] * 8
    dsts.insert(place, dst)
    sources.insert(place, src)
    versions = [tensor._version for tensor in good]
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        torch._foreach_copy_(*([tensor] for tensor in REFUSED[name](Host)))
    with rig.unchanged(pool), pytest.raises((RuntimeError, TypeError)) as ours:
        pinstage.copy_batch_(dsts, sources, pool=pool)
    assert type(ours.value) is type(theirs.value)
    assert [tensor._version for tensor in good] == versions
    for tensor in good:
        rig.expect(tensor, 7)


LISTS = {
    "both_empty": lambda a: ([], []),
    "no_sources": lambda a: ([a], []),
    "no_dsts": lambda a: ([], [a]),
    "two_lengths": lambda a: ([a, a], [a]),
    "tensors": lambda a: (a, a),
    "iterators": lambda a: (iter([a]), [a]),
    "none": lambda a: (None, [a]),
    "source_is_none": lambda a: ([a], None),
}


@pytest.mark.both
@pytest.mark.parametrize("name", LISTS)
def test_bad_lists_raise_as_torch_raises_it(rig, name):
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        torch._foreach_copy_(*LISTS[name](torch.ones(4)))
    with pytest.raises((RuntimeError, TypeError)) as ours:
        pinstage.copy_batch_(*LISTS[name](rig.empty(4)))
    assert type(ours.value) is type(theirs.value)


@pytest.mark.both
@pytest.mark.parametrize("cast", [False, True])
def test_captured_stream_of_any_device_raises_before_anything_is_enqueued(rig, other, cast):
    """Case 10."""
    dsts = [each.filled(8, INT, 7) for each in (rig, other) for _ in range(4)]
    sources = [torch.ones(8, dtype=LONG if cast else INT)] * 8
    pools = [pinstage.default_pool(each.device) for each in (rig, other)]
    pinstage.copy_batch_(dsts, [torch.full((8,), 7, dtype=INT)] * 8)
    for each, pool in zip((rig, other), pools, strict=True):
        each.synchronize()
        pool.reclaim()
    versions = [dst._version for dst in dsts]
    for captured in (rig, other):
        captured.make_current()
        counter = captured.filled((), LONG, 0)
        with rig.unchanged(pools[0]), rig.unchanged(pools[1]), captured.capture() as graph:
            captured.launch(lambda counter=counter: counter.add_(1))
            with pytest.raises(CaptureError):
                pinstage.copy_batch_(dsts, sources)
        graph.replay()
        captured.expect(counter, 1)
    assert [dst._version for dst in dsts] == versions
    for i, dst in enumerate(dsts):
        (rig, other)[i // 4].expect(dst, 7)


@pytest.mark.both
def test_pool_of_another_device_is_refused(rig, other):
    pool, dsts = other.pool(), [rig.filled(8, INT, 7) for _ in range(3)]
    with rig.unchanged(pool), pytest.raises(ValueError, match="use a pool of dst's device"):
        pinstage.copy_batch_(dsts, [torch.ones(8, dtype=INT)] * 3, pool=pool)
    with rig.unchanged(pool), pytest.raises(TypeError, match="StagingPool"):
        pinstage.copy_batch_(dsts, [torch.ones(8, dtype=INT)] * 3, pool="the best one")
    for dst in dsts:
        rig.expect(dst, 7)


def test_full_pool_that_may_not_wait_raises_and_changes_nothing(dev):
    pool = pinstage.StagingPool(dev, max_bytes=4 * KB, when_full="raise")
    dsts = [dev.zeros(64, INT) for _ in range(8)]
    with pool.lease(4 * KB, BYTE) as lease:
        before, versions = pool.stats(), [dst._version for dst in dsts]
        with pytest.raises(PoolExhausted):
            pinstage.copy_batch_(dsts, [torch.ones(64, dtype=INT)] * 8, pool=pool)
        assert pool.stats() == before
        assert [dst._version for dst in dsts] == versions
        lease.cancel()
