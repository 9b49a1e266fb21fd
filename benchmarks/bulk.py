# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Large uploads: pageable blocks and rows against pinned peak and what users write, and the pinning of a new pool.

Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import SETTLED, Call, Host, interleaved, print_table, size_name, write_json

import pinstage

MB = 1 << 20
SIZES = (7 * MB, 16 * MB, 29 * MB, 64 * MB, 256 * MB, 512 * MB)
# name: bytes of a row, rows that are taken, rows of the table
ROWS = {
    "29 MB objects": (29 * MB, 4, 12),
    "256 B rows": (256, MB, 4 * MB),
    "1 KB rows": (1 << 10, 256 << 10, MB),
    "3 KB rows": (3 << 10, 85 << 10, 340 << 10),
}
POOLS = (8 * MB, 32 * MB, 64 * MB, 256 * MB, 1024 * MB)
PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20, help="calls of each variant and size")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")
    parser.add_argument(
        "--pieces", type=int, nargs="*", default=[8 * MB], metavar="BYTES", help="largest pieces to try, in turn"
    )
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument("--pools", type=int, nargs="*", default=POOLS, metavar="BYTES", help="sizes of new pools")


def to_completion(call: Call) -> Call:
    """The same call, timed until the device is idle."""

    def timed(i: int) -> float:
        start = time.perf_counter_ns()
        call(i)
        torch.cuda.synchronize()
        return float(time.perf_counter_ns() - start)

    return timed


def pools_of(pieces: list[int]) -> dict[str, pinstage.StagingPool]:
    """A warm pool for each size of pieces, by the name of its variant."""
    pools = {}
    for piece in pieces:
        pool = pinstage.StagingPool()
        pool._most_piece_bytes = piece
        pool.reserve(8 * piece)
        pools["copy_" if len(pieces) == 1 else f"copy_ by {size_name(piece)}"] = pool
    return pools


def uploads(nbytes: int, pools: dict[str, pinstage.StagingPool]) -> dict[str, Call]:
    """Each sends one of several blocks, so that none is found in a cache because it was sent just before."""
    blocks = torch.ones((max(2, 128 * MB // nbytes), nbytes), dtype=torch.uint8)
    turn = itertools.cycle(range(len(blocks)))
    pinned = blocks[0].pin_memory()
    dst = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def fresh(i: int) -> None:
        staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        staged.copy_(blocks[next(turn)])
        dst.copy_(staged, non_blocking=True)

    def staged(pool: pinstage.StagingPool) -> Call:
        return lambda i: pinstage.copy_(dst, blocks[next(turn)], pool=pool)

    return {
        **{name: staged(pool) for name, pool in pools.items()},
        "pinned": lambda i: dst.copy_(pinned, non_blocking=True),
        "pageable": lambda i: dst.copy_(blocks[next(turn)]),
        "fresh pinned": fresh,
    }


def row_uploads(name: str, pools: dict[str, pinstage.StagingPool]) -> tuple[int, dict[str, Call]]:
    """Bytes of one call, and the calls: random rows of a table to the device."""
    row, count, rows = ROWS[name]
    table = torch.ones((rows, row), dtype=torch.uint8)
    indices = [torch.randint(0, rows, (count,)) for _ in range(4)]
    turn = itertools.cycle(indices)
    pinned = torch.empty((count, row), dtype=torch.uint8, pin_memory=True)
    dst = torch.empty((count, row), dtype=torch.uint8, device="cuda")

    def select_fresh(i: int) -> None:
        staged = torch.empty((count, row), dtype=torch.uint8, pin_memory=True)
        torch.index_select(table, 0, next(turn), out=staged)
        dst.copy_(staged, non_blocking=True)

    def select(i: int) -> None:
        torch.index_select(table, 0, next(turn), out=pinned)
        dst.copy_(pinned, non_blocking=True)

    def staged(pool: pinstage.StagingPool) -> Call:
        return lambda i: pinstage.copy_rows_(dst, table, next(turn), pool=pool)

    return count * row, {
        **{name.replace("copy_", "copy_rows_"): staged(pool) for name, pool in pools.items()},
        "index_select + copy": select,
        "fresh index_select + copy": select_fresh,
        "pinned": lambda i: dst.copy_(pinned, non_blocking=True),
    }


def pinnings(nbytes: int) -> tuple[dict[str, Call], dict[str, list[float]]]:
    """The calls, which time how long pinning takes, and where they leave how long giving back took, in ns."""
    entries = pinstage.cuda.resolve_entries()
    allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint)(
        entries["cuMemHostAlloc"]
    )
    free = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(entries["cuMemFreeHost"])
    freeing: dict[str, list[float]] = {"reserve": [], "cuMemHostAlloc": []}

    def timed(name: str, pin: Callable[[], object], give_back: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        pin()
        pinned = time.perf_counter_ns()
        give_back()
        freeing[name].append(float(time.perf_counter_ns() - pinned))
        return float(pinned - start)

    def reserve(i: int) -> float:
        pool = pinstage.StagingPool(max_bytes=nbytes)
        return timed("reserve", lambda: pool.reserve(nbytes), pool.close)

    def host_alloc(i: int) -> float:
        memory = ctypes.c_void_p()

        def checked(status: int) -> None:
            if status != 0:
                raise RuntimeError(f"the driver refused to pin or free {nbytes} bytes: {status}")

        return timed(
            "cuMemHostAlloc",
            lambda: checked(allocate(ctypes.byref(memory), nbytes, PORTABLE_AND_MAPPED)),
            lambda: checked(free(memory)),
        )

    return {"reserve": reserve, "cuMemHostAlloc": host_alloc}, freeing


def gigabytes_a_second(nbytes: int, time: Host) -> str:
    """Rate of the median."""
    return f"{nbytes / time.median / 1e3:.1f}"


def measure(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, Host]]:
    """Host time of each call on an idle device, and time until its copy is done."""
    done = {name: to_completion(call) for name, call in calls.items()}
    synchronize = torch.cuda.synchronize
    return {
        "done": interleaved(done, rounds, synchronize=synchronize, block=1, settle=SETTLED),
        "host": interleaved(calls, rounds, synchronize=synchronize, block=1, settle=SETTLED),
    }


def print_rates(title: str, figures: list[dict[str, Any]]) -> None:
    """GB/s to completion, then host time in µs."""
    if not figures:
        return
    names = list(figures[0]["done"])
    print(f"\n{title}: GB/s until the copy is done (of the median)")
    print_table(
        ["", *names],
        [[f["name"], *(gigabytes_a_second(f["bytes"], f["done"][name]) for name in names)] for f in figures],
    )
    print(f"\n{title}: host time of the call on an idle device, µs, median (mean)")
    hosts = [[f["host"][name] for name in names] for f in figures]
    print_table(
        ["", *names],
        [
            [f["name"], *(f"{time.median:.0f} ({time.mean:.0f})" for time in times)]
            for f, times in zip(figures, hosts, strict=True)
        ],
    )


def as_plain(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For JSON: times by name, in µs."""
    return [
        {
            "name": f["name"],
            "bytes": f["bytes"],
            **{f"{kind}_us": {name: time._asdict() for name, time in f[kind].items()} for kind in ("done", "host")},
        }
        for f in figures
    ]


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bulk measures a GPU, and there is none here")
        return 2
    torch.cuda.set_stream(torch.cuda.Stream())
    pools = pools_of(args.pieces)
    blocks: list[dict[str, Any]] = [
        {"name": size_name(nbytes), "bytes": nbytes, **measure(uploads(nbytes, pools), args.rounds)}
        for nbytes in args.sizes
    ]
    print_rates("pageable blocks", blocks)
    rows: list[dict[str, Any]] = []
    for name in args.rows:
        nbytes, calls = row_uploads(name, pools)
        rows.append({"name": name, "bytes": nbytes, **measure(calls, args.rounds)})
        del calls
    print_rates("rows", rows)
    for pool in pools.values():
        pool.close()
    pinned: list[dict[str, Any]] = []
    for nbytes in args.pools:
        calls, freeing = pinnings(nbytes)
        times = interleaved(calls, args.rounds, synchronize=torch.cuda.synchronize, block=1, warmup=1)
        freed = {name: statistics.median(values) / 1e3 for name, values in freeing.items()}
        pinned.append({"bytes": nbytes, "pin_us": times, "free_us": freed})
    print("\nnew pools: median time to pin, ms (to give back)")
    names = ["reserve", "cuMemHostAlloc"]
    print_table(
        ["", *names, "ratio"],
        [
            [
                size_name(p["bytes"]),
                *(f"{p['pin_us'][name].median / 1e3:.2f} ({p['free_us'][name] / 1e3:.2f})" for name in names),
                f"{p['pin_us']['reserve'].median / p['pin_us']['cuMemHostAlloc'].median:.2f}",
            ]
            for p in pinned
        ],
    )
    for p in pinned:
        p["pin_us"] = {name: time._asdict() for name, time in p["pin_us"].items()}
    threads = pinstage._core.num_threads()
    write_json(
        args.json, "bulk", {"threads": threads, "blocks": as_plain(blocks), "rows": as_plain(rows), "pools": pinned}
    )
    return 0
