# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Every public name is documented, and every example runs, on the simulated device."""

from __future__ import annotations

import doctest
import inspect

import pytest

import pinstage
import pinstage.testing

NAMES = [(module, name) for module in (pinstage, pinstage.testing) for name in module.__all__]
# Plain data and errors say all in their docstrings; the rest is made by what has an example.
NO_EXAMPLE = {"PoolStats", "PinstageError", "PoolExhausted", "LeaseStateError", "CaptureError", "DriverError",
              "ForkedError", "WaitTimeout", "Latch", "SimulatedGraph", "SimulatedStream"}  # fmt: skip
# What names the contract of its call: who may write the source, and when.
CONTRACTS = {
    "copy_": "snapshot", "copy_batch_": "snapshot", "copy_rows_": "snapshot", "to_device": "snapshot",
    "gather_rows": "snapshot", "StagedTable": "snapshot", "Lease": "handover",
    "DoubleBuffer": "handover", "keep_alive": "borrow",
}  # fmt: skip


def ids(names):
    return [f"{module.__name__}.{name}" for module, name in names]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=ids(NAMES))
def test_public_name_and_all_its_members_have_a_docstring(module, name):
    public = getattr(module, name)
    assert public.__doc__
    assert public.__doc__.strip().splitlines()[0].endswith(".")
    if inspect.isclass(public):
        for member, value in vars(public).items():
            described = inspect.isfunction(value) or isinstance(value, (property, staticmethod, classmethod))
            if described and not member.startswith("_"):
                assert inspect.getdoc(getattr(public, member)), f"{name}.{member}"


@pytest.mark.parametrize(("module", "name"), NAMES, ids=ids(NAMES))
def test_example_of_a_public_name_runs(module, name):
    public = getattr(module, name)
    tests = [test for test in doctest.DocTestFinder().find(public, name, globs={}) if test.examples]
    assert bool(tests) or name in NO_EXAMPLE
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
        failures = []
        runner.run(test, out=failures.append)
        assert runner.failures == 0, "".join(failures)


@pytest.mark.parametrize("name", CONTRACTS)
def test_docstring_names_its_contract(name):
    assert f"(contract: {CONTRACTS[name]})" in getattr(pinstage, name).__doc__


def test_all_is_sorted_and_complete():
    for module in (pinstage, pinstage.testing):
        assert sorted(module.__all__) == module.__all__
        public = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__ + ".")
        }
        assert public == set(module.__all__) - {name for name in module.__all__ if name not in public}
