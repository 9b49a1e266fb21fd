# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`copy_rows_` without an index: many pieces, one after the other, as the block lists of a batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import pinstage


def ragged(lengths, dtype=torch.int32, row=()):
    """Pieces of these lengths, no two elements alike."""
    values = torch.arange(sum(lengths) * max(int(np.prod(row)), 1), dtype=torch.int64).to(dtype)
    return [piece.clone() for piece in values.view(-1, *row).split(lengths)]


@pytest.mark.raced
def test_pieces_may_be_written_as_soon_as_the_call_returns(rig):
    """Case 1, with pieces."""
    dice = random.Random(7)
    pool, pieces = rig.pool(), ragged([dice.randrange(1, 300) for _ in range(40)])
    total = sum(map(len, pieces))
    dsts, expected = [rig.filled(total, torch.int32, -1) for _ in range(2)], []
    with rig.stream(), rig.gate():
        for dst in dsts:
            expected.append(torch.cat(pieces))
            assert pinstage.copy_rows_(dst, pieces, pool=pool) is dst
            for piece in pieces:
                piece.add_(100_000)
    for dst, values in zip(dsts, expected, strict=True):
        rig.expect(dst, values)


@pytest.mark.both  # no control: one copy each, whose slot nobody is after
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 3, 0, 5, 0], [7] * 300, [1, 20_000, 1], [600_000, 5]])
@pytest.mark.parametrize("row", [(), (3,), (2, 5)])
def test_elements_past_the_pieces_are_left_alone(rig, lengths, row):
    pieces = ragged(lengths, row=row) if sum(lengths) else [torch.empty(0, *row, dtype=torch.int32) for _ in lengths]
    total = sum(lengths)
    dst = rig.filled((total + 11, *row), torch.int32, -1)
    pinstage.copy_rows_(dst, pieces)
    host = torch.full((total + 11, *row), -1, dtype=torch.int32)
    if pieces:
        host[:total] = torch.cat(pieces)
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
def test_pieces_of_any_layout_give_what_cat_gives(rig, name):
    pieces = VIEWS[name]()
    expected = torch.cat([torch.as_tensor(piece) for piece in pieces])
    dst = rig.filled(tuple(expected.shape), torch.int32, -1)
    pinstage.copy_rows_(dst, pieces)
    rig.expect(dst, expected)


@pytest.mark.both
@pytest.mark.parametrize("dim", [1, -1])
def test_pieces_follow_one_another_along_any_dimension(rig, dim):
    pieces = [torch.ones(4, 3, dtype=torch.int32), torch.full((4, 2), 2, dtype=torch.int32)]
    dst = rig.filled((4, 6), torch.int32, -1)
    pinstage.copy_rows_(dst, pieces, dim=dim)
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
def test_pieces_of_any_dtype(rig, dtype):
    pieces = [torch.tensor([1, 0, 1]).to(dtype), torch.tensor([0, 1]).to(dtype)]
    dst = rig.filled(5, dtype, 0)
    pinstage.copy_rows_(dst, pieces)
    rig.expect(dst, torch.cat(pieces))


def test_pieces_go_to_one_slot_by_one_copy(dev):
    pool, dst = pinstage.StagingPool(dev), dev.empty((5000,), torch.int32)
    pinstage.copy_rows_(dst, ragged([3] * 1000), pool=pool)
    assert (dev.calls["cuMemcpyHtoDAsync"], dev.calls["cuEventRecord"]) == (1, 1)


def test_pieces_go_to_host_tensors_too():
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
    "too_many": ([A, B, A, A], {}, ValueError, "the 4 pieces have 7 rows, the destination 5"),
    "other_dtype": ([A, B.int()], {}, ValueError, r"the destination is of torch.int64, src\[1\] of torch.int32"),
    "too_narrow": (
        [A, A[:, :3]],
        {},
        ValueError,
        r"is \(5, 4\); src\[1\] of \(2, 3\) may .* along dimension 0",
    ),
    "other_dims": ([A, torch.ones(4, dtype=torch.int64)], {}, ValueError, r"src\[1\] of \(4,\)"),
    "scalar": ([torch.tensor(1)], {}, ValueError, r"src\[0\] of \(\)"),
    "list_piece": ([A, [[1, 2, 3, 4]]], {}, TypeError, r"src\[1\] must be a torch.Tensor or a NumPy array, not list"),
    "no_sequence": (A, {}, TypeError, "without an index, src is a list or tuple of tensors, not Tensor"),
    "bad_dim": ([A], {"dim": 2}, IndexError, "dim 2 is out of range"),
    "no_int_dim": ([A], {"dim": "0"}, TypeError, "dim is an int"),
    "meta_piece": ([A, B.to("meta")], {}, ValueError, r"src\[1\] is on meta"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", BAD)
def test_bad_pieces_raise_and_change_nothing(rig, name):
    """Case 31."""
    pieces, options, error, match = BAD[name]
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    version = dst._version
    with rig.unchanged(pool), pytest.raises(error, match=match):
        pinstage.copy_rows_(dst, pieces, pool=pool, **options)
    assert dst._version == version
    rig.expect(dst, 7)


@pytest.mark.both
def test_piece_on_the_device_is_refused(rig):
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    with rig.unchanged(pool), pytest.raises(ValueError, match=r"src\[1\] is on .* in device memory"):
        pinstage.copy_rows_(dst, [A, rig.filled((1, 4), torch.int64, 1)], pool=pool)


@pytest.mark.both
def test_capture_is_refused(rig):
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    with rig.unchanged(pool), rig.capture(), pytest.raises(pinstage.CaptureError):
        pinstage.copy_rows_(dst, [A, B], pool=pool)
