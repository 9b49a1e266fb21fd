# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Race staging code on any machine: a simulated device, and a latch that holds a stream."""

from pinstage.testing.latch import Latch, latch
from pinstage.testing.simulated import SimulatedDevice, SimulatedGraph, SimulatedStream

__all__ = ["Latch", "SimulatedDevice", "SimulatedGraph", "SimulatedStream", "latch"]
