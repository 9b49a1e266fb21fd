# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`copy_`: what torch's copy_ takes, with a source that may be written at once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import pinstage
from pinstage.testing import SimulatedDevice, latch

TESTS = Path(__file__).parent  # not the root, where the source folder would be imported
FLOAT = torch.float32


def numbers(shape, dtype, step=0):
    count = int(np.prod(shape, dtype=np.int64))
    return (torch.arange(count).reshape(shape) % 100 + step).to(dtype)


def plain(data):
    """What torch itself would copy from a tensor or any NumPy array."""
    if isinstance(data, torch.Tensor):
        return data
    return torch.from_numpy(np.ascontiguousarray(data).astype(data.dtype.newbyteorder("=")))


def read_only(array):
    array.flags.writeable = False
    return array


# --- the race -------------------------------------------------------------------------------------------------------


@pytest.mark.both  # the reader is unprotected by design: this shows that the gate makes races
def test_bare_copy_reads_what_is_written_after_it(rig):
    """Case 1, without pinstage."""
    source, dst = rig.pinned(1024, torch.int32).fill_(1), rig.filled(1024, torch.int32, 0)
    with rig.stream(), rig.gate():
        rig.copy_bare(dst, source)
        source.fill_(2)
    rig.expect(dst, 2)


@pytest.mark.raced
@pytest.mark.parametrize("kind", ["pinned", "pageable", "numpy"])
def test_source_may_be_written_as_soon_as_the_call_returns(rig, kind):
    """Case 1."""
    source = rig.pinned(1024, torch.int32) if kind == "pinned" else torch.empty(1024, dtype=torch.int32)
    source = source.numpy() if kind == "numpy" else source
    first, second = (rig.filled(1024, torch.int32, 0) for _ in range(2))
    pool = rig.pool()
    with rig.stream(), rig.gate():
        source[:] = 1
        pinstage.copy_(first, source, pool=pool)
        source[:] = 2
        pinstage.copy_(second, source, pool=pool)
        source[:] = 3
    rig.expect(first, 1)
    rig.expect(second, 2)


@pytest.mark.raced
def test_default_pool_and_default_stream_are_safe_too(rig):
    """Case 1."""
    source, dsts = torch.empty(100), [rig.filled(100, FLOAT, 0) for _ in range(3)]
    with rig.gate():
        for step, dst in enumerate(dsts):
            pinstage.copy_(dst, source.fill_(step))
        source.fill_(-1)
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)


@pytest.mark.raced
def test_every_call_works_on_the_legacy_default_stream(rig):
    """Case 19. (`copy_batch_` has a test of its own.)"""
    source, pool = torch.empty(8, 64, dtype=torch.int32), rig.pool()
    buffer = pinstage.DoubleBuffer((8, 64), torch.int32, rig.device, pool=pool)

    def leased(dst):
        with pool.lease((8, 64), torch.int32) as lease:
            lease.tensor.copy_(source)
            lease.copy_to(dst)

    def buffered(dst):
        with buffer.fill() as host:
            host.copy_(source)
        buffer.copy_to(dst)

    ways = [
        lambda dst: pinstage.copy_(dst, source, pool=pool),
        lambda dst: pinstage.copy_(dst, source[:1], pool=pool),
        lambda dst: pinstage.copy_(dst, source.to(torch.int64), pool=pool),
        lambda dst: pinstage.copy_(dst, source.double(), pool=pool),
        lambda dst: pinstage.copy_(dst[:, :20], source[:, 30:50], pool=pool),
        lambda dst: pinstage.copy_rows_(dst, source, list(range(8)), pool=pool),
        leased,
        buffered,
    ]
    dsts = [[rig.filled((8, 64), torch.int32, 0) for _ in range(2)] for _ in ways]
    with rig.gate():
        for i, way in enumerate(ways):
            for step, dst in enumerate(dsts[i]):
                source.fill_(10 * i + step)
                way(dst)
        source.fill_(-1)
    for i in range(len(ways)):
        for step, dst in enumerate(dsts[i]):
            rig.expect(dst[:, :20], 10 * i + step)


@pytest.mark.raced
@pytest.mark.parametrize("copies", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_copies_have_no_wrong_byte(rig, copies):
    """Case 6."""
    dice = random.Random(copies)
    batch, longest = 400, 4096  # 400 copies and their fences fit a launch queue while its stream is held
    source = torch.empty(longest, dtype=torch.int32)
    arena = rig.filled(batch * longest, torch.int32, 0)
    expected = torch.zeros(batch * longest, dtype=torch.int32)
    number = 0
    pool = rig.pool(initial_bytes=1 << 16)
    with rig.stream() as a, rig.stream() as b, rig.stream() as c:
        for _ in range(copies // batch):
            with rig.gate(a, b, c):
                end = 0
                for _ in range(batch):
                    count, number, start = int(2 ** dice.uniform(0, 12)), number + 1, end
                    end = start + count
                    filling = source[:count].fill_(number)
                    with rig.stream(dice.choice((a, b, c))):
                        pinstage.copy_(arena[start:end], filling, pool=pool)
                    filling.fill_(-1)
                    expected[start:end] = number
            rig.expect(arena[:end], expected[:end])


@pytest.mark.parametrize(("schedule", "lying"), [("late", False), ("eager", False), ("random", False), ("late", True)])
def test_full_pool_waits_and_never_hands_out_bytes_in_flight(schedule, lying):
    """Case 6, with room for few copies. The control is that of the schedule that races most."""
    dice = random.Random(3)
    wrong = 0
    with SimulatedDevice(schedule=schedule, seed=3, lying_queries=lying) as dev:
        dev.make_current()
        pool = pinstage.StagingPool(dev, max_bytes=1 << 15)
        streams = [dev._new_stream() for _ in range(3)]
        source, dsts = torch.empty(2048, dtype=torch.int32), [dev.zeros(2048, torch.int32) for _ in range(300)]
        counts = [dice.randint(1, 2048) for _ in dsts]
        for i, (dst, count) in enumerate(zip(dsts, counts, strict=True)):
            with dev.stream(dice.choice(streams)):
                pinstage.copy_(dst[:count], source[:count].fill_(i), pool=pool)
            source.fill_(-1)
            assert pool._consistent()
        dev.synchronize()
        for i, (dst, count) in enumerate(zip(dsts, counts, strict=True)):
            wrong += int((dst[:count] != i).sum())
        assert (wrong > 0) == lying
        assert (pool.stats().waits > 0) == (schedule == "late" and not lying)


@pytest.mark.raced
def test_default_stream_is_that_of_the_destinations_device(rig, other):
    """Case 36: another device is current."""
    source, dsts = torch.empty(256, dtype=torch.int32), [other.filled(256, torch.int32, 0) for _ in range(2)]
    rig.make_current()
    default = other.device.default_stream if other.simulated else torch.cuda.default_stream(1)
    pool = other.pool()
    with other.gate(default):
        for step, dst in enumerate(dsts):
            pinstage.copy_(dst, source.fill_(step), pool=pool)
        source.fill_(-1)
        rig.synchronize()  # the fences are not on this device
        pool.reclaim()
        assert pool.stats().in_flight_bytes == 2 * 1024
    for step, dst in enumerate(dsts):
        other.expect(dst, step)
    pool.reclaim()
    assert pool.stats().in_flight_bytes == 0


@pytest.mark.both  # no control: it shows that nothing hangs, which does not hang on what queries say
def test_full_launch_queue_blocks_neither_other_threads_nor_the_interpreter(rig):
    """Case 38."""
    count = 3000  # more than a launch queue holds
    dst = rig.filled(count, torch.int32, -1)
    source = torch.empty(1, dtype=torch.int32)
    finished = threading.Event()
    pool = rig.pool()
    with rig.stream() as stream:

        def submit():
            rig.make_current()
            with rig.stream(stream):
                for i in range(count):
                    pinstage.copy_(dst[i : i + 1], source.fill_(i), pool=pool)
            finished.set()

        with latch(stream, timeout=60) as gate:
            thread = threading.Thread(target=submit)
            thread.start()
            before = -1
            while pool.stats().copies != before or before < 300:  # until it got no further
                before = pool.stats().copies
                for _ in range(2000):
                    pool.stats()
            if rig.simulated:
                pool.try_lease(16, torch.uint8).cancel()
            assert not finished.is_set()
            rig.open(gate)
            thread.join(timeout=60)
        assert finished.is_set()
        rig.expect(dst, torch.arange(count, dtype=torch.int32))


# --- every destination and source -------------------------------------------------------------------------------------

# name: shape and dtype of the device memory, the view that is written
DIRECT = {
    "contiguous": ((6, 8), FLOAT, lambda b: b),
    "zero_dim": ((), FLOAT, lambda b: b),
    "one_dim_slice": ((100,), FLOAT, lambda b: b[3:90]),
    "pitched": ((7, 64), FLOAT, lambda b: b[:, 3:40]),
    "every_second_row": ((8, 32), FLOAT, lambda b: b[::2]),
    "strided_by_two_few": ((8, 8), FLOAT, lambda b: b[::2, ::2]),
    "three_dims_pitched": ((3, 5, 64), FLOAT, lambda b: b[:, :3, :30]),
    "four_dims_repeated": ((3, 4, 5, 64), FLOAT, lambda b: b[:, :2, :3, :20]),
    "size_one_dims": ((1, 6, 1, 8), torch.int16, lambda b: b),
    "expanded_of_size_one": ((1, 8), FLOAT, lambda b: b.expand(1, 8)),
    "bytes": ((1001,), torch.uint8, lambda b: b[1:]),
    "complex": ((5, 3), torch.complex64, lambda b: b),
}
# Written by a device-side copy that reads the slot in place. A living view holds the slot on the simulated device,
# whatever the queries say, so that there is no control.
INDIRECT = {
    "transposed": ((64, 96), FLOAT, lambda b: b.t()),
    "strided_by_two": ((200, 64), FLOAT, lambda b: b[:, ::2]),
    "permuted": ((3, 4, 5, 6), torch.int16, lambda b: b.permute(2, 0, 3, 1)),
    "narrow_rows": ((500, 8), torch.uint8, lambda b: b[:, :3]),
    "many_repeats": ((20, 4, 5, 64), FLOAT, lambda b: b[:, :2, :3, :20]),
    "overlapping": ((100,), FLOAT, lambda b: b.as_strided((10, 1, 3), (4, 1, 1))),
    "conjugated": ((6, 8), torch.complex64, lambda b: b.conj()),
    "negated": ((6, 8), torch.complex64, lambda b: b.conj().imag),
    "negated_ints": ((6, 8), torch.int32, lambda b: torch._neg_view(b)),
}
# name: shape and dtype of the host memory, what of it is copied, shape and dtype of dst
SOURCES = {
    "plain": ((6, 8), FLOAT, lambda b: b, (6, 8), FLOAT),
    "double_to_float": ((6, 8), torch.float64, lambda b: b, (6, 8), FLOAT),
    "int_to_float": ((6, 8), torch.int64, lambda b: b, (6, 8), FLOAT),
    "float_to_int": ((6, 8), FLOAT, lambda b: b / 3, (6, 8), torch.int32),
    "int_to_long": ((8192,), torch.int32, lambda b: b, (8192,), torch.int64),
    "float_to_bfloat16": ((6, 8), FLOAT, lambda b: b, (6, 8), torch.bfloat16),
    "real_to_complex": ((6, 8), FLOAT, lambda b: b, (6, 8), torch.complex64),
    "row": ((8,), FLOAT, lambda b: b, (6, 8), FLOAT),
    "column": ((6, 1), FLOAT, lambda b: b, (6, 8), FLOAT),
    "scalar": ((), FLOAT, lambda b: b, (6, 8), FLOAT),
    "fewer_dims": ((2, 8), torch.int16, lambda b: b, (3, 2, 8), torch.int16),
    "expanded": ((6, 1), FLOAT, lambda b: b.expand(6, 8), (6, 8), FLOAT),
    "strided": ((12, 16), FLOAT, lambda b: b[::2, ::2], (6, 8), FLOAT),
    "transposed": ((8, 6), FLOAT, lambda b: b.t(), (6, 8), FLOAT),
    "conjugated": ((6, 8), torch.complex64, lambda b: b.conj(), (6, 8), torch.complex64),
    "negated": ((6, 8), torch.complex64, lambda b: b.conj().imag, (6, 8), FLOAT),
    "negated_ints": ((6, 8), torch.int32, lambda b: torch._neg_view(b), (6, 8), torch.int32),
    "grad_source": ((6, 8), FLOAT, lambda b: b.detach().requires_grad_(), (6, 8), FLOAT),
    "numpy": ((6, 8), FLOAT, lambda b: b.numpy(), (6, 8), FLOAT),
    "numpy_scalar": ((), FLOAT, lambda b: b.numpy(), (6, 8), FLOAT),
    "numpy_read_only": ((6, 8), FLOAT, lambda b: read_only(b.numpy()), (6, 8), FLOAT),
    "numpy_reversed": ((6, 8), FLOAT, lambda b: b.numpy()[::-1, ::-1], (6, 8), FLOAT),
    "numpy_transposed": ((8, 6), FLOAT, lambda b: b.numpy().T, (6, 8), FLOAT),
    "numpy_double": ((6, 8), torch.float64, lambda b: b.numpy(), (6, 8), FLOAT),
    "numpy_big_endian": ((6, 8), torch.int32, lambda b: b.numpy().astype(">i4"), (6, 8), torch.int32),
}


def check_destination(rig, shape, dtype, view):
    devices = [rig.filled(shape, dtype, 7) for _ in range(2)]
    hosts = [torch.full(shape, 7, dtype=dtype) for _ in range(2)]
    source = torch.empty(view(hosts[0]).shape, dtype=view(hosts[0]).dtype)
    pool = rig.pool()
    # A kernel's first launch loads it, which waits for the device: not behind a gate.
    pinstage.copy_(view(rig.filled(shape, dtype, 7)), torch.zeros(source.shape, dtype=source.dtype), pool=pool)
    rig.synchronize()
    with rig.stream(), rig.gate():
        for step, (device, host) in enumerate(zip(devices, hosts, strict=True)):
            source.copy_(numbers(source.shape, source.dtype, step))
            view(host).copy_(source)
            pinstage.copy_(view(device), source, pool=pool)
        source.fill_(99)
    for device, host in zip(devices, hosts, strict=True):
        rig.expect(device, host)


@pytest.mark.raced
@pytest.mark.parametrize("name", DIRECT)
def test_every_pitched_destination_is_written_as_torch_does(rig, name):
    """Case 28: and without waiting for the stream, which is held."""
    check_destination(rig, *DIRECT[name])


@pytest.mark.both
@pytest.mark.parametrize("name", INDIRECT)
def test_every_other_destination_is_written_as_torch_does(rig, name):
    """Case 28."""
    check_destination(rig, *INDIRECT[name])


@pytest.mark.raced
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_read_before_the_call_returns(rig, name):
    """Cases 1 and 28."""
    shape, dtype, view, dst_shape, dst_dtype = SOURCES[name]
    base = torch.empty(shape, dtype=dtype)
    devices = [rig.filled(dst_shape, dst_dtype, 7) for _ in range(2)]
    hosts = [torch.empty(dst_shape, dtype=dst_dtype) for _ in range(2)]
    pool = rig.pool()
    with torch.no_grad(), rig.stream(), rig.gate():
        for step, (device, host) in enumerate(zip(devices, hosts, strict=True)):
            base.copy_(numbers(shape, dtype, step))
            if dtype.is_complex:
                base.imag.copy_(numbers(shape, FLOAT, 2 * step + 1))
            host.copy_(plain(view(base)))
            pinstage.copy_(device, view(base), pool=pool)
            base.fill_(99)
    for device, host in zip(devices, hosts, strict=True):
        rig.expect(device, host)


# --- the semantics of Tensor.copy_: no races here, hence no controls --------------------------------------------------


@pytest.mark.both
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copy_returns_dst(rig, non_blocking):
    dst = rig.empty(4)
    assert pinstage.copy_(dst, torch.ones(4), non_blocking) is dst
    rig.expect(dst, 1)


def test_blocking_copy_is_done_when_it_returns(dev):
    dst = dev.zeros(4)
    pinstage.copy_(dst, torch.ones(4), non_blocking=False)
    assert dst.tolist() == [1] * 4
    assert dev.pending() == 0


@pytest.mark.both
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_copy_of_no_elements_does_nothing(rig, shape):
    pool = rig.pool()
    before = pool.stats()
    pinstage.copy_(rig.empty(shape), torch.empty(shape), pool=pool)
    assert pool.stats() == before


VERSIONED = {
    "fast": lambda b: (b, torch.zeros(6, 64)),
    "cast": lambda b: (b, torch.zeros(6, 64, dtype=torch.int64)),
    "device_side": lambda b: (b.t(), torch.zeros(64, 6)),
    "no_elements": lambda b: (b[:0], torch.zeros(0, 64)),
}


@pytest.mark.both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VERSIONED)
def test_version_counter_moves_as_torch_moves_it(rig, name, mode):
    device, host = rig.filled((6, 64), FLOAT, 0), torch.zeros(6, 64)
    versions = device._version, host._version
    with mode():
        dst, source = VERSIONED[name](device)
        twin, _ = VERSIONED[name](host)
        pinstage.copy_(dst, source)
        twin.copy_(source)
    rig.synchronize()
    assert device._version - versions[0] == host._version - versions[1]


@pytest.mark.both
def test_inference_tensors_can_be_written_in_inference_mode(rig):
    with torch.inference_mode():
        dst = rig.empty((4, 4))
        pinstage.copy_(dst, torch.ones(4, 4))
        pinstage.copy_(dst[:, :2], torch.zeros(4, 2, dtype=torch.int64))
    rig.expect(dst, torch.tensor([0.0, 0, 1, 1]))


@pytest.mark.both
def test_inference_tensors_outside_of_inference_mode_raise_as_torch_does(rig):
    with torch.inference_mode():
        dst = rig.empty(4)
    with pytest.raises(RuntimeError, match="inference tensor"):
        pinstage.copy_(dst, torch.ones(4))


@pytest.mark.both
def test_gradients_flow_through_a_copy(rig):
    source = torch.ones(4, requires_grad=True)
    dst = rig.filled(4, FLOAT, 0)
    pinstage.copy_(dst, source)
    dst.sum().backward()
    assert source.grad.tolist() == [1] * 4


@pytest.mark.both
@pytest.mark.parametrize("source", [torch.ones(4), torch.ones(4, dtype=torch.int64)])
def test_leaf_that_requires_grad_raises_as_torch_does(rig, source):
    dst = rig.filled(4, FLOAT, 0).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        pinstage.copy_(dst, source)
    with torch.no_grad():
        pinstage.copy_(dst, source)
    rig.expect(dst, 1)


@pytest.mark.both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its first use of forward mode
def test_forward_mode_tangents_are_copied(rig):
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        dst = rig.filled(4, FLOAT, 0)
        pinstage.copy_(dst, forward.make_dual(torch.ones(4), torch.full((4,), 2.0)))
        assert forward.unpack_dual(dst).tangent.tolist() == [2] * 4


class Tagged(torch.Tensor):
    pass


@pytest.mark.both
def test_subclasses_are_left_to_torch_and_safe(rig):
    """Case 37, without a gate: torch then waits for the copy."""
    source, dst = rig.pinned(4, FLOAT).fill_(1), rig.filled(4, FLOAT, 0)
    assert isinstance(pinstage.copy_(dst.as_subclass(Tagged), source), Tagged)
    source.fill_(2)
    rig.expect(dst, 1)
    pinstage.copy_(dst, source.as_subclass(Tagged))
    source.fill_(3)
    rig.expect(dst, 2)


@pytest.mark.both
def test_active_function_mode_sees_the_copy(rig):
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    dst = rig.filled(4, FLOAT, 0)
    with Recorder():
        pinstage.copy_(dst, torch.ones(4))
    rig.expect(dst, 1)
    assert torch.Tensor.copy_ in seen


REFUSED = {
    "shape": lambda dst: (dst, torch.zeros(5)),
    "more_dims": lambda dst: (dst, torch.zeros(2, 3, 4)),
    "expanded_dst": lambda dst: (dst[:1].expand(3, 4), torch.zeros(3, 4)),
    "expanded_dst_cast": lambda dst: (dst[:1].expand(3, 4), torch.zeros(3, 4, dtype=torch.int64)),
}


@pytest.mark.both
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_raises_as_torch_raises_it_and_changes_nothing(rig, name):
    device, pool = rig.filled((3, 4), FLOAT, 7), rig.pool()
    with rig.pool() as another:  # the device has its first event
        pinstage.copy_(rig.empty(4), torch.zeros(4), pool=another)
    before = pool.stats()
    twin, source = REFUSED[name](torch.zeros(3, 4))
    with pytest.raises(RuntimeError) as theirs:
        twin.copy_(source)
    with pytest.raises(RuntimeError) as ours:
        pinstage.copy_(REFUSED[name](device)[0], source, pool=pool)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    assert pool.stats() == before
    rig.expect(device, 7)


@pytest.mark.both
def test_other_directions_are_torchs(rig):
    device, host = rig.empty(4), torch.empty(4)
    pinstage.copy_(device, torch.arange(4.0))
    assert pinstage.copy_(host, device) is host  # waits for what is queued on the device
    rig.synchronize()
    assert host.tolist() == [0, 1, 2, 3]
    second = rig.empty(4, torch.int64)
    pinstage.copy_(second, device)
    rig.expect(second, torch.arange(4))
    pinstage.copy_(host, np.ones(4))
    assert host.tolist() == [1] * 4


def test_copy_from_a_pinned_slot_copies_nothing_else(dev):
    """The fast path is one host copy, one driver copy, one fence."""
    pool, dst, source = pinstage.StagingPool(dev), dev.empty(64), torch.zeros(64)
    pinstage.copy_(dst, source, pool=pool)
    before = dev.calls
    pinstage.copy_(dst, source, pool=pool)
    made = {name: count - before[name] for name, count in dev.calls.items() if count != before[name]}
    assert made.pop("cuMemcpyHtoDAsync") == 1
    assert made.pop("cuEventRecord") == 1
    assert set(made) <= {
        "cuEventQuery", "cuStreamIsCapturing", "cuCtxGetCurrent", "cuThreadExchangeStreamCaptureMode", "cuEventCreate",
        "cuStreamGetId",
    }  # fmt: skip


@pytest.mark.parametrize(
    "block", ["torch.inference_mode()", "torch.device('meta')", "torch.no_grad()", "FakeTensorMode()"]
)
def test_package_can_be_imported_inside_any_mode(block):
    program = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with {block}:
    import pinstage
from pinstage.testing import SimulatedDevice
with SimulatedDevice() as dev:
    dst, src = dev.zeros(4), torch._neg_view(torch.ones(4))
    version = dst._version
    pinstage.copy_(dst, src)
    dev.synchronize()
    assert (dst.tolist(), dst._version) == ([-1] * 4, version + 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=TESTS
    )
    assert (done.returncode, done.stderr) == (0, "")
