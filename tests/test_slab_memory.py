# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Large slabs: mapped, touched by the team, registered; and what happens where registration is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage import DriverError
from pinstage.testing import SimulatedDevice, latch

MB = 1 << 20
OUT_OF_MEMORY, ALREADY_REGISTERED, LAUNCH_FAILED, NOT_SUPPORTED = 2, 712, 719, 801


def pinnings(dev):
    return dev.calls["cuMemHostRegister"], dev.calls["cuMemHostAlloc"]


def test_large_slab_is_one_registration_and_a_small_one_is_allocated(dev):
    pool = pinstage.StagingPool(dev, initial_bytes=MB, max_bytes=64 * MB)
    pool.lease(1, torch.uint8).cancel()
    assert pinnings(dev) == (0, 1)
    pool.reserve(40 * MB)
    assert pinnings(dev) == (1, 1)
    assert (pool.stats().slabs, pool.stats().host_allocations, pool.stats().capacity_bytes) == (2, 2, 40 * MB)
    pool.lease(39 * MB, torch.uint8).cancel()  # as large as the largest slab
    assert pool.trim() == 40 * MB
    assert (dev.calls["cuMemHostUnregister"], dev.calls["cuMemFreeHost"], dev.host_allocations) == (1, 1, 0)


def test_first_slab_starts_no_threads(tmp_path):
    """A process that makes small copies alone has no workers."""
    program = """
import os, torch, pinstage
from pinstage.testing import SimulatedDevice
pinstage.set_num_threads(2)
with SimulatedDevice() as dev:
    before = len(os.listdir("/proc/self/task"))
    pinstage.copy_(dev.empty(4), torch.ones(4))
    assert dev.calls["cuMemHostRegister"] == 1
    print(len(os.listdir("/proc/self/task")) - before)
    pinstage.default_pool(dev).reserve(64 << 20)
    print(len(os.listdir("/proc/self/task")) - before, pinstage._core.num_threads() - 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    first, large, workers = map(int, done.stdout.split())
    assert (first, large) == (0, workers)


@pytest.mark.parametrize("nbytes", [8 * MB, 8 * MB + 256, 10 * MB - 256, 11 * MB + 4096])
def test_registered_slab_holds_its_bytes_to_the_last(dev, nbytes):
    """Whole pages are registered; a limit in the middle of one is kept."""
    pool = pinstage.StagingPool(dev, initial_bytes=nbytes, max_bytes=nbytes)
    dst = dev.zeros(nbytes, torch.uint8)
    with pool.lease(nbytes, torch.uint8) as lease:
        assert lease.tensor.data_ptr() % (2 * MB) == 0
        lease.tensor.fill_(7)
        lease.copy_to(dst)
    dev.synchronize()
    assert bool((dst == 7).all())
    assert pool.stats().capacity_bytes == nbytes
    assert pinnings(dev) == (1, 0)


@pytest.mark.both  # no control: one copy
def test_slot_of_a_registered_slab_is_pinned_memory(rig):
    """To torch too; and kernels read it in place."""
    pool = rig.pool(initial_bytes=16 * MB)
    dst, seen = rig.filled(16 * MB, torch.uint8, 0), rig.filled(16 * MB, torch.uint8, 0)
    with pool.lease(16 * MB, torch.uint8) as lease:
        lease.tensor.random_(0, 255)
        expected = lease.tensor.clone()
        if not rig.simulated:
            assert lease.tensor.is_pinned()
        with rig.stream() as stream:
            lease.copy_to(dst)
            rig.launch(lambda view=lease.device_view: seen.copy_(view))
            lease.retire(stream)
    rig.expect(dst, expected)
    rig.expect(seen, expected)


def test_registered_slab_under_a_copy_in_flight_is_not_unmapped(dev):
    pool, dst = pinstage.StagingPool(dev, initial_bytes=8 * MB), dev.zeros(1000, torch.int32)
    with latch(dev.default_stream):
        pinstage.copy_(dst, torch.full((1000,), 5, dtype=torch.int32), pool=pool)
        assert pool.trim() == 0
        del pool
    dev.synchronize()
    assert dst.tolist() == [5] * 1000
    dev.close()
    assert (dev.violations, dev.calls["cuMemHostUnregister"], dev.host_allocations) == (0, 1, 0)


def test_tensor_over_a_registered_slab_outlives_its_pool_and_device():
    with SimulatedDevice() as dev:
        pool = pinstage.StagingPool(dev, initial_bytes=8 * MB)
        lease = pool.lease(8 * MB, torch.uint8)
        view = lease.tensor.fill_(3)
        lease.cancel()
        del lease
        pool.close()
        assert pool.stats().held_bytes == 8 * MB
        del pool
    assert bool((view == 3).all())


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, ALREADY_REGISTERED, LAUNCH_FAILED, NOT_SUPPORTED])
def test_refused_registration_is_followed_by_an_allocation(dev, status):
    """Case 25: no error remains. Under confidential computing nothing registers, which is asked once a pool."""
    pool = pinstage.StagingPool(dev, initial_bytes=8 * MB)
    dev.fail("cuMemHostRegister", status=status)
    pool.lease(1, torch.uint8).cancel()
    assert pinnings(dev) == (1, 1)
    pool.reserve(16 * MB)
    assert pinnings(dev) == ((1, 2) if status == NOT_SUPPORTED else (2, 1))
    assert pool.stats().capacity_bytes == 16 * MB
    pool.close()
    assert dev.host_allocations == 0


def test_refusal_of_both_names_the_bytes_and_changes_nothing(dev):
    """Case 25."""
    pool = pinstage.StagingPool(dev)
    pool.lease(1, torch.uint8).cancel()
    before = pool.stats()
    dev.fail("cuMemHostRegister")
    dev.fail("cuMemHostAlloc")
    with pytest.raises(DriverError, match=r"cuMemHostAlloc failed.*Pinning 25165824 bytes"):
        pool.reserve(32 * MB)
    assert pool.stats() == before
    pool.reserve(32 * MB)
    assert pool.stats().capacity_bytes == 32 * MB


def test_slab_that_is_not_unregistered_is_kept_for_another_try(dev):
    pool = pinstage.StagingPool(dev, initial_bytes=8 * MB)
    pool.lease(1, torch.uint8).cancel()
    dev.fail("cuMemHostUnregister")
    pool.trim()
    assert (pool.stats().capacity_bytes, dev.host_allocations) == (0, 0)  # trim sweeps
    assert dev.calls["cuMemHostUnregister"] == 2


def test_lost_device_keeps_its_registered_slabs_mapped(dev):
    """Case 26: nobody knows what it still reads."""
    pool = pinstage.StagingPool(dev, initial_bytes=8 * MB)
    lease = pool.lease(8 * MB, torch.uint8)
    view = lease.tensor
    lease.cancel()
    dev.lose(LAUNCH_FAILED)
    del lease, pool
    view.fill_(1)
    assert dev.host_allocations == 1


def test_pageable_pool_registers_nothing(monkeypatch, dev):
    monkeypatch.setenv("PINSTAGE_PINNED", "never")
    pool = pinstage.StagingPool(dev, initial_bytes=8 * MB)
    with pytest.warns(RuntimeWarning, match="pageable"):
        pool.lease(1, torch.uint8).cancel()
    assert pinnings(dev) == (0, 0)


def test_forked_child_would_not_share_a_registered_slab(dev):
    """Case 23: a child's copy-on-write claim could leave the parent with copies, and the device with the originals."""
    pool = pinstage.StagingPool(dev, initial_bytes=8 * MB)
    with pool.lease(8 * MB, torch.uint8) as lease:
        assert "wf" in flags_of_mapping(lease.tensor.data_ptr())  # "wipe on fork"
        lease.retire(dev.current_stream)


def flags_of_mapping(address):
    """VmFlags of /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")
