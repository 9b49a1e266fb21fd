# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The steps that the cache manager's benchmark times, and that it says what it needs."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("steps")
    for name in ("steps", "measure"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_suite_says_that_it_needs_a_gpu():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "cache_manager"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (2, "cache_manager measures a GPU, and there is none here")


def test_generated_requests_have_the_quantiles_of_the_service(steps):
    requests = list(itertools.islice(steps.generated_requests(1), 4000))
    assert requests == list(itertools.islice(steps.generated_requests(1), 4000))
    context = sorted(request.context for request in requests)
    generated = sorted(request.generated for request in requests)
    assert 850 < context[2000] < 1100
    assert 110 < generated[2000] < 150
    assert 1 <= context[0] < context[-1] <= 14050


def test_trace_is_read_and_repeated(steps, tmp_path):
    path = tmp_path / "trace.csv"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(header + "2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04,8,3\n")
    assert list(itertools.islice(steps.traced_requests(str(path)), 3)) == [(4808, 10), (8, 3), (4808, 10)]
    path.write_text(header)
    with pytest.raises(ValueError, match="no requests"):
        next(steps.traced_requests(str(path)))


def test_every_live_block_was_written_before_its_step(steps):
    """A block for every token that a request has, the one of this step too; none past the table."""
    slots, width = 16, 128
    written = [set() for _ in range(slots)]
    planned = steps.schedule(steps.generated_requests(2), 300, slots, width)
    assert planned == steps.schedule(steps.generated_requests(2), 300, slots, width)
    for step in planned:
        assert (step.rows, step.width % steps.GRAIN) == (slots, 0)
        assert step.width <= width
        for row, first, count in step.writes:
            assert count >= 1
            assert 0 <= first < first + count <= step.width
            if first == 0:
                written[row].clear()
            assert first == len(written[row])  # the next one, or a new request's first
            written[row].update(range(first, first + count))
    assert sum(len(step.writes) for step in planned) > 200
