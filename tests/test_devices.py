# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Several devices: each has its own pool, streams and fences, and one that nobody uses is not touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage.testing import SimulatedDevice

INT = torch.int32
TESTS = Path(__file__).parent  # not the root, where the source folder would be imported


def default_stream(rig):
    return rig.device.default_stream if rig.simulated else torch.cuda.default_stream(rig.index)


@pytest.mark.both  # no control: nothing races
def test_devices_have_pools_of_their_own(rig, other):
    first, second = (pinstage.default_pool(each.device) for each in (rig, other))
    assert first is not second
    for each, pool in ((rig, first), (other, second)):
        assert pinstage.default_pool(each.device) is pool
        assert repr(pool).startswith(f"<StagingPool on {each.core().name}")
        before = [first.stats().copies, second.stats().copies]
        dst = each.filled(8, INT, 0)
        pinstage.copy_(dst, torch.full((8,), 5, dtype=INT))
        each.expect(dst, 5)
        assert [first.stats().copies, second.stats().copies] == [before[0] + (each is rig), before[1] + (each is other)]


@pytest.mark.raced
def test_devices_wait_for_their_own_streams_only(rig, other):
    """Case 36: one device stands still; the other's slots come back, and its own stay."""
    pools = [each.pool(max_bytes=4096, when_full="raise") for each in (rig, other)]
    source, held = torch.full((1024,), 1, dtype=INT), rig.filled(1024, INT, 0)
    dsts = [other.filled(1024, INT, 0) for _ in range(8)]
    with rig.stream() as stalled, other.stream() as running:
        with rig.gate(stalled):
            pinstage.copy_(held, source, pool=pools[0])
            for step, dst in enumerate(dsts):
                pinstage.copy_(dst, source.fill_(step), pool=pools[1])
                running.synchronize()  # one slot is all that there is
            source.fill_(-1)
            with pytest.raises(pinstage.PoolExhausted):
                pinstage.copy_(held, source, pool=pools[0])
        rig.expect(held, 1)
    for step, dst in enumerate(dsts):
        other.expect(dst, step)


STREAM_CALLS = {
    "Lease.retire": lambda b, stream: b.lease.retire(stream),
    "Lease.retire, second": lambda b, stream: b.lease.retire(b.rig.current_stream(), stream),
    "DoubleBuffer.retire": lambda b, stream: b.buffer.retire(stream),
    "StagedTable.commit": lambda b, stream: b.table.commit(stream=stream),
    "StagedTable.commit_to": lambda b, stream: b.table.commit_to(b.dst, [0], stream=stream),
    "keep_alive": lambda b, stream: pinstage.keep_alive(b.dst, stream, device=b.rig.device),
}


class Bench:
    """What each call with a stream needs, on the first device."""

    def __init__(self, rig):
        self.rig = rig
        self.pool = rig.pool()
        self.dst = rig.filled((1, 8), INT, 7)
        self.table = pinstage.StagedTable((4, 8), INT, rig.device, pool=self.pool)
        self.buffer = pinstage.DoubleBuffer(8, INT, rig.device, pool=self.pool)
        with self.buffer.fill():
            pass
        self.lease = self.pool.lease(8, INT)


@pytest.mark.both  # no control: nothing is enqueued
@pytest.mark.parametrize("kind", ["default", "made"])
@pytest.mark.parametrize("call", STREAM_CALLS)
def test_stream_of_another_device_is_refused_before_anything_is_fenced(rig, other, call, kind):
    """Case 36. All default streams have one handle, 0: unasked, it would be this device's that is fenced."""
    bench = Bench(rig)
    with other.stream() as made:
        stream = default_stream(other) if kind == "default" else made
        with rig.unchanged(bench.pool), pytest.raises(ValueError, match=f"is not of {rig.core().name}: pass a stream"):
            STREAM_CALLS[call](bench, stream)
    rig.expect(bench.dst, 7)
    assert bench.pool.stats().quarantined_bytes == 0
    bench.lease.cancel()  # no reader was declared


@pytest.mark.both  # no control: what waits is the device, in which no query takes part
@pytest.mark.parametrize("kind", ["default", "made"])
def test_ticket_is_waited_for_by_a_stream_of_another_device(rig, other, kind):
    """Case 36: the event stays where it is, and the wait goes where the stream is."""
    pool, dst = rig.pool(), rig.filled(8, INT, 0)
    with rig.stream() as copying, other.stream() as made, other.stream() as free:
        waiting = default_stream(other) if kind == "default" else made
        with rig.gate(copying):
            with pool.lease(8, INT) as lease:
                ticket = lease.copy_to(dst)
            ticket.wait_on(waiting)
            behind = pinstage.keep_alive(None, waiting)
            pinstage.keep_alive(None, default_stream(rig), device=rig.device).wait()  # nothing waits there
            with other.stream(free):
                pinstage.keep_alive(None, free, device=other.device).wait()  # enqueued later, and done
            if other.simulated:
                other.device.run()
            assert [ticket.done(), behind.done()] == [False, False]
        behind.wait()
        assert ticket.done()


@pytest.mark.both
def test_keep_alive_finds_the_device_of_its_stream(rig, other):
    with other.stream() as stream:
        for each in (stream, default_stream(other)):
            with other.gate(each):
                ticket = pinstage.keep_alive(None, each)
                rig.synchronize()
                assert not ticket.done()
            ticket.wait()


@pytest.mark.gpu
def test_gpu_does_not_wait_for_simulated_work_nor_the_reverse(dev):
    here = pinstage.keep_alive(None, dev.default_stream)
    there = pinstage.keep_alive(None, torch.cuda.current_stream())
    with pytest.raises(ValueError, match="a stream of cuda:0 cannot wait for work on simulated:0"):
        here.wait_on(torch.cuda.current_stream())
    there.wait()
    there.wait_on(torch.cuda.current_stream())


# --- devices that nobody uses -----------------------------------------------------------------------------------------

# Every way of staging, on `device`; `empty` makes a tensor there.
EVERY_WAY = """
def stage(device, empty, stream):
    source, dsts = torch.arange(64, dtype=torch.int32), [empty() for _ in range(4)]
    pool = pinstage.default_pool(device)
    pinstage.copy_(dsts[0], source)
    pinstage.copy_(dsts[0][::2], source.double()[::2])
    pinstage.copy_batch_(dsts, [source] * 4)
    pinstage.copy_rows_(dsts[1], source, [3, 1])
    pinstage.to_device([1, 2, 3], device)
    with pool.lease(64, torch.int32) as lease:
        ticket = lease.copy_to(dsts[2])
        lease.retire(stream)
    ticket.wait_on(stream)
    pinstage.keep_alive(source, stream).wait()
    buffer = pinstage.DoubleBuffer(64, torch.int32, device)
    with buffer.fill() as host:
        host.copy_(source)
    buffer.copy_to(dsts[3]).wait()
    pinstage.StagedTable((4, 64), torch.int32, device).commit(2)
    pool.reserve(16 << 20)
    pool.reclaim(synchronize=True)
    del buffer
    pool.close()
"""


def test_no_driver_call_is_made_for_a_device_that_nobody_uses():
    """Although it is the current one."""
    names = {"torch": torch, "pinstage": pinstage}
    exec(EVERY_WAY, names)
    with SimulatedDevice(0) as unused, SimulatedDevice(1) as used:
        assert unused._core is pinstage._core.SimulatedDevice.current()
        names["stage"](used, lambda: used.zeros(64, INT), used.default_stream)
        assert sum(used.calls.values()) > 50
        called = {name for name, count in unused.calls.items() if count}
        assert called <= {"cuCtxGetCurrent"}  # a question about the thread, counted by its current device


@pytest.mark.gpu
def test_no_context_is_made_on_a_gpu_that_nobody_uses():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    program = f"""
import torch, pinstage
from cuda.bindings import driver
{EVERY_WAY}
def has_context(index):
    status, flags, active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(index)[1])
    assert int(status) == 0, status
    return bool(active)
dst = torch.zeros(64, dtype=torch.int32, device="cuda:1")
before = has_context(0)
stage("cuda:1", lambda: torch.zeros(64, dtype=torch.int32, device="cuda:1"), torch.cuda.current_stream(1))
print(before, has_context(0), has_context(1))
pinstage.copy_(torch.zeros(4, device="cuda:0"), torch.ones(4))
print(has_context(0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    before, *after = done.stdout.split()
    if before == "True":
        pytest.skip("torch itself makes a context on cuda:0 here")
    assert after == ["False", "True", "True"]  # the last: the question can be answered with yes
