"""
The compiled core of pinstage. Private: use the names of the pinstage package.
"""

from collections.abc import Callable
import enum
from typing import Any

import torch


class Schedule(enum.Enum):
    """When the steps of a simulated device run."""

    LATE = 0

    EAGER = 1

    RANDOM = 2

    MANUAL = 3

class SimulatedLatch:
    """A step that holds a simulated stream."""

    def release(self) -> None: ...

    @property
    def held(self) -> bool: ...

    @property
    def timed_out(self) -> bool: ...

class SimulatedGraph:
    """Captured steps of a simulated stream."""

class SimulatedDevice:
    """
    The core of pinstage.testing.SimulatedDevice. Methods return CUresult values.
    """

    def __init__(self, index: int, schedule: Schedule, seed: int, queue_depth: int = 1024, lying_queries: bool = False) -> None: ...

    def close(self) -> None: ...

    @property
    def closed(self) -> bool: ...

    @property
    def index(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def schedule(self) -> Schedule: ...

    @staticmethod
    def find(address: int) -> SimulatedDevice | None: ...

    @staticmethod
    def of_stream(stream: int) -> SimulatedDevice: ...

    @staticmethod
    def current() -> SimulatedDevice | None: ...

    @staticmethod
    def live() -> int: ...

    def make_current(self) -> None: ...

    def drop_current(self) -> None: ...

    def create_stream(self) -> tuple[int, int]: ...

    def destroy_stream(self, stream: int) -> int: ...

    @property
    def current_stream(self) -> int: ...

    @current_stream.setter
    def current_stream(self, arg: int, /) -> None: ...

    def launch(self, stream: int, kernel: Callable[[], object]) -> int: ...

    def hold(self, stream: int, timeout: float) -> tuple[int, SimulatedLatch]: ...

    def run(self, steps: int) -> int: ...

    def run_stream(self, steps: int, stream: int) -> int: ...

    def pending(self) -> int: ...

    def pending_stream(self, stream: int) -> int: ...

    def synchronize(self) -> int: ...

    def synchronize_stream(self, stream: int) -> int: ...

    def begin_capture(self, stream: int, mode: int) -> int: ...

    def end_capture(self, stream: int) -> tuple[int, SimulatedGraph]: ...

    def replay(self, graph: SimulatedGraph, stream: int) -> int: ...

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int, owner: object) -> int: ...

    def heap_alloc(self, nbytes: int) -> int: ...

    @staticmethod
    def heap_free(address: int) -> None: ...

    def fail(self, entry: str, nth: int, status: int, times: int) -> bool: ...

    def lose(self, status: int = 719, calls: int = 0) -> None: ...

    def take_kernel_error(self) -> BaseException | None: ...

    @property
    def sticky_status(self) -> int: ...

    @property
    def calls(self) -> dict[str, int]: ...

    @property
    def violations(self) -> int: ...

    @property
    def host_allocations(self) -> int: ...

def prepare_exit() -> None:
    """
    From here on, threads that come back from a wait stay away from the interpreter.
    """

def simulated_error(status: int) -> tuple[str, str]:
    """Name and text of a CUresult."""

def try_copy(dst: object, src: object, pool: object | None) -> bool: ...

def copy_builtin(general: Callable[..., Any]) -> Callable[..., Any]:
    """copy_ as a builtin, with `general` for what its fast path declines."""

def gather_rows_builtin(general: Callable[..., Any]) -> Callable[..., Any]:
    """gather_rows as a builtin, likewise."""

def try_copy_rows(dst: object, src: object, index: object, dim: int, pool: object | None) -> bool: ...

def try_copy_segments(dst: object, segments: object, pool: object | None) -> bool: ...

def try_gather(out: object, src: object, index: object, dim: int) -> bool: ...

def try_copy_batch(dsts: object | None, srcs: object | None, pool: object | None) -> int:
    """
    -1: all are under way. Else nothing happened, and this is the first pair that is not one for the fast path.
    """

def to_device_builtin(general: Callable[..., Any]) -> Callable[..., Any]:
    """
    to_device as a builtin, with `general` for all but lists of plain numbers.
    """

def driver_entries() -> list[tuple[str, int, bool]]:
    """
    (CUDA name, CUDA version, required) of every entry of the driver table.
    """

def lying_event_query() -> int:
    """
    Address of a cuEventQuery that always says done: the negative control of race tests.
    """

def set_num_threads(threads: int) -> None: ...

def num_threads() -> int: ...

def isa() -> str:
    """The instruction set of the gather kernels in use."""

def supported_isas() -> list[str]:
    """Those that this CPU can run, best first."""

def torch_access() -> str:
    """How tensors are read: "shims", "native" or "python", quickest first."""

def usable_cpus() -> int:
    """CPUs that this process may run on."""

class Ticket:
    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> None: ...

    def wait_on(self, stream: int, device: Device | None) -> None:
        """`device`: the stream's; None for the ticket's."""

class Device:
    @staticmethod
    def cuda(addresses: dict[str, int], context: int, index: int) -> Device: ...

    @staticmethod
    def simulated(device: object) -> Device: ...

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def poll_batch(self) -> int:
        """
        Fences that come together before a copy polls them: 1 reuses slots as early as can be. For tests.
        """

    @poll_batch.setter
    def poll_batch(self, arg: int, /) -> None: ...

    @property
    def numa_node(self) -> int | None:
        """
        Where its slabs of 8 MB and more shall lie; None where there is nothing to choose, or the system refused.
        """

    @numa_node.setter
    def numa_node(self, node: int | None) -> None: ...

    @property
    def refuses_scatter(self) -> bool:
        """
        Pieces of a slot travel by driver copies, not by a kernel: because the driver refused it, or, for tests and measurements, because this was set.
        """

    @refuses_scatter.setter
    def refuses_scatter(self, arg: bool, /) -> None: ...

    @property
    def usable(self) -> bool:
        """False after shutdown() and in a forked child."""

    @property
    def simulation(self) -> SimulatedDevice | None:
        """None for a GPU."""

    @property
    def current_stream(self) -> int: ...

    def require_not_capturing(self, stream: int) -> None: ...

    def fence(self, stream: int) -> Ticket: ...

    @property
    def default_pool(self) -> Any:
        """
        The StagingPool of copies without a pool of their own; None at first and once it was closed.
        """

    @default_pool.setter
    def default_pool(self, pool: Pool) -> None: ...

    def shutdown(self) -> None: ...

PIECES_IN_FLIGHT: int = 4

class Pool:
    def __init__(self, device: Device, initial_bytes: int, max_bytes: int, wait_when_full: bool, warn_on_wait: bool, pageable: bool) -> None: ...

    def _take(self, shape: tuple[int, ...], dtype: int, timeout: float | None, block: bool, owned: bool) -> Lease | None: ...

    def _reclaim(self, synchronize: bool) -> int: ...

    def _trim(self) -> int: ...

    def _reserve(self, nbytes: int) -> None: ...

    @property
    def _pageable(self) -> bool: ...

    def _close(self) -> None: ...

    def _piece_bytes(self, nbytes: int) -> int:
        """Bytes of the slots that a snapshot of `nbytes` goes through."""

    @property
    def _most_piece_bytes(self) -> int:
        """For tests and measurements."""

    @_most_piece_bytes.setter
    def _most_piece_bytes(self, arg: int, /) -> None: ...

    def _stats(self) -> tuple[Any, ...]: ...

    def _consistent(self) -> bool:
        """I1 and I2 hold. For tests."""

class Lease:
    def tensor(self) -> torch.Tensor: ...

    def device_view(self) -> torch.Tensor: ...

    def fill(self, src: object) -> None: ...

    def submit(self, dst: object) -> Ticket | None: ...

    def retire(self, stream: int) -> Ticket: ...

    def hand_over(self) -> bool: ...

    def cancel(self) -> None: ...

    def declared(self) -> bool: ...

    def is_open(self) -> bool: ...

    def wait_reusable(self, timeout: float | None) -> None: ...

class TakenRows:
    """Rows of a table on their way to the device."""

    @property
    def count(self) -> int: ...

    @property
    def runs(self) -> list[tuple[int, int]]:
        """
        (first, count) of the rows that one copy each brings; empty: scattered.
        """

    @property
    def fill_to(self) -> int:
        """Columns from the window's width up to this one are to be padded."""

    def settle(self) -> None:
        """They were sent. Else they are put back when this dies."""

    def put_back(self) -> None: ...

class Table:
    @staticmethod
    def make(host: object, mirror: object, outer: int, rows: int, planes: int, columns: int, tracking: int) -> Table: ...

    def mark(self, rows: object) -> None: ...

    def forget_padding(self) -> None: ...

    def take(self, rows: Any, plane: int, planes: int, width: int, pad: bool) -> TakenRows | None: ...

    def send(self, taken: TakenRows, stream: int, pool: Pool) -> Ticket | None: ...

    def send_packed(self, taken: TakenRows, begin: int, count: int, dst: object, stream: int, pool: Pool) -> None: ...

    def send_rows(self, dst: object, index: object, plane: int, planes: int, width: int, stream: int, pool: Pool) -> Ticket | None: ...

    @staticmethod
    def packed_index_bytes(count: int) -> int: ...

    @property
    def most_runs(self) -> int:
        """Runs of rows that get a copy each. For tests and measurements."""

    @most_runs.setter
    def most_runs(self, arg: int, /) -> None: ...

    @property
    def most_surplus_bytes(self) -> int:
        """
        Bytes that go along to make one copy of all. For tests and measurements.
        """

    @most_surplus_bytes.setter
    def most_surplus_bytes(self, arg: int, /) -> None: ...
