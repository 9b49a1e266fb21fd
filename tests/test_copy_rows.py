# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`copy_rows_`: rows of a host table, gathered straight into a slot."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import pinstage


def table(shape, dtype=torch.int64):
    return torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape).to(dtype)


@pytest.mark.raced
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("index_form", ["int32", "int64", "list", "numpy"])
def test_table_and_index_may_be_written_as_soon_as_the_call_returns(rig, dim, index_form):
    """Case 1, with rows."""
    src = table((8, 9, 70), torch.int32)
    originals = src.clone(), src.clone() + 1000
    rows = [3, 0, 3, 7, 5]
    index = {
        "int32": torch.tensor(rows, dtype=torch.int32),
        "int64": torch.tensor(rows),
        "list": list(rows),
        "numpy": np.array(rows),
    }[index_form]
    expected = [original.index_select(dim, torch.tensor(rows)) for original in originals]
    dsts = [rig.filled(tuple(expected[0].shape), torch.int32, -1) for _ in range(2)]
    pool = rig.pool()
    with rig.stream(), rig.gate():
        for original, dst in zip(originals, dsts, strict=True):
            src.copy_(original)
            index[:] = rows if not isinstance(index, torch.Tensor) else torch.tensor(rows)
            assert pinstage.copy_rows_(dst, src, index, dim=dim, pool=pool) is dst
            src.fill_(-5)
            index[0] = 1
    for dst, rows_of in zip(dsts, expected, strict=True):
        rig.expect(dst, rows_of)


@pytest.mark.raced
@pytest.mark.parametrize("row", [1, 3, 46 * 2, 100, 576, 584])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_are_exact_and_nothing_past_them_is_written(rig, row, offset):
    """Case 29."""
    dice = random.Random(row)
    src = torch.randint(0, 200, (offset + 40 * row,), dtype=torch.uint8, generator=torch.manual_seed(row))
    src = src[offset:].view(40, row)
    arenas = [rig.filled(offset + 30 * row + 64, torch.uint8, 255) for _ in range(2)]
    pool, expected = rig.pool(), []
    with rig.stream(), rig.gate():
        for step, arena in enumerate(arenas):
            index = [dice.randrange(40) for _ in range(30)]
            dst = arena[offset : offset + 30 * row].view(30, row)
            pinstage.copy_rows_(dst, src.add_(step), index, pool=pool)
            expected.append(src[index].flatten())
        src.fill_(0)
    for arena, rows in zip(arenas, expected, strict=True):
        rig.expect(arena[offset : offset + 30 * row], rows)
        rig.expect(arena[offset + 30 * row :], 255)
        rig.expect(arena[:offset], 255)


VIEWS = {
    "plain": (lambda: table((6, 5, 40)), lambda b: b),
    "strided_src": (lambda: table((6, 5, 80))[..., ::2], lambda b: b),
    "transposed_src": (lambda: table((40, 5, 6)).permute(2, 1, 0), lambda b: b),
    "expanded_src": (lambda: table((6, 1, 40)).expand(6, 5, 40), lambda b: b),
    "numpy_src": (lambda: table((6, 5, 40)).numpy(), lambda b: b),
    "read_only_src": (lambda: np.broadcast_to(table((6, 1, 40)).numpy(), (6, 5, 40)), lambda b: b),
    "reversed_src": (lambda: table((6, 5, 40)).numpy()[::-1], lambda b: b),
    "negated_src": (lambda: torch._neg_view(table((6, 5, 40))), lambda b: b),
    "strided_dst": (lambda: table((6, 5, 40)), lambda b: b.transpose(0, 2).contiguous().transpose(0, 2)),
    "complex": (lambda: table((6, 5, 40), torch.complex64).conj(), lambda b: b),
    "half": (lambda: table((6, 5, 40), torch.float16), lambda b: b),
}


@pytest.mark.both  # no control: one copy each, whose slot nobody is after
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 5, 60])
def test_any_table_gives_what_index_select_gives(rig, name, dim, count):
    make, view = VIEWS[name]
    src = make()
    plain = torch.from_numpy(src.copy()) if isinstance(src, np.ndarray) else src
    index = torch.randint(0, plain.shape[dim], (count,), generator=torch.manual_seed(count))
    expected = plain.index_select(dim, index)
    shape = list(expected.shape)
    shape[dim] += 3  # rows past the index are left alone
    dst = view(rig.filled(tuple(shape), plain.dtype, 7))
    host = torch.full(shape, 7, dtype=plain.dtype)
    host.narrow(dim, 0, count).copy_(expected)
    pinstage.copy_rows_(dst, src, index, dim=dim)
    rig.expect(dst, host)


def test_rows_go_to_host_tensors_too():
    dst = torch.zeros(3, 2, dtype=torch.int64)
    pinstage.copy_rows_(dst, table((4, 2)), [3, 1])
    assert dst.tolist() == [[6, 7], [2, 3], [0, 0]]


@pytest.mark.both
def test_version_counter_moves_once(rig):
    dst = rig.filled((3, 64), torch.int64, 0)
    before = dst._version
    pinstage.copy_rows_(dst, table((4, 64)), [3, 1])
    assert dst._version == before + 1


def test_rows_go_from_table_to_slot_without_another_pass(dev):
    """One driver copy, one fence, whatever `dim`."""
    pool, dst = pinstage.StagingPool(dev), dev.empty((8, 5, 64), torch.int64)
    pinstage.copy_rows_(dst, table((8, 9, 64)), [1, 2, 3, 4, 5], dim=1, pool=pool)
    assert (dev.calls["cuMemcpyHtoDAsync"], dev.calls["cuEventRecord"]) == (1, 1)
    assert pool.stats().copies == 1


SRC = table((10, 4))
BAD = {
    "past_the_end": (SRC, [1, 2, 10], {}, IndexError, r"index 10 at position 2 is out of range for 10 rows"),
    "negative": (SRC, torch.tensor([0, -1]), {}, IndexError, r"index -1 at position 1 is out of range for 10 rows"),
    "late": (SRC, torch.tensor([0, 1, 77, 88], dtype=torch.int32), {}, IndexError, "index 77 at position 2"),
    "general_path": (table((4, 10)).t(), [10], {}, IndexError, "index 10 at position 0"),
    "float_index": (SRC, [0.5], {}, TypeError, "int32 or int64, not torch.float32"),
    "int8_index": (SRC, torch.tensor([1], dtype=torch.int8), {}, TypeError, "int32 or int64, not torch.int8"),
    "two_dim_index": (SRC, torch.zeros(1, 1, dtype=torch.int64), {}, ValueError, "one-dimensional"),
    "bad_dim": (SRC, [0], {"dim": 2}, IndexError, "dim 2 is out of range"),
    "dst_too_small": (SRC, [0, 1, 2, 3, 4, 5], {}, ValueError, r"is \(5, 4\); 6 rows of \(10, 4\).*need \(6, 4\)"),
    "dst_too_narrow": (table((10, 5)), [0, 1], {}, ValueError, r"need \(2, 5\) \(or more along it\)"),
    "dst_too_wide": (table((10, 3)), [0, 1], {}, ValueError, r"need \(2, 3\)"),
    "other_dims": (table((10, 4, 1)), [0, 1], {}, ValueError, r"need \(2, 4, 1\)"),
    "other_dtype": (SRC.int(), [0, 1], {}, ValueError, "of torch.int64, the table of torch.int32"),
    "list_table": ([[1, 2, 3, 4]], [0], {}, TypeError, "src must be a torch.Tensor or a NumPy array"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_changes_nothing(rig, name):
    """Case 31."""
    src, index, options, error, match = BAD[name]
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    version = dst._version
    with rig.unchanged(pool), pytest.raises(error, match=match):
        pinstage.copy_rows_(dst, src, index, pool=pool, **options)
    assert dst._version == version
    rig.expect(dst, 7)


@pytest.mark.both
def test_table_on_the_device_is_refused(rig):
    dst, pool = rig.filled((5, 4), torch.int64, 7), rig.pool()
    with rig.unchanged(pool), pytest.raises(ValueError, match=r"gathered on the host|on the device"):
        pinstage.copy_rows_(dst, rig.filled((10, 4), torch.int64, 1), [0], pool=pool)
