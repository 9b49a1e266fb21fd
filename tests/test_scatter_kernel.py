# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/scatter_kernel.h by itself: that it assembles, and what each of its blocks reads and writes.

`run` interprets the few PTX instructions that it is made of, so that this needs no GPU. tests/test_scatter.py has what
is built on the kernel, on a GPU too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

THREADS = 128
SOURCE = Path(__file__).parents[1] / "csrc" / "scatter_kernel.h"


def kernel_text() -> str:
    """The kernel as the driver gets it."""
    found = re.search(r'R"ptx\((.*?)\)ptx"', SOURCE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def instructions(ptx: str) -> list[tuple[str | None, str, list[str]]]:
    """(predicate, opcode, operands) of each, vectors as one operand."""
    body = re.sub(r"//.*", "", ptx)
    body = body[body.index("{") + 1 : body.rindex("}")]
    found = []
    for line in (" ".join(part.split()) for part in body.split(";")):
        if not line or line.startswith(".reg"):
            continue
        predicate, opcode, rest = re.fullmatch(r"(?:@(%\w+) )?([\w.]+) ?(.*)", line).groups()
        found.append((predicate, opcode, re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", rest)))
    return found


class Memory:
    """Bytes from address `base` on, each with the number of times that it was written."""

    def __init__(self, base: int, contents: np.ndarray) -> None:
        self.base, self.bytes = base, contents.copy()
        self.writes = np.zeros(len(contents), dtype=int)

    def holds(self, address: int, nbytes: int) -> bool:
        return self.base <= address and address + nbytes <= self.base + len(self.bytes)


def run(ptx: str, block: int, parameters: dict[str, int], memories: list[Memory]) -> None:
    """Runs one block: each instruction by all threads together, as NumPy arrays.

    A load or store that is not aligned to its size, or reaches over the memory's ends, raises.
    """
    registers: dict[str, np.ndarray] = {
        "%ctaid.x": np.full(THREADS, block, dtype=np.uint64), "%tid.x": np.arange(THREADS, dtype=np.uint64),
    }  # fmt: skip

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand[0] == "%" else np.full(THREADS, int(operand, 0), dtype=np.uint64)

    def place(operand: str, thread: int, nbytes: int) -> tuple[Memory, int]:
        register, offset = re.fullmatch(r"\[(%\w+)(?:\+(\d+))?\]", operand).groups()
        address = int(registers[register][thread]) + int(offset or 0)
        assert address % nbytes == 0, f"{operand} of thread {thread} is misaligned: {address:#x} for {nbytes} bytes"
        memory = next((m for m in memories if m.holds(address, nbytes)), None)
        assert memory is not None, f"{operand} of thread {thread} is outside: {address:#x}, {nbytes} bytes"
        return memory, address - memory.base

    left = np.zeros(THREADS, dtype=bool)
    for predicate, opcode, operands in instructions(ptx):
        active = (registers[predicate] if predicate else np.ones(THREADS, dtype=bool)) & ~left
        name, *types = opcode.split(".")
        width = int(re.sub(r"\D", "", types[-1])) if types else 0
        if name == "ret":
            left |= active
            continue
        if name in ("ld", "st") and types[0] == "global":
            vector, at = operands if name == "ld" else operands[::-1]
            parts = re.findall(r"%\w+", vector)
            for part in parts if name == "ld" else ():
                registers.setdefault(part, np.zeros(THREADS, dtype=np.uint64))
            each = width // 8
            for thread in np.flatnonzero(active):
                memory, begin = place(at, thread, each * len(parts))
                for i, part in enumerate(parts):
                    cell = slice(begin + i * each, begin + (i + 1) * each)
                    if name == "ld":
                        registers[part][thread] = int.from_bytes(memory.bytes[cell].tobytes(), "little")
                    else:
                        number = int(registers[part][thread])
                        memory.bytes[cell] = np.frombuffer(number.to_bytes(each, "little"), dtype=np.uint8)
                        memory.writes[cell] += 1
            continue
        assert predicate is None, opcode
        if (name, types[0]) == ("ld", "param"):
            registers[operands[0]] = np.full(THREADS, parameters[operands[1].strip("[]")], dtype=np.uint64)
            continue
        a, *more = (value(operand) for operand in operands[1:])
        if name == "setp":
            registers[operands[0]] = {"lt": np.less, "gt": np.greater, "ne": np.not_equal}[types[0]](a, more[0])
            if types[1] == "or":
                registers[operands[0]] |= more[1]
            continue
        result = {
            "mov": lambda a: a, "cvt": lambda a: a, "neg": lambda a: np.uint64(0) - a,
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b, "xor": lambda a, b: a ^ b,
            "shr": lambda a, b: a >> b, "min": np.minimum, "mad": lambda a, b, c: a * b + c,
        }[name](a, *more)  # fmt: skip
        # cvt.<to>.<from>; a wide product is of 64 bits.
        bits = int(types[0][1:]) if name == "cvt" else 64 if types[0] == "wide" else width
        registers[operands[0]] = result & np.uint64((1 << bits) - 1)


# --- tests ------------------------------------------------------------------------------------------------------------

PIECE_BYTES = 8192
SLOT, DST = 0x7F0000000000, 0x7E0000000000
SIZES = [*range(1, 71), 255, 256, 257, 2047, 2048, 2049, 4095, 4096, 4097, PIECE_BYTES - 18, PIECE_BYTES - 17]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_100"])
def test_kernel_assembles(tmp_path, architecture):
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if ptxas is None:
        pytest.skip("needs ptxas, of a CUDA toolkit")
    source = tmp_path / "scatter.ptx"
    source.write_text(kernel_text(), encoding="utf-8")
    command = [ptxas, f"-arch={architecture}", "-v", str(source), "-o", str(tmp_path / "scatter.cubin")]
    told = subprocess.run(command, check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "0 bytes spill stores" in told.stderr


def ran(from_vector, nbytes, block=0, found=None, text=None):
    """The bytes of the slot and the destination after one block, from 32 bytes before the piece to 32 behind.

    `found` is the descriptor that the block finds instead of its own: (dst, offset, nbytes).
    """
    offset = 64 + from_vector
    slot = Memory(SLOT + offset, np.arange(nbytes, dtype=np.uint64).astype(np.uint8) % 251 + 1)
    first = DST + 32 + from_vector
    dst_found, offset_found, nbytes_found = found or (first, offset, nbytes)
    descriptor = np.array([dst_found, offset_found << 16 | nbytes_found], dtype=np.uint64).view(np.uint8)
    pieces = SLOT + (offset + nbytes + 63) // 64 * 64
    dst = Memory(DST, np.zeros(from_vector + nbytes + 64, dtype=np.uint8))
    parameters = {"slot": SLOT, "pieces": pieces, "first": first, "end": first + nbytes}
    run(text or kernel_text(), block, parameters, [slot, Memory(pieces + 16 * block, descriptor), dst])
    return slot, dst


@pytest.mark.parametrize("from_vector", range(16))
def test_block_copies_its_piece_to_the_byte_and_each_byte_once(from_vector):
    """Case 29. A load outside the piece's own bytes raises, and so does one that is not aligned."""
    for nbytes in [*SIZES, PIECE_BYTES - from_vector]:
        slot, dst = ran(from_vector, nbytes)
        written = slice(32 + from_vector, 32 + from_vector + nbytes)
        assert np.array_equal(dst.bytes[written], slot.bytes), nbytes
        assert dst.writes[written].tolist() == [1] * nbytes
        assert dst.writes.sum() == nbytes


def test_block_takes_the_descriptor_of_its_number():
    slot, dst = ran(3, 100, block=70_000)
    assert np.array_equal(dst.bytes[35:135], slot.bytes)


def test_offset_in_the_slot_may_be_of_48_bits():
    offset, nbytes = (1 << 40) + 16, 33
    slot = Memory(SLOT + offset, np.arange(1, nbytes + 1, dtype=np.uint8))
    at = SLOT + offset + 48
    pieces = Memory(at, np.array([DST, offset << 16 | nbytes], dtype=np.uint64).view(np.uint8))
    dst = Memory(DST, np.zeros(nbytes, dtype=np.uint8))
    run(kernel_text(), 0, {"slot": SLOT, "pieces": at, "first": DST, "end": DST + nbytes}, [slot, pieces, dst])
    assert np.array_equal(dst.bytes, slot.bytes)


# name: dst, offset, nbytes; of a launch whose only piece is DST + 35, 67, 100
FOREIGN = {
    "zeros": (0, 0, 0),
    "ones": ((1 << 64) - 1, (1 << 48) - 1, (1 << 16) - 1),
    "below": (DST + 35 - 16, 67, 100),
    "above": (DST + 35 + 16, 67, 100),
    "another launch": (DST + 0x100000 + 3, 67, 100),
    "beyond the slot's bytes": (DST + 35, 67 + 4096, 100),
    "on another vector": (DST + 35, 68, 90),
    "long": (DST + 35, 67, 8000),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_descriptor_that_is_none_of_the_launch_neither_reads_nor_writes(name):
    _, dst = ran(3, 100, found=FOREIGN[name])
    assert dst.writes.sum() == 0


def test_interpreter_refuses_what_a_gpu_would():
    """The control of these tests: a kernel whose vectors begin a byte late."""
    broken = kernel_text().replace("and.b32           %head, %head, 15;", "and.b32           %head, %head, 14;")
    assert broken != kernel_text()
    with pytest.raises(AssertionError, match="misaligned"):
        ran(1, 100, text=broken)
