# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""How much memory staging pools may pin by default."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 8  # default max_bytes: an eighth of what the process may use


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may use: the machine's, or its control group's limit if lower.

    Args:
        root: the file system's root; tests pass another.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total]
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = (root / path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max": no limit
            limits.append(int(text))
    return min(limits)


def local_ranks() -> int:
    """Processes of this job on this node, as torchrun and its like tell."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def default_max_bytes() -> int:
    """``PINSTAGE_MAX_BYTES``, or an eighth of the available memory; either is shared among the node's local ranks.

    Raises:
        ValueError: ``PINSTAGE_MAX_BYTES`` is not a positive number of bytes.
    """
    text = os.environ.get("PINSTAGE_MAX_BYTES")
    if text is None:
        budget = available_memory() // _SHARE
    else:
        if not text.isdigit() or int(text) == 0:
            raise ValueError(f"PINSTAGE_MAX_BYTES must be a positive number of bytes, not {text!r}")
        budget = int(text)
    return max(budget // local_ranks(), 1 << 20)
