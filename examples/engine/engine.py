# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The engine's loop: the host schedules a step while the device runs the one before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from kv_cache import KvCache
from model import Model
from scheduler import Chunk, Scheduler
from step_tensors import Step
from uploads import BlockingUpload, MakeUpload
from workload import Prompt

from pinstage.cli.backends import Backend


@dataclass(frozen=True)
class Shape:
    """How much the engine serves.

    Attributes:
        batch: sequences that run at once.
        chunk: most tokens of one sequence in one step.
        block_tokens: tokens a block of the cache.
        width: most blocks of one sequence.
        blocks: blocks of the cache. Fewer than batch * width, so that sequences get preempted.
    """

    batch: int = 16
    chunk: int = 16
    block_tokens: int = 4
    width: int = 32
    blocks: int = 160

    @property
    def most_tokens(self) -> int:
        """Most tokens of one sequence."""
        return self.width * self.block_tokens


@dataclass(frozen=True)
class Served:
    """What some steps came to.

    Attributes:
        answers: the tokens of each request, as far as the steps got.
        steps: how many.
        seconds: that they took, the device's work included.
        host_us: median host time of a step, in µs: all but the wait for the tokens of the step before.
        upload_us: of it, the wait until the tensors may be written, and their copies.
        preempted: how often a sequence had to give its blocks back.
        reused_tokens: tokens whose keys and values were found in the cache.
    """

    answers: list[list[int]]
    steps: int
    seconds: float
    host_us: float
    upload_us: float
    preempted: int
    reused_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))


class Engine:
    """Serves prompts on one device.

    Args:
        backend: the device.
        prompts: in order of arrival, without end.
        shape: of the batch and the cache.
        seed: of the model's weights.
        make_upload: how a step's tensors get to the device.
        overlap: False makes every step wait for the one before: the reference.
    """

    def __init__(
        self,
        backend: Backend,
        prompts: Iterator[Prompt],
        shape: Shape,
        seed: int,
        make_upload: MakeUpload,
        overlap: bool = True,
    ) -> None:
        self._backend = backend
        self._upload = make_upload(backend, shape.batch, shape.width, shape.batch * shape.chunk)
        cache = KvCache(self._upload.map, shape.blocks, shape.block_tokens)
        self._scheduler = Scheduler(prompts, cache, shape.chunk)
        self._block_tokens = shape.block_tokens
        device = "cpu" if backend.simulated else backend.device
        self._model = Model(device, seed, shape.batch, shape.blocks, shape.block_tokens, shape.most_tokens)
        self._lag = 1 if overlap else 0
        # The tokens of one step are read by the host while the next step's are written.
        self._results = deque((backend.pinned_tensor((shape.batch,), torch.int64), backend.event()) for _ in range(2))
        self._under_way: deque[list[Chunk]] = deque()

    def serve(self, steps: int, on_step: Callable[[], object] = lambda: None) -> Served:
        """Runs some steps, and collects their tokens."""
        self._backend.synchronize()  # what the constructor enqueued
        with self._backend.own_stream():
            return self._serve(steps, on_step)

    def _serve(self, steps: int, on_step: Callable[[], object]) -> Served:
        host_ns: list[int] = []
        upload_ns: list[int] = []
        start = time.perf_counter_ns()
        while len(host_ns) < steps:
            began = time.perf_counter_ns()
            self._upload.wait_before_refill()  # the scheduler writes the block map
            waited = time.perf_counter_ns()
            chunks = self._scheduler.step()
            if not chunks:
                self._collect()
                continue
            step = Step(chunks, self._block_tokens)
            self._backend.enqueue_layers()  # of a model of a serious size, for the copies to queue behind
            upload_ns.append(waited - began + self._enqueue(step))
            host_ns.append(time.perf_counter_ns() - began)
            while len(self._under_way) > self._lag:
                self._collect()
            on_step()
        while self._under_way:
            self._collect()
        return Served(
            answers=self._scheduler.answers(),
            steps=steps,
            seconds=(time.perf_counter_ns() - start) / 1e9,
            host_us=median(host_ns) / 1e3,
            upload_us=median(upload_ns) / 1e3,
            preempted=self._scheduler.preempted,
            reused_tokens=self._scheduler.reused_tokens,
        )

    def _enqueue(self, step: Step) -> int:
        """Enqueues a step; returns the nanoseconds that its copies took the host."""
        step.write(self._upload.host)
        began = time.perf_counter_ns()
        inputs = self._upload.send(step)
        copied = time.perf_counter_ns() - began
        host_tokens, done = self._results[0]

        def kernel() -> None:
            tokens = self._model.step(inputs, step.most_columns)
            host_tokens[: len(tokens)].copy_(tokens, non_blocking=True)

        self._backend.launch(kernel)
        done.record()
        self._results.rotate(-1)
        self._under_way.append(step.chunks)
        return copied

    def _collect(self) -> None:
        """Waits for the oldest step under way, and hands its tokens to the scheduler."""
        chunks = self._under_way.popleft()
        host_tokens, done = self._results[-1 - len(self._under_way)]
        done.synchronize()
        self._scheduler.collect(chunks, host_tokens[: len(chunks)].tolist())


def reference(backend: Backend, prompts: Iterator[Prompt], shape: Shape, seed: int, steps: int) -> Served:
    """Serves without overlap: each step's copies and kernels are over before the next one is decided."""
    return Engine(backend, prompts, shape, seed, BlockingUpload, overlap=False).serve(steps)
