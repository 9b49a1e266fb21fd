# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Row gather on the host: `gather_rows` against torch.index_select(out=), numpy.take(out=) and memcpy of as many bytes.

Cold: the table is many times the last-level cache and every call has a fresh random index, so that rows come from
memory; the index itself was just written. Cached: the table fits the second-level cache.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import Call, Host, interleaved, print_table, size_name, write_json

import pinstage

SHORT_ROWS = (64, 128, 256, 512, 1 << 10, 2 << 10, 4 << 10)
LONG_ROWS = (16 << 10, 32 << 10, 64 << 10)
OUTPUTS = (64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20)
TABLE = 512 << 20
CACHED_TABLE = 256 << 10
# (slots of the table, int32 of a row, rows taken): [2, slots, 2, width], of whose key plane rows are taken along dim 1.
PLANES = (
    (2048, 32, 1), (2048, 32, 8), (2048, 32, 64), (2048, 256, 16), (2048, 1024, 4),
    (2048, 32, 512), (2048, 256, 256), (2048, 1024, 64), (2048, 1024, 256), (2048, 1024, 1024),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="of pinstage and of torch; numpy and memcpy have one")
    parser.add_argument("--huge-pages", action="store_true", help="the cold table lies in huge pages")
    parser.add_argument("--effort", type=float, default=1.0, help="factor on the number of calls")
    parser.add_argument("--rows", type=int, nargs="*", default=(*SHORT_ROWS, *LONG_ROWS), metavar="BYTES")
    parser.add_argument("--outputs", type=int, nargs="*", default=OUTPUTS, metavar="BYTES")
    parser.add_argument(
        "--only", choices=("cold", "cached", "planes", "call"), nargs="*", default=("cold", "cached", "planes", "call")
    )


class Cell(NamedTuple):
    """One point of the comparison. `times` by who did it."""

    kind: str
    row: int
    output: int
    times: dict[str, Host]

    def ahead_of(self, other: str) -> float:
        """How many times as fast as `other` gather_rows is."""
        return self.times[other].median / self.times["gather_rows"].median


def timed(call: Callable[[], object], clock: Callable[[], int] = time.perf_counter_ns) -> float:
    start = clock()
    call()
    return float(clock() - start)


def clock_of(nbytes: int) -> Callable[[], int]:
    """The thread's own time for a long call on one thread, which loses its CPU to others on a shared machine."""
    return time.thread_time_ns if nbytes >= 1 << 20 and torch.get_num_threads() == 1 else time.perf_counter_ns


def cold_table(huge_pages: bool) -> torch.Tensor:
    """Random int32, TABLE bytes of them."""
    memory = mmap.mmap(-1, TABLE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32).random_(0, 1 << 30)


def rows_of_table(kind: str, table: torch.Tensor, row: int, output: int, effort: float) -> Cell:
    """Gathers whole rows of a dense table."""
    src = table.view(-1, row // 4)
    out = torch.empty(output // row, row // 4, dtype=torch.int32)
    src_array, out_array = src.numpy(), out.numpy()
    count = out.shape[0]
    clock = clock_of(output)

    def index() -> torch.Tensor:
        return torch.randint(0, src.shape[0], (count,))

    def gather(_: int) -> float:
        chosen = index()
        return timed(lambda: pinstage.gather_rows(src, chosen, out=out), clock)

    def select(_: int) -> float:
        chosen = index()
        return timed(lambda: torch.index_select(src, 0, chosen, out=out), clock)

    def take(_: int) -> float:
        chosen = index().numpy()
        # With mode="raise" numpy fills a buffer first.
        return timed(lambda: np.take(src_array, chosen, axis=0, out=out_array, mode="clip"), clock)

    def memcpy(_: int) -> float:
        index()
        last = src.shape[0] - count
        begin = src.data_ptr() + (random.randrange(last + 1) if last > 0 else 0) * row
        return timed(lambda: ctypes.memmove(out.data_ptr(), begin, output), clock)

    chosen = index()
    if not torch.equal(pinstage.gather_rows(src, chosen, out=out), torch.index_select(src, 0, chosen)):
        raise AssertionError(f"wrong bytes: rows of {row} bytes, {output} bytes in all")
    calls: dict[str, Call] = {"gather_rows": gather, "index_select": select, "take": take, "memcpy": memcpy}
    rounds = max(9, int(min(400, (256 << 20) / output) * effort))
    return Cell(kind, row, output, interleaved(calls, rounds, synchronize=lambda: None, block=1))


def rows_of_plane(slots: int, width: int, count: int, effort: float) -> Cell:
    """Gathers rows of the key plane of a block table, as an engine does each step."""
    src = torch.randint(0, 1 << 30, (2, slots, 2, width), dtype=torch.int32)[:, :, 0]
    out = torch.empty(2, count, width, dtype=torch.int32)

    def gather(_: int) -> float:
        index = torch.randint(0, slots, (count,))
        return timed(lambda: pinstage.gather_rows(src, index, dim=1, out=out))

    def select(_: int) -> float:
        index = torch.randint(0, slots, (count,))
        return timed(lambda: torch.index_select(src, 1, index, out=out))

    index = torch.randint(0, slots, (count,))
    if not torch.equal(pinstage.gather_rows(src, index, dim=1, out=out), torch.index_select(src, 1, index)):
        raise AssertionError(f"wrong bytes: {count} rows of [2, {slots}, {width}]")
    nbytes = out.numel() * 4
    rounds = max(15, int(min(1000, (512 << 20) / nbytes) * effort))
    times = interleaved({"gather_rows": gather, "index_select": select}, rounds, synchronize=lambda: None, block=1)
    return Cell("plane", width * 4, nbytes, times)


def one_row(effort: float) -> Cell:
    """What a call costs: one cached row of 64 bytes, many calls to a reading of the clock."""
    src, index, out = torch.ones(64, 16, dtype=torch.int32), torch.tensor([5]), torch.empty(1, 16, dtype=torch.int32)
    calls = 1000

    def gather(_: int) -> float:
        def repeat() -> None:
            for _ in range(calls):
                pinstage.gather_rows(src, index, out=out)

        return timed(repeat) / calls

    def select(_: int) -> float:
        def repeat() -> None:
            for _ in range(calls):
                torch.index_select(src, 0, index, out=out)

        return timed(repeat) / calls

    variants: dict[str, Call] = {"gather_rows": gather, "index_select": select}
    times = interleaved(variants, int(40 * effort), synchronize=lambda: None, block=1)
    return Cell("call", 64, 64, times)


class Goal(NamedTuple):
    """What is wanted of a figure, and the figure."""

    what: str
    wanted: str
    measured: float
    met: bool


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def goals(cells: list[Cell], threads: int) -> list[Goal]:
    """Those that these cells can answer."""
    found = []

    def at_least(what: str, wanted: float, values: list[float], summary: Callable[[list[float]], float]) -> None:
        if values:
            measured = summary(values)
            found.append(Goal(what, f">= {wanted}", measured, measured >= wanted))

    def ratios(kind: str, test: Callable[[Cell], bool], other: str = "index_select") -> list[float]:
        return [cell.ahead_of(other) for cell in cells if cell.kind == kind and test(cell)]

    short = ratios("cold", lambda c: c.row in SHORT_ROWS)
    if threads == 1:
        at_least("rows 64 B - 4 KB, cold: geomean", 1.5, short, geomean)
        at_least("rows 64 B - 4 KB, cold: least", 1.0, short, min)
        for output, wanted in ((64 << 10, 1.35), (1 << 20, 1.0), (64 << 20, 1.25)):
            long = ratios("cold", lambda c, output=output: c.row in LONG_ROWS and c.output == output)  # type: ignore[misc]
            at_least(f"rows 16 - 64 KB, cold, {size_name(output)}: least", wanted, long, min)
    else:
        largest = ratios("cold", lambda c: c.row in SHORT_ROWS and c.output == 64 << 20)
        at_least(f"{threads} threads, rows 64 B - 4 KB, cold, 64 MB: geomean", 1.5, largest, geomean)
    at_least("cached, 64 KB: geomean", 2.5, ratios("cached", lambda c: c.row in SHORT_ROWS), geomean)
    at_least("cached, 64 KB, of memcpy: geomean", 0.7, ratios("cached", lambda c: True, "memcpy"), geomean)
    at_least("4-D table, one row of 128 B", 5.0, ratios("plane", lambda c: c.output == 256), min)
    at_least("4-D table, up to 32 KB: least", 2.5, ratios("plane", lambda c: c.output <= 32 << 10), min)
    at_least("4-D table, 128 KB - 8 MB: least", 1.3, ratios("plane", lambda c: c.output >= 128 << 10), min)
    for cell in cells:
        if cell.kind == "call":
            us = cell.times["gather_rows"].median
            found.append(Goal("a call for one row, µs", "<= 0.6", us, us <= 0.6))
    return found


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    pinstage.set_num_threads(args.threads)
    cells = []
    if "cold" in args.only:
        table = cold_table(args.huge_pages)
        cells += [
            rows_of_table("cold", table, row, output, args.effort)
            for output in args.outputs
            for row in args.rows
            if row <= output
        ]
        del table
    if "cached" in args.only:
        table = torch.randint(0, 1 << 30, (CACHED_TABLE // 4,), dtype=torch.int32)
        cells += [rows_of_table("cached", table, row, 64 << 10, args.effort) for row in SHORT_ROWS if row in args.rows]
    if "planes" in args.only:
        cells += [rows_of_plane(*plane, args.effort) for plane in PLANES]
    if "call" in args.only:
        cells.append(one_row(args.effort))

    isa = pinstage._core.isa()
    print(f"gather_rows ({isa}, {args.threads} threads): median µs, and how many times as fast as each other")
    others = ("index_select", "take", "memcpy")
    print_table(
        ["", "row", "output", "µs", *others],
        [
            [
                cell.kind,
                size_name(cell.row),
                size_name(cell.output),
                f"{cell.times['gather_rows'].median:.2f}",
                *(f"{cell.ahead_of(other):.2f}" if other in cell.times else "" for other in others),
            ]
            for cell in cells
        ],
    )
    answers = goals(cells, args.threads)
    print("\ngoals, as factors over index_select unless they say otherwise")
    print_table(
        ["what", "goal", "measured", ""],
        [[goal.what, goal.wanted, f"{goal.measured:.2f}", "" if goal.met else "missed"] for goal in answers],
    )
    figures: dict[str, Any] = {
        "isa": isa,
        "threads": args.threads,
        "huge_pages": args.huge_pages,
        "cells": [
            {**cell._asdict(), "times": {who: host._asdict() for who, host in cell.times.items()}} for cell in cells
        ],
        "goals": [goal._asdict() for goal in answers],
    }
    write_json(args.json, "gather", figures)
    return 0
