# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""A cache manager's uploads by `StagedTable` and `copy_batch_`, against what is written today. Needs a GPU.

Call by call: block tables by their live width (T1, T2), in batch order (T3), by row (T4), a step's metadata (T5),
tables that did not change, scattered rows by each way that they can travel. Then over the steps of a server with
continuous batching (steps.py). Bytes are compared once before anything is timed, and at the end of the steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bulk import to_completion
from measure import SETTLED, Call, interleaved, print_table, size_name, without_kernel, write_json
from overhead import floor
from small import METADATA
from steps import generated_requests, serve, traced_requests

import pinstage

POOLS, SLOTS, WIDTH = 2, 256, 8192  # T1: 33.5 MB
LIVE = 220  # columns: 0.9 MB
FLOOR = "driver floor of the live bytes"
SCATTERED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
SCATTERED_WIDTHS = (64, 1024, 8192)
# most_runs, most_surplus_bytes that force a way where there is no kernel; and whether there is
TRAVELS = {
    "kernel": (0, 0, True),
    "a copy each": (1 << 20, 0, False),
    "scatter by torch": (0, 0, False),
    "one copy of all": (0, 1 << 40, False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=40, help="blocks of each way (a quarter for the slow workloads)")
    parser.add_argument("--block", type=int, default=4, help="calls of one way before the next one's turn")
    parser.add_argument("--steps", type=int, default=400, help="steps of the trace that are timed")
    parser.add_argument(
        "--trace", metavar="FILE", help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens; else a seeded generator"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the generator")


class Work(NamedTuple):
    """One upload.

    Attributes:
        name: of the workload.
        live: bytes that are worth sending.
        ways: by name, the first of pinstage; one that returns a float has timed itself, in ns.
        results: what each way writes, and shall then equal.
        goals: (other way, largest ratio) of the first way's time.
    """

    name: str
    live: int
    ways: dict[str, Call]
    results: dict[str, tuple[torch.Tensor, torch.Tensor]]
    goals: list[tuple[str, float]]


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 1 << 20, shape, dtype=torch.int32)


def live_width(name: str, pools: int, width: int, live: int, goals: list[tuple[str, float]]) -> Work:
    """T1 and T2: of a wide table, the live columns."""
    shape = (pools, SLOTS, 2, width)
    table = pinstage.StagedTable(shape, torch.int32, dim=1)
    table.host.copy_(random_ids(*shape))
    host, pinned, waited = table.host, table.host.pin_memory(), table.host.pin_memory()
    dsts = {name: torch.zeros(shape, dtype=torch.int32, device="cuda") for name in ("bare", "full", "live", "event")}
    event = torch.cuda.Event()
    event.record()

    def bare(i: int) -> None:
        for dst, src in zip(dsts["bare"], pinned, strict=True):
            dst.copy_(src, non_blocking=True)

    def fresh(i: int) -> None:
        staged = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        staged.copy_(host)
        dsts["full"].copy_(staged, non_blocking=True)

    def fresh_live(i: int) -> None:
        staged = torch.empty((pools, SLOTS, 2, live), dtype=torch.int32, pin_memory=True)
        staged.copy_(host[..., :live])
        dsts["live"][..., :live].copy_(staged, non_blocking=True)

    def event_wait(i: int) -> None:
        event.synchronize()
        waited.copy_(host)
        dsts["event"].copy_(waited, non_blocking=True)
        event.record()

    ways: dict[str, Call] = {
        "commit": lambda i: table.commit(width=live),
        "bare, a pool at a time": bare,
        "fresh pinned": fresh,
        "fresh pinned, live": fresh_live,
        "event wait": event_wait,
    }
    results = {
        "commit": (table.device[..., :live], host[..., :live]),
        "bare, a pool at a time": (dsts["bare"], host),
        "fresh pinned": (dsts["full"], host),
        "fresh pinned, live": (dsts["live"][..., :live], host[..., :live]),
        "event wait": (dsts["event"], host),
    }
    nbytes = pools * SLOTS * 2 * live * 4
    driver = floor_of(nbytes)
    if driver is not None:
        ways[FLOOR] = driver
    return Work(name, nbytes, ways, results, goals)


def floor_of(nbytes: int) -> Call | None:
    rows = torch.ones((4, nbytes), dtype=torch.uint8)
    device = torch.empty((4, nbytes), dtype=torch.uint8, device="cuda")
    return floor(list(rows), list(device), [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(4)])


def batch_order(count: int) -> Work:
    """T3: ``[P, C, 2, W][:, idx, 0]``."""
    table = pinstage.StagedTable((POOLS, 2048, 2, 1024), torch.int32, dim=1)
    table.host.copy_(random_ids(*table.shape))
    index = torch.randperm(2048)[:count]
    expected = table.host[:, index, 0]
    dsts = [torch.zeros(expected.shape, dtype=torch.int32, device="cuda") for _ in range(2)]

    def select(i: int) -> None:
        staged = torch.empty(expected.shape, dtype=torch.int32, pin_memory=True)
        torch.index_select(table.host[:, :, 0], 1, index, out=staged)
        dsts[1].copy_(staged, non_blocking=True)

    ways: dict[str, Call] = {
        "commit_to": lambda i: table.commit_to(dsts[0], index, planes=0),
        "index_select into pinned": select,
    }
    results = dict(zip(ways, [(dst, expected) for dst in dsts], strict=True))
    return Work(f"T3 {count} rows", expected.numel() * 4, ways, results, [])


def by_row() -> Work:
    """T4: 256 of 1024 rows of 32 KB, in batch order and into the table's own rows."""
    table = pinstage.StagedTable((1024, WIDTH), torch.int32)
    table.host.copy_(random_ids(1024, WIDTH))
    index = torch.randperm(1024)[:256]
    expected = table.host[index]
    batch, fresh = (torch.zeros((256, WIDTH), dtype=torch.int32, device="cuda") for _ in range(2))

    def select(i: int) -> None:
        staged = torch.empty(expected.shape, dtype=torch.int32, pin_memory=True)
        torch.index_select(table.host, 0, index, out=staged)
        fresh.copy_(staged, non_blocking=True)

    def own_rows() -> torch.Tensor:
        return table.device[index.cuda()]

    ways: dict[str, Call] = {
        "commit_to": lambda i: table.commit_to(batch, index),
        "commit": lambda i: table.commit(index),
        "index_select into pinned": select,
    }
    results = {"commit_to": (batch, expected), "index_select into pinned": (fresh, expected)}
    table.commit(index).wait()
    if not torch.equal(own_rows().cpu(), expected):
        raise RuntimeError("T4: commit brought wrong bytes")
    return Work("T4 256 of 1024 rows", expected.numel() * 4, ways, results, [])


def metadata() -> Work:
    """T5: a step's small tensors, each allocated by itself."""
    srcs = [torch.randint(1, 100, (nbytes // dtype.itemsize,), dtype=dtype) for dtype, nbytes in METADATA]
    pinned = [src.pin_memory() for src in srcs]
    dsts = [torch.zeros_like(src, device="cuda") for src in srcs]

    def bare(i: int) -> None:
        for dst, src in zip(dsts, pinned, strict=True):
            dst.copy_(src, non_blocking=True)

    def fresh(i: int) -> None:
        for dst, src in zip(dsts, srcs, strict=True):
            staged = torch.empty(src.shape, dtype=src.dtype, pin_memory=True)
            staged.copy_(src)
            dst.copy_(staged, non_blocking=True)

    ways: dict[str, Call] = {
        "copy_batch_": lambda i: pinstage.copy_batch_(dsts, srcs),
        "copy_batch_ without its kernel": without_kernel(lambda i: pinstage.copy_batch_(dsts, srcs)),
        "bare loop": bare,
        "fresh pinned loop": fresh,
    }
    for name, way in ways.items():
        torch._foreach_zero_(dsts)
        way(0)
        torch.cuda.synchronize()
        if not all(torch.equal(dst.cpu(), src) for dst, src in zip(dsts, srcs, strict=True)):
            raise RuntimeError(f"T5: {name} brought wrong bytes")
    return Work(f"T5 {len(srcs)} tensors", sum(src.nbytes for src in srcs), ways, {}, [("bare loop", 0.25)])


WORKLOADS: list[Callable[[], Work]] = [
    lambda: live_width("T1", POOLS, WIDTH, LIVE, [("fresh pinned", 0.10), (FLOOR, 1.3)]),
    lambda: live_width("T2", POOLS, 256, LIVE, [("fresh pinned, live", 0.5)]),
    lambda: batch_order(16),
    lambda: batch_order(200),
    lambda: batch_order(512),
    by_row,
    metadata,
]


def check(work: Work) -> None:
    """Every way brings the right bytes.

    Raises:
        RuntimeError: one does not.
    """
    for name, (result, expected) in work.results.items():
        result.fill_(0)
        torch.cuda.synchronize()
        work.ways[name](0)
        torch.cuda.synchronize()
        if not torch.equal(result.cpu(), expected):
            raise RuntimeError(f"{work.name}: {name} brought wrong bytes")


def call_by_call(args: argparse.Namespace) -> list[dict[str, Any]]:
    figures = []
    print("median host time of one call, µs (the first way's as a ratio of it)")
    for make in WORKLOADS:
        work = make()
        check(work)
        rounds = args.rounds if work.live < 1 << 19 else max(args.rounds // 4, 5)
        times = interleaved(work.ways, rounds, synchronize=torch.cuda.synchronize, block=args.block, settle=SETTLED)
        ours = next(iter(times.values())).median
        print(f"\n{work.name}, {size_name(work.live)} live")
        print_table(
            ["way", "µs", "ratio"], [[n, f"{t.median:.1f}", f"{ours / t.median:.3f}"] for n, t in times.items()]
        )
        for against, most in work.goals:
            if against not in times:  # no compiler, no floor
                continue
            ratio = ours / times[against].median
            print(f"goal: <= {most} of {against}: {'met' if ratio <= most else 'missed'} ({ratio:.3f})")
        figures.append(
            {"workload": work.name, "live_bytes": work.live, "us": {n: t._asdict() for n, t in times.items()}}
        )
    return figures


def unchanged(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Commits that have nothing to send."""
    ways: dict[str, Call] = {}
    cases = {"T1 live": ((POOLS, SLOTS, 2, WIDTH), 1, LIVE), "T4 live": ((1024, WIDTH), 0, 300),
             "small": ((64, 256), 0, 256)}  # fmt: skip
    for name, (shape, dim, live) in cases.items():
        for track in ("marks", "compare"):
            table = pinstage.StagedTable(shape, torch.int32, dim=dim, track=track)  # type: ignore[arg-type]
            table.host.copy_(random_ids(*shape))
            table.mark(range(shape[dim]))
            table.commit(width=live).wait()
            ways[f"{name}, {track}"] = lambda i, table=table, live=live: table.commit(width=live)  # type: ignore[misc]
    times = interleaved(ways, args.rounds, synchronize=torch.cuda.synchronize, block=16)
    print("\ncommit of an unchanged table, host time, µs (goal: <= 5 with marks)")
    print_table(list(times), [[f"{t.median:.2f}" for t in times.values()]])
    return {name: t._asdict() for name, t in times.items()}


def scattered(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows apart from one another, 16 rows between two, by each way that they can travel."""
    figures = []
    for width in SCATTERED_WIDTHS:
        cells = []
        for count in SCATTERED:
            rows = list(range(0, 16 * count, 16))
            ways: dict[str, Call] = {}
            for name, (most_runs, surplus, kernel) in TRAVELS.items():
                table = pinstage.StagedTable((1024, WIDTH), torch.int32, track="marks")
                table._core.most_runs, table._core.most_surplus_bytes = most_runs, surplus
                table.host.copy_(random_ids(1024, WIDTH))
                index = torch.tensor(rows)

                def call(i: int, table: pinstage.StagedTable = table, index: torch.Tensor = index) -> None:
                    table.mark(index)
                    table.commit(width=width)  # noqa: B023

                way = call if kernel else without_kernel(call)
                way(0)
                torch.cuda.synchronize()
                if not torch.equal(table.device[rows, :width].cpu(), table.host[rows, :width]):
                    raise RuntimeError(f"{count} rows by {name}: wrong bytes")
                ways[name] = way
            rounds = max(args.rounds // 2, 5)
            host = interleaved(ways, rounds, synchronize=torch.cuda.synchronize, block=args.block)
            done = interleaved(
                {name: to_completion(way) for name, way in ways.items()}, rounds,
                synchronize=torch.cuda.synchronize, block=args.block,
            )  # fmt: skip
            cells.append([str(count), *(f"{host[n].median:.1f} ({done[n].median:.1f})" for n in ways)])
            figures.append(
                {
                    "rows": count,
                    "row_bytes": 4 * width,
                    "host_us": {n: t._asdict() for n, t in host.items()},
                    "done_us": {n: t._asdict() for n, t in done.items()},
                }
            )
        print(f"\nscattered rows of {size_name(4 * width)}, one in 16: host time (until done), µs")
        print_table(["rows", *TRAVELS], cells)
    return figures


def steps(args: argparse.Namespace) -> dict[str, Any]:
    if args.trace is None:
        return serve(generated_requests(args.seed), "seeded requests", args.steps)
    return serve(traced_requests(args.trace), Path(args.trace).name, args.steps)


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("cache_manager measures a GPU, and there is none here")
        return 2
    torch.cuda.set_stream(torch.cuda.Stream())
    pinstage.default_pool().reserve(256 << 20)
    figures = {
        "calls": call_by_call(args),
        "unchanged": unchanged(args),
        "scattered": scattered(args),
        "steps": steps(args),
    }
    write_json(args.json, "cache_manager", figures)
    return 0
