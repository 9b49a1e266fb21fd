# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Timing that survives a wandering clock: all variants take turns in one run, medians, and ratios between them."""

from __future__ import annotations

import ctypes
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pinstage

Call = Callable[[int], object]

# Seconds after which torch's OpenMP threads, which spin on after each parallel operation, have left the CPUs to others.
SETTLED = 0.015


def pause(seconds: float) -> None:
    """On this thread, which stays awake."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def without_kernel(call: Call) -> Call:
    """The same call as where the driver refuses the kernel that brings pieces of a slot to their places."""
    core = pinstage.devices.resolve()

    def refused(i: int) -> object:
        core.refuses_scatter = True
        try:
            return call(i)
        finally:
            core.refuses_scatter = False

    return refused


class Host(NamedTuple):
    """Host time of one call, in µs."""

    median: float
    mean: float


def interleaved(
    variants: Mapping[str, Call],
    rounds: int,
    *,
    synchronize: Callable[[], object],
    block: int = 16,
    warmup: int = 4,
    settle: float = 0.0,
) -> dict[str, Host]:
    """Host time of each variant: blocks of calls in turn, each round in another order, so that none always follows the
    same one and finds the caches as that leaves them.

    Args:
        variants: called with a running number. One that returns a float has timed itself (in ns).
        rounds: blocks of each variant.
        synchronize: empties the device's queue before each block, outside the timing.
        block: calls a block. 1 lets every call find the caches as the other variants left them.
        warmup: rounds left out.
        settle: seconds of pause before each block, so that what one variant left spinning does not take the next one's
            CPUs: SETTLED where torch copies on several threads.
    """
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    shuffled = random.Random(0)
    for i in range(-warmup, rounds):
        for name in shuffled.sample(names, len(names)):
            call = variants[name]
            synchronize()
            pause(settle)
            for k in range(block):
                start = time.perf_counter_ns()
                result = call(k)
                elapsed = time.perf_counter_ns() - start
                if i >= 0:
                    times[name].append(result if isinstance(result, float) else elapsed)
    synchronize()
    return {name: Host(statistics.median(v) / 1e3, statistics.fmean(v) / 1e3) for name, v in times.items()}


def conditions() -> dict[str, Any]:
    """What a figure depends on."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _commit() -> str:
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def compiled(source: str) -> ctypes.CDLL:
    """The C++ file beside this one, compiled for this run.

    Raises:
        FileNotFoundError: there is no g++.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library.so"
        path = Path(__file__).with_name(source)
        subprocess.run(["g++", "-O3", "-shared", "-fPIC", str(path), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def size_name(nbytes: int) -> str:
    """256 B, 4 KB, 1 MB."""
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Plain aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def write_json(path: str | None, suite: str, figures: Any) -> None:
    """Figures with their conditions."""
    if path is not None:
        Path(path).write_text(
            json.dumps({"suite": suite, "conditions": conditions(), "figures": figures}, indent=1) + "\n"
        )
