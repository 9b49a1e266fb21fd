# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad input: a typed error that says what, the numbers and the remedy, and nothing changed.

No controls: these calls are refused before any work is queued. Rows and indices are in test_gather_rows.py and
test_copy_rows.py, capture in test_capture.py, uses after the hand-over in test_lease.py.
"""

from __future__ import annotations

import pytest
import torch

import pinstage
from pinstage import DriverError, LeaseStateError, PoolExhausted
from pinstage.testing import SimulatedDevice


@pytest.fixture
def pool(rig):
    pool, dst = rig.pool(max_bytes=64 << 10), rig.empty(64)
    pinstage.copy_(dst, torch.zeros(64), pool=pool)  # there is a slab, and there are events
    rig.synchronize()
    pool.reclaim()
    return pool


LEASES = {
    "negative": (lambda p: p.lease((3, -1), torch.int8), ValueError, "negative: -1"),
    "fraction": (lambda p: p.lease((2.5,), torch.int8), TypeError, None),
    "text": (lambda p: p.lease("ab", torch.int8), TypeError, None),
    "no_shape": (lambda p: p.lease(None, torch.int8), TypeError, None),
    "too_many_dims": (lambda p: p.lease((1,) * 100, torch.int8), ValueError, r"at most \d+ dimensions, this shape 100"),
    "quantized": (lambda p: p.lease(4, torch.quint8), TypeError, "cannot hold torch.quint8; stage its bytes"),
    "no_dtype": (lambda p: p.lease(4, "int8"), TypeError, "cannot hold int8"),
    "oversize": (
        lambda p: p.lease(65 << 10, torch.int8),
        PoolExhausted,
        r"no room for 66560 bytes.*larger than max_bytes",
    ),
    "try_oversize": (
        lambda p: p.try_lease(65 << 10, torch.int8),
        PoolExhausted,
        "larger than max_bytes.*Raise max_bytes",
    ),
    "absurd": (lambda p: p.lease((1 << 40, 1 << 40), torch.int8), PoolExhausted, "no host has the memory"),
    "overflow": (lambda p: p.lease((1 << 62, 1 << 62, 4), torch.int64), PoolExhausted, "no host has the memory"),
    "negative_timeout": (lambda p: p.lease(4, torch.int8, timeout=-1), ValueError, "timeout"),
    "nan_timeout": (lambda p: p.lease(4, torch.int8, timeout=float("nan")), ValueError, "timeout"),
    "reserve_too_much": (lambda p: p.reserve(1 << 30), PoolExhausted, r"1073741824 bytes.*max_bytes 65536"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", LEASES)
def test_bad_lease_changes_nothing(rig, pool, name):
    call, error, match = LEASES[name]
    with rig.unchanged(pool), pytest.raises(error, match=match):
        call(pool)


SUBMISSIONS = {
    "shape": (lambda r, lease: lease.copy_to(r.empty((3, 4))), ValueError, r"\(3, 4\).*\(4, 4\).*lease what dst needs"),
    "fewer_dims": (
        lambda r, lease: lease.copy_to(r.empty(16)),
        ValueError,
        r"\(16,\) torch.float32, the lease \(4, 4\)",
    ),
    "dtype": (lambda r, lease: lease.copy_to(r.empty((4, 4), torch.int32)), ValueError, "torch.int32, the lease"),
    "host": (lambda r, lease: lease.copy_to(torch.empty(4, 4)), ValueError, "host memory.*use a pool of dst's device"),
    "no_tensor": (lambda r, lease: lease.copy_to([1]), TypeError, "copy_to needs a tensor, not list"),
    "no_stream": (lambda r, lease: lease.retire(), TypeError, "needs the streams that read the slot"),
    "not_a_stream": (lambda r, lease: lease.retire("s"), TypeError, "__cuda_stream__; got str"),
    "second_not_a_stream": (lambda r, lease: lease.retire(r.current_stream(), None), TypeError, "got NoneType"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", SUBMISSIONS)
def test_bad_submission_changes_nothing_and_leaves_the_lease_open(rig, pool, name):
    call, error, match = SUBMISSIONS[name]
    lease = pool.lease((4, 4), torch.float32)
    lease.tensor.fill_(1)
    with rig.unchanged(pool), pytest.raises(error, match=match):
        call(rig, lease)
    assert lease.tensor.sum() == 16
    lease.cancel()


@pytest.mark.both
def test_destination_on_another_device_changes_nothing(rig, other, pool):
    lease = pool.lease(4, torch.float32)
    dst = other.filled(4, torch.float32, 7)
    with rig.unchanged(pool):
        with pytest.raises(ValueError, match=f"on {other.core().name}|in {other.core().name}"):
            lease.copy_to(dst)
        with pytest.raises(ValueError, match="use a pool of dst's device"):
            pinstage.copy_(dst, torch.zeros(4), pool=pool)
        with pytest.raises(ValueError, match="use a pool of dst's device"):
            pinstage.copy_rows_(dst, torch.zeros(4), [0], pool=pool)
        with pytest.raises(ValueError, match="another device"):
            pinstage.DoubleBuffer(4, torch.float32, other.device, pool=pool)
    lease.cancel()
    other.expect(dst, 7)


COPIES = {
    "list_dst": (lambda dst: ([1.0], torch.zeros(1)), TypeError, "dst must be a torch.Tensor, not list"),
    "list_src": (lambda dst: (dst, [1.0] * 4), TypeError, "src must be a torch.Tensor or a NumPy array, not list"),
    "no_src": (lambda dst: (dst, None), TypeError, "src must be a torch.Tensor or a NumPy array, not NoneType"),
    "shape": (lambda dst: (dst, torch.zeros(5)), RuntimeError, r"size of tensor a \(4\) must match .* b \(5\)"),
    "swapped": (lambda dst: (torch.zeros(3), dst), RuntimeError, "must match"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", COPIES)
def test_bad_copy_changes_nothing(rig, pool, name):
    make, error, match = COPIES[name]
    dst = rig.filled(4, torch.float32, 7)
    version = dst._version
    with rig.unchanged(pool), pytest.raises(error, match=match):
        pinstage.copy_(*make(dst), pool=pool)
    assert dst._version == version
    rig.expect(dst, 7)


@pytest.mark.both
def test_pool_of_another_type_is_refused(rig):
    dst = rig.filled(4, torch.float32, 7)
    with pytest.raises((TypeError, ValueError), match="pool"):
        pinstage.copy_(dst, torch.zeros(4), pool="mine")
    rig.expect(dst, 7)


@pytest.mark.both
def test_closed_pool_refuses_all_but_its_end(rig, pool):
    pool.close()
    dst = rig.filled(4, torch.float32, 7)
    for call in (
        lambda: pool.lease(4, torch.float32),
        lambda: pool.try_lease(4, torch.float32),
        lambda: pool.reserve(4),
        lambda: pinstage.copy_(dst, torch.zeros(4), pool=pool),
        lambda: pinstage.copy_(dst, torch.zeros(4, dtype=torch.int64), pool=pool),
        lambda: pinstage.copy_rows_(dst, torch.zeros(4), [0], pool=pool),
        lambda: pinstage.DoubleBuffer(4, torch.float32, pool=pool),
    ):
        with rig.unchanged(pool), pytest.raises(LeaseStateError, match="closed; make a new one"):
            call()
    assert pool.reclaim(synchronize=True) == 0
    assert pool.trim() == 0
    pool.close()
    rig.expect(dst, 7)


POOLS = {
    "when_full": ({"when_full": "grow"}, ValueError, '"wait" or "raise", not \'grow\''),
    "no_bytes": ({"max_bytes": 0}, ValueError, "at least 256.*max_bytes 0"),
    "negative": ({"initial_bytes": -1}, ValueError, "must be positive.*initial_bytes -1"),
    "below_a_slot": ({"max_bytes": 255}, ValueError, "at least 256.*max_bytes 255"),
    "fraction": ({"max_bytes": 1000.5}, TypeError, None),
    "host": ({"device": "cpu"}, ValueError, "not to cpu"),
    "nonsense": ({"device": "nonsense"}, (ValueError, RuntimeError), None),
}


@pytest.mark.parametrize("name", POOLS)
def test_bad_pool_is_refused(dev, name):
    options, error, match = POOLS[name]
    with pytest.raises(error, match=match):
        pinstage.StagingPool(**{"device": dev, **options})
    assert dev.host_allocations == 0


@pytest.mark.parametrize(
    ("variable", "value", "match"),
    [
        ("PINSTAGE_MAX_BYTES", "lots", "PINSTAGE_MAX_BYTES must be a positive number of bytes, not 'lots'"),
        ("PINSTAGE_MAX_BYTES", "0", "positive number of bytes"),
        ("PINSTAGE_PINNED", "maybe", 'PINSTAGE_PINNED is "auto" or "never", not \'maybe\''),
    ],
)
def test_bad_environment_is_named(dev, monkeypatch, variable, value, match):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=match):
        pinstage.StagingPool(dev)


def test_device_that_is_closed_says_so():
    dev = SimulatedDevice()
    pool = pinstage.StagingPool(dev)
    dev.close()
    with pytest.raises((LeaseStateError, DriverError), match=r"shut down|closed"):
        pool.lease(4, torch.int8)
    with pytest.raises((LeaseStateError, DriverError), match=r"shut down|closed"):
        pinstage.StagingPool(dev).lease(4, torch.int8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_names_the_simulated_device():
    with pytest.raises(DriverError, match="SimulatedDevice"):
        pinstage.StagingPool("cuda:0")
    with pytest.raises(DriverError, match="SimulatedDevice"):
        pinstage.StagingPool()


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_bad_timeouts_of_tickets_and_fills_are_refused(dev, timeout):
    ticket = pinstage.keep_alive(None, dev.default_stream)
    with pytest.raises(ValueError, match="timeout"):
        ticket.wait(timeout)
    buffer = pinstage.DoubleBuffer(4, torch.int8, dev)
    with pytest.raises(ValueError, match="timeout"), buffer.fill(timeout):
        pass


@pytest.mark.parametrize("stream", [None, "s", 1.5])
def test_ticket_waits_on_streams_alone(dev, stream):
    ticket = pinstage.keep_alive(None, dev.default_stream)
    with pytest.raises(TypeError, match=r"a stream is a torch.cuda.Stream, an int handle or has __cuda_stream__"):
        ticket.wait_on(stream)


def test_errors_are_what_a_caller_would_catch():
    for name in ("PoolExhausted", "LeaseStateError", "CaptureError", "DriverError", "ForkedError", "WaitTimeout"):
        error = getattr(pinstage, name)
        assert issubclass(error, pinstage.PinstageError)
        assert issubclass(error, TimeoutError if name == "WaitTimeout" else RuntimeError)
