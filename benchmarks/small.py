# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Host time of many small uploads, of Python lists, and of strided and converting copies, against today's ways."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from bulk import to_completion
from measure import SETTLED, Call, Host, interleaved, print_table, size_name, without_kernel, write_json

import pinstage

KB = 1 << 10
SIZES = (1 * KB, 4 * KB, 16 * KB)
PAIRS = 16
LENGTHS = (1, 16, 64, 256, 1024, 4096)
# The metadata of a decoding step: lengths and offsets of each request, slots and positions of each token.
METADATA = [
    (dtype, nbytes)
    for nbytes in (1 * KB, 1 * KB, 2 * KB, 2 * KB, 4 * KB, 4 * KB, 4 * KB, 8 * KB, 8 * KB, 16 * KB, 16 * KB, 32 * KB,
                   32 * KB, 64 * KB)
    for dtype in (torch.int32, torch.int64)
]  # fmt: skip
TORCH_ALONE = 32768  # elements from which on torch copies on several threads, which then spin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each variant and case")
    parser.add_argument("--block", type=int, default=8, help="calls of one variant before the next one's turn")


# --- where the destinations lie ---------------------------------------------------------------------------------------


def apart(nbytes: int) -> list[torch.Tensor]:
    """Tensors of their own, at distances that follow no rule: no two can be one copy."""
    return [device_bytes(nbytes + 512 * (1 + i * i % 7))[:nbytes] for i in range(PAIRS)]


def allocated_in_turn(nbytes: int) -> list[torch.Tensor]:
    """As torch's allocator places them: often side by side."""
    return [device_bytes(nbytes) for _ in range(PAIRS)]


def rows(nbytes: int) -> list[torch.Tensor]:
    """Rows of one buffer that is wider than they are."""
    return list(device_bytes(PAIRS * 2 * nbytes).view(PAIRS, 2 * nbytes)[:, :nbytes])


LAYOUTS: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "apart": apart,
    "allocated in turn": allocated_in_turn,
    "rows": rows,
}


def device_bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


# --- what is timed ----------------------------------------------------------------------------------------------------


def batch_calls(dsts: list[torch.Tensor]) -> dict[str, Call]:
    """Each writes all of `dsts`."""
    srcs = [torch.randint(0, 100, dst.shape, dtype=dst.dtype) for dst in dsts]
    pinned = [src.pin_memory() for src in srcs]
    pairs, pinned_pairs = list(zip(dsts, srcs, strict=True)), list(zip(dsts, pinned, strict=True))

    def copy_loop(i: int) -> None:
        for dst, src in pairs:
            pinstage.copy_(dst, src)

    def bare_loop(i: int) -> None:
        for dst, src in pinned_pairs:
            dst.copy_(src, non_blocking=True)

    def fresh_loop(i: int) -> None:
        for dst, src in pairs:
            staged = torch.empty(src.shape, dtype=src.dtype, pin_memory=True)
            staged.copy_(src)
            dst.copy_(staged, non_blocking=True)

    def pageable_loop(i: int) -> None:
        for dst, src in pairs:
            dst.copy_(src, non_blocking=True)

    calls: dict[str, Call] = {
        "copy_batch_": lambda i: pinstage.copy_batch_(dsts, srcs),
        "without its kernel": without_kernel(lambda i: pinstage.copy_batch_(dsts, srcs)),
        "copy_ loop": copy_loop,
        "bare loop": bare_loop,
        "_foreach_copy_": lambda i: torch._foreach_copy_(dsts, pinned, non_blocking=True),
        "fresh pinned loop": fresh_loop,
        "pageable loop": pageable_loop,
    }
    for name, call in calls.items():
        for dst in dsts:
            dst.fill_(101)
        call(0)
        torch.cuda.synchronize()
        for dst, src in pairs:
            if not torch.equal(dst.cpu(), src):
                raise RuntimeError(f"{name} brought wrong bytes")
    return calls


def list_calls(data: list[Any], dtype: torch.dtype) -> dict[str, Call]:
    """Each brings the numbers of `data` to the device."""
    expected = torch.tensor(data, dtype=dtype)
    pinned, dst = expected.pin_memory(), expected.to("cuda")
    calls: dict[str, Call] = {
        "to_device": lambda i: pinstage.to_device(data, "cuda", dtype),
        "tensor(pin_memory).to": lambda i: torch.tensor(data, dtype=dtype, pin_memory=True).to(
            "cuda", non_blocking=True
        ),
        "tensor().to": lambda i: torch.tensor(data, dtype=dtype).to("cuda", non_blocking=True),
        "tensor(device=)": lambda i: torch.tensor(data, dtype=dtype, device="cuda"),
        "bare copy of a pinned tensor": lambda i: dst.copy_(pinned, non_blocking=True),
        "torch.empty alone": lambda i: torch.empty(expected.shape, dtype=dtype, device="cuda"),
    }
    for name, call in calls.items():
        made = call(0)
        torch.cuda.synchronize()
        if name != "torch.empty alone" and not (isinstance(made, torch.Tensor) and torch.equal(made.cpu(), expected)):
            raise RuntimeError(f"{name} brought wrong numbers")
    return calls


def other_calls(dst: torch.Tensor, pinned: torch.Tensor) -> dict[str, Call]:
    """Each copies what is not dense bytes of dst's dtype."""
    source = torch.empty_strided(pinned.shape, pinned.stride(), dtype=pinned.dtype).copy_(pinned)
    calls: dict[str, Call] = {
        "copy_": lambda i: pinstage.copy_(dst, source),
        "bare": lambda i: dst.copy_(pinned, non_blocking=True),
        "pageable": lambda i: dst.copy_(source, non_blocking=True),
    }
    for name, call in calls.items():
        dst.fill_(101)
        call(0)
        torch.cuda.synchronize()
        if not torch.equal(dst.cpu(), source.to(dst.dtype)):
            raise RuntimeError(f"{name} brought wrong numbers")
    return calls


def batch_cases() -> dict[str, list[torch.Tensor]]:
    cases = {
        f"{PAIRS} x {size_name(nbytes)}, {layout}": make(nbytes) for nbytes in SIZES for layout, make in LAYOUTS.items()
    }
    cases[f"{len(METADATA)} tensors of metadata"] = [
        torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cuda") for dtype, nbytes in METADATA
    ]
    return cases


def list_cases() -> dict[str, tuple[list[Any], torch.dtype]]:
    cases: dict[str, tuple[list[Any], torch.dtype]] = {
        f"{n} ints, int64": (list(range(n)), torch.int64) for n in LENGTHS
    }
    cases["64 ints, int32"] = (list(range(64)), torch.int32)
    cases["64 floats, float32"] = ([i / 7 for i in range(64)], torch.float32)
    cases["3 x 64 ints, int32"] = ([list(range(64)) for _ in range(3)], torch.int32)
    return cases


def other_cases() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(dst, pinned source)."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return (
            torch.arange(100)
            .repeat(-(-torch.Size(shape).numel() // 100))[: torch.Size(shape).numel()]
            .to(dtype)
            .reshape(shape)
        )

    def device(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    planes = numbers(1, 1024, 2, 1024).pin_memory()
    return {
        "plane [:, :, 0] of 4 MB": (device(1, 1024, 2, 1024)[:, :, 0], planes[:, :, 0]),
        "transposed, 64 KB": (device(128, 128), numbers(128, 128).pin_memory().t()),
        "8192 int32 to int64": (device(8192, dtype=torch.int64), numbers(8192).pin_memory()),
        "8192 int64 to int32": (device(8192), numbers(8192, dtype=torch.int64).pin_memory()),
        "8192 float32 to bfloat16": (
            device(8192, dtype=torch.bfloat16),
            numbers(8192, dtype=torch.float32).pin_memory(),
        ),
    }


# --- the report -------------------------------------------------------------------------------------------------------


def measure(calls: dict[str, Call], args: argparse.Namespace, settle: float = 0.0) -> dict[str, Host]:
    interleaved(calls, 4, synchronize=torch.cuda.synchronize, block=args.block)
    before = pinstage.default_pool().stats()
    times = interleaved(calls, args.rounds, synchronize=torch.cuda.synchronize, block=args.block, settle=settle)
    after = pinstage.default_pool().stats()
    if (after.host_allocations, after.events_created) != (before.host_allocations, before.events_created):
        print("the steady state pinned memory or made events")
    return times


def kernel_or_copies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`copy_batch_` to tensors apart, by one kernel and by driver copies: where either is worth it."""
    figures, cells = [], []
    for count in (3, 4, 8, 16, 32, 64):
        for nbytes in (256, 4 * KB, 15 * KB):
            dsts = [device_bytes(nbytes + 512 * (1 + i * i % 7))[:nbytes] for i in range(count)]
            srcs = [torch.ones(nbytes, dtype=torch.uint8) for _ in dsts]

            def batch(i: int, dsts: list[torch.Tensor] = dsts, srcs: list[torch.Tensor] = srcs) -> None:
                pinstage.copy_batch_(dsts, srcs)

            ways: dict[str, Call] = {"kernel": batch, "driver copies": without_kernel(batch)}
            host = measure(ways, args)
            done = measure({name: to_completion(way) for name, way in ways.items()}, args)
            cells.append(
                [f"{count} x {size_name(nbytes)}", *(f"{host[n].median:.2f} ({done[n].median:.2f})" for n in ways)]
            )
            figures.append(
                {
                    "copies": count,
                    "bytes": nbytes,
                    "host_us": {n: t._asdict() for n, t in host.items()},
                    "done_us": {n: t._asdict() for n, t in done.items()},
                }
            )
    print("\ncopy_batch_ by one kernel and by driver copies: host time (until done), µs")
    print_table(["", "kernel", "driver copies"], cells)
    return figures


def report(title: str, figures: dict[str, dict[str, Host]]) -> None:
    names = list(next(iter(figures.values())))
    print(f"\n{title}: median host time, µs")
    print_table(["", *names], [[case, *(f"{t.median:.2f}" for t in times.values())] for case, times in figures.items()])
    print(f"\n{names[0]} as a ratio of medians")
    print_table(
        ["", *(f"/ {name}" for name in names[1:])],
        [
            [case, *(f"{times[names[0]].median / times[name].median:.2f}" for name in names[1:])]
            for case, times in figures.items()
        ],
    )


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("small measures a GPU, and there is none here")
        return 2
    torch.cuda.set_stream(torch.cuda.Stream())
    pinstage.default_pool().reserve(64 << 20)
    batches = {case: measure(batch_calls(dsts), args) for case, dsts in batch_cases().items()}
    lists = {case: measure(list_calls(*data), args) for case, data in list_cases().items()}
    others = {
        case: measure(other_calls(*pair), args, SETTLED if pair[0].numel() >= TORCH_ALONE else 0.0)
        for case, pair in other_cases().items()
    }
    report("many small copies", batches)
    report("Python lists", lists)
    report("strided and converting copies", others)
    figures: dict[str, Any] = {
        kind: {case: {name: time._asdict() for name, time in times.items()} for case, times in cases.items()}
        for kind, cases in (("batches", batches), ("lists", lists), ("others", others))
    }
    figures["kernel_or_copies"] = kernel_or_copies(args)
    write_json(args.json, "small", figures)
    return 0
