# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The engine's loop, one step ahead of its device, and the measurement of an upload in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from pinstage.cli.backends import Backend
from pinstage.cli.kv_cache import Scheduler, TableShape
from pinstage.cli.traffic import Request, generate, repeat
from pinstage.cli.uploads import Upload

WARM_UP_STEPS = 16
_RUN_AHEAD = 2  # the host waits for the tokens of the step before last
_RECORDED_BYTES = 64 << 20  # of tables kept on each side before they are compared


@dataclass(frozen=True)
class Workload:
    """The steps that every mode runs.

    Attributes:
        shape: of the block tables.
        steps: how many are measured.
        seed: of the generator, and of the cache's free lists.
        trace: requests to serve over and over; None takes them from the generator.
        source: what to call the origin of the requests.
    """

    shape: TableShape
    steps: int
    seed: int = 0
    trace: tuple[Request, ...] | None = None
    source: str = "a generator"

    def scheduler(self) -> Scheduler:
        """A new scheduler at the first step."""
        requests = generate(self.seed) if self.trace is None else repeat(self.trace)
        return Scheduler(requests, self.shape, self.seed)

    def requests_served(self) -> int:
        """How many requests the steps serve, wholly or in part."""
        scheduler = self.scheduler()
        for _ in range(WARM_UP_STEPS + self.steps):
            scheduler.step()
        return scheduler.admitted

    def host_ms_per_step(self) -> float:
        """Median host time of a step without its upload, in ms."""
        scheduler, table, record = self.scheduler(), *(torch.zeros(*self.shape, dtype=torch.int32) for _ in range(2))
        times = []
        for _ in range(WARM_UP_STEPS):
            began = time.perf_counter_ns()
            scheduler.step()
            scheduler.fill(table)
            record.copy_(table)
            times.append(time.perf_counter_ns() - began)
        return median(times) / 1e6


@dataclass(frozen=True)
class Measurement:
    """What the steps of one mode came to.

    Attributes:
        steps: how many.
        wrong_steps: in which the device saw another table than the step's.
        host_us_per_step: median host time of the upload call, in µs.
        stall_us_per_step: median time that the host was blocked before it could refill the table, in µs.
        pinned_bytes: pinned host memory of this mode.
    """

    steps: int
    wrong_steps: int
    host_us_per_step: float
    stall_us_per_step: float
    pinned_bytes: int


def _longest_run(shape: TableShape) -> int:
    return max(WARM_UP_STEPS, _RECORDED_BYTES // shape.nbytes)


def memory_needed(workload: Workload) -> int:
    """Bytes of the records that `measure` keeps, the device's included."""
    steps = min(workload.steps, _longest_run(workload.shape))
    return 2 * max(WARM_UP_STEPS, steps) * workload.shape.nbytes


class OverlapEngine:
    """Prepares step i while the device works on step i-1, and keeps the table of each step on both sides.

    Args:
        backend: the device.
        scheduler: decides the batches and fills the tables.
        upload: how a table gets to the device.
        shape: of the tables.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, upload: Upload, shape: TableShape) -> None:
        self.longest_run = _longest_run(shape)
        self.upload_ns: list[int] = []
        self.stall_ns: list[int] = []
        self._backend = backend
        self._scheduler = scheduler
        self._upload = upload
        self._shape = shape
        self._device_table = backend.device_tensor(shape)
        self._tokens = [backend.event() for _ in range(_RUN_AHEAD)]
        self._expected = torch.empty(0)
        self._seen = torch.empty(0)

    def run(self, steps: int, on_step: Callable[[], object]) -> int:
        """Runs some steps, then drains the device and compares what it saw with the tables that were meant.

        Args:
            steps: how many, at most `longest_run`.
            on_step: called after each.

        Returns:
            In how many steps the device saw another table.
        """
        self._make_records(steps)
        for step in range(steps):
            tokens = self._tokens[step % _RUN_AHEAD]
            tokens.synchronize()  # of the step before last: bounds the run-ahead, in every mode alike
            self._scheduler.step()
            began = time.perf_counter_ns()
            self._upload.wait_before_refill()
            self.stall_ns.append(time.perf_counter_ns() - began)
            self._scheduler.fill(self._upload.table)
            self._expected[step].copy_(self._upload.table)
            self._backend.enqueue_layers()
            began = time.perf_counter_ns()
            self._upload.upload_to(self._device_table)
            self.upload_ns.append(time.perf_counter_ns() - began)
            self._backend.enqueue_attention(self._device_table, self._seen[step])
            tokens.record()
            on_step()
        self._backend.synchronize()
        differs = self._seen[:steps].cpu() != self._expected[:steps]
        return int(differs.flatten(1).any(1).sum())

    def _make_records(self, steps: int) -> None:
        if len(self._expected) < steps:
            self._expected = torch.full(
                (steps, *self._shape), 0, dtype=torch.int32
            )  # not empty(): touches the pages now
            self._seen = self._backend.device_tensor((steps, *self._shape))
        self._seen.fill_(torch.iinfo(torch.int32).min)  # no table holds this: a step that never ran is wrong
        self._backend.synchronize()


def measure(
    backend: Backend, workload: Workload, upload: Upload, on_step: Callable[[], object] = lambda: None
) -> Measurement:
    """Runs the workload after a warm-up, which is not counted.

    Args:
        backend: the device.
        workload: the steps to run.
        upload: the mode to measure.
        on_step: called after each step.
    """
    engine = OverlapEngine(backend, workload.scheduler(), upload, workload.shape)
    engine.run(WARM_UP_STEPS, lambda: None)
    engine.upload_ns.clear()
    engine.stall_ns.clear()
    wrong = 0
    for done in range(0, workload.steps, engine.longest_run):
        wrong += engine.run(min(engine.longest_run, workload.steps - done), on_step)
    return Measurement(
        steps=workload.steps,
        wrong_steps=wrong,
        host_us_per_step=median(engine.upload_ns) / 1e3,
        stall_us_per_step=median(engine.stall_ns) / 1e3,
        pinned_bytes=upload.pinned_bytes,
    )
