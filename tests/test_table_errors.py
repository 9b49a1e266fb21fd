# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`StagedTable` refused, failing and captured: a commit that fails loses no row.

No test here has a control by lying queries: each asks what a refused or failed call leaves behind.
"""

from __future__ import annotations

import os

import pytest
import torch

import pinstage
from pinstage import CaptureError, DriverError, LeaseStateError, PoolExhausted, StagedTable
from pinstage.testing import SimulatedDevice

SHAPE = (2, 8, 2, 16)


def table_of(rig, track="marks", **options):
    return StagedTable(SHAPE, torch.int32, rig.device, dim=1, track=track, pool=rig.pool(**options))


def change(table, value, rows=range(8)):
    table.host[:, list(rows)] = value
    if table._track == "marks":
        table.mark(rows)


BAD_COMMITS = {
    "wide": ({"width": 17}, ValueError, "width is 17, of a table of 16 columns"),
    "negative width": ({"width": -1}, ValueError, "width is -1"),
    "no width": ({"width": "3"}, TypeError, "number of columns, not str"),
    "too many rows": ({"rows": 9}, IndexError, "the first 9 rows, of a table of 8"),
    "negative rows": ({"rows": -1}, IndexError, "the first -1 rows"),
    "row past the end": ({"rows": [1, 8, 9]}, IndexError, "row 8 at position 1 is out of range for a table of 8 rows"),
    "negative row": ({"rows": torch.tensor([0, -3])}, IndexError, "row -3 at position 1"),
    "no rows": ({"rows": "all"}, TypeError, "index"),
    "float rows": ({"rows": [0.5]}, TypeError, "int32 or int64, not torch.float32"),
    "mask": ({"rows": torch.ones(8, dtype=torch.bool)}, TypeError, "int32 or int64, not torch.bool"),
    "two-dimensional": ({"rows": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "one-dimensional"),
    "plane past the end": ({"planes": 2}, IndexError, "planes is 2, of a table of 2 planes"),
    "negative plane": ({"planes": -1}, IndexError, "planes is -1"),
    "planes past the end": ({"planes": range(1, 3)}, IndexError, r"planes is range\(1, 3\)"),
    "planes apart": ({"planes": range(0, 2, 2)}, TypeError, "range of step 1"),
    "no planes": ({"planes": [0]}, TypeError, "the number of one plane or a range"),
    "pad too large": ({"pad": 1 << 40, "width": 3}, ValueError, "which torch.int32 does not hold"),
    "no pad": ({"pad": "x", "width": 3}, TypeError, "pad is a number, not str"),
    "no stream": ({"stream": "s"}, TypeError, "__cuda_stream__; got str"),
}


@pytest.mark.both
@pytest.mark.parametrize("track", [None, "marks", "compare"])
@pytest.mark.parametrize("name", BAD_COMMITS)
def test_refused_commit_changes_nothing_and_loses_nothing(rig, name, track):
    """Case 31."""
    table = table_of(rig, track)
    change(table, 1, [2, 5])
    options, error, match = BAD_COMMITS[name]
    version = table.device._version
    with rig.unchanged(table._pool), pytest.raises(error, match=match):
        table.commit(**options)
    assert table.device._version == version
    rig.expect(table.device, 0)
    table.commit()
    rig.expect(table.device, table.host)


BAD_TARGETS = {
    "no tensor": (lambda r: [1], {}, TypeError, "dst must be a torch.Tensor, not list"),
    "host": (lambda r: torch.zeros(2, 3, 2, 16, dtype=torch.int32), {}, ValueError, "in other memory"),
    "dtype": (lambda r: r.empty((2, 3, 2, 16), torch.int64), {}, ValueError, r"need \(2, 3, 2, 16\) torch.int32"),
    "few rows": (lambda r: r.empty((2, 2, 2, 16), torch.int32), {}, ValueError, r"dst is \(2, 2, 2, 16\)"),
    "narrow": (lambda r: r.empty((2, 3, 2, 15), torch.int32), {}, ValueError, "or more rows and columns"),
    "planes": (lambda r: r.empty((2, 3, 1, 16), torch.int32), {}, ValueError, "need"),
    "a plane": (lambda r: r.empty((2, 3, 1, 16), torch.int32), {"planes": 0}, ValueError, r"need \(2, 3, 16\)"),
    "outer": (lambda r: r.empty((3, 3, 2, 16), torch.int32), {}, ValueError, "need"),
    "row": (lambda r: r.empty((2, 3, 2, 16), torch.int32), {"index": [0, 1, 8]}, IndexError, "row 8 at position 2"),
    "width": (lambda r: r.empty((2, 3, 2, 16), torch.int32), {"width": 99}, ValueError, "width is 99"),
    "plane number": (lambda r: r.empty((2, 3, 16), torch.int32), {"planes": 5}, IndexError, "planes is 5"),
}


@pytest.mark.both
@pytest.mark.parametrize("name", BAD_TARGETS)
def test_refused_batch_table_is_not_written(rig, name):
    """Case 31."""
    table = table_of(rig)
    make, options, error, match = BAD_TARGETS[name]
    dst = make(rig)
    before = dst.clone() if isinstance(dst, torch.Tensor) else None
    with rig.unchanged(table._pool), pytest.raises(error, match=match):
        table.commit_to(dst, **{"index": [0, 1, 2], **options})
    if before is not None:
        rig.synchronize()
        assert torch.equal(dst, before)


@pytest.mark.parametrize(
    ("shape", "options", "error", "match"),
    [
        (8, {}, ValueError, "rows and columns"),
        ((8,), {}, ValueError, "rows and columns"),
        ((8, -1), {}, ValueError, r"at least one of each; shape is \(8, -1\)"),
        ((0, 4), {}, ValueError, "at least one of each"),
        ((8, 4), {"dim": 1}, ValueError, "dim is 1: rows count along a dimension before the last"),
        ((8, 4), {"dim": -1}, ValueError, "dim is -1"),
        ((8, 4), {"dim": 2}, ValueError, "dim is 2"),
        ((8, 4), {"track": "yes"}, ValueError, "track is None"),
        ((8, 4), {"dtype": torch.quint8}, TypeError, "cannot hold torch.quint8"),
    ],
)
def test_table_that_cannot_be_is_refused(dev, shape, options, error, match):
    with pytest.raises(error, match=match):
        StagedTable(shape, **{"dtype": torch.int32, "device": dev, **options})


def test_pool_of_another_device_is_refused(dev):
    with SimulatedDevice(1) as other, pytest.raises(ValueError, match="the pool is of simulated:1"):
        StagedTable((8, 4), torch.int32, dev, pool=pinstage.StagingPool(other))


def test_marks_are_checked_before_any_is_made(dev):
    table = StagedTable((8, 4), torch.int32, dev, track="marks")
    table.host.fill_(1)
    for rows, error, match in (
        ([1, 8], IndexError, "row 8 at position 1"),
        ([-1], IndexError, "row -1 at position 0"),
        (3, TypeError, r"\[3\] for one row, range\(3\)"),
        ([0.5], TypeError, "int32 or int64"),
    ):
        with pytest.raises(error, match=match):
            table.mark(rows)
    table.mark([])
    table.commit().wait()
    assert int(table.device.sum()) == 0
    with pytest.raises(LeaseStateError, match='track="marks"'):
        StagedTable((8, 4), torch.int32, dev).mark([1])


@pytest.mark.parametrize("which", ["host", "device"])
@pytest.mark.parametrize("how", ["larger", "smaller", "set"])
def test_resized_table_is_refused_and_loses_nothing(dev, which, how):
    """Resize in flight: the queued copy is untouched; the next commit says what happened."""
    table = StagedTable((8, 64), torch.int32, dev, track="marks")
    table.host.fill_(1)
    table.mark(range(8))
    table.commit()
    mirror = table.device.view(-1)
    tensor = getattr(table, which)
    storage = tensor.untyped_storage()
    {
        "larger": lambda: tensor.set_(torch.zeros(9, 64, dtype=torch.int32)),
        "smaller": lambda: tensor.resize_(7, 64),
        "set": lambda: tensor.set_(torch.zeros(8, 64, dtype=torch.int32)),
    }[how]()
    table.mark([0])
    with pytest.raises(ValueError, match=f"table.{which} was resized or given other memory"):
        table.commit()
    dev.synchronize()
    assert mirror.tolist() == [1] * 512
    tensor.set_(storage, 0, (8, 64))
    table.host.fill_(2)
    table.commit([0]).wait()
    assert mirror[:64].tolist() == [2] * 64


@pytest.mark.both
@pytest.mark.parametrize("track", [None, "marks", "compare"])
@pytest.mark.parametrize("most_runs", [0, 8])
@pytest.mark.parametrize("kernel", [True, False])
def test_commit_on_a_capturing_stream_raises_and_keeps_the_dirty_rows(rig, track, most_runs, kernel):
    """Case 10. Also when there is nothing to send: whether a call is legal does not depend on the data."""
    table = table_of(rig, track)
    rig.core().refuses_scatter = not kernel
    table._core.most_runs = most_runs
    change(table, 1)
    dst = rig.filled((2, 1, 2, 16), torch.int32, 0)
    counter = rig.filled((), torch.int64, 0)
    with rig.capture() as graph:
        rig.launch(lambda: counter.add_(1))
        before = table._pool.stats()
        for options in ({}, {"rows": 0}, {"width": 3, "pad": 9}):
            with pytest.raises(CaptureError, match="captured"):
                table.commit(**options)
        with pytest.raises(CaptureError, match="captured"):
            table.commit_to(dst, [0])
        with pytest.raises(CaptureError, match="captured"):
            StagedTable((4, 4), torch.int32, rig.device)
        assert table._pool.stats() == before
    graph.replay()
    rig.expect(counter, 1)
    rig.expect(table.device, 0)
    table.commit(width=3, pad=9)
    rig.expect(table.device[..., :3], 1)
    rig.expect(table.device[..., 3:], 9)


@pytest.mark.both
@pytest.mark.parametrize("track", ["marks", "compare"])
def test_full_pool_refuses_a_commit_and_the_rows_are_still_to_be_sent(rig, track):
    table = table_of(rig, track, max_bytes=4096, when_full="raise")
    change(table, 1)
    with table._pool.lease(4096, torch.uint8) as lease:
        with pytest.raises(PoolExhausted):
            table.commit()
        lease.cancel()
    rig.expect(table.device, 0)
    table.commit()
    rig.expect(table.device, 1)


# Every driver call of a commit, and which kind of commit makes it.
CALLS = ["cuMemcpyHtoDAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync", "cuEventRecord", "cuStreamIsCapturing",
         "cuEventCreate", "cuMemHostAlloc", "cuLaunchKernel", "cuMemHostGetDevicePointer"]  # fmt: skip
STEPS = {
    "pitched": (8, {"width": 5}),
    "runs": (8, {"rows": [0, 1, 4, 6]}),
    "scattered": (0, {"width": 5}),
    "runs by torch": (0, {"rows": [0, 1, 4, 6]}),
    "padded": (8, {"width": 5, "pad": 7}),
    "scattered and padded": (0, {"width": 5, "pad": 7}),
    "a plane": (8, {"planes": 1, "width": 5}),
}


@pytest.mark.parametrize("track", [None, "marks", "compare"])
@pytest.mark.parametrize("name", STEPS)
def test_commit_that_fails_anywhere_is_made_good_by_the_next(name, track):
    """Cases 25 and 26: each driver call, each time it is made."""
    most_runs, options = STEPS[name]
    kernel = name in ("scattered", "runs")
    failures = 0
    for call in CALLS:
        for nth in range(1, 6):
            with SimulatedDevice() as dev:
                table = StagedTable(SHAPE, torch.int32, dev, dim=1, track=track, pool=pinstage.StagingPool(dev))
                table._core.most_runs = most_runs
                pinstage.devices.resolve(dev).refuses_scatter = not kernel
                table.host.random_(1, 100)
                if track == "marks":
                    table.mark(range(8))
                dev.fail(call, nth)
                try:
                    table.commit(**options)
                except DriverError:
                    failures += 1
                    table.commit(**options)
                dev.synchronize()
                rows, planes = options.get("rows", list(range(8))), options.get("planes")
                chosen = slice(None) if planes is None else slice(planes, planes + 1)
                width = options.get("width", 16)
                sent = [t[:, rows, chosen] for t in (table.device, table.host)]
                assert torch.equal(sent[0][..., :width], sent[1][..., :width]), (call, nth)
                if "pad" in options:
                    assert bool((sent[0][..., width:] == 7).all()), (call, nth)
                assert table._pool._consistent()
    assert failures >= 3  # the copy, its fence, the look for a capture


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_is_told_so_even_while_another_thread_commits(dev):
    """Case 23."""
    import warnings

    table = StagedTable((8, 4), torch.int32, dev)
    with table._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's about forks of a process with threads
        child = os.fork()
        if child == 0:
            try:
                table.commit()
            except pinstage.ForkedError:
                os._exit(0)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_rows_on_their_way_are_not_lost_whatever_ends_the_commit(dev, monkeypatch):
    """Ctrl-C may come between any two lines of Python."""
    table = StagedTable((8, 4), torch.int32, dev, track="marks")
    table.host.fill_(1)
    table.mark(range(8))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(table, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.commit()
    table._core.take(8, 0, 1, 4, False)  # as if the interrupt came right behind it
    table.commit().wait()
    assert int(table.device.sum()) == 32


def test_rows_may_be_sent_again_while_the_error_is_handled(dev):
    table = StagedTable((8, 4), torch.int32, dev, track="marks", pool=pinstage.StagingPool(dev))
    table.host.fill_(1)
    table.mark(range(8))
    dev.fail("cuMemcpyHtoDAsync")
    try:
        table.commit()
    except DriverError:
        table.commit().wait()
    assert int(table.device.sum()) == 32
