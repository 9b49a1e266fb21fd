# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Continuous batching with chunked prefill, prefix reuse and preemption, ahead of the tokens that it schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kv_cache import KvCache, Sequence
from workload import Prompt

_STEP_SECONDS = 0.2  # by the clock of the arrivals: slow, so that a few requests a second fill the batch


@dataclass(frozen=True)
class Chunk:
    """A sequence's part of a step: the tokens start to start + count.

    Attributes:
        samples: whether they end at the sequence's last token, so that the step makes the next one.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Scheduler:
    """Decides each step's batch. It knows how long an answer gets, and needs none of its tokens to go on.

    Args:
        prompts: in order of arrival, without end.
        cache: where their blocks come from.
        chunk: most tokens of one sequence in one step.

    Attributes:
        sequences: all that were admitted, by the number of their request.
        preempted: how often a sequence had to give its blocks back and start over.
        reused_tokens: how many tokens were found in the cache rather than computed.
    """

    def __init__(self, prompts: Iterator[Prompt], cache: KvCache, chunk: int) -> None:
        self._prompts = prompts
        self._next = next(prompts)
        self._cache = cache
        self._chunk = chunk
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._now = 0.0
        self.sequences: list[Sequence] = []
        self.preempted = 0
        self.reused_tokens = 0

    def step(self) -> list[Chunk]:
        """The next step's batch. Empty only if all that is left waits for tokens in flight."""
        self._retire()
        self._now += _STEP_SECONDS
        before = self.preempted
        chunks = [
            self._schedule(sequence)
            for sequence in list(self._running)
            if sequence.slot >= 0 and self._find_blocks(sequence)  # none if an older one was given its blocks
        ]
        if self.preempted == before:
            chunks += self._admit()
        return chunks

    def collect(self, chunks: list[Chunk], tokens: list[int]) -> None:
        """Takes what a step made: a token of each of its chunks, which means nothing where it does not sample."""
        for chunk, token in zip(chunks, tokens, strict=True):
            if chunk.samples:
                chunk.sequence.tokens.append(token)
                chunk.sequence.in_flight -= 1

    def answers(self) -> list[list[int]]:
        """The tokens that each request got so far."""
        return [sequence.tokens[sequence.prompt_tokens :] for sequence in self.sequences]

    def _retire(self) -> None:
        for sequence in self._running:
            if sequence.length == sequence.target:
                self._cache.release(sequence)
        self._running = [sequence for sequence in self._running if sequence.slot >= 0]

    def _find_blocks(self, sequence: Sequence) -> bool:
        """Gets the blocks of the sequence's next chunk. The youngest sequences give theirs; in the end, itself."""
        while not self._cache.grow(sequence, self._end_of_chunk(sequence)):
            youngest = self._running.pop()
            self._cache.release(youngest)
            self._waiting.appendleft(youngest)
            self.preempted += 1
            if youngest is sequence:
                return False
        return True

    def _admit(self) -> list[Chunk]:
        self._arrive()
        chunks = []
        # A sequence that was preempted computes its answer's tokens anew, so the host must have seen them all.
        while self._waiting and self._cache.has_slot and not self._waiting[0].in_flight:
            sequence = self._waiting[0]
            self._cache.open(sequence)
            if not self._cache.grow(sequence, self._end_of_chunk(sequence)):
                self._cache.release(sequence)
                break
            self._waiting.popleft()
            self._running.append(sequence)
            self.reused_tokens += sequence.computed
            chunks.append(self._schedule(sequence))
        return chunks

    def _arrive(self) -> None:
        if not self._running and not self._waiting:
            self._now = max(self._now, self._next.arrival)  # idle until someone comes
        while self._next.arrival <= self._now:
            sequence = Sequence(self._next.tokens, len(self._next.tokens), self._next.target)
            self._waiting.append(sequence)
            self.sequences.append(sequence)
            self._next = next(self._prompts)

    def _end_of_chunk(self, sequence: Sequence) -> int:
        return min(sequence.length, sequence.computed + self._chunk)

    def _schedule(self, sequence: Sequence) -> Chunk:
        start, end = sequence.computed, self._end_of_chunk(sequence)
        chunk = Chunk(sequence, start, end - start, samples=end == sequence.length)
        sequence.computed = end
        self._cache.publish(sequence)
        sequence.in_flight += chunk.samples
        return chunk
