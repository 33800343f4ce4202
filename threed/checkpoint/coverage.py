"""Whether the files of a checkpoint hold every element of every tensor exactly once, by their manifest alone."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

MOST_CELLS = 2**30  # times boxes, of one tensor: seconds of work
MOST_WINDOWS = 2**20  # of a section
Corner = tuple[int, ...]


def of_sections(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the sections of a manifest, which has the structure of one.

    Files have each number of each section once, lines are cut evenly, their pieces do not overlap there, and are a
    partition of the tensors.
    """
    sections, shapes = manifest["sections"], manifest["shapes"]
    counts = Counter(tuple(pair) for entry in manifest["files"] for pair in entry["holds"])
    wanted = [section["portions"] * section["writers"] for section in sections]
    for (section, number), count in counts.items():
        if section >= len(sections) or number >= wanted[section]:
            yield f"it has no number {number} of section {section}"
        elif count > 1:
            yield f"files have number {number} of section {section} twice"
    if len(counts) < sum(wanted):
        yield f"files have {len(counts)} of {sum(wanted)} numbers of sections"
    found: dict[tuple[str, str], list[tuple[Corner, Corner]]] = defaultdict(list)
    for number, section in enumerate(sections):
        portions = section["portions"]
        if len(set(section["parts"])) < len(section["parts"]):
            yield f"section {number} names a part twice"
        if sum(line["length"] // line["step"] for line in section["lines"]) > MOST_WINDOWS:
            yield f"section {number} is cut into too many windows"
        for line in section["lines"]:
            if line["length"] % portions or line["step"] % portions:
                yield f"a line of section {number} is not cut evenly"
            if problem := _line_problem(line, shapes):
                yield f"a line of section {number}: {problem}"
            for name, start, size, _ in line["pieces"]:
                for part in section["parts"]:
                    found[part, name].append((start, size))
    for (part, name), boxes in found.items():
        if problem := partition_problem(f"{part} of {name}", shapes[name], boxes):
            yield problem
    if unused := set(shapes) - {name for _, name in found}:
        yield f"it has no values of {min(unused)}"


def _line_problem(line: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """Returns what is wrong with the pieces of a line, "" for nothing."""
    for name, start, size, _ in line["pieces"]:
        if name not in shapes:
            return f"{name} has no shape"
        if not len(start) == len(size) == len(shapes[name]):
            return f"a piece of {name} has other dimensions than {shapes[name]}"
    ends = [(at, at + math.prod(size)) for *_, size, at in line["pieces"]]
    if any(end > first for (_, end), (first, _) in pairwise(ends)) or ends[-1][1] > line["length"]:
        return "its pieces overlap, or lie beyond its end"
    return ""


def partition_problem(
    what: str, shape: Sequence[int], boxes: Sequence[tuple[Corner, Corner]]
) -> str:
    """Returns why boxes (start, size) are no partition of a tensor, "" if they are one. what: its name in the text."""
    if any(not len(start) == len(size) == len(shape) for start, size in boxes):
        return f"a box of {what} has other dimensions than {list(shape)}"
    if any(a + n > m for start, size in boxes for a, n, m in zip(start, size, shape, strict=True)):
        return f"a box of {what} lies outside of its shape {list(shape)}"
    found, wanted = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if found < wanted:
        return f"the checkpoint has {found} of {wanted} values of {what}"
    # cells between all edges: a partition has as many values as the tensor, and no cell twice
    edges = [
        sorted({edge for start, size in boxes for edge in (start[d], start[d] + size[d])})
        for d in range(len(shape))
    ]
    covered_shape = [len(some) for some in edges]
    if len(boxes) * math.prod(covered_shape) > MOST_CELLS:
        return f"{what} is cut into too many boxes"
    covered = np.zeros(covered_shape, dtype=bool)
    for start, size in boxes:
        box = tuple(
            slice(bisect_left(some, a), bisect_left(some, a + n))
            for some, a, n in zip(edges, start, size, strict=True)
        )
        if covered[box].any():
            return f"boxes of {what} overlap"
        covered[box] = True
    return ""
