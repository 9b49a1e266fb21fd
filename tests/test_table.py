# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`StagedTable`: what a commit brings, to the byte, and that the host table may be written at once."""

from __future__ import annotations

import gc
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch

import pinstage
from pinstage import StagedTable
from pinstage.testing import SimulatedDevice

TRACKS = [None, "marks", "compare"]


def table_of(rig, shape=(16, 2, 64), **options):
    load_kernels(rig)
    return StagedTable(shape, torch.int32, rig.device, **{"pool": rig.pool(), **options})


LOADED = set()


def load_kernels(rig):
    """The first launch of a kernel may wait for the whole device, which a gate would hold."""
    if rig.simulated or "kernels" in LOADED:
        return
    LOADED.add("kernels")
    table = StagedTable((4, 2, 8), torch.int32, rig.device)
    for most_runs in (0, 8):  # with tails to pad, which torch does
        table._core.most_runs = most_runs
        table.commit([0, 2], width=3, pad=most_runs + 1).wait()


def write(table, value, rows=None):
    """Writes rows along `dim`, all by default, and marks them."""
    rows = range(table.shape[table.dim]) if rows is None else rows
    table.host.index_fill_(table.dim, torch.tensor(list(rows)), value)
    if table._track is not None:
        table.mark(rows)


# How a commit sends rows 0, 2, 4, ... of sixteen: whether by the kernel where it likes to, what the thresholds are set
# to, the rows it is asked for.
WAYS = {
    "prefix": (True, 8, 0, 16),
    "kernel": (True, 8, 0, list(range(0, 16, 2))),
    "a copy each": (False, 8, 0, list(range(0, 16, 2))),
    "one copy of all": (False, 1, 1 << 20, None),
    "scattered by torch": (False, 1, 0, list(range(0, 16, 2))),
}


@pytest.mark.raced
@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("way", WAYS)
def test_host_table_may_be_written_as_soon_as_a_commit_returns(rig, track, way):
    """Cases 1 and 32: only the live columns travel, and the tail is kept."""
    pool = rig.pool()
    tables = [table_of(rig, pool=pool, track=track) for _ in range(2)]
    kernel, most_runs, most_surplus, rows = WAYS[way]
    rig.core().refuses_scatter = not kernel
    written = range(16) if way == "prefix" else range(0, 16, 2)
    with rig.stream(), rig.gate():
        for value, table in enumerate(tables, start=1):
            table._core.most_runs, table._core.most_surplus_bytes = most_runs, most_surplus
            write(table, value, written)
            table.commit(rows, width=40)
            table.host.fill_(-5)
    for value, table in enumerate(tables, start=1):
        expected = torch.zeros(16, 2, 64, dtype=torch.int32)
        # Without tracking every named row is sent: the rows between too, which nobody wrote.
        expected[list(written), :, :40] = value
        rig.expect(table.device, expected)


@pytest.mark.raced
@pytest.mark.parametrize("way", ["kernel", "scattered by torch", "pitched"])
def test_each_consumer_of_a_step_sees_its_own_commit(rig, way):
    """Case 5: K commits of one table inside one step, behind a gate, each read by a kernel of its own."""
    table = table_of(rig, (4, 128), track="marks")
    rig.core().refuses_scatter = way != "kernel"
    table._core.most_runs = 8 if way == "pitched" else 0
    seen = [rig.filled((4, 128), torch.int32, 0) for _ in range(5)]
    with rig.stream(), rig.gate():
        for step, result in enumerate(seen, start=1):
            write(table, step)
            table.commit(width=100)
            rig.launch(lambda result=result: result.copy_(table.device))
        write(table, 99)
    for step, result in enumerate(seen, start=1):
        rig.expect(result[:, :100], step)
        rig.expect(result[:, 100:], 0)


@pytest.mark.raced
def test_dropping_a_table_in_flight_neither_blocks_nor_gives_its_memory_away(rig):
    """Cases 11 and 35. The commit is on another stream than the one that the mirror's memory was allocated on."""
    pool, shape, home = rig.pool(), (16, 2, 64), rig.current_stream()
    table = table_of(rig, shape, pool=pool)
    seen = rig.filled(shape, torch.int32, 0)
    with rig.stream() as stream, rig.gate(stream):
        write(table, 1)
        ticket = table.commit(stream=stream)
        rig.launch(partial(seen.copy_, table.device))
        del table
        gc.collect()
        with rig.stream(home):
            successor = rig.empty(shape, torch.int32)
            rig.launch(partial(successor.fill_, 5))
        for _ in range(3):
            with pool.lease(shape, torch.int32) as lease:
                lease.tensor.fill_(2)
                lease.cancel()
        if not rig.lying:
            assert not ticket.done()
    rig.expect(seen, 1)
    rig.expect(successor, 5)
    ticket.wait()


@pytest.mark.raced
@pytest.mark.parametrize("planes", [None, 0, 1, range(1, 2)])
def test_table_in_batch_order_is_gathered_from_the_host_rows_of_this_moment(rig, planes):
    """Case 1, and workload T3: ``[P, C, 2, W][:, idx, 0]``."""
    table = table_of(rig, (2, 32, 2, 64), dim=1)
    index = [7, 3, 3, 30, 0]
    shape = (2, 5, 48) if isinstance(planes, int) else (2, 5, 2 if planes is None else 1, 48)
    dsts, expected = [rig.filled(shape, torch.int32, -1) for _ in range(2)], []
    with rig.stream(), rig.gate():
        for step, dst in enumerate(dsts):
            table.host.copy_(torch.arange(table.host.numel()).view(table.shape) + step)
            rows = torch.tensor(index)
            part = table.host[:, rows, :, :48]
            if planes is not None:
                part = part[:, :, planes.start :] if isinstance(planes, range) else part[:, :, planes]
            expected.append(part)
            table.commit_to(dst, rows, width=48, planes=planes)
            table.host.fill_(-5)
            rows.fill_(1)
    for dst, rows_of in zip(dsts, expected, strict=True):
        rig.expect(dst, rows_of)


@pytest.mark.both  # no control: nothing holds the stream
@pytest.mark.parametrize("layout", ["dense", "pitched", "transposed", "larger", "many outer"])
def test_batch_table_may_have_any_layout_and_room_to_spare(rig, layout):
    outer = 20 if layout == "many outer" else 2
    table = table_of(rig, (outer, 8, 2, 16), dim=1)
    table.host.copy_(torch.arange(table.host.numel()).view(table.shape))
    expected = table.host[:, [5, 1, 1], 1, :12]
    base = {
        "dense": lambda: rig.filled((2, 3, 12), torch.int32, -1),
        "pitched": lambda: rig.filled((2, 6, 40), torch.int32, -1)[:, :3, :12],
        "transposed": lambda: rig.filled((12, 3, 2), torch.int32, -1).permute(2, 1, 0),
        "larger": lambda: rig.filled((2, 8, 16), torch.int32, -1),
        "many outer": lambda: rig.filled((20, 6, 3, 12), torch.int32, -1)[:, :3, 1],
    }[layout]()
    table.commit_to(base, [5, 1, 1], width=12, planes=1).wait()
    rig.expect(base[:, :3, :12], expected)
    if layout == "larger":
        rig.expect(base[:, 3:], -1)
        rig.expect(base[:, :, 12:], -1)


class Model:
    """A table driven at random, and what its mirror must hold."""

    def __init__(self, rig, seed, track):
        self.dice, self.track = random.Random(seed), track
        self.columns = self.dice.choice([40, 40, 37, 48])
        shape, dim = self.dice.choice([((12,), 0), ((12, 3), 0), ((3, 12, 2), 1), ((2, 12), 1)])
        shape = (*shape, self.columns)
        dtype = self.dice.choice([torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.bool])
        self.table = StagedTable(shape, dtype, rig.device, dim=dim, track=track, pool=rig.pool())
        rig.core().refuses_scatter = self.dice.choice([False, False, True])
        self.table._core.most_runs = self.dice.choice([0, 1, 2, 8])
        self.table._core.most_surplus_bytes = self.dice.choice([0, 500, 1 << 20])
        self.grid = (-1 if dim else 1, 12, 1 if len(shape) == dim + 2 else shape[dim + 1], self.columns)
        self.mirror = torch.zeros(shape, dtype=dtype)
        self.pads = {torch.bool: [True, False]}.get(dtype, [0, 1, 7, 7])

    def write(self):
        rows = self.dice.sample(range(12), self.dice.choice([0, 1, 3, 12]))
        for row in rows:
            begin = self.dice.randrange(self.columns)
            part = self.table.host.view(self.grid)[:, row, :, begin : self.dice.randint(begin, self.columns)]
            part.copy_(torch.randint(0, 100, part.shape, generator=torch.manual_seed(self.dice.randrange(1 << 30))))
        if self.track == "marks":
            self.table.mark(rows)

    def commit(self):
        rows = self.dice.choice(
            [None, self.dice.randint(0, 12), self.dice.choices(range(12), k=self.dice.randint(0, 9))]
        )
        width = self.dice.choice([None, *(self.dice.randint(0, self.columns) for _ in range(3))])
        pad = self.dice.choice([None, None, self.dice.choice(self.pads)])
        planes = None
        if self.grid[2] > 1:
            planes = self.dice.choice([None, None, self.dice.randrange(self.grid[2]), range(1, self.grid[2])])
        self.table.commit(rows, width=width, planes=planes, pad=pad)
        named = list(range(12)) if rows is None else list(range(rows)) if isinstance(rows, int) else rows
        chosen = slice(None) if planes is None else planes
        chosen = slice(chosen, chosen + 1) if isinstance(chosen, int) else chosen
        chosen = slice(chosen.start, chosen.stop)
        for row in named:
            to, source = (t.view(self.grid)[:, row, chosen] for t in (self.mirror, self.table.host))
            to[..., :width] = source[..., :width]
            if pad is not None and width is not None:
                to[..., width:] = pad


@pytest.mark.both  # no control: nothing holds the stream
@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("seed", range(25))
def test_mirror_holds_exactly_what_was_committed(rig, seed, track):
    """Case 32, any rows, columns, planes and pads in any order: nothing else is written, and nothing lost."""
    model = Model(rig, seed, track)
    for _ in range(30):
        model.write()
        if model.dice.random() < 0.8:
            model.commit()
            rig.expect(model.table.device, model.mirror)


def submissions(dev):
    return {kind: dev.calls[kind] for kind in ("cuMemcpyHtoDAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync", LAUNCH)}


LAUNCH = "cuLaunchKernel"


@pytest.mark.parametrize("kernel", [True, False])
def test_only_what_changed_travels_and_only_its_live_columns(kernel):
    """Case 32: bytes in the slot, driver copies or launches. Three runs and more are one launch."""
    with SimulatedDevice() as dev:
        pool = pinstage.StagingPool(dev)
        pinstage.devices.resolve(dev).refuses_scatter = not kernel
        for track in ("marks", "compare"):
            table = StagedTable((1, 256, 2, 1024), torch.int32, dev, dim=1, track=track, pool=pool)
            # name, rows written, of the commit; copies, bytes; those by the kernel where it launches one
            steps = [
                ("nothing written", [], {}, 0, 0, None),
                ("scattered", range(0, 256, 16), {}, 1, 256 + 16 * 8192, 16 * (8192 + 16)),
                ("a row", [3], {"width": 64}, 1, 2 * 256, None),
                ("unchanged", [], {"width": 64}, 0, 0, None),
                ("neighbours", [7, 8, 9], {"width": 64}, 1, 6 * 256, None),
                ("two runs", [0, 100], {"width": 64}, 2, 4 * 256, None),
                ("apart", [0, 100, 200], {"width": 64}, 3, 6 * 256, 6 * (256 + 16)),
                ("eight runs", range(0, 16, 2), {"width": 64}, 8, 16 * 256, 16 * (256 + 16)),
                ("close together", range(0, 40, 2), {"width": 64}, 1, 39 * 2 * 256, 40 * (256 + 16)),
                ("not asked for", [50], {"rows": 50, "width": 64}, 0, 0, None),
                ("asked for", [], {"rows": 51, "width": 64}, 1, 512, None),
                ("a plane", [9], {"planes": 1, "width": 64}, 1, 256, None),
            ]
            for name, rows, options, expected_copies, expected_bytes, scattered_bytes in steps:
                launched = kernel and scattered_bytes is not None
                nbytes = scattered_bytes if launched else expected_bytes
                table.host[:, list(rows)] += 1
                if track == "marks":
                    table.mark(rows)
                dev.synchronize()
                pool.reclaim()
                before, made = submissions(dev), pool.stats().copies
                table.commit(**options)
                done = {kind: count - before[kind] for kind, count in submissions(dev).items()}
                assert done.pop(LAUNCH) == int(launched), (track, name)
                assert sum(done.values()) == (0 if launched else expected_copies), (track, name)
                assert pool.stats().copies - made == min(expected_copies, 1), (track, name)
                assert pool.stats().in_flight_bytes == -(-nbytes // 256) * 256, (track, name)
            dev.synchronize()


@pytest.mark.both
def test_wider_commit_sends_what_a_narrower_one_left_out(rig):
    table = table_of(rig, (4, 64), track="marks")
    write(table, 1)
    table.commit(width=16)
    rig.expect(table.device[:, 16:], 0)
    table.commit(width=48)
    rig.expect(table.device[:, :48], 1)
    rig.expect(table.device[:, 48:], 0)


@pytest.mark.both
def test_rows_written_by_numpy_or_through_the_pointer_are_found_by_comparison(rig):
    import ctypes

    table = table_of(rig, (8, 64), track="compare")
    address = table.host.data_ptr()
    array = table.host.numpy()
    for step in range(1, 5):
        array[2] = step
        ctypes.c_int32.from_address(address + 4 * 64 * 6).value = step
        table.commit()
        assert table.host.data_ptr() == address
        expected = torch.zeros(8, 64, dtype=torch.int32)
        expected[2], expected[6, 0] = step, step
        rig.expect(table.device, expected)


@pytest.mark.both
@pytest.mark.parametrize("form", ["stream", "int", "protocol", "none"])
@pytest.mark.parametrize("most_runs", [0, 8])
def test_commit_goes_to_the_stream_it_is_given(rig, form, most_runs):
    class Protocol:
        def __cuda_stream__(self):
            return (0, handle)

    table = table_of(rig)
    table._core.most_runs = most_runs
    write(table, 1)
    with rig.stream() as stream:
        handle = pinstage.devices.stream_handle(stream)
        argument = {"stream": stream, "int": handle, "protocol": Protocol(), "none": None}[form]
        with rig.stream(stream if form == "none" else None), rig.gate(stream):
            ticket = table.commit(width=32, pad=7, stream=argument)
            assert not ticket.done()
    ticket.wait()
    rig.expect(table.device[..., :32], 1)
    rig.expect(table.device[..., 32:], 7)


@pytest.mark.both
def test_ticket_of_an_unchanged_commit_covers_the_commit_before(rig):
    table = table_of(rig, track="marks")
    write(table, 1)
    with rig.stream() as stream, rig.gate(stream):
        table.commit()
        ticket = table.commit()
        assert not ticket.done()
    ticket.wait()


@pytest.mark.both
@pytest.mark.parametrize("most_runs", [0, 8])
@pytest.mark.parametrize("kernel", [True, False])
def test_table_larger_than_a_slot_goes_in_pieces(rig, most_runs, kernel):
    pool = rig.pool(max_bytes=1 << 20)
    pool._most_piece_bytes = 32 << 10
    rig.core().refuses_scatter = not kernel
    table = table_of(rig, (64, 2, 1000), pool=pool)
    table._core.most_runs = most_runs
    table.host.copy_(torch.arange(table.host.numel()).view(table.shape))
    for width in (1000, 700):
        table.host.add_(1)
        table.commit(width=width).wait()
        rig.expect(table.device[..., :width], table.host[..., :width])
    table.host.neg_()
    table.commit(range(1, 64, 2)).wait()
    rig.expect(table.device[1::2], table.host[1::2])
    table.commit([*range(20), *range(30, 64)]).wait()
    rig.expect(table.device[:20], table.host[:20])


@pytest.mark.both
@pytest.mark.parametrize(("shape", "rows", "width", "max_bytes", "when_full"), [
    ((2048, 64), range(0, 2048, 2), 1, 64 << 10, "raise"),  # packed they fit, each on a cache line of its own not
    ((6, 20_000), range(0, 6, 2), 20_000, 64 << 10, "wait"),  # a row is larger than the pool
])  # fmt: skip
def test_scattered_rows_go_through_a_pool_too_small_for_the_kernel(rig, shape, rows, width, max_bytes, when_full):
    pool = rig.pool(max_bytes=max_bytes, initial_bytes=max_bytes, when_full=when_full)
    table = table_of(rig, shape, pool=pool)
    table.host.copy_(torch.arange(table.host.numel()).view(shape))
    table.commit(rows, width=width).wait()
    rig.expect(table.device[list(rows), :width], table.host[list(rows), :width])


def test_rows_with_gaps_go_by_the_kernel_only_while_they_are_few(dev):
    for rows, launches in ((1000, 1), (2000, 1)):  # 0.9 and 1.8 MB
        table = pinstage.StagedTable((2000, 220), torch.int32, dev, track="marks")
        table.mark([row for row in range(rows) if row % 50])
        table.commit(rows).wait()
        assert dev.calls["cuLaunchKernel"] == launches


@pytest.mark.both
@pytest.mark.parametrize("track", ["marks", "compare"])
def test_writer_inside_a_commit_is_sent_by_the_next_one(rig, track):
    """What a racing writer leaves is a mixture of its own values, and only until the next commit of the row."""
    table = table_of(rig, (32, 256), track=track)
    rows, steps = table.host.numpy(), 400
    done = threading.Event()

    def writer():
        for step in range(1, steps + 1):
            row = step * 7 % 32
            rows[row] = step
            if track == "marks":
                table.mark([row])
        done.set()

    thread = threading.Thread(target=writer)
    thread.start()
    while not done.is_set():
        table.commit(width=200)
        rig.synchronize()
        values = table.device.cpu()[:, :200]
        owners = torch.where(values == 0, torch.arange(32).view(32, 1), values * 7 % 32)
        assert torch.equal(owners, torch.arange(32, dtype=owners.dtype).view(32, 1).expand(32, 200))
    thread.join()
    table.commit(width=200)
    rig.expect(table.device[:, :200], table.host[:, :200])


@pytest.mark.both
@pytest.mark.parametrize("track", TRACKS)
def test_commits_of_several_threads_follow_one_another(rig, track):
    table = table_of(rig, (32, 64), track=track)
    start = threading.Barrier(4)
    stream = rig.current_stream()

    def worker(number):
        start.wait()
        for step in range(60):
            row = number * 8 + step % 8
            table.host[row] = step
            if track == "marks":
                table.mark([row])
            table.commit(stream=stream)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.expect(table.device, table.host)


@pytest.mark.both
def test_commit_moves_the_version_counter_of_the_mirror(rig):
    table = table_of(rig, track="marks")
    write(table, 1)
    before = table.device._version
    table.commit()
    assert table.device._version > before
    unchanged = table.device._version
    table.commit()
    assert table.device._version == unchanged


@pytest.mark.both
def test_steady_state_pins_nothing_and_makes_no_events(rig):
    pool = rig.pool()
    table = table_of(rig, pool=pool, track="compare")
    for step in range(60):
        if step == 20:
            before = pool.stats()
        write(table, step, [step % 16, (step + 5) % 16])
        table.commit(width=step % 64).wait()
    after = pool.stats()
    assert (after.host_allocations, after.events_created) == (before.host_allocations, before.events_created)


def test_array_rows_are_taken_as_an_index(dev):
    table = StagedTable((8, 4), torch.int32, dev)
    table.host.fill_(1)
    for rows in (np.array([1]), torch.tensor([2], dtype=torch.int32), [3], range(4, 5)):
        table.commit(rows).wait()
    assert table.device[:, 0].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]


def test_tails_of_nan_are_written_once(dev):
    table = StagedTable((8, 4), torch.float32, dev, track="marks")
    table.host.fill_(1)
    table.mark(range(8))
    table.commit(width=2, pad=float("nan")).wait()
    assert table.device.isnan().sum() == 16
    before = table.device._version
    table.commit(width=2, pad=float("nan")).wait()
    assert table.device._version == before


def test_numbers_may_be_numpys(dev):
    table = StagedTable((8, 4), torch.int32, dev)
    table.host.fill_(1)
    table.commit(np.int64(3), width=np.array([1, 2]).max(), pad=np.int32(7)).wait()
    assert table.device[2:4].tolist() == [[1, 1, 7, 7], [0, 0, 0, 0]]


def test_table_of_a_device_whose_steps_are_released_by_hand():
    with SimulatedDevice(schedule="manual") as dev:
        table = StagedTable((2, 4), torch.int32, dev, track="marks")
        table.host.fill_(1)
        table.mark([1])
        ticket = table.commit()
        assert (ticket.done(), table.device.tolist()) == (False, [[0] * 4, [0] * 4])
        dev.run()
        assert (ticket.done(), table.device.tolist()) == (True, [[0] * 4, [1] * 4])
