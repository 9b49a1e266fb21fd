# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of large uploads, as far as it can be tested without measuring."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bulk(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("bulk")
    for name in ("bulk", "measure"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_suite_says_that_it_needs_a_gpu():
    done = subprocess.run([sys.executable, str(BENCHMARKS), "bulk"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (2, "bulk measures a GPU, and there is none here")


def test_figures_are_printed_as_rates_and_written_as_times(bulk, capsys):
    host = bulk.Host
    figures = [
        {
            "name": "16 MB",
            "bytes": 16_000_000,
            "done": {"copy_": host(400.0, 410.0), "pinned": host(320.0, 330.0)},
            "host": {"copy_": host(300.4, 310.0), "pinned": host(7.0, 8.0)},
        }
    ]
    bulk.print_rates("blocks", figures)
    printed = capsys.readouterr().out
    assert "40.0" in printed
    assert "50.0" in printed
    assert "300 (310)" in printed
    plain = json.loads(json.dumps(bulk.as_plain(figures)))
    assert plain[0]["done_us"]["copy_"] == {"median": 400.0, "mean": 410.0}
    bulk.print_rates("nothing", [])
    assert capsys.readouterr().out == ""


def test_every_row_workload_gathers_what_it_says(bulk):
    for name, (row, count, rows) in bulk.ROWS.items():
        assert count <= rows
        assert 64 << 20 <= row * count <= 512 << 20, name
