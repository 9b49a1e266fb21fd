# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""What the README tells users to write does what it says, on the simulated device."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pinstage
from pinstage.testing import SimulatedDevice

README = (Path(__file__).parents[1] / "README.md").read_text()
SOURCE = torch.arange(32, dtype=torch.int32).reshape(4, 8)
ROWS = [2, 0, 3, 3]


def replacements():
    """(today, the snippets to write instead) of each line of "Which call for what"."""
    section = README.split("## Which call for what", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(today.strip(), re.findall(r"`([^`]+)`", instead)) for today, instead, _ in rows]


def names(dev):
    return {
        "pinstage": pinstage, "torch": torch, "device": dev, "pool": pinstage.StagingPool(dev),
        "stream": dev.default_stream, "dst": dev.zeros((4, 8), torch.int32), "src": SOURCE.clone(),
        "table": SOURCE.clone(), "idx": torch.tensor(ROWS), "lists": list(SOURCE[ROWS].split([1, 3])),
        "out": torch.zeros(4, 8, dtype=torch.int32),
        "dsts": [dev.zeros((4, 8), torch.int32), dev.zeros(3, torch.int64)],
        "srcs": [SOURCE.clone(), torch.arange(3)], "numbers": SOURCE.tolist(),
        "array": SOURCE.numpy().astype(np.float64), "dtype": torch.int32, "shape": (4, 8),
        "fill": lambda tensor: tensor.copy_(SOURCE), "tensor": torch.zeros(4),
        "n": 3, "w": 5, "planes": SOURCE.unsqueeze(-1).repeat(1, 1, 2), "longs": SOURCE.to(torch.int64),
    }  # fmt: skip


# What holds once the device is idle, by the call.
OUTCOMES = {
    "pinstage.copy_(": lambda n, _: torch.equal(n["dst"], SOURCE),
    "pinstage.copy_batch_(": lambda n, _: (
        n["dsts"][0].tolist() == SOURCE.tolist() and n["dsts"][1].tolist() == [0, 1, 2]
    ),
    "pinstage.to_device(": lambda _, made: made.tolist() == SOURCE.tolist(),
    "pinstage.copy_rows_(": lambda n, _: torch.equal(n["dst"], SOURCE[ROWS]),
    "pinstage.gather_rows(": lambda n, made: made is n["out"] and torch.equal(made, SOURCE[ROWS]),
    "block_table.commit(n": lambda n, _: torch.equal(n["block_table"].device[:3, :5], SOURCE[:3, :5]),
    "block_table.commit()": lambda n, _: torch.equal(n["block_table"].device[ROWS], SOURCE[ROWS]),
    "block_table.commit_to(": lambda n, _: torch.equal(n["dst"], SOURCE[ROWS]),
    "pool.lease(": lambda n, _: torch.equal(n["dst"], SOURCE),
    "db.copy_to(": lambda n, _: torch.equal(n["dst"], SOURCE),
    "pinstage.keep_alive(": lambda _, made: made.done(),
    "pinstage.staged_copies(": lambda n, _: torch.equal(n["dst"], SOURCE),
}


@pytest.mark.parametrize(("today", "snippets"), replacements(), ids=[today for today, _ in replacements()])
def test_replacement_does_what_it_replaces(today, snippets):
    with SimulatedDevice() as dev:
        dev.make_current()
        namespace, made = names(dev), None
        namespace["step"] = lambda: namespace["dst"].copy_(namespace["src"], non_blocking=True)
        for snippet in snippets:
            if re.match(r"with |\w+ = ", snippet):
                exec(snippet, namespace)
            else:
                made = eval(snippet, namespace)
        for changed in ("src", "planes", "longs", "table", "idx", "tensor"):  # at once
            namespace[changed].fill_(1)
        if "block_table" in namespace:
            namespace["block_table"].host.fill_(1)
        dev.synchronize()
        (outcome,) = (check for call, check in OUTCOMES.items() if call in snippets[-1])
        assert outcome(namespace, made), f"{snippets} instead of {today}"


def test_every_snapshot_call_replaces_something():
    text = " ".join(snippet for _, snippets in replacements() for snippet in snippets)
    assert [call for call in OUTCOMES if call not in text] == []


@pytest.mark.parametrize("block", re.findall(r"```python\n(with .*?)```", README, re.DOTALL))
def test_block_of_code_runs(block):
    exec(block, {"pinstage": pinstage, "torch": torch, "SimulatedDevice": SimulatedDevice})
