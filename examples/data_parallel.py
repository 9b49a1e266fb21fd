# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Ranks that stage their own tables, each to its own device, while their gradients are reduced.

Run it with `torchrun --nproc-per-node 2 examples/data_parallel.py`. In each step a rank's host writes its tables anew,
sends them, and goes on; a kernel compares every element that arrived with what this rank wrote in this step; and the
gradients of all ranks are summed on another stream. The same steps are run with bare asynchronous copies from pinned
tables first, and then with pinstage. With a GPU for each rank the sums go through NCCL, else through gloo and each rank
has a simulated device.

Exit status: 0; 1 if pinstage brought a wrong element, a sum was wrong, or a rank touched another rank's device; 2 for
bad input, and if the bare copies were right on any rank, for then nothing was proved.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

import pinstage
from pinstage.budget import default_max_bytes
from pinstage.cli.backends import Backend, CudaBackend, SimulatedBackend
from pinstage.testing import SimulatedDevice

# A step's tables, as an engine has them: a block table, and what is small. Shapes and dtypes.
TABLES = (((256, 128), torch.int32), ((257,), torch.int32), ((1024,), torch.int64), ((4, 256), torch.float32))
GRADIENT = 1 << 20  # elements


class Outcome(NamedTuple):
    """What one rank found."""

    device: str
    numa_node: int | None
    max_bytes: int
    elements: int  # that were compared, in each mode
    bare: int  # of them wrong
    staged: int
    sums: int  # wrong elements of reduced gradients
    strangers: list[int]  # devices of other ranks that this process touched


class Ranks(NamedTuple):
    """Which of the job's processes this is, and of the node's."""

    rank: int
    local: int
    world: int
    local_world: int


# --- one rank ---------------------------------------------------------------------------------------------------------


class Tables:
    """A step's tables on both sides, and a count of what arrived wrong.

    Args:
        backend: the rank's device.
        staged: whether pinstage sends them from ordinary tensors, or bare copies from pinned ones.
    """

    def __init__(self, backend: Backend, staged: bool) -> None:
        self._backend, self._staged = backend, staged
        make = torch.empty if staged else backend.pinned_tensor
        self._host = [make(shape, dtype=dtype) for shape, dtype in TABLES]
        self._device = [backend.device_tensor(shape, dtype) for shape, dtype in TABLES]
        self._counting = [torch.arange(table.numel()).view(table.shape).to(table.dtype) for table in self._host]
        self._expected = [torch.empty_like(mirror) for mirror in self._device]
        self._wrong = backend.device_tensor((), torch.int64)
        for expected, counting in zip((*self._expected, self._wrong), (*self._counting, torch.tensor(0)), strict=True):
            expected.copy_(counting)
        backend.synchronize()

    def write(self, number: int) -> None:
        """Fills the host's tables: no element is the same for two numbers."""
        for table, counting in zip(self._host, self._counting, strict=True):
            torch.add(counting, number, out=table)

    def send(self) -> None:
        if self._staged:
            pinstage.copy_batch_(self._device, self._host)
        else:
            for mirror, table in zip(self._device, self._host, strict=True):
                self._backend.bare_copy(mirror, table)

    def compare(self, number: int) -> None:
        """Enqueues a kernel that counts the elements on the device which are not those of `number`."""

        def kernel() -> None:
            for mirror, expected in zip(self._device, self._expected, strict=True):
                self._wrong.add_((mirror != expected + number).sum())

        self._backend.launch(kernel)

    def wrong(self) -> int:
        self._backend.synchronize()
        return int(self._wrong)


class Gradients:
    """Summed over all ranks in each step, on a stream of their own where there is a GPU."""

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        device = torch.device("cpu") if backend.simulated else backend.device
        self._stream = None if backend.simulated else torch.cuda.Stream(device)
        self._rank, self._world = ranks.rank, ranks.world
        self._gradient = torch.empty(GRADIENT, device=device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)
        backend.synchronize()

    def reduce(self, step: int) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._gradient.fill_(self._rank + step)
            dist.all_reduce(self._gradient)
            self._wrong += (self._gradient != self._world * (self._world - 1) // 2 + self._world * step).sum()

    def wrong(self) -> int:
        if self._stream is not None:
            self._stream.synchronize()
        return int(self._wrong)


def run_steps(backend: Backend, ranks: Ranks, steps: int, staged: bool) -> tuple[int, int]:
    """Returns wrong elements of tables, and of sums."""
    tables, gradients = Tables(backend, staged), Gradients(backend, ranks)
    with backend.own_stream():
        for step in range(steps):
            number = step * ranks.world + ranks.rank
            tables.write(number)
            backend.enqueue_layers()
            tables.send()  # on the next turn the tables are written again, whatever has become of the copies
            tables.compare(number)
            gradients.reduce(step)
        return tables.wrong(), gradients.wrong()


def run_rank(backend: Backend, ranks: Ranks, steps: int, strangers: Callable[[], list[int]]) -> Outcome:
    bare, bare_sums = run_steps(backend, ranks, steps, staged=False)
    staged, sums = run_steps(backend, ranks, steps, staged=True)
    core = pinstage.default_pool(backend.device).device
    elements = steps * sum(torch.Size(shape).numel() for shape, _ in TABLES)
    limit = default_max_bytes()
    return Outcome(core.name, core.numa_node, limit, elements, bare, staged, bare_sums + sums, strangers())


# --- devices ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_device(ranks: Ranks, simulated: bool) -> Iterator[tuple[Backend, Callable[[], list[int]]]]:
    """This rank's device, and a function that tells which of the other ranks' devices this process has touched."""
    others = [index for index in range(ranks.local_world) if index != ranks.local]
    if not simulated:
        torch.cuda.set_device(ranks.local)
        backend = CudaBackend(ranks.local, "one for each rank")
        backend.set_layers(1.0)
        yield backend, lambda: [index for index in others if has_context(index)]
        return
    with ExitStack() as stack:
        devices = [stack.enter_context(SimulatedDevice(index)) for index in range(ranks.local_world)]
        devices[ranks.local].make_current()
        yield (
            SimulatedBackend(devices[ranks.local], "fewer GPUs than ranks"),
            lambda: [index for index in others if any(devices[index].calls.values())],
        )


def has_context(index: int) -> bool:
    """Whether this process has made a CUDA context on a GPU, which takes hundreds of megabytes there."""
    from cuda.bindings import driver

    status, handle = driver.cuDeviceGet(index)
    if int(status) == 0:
        status, _, active = driver.cuDevicePrimaryCtxGetState(handle)
    if int(status) != 0:
        raise RuntimeError(f"whether cuda:{index} has a context is not told: {status!r}")
    return bool(active)


# --- the command ------------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _report(outcomes: list[Outcome], simulated: bool) -> None:
    elements = outcomes[0].elements
    print(f"{elements} elements a rank and mode, compared on the device; {'gloo' if simulated else 'NCCL'}\n")
    print(f"{'rank':<5} {'device':<12} {'NUMA':>4} {'pool limit':>12} {'bare: wrong':>12} {'pinstage: wrong':>16} "
          f"{'wrong sums':>11} {'others touched':>15}")  # fmt: skip
    for rank, each in enumerate(outcomes):
        node = "–" if each.numa_node is None else each.numa_node
        print(f"{rank:<5} {each.device:<12} {node:>4} {each.max_bytes:>12} {each.bare:>12} {each.staged:>16} "
              f"{each.sums:>11} {len(each.strangers):>15}")  # fmt: skip
    if _status(outcomes) == 1:
        print("\nFAILED: pinstage brought wrong elements, a sum is wrong, or a rank touched another's device.")
    elif _status(outcomes) == 2:
        print("\nPROVED NOTHING: the bare copies were right on some rank, so these steps hardly raced.")


def _status(outcomes: list[Outcome]) -> int:
    if any(each.staged or each.sums or each.strangers for each in outcomes):
        return 1
    return 0 if all(each.bare for each in outcomes) else 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=_positive, default=200, metavar="N", help="steps of each mode (%(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "simulated"), default="auto")
    args = parser.parse_args(argv)
    try:
        ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))
    except KeyError:
        parser.error("start it with torchrun --nproc-per-node 2 examples/data_parallel.py")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cuda" and gpus < ranks.local_world:
        parser.error(f"{ranks.local_world} local ranks need as many GPUs; torch sees {gpus}. Use --device simulated")
    simulated = args.device == "simulated" or gpus < ranks.local_world
    with open_device(ranks, simulated) as (backend, strangers):
        if simulated:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("nccl", device_id=backend.device)
        outcomes: list[Outcome | None] = [None] * ranks.world
        dist.all_gather_object(outcomes, run_rank(backend, ranks, args.steps, strangers))
        dist.destroy_process_group()
    told = [each for each in outcomes if each is not None]
    if ranks.rank == 0:
        _report(told, simulated)
    return _status(told)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a simulated device's kernels are too small to share
    sys.exit(main())
