# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""examples/data_parallel.py: two ranks under torchrun, each with its own device and its share of the limit."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAM = EXAMPLES / "data_parallel.py"
LIMIT = 16 << 20


def torchrun(folder, *arguments, timeout):
    """(exit status, output) of two ranks."""
    environment = {
        **os.environ,
        "PINSTAGE_MAX_BYTES": str(LIMIT),
        "NCCL_NVLS_ENABLE": "0",  # multicast over NVLink, which virtual machines may lack, is not what is tested
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM, *arguments]
    with subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            output, _ = running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the ranks too
            raise
    return running.returncode, output


def check(output, kind):
    """Each rank's line of the report."""
    for rank in (0, 1):
        (line,) = (line.split() for line in output.splitlines() if line.startswith(f"{rank} "))
        _, device, _, limit, bare, staged, sums, touched = line
        assert device == f"{kind}:{rank}"
        assert int(limit) == LIMIT // 2
        assert int(bare) > 0  # or nothing raced
        assert (staged, sums, touched) == ("0", "0", "0")


def test_ranks_stage_their_own_bytes_on_simulated_devices(tmp_path):
    """With its control: bare copies of the same steps bring wrong elements."""
    status, output = torchrun(tmp_path, "--steps", 20, "--device", "simulated", timeout=120)
    assert status == 0, output
    assert "gloo" in output
    check(output, "simulated")


@pytest.mark.gpu
def test_ranks_stage_their_own_bytes_while_nccl_reduces(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    status, output = torchrun(tmp_path, "--steps", 200, "--device", "cuda", timeout=240)
    assert status == 0, output
    assert "NCCL" in output
    check(output, "cuda")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("data_parallel")
    sys.modules.pop("data_parallel", None)


@pytest.mark.parametrize(("change", "status"), [
    ({}, 0),
    ({"staged": 1}, 1),
    ({"sums": 1}, 1),
    ({"strangers": [0]}, 1),
    ({"bare": 0}, 2),
    ({"bare": 0, "staged": 1}, 1),
])  # fmt: skip
def test_any_rank_decides_the_exit_status(example, change, status):
    right = example.Outcome("cuda:0", 0, LIMIT, 100, bare=9, staged=0, sums=0, strangers=[])
    assert example._status([right, right._replace(**change)]) == status


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "start it with torchrun"),
    (["--steps", "0"], "'0' is not a positive number"),
    (["--device", "tpu"], "invalid choice"),
])  # fmt: skip
def test_bad_input_is_status_2(example, monkeypatch, capsys, arguments, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as exit_:
        example.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
