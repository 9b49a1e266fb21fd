# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""A decode engine whose host runs one step ahead of its device, and what that does to unguarded copies.

Continuous batching over a paged KV cache, with prefix reuse and preemption. The same requests are served without
overlap, which gives the tokens to expect, and with overlap in three ways: bare asynchronous copies from tensors that
are refilled at once, the same with an event wait, and pinstage. Exit status: 0; 1 if pinstage or the event wait gave
any request another token; 2 for bad input, and if the bare copies were right too often to prove anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from comparison import Verdict, exit_status, serve_all
from engine import Served, Shape

from pinstage.cli.backends import Backend, open_backend
from pinstage.cli.errors import UsageError

_TITLES = {"reference": "no overlap", "bare": "bare copies", "event_wait": "event wait", "pinstage": "pinstage"}


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python examples/engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=_positive, default=1000, metavar="N", help="steps of each mode (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and requests (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N or simulated (%(default)s)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="serve these requests, over and over: CSV with TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args(argv)


def _report(backend: Backend, served: dict[str, Served], verdicts: dict[str, Verdict]) -> None:
    expected = served["reference"]
    print(f"device     {backend.name} ({backend.reason})")
    served_requests = sum(map(bool, expected.answers))
    print(f"workload   {expected.tokens} tokens for {served_requests} requests in {expected.steps} steps")
    print(f"cache      {expected.reused_tokens} tokens reused, {expected.preempted} preemptions\n")
    print(f"{'mode':<12} {'wrong requests':>15} {'host µs a step':>15} {'of it upload':>13} {'tokens/s':>9}")
    for mode, each in served.items():
        verdict = f"{verdicts[mode].wrong} of {verdicts[mode].compared}" if mode in verdicts else "–"
        print(
            f"{_TITLES[mode]:<12} {verdict:>15} {each.host_us:>15.1f} {each.upload_us:>13.1f} "
            f"{each.tokens / each.seconds:>9.0f}"
        )
    status = exit_status(verdicts)
    if status == 1:
        print("\nFAILED: pinstage or the event wait gave a request other tokens. Neither may happen.")
    elif status == 2:
        print("\nPROVED NOTHING: the bare copies were right in every step, so these steps hardly raced.")
    if backend.simulated:
        print("\nThese times are of the simulation, whose kernels run on the host, not of a GPU.")


def _as_json(backend: Backend, served: dict[str, Served], verdicts: dict[str, Verdict]) -> dict[str, object]:
    return {
        "device": backend.name,
        "steps": served["reference"].steps,
        "modes": {
            mode: {
                **(verdicts[mode]._asdict() if mode in verdicts else {}),
                "tokens_per_second": each.tokens / each.seconds,
                "host_us_per_step": each.host_us,
                "upload_us_per_step": each.upload_us,
                "preempted": each.preempted,
                "reused_tokens": each.reused_tokens,
            }
            for mode, each in served.items()
        },
    }


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        if args.json is not None:
            args.json.open("a").close()  # now rather than after the run
        with open_backend(args.device) as backend:
            served, verdicts = serve_all(backend, Shape(), args.seed, args.steps, args.trace)
            _report(backend, served, verdicts)
            if args.json is not None:
                args.json.write_text(json.dumps(_as_json(backend, served, verdicts), indent=2) + "\n", encoding="utf-8")
    except (UsageError, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    return exit_status(verdicts)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a simulated device's kernels are too small to share
    sys.exit(main())
