# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Pool and streams against a naive model, under every schedule.

The model is one line: what was submitted last to a piece of device memory on its stream is what it holds in the end.
Every submission has device memory of its own, and its source is overwritten at once. After every step the books must
balance; at the end every byte must be right. The control: with lying queries the machine must find wrong bytes.
"""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import pinstage
from pinstage import LeaseStateError, PoolExhausted
from pinstage.testing import SimulatedDevice

LARGEST = 24_000  # elements of int16: two such leases fill the pool
MAX_BYTES = 128 << 10
SIZES = st.one_of(st.integers(1, 300), st.integers(1, LARGEST))


class PoolAndStreams(RuleBasedStateMachine):
    schedule = "late"
    lying = False

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed):
        self.dev = SimulatedDevice(schedule=self.schedule, seed=seed, lying_queries=self.lying)
        self.dev.make_current()
        when_full = "raise" if self.schedule == "manual" else "wait"  # where nothing runs, waiting is an error
        self.pool = pinstage.StagingPool(self.dev, initial_bytes=8 << 10, max_bytes=MAX_BYTES, when_full=when_full)
        self.streams = [self.dev.default_stream] + [self.dev._new_stream() for _ in range(2)]
        self.source = torch.empty(LARGEST, dtype=torch.int16)
        self.table = torch.empty((50, 40), dtype=torch.int16)
        self.value = 0
        self.expected = []  # (device tensor, value)
        self.leases = []  # [lease, value], open
        self.views = []  # (tensor over a handed-over slot, value)
        self.tickets = []  # [ticket, was done]

    # --- what is submitted ---

    def next_value(self):
        self.value += 1
        return self.value

    def on(self, stream):
        return self.dev.stream(self.streams[stream])

    @rule(count=SIZES, stream=st.integers(0, 2), cast=st.booleans(), strided=st.booleans())
    def copy(self, count, stream, cast, strided):
        value = self.next_value()
        dst = self.dev.empty((count, 2) if strided else count, torch.int16)
        part = dst[:, 0] if strided else dst
        source = self.source[:count].fill_(value)
        source = source.double() if cast else source
        try:
            with self.on(stream):
                pinstage.copy_(part, source, pool=self.pool)
            self.expected.append((part, value))
        except PoolExhausted:
            self.require_occupied()
        source.fill_(-1)

    @rule(index=st.lists(st.integers(0, 49), max_size=60), stream=st.integers(0, 2), dim=st.sampled_from([0, -2]))
    def copy_rows(self, index, stream, dim):
        value = self.next_value()
        dst = self.dev.empty((len(index), 40), torch.int16)
        try:
            with self.on(stream):
                pinstage.copy_rows_(dst, self.table.fill_(value), index, dim=dim, pool=self.pool)
            self.expected.append((dst, value))
        except PoolExhausted:
            self.require_occupied()
        self.table.fill_(-1)

    def require_occupied(self):
        stats = self.pool.stats()
        assert stats.free_bytes < stats.capacity_bytes

    # --- leases ---

    @rule(count=SIZES)
    def lease(self, count):
        lease = self.pool.try_lease(count, torch.int16)
        if lease is None:
            return
        value = self.next_value()
        lease.tensor.fill_(value)
        self.leases.append([lease, value])

    @rule(which=st.integers(0, 100), stream=st.integers(0, 2), repeat=st.integers(1, 2))
    def copy_to(self, which, stream, repeat):
        if not self.leases:
            return
        lease, value = self.leases[which % len(self.leases)]
        for _ in range(repeat):
            dst = self.dev.empty(lease.shape, torch.int16)
            with self.on(stream):
                ticket = lease.copy_to(dst)
            self.expected.append((dst, value))
            self.tickets.append([ticket, False])

    @rule(which=st.integers(0, 100), stream=st.integers(0, 2))
    def read_in_place(self, which, stream):
        if not self.leases:
            return
        lease, value = self.leases[which % len(self.leases)]
        dst, view = self.dev.empty(lease.shape, torch.int16), lease.device_view
        self.dev.launch(lambda view=view: dst.copy_(view), self.streams[stream])
        self.tickets.append([lease.retire(self.streams[stream]), False])
        self.expected.append((dst, value))

    @rule(which=st.integers(0, 100), keep=st.booleans())
    def close(self, which, keep):
        if not self.leases:
            return
        lease, value = self.leases.pop(which % len(self.leases))
        if keep:
            self.views.append((lease.tensor, value))
        before = self.pool.stats().parked_bytes
        try:
            lease.close()
        except LeaseStateError:  # undeclared
            before += -(-2 * lease.shape[0] // 256) * 256
        assert self.pool.stats().parked_bytes == before
        for use in (lambda: lease.tensor, lease.close, lease.cancel):
            with pytest.raises(LeaseStateError):
                use()

    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        if not self.leases:
            return
        at = which % len(self.leases)
        try:
            self.leases[at][0].cancel()
            del self.leases[at]
        except LeaseStateError:  # declared
            assert self.leases[at][0].tensor is not None

    @rule(which=st.integers(0, 100))
    def forget(self, which):
        if not self.leases:
            return
        lease, _ = self.leases.pop(which % len(self.leases))
        before = self.pool.stats().parked_bytes
        with pytest.MonkeyPatch.context() as patch:
            warned = []
            patch.setattr("warnings.warn", lambda message, *_, **__: warned.append(message))
            del lease
        assert bool(warned) == (self.pool.stats().parked_bytes > before)

    @rule(which=st.integers(0, 100))
    def drop_view(self, which):
        if self.views:
            view, value = self.views.pop(which % len(self.views))
            assert bool((view == value).all())

    # --- time and upkeep ---

    @rule(steps=st.integers(1, 6))
    def run_steps(self, steps):
        if self.schedule != "eager":
            self.dev.run(steps)

    @rule(stream=st.integers(0, 2))
    def synchronize_stream(self, stream):
        self.streams[stream].synchronize()

    @rule(stream=st.integers(1, 2))
    def replace_stream(self, stream):
        self.streams[stream] = None  # its handle is given out again
        self.streams[stream] = self.dev._new_stream()

    @rule(which=st.integers(0, 100), stream=st.integers(0, 2))
    def wait_on(self, which, stream):
        if self.tickets:
            self.tickets[which % len(self.tickets)][0].wait_on(self.streams[stream])

    @rule(which=st.integers(0, 100))
    def wait(self, which):
        if self.tickets and self.schedule != "manual":
            self.tickets[which % len(self.tickets)][0].wait(timeout=30)
            assert self.tickets[which % len(self.tickets)][0].done()

    @rule(synchronize=st.booleans())
    def reclaim(self, synchronize):
        if synchronize and self.schedule == "manual":
            self.dev.run()
        self.pool.reclaim(synchronize)
        if synchronize:
            assert self.pool.stats().parked_bytes == 0

    @rule()
    def trim(self):
        if self.schedule == "manual":
            self.dev.run()
        self.pool.trim()

    # --- what always holds ---

    @invariant()
    def books_balance(self):
        """I1, I2."""
        assert self.pool._consistent()
        stats = self.pool.stats()
        states = [stats.open_bytes, stats.in_flight_bytes, stats.held_bytes, stats.parked_bytes, stats.free_bytes]
        assert sum(states) == stats.capacity_bytes <= MAX_BYTES
        assert stats.high_water_bytes <= MAX_BYTES
        assert self.dev.violations == 0
        assert self.dev.host_allocations == stats.slabs

    @invariant()
    def what_the_caller_holds_is_untouched(self):
        """I5."""
        for tensor, value in [(lease.tensor, value) for lease, value in self.leases] + self.views:
            assert bool((tensor == value).all())

    @invariant()
    def done_tickets_stay_done(self):
        """I4."""
        for entry in self.tickets:
            done = entry[0].done()
            assert done or not entry[1]
            entry[1] = done

    def teardown(self):
        if not hasattr(self, "tickets"):
            return
        try:
            self.finish()
        finally:
            self.expected.clear()
            self.views.clear()
            for lease, _ in self.leases:
                lease.retire(0) if lease._lease.is_open() else None
            self.leases.clear()
            self.dev.close()

    def finish(self):
        self.dev.synchronize()
        assert self.dev.pending() == 0
        for dst, value in self.expected:
            assert bool((dst == value).all())
        assert all(ticket.done() for ticket, _ in self.tickets)
        while self.leases:
            self.close(0, False)
        self.views.clear()
        self.expected.clear()
        self.pool.reclaim(synchronize=True)
        assert self.pool.stats().free_bytes == self.pool.stats().capacity_bytes
        if self.pool.stats().capacity_bytes == MAX_BYTES and self.pool.stats().slabs == 1:
            self.pool.lease(MAX_BYTES, torch.uint8).cancel()
        self.pool.close()
        assert (self.dev.host_allocations, self.dev.violations) == (0, 0)


QUICK = {"max_examples": 30, "stateful_step_count": 25}
FULL = {"max_examples": 300, "stateful_step_count": 50}
SCHEDULES = ["late", "eager", "random", "manual"]


def run(schedule, lying=False, **options):
    machine = type(f"PoolAndStreams_{schedule}", (PoolAndStreams,), {"schedule": schedule, "lying": lying})
    chosen = settings(
        **options,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        deadline=None,
        derandomize=False,
        database=None,
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [QUICK, pytest.param(FULL, marks=pytest.mark.slow)], ids=["quick", "full"])
def test_pool_and_streams_agree_with_the_model(schedule, size):
    run(schedule, **size)


def test_machine_finds_wrong_bytes_when_queries_lie():
    """The control, on the schedule that races most: without shrinking, for the failure alone."""
    with pytest.raises(AssertionError):
        run("late", lying=True, max_examples=100, stateful_step_count=50, phases=[Phase.generate],
            verbosity=Verbosity.quiet)  # fmt: skip
    gc.collect()
