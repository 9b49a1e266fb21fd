# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""A small paged KV cache: blocks of tokens, handed to requests as they grow, and continuous batching over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

import pinstage
from pinstage.cli.traffic import Request

BLOCK_TOKENS = 64
NO_BLOCK = -1  # fills the table past a request's blocks, and the rows without a request
_PREFILL_TOKENS = 512  # of a prompt, in one step
_STEP_SECONDS = 0.2  # by the clock of the arrivals: slow, so that a few requests a second fill the batch


class TableShape(NamedTuple):
    """Shape of a block table, int32: entry [pool, row, 0 or 1, i] is where the i-th block of keys or values lies."""

    pools: int
    batch: int
    planes: int
    blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.pools * self.batch * self.planes * self.blocks * torch.int32.itemsize

    @classmethod
    def of(cls, pools: int, batch: int, blocks: int) -> TableShape:
        """The shape for `batch` requests of up to `blocks` blocks in each of `pools` pools."""
        return cls(pools, batch, 2, blocks)


class PagedKvCache:
    """Which blocks of each pool belong to which request. A request has a slot, its row in a map kept on the host.

    Args:
        shape: of the tables to fill. Each pool has blocks for a full table, so that requests never run out.
        seed: shuffles the pools' free lists.
    """

    def __init__(self, shape: TableShape, seed: int) -> None:
        rng = random.Random(seed)
        self._free_blocks = [list(range(shape.batch * shape.blocks)) for _ in range(shape.pools)]
        for blocks in self._free_blocks:
            rng.shuffle(blocks)
        self._free_slots = list(range(shape.batch))
        self._held = [0] * shape.batch  # blocks of each slot, in every pool
        # One row more than slots, always without blocks, which fills up a batch.
        self._map = torch.full((shape.pools, shape.batch + 1, 2, shape.blocks), NO_BLOCK, dtype=torch.int32)
        self._batch = shape.batch

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    def open_slot(self) -> int:
        """Takes a free slot for a new request."""
        return self._free_slots.pop()

    def grow(self, slot: int, tokens: int) -> None:
        """Gives the request in `slot` the blocks that it lacks for `tokens` tokens."""
        held, needed = self._held[slot], -(-tokens // BLOCK_TOKENS)
        if needed <= held:
            return
        for pool, free in enumerate(self._free_blocks):
            blocks = torch.tensor([free.pop() for _ in range(held, needed)], dtype=torch.int32)
            self._map[pool, slot, 0, held:needed] = 2 * blocks  # a block's keys, and behind them its values
            self._map[pool, slot, 1, held:needed] = 2 * blocks + 1
        self._held[slot] = needed

    def release(self, slot: int) -> None:
        """Takes the slot and all its blocks back."""
        for pool, free in enumerate(self._free_blocks):
            free.extend((self._map[pool, slot, 0, : self._held[slot]] // 2).tolist())
        self._map[:, slot] = NO_BLOCK
        self._held[slot] = 0
        self._free_slots.append(slot)

    def fill(self, table: torch.Tensor, slots: list[int]) -> None:
        """Writes the batch's block table: row i is that of the request in ``slots[i]``."""
        rows = slots + [self._batch] * (self._batch - len(slots))
        pinstage.gather_rows(self._map, rows, dim=1, out=table)


@dataclass
class _Running:
    slot: int
    context_tokens: int
    last_token: int  # context and answer together
    tokens: int = 0


class Scheduler:
    """Continuous batching: each step, requests that are done leave, waiting ones join, the others go on.

    The batch stays compact: when a request leaves, those behind it move up a row.

    Args:
        requests: in order of arrival, without end. What does not fit the table's width is cut off.
        shape: of the block tables.
        seed: of the cache's free lists.
    """

    def __init__(self, requests: Iterator[Request], shape: TableShape, seed: int) -> None:
        self._requests = requests
        self._next = next(requests)
        self._cache = PagedKvCache(shape, seed)
        self._most_tokens = shape.blocks * BLOCK_TOKENS
        self._running: list[_Running] = []
        self._now = 0.0
        self.admitted = 0

    def step(self) -> None:
        """Decides the next step's batch, and gives it blocks."""
        self._now += _STEP_SECONDS
        for request in self._running:
            if request.tokens == request.last_token:
                self._cache.release(request.slot)
        self._running = [request for request in self._running if request.tokens < request.last_token]
        if not self._running:
            self._now = max(self._now, self._next.arrival)  # idle until someone comes
        while self._next.arrival <= self._now and self._cache.has_room:
            self._admit(self._next)
            self._next = next(self._requests)
        for request in self._running:
            prompt_left = request.context_tokens - request.tokens
            request.tokens += min(prompt_left, _PREFILL_TOKENS) if prompt_left > 0 else 1
            self._cache.grow(request.slot, request.tokens)

    def _admit(self, request: Request) -> None:
        context = min(request.context_tokens, self._most_tokens - 1)
        last = min(context + request.generated_tokens, self._most_tokens)
        self._running.append(_Running(self._cache.open_slot(), context, last))
        self.admitted += 1

    def fill(self, table: torch.Tensor) -> None:
        """Writes the block table of the step just decided."""
        self._cache.fill(table, [request.slot for request in self._running])
