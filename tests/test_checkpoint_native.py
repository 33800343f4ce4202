"""The native format: resume is bit-exact, any topology loads any other's, and nothing damaged or half-written passes."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from threed import collectives
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError, publish, sha256, stream_tensors, write_tensors
from threed.engine import Engine
from threed.sharding import Piece, boxes, intersect
from threed.zero.records import records


def train(engine: Engine, count: int) -> list[float]:
    """The losses of `count` more steps."""
    rows = engine.config.train.global_batch
    return [engine.step(share(batch(engine.steps, rows), engine.topology)).loss for _ in range(count)]


def state_of(engine: Engine) -> list[tuple[str, str, Tensor]]:
    """A copy of every box of weight and moments on this rank."""
    engine.optimizer.settle()
    return [(r.part, r.piece.name, r.values.clone()) for r in records(engine.optimizer)]


def distance(one: list[tuple[str, str, Tensor]], other: list[tuple[str, str, Tensor]]) -> float:
    """The largest difference of two states of one topology."""
    assert [a[:2] for a in one] == [b[:2] for b in other]
    return max((float((a[2] - b[2]).abs().max()) for a, b in zip(one, other, strict=True)), default=0.0)


# ------------------------------------------------------------------------------------------------------------ resume

SHAPES = {"pp2 tp2": (2, 1, 2), "dp2 tp2": (1, 2, 2), "pp2 dp2": (2, 2, 1), "tp4": (1, 1, 4), "dp4": (1, 4, 1)}
RESUMED = [
    Case(*shape, model=model, zero=zero, dtype=dtype, dropout=0.1, sequence=shape[2] > 1, bucket_mib=0.01, layers=3)
    for number, (shape, zero, dtype) in enumerate(itertools.product(SHAPES.values(), (0, 1), ("fp32", "bf16")))
    for model in [("gpt", "llama", "qwen-tied", "gpt-untied")[number % 4]]
]


def resume(folder: Path, cases: list[Case]) -> list[str]:
    """What differs between ten steps, and five, a restart and five."""
    wrong = []
    for number, case in enumerate(cases):
        straight = engine_of(config_of(case))
        first = train(straight, 5)
        straight.save(folder / f"step-{number}", {"note": case.model})
        second = train(straight, 5)
        resumed = engine_of(config_of(case))
        extra = resumed.load(folder / f"step-{number}")
        losses = train(resumed, 5)
        gap = distance(state_of(straight), state_of(resumed))
        moved = max(float(values.abs().max()) for part, _, values in state_of(resumed) if part == "exp_avg_sq")
        facts = (losses == second, gap == 0.0, extra == {"note": case.model}, resumed.steps == 10, moved > 0)
        facts += (resumed.consumed == straight.consumed, len(set(first + second)) == 10)
        if not all(facts):
            wrong.append(f"{case}: {facts}, distance {gap}, losses {losses} and {second}")
    return wrong


def test_ten_steps_are_five_a_restart_and_five(tmp_path: Path) -> None:
    """Difference 0.0 in every weight, in both moments and in the losses."""
    results = run_ranks(4, resume, tmp_path, RESUMED)
    assert not any(results), results
    alone = [Case(model="gpt", dtype=dtype, dropout=0.1, layers=3) for dtype in ("fp32", "bf16")]
    assert run_ranks(1, resume, tmp_path / "alone", alone) == [[]]


@dataclass(frozen=True)
class Move:
    """A checkpoint's way from one topology to another."""

    source: Case
    target: Case
    tolerance: float


def move(source: tuple[int, int, int], target: tuple[int, int, int], tolerance: float, **settings: Any) -> Move:
    """A move with the same model, data and batch on both sides."""
    zero = settings.pop("zero", (1, 1))
    settings = {"microbatches": -12, "layers": 5, "dtype": "fp64" if tolerance < 1e-6 else "fp32", **settings}
    cases = [Case(*shape, zero=z, sequence=shape[2] > 1, **settings) for shape, z in zip((source, target), zero)]
    return Move(*cases, tolerance)


# fp64: the order of sums is all that differs; fp32: the same at 1e-7 a rounding. No tp divides the vocabulary, 53.
MOVES = [
    move((2, 2, 1), (1, 2, 2), 1e-5, microbatches=3),
    move((2, 2, 1), (1, 2, 2), 1e-9, microbatches=3, model="llama", dropout=0.1),
    move((1, 1, 4), (4, 1, 1), 1e-9, model="qwen-tied"),  # one key/value head on four ranks, tied over four stages
    move((1, 4, 1), (1, 1, 4), 1e-9, model="qwen-tied", bucket_mib=0.01),
    move((2, 1, 2), (1, 4, 1), 1e-9, model="llama", zero=(1, 0)),
    move((1, 4, 1), (2, 1, 2), 1e-9, model="gpt-untied", zero=(0, 1), dropout=0.1),
    move((4, 1, 1), (1, 1, 1), 1e-9, model="gpt"),
    move((1, 2, 2), (1, 1, 1), 1e-9, model="llama"),
    move((2, 1, 2), (2, 1, 1), 1e-9, model="qwen-tied"),
    move((1, 2, 2), (1, 1, 2), 1e-5, model="gpt", dropout=0.1),
    move((1, 1, 1), (2, 2, 2), 1e-9, model="llama", dropout=0.1),
]


def depart(folder: Path, moves: dict[int, Move]) -> dict[int, tuple[list[float], dict[str, Tensor]]]:
    """Two steps and a checkpoint for each move, then how it would have gone on: losses and weights."""
    out = {}
    for number, one in moves.items():
        engine = engine_of(config_of(one.source))
        train(engine, 2)
        engine.save(folder / f"move-{number}")
        out[number] = (train(engine, 3), engine.full_state_dict())
    return out


def arrive(folder: Path, moves: dict[int, Move]) -> dict[int, tuple[list[float], dict[str, Tensor]]]:
    """How it goes on in the other topology."""
    out = {}
    for number, one in moves.items():
        engine = engine_of(config_of(one.target))
        engine.load(folder / f"move-{number}")
        out[number] = (train(engine, 3), engine.full_state_dict())
    return out


def by_world(moves: dict[int, Move], case: Callable[[Move], Case]) -> Iterator[tuple[int, dict[int, Move]]]:
    for world in sorted({case(one).world for one in moves.values()}):
        yield world, {number: one for number, one in moves.items() if case(one).world == world}


def test_any_topology_goes_on_from_any_other(tmp_path: Path) -> None:
    """Losses and every weight, three steps on, as without the move."""
    moves, wanted, found = dict(enumerate(MOVES)), {}, {}
    for world, some in by_world(moves, lambda one: one.source):
        wanted |= run_ranks(world, depart, tmp_path, some)[0]
    for world, some in by_world(moves, lambda one: one.target):
        found |= run_ranks(world, arrive, tmp_path, some)[0]
    for number, one in moves.items():
        assert found[number][0] == pytest.approx(wanted[number][0], rel=one.tolerance, abs=0), one
        assert found[number][1].keys() == wanted[number][1].keys()
        for name, want in wanted[number][1].items():
            torch.testing.assert_close(
                found[number][1][name], want, rtol=0, atol=one.tolerance, msg=lambda m, n=name, o=one: f"{o} {n}: {m}"
            )


# ---------------------------------------------------------------------------------------------------------- contents


def save_and_collect(folder: Path, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Saves each case after a step; its weights."""
    out = []
    for number, case in enumerate(cases):
        engine = engine_of(config_of(case))
        train(engine, 1)
        engine.save(folder / f"step-{number}")
        out.append(engine.full_state_dict())
    return out


def test_a_checkpoint_holds_every_value_once_and_no_padding(tmp_path: Path) -> None:
    cases = [
        Case(1, 2, 2, model="qwen-tied", zero=1, sequence=True, bucket_mib=0.01, layers=3),
        Case(2, 1, 2, model="qwen-tied", layers=3),
        Case(2, 2, 1, model="gpt", zero=0, layers=3),
    ]
    for number, weights in enumerate(run_ranks(4, save_and_collect, tmp_path, cases)[0]):
        path = tmp_path / f"step-{number}"
        manifest = native.read_manifest(path)
        assert native.verify(path, manifest) == []
        saved = sum(math.prod(box[4]) for entry in manifest["files"] for box in entry["boxes"])
        assert saved == 3 * sum(w.numel() for w in weights.values())
        reader = native.Reader(path, manifest)
        assert reader.shapes == {name: tuple(w.shape) for name, w in weights.items()}
        assert all(torch.equal(reader.full("weight", name), w) for name, w in weights.items())
        word, part = weights["embedding.word.weight"], reader.box("weight", "embedding.word.weight", (7, 3), (40, 2))
        assert torch.equal(part, word[7:47, 3:5])
        assert all(reader.full("exp_avg_sq", name).min() >= 0 for name in weights)


def test_reading_what_was_never_saved_is_an_error(tmp_path: Path) -> None:
    run_ranks(1, save_and_collect, tmp_path, [Case(layers=1)])
    path = tmp_path / "step-0"
    reader = native.Reader(path, native.read_manifest(path))
    with pytest.raises(CheckpointError, match="0 of 4 values of weight of nobody"):
        reader.box("weight", "nobody", (0,), (4,))
    with pytest.raises(CheckpointError, match="values of weight of embedding.word.weight"):
        reader.box("weight", "embedding.word.weight", (50, 0), (10, 32))


# ------------------------------------------------------------------------------------------------------------ damage


def sealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest, and its own hash with it, as somebody would who means it."""
    body = json.loads((path / "manifest.json").read_text())
    change(body)
    del body["sha256"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


def flip(file: Path, at: int) -> None:
    """Flips one bit."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def swap_files(path: Path) -> None:
    """Two files of one size change places."""
    one, other = path / "rank-00000.safetensors", path / "rank-00001.safetensors"
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def make_link(path: Path) -> None:
    """A file becomes a link to its good self elsewhere."""
    file = path / "rank-00003.safetensors"
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def lead_out(path: Path) -> None:
    """The manifest names a good file outside of its folder."""
    shutil.move(path / "rank-00001.safetensors", path.parent / "outside.safetensors")
    sealed(path, lambda body: body["files"][1].update(file="../outside.safetensors"))


# Damage, and what the error must name.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit of a value": (lambda p: flip(p / "rank-00002.safetensors", -5), "rank-00002.safetensors is damaged"),
    "bit of a header": (lambda p: flip(p / "rank-00001.safetensors", 20), "rank-00001.safetensors is damaged"),
    "bit of a length": (lambda p: flip(p / "rank-00000.safetensors", 6), "rank-00000.safetensors is damaged"),
    "cut short": (lambda p: os.truncate(p / "rank-00001.safetensors", 5000), "rank-00001.safetensors has 5000 bytes"),
    "swapped": (swap_files, "rank-00000.safetensors"),
    "deleted": (lambda p: (p / "rank-00003.safetensors").unlink(), "rank-00003.safetensors is missing"),
    "a folder": (lambda p: ((p / "rank-00000.safetensors").unlink(), (p / "rank-00000.safetensors").mkdir()), "rank-00000.safetensors is missing"),
    "a link": (make_link, "rank-00003.safetensors is missing, or not a plain file"),
    "leads out": (lead_out, "outside.safetensors is missing, or not a plain file of its folder"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json"),
    "no JSON": (lambda p: (p / "manifest.json").write_text('{"format": '), "manifest.json cannot be read"),
    "no text": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json cannot be read"),
    "a list": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is not that of"),
    "of the future": (lambda p: sealed(p, lambda body: body.update(version=99)), "manifest.json is not that of a version 1"),
    "bit of a counter": (
        lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text().replace('"steps": 2', '"steps": 3')),
        "manifest.json is damaged",
    ),
    "a box too few": (lambda p: sealed(p, lambda body: body["files"][2]["boxes"].pop()), "values of exp_avg_sq of"),
    "a file too few": (lambda p: sealed(p, lambda body: body["files"].pop()), "the checkpoint has 0 of"),
    "not there": (lambda p: shutil.rmtree(p), "it has no manifest.json"),
}  # fmt: skip


def load_damaged(folder: Path) -> dict[str, tuple[str, bool]]:
    """For each damage, on every rank: what loading said, and whether the engine was left as it was."""
    case = Case(2, 1, 2, model="gpt-untied", dtype="fp32", layers=2, partition="2,2")
    engine = engine_of(config_of(case))
    train(engine, 2)
    engine.save(folder / "good")
    train(engine, 1)
    world, before, out = engine.topology.axis("world"), state_of(engine), {}
    for kind, (damage, _) in DAMAGES.items():
        path = folder / kind / "step-2"
        if world.index == 0:
            damage(shutil.copytree(folder / "good", path))
        collectives.exchange(None, world)
        try:
            engine.load(path)
            said = "nothing"
        except CheckpointError as error:
            said = str(error)
        same = distance(before, state_of(engine)) == 0.0 and engine.steps == 3
        out[kind] = (said, same)
    usable = math.isfinite(train(engine, 1)[0])
    engine.load(folder / "good")
    out["engine"] = ("", usable and engine.steps == 2)
    return out


def test_damage_is_named_on_every_rank_and_touches_nothing(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(4, load_damaged, tmp_path)):
        for kind, (_, naming) in DAMAGES.items():
            said, same = found[kind]
            assert naming in said, (rank, kind, said)
            assert same, (rank, kind)
        assert found["engine"][1]


def load_other_shapes(folder: Path) -> list[str]:
    """What loading another model's checkpoint says."""
    engine_of(config_of(Case(model="llama", layers=2))).save(folder / "step-0")
    said = []
    for case in (Case(model="llama", layers=3), Case(model="gpt", layers=2), Case(model="llama", layers=2, dropout=0.3)):
        try:
            engine_of(config_of(case)).load(folder / "step-0")
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_another_model_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    ((layers, arch, dropout),) = run_ranks(1, load_other_shapes, tmp_path)
    assert "layers = 2, this run has 3" in layers
    assert "heads" not in layers
    assert all(key in arch for key in ("arch = llama, this run has gpt", "kv_heads = 2", "ffn = 72", "tied = False"))
    assert "--checkpoint.resume none" in arch
    assert dropout == ""  # no shape


# ----------------------------------------------------------------------------------------------------------- atomicity


def save_twice(folder: Path) -> tuple[list[str], float, int]:
    """The same step saved again: what lies in the folder, and what is read back."""
    engine = engine_of(config_of(Case(1, 2, 1, dtype="fp32", layers=2)))
    engine.save(folder / "step-1")
    train(engine, 2)
    engine.save(str(folder / "step-1"))
    other = engine_of(engine.config)
    other.load(folder / "step-1")
    return sorted(path.name for path in folder.iterdir()), distance(state_of(engine), state_of(other)), other.steps


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    assert run_ranks(2, save_twice, tmp_path / "deep" / "er")[0] == (["step-1"], 0.0, 2)


def save_badly(folder: Path) -> list[str]:
    """Saves that cannot succeed: what each rank hears."""
    engine = engine_of(config_of(Case(1, 2, 1, dtype="fp32", layers=2)))
    engine.save(folder / "step-1")
    said = []
    for path, extra in (
        (folder / "mine", {}),
        (folder / "file", {}),
        (folder / "file" / "step-2", {}),
        (folder / "step-2", {"tensor": object()}),
    ):
        try:
            engine.save(path, extra)
        except CheckpointError as error:
            said.append(str(error))
    engine.save(folder / "step-3", {"fine": [1, (2, 3)], "numbers": {10: 1, 9: 2}})
    extra = engine.load(folder / "step-3")
    assert extra == {"fine": [1, [2, 3]], "numbers": {"10": 1, "9": 2}}
    return said


def test_a_save_that_cannot_succeed_says_so_on_all_ranks_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("42")
    (tmp_path / "file").write_text("43")
    results = run_ranks(2, save_badly, tmp_path)
    assert results[0] == results[1]
    foreign, file, below, extra = results[0]
    assert "mine exists and is no checkpoint" in foreign
    assert "file exists and is no checkpoint" in file
    assert "Not a directory" in below
    assert "not JSON serializable" in extra
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "42"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "step-1", "step-3"]


def save_on_a_full_disk(folder: Path, full: int) -> str:
    """A save during which rank `full` cannot write more than 30 kB to a file; then one that works."""
    engine = engine_of(config_of(Case(2, 2, 1, dtype="fp32", layers=2)))
    engine.save(folder / "step-1")
    train(engine, 1)
    before, said = state_of(engine), ""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.topology.rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        engine.save(folder / "step-2")
    except CheckpointError as error:
        said = str(error)
    left = sorted(path.name for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left == ["step-1"], left
    assert distance(before, state_of(engine)) == 0.0
    engine.save(folder / "step-2")
    engine.load(folder / "step-1")
    return said


@pytest.mark.parametrize("full", [0, 3])
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_nothing_half_written(full: int, tmp_path: Path) -> None:
    results = run_ranks(4, save_on_a_full_disk, tmp_path, full)
    assert len(set(results)) == 1
    assert f"rank {full} could not write" in results[0]
    assert f"rank-{full:05d}.safetensors" in results[0]
    assert "earlier checkpoints are intact" in results[0]


def die_when(ready: Callable[[], bool]) -> None:
    """Watches, and kills this process as nothing can be caught."""

    def watch() -> None:
        while not ready():
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def save_and_die(folder: Path, again: str, moment: str) -> None:
    """Saves step 1, then `again`, and dies in the middle of that, on all ranks: while writing, or at the manifest."""
    config = config_of(Case(1, 2, 1, dtype="fp32", layers=2))
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": 60_000})})
    engine = engine_of(config)
    engine.save(folder / "step-1")
    building = folder / f"{again}.tmp"
    file = building / ("manifest.json" if moment == "manifest" else f"rank-{engine.topology.rank:05d}.safetensors")
    die_when(lambda: file.exists() and (moment == "manifest" or file.stat().st_size > 0))
    engine.save(folder / again)
    time.sleep(30)


def after_death(folder: Path, again: str) -> int:
    """The next start: loads step 1, and saves what was interrupted."""
    config = config_of(Case(1, 2, 1, dtype="fp32", layers=2))
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": 60_000})})
    engine = engine_of(config)
    engine.load(folder / "step-1")
    engine.save(folder / again)
    return len(list(folder.iterdir()))


@pytest.mark.parametrize("again", ["step-2", "step-1"])
@pytest.mark.parametrize("moment", ["writing", "manifest"])
def test_kill_9_in_the_middle_of_a_save_leaves_the_previous_checkpoint(
    again: str, moment: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(2, save_and_die, tmp_path, again, moment)
    steps = [path for path in tmp_path.iterdir() if path.suffix != ".tmp"]
    assert tmp_path / "step-1" in steps
    for path in steps:
        assert native.verify(path, native.read_manifest(path)) == []
    if moment == "writing":
        assert steps == [tmp_path / "step-1"]
        with pytest.raises(CheckpointError, match="it has no manifest"):
            native.read_manifest(tmp_path / f"{again}.tmp")
    assert run_ranks(2, after_death, tmp_path, again)[0] == len({"step-1", again})


# ------------------------------------------------------------------------------------------------------- files, boxes


def test_files_of_tensors_are_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
    tensors = {str(dtype): (torch.randn(5, 3) * 10).to(dtype).t() for dtype in dtypes}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "ünï": torch.ones(1)}
    digest = write_tensors(tmp_path / "f", tensors, {"a": "b"})
    assert digest == sha256(tmp_path / "f") == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert file.metadata() == {"a": "b"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_a_stream_that_is_not_what_was_announced_is_an_error(tmp_path: Path) -> None:
    about = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with pytest.raises(ValueError, match="b is torch.float32 .3,., announced as"):
        stream_tensors(tmp_path / "f", about, iter([torch.zeros(2), torch.zeros(3)]))
    with pytest.raises(ValueError, match="shorter"):
        stream_tensors(tmp_path / "f", about, iter([torch.zeros(2)]))


def test_publish_replaces_a_folder_whole(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / f"file-{number}").touch()
        publish(tmp_path / "new", tmp_path / "name")
        assert [path.name for path in tmp_path.iterdir()] == ["name"]
        assert [path.name for path in (tmp_path / "name").iterdir()] == [f"file-{number}"]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Piece, int, int]:
    """A piece of a global tensor of 1 to 4 dimensions, and a range of its elements."""
    size = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, 3)) for _ in size)
    shape = tuple(s + n + draw(st.integers(0, 2)) for s, n in zip(start, size, strict=True))
    first = draw(st.integers(0, math.prod(size)))
    return Piece("name", shape, start, size), first, draw(st.integers(first, math.prod(size)))


@given(ranges())
def test_boxes_hold_every_element_of_a_range_once_and_in_order(drawn: tuple[Piece, int, int]) -> None:
    piece, first, last = drawn
    number = torch.full(piece.shape, -1)
    inside = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))
    number[inside] = torch.arange(piece.numel).view(piece.size)
    found = list(boxes(piece, first, last))
    assert len(found) <= 2 * len(piece.size) - 1
    flat = torch.full((last - first,), -1)
    for box in found:
        part = number[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))]
        assert part.shape == box.size  # inside the global tensor
        assert (flat[box.offset : box.offset + box.numel] == -1).all()
        flat[box.offset : box.offset + box.numel] = part.reshape(-1)
    assert flat.tolist() == list(range(first, last))


@st.composite
def pairs_of_boxes(draw: st.DrawFn) -> list[list[tuple[int, ...]]]:
    """Start and size of two boxes in one space."""
    dimensions = draw(st.integers(1, 3))
    return [
        [tuple(draw(st.integers(low, 4)) for _ in range(dimensions)) for low in (0, 1)]
        for _ in range(2)
    ]  # fmt: skip


@given(pairs_of_boxes())
def test_the_common_part_of_two_boxes_is_what_both_hold(pair: list[list[tuple[int, ...]]]) -> None:
    def cells(start: tuple[int, ...], size: tuple[int, ...]) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(s, s + n) for s, n in zip(start, size, strict=True))))

    (one, other), common = pair, intersect(*pair[0], *pair[1])
    assert (cells(*common) if common else set()) == cells(*one) & cells(*other)
    assert intersect(*other, *one) == common
