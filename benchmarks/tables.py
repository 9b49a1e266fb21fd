# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Host time of what engines upload each step, against what they write today. Needs a GPU.

Block tables whole and in part (T1-T4), sparse KV rows (T8), the block lists of a batch's requests (T9). Bytes are
compared once before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from measure import SETTLED, Call, Host, interleaved, print_table, size_name, write_json

import pinstage

POOLS, CONTEXTS, WIDTH = 2, 2048, 1024  # of the table that T3 takes rows from: 2 KB or 4 KB keys a row


class Work(NamedTuple):
    """One upload: what it makes of the device tensor, and the ways to do it.

    Attributes:
        name: of the workload.
        nbytes: that travel.
        expected: what dst holds afterwards.
        dst: where to.
        ways: `pinstage`, and what is written today, by name.
        goal: how much of which way's time pinstage may take.
    """

    name: str
    nbytes: int
    expected: torch.Tensor
    dst: torch.Tensor
    ways: dict[str, Callable[[], object]]
    goal: tuple[str, float] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each way and workload (fewer from 4 MB on)")
    parser.add_argument("--block", type=int, default=8, help="calls of one way before the next one's turn")
    parser.add_argument("--threads", type=int, help="of pinstage and of torch; default: each its own")


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << 20, shape, dtype=torch.int32)


def staged(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Today's safe copy: a fresh pinned tensor each time."""
    fresh = torch.empty(src.shape, dtype=src.dtype, pin_memory=True)
    fresh.copy_(src)
    dst.copy_(fresh, non_blocking=True)


def whole(name: str, src: torch.Tensor, dst: torch.Tensor) -> Work:
    """A copy of src as it is."""
    ways: dict[str, Callable[[], object]] = {
        "pinstage": lambda: pinstage.copy_(dst, src),
        "fresh pinned": lambda: staged(src, dst),
        "pageable": lambda: dst.copy_(src, non_blocking=True),
    }
    return Work(name, src.numel() * src.element_size(), src, dst, ways, ("fresh pinned", 0.5))


def rows(name: str, src: torch.Tensor, dst: torch.Tensor, index: torch.Tensor, dim: int, goal: float | None) -> Work:
    """Rows of src, gathered."""
    shape = [*src.shape[:dim], index.numel(), *src.shape[dim + 1 :]]
    nbytes = dst.element_size()
    for size in shape:
        nbytes *= size

    def select() -> None:
        fresh = torch.empty(shape, dtype=src.dtype, pin_memory=True)
        torch.index_select(src, dim, index, out=fresh)
        dst.copy_(fresh, non_blocking=True)

    ways: dict[str, Callable[[], object]] = {
        "pinstage": lambda: pinstage.copy_rows_(dst, src, index, dim=dim),
        "index_select into pinned": select,
        "index_select, fresh pinned": lambda: staged(src.index_select(dim, index), dst),
    }
    expected = src.index_select(dim, index)
    return Work(name, nbytes, expected, dst, ways, None if goal is None else ("index_select into pinned", goal))


def concatenated(requests: int, blocks: int) -> Work:
    """The block lists of a batch, of lengths from half to one and a half of `blocks`."""
    lengths = torch.randint(blocks // 2, blocks + blocks // 2, (requests,)).tolist()
    lists = [random_ids(length) for length in lengths]
    total = sum(lengths)
    dst = torch.empty(total, dtype=torch.int32, device="cuda")

    def cat() -> None:
        fresh = torch.empty(total, dtype=torch.int32, pin_memory=True)
        torch.cat(lists, out=fresh)
        dst.copy_(fresh, non_blocking=True)

    ways: dict[str, Callable[[], object]] = {
        "pinstage": lambda: pinstage.copy_rows_(dst, lists),
        "cat into pinned": cat,
        "cat, fresh pinned": lambda: staged(torch.cat(lists), dst),
    }
    return Work(f"T9 {requests} lists", total * 4, torch.cat(lists), dst, ways, None)


def workloads() -> list[Callable[[], Work]]:
    """Made one at a time: the largest takes a hundred MB of each kind of memory."""

    def device(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    def t1() -> Work:
        return whole("T1 full width", random_ids(2, 256, 2, 8192), device(2, 256, 2, 8192))

    def t2() -> Work:
        src, dst = random_ids(2, 256, 2, 8192)[..., :220], device(2, 256, 2, 8192)[..., :220]
        return whole("T2 live width", src, dst)

    def t3(count: int, width: int) -> Work:
        src = random_ids(POOLS, CONTEXTS, 2, WIDTH)[:, :, 0, :width]
        dst, index = device(POOLS, count, 2, width)[:, :, 0], torch.randperm(CONTEXTS)[:count]
        return rows(f"T3 {count} rows", src, dst, index, 1, 0.15)

    def t4() -> Work:
        index = torch.randperm(1024)[:256]
        work = rows("T4 block table", random_ids(1024, 8192), device(256, 8192), index, 0, None)
        return work._replace(goal=("index_select, fresh pinned", 0.5))

    def t8() -> Work:
        src = torch.randint(0, 255, (100_000, 2304), dtype=torch.uint8)
        index = torch.randint(0, 100_000, (2048,))
        return rows("T8 sparse KV rows", src, device(2048, 2304, dtype=torch.uint8), index, 0, None)

    return [
        t1, t2, *(lambda n=n: t3(n, WIDTH) for n in (1, 16, 200, 512)), t4, t8,
        *(lambda n=n: concatenated(*n) for n in ((64, 40), (256, 100), (512, 500))),
    ]  # fmt: skip


def check(work: Work) -> None:
    """Every way brings the right bytes.

    Raises:
        AssertionError: one does not.
    """
    part = work.dst[tuple(slice(size) for size in work.expected.shape)]
    for name, way in work.ways.items():
        part.fill_(0)
        way()
        torch.cuda.synchronize()
        if not torch.equal(part.cpu(), work.expected):
            raise AssertionError(f"{work.name}: {name} brought wrong bytes")


def measure(work: Work, rounds: int, block: int) -> dict[str, Host]:
    calls: dict[str, Call] = {name: lambda _, way=way: way() for name, way in work.ways.items()}  # type: ignore[misc]
    rounds = rounds if work.nbytes < 4 << 20 else max(rounds // 4, 10)
    return interleaved(calls, rounds, synchronize=torch.cuda.synchronize, block=block, settle=SETTLED)


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("tables measures a GPU, and there is none here")
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
        pinstage.set_num_threads(args.threads)
    torch.cuda.set_stream(torch.cuda.Stream())
    pinstage.default_pool().reserve(256 << 20)
    cells, figures = [], []
    for make in workloads():
        work = make()
        check(work)
        times = measure(work, args.rounds, args.block)
        ours = times["pinstage"].median
        ratios = {name: ours / time.median for name, time in times.items() if name != "pinstage"}
        met = ""
        if work.goal is not None:
            against, wanted = work.goal
            met = f"<= {wanted} of {against}: {'met' if ratios[against] <= wanted else 'missed'}"
        spelt = [f"{name} {times[name].median:.1f} ({ratio:.2f})" for name, ratio in ratios.items()]
        cells.append([work.name, size_name(work.nbytes), f"{ours:.1f}", *spelt, met])
        figures.append(
            {
                "workload": work.name,
                "bytes": work.nbytes,
                "us": {name: time._asdict() for name, time in times.items()},
                "ratios": ratios,
                "goal": work.goal,
            }
        )
    print("median host time of one call, µs (pinstage's as a ratio of it)")
    print_table(["workload", "bytes", "pinstage", "", "", "goal"], cells)
    write_json(args.json, "tables", figures)
    return 0
