# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Copies of several threads at once, each on a stream of its own, all through one pool: rates, and p99 under load.

`copy_` shares one team of worker threads among its callers. In `copy_, alone`, after `set_num_threads(1)`, each caller
copies by itself. Without a GPU the simulated device takes the copies: its times say nothing of a GPU, but what several
threads cost each other in Python and in the pool shows there too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from measure import SETTLED, print_table, size_name, write_json

import pinstage
from pinstage.testing import SimulatedDevice

SIZES = (256, 4 << 10, 64 << 10, 256 << 10, 1 << 20)
THREADS = (1, 2, 4, 8)
# Calls of a burst: enough that the threads' start, which takes them 0.1 ms, is a small part of it; few enough for a
# launch queue, and for memory that the device reads at the end of the burst alone. A block of small copies is several.
MOST_CALLS, LEAST_CALLS, BURST_BYTES, BURSTS = 256, 16, 32 << 20, 4
WARMUP = 1  # rounds
OURS, ALONE, BARE, FRESH = "copy_", "copy_, alone", "bare", "fresh pinned"
LARGE, TIMES_ONE = 256 << 10, 4  # the goal: from this size on, this many times the rate of one thread by itself
PATIENCE = 60.0  # seconds for a thread that does not come


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each way, size and number of threads (8)")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")
    parser.add_argument("--threads", type=int, nargs="*", default=THREADS, metavar="N", help="the first is the base")


class Lane(NamedTuple):
    """What one thread copies, and where."""

    dst: torch.Tensor
    src: torch.Tensor
    pinned: torch.Tensor
    stream: Any


class Gpu:
    def __init__(self) -> None:
        self.device: Any = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name()

    def lane(self, src: torch.Tensor) -> Lane:
        return Lane(torch.empty_like(src, device=self.device), src, src.pin_memory(), torch.cuda.Stream())

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(lane.stream)

    def bare(self, lane: Lane) -> Callable[[], object]:
        return lambda: lane.dst.copy_(lane.pinned, non_blocking=True)

    def fresh(self, lane: Lane) -> Callable[[], object]:
        def call() -> None:
            staged = torch.empty(lane.src.shape, dtype=torch.uint8, pin_memory=True)
            staged.copy_(lane.src)
            lane.dst.copy_(staged, non_blocking=True)

        return call

    def synchronize(self, lane: Lane) -> None:
        lane.stream.synchronize()

    def close(self) -> None:
        pass


class Simulation:
    def __init__(self) -> None:
        self.device: Any = SimulatedDevice(schedule="late")
        self.name = "simulated device"

    def lane(self, src: torch.Tensor) -> Lane:
        with self.device.stream() as stream:
            return Lane(self.device.empty(src.shape, src.dtype), src, src.clone(), stream)

    @contextlib.contextmanager
    def on(self, lane: Lane) -> Any:
        self.device.make_current()
        with self.device.stream(lane.stream):
            yield

    def bare(self, lane: Lane) -> Callable[[], object]:
        return lambda: self.device.copy_async(lane.dst, lane.pinned)

    def fresh(self, lane: Lane) -> Callable[[], object]:
        return lambda: self.device.copy_async(lane.dst, lane.src.clone())

    def synchronize(self, lane: Lane) -> None:
        self.device.current_stream.synchronize()

    def close(self) -> None:
        self.device.close()


Machine = Gpu | Simulation
# Of each thread, of each of its bursts: when that began, and when each call ended, in ns.
Block = list[list[list[int]]]
# By way and number of threads: the block of each round.
Blocks = dict[tuple[str, int], list[Block]]


class Bench:
    """One size: as many lanes as threads, and every way to copy in each."""

    def __init__(self, machine: Machine, pool: pinstage.StagingPool, workers: ThreadPoolExecutor, nbytes: int, n: int):
        self.machine, self.workers = machine, workers
        self.calls = max(min(MOST_CALLS, BURST_BYTES // nbytes), LEAST_CALLS)
        self.bursts = BURSTS if nbytes < LARGE else 1
        self.settle = SETTLED if nbytes >= 32 << 10 else 0.0  # FRESH leaves torch's OpenMP threads spinning
        self.lanes = [machine.lane(torch.randint(0, 255, (nbytes,), dtype=torch.uint8)) for _ in range(n)]

        def ours(lane: Lane) -> Callable[[], object]:
            return lambda: pinstage.copy_(lane.dst, lane.src, pool=pool)

        makers = {OURS: ours, ALONE: ours, BARE: machine.bare, FRESH: machine.fresh}
        self.ways = {name: [make(lane) for lane in self.lanes] for name, make in makers.items()}

    def block(self, way: str, threads: int) -> Block:
        """All threads copying at once."""
        barrier = threading.Barrier(threads, timeout=PATIENCE)

        def work(lane: Lane, call: Callable[[], object]) -> list[list[int]]:
            clock, bursts = time.perf_counter_ns, [[0] * (self.calls + 1) for _ in range(self.bursts)]
            with self.machine.on(lane):
                barrier.wait()
                for ticks in bursts:
                    ticks[0] = clock()
                    for i in range(1, len(ticks)):
                        call()
                        ticks[i] = clock()
                    self.machine.synchronize(lane)
            return bursts

        pinstage.set_num_threads(1 if way == ALONE else 0)
        time.sleep(self.settle)
        lanes = list(zip(self.lanes, self.ways[way], strict=True))[:threads]
        return [future.result() for future in [self.workers.submit(work, *lane) for lane in lanes]]

    def check(self, threads: int) -> None:
        """Every way brings every thread's bytes.

        Raises:
            RuntimeError: one does not.
        """
        for way in self.ways:
            for lane in self.lanes:
                lane.dst.zero_()
            self.block(way, threads)
            if not all(torch.equal(lane.dst.cpu(), lane.src) for lane in self.lanes[:threads]):
                raise RuntimeError(f"{way} brought wrong bytes")

    def run(self, counts: list[int], rounds: int) -> Blocks:
        """Ways and numbers of threads take turns, in another order each round."""
        cells = [(way, threads) for threads in counts for way in self.ways]
        blocks: Blocks = {cell: [] for cell in cells}
        shuffled = random.Random(0)
        for i in range(-WARMUP, rounds):
            for cell in shuffled.sample(cells, len(cells)):
                measured = self.block(*cell)
                if i >= 0:
                    blocks[cell].append(measured)
        return blocks


def rate(block: Block) -> float:
    """Calls a second, from when the first thread began until the last one was through."""
    nanoseconds = max(bursts[-1][-1] for bursts in block) - min(bursts[0][0] for bursts in block)
    return sum(len(ticks) - 1 for bursts in block for ticks in bursts) / nanoseconds * 1e9


def quantiles(blocks: list[Block]) -> dict[str, float]:
    """Of one call, in µs."""
    times = torch.tensor(blocks, dtype=torch.int64).diff(dim=-1).flatten().double() / 1e3
    ordered = times.sort().values
    return {name: round(float(ordered[int(q * (len(ordered) - 1))]), 2) for name, q in (("p50", 0.5), ("p99", 0.99))}


def figures_of(nbytes: int, bench: Bench, blocks: Blocks, counts: list[int]) -> dict[str, Any]:
    rates = {
        way: {n: statistics.median(map(rate, blocks[way, n])) for n in counts} for way in bench.ways
    }  # median over the rounds
    return {
        "bytes": nbytes,
        "calls_a_burst": bench.calls,
        "bursts": bench.bursts,
        "rates": rates,
        "ratios": {way: {n: each[n] / each[counts[0]] for n in counts} for way, each in rates.items()},
        "us": {way: {n: quantiles(blocks[way, n]) for n in counts} for way in bench.ways},
    }


def goals(figures: list[dict[str, Any]], counts: list[int], cpus: int) -> list[str]:
    """Each in a line, met or missed."""
    first, most = counts[0], counts[-1]
    if first == most:
        return []
    lines = []
    for each in figures:
        alone = each["rates"][ALONE][first]
        for way in (OURS, ALONE):
            ratios = {n: each["ratios"][way][n] for n in counts[1:]}
            worst = min(ratios, key=ratios.get)
            lines.append(
                f"{size_name(each['bytes'])}, {way}: never under the rate of {first} thread: "
                f"{ratios[worst]:.2f} with {worst}: {'met' if ratios[worst] >= 1 else 'missed'}"
            )
            if each["bytes"] < LARGE:
                continue
            ratio = each["rates"][way][most] / alone
            judged = "met" if ratio >= TIMES_ONE else "missed"
            if cpus < most:
                judged = f"cannot be judged with {cpus} CPUs"
            lines.append(
                f"{size_name(each['bytes'])}, {way}: with {most} threads >= {TIMES_ONE} times {first} thread "
                f"that copies alone: {ratio:.2f}: {judged}"
            )
    return lines


def report(figures: list[dict[str, Any]], counts: list[int]) -> None:
    print("thousand calls a second of all threads together, and as a multiple of the first column's")
    print_table(
        ["bytes", "way", *(f"{n} threads" for n in counts)],
        [
            [size_name(each["bytes"]), way, *(f"{r / 1e3:.1f} ({each['ratios'][way][n]:.2f})" for n, r in of.items())]
            for each in figures
            for way, of in each["rates"].items()
        ],
    )
    print("\nhost time of one call, µs: p50 / p99")
    print_table(
        ["bytes", "way", *(f"{n} threads" for n in counts)],
        [
            [size_name(each["bytes"]), way, *(f"{q['p50']:.1f} / {q['p99']:.1f}" for q in of.values())]
            for each in figures
            for way, of in each["us"].items()
        ],
    )


def run(args: argparse.Namespace) -> int:
    counts, cpus = list(args.threads), len(os.sched_getaffinity(0))
    machine: Machine = Gpu() if torch.cuda.is_available() else Simulation()
    figures = []
    with contextlib.closing(machine), ThreadPoolExecutor(max(counts)) as workers:
        pool = pinstage.StagingPool(machine.device)
        pool.reserve(2 * max(counts) * BURST_BYTES)
        before = pool.stats()
        for nbytes in args.sizes:
            bench = Bench(machine, pool, workers, nbytes, max(counts))
            bench.check(max(counts))
            figures.append(figures_of(nbytes, bench, bench.run(counts, args.rounds), counts))
        after = pool.stats()
        pool.close()
    pinstage.set_num_threads(0)
    print(f"{machine.name}, {cpus} CPUs")
    report(figures, counts)
    print(
        f"\npinned {after.host_allocations - before.host_allocations} times more after the start, waited for room "
        f"{after.waits} times\n"
    )
    print("\n".join(goals(figures, counts, cpus)))
    write_json(args.json, "threads", {"device": machine.name, "cpus": cpus, "sizes": figures})
    return 0
