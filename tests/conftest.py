# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import settings

# print_blob: a failure prints what replays it. No deadline: a busy machine is not a bug.
settings.register_profile("pinstage", print_blob=True, deadline=None)
settings.load_profile("pinstage")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` where there is no GPU."""
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)
