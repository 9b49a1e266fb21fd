# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The default limit of a pool, and each local rank's share of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pinstage
from pinstage import budget

TESTS = Path(__file__).parent
GB = 1 << 30
TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("PINSTAGE_MAX_BYTES", *budget._LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variables", "ranks"), [
    ({}, 1),
    ({"LOCAL_WORLD_SIZE": "8"}, 8),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ({"MPI_LOCALNRANKS": "4"}, 4),
    ({"MV2_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 8),  # which node this is, is not told with it
    ({"SLURM_STEP_TASKS_PER_NODE": "2"}, 2),
    ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 1),  # the step is what runs
    ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun under srun
    ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "2"}, 2),
    ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ({"LOCAL_WORLD_SIZE": "-2"}, 1),
    ({"LOCAL_WORLD_SIZE": "many", "MPI_LOCALNRANKS": "\N{SUPERSCRIPT TWO}"}, 1),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),,4"}, 1),
])  # fmt: skip
def test_launcher_tells_the_ranks_of_the_node(monkeypatch, variables, ranks):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert budget.local_ranks() == ranks


@pytest.mark.parametrize("ranks", [1, 3, 8, 1000])
def test_ranks_together_pin_no_more_than_the_limit(monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for limit in (256 * ranks, 1000 * ranks + 1, GB):
        monkeypatch.setenv("PINSTAGE_MAX_BYTES", str(limit))
        assert limit - ranks < ranks * budget.default_max_bytes() <= limit


def test_default_is_an_eighth_of_the_memory_shared_by_the_ranks(monkeypatch):
    monkeypatch.setattr(budget, "available_memory", lambda: 64 * GB)
    assert budget.default_max_bytes() == 8 * GB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert budget.default_max_bytes() == GB


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "4 GB", "\N{SUPERSCRIPT TWO}"])
def test_limit_that_is_no_number_of_bytes_is_refused(monkeypatch, text):
    monkeypatch.setenv("PINSTAGE_MAX_BYTES", text)
    with pytest.raises(ValueError, match="PINSTAGE_MAX_BYTES must be a positive number of bytes"):
        budget.default_max_bytes()


def test_limit_too_small_for_its_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("PINSTAGE_MAX_BYTES", "2047")
    with pytest.raises(ValueError, match="is 2047, which leaves 255 bytes to each of 8 local ranks"):
        budget.default_max_bytes()
    monkeypatch.setenv("PINSTAGE_MAX_BYTES", "2048")
    assert budget.default_max_bytes() == 256


def test_limit_that_was_passed_is_this_ranks_own(dev, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pinstage.StagingPool(dev, max_bytes=1 << 20) as pool:
        pool.reserve(1 << 20)


def test_each_process_of_a_job_keeps_to_its_share():
    program = """
import pinstage
from pinstage.testing import SimulatedDevice
with SimulatedDevice() as dev:
    pool = pinstage.default_pool(dev)
    try:
        pool.reserve(4 << 20)
    except pinstage.PoolExhausted:
        pool.reserve(3 << 20)
        print(pool.stats().capacity_bytes)
"""
    environment = {**os.environ, "PINSTAGE_MAX_BYTES": str(6 << 20), "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=TESTS, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"{3 << 20}\n"), done.stderr


# --- memory -----------------------------------------------------------------------------------------------------------

V1_UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(("files", "limit"), [
    ({}, None),
    ({"sys/fs/cgroup/memory.max": "1000"}, 1000),  # in a container
    ({"sys/fs/cgroup/memory.max": "max"}, None),
    ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000"}, 1000),
    ({"sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED}, None),
    ({"proc/self/cgroup": "0::/slurm/job_1/step_0", "sys/fs/cgroup/slurm/job_1/memory.max": "2000",
      "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max"}, 2000),  # of a job, on the node itself
    ({"proc/self/cgroup": "0::/slurm/job_1", "sys/fs/cgroup/slurm/memory.max": "4000",
      "sys/fs/cgroup/slurm/job_1/memory.max": "3000", "sys/fs/cgroup/slurm/job_2/memory.max": "1"}, 3000),
    ({"proc/self/cgroup": "4:memory:/slurm/job_1\n3:cpu,cpuacct:/other\n0::/",
      "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": "5000",
      "sys/fs/cgroup/memory/other/memory.limit_in_bytes": "1"}, 5000),
    ({"proc/self/cgroup": "0::/docker/0123", "sys/fs/cgroup/memory.max": "6000"}, 6000),  # the mount is the group
    ({"proc/self/cgroup": "0::/../../other", "sys/fs/cgroup/memory.max": "7000"}, 7000),
])  # fmt: skip
def test_memory_is_the_machines_or_the_lowest_limit_of_the_control_groups(tmp_path, files, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert budget.available_memory(tmp_path) == (TOTAL if limit is None else limit)
