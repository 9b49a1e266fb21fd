# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""What it costs to learn that a fence has passed: with the stream idle behind it, with work queued, and in vain."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from contextlib import nullcontext

import torch
from measure import compiled, print_table, write_json

import pinstage
from pinstage.testing import latch

FENCES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=200)


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("event_query measures a GPU's driver, and there is none here")
        return 2
    library = compiled("event_query.cpp")
    entries = {name: ctypes.c_void_p(address) for name, address in pinstage.cuda.resolve_entries().items()}
    stream = torch.cuda.Stream()
    dst = torch.empty(256, dtype=torch.uint8, device="cuda")
    src = torch.empty(256, dtype=torch.uint8).pin_memory()
    events = [torch.cuda.Event() for _ in range(2 * FENCES)]
    for event in events:
        event.record(stream)
    handles = (ctypes.c_void_p * len(events))(*(event.cuda_event for event in events))
    late = ctypes.cast(
        ctypes.addressof(handles) + FENCES * ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)
    )

    def enqueue(which: object) -> None:
        library.enqueue(
            entries["cuMemcpyHtoDAsync"], entries["cuEventRecord"], ctypes.c_ulonglong(dst.data_ptr()),
            ctypes.c_void_p(src.data_ptr()), ctypes.c_void_p(stream.cuda_stream), which, FENCES,
        )  # fmt: skip

    def query(which: object) -> tuple[list[float], int]:
        times = (ctypes.c_double * FENCES)()
        busy = library.query(entries["cuEventQuery"], which, FENCES, times)
        return list(times), busy

    figures = {}
    for name in ("stream idle", "work queued", "not passed"):
        first, others = [], []
        for _ in range(args.rounds):
            torch.cuda.synchronize()
            enqueue(handles)
            time.sleep(200e-6)  # the copies run
            with nullcontext() if name == "stream idle" else latch(stream):
                if name != "stream idle":
                    enqueue(late)
                    time.sleep(100e-6)
                times, busy = query(late if name == "not passed" else handles)
                assert busy == (FENCES if name == "not passed" else 0), f"{busy} fences had not passed"
            first.append(times[0])
            others.extend(times[1:])
        figures[name] = {"youngest_ns": statistics.median(first), "older_ns": statistics.median(others)}
    print("median time of one cuEventQuery, ns; 16 fences, the youngest asked first")
    rows = [[name, f"{f['youngest_ns']:.0f}", f"{f['older_ns']:.0f}"] for name, f in figures.items()]
    print_table(["", "youngest", "older ones"], rows)
    write_json(args.json, "event_query", figures)
    return 0
