# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`to_device`: torch.tensor() is the oracle, for values, dtypes, shapes and errors alike."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pinstage
from pinstage import CaptureError, PoolExhausted
from pinstage.testing import SimulatedDevice

DTYPES = [
    None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e5m2,
]  # fmt: skip
ERRORS = (ValueError, TypeError, RuntimeError, OverflowError)


def target(rig):
    """The rig's device as a user names it."""
    return rig.device if rig.simulated else f"cuda:{rig.index}"


def outcome(make):
    try:
        return make()
    except ERRORS as error:
        return type(error)


def same(actual, expected):
    """Bit for bit, but for the payloads of NaNs."""
    if isinstance(expected, type) or isinstance(actual, type):
        return actual is expected
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    if expected.is_floating_point() and expected.itemsize > 1:
        holes = expected.isnan()
        return torch.equal(actual.isnan(), holes) and same_bytes(actual[~holes], expected[~holes])
    return same_bytes(actual, expected)


def same_bytes(actual, expected):
    return torch.equal(actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def eager():
    with SimulatedDevice(schedule="eager") as dev:
        yield dev


# --- the oracle -------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-300, 300),
    st.sampled_from(
        [s * 2**n + d for n in (7, 8, 15, 16, 31, 32, 53, 63, 64, 70) for s in (1, -1) for d in (-1, 0, 1)]
    ),
    st.floats(width=16),
    st.floats(),
)
ODD = st.sampled_from([None, "a", b"a", 1j, [], (), np.float32(1.5), np.int64(3), torch.tensor(2), 10**400, {1}])


def nested(numbers, depth):
    """Lists of one shape, mostly: an element may be ragged, or of another depth."""
    if depth == 0:
        return numbers
    below = nested(numbers, depth - 1)
    even = st.integers(1, 4).flatmap(lambda size: st.lists(below, min_size=size, max_size=size))
    return st.one_of(even, even.map(tuple), st.lists(below, max_size=3))


DATA = st.integers(0, 3).flatmap(lambda depth: nested(st.one_of(NUMBERS, NUMBERS, NUMBERS, ODD), depth))
PLAIN = st.one_of(
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.lists(st.one_of(st.booleans(), st.integers(-100, 100)), min_size=1, max_size=20),
    st.lists(st.one_of(st.integers(-(2**60), 2**60), st.floats()), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 127), min_size=3, max_size=3), min_size=1, max_size=6),
)


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")  # torch's, of odd input
@settings(max_examples=400)
@given(st.one_of(DATA, PLAIN), st.sampled_from(DTYPES))
@example([[1, 2], [3]], None)
@example([1, [2]], None)
@example([[1], 2], None)
@example([[], [1]], None)
@example([2**63], None)
@example([1.0, 2**63], None)
@example([True, 2, 2.5], None)
@example([256], torch.uint8)
@example([-1], torch.uint8)
@example([1.5], torch.int32)
@example(range(3), None)
def test_lists_become_what_torch_makes_of_them_or_raise_what_torch_raises(eager, data, dtype):
    """Case 31."""
    expected = outcome(lambda: torch.tensor(data, dtype=dtype))
    actual = outcome(lambda: pinstage.to_device(data, eager, dtype))
    eager.synchronize()
    assert same(actual, expected), f"{actual} instead of {expected}"


def test_list_nested_in_itself_raises_as_torch_raises_it(eager):
    data = []
    data.append(data)
    expected = outcome(lambda: torch.tensor(data))
    assert isinstance(expected, type)
    assert outcome(lambda: pinstage.to_device(data, eager)) is expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_rounding_to_sixteen_bits_is_torchs(eager, dtype):
    """All finite numbers of the dtype, the points half way between two of them, and the float32s next to those."""
    finite = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    finite = finite[finite.isfinite()].unique()
    halves = (finite[:-1].double() + finite[1:].double()).div(2).float()
    infinity = torch.tensor(torch.inf)
    tests = torch.cat([finite, halves, halves.nextafter(infinity), halves.nextafter(-infinity)])
    tests = torch.cat([tests, torch.tensor([65519.9, 65520.0, 3.4e38, torch.inf, -torch.inf, -0.0])]).tolist()
    actual = pinstage.to_device(tests, eager, dtype)
    eager.synchronize()
    assert same_bytes(actual, torch.tensor(tests, dtype=dtype))


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
def test_default_dtype_is_followed(eager, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        made = pinstage.to_device([1, 2.5], eager)
        eager.synchronize()
        assert same(made, torch.tensor([1, 2.5]))
        assert pinstage.to_device([], eager).dtype == default
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("count", [1, 2048, 2049, 100_000])
def test_lists_of_any_length(eager, count):
    made = pinstage.to_device(list(range(count)), eager)
    eager.synchronize()
    assert torch.equal(made, torch.arange(count))


# --- arrays and tensors -----------------------------------------------------------------------------------------------

SOURCES = {
    "tensor": lambda: torch.arange(24).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "strided": lambda: torch.arange(24).reshape(4, 6)[:, ::2],
    "expanded": lambda: torch.arange(4).expand(3, 4),
    "zero_dim": lambda: torch.tensor(3.5),
    "no_elements": lambda: torch.empty(3, 0),
    "conjugated": lambda: torch.arange(4).mul(1j).conj(),
    "negated": lambda: torch._neg_view(torch.arange(4.0)),
    "requires_grad": lambda: torch.ones(4, requires_grad=True),
    "array": lambda: np.arange(12, dtype=np.int32).reshape(3, 4),
    "array_transposed": lambda: np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "list_of_arrays": lambda: [np.arange(3), np.arange(3)],
}


@pytest.mark.both
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy:UserWarning")
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int32])
@pytest.mark.parametrize("name", SOURCES)
def test_arrays_and_tensors_keep_shape_dtype_and_layout(rig, name, dtype):
    if name == "conjugated" and dtype is not None:
        dtype = torch.complex128
    source = SOURCES[name]()
    made = pinstage.to_device(source, target(rig), dtype)
    if isinstance(source, torch.Tensor):
        expected = source.detach().resolve_conj().resolve_neg().to(dtype or source.dtype)
    else:
        expected = torch.tensor(source, dtype=dtype)
    assert (made.dtype, made.requires_grad) == (expected.dtype, False)
    if isinstance(source, torch.Tensor) and name not in ("strided", "expanded"):
        assert made.stride() == expected.stride()
    rig.expect(made, expected)


@pytest.mark.both
def test_tensor_on_the_device_is_copied_too(rig):
    source = rig.filled(4, torch.float32, 2)
    made = pinstage.to_device(source, target(rig), torch.int32)
    assert made.data_ptr() != source.data_ptr()
    rig.expect(made, 2)


# --- the race ---------------------------------------------------------------------------------------------------------


@pytest.mark.raced
@pytest.mark.parametrize("kind", ["list", "array", "tensor", "nested_tuple"])
def test_data_may_be_changed_as_soon_as_the_call_returns(rig, kind):
    """Cases 1 and 19."""
    data = {"list": [0] * 64, "array": np.zeros(64, dtype=np.int64), "tensor": torch.zeros(64, dtype=torch.int64)}
    made = []
    pool = rig.pool()
    rig.empty(64, torch.int64)  # torch's allocator has its memory before the gate
    with rig.gate():
        for step in range(3):
            if kind == "nested_tuple":
                made.append(pinstage.to_device(((step,) * 64,), target(rig), pool=pool))
                continue
            for i in range(64):
                data[kind][i] = step
            made.append(pinstage.to_device(data[kind], target(rig), pool=pool))
            for i in range(64):
                data[kind][i] = -1
    for step, tensor in enumerate(made):
        rig.expect(tensor, step)


@pytest.mark.both  # no control: it shows that the numbers are read before the wait
def test_list_may_change_while_the_call_waits_for_room(rig):
    pool, made = rig.pool(max_bytes=4096), []
    data = list(range(512))
    with rig.stream() as stream, rig.gate():
        pinstage.copy_(rig.empty(4096, torch.uint8), torch.zeros(4096, dtype=torch.uint8), pool=pool)

        def submit():
            rig.make_current()
            with rig.stream(stream):
                made.append(pinstage.to_device(data, target(rig), pool=pool))

        thread = threading.Thread(target=submit)
        thread.start()
        while pool.stats().waits == 0:
            pass
        data.clear()
    thread.join()
    rig.expect(made[0], torch.arange(512))


# --- what else may go wrong -------------------------------------------------------------------------------------------


@pytest.mark.both
@pytest.mark.parametrize("data", [[1, 2], np.arange(2), torch.arange(2)], ids=["list", "array", "tensor"])
def test_captured_stream_raises_and_enqueues_nothing(rig, data):
    """Case 10."""
    pool = rig.pool()
    pinstage.to_device(data, target(rig), pool=pool)
    rig.synchronize()
    pool.reclaim()
    counter = rig.filled((), torch.int64, 0)
    with rig.unchanged(pool), rig.capture() as graph:
        rig.launch(lambda: counter.add_(1))
        with pytest.raises(CaptureError):
            pinstage.to_device(data, target(rig), pool=pool)
    graph.replay()
    rig.expect(counter, 1)


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu"), None, 3.5])
@pytest.mark.parametrize("data", [[1, 2], np.arange(2)], ids=["list", "array"])
def test_what_is_no_device_is_refused(dev, device, data):
    with pytest.raises((ValueError, TypeError)):
        pinstage.to_device(data, device)


@pytest.mark.both
@pytest.mark.parametrize("data", [[1, 2], np.arange(2)], ids=["list", "array"])
def test_pool_of_another_device_is_refused(rig, other, data):
    pool = other.pool()
    with rig.unchanged(pool), pytest.raises(ValueError, match="use a pool of dst's device"):
        pinstage.to_device(data, target(rig), pool=pool)


def test_list_larger_than_the_pool_is_told(dev):
    pool = pinstage.StagingPool(dev, max_bytes=4096)
    before = pool.stats()
    with pytest.raises(PoolExhausted, match="larger than max_bytes"):
        pinstage.to_device(list(range(1000)), dev, pool=pool)
    assert pool.stats() == before


@pytest.mark.both
def test_active_function_mode_sees_the_copy(rig):
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        made = pinstage.to_device([1, 2], target(rig))
    rig.expect(made, torch.tensor([1, 2]))
    assert torch.tensor in seen
    assert torch.Tensor.copy_ in seen


def test_list_is_one_driver_copy_and_one_fence(dev):
    pinstage.to_device([1, 2], dev)
    before = dev.calls
    pinstage.to_device([[1, 2], [3, 4]], dev, torch.float32)
    made = {name: count - before[name] for name, count in dev.calls.items() if count != before[name]}
    assert made["cuMemcpyHtoDAsync"] == made["cuEventRecord"] == 1
