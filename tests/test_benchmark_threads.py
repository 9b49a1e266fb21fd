# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of several threads: a short run of it, and what it makes of its ticks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("threads")
    for name in ("threads", "measure"):
        sys.modules.pop(name, None)


def test_every_way_size_and_number_of_threads_has_its_figures(tmp_path):
    """Case 13: 8 threads through one pool, each of which finds its own bytes."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "threads", "--rounds", "2", "--sizes", "256", "262144",
         "--threads", "1", "8", "--json", str(tmp_path / "threads.json")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = json.loads((tmp_path / "threads.json").read_text())["figures"]["sizes"]
    assert [each["bytes"] for each in sizes] == [256, 262144]
    for each in sizes:
        assert list(each["rates"]) == list(each["us"]) == ["copy_", "copy_, alone", "bare", "fresh pinned"]
        for way, rates in each["rates"].items():
            assert list(rates) == ["1", "8"]
            assert min(rates.values()) > 0
            assert each["ratios"][way]["1"] == 1
            assert all(0 < of["p50"] <= of["p99"] for of in each["us"][way].values())
    assert "pinned 0 times more after the start, waited for room 0 times" in done.stdout
    assert done.stdout.count("never under the rate of 1 thread") == 4
    assert done.stdout.count("with 8 threads >= 4 times 1 thread") == 2  # from 256 KB on


def test_wrong_bytes_of_any_thread_are_told(suite):
    machine = suite.Simulation()
    with suite.ThreadPoolExecutor(2) as workers:
        bench = suite.Bench(machine, suite.pinstage.StagingPool(machine.device), workers, 256, 2)
        bench.check(2)
        bench.ways[suite.BARE][1] = lambda: None
        with pytest.raises(RuntimeError, match="bare brought wrong bytes"):
            bench.check(2)
    machine.close()


def test_the_largest_sizes_are_called_a_few_times_too(suite):
    machine = suite.Simulation()
    bench = suite.Bench(machine, suite.pinstage.StagingPool(machine.device), None, 2 * suite.BURST_BYTES, 1)
    assert (bench.calls, bench.bursts) == (suite.LEAST_CALLS, 1)
    machine.close()


def test_rate_is_of_all_threads_from_the_first_start_to_the_last_end(suite):
    assert suite.rate([[[0, 10, 20], [30, 40, 50]], [[1000, 1250, 1500], [1700, 1800, 2000]]]) == 8 / 2000 * 1e9


def test_quantiles_are_those_of_single_calls(suite):
    block = [[[0, *range(1000, 101_000, 1000)]], [[0, *range(2000, 202_000, 2000)]]]
    assert suite.quantiles([block, block]) == {"p50": 1.0, "p99": 2.0}


def test_goals_are_judged_against_one_thread_that_copies_alone(suite):
    rates = {suite.OURS: {1: 300.0, 8: 420.0}, suite.ALONE: {1: 100.0, 8: 90.0}}
    ratios = {way: {n: each / of[1] for n, each in of.items()} for way, of in rates.items()}
    figures = [{"bytes": nbytes, "rates": rates, "ratios": ratios} for nbytes in (4096, 1 << 20)]
    lines = suite.goals(figures, [1, 8], 16)
    subjects = ["4 KB, copy_", "4 KB, copy_, alone", *["1 MB, copy_"] * 2, *["1 MB, copy_, alone"] * 2]
    assert [line.split(": ")[0] for line in lines] == subjects
    assert [line.split(": ")[-1] for line in lines] == ["met", "missed", "met", "met", "missed", "missed"]
    assert "4.20" in lines[3]
    assert "cannot be judged with 2 CPUs" in suite.goals(figures, [1, 8], 2)[3]
