# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`pinstage doctor`: what pinstage found on this machine, and whether a copy works on each device."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pinstage
from pinstage import _core, cuda
from pinstage.budget import available_memory, default_max_bytes, local_ranks
from pinstage.cli.errors import check_writable
from pinstage.devices import resolve
from pinstage.testing import SimulatedDevice

SUMMARY = "say what pinstage found here, and try a copy on each device"
DESCRIPTION = (
    "Names versions, the instruction set and threads of the host, the limit of a staging pool, and the driver; then "
    "pins memory and copies through it on each GPU, or on a simulated device where there is none, and says on which "
    "NUMA node that memory is. "
    "Exit status: 0; 1 if something is broken, with the remedy; 2 for bad input."
)

# What pinstage can do without, and what is lost then.
_OPTIONAL_ENTRIES = {
    "cuStreamGetId": "each fence is polled by itself",
    "cuMemcpyBatchAsync": "many small copies are submitted one by one where the kernel does not bring them",
    "cuLaunchKernel": "many small copies and scattered rows are driver copies",
}
_ACCESS = {
    "shims": "torch's C functions (20-65 ns a tensor)",
    "native": "DLPack, and torch's C++ functions for what it lacks (50-270 ns a tensor)",
    "python": "DLPack, and Python for what it lacks (0.5 µs a copy more): this torch's C++ functions were not found",
}
_PROBE = 1 << 16  # elements
_PROBE_BYTES = 8 << 20  # as much as a pool pins first
# Where the kernel has an NVIDIA GPU, WSL's included, whether or not torch can use it.
_GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and its function."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings here too")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns the exit status.

    Raises:
        UsageError: the file cannot be written.
    """
    if args.json is not None:
        check_writable(args.json)
    report = examine()
    for name, finding in report["findings"].items():
        print(f"{name:<16}{finding}")
    for problem in report["problems"]:
        print(f"BROKEN          {problem}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Findings, by what they are of, and problems, each with its remedy."""
    problems: list[str] = []
    findings = {
        "pinstage": importlib.metadata.version("pinstage"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, read through {_ACCESS[_core.torch_access()]}",
        "kernels": f"{_core.isa()}, of {', '.join(_core.supported_isas())} (PINSTAGE_ISA forces one)",
        "threads": f"{_core.num_threads()} share a large snapshot, of {_core.usable_cpus()} usable CPUs "
        "(PINSTAGE_THREADS)",
        "max_bytes": _limit(problems),
        "cuda driver": _driver(problems),
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name = f"cuda:{index}"
            outcome = _probe(name, name, lambda name=name: torch.zeros(_PROBE, device=name), problems)  # type: ignore[misc]
            placement = f"; {_placement(index)}" if outcome.startswith("pinning") else ""
            findings[name] = f"{torch.cuda.get_device_name(index)}; {outcome}{placement}"
    else:
        with SimulatedDevice() as device:
            outcome = _probe("simulated", device, lambda: device.zeros(_PROBE), problems)
            findings["simulated"] = f"no GPU here; on a simulated device {outcome}"
    return {"findings": findings, "problems": problems}


def _limit(problems: list[str]) -> str:
    try:
        nbytes = default_max_bytes()
    except ValueError as error:
        problems.append(f"{error}. Correct it or unset it.")
        return "unknown"
    if "PINSTAGE_MAX_BYTES" in os.environ:
        source = "PINSTAGE_MAX_BYTES"
    else:
        source = f"an eighth of the {available_memory()} B that this process may use; PINSTAGE_MAX_BYTES sets another"
    ranks = local_ranks()
    return f"{nbytes} B a pool: {source}" + (f", shared by {ranks} local ranks" if ranks > 1 else "")


def _driver(problems: list[str]) -> str:
    if not torch.cuda.is_available():
        if not any(node.exists() for node in _GPU_NODES):
            return "none"
        if torch.version.cuda is None:
            problems.append(
                f"there is an NVIDIA GPU, but torch {torch.__version__} is a build without CUDA. Install a CUDA build, "
                "see https://pytorch.org/get-started/locally"
            )
        else:
            problems.append(
                f"there is an NVIDIA GPU, but torch cannot use it. Check that nvidia-smi runs here, that its CUDA "
                f"version is at least torch's ({torch.version.cuda}), and CUDA_VISIBLE_DEVICES"
            )
        return "unusable"
    try:
        entries = cuda.resolve_entries()
        version = cuda.driver_version()
    except pinstage.DriverError as error:
        problems.append(f"the CUDA driver's entry points cannot be had: {error}. Update the driver or cuda-bindings")
        return "unusable"
    lacking = [f"no {name}: {loss}" for name, loss in _OPTIONAL_ENTRIES.items() if name not in entries]
    return "; ".join([f"CUDA {version // 1000}.{version % 1000 // 10}", *(lacking or ["all entry points found"])])


def _probe(name: str, device: Any, zeros: Callable[[], torch.Tensor], problems: list[str]) -> str:
    """Pins a small pool, copies through it and waits for the fence; `zeros` makes a tensor on the device."""
    src = torch.arange(_PROBE, dtype=torch.float32)
    try:
        pool = pinstage.StagingPool(device, max_bytes=_PROBE_BYTES)
        dst = zeros()
        with pool.lease(_PROBE, torch.float32) as lease:
            lease.tensor.copy_(src)
            ticket = lease.copy_to(dst)
        ticket.wait(timeout=30)
        right = torch.equal(dst.cpu(), src)
        pageable = pool.stats().pageable
        kernel = not pool.device.refuses_scatter
        pool.close()
    except (pinstage.PinstageError, RuntimeError) as error:
        problems.append(
            f"{name}: a copy through pinned memory failed: {error}. If pinning is what fails: raise the limit on "
            "locked memory (ulimit -l) or of the container, or set PINSTAGE_PINNED=never"
        )
        return "copies fail"
    if not right:
        problems.append(f"{name}: a copy brought wrong bytes although its fence passed. Please report this")
        return "copies are wrong"
    if pageable:
        return "copies work, from pageable memory (PINSTAGE_PINNED=never)"
    if not kernel:
        return (
            "pinning and copies work; small copies and scattered rows are driver copies (PINSTAGE_KERNEL=never, or the "
            "driver compiles no kernel)"
        )
    return "pinning and copies work"


def _placement(index: int) -> str:
    """Where the large slabs of a GPU lie, as its first one, which was pinned by now, has found out."""
    try:
        near, used = cuda.numa_node(index), resolve(index).numa_node
    except pinstage.DriverError:
        return "its NUMA node is unknown"
    if near is None:
        return "no NUMA node to choose, or none told"
    if near != used:
        return (
            f"slabs are not placed on its NUMA node {near}: this process may not choose, or has a memory policy "
            "(numactl) of its own, which stays"
        )
    return f"slabs are placed on its NUMA node {near}"
