# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Large slabs lie on the NUMA node of their device, where the platform tells it and lets a process choose."""

from __future__ import annotations

import ctypes
import platform
import re
import threading
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage import cuda, devices, numa
from pinstage.testing import SimulatedDevice

MB = 1 << 20
ADDRESS = "0000:1B:00.0"
MISSING = 1023  # a node that no machine here has


def machine_with(root, has_memory, numa_node):
    files = {
        "devices/system/node/has_memory": has_memory,
        "bus/pci/devices/0000:1b:00.0/numa_node": numa_node,
    }
    for name, text in files.items():
        if text is not None:
            path = root / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(("has_memory", "numa_node", "near"), [
    ("0-1", "1", 1),
    ("0-1", "0", 0),
    ("0,2-3,8", "3", 3),
    ("0-1", "-1", None),  # the firmware does not tell
    ("0", "0", None),  # no choice
    ("0,2", "1", None),  # a node without memory
    ("0-1", None, None),
    (None, "1", None),  # a kernel without NUMA
    ("", "0", None),
    ("0-1", "near", None),
])  # fmt: skip
def test_node_is_told_by_the_platform_or_not_chosen(tmp_path, has_memory, numa_node, near):
    assert numa.node_near(ADDRESS, machine_with(tmp_path, has_memory, numa_node)) == near


# --- placement --------------------------------------------------------------------------------------------------------


def nodes_of_this_process():
    """NUMA nodes that this process may use: of one there is nothing to choose, yet a policy can be set."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return sorted(numa._numbers(found[1])) if found else []


def placed(address):
    """(policy, pages by node) of the mapping around an address, from /proc/self/numa_maps."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError as error:
        pytest.skip(f"this system does not tell where memory lies: {error}")
    _, line = max((start, line) for line in lines if (start := int(line.split()[0], 16)) <= address)
    pages = {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}
    return line.split()[1], pages


def slab_of(pool, nbytes=16 * MB):
    with pool.lease(nbytes, torch.uint8) as lease:
        lease.retire(pool.device.current_stream)
        return lease.tensor.data_ptr()


def require_policies(core, node):
    """Skips where the system refuses what a pool then does without."""
    if core.numa_node != node:
        pytest.skip("this process may not choose a NUMA node, or has a memory policy of its own")


@pytest.mark.parametrize("node", [None, *nodes_of_this_process()])
def test_large_slab_prefers_the_node_of_its_device(dev, node):
    core, pool = devices.resolve(dev), pinstage.StagingPool(dev, initial_bytes=16 * MB)
    core.numa_node = node
    address = slab_of(pool)
    require_policies(core, node)
    policy, pages = placed(address)
    assert policy == ("default" if node is None else f"prefer:{node}")
    if node is not None and len(nodes_of_this_process()) > 1:
        assert max(pages, key=pages.__getitem__) == node, f"{pages}, unless node {node} is full"


@pytest.mark.skipif(len(nodes_of_this_process()) < 2, reason="needs a second NUMA node")
def test_pools_of_two_devices_lie_apart(dev):
    first, second = nodes_of_this_process()[:2]
    with SimulatedDevice(1) as other:
        for device, node in ((dev, first), (other, second)):
            core, pool = devices.resolve(device), pinstage.StagingPool(device, initial_bytes=16 * MB)
            core.numa_node = node
            address = slab_of(pool)
            require_policies(core, node)
            _, pages = placed(address)
            assert max(pages, key=pages.__getitem__) == node


def test_node_that_the_system_refuses_is_not_asked_for_again(dev):
    """As where a container forbids the call: the slab is as good, only elsewhere."""
    core, pool = devices.resolve(dev), pinstage.StagingPool(dev, initial_bytes=16 * MB)
    core.numa_node = MISSING
    dst = dev.zeros(16 * MB, torch.uint8)
    pinstage.copy_(dst, torch.full((16 * MB,), 7, dtype=torch.uint8), pool=pool)
    dev.synchronize()
    assert bool((dst == 7).all())
    assert dev.calls["cuMemHostRegister"] == 1
    assert core.numa_node is None


def test_memory_that_the_driver_allocates_is_left_to_it(dev):
    core, pool = devices.resolve(dev), pinstage.StagingPool(dev, initial_bytes=MB)
    core.numa_node = MISSING
    pool.lease(1, torch.uint8).cancel()
    assert dev.calls["cuMemHostAlloc"] == 1
    assert core.numa_node == MISSING  # nobody was asked, or it would be refused


def test_policy_of_the_process_stays(dev):
    """What numactl set is the user's word."""
    number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    if number is None or not nodes_of_this_process():
        pytest.skip(f"set_mempolicy of {platform.machine()} is not known here")
    core, pool = devices.resolve(dev), pinstage.StagingPool(dev, initial_bytes=16 * MB)
    node, bind = nodes_of_this_process()[0], 2
    core.numa_node, mask, outcome = node, ctypes.c_ulong(1 << node), {}

    def bound():  # in a thread, whose policy ends with it
        libc = ctypes.CDLL(None, use_errno=True)
        outcome["status"] = libc.syscall(number, bind, ctypes.byref(mask), ctypes.c_ulong(65))
        outcome["address"] = slab_of(pool)

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    if outcome["status"] != 0:
        pytest.skip("this process may not set a memory policy")
    assert core.numa_node is None
    assert not placed(outcome["address"])[0].startswith("prefer")


@pytest.mark.parametrize("node", [-1, 1024, 1 << 40, "0"])
def test_what_is_no_node_is_refused(dev, node):
    core = devices.resolve(dev)
    with pytest.raises((ValueError, TypeError)):
        core.numa_node = node
    assert core.numa_node is None


@pytest.mark.gpu
def test_slab_of_a_gpu_lies_on_its_node():
    node = cuda.numa_node(0)
    if node is None:
        pytest.skip("one NUMA node, or the platform does not tell that of cuda:0")
    core, pool = devices.resolve("cuda:0"), pinstage.StagingPool("cuda:0", initial_bytes=64 * MB)
    assert core.numa_node == node
    address = slab_of(pool, 64 * MB)
    require_policies(core, node)
    policy, pages = placed(address)
    assert policy == f"prefer:{node}"
    assert max(pages, key=pages.__getitem__) == node, f"{pages}, unless node {node} is full"
