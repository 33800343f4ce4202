"""Megatron-LM's checkpoints, written as its sources lay them out, become native ones bit for bit."""

from __future__ import annotations

import io
import pickle
import random
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import megatron_checkpoints as written
from tests.harness import run_ranks
from tests.megatron_checkpoints import GPT, LLAMA
from threed import cli
from threed.checkpoint import native
from threed.checkpoint.convert import convert
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.reading import Reader
from threed.config import ModelConfig

EVEN = [[0, 1], [2, 3]]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama, tp 2": (LLAMA, {"tp": 2}),
    "more ranks than groups": (LLAMA, {"tp": 4}),
    "llama, tp 2, pp 2": (LLAMA, {"tp": 2, "layers": EVEN}),
    "uneven stages": (LLAMA, {"layers": [[0], [1, 2, 3]]}),
    "virtual stages": (LLAMA, {"tp": 2, "layers": [[0], [1], [2], [3]], "virtual": 2}),
    "not Transformer Engine": (LLAMA, {"tp": 2, "engine": False}),
    "tied": (LLAMA | {"untie_embeddings_and_output_weights": False}, {"tp": 2, "layers": EVEN}),
    "biases": (LLAMA | {"add_bias_linear": True}, {"tp": 2}),
    "biases of queries": (LLAMA | {"add_qkv_bias": True}, {"tp": 2}),
    "norms of heads": (LLAMA | {"qk_layernorm": True}, {"tp": 2}),
    "gpt": (GPT, {}),
    "gpt, tp 2, pp 2": (GPT, {"tp": 2, "layers": EVEN, "engine": False}),
}


def check(out: Path, args: dict[str, Any], weights: dict[str, Tensor]) -> None:
    manifest = native.read_manifest(out)
    assert native.verify(out, manifest) == []
    assert (manifest["state"]["steps"], manifest["state"]["consumed"]) == (0, 0)
    assert ModelConfig.model_validate(manifest["config"]["model"]) == written.model_of(args)
    with Reader(out, manifest) as reader:
        assert reader.shapes.keys() == weights.keys()
        for name, want in weights.items():
            assert torch.equal(reader.full("weight", name), want), name


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    args, layout = CASES[case]
    weights = written.weights_of(written.model_of(args))
    folder = written.write_legacy(tmp_path / "theirs", args, weights, **layout)
    with pytest.warns(UserWarning, match="weights alone are read"):
        check(convert(folder, tmp_path / "native", allow_pickle=True), args, weights)


def test_an_iteration_may_be_given_itself_and_only_where_somebody_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = written.weights_of(written.model_of(LLAMA))
    written.write_legacy(tmp_path / "theirs", LLAMA, weights)
    words = ["convert", str(tmp_path / "theirs/iter_0000100"), str(tmp_path / "native")]
    assert cli.main(words) == 2
    assert (
        "a checkpoint of Megatron-LM's, which is made of pickles: --allow-pickle"
        in capsys.readouterr().err
    )
    assert cli.main([*words, "--allow-pickle"]) == 0
    assert (
        "masters and moments are left out, weights alone are read: it was saved without its optimizer"
        in capsys.readouterr().err
    )
    check(tmp_path / "native", LLAMA, weights)


def test_scaled_rotary_angles_are_llama_3s(tmp_path: Path) -> None:
    args = LLAMA | {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
    folder = written.write_legacy(
        tmp_path / "theirs", args, written.weights_of(written.model_of(LLAMA))
    )
    with pytest.warns(UserWarning, match="weights alone"):
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
    "has 4 of 1000000000 layers": {"num_layers": 10**9},
    "has 21 rows, not|fewer rows than its model|not \\[": {"ffn_hidden_size": 21},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_other_models_are_refused_by_name(problem: str, tmp_path: Path) -> None:
    args = LLAMA | REFUSED[problem]
    folder = written.write_legacy(
        tmp_path / "theirs", LLAMA, written.weights_of(written.model_of(LLAMA))
    )
    file = folder / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["args"].__dict__.clear()
    state["args"].__dict__.update({name: value for name, value in args.items() if value is not ...})
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)
    assert not (tmp_path / "native").exists()


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
TENSORS: dict[str, tuple[dict[str, Tensor], str]] = {
    "a scalar": ({QKV: torch.tensor(1.0)}, r"linear_qkv.weight is \[\], and needs 40 rows"),
    "a layer number of many digits": (
        {f"decoder.layers.{'9' * 5000}.mlp": torch.ones(3)},
        "does not fit its args",
    ),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_no_model_has_are_refused(kind: str, tmp_path: Path) -> None:
    folder = written.write_legacy(
        tmp_path / "theirs", LLAMA, written.weights_of(written.model_of(LLAMA))
    )
    file = folder / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    state, (tensors, problem) = torch.load(file, weights_only=False), TENSORS[kind]
    state["model"].update(tensors)
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)


# -------------------------------------------------------------------------------------------------------- torch_dist


def write_all(place: Path, cases: list[tuple[str, dict[str, Any], bool]]) -> None:
    for name, args, numbered in cases:
        written.write_dist(place / name, args, written.weights_of(written.model_of(args)), numbered)


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of torch_dist, which two ranks wrote."""
    place = tmp_path_factory.mktemp("dist")
    run_ranks(
        2,
        write_all,
        place,
        [("llama", LLAMA, False), ("gpt", GPT, False), ("numbered", LLAMA, True)],
    )
    return place


@pytest.mark.parametrize("name", ["llama", "gpt", "numbered"])
def test_torch_dist_is_the_same_bit_for_bit(name: str, dists: Path, tmp_path: Path) -> None:
    args = GPT if name == "gpt" else LLAMA
    assert len(list((dists / name).glob("*.distcp"))) == 2
    with pytest.warns(UserWarning, match="weights alone are read"):
        out = convert(dists / name, tmp_path / "native", allow_pickle=True)
    check(out, args, written.weights_of(written.model_of(args)))


DIST_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "is of kind zarr: torch_dist and the legacy one": lambda folder: (
        folder / "metadata.json"
    ).write_text('{"sharded_backend": "zarr"}'),
    "says there of which kind": lambda folder: (folder / "metadata.json").unlink(),
    "has no args": lambda folder: (folder / "common.pt").unlink(),
    "__1_0.distcp": lambda folder: (folder / "__1_0.distcp").unlink(),
    "is cut off": lambda folder: (folder / "__1_0.distcp").write_bytes(
        (folder / "__1_0.distcp").read_bytes()[:900]
    ),
    "which no checkpoint needs": lambda folder: (folder / ".metadata").write_bytes(
        b"cposix\nsystem\n(S'true'\ntR."
    ),
}


@pytest.mark.parametrize("problem", DIST_DAMAGE)
def test_damaged_torch_dist_is_refused(problem: str, dists: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(dists / "llama", folder)
    DIST_DAMAGE[problem](folder)
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)


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
    "a size of texts": (changed(size=["x", "y"]), "no lengths"),
    "a size of lists": (changed(size=[[52], [24]]), "no lengths"),
    "a size of None": (changed(size=[None, None]), "no lengths"),
    "a box at texts": (changed(offsets=["x", "y"]), "no lengths"),
    "a box of tables": (changed(sizes=[{}, {}]), "no lengths"),
    "a box before the first element": (changed(offsets=[-1, 0]), "no lengths"),
    "no boxes": (changed(chunks=[]), f"has no boxes of {WORD}"),
    "a place of texts": (changed(offset="a", length="b"), "no lengths"),
    "a place of lists": (changed(offset=[], length=[]), "no lengths"),
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


# -------------------------------------------------------------------------------------------------------- not whole


def mutants(data: bytes, count: int) -> Iterator[bytes]:
    """A file of torch.save with its pickle changed a little, and its checksum renewed."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        info = next(info for info in file.infolist() if info.filename.endswith("/data.pkl"))
    first = info.header_offset + 30 + sum(struct.unpack("<HH", data[info.header_offset + 26 :][:4]))
    draw = random.Random(5)
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 5, 30])):
            at = draw.randrange(first, first + info.file_size)
            mutant[at] = draw.choice(
                [draw.randrange(256), draw.choice(b"\x80()]}.0Nc\x81\x85Rbqrtsuehjk\xff"), 1]
            )
        crc = zlib.crc32(mutant[first : first + info.file_size])
        yield bytes(mutant).replace(struct.pack("<I", info.CRC), struct.pack("<I", crc))


def test_mutants_of_a_pickle_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    weights = written.weights_of(written.model_of(LLAMA))
    file = (
        written.write_legacy(tmp_path / "theirs", LLAMA, weights)
        / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    )
    problems = []
    for number, mutant in enumerate(mutants(file.read_bytes(), 40)):
        file.write_bytes(mutant)
        try:
            with warnings.catch_warnings(action="ignore"):
                convert(tmp_path / "theirs", tmp_path / "native" / str(number), allow_pickle=True)
        except CheckpointError as error:
            problems.append(str(error))
    assert len(problems) > 20
    assert not any("\n" in problem for problem in problems)
    assert len(list((tmp_path / "native").iterdir())) == 40 - len(problems)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        file = folder / "mp_rank_00_001/model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)

    return edit


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "names iter_0000100, which is not there: give": lambda folder: folder.rename(
        folder.parent / "iter_0000200"
    ),
    "has 3 of 4 files of tp 2 and pp 2": lambda folder: shutil.rmtree(folder / "mp_rank_01_001"),
    "expert parallelism is not read": lambda folder: (folder / "mp_rank_00_001").rename(
        folder / "mp_rank_00_001_000"
    ),
    "no file of the first rank": lambda folder: shutil.rmtree(folder / "mp_rank_00_000"),
    "tensor ranks have different tensors": edited(
        lambda state: state["model"].pop("output_layer.weight")
    ),
    "from before megatron-core": edited(lambda state: state.update(model={"language_model": {}})),
    "other virtual stages": edited(lambda state: state.pop("model")),
    "does not fit together": edited(
        lambda state: state["model"].update({"output_layer.weight": torch.ones(26, 23)})
    ),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_folders_that_are_not_whole_are_refused(problem: str, tmp_path: Path) -> None:
    weights = written.weights_of(written.model_of(LLAMA))
    folder = written.write_legacy(tmp_path / "theirs", LLAMA, weights, tp=2, layers=EVEN)
    DAMAGE[problem](folder / "iter_0000100")
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)
