# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`staged_copies` and `pinstage run --staged`: asynchronous copies of code that knows nothing of pinstage."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage import switch
from pinstage.cli import main

TESTS = Path(__file__).parent
FLOAT = torch.float32
METHODS = ("copy_", "to", "cuda")


def methods():
    """What torch.Tensor has for the methods that the switch replaces."""
    return [(name, getattr(torch.Tensor, name), name in vars(torch.Tensor)) for name in METHODS]


@pytest.fixture(autouse=True)
def restored():
    """Every test leaves torch as it found it."""
    before = methods()
    yield
    assert methods() == before
    assert switch._blocks == 0


@pytest.fixture
def engine(rig):
    """Code that cannot be edited: an upload of a persistent table that is refilled at once."""
    table = rig.pinned(1024, torch.int32)

    def upload(dst, value, **options):
        table.fill_(value)
        dst.copy_(table, **(options or {"non_blocking": True}))
        table.fill_(-1)

    return upload


# --- the race ---------------------------------------------------------------------------------------------------------


@pytest.mark.raced
@pytest.mark.parametrize("options", [{"non_blocking": True}, {"non_blocking": 1}])
def test_copies_of_other_code_are_snapshots(rig, engine, options):
    """Case 1, in code that calls torch."""
    dsts = [rig.filled(1024, torch.int32, 0) for _ in range(3)]
    with rig.stream(), rig.gate(), pinstage.staged_copies() as staged:
        for step, dst in enumerate(dsts):
            engine(dst, step, **options)
    assert (staged.copies, staged.nbytes) == (3, 3 * 4096)
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)


@pytest.mark.gpu
def test_the_same_code_races_without_the_switch():
    """The control of the tests here that run on a GPU. (Simulated tensors are written by torch at once.)"""
    table = torch.empty(1024, dtype=torch.int32, pin_memory=True).fill_(1)
    dst = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with pinstage.testing.latch(torch.cuda.current_stream()):
        dst.copy_(table, non_blocking=True)
        table.fill_(2)
    torch.cuda.synchronize()
    assert dst.unique().tolist() == [2]


@pytest.mark.raced
def test_other_threads_are_covered(rig, engine):
    dsts = [rig.filled(1024, torch.int32, 0) for _ in range(3)]
    with rig.stream() as stream:

        def worker():
            rig.make_current()
            with rig.stream(stream):
                for step, dst in enumerate(dsts):
                    engine(dst, step)

        with rig.gate(stream), pinstage.staged_copies() as staged:
            thread = threading.Thread(target=worker)
            thread.start()
            thread.join()
    assert staged.copies == 3
    for step, dst in enumerate(dsts):
        rig.expect(dst, step)


@pytest.mark.both
@pytest.mark.parametrize("how", ["positional", "keyword", "cast", "strided", "broadcast", "nothing", "number"])
def test_results_are_torchs(rig, how):
    source, dst, twin = torch.arange(24.0).reshape(4, 6), rig.filled((4, 6), FLOAT, 0), torch.zeros(4, 6)
    call = {
        "positional": lambda d: d.copy_(source, True),
        "keyword": lambda d: d.copy_(non_blocking=True, src=source) if d is dst else d.copy_(source),
        "cast": lambda d: d.copy_(source.to(torch.int16), non_blocking=True),
        "strided": lambda d: d.t().copy_(source.t(), non_blocking=True),
        "broadcast": lambda d: d.copy_(source[1], non_blocking=True),
        "nothing": lambda d: d[:0].copy_(source[:0], non_blocking=True),
        "number": lambda d: d.copy_(3.5, non_blocking=True),
    }[how]
    if how == "keyword":
        with pytest.raises(TypeError):  # torch names it `other`
            call(dst)
        return
    with pinstage.staged_copies():
        result = call(dst)
    assert result.shape == call(twin).shape
    rig.expect(dst, twin)


@pytest.mark.both
def test_errors_are_torchs(rig):
    dst = rig.filled((4, 6), FLOAT, 7)
    with pinstage.staged_copies() as staged:
        with pytest.raises(RuntimeError, match="must match the size"):
            dst.copy_(torch.zeros(5), non_blocking=True)
        with pytest.raises(TypeError):
            dst.copy_([1.0], non_blocking=True)
        with pytest.raises(TypeError):
            dst.copy_()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            rig.filled(4, FLOAT, 0).requires_grad_().copy_(torch.zeros(4), non_blocking=True)
    assert staged.copies == 0
    rig.expect(dst, 7)


@pytest.mark.both
def test_gradients_flow_through_a_copy(rig):
    source, dst = torch.ones(4, requires_grad=True), rig.filled(4, FLOAT, 0)
    with pinstage.staged_copies():
        dst.copy_(source, non_blocking=True)
        dst.sum().backward()
    assert source.grad.tolist() == [1] * 4


@pytest.mark.both
def test_other_copies_are_left_alone(rig):
    host, dst = torch.arange(4.0), rig.filled(4, FLOAT, 5)
    with pinstage.staged_copies() as staged:
        torch.empty(4).copy_(host, non_blocking=True)
        dst.copy_(host)
        rig.synchronize()
        host.copy_(dst)
        assert host.to(torch.int64, non_blocking=True).tolist() == [0, 1, 2, 3]
        assert host.to("cpu", non_blocking=True) is host
        assert host.to(host, non_blocking=True) is host
        assert host.to(torch.device("meta"), non_blocking=True).is_meta
        assert host.to(device="cpu", dtype=torch.float64, non_blocking=True, copy=True).dtype == torch.float64
        assert host.to(memory_format=torch.contiguous_format) is host
    assert staged.copies == 0


@pytest.mark.both
def test_copy_larger_than_the_pool_is_waited_for(rig, monkeypatch):
    monkeypatch.setenv("PINSTAGE_MAX_BYTES", str(1 << 20))
    source, dst = rig.pinned(1 << 20, torch.int32).fill_(1), rig.filled(1 << 20, torch.int32, 0)
    pinstage.default_pool(rig.device).close()
    with pinstage.staged_copies() as staged:
        dst.copy_(source, non_blocking=True)
        source.fill_(2)
    assert staged.copies == 1
    rig.expect(dst, 1)
    pinstage.default_pool(rig.device).close()


@pytest.mark.both
def test_captured_copy_is_torchs_and_warned_of_once(rig, monkeypatch):
    monkeypatch.setattr(switch, "_warned_of_capture", False)
    source, dst = rig.pinned(16, torch.int32).fill_(1), rig.filled(16, torch.int32, 0)
    before = pinstage.default_pool(rig.device).stats()
    with pinstage.staged_copies() as staged:
        with rig.capture() as graph:
            with pytest.warns(RuntimeWarning, match="captured into a CUDA graph") as warned:
                dst.copy_(source, non_blocking=True)
            dst.copy_(source, non_blocking=True)
        assert Path(warned[0].filename) == Path(__file__)
    assert staged.copies == 0
    assert pinstage.default_pool(rig.device).stats() == before
    if not rig.simulated:  # torch captures nothing on a simulated device
        source.fill_(2)
        graph.replay()
        rig.expect(dst, 2)


# --- Tensor.to and Tensor.cuda ----------------------------------------------------------------------------------------

SOURCES = {
    "contiguous": lambda: torch.arange(24.0).reshape(4, 6),
    "transposed": lambda: torch.arange(24.0).reshape(6, 4).t(),
    "strided": lambda: torch.arange(48.0).reshape(4, 12)[:, ::2],
    "expanded": lambda: torch.arange(6.0).expand(4, 6),
    "no elements": lambda: torch.empty(4, 0),
    "scalar": lambda: torch.tensor(2.5),
    "channels last": lambda: torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.arange(4.0).to(torch.complex64).mul(1j).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "gradient": lambda: torch.arange(4.0, requires_grad=True),
    "sparse": lambda: torch.arange(4.0).to_sparse(),
}
MOVES = {
    "device": lambda t: t.to("cuda", non_blocking=True),
    "index": lambda t: t.to(0, non_blocking=True),
    "device keyword": lambda t: t.to(device=torch.device("cuda", 0), non_blocking=True),
    "device and dtype": lambda t: t.to("cuda", torch.complex128, True),
    "copy": lambda t: t.to("cuda", torch.complex64, True, True),
    "dtype keyword": lambda t: t.to("cuda", non_blocking=True, dtype=torch.complex64, copy=True),
    "other": lambda t: t.to(torch.empty(0, device="cuda", dtype=torch.complex128), non_blocking=True),
    "other keyword": lambda t: t.to(tensor=torch.empty(0, device="cuda", dtype=torch.complex128), non_blocking=True),
    "format": lambda t: t.to("cuda", non_blocking=True, memory_format=torch.contiguous_format),
    "cuda": lambda t: t.cuda(non_blocking=True),
    "cuda index": lambda t: t.cuda(0, True),
    "pinned": lambda t: (t if t.is_sparse else t.pin_memory()).to("cuda", non_blocking=True),
    "without grad": torch.no_grad()(lambda t: t.to("cuda", non_blocking=True)),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("source", SOURCES)
def test_moved_tensor_is_the_one_that_torch_makes(source, move):
    try:
        expected = MOVES[move](SOURCES[source]())
    except RuntimeError as error:  # memory formats are for dense tensors, and some releases pin no expanded ones
        with pinstage.staged_copies(), pytest.raises(RuntimeError, match=re.escape(str(error))):
            MOVES[move](SOURCES[source]())
        return
    with pinstage.staged_copies() as staged:
        actual = MOVES[move](SOURCES[source]())
    assert staged.copies == 1
    for fact in ("device", "dtype", "shape", "layout", "requires_grad", "is_leaf"):
        assert getattr(actual, fact) == getattr(expected, fact), fact
    assert (type(actual), actual.is_conj()) == (type(expected), expected.is_conj())
    assert actual.is_sparse or actual.stride() == expected.stride()
    assert torch.equal(actual.to_dense() if actual.is_sparse else actual,
                       expected.to_dense() if expected.is_sparse else expected)  # fmt: skip


@pytest.mark.gpu
def test_moved_tensors_are_snapshots():
    """Case 1."""
    table = torch.empty(1024, dtype=torch.int32, pin_memory=True)
    torch.zeros(1024, dtype=torch.int32, device="cuda")  # torch's allocator has the memory
    with pinstage.testing.latch(torch.cuda.current_stream()), pinstage.staged_copies():
        moved = [table.fill_(1).to("cuda", non_blocking=True), table.fill_(2).cuda(non_blocking=True)]
        table.fill_(3)
    torch.cuda.synchronize()
    assert [tensor.unique().tolist() for tensor in moved] == [[1], [2]]


@pytest.mark.gpu
def test_module_is_moved():
    module = torch.nn.Linear(3, 2)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    with pinstage.staged_copies() as staged:
        module.to("cuda", non_blocking=True)
    assert staged.copies == 2
    assert all(parameter.requires_grad and parameter.is_cuda for parameter in module.parameters())
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in module.state_dict().items())


@pytest.fixture
def simulated_cuda(dev, monkeypatch):
    """`.to("cuda")` allocates on a simulated device, once the switch has read its arguments."""
    asked = []

    def allocate(src, values):
        asked.append(values)
        return dev.empty(src.shape, values.get("dtype") or src.dtype)

    monkeypatch.setattr(switch, "_allocate", allocate)
    return asked


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.to("cuda", non_blocking=True),
        lambda t: t.to(torch.device("cuda", 0), torch.float64, True),
        lambda t: t.to("cuda", torch.float64, True, True),
        lambda t: t.to(device="cuda", dtype=torch.float64, non_blocking=True, copy=True),
        lambda t: t.cuda(non_blocking=True),
        lambda t: t.cuda(0, True),
        lambda t: t.cuda(device=0, non_blocking=True),
    ],
)
def test_every_form_of_a_move_is_a_snapshot(dev, simulated_cuda, call):
    source = torch.ones(8)
    with pinstage.staged_copies() as staged:
        moved = call(source)
        source.fill_(2)
    dev.synchronize()
    assert moved.tolist() == [1] * 8
    assert staged.copies == 1
    assert moved.dtype == (simulated_cuda[0].get("dtype") or FLOAT)


def test_what_autograd_or_a_subclass_must_see_is_moved_by_torch_and_waited_for(simulated_cuda):
    calls = []

    def original(tensor, **values):
        calls.append(values)
        return torch.zeros(2)

    class Tagged(torch.Tensor):
        pass

    with pinstage.staged_copies():
        for source in (torch.ones(2, requires_grad=True), torch.ones(2).as_subclass(Tagged), torch.ones(2).to_sparse(),
                       torch.ones(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))):  # fmt: skip
            switch._to(original, source, "cuda", torch.float64, True)
    assert calls == [{"device": "cuda", "dtype": torch.float64, "non_blocking": False}] * 5
    assert simulated_cuda == []


def test_parameters_are_staged_where_no_gradient_is_recorded(dev, simulated_cuda):
    parameter = torch.nn.Parameter(torch.ones(4))
    with pinstage.staged_copies(), torch.no_grad():
        moved = parameter.to("cuda", non_blocking=True)
    parameter.data.fill_(2)
    dev.synchronize()
    assert (type(moved), moved.tolist()) == (torch.Tensor, [1] * 4)


# --- on and off -------------------------------------------------------------------------------------------------------


def is_on():
    return [name in vars(torch.Tensor) for name in METHODS] == [True] * 3


def test_blocks_nest_and_end_by_errors_too():
    with pinstage.staged_copies():
        with pytest.raises(ZeroDivisionError), pinstage.staged_copies():
            raise ZeroDivisionError
        assert is_on()
    assert not is_on()


def test_blocks_of_several_threads_may_end_in_any_order():
    first, second = pinstage.staged_copies(), pinstage.staged_copies()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert is_on()
    second.__exit__(None, None, None)
    assert not is_on()


def test_many_threads_enter_and_leave():
    barrier = threading.Barrier(4)
    seen = []

    def work():
        barrier.wait()
        for _ in range(200):
            with pinstage.staged_copies():
                seen.append(is_on())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 800


def test_count_stops_with_its_block(dev):
    dst, source = dev.zeros(4), torch.ones(4)
    with pinstage.staged_copies() as outer:
        with pinstage.staged_copies() as inner:
            dst.copy_(source, non_blocking=True)
        dst.copy_(source, non_blocking=True)
    assert (inner.copies, outer.copies) == (1, 2)
    assert repr(inner) == "<1 staged copies of 16 bytes>"


def test_replacement_by_somebody_else_is_left_alone(dev, monkeypatch):
    dst, source, seen = dev.zeros(4), torch.ones(4), []
    block = pinstage.staged_copies()
    block.__enter__()
    ours = torch.Tensor.copy_

    def theirs(tensor, *args, **kwargs):
        seen.append("copy_")
        return ours(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", theirs)
    dst.copy_(source, non_blocking=True)
    block.__exit__(None, None, None)
    assert torch.Tensor.copy_ is theirs
    before = pinstage.default_pool(dev).stats().copies
    dst.copy_(source, non_blocking=True)  # ours passes it on
    assert pinstage.default_pool(dev).stats().copies == before
    with pinstage.staged_copies() as again:
        dst.copy_(source, non_blocking=True)
        dst.copy_(source)
    assert (torch.Tensor.copy_ is theirs, again.copies) == (True, 1)
    assert seen == ["copy_"] * 3  # the staged one of the second block did not come through theirs
    monkeypatch.undo()
    assert torch.Tensor.copy_ is ours  # as they had found it: it stays, and passes on
    with pinstage.staged_copies() as third:
        dst.copy_(source, non_blocking=True)
    assert third.copies == 1


# --- pinstage run -----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, threading, atexit, torch
from pathlib import Path
from pinstage.testing import SimulatedDevice
assert __name__ == "__main__" and Path(__file__).name == "program.py" and sys.modules["__main__"].sys is sys
import neighbour
dev = SimulatedDevice(schedule="late")
dev.make_current()
dst, table = dev.empty(4, torch.int64), torch.arange(4)
dst.copy_(table, non_blocking=True)
table.fill_(-1)
dev.synchronize()
print(sys.argv[1:], dst.tolist())
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "neighbour.py").write_text("")
    return tmp_path


def pinstage_run(cwd, *args):
    command = [sys.executable, "-c", "import sys; from pinstage.cli import main; sys.exit(main())", "run", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]])
def test_program_runs_as_python_runs_it_and_is_staged(program, how):
    done = pinstage_run(program, "--staged", *how, "--staged", "-x", "1")
    assert (done.returncode, done.stdout) == (0, "['--staged', '-x', '1'] [0, 1, 2, 3]\n")
    assert done.stderr == "pinstage: 1 copies of 32 bytes were staged\n"


def test_program_runs_unstaged_without_the_option(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (program / "program.py").write_text("import torch; print('copy_' in vars(torch.Tensor))")
    assert main(["run", str(program / "program.py")]) == 0
    assert capsys.readouterr().out == "False\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import sys; sys.exit(7)", SystemExit),
        ("1 / 0", ZeroDivisionError),
        ("raise ModuleNotFoundError('rich', name='rich')", ModuleNotFoundError),
        ("raise KeyboardInterrupt", KeyboardInterrupt),
    ],
)
def test_errors_of_the_program_are_its_own(program, monkeypatch, text, error):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (program / "program.py").write_text(text)
    with pytest.raises(error) as raised:
        main(["run", str(program / "program.py")])
    assert error is not SystemExit or raised.value.code == 7


def test_exit_status_is_the_programs(program):
    (program / "program.py").write_text("import sys; sys.exit(7)")
    done = pinstage_run(program, "--staged", "program.py")
    assert (done.returncode, done.stderr) == (7, "pinstage: 0 copies of 0 bytes were staged\n")


def test_copies_of_exit_handlers_are_staged(program):
    (program / "program.py").write_text(
        PROGRAM.replace(
            "dst.copy_", "atexit.register(lambda: dst.copy_(torch.arange(4), non_blocking=True))\ndst.copy_"
        )
    )
    done = pinstage_run(program, "--staged", "program.py")
    assert done.stderr == "pinstage: 2 copies of 64 bytes were staged\n"


def test_missing_program_is_bad_input(tmp_path, capsys):
    assert main(["run", str(tmp_path / "nothing.py")]) == 2
    assert "nothing.py" in capsys.readouterr().err
