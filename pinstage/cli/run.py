# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""`pinstage run`: a Python program as it is, with its asynchronous copies staged or not."""

from __future__ import annotations

import argparse
import atexit
import runpy
import sys
from pathlib import Path

from pinstage.cli.errors import UsageError
from pinstage.switch import staged_copies

SUMMARY = "run a program with its asynchronous copies staged: does its corruption go away?"
DESCRIPTION = (
    "Runs a Python script (or, with -m, a module) as python does, with the same arguments and exit status. With "
    "--staged, every asynchronous host-to-device copy of the program goes through pinstage until the process ends, as "
    "by pinstage.staged_copies(), and the last line on stderr says how many did. Processes that it spawns are not "
    "affected."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments and its function."""
    parser.add_argument("--staged", action="store_true", help="stage the program's asynchronous copies")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM names a module, as of python -m")
    parser.add_argument("program", metavar="PROGRAM", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments")
    parser.set_defaults(command=prepare)


def prepare(args: argparse.Namespace) -> int:
    """Makes everything ready for `execute`: the arguments, the import path and the switch.

    Raises:
        UsageError: there is no such script.
    """
    if not args.module and not Path(args.program).exists():
        raise UsageError(f"there is no {args.program!r}")
    sys.argv = [args.program, *args.arguments]
    # The folder that python puts first: the script's, or with -m the current one.
    sys.path[0] = str(Path.cwd()) if args.module else str(Path(args.program).resolve().parent)
    if args.staged:
        _stage_until_exit()
    return 0


def execute(args: argparse.Namespace) -> None:
    """Runs the program to its end; what it raises, SystemExit included, goes through."""
    if args.module:
        runpy.run_module(args.program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args.program, run_name="__main__")


def _stage_until_exit() -> None:
    # To the very end, because threads and exit handlers of the program copy after its last line.
    block = staged_copies()
    count = block.__enter__()

    @atexit.register
    def report() -> None:
        print(f"pinstage: {count.copies} copies of {count.nbytes} bytes were staged", file=sys.stderr, flush=True)
        block.__exit__(None, None, None)
