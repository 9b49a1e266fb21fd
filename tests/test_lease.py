# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Leases: who may write a slot, when it is handed over, and when its bytes are handed out again."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest
import torch

import pinstage
from pinstage import LeaseStateError

SLOT = 1024  # bytes of what most tests lease: 256 int32


def lease_of(pool, value):
    lease = pool.lease(256, torch.int32)
    lease.tensor.fill_(value)
    return lease


# --- the race -------------------------------------------------------------------------------------------------------


@pytest.mark.raced
def test_dropped_lease_keeps_its_bytes_until_the_copy_has_run(rig):
    """Case 11."""
    dsts = [rig.filled(256, torch.int32, 0) for _ in range(3)]
    pool = rig.pool()
    with rig.stream(), rig.gate():
        for step, dst in enumerate(dsts):
            with lease_of(pool, step) as lease:
                lease.copy_to(dst)
            del lease
            gc.collect()
        lease_of(pool, -1).cancel()
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)


@pytest.mark.raced
def test_slot_waits_for_the_slowest_of_its_destinations(rig):
    """Case 11, with two streams."""
    quick_dst, slow_dst = (rig.filled(256, torch.int32, 0) for _ in range(2))
    pool = rig.pool()
    with rig.stream() as slow, rig.stream() as quick:
        with rig.gate(slow):
            with lease_of(pool, 1) as lease:
                for stream, dst in ((slow, slow_dst), (quick, quick_dst)):
                    with rig.stream(stream):
                        lease.copy_to(dst)
            quick.synchronize()
            pool.reclaim()
            lease_of(pool, 2).cancel()
            assert pool.stats().in_flight_bytes == SLOT
        slow.synchronize()
        pool.reclaim()
        assert pool.stats().in_flight_bytes == 0
    rig.expect(quick_dst, 1)
    rig.expect(slow_dst, 1)


@pytest.mark.raced
def test_retired_streams_may_read_the_slot_in_place(rig):
    """Case 2, with torch's own kernels."""
    dsts = [rig.filled(256, torch.int32, 0) for _ in range(2)]
    pool = rig.pool()
    with rig.stream() as a, rig.stream() as b, rig.gate(a, b):
        lease = lease_of(pool, 1)
        for stream, dst in zip((a, b), dsts, strict=True):
            with rig.stream(stream):
                address = lease.device_view if not rig.simulated else unguarded(lease.tensor)
                rig.launch(lambda dst=dst, address=address: dst.copy_(address, non_blocking=True))
        del address
        lease.retire(a, b)
        lease.close()
        lease_of(pool, 2).cancel()
    for dst in dsts:
        rig.expect(dst, 1)


def take_rows(dst, table, index):
    """Stays inside the table with any index: the control's is overwritten."""
    torch.index_select(table, 0, index.clamp(0, len(table) - 1), out=dst)


@pytest.mark.raced
def test_kernel_on_a_raw_stream_sees_the_slots_that_it_was_launched_with(rig):
    """Case 2: it reads a table and an index in place; both are refilled behind the gate."""
    pool, seen = rig.pool(), [rig.filled((2, 8), torch.int32, 0) for _ in range(2)]
    tables = [torch.arange(64, dtype=torch.int32).view(8, 8) + 100 * step for step in range(2)]
    indices = [torch.tensor([7, 2]), torch.tensor([0, 5])]
    # Once before: the first launch of a kernel may wait for the whole device, which a gate would hold.
    take_rows(rig.empty((2, 8), torch.int32), rig.filled((8, 8), torch.int32, 0), rig.filled(2, torch.int64, 0))
    with rig.stream() as stream:
        handle = int(stream.__cuda_stream__()[1])
        with rig.gate(stream):
            for table, index, dst in zip(tables, indices, seen, strict=True):
                with pool.lease((8, 8), torch.int32) as rows, pool.lease(2, torch.int64) as numbers:
                    rows.tensor.copy_(table)
                    numbers.tensor.copy_(index)
                    views = [
                        unguarded(lease.tensor).view(lease.shape) if rig.simulated else lease.device_view
                        for lease in (rows, numbers)
                    ]
                    rig.launch(partial(take_rows, dst, *views))
                    del views
                    rows.retire(handle)
                    ticket = numbers.retire(handle)
            if not rig.lying:
                assert not ticket.done()
    for table, index, dst in zip(tables, indices, seen, strict=True):
        rig.expect(dst, table[index])


def unguarded(tensor):
    """The same bytes as a raw kernel knows them: by address, without a tensor that would hold the slot."""
    return torch.frombuffer((ctypes_array(tensor)).from_address(tensor.data_ptr()), dtype=tensor.dtype)


def ctypes_array(tensor):
    import ctypes

    return ctypes.c_char * (tensor.numel() * tensor.element_size())


@pytest.mark.both  # no control: a living view holds the bytes, and no query is asked about it
@pytest.mark.parametrize("keep", ["tensor", "slice", "numpy", "memoryview"])
def test_kept_view_keeps_its_bytes_to_itself(rig, keep):
    """Case 12."""
    first, second = (rig.filled(256, torch.int32, 0) for _ in range(2))
    pool = rig.pool()
    with lease_of(pool, 1) as lease:
        lease.copy_to(first)
        view = {
            "tensor": lambda t: t,
            "slice": lambda t: t[7:9],
            "numpy": lambda t: t.numpy(),
            "memoryview": lambda t: memoryview(t.numpy()),
        }[keep](lease.tensor)
    rig.synchronize()
    pool.reclaim()
    assert pool.stats().held_bytes == SLOT
    with lease_of(pool, 2) as lease:
        view[0] = 9
        lease.copy_to(second)
    rig.expect(first, 1)
    rig.expect(second, 2)
    assert view[0] == 9
    del view
    pool.reclaim()
    assert (pool.stats().held_bytes, pool.stats().free_bytes) == (0, pool.stats().capacity_bytes)


@pytest.mark.both  # no control: see above
def test_view_outlives_pool_and_device(rig):
    """Case 12."""
    pool = rig.pool()
    with lease_of(pool, 1) as lease:
        lease.copy_to(rig.empty(256, torch.int32))
        view = lease.tensor
    pool.close()
    del pool, lease
    gc.collect()
    view.fill_(5)
    assert view.tolist() == [5] * 256


def test_kept_name_costs_one_slot_more_and_is_told(dev):
    pool = pinstage.StagingPool(dev, max_bytes=4096, when_full="raise")
    dst = dev.empty(512, torch.int32)
    for _ in range(5):
        with pool.lease(512, torch.int32) as lease:
            view = lease.tensor.fill_(1)
            lease.copy_to(dst)
        dev.synchronize()
    assert pool.stats().high_water_bytes == 4096
    pool.reclaim()
    with pytest.raises(pinstage.PoolExhausted, match="held by living tensors 2048"):
        pool.lease(1024, torch.int32)
    del view


# --- hand-over ------------------------------------------------------------------------------------------------------


@pytest.mark.both  # no control: nothing here depends on whether work has run
def test_undeclared_lease_raises_and_parks_its_slot(rig):
    """Case 3."""
    pool = rig.pool()
    with pytest.raises(LeaseStateError, match=r"parked until pool\.reclaim"), lease_of(pool, 1) as lease:
        pass
    assert pool.stats().parked_bytes == SLOT
    rig.synchronize()
    assert pool.reclaim() == 0
    assert pool.stats().parked_bytes == SLOT
    assert pool.reclaim(synchronize=True) == SLOT
    assert pool.stats().parked_bytes == 0
    with pytest.raises(LeaseStateError, match="handed over"):
        _ = lease.tensor


def test_no_public_name_copies_without_a_fence():
    """Case 3: what takes a lease's bytes to the device returns a ticket or retires."""
    public = {name for name in dir(pinstage.Lease) if not name.startswith("_")}
    reading = {"tensor", "device_view", "shape", "dtype"}
    assert public - {"fill_with"} == {"copy_to", "retire", "cancel", "close"} | reading


@pytest.mark.both  # no control: parked bytes are safe by not being asked about
def test_parked_bytes_are_not_reused_while_an_unknown_reader_may_run(rig):
    """Case 3."""
    dst = rig.filled(256, torch.int32, 0)
    pool = rig.pool()
    with rig.stream(), rig.gate():
        lease = lease_of(pool, 1)
        address = lease.device_view if not rig.simulated else unguarded(lease.tensor)
        rig.launch(lambda: dst.copy_(address, non_blocking=True))
        with pytest.raises(LeaseStateError):
            lease.close()
        for _ in range(3):
            lease_of(pool, 2).cancel()
            pool.reclaim()
    rig.expect(dst, 1)


@pytest.mark.parametrize("give_back", ["reclaim", "trim", "close"])
def test_parked_bytes_come_back_by(dev, give_back):
    pool = pinstage.StagingPool(dev)
    with pytest.raises(LeaseStateError):
        lease_of(pool, 1).close()
    {"reclaim": lambda: pool.reclaim(synchronize=True), "trim": pool.trim, "close": pool.close}[give_back]()
    assert pool.stats().parked_bytes == 0
    assert pool.stats().capacity_bytes == (8 << 20 if give_back == "reclaim" else 0)
    assert dev.host_allocations == (give_back == "reclaim")


def test_exception_under_way_is_let_through_and_the_slot_parks(dev):
    pool = pinstage.StagingPool(dev)
    with pytest.raises(KeyError, match="mine"), lease_of(pool, 1):
        raise KeyError("mine")
    assert pool.stats().parked_bytes == SLOT


def test_collected_undeclared_lease_warns_and_parks_its_slot(dev):
    pool = pinstage.StagingPool(dev)
    lease = lease_of(pool, 1)
    with pytest.warns(ResourceWarning, match=r"lease of \(256,\) torch.int32 was dropped"):
        del lease
    assert pool.stats().parked_bytes == SLOT


def test_collected_declared_lease_is_handed_over_silently(dev):
    pool = pinstage.StagingPool(dev)
    lease = lease_of(pool, 1)
    lease.copy_to(dev.empty(256, torch.int32))
    del lease
    assert pool.stats().in_flight_bytes == SLOT


def test_cancelled_lease_is_free_at_once(dev):
    pool = pinstage.StagingPool(dev)
    with lease_of(pool, 1) as lease:
        lease.cancel()
    assert pool.stats().free_bytes == pool.stats().capacity_bytes


@pytest.mark.parametrize("declare", ["copy_to", "retire"])
def test_declared_lease_cannot_be_cancelled(dev, declare):
    pool, dst = pinstage.StagingPool(dev), dev.empty(256, torch.int32)
    with lease_of(pool, 1) as lease:
        lease.copy_to(dst) if declare == "copy_to" else lease.retire(dev.default_stream)
        with pytest.raises(LeaseStateError, match="cannot be cancelled"):
            lease.cancel()
    dev.synchronize()
    assert pool.reclaim() == SLOT


USES = {
    "tensor": lambda lease, dst: lease.tensor,
    "device_view": lambda lease, dst: lease.device_view,
    "copy_to": lambda lease, dst: lease.copy_to(dst),
    "copy_to_strided": lambda lease, dst: lease.copy_to(dst.view(16, 16).t().reshape(256)),
    "retire": lambda lease, dst: lease.retire(0),
    "cancel": lambda lease, dst: lease.cancel(),
    "close": lambda lease, dst: lease.close(),
}


@pytest.mark.both
@pytest.mark.parametrize("end", ["close", "cancel"])
@pytest.mark.parametrize("use", USES)
def test_every_use_after_the_hand_over_raises_and_changes_nothing(rig, use, end):
    """Double hand-back among them; a lease that got the same slot meanwhile is not touched."""
    pool, dst = rig.pool(), rig.filled(256, torch.int32, 7)
    lease = lease_of(pool, 1)
    if end == "close":
        lease.copy_to(dst)
    getattr(lease, end)()
    rig.synchronize()
    pool.reclaim()
    successor = lease_of(pool, 2)
    with rig.unchanged(pool), pytest.raises(LeaseStateError, match="handed over or cancelled; take a new one"):
        USES[use](lease, dst)
    assert successor.tensor.tolist() == [2] * 256
    successor.cancel()


@pytest.mark.parametrize("use", ["copy_to", "retire"])
def test_lease_of_a_closed_pool_can_only_end(dev, use):
    """Its slab is freed by the next call that may use the driver, be it of another pool."""
    pool, dst = pinstage.StagingPool(dev), dev.empty(256, torch.int32)
    lease = lease_of(pool, 1)
    pool.close()
    with pytest.raises(LeaseStateError, match="closed"):
        USES[use](lease, dst)
    lease.cancel()
    assert dev.host_allocations == 1
    if use == "copy_to":
        pool.trim()
    else:
        del pool, lease
        pinstage.StagingPool(dev)
    assert dev.host_allocations == 0


def test_lease_may_be_handed_over_by_another_thread(dev):
    pool, dst = pinstage.StagingPool(dev), dev.zeros(256, torch.int32)
    lease = lease_of(pool, 3)
    errors = []

    def finish():
        try:
            lease.copy_to(dst)
            lease.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    assert errors == []
    dev.synchronize()
    assert dst.tolist() == [3] * 256


# --- what a lease is ------------------------------------------------------------------------------------------------


@pytest.mark.both
@pytest.mark.parametrize("shape", [(), (1,), 5, (3, 4), (2, 1, 3, 1, 2), (0,), (3, 0)])
def test_tensor_has_exactly_the_leased_shape(rig, shape):
    pool = rig.pool()
    lease = pool.lease(shape, torch.float16)
    expected = torch.empty(shape, dtype=torch.float16)
    assert (lease.tensor.shape, lease.tensor.dtype) == (expected.shape, expected.dtype)
    assert lease.shape == tuple(expected.shape)
    assert lease.tensor.is_contiguous()
    assert lease.tensor.device.type == "cpu"
    assert lease.tensor is lease.tensor
    assert lease.tensor.data_ptr() % 256 == 0
    assert rig.simulated or lease.tensor.numel() == 0 or lease.tensor.is_pinned()
    lease.cancel()


@pytest.mark.both
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ],
)  # fmt: skip
def test_every_dtype_with_plain_bytes_can_be_leased_and_copied(rig, dtype):
    dst = rig.empty((4, 8), dtype)
    bits = torch.arange(4 * 8 * dtype.itemsize, dtype=torch.uint8) % 2
    with rig.pool() as pool:
        with pool.lease((4, 8), dtype) as lease:
            assert lease.tensor.dtype == dtype
            lease.tensor.view(torch.uint8).view(-1).copy_(bits)
            lease.copy_to(dst)
        rig.synchronize()
        assert torch.equal(dst.cpu().view(torch.uint8).view(-1), bits)
        pinstage.copy_(dst, torch.zeros((4, 8), dtype=torch.uint8).repeat(1, dtype.itemsize).view(dtype), pool=pool)
        rig.synchronize()
        assert not dst.cpu().view(torch.uint8).any()


@pytest.mark.both
@pytest.mark.parametrize(
    "view",
    [lambda b: b, lambda b: b[:, 1:9], lambda b: b[::2], lambda b: b.t(), lambda b: b[:, ::3], lambda b: b[:0]],
    ids=["dense", "pitched", "rows", "transposed", "strided", "no_elements"],
)
def test_copy_to_takes_a_destination_of_any_strides(rig, view):
    device, host = rig.filled((70, 12), torch.int32, 0), torch.zeros((70, 12), dtype=torch.int32)
    shape = tuple(view(host).shape)
    values = torch.arange(view(host).numel(), dtype=torch.int32).reshape(shape)
    view(host).copy_(values)
    with rig.pool() as pool:
        with pool.lease(shape, torch.int32) as lease:
            lease.tensor.copy_(values)
            ticket = lease.copy_to(view(device))
        ticket.wait()
        assert ticket.done()
    rig.expect(device, host)


def test_repr_tells_shape_device_and_state(dev):
    lease = pinstage.StagingPool(dev).lease((2, 3), torch.int8)
    assert repr(lease) == "<Lease (2, 3) torch.int8 on simulated:0, open>"
    lease.cancel()
    assert repr(lease) == "<Lease (2, 3) torch.int8 on simulated:0, handed over>"
