# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Tickets, fences per stream, and keep_alive."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import weakref

import pytest
import torch

import pinstage
from pinstage import DriverError, WaitTimeout
from pinstage.testing import SimulatedDevice, latch


def copied(pool, value, dst):
    with pool.lease(dst.shape, dst.dtype) as lease:
        lease.tensor.fill_(value)
        return lease.copy_to(dst)


# --- tickets --------------------------------------------------------------------------------------------------------


@pytest.mark.raced
def test_ticket_is_done_when_its_copy_has_run_and_not_before(rig):
    pool, dst = rig.pool(), rig.filled(64, torch.int32, 0)
    with rig.stream():
        with rig.gate():
            ticket = copied(pool, 1, dst)
            assert not ticket.done()
        ticket.wait()
        assert ticket.done()
    rig.expect(dst, 1)


@pytest.mark.raced
@pytest.mark.parametrize("timeout", [0, 0.01])
def test_wait_gives_up_after_its_timeout(rig, timeout):
    pool, dst = rig.pool(), rig.empty(64, torch.int32)
    with rig.stream(), rig.gate():
        ticket = copied(pool, 1, dst)
        with pytest.raises(WaitTimeout, match=r"did not pass within 0\.0\d* s"):
            ticket.wait(timeout)
        assert not ticket.done()


@pytest.mark.raced
def test_ticket_outlives_the_reuse_of_its_event(rig):
    """I4: a ticket names its event's generation."""
    pool, dst = rig.pool(), rig.filled(64, torch.int32, 0)
    with rig.stream() as stream:
        early = copied(pool, 0, dst)
        stream.synchronize()
        pool.reclaim()  # the event is free from here on
        events = pool.stats().events_created
        with rig.gate():
            later = [copied(pool, 1, dst) for _ in range(events + 1)]
            assert early.done()
            assert not any(ticket.done() for ticket in later)
            early.wait(0)
        later[-1].wait()
        assert all(ticket.done() for ticket in later)


@pytest.mark.both  # no control: wait_on is about the device's order, in which no query takes part
def test_wait_on_makes_another_stream_run_after_the_ticket(rig):
    pool, dst, seen = rig.pool(), rig.filled(64, torch.int32, 0), rig.filled(64, torch.int32, 9)
    unordered = rig.filled(64, torch.int32, 9)
    with rig.stream() as copying, rig.stream() as reading, rig.stream() as free:
        with rig.gate(copying):
            with rig.stream(copying):
                ticket = copied(pool, 1, dst)
            with rig.stream(free):
                rig.launch(lambda: unordered.copy_(dst, non_blocking=True))
            free.synchronize()
            with rig.stream(reading):
                ticket.wait_on(reading)  # the host goes on, although the copy is held
                rig.launch(lambda: seen.copy_(dst, non_blocking=True))
        reading.synchronize()
    rig.expect(seen, 1)
    rig.expect(unordered, 0)  # what the wait was needed for


def test_wait_on_a_ticket_that_has_passed_enqueues_nothing(dev):
    pool, dst = pinstage.StagingPool(dev), dev.empty(64, torch.int32)
    ticket = copied(pool, 1, dst)
    dev.synchronize()
    pool.reclaim()
    ticket.wait_on(dev.default_stream)
    assert (dev.calls["cuStreamWaitEvent"], dev.pending()) == (0, 0)


def test_wait_is_interrupted_by_a_signal(dev, until):
    pool, dst = pinstage.StagingPool(dev), dev.empty(64, torch.int32)
    main = threading.get_ident()

    def interrupt():
        before = dev.calls["cuEventQuery"]
        until(lambda: dev.calls["cuEventQuery"] > before)  # the wait polls
        signal.pthread_kill(main, signal.SIGINT)

    with latch(dev.default_stream):
        ticket = copied(pool, 1, dst)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        thread.join()
    ticket.wait()
    assert dst.tolist() == [1] * 64


def test_wait_that_nothing_could_end_raises():
    """I6."""
    with SimulatedDevice(schedule="manual") as dev:
        pool, dst = pinstage.StagingPool(dev), dev.empty(64, torch.int32)
        ticket = copied(pool, 1, dst)
        with pytest.raises(DriverError, match=r"this wait would never end.*dev\.run\(\)"):
            ticket.wait()
        dev.run()
        ticket.wait()


# --- streams --------------------------------------------------------------------------------------------------------


class Streamish:
    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return self.stream.__cuda_stream__()


FORMS = {
    "stream": lambda stream: stream,
    "handle": lambda stream: stream.__cuda_stream__()[1],
    "protocol": Streamish,
}


@pytest.mark.raced
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_stream_argument_names_the_same_stream(rig, form):
    pool, dst = rig.pool(), rig.empty(64, torch.int32)
    with rig.stream() as stream:
        argument = FORMS[form](stream)
        with rig.gate():
            lease = pool.lease(64, torch.int32)
            retired = lease.retire(argument)
            lease.close()
            kept = pinstage.keep_alive(dst, argument, device=rig.device)
            assert [retired.done(), kept.done()] == [False, False]
        retired.wait()
        kept.wait_on(argument)
        kept.wait()


@pytest.mark.raced
def test_passed_fence_says_nothing_of_an_older_one_under_a_recycled_handle(rig):
    """I4: the driver gives a destroyed stream's handle out again while its work is queued."""
    if not rig.simulated:
        pytest.skip("torch never destroys a stream")
    pool, dsts = rig.pool(), [rig.filled(64, torch.int32, 0) for _ in range(2)]
    with rig.stream() as first:
        gate = latch(first)
        older = copied(pool, 1, dsts[0])
        handle = first.handle
    del first
    gc.collect()
    with gate:
        with rig.stream() as second:
            assert second.handle == handle
            younger = copied(pool, 2, dsts[1])
            second.synchronize()
        assert younger.done()
        assert not older.done()
        pool.reclaim()
        assert pool.stats().in_flight_bytes >= 256
        pool.lease(64, torch.int32).cancel()
    assert gate.held
    rig.expect(dsts[0], 1)
    rig.expect(dsts[1], 2)


@pytest.mark.parametrize("streams", [1, 100])
def test_cost_of_a_copy_does_not_grow_with_the_backlog(streams):
    """Case 34, counted in driver calls: 10 and 100,000 in flight."""
    with SimulatedDevice(queue_depth=300_000) as dev:
        pool, dst, source = pinstage.StagingPool(dev), dev.empty(64), torch.zeros(64)
        made = [dev.default_stream] + [dev._new_stream() for _ in range(streams - 1)]

        def calls_of(copies):
            before = sum(dev.calls.values())
            for stream in made:
                with dev.stream(stream):
                    for _ in range(copies // streams):
                        pinstage.copy_(dst, source, pool=pool)
            return (sum(dev.calls.values()) - before) / copies

        with contextlib.ExitStack() as held:
            for stream in made:
                held.enter_context(latch(stream, timeout=60))
            # Of a backlog the youngest of 64 fences is asked, of its half, and so on: 7 queries. 8 calls more go with
            # the copy, and a batch of new events is made for 192 of them.
            for backlog in (1000, 10_000, 89_000):
                calls_of(backlog)
                assert calls_of(1000) <= 17
            assert pool.stats().in_flight_bytes == 256 * 103_000
        dev.synchronize()
        assert pool.reclaim() == 256 * 103_000
        assert pool._consistent()


# --- keep_alive -----------------------------------------------------------------------------------------------------


class Buffer:
    """Something to be kept alive that can be watched."""


@pytest.mark.raced
def test_kept_object_lives_until_its_fence_passed(rig):
    kept = Buffer()
    alive = weakref.ref(kept)
    with rig.stream() as stream:
        with rig.gate():
            ticket = pinstage.keep_alive(kept, stream, device=rig.device)
            del kept
            pinstage.keep_alive(Buffer(), stream, device=rig.device)
            gc.collect()
            assert alive() is not None
            assert not ticket.done()
        stream.synchronize()
        pinstage.keep_alive(Buffer(), stream, device=rig.device)
        assert alive() is None
        stream.synchronize()
        rig.pool().reclaim()


@pytest.mark.raced
def test_bare_copy_from_a_kept_buffer_reads_it_alive(rig):
    dst = rig.filled(1000, torch.int32, 0)
    with rig.stream() as stream, rig.gate():
        source = rig.pinned(1000, torch.int32).fill_(1)
        rig.copy_bare(dst, source)
        ticket = pinstage.keep_alive(source, stream, device=rig.device)
        del source
        assert not ticket.done()
    rig.expect(dst, 1)


def test_current_stream_and_device_are_the_default(dev):
    with dev.stream() as stream, latch(stream):
        ticket = pinstage.keep_alive(Buffer())
        assert not ticket.done()
    ticket.wait()


@pytest.mark.parametrize("end", ["close", "lose"])
def test_device_that_is_gone_does_not_disturb_the_others(end):
    gone, kept = SimulatedDevice(0), Buffer()
    pinstage.keep_alive(kept, gone.default_stream)
    gone.lose() if end == "lose" else gone.close()
    with SimulatedDevice(0) as dev:  # of the same name
        pool = pinstage.StagingPool(dev)
        alive = weakref.ref(buffer := Buffer())
        pinstage.keep_alive(buffer, dev.default_stream).wait()
        del buffer
        pool.reclaim()
        assert alive() is None
    gone.close()


def test_finalizer_of_a_kept_object_may_keep_another(dev):
    class Chain:
        def __del__(self):
            pinstage.keep_alive(Buffer(), dev.default_stream)

    pinstage.keep_alive(Chain(), dev.default_stream).wait()
    pinstage.StagingPool(dev).reclaim()
    dev.synchronize()
    pinstage.StagingPool(dev).reclaim()


@pytest.mark.parametrize("batch", [1, 16])
def test_threads_that_share_a_stream_may_push_in_another_order_than_they_recorded(batch):
    """A fence answers only for those that were pushed before it was recorded. The pool is at its limit throughout."""
    threads, copies, width = 4, 1500, 1024
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with SimulatedDevice(schedule="late", queue_depth=1 << 16) as dev:
        pool = pinstage.StagingPool(dev, max_bytes=16 << 10)
        pool.device.poll_batch = batch
        dsts = [[dev.zeros(width, torch.int32) for _ in range(copies)] for _ in range(threads)]

        def run(thread):
            source = torch.empty(width, dtype=torch.int32)
            for step, dst in enumerate(dsts[thread]):
                source.fill_(thread * copies + step)
                pinstage.copy_(dst, source, pool=pool)
                source.fill_(-1)

        running = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        sys.setswitchinterval(interval)
        dev.synchronize()
        seen = torch.stack([torch.stack(row) for row in dsts]).view(-1, width)
    assert torch.equal(seen, torch.arange(threads * copies, dtype=torch.int32)[:, None].expand(-1, width))
