"""Megatron-LM's checkpoints, written as its sources lay them out, become native ones bit for bit."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import megatron_checkpoints as written
from tests.harness import run_ranks
from tests.megatron_checkpoints import GPT, LLAMA
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import read_all
from threed.checkpoint.reading import Reader
from threed.cli import commands
from threed.config import ModelConfig
from threed.interop.convert import convert

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "gpt": (GPT, {}),
    "numbered": (LLAMA, {"numbered": True}),
    "an entry": (GPT, {"entry": True}),
    "not Transformer Engine": (LLAMA, {"engine": False}),
    "gpt, not Transformer Engine": (GPT, {"engine": False}),
    "tied": (LLAMA | {"untie_embeddings_and_output_weights": False}, {}),
    "biases": (LLAMA | {"add_bias_linear": True}, {}),
    "biases of queries": (LLAMA | {"add_qkv_bias": True}, {}),
    "norms of heads": (LLAMA | {"qk_layernorm": True}, {}),
}
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
TENSORS: dict[str, tuple[dict[str, Tensor], str]] = {
    "a scalar": ({QKV: torch.tensor(1.0)}, r"linear_qkv.weight is \[\], and needs 40 rows"),
    "a layer number of many digits": (
        {f"decoder.layers.{'9' * 5000}.mlp": torch.ones(3)},
        "does not fit its args",
    ),
}


def write_all(place: Path) -> None:
    for name, (args, layout) in CASES.items():
        weights = written.weights_of(written.model_of(args))
        written.write_dist(place / name, args, weights, **layout)
    for name, (tensors, _) in TENSORS.items():
        weights = written.weights_of(written.model_of(LLAMA))
        written.write_dist(place / name, LLAMA, weights, numbered=True, more=tensors)


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of torch_dist, written by two ranks."""
    place = tmp_path_factory.mktemp("dist")
    run_ranks(2, write_all, place)
    return place


def check(out: Path, args: dict[str, Any], weights: dict[str, Tensor]) -> None:
    manifest = native.read_manifest(out)
    assert native.verify(out, manifest) == []
    assert (manifest["state"]["steps"], manifest["state"]["consumed"]) == (0, 0)
    assert ModelConfig.model_validate(manifest["config"]["model"]) == written.model_of(args)
    with Reader(out, manifest) as reader:
        assert reader.shapes.keys() == weights.keys()
        for name, want in weights.items():
            assert torch.equal(read_all(reader.tensor("weight", name)), want), name


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_same_bit_for_bit(case: str, dists: Path, tmp_path: Path) -> None:
    args = CASES[case][0]
    assert len(list((dists / case).glob("*.distcp"))) == 2
    with pytest.warns(UserWarning, match="only weights are imported.*zero moments"):
        out = convert(dists / case, tmp_path / "native", allow_pickle=True)
    check(out, args, written.weights_of(written.model_of(args)))


def copied(dists: Path, tmp_path: Path, name: str = "llama") -> Path:
    """A copy of a folder, below a tracker as Megatron writes it."""
    folder = tmp_path / "theirs/iter_0000100"
    shutil.copytree(dists / name, folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def edited(file: Path, change: Callable[[Any], Any]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize("given", ["theirs", "theirs/iter_0000100"])
def test_the_folder_or_that_of_an_iteration_is_read_with_allow_pickle_alone(
    given: str, dists: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(dists, tmp_path)
    words = ["convert", str(tmp_path / given), str(tmp_path / "native")]
    assert commands.main(words) == 2
    assert (
        "a Megatron-LM checkpoint, which consists of pickles: --allow-pickle"
        in capsys.readouterr().err
    )
    assert commands.main([*words, "--allow-pickle"]) == 0
    assert "states of Megatron-LM's optimizers are not supported" in capsys.readouterr().err
    check(tmp_path / "native", LLAMA, written.weights_of(written.model_of(LLAMA)))


@pytest.mark.parametrize("allow", [False, True])
def test_the_legacy_layout_is_refused_by_name(allow: bool, tmp_path: Path) -> None:
    folder = tmp_path / "theirs/iter_0000100/mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({}, folder / "model_optim_rng.pt")
    (tmp_path / "theirs/latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(
        CheckpointError, match=r"Megatron-LM's legacy layout.*--ckpt-convert-format torch_dist"
    ):
        convert(tmp_path / "theirs", tmp_path / "native", allow_pickle=allow)


def test_scaled_rotary_angles_are_llama_3s(dists: Path, tmp_path: Path) -> None:
    folder = copied(dists, tmp_path)
    scaling = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
    edited(folder / "common.pt", lambda state: state["args"].__dict__.update(scaling))
    with pytest.warns(UserWarning, match="only weights"):
        out = convert(folder, tmp_path / "native", allow_pickle=True)
    model = ModelConfig.model_validate(native.read_manifest(out)["config"]["model"])
    assert model.rope_scaling is not None
    assert model.rope_scaling.table() == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


REFUSED = {
    "num_experts 8": {"num_experts": 8},
    "multi_latent_attention True": {"multi_latent_attention": True},
    "rotary_interleaved True": {"rotary_interleaved": True},
    "rotary_percent 0.5": {"rotary_percent": 0.5},
    "apply_layernorm_1p True": {"apply_layernorm_1p": True},
    "squared_relu True": {"squared_relu": True},
    "mtp_num_layers 1": {"mtp_num_layers": 1},
    "window_size": {"window_size": (128, 0)},
    "normalization LayerNorm with position_embedding_type rope": {"normalization": "LayerNorm"},
    "gelu by the error function": {**GPT, "bias_gelu_fusion": False},
    "its args: layers: Input should be a valid integer[^;]*; norm_eps: [^;]*$": {
        "num_layers": "x",
        "norm_epsilon": "y",
    },
    "its args: 'ffn_hidden_size'": {"ffn_hidden_size": ...},
    "has 4 of 2000 layers": {"num_layers": 2000},
    "has 21 rows, not|fewer rows than its model|not \\[": {"ffn_hidden_size": 21},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_other_models_are_refused_by_name(problem: str, dists: Path, tmp_path: Path) -> None:
    folder, args = copied(dists, tmp_path), LLAMA | REFUSED[problem]

    def change(state: Any) -> None:
        state["args"].__dict__.clear()
        known = {name: value for name, value in args.items() if value is not ...}
        state["args"].__dict__.update(known)

    edited(folder / "common.pt", change)
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_no_model_has_are_refused(kind: str, dists: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=TENSORS[kind][1]):
        convert(dists / kind, tmp_path / "native", allow_pickle=True)


DIST_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "is of kind zarr: only torch_dist is supported": lambda folder: (
        folder / "metadata.json"
    ).write_text('{"sharded_backend": "zarr"}'),
    "records the kind of a checkpoint there": lambda folder: (folder / "metadata.json").unlink(),
    "names iter_0000100, which does not exist: give": lambda folder: folder.rename(
        folder.parent / "iter_0000200"
    ),
    "has no args": lambda folder: (folder / "common.pt").unlink(),
    "__1_0.distcp": lambda folder: (folder / "__1_0.distcp").unlink(),
    "is truncated": lambda folder: (folder / "__1_0.distcp").write_bytes(
        (folder / "__1_0.distcp").read_bytes()[:900]
    ),
    "which no checkpoint needs": lambda folder: (folder / ".metadata").write_bytes(
        b"cposix\nsystem\n(S'true'\ntR."
    ),
}


@pytest.mark.parametrize("problem", DIST_DAMAGE)
def test_damaged_torch_dist_is_refused(problem: str, dists: Path, tmp_path: Path) -> None:
    DIST_DAMAGE[problem](copied(dists, tmp_path))
    with pytest.raises(CheckpointError, match=problem):
        convert(tmp_path / "theirs", tmp_path / "native", allow_pickle=True)


WORD = "embedding.word_embeddings.weight"


def changed(**attributes: Any) -> Callable[[Any], Any]:
    """Changes what `.metadata` says of the embedding: of itself, of its first box, or of where that is."""

    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata[WORD]
        place = next(info for key, info in metadata.storage_data.items() if key.fqn == WORD)
        for of in (tensor, tensor.chunks[0], place):
            for name in attributes.keys() & vars(of).keys():
                object.__setattr__(of, name, attributes[name])

    return change


METADATA: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a size of texts": (changed(size=["x", "y"]), "not lengths"),
    "a size of lists": (changed(size=[[52], [24]]), "not lengths"),
    "a size of None": (changed(size=[None, None]), "not lengths"),
    "a box at texts": (changed(offsets=["x", "y"]), "not lengths"),
    "a box of tables": (changed(sizes=[{}, {}]), "not lengths"),
    "a box before the first element": (changed(offsets=[-1, 0]), "not lengths"),
    "no boxes": (changed(chunks=[]), f"has no chunks of {WORD}"),
    "a place of texts": (changed(offset="a", length="b"), "not lengths"),
    "a place of lists": (changed(offset=[], length=[]), "not lengths"),
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_of_other_types_is_refused(kind: str, dists: Path, tmp_path: Path) -> None:
    folder, (change, problem) = tmp_path / "theirs", METADATA[kind]
    shutil.copytree(dists / "llama", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)


# ------------------------------------------------------------------------------------------------------------- fuzz

FUZZ = int(os.environ.get("FUZZ", "40"))  # mutants


def pickle_of(data: bytes, draw: random.Random) -> tuple[int, int]:
    """The bytes of one of the pickles in a file that holds one or more files of torch.save."""
    pattern = rb"PK\x03\x04.{26}[^/]*/data\.pkl(FB.{2}Z*)?"
    firsts = [match.end() for match in re.finditer(pattern, data, re.DOTALL)]
    first = draw.choice(firsts)
    return first, data.index(b"PK\x07\x08", first)


def mutant_of(file: Path, draw: random.Random) -> bytes:
    """The file with some bytes of a pickle changed, and the pickle's checksum renewed."""
    old = file.read_bytes()
    whole = file.name == ".metadata"
    first, last = (0, len(old)) if whole else pickle_of(old, draw)
    new = bytearray(old)
    for _ in range(draw.choice([1, 1, 2, 5, 30])):
        new[draw.randrange(first, last)] = draw.choice(
            [draw.randrange(256), draw.choice(b"\x80()]}.0Nc\x81\x85Rbqrtsuehjk\xff"), 1]
        )
    crc = [struct.pack("<I", zlib.crc32(some[first:last])) for some in (old, new)]
    if whole or old.count(crc[0]) not in (1, 2):
        return bytes(new)
    return bytes(new).replace(crc[0], crc[1])


def test_mutants_of_pickles_are_read_or_refused_in_one_line(dists: Path, tmp_path: Path) -> None:
    folder, draw, problems = copied(dists, tmp_path), random.Random(4), []
    files = [file for file in sorted(folder.iterdir()) if file.name != "metadata.json"]
    for number in range(FUZZ):
        file = draw.choice(files)
        kept = file.read_bytes()
        file.write_bytes(mutant_of(file, draw))
        try:
            with warnings.catch_warnings(action="ignore"):
                convert(folder, tmp_path / "native" / str(number), allow_pickle=True)
        except CheckpointError as error:
            problems.append(str(error))
        finally:
            file.write_bytes(kept)
    assert len(problems) > FUZZ // 3
    assert all(problem.isprintable() for problem in problems)
    assert len(list((tmp_path / "native").iterdir())) == FUZZ - len(problems)
