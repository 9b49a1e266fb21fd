# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Pinned staging for asynchronous host-to-device copies in PyTorch.

An asynchronous copy reads its source when it executes, not when it is enqueued. pinstage keeps the source valid until
then, for less host time than the unguarded copy costs. Three contracts say who may write the source, and when:

    snapshot   copy_, copy_rows_, copy_batch_,     the caller, as soon as the call returns
               to_device, gather_rows, StagedTable
    handover   StagingPool.lease, DoubleBuffer     the caller, until the hand-over; then nobody until the fence passed
    borrow     keep_alive                          nobody until the ticket is done
"""

from __future__ import annotations

from pinstage.batch import copy_batch_
from pinstage.copy import copy_, copy_rows_
from pinstage.device_tensor import to_device
from pinstage.double_buffer import DoubleBuffer
from pinstage.errors import (
    CaptureError,
    DriverError,
    ForkedError,
    LeaseStateError,
    PinstageError,
    PoolExhausted,
    WaitTimeout,
)
from pinstage.gather import gather_rows, set_num_threads
from pinstage.pool import Lease, PoolStats, StagingPool, default_pool
from pinstage.switch import staged_copies
from pinstage.table import StagedTable
from pinstage.ticket import Ticket, keep_alive

__all__ = [
    "CaptureError",
    "DoubleBuffer",
    "DriverError",
    "ForkedError",
    "Lease",
    "LeaseStateError",
    "PinstageError",
    "PoolExhausted",
    "PoolStats",
    "StagedTable",
    "StagingPool",
    "Ticket",
    "WaitTimeout",
    "copy_",
    "copy_batch_",
    "copy_rows_",
    "default_pool",
    "gather_rows",
    "keep_alive",
    "set_num_threads",
    "staged_copies",
    "to_device",
]
