# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""A small transformer with random weights over a paged KV cache: what the device runs in a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

VOCABULARY = 512
_WIDTH = 32
_HEADS = 2
_LAYERS = 2
# Rounding then is far below the distance of two logits, and a token does not depend on who else is in its batch.
_DTYPE = torch.float64


class StepInputs(NamedTuple):
    """What a step reads from the device's memory, uploaded by the host. Over T tokens of N sequences in S slots.

    Attributes:
        token_ids: [T] int64; -1 - slot stands for the token that the step before made for that slot.
        positions: [T] int64, in the token's sequence.
        cache_slots: [T] int64, where the token's key and value go: block * block_tokens + place.
        rows: [T] int32, which of the N sequences it belongs to.
        columns: [T] int32, which of that sequence's tokens in this step it is.
        last: [N] int32, the sequence's last token among the T.
        slots: [N] int32, the sequence's slot, where its next token is kept for the step after.
        map: [S, W] int32, the blocks of the sequence in each slot.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cache_slots: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    last: torch.Tensor
    slots: torch.Tensor
    map: torch.Tensor


class Model:
    """The weights, the cache's memory and the last tokens, all on the device.

    Args:
        device: a GPU, or "cpu" for the kernels of a simulated device.
        seed: of the weights.
        slots: sequences that run at once.
        blocks: blocks of the cache.
        block_tokens: tokens a block.
        most_tokens: of one sequence.
    """

    def __init__(
        self, device: torch.device | str, seed: int, slots: int, blocks: int, block_tokens: int, most_tokens: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int, gain: float = 1.0) -> torch.Tensor:
            scale = gain / float(shape[-2]) ** 0.5
            return torch.randn(*shape, generator=generator, dtype=_DTYPE).mul_(scale).to(device)

        self._embedding = weights(VOCABULARY, _WIDTH, gain=VOCABULARY**0.5)
        self._place = weights(most_tokens, _WIDTH, gain=0.5 * most_tokens**0.5)
        # Queries twice as large as usual, and attention's share too: a token depends on which tokens the table finds.
        self._layers = [
            (
                weights(_WIDTH, 3 * _WIDTH, gain=2.0),
                weights(_WIDTH, _WIDTH, gain=2.0),
                weights(_WIDTH, 2 * _WIDTH),
                weights(2 * _WIDTH, _WIDTH),
            )
            for _ in range(_LAYERS)
        ]
        self._head = weights(_WIDTH, VOCABULARY)
        self._blocks = blocks
        self._block_tokens = block_tokens
        shape = (_LAYERS, 2, blocks * block_tokens, _HEADS, _WIDTH // _HEADS)
        self._cache = torch.zeros(shape, dtype=_DTYPE, device=device)
        self._last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, inputs: StepInputs, most_columns: int) -> torch.Tensor:
        """Runs a step, and returns the next token of each sequence, [N] int64.

        Every index is clamped: without guarded copies they may be anything, and shall compute nonsense rather than end
        the process.

        Args:
            inputs: of the step.
            most_columns: most tokens of one sequence among them.
        """
        tokens, sequences, width = len(inputs.token_ids), len(inputs.slots), inputs.map.shape[1]
        slots = inputs.slots.clamp(0, len(self._last_tokens) - 1)
        rows, columns = inputs.rows.clamp(0, sequences - 1), inputs.columns.clamp(0, most_columns - 1)
        token_positions = inputs.positions.clamp(0, len(self._place) - 1)
        cache_slots = inputs.cache_slots.clamp(0, self._blocks * self._block_tokens - 1)
        places = torch.arange(self._block_tokens, device=cache_slots.device)
        keys_at = (inputs.map[slots].clamp(0, self._blocks - 1)[:, :, None] * self._block_tokens + places).flatten(1)
        positions = token_positions.new_zeros(sequences, most_columns)
        positions[rows, columns] = token_positions
        visible = torch.arange(width * self._block_tokens, device=keys_at.device) <= positions[:, None, :, None]
        made = self._last_tokens[(-1 - inputs.token_ids).clamp(0, len(self._last_tokens) - 1)]
        token_ids = torch.where(inputs.token_ids < 0, made, inputs.token_ids.clamp(max=VOCABULARY - 1))
        x = self._embedding[token_ids] + self._place[token_positions]
        for (qkv, out, up, down), (all_keys, all_values) in zip(self._layers, self._cache, strict=True):
            q, k, v = (_norm(x) @ qkv).view(tokens, 3, _HEADS, -1).unbind(1)
            all_keys[cache_slots], all_values[cache_slots] = k, v
            padded = q.new_zeros(sequences, most_columns, *q.shape[1:])
            padded[rows, columns] = q
            paged_keys, paged_values = (pool[keys_at].transpose(1, 2) for pool in (all_keys, all_values))
            attended = functional.scaled_dot_product_attention(
                padded.transpose(1, 2), paged_keys, paged_values, attn_mask=visible
            )
            x = x + attended.transpose(1, 2)[rows, columns].flatten(1) @ out
            x = x + functional.gelu(_norm(x) @ up) @ down
        next_tokens = (_norm(x[inputs.last.clamp(0, tokens - 1)]) @ self._head).argmax(-1)
        self._last_tokens[slots] = next_tokens
        return next_tokens


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])
