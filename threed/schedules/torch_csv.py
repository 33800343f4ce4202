"""Conversion of plans to and from the CSV format of torch.distributed.pipelining.

    text = to_csv(build("1f1b", stages=4, microbatches=8))    # one row per rank: 0F0,0F1,0F2,0F3...
    plan = from_csv(text, "mine.csv")                         # errors name the row and the cell

A cell is one action: stage of the model, kind (F, B, I, W), micro-batch. The cell
`(0F7;7B3)OVERLAP_F_B` runs a forward together with a backward. Empty cells are ignored. The stages
in a row, in model order, become the chunks of that rank. Sends, receives, gathers and reductions,
such as `0SEND_F3` and `2UNSHARD`, are ignored, because `lower` adds communication.

Source: torch 2.13, torch/distributed/pipelining/schedules.py, `_Action` and
`PipelineScheduleMulti._load_csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from threed.core.messages import counted
from threed.schedules.action import COMPUTE, Action, Kind, together
from threed.schedules.deadlock_check import validate
from threed.schedules.plan import Plan

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_COMMUNICATION = re.compile(
    r"([0-9]{1,9})(?:(?:SEND|RECV)_[FB][0-9]{1,9}|(?:UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9})"
)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


class _Part(NamedTuple):
    """A compute action in torch's notation."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class _Cell(NamedTuple):
    """A parsed cell.

    Attributes:
        where: file, row and cell, for error messages.
        parts: the compute actions: one, or two that run together; empty for communication.
        stages: the stages of the actions, or the stage of the communication.
    """

    where: str
    parts: tuple[_Part, ...]
    stages: tuple[int, ...]


def to_csv(plan: Plan) -> str:
    """Returns the plan's compute actions as CSV text; torch adds the communication.

    Raises:
        ValueError: if the plan is asynchronous, or if the plan is bidirectional (torch supports
            only one rank per stage).
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
    """Returns the plan in a CSV text, checked by `validate`.

    Args:
        text: the CSV text. All ranks must have the same number of stages.
        name: name of the plan, such as the path of its file; also used in error messages.

    Raises:
        ValueError: the text is invalid; the message names the row and the cell.
    """
    rows = _read(text, name)
    placement = _placement(rows, name)
    for row in rows:
        _check_order(row)
    microbatches = _count_microbatches(rows, name)
    chunk_of = {stage: chunk for stages in placement for chunk, stage in enumerate(stages)}
    ranks = tuple(
        tuple(_action(cell.parts, chunk_of) for cell in row if cell.parts) for row in rows
    )
    round_robin = tuple(
        tuple(range(rank, len(rows) * len(placement[0]), len(rows))) for rank in range(len(rows))
    )
    plan = Plan(
        name,
        len(rows),
        microbatches,
        len(placement[0]),
        ranks,
        () if placement == round_robin else placement,
    )
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
        raise ValueError(f"{name}: the file is empty; it needs one row per rank, such as 0F0,0B0")
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
            f"{where}: not an action of torch.distributed.pipelining; examples: 0F3, 1B3, 1I3, 1W3, (0F7;7B3)OVERLAP_F_B"
        )
    return _Cell(where, parts, tuple(part.stage for part in parts))


def _placement(rows: Sequence[Sequence[_Cell]], name: str) -> tuple[tuple[int, ...], ...]:
    """Returns the stages that each row computes, sorted."""
    home: dict[int, int] = {}
    for number, row in enumerate(rows, 1):
        for cell in row:
            for part in cell.parts:
                if home.setdefault(part.stage, number) != number:
                    raise ValueError(
                        f"{cell.where}: stage {part.stage} is in row {home[part.stage]} already"
                    )
    for number, row in enumerate(rows, 1):
        for cell in row:
            if any(home.get(stage) != number for stage in cell.stages):
                raise ValueError(
                    f"{cell.where}: this row computes nothing of stage {cell.stages[0]}"
                )
    if missing := set(range(len(home))) - home.keys():
        raise ValueError(f"{name}: no row has stage {min(missing)}, but one has stage {max(home)}")
    placement = tuple(
        tuple(sorted(s for s, row in home.items() if row == number))
        for number in range(1, len(rows) + 1)
    )
    for number, stages in enumerate(placement, 1):
        if len(stages) != len(placement[0]):
            counts = f"row 1 has {counted(len(placement[0]), 'stage')} and row {number} has {len(stages)}"
            raise ValueError(f"{name}: {counts}; all ranks must have the same number")
    return placement


def _check_order(row: Iterable[_Cell]) -> None:
    """Checks the actions of one row. Raises ValueError naming the cell.

    No action may be repeated. B and I must follow the F of their micro-batch, and W must follow the
    I. A micro-batch must not have both a B and an I on one stage.
    """
    seen: set[_Part] = set()
    for cell in row:
        for part in cell.parts:
            before = _BEFORE[part.kind]
            excludes = {Kind.B: Kind.I, Kind.I: Kind.B}
            if part in seen:
                raise ValueError(f"{cell.where}: {part} appears twice")
            if before and part._replace(kind=before) not in seen:
                raise ValueError(
                    f"{cell.where}: {part} appears before {part._replace(kind=before)}"
                )
            if part.kind in excludes and part._replace(kind=excludes[part.kind]) in seen:
                raise ValueError(
                    f"{cell.where}: this micro-batch already had its backward; it is one B, or one I and one W"
                )
        seen.update(cell.parts)


def _count_microbatches(rows: Iterable[Iterable[_Cell]], name: str) -> int:
    """Returns the number of micro-batches.

    Raises ValueError if a stage lacks the forward or the backward of a micro-batch.
    """
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
                    f"{name}: stage {stage} has no {text} of micro-batch {missing};"
                    f" the plan has {counted(count, 'micro-batch')}"
                )
    return count


def _action(parts: Sequence[_Part], chunk_of: dict[int, int]) -> Action:
    actions = [Action(part.kind, part.microbatch, chunk_of[part.stage]) for part in parts]
    if len(actions) == 1:
        return actions[0]
    backward, forward = sorted(actions, key=lambda action: action.kind is Kind.F)
    return together(forward, backward)
