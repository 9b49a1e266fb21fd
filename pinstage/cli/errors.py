# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The exception of bad input on the command line."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input. `main` prints the message, one line, and exits with status 2."""
