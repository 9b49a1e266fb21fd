# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`gather_rows` against `torch.index_select`. Host only and synchronous: no race, hence no controls."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import pinstage

FILLER = 0x5A
ROW_BYTES = [1, 2, 3, 4, 7, 8, 16, 31, 32, 46 * 2, 64, 100, 128, 255, 256, 257, 576, 584, 4096, 4097, 20_000]


def table(shape, dtype=torch.int64):
    values = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    return values.to(dtype) if not dtype.is_complex else torch.complex(values.float(), -values.float()).to(dtype)


@pytest.mark.parametrize("row", ROW_BYTES)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_exact_and_nothing_past_them_is_written(row, offset, index_dtype):
    """Case 29: any row size, odd base addresses."""
    dice = random.Random(row * 10 + offset)
    rows, count = 50, 37
    base = torch.randint(0, 256, (offset + rows * row,), dtype=torch.uint8, generator=torch.manual_seed(row))
    src = base[offset:].view(rows, row)
    index = torch.tensor([dice.randrange(rows) for _ in range(count)], dtype=index_dtype)
    around = torch.full((256 + offset + count * row + 256,), FILLER, dtype=torch.uint8)
    out = around[256 + offset : -256].view(count, row)
    assert pinstage.gather_rows(src, index, out=out) is out
    assert torch.equal(out, src[index.long()])
    assert (around[: 256 + offset] == FILLER).all()
    assert (around[-256:] == FILLER).all()


@pytest.mark.parametrize("megabytes", [8, 40])
def test_large_outputs_are_exact(megabytes):
    """Case 29: these take the streaming kernels."""
    src = table((1000, 512), torch.int32)
    index = torch.randint(0, 1000, (megabytes * 512,), generator=torch.manual_seed(megabytes))
    assert torch.equal(pinstage.gather_rows(src, index), src[index])


VIEWS = {
    "plain": lambda: table((6, 5, 4, 3)),
    "pitched": lambda: table((6, 5, 4, 8))[..., :3],
    "every_second": lambda: table((12, 10, 4, 3))[::2, ::2],
    "transposed": lambda: table((3, 4, 5, 6)).permute(3, 2, 1, 0),
    "swapped": lambda: table((5, 6, 4, 3)).transpose(0, 1),
    "expanded": lambda: table((6, 1, 4, 3)).expand(6, 5, 4, 3),
    "expanded_rows": lambda: table((1, 5, 4, 3)).expand(6, 5, 4, 3),
    "size_one": lambda: table((6, 1, 4, 1)),
    "no_columns": lambda: table((6, 5, 4, 0)),
    "negated": lambda: torch._neg_view(table((6, 5, 4, 3))),
    "conjugated": lambda: table((6, 5, 4, 3), torch.complex64).conj(),
    "inference": lambda: inference_table((6, 5, 4, 3)),
}


def inference_table(shape):
    with torch.inference_mode():
        return table(shape)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dim", range(-4, 4))
def test_any_strides_and_dimension_give_what_index_select_gives(name, dim):
    src = VIEWS[name]()
    rows = src.shape[dim]
    for count in (0, 1, 7):
        index = torch.randint(0, max(rows, 1), (count if rows else 0,), generator=torch.manual_seed(dim + 9))
        expected = torch.index_select(src, dim, index)
        assert torch.equal(pinstage.gather_rows(src, index, dim=dim), expected)
        strided = torch.empty((*expected.shape, 2), dtype=src.dtype)[..., 0]
        assert pinstage.gather_rows(src, index, dim=dim, out=strided) is strided
        assert torch.equal(strided, expected)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.uint16, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    ],
)  # fmt: skip
def test_every_dtype(dtype):
    src = table((9, 5), dtype)
    assert torch.equal(pinstage.gather_rows(src, [8, 0, 8]), src[[8, 0, 8]])


INDICES = {
    "list": [3, 0, 3],
    "tuple": (3, 0, 3),
    "range": range(1, 4),
    "int32": torch.tensor([3, 0, 3], dtype=torch.int32),
    "int64": torch.tensor([3, 0, 3]),
    "strided": torch.tensor([3, 9, 0, 9, 3, 9], dtype=torch.int32)[::2],
    "expanded": torch.tensor([2]).expand(5),
    "numpy32": np.array([3, 0, 3], dtype=np.int32),
    "numpy64": np.array([3, 0, 3]),
    "numpy_reversed": np.array([3, 0, 1])[::-1],
    "numpy_big_endian": np.array([3, 0, 1], dtype=">i8"),
    "empty_list": [],
    "empty_tensor": torch.empty(0, dtype=torch.int32),
}


@pytest.mark.parametrize("name", INDICES)
def test_every_form_of_an_index(name):
    index, src = INDICES[name], table((4, 6))
    expected = [src[int(i)].tolist() for i in index]
    assert pinstage.gather_rows(src, index).tolist() == expected
    assert pinstage.gather_rows(src.numpy(), index).tolist() == expected


def test_one_dimensional_table_has_rows_of_one_element():
    assert pinstage.gather_rows(torch.tensor([5, 6, 7]), [2, 2, 0]).tolist() == [7, 7, 5]


@pytest.mark.slow
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("power", [31, 32])
def test_row_offsets_beyond_32_bits(index_dtype, power):
    """Case 30, over memory that is never touched but for three rows."""
    row = 1 << 12
    rows = (1 << power) // row + 2
    src = torch.empty(rows * row, dtype=torch.uint8).view(rows, row)
    marked = [0, rows - 2, rows - 1]
    for value, at in enumerate(marked):
        src[at] = value + 1
    out = pinstage.gather_rows(src, torch.tensor(marked[::-1], dtype=index_dtype))
    assert [out[i].unique().tolist() for i in range(3)] == [[3], [2], [1]]


def test_version_counter_of_out_moves():
    out = torch.empty(2, 3)
    before = out._version
    pinstage.gather_rows(torch.ones(4, 3), [0, 1], out=out)
    assert out._version == before + 1


# --- bad input: nothing is written ------------------------------------------------------------------------------------

SRC, OUT = table((10, 4)), torch.zeros((3, 4), dtype=torch.int64)
POOL = torch.zeros(100, dtype=torch.int64)
BAD = {
    "past_the_end": (SRC, [1, 2, 10], {}, IndexError, r"index 10 at position 2 is out of range for 10 rows"),
    "negative": (SRC, [0, -1, 99], {}, IndexError, r"index -1 at position 1 is out of range for 10 rows"),
    "int32_negative": (SRC, torch.tensor([0, -3], dtype=torch.int32), {}, IndexError, "index -3 at position 1"),
    "least_int32": (
        SRC,
        torch.tensor([-(2**31)], dtype=torch.int32),
        {},
        IndexError,
        "index -2147483648 at position 0",
    ),
    "greatest_int64": (SRC, torch.tensor([2**63 - 1]), {}, IndexError, "index 9223372036854775807 at position 0"),
    "late_in_a_long_index": (SRC, [0] * 1000 + [10] + [0] * 50, {}, IndexError, "index 10 at position 1000"),
    "strided_index": (SRC, torch.tensor([0, 99, 77, 99])[::2], {}, IndexError, "index 77 at position 1"),
    "empty_table": (table((0, 4)), [0], {}, IndexError, "index 0 at position 0 is out of range for 0 rows"),
    "general_path": (SRC.t(), [4], {}, IndexError, "index 4 at position 0 is out of range for 4 rows"),
    "float_index": (SRC, [0.5], {}, TypeError, "int32 or int64, not torch.float32"),
    "bool_index": (SRC, torch.ones(10, dtype=torch.bool), {}, TypeError, "int32 or int64, not torch.bool"),
    "int16_index": (SRC, np.array([1], dtype=np.int16), {}, TypeError, "int32 or int64, not torch.int16"),
    "no_index": (SRC, None, {}, TypeError, "index must be a torch.Tensor or a NumPy array, not NoneType"),
    "two_dim_index": (SRC, [[0, 1]], {}, ValueError, "one-dimensional"),
    "scalar_index": (SRC, torch.tensor(1), {}, ValueError, "one-dimensional"),
    "dim_too_large": (SRC, [0], {"dim": 2}, IndexError, "dim 2 is out of range for a table of 2 dimensions"),
    "dim_too_small": (SRC, [0], {"dim": -3}, IndexError, "dim -3 is out of range for a table of 2 dimensions"),
    "dim_no_int": (SRC, [0], {"dim": 1.5}, TypeError, "dim"),
    "zero_dim_table": (torch.tensor(1), [0], {}, IndexError, "table of 0 dimensions"),
    "table_of_lists": ([[1, 2]], [0], {}, TypeError, "src must be a torch.Tensor or a NumPy array, not list"),
    "out_too_small": (SRC, [0, 1, 2, 3], {"out": OUT}, ValueError, r"\(3, 4\); 4 rows of \(10, 4\) .* need \(4, 4\)"),
    "out_too_large": (SRC, [0, 1], {"out": OUT}, ValueError, r"need \(2, 4\)"),
    "out_of_other_dtype": (SRC, [0, 1, 2], {"out": OUT.int()}, ValueError, "of torch.int32, the table of torch.int64"),
    "out_of_other_width": (SRC[:, :3], [0, 1, 2], {"out": OUT}, ValueError, r"need \(3, 3\)"),
    "out_is_src": (SRC, [0, 1, 2], {"out": SRC[:3]}, ValueError, "out overlaps src"),
    "out_in_src": (POOL[:40].view(10, 4), [0, 1], {"out": POOL[36:44].view(2, 4)}, ValueError, "out overlaps src"),
    "out_in_src_strided": (SRC, [0, 1], {"dim": 1, "out": SRC[:, :2]}, ValueError, "out overlaps src"),
    "out_over_index": (SRC[:, :1], POOL[:3], {"out": POOL[2:5].view(3, 1)}, ValueError, "overlaps"),
    "out_over_index_strided": (SRC[:, :2], POOL[:3], {"out": POOL[:12].view(3, 4)[:, ::2]}, ValueError, "overlaps"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_writes_nothing(name):
    """Case 31."""
    src, index, options, error, match = BAD[name]
    written = options.get("out")
    before = None if written is None else written.clone()
    with pytest.raises(error, match=match):
        pinstage.gather_rows(src, index, **options)
    assert written is None or torch.equal(written, before)


def test_out_that_only_shares_a_storage_is_no_overlap():
    both = torch.arange(40).view(10, 4)
    pinstage.gather_rows(both[:5], [4, 3, 2, 1, 0], out=both[5:])
    assert torch.equal(both[5:], both[:5].flip(0))


def test_device_tables_and_outputs_are_refused(dev):
    with pytest.raises(ValueError, match="gathered on the host"):
        pinstage.gather_rows(torch.zeros(3, 2, device="meta"), [0])
    with pytest.raises(ValueError, match="see copy_rows_"):
        pinstage.gather_rows(torch.zeros(3, 2), [0], out=torch.zeros(1, 2, device="meta"))
