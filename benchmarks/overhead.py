# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Host time of one `copy_`, against what users write today and against the driver floor. Needs a GPU."""

from __future__ import annotations

import argparse
import ctypes
import shutil

import torch
from measure import SETTLED, Call, Host, compiled, interleaved, print_table, size_name, write_json

import pinstage

OPENMP_FROM = 32 << 10  # bytes from which torch copies on several threads
SIZES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=40, help="blocks of each variant and size (a quarter from 1 MB on)"
    )
    parser.add_argument("--block", type=int, default=64, help="calls of one variant before the next one's turn")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")


def floor(rows: list[torch.Tensor], dst: list[torch.Tensor], slots: list[torch.Tensor]) -> Call | None:
    """memcpy + cuMemcpyHtoDAsync + cuEventRecord from C++, or None without a compiler."""
    if shutil.which("g++") is None:
        return None
    entries = pinstage.cuda.resolve_entries()
    staged_copy = compiled("floor.cpp").staged_copy
    pointer = ctypes.c_void_p
    staged_copy.restype = ctypes.c_double
    staged_copy.argtypes = [pointer, pointer, ctypes.c_ulonglong, pointer, pointer, ctypes.c_size_t, pointer, pointer]
    copy, record = entries["cuMemcpyHtoDAsync"], entries["cuEventRecord"]
    events = [torch.cuda.Event() for _ in rows]
    stream = torch.cuda.current_stream().cuda_stream
    for event in events:
        event.record()
    nbytes = rows[0].numel()

    def call(i: int) -> float:
        k = i % len(rows)
        elapsed = staged_copy(
            copy,
            record,
            dst[k].data_ptr(),
            slots[k].data_ptr(),
            rows[k].data_ptr(),
            nbytes,
            stream,
            events[k].cuda_event,
        )
        if elapsed < 0:
            raise RuntimeError("the driver refused a copy of the floor")
        return elapsed

    return call


def variants(nbytes: int) -> dict[str, Call]:
    """Each copies row i of a table to its place on the device."""
    count = 16 if nbytes <= 1 << 20 else 4
    table = torch.randint(0, 255, (count, nbytes), dtype=torch.uint8)
    rows, pinned = list(table), list(table.pin_memory())
    dst = list(torch.empty((count, nbytes), dtype=torch.uint8, device="cuda"))
    persistent = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    event = torch.cuda.Event()
    event.record()

    def fresh(i: int) -> None:
        k = i % count
        staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        staged.copy_(rows[k])
        dst[k].copy_(staged, non_blocking=True)

    def event_wait(i: int) -> None:
        k = i % count
        event.synchronize()
        persistent.copy_(rows[k])
        dst[k].copy_(persistent, non_blocking=True)
        event.record()

    calls: dict[str, Call] = {
        "copy_": lambda i: pinstage.copy_(dst[i % count], rows[i % count]),
        "copy_ pinned src": lambda i: pinstage.copy_(dst[i % count], pinned[i % count]),
        "bare": lambda i: dst[i % count].copy_(pinned[i % count], non_blocking=True),
        "fresh pinned": fresh,
        "pin_memory()": lambda i: dst[i % count].copy_(rows[i % count].pin_memory(), non_blocking=True),
        "pageable": lambda i: dst[i % count].copy_(rows[i % count], non_blocking=True),
        "event wait": event_wait,
    }
    driver = floor(rows, dst, [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(count)])
    if driver is not None:
        calls["floor"] = driver
    return calls


def leases() -> dict[str, Call]:
    """A 4 KB lease through Python."""
    pool = pinstage.default_pool()
    stream = torch.cuda.current_stream()
    handle = stream.cuda_stream
    dst = torch.empty(4096, dtype=torch.uint8, device="cuda")

    def lease_retire(i: int) -> None:
        lease = pool.lease(4096, torch.uint8)
        lease.retire(handle)
        lease.close()

    def lease_tensor_retire(i: int) -> None:
        with pool.lease(4096, torch.uint8) as lease:
            lease.tensor  # noqa: B018
            lease.retire(handle)

    def lease_copy(i: int) -> None:
        with pool.lease(4096, torch.uint8) as lease:
            lease.tensor  # noqa: B018
            lease.copy_to(dst)

    return {
        "lease + retire": lease_retire,
        "lease + tensor + retire": lease_tensor_retire,
        "lease + copy_to": lease_copy,
    }


def spell(time: Host) -> str:
    return f"{time.median:.2f} ({time.mean:.2f})"


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("overhead measures a GPU, and there is none here")
        return 2
    torch.cuda.set_stream(torch.cuda.Stream())
    pool = pinstage.default_pool()
    pool.reserve(64 << 20)
    figures = []
    for nbytes in args.sizes:
        calls = variants(nbytes)
        interleaved(calls, 4, synchronize=torch.cuda.synchronize, block=args.block)
        before = pool.stats()
        rounds = args.rounds if nbytes < 1 << 20 else args.rounds // 4
        times = interleaved(
            calls,
            rounds,
            synchronize=torch.cuda.synchronize,
            block=args.block,
            settle=SETTLED if nbytes >= OPENMP_FROM else 0,
        )
        after = pool.stats()
        figures.append(
            {
                "bytes": nbytes,
                "us": times,
                "host_allocations": after.host_allocations - before.host_allocations,
                "events_created": after.events_created - before.events_created,
            }
        )
    lease_times = interleaved(leases(), args.rounds, synchronize=torch.cuda.synchronize, block=args.block)
    names = list(figures[0]["us"])
    print("median (mean) host time of one call, µs")
    print_table(["bytes", *names], [[size_name(f["bytes"]), *map(spell, f["us"].values())] for f in figures])
    print("\ncopy_ as a ratio of medians, and what the steady state allocated")
    ratios = [n for n in ("bare", "fresh pinned", "floor") if n in names]
    print_table(
        ["bytes", *(f"/ {n}" for n in ratios), "host allocations", "events created"],
        [
            [
                size_name(f["bytes"]),
                *(f"{f['us']['copy_'].median / f['us'][n].median:.2f}" for n in ratios),
                str(f["host_allocations"]),
                str(f["events_created"]),
            ]
            for f in figures
        ],
    )
    print("\na 4 KB lease through Python, µs")
    print_table(list(lease_times), [list(map(spell, lease_times.values()))])
    for figure in figures:
        figure["us"] = {name: time._asdict() for name, time in figure["us"].items()}
    leases_us = {name: time._asdict() for name, time in lease_times.items()}
    write_json(args.json, "overhead", {"sizes": figures, "leases": leases_us})
    return 0
