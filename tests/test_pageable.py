# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Machines that cannot pin memory, or must not: the slots are pageable, and everything else is as it was."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage import cuda, devices
from pinstage.testing import SimulatedDevice

TESTS = Path(__file__).parent
OUT_OF_MEMORY, NOT_PERMITTED, NOT_SUPPORTED = 2, 800, 801
KB = 1024
WARNING = "uses pageable memory"


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
def refuse(out, nbytes, flags):
    return NOT_SUPPORTED


def refuse_to_pin(dev, status):
    for entry in ("cuMemHostRegister", "cuMemHostAlloc"):  # the second is asked where the first refuses
        dev.fail(entry, status=status, times=100)


@pytest.fixture(params=["never", "refused"])
def unpinned(request, rig, monkeypatch):
    """`rig`, where pinning is switched off, or the driver refuses it."""
    if request.param == "never":
        monkeypatch.setenv("PINSTAGE_PINNED", "never")
    elif rig.simulated:
        refuse_to_pin(rig.device, NOT_SUPPORTED)
    else:
        entry = ctypes.cast(refuse, ctypes.c_void_p).value
        overrides = {"cuMemHostRegister": entry, "cuMemHostAlloc": entry}
        rig.device = devices._cuda_devices[rig.index] = cuda.open_device(rig.index, overrides)
    return rig


@pytest.mark.both  # no control: a driver may copy pageable memory before it returns, and then nothing races
def test_every_way_of_staging_is_correct_without_pinned_memory(unpinned):
    """Case 27."""
    rig = unpinned
    pool = rig.pool(initial_bytes=16 * KB)
    with pytest.warns(RuntimeWarning, match=WARNING):
        pool.reserve(16 * KB)
    assert pool.stats().pageable
    source = torch.empty(32, 32, dtype=torch.int32)
    ways = {
        "copy": lambda dst: pinstage.copy_(dst, source, pool=pool),
        "cast": lambda dst: pinstage.copy_(dst, source.double(), pool=pool),
        "transposed": lambda dst: pinstage.copy_(dst.t(), source, pool=pool),
        "rows": lambda dst: pinstage.copy_rows_(dst, source, list(range(32)), pool=pool),
        "lease": lambda dst: leased(dst),
        "buffer": lambda dst: filled(dst),
    }
    buffer = pinstage.DoubleBuffer((32, 32), torch.int32, rig.device, pool=pool)

    def leased(dst):
        with pool.lease((32, 32), torch.int32) as lease:
            assert not lease.tensor.is_pinned()
            lease.tensor.copy_(source)
            lease.copy_to(dst)
            lease.copy_to(dst.t())
            lease.copy_to(dst)

    def filled(dst):
        with buffer.fill() as host:
            host.copy_(source)
        buffer.copy_to(dst)

    dsts = {name: [rig.filled((32, 32), torch.int32, 0) for _ in range(3)] for name in ways}
    for name, way in ways.items():
        for step, dst in enumerate(dsts[name]):
            source.copy_(torch.arange(1024).reshape(32, 32) + step)
            way(dst)
            source.fill_(-1)
    for name in ways:
        for step, dst in enumerate(dsts[name]):
            expected = torch.arange(1024, dtype=torch.int32).reshape(32, 32) + step
            rig.expect(dst, expected.t() if name == "transposed" else expected)
    pool.reclaim()
    assert pool._consistent()


@pytest.mark.parametrize("lying", [False, True])
def test_pageable_slots_are_fenced_like_pinned_ones(monkeypatch, lying):
    """Case 27, on a device that reads pageable memory late. (A GPU's driver may wait for the stream instead.)"""
    monkeypatch.setenv("PINSTAGE_PINNED", "never")
    with SimulatedDevice(schedule="late", lying_queries=lying) as dev:
        dev.make_current()
        source, dsts = torch.empty(256, dtype=torch.int32), [dev.zeros(256, torch.int32) for _ in range(300)]
        pool = pinstage.StagingPool(dev, max_bytes=1 << 17)
        with pytest.warns(RuntimeWarning, match=WARNING):
            pool.reserve(KB)
        for step, dst in enumerate(dsts):
            pinstage.copy_(dst, source.fill_(step), pool=pool)
        source.fill_(-1)
        dev.synchronize()
        wrong = sum(not bool((dst == step).all()) for step, dst in enumerate(dsts))
        assert (wrong > 0) == lying


def test_refusal_is_met_once_a_device_and_warned_of_once(dev):
    refuse_to_pin(dev, NOT_PERMITTED)
    dst = dev.zeros(4)
    with pytest.warns(RuntimeWarning, match="status 800"):
        pinstage.copy_(dst, torch.ones(4))
    with pinstage.StagingPool(dev) as second:  # a second warning would be an error here
        pinstage.copy_(dst, torch.ones(4), pool=second)
        second.lease(32 << 20, torch.uint8).cancel()
    assert (dev.calls["cuMemHostRegister"], dev.calls["cuMemHostAlloc"]) == (1, 1)
    assert pinstage.default_pool(dev).stats().pageable
    dev.synchronize()
    assert dst.tolist() == [1] * 4


def test_nothing_is_pinned_where_it_is_switched_off(dev, monkeypatch):
    monkeypatch.setenv("PINSTAGE_PINNED", "never")
    with pytest.warns(RuntimeWarning, match="PINSTAGE_PINNED=never"):
        pinstage.copy_(dev.zeros(4), torch.ones(4))
    assert dev.calls["cuMemHostAlloc"] == 0
    assert dev.calls["cuMemHostRegister"] == 0


def test_pools_of_other_devices_stay_pinned(dev):
    refuse_to_pin(dev, NOT_SUPPORTED)
    with pytest.warns(RuntimeWarning, match=WARNING):
        pinstage.copy_(dev.zeros(4), torch.ones(4))
    with SimulatedDevice(index=1) as other:
        pinstage.copy_(other.zeros(4), torch.ones(4))
        assert not pinstage.default_pool(other).stats().pageable


def test_warning_that_is_an_error_takes_no_slot(dev, monkeypatch):
    monkeypatch.setenv("PINSTAGE_PINNED", "never")
    pool = pinstage.StagingPool(dev)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=WARNING):
            pool.lease(4, torch.uint8)
    assert pool.stats().free_bytes == pool.stats().capacity_bytes
    pool.lease(4, torch.uint8).cancel()


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, 999])
def test_other_failures_are_errors_that_name_bytes_and_remedy(dev, status):
    """Case 25."""
    dev.fail("cuMemHostAlloc", status=status, times=2)  # the slab, and the smaller one that would do
    pool = pinstage.StagingPool(dev, initial_bytes=8 * KB)
    before = pool.stats()
    with pytest.raises(pinstage.DriverError, match=r"Pinning 4096 bytes .* PINSTAGE_PINNED=never"):
        pinstage.copy_(dev.zeros(4), torch.ones(4), pool=pool)
    assert pool.stats() == before
    assert not before.pageable


def test_refusal_of_a_later_slab_is_an_error(dev):
    """Pinned memory is not mixed with pageable one behind the caller's back."""
    pool = pinstage.StagingPool(dev, initial_bytes=4 * KB)
    held = pool.lease(4 * KB, torch.uint8)
    before = pool.stats()
    dev.fail("cuMemHostAlloc", status=NOT_SUPPORTED, times=2)
    with pytest.raises(pinstage.DriverError, match="Pinning"):
        pool.lease(4 * KB, torch.uint8)
    assert pool.stats() == before
    held.cancel()


@pytest.mark.both
def test_kernels_cannot_read_a_pageable_slot_in_place(unpinned):
    with pytest.warns(RuntimeWarning, match=WARNING):
        lease = unpinned.pool().lease(4, torch.uint8)
    with pytest.raises(pinstage.DriverError, match=r"pageable, .* use copy_to"):
        _ = lease.device_view
    lease.cancel()


def test_import_and_a_pool_ask_the_driver_nothing():
    """So that a process may import pinstage, and set up, before it forks its workers."""
    program = """
import os, warnings
import pinstage
from pinstage.testing import SimulatedDevice
with SimulatedDevice() as dev:
    pinstage.StagingPool(dev)
    asked = {name for name, count in dev.calls.items() if count}
    assert not {name for name in asked if "Host" in name or "Event" in name}, asked
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=TESTS)
