# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The paged KV cache's bookkeeping: which blocks belong to which sequence, and which are shared by their contents."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

NULL_BLOCK = 0  # belongs to nobody; fills the tables past a sequence's blocks


@dataclass(eq=False)
class Sequence:
    """One request under way.

    Attributes:
        tokens: the prompt, and behind it the answer as far as the host has seen it.
        prompt_tokens: length of the prompt.
        target: tokens when the answer is complete.
        in_flight: answer tokens that the device was told to make and the host has not seen.
        computed: tokens whose keys and values are in the cache, or will be by what is enqueued.
        slot: its row in the block map, and its entry in the device's last tokens.
        blocks: its blocks, in order.
        keys: what its first blocks hold, as far as they are full and known (see block_key).
    """

    tokens: list[int]
    prompt_tokens: int
    target: int
    in_flight: int = 0
    computed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, those in flight included."""
        return len(self.tokens) + self.in_flight


def block_key(before: bytes, tokens: list[int]) -> bytes:
    """Names the contents of a block: its tokens and, by the key of the block before it, all tokens ahead of them."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out blocks, the longest unused first. Until it is taken, a free block can be shared for its contents."""

    def __init__(self, blocks: int) -> None:
        self._users = [0] * blocks
        self._free = OrderedDict((block, None) for block in range(NULL_BLOCK + 1, blocks))
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def take(self) -> int | None:
        """A block of one's own to write, or None if every block is in use."""
        if not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]
        self._users[block] = 1
        return block

    def share(self, key: bytes) -> int | None:
        """The block that holds what `key` names, to read only, or None."""
        block = self._by_key.get(key)
        if block is not None:
            self._users[block] += 1
            self._free.pop(block, None)
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Lets others share a full block. Of two with the same contents, the first stays the one that is found."""
        if block not in self._keys and key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, block: int) -> None:
        """Ends one use of a block."""
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free[block] = None


class KvCache:
    """The blocks of all sequences, and the host's map of them.

    Args:
        block_map: [slots, width] int32 on the host: written to hold the blocks of the sequence in each slot, then null
            blocks.
        blocks: blocks of the cache, the null block among them.
        block_tokens: tokens a block.
    """

    def __init__(self, block_map: torch.Tensor, blocks: int, block_tokens: int) -> None:
        slots, width = block_map.shape
        if blocks <= width:
            raise ValueError(f"{blocks} blocks cannot hold one sequence of {width} and the null block")
        self.block_tokens = block_tokens
        self._rows = block_map.fill_(NULL_BLOCK).numpy()
        self._pool = BlockPool(blocks)
        self._free_slots = list(range(slots))

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    def open(self, sequence: Sequence) -> None:
        """Gives a sequence a slot, and the blocks of others that begin with the same tokens."""
        sequence.slot = self._free_slots.pop()
        # Not the last token's block: it must be computed for the next token to come out.
        for start in range(0, len(sequence.tokens) - self.block_tokens, self.block_tokens):
            key = self._key_at(sequence, start)
            block = self._pool.share(key)
            if block is None:
                break
            self._append(sequence, block)
            sequence.keys.append(key)
        sequence.computed = len(sequence.blocks) * self.block_tokens

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a sequence the blocks that it lacks for `tokens` tokens; False if they ran out on the way."""
        while len(sequence.blocks) * self.block_tokens < tokens:
            block = self._pool.take()
            if block is None:
                return False
            self._append(sequence, block)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Lets others share the blocks that are full, enqueued to be computed, and of tokens that the host knows."""
        full = min(sequence.computed, len(sequence.tokens)) // self.block_tokens
        for i in range(len(sequence.keys), full):
            sequence.keys.append(self._key_at(sequence, i * self.block_tokens))
            self._pool.publish(sequence.blocks[i], sequence.keys[i])

    def release(self, sequence: Sequence) -> None:
        """Takes everything back. Steps that still read it are ahead, on the stream, of those that will write it."""
        self.publish(sequence)
        for block in reversed(sequence.blocks):  # so that the beginning, which others may share, is taken last
            self._pool.release(block)
        self._rows[sequence.slot] = NULL_BLOCK
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.keys, sequence.slot, sequence.computed = [], [], -1, 0

    def _append(self, sequence: Sequence, block: int) -> None:
        self._rows[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)

    def _key_at(self, sequence: Sequence, start: int) -> bytes:
        before = sequence.keys[-1] if sequence.keys else b""
        return block_key(before, sequence.tokens[start : start + self.block_tokens])
