"""The native format: every value once, and nothing damaged, half-written or another model's passes."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import distance, hashes_of, state_of, train
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import read_all, read_box
from threed.checkpoint.reading import Reader, TensorFile
from threed.distributed import collectives
from threed.engine import Engine

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
        saved = sum(
            math.prod(piece[2]) * len(section["parts"]) for section, piece in pieces_of(manifest)
        )
        assert saved == 3 * sum(w.numel() for w in weights.values())
        inside = [
            file.tensors.items() for file in map(TensorFile, sorted(path.glob("*.safetensors")))
        ]
        assert saved == sum(
            shape[0] for items in inside for key, (_, (*shape,), _) in items if key.isdecimal()
        )
        reader = Reader(path, manifest)
        assert reader.shapes == {name: tuple(w.shape) for name, w in weights.items()}
        assert all(
            torch.equal(read_all(reader.tensor("weight", name)), w) for name, w in weights.items()
        )
        word = weights["embedding.word.weight"]
        part = read_box(reader.tensor("weight", "embedding.word.weight"), (7, 3), (40, 2))
        assert torch.equal(part, word[7:47, 3:5])
        assert all(read_all(reader.tensor("exp_avg_sq", name)).min() >= 0 for name in weights)


def test_reading_what_was_never_saved_is_an_error(tmp_path: Path) -> None:
    run_ranks(1, save_and_collect, tmp_path, [Case(layers=1)])
    path = tmp_path / "step-0"
    reader = Reader(path, native.read_manifest(path))
    with pytest.raises(CheckpointError, match="has no weight of nobody"):
        reader.tensor("weight", "nobody")
    with pytest.raises(CheckpointError, match=r"has no momentum of embedding\.word\.weight"):
        reader.tensor("momentum", "embedding.word.weight")


# ------------------------------------------------------------------------------------------------------------ damage


def sealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest, and its own hash with it, as somebody would who means it."""
    body = json.loads((path / "manifest.json").read_text())
    change(body)
    body.pop("sha256", None)
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


def make_folder(path: Path) -> None:
    """A folder where a file was."""
    (path / "rank-00000.safetensors").unlink()
    (path / "rank-00000.safetensors").mkdir()


def replace_text(path: Path, old: str, new: str) -> None:
    """Changes the manifest, and not its hash."""
    text = (path / "manifest.json").read_text()
    assert text.count(old) == 1
    (path / "manifest.json").write_text(text.replace(old, new))


def make_link(path: Path) -> None:
    """A file becomes a link to its good self elsewhere."""
    file = path / "rank-00003.safetensors"
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def lead_out(path: Path) -> None:
    """The manifest names a good file outside of its folder."""
    shutil.move(path / "rank-00001.safetensors", path.parent / "outside.safetensors")
    sealed(path, lambda body: body["files"][1].update(file="../outside.safetensors"))


def pieces_of(body: dict[str, Any]) -> list[tuple[dict[str, Any], list[Any]]]:
    """Every piece of a manifest, with its section."""
    lines = [(section, line) for section in body["sections"] for line in section["lines"]]
    return [(section, piece) for section, line in lines for piece in line["pieces"]]


def first_piece(body: dict[str, Any]) -> list[Any]:
    return list(pieces_of(body)[0][1])


def shift_a_piece(body: dict[str, Any]) -> None:
    """Two pieces of one size become the same one: the counts add up, and some values are there twice."""
    seen: dict[str, list[Any]] = {}
    for _, piece in pieces_of(body):
        other = seen.setdefault(json.dumps([piece[0], piece[2]]), piece[1])
        if other != piece[1]:
            piece[1] = other
            return


def rename(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda body: pieces_of(body)[0][1].__setitem__(0, name)


def exchange_numbers(body: dict[str, Any]) -> None:
    """Two files are said to have what the other one has."""
    pairs = itertools.combinations(body["files"], 2)
    one, other = next(pair for pair in pairs if pair[0]["holds"] != pair[1]["holds"])
    one["holds"], other["holds"] = other["holds"], one["holds"]


def cut_otherwise(body: dict[str, Any]) -> None:
    """A line is cut into other windows, of which every file would have as many elements."""
    line = max(
        (line for section in body["sections"] for line in section["lines"]),
        key=lambda line: line["length"],
    )
    line["step"] = 2 * line["step"] if line["step"] < line["length"] else line["step"] // 2


def drop_a_piece(body: dict[str, Any]) -> None:
    """One of those that a tensor is cut into."""
    lines = [line["pieces"] for section in body["sections"] for line in section["lines"]]
    some = next(
        (pieces, piece)
        for pieces in lines
        for piece in pieces
        if piece[2] != body["shapes"][piece[0]]
    )
    some[0].remove(some[1])


def gone(file: Path) -> Path:
    """Its name, free now."""
    file.unlink()
    return file


def many_boxes(body: dict[str, Any]) -> None:
    """Adds a tensor of 20,000 boxes in eight dimensions."""
    boxes = [["x", [n, *[0] * 7], [1] * 8, n] for n in range(20_000)]
    line = {"length": len(boxes), "step": len(boxes), "pieces": boxes}
    body["files"][0]["holds"].append([len(body["sections"]), 0])
    cut = {"portions": 1, "writers": 1, "lines": [line]}
    body["sections"].append({"parts": ["weight"], "dtype": "F32", **cut})
    body["shapes"]["x"] = [len(boxes), *[1] * 7]


def resealed(path: Path, at: int, new: bytes | None, old: bytes = b"", by: bytes = b"") -> None:
    """Changes a file of tensors, and all the hashes with it: some bytes at a place, or one text by another."""
    file = path / "rank-00001.safetensors"
    data = file.read_bytes()
    data = data.replace(old, by) if new is None else data[:at] + new + data[at + len(new) :]
    file.write_bytes(data)
    sealed(path, lambda body: body["files"][1].update(hashes_of(file), size=len(data)))


# Damage, and what the error must name.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit of a value": (lambda p: flip(p / "rank-00002.safetensors", -5), "rank-00002.safetensors is damaged"),
    "bit of a header": (lambda p: flip(p / "rank-00001.safetensors", 20), "rank-00001.safetensors is damaged"),
    "bit of a length": (lambda p: flip(p / "rank-00000.safetensors", 6), "rank-00000.safetensors is damaged"),
    "cut short": (lambda p: os.truncate(p / "rank-00001.safetensors", 5000), "rank-00001.safetensors has 5000 bytes"),
    "swapped": (swap_files, "rank-00000.safetensors"),
    "deleted": (lambda p: (p / "rank-00003.safetensors").unlink(), "rank-00003.safetensors is missing"),
    "a folder": (make_folder, "rank-00000.safetensors is missing, or not a plain file"),
    "a link": (make_link, "rank-00003.safetensors is missing, or not a plain file"),
    "leads out": (lead_out, "outside.safetensors is missing, or not a plain file of its folder"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json"),
    "no JSON": (lambda p: (p / "manifest.json").write_text('{"format": '), "manifest.json cannot be read"),
    "no text": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json cannot be read"),
    "a list": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is not the manifest of"),
    "of the future": (lambda p: sealed(p, lambda body: body.update(version=99)), "is of version 99 of the format"),
    "of the past": (
        lambda p: sealed(p, lambda body: body.update(version=2)), "this program reads version 3: use the"
    ),
    "of no version": (lambda p: sealed(p, lambda body: body.update(version=True)), "manifest.json is not the manifest of"),
    "bit of a counter": (lambda p: replace_text(p, '"steps": 2', '"steps": 3'), "manifest.json is damaged"),
    "a piece too few": (lambda p: sealed(p, drop_a_piece), "values of weight of"),
    "a file too few": (lambda p: sealed(p, lambda body: body["files"].pop()), "numbers of section"),
    "a number twice": (
        lambda p: sealed(p, lambda b: b["files"][0]["holds"].append(b["files"][1]["holds"][0])), "files have number"
    ),
    "numbers exchanged": (lambda p: sealed(p, exchange_numbers), "as the manifest says"),
    "other windows": (lambda p: sealed(p, cut_otherwise), "as the manifest says"),
    "a hole and an overlap": (lambda p: sealed(p, shift_a_piece), "manifest.json is not valid: boxes of"),
    "a piece outside": (lambda p: sealed(p, lambda b: pieces_of(b)[0][1][1].append(0)), "another number of dimensions"),
    "pieces on each other": (lambda p: sealed(p, lambda b: pieces_of(b)[-1][1].__setitem__(3, 2**40)), "its pieces"),
    "another shape": (lambda p: sealed(p, lambda b: b["shapes"][first_piece(b)[0]].__setitem__(0, 1)), "outside its shape"),
    "boxes beyond count": (lambda p: sealed(p, many_boxes), "split into too many boxes"),
    "half a loss scale": (lambda p: sealed(p, lambda body: body["state"].update(good_steps=3)), "go together"),
    "a shape of nobody": (lambda p: sealed(p, lambda body: body["shapes"].update(x=[1])), "it has no values of x"),
    "a start of infinity": (lambda p: sealed(p, lambda b: pieces_of(b)[0][1][1].append(math.inf)), "pieces.0.1"),
    "updates of infinity": (lambda p: sealed(p, lambda body: body["state"].update(updates=math.inf)), "state.updates"),
    "fewer than no samples": (lambda p: sealed(p, lambda body: body["state"].update(consumed=-5)), "state.consumed"),
    "a step in doubles": (lambda p: sealed(p, lambda body: body["state"].update(steps=1e300)), "state.steps"),
    "no counters": (lambda p: sealed(p, lambda body: body.update(state=[])), "manifest.json is not valid: state"),
    "a name for terminals": (lambda p: sealed(p, rename("\x1b[2J")), "pieces.0.0: Value error, must be printable"),
    "a file twice": (lambda p: sealed(p, lambda body: body["files"].append(body["files"][0])), "names a file twice"),
    "a deep nest": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
    "a long number": (lambda p: (p / "manifest.json").write_text("9" * 5000), "manifest.json cannot be read"),
    "a pipe": (lambda p: os.mkfifo(gone(p / "manifest.json")), "manifest.json cannot be read: it is not a regular file"),
    "a manifest's folder": (lambda p: gone(p / "manifest.json").mkdir(), "cannot be read: it is not a regular file"),
    "a header of exabytes": (lambda p: resealed(p, 0, b"\xff" * 7 + b"\0"), "rank-00001.safetensors cannot be read"),
    "a header that is none": (lambda p: resealed(p, 8, b"{{"), "rank-00001.safetensors cannot be read"),
    "other dtypes": (lambda p: resealed(p, 8, None, b'"F32"', b'"I32"'), "rank-00001.safetensors cannot be read"),
    "not there": (lambda p: shutil.rmtree(p), "it does not exist"),
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
    for case in (
        Case(model="llama", layers=3),
        Case(model="gpt", layers=2),
        Case(model="llama", layers=2, dropout=0.3),
    ):
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
    assert all(
        key in arch
        for key in ("arch = llama, this run has gpt", "kv_heads = 2", "ffn = 72", "tied = False")
    )
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
    return (
        sorted(path.name for path in folder.iterdir()),
        distance(state_of(engine), state_of(other)),
        other.steps,
    )


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
    assert "mine exists and is not a checkpoint" in foreign
    assert "file exists and is not a checkpoint" in file
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
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_nothing_half_written(
    full: int, tmp_path: Path
) -> None:
    results = run_ranks(4, save_on_a_full_disk, tmp_path, full)
    assert len(set(results)) == 1
    assert f"rank {full} could not write" in results[0]
    assert f"rank-{full:05d}.safetensors" in results[0]
    assert "earlier checkpoints are intact" in results[0]


def die_when(ready: Callable[[], bool]) -> None:
    """Watches, and kills this process in a way that nothing can catch."""

    def watch() -> None:
        while not ready():
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def large_engine() -> Engine:
    """An engine whose checkpoints take some time to write."""
    config = config_of(Case(1, 2, 1, dtype="fp32", layers=2))
    return engine_of(
        config.model_copy(update={"model": config.model.model_copy(update={"vocab": 60_000})})
    )


def inode(file: Path) -> int:
    """Which file it is, 0 for none."""
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return 0


def save_and_die(folder: Path, again: str, moment: str) -> None:
    """Saves step 1, then `again`, and dies in the middle of that, on all ranks: while writing, or about the rename."""
    engine = large_engine()
    engine.save(folder / "step-1")
    building, manifest = folder / f"{again}.tmp", folder / again / "manifest.json"
    file, before = building / f"rank-{engine.topology.rank:05d}.safetensors", inode(manifest)
    if moment == "writing":
        die_when(lambda: file.exists() and file.stat().st_size > 0)
    else:
        die_when(lambda: (building / "manifest.json").exists() or inode(manifest) != before)
    engine.save(folder / again)
    time.sleep(30)


def after_death(folder: Path, again: str) -> list[str]:
    """The next start: loads step 1, and saves what was interrupted."""
    engine = large_engine()
    engine.load(folder / "step-1")
    engine.save(folder / again)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.seldom("writing-step-1", "renaming-step-1")
@pytest.mark.parametrize("again", ["step-2", "step-1"])
@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_kill_9_in_the_middle_of_a_save_leaves_the_previous_checkpoint(
    again: str, moment: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="died without a traceback"):
        run_ranks(2, save_and_die, tmp_path, again, moment)
    steps = [path for path in tmp_path.iterdir() if path.suffix != ".tmp"]
    assert tmp_path / "step-1" in steps
    for path in steps:
        assert native.verify(path, native.read_manifest(path)) == []
    if moment == "writing":
        assert steps == [tmp_path / "step-1"]
        with pytest.raises(CheckpointError, match="it has no manifest"):
            native.read_manifest(tmp_path / f"{again}.tmp")
    assert run_ranks(2, after_death, tmp_path, again)[0] == sorted({"step-1", again})
