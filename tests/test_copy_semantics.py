# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""What else torch knows of a tensor than bytes: autograd, subclasses, modes, transforms, layouts without memory.

As in test_copy_matrix.py, torch's own `copy_` is the oracle: the same program runs with each, and what it returns or
raises must be the same.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import pinstage

FLOAT = torch.float32


def outcome(program, copy, *tensors):
    """What `program` returns, tensors as lists, or the type of what it raises."""
    try:
        result = program(copy, *tensors)
    except Exception as error:
        return type(error)
    return [value.detach().cpu().tolist() if isinstance(value, torch.Tensor) else value for value in result]


def torch_copy(dst, src):
    return dst.copy_(src)


def compare(rig, program):
    """Runs `program(copy, dst, src)` with torch's copy and with ours."""
    pool = rig.pool()

    def copy(dst, src):
        result = pinstage.copy_(dst, src, pool=pool)
        rig.synchronize()  # a simulated device's tensors are read at once
        return result

    source = torch.arange(24).reshape(4, 6).to(FLOAT)
    twin = torch.empty(4, 6) if rig.simulated else rig.empty((4, 6))
    theirs = outcome(program, torch_copy, twin.fill_(7), source.clone())
    ours = outcome(program, copy, rig.filled((4, 6), FLOAT, 7), source)
    assert ours == theirs
    rig.synchronize()
    pool.reclaim()
    stats = pool.stats()
    assert stats.free_bytes == stats.capacity_bytes


# --- autograd ---------------------------------------------------------------------------------------------------------


def backward(copy, dst, src):
    src.requires_grad_()
    weight = dst * 1
    result = copy(weight, src)
    (result * torch.arange(24.0, device=dst.device).reshape(4, 6)).sum().backward()
    return result is weight, type(weight.grad_fn).__name__, weight, src.grad


def into_a_leaf(copy, dst, src):
    return copy(dst.requires_grad_(), src)


def into_a_view_of_a_leaf(copy, dst, src):
    return copy(dst.requires_grad_()[1:], src[1:])


def into_a_leaf_without_grad(copy, dst, src):
    dst.requires_grad_()
    with torch.no_grad():
        copy(dst, src)
        copy(dst[:, ::2], src[:, 1::2])
    return dst, dst._version, dst.requires_grad, dst.grad_fn


def into_its_data(copy, dst, src):
    dst.requires_grad_()
    copy(dst.data, src)
    return dst, dst._version


def into_what_backward_needs(copy, dst, src):
    leaf = torch.ones(4, 6, device=dst.device, requires_grad=True)
    product = (leaf * dst).sum()
    copy(dst, src)  # `dst` was saved for backward
    product.backward()


def through_a_cast(copy, dst, src):
    src.requires_grad_()
    double = dst.double()
    copy(double, src)
    double.sum().backward()
    return double.dtype, src.grad.dtype, src.grad


def through_a_broadcast(copy, dst, src):
    row = src[0].detach().requires_grad_()
    weight = dst * 1
    copy(weight, row)
    weight.sum().backward()
    return weight, row.grad


def into_integers(copy, dst, src):
    src.requires_grad_()
    integers = dst.to(torch.int32)
    copy(integers, src)
    return integers, integers.requires_grad


def part_of_a_graph(copy, dst, src):
    src.requires_grad_()
    weight = (dst * 1).requires_grad_()
    product = weight * 2
    copy(product[:, :3], src[:, :3])
    product.sum().backward()
    return weight.grad, src.grad


def source_of_a_graph(copy, dst, src):
    leaf = src.requires_grad_()
    copy(dst, leaf * 2)
    dst.sum().backward()
    return dst, leaf.grad


def detached_source(copy, dst, src):
    src.requires_grad_()
    copy(dst, src.detach())
    return dst, dst.requires_grad


def under_inference(copy, dst, src):
    with torch.inference_mode():
        copy(dst, src)
        copy(dst.t(), src.t() + 1)
        fresh = dst + 0
        copy(fresh, src[:1])
    return dst, dst._version, fresh


def inference_source(copy, dst, src):
    with torch.inference_mode():
        source = src + 1
        integers = source.to(torch.int64)
    copy(dst, source)
    copy(dst[1:, ::2], integers[1:, ::2])
    return dst, dst.is_inference()


def inference_destination(copy, dst, src):
    with torch.inference_mode():
        inferred = dst * 1
    return copy(inferred, src)


def under_forward_mode(copy, dst, src):
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        weight = dst * 1
        copy(weight, forward.make_dual(src, src * 3))
        return tuple(forward.unpack_dual(weight))


def parameter_destination(copy, dst, src):
    parameter = torch.nn.Parameter(dst)
    with torch.no_grad():
        result = copy(parameter, src)
    return type(result).__name__, parameter, parameter.requires_grad


def parameter_destination_with_grad(copy, dst, src):
    return copy(torch.nn.Parameter(dst), src)


def parameter_source(copy, dst, src):
    parameter = torch.nn.Parameter(src)
    copy(dst, parameter)
    dst.sum().backward()
    return dst, parameter.grad


def hooked_source(copy, dst, src):
    seen = []
    src.requires_grad_().register_hook(lambda grad: seen.append(grad.sum().item()))
    copy(dst, src)
    dst.sum().backward()
    return dst, seen


AUTOGRAD = [
    backward, into_a_leaf, into_a_view_of_a_leaf, into_a_leaf_without_grad, into_its_data, into_what_backward_needs,
    through_a_cast, through_a_broadcast, into_integers, part_of_a_graph, source_of_a_graph, detached_source,
    under_inference, inference_source, inference_destination, under_forward_mode, parameter_destination,
    parameter_destination_with_grad, parameter_source, hooked_source,
]  # fmt: skip


@pytest.mark.both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its first use of forward mode
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("program", AUTOGRAD, ids=lambda program: program.__name__)
def test_autograd_sees_what_torch_lets_it_see(rig, program):
    compare(rig, program)


# --- subclasses and modes ---------------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass that torch function dispatch keeps."""


class Counting(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "copy_":
            Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A subclass without memory of its own, that torch dispatches to Python."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(value):
            return value.inner if isinstance(value, Wrapped) else value

        result = func(*map(inner, args), **(kwargs or {}))
        return args[0] if func._schema.is_mutable else result


def tagged_destination(copy, dst, src):
    return type(copy(dst.as_subclass(Tagged), src)).__name__, dst


def tagged_source(copy, dst, src):
    return type(copy(dst, src.as_subclass(Tagged))).__name__, dst


def counting(copy, dst, src):
    Counting.calls = 0
    copy(dst.as_subclass(Counting), src)
    copy(dst, src.as_subclass(Counting))
    return Counting.calls, dst


def wrapped_destination(copy, dst, src):
    wrapped = Wrapped(dst)
    return copy(wrapped, src) is wrapped, dst


def wrapped_source(copy, dst, src):
    return copy(dst, Wrapped(src)) is dst, dst


def function_mode(copy, dst, src):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.copy_:
                seen.append("copy_")
            return func(*args, **(kwargs or {}))

    with Mode():
        copy(dst, src)
        copy(dst, src.double())
    return seen, dst


def dispatch_mode(copy, dst, src):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                seen.append("copy_")
            return func(*args, **(kwargs or {}))

    with Mode():
        copy(dst, src)
    return seen[:1], dst


def default_device(copy, dst, src):
    with torch.device("meta"):
        copy(dst, src)
        copy(dst[:, 1:], src[:, 1:].double())
        copy(dst[:, ::2], 3)
    return (dst,)


def fake(copy, dst, src):
    with FakeTensorMode() as mode:
        a, b = torch.empty(4, 6), mode.from_tensor(src)
        result = copy(a, b)
        return type(result).__name__, tuple(result.shape), result is a


def fake_outside_of_its_mode(copy, dst, src):
    mode = FakeTensorMode()
    return type(copy(mode.from_tensor(dst), mode.from_tensor(src))).__name__, dst


def fake_source(copy, dst, src):
    return copy(dst, FakeTensorMode().from_tensor(src))


def fake_gpu(copy, dst, src):
    with FakeTensorMode():
        a, b = torch.empty(4, 6, device="cuda"), torch.empty(4, 6)
        return type(copy(a, b)).__name__, str(a.device)


def functional(copy, dst, src):
    wrapped = torch._to_functional_tensor(dst)
    torch._enable_functionalization(reapply_views=False)
    try:
        copy(wrapped, torch._to_functional_tensor(src))
        torch._sync(wrapped)
    finally:
        torch._disable_functionalization()
    return (torch._from_functional_tensor(wrapped),)


SUBCLASSES = [
    tagged_destination, tagged_source, counting, wrapped_destination, wrapped_source, function_mode, dispatch_mode,
    default_device, fake, fake_outside_of_its_mode, fake_source, fake_gpu, functional,
]  # fmt: skip


@pytest.mark.both
@pytest.mark.parametrize("program", SUBCLASSES, ids=lambda program: program.__name__)
def test_subclasses_and_modes_see_what_torch_shows_them(rig, program):
    """Case 37."""
    compare(rig, program)


@pytest.mark.raced
@pytest.mark.parametrize("program", ["function", "dispatch", "parameter", "gradient"])
def test_what_goes_through_torch_is_a_snapshot_too(rig, program):
    """Case 37: the source is pinned, and torch would read it late."""
    source = rig.pinned((4, 6), FLOAT).fill_(1)
    first, second, third = (rig.filled((4, 6), FLOAT, 0) for _ in range(3))
    as_source = {
        "function": lambda: source.as_subclass(Tagged),
        "dispatch": lambda: Wrapped(source),
        "parameter": lambda: torch.nn.Parameter(source, requires_grad=False),
        "gradient": lambda: source.detach().requires_grad_(),
    }[program]
    pool = rig.pool()
    with rig.stream():
        pinstage.copy_(first, as_source(), pool=pool)
        source.fill_(2)
        with rig.gate():
            pinstage.copy_(second, source, pool=pool)
            source.fill_(3)
            pinstage.copy_(third, source, pool=pool)
            source.fill_(4)
    rig.expect(first, 1)
    rig.expect(second, 2)
    rig.expect(third, 3)


@pytest.mark.raced
def test_default_device_makes_no_copy_wait(rig):
    """Engines set one for the whole process; it is a function mode, and others are left to torch."""
    pool, source = rig.pool(), rig.pinned((4, 6), torch.int32)
    ways = [
        lambda dst: pinstage.copy_(dst, source, pool=pool),
        lambda dst: pinstage.copy_(dst, source.double(), pool=pool),
        lambda dst: pinstage.copy_rows_(dst, source, [0, 1, 2, 3], pool=pool),
    ]
    dsts = [rig.filled((4, 6), torch.int32, 0) for _ in ways]
    with rig.stream(), rig.gate(), torch.device("meta"):
        for step, (way, dst) in enumerate(zip(ways, dsts, strict=True)):
            source.fill_(step)
            way(dst)
        source.fill_(-1)
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)


# --- transforms and compilation ---------------------------------------------------------------------------------------


def batched_source(copy, dst, src):
    def each(row):
        return copy(torch.zeros_like(row), row) * 2

    return (torch.vmap(each)(src),)


def batched_source_into_memory(copy, dst, src):
    return (torch.vmap(lambda row: copy(dst[0], row))(src),)  # torch refuses: all would write one row


def batched_both(copy, dst, src):
    return (torch.vmap(copy)(dst, src), dst)


def batched_destination(copy, dst, src):
    return (torch.vmap(lambda row: copy(row, src[0]))(dst), dst)


def inside_a_map(copy, dst, src):
    def each(row):
        copy(dst, src)  # neither is batched
        return row + 1

    return (torch.vmap(each)(torch.arange(3.0)), dst)


def inside_grad(copy, dst, src):
    def loss(x):
        return copy(torch.zeros_like(x), x).square().sum()

    return (torch.func.grad(loss)(src),)


def inside_jvp(copy, dst, src):
    return torch.func.jvp(lambda x: copy(torch.zeros_like(x), x) * 3, (src,), (src,))


TRANSFORMS = [batched_source, batched_source_into_memory, batched_both, batched_destination, inside_a_map, inside_grad,
              inside_jvp]  # fmt: skip


@pytest.mark.both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("program", TRANSFORMS, ids=lambda program: program.__name__)
def test_transforms_see_what_torch_shows_them(rig, program):
    compare(rig, program)


@pytest.mark.both
@pytest.mark.filterwarnings("ignore")  # torch.compile has many of its own
@pytest.mark.parametrize("src_dtype", [FLOAT, torch.int64])
def test_compiled_function_breaks_its_graph_at_a_copy_and_is_right(rig, src_dtype):
    pool = rig.pool()

    def step(dst, src, bias):
        source = src * 2
        pinstage.copy_(dst, source, pool=pool)
        source.fill_(-1)
        return bias + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    for number in range(3):
        dst = rig.filled((4, 6), FLOAT, 0)
        source = torch.full((4, 6), number, dtype=src_dtype)
        assert compiled(dst, source, torch.zeros(2)).tolist() == [1, 1]
        rig.expect(dst, 2 * number)
    torch._dynamo.reset()


# --- what has no plain memory -----------------------------------------------------------------------------------------


def meta_source(copy, dst, src):
    return copy(dst, src.to("meta"))


def meta_destination(copy, dst, src):
    result = copy(torch.empty(4, 6, device="meta"), src)
    return str(result.device), tuple(result.shape)


def zero_source(copy, dst, src):
    return copy(dst, torch._efficientzerotensor((4, 6))), 0


def sparse_source(copy, dst, src):
    return copy(dst, src.to_sparse())


def compressed_source(copy, dst, src):
    return copy(dst, src.to_sparse_csr())


def sparse_destination(copy, dst, src):
    return copy(torch.sparse_coo_tensor(size=(4, 6)), src)


def both_sparse(copy, dst, src):
    return (copy(torch.sparse_coo_tensor(size=(4, 6)), src.to_sparse()).to_dense(),)


def nested_source(copy, dst, src):
    return copy(dst, torch.nested.nested_tensor([src[0], src[1, :2]]))


def jagged_source(copy, dst, src):
    return copy(dst, torch.nested.nested_tensor([src[0], src[1, :2]], layout=torch.jagged))


def opaque_source(copy, dst, src):
    return copy(dst, src.to_mkldnn())


def quantized_source(copy, dst, src):
    return (copy(dst, torch.quantize_per_tensor(src, 0.5, 0, torch.quint8)),)


def names(copy, dst, src):
    named = src.refine_names("rows", "columns")
    result = copy(dst, named)
    return result.names, result.rename(None)


def itself(copy, dst, src):
    return copy(dst, dst), 0


def its_own_view(copy, dst, src):
    copy(dst, src)
    return copy(dst[:2], dst[2:]), dst


def the_other_direction(copy, dst, src):
    copy(dst, src + 1)
    return copy(src, dst), 0


STRANGE = [
    meta_source, meta_destination, zero_source, sparse_source, compressed_source, sparse_destination, both_sparse,
    nested_source, jagged_source, opaque_source, quantized_source, names, itself, its_own_view,
    the_other_direction,
]  # fmt: skip


@pytest.mark.both
@pytest.mark.filterwarnings("ignore::UserWarning")  # sparse CSR, named and nested tensors are in beta
@pytest.mark.parametrize("program", STRANGE, ids=lambda program: program.__name__)
def test_what_has_no_plain_memory_is_copied_or_refused_as_torch_does(rig, program):
    compare(rig, program)


@pytest.mark.both
@pytest.mark.parametrize("dst_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("src_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pin", [False, True])
def test_memory_formats_are_those_of_dst(rig, dst_format, src_format, pin):
    shape = (2, 3, 4, 5)
    source = torch.arange(120.0).reshape(shape).contiguous(memory_format=src_format)
    if pin and not rig.simulated:
        source = source.pin_memory()
    memory = rig.filled((2, 4, 5, 3) if dst_format == torch.channels_last else shape, FLOAT, 0)
    dst = memory.permute(0, 3, 1, 2) if dst_format == torch.channels_last else memory
    strides = dst.stride()
    expected = source.clone()
    pinstage.copy_(dst, source)
    source.fill_(-1)
    rig.expect(dst, expected)
    assert dst.stride() == strides
