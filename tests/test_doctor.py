# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`pinstage doctor`: right about a machine that works, and about one that does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage import _core, cuda, devices
from pinstage.cli import doctor, main
from pinstage.testing import SimulatedDevice


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """A machine without a GPU, this one or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_GPU_NODES", (tmp_path / "nvidiactl",))


def test_machine_without_a_gpu_is_in_order(no_gpu, capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "no GPU here; on a simulated device pinning and copies work" in shown
    assert f"{_core.isa()}, of {', '.join(_core.supported_isas())}" in shown
    assert "BROKEN" not in shown


def test_json_holds_what_is_shown(no_gpu, tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    report = json.loads((tmp_path / "doctor.json").read_text())
    shown = capsys.readouterr().out
    assert list(report) == ["findings", "problems"]
    assert report["problems"] == []
    assert all(name in shown and text in shown for name, text in report["findings"].items())


def test_doctor_needs_no_extra(no_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["doctor"]) == 0


def test_failing_allocation_is_broken_with_its_remedy(no_gpu, monkeypatch, capsys):
    class Failing(SimulatedDevice):
        def __init__(self):
            super().__init__()
            self.fail("cuMemHostAlloc", times=100)
            self.fail("cuMemHostRegister", times=100)

    monkeypatch.setattr(doctor, "SimulatedDevice", Failing)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "copies fail" in shown
    assert "BROKEN          simulated: a copy through pinned memory failed" in shown
    assert "ulimit -l" in shown


def test_driver_that_compiles_no_kernel_is_in_order_and_says_what_is_lost(no_gpu, monkeypatch, capsys):
    class WithoutCompiler(SimulatedDevice):
        def __init__(self):
            super().__init__()
            self.fail("cuModuleLoadData", status=221)

    monkeypatch.setattr(doctor, "SimulatedDevice", WithoutCompiler)
    assert main(["doctor"]) == 0
    assert "pinning and copies work; small copies and scattered rows are driver copies" in capsys.readouterr().out


def test_lying_device_is_broken(no_gpu, monkeypatch, capsys):
    """The control of the probe: its fence says done before the copy ran."""
    monkeypatch.setattr(doctor, "SimulatedDevice", lambda: SimulatedDevice(schedule="late", lying_queries=True))
    assert main(["doctor"]) == 1
    assert "wrong bytes although its fence passed" in capsys.readouterr().out


def test_unusable_limit_is_broken(no_gpu, monkeypatch, capsys):
    monkeypatch.setenv("PINSTAGE_MAX_BYTES", "lots")
    assert main(["doctor"]) == 1
    assert "PINSTAGE_MAX_BYTES must be a positive number of bytes, not 'lots'" in capsys.readouterr().out


@pytest.mark.parametrize(("variables", "source"), [
    ({"PINSTAGE_MAX_BYTES": "16777216"}, "16777216 B a pool: PINSTAGE_MAX_BYTES"),
    ({"PINSTAGE_MAX_BYTES": "16777216", "LOCAL_WORLD_SIZE": "4"},
     "4194304 B a pool: PINSTAGE_MAX_BYTES, shared by 4 local ranks"),
])  # fmt: skip
def test_source_of_the_limit_is_told(no_gpu, monkeypatch, capsys, variables, source):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    assert source in capsys.readouterr().out


@pytest.mark.parametrize(("build", "remedy"), [(None, "Install a CUDA build"), ("12.8", "nvidia-smi")])
def test_gpu_that_torch_cannot_use_is_broken(no_gpu, monkeypatch, tmp_path, capsys, build, remedy):
    Path(tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(torch.version, "cuda", build)
    assert main(["doctor"]) == 1
    assert remedy in capsys.readouterr().out


def test_driver_without_an_optional_entry_is_in_order_and_says_what_is_lost(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "resolve_entries", lambda: {"cuStreamGetId": 1})
    monkeypatch.setattr(cuda, "driver_version", lambda: 12080)
    problems: list[str] = []
    found = doctor._driver(problems)
    assert found == (
        "CUDA 12.8; no cuMemcpyBatchAsync: many small copies are submitted one by one where the kernel does not bring "
        "them; no cuLaunchKernel: many small copies and scattered rows are driver copies"
    )
    assert problems == []


def test_driver_without_a_required_entry_is_broken(no_gpu, monkeypatch):
    def refused():
        raise pinstage.DriverError("the CUDA driver has no cuEventQuery of CUDA 2000")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "resolve_entries", refused)
    problems: list[str] = []
    assert doctor._driver(problems) == "unusable"
    assert "cuEventQuery" in problems[0]


def test_file_that_cannot_be_written_is_bad_input(no_gpu, tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path / "none" / "doctor.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(("near", "used", "found"), [
    (1, 1, "slabs are placed on its NUMA node 1"),
    (1, None, "slabs are not placed on its NUMA node 1: this process may not choose"),
    (None, None, "no NUMA node to choose, or none told"),
])  # fmt: skip
def test_numa_node_of_a_gpu_is_told(dev, monkeypatch, near, used, found):
    core = devices.resolve(dev)
    core.numa_node = used
    monkeypatch.setattr(cuda, "numa_node", lambda index: near)
    monkeypatch.setattr(doctor, "resolve", lambda index: core)
    assert doctor._placement(0).startswith(found)


def test_probe_pins_as_a_pool_does(dev):
    """By registration: it is what most slabs need."""
    problems: list[str] = []
    assert doctor._probe("simulated", dev, lambda: dev.zeros(doctor._PROBE), problems) == "pinning and copies work"
    assert (problems, dev.calls["cuMemHostRegister"], dev.host_allocations) == ([], 1, 0)


@pytest.mark.gpu
def test_gpu_is_in_order(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "pinning and copies work" in shown
    assert "NUMA node" in shown
