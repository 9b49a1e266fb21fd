# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`pinstage demo`: the race that pinstage ends, on a paged KV cache, and what ending it costs in three ways."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pinstage.budget import available_memory
from pinstage.cli.backends import Backend, open_backend
from pinstage.cli.errors import UsageError, check_writable
from pinstage.cli.kv_cache import TableShape
from pinstage.cli.overlap import Measurement, Workload, measure, memory_needed
from pinstage.cli.traffic import read_trace
from pinstage.cli.uploads import UPLOADS

SUMMARY = "watch a KV-cache manager race its own copies, and pinstage not"
DESCRIPTION = (
    "Serves requests from a paged KV cache with a scheduler that runs one step ahead of the device, and uploads each "
    "step's block table in three ways: a bare asynchronous copy from a pinned table that is refilled at once, the same "
    "with an event wait before the refill, and pinstage. Exit status: 0; 1 if pinstage or the event wait was ever "
    "wrong; 2 for bad input, and if the bare copy was right too often to prove anything."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and its function."""
    parser.add_argument("--steps", type=_positive, default=1000, metavar="N", help="steps of each mode (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the generator and the free lists (%(default)s)"
    )
    parser.add_argument("--pools", type=_positive, default=1, metavar="N", help="block pools (%(default)s)")
    parser.add_argument("--batch", type=_positive, default=64, metavar="N", help="most requests a step (%(default)s)")
    parser.add_argument(
        "--blocks", type=_positive, default=128, metavar="N", help="most blocks of 64 tokens a request (%(default)s)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="serve these requests, over and over: CSV with TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N or simulated (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(command=run)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def run(args: argparse.Namespace) -> int:
    """Runs the command on the device that it asks for; returns the exit status.

    Raises:
        UsageError: bad input.
    """
    workload = Workload(
        shape=TableShape.of(args.pools, args.batch, args.blocks),
        steps=args.steps,
        seed=args.seed,
        source="a generator" if args.trace is None else str(args.trace),
        trace=None if args.trace is None else tuple(read_trace(args.trace)),
    )
    _check_memory(workload)
    if args.json is not None:
        check_writable(args.json)
    with open_backend(args.device) as backend:
        return run_on(backend, workload, args.json)


def run_on(backend: Backend, workload: Workload, json_file: Path | None = None) -> int:
    """Runs all modes on `backend`, shows and writes the figures; returns the exit status."""
    from rich.console import Console  # here and not above, so that the command line can say that it is missing

    from pinstage.cli import display

    # So long that the device reads a step's table well after the host has refilled it for the next one.
    backend.set_layers(milliseconds=max(1.0, 2 * workload.host_ms_per_step()))
    console = Console(highlight=False)
    display.announce(console, backend, workload)
    results = {}
    with display.progress_bar(console, workload.steps * len(UPLOADS)) as advance:
        for mode, upload in UPLOADS.items():
            advance(mode, 0)
            results[mode] = measure(backend, workload, upload(backend, workload.shape), partial(advance, mode, 1))
    status = exit_status(results)
    display.report(console, results, status, simulated=backend.simulated)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(backend, workload, results), indent=2) + "\n", encoding="utf-8")
    return status


def _check_memory(workload: Workload) -> None:
    needed, available = memory_needed(workload), available_memory()
    if needed > available // 2:
        raise UsageError(
            f"keeping tables of {workload.shape.nbytes / 1e6:.0f} MB takes {needed / 1e9:.0f} GB, over half of the "
            f"{available / 1e9:.0f} GB here; use fewer --pools, --batch or --blocks"
        )


def exit_status(results: Mapping[str, Measurement]) -> int:
    """1 if pinstage or the event wait was ever wrong, else 2 if the bare copy was right in most steps, else 0."""
    if results["pinstage"].wrong_steps or results["event_wait"].wrong_steps:
        return 1
    return 0 if 2 * results["bare"].wrong_steps >= results["bare"].steps else 2


def as_json(backend: Backend, workload: Workload, results: Mapping[str, Measurement]) -> dict[str, object]:
    """The figures as `--json` writes them."""
    figures = ("wrong_steps", "host_us_per_step", "stall_us_per_step", "pinned_bytes")
    return {
        "device": backend.name,
        "steps": workload.steps,
        "modes": {mode: {name: asdict(result)[name] for name in figures} for mode, result in results.items()},
    }
