# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`copy_rows_` without an index: many segments, one after the other, as the block lists of a batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import pinstage


def ragged(lengths, dtype=torch.int32, row=()):
    """Pieces of these lengths, no two elements alike."""
    values = torch.arange(sum(lengths) * max(int(np.prod(row)), 1), dtype=torch.int64).to(dtype)
    return [segment.clone() for segment in values.view(-1, *row).split(lengths)]


@pytest.mark.raced
def test_segments_may_be_written_as_soon_as_the_call_returns(rig):
    """Case 1, with segments."""
    dice = random.Random(7)
    pool, segments = rig.pool(), ragged([dice.randrange(1, 300) for _ in range(40)])
    total = sum(map(len, segments))
    dsts, expected = [rig.filled(total, torch.int32, -1) for _ in range(2)], []
    with rig.stream(), rig.gate():
        for dst in dsts:
            expected.append(torch.cat(segments))
            assert pinstage.copy_rows_(dst, segments, pool=pool) is dst
            for segment in segments:
                segment.add_(100_000)
    for dst, values in zip(dsts, expected, strict=True):
        rig.expect(dst, values)


@pytest.mark.both  # no control: one copy each, whose slot nobody is after
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 3, 0, 5, 0], [7] * 300, [1, 20_000, 1], [600_000, 5]])
@pytest.mark.parametrize("row", [(), (3,), (2, 5)])
def test_elements_past_the_segments_are_left_alone(rig, lengths, row):
    segments = ragged(lengths, row=row) if sum(lengths) else [torch.empty(0, *row, dtype=torch.int32) for _ in lengths]
    total = sum(lengths)
    dst = rig.filled((total + 11, *row), torch.int32, -1)
    pinstage.copy_rows_(dst, segments)
    host = torch.full((total + 11, *row), -1, dtype=torch.int32)
    if segments:
        host[:total] = torch.cat(segments)
    rig.expect(dst, host)


VIEWS = {
    "strided": lambda: [torch.arange(60, dtype=torch.int32).view(6, 10)[:, ::2], torch.ones(2, 5, dtype=torch.int32)],
    "numpy": lambda: [np.arange(10, dtype=np.int32).reshape(2, 5), np.ones((1, 5), dtype=np.int32)],
    "both": lambda: (np.arange(10, dtype=np.int32).reshape(2, 5), torch.ones(3, 5, dtype=torch.int32)),
    "transposed": lambda: [torch.arange(20, dtype=torch.int32).view(5, 4).t()],
    "expanded": lambda: [torch.arange(5, dtype=torch.int32).expand(3, 5)],
    "negated": lambda: [torch._neg_view(torch.arange(10, dtype=torch.int32).view(2, 5)), torch.ones(1, 5).int()],
    "one_twice": lambda: [torch.arange(5, dtype=torch.int32)[None]] * 2,
}


@pytest.mark.both
@pytest.mark.parametrize("name", VIEWS)
def test_segments_of_any_layout_give_what_cat_gives(rig, name):
    segments = VIEWS[name]()
    expected = torch.cat([torch.as_tensor(segment) for segment in segments])
    dst = rig.filled(tuple(expected.shape), torch.int32, -1)
    pinstage.copy_rows_(dst, segments)
    rig.expect(dst, expected)


@pytest.mark.both
@pytest.mark.parametrize("step", [1, 2])
def test_segments_too_large_for_a_slot_go_in_pieces(rig, step):
    pool, segments = rig.pool(max_bytes=1 << 20), [s[::step] for s in ragged([200_000, 3, 400_001], row=(2,))]
    expected = torch.cat(segments)
    dst = rig.filled(tuple(expected.shape), torch.int32, -1)
    with rig.stream():
        pinstage.copy_rows_(dst, segments, pool=pool)
        for segment in segments:
            segment.zero_()
    rig.expect(dst, expected)
    assert pool.stats().copies > 1


@pytest.mark.both
@pytest.mark.parametrize("dim", [1, -1])
def test_segments_follow_one_another_along_any_dimension(rig, dim):
    segments = [torch.ones(4, 3, dtype=torch.int32), torch.full((4, 2), 2, dtype=torch.int32)]
    dst = rig.filled((4, 6), torch.int32, -1)
    pinstage.copy_rows_(dst, segments, dim=dim)
    rig.expect(dst, torch.tensor([[1, 1, 1, 2, 2, -1]] * 4))


@pytest.mark.both
def test_destination_may_be_strided(rig):
    whole = rig.filled((8, 9), torch.int32, -1)
    pinstage.copy_rows_(whole[:, :4], ragged([2, 3], row=(4,)))
    host = torch.full((8, 9), -1, dtype=torch.int32)
    host[:5, :4] = torch.arange(20).view(5, 4)
    rig.expect(whole, host)


@pytest.mark.both
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float64, torch.complex64])
def test_segments_of_any_dtype(rig, dtype):
    segments = [torch.tensor([1, 0, 1]).to(dtype), torch.tensor([0, 1]).to(dtype)]
    dst = rig.filled(5, dtype, 0)
    pinstage.copy_rows_(dst, segments)
    rig.expect(dst, torch.cat(segments))


def test_segments_go_to_one_slot_by_one_copy(dev):
    pool, dst = pinstage.StagingPool(dev), dev.empty((5000,), torch.int32)
    pinstage.copy_rows_(dst, ragged([3] * 1000), pool=pool)
    assert (dev.calls["cuMemcpyHtoDAsync"], dev.calls["cuEventRecord"]) == (1, 1)


def test_segments_go_to_host_tensors_too():
    dst = torch.zeros(4, dtype=torch.int32)
    pinstage.copy_rows_(dst, ragged([2, 1]))
    assert dst.tolist() == [0, 1, 2, 0]


@pytest.mark.both
def test_version_counter_moves_once(rig):
    dst = rig.filled(6, torch.int32, 0)
    before = dst._version
    pinstage.copy_rows_(dst, ragged([2, 3]))
    assert dst._version == before + 1


A, B = torch.ones(2, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)
BAD = {
    "too_many": ([A, B, A, A], {}, ValueError, "the 4 segments have 7 rows, the destination 5"),
    "other_dtype": ([A, B.int()], {}, ValueError, r"the destination is of torch.int64, src\[1\] of torch.int32"),
    "too_narrow": (
        [A, A[:, :3]],
        {},
        ValueError,
        r"is \(5, 4\); src\[1\] of \(2, 3\) may .* along dimension 0",
    ),
    "other_dims": ([A, torch.ones(4, dtype=torch.int64)], {}, ValueError, r"src\[1\] of \(4,\)"),
    "scalar": ([torch.tensor(1)], {}, ValueError, r"src\[0\] of \(\)"),
    "list_segment": ([A, [[1, 2, 3, 4]]], {}, TypeError, r"src\[1\] must be a torch.Tensor or a NumPy array, not list"),
    "no_sequence": (A, {}, TypeError, "without an index, src is a list or tuple of tensors, not Tensor"),
    "bad_dim": ([A], {"dim": 2}, IndexError, "dim 2 is out of range"),
    "no_int_dim": ([A], {"dim": "0"}, TypeError, "dim is an int"),
    "meta_segment": ([A, B.to("meta")], {}, ValueError, r"src\[1\] is on meta"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", BAD)
def test_bad_segments_raise_and_change_nothing(rig, name):
    """Case 31."""
    segments, options, error, match = BAD[name]
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    version = dst._version
    with rig.unchanged(pool), pytest.raises(error, match=match):
        pinstage.copy_rows_(dst, segments, pool=pool, **options)
    assert dst._version == version
    rig.expect(dst, 7)


@pytest.mark.both
def test_segment_on_the_device_is_refused(rig):
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    with rig.unchanged(pool), pytest.raises(ValueError, match=r"src\[1\] is on .* in device memory"):
        pinstage.copy_rows_(dst, [A, rig.filled((1, 4), torch.int64, 1)], pool=pool)


@pytest.mark.both
def test_capture_is_refused(rig):
    dst, pool, counter = rig.filled((5, 4), torch.int64, 7), rig.pool(), rig.filled((), torch.int64, 0)
    with rig.unchanged(pool), rig.capture():
        rig.launch(lambda: counter.add_(1))
        with pytest.raises(pinstage.CaptureError):
            pinstage.copy_rows_(dst, [A, B], pool=pool)
