# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Minutes of mixed traffic in which every source is written at once, and every byte is verified on the device."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import size_name, write_json

import pinstage
from pinstage import _core, cuda, devices
from pinstage.cli.errors import UsageError
from pinstage.cli.traffic import Request, generate, read_trace, repeat
from pinstage.testing import SimulatedDevice

BLOCK_TOKENS = 16
KINDS = ("copy_", "copy_ strided", "copy_rows_", "segments", "copy_batch_", "to_device", "lease", "DoubleBuffer")
WEIGHTS = (40, 5, 5, 5, 15, 10, 10, 10)
PAIRS = 8  # of a batch
ROWS, TABLE = 32, 64  # rows taken, rows there are
STREAMS = 4
MOST = 64 << 10  # elements of int32 of all but the bulk copies
BULK = 3 << 20  # elements: 12 MB, more than one piece
UPDATES = 0.5  # seconds between two looks at the device's count of wrong bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes, streams and order (0)")
    parser.add_argument("--operations", type=int, default=2000, help="calls between two verifications (2000)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="limit of the pool (64 MB)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="CSV of requests whose lengths are the sizes")
    parser.add_argument(
        "--control", action="store_true", help="event queries lie, so slots are reused too early: must find wrong bytes"
    )


# --- where it runs ----------------------------------------------------------------------------------------------------


class Gpu:
    """What the soak needs of a device. Streams are named by number; 0 is the default stream."""

    def __init__(self, control: bool) -> None:
        index = torch.cuda.current_device()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if control:
            core = cuda.open_device(index, {"cuEventQuery": _core.lying_event_query()})
            core.poll_batch = 1
            devices._cuda_devices[index] = core
        self.device: Any = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name()
        self.streams: list[Any] = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(STREAMS)]

    def empty(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=torch.int32, device=self.device)

    def on(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.streams[stream])

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> int:
        return torch.cuda.memory_allocated()

    def close(self) -> None:
        pass


class Simulation:
    def __init__(self, control: bool) -> None:
        self.device: Any = SimulatedDevice(schedule="late", lying_queries=control)
        self.device.make_current()
        self.name = "simulated device"
        self.streams = [self.device.default_stream]
        for _ in range(STREAMS):
            with self.device.stream() as stream:
                self.streams.append(stream)

    def empty(self, elements: int) -> torch.Tensor:
        made: torch.Tensor = self.device.empty(elements, torch.int32)
        return made

    def on(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return self.device.stream(self.streams[stream])  # type: ignore[no-any-return]

    def launch(self, work: Callable[[], object]) -> None:
        self.device.launch(work)

    def synchronize(self) -> None:
        self.device.synchronize()

    def memory(self) -> int:
        return 0

    def close(self) -> None:
        self.device.close()


Machine = Gpu | Simulation


# --- what is copied ---------------------------------------------------------------------------------------------------


def sizes(rng: random.Random, trace: Path | None) -> Iterator[int]:
    """Elements of one copy after the other: of a request its token ids and its block table; else any, small ones most.

    One in a thousand is large enough to go in pieces.
    """
    requests: Iterator[Request] = generate(rng.getrandbits(32)) if trace is None else repeat(read_trace(trace))
    for request in requests:
        yield min(request.context_tokens, MOST)
        yield -(-request.context_tokens // BLOCK_TOKENS)
        yield round(2 ** rng.uniform(0, 13))
        if trace is None and rng.random() < 0.003:
            yield round(2 ** rng.uniform(13, 16))
        if trace is None and rng.random() < 0.001:
            yield BULK


class Destination:
    """Part of the device buffers (one of even rounds, one of odd ones) that `source` is copied to."""

    def __init__(self, first: int, source: torch.Tensor, shape: torch.Size) -> None:
        self.first, self.source, self.shape = first, source, shape

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.first : self.first + self.shape.numel()].view(self.shape)


class Operation:
    """A call of pinstage, for even and for odd rounds, of some copies; `refill` then writes their sources."""

    def __init__(self, kind: str, calls: list[Callable[[], object]], refill: Callable[[], object], copies: int) -> None:
        self.kind, self.calls, self.refill, self.copies = kind, calls, refill, copies


class Plan:
    """A round of operations, repeated. In round r each source holds its first contents plus r, then one more."""

    def __init__(self, machine: Machine, pool: pinstage.StagingPool, args: argparse.Namespace) -> None:
        self.machine, self.pool = machine, pool
        self.rng = random.Random(args.seed)
        self._random = torch.Generator().manual_seed(args.seed)
        self._sizes = sizes(self.rng, args.trace)
        self._expected: list[torch.Tensor] = []  # first contents, in the order of the buffers
        self._elements = 0
        drafts = [self._draft(kind) for kind in self.rng.choices(KINDS, WEIGHTS, k=args.operations)]
        self.buffers = [machine.empty(self._elements) for _ in range(2)]
        self.expected = machine.empty(self._elements)
        self.expected.copy_(torch.cat(self._expected))
        self._expected.clear()
        self.operations = [draft() for draft in drafts]
        self.copies = sum(operation.copies for operation in self.operations)
        self.nbytes = 4 * self._elements

    def _source(self, *shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=self._random).to(torch.int32)

    def _to(self, source: torch.Tensor, expected: torch.Tensor | None = None) -> Destination:
        expected = source if expected is None else expected
        destination = Destination(self._elements, source, expected.shape)
        self._expected.append(expected.flatten().clone())
        self._elements += expected.numel()
        return destination

    def _draft(self, kind: str) -> Callable[[], Operation]:
        """Takes room in the buffers; what is returned makes the operation once they are there."""
        make = {
            "copy_": self._copy, "copy_ strided": self._strided, "copy_rows_": self._rows, "segments": self._segments,
            "copy_batch_": self._batch, "to_device": self._to_device, "lease": self._lease,
            "DoubleBuffer": self._double_buffer,
        }[kind]  # fmt: skip
        return partial(make, *self._arguments(kind))

    def _arguments(self, kind: str) -> list[Any]:
        size = next(self._sizes)
        small = min(size, 2048)
        if kind == "copy_batch_":
            return [[self._to(self._source(min(next(self._sizes), 4096))) for _ in range(PAIRS)]]
        if kind == "copy_rows_":
            table = self._source(TABLE, -(-small // ROWS))
            index = torch.randint(0, TABLE, (ROWS,), generator=self._random)
            return [self._to(table, table[index]), index]
        if kind == "segments":
            sources = [self._source(min(next(self._sizes), 4096)) for _ in range(PAIRS)]
            return [self._to(sources[0], torch.cat(sources)), sources]
        if kind == "copy_ strided":
            width = -(-small // 16)
            sources = [self._source(16, width), self._source(16, width)]
            whole = self._to(sources[0], torch.cat(sources, 1))
            return [whole, sources, width]
        if kind == "to_device":
            return [self._to(self._source(small))]
        return [self._to(self._source(size))]

    def _operation(
        self, kind: str, calls: list[Callable[[], object]], sources: list[torch.Tensor], copies: int = 1
    ) -> Operation:
        if len(sources) == 1:
            return Operation(kind, calls, partial(sources[0].add_, 1), copies)
        return Operation(kind, calls, partial(torch._foreach_add_, sources, 1), copies)

    def _copy(self, to: Destination) -> Operation:
        calls = [partial(pinstage.copy_, to.view(buffer), to.source, pool=self.pool) for buffer in self.buffers]
        return self._operation("copy_", calls, [to.source])

    def _strided(self, to: Destination, sources: list[torch.Tensor], width: int) -> Operation:
        def call(left: torch.Tensor, right: torch.Tensor) -> None:
            pinstage.copy_(left, sources[0], pool=self.pool)
            pinstage.copy_(right, sources[1], pool=self.pool)

        views = [to.view(buffer) for buffer in self.buffers]
        calls = [partial(call, view[:, :width], view[:, width:]) for view in views]
        return self._operation("copy_ strided", calls, sources, 2)

    def _rows(self, to: Destination, index: torch.Tensor) -> Operation:
        calls = [
            partial(pinstage.copy_rows_, to.view(buffer), to.source, index, pool=self.pool) for buffer in self.buffers
        ]
        return self._operation("copy_rows_", calls, [to.source])

    def _segments(self, to: Destination, sources: list[torch.Tensor]) -> Operation:
        calls = [partial(pinstage.copy_rows_, to.view(buffer), sources, pool=self.pool) for buffer in self.buffers]
        return self._operation("segments", calls, sources, len(sources))

    def _batch(self, to: list[Destination]) -> Operation:
        sources = [each.source for each in to]
        calls = [
            partial(pinstage.copy_batch_, [each.view(buffer) for each in to], sources, pool=self.pool)
            for buffer in self.buffers
        ]
        return self._operation("copy_batch_", calls, sources, len(to))

    def _to_device(self, to: Destination) -> Operation:
        as_list = to.source.numel() <= 64

        def call(view: torch.Tensor) -> None:
            data = to.source.tolist() if as_list else to.source
            made = pinstage.to_device(data, self.machine.device, torch.int32, pool=self.pool)
            self.machine.launch(lambda: view.copy_(made))

        return self._operation("to_device", [partial(call, to.view(buffer)) for buffer in self.buffers], [to.source])

    def _lease(self, to: Destination) -> Operation:
        def call(view: torch.Tensor) -> None:
            with self.pool.lease(to.shape, torch.int32) as lease:
                lease.tensor.copy_(to.source)
                lease.copy_to(view)

        return self._operation("lease", [partial(call, to.view(buffer)) for buffer in self.buffers], [to.source])

    def _double_buffer(self, to: Destination) -> Operation:
        ring = pinstage.DoubleBuffer(to.shape, torch.int32, self.machine.device, pool=self.pool)

        def call(view: torch.Tensor) -> None:
            with ring.fill() as host:
                host.copy_(to.source)
            ring.copy_to(view)

        return self._operation("DoubleBuffer", [partial(call, to.view(buffer)) for buffer in self.buffers], [to.source])


class Verifier:
    """Counts wrong bytes on the device, in stream order, with no wait of the host."""

    STREAM = STREAMS

    def __init__(self, plan: Plan) -> None:
        self.plan, self.machine = plan, plan.machine
        elements = plan.expected.numel()
        self._scratch = plan.machine.empty(elements)
        self._differs = plan.machine.empty(elements).view(torch.bool)
        self._wrong = plan.machine.empty(2).view(torch.int64).zero_()
        plan.machine.synchronize()
        self._read: list[pinstage.ticket.Ticket | None] = [None, None]

    def before_round(self, number: int) -> None:
        """The streams wait for the check of the round that used this buffer before."""
        ticket = self._read[number % 2]
        if ticket is not None:
            for stream in range(STREAMS):
                ticket.wait_on(self.machine.streams[stream])

    def after_round(self, number: int) -> None:
        """Enqueues the check, after all that the round enqueued."""
        check = self.machine.streams[self.STREAM]
        for stream in range(STREAMS):
            pinstage.keep_alive(None, self.machine.streams[stream], device=self.machine.device).wait_on(check)
        with self.machine.on(self.STREAM):
            self.machine.launch(partial(self._check, self.plan.buffers[number % 2], number))
        self._read[number % 2] = pinstage.keep_alive(None, check, device=self.machine.device)

    def _check(self, buffer: torch.Tensor, number: int) -> None:
        torch.add(self.plan.expected, number, out=self._scratch)
        torch.ne(buffer.view(torch.uint8), self._scratch.view(torch.uint8), out=self._differs)
        self._wrong.add_(torch.count_nonzero(self._differs))

    def wrong(self) -> int:
        """Waits for the device."""
        self.machine.synchronize()
        return int(self._wrong.item())


class Times:
    """Host times of calls in steps of 2 %: a size that does not grow with the run."""

    _STEPS = torch.exp(torch.arange(0, 1200, dtype=torch.float64) * 0.02)  # ns

    def __init__(self) -> None:
        self._counts = torch.zeros(len(self._STEPS) + 1, dtype=torch.int64)
        self._max = 0

    def add(self, nanoseconds: list[int]) -> None:
        values = torch.tensor(nanoseconds, dtype=torch.float64)
        self._counts += torch.bincount(torch.bucketize(values, self._STEPS), minlength=len(self._counts))
        self._max = max(self._max, *nanoseconds)

    def figures(self) -> dict[str, float]:
        """µs: the upper ends of the steps that hold the quantiles."""
        share = self._counts.cumsum(0) / self._counts.sum()
        at = torch.searchsorted(share, torch.tensor([0.5, 0.99], dtype=share.dtype)).clamp(max=len(self._STEPS) - 1)
        p50, p99 = (self._STEPS[at] / 1e3).tolist()
        return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(self._max / 1e3, 1)}


# --- the run ----------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run_round(plan: Plan, number: int, times: dict[str, list[int]]) -> None:
    """All operations once, in an order and on streams of this round."""
    operations, clock = plan.operations, time.perf_counter_ns
    plan.rng.shuffle(operations)
    at = 0
    while at < len(operations):
        stop = at + plan.rng.randint(1, 16)
        with plan.machine.on(plan.rng.randrange(STREAMS)):
            for operation in operations[at:stop]:
                call = operation.calls[number % 2]
                start = clock()
                call()
                times[operation.kind].append(clock() - start)
                operation.refill()
        at = stop


def soak(machine: Machine, args: argparse.Namespace, show: Callable[[float, int, int], None]) -> dict[str, Any]:
    pool = pinstage.StagingPool(machine.device, max_bytes=args.max_bytes)
    plan = Plan(machine, pool, args)
    verifier = Verifier(plan)
    times = {kind: Times() for kind in KINDS}
    start = time.monotonic()
    shown, wrong, warm = 0.0, 0, None
    for number in itertools.count():
        verifier.before_round(number)
        measured: dict[str, list[int]] = {kind: [] for kind in KINDS}
        run_round(plan, number, measured)
        verifier.after_round(number)
        elapsed = time.monotonic() - start
        if number > 0:  # the first round pins, and makes events
            for kind, values in measured.items():
                if values:
                    times[kind].add(values)
        if warm is None and number >= 2 and elapsed >= args.seconds / 10:
            warm = (pool.stats(), resident_bytes(), machine.memory())
        if elapsed - shown >= UPDATES or elapsed >= args.seconds:
            wrong, shown = verifier.wrong(), elapsed
            show(elapsed, (number + 1) * plan.copies, wrong)
        if warm is not None and elapsed >= args.seconds:
            break
    assert warm is not None
    stats = pool.stats()
    figures = {
        "device": machine.name,
        "seconds": round(time.monotonic() - start, 1),
        "rounds": number + 1,
        "copies": (number + 1) * plan.copies,
        "bytes": (number + 1) * plan.nbytes,
        "wrong_bytes": wrong,
        "host_allocations": stats.host_allocations,
        "host_allocations_after_warm_up": stats.host_allocations - warm[0].host_allocations,
        "events_created": stats.events_created,
        "events_created_after_warm_up": stats.events_created - warm[0].events_created,
        "pinned_high_water_bytes": stats.high_water_bytes,
        "pinned_bytes": stats.capacity_bytes,
        "resident_growth_bytes": resident_bytes() - warm[1],
        "device_growth_bytes": machine.memory() - warm[2],
        "waits": stats.waits,
        "host_us": {kind: each.figures() for kind, each in times.items() if int(each._counts.sum())},
    }
    if not pool._consistent():
        raise RuntimeError("the pool's books do not balance")
    del plan, verifier
    pool.close()
    return figures


def report(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{figures['device']}: {figures['copies']:,} copies, {figures['bytes'] / 1e9:,.1f} GB "
        f"in {figures['seconds']} s, every byte verified on the device"
    )
    colour = "red" if figures["wrong_bytes"] else "green"
    console.print(f"[{colour}]{figures['wrong_bytes']:,} wrong bytes[/]")
    console.print(
        f"host allocations {figures['host_allocations']} "
        f"(+{figures['host_allocations_after_warm_up']} after the warm-up), events created "
        f"{figures['events_created']} (+{figures['events_created_after_warm_up']}), pinned high water "
        f"{size_name(figures['pinned_high_water_bytes'])} of {size_name(figures['pinned_bytes'])}, resident memory "
        f"{figures['resident_growth_bytes'] / (1 << 20):+.1f} MB, device memory "
        f"{figures['device_growth_bytes'] / (1 << 20):+.1f} MB, waits for room {figures['waits']}"
    )
    table = Table("host µs a call", *("p50", "p99", "max"))
    for kind, each in figures["host_us"].items():
        table.add_row(kind, *(f"{each[name]:,.1f}" for name in ("p50", "p99", "max")))
    console.print(table)


@contextlib.contextmanager
def progress(seconds: float) -> Iterator[Callable[[float, int, int], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Refreshed by hand: a thread that redraws would take the GIL in the middle of what is timed.
    with Progress(*columns, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=seconds)

        def show(elapsed: float, copies: int, wrong: int) -> None:
            bar.update(task, completed=elapsed, description=f"{copies:,} copies, {wrong:,} wrong bytes", refresh=True)

        yield show


def run(args: argparse.Namespace) -> int:
    try:
        import rich  # noqa: F401  # for the bar and the table
    except ImportError:
        print('rich is not installed; pip install "pinstage[cli]"', file=sys.stderr)
        return 2
    machine: Machine = Gpu(args.control) if torch.cuda.is_available() else Simulation(args.control)
    try:
        with contextlib.closing(machine), progress(args.seconds) as show:
            figures = soak(machine, args, show)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    report(figures)
    write_json(args.json, "soak", figures)
    return 1 if figures["wrong_bytes"] else 0
