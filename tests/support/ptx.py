# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX text of a kernel thread by thread, without a GPU.

The emulated device runs a version of each kernel that is written in C, so a mistake in the
PTX text would show only on a GPU. This module interprets the text, slowly. It knows only
the integer instructions that the kernels use, and any other one is a KeyError. Threads run
one after another, so races are not found. Memory consists of a few pieces at addresses that
the test chooses. An access that is misaligned, or that leaves its piece, raises a
ValueError.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

#: The value of a register that has not been written.
_UNSET = 0x5BAD_BEEF_5BAD_BEEF
#: A thread that runs more instructions than this is taken to be in an endless loop.
_MOST_STEPS = 1_000_000
_BITS = {"8": 8, "16": 16, "32": 32, "64": 64}
#: What the instruction `setp` does, by its comparison.
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
}
#: What instructions with two operands do.
_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "mul.wide": operator.mul,
    "div": operator.floordiv,
    "min": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}


#: The values of the registers, by their names.
Registers = dict[str, int]


class Instruction(NamedTuple):
    """One instruction, whose text is `@guard op operands`."""

    guard: str  # a predicate, or nothing; with "!" before it if it has to be false
    op: str  # the name, without its type and without hints to the caches
    kind: str  # the type, such as u32, s64, v4.u32 or pred
    operands: list[str]
    #: This computes what is written into the first operand. Instructions that move data to
    #: or from memory, and those that jump, have None.
    compute: Callable[[Registers], int] | None


def _value(operand: str, kind: str) -> Callable[[Registers], int]:
    """Return a function that reads a register or a constant as a number of this type."""
    read: Callable[[Registers], int] = operator.itemgetter(operand)
    if operand[0] != "%":
        number = int(operand, 0)
        read = lambda registers: number  # noqa: E731
    if kind == "pred":
        return read
    mask = (1 << _BITS[kind[1:]]) - 1
    if kind[0] != "s":
        return lambda registers: read(registers) & mask
    sign = mask // 2 + 1
    return lambda registers: ((read(registers) & mask) ^ sign) - sign


def _computation(op: str, kind: str, operands: list[str]) -> Callable[[Registers], int]:
    """Return a function that computes what an instruction writes into a register.

    The text is taken apart here and not in each run, since threads run an instruction
    many times.
    """
    name, *more = op.split(".")
    if name == "mov" and operands[0] == "job":
        return lambda registers: 0  # the parameter begins at address 0 of its own space
    if name in ("mov", "cvt"):
        return _value(operands[0], kind)
    if name == "selp":
        yes, no = _value(operands[0], kind), _value(operands[1], kind)
        which = operands[2]
        return lambda registers: (yes if registers[which] else no)(registers)
    first = _value(operands[0], kind)
    if name == "neg":
        return lambda registers: -first(registers)
    second = _value(operands[1], "u32" if name in ("shl", "shr") else kind)
    if name == "mad":
        third = _value(operands[2], kind)
        return lambda registers: first(registers) * second(registers) + third(registers)
    if name == "setp" and more[1:]:
        compare, other = _COMPARE[more[0]], operands[2]
        return lambda registers: (
            compare(first(registers), second(registers)) and bool(registers[other])
        )
    both = _COMPARE[more[0]] if name == "setp" else _COMPUTE[op]
    return lambda registers: both(first(registers), second(registers))


class Memory:
    """Pieces of memory at addresses that the test chooses."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytearray] = {}

    def add(self, address: int, piece: bytearray) -> int:
        """Put a piece of memory at an address, and return the address."""
        self.pieces[address] = piece
        return address

    def _find(self, address: int, nbytes: int) -> tuple[bytearray, int]:
        """Return the piece that has these bytes, and where they begin in it."""
        if address % nbytes:
            raise ValueError(f"{nbytes} bytes at {address:#x} are misaligned")
        for start, piece in self.pieces.items():
            if start <= address and address + nbytes <= start + len(piece):
                return piece, address - start
        raise ValueError(f"{nbytes} bytes at {address:#x} are not in any piece")

    def load(self, address: int, nbytes: int) -> int:
        piece, at = self._find(address, nbytes)
        return int.from_bytes(piece[at : at + nbytes], "little")

    def store(self, address: int, nbytes: int, value: int) -> None:
        piece, at = self._find(address, nbytes)
        piece[at : at + nbytes] = value.to_bytes(nbytes, "little")


class Kernel:
    """The text of one kernel, which has one parameter, a struct."""

    def __init__(self, text: str) -> None:
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        body = re.sub(r"//.*", "", text[text.index("{") + 1 : text.rindex("}")])
        for line in filter(None, map(str.strip, body.splitlines())):
            label = re.match(r"(\w+):\s*", line)
            if label:
                self.labels[label[1]] = len(self.code)
            rest = line[label.end() :] if label else line
            if rest and not rest.startswith(".reg"):
                self.code.append(self._read(rest))

    @staticmethod
    def _read(line: str) -> Instruction:
        """Take the text of an instruction apart."""
        found = re.fullmatch(r"(?:@(!?%\w+) )?([\w.]+)\s*(.*);", line)
        if found is None:
            raise ValueError(f"not understood: {line}")
        guard, op, rest = found.groups(default="")
        kind = re.search(r"\.((?:v4\.)?[usbf]\d+|pred|s32)(?:\.[usb]\d+)?$", op)
        op = op[: kind.start()] if kind else op
        for hint in (".cs", ".volatile", ".uni"):
            op = op.replace(hint, "")
        vector = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        name = kind[1] if kind else ""
        moves = op in ("ret", "bra") or op.split(".")[0] in ("ld", "st")
        compute = None if moves else _computation(op, name, vector[1:])
        return Instruction(guard, op, name, vector, compute)

    def run(self, memory: Memory, params: bytes, blocks: int, threads: int) -> None:
        """Run a grid, one thread after another."""
        for block in range(blocks):
            for thread in range(threads):
                _Thread(self, memory, params, (block, blocks, thread, threads)).run()


class _Thread:
    """One thread of a grid, with its registers."""

    def __init__(
        self, kernel: Kernel, memory: Memory, params: bytes, place: tuple[int, ...]
    ) -> None:
        names = ("%ctaid.x", "%nctaid.x", "%tid.x", "%ntid.x")
        self.registers = defaultdict(lambda: _UNSET, zip(names, place, strict=True))
        self.kernel = kernel
        self.memory = memory
        self.params = params

    def run(self) -> None:
        code, registers = self.kernel.code, self.registers
        at = 0
        for _ in range(_MOST_STEPS):
            guard, op, kind, operands, compute = code[at]
            at += 1
            if guard and bool(registers[guard.lstrip("!")]) == (guard[0] == "!"):
                continue
            if compute is not None:
                registers[operands[0]] = compute(registers)
            elif op == "ret":
                return
            elif op == "bra":
                at = self.kernel.labels[operands[0]]
            else:
                self._move(op, kind, operands)
        raise RuntimeError(f"a thread has not ended after {_MOST_STEPS} instructions")

    def _address(self, operand: str, base: int) -> int:
        """Return the address of an operand such as `[%rd1+8]` or `[job+16]`."""
        name, _, offset = operand.strip("[]").partition("+")
        start = base if name == "job" else self.registers[name]
        return start + int(offset or 0) & (1 << 64) - 1

    def _move(self, op: str, kind: str, operands: list[str]) -> None:
        """Load registers from memory or from the parameter, or store them."""
        nbytes = _BITS[kind.removeprefix("v4.")[1:]] // 8
        names, at = operands if op.startswith("ld") else reversed(operands)
        address = self._address(at, 0)
        if op == "ld.param":
            data = self.params[address : address + nbytes]
            self.registers[names] = int.from_bytes(data, "little")
            return
        if kind.startswith("v4.") and address % (4 * nbytes):
            raise ValueError(f"a vector at {address:#x} is misaligned")
        for k, name in enumerate(self._each(names)):
            if op == "ld.global":
                self.registers[name] = self.memory.load(address + k * nbytes, nbytes)
            else:
                value = _value(name, f"u{8 * nbytes}")(self.registers)
                self.memory.store(address + k * nbytes, nbytes, value)

    @staticmethod
    def _each(names: str) -> Iterator[str]:
        """Return the registers of a vector, or the one register."""
        return iter(names.strip("{}").replace(" ", "").split(","))
