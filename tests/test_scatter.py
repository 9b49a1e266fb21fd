# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""Pieces that one kernel brings to their places (csrc/scatter.h), through `copy_batch_` and `StagedTable`.

tests/test_copy_batch.py and tests/test_table.py have the rest of both, and what happens where the kernel is refused.
"""

from __future__ import annotations

import random

import pytest
import torch

import pinstage

BYTE, INT, LONG = torch.uint8, torch.int32, torch.int64
KB = 1024
# Of a piece: below and about the vectors, what a block takes, and several blocks.
SIZES = [*range(1, 71), 4 * KB - 1, 4 * KB, 4 * KB + 1, 8 * KB - 1, 8 * KB, 8 * KB + 1, 64 * KB]


def launches(rig):
    return rig.device.calls["cuLaunchKernel"] if rig.simulated else 0


def expect_launches(rig, before, count):
    """So many since `before`. On a GPU: the driver compiled the kernel and declined no launch."""
    assert not rig.core().refuses_scatter
    assert launches(rig) - before == (count if rig.simulated else 0)


def bytes_of(nbytes, seed):
    return torch.randint(1, 256, (nbytes,), dtype=BYTE, generator=torch.manual_seed(seed))


@pytest.mark.both  # no control: nothing holds the stream
@pytest.mark.parametrize("alignment", range(18))
@pytest.mark.parametrize("own_stream", [True, False])
def test_piece_of_any_size_arrives_at_any_address_and_nothing_beside_it(rig, alignment, own_stream):
    """Cases 19 and 29: the default stream too."""
    before = launches(rig)
    with rig.stream(None if own_stream else rig.current_stream()):
        for first in range(0, len(SIZES), 8):
            sizes = SIZES[first : first + 8]
            device = [rig.filled(size + 64, BYTE, 0) for size in sizes]
            host = [torch.zeros(size + 64, dtype=BYTE) for size in sizes]
            sources = [bytes_of(size, size) for size in sizes]
            for whole in (device, host):
                copy = pinstage.copy_batch_ if whole is device else torch._foreach_copy_
                copy([each[alignment : alignment + size] for each, size in zip(whole, sizes, strict=True)], sources)
            for source in sources:
                source.fill_(0)
            for each, twin in zip(device, host, strict=True):
                rig.expect(each, twin)
    expect_launches(rig, before, -(-len(SIZES) // 8))


@pytest.mark.both
def test_thousands_of_pieces_are_one_launch(rig):
    dice = random.Random(0)
    device, host = rig.filled(512 * KB, BYTE, 0), torch.zeros(512 * KB, dtype=BYTE)
    places, at = [], 0
    while at < 500 * KB:
        places.append(slice(at, at + dice.randint(1, 80)))
        at = places[-1].stop + dice.randint(1, 5)
    assert len(places) > 5000
    dice.shuffle(places)
    source = bytes_of(100, 0)
    sources = [source[: place.stop - place.start].clone() for place in places]
    pool, before = rig.pool(), launches(rig)
    pinstage.copy_batch_([device[place] for place in places], sources, pool=pool)
    for each in sources:
        each.fill_(0)
    for place in places:
        host[place] = source[: place.stop - place.start]
    rig.expect(device, host)
    assert pool.stats().copies == 1
    expect_launches(rig, before, 1)


@pytest.mark.raced
@pytest.mark.parametrize("own_stream", [True, False])
def test_sources_of_a_scattered_batch_may_be_written_as_soon_as_the_call_returns(rig, own_stream):
    """Cases 1 and 6: the kernel reads descriptors and bytes late, and each step's slot is its own until then."""
    dtypes = [INT, LONG, BYTE, torch.bfloat16, torch.bool, torch.float64] * 3
    steps = [[rig.filled(30 + i, dtype, 0) for i, dtype in enumerate(dtypes)] for _ in range(4)]
    sources = [torch.zeros(30 + i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    pool = rig.pool()
    pool.reserve(1 << 20)
    with rig.stream(None if own_stream else rig.current_stream()), rig.gate():
        for step, dsts in enumerate(steps, start=1):
            for source in sources:
                source.fill_(step)
            pinstage.copy_batch_(dsts, sources, pool=pool)
        for source in sources:
            source.fill_(0)
    for step, dsts in enumerate(steps, start=1):
        for dst in dsts:
            rig.expect(dst, step)


@pytest.mark.both
def test_steady_state_of_scattered_batches_pins_nothing_and_makes_no_events(rig):
    """Case 16."""
    pool, dsts = rig.pool(), [rig.empty(100 + i, INT) for i in range(20)]
    source = torch.zeros(200, dtype=INT)
    for step in range(60):
        if step == 20:
            before = pool.stats()
        source.fill_(step)
        pinstage.copy_batch_(dsts, [source[: 100 + i] for i in range(20)], pool=pool)
        rig.synchronize()
    after = pool.stats()
    assert (after.host_allocations, after.events_created) == (before.host_allocations, before.events_created)
    for dst in dsts:
        rig.expect(dst, 59)


@pytest.mark.both
@pytest.mark.parametrize("columns", [1, 3, 16, 37, 100, 1024, 3001])
@pytest.mark.parametrize("dtype", [BYTE, torch.int16, INT, LONG])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (3, 40, 2)])
def test_scattered_rows_of_any_width_arrive_and_nothing_beside_them(rig, columns, dtype, shape):
    """Case 29. Rows whose places differ modulo a vector are gathered apart from one another."""
    dim = len(shape) - 1 if len(shape) < 3 else 1
    table = pinstage.StagedTable((*shape, columns), dtype, rig.device, dim=dim, pool=rig.pool())
    mirror = torch.zeros(table.shape, dtype=dtype)
    before = launches(rig)
    for width in (columns, max(columns - 1, 1)):
        rows = torch.tensor([0, 2, 5, 6, 39, 11])
        table.host.copy_(torch.randint(0, 100, table.shape, generator=torch.manual_seed(width)))
        mirror.narrow(-1, 0, width).index_copy_(
            dim, rows, table.host.narrow(-1, 0, width).index_select(dim, rows).clone()
        )
        table.commit(rows, width=width)
        table.host.fill_(101)
        rig.expect(table.device, mirror)
    expect_launches(rig, before, 2)
