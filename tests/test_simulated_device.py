# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The simulated device and the latch, from Python. tests/native has the driver table's semantics."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pinstage import _core
from pinstage.errors import DriverError
from pinstage.testing import SimulatedDevice, latch

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parent  # not the root, where the source folder would be imported
SCHEDULES = ["late", "eager", "random", "manual"]


def run_in_thread(fn: Callable[[], object]) -> None:
    failures: list[BaseException] = []

    def body() -> None:
        try:
            fn()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), 3, (0,), (2, 0, 3), (2, 3), torch.Size([4, 1])])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int32, torch.float64, torch.bfloat16, torch.complex64]
)
def test_empty_has_the_shape_and_dtype_asked_for(shape, dtype):
    with SimulatedDevice() as dev:
        tensor = dev.empty(shape, dtype)
        assert tensor.shape == torch.empty(shape).shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert dev.zeros(shape, dtype).eq(0).all()


def test_empty_is_poisoned():
    with SimulatedDevice() as dev:
        assert dev.empty(3, torch.uint8).tolist() == [0xCD] * 3


def test_negative_size_is_refused():
    with SimulatedDevice() as dev, pytest.raises(ValueError, match=r"\(2, -1\)"):
        dev.empty((2, -1))


def test_device_is_found_by_the_address_of_any_view():
    with SimulatedDevice() as dev:
        view = dev.empty((4, 8), torch.int32)[2, 3:]
        assert _core.SimulatedDevice.find(view.data_ptr()) is dev._core
        assert _core.SimulatedDevice.find(torch.empty(4).data_ptr()) is None


def test_memory_lives_as_long_as_a_view_of_it():
    with SimulatedDevice() as dev:
        view = dev.zeros((4, 8), torch.int32)[2]
        address = view.data_ptr()
        gc.collect()
        assert _core.SimulatedDevice.find(address) is dev._core
        del view
        gc.collect()
        assert _core.SimulatedDevice.find(address) is None


def test_tensor_outlives_its_device():
    with SimulatedDevice() as dev:
        tensor = dev.zeros(3, torch.int32)
        dev.launch(lambda: tensor.fill_(7))
    del dev
    gc.collect()
    assert tensor.tolist() == [7, 7, 7]
    assert _core.SimulatedDevice.find(tensor.data_ptr()) is None


# --- copies and kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "arrives"), [("late", 2), ("manual", 2), ("eager", 1)])
def test_bare_copy_reads_its_source_when_it_runs(schedule, arrives):
    with SimulatedDevice(schedule=schedule) as dev:
        src, dst = torch.ones(5), dev.empty(5)
        dev.copy_async(dst, src)
        src.fill_(2)
        dev.synchronize()
        assert dst.tolist() == [arrives] * 5


def test_bare_copy_keeps_its_source_alive():
    with SimulatedDevice() as dev:
        dst = dev.empty(1 << 20, torch.uint8)
        src = torch.full((1 << 20,), 3, dtype=torch.uint8)
        alive = weakref.ref(src)
        dev.copy_async(dst, src)
        del src
        assert alive() is not None
        dev.synchronize()
        assert alive() is None
        assert dst.eq(3).all()


def test_bare_copy_refuses_what_it_cannot_copy_plainly():
    with SimulatedDevice() as dev:
        dst = dev.empty((2, 2))
        with pytest.raises(ValueError, match="converts nothing"):
            dev.copy_async(dst, torch.zeros(2, 2, dtype=torch.int32))
        with pytest.raises(ValueError, match="contiguous"):
            dev.copy_async(dst, torch.zeros(2, 2).t()[:, :].t().T)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            dev.copy_async(torch.zeros(2, 2), torch.zeros(2, 2))
        assert dev.pending() == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kernels_of_a_stream_run_in_order(schedule):
    seed = random.randrange(2**32)
    print("seed", seed)
    with SimulatedDevice(schedule=schedule, seed=seed) as dev, dev.stream():
        seen: list[int] = []
        for i in range(20):
            dev.launch(lambda i=i: seen.append(i))
        dev.synchronize()
        assert seen == list(range(20))


def test_kernel_is_dropped_once_it_ran():
    with SimulatedDevice(schedule="manual") as dev:

        def kernel() -> None: ...

        alive = weakref.ref(kernel)
        dev.launch(kernel)
        del kernel
        assert alive() is not None
        assert dev.run() == 1
        assert alive() is None


def test_exception_in_a_kernel_is_raised_by_synchronize_and_loses_the_device():
    with SimulatedDevice() as dev:
        later: list[int] = []
        dev.launch(lambda: 1 // 0)
        dev.launch(lambda: later.append(1))
        with pytest.raises(ZeroDivisionError):
            dev.synchronize()
        with pytest.raises(ZeroDivisionError):
            dev.launch(lambda: None)
        assert later == []


def test_failed_device_is_collected():
    def block() -> None:
        with SimulatedDevice() as dev:
            devices.add(dev)
            dev.launch(lambda: 1 // 0)

    devices: weakref.WeakSet[SimulatedDevice] = weakref.WeakSet()
    with pytest.raises(ZeroDivisionError) as failure:
        block()
    del failure
    gc.collect()
    assert not devices


def test_exception_in_a_kernel_is_raised_at_the_end_of_the_block():
    with pytest.raises(ZeroDivisionError), SimulatedDevice() as dev:
        dev.launch(lambda: 1 // 0)


def test_exception_of_the_block_wins_over_that_of_a_kernel():
    def block() -> None:
        with SimulatedDevice() as dev:
            dev.launch(lambda: 1 // 0)
            raise KeyError

    with pytest.raises(KeyError):
        block()


def test_kernel_that_enqueues_fails():
    with SimulatedDevice() as dev:
        dst, src = dev.empty(1), torch.ones(1)
        dev.launch(lambda: dev.copy_async(dst, src))
        with pytest.raises(DriverError, match="CUDA_ERROR_NOT_PERMITTED"):
            dev.synchronize()


# --- streams ----------------------------------------------------------------------------------------------------------


def test_stream_is_current_inside_its_block_only():
    with SimulatedDevice() as dev:
        assert dev.current_stream is dev.default_stream
        with dev.stream() as outer:
            with dev.stream() as inner:
                assert dev.current_stream is inner
            assert dev.current_stream is outer
            with dev.stream(dev.default_stream):
                assert dev.current_stream is dev.default_stream
            with dev.stream(inner.handle) as again:
                assert again is inner
        assert dev.current_stream is dev.default_stream
        assert outer.__cuda_stream__() == (0, outer.handle)


def test_current_stream_belongs_to_the_thread():
    with SimulatedDevice() as dev, dev.stream():
        seen: list[int] = []
        run_in_thread(lambda: seen.append(dev.current_stream.handle))
        assert seen == [0]


def test_stream_of_another_device_is_refused():
    with SimulatedDevice() as dev, SimulatedDevice(1) as other, other.stream() as stream:
        with pytest.raises(ValueError, match="use a stream of that device"):
            dev.launch(lambda: None, stream)
        with pytest.raises(ValueError, match="is no stream of"), dev.stream(stream.handle):
            pass


def test_handle_of_a_dead_stream_is_recycled_and_its_work_runs():
    with SimulatedDevice(schedule="manual") as dev:
        seen: list[str] = []
        with dev.stream() as stream:
            dev.launch(lambda: seen.append("old"))
        handle = stream.handle
        del stream
        gc.collect()
        with dev.stream() as stream:
            assert stream.handle == handle
            dev.launch(lambda: seen.append("new"))
            assert dev.run(stream=stream) == 1
            assert seen == ["new"]
        dev.synchronize()
        assert seen == ["new", "old"]


def test_synchronizing_a_stream_leaves_others_alone():
    with SimulatedDevice() as dev:
        with dev.stream() as one:
            dev.launch(lambda: None)
        with dev.stream() as two:
            dev.launch(lambda: None)
        one.synchronize()
        assert (one.pending(), two.pending(), dev.pending()) == (0, 1, 1)


# --- schedules --------------------------------------------------------------------------------------------------------


def test_manual_device_runs_what_it_is_told_to():
    with SimulatedDevice(schedule="manual") as dev:
        seen: list[int] = []
        for i in range(5):
            dev.launch(lambda i=i: seen.append(i))
        assert dev.run(2) == 2
        assert seen == [0, 1]
        assert dev.pending() == 3
        assert dev.run() == 3
        assert dev.run() == 0


def test_one_seed_gives_one_interleaving():
    def order(seed: int) -> str:
        seen: list[str] = []
        with SimulatedDevice(schedule="random", seed=seed) as dev:
            streams = []
            for letter in "abcdefgh":
                with dev.stream() as stream:
                    streams.append(stream)
                    dev.launch(lambda letter=letter: seen.append(letter))
            dev.synchronize()
        return "".join(seen)

    seed = random.randrange(2**32)
    print("seed", seed)
    assert order(seed) == order(seed)
    assert len({order(seed + i) for i in range(32)}) > 8


def test_unknown_schedule_and_empty_queue_are_refused():
    with pytest.raises(ValueError, match="'late', 'eager', 'random', 'manual'"):
        SimulatedDevice(schedule="sometimes")
    with pytest.raises(ValueError, match="queue_depth is 0"):
        SimulatedDevice(queue_depth=0)


# --- latches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_latch_holds_its_stream_until_released(schedule):
    with SimulatedDevice(schedule=schedule) as dev, dev.stream() as stream:
        seen: list[int] = []
        with latch(stream) as gate:
            dev.launch(lambda: seen.append(1))
            assert dev.run() == 0
            assert gate.held
            assert seen == []
        dev.synchronize()
        assert seen == [1]
        assert gate.held
        assert not gate.timed_out


@pytest.mark.parametrize("name", ["int", "protocol", "default"])
def test_latch_finds_a_simulated_stream_by_whatever_names_it(name):
    with SimulatedDevice() as dev, dev.stream() as stream:

        class Named:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, stream.handle)

        held = dev.default_stream if name == "default" else stream
        with latch({"int": stream.handle, "protocol": Named(), "default": 0}[name]):
            assert held.pending() == 1


def test_latch_past_its_timeout_says_that_it_did_not_hold():
    with SimulatedDevice() as dev:
        with latch(dev.default_stream, timeout=1e-3) as gate:
            dev.synchronize()
        assert gate.timed_out
        assert not gate.held


def test_latch_refuses_what_is_no_stream_and_no_timeout():
    with SimulatedDevice() as dev:
        with pytest.raises(TypeError, match="a stream is a"):
            latch("stream")
        with pytest.raises(ValueError, match="timeout is 0"):
            latch(dev.default_stream, timeout=0)
        dev.lose()
        with pytest.raises(DriverError, match="719"):
            latch(dev.default_stream)


def test_device_closes_under_a_latch():
    with SimulatedDevice() as dev:
        seen: list[int] = []
        latch(dev.default_stream)
        dev.launch(lambda: seen.append(1))
    assert seen == []


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_full_queue_behind_a_python_latch_does_not_deadlock(schedule):
    """Case 38: the submitting thread blocks without the GIL, so that the releasing one gets it."""
    seen: list[int] = []
    with SimulatedDevice(schedule=schedule, queue_depth=4) as dev:
        gate = latch(dev.default_stream, timeout=60)
        half_way = threading.Event()

        def submit() -> None:
            for i in range(3):
                dev.launch(lambda i=i: seen.append(i))
            half_way.set()
            for i in range(3, 20):
                dev.launch(lambda i=i: seen.append(i))

        thread = threading.Thread(target=submit)
        thread.start()
        half_way.wait()
        gate.release()
        thread.join()
        dev.synchronize()
        assert gate.held
    assert seen == list(range(20))


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_threads_that_wait_for_each_others_kernels_do_not_deadlock(schedule):
    seed = random.randrange(2**32)
    print("seed", seed)
    with SimulatedDevice(schedule=schedule, seed=seed, queue_depth=3) as dev:
        barrier = threading.Barrier(4)
        counts = dev.zeros(4, torch.int64)

        def work(i: int) -> None:
            with dev.stream() as stream:
                barrier.wait()
                for _ in range(50):
                    dev.launch(lambda: counts[i].add_(1))
                    stream.synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dev.synchronize()
        assert counts.tolist() == [50] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["new", "default", "int"])
def test_latch_holds_a_gpu_stream_until_released(stream):
    streams = {"new": torch.cuda.Stream(), "default": torch.cuda.default_stream()}
    held = streams.get(stream, streams["new"])
    with torch.cuda.stream(held):
        word = torch.zeros(1, dtype=torch.int32, device="cuda")
        held.synchronize()
        after = torch.cuda.Event()
        with latch(held.cuda_stream if stream == "int" else held) as gate:
            word.fill_(7)
            after.record()
            assert not after.query()
            assert gate.held
        after.synchronize()
        assert word.item() == 7
    assert gate.held
    assert not gate.timed_out


@pytest.mark.gpu
def test_latch_on_a_gpu_lets_go_at_its_timeout():
    stream = torch.cuda.Stream()
    gate = latch(stream, timeout=0.05)
    stream.synchronize()
    gate.release()
    assert gate.timed_out
    assert not gate.held


@pytest.mark.gpu
def test_latch_leaves_a_capture_whole():
    held, captured, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    word = torch.zeros(1, device="cuda").add_(0)
    latch(held).release()  # what is set up once, is: a kernel's first use waits for the device, and here for the gate
    torch.cuda.synchronize()
    with torch.cuda.stream(captured):
        graph.capture_begin()
        with latch(held) as gate:
            word.add_(1)
            stood = gate.held
        graph.capture_end()
    assert stood
    graph.replay()
    torch.cuda.synchronize()
    assert word.item() == 1


# --- several devices --------------------------------------------------------------------------------------------------


def test_first_device_entered_is_current_until_it_is_left():
    assert _core.SimulatedDevice.current() is None
    with SimulatedDevice(0) as first:
        with SimulatedDevice(1) as second:
            assert _core.SimulatedDevice.current() is first._core
            second.make_current()
            assert _core.SimulatedDevice.current() is second._core
            first.make_current()
        assert _core.SimulatedDevice.current() is first._core
        run_in_thread(lambda: _core.SimulatedDevice.current() is None or pytest.fail("a fresh thread has none"))
    assert _core.SimulatedDevice.current() is None
    assert _core.SimulatedDevice.live() == 0


def test_default_stream_of_a_device_that_is_not_current_is_its_own():
    with SimulatedDevice(0, schedule="manual") as first, SimulatedDevice(1, schedule="manual") as second:
        second.copy_async(second.empty(1), torch.ones(1))
        assert (first.pending(), second.pending()) == (0, 1)


# --- faults and observation -------------------------------------------------------------------------------------------


def test_nth_call_fails_and_the_next_succeeds():
    with SimulatedDevice(schedule="eager") as dev:
        dst, src = dev.zeros(4), torch.ones(4)
        dev.fail("cuMemcpyHtoDAsync", nth=2, status=2)
        dev.copy_async(dst, src)
        with pytest.raises(DriverError, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\)") as failure:
            dev.copy_async(dst, src)
        assert failure.value.status == 2
        dev.copy_async(dst, src)
        assert dev.calls["cuMemcpyHtoDAsync"] == 3
        assert dev.calls["cuEventRecord"] == 0


def test_failure_of_an_unknown_call_is_refused():
    with SimulatedDevice() as dev:
        with pytest.raises(ValueError, match=r"no 'cuMalloc'.*cuMemHostAlloc"):
            dev.fail("cuMalloc")
        with pytest.raises(ValueError, match="nth is 0"):
            dev.fail("cuMemHostAlloc", nth=0)


def test_lost_device_runs_nothing_and_raises():
    with SimulatedDevice() as dev:
        seen: list[int] = []
        dev.launch(lambda: seen.append(1))
        dev.lose()
        with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED"):
            dev.synchronize()
        assert dev.run() == 0
        assert seen == []


def test_close_calls_back_after_the_last_step_and_before_the_end():
    seen: list[object] = []
    with SimulatedDevice() as dev:
        dev.at_close(lambda: seen.append(("first", dev._core.closed)))
        dev.at_close(lambda: seen.append(("second", dev._core.closed)))
        dev.launch(lambda: seen.append("step"))
    assert seen == ["step", ("second", False), ("first", False)]
    dev.close()
    with pytest.raises(DriverError, match="CUDA_ERROR_DEINITIALIZED"):
        dev.launch(lambda: None)


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_replay_reads_the_source_anew(schedule, mode):
    with SimulatedDevice(schedule=schedule) as dev:
        src, dst = torch.ones(2), dev.zeros(2)
        with dev.capture(mode=mode) as graph:
            dev.copy_async(dst, src)
            dev.launch(lambda: dst.add_(100))
        dev.synchronize()
        assert dst.tolist() == [0, 0]
        for value in (2, 3):
            src.fill_(value)
            graph.replay()
            dev.synchronize()
            assert dst.tolist() == [value + 100] * 2


def test_graph_keeps_its_tensors_alive():
    with SimulatedDevice() as dev:
        src, dst = torch.ones(2), dev.zeros(2)
        with dev.capture() as graph:
            dev.copy_async(dst, src)
        alive = weakref.ref(src)
        del src
        assert alive() is not None
        del graph
        assert alive() is None


def test_capture_broken_by_a_synchronize_fails_and_leaves_no_graph():
    with SimulatedDevice() as dev:
        with pytest.raises(DriverError, match="901"), dev.capture() as graph, pytest.raises(DriverError, match="900"):
            dev.synchronize()
        with pytest.raises(RuntimeError, match="holds nothing"):
            graph.replay()
        dev.synchronize()


def test_exception_ends_the_capture():
    with SimulatedDevice() as dev:
        with pytest.raises(KeyError), dev.capture():
            raise KeyError
        dev.synchronize()


def test_default_stream_cannot_be_captured():
    with SimulatedDevice() as dev:
        with pytest.raises(DriverError, match="900"), dev.capture(dev.default_stream):
            pass
        with pytest.raises(ValueError, match="'global', 'thread_local', 'relaxed'"), dev.capture(mode="local"):
            pass


# --- the end of the process -------------------------------------------------------------------------------------------


def test_interpreter_exits_with_work_queued_and_a_thread_waiting():
    program = """
import threading, torch
from pinstage.errors import DriverError
from pinstage.testing import SimulatedDevice, latch
dev = SimulatedDevice()
tensor = dev.zeros(3)
gate = latch(dev.default_stream, timeout=60)
dev.launch(lambda: tensor.fill_(1))
dev.copy_async(tensor, torch.ones(3))
def wait():
    try:
        dev.synchronize()
    except DriverError:
        pass
threading.Thread(target=wait, daemon=True).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=TESTS
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
