# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of every shape and type: the documented errors, or the right bytes, and never a crash.

Each public call gets generated arguments: shapes, strides, dtypes, indices, sizes near limits, objects of wrong types.
Whatever comes out, the pool's books balance; what is refused changed nothing; what is accepted is what torch makes of
it. Each test takes PINSTAGE_FUZZ_EXAMPLES examples, if that is set. With PINSTAGE_FUZZ_MINUTES all of them together run
for as long, and `-s` shows how many examples each took; what fails is replayed without it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pinstage
from pinstage import LeaseStateError, PinstageError, PoolExhausted
from pinstage.testing import SimulatedDevice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),  # torch's, once a process
]

LIMIT = 64 << 10  # bytes of the pool of which leases are asked
EXAMPLES = int(os.environ.get("PINSTAGE_FUZZ_EXAMPLES", "1000"))
MINUTES = float(os.environ.get("PINSTAGE_FUZZ_MINUTES", "0"))
timed = []


def fuzz(test):
    """EXAMPLES examples of the test; with MINUTES, others of them over and over for its share of the time."""
    test = settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        derandomize=settings.default.derandomize and MINUTES == 0,  # in a CI hypothesis draws the same ones each time
    )(test)  # fmt: skip
    if MINUTES == 0:
        return test
    timed.append(test)

    def for_its_share():
        before, until = Fuzzed.examples, time.monotonic() + MINUTES * 60 / len(timed)
        while time.monotonic() < until:
            test()
        print(f"{Fuzzed.examples - before} examples")
        assert Fuzzed.examples > before

    return for_its_share


DTYPES = [
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
dtypes = st.sampled_from(DTYPES)
NEAR = [0, 1, 2, 3, 255, 256, 257, 4095, 4096, 4097, LIMIT - 1, LIMIT, LIMIT + 1]
LARGE = [2**31 - 1, 2**31, 2**32, 2**46, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]
sizes = st.one_of(st.integers(0, 9), st.sampled_from(NEAR))
any_sizes = st.one_of(sizes, st.integers(-3, -1), st.sampled_from(LARGE))
small_shapes = st.lists(st.integers(0, 6), max_size=5)
any_shapes = st.one_of(
    any_sizes,
    st.lists(any_sizes, max_size=4),
    st.lists(st.just(1), min_size=60, max_size=70),
    st.tuples(st.sampled_from([1.5, "2", None, b"3", 2j, math.nan])),
    st.sampled_from([None, 1.5, "abc", {}, True, torch.Size([3]), np.int64(3)]),
)
NOTHING_LIKE_IT = [
    None,
    0,
    -1,
    1.5,
    "cuda",
    b"",
    [],
    {},
    (),
    object(),
    int,
    torch,
    math.nan,
    np.zeros(3),
    [[1], [2, 3]],
]
anything = st.sampled_from(NOTHING_LIKE_IT)


@st.composite
def views(draw, make, dtypes=dtypes):
    """A tensor of at most five dimensions: a slice, a transposition, an expansion or a part of one."""
    tensor = make(draw(small_shapes), draw(dtypes))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["slice", "step", "permute", "expand", "squeeze", "flatten", "conj"]))
        if tensor.dim() == 0 and kind != "conj":
            continue
        dim = draw(st.integers(0, max(tensor.dim() - 1, 0)))
        if kind == "slice":
            start = draw(st.integers(0, tensor.shape[dim]))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.shape[dim] - start)))
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], draw(st.integers(0, 4)), *tensor.shape[dim:])
        elif kind == "squeeze":
            tensor = tensor.squeeze(dim)
        elif kind == "flatten" and tensor.is_contiguous():
            tensor = tensor.flatten()
        elif kind == "conj":
            tensor = tensor.conj()
    return tensor


def numbered(shape, dtype):
    """A host tensor whose elements differ."""
    count = math.prod(shape)
    values = torch.arange(count) % 2 if dtype == torch.bool else torch.arange(count) % 100
    return values.to(dtype).reshape(shape)


host_views = views(numbered)


class Fuzzed:
    """A device and a pool, by default one that takes any copy here; checks what must hold after every call."""

    examples = 0

    def __init__(self, max_bytes=1 << 30):
        self.max_bytes = max_bytes

    def __enter__(self):
        Fuzzed.examples += 1
        self.dev = SimulatedDevice().__enter__()
        self.dev.make_current()
        self.pool = pinstage.StagingPool(self.dev, initial_bytes=4096, max_bytes=self.max_bytes, when_full="raise")
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None:
            self.dev.synchronize()
            assert self.dev.violations == 0
            self.pool.reclaim(synchronize=True)
            assert self.pool._consistent()
            stats = self.pool.stats()
            assert stats.free_bytes + stats.open_bytes + stats.held_bytes == stats.capacity_bytes
            assert (stats.parked_bytes, stats.quarantined_bytes) == (0, 0)
        self.dev.__exit__(kind, error, traceback)

    def destination(self, shape, dtype):
        return self.dev.empty(shape, dtype).fill_(0)

    def outcome(self, call, *documented):
        """The error that `call` raises, if it is documented, or None."""
        before = self.pool.stats()
        try:
            call()
        except (*documented, PinstageError) as error:
            after = self.pool.stats()
            assert (after.copies, after.in_flight_bytes) == (before.copies, before.in_flight_bytes)
            return error
        return None


def torchs(call):
    """The error that torch raises, or None."""
    try:
        with torch.no_grad():
            call()
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, OverflowError) as error:
        return error
    return None


def plain_bytes(tensor):
    return tensor.resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same(a, b):
    """Of one shape and one dtype, to the bit."""
    return a.shape == b.shape and (a.numel() == 0 or torch.equal(plain_bytes(a), plain_bytes(b)))


def host_copy(tensor):
    """Of the same strides and storage, in host memory."""
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8).fill_(0)
    held = torch.tensor([], dtype=tensor.dtype).set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    return held.conj() if tensor.is_conj() else held


@fuzz
@given(st.data())
def test_copy_is_torchs(data):
    with Fuzzed() as f, torch.no_grad():
        dst = data.draw(views(f.destination))
        src = data.draw(host_views)
        expected = host_copy(dst)
        error = torchs(lambda: expected.copy_(src))
        non_blocking = data.draw(st.booleans())
        raised = f.outcome(
            lambda: pinstage.copy_(dst, src, non_blocking, pool=f.pool),
            RuntimeError, TypeError, NotImplementedError,
        )  # fmt: skip
        f.dev.synchronize()
        assert (raised is None) == (error is None), (raised, error)
        if raised is None:
            assert same(dst, expected)


@fuzz
@given(st.data())
def test_copy_of_what_is_no_tensor_raises(data):
    with Fuzzed() as f:
        dst, src = f.destination((3,), torch.float32), numbered((3,), torch.float32)
        wrong = data.draw(st.sampled_from(["dst", "src", "pool"]))
        given_ = data.draw(anything)
        if wrong == "pool" and given_ is None:
            return
        arguments = {"dst": dst, "src": src, "pool": f.pool, wrong: given_}
        raised = f.outcome(
            lambda: pinstage.copy_(arguments["dst"], arguments["src"], pool=arguments["pool"]),
            TypeError, ValueError, RuntimeError,
        )  # fmt: skip
        assert raised is not None or (wrong == "src" and isinstance(given_, (np.ndarray, int, float, complex)))


def index_values(rows):
    return st.one_of(st.integers(0, max(rows - 1, 0)), st.sampled_from([-1, rows, rows + 1, *LARGE[:6], -(2**63)]))


@st.composite
def indices(draw, rows):
    good = draw(st.booleans())
    values = draw(st.lists(st.integers(0, rows - 1) if good and rows > 0 else index_values(rows), max_size=12))
    form = draw(st.sampled_from(["list", "int64", "int32", "numpy", "strided", "odd"]))
    if form == "list":
        return values
    if form == "odd":
        return draw(
            st.one_of(anything, st.sampled_from([torch.zeros(2), torch.zeros((1, 1), dtype=torch.int64), [1.5]]))
        )
    tensor = torch.tensor(values, dtype=torch.int64)
    if form == "int32":
        return tensor.to(torch.int32)
    if form == "strided":
        return torch.stack([tensor, tensor + 7], 1)[:, 0] if len(values) else tensor
    return tensor.numpy() if form == "numpy" else tensor


DOCUMENTED = (IndexError, ValueError, TypeError, RuntimeError)


@fuzz
@given(st.data())
def test_rows_are_those_of_index_select(data):
    with Fuzzed() as f, torch.no_grad():
        table = data.draw(host_views)
        dim = data.draw(st.integers(-6, 6))
        rows = table.shape[dim] if -table.dim() <= dim < table.dim() else 1
        index = data.draw(indices(rows))
        gathered = []
        raised = f.outcome(lambda: gathered.append(pinstage.gather_rows(table, index, dim=dim)), *DOCUMENTED)
        plain = []
        torchs(lambda: plain.append(torch.as_tensor(index)))
        if raised is None:
            assert same(gathered[0], table.index_select(dim, plain[0].long()))
        count = len(plain[0]) if plain and plain[0].dim() > 0 else 0
        shape = list(table.shape)
        if shape and -len(shape) <= dim < len(shape):
            shape[dim] = count + data.draw(st.integers(-1, 1)) if count else 0
        dst = f.destination(shape, table.dtype)
        refused = f.outcome(lambda: pinstage.copy_rows_(dst, table, index, dim=dim, pool=f.pool), *DOCUMENTED)
        f.dev.synchronize()
        if refused is None:
            assert raised is None
            assert same(dst.narrow(dim, 0, count), gathered[0])
        else:
            assert not bool(dst.ne(0).any()) if dst.numel() and dst.dtype != torch.float8_e4m3fn else True


@fuzz
@given(st.data())
def test_segments_are_those_of_cat(data):
    with Fuzzed() as f, torch.no_grad():
        first = data.draw(host_views)
        dim = data.draw(st.integers(-2, 3))
        segments = [first]
        for _ in range(data.draw(st.integers(0, 3))):
            rows = data.draw(st.integers(0, 4))
            like = list(first.shape)
            if -len(like) <= dim < len(like):
                like[dim] = rows
            segments.append(data.draw(st.one_of(st.just(numbered(like, first.dtype)), host_views)))
        if data.draw(st.integers(0, 9)) == 0:
            segments = data.draw(anything)
        wanted = []
        error = torchs(lambda: wanted.append(torch.cat(list(segments), dim)))
        shape = list(wanted[0].shape if wanted else first.shape)
        more = data.draw(st.integers(-1, 1))
        if shape and -len(shape) <= dim < len(shape):
            shape[dim] = max(shape[dim] + more, 0)
        dst = f.destination(shape, first.dtype)
        raised = f.outcome(lambda: pinstage.copy_rows_(dst, segments, dim=dim, pool=f.pool), *DOCUMENTED)
        f.dev.synchronize()
        if raised is None:
            assert error is None or len(segments) == 0
            assert not wanted or same(dst.narrow(dim, 0, wanted[0].shape[dim]), wanted[0])


@fuzz
@given(st.data())
def test_batch_is_a_loop(data):
    with Fuzzed() as f, torch.no_grad():
        dsts = [data.draw(views(f.destination)) for _ in range(data.draw(st.integers(0, 5)))]
        fit = data.draw(st.booleans())
        srcs = [
            numbered(dst.shape, data.draw(st.one_of(st.just(dst.dtype), dtypes))) if fit else data.draw(host_views)
            for dst in dsts
        ]
        if data.draw(st.integers(0, 9)) == 0:
            (dsts if data.draw(st.booleans()) else srcs).append(data.draw(anything))  # one too many
        expected = [host_copy(dst) if isinstance(dst, torch.Tensor) else None for dst in dsts]
        pairs = zip(expected, srcs, strict=False)
        errors = [torchs(lambda a=a, b=b: a.copy_(b)) for a, b in pairs] + [True] * (len(dsts) != len(srcs))
        raised = f.outcome(
            lambda: pinstage.copy_batch_(dsts, srcs, pool=f.pool),
            RuntimeError,
            TypeError,
            ValueError,
            NotImplementedError,
        )
        f.dev.synchronize()
        if raised is None:
            assert not any(errors)
            assert all(same(dst, wanted) for dst, wanted in zip(dsts, expected, strict=True))


NUMBERS = st.one_of(
    st.integers(-300, 300),
    st.sampled_from([0.5, -0.0, math.inf, math.nan, True, 1e300, *LARGE]),
    st.sampled_from([1j, None, "1"]),
)  # fmt: skip


@fuzz
@given(st.data())
def test_to_device_is_torchs(data):
    with Fuzzed() as f, torch.no_grad():
        given_ = data.draw(
            st.one_of(
                st.lists(st.integers(-100, 100), max_size=40), st.lists(NUMBERS, max_size=6), NUMBERS, host_views,
                st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3), max_leaves=12), anything,
            )
        )  # fmt: skip
        dtype = data.draw(st.one_of(st.none(), dtypes))

        def as_torch():
            if isinstance(given_, torch.Tensor):
                return given_.detach().to(given_.dtype if dtype is None else dtype)
            return torch.tensor(given_, dtype=dtype)

        made, wanted = [], []
        error = torchs(lambda: wanted.append(as_torch()))
        raised = f.outcome(
            lambda: made.append(pinstage.to_device(given_, f.dev, dtype, pool=f.pool)),
            ValueError, TypeError, RuntimeError, OverflowError, NotImplementedError,
        )  # fmt: skip
        f.dev.synchronize()
        assert (raised is None) == (error is None), (given_, dtype, raised, error)
        if raised is None:
            assert made[0].dtype == wanted[0].dtype
            assert same(made[0], wanted[0])


@fuzz
@given(st.data())
def test_leases_of_any_shape_dtype_and_timeout(data):
    with Fuzzed(LIMIT) as f:
        shape = data.draw(st.one_of(any_shapes, small_shapes))
        dtype = data.draw(st.one_of(dtypes, anything, st.just(torch.quint8)))
        timeout = data.draw(st.sampled_from([None, 0, 0.0, 1e-9, -1, math.nan, math.inf, "1", True, 1e300]))
        taken = []
        depth = data.draw(st.integers(-1, 3))
        calls = {
            "lease": lambda: f.pool.lease(shape, dtype, timeout),
            "try_lease": lambda: f.pool.try_lease(shape, dtype),
            "buffer": lambda: pinstage.DoubleBuffer(shape, dtype, f.dev, depth=depth, pool=f.pool),
        }
        call = data.draw(st.sampled_from(sorted(calls)))
        dst = data.draw(st.one_of(st.none(), anything, views(f.destination)))  # None: one that fits
        stream = data.draw(st.one_of(anything, st.sampled_from([2**64, -(2**63), f.dev.current_stream])))
        raised = f.outcome(lambda: taken.append(calls[call]()), ValueError, TypeError)
        if raised is not None:
            assert f.pool.stats().open_bytes == 0
            return
        if call == "buffer" or taken[0] is None:
            return
        lease = taken[0]
        tensor = lease.tensor
        assert (tuple(tensor.shape), tensor.dtype) == (lease.shape, lease.dtype)
        assert tensor.nbytes <= f.pool.stats().open_bytes <= LIMIT
        dst = f.dev.zeros(lease.shape, dtype) if dst is None else dst
        refused = f.outcome(lambda: lease.copy_to(dst), ValueError, TypeError, RuntimeError)
        f.outcome(lambda: lease.retire(*([stream] if stream is not None else [])), TypeError, ValueError, OverflowError)
        with contextlib.suppress(LeaseStateError):
            lease.cancel()
        with contextlib.suppress(LeaseStateError):
            lease.close()
        if refused is None:
            f.dev.synchronize()
            assert same(dst, tensor)


@fuzz
@given(st.data())
def test_pools_of_any_size(data):
    with Fuzzed() as f:
        number = st.one_of(any_sizes, st.sampled_from([1.5, "1", None, True, math.nan]))
        when_full = st.sampled_from(["wait", "raise", "", None, 1])
        options = data.draw(
            st.fixed_dictionaries({}, optional={"initial_bytes": number, "max_bytes": number, "when_full": when_full})
        )
        made = []
        raised = f.outcome(
            lambda: made.append(pinstage.StagingPool(f.dev, **options)), ValueError, TypeError, OverflowError
        )
        if raised is not None:
            return
        pool = made[0]
        for size in data.draw(st.lists(st.one_of(st.integers(1, 5000), st.integers(-3, -1)), max_size=3)):
            try:
                pool.reserve(size)
            except (PoolExhausted, TypeError, ValueError):
                continue
            assert pool.stats().capacity_bytes >= size // 256 * 256
        pool.close()
        assert pool.stats().capacity_bytes == 0
