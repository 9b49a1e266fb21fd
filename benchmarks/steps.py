# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The steps of a server with continuous batching, from a trace or a seeded generator, and its uploads."""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import SETTLED, Host, pause, print_table

import pinstage

POOLS, SLOTS, WIDTH = 2, 256, 1024
BLOCK = 16  # tokens of a cache block
GRAIN = 64  # columns: engines keep few widths, as each has its CUDA graphs, and a table is sent whole when it widens
WARMUP = 20  # steps

Way = Callable[[], object]


class Request(NamedTuple):
    """Tokens of a request."""

    context: int
    generated: int


# Percentiles 0, 5, 25, 50, 75, 95, 99, 100 of a conversation service's requests: Azure Public Dataset, November 2023
# (Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024).
_PERCENTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_CONTEXT = (1, 181, 396, 1020, 1189, 4083, 4142, 14050)
_GENERATED = (1, 41, 85, 129, 395, 451, 601, 1000)


def _drawn(dice: random.Random, values: tuple[int, ...]) -> int:
    at = dice.random()
    i = max(i for i, percentile in enumerate(_PERCENTILES[:-1]) if percentile <= at)
    low, high = _PERCENTILES[i : i + 2]
    return round(values[i] + (values[i + 1] - values[i]) * (at - low) / (high - low))


def generated_requests(seed: int) -> Iterator[Request]:
    """Without end."""
    dice = random.Random(seed)
    while True:
        yield Request(_drawn(dice, _CONTEXT), _drawn(dice, _GENERATED))


def traced_requests(path: str) -> Iterator[Request]:
    """The file's requests, over and over.

    Raises:
        ValueError: the file holds none.
    """
    with Path(path).open(newline="") as file:
        requests = [Request(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    if not requests:
        raise ValueError(f"{path} holds no requests")
    while True:
        yield from requests


class Step(NamedTuple):
    """What the scheduler writes before one step, and what is live then.

    Attributes:
        writes: (row, first column, number of columns) of new block numbers.
        rows: live ones, from the first on.
        width: live columns.
    """

    writes: list[tuple[int, int, int]]
    rows: int
    width: int


def schedule(requests: Iterator[Request], steps: int, slots: int, width: int) -> list[Step]:
    """A batch that is always full: whoever is done is replaced at once; a request gains a token a step."""
    tokens, left = [0] * slots, [0] * slots
    planned = []
    for _ in range(steps):
        writes = []
        for row in range(slots):
            if left[row] == 0:
                request = next(requests)
                tokens[row], left[row] = min(request.context, (width - 1) * BLOCK), max(request.generated, 1)
                writes.append((row, 0, -(-tokens[row] // BLOCK)))
            left[row] -= 1
            if tokens[row] % BLOCK == 0 and tokens[row] < width * BLOCK:
                writes.append((row, tokens[row] // BLOCK, 1))
            tokens[row] = min(tokens[row] + 1, width * BLOCK)
        live = -(-max(tokens) // BLOCK)
        planned.append(Step(writes, slots, min(-(-live // GRAIN) * GRAIN, width)))
    return planned


class Server:
    """One scheduler's host table, and every way to bring it to the device, each with a device table of its own."""

    def __init__(self) -> None:
        shape = (POOLS, SLOTS, 2, WIDTH)
        self.marked = pinstage.StagedTable(shape, torch.int32, dim=1, track="marks")
        self.compared = pinstage.StagedTable(shape, torch.int32, dim=1, track="compare")
        self.plain = pinstage.StagedTable(shape, torch.int32, dim=1)
        self.pinned = torch.zeros(shape, dtype=torch.int32).pin_memory()
        self.waited = torch.zeros(shape, dtype=torch.int32).pin_memory()
        self.event = torch.cuda.Event()
        self.event.record()
        self.dice = torch.Generator().manual_seed(0)
        self.devices = {
            "StagedTable, marks": self.marked.device,
            "StagedTable, compare": self.compared.device,
            "StagedTable": self.plain.device,
            **{
                name: torch.zeros(shape, dtype=torch.int32, device="cuda")
                for name in ("bare, a pool at a time", "fresh pinned", "fresh pinned, live", "event wait")
            },
        }

    def write(self, step: Step) -> None:
        """Into every host table."""
        for row, first, count in step.writes:
            blocks = torch.randint(0, 1 << 20, (POOLS, 2, count), dtype=torch.int32, generator=self.dice)
            for host in (self.marked.host, self.compared.host, self.plain.host, self.pinned):
                host[:, row, :, first : first + count] = blocks
        self.dirty = sorted({row for row, _, _ in step.writes})
        self.step = step

    def ways(self) -> dict[str, Way]:
        """Each uploads what is live."""
        host, dsts = self.plain.host, self.devices
        n, w = self.step.rows, self.step.width
        # Marked while they are written; that costs the writer, and is timed with the commit.
        dirty = self.dirty

        def marks() -> None:
            self.marked.mark(dirty)
            self.marked.commit(n, width=w)

        def bare() -> None:
            for dst, src in zip(dsts["bare, a pool at a time"], self.pinned, strict=True):
                dst.copy_(src, non_blocking=True)

        def fresh() -> None:
            staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
            staged.copy_(host)
            dsts["fresh pinned"].copy_(staged, non_blocking=True)

        def fresh_live() -> None:
            live = host[:, :n, :, :w]
            staged = torch.empty(live.shape, dtype=host.dtype, pin_memory=True)
            staged.copy_(live)
            dsts["fresh pinned, live"][:, :n, :, :w].copy_(staged, non_blocking=True)

        def event_wait() -> None:
            self.event.synchronize()
            self.waited.copy_(host)
            dsts["event wait"].copy_(self.waited, non_blocking=True)
            self.event.record()

        return {
            "StagedTable, marks": marks,
            "StagedTable, compare": lambda: self.compared.commit(n, width=w),
            "StagedTable": lambda: self.plain.commit(n, width=w),
            "bare, a pool at a time": bare,
            "fresh pinned": fresh,
            "fresh pinned, live": fresh_live,
            "event wait": event_wait,
        }

    def check(self) -> None:
        """Every way's device table holds what is live.

        Raises:
            RuntimeError: one does not.
        """
        torch.cuda.synchronize()
        live = (slice(None), slice(self.step.rows), slice(None), slice(self.step.width))
        for name, table in self.devices.items():
            if not torch.equal(table[live].cpu(), self.plain.host[live]):
                raise RuntimeError(f"{name} brought wrong bytes")


def serve(requests: Iterator[Request], name_of_requests: str, steps: int) -> dict[str, Any]:
    """Host time of each way's uploads; printed, and returned."""
    server = Server()
    times: dict[str, list[float]] = {name: [] for name in server.devices}
    shares, dirty = [], []
    for i, step in enumerate(schedule(requests, WARMUP + steps, SLOTS, WIDTH)):
        server.write(step)
        ways = list(server.ways().items())
        for name, way in ways[i % len(ways) :] + ways[: i % len(ways)]:
            torch.cuda.synchronize()
            pause(SETTLED)
            start = time.perf_counter_ns()
            way()
            if i >= WARMUP:
                times[name].append((time.perf_counter_ns() - start) / 1e3)
        if i in (0, WARMUP):
            server.check()
        if i >= WARMUP:
            shares.append(step.rows * step.width / (SLOTS * WIDTH))
            dirty.append(len(server.dirty))
    server.check()
    hosts = {name: Host(statistics.median(each), statistics.fmean(each)) for name, each in times.items()}
    print(
        f"\na server's steps ({name_of_requests}): a table of "
        f"[{POOLS}, {SLOTS}, 2, {WIDTH}], live share {statistics.fmean(shares):.2f}, rows written a step "
        f"{statistics.fmean(dirty):.1f} of {SLOTS}; host time of a step's upload, µs"
    )
    ours = hosts["StagedTable, marks"]
    print_table(
        ["way", "median", "mean", "marks / it (means)"],
        [[n, f"{t.median:.1f}", f"{t.mean:.1f}", f"{ours.mean / t.mean:.2f}"] for n, t in hosts.items()],
    )
    return {
        "us": {name: host._asdict() for name, host in hosts.items()},
        "live_share": statistics.fmean(shares),
        "rows_written": statistics.fmean(dirty),
    }
