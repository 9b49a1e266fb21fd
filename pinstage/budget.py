# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""How much memory staging pools may pin by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SMALLEST_SLOT = 256  # bytes

_SHARE = 8  # default max_bytes: an eighth of what the process may use
_LEAST = 1 << 20  # bytes of that default, however many ranks share the node

# Where launchers tell how many processes of the job are on this node. The innermost first: torchrun runs under srun,
# not the other way round.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH2
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "8(x2),4" is 8, 8 and 4 on the step's nodes
    "SLURM_NTASKS_PER_NODE",
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may use: the machine's, or the lowest limit of its control groups.

    Args:
        root: the file system's root; tests pass another.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """The memory limits of the process's control group and of those around it, of either version of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    mount = root / "sys/fs/cgroup"
    for folder, path, name in (
        (mount, own.get("", ""), "memory.max"),
        (mount / "memory", own.get("memory", ""), "memory.limit_in_bytes"),
    ):
        # A container may see its own group as the mount's root although the path says otherwise.
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            try:
                text = folder.joinpath(*parts[:depth], name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # "max": no limit
                yield int(text)


def local_ranks() -> int:
    """Processes of this job on this node, as torchrun, MPI or SLURM tell; of nodes that differ, on the fullest."""
    for name in _LOCAL_SIZES:
        counts = [part.partition("(")[0] for part in os.environ.get(name, "").split(",")]
        if all(map(str.isdecimal, counts)) and max(map(int, counts)) > 0:
            return max(map(int, counts))
    return 1


def default_max_bytes() -> int:
    """``PINSTAGE_MAX_BYTES``, or an eighth of the available memory; either is shared among the node's local ranks.

    Raises:
        ValueError: ``PINSTAGE_MAX_BYTES`` is not a positive number of bytes, or too small to be shared.
    """
    ranks = local_ranks()
    text = os.environ.get("PINSTAGE_MAX_BYTES")
    if text is None:
        return max(available_memory() // _SHARE // ranks, _LEAST)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"PINSTAGE_MAX_BYTES must be a positive number of bytes, not {text!r}")
    share = int(text) // ranks
    if share < SMALLEST_SLOT:
        raise ValueError(
            f"PINSTAGE_MAX_BYTES is {text}, which leaves {share} bytes to each of {ranks} local ranks; "
            f"the smallest slot has {SMALLEST_SLOT}"
        )
    return share
