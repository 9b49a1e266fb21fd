# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The exception of bad input on the command line."""

from __future__ import annotations

from pathlib import Path


class UsageError(Exception):
    """Bad input. `main` prints the message, one line, and exits with status 2."""


def check_writable(path: Path) -> None:
    """Before the work that the file is for, rather than after it.

    Raises:
        UsageError: `path` cannot be written.
    """
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
