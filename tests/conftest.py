# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The rig that race tests run on, simulated and on a GPU alike, and their negative controls.

A test marked `raced` takes the fixture `rig` and runs once on each backend, then once more on a device whose event
queries always say done. There one of its assertions must fail: a race test that passes without the protection has
raced nothing. What makes a run vacuous raises `Vacuous`, which satisfies neither.
"""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from pinstage import DriverError, StagingPool, _core, cuda, devices
from pinstage.testing import SimulatedDevice, latch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# print_blob: a failure prints what replays it. No deadline: a busy machine is not a bug.
settings.register_profile("pinstage", print_blob=True, deadline=None)
settings.load_profile("pinstage")


class Vacuous(Exception):
    """The test raced nothing."""


class Rig:
    """A device and what a test does with it, in words that hold for both backends."""

    device: Any  # what pinstage takes as `device=`
    simulated: bool
    lying: bool

    def pool(self, **options: Any) -> StagingPool:
        """A pool that is closed once the device is idle: a control's copies may be in flight although it thinks not."""
        pool = StagingPool(self.device, **options)
        self._pools.append(weakref.ref(pool))
        return pool

    def close_pools(self) -> None:
        self.synchronize()
        for reference in self._pools:
            pool = reference()
            if pool is not None:
                pool.close()

    def core(self) -> Any:
        return devices.resolve(self.device)

    def filled(self, shape: int | tuple[int, ...], dtype: torch.dtype, value: float) -> torch.Tensor:
        """A device tensor that has its value now: not for use behind a gate."""
        tensor = self.empty(shape, dtype)
        tensor.fill_(value)
        self.synchronize()
        return tensor

    def expect(self, actual: torch.Tensor, expected: torch.Tensor | float) -> None:
        """Every byte of `actual` once the device is idle."""
        self.synchronize()
        host = actual.detach().cpu()
        wanted = torch.as_tensor(expected, dtype=host.dtype).expand(host.shape)
        assert torch.equal(host, wanted), f"{int((host != wanted).sum())} of {host.numel()} elements are wrong"

    @contextmanager
    def unchanged(self, pool: StagingPool) -> Iterator[None]:
        """The block changes nothing that the pool counts."""
        before = pool.stats()
        yield
        assert pool.stats() == before
        assert pool._consistent()

    @contextmanager
    def gate(self, *streams: Any, timeout: float = 10.0) -> Iterator[None]:
        """Holds the streams (default: the current one) for the block, and raises unless each really held."""
        latches = [latch(stream, timeout) for stream in streams or (self.current_stream(),)]
        try:
            yield
        finally:
            for gate in latches:
                gate.release()
        if not all(gate.held for gate in latches):
            raise Vacuous("a gate did not hold its stream to the end of its block")


class SimulatedRig(Rig):
    simulated = True

    def __init__(self, lying_queries: bool = False, index: int = 0, **options: Any) -> None:
        self.lying = lying_queries
        self._pools: list[weakref.ref[StagingPool]] = []
        self.device = SimulatedDevice(index, lying_queries=lying_queries, **options)
        self.make_current = self.device.make_current
        self.make_current()
        self.core().poll_batch = 1
        self.empty: Callable[..., torch.Tensor] = self.device.empty
        self.stream = self.device.stream
        self.synchronize = self.device.synchronize
        self.copy_bare = self.device.copy_async
        self.launch = self.device.launch
        self.capture = self.device.capture

    def current_stream(self) -> Any:
        return self.device.current_stream

    def open(self, gate: Any) -> None:
        gate.release()

    def pinned(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)  # the simulation reads pageable memory just as late

    def close(self) -> None:
        self.device.close()


class GpuRig(Rig):
    simulated = False

    def __init__(self, lying_queries: bool = False, index: int = 0) -> None:
        overrides = {"cuEventQuery": _core.lying_event_query()} if lying_queries else {}
        torch.cuda.init()
        self.index = index
        self.lying = lying_queries
        self._pools: list[weakref.ref[StagingPool]] = []
        # The package's own table of devices, so that calls without `pool=` meet this one too.
        self.device = devices._cuda_devices[index] = cuda.open_device(index, overrides)
        self.device.poll_batch = 1  # slots are reused as early as can be: the sharpest race
        self.device.poll_batch = 1  # slots are reused as early as can be

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{self.index}")

    def pinned(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def make_current(self) -> None:
        torch.cuda.set_device(self.index)

    @contextmanager
    def stream(self, existing: Any = None) -> Iterator[torch.cuda.Stream]:
        stream = torch.cuda.Stream(self.index) if existing is None else existing
        with torch.cuda.stream(stream):
            yield stream

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.index)

    def open(self, gate: Any) -> None:
        """Releases by memory alone: behind a full launch queue the driver may let no query through."""
        gate._gate.open()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def copy_bare(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    def launch(self, fn: Callable[[], object]) -> None:
        fn()  # torch's operations on CUDA tensors are kernels already

    @contextmanager
    def capture(self, mode: str = "global") -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.index), capture_error_mode=mode):
            yield graph

    def close(self) -> None:
        devices._cuda_devices.pop(self.index, None)
        self.device = None
        gc.collect()


RIGS = {"simulated": SimulatedRig, "gpu": GpuRig}


@contextmanager
def _opened(rig: Rig) -> Iterator[Rig]:
    try:
        yield rig
    finally:
        try:
            rig.close_pools()
        except DriverError as error:  # a test may lose its device
            print(f"closing: {error}")
        rig.close()


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """One open device. Parametrised below: by backend, and for raced tests by whether its event queries lie."""
    backend, lying = getattr(request, "param", ("simulated", False))
    with _opened(RIGS[backend](lying_queries=lying)) as opened:
        yield opened


@pytest.fixture
def other(rig: Rig) -> Iterator[Rig]:
    """A second device beside `rig`, as honest as that one; `rig` stays current."""
    if not rig.simulated and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with _opened(type(rig)(lying_queries=rig.lying, index=1)) as opened:
        rig.make_current()
        yield opened


@pytest.fixture
def dev() -> Iterator[SimulatedDevice]:
    """A simulated device with schedule "late", for what only a simulation can show."""
    with _opened(SimulatedRig()) as opened:
        yield opened.device


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "raced: runs again with lying event queries, where it must fail (conftest.py)")
    config.addinivalue_line(
        "markers", "both: takes the fixture `rig` of either backend; no control (its reason beside)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" not in metafunc.fixturenames:
        return
    raced = metafunc.definition.get_closest_marker("raced") is not None
    if not raced and metafunc.definition.get_closest_marker("both") is None:
        return
    modes = [(False, "")] + [(True, "-control")] * raced
    metafunc.parametrize(
        "rig",
        [
            pytest.param((backend, lying), id=backend + name, marks=[pytest.mark.gpu] * (backend == "gpu"))
            for backend in RIGS
            for lying, name in modes
        ],
        indirect=True,
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Expects the control of a raced test to fail."""
    spec = getattr(pyfuncitem, "callspec", None)
    lying = pyfuncitem.get_closest_marker("raced") is not None and spec.params["rig"][1]
    if not lying:
        return (yield)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        yield
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` where there is no GPU."""
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


@pytest.fixture
def until():
    """Spins until another thread got somewhere; a failing test ends all the same."""

    def spin(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline

    return spin
