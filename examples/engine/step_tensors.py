# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The tensors that describe a step, written by the host step after step into the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scheduler import Chunk

# In the order of model.StepInputs, without the map.
_PER_TOKEN = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int32)
_PER_SEQUENCE = (torch.int32, torch.int32)


class StepTensors:
    """One side's tensors, on the host or on the device, for steps of up to `tokens` tokens of `sequences` sequences.

    Args:
        make: makes a tensor of a shape and dtype.
        tokens: most tokens of a step.
        sequences: most sequences of a step.
    """

    def __init__(
        self, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], tokens: int, sequences: int
    ) -> None:
        self._per_token = [make((tokens,), dtype) for dtype in _PER_TOKEN]
        self._per_sequence = [make((sequences,), dtype) for dtype in _PER_SEQUENCE]

    def live(self, tokens: int, sequences: int) -> list[torch.Tensor]:
        """The parts that a step of this size uses."""
        return [each[:tokens] for each in self._per_token] + [each[:sequences] for each in self._per_sequence]


class Step:
    """A step as the scheduler decided it: its size, and what to write into the host's tensors.

    Attributes:
        chunks: the batch.
        tokens: how many.
        most_columns: most tokens of one sequence.
        width: blocks of its longest sequence.
    """

    def __init__(self, chunks: list[Chunk], block_tokens: int) -> None:
        self.chunks = chunks
        self.tokens = sum(chunk.count for chunk in chunks)
        self.most_columns = max(chunk.count for chunk in chunks)
        self.width = max(len(chunk.sequence.blocks) for chunk in chunks)
        self._block_tokens = block_tokens

    def write(self, host: StepTensors) -> None:
        """Writes the step into the host's tensors."""
        columns: list[list[int]] = [[] for _ in (*_PER_TOKEN, *_PER_SEQUENCE)]
        ids, positions, cache_slots, rows, places, last, slots = columns
        for row, chunk in enumerate(self.chunks):
            sequence, span = chunk.sequence, range(chunk.start, chunk.start + chunk.count)
            known = sequence.tokens[span.start : span.stop]
            ids += known + [-1 - sequence.slot] * (chunk.count - len(known))
            positions += span
            for position in span:
                block, place = divmod(position, self._block_tokens)
                cache_slots.append(sequence.blocks[block] * self._block_tokens + place)
            rows += [row] * chunk.count
            places += range(chunk.count)
            last.append(len(ids) - 1)
            slots.append(sequence.slot)
        for tensor, values in zip(host.live(self.tokens, len(self.chunks)), columns, strict=True):
            tensor.numpy()[:] = values
