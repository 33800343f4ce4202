"""Plans as the CSV text of torch.distributed.pipelining, both ways.

    text = to_csv(build("1f1b", stages=4, microbatches=8))     a row for each rank: 0F0,0F1,0F2,0F3,0B0,0F4,...
    plan = from_csv(text, "mine.csv")                          refused by row and cell where something is wrong

A cell is one action: stage of the model, kind (F, B, I, W), micro-batch. `(0F7;7B3)OVERLAP_F_B` runs a forward together
with a backward, and an empty cell nothing. Which stages a rank has follows from its row; they are its chunks, in the
order of the model. Sends, receives, gathers and reductions (`0SEND_F3`, `2UNSHARD`) are read over: `lower` adds ours.

Phases: split the text into cells, see who has which stage, check every cell, then make the plan and play it out.
Source: torch 2.13, torch/distributed/pipelining/schedules.py, `_Action` and `PipelineScheduleMulti._load_csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from threed.schedules.action import COMPUTE, Action, Kind, together
from threed.schedules.plan import Plan
from threed.schedules.rendezvous import validate

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_COMMUNICATION = re.compile(
    r"([0-9]{1,9})(?:(?:SEND|RECV)_[FB][0-9]{1,9}|(?:UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9})"
)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


class _Part(NamedTuple):
    """A compute action as torch writes it."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class _Cell(NamedTuple):
    """What a cell says: one part, two that run together, or none of a communication. where: for messages."""

    where: str
    parts: tuple[_Part, ...]
    stages: tuple[int, ...]


def to_csv(plan: Plan) -> str:
    """Returns the plan's compute actions as text; torch adds communication of its own.

    Raises ValueError for a bidirectional plan: torch has every stage on one rank only; and for an asynchronous one.
    """
    if plan.asynchronous:
        raise ValueError(
            f"plan {plan.name} leaves backwards to the next step, and torch.distributed.pipelining ends every step: it"
            " cannot be written as CSV"
        )
    if plan.ways > 1:
        raise ValueError(
            f"plan {plan.name} has every stage on two ranks, and torch.distributed.pipelining on one only: "
            "it cannot be written as CSV"
        )
    rows = (
        [_cell_text(plan, rank, a) for a in actions if a.kind in COMPUTE]
        for rank, actions in enumerate(plan.ranks)
    )
    return "".join(",".join(row) + "\n" for row in rows)


def _cell_text(plan: Plan, rank: int, action: Action) -> str:
    parts = [
        str(_Part(plan.stage_of(rank, part.chunk), part.kind, part.microbatch))
        for part in action.parts
    ]
    return parts[0] if action.beside is None else f"({';'.join(parts)})OVERLAP_F_B"


def from_csv(text: str, name: str = "csv") -> Plan:
    """Returns the plan that a text is, under this name: legal, and free of stalls.

    Raises ValueError naming row and cell of what is wrong. Every rank must have equally many stages, as in `Plan`.
    """
    rows = _read(text, name)
    held = _placement(rows, name)
    for row in rows:
        _check_order(row)
    microbatches = _count_microbatches(rows, name)
    chunk_of = {stage: chunk for stages in held for chunk, stage in enumerate(stages)}
    ranks = tuple(
        tuple(_action(cell.parts, chunk_of) for cell in row if cell.parts) for row in rows
    )
    in_turn = tuple(
        tuple(range(rank, len(rows) * len(held[0]), len(rows))) for rank in range(len(rows))
    )
    plan = Plan(name, len(rows), microbatches, len(held[0]), ranks, () if held == in_turn else held)
    validate(plan)
    return plan


def _read(text: str, name: str) -> list[list[_Cell]]:
    try:
        table = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(f"{name}: not CSV: {error}") from None
    while table and not "".join(table[-1]).strip():
        table.pop()
    if not table:
        raise ValueError(
            f"{name}: there is nothing in it; a row for each rank is needed, such as 0F0,0B0"
        )
    rows = []
    for number, texts in enumerate(table, 1):
        cells = (
            (f"{name}: row {number}, cell {at}: {cell.strip()[:40]!r}", cell)
            for at, cell in enumerate(texts, 1)
        )
        rows.append([_parse(cell.strip(), where) for where, cell in cells if cell.strip()])
        if not any(cell.parts for cell in rows[-1]):
            raise ValueError(
                f"{name}: row {number} computes nothing; every rank needs a stage of the model"
            )
    return rows


def _parse(text: str, where: str) -> _Cell:
    if match := _COMMUNICATION.fullmatch(text):
        return _Cell(where, (), (int(match[1]),))
    pair = _PAIR.fullmatch(text)
    found = [_ACTION.fullmatch(part.strip()) for part in (pair.groups() if pair else (text,))]
    parts = tuple(_Part(int(match[1]), Kind(match[2]), int(match[3])) for match in found if match)
    kinds = "".join(sorted(part.kind for part in parts))
    if len(parts) != len(found) or (pair and kinds not in ("BF", "FI")):
        raise ValueError(
            f"{where}: no action of torch.distributed.pipelining; examples: 0F3, 1B3, 1I3, 1W3, (0F7;7B3)OVERLAP_F_B"
        )
    return _Cell(where, parts, tuple(part.stage for part in parts))


def _placement(rows: Sequence[Sequence[_Cell]], name: str) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank: those that its row computes."""
    home: dict[int, int] = {}
    for number, row in enumerate(rows, 1):
        for cell in row:
            for part in cell.parts:
                if home.setdefault(part.stage, number) != number:
                    raise ValueError(
                        f"{cell.where}: stage {part.stage} is that of row {home[part.stage]} already"
                    )
    for number, row in enumerate(rows, 1):
        for cell in row:
            if any(home.get(stage) != number for stage in cell.stages):
                raise ValueError(
                    f"{cell.where}: this row computes nothing of stage {cell.stages[0]}"
                )
    if missing := set(range(len(home))) - home.keys():
        raise ValueError(f"{name}: no row has stage {min(missing)}, and one has stage {max(home)}")
    held = tuple(
        tuple(sorted(s for s, row in home.items() if row == number))
        for number in range(1, len(rows) + 1)
    )
    for number, stages in enumerate(held, 1):
        if len(stages) != len(held[0]):
            counts = f"row 1 has {len(held[0])} stages and row {number} has {len(stages)}"
            raise ValueError(f"{name}: {counts}; every rank must have equally many")
    return held


def _check_order(row: Iterable[_Cell]) -> None:
    """Nothing twice, nothing before what it follows, and one kind of backward."""
    seen: set[_Part] = set()
    for cell in row:
        for part in cell.parts:
            before = _BEFORE[part.kind]
            others = {Kind.B: Kind.I, Kind.I: Kind.B}
            if part in seen:
                raise ValueError(f"{cell.where}: {part} appears twice")
            if before and part._replace(kind=before) not in seen:
                raise ValueError(
                    f"{cell.where}: {part} appears before {part._replace(kind=before)}"
                )
            if part.kind in others and part._replace(kind=others[part.kind]) in seen:
                raise ValueError(
                    f"{cell.where}: this micro-batch had its backward; it is one B, or one I and one W"
                )
        seen.update(cell.parts)


def _count_microbatches(rows: Iterable[Iterable[_Cell]], name: str) -> int:
    """How many there are; every stage must have a forward and a backward of each, numbered from 0."""
    done: dict[int, dict[Kind, set[int]]] = {}
    for row in rows:
        for cell in row:
            for stage, kind, microbatch in cell.parts:
                done.setdefault(stage, {kind: set() for kind in _BEFORE})[kind].add(microbatch)
    count = max(len(kinds[Kind.F]) for kinds in done.values())
    for stage, kinds in sorted(done.items()):
        needed = {
            "F": kinds[Kind.F],
            "B, or I and W,": kinds[Kind.B] | kinds[Kind.I],
            "W": kinds[Kind.B] | kinds[Kind.W],
        }
        for text, found in needed.items():
            missing = next(
                (microbatch for microbatch in range(count) if microbatch not in found), None
            )
            if missing is not None:
                raise ValueError(
                    f"{name}: stage {stage} has no {text} of micro-batch {missing}; there are {count} micro-batches"
                )
    return count


def _action(parts: Sequence[_Part], chunk_of: dict[int, int]) -> Action:
    actions = [Action(part.kind, part.microbatch, chunk_of[part.stage]) for part in parts]
    if len(actions) == 1:
        return actions[0]
    backward, forward = sorted(actions, key=lambda action: action.kind is Kind.F)
    return together(forward, backward)
