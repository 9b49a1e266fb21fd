# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""What the engine serves: the requests of the demo's traffic, with tokens for their prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pinstage.cli.traffic import generate, read_trace, repeat

# Lengths are divided by these, so that a small model on a CPU serves them in seconds.
_SHRINK_CONTEXT, _SHRINK_ANSWER = 32, 8
_SYSTEM_PROMPTS = 4  # of which each prompt begins with one, so that there are prefixes to reuse
_SYSTEM_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    """A request with its tokens.

    Attributes:
        arrival: seconds since the first request.
        tokens: the prompt.
        target: tokens when the answer is complete.
    """

    arrival: float
    tokens: list[int]
    target: int


def prompts(seed: int, vocabulary: int, most_tokens: int, trace: Path | None = None) -> Iterator[Prompt]:
    """Prompts without end, in order of arrival. The same arguments give the same prompts.

    Args:
        seed: of the generator, and of the tokens.
        vocabulary: tokens are 0 to vocabulary - 1.
        most_tokens: of a prompt and its answer together; what exceeds it is cut off.
        trace: a file with the requests, served over and over; None takes them from the generator.

    Raises:
        UsageError: the trace cannot be read.
    """
    requests = generate(seed) if trace is None else repeat(read_trace(trace))
    rng = random.Random(seed)
    systems = [rng.choices(range(vocabulary), k=_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]

    def endless() -> Iterator[Prompt]:
        for request in requests:
            context = min(-(-request.context_tokens // _SHRINK_CONTEXT), most_tokens - 1)
            answer = -(-request.generated_tokens // _SHRINK_ANSWER)
            tokens = rng.choice(systems) + rng.choices(range(vocabulary), k=max(context - _SYSTEM_TOKENS, 0))
            yield Prompt(request.arrival, tokens[:context], min(context + answer, most_tokens))

    return endless()
