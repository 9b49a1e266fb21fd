# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""What the demo shows on the terminal. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pinstage.cli.backends import Backend
from pinstage.cli.kv_cache import BLOCK_TOKENS
from pinstage.cli.overlap import Measurement, Workload

_TITLES = {"bare": "bare copy", "event_wait": "event wait", "pinstage": "pinstage"}
_REFRESHES = 60  # of the bar. Each costs the engine's host thread a millisecond, so not every step has one


def announce(console: Console, backend: Backend, workload: Workload) -> None:
    """Says what runs where."""

    def say(name: str, fact: str) -> None:
        console.print(f"[bold]{name:<9}[/] {escape(fact)}")

    shape = workload.shape
    say("device", f"{backend.name} ({backend.reason})")
    say("table", f"{list(shape)} int32, {binary_size(shape.nbytes)}; a block holds {BLOCK_TOKENS} tokens")
    say("workload", f"{workload.requests_served()} requests from {workload.source} in {workload.steps} steps")


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows a bar of `total` steps while the block runs; yields the function that tells it of a mode's steps."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    every = max(1, total // _REFRESHES)
    done = 0
    # Refreshed by hand: a thread that redraws would take the GIL in the middle of what is timed.
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)

        def advance(mode: str, steps: int) -> None:
            nonlocal done
            done += steps
            if steps == 0 or done % every == 0:
                progress.update(task, completed=done, description=_TITLES[mode], refresh=True)

        yield advance


def report(console: Console, results: Mapping[str, Measurement], status: int, *, simulated: bool) -> None:
    """Shows a row a mode, and what it means."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("mode")
    for heading in ("wrong steps", "host µs a step", "stall µs a step", "pinned"):
        table.add_column(heading, justify="right")
    for mode, result in results.items():
        colour = "red" if result.wrong_steps else "green"
        table.add_row(
            _TITLES[mode],
            f"[{colour}]{result.wrong_steps} of {result.steps}[/]",
            f"{result.host_us_per_step:.1f}",
            f"{result.stall_us_per_step:.1f}",
            binary_size(result.pinned_bytes),
        )
    console.print(table)
    console.print(_conclusion(results, status))
    console.print("pinstage's pinned memory is its default pool, which serves all copies of the process.", style="dim")
    if simulated:
        console.print("These host times are of the simulation, not of a GPU.", style="dim")


def _conclusion(results: Mapping[str, Measurement], status: int) -> str:
    bare, event_wait, pinstage = (results[mode] for mode in ("bare", "event_wait", "pinstage"))
    if status == 1:
        return (
            f"[red]FAILED[/]: the device saw another table in {pinstage.wrong_steps} steps of pinstage and "
            f"{event_wait.wrong_steps} of the event wait. Neither may happen."
        )
    if status == 2:
        return (
            f"[red]PROVED NOTHING[/]: the bare copy was wrong in only {bare.wrong_steps} of {bare.steps} steps, so "
            "these steps hardly raced. Larger batches change the table in more steps; a busier device copies later."
        )
    return (
        f"The bare copy gave the device another step's blocks in {bare.wrong_steps} of {bare.steps} steps. The event "
        f"wait ends that and blocks the host for {event_wait.stall_us_per_step:.0f} µs a step; pinstage ends it and "
        "lets the host run ahead."
    )


def binary_size(nbytes: int) -> str:
    """For example "64 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
