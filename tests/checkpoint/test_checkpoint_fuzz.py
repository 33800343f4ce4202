"""Damaged and hostile checkpoints: every mutant is refused by a CheckpointError, or gives the tensors that were saved.

A seeded loop changes a byte, or a node of the JSON of a manifest or a header; the latter with all hashes made right
again. What loads must have every weight, moment and buffer bit for bit, and counters in range; `threed inspect` and
`threed convert` of it end with 0 or 2. pytest -m grid runs thousands of mutants.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_checkpoint_native import sealed
from tests.checkpoint.test_checkpoint_state import Norms, engine_for, local, wrapped
from tests.checkpoints import hashes_of, state_of
from tests.configs import Case, engine_of
from tests.harness import run_ranks
from tests.interop.test_interop_hf import config_of as hf_config
from threed.checkpoint.files import CheckpointError
from threed.cli.commands import main
from threed.engine import Engine
from threed.zero.state import read_records, records

FILE = "rank-00000.safetensors"
VALUES: list[Any] = [
    None, True, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e300, float("inf"), float("nan"), "", "x", "..",
    "/etc/passwd", "\0", "\x1b[2J", "\ud800", "é" * 300, [], [[]], {}, {"": []}, [0] * 100, "F16", "I64",
    "float16", "save", "weight",
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- mutants


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from nodes(tree[key])


def change(draw: random.Random, tree: Any) -> None:
    """Replaces, removes, doubles or exchanges something; nodes near the root as often as the many boxes."""
    found = list(nodes(tree))
    shallow = [(c, k) for c, k in found if isinstance(c, dict)]
    container, key = draw.choice(draw.choice([shallow or found, found]))
    action = draw.randrange(5)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, list):
        container.insert(draw.randrange(len(container) + 1), copy.deepcopy(container[key]))
    elif action == 2:
        other, there = draw.choice(found)
        container[key] = copy.deepcopy(other[there])
    elif action == 3 and isinstance(container[key], int | float):
        container[key] += draw.choice([-1, 1, -0.5, 8, 2**40])
    else:
        container[key] = draw.choice(VALUES)


def damage(draw: random.Random, path: Path) -> None:
    """Changes bytes of a file and no hash."""
    file = path / draw.choice(["manifest.json", "manifest.json", FILE])
    data = bytearray(file.read_bytes())
    at, length = draw.randrange(len(data)), draw.choice([1, 1, 9, 300])
    action = draw.randrange(4)
    if action == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif action == 1:
        del data[at : at + length]
    elif action == 2:
        data[at:at] = bytes(draw.randrange(256) for _ in range(length))
    else:
        data = bytearray(draw.choice([b"[", b'{"a":', b"9", b"\xff"]) * 60_000)
    file.write_bytes(data)


def forge_manifest(draw: random.Random, path: Path) -> None:
    """Changes a node of the manifest, and its hash."""
    sealed(path, lambda body: change(draw, body))


def forge_header(draw: random.Random, path: Path) -> None:
    """Changes the header of a file, or its length, and all hashes."""
    data = (path / FILE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    if draw.randrange(4):
        header = json.loads(data[8:end])
        change(draw, header)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = len(text).to_bytes(8, "little") + text + data[end:]
    else:
        cut = draw.randrange(len(data))
        data = draw.choice(
            [
                data[:cut],
                data + b"\0" * 9,
                draw.randbytes(8) + data[8:],
                data[:8] + b"[" * (end - 8),
            ]
        )
    (path / FILE).write_bytes(data)
    hashes = hashes_of(path / FILE)
    sealed(path, lambda b: b["files"][0].update(hashes, size=len(data)))


KINDS = {"damaged": damage, "forged manifest": forge_manifest, "forged header": forge_header}


# ------------------------------------------------------------------------------------------------------ what is saved


def save(folder: Path) -> None:
    """Checkpoints of two ranks: of layers with buffers, and of a model that can be exported."""
    engine_for(Case(1, 2, 1, model="llama", microbatches=-8, zero=3)).save(folder / "buffers")
    engine_of(hf_config("gpt", 2, tp=2)).save(folder / "export")


def save_alone(folder: Path) -> None:
    """Checkpoint of a wrapped module, whose rank loads its generators again."""
    engine = wrapped(Norms(), 1)
    engine.save(folder / "wrapped")


def makers() -> dict[str, Callable[[], Engine]]:
    """A fresh engine for each of them."""
    return {
        "buffers": lambda: engine_for(Case(model="llama", microbatches=-8)),
        "export": lambda: engine_of(hf_config("gpt", 1)),
        "wrapped": lambda: wrapped(Norms(), 1),
    }


def tensors(engine: Engine) -> list[Tensor]:
    """A copy of all that a checkpoint restores of an engine."""
    buffers = [value.clone() for _, value in sorted(local(engine).items())]
    return [values for *_, values in state_of(engine)] + buffers + [torch.get_rng_state()]


def scramble(engine: Engine) -> None:
    """Sets all that a checkpoint restores to something else."""
    torch.manual_seed(0)
    with torch.no_grad():
        for _, values in read_records(engine.optimizer, records(engine.optimizer)):
            values.fill_(7)
        for buffer in local(engine).values():
            buffer.copy_(torch.ones(()))


def fuzz(folder: Path, seed: int, count: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How many mutants of each kind ended how; and what should not be."""
    ends, wrong = Counter[tuple[str, str]](), []
    engines = {name: make() for name, make in makers().items()}
    good = {}
    for name, engine in engines.items():
        engine.load(folder / name)
        good[name] = tensors(engine)
    for number in range(count):
        draw, name = random.Random(f"{seed}/{number}"), list(engines)[number % len(engines)]
        kind, path = draw.choice(list(KINDS)), folder / "mutant"
        shutil.copytree(folder / name, path)
        KINDS[kind](draw, path)
        try:
            end = loaded(engines[name], path, good[name])
            if number % 5 == 0:
                tools(path)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        ends[kind, end if end in ("refused", "same") else "wrong"] += 1
        if end not in ("refused", "same"):
            wrong.append(f"seed {seed}, mutant {number} ({kind} of {name}): {end}")
        shutil.rmtree(path)
    return ends, wrong


def loaded(engine: Engine, path: Path, wanted: list[Tensor]) -> str:
    """What came of loading a mutant; before it, nothing in the engine is as wanted."""
    scramble(engine)
    try:
        engine.load(path)
    except CheckpointError as error:
        return "refused" if str(error).isprintable() else f"unprintable: {error!r}"
    in_range = 0 <= engine.steps <= 2**53 and 0 <= engine.consumed <= 2**53
    # generators: set, or seeded anew where the topology is another now
    found = tensors(engine)[: len(wanted) - 1]
    same = len(found) == len(wanted) - 1 and all(map(torch.equal, found, wanted))
    return (
        "same"
        if same and in_range
        else f"accepted, changed: steps {engine.steps}, same tensors {same}"
    )


def tools(path: Path) -> None:
    """`threed inspect` and `threed convert` end by themselves."""
    for words in (["inspect", str(path)], ["convert", str(path), str(path / "hf")]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(words) in (0, 2), words


def fuzzed(folder: Path, seed: int, count: int) -> Counter[tuple[str, str]]:
    run_ranks(2, save, folder)
    run_ranks(1, save_alone, folder)
    ends, wrong = run_ranks(1, quietly_fuzz, folder, seed, count)[0]
    assert wrong == []
    return ends


def quietly_fuzz(folder: Path, seed: int, count: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    with warnings.catch_warnings():
        # of moments that begin at zero, and generators of another topology
        warnings.simplefilter("ignore")
        return fuzz(folder, seed, count)


def test_no_mutant_gets_through(tmp_path: Path) -> None:
    ends = fuzzed(tmp_path, 1, 240)
    assert sum(ends.values()) == 240
    assert all(ends[kind, "refused"] for kind in KINDS)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(2, 12))
def test_no_mutant_of_thousands_gets_through(seed: int, tmp_path: Path) -> None:
    assert sum(fuzzed(tmp_path, seed, 1000).values()) == 1000
