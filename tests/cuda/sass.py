"""Reads the machine code of GPU kernels (SASS, as nvdisasm prints it): basic blocks, loops, and ways through them.

    for name, code in kernels(text).items():
        for loop in code.loops:            # natural loops: a branch back to a block that every way there passes
            code.path(loop)                # of one iteration: its blocks, instructions and streamed bytes

Streamed is what is read or written once and marked so in the source (`__ldcs`, `__stcs`; `.EF` in SASS): the bytes that
memory moves. What is read again and again (weights, tables, statistics) comes from a cache and is not in it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ACCESSES = {"LDG": "load", "STG": "store", "LDS": "shared load", "STS": "shared store"}
LOCAL = ("LDL", "STL")
# What the special-function unit executes, 16 lanes a clock of a multiprocessor: these and conversions.
SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "FRND")
NARROWER = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


class Instruction(NamedTuple):
    """guard: its predicate, with a `!` where that is negated, or nothing. opcode: with its modifiers."""

    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def width(self) -> int:
        """Bytes that a load or store moves for one thread; 0 for anything else."""
        if self.base not in ACCESSES and self.base not in LOCAL:
            return 0
        return next((NARROWER[part] for part in self.opcode.split(".") if part in NARROWER), 4)

    @property
    def streamed(self) -> int:
        """Bytes of one thread that come from memory or go there, and are not used again."""
        return self.width if self.base in ("LDG", "STG") and ".EF" in self.opcode else 0

    @property
    def double(self) -> bool:
        """Whether it computes in fp64, or converts from it or to it."""
        return bool(
            re.match(r"D(ADD|MUL|FMA|SETP|MNMX)|MUFU\.\w*64|[A-Z0-9]+\.(.*\.)?F64", self.opcode)
        )

    @property
    def target(self) -> str | None:
        """The label of the kernel's own that it may jump to. BRA.DIV, for a warp that is not together, counts as not
        taken: ours always are. ptxas leaves some loops by a CALL to a label, from which nothing returns."""
        label = self.operands[-1].strip("`()") if self.operands else ""
        jumps = (
            self.base in ("BRA", "CALL") and ".DIV" not in self.opcode and label.startswith(".L_")
        )
        return label if jumps else None

    @property
    def calls(self) -> bool:
        """Whether it calls a subroutine: a slow division, say."""
        return self.base == "CALL" and self.target is None

    @property
    def written(self) -> set[int]:
        """Registers that a load writes."""
        first = re.match(r"R(\d+)", self.operands[0]) if self.base in ("LDG", "LDS") else None
        return (
            set(range(int(first[1]), int(first[1]) + max(self.width // 4, 1))) if first else set()
        )

    @property
    def read(self) -> set[int]:
        """Registers that it reads: the first of each operand's, which is enough to know a result that is waited for."""
        sources = self.operands if self.base.startswith(("ST", "RED")) else self.operands[1:]
        return {int(number) for operand in sources for number in re.findall(r"\bR(\d+)", operand)}


class Path(NamedTuple):
    """A way from the head of a region to its end. streamed: bytes of one thread; size: instructions. They sort so."""

    streamed: int
    size: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """head: the block that an iteration begins with; blocks: all of it, inner loops included."""

    head: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Code:
    """A kernel's blocks that can be reached; block 0 is the entry. next: where a block's end may lead."""

    blocks: tuple[tuple[Instruction, ...], ...]
    next: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def order(self) -> list[int]:
        """Blocks that can be reached, each after those before it but for back edges."""
        done: list[int] = []
        seen, stack = {0}, [(0, iter(self.next[0]))]
        while stack:
            successors = stack[-1][1]
            if (new := next((s for s in successors if s not in seen), None)) is None:
                done.append(stack.pop()[0])
            else:
                seen.add(new)
                stack.append((new, iter(self.next[new])))
        return done[::-1]

    @functools.cached_property
    def before(self) -> dict[int, list[int]]:
        """The blocks that lead to a block."""
        return {block: [p for p in self.order if block in self.next[p]] for block in self.order}

    @functools.cached_property
    def dominators(self) -> dict[int, set[int]]:
        """The blocks that every way from the entry to a block passes, itself included."""
        found = {block: set(self.order) for block in self.order} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                new = set.intersection(*(found[p] for p in self.before[block])) | {block}
                changed |= new != found[block]
                found[block] = new
        return found

    @functools.cached_property
    def back_edges(self) -> set[tuple[int, int]]:
        """Branches to a block that dominates where they start."""
        return {
            (block, to)
            for block in self.order
            for to in self.next[block]
            if to in self.dominators[block]
        }

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, those with one head as one."""
        heads = sorted({to for _, to in self.back_edges})
        return [Loop(head, self._body(head)) for head in heads]

    def _body(self, head: int) -> frozenset[int]:
        body, waiting = {head}, [block for block, to in self.back_edges if to == head]
        while waiting:
            if (block := waiting.pop()) not in body:
                body.add(block)
                waiting += self.before[block]
        return frozenset(body)

    @property
    def outer_loops(self) -> list[Loop]:
        """Loops that are in no other."""
        return [a for a in self.loops if not any(a.blocks < b.blocks for b in self.loops)]

    def instructions(self, blocks: Iterable[int]) -> Iterator[Instruction]:
        """All instructions of these blocks."""
        for block in blocks:
            yield from self.blocks[block]

    def path(self, loop: Loop | None = None) -> Path:
        """The way through one iteration, or with None through the kernel, that streams most, and of those the longest.
        Loops inside are passed once."""
        inside, head = (loop.blocks, loop.head) if loop else (frozenset(self.order), 0)
        best = {head: self._extended(Path(0, 0, ()), head)}
        for block in (b for b in self.order if b in inside and b != head):
            before = [
                p for p in self.before[block] if p in best and (p, block) not in self.back_edges
            ]
            best[block] = self._extended(max(best[p] for p in before), block)
        ends = {block for block, to in self.back_edges if loop and to == head} or {
            b for b in inside if not self.next[b]
        }
        return max(best[block] for block in ends)

    def _extended(self, path: Path, block: int) -> Path:
        code = [i for i in self.blocks[block] if i.opcode != "NOP"]
        return Path(
            path.streamed + sum(i.streamed for i in code),
            path.size + len(code),
            (*path.blocks, block),
        )


def in_flight(code: Sequence[Instruction]) -> float:
    """Streamed bytes that a thread of a loop asks for before it waits for them, the mean of an iteration.

    It waits at the first use of a result, which by then has come with all that was asked for earlier. The code is
    followed twice, because an iteration may ask for what the next one uses."""
    asked, waits, waiting = 0, 0, set[int]()
    for turn in range(2):
        for instruction in code:
            if waiting & instruction.read:
                waits, waiting = waits + turn, set()
            if instruction.base == "LDG" and instruction.streamed:
                asked += instruction.streamed * turn
                waiting |= instruction.written
    return asked / max(waits, 1)


# ------------------------------------------------------------------------------------------------------------- reading


def kernels(text: str) -> dict[str, Code]:
    """Each kernel's code by its mangled name, from nvdisasm's output."""
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.M)
    return {name: _code(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def threads(text: str) -> dict[str, int]:
    """The launch bound of each kernel, from the same output: threads in a block."""
    found = {}
    for part in re.split(r"^//-+ \.nv\.info\.", text, flags=re.M)[1:]:
        if bound := re.search(r"EIATTR_MAX_THREADS\n(?:.*\n){1,5}?.*\.word\s+(0x\w+)", part):
            found[part.split()[0]] = int(bound[1], 16)
    return found


def _code(text: str) -> Code:
    labels: dict[str, int] = {}
    blocks: list[list[Instruction]] = [[]]
    for line in text.splitlines():
        if line.startswith("//-----"):
            break  # the next section
        if label := re.match(r"(\S+):$", line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif found := re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(\S+)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", line
        ):
            operands = tuple(one.strip() for one in found[3].split(",")) if found[3] else ()
            blocks[-1].append(Instruction(found[1] or "", found[2], operands))
            if blocks[-1][-1].target or blocks[-1][-1].base in ("EXIT", "RET", "BRX", "JMP"):
                blocks.append([])
    following = tuple(
        tuple(_successors(b, n + 1, len(blocks), labels)) for n, b in enumerate(blocks)
    )
    return Code(tuple(tuple(block) for block in blocks), following)


def _successors(
    block: list[Instruction], after: int, count: int, labels: Mapping[str, int]
) -> Iterator[int]:
    """Where a block leads."""
    last = block[-1] if block else Instruction("", "NOP", ())
    assert last.base not in ("BRX", "JMP"), f"{last.opcode}: a branch that is not understood"
    if last.target:
        yield labels[last.target]
    certain = last.base in ("EXIT", "RET") or (last.target and len(last.operands) == 1)
    if after < count and (not certain or last.guard):
        yield after
