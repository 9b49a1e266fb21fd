# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Every kind of copy that torch takes or refuses, with torch's own `copy_` as the oracle.

Each cell of a table makes the same destination twice. torch writes one, waiting for it; `pinstage.copy_` writes the
other, whose copies read their source as late as can be, and the source is overwritten as soon as the call returns. Then
every byte of the destination's memory must be equal, the version counter must have moved as far, and a cell that torch
refuses must raise the same type of error and leave the pool as it was.

No test here has a control by lying queries: the snapshot is raced in test_copy.py; here it only must have been made.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings

import numpy as np
import pytest
import torch

import pinstage

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
PLAIN = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.complex64]

CONVERTED = [(torch.int32, torch.int64), (torch.int64, torch.int32), (torch.float32, torch.bfloat16),
             (torch.float64, torch.float32), (torch.complex64, torch.float32), (torch.float32, torch.complex64),
             (torch.int64, torch.bool)]  # fmt: skip


def elements(shape, dtype):
    """A tensor of distinct, small values where the dtype has them, else of distinct bytes."""
    count = math.prod(shape)
    if dtype in QUANTIZED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # deprecated
            return torch._empty_affine_quantized(shape, scale=0.5, zero_point=1, dtype=dtype)
    values = torch.arange(count).remainder(100)
    if dtype.is_complex:
        values = torch.complex(values.float(), values.flip(0).float())
    try:
        return values.to(dtype).reshape(shape)
    except (RuntimeError, TypeError):
        return torch.arange(count * dtype.itemsize).remainder(200).to(torch.uint8).view(dtype).reshape(shape)


def attempt(call):
    """The error that `call` raises, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex to real, and what is experimental
        try:
            call()
        except Exception as error:
            return error
    return None


def raw(tensor):
    """The bytes of a contiguous tensor."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def equal(ours, theirs):
    """The bytes, or the values: torch's own copy of a negated zero is 0.0 or -0.0, depending on layout and device."""
    if torch.equal(raw(ours), raw(theirs)):
        return True
    wide = torch.complex128 if ours.is_complex() else torch.float64
    signed_zeros = ours.is_complex() or ours.is_floating_point()
    return signed_zeros and torch.equal(ours.cpu().to(wide), theirs.cpu().to(wide))


def changes(before, after):
    before, after = dataclasses.asdict(before), dataclasses.asdict(after)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


class Matrix:
    """Compares pinstage with torch, cell by cell, and tells all that differ at once."""

    def __init__(self, rig, pool):
        self.rig = rig
        self.pool = pool
        pinstage.copy_(rig.empty((4, 16)).t(), torch.zeros(16, 4), pool=pool)  # the device has its first events
        rig.synchronize()
        self.copied = self.refused = 0
        self.wrong = []

    def memory(self, shape, dtype, *, simulated):
        """Device memory of known bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self.rig.empty(nbytes, torch.uint8) if simulated else torch.empty(nbytes, dtype=torch.uint8)
        memory.fill_(0xA5)
        self.rig.synchronize()
        return memory.view(dtype).view(shape)

    def cell(self, name, dst_shape, dst_dtype, dst_view, source):
        """`source()` makes the source afresh: what to copy, and the memory to overwrite after the call (or None)."""
        # A simulated device's memory is the host's: torch writes ordinary memory there.
        theirs = self.memory(dst_shape, dst_dtype, simulated=not self.rig.simulated)
        ours = self.memory(dst_shape, dst_dtype, simulated=True)
        versions = theirs._version, ours._version
        data, _ = source()
        data = data if isinstance(data, torch.Tensor) else native(data)
        if isinstance(data, torch.Tensor) and data.dtype != dst_dtype:
            # To a GPU torch casts the values of a negated or conjugated source, then negates or conjugates them again.
            data = data.resolve_conj().resolve_neg()
        their_error = attempt(lambda: dst_view(theirs).copy_(data))
        data, memory = source()
        self.pool.reclaim()  # so that what follows may only fail to free, or create
        dst, before, result = dst_view(ours), self.pool.stats(), []
        our_error = attempt(lambda: result.append(pinstage.copy_(dst, data, pool=self.pool)))
        after = self.pool.stats()
        if memory is not None:
            memory.untyped_storage().fill_(0x5A)
        self.rig.synchronize()
        if type(our_error) is not type(their_error):
            self.wrong.append(f"{name}: {our_error!r} where torch has {their_error!r}")
        elif our_error is not None:
            if bool((raw(ours) != 0xA5).any()):
                self.wrong.append(f"{name}: an error, yet dst was written")
            if after != before:
                self.wrong.append(f"{name}: an error changed the pool: {changes(before, after)}")
        elif not equal(ours, theirs):
            self.wrong.append(f"{name}: other bytes than torch's")
        elif result[0] is not dst:
            self.wrong.append(f"{name}: did not return dst")
        elif ours._version - versions[1] != theirs._version - versions[0]:
            self.wrong.append(f"{name}: version {ours._version - versions[1]}, not {theirs._version - versions[0]}")
        self.copied += our_error is None
        self.refused += our_error is not None

    def finish(self):
        self.rig.synchronize()
        self.pool.reclaim()
        stats = self.pool.stats()
        assert self.pool._consistent()
        assert stats.free_bytes == stats.capacity_bytes, "a slot was lost"
        assert not self.wrong, f"{len(self.wrong)} cells:\n" + "\n".join(self.wrong)


def native(data):
    """What torch itself copies for a NumPy array."""
    if not isinstance(data, (np.ndarray, np.generic)):
        return data
    array = np.asarray(data)
    return torch.from_numpy(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("=")).reshape(array.shape))


def same(memory):
    return memory


@pytest.fixture
def matrix(rig):
    matrix = Matrix(rig, rig.pool())
    yield matrix
    matrix.finish()


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.both
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("src_dtype", DTYPES, ids=str)
def test_every_pair_of_dtypes_is_copied_or_refused_as_torch_does(matrix, src_dtype):
    for dst_dtype in DTYPES:
        if dst_dtype in QUANTIZED:
            continue  # no memory of ours holds them; see below
        for name, dst_view in {"dense": same, "transposed": lambda b: b.t()}.items():
            matrix.cell(
                f"{src_dtype} -> {dst_dtype}, {name}",
                (6, 6), dst_dtype, dst_view,
                lambda: (elements((6, 6), src_dtype),) * 2,
            )  # fmt: skip
    assert matrix.copied + matrix.refused == 2 * (len(DTYPES) - len(QUANTIZED))


@pytest.mark.both
@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_quantized_destinations_on_the_host_are_torchs(rig, dtype):
    source = torch.linspace(0, 3, 8)
    theirs, ours = elements((8,), dtype), elements((8,), dtype)
    errors = [attempt(lambda: theirs.copy_(source)), attempt(lambda: pinstage.copy_(ours, source))]
    assert type(errors[0]) is type(errors[1])
    if errors[0] is None:
        assert torch.equal(ours.int_repr(), theirs.int_repr())


# --- layouts ----------------------------------------------------------------------------------------------------------

# name: shape of the memory and the view of it. (A destination that overlaps itself is in test_copy.py: which of the
# values for one element wins is undefined.)
SHAPE = (2, 3, 4, 6)
DST_LAYOUTS = {
    "contiguous": (SHAPE, same),
    "offset": ((3, 3, 4, 6), lambda b: b[1:]),
    "pitched": ((2, 3, 4, 9), lambda b: b[..., 2:8]),
    "pitched rows": ((2, 3, 7, 6), lambda b: b[:, :, 1:5]),
    "plane": ((2, 3, 2, 4, 6), lambda b: b[:, :, 1]),
    "step": ((2, 3, 4, 12), lambda b: b[..., ::2]),
    "every second row": ((2, 3, 8, 6), lambda b: b[:, :, ::2]),
    "transposed": ((2, 3, 6, 4), lambda b: b.transpose(2, 3)),
    "permuted": ((4, 2, 6, 3), lambda b: b.permute(1, 3, 0, 2)),
    "channels last": ((2, 4, 6, 3), lambda b: b.permute(0, 3, 1, 2)),
    "reversed dims": ((6, 4, 3, 2), lambda b: b.permute(3, 2, 1, 0)),
    "expanded": ((2, 3, 4, 1), lambda b: b.expand(SHAPE)),
    "expanded rows": ((1, 3, 4, 6), lambda b: b.expand(SHAPE)),
    "fewer dims": ((6,), same),
    "no elements": ((2, 3, 0, 6), same),
    "scalar": ((), same),
    "ones with odd strides": ((2, 3, 4, 6), lambda b: b.as_strided((2, 1, 3, 1, 4, 6), (72, 7, 24, 5, 6, 1))),
    "nine dims": (SHAPE, lambda b: b.reshape(2, 3, 2, 2, 1, 1, 1, 2, 3)),
    "conjugated": (SHAPE, lambda b: b.conj() if b.is_complex() else b),
    "negated": (SHAPE, lambda b: torch._neg_view(b) if b.dtype != torch.bool else b),
}
SRC_LAYOUTS = {
    **{name: layout for name, layout in DST_LAYOUTS.items() if name != "fewer dims"},
    "row": ((6,), same),
    "rows": ((4, 6), same),
    "column": ((4, 1), same),
    "column of a table": ((4, 9), lambda b: b[:, 3:4]),
    "slices": ((2, 1, 4, 1), same),
    "one element": ((1, 1), same),
    "strided row": ((12,), lambda b: b[::2]),
    "expanded plane": ((4, 6), lambda b: b.expand(SHAPE)),
    "overlapping": ((2, 3, 40), lambda b: b.as_strided(SHAPE, (120, 40, 1, 1))),
    "window": ((20,), lambda b: b.unfold(0, 6, 2)[:4]),
    "too long": ((7,), same),
    "more dims": ((1, *SHAPE), same),
    "other shape": ((3, 2, 4, 6), same),
}


@pytest.mark.both
@pytest.mark.parametrize("dtypes", [(dtype, dtype) for dtype in PLAIN] + CONVERTED,
                         ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))  # fmt: skip
def test_every_layout_is_copied_or_refused_as_torch_does(matrix, dtypes):
    for src_name, (src_shape, src_view) in SRC_LAYOUTS.items():

        def source(shape=src_shape, view=src_view):
            memory = elements(shape, dtypes[0])
            return view(memory), memory

        for dst_name, (dst_shape, dst_view) in DST_LAYOUTS.items():
            matrix.cell(f"{src_name} -> {dst_name}", dst_shape, dtypes[1], dst_view, source)
    assert matrix.copied > 250
    assert matrix.refused > 100


def random_view(dice, memory_of, ndim, longest):
    """Memory of random dimensions and a view of it: dimensions permuted, cut, stepped over or repeated."""
    sizes = [dice.choice((1, 1, 2, 3, 4, dice.randint(1, longest))) for _ in range(ndim)]
    memory = memory_of(sizes)
    view = memory
    for dim in range(ndim):
        choice = dice.random()
        if choice < 0.25:
            start = dice.randrange(sizes[dim])
            view = view.narrow(dim, start, dice.randint(1, sizes[dim] - start))
        elif choice < 0.4:
            index = [slice(None)] * ndim
            index[dim] = slice(None, None, dice.randint(2, 3))
            view = view[tuple(index)]
        elif choice < 0.5:
            view = view.select(dim, 0).unsqueeze(dim)
    order = list(range(ndim))
    if dice.random() < 0.5:
        dice.shuffle(order)
    return memory, view.permute(order)


@pytest.mark.both
@pytest.mark.parametrize("seed", range(6))
def test_random_views_are_copied_as_torch_does(matrix, seed):
    dice = random.Random(seed)
    for i in range(100):
        dtype = dice.choice((torch.uint8, torch.int16, torch.int32, torch.float32, torch.int64, torch.complex128))
        dst_dtype = dtype if dice.random() < 0.8 else torch.int32
        ndim, longest, state = dice.randint(0, 5), dice.choice((5, 40)), dice.getrandbits(32)

        def make(memory_of, ndim=ndim, longest=longest, state=state):
            return random_view(random.Random(state), memory_of, ndim, longest)

        def source(dtype=dtype, make=make, state=state):
            again = random.Random(state + 1)
            memory, view = make(lambda sizes: elements(sizes, dtype))
            for dim in range(view.dim()):
                if again.random() < 0.2:
                    view = view.narrow(dim, 0, 1)  # is broadcast
            return view, memory

        memory, view = make(torch.empty)
        dense, shape = dice.random() < 0.5, tuple(view.shape)
        matrix.cell(
            f"seed {seed}, case {i}: {shape} {dtype} -> {dst_dtype}",
            shape if dense else tuple(memory.shape),
            dst_dtype,
            same if dense else lambda memory, make=make: make(lambda _: memory)[1],
            source,
        )
    assert matrix.copied > 90


@pytest.mark.both
@pytest.mark.parametrize("threads", [1, 2])
def test_large_strided_sources_are_copied_as_torch_does(matrix, threads):
    """Large enough for the worker threads."""
    pinstage.set_num_threads(threads)
    try:
        for name, (shape, view) in {
            "plane": ((8, 64, 2, 2050), lambda b: b[:, :, 0]),
            "rows": ((1024, 1100), lambda b: b[:, 3:1030]),
            "short rows": ((60000, 24), lambda b: b[:, 1:18]),
            "one long row": ((2, 1 << 20), lambda b: b[1:]),
            "transposed": ((700, 1000), lambda b: b.t()),
            "row": ((4, 1, 600_000), lambda b: b[:1].expand(2, 3, 600_000)),
        }.items():
            for dtypes in ((torch.int32, torch.int32), (torch.int32, torch.int64), (torch.uint8, torch.uint8)):

                def source(shape=shape, view=view, dtype=dtypes[0]):
                    memory = elements(shape, dtype)
                    return view(memory), memory

                matrix.cell(f"{name}, {dtypes}", tuple(view(torch.empty(shape)).shape), dtypes[1], same, source)
    finally:
        pinstage.set_num_threads(0)
    assert matrix.refused == 0


@pytest.mark.both
@pytest.mark.parametrize("max_bytes", [256, 4096])
def test_sources_larger_than_the_pool_are_copied_in_pieces_as_torch_does(rig, max_bytes):
    """Small pieces, which begin and end anywhere in a row."""
    matrix = Matrix(rig, rig.pool(max_bytes=max_bytes, initial_bytes=256))
    for dtypes in ((torch.int32, torch.int32), (torch.int32, torch.int64), (torch.int64, torch.int32),
                   (torch.float32, torch.bfloat16), (torch.complex128, torch.complex128)):  # fmt: skip
        for name, (shape, view) in {
            "dense": ((4, 1600), same),
            "plane": ((4, 5, 2, 333), lambda b: b[:, :, 0]),
            "rows": ((40, 77), lambda b: b[:, 3:70]),
            "transposed": ((41, 53), lambda b: b.t()),
            "row": ((1, 1500), lambda b: b.expand(4, 1500)),
            "one more dimension": ((3000,), lambda b: b[None, None]),
        }.items():

            def source(shape=shape, view=view, dtype=dtypes[0]):
                memory = elements(shape, dtype)
                return view(memory), memory

            matrix.cell(f"{name}, {dtypes}", tuple(view(torch.empty(shape)).shape), dtypes[1], same, source)
    assert matrix.refused == 0
    matrix.finish()


# --- other kinds of source --------------------------------------------------------------------------------------------


def read_only(array):
    array.flags.writeable = False
    return array


# What NumPy has and torch has not: each is copied as the same values in a form that torch has.
ARRAYS = {
    **{name: lambda name=name: np.arange(24).astype(name).reshape(4, 6) for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
        "float64", "complex64", "complex128", ">i2", ">i4", ">u8", ">f4", ">f8", ">c8", "<f4")},
    "read-only": lambda: read_only(np.arange(24.0).reshape(4, 6)),
    "reversed": lambda: np.arange(24.0).reshape(4, 6)[::-1, ::-1],
    "reversed big-endian": lambda: np.arange(24).astype(">i4").reshape(4, 6)[::-1],
    "transposed": lambda: np.arange(24.0).reshape(6, 4).T,
    "strided": lambda: np.arange(96.0).reshape(8, 12)[::2, ::2],
    "row": lambda: np.arange(6.0),
    "zero-dim": lambda: np.array(3.5),
    "scalar": lambda: np.float32(3.5),
    "integer scalar": lambda: np.int64(7),
    "no elements": lambda: np.zeros((0, 6)),
    "too long": lambda: np.arange(7.0),
    "broadcast": lambda: np.broadcast_to(np.arange(6.0), (4, 6)),
    "matrix row": lambda: np.arange(24.0).reshape(4, 6)[1:2],
    "memory-mapped order": lambda: np.asfortranarray(np.arange(24.0).reshape(4, 6)),
}  # fmt: skip


@pytest.mark.both
@pytest.mark.parametrize("name", ARRAYS)
def test_every_numpy_array_is_copied_as_its_values(matrix, name):
    def source():
        array = ARRAYS[name]()
        if (
            array.flags.writeable
            and isinstance(array, np.ndarray)
            and array.dtype.isnative
            and min(array.strides, default=0) >= 0
        ):
            return array, torch.from_numpy(array)
        return array, None

    for dst_dtype in (torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64):
        for view in (same, lambda b: b.t().reshape(4, 6).t().t(), lambda b: b.as_strided((4, 6), (1, 4))):
            matrix.cell(f"{name} -> {dst_dtype}", (4, 6), dst_dtype, view, source)


NUMBERS = [3, -1, True, 2.5, math.inf, 1 + 2j, 2**40, np.float64(0.5)]


@pytest.mark.both
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_python_numbers_fill_as_torch_lets_them(matrix, number):
    for dst_dtype in (torch.float32, torch.int64, torch.complex64, torch.float64):
        if number is math.inf and not dst_dtype.is_floating_point:
            continue  # undefined in C++
        for shape, view in (((), same), ((4, 6), same), ((4, 6), lambda b: b.t()), ((4, 6), lambda b: b[:, 1:3])):
            matrix.cell(f"{number} -> {dst_dtype}", shape, dst_dtype, view, lambda: (number, None))
    assert matrix.refused == 0


@pytest.mark.both
@pytest.mark.parametrize("source", [[1, 2], "text", None, object(), np.array(["a"]), np.array([None])], ids=repr)
def test_what_is_no_tensor_is_refused_as_torch_refuses_it(rig, source):
    pool, dst = rig.pool(), rig.filled(2, torch.float32, 7)
    with rig.unchanged(pool), pytest.raises(TypeError):
        pinstage.copy_(dst, source, pool=pool)
    with pytest.raises(TypeError):
        pinstage.copy_(source, dst, pool=pool)
    rig.expect(dst, 7)
