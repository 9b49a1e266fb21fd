# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/recipes: every block runs; what it says to replace corrupts, and the replacement only if the fences lie."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import pinstage
from pinstage import devices
from pinstage.testing import SimulatedDevice

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
ROLES = ("stand-in", "before", "after", "a step")
SECTIONS = {
    "vllm": ["The block table", "The step's metadata", "The same, written straight into pinned memory"],
    "tensorrt_llm": [
        "Every pool's offsets",
        "Only the live width",
        "The key plane of some slots",
        "A request is cancelled while its copy is queued",
    ],
    "sglang": ["A kernel that reads host memory in place", "A ring of two", "One workspace for many plans"],
}


class Variant(NamedTuple):
    """A way through a section: its stand-ins, one `before` or `after`, and the step."""

    name: str
    before: bool
    code: str


def blocks(text):
    """(role, code) of each block; its first line tells the role."""
    found = []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        first = code.splitlines()[0].removeprefix("# ")
        (role,) = [role for role in ROLES if first.startswith(role)]
        found.append((role, code))
    return found


def variants():
    for recipe in sorted(SECTIONS):
        preamble, *sections = (RECIPES / f"{recipe}.md").read_text().split("\n## ")
        shared = [code for _, code in blocks(preamble)]
        for section in sections:
            parts = blocks(section)
            stand_ins = shared + [code for role, code in parts if role == "stand-in"]
            steps = [code for role, code in parts if role == "a step"]
            for role, code in parts:
                if role in ("before", "after"):
                    title = f"{recipe}: {section.splitlines()[0]}: {code.splitlines()[0].removeprefix('# ')}"
                    yield Variant(title, role == "before", "\n".join([*stand_ins, code, *steps]))


class Stage:
    """The names that the recipes use, on a simulated device, and the verdict on what their kernels read."""

    def __init__(self, device):
        self.device = device
        self.launched = 0
        self.wrong = []
        devices.resolve(device).poll_batch = 1  # slots are reused as early as can be

    def names(self):
        return {
            "torch": torch, "np": np, "pinstage": pinstage, "device": self.device, "stream": self.device.current_stream,
            "pinned": lambda shape, dtype: torch.zeros(shape, dtype=dtype), "on_device": self.device.zeros,
            "kernel": self.kernel, "raw_kernel": self.raw_kernel,
        }  # fmt: skip

    def kernel(self, *tensors, meant):
        self._launch(None, lambda: tensors, [tensor.clone() for tensor in meant])

    def raw_kernel(self, stream, *views, meant):
        # By address: a tensor in the kernel would keep the slot from being reused, fence or no fence.
        raw = [(view.data_ptr(), view.nbytes, view.dtype, view.shape) for view in views]

        def read():
            return [
                torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype).view(shape)
                for address, nbytes, dtype, shape in raw
            ]

        self._launch(stream, read, [tensor.clone() for tensor in meant])

    def _launch(self, stream, read, meant):
        number = self.launched
        self.launched += 1

        def run():
            found = read()
            assert [tensor.shape for tensor in found] == [tensor.shape for tensor in meant]
            if not all(bool((a == b).all()) for a, b in zip(found, meant, strict=True)):
                self.wrong.append(number)

        self.device.launch(run, stream)

    def bare_copy(self):
        """What `Tensor.copy_` is on a GPU, for the blocks that call it."""

        def copy_(dst, src, non_blocking=False):
            assert non_blocking
            self.device.copy_async(dst, src)
            return dst

        return copy_


def play(variant, monkeypatch, **options):
    """(kernels, wrong ones) of a variant."""
    with SimulatedDevice(**options) as device, device.stream():
        device.make_current()
        stage = Stage(device)
        with monkeypatch.context() as patched:
            if variant.before:
                patched.setattr(torch.Tensor, "copy_", stage.bare_copy())
            exec(compile(variant.code, variant.name, "exec"), stage.names())
        device.synchronize()
        return stage.launched, len(stage.wrong)


ALL = list(variants())
BEFORE = [variant for variant in ALL if variant.before]
AFTER = [variant for variant in ALL if not variant.before]


def named(chosen):
    return pytest.mark.parametrize("variant", chosen, ids=[variant.name for variant in chosen])


@named(BEFORE)
def test_what_is_to_be_replaced_corrupts(variant, monkeypatch):
    """Cases 1, 2 and 5, as they are written today."""
    kernels, wrong = play(variant, monkeypatch, schedule="late")
    assert wrong > kernels / 2


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [
        pytest.param(variant, schedule, id=f"{variant.name}-{schedule}")
        for variant in AFTER
        for schedule in ("late", "eager", "random")
        if schedule == "late" or "not ticket.done()" not in variant.code  # which is about a copy in flight
    ],
)
def test_replacement_is_right(variant, schedule, monkeypatch):
    """Cases 1, 2, 5, 32 and 35."""
    for seed in range(3):
        kernels, wrong = play(variant, monkeypatch, schedule=schedule, seed=seed)
        assert kernels > 0
        assert wrong == 0


@named(AFTER)
def test_replacement_rests_on_its_fences(variant, monkeypatch):
    """The control: with event queries that always say done, slots are reused while the device has yet to read them."""
    try:
        _, wrong = play(variant, monkeypatch, schedule="late", lying_queries=True)
    except AssertionError:
        return  # of the recipe itself
    assert wrong > 0


def test_recipes_have_the_sections_that_are_tested():
    for recipe, titles in SECTIONS.items():
        text = (RECIPES / f"{recipe}.md").read_text()
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == titles
        for title in titles:
            assert any(variant.name.startswith(f"{recipe}: {title}: ") for variant in AFTER)
    assert sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "README") == sorted(SECTIONS)
