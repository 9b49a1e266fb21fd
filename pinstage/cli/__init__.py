# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The command line, `pinstage COMMAND`. Each command is a module of its own here.

Exit status: what the command says, 2 for bad input (one line on stderr), 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pinstage.cli import demo, doctor, run
from pinstage.cli.errors import UsageError

_EXTRA = "cli"  # holds what the commands import beyond pinstage's own dependencies
_EXTRA_MODULES = ("rich",)


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` of its result is the function to call."""
    parser = _Parser(prog="pinstage", description="Race-free staging for asynchronous host-to-device copies.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add_arguments(commands.add_parser("demo", help=demo.SUMMARY, description=demo.DESCRIPTION))
    doctor.add_arguments(commands.add_parser("doctor", help=doctor.SUMMARY, description=doctor.DESCRIPTION))
    run.add_arguments(commands.add_parser("run", help=run.SUMMARY, description=run.DESCRIPTION))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
        argv: the arguments; None takes them from `sys.argv`.
    """
    try:
        args = build_parser().parse_args(argv)
        status: int = args.command(args)
    except UsageError as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_MODULES:
            raise
        return _fail(f'{module} is not installed; pip install "pinstage[{_EXTRA}]"', 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    if args.command is run.prepare:
        run.execute(args)  # out here, because its errors are the program's own
    return status


def _fail(message: str, status: int) -> int:
    print(f"pinstage: {message}", file=sys.stderr)
    return status
