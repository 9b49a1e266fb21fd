# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrow between the layers points one way: the core knows nothing of what is built on it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pinstage

PACKAGE = Path(pinstage.__file__).parent
TESTS = Path(__file__).parent  # not the root, where the source folder would be imported
UPPER = ("testing", "cli", "sanitizer", "table", "replay_buffer")
OFFERED = ("table",)  # upper layers that the package's face offers beside the core
CORE = sorted(path for path in PACKAGE.glob("*.py") if path.stem not in (*UPPER, "__init__", "__main__"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_core_was_found():
    assert {"copy", "pool", "gather", "double_buffer", "ticket"} <= {path.stem for path in CORE}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_imports_nothing_that_is_built_on_it(path):
    upper = tuple(f"pinstage.{name}" for name in UPPER)
    assert [name for name in imported(path) if name.startswith(upper)] == []


def loaded_by(statement):
    """Modules that a fresh interpreter has after `statement`."""
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TESTS)
    return set(result.stdout.split())


def test_importing_the_package_adds_neither_upper_layers_nor_extras_nor_the_driver():
    """torch itself may load cuda-bindings and NumPy."""
    modules = loaded_by("import pinstage") - loaded_by("import torch")
    assert "pinstage.pool" in modules
    upper = (f"pinstage.{name}" for name in UPPER if name not in OFFERED)
    unwanted = ("rich", "matplotlib", "hypothesis", "pytest", "cuda", *upper)
    assert [name for name in modules if name.startswith(unwanted)] == []
