# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Which memory of the host is near a device."""

from __future__ import annotations

from pathlib import Path


def node_near(pci_address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device, where the choice of a node matters.

    Args:
        pci_address: domain:bus:device.function in hexadecimal, of either case, such as "0000:1B:00.0".
        root: the file system's root; tests pass another.

    Returns:
        The node's number; None where only one node has memory, or the platform does not tell the device's.
    """
    system = root / "sys"
    try:
        nodes = _numbers((system / "devices/system/node/has_memory").read_text())
        node = int((system / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if len(nodes) > 1 and node in nodes else None  # -1: not told


def _numbers(text: str) -> set[int]:
    """The numbers of a kernel's list: "0-2,5" is 0, 1, 2 and 5."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
