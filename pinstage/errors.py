# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""The exceptions that pinstage raises.

    PinstageError
    ├── PoolExhausted     (RuntimeError)  no room for a lease: too large, pool full, timeout
    ├── LeaseStateError   (RuntimeError)  used after hand-over, left undeclared, closed pool
    ├── CaptureError      (RuntimeError)  the stream is being captured into a CUDA graph
    ├── DriverError       (RuntimeError)  a driver call failed; `.status` holds its CUresult
    ├── ForkedError       (RuntimeError)  used in a forked child
    └── WaitTimeout       (TimeoutError)  a fence did not pass in time

Mistakes in arguments raise the built-in ValueError, IndexError and TypeError.
"""

from __future__ import annotations


class PinstageError(Exception):
    """Root of all errors that pinstage raises on its own account."""


class PoolExhausted(PinstageError, RuntimeError):
    """A staging pool has no room for a lease; the message holds the bytes of every state and the remedy."""


class LeaseStateError(PinstageError, RuntimeError):
    """A lease, buffer or pool was used in a state that does not allow it, for example after its hand-over."""


class CaptureError(PinstageError, RuntimeError):
    """A call would have enqueued work on a stream that is being captured. Nothing was enqueued."""


class DriverError(PinstageError, RuntimeError):
    """A call to the CUDA driver failed.

    Attributes:
        status: the CUresult, as an int.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ForkedError(PinstageError, RuntimeError):
    """A forked child used a device that its parent had set up; CUDA does not survive a fork."""


class WaitTimeout(PinstageError, TimeoutError):
    """A fence did not pass within the timeout."""
