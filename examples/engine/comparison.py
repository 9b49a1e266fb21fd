# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The same requests served without overlap and with each upload, and whether they got the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine import Engine, Served, Shape, reference
from model import VOCABULARY
from uploads import UPLOADS
from workload import Prompt, prompts

from pinstage.cli.backends import Backend

_LAYER_MS = 1.0  # least work of the layers that the copies queue behind on a GPU


class Verdict(NamedTuple):
    """How a mode's answers compare with those without overlap, as far as both got.

    Attributes:
        compared: requests of which both have a token.
        wrong: of those, requests with another token.
        tokens: compared.
    """

    compared: int
    wrong: int
    tokens: int


def compare(served: Served, expected: Served) -> Verdict:
    """Compares token by token. Preempted sequences resume a step later with overlap, so the ends differ in length."""
    pairs = zip(served.answers, expected.answers, strict=False)  # one may have seen more requests arrive
    lengths = [(got, meant, min(len(got), len(meant))) for got, meant in pairs]
    return Verdict(
        compared=sum(length > 0 for _, _, length in lengths),
        wrong=sum(got[:length] != meant[:length] for got, meant, length in lengths),
        tokens=sum(length for _, _, length in lengths),
    )


def exit_status(verdicts: dict[str, Verdict]) -> int:
    """1 if pinstage or the event wait was ever wrong, else 2 if the bare copies never were, else 0."""
    if verdicts["pinstage"].wrong or verdicts["event_wait"].wrong:
        return 1
    return 0 if verdicts["bare"].wrong else 2


def serve_all(
    backend: Backend, shape: Shape, seed: int, steps: int, trace: Path | None = None
) -> tuple[dict[str, Served], dict[str, Verdict]]:
    """What every mode came to, the reference first, and the verdict on each of the others."""

    def requests() -> Iterator[Prompt]:
        return prompts(seed, VOCABULARY, shape.most_tokens, trace)

    served = {"reference": reference(backend, requests(), shape, seed, steps)}
    # So long that the device reads a step's tensors well after the host has refilled them for the next one.
    backend.set_layers(milliseconds=max(_LAYER_MS, 2 * served["reference"].host_us / 1e3))
    for mode, make_upload in UPLOADS.items():
        served[mode] = Engine(backend, requests(), shape, seed, make_upload).serve(steps)
    return served, {mode: compare(served[mode], served["reference"]) for mode in UPLOADS}
