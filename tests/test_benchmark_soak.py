# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The soak: short runs of it, and its control."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SHORT = ["--seconds", "0.5", "--operations", "150"]


def soak(*arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS), "soak", *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("soak")
    for name in ("soak", "measure"):
        sys.modules.pop(name, None)


def test_no_byte_is_wrong_and_the_steady_state_pins_nothing(tmp_path):
    """Case 6, and case 16: from a trace, through a pool that is tight."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.9,396,109\n"
    )
    done = soak(*SHORT, "--json", tmp_path / "soak.json", "--max-bytes", 1 << 20, "--trace", trace)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())["figures"]
    assert figures["wrong_bytes"] == 0
    assert figures["rounds"] > 2
    assert figures["copies"] > 150 * figures["rounds"]
    assert figures["host_allocations_after_warm_up"] == 0
    assert figures["pinned_high_water_bytes"] <= 1 << 20
    assert {"copy_", "copy_batch_", "to_device", "lease", "DoubleBuffer"} <= set(figures["host_us"])
    assert "0 wrong bytes" in done.stdout


def test_control_finds_wrong_bytes():
    done = soak(*SHORT, "--control")
    assert done.returncode == 1, done.stdout + done.stderr
    assert " 0 wrong bytes" not in done.stdout


def test_bad_trace_is_told_in_one_line(suite, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    assert suite.run(parser.parse_args(["--trace", str(tmp_path / "none.csv")])) == 2
    assert capsys.readouterr().err.startswith("cannot read the trace")


def test_quantiles_are_those_of_the_calls(suite):
    times = suite.Times()
    for start in range(0, 1000, 100):
        times.add([1000 * (i + 1) for i in range(start, start + 100)])
    figures = times.figures()
    assert 500 <= figures["p50"] <= 511
    assert 990 <= figures["p99"] <= 1011
    assert figures["max"] == 1000.0
