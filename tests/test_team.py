# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The worker team in the life of a process: forks, exits, settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pinstage

TESTS = Path(__file__).parent  # not the root, where the source folder would be imported
# One thread for torch itself, whose own pool does not survive a fork.
GATHER = """
import os, sys, torch, pinstage
torch.set_num_threads(1)
src, index = torch.arange(1 << 20).reshape(256, -1), torch.arange(255, -1, -1)
for _ in range(5):
    assert torch.equal(pinstage.gather_rows(src, index), src.flip(0))
"""


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=False, cwd=TESTS, env={**os.environ, **environment},
    )  # fmt: skip


def test_process_exits_cleanly_right_after_the_team_worked():
    done = run(GATHER)
    assert (done.returncode, done.stderr) == (0, "")


def test_forked_child_has_a_team_of_its_own():
    in_child = "\n    ".join(["", *GATHER.strip().splitlines(), "os._exit(0)"])
    child = f"pid = os.fork()\nif pid == 0:{in_child}\n"
    done = run(GATHER + child + "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("value", ["0", "-1", "many", "2x"])
def test_bad_number_of_threads_in_the_environment_shows_at_import(value):
    done = run("import pinstage", PINSTAGE_THREADS=value)
    assert done.returncode != 0
    assert "PINSTAGE_THREADS must be a number of threads" in done.stderr


def test_number_of_threads_cannot_be_negative():
    with pytest.raises(ValueError, match="negative"):
        pinstage.set_num_threads(-1)


FORK = """
import os, signal, sys, threading, torch, pinstage
from pinstage.testing import SimulatedDevice
dev = SimulatedDevice(schedule="eager")
pool = pinstage.StagingPool(dev, max_bytes=1 << 20)
dst, stop = dev.zeros(1024), threading.Event()
def copies():
    while not stop.is_set():
        pinstage.copy_(dst, torch.ones(1024), pool=pool)
threads = [threading.Thread(target=copies) for _ in range(2)]
for thread in threads:
    thread.start()
lease = pool.lease(64, torch.int32)
statuses = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        for call in (pool.stats, lambda: pool.lease(4, torch.int32), pool.reclaim, lease.close):
            try:
                call()
            except pinstage.ForkedError:
                pass
            else:
                os._exit(7)
        del lease
        pinstage._core.prepare_exit()
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
for thread in threads:
    thread.join()
lease.cancel()
assert statuses == [0] * 10, statuses
assert pool._consistent()
"""


def test_forked_child_is_told_and_does_not_hang():
    """Case 23: with threads of the parent in the middle of copies."""
    done = run(FORK)
    assert (done.returncode, done.stderr) == (0, "")
