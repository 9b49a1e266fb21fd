# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Run as a script, after an install, it writes the stub that the first test expects."""

import importlib.metadata
from pathlib import Path

from nanobind.stubgen import StubGen

import pinstage._core

COMMITTED = Path(__file__).parents[1] / "pinstage" / "_core.pyi"
REMEDY = 'out of date; from the root: pip install -c constraints.txt ".[test]" && python tests/test_stub_is_current.py'


def generated_stub() -> str:
    generator = StubGen(pinstage._core, include_private=True)
    generator.put(pinstage._core)
    return generator.get()


def test_committed_stub_is_what_the_extension_declares() -> None:
    assert COMMITTED.read_text() == generated_stub(), f"pinstage/_core.pyi is {REMEDY}"


def test_installed_package_holds_only_what_runs() -> None:
    installed = [file for file in importlib.metadata.files("pinstage") or [] if file.suffix != ".pyc"]
    package = {file.relative_to("pinstage").as_posix() for file in installed if file.parts[0] == "pinstage"}
    assert {"__init__.py", "py.typed", "_core.pyi"} <= package
    assert {Path(name).suffix for name in package - {"py.typed"}} == {".py", ".pyi", ".so"}
    # Beside the package there are its metadata and the console script (../../../bin/pinstage).
    others = {file.parts[0] for file in installed} - {"pinstage", ".."}
    assert len(others) == 1
    assert others.pop().endswith(".dist-info")


if __name__ == "__main__":
    COMMITTED.write_text(generated_stub())
