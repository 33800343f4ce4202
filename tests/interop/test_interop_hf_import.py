"""Hugging Face folders come in: bit for bit, in any topology, in every spelling of names, or are refused by name.

The folders are written by `transformers` itself, from random weights of every family.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import configs
from tests.checkpoints import state_of
from tests.configs import Case, engine_of
from tests.harness import run_ranks
from tests.models.test_models_families import FAMILIES, SEQ, TOKENS, VOCAB, theirs
from threed.checkpoint import lazy_tensors, native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import LazyTensor
from threed.cli.commands import main
from threed.config import Config
from threed.config.arguments import load
from threed.config.resolution import resolve
from threed.data.tokenizer import ByteTokenizer
from threed.interop.convert import convert
from threed.interop.huggingface import folder as hf_folder
from threed.interop.huggingface.export import export_hf
from threed.interop.huggingface.folder import HFFolder
from threed.interop.huggingface.weights import import_hf
from threed.interop.pretrained import find
from threed.zero.state import WEIGHT

# One of each family: scaled angles, heads of a size of their own, biases, windows, caps, packed projections, ties.
NAMES = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"]
TOPOLOGIES = [  # more tensor ranks than key/value heads among them
    {"tp": 2, "pp": 2}, {"tp": 4, "pp": 1}, {"tp": 1, "pp": 4}, {"tp": 1, "pp": 1, "zero": 3},
    {"tp": 2, "pp": 1, "zero": 2}, {"tp": 1, "pp": 2, "zero": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every family."""
    place = tmp_path_factory.mktemp("theirs")
    for name in NAMES:
        theirs(name).save_pretrained(place / name)
    return place


def config_of(
    folder: Path, world: int, zero: int = 1, dtype: str = "fp32", **parallel: Any
) -> Config:
    """The configuration of a run that begins from a folder."""
    config = Config.model_validate({
        "parallel": parallel, "zero": {"stage": zero}, "precision": {"dtype": dtype},
        "model": dict(HFFolder(folder).model) | {"seq": SEQ}, "train": {"global_batch": 4, "micro_batch": 1},
    })  # fmt: skip
    return resolve(config, VOCAB, world)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of one file or many."""
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same(found: Path, wanted: Path) -> None:
    """Names, formats and bits."""
    ours, theirs = tensors(found), tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8)), name


# ------------------------------------------------------------------------------------------------ bits, in any topology


def load_and_save(
    place: Path, out: Path, cases: list[tuple[str, dict[str, Any]]]
) -> list[Tensor | None]:
    """Engines that begin from folders, in their topologies, and save; this rank's logits."""
    logits = []
    for name, topology in cases:
        engine = engine_of(config_of(place / name, 4, **topology))
        assert engine.load(place / name).keys() == {"hf"}  # the record of the folder
        assert (engine.steps, engine.consumed, float(engine.optimizer.updates)) == (0, 0, 0.0)
        assert not any(values.any() for part, *_, values in state_of(engine) if part != WEIGHT)
        with torch.no_grad():
            found = engine.logits(TOKENS)
        logits.append(found if engine.topology.axis("dp").index == 0 else None)
        engine.save(out / name / str(cases.index((name, topology))))
    return logits


@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.grid)])
def test_folders_load_in_every_topology_bit_for_bit_and_give_their_logits(
    shift: int, folders: Path, tmp_path: Path
) -> None:
    pairs = [(name, TOPOLOGIES[(i + shift) % len(TOPOLOGIES)]) for i, name in enumerate(NAMES)]
    found = run_ranks(4, load_and_save, folders, tmp_path, pairs)
    for number, (name, topology) in enumerate(pairs):
        out = export_hf(tmp_path / name / str(number), tmp_path / "back" / str(number))
        assert_same(out, folders / name)
        parts = [rank[number] for rank in found if rank[number] is not None]
        assert len(parts) == topology["tp"]
        # Logits have the rounding errors of transformers' fp32 logits, compared with fp64. With other
        # processors than AVX-512, these errors alone are up to 1.3e-5.
        with torch.no_grad():
            exact = theirs(name).double()(TOKENS).logits
            theirs_error = theirs(name)(TOKENS).logits - exact
        error = torch.cat(parts, -1)[..., :VOCAB] - exact
        assert error.square().mean() <= 1.25**2 * theirs_error.square().mean(), name
        assert error.abs().max() <= 2 * theirs_error.abs().max() < 4e-5, name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convert_goes_there_and_back_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs(name, dtype).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("model-*-of-*.safetensors"))) > 2
    native_folder = convert(tmp_path / "theirs", tmp_path / "native")
    assert native.verify(native_folder, native.read_manifest(native_folder)) == []
    assert_same(convert(native_folder, tmp_path / "back"), tmp_path / "theirs")
    assert_same(convert(tmp_path / "theirs", tmp_path / "one", to="hf"), tmp_path / "theirs")
    assert (tmp_path / "one" / "model.safetensors").is_file()
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "one")
    )
    assert after == before | {"torch_dtype": before["dtype"]}


@dataclasses.dataclass
class Counted:
    """A tensor that counts the elements which are read."""

    inner: LazyTensor
    name: str
    seen: dict[str, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    def read(self, start: tuple[int, ...], out: Tensor) -> None:
        self.seen[self.name] = self.seen.get(self.name, 0) + out.numel()
        self.inner.read(start, out)


def what_is_read(folder: Path) -> list[tuple[dict[str, int], int, list[str]]]:
    """Of some topologies: elements that this rank reads of each tensor, those it keeps, and the files it opens."""
    found, tensor = [], HFFolder.tensor
    for topology in TOPOLOGIES:
        engine, seen = engine_of(config_of(folder, 4, **topology)), dict[str, int]()
        files: list[str] = []
        with pytest.MonkeyPatch.context() as patch:

            def noted(
                self: HFFolder, part: str, name: str, seen: dict[str, int] = seen
            ) -> LazyTensor:
                return Counted(tensor(self, part, name), name, seen)

            def opened(path: Path, files: list[str] = files) -> Any:
                files.append(path.name)
                return safe_open(path, framework="pt")

            patch.setattr(HFFolder, "tensor", noted)
            patch.setattr(hf_folder, "_open", opened)
            engine.load(folder)
        kept = sum(values.numel() for part, *_, values in state_of(engine) if part == WEIGHT)
        found.append((seen, kept, files))
    return found


def test_a_rank_reads_its_slices_and_opens_their_files(tmp_path: Path) -> None:
    theirs("qwen3").save_pretrained(tmp_path, max_shard_size="5KB")
    count = len(list(tmp_path.glob("*.safetensors")))
    every = run_ranks(4, what_is_read, tmp_path)
    for number, topology in enumerate(TOPOLOGIES):
        for rank, (seen, kept, files) in enumerate(row[number] for row in every):
            assert sum(seen.values()) == kept
            assert len(files) == len(set(files))
            if rank and topology["pp"] > 1:
                assert len(files) < 0.8 * count
        if topology["tp"] == topology["pp"] == 1:
            whole = HFFolder(tmp_path).shapes
            for name, shape in whole.items():
                assert sum(row[number][0].get(name, 0) for row in every) in (
                    math.prod(shape),
                    4 * math.prod(shape),
                )


def convert_in_little_memory(folder: Path) -> None:
    """Converts there and back while no more than half of the largest tensor can be allocated."""
    lazy_tensors.SLAB_BYTES = 2**20  # this process ends after it
    convert(folder / "theirs", folder / "warm-up", tokenizer="none")
    convert(folder / "warm-up", folder / "warm-up-too")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # mapped, as data
    files = sum(file.stat().st_size for file in (folder / "theirs").glob("*.safetensors"))
    resource.setrlimit(
        resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + files + 2**24,) * 2
    )
    convert(folder / "theirs", folder / "native", tokenizer="none")
    convert(folder / "native", folder / "back")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_conversion_holds_some_rows_at_a_time(name: str, tmp_path: Path) -> None:
    kind, sizes = FAMILIES[name]
    wide = {"n_embd": 128} if name == "gpt2" else {"hidden_size": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, name, (kind, sizes | wide | {"vocab_size": 2**16}))
        theirs(name).save_pretrained(tmp_path / "theirs")
    run_ranks(1, convert_in_little_memory, tmp_path)
    assert_same(tmp_path / "back", tmp_path / "theirs")
    shutil.rmtree(tmp_path)


def resume_natively(folder: Path) -> list[list[tuple[Any, ...]]]:
    """What engines hold that resume a converted checkpoint: another optimizer, another length of sequences."""
    found = []
    for changes in ({}, {"optim": {"name": "lion"}}, {"model": {"seq": 9}}):
        config = config_of(folder / "theirs", 2, tp=2)
        groups = {
            name: getattr(config, name).model_copy(update=update)
            for name, update in changes.items()
        }
        engine = engine_of(config.model_copy(update=groups))
        engine.load(folder / "native")
        found.append([row for row in state_of(engine) if row[0] == WEIGHT])
        assert not any(values.any() for part, *_, values in state_of(engine) if part != WEIGHT)
    return found


def test_a_converted_checkpoint_resumes_with_any_optimizer(
    folders: Path, tmp_path: Path, recwarn: Any
) -> None:
    shutil.copytree(folders / "qwen3", tmp_path / "theirs")
    import_hf(HFFolder(tmp_path / "theirs"), tmp_path / "native", file_bytes=20_000)
    assert len(list((tmp_path / "native").glob("rank-*.safetensors"))) > 2
    for found in run_ranks(2, resume_natively, tmp_path):
        for one in found[1:]:
            assert all(torch.equal(a[-1], b[-1]) for a, b in zip(one, found[0], strict=True))


def trained_and_loaded(place: Path) -> list[tuple[Any, ...]]:
    """What engines hold after they load weights alone: new ones, and ones that have trained in fp16."""
    found = []
    for trains in (False, True):
        for path in (place / "qwen3", place / "native"):
            config = config_of(place / "qwen3", 1, dtype="fp16")
            engine = engine_of(config)
            if trains:
                engine.optimizer.scaler.scale.fill_(4.0)
                engine.step({"tokens": TOKENS[:1].repeat(4, 1), "labels": TOKENS[:1].repeat(4, 1)})
            engine.load(path)
            state = [(*row[:-1], row[-1].tolist()) for row in state_of(engine)]
            found.append(
                (
                    engine.counters(None),
                    engine.optimizer.scaler.state(),
                    engine.optimizer.bad.state(),
                    state,
                )
            )
    return found


def test_weights_alone_begin_a_run_in_an_engine_that_has_trained(
    folders: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders / "qwen3", tmp_path / "qwen3")
    import_hf(HFFolder(tmp_path / "qwen3"), tmp_path / "native")
    (found,) = run_ranks(1, trained_and_loaded, tmp_path)
    assert found[0][1]["loss_scale"] == 2.0**16
    assert all(one == found[0] for one in found)


def spelled_twice(place: Path) -> list[Any]:
    """Weights of a Llama with `qk_norm`; and of engines that begin from its export and from that converted, spelled as a
    Llama and as the Qwen3 that the export is."""
    llama = configs.config_of(Case(model="qwen-tied", dtype="fp32"))
    engine = engine_of(llama)
    export_hf(engine.save(place / "saved"), place / "folder")
    import_hf(HFFolder(place / "folder"), place / "native")
    found = [engine.full_state_dict()]
    for config in (llama, config_of(place / "folder", 1)):
        for path in (place / "folder", place / "native"):
            engine = engine_of(config)
            engine.load(path)
            found.append(engine.full_state_dict())
    return found


def test_a_llama_with_head_norms_begins_from_the_folder_that_it_exports(tmp_path: Path) -> None:
    (found,) = run_ranks(1, spelled_twice, tmp_path)
    for weights in found:
        assert weights.keys() == found[0].keys()
        assert all(torch.equal(weights[name], value) for name, value in found[0].items())
    for path in (tmp_path / "folder", tmp_path / "native"):
        flags = ["--model.arch", "llama", "--model.qk-norm", "true", "--data.tokenizer", "bytes"]
        config, options = load([*flags, "--checkpoint.resume", str(path)], begin=find)
        assert options.pretrained
        model = config.model
        assert (model.arch, model.qk_norm, model.layers) == ("llama", True, 3)


# ------------------------------------------------------------------------------------------------------------ spellings


def change(
    source: Path, out: Path, edit: Callable[[dict[str, Tensor]], Any], **config: Any
) -> Path:
    """A copy of a folder with other tensors and keys."""
    shutil.copytree(source, out)
    weights = tensors(source)
    edit(weights)
    for file in out.glob("*.safetensors"):
        file.unlink()
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, out / "model.safetensors"
    )
    about = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(about))
    return out


def rename(weights: dict[str, Tensor], old: str, new: str) -> None:
    """Gives tensors another beginning of their names."""
    for name in [name for name in weights if name.startswith(old)]:
        weights[new + name.removeprefix(old)] = weights.pop(name)


def add(weights: dict[str, Tensor], **more: Tensor) -> None:
    """Adds tensors; __ stands for a dot."""
    weights.update({name.replace("__", "."): value for name, value in more.items()})


def begin(folder: Path) -> str:
    """What an engine says that begins from a folder, and whether it would train on."""
    engine = engine_of(config_of(folder, 2, tp=2))
    with pytest.raises(CheckpointError) as refused:
        engine.load(folder)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        engine.save(folder / "again")
    return str(refused.value)


def test_a_folder_with_a_value_that_is_not_finite_is_refused_on_every_rank(
    folders: Path, tmp_path: Path
) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        # the last tensor rank's alone
        weights["model.layers.1.mlp.up_proj.weight"][-1, 0] = math.nan

    path = change(folders / "qwen3", tmp_path / "theirs", spoil)
    said = run_ranks(2, begin, path)
    assert said[0] == said[1]
    assert "has values that are not finite (NaN or infinite)" in said[0]


def test_a_conversion_passes_on_what_is_not_finite_and_says_so_once(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.norm.weight"][1] = -math.inf
        weights["model.layers.1.mlp.up_proj.weight"][:, 0] = math.nan

    def said(src: Path, dst: Path, *more: str) -> list[str]:
        assert main(["convert", str(src), str(dst), *more]) == 0
        return capsys.readouterr().err.splitlines()

    why = "have values that are not finite (NaN or infinite): a run refuses to begin from them"
    theirs = change(folders / "llama", tmp_path / "theirs", spoil)
    native_ = tmp_path / "native"
    back = tmp_path / "back"
    for src, dst, more, first in (
        (theirs, native_, [], "blocks.1.mlp.up.weight"),
        (native_, back, [], "model.layers.1.mlp.up_proj.weight"),
        (theirs, tmp_path / "again", ["--to", "hf"], "model.layers.1.mlp.up_proj.weight"),
    ):
        assert said(src, dst, *more) == [
            f"threed convert: {dst}: 2 tensors, of which the first is {first}, {why}"
        ]
    assert_same(back, theirs)
    assert said(folders / "llama", tmp_path / "good") == []


SPELLINGS: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "GPT-2 as it was published": ("gpt2", lambda w: (
        rename(w, "transformer.", ""),
        w.update({f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(3)}),
        w.update({f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}),
    )),
    "a base model whose head is tied": ("gemma2", lambda w: rename(w, "model.", "")),
    "buffers of old versions": ("llama", lambda w: w.update(
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(3)}
    )),
    "the tied head, too": ("qwen2", lambda w: add(w, lm_head__weight=w["model.embed_tokens.weight"].clone())),
    "the tied head alone": ("gpt2", lambda w: add(w, lm_head__weight=w.pop("transformer.wte.weight"))),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_names_are_the_same_model(
    spelling: str, folders: Path, tmp_path: Path
) -> None:
    name, edit = SPELLINGS[spelling]
    source = change(folders / name, tmp_path / "theirs", edit)
    assert tensors(source).keys() != tensors(folders / name).keys()
    convert(source, tmp_path / "native")
    assert_same(convert(tmp_path / "native", tmp_path / "out"), folders / name)
    assert_same(convert(source, tmp_path / "again", to="hf"), folders / name)


def test_inspect_shows_a_folder_or_what_is_wrong_with_it(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folders / "qwen3")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("model qwen3, ")
    assert said[1].endswith(" parameters, float32")
    assert len(said) == 2 + len(HFFolder(folders / "qwen3").shapes)
    source = change(folders / "qwen3", tmp_path / "theirs", drop("model.norm.weight"))
    assert main(["inspect", str(source)]) == 2
    assert "model.norm.weight is missing" in capsys.readouterr().err


def test_a_cache_of_downloads_is_made_of_links(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate((folders / "llama").iterdir()):
        blob = shutil.copy(file, tmp_path / str(number))
        (tmp_path / "snapshot" / file.name).symlink_to(blob)
    convert(tmp_path / "snapshot", tmp_path / "native")
    assert_same(convert(tmp_path / "native", tmp_path / "out"), folders / "llama")


def test_the_tokenizer_of_a_folder_goes_along(tmp_path: Path) -> None:
    kind, sizes = FAMILIES["gpt2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "gpt2", (kind, sizes | {"vocab_size": 300}))
        theirs("gpt2").save_pretrained(tmp_path / "theirs")
    ByteTokenizer().save_hf(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"top_k": 7}')
    convert(tmp_path / "theirs", tmp_path / "native")
    for out in (
        convert(tmp_path / "native", tmp_path / "out"),
        convert(tmp_path / "theirs", tmp_path / "hf", to="hf"),
    ):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (out / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {"top_k": 7}


# ------------------------------------------------------------------------------------------------------------- refusals


def drop(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    """Removes tensors."""
    return lambda weights: [weights.pop(name) for name in names]


LAYER = "model.layers.1."
REFUSED: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], dict[str, Any], str]] = {
    "missing": ("llama", drop(LAYER + "mlp.up_proj.weight"), {}, LAYER + "mlp.up_proj.weight is missing"),
    "unexpected": ("llama", lambda w: add(w, score__weight=torch.ones(2)), {}, "score.weight is unexpected"),
    "misshaped": ("llama", lambda w: add(w, model__norm__weight=torch.ones(41)), {}, "norm.weight is [41], not [40]"),
    "a base model": (
        "llama", lambda w: (rename(w, "model.", ""), drop("lm_head.weight")(w)), {},
        "lm_head.weight is missing in {folder}: a base model has no head",
    ),
    "another head": (
        "qwen2", lambda w: add(w, lm_head__weight=w["model.embed_tokens.weight"] + 1), {},
        "lm_head.weight in {folder} differs from model.embed_tokens.weight, but its configuration ties them",
    ),
    "both spellings": ("llama", lambda w: add(w, norm__weight=torch.ones(40)), {}, "norm.weight is unexpected"),
    "whole numbers": (
        "llama", lambda w: w.update({name: value.to(torch.int8) for name, value in w.items()}), {},
        "is I8: supported are F64, F32, BF16, F16",
    ),
    "fewer layers": ("llama", lambda w: None, {"num_hidden_layers": 2}, "model.layers.2.mlp.up_proj.weight is unex"),
    "many layers": ("llama", lambda w: None, {"num_hidden_layers": 2000}, "it has fewer tensors"),
    "absurdly many layers": ("llama", lambda w: None, {"num_hidden_layers": 10**9}, "must be less than or equal to 2000"),
    "another architecture": ("llama", lambda w: None, {"model_type": "bloom"}, "model_type bloom is not one of gpt2"),
    "other angles": (
        "llama", lambda w: None, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"
    ),
    "no angles": ("llama", lambda w: None, {"rope_parameters": "yarn"}, "rope_parameters yarn, which must be an object"),
    "a list of angles": ("llama", lambda w: None, {"rope_parameters": [1]}, "rope_parameters [1], which must be"),
    "quantized": ("llama", lambda w: None, {"quantization_config": {"bits": 4}}, "quantization_config"),
}  # fmt: skip


def test_an_adapter_is_refused(folders: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folders / "llama", tmp_path / "theirs")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has an adapter, which is not supported: merge it"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name(kind: str, folders: Path, tmp_path: Path) -> None:
    name, edit, keys, problem = REFUSED[kind]
    source = change(folders / name, tmp_path / "theirs", edit, **keys)
    for to in ("native", "hf"):
        with pytest.raises(
            CheckpointError, match=re.escape(problem.format(folder=source))
        ) as error:
            convert(source, tmp_path / "out", to=to)
        assert str(error.value).isprintable()
    assert [file.name for file in tmp_path.iterdir()] == ["theirs"]


def test_ten_names_of_each_kind_are_listed(folders: Path, tmp_path: Path) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        rename(weights, "model.layers.0.", "model.layers.5.")
        rename(weights, "model.layers.1.", "model.layers.6.")
        for name in list(weights):
            weights[name] = (
                weights[name].unsqueeze(0)
                if "layers.2." in name or "lm_head" in name
                else weights[name]
            )
        for name in ("a", "b"):
            weights[f"model.layers.2.{name}"] = torch.ones(1)

    source = change(folders / "qwen3", tmp_path / "theirs", edit)
    with pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "out")
    said = str(error.value)
    assert [said.count(word) for word in ("is missing", "is unexpected", ", not [")] == [10, 10, 10]
    assert said.count(" more") == 3


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        (
            "../outside.safetensors",
            "names ../outside.safetensors, which is not a safetensors file in its folder",
        ),
        ("/etc/passwd", "names /etc/passwd, which is not"),
        ("sub/model.safetensors", "names sub/model.safetensors, which is not"),
        ("config.json", "names config.json, which is not"),
        ("a\0.safetensors", r"names a\x00.safetensors, which is not"),
        ("missing.safetensors", "missing.safetensors cannot be read"),
        ("pipe.safetensors", "it is not a regular file"),
        ("sub.safetensors", "it is not a regular file"),
        (7, "must have the name of a file for every tensor"),
        (None, "must have the name of a file for every tensor"),
    ],
)
def test_an_index_names_plain_files_of_its_folder(
    weight_map: Any, problem: str, folders: Path, tmp_path: Path
) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    shutil.copy(folders / "llama" / "config.json", source)
    shutil.copy(folders / "llama" / "model.safetensors", source / "model-1.safetensors")
    shutil.copy(folders / "llama" / "model.safetensors", tmp_path / "outside.safetensors")
    (source / "sub.safetensors").mkdir()
    os.mkfifo(source / "pipe.safetensors")
    places = dict.fromkeys(tensors(folders / "llama"), weight_map)
    index = {"weight_map": None if weight_map is None else places}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        convert(source, tmp_path / "out")
    places = dict.fromkeys(list(places)[1:], "model-1.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"do not name the same tensors: lm_head\.weight"):
        convert(source, tmp_path / "out")


def test_pickles_and_folders_without_weights_are_refused(folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    shutil.copy(folders / "llama" / "config.json", source)
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor"):
        convert(source, tmp_path / "out")
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        CheckpointError, match=r"has its weights as pytorch_model\.bin, which can run any code"
    ):
        convert(source, tmp_path / "out")
    (source / "config.json").unlink()
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        convert(source, tmp_path / "out")


def test_numbers_that_become_infinite_are_refused(folders: Path, tmp_path: Path) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        weights[LAYER + "mlp.up_proj.weight"][3, 5] = -7e4
        weights["model.norm.weight"][2] = float("inf")  # which it is already

    source = change(folders / "llama", tmp_path / "theirs", edit)
    for to in ("native", "hf"):
        with pytest.raises(CheckpointError, match=r"mlp\.up.*weight has values beyond 65504"):
            convert(source, tmp_path / "out", dtype="fp16", to=to)
        assert not (tmp_path / "out").exists()
        convert(source, tmp_path / f"{to} bf16", dtype="bf16", to=to)
    with pytest.raises(CheckpointError, match="dtype int3 is not one of"):
        convert(source, tmp_path / "out", dtype="int3")
    (said,) = run_ranks(1, load_half, source)
    assert "blocks.1.mlp.up.weight has values beyond 65504" in said


def load_half(folder: Path) -> str:
    """What an engine in fp16 says to weights that it cannot hold; it keeps its own."""
    engine = engine_of(config_of(folder, 1, dtype="fp16"))
    before = [values.clone() for *_, values in state_of(engine)]
    try:
        engine.load(folder)
    except CheckpointError as error:
        assert all(torch.equal(a, b) for a, (*_, b) in zip(before, state_of(engine), strict=True))
        return str(error)
    return ""


def load_another(place: Path) -> list[str]:
    """What engines of another model say to a folder, and to a damaged one; on every rank alike."""
    said = []
    for folder in (place / "llama", place / "damaged"):
        config = config_of(place / "llama", 2, tp=2)
        if folder.name == "llama":
            config = config.model_copy(
                update={"model": config.model.model_copy(update={"layers": 4, "ffn": 72})}
            )
        engine = engine_of(config)
        try:
            engine.load(folder)
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_an_engine_of_another_model_refuses_on_every_rank(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "llama", tmp_path / "llama")
    change(folders / "llama", tmp_path / "damaged", drop("model.norm.weight"))
    for said in run_ranks(2, load_another, tmp_path):
        assert "has layers = 3, this run has 4" in said[0]
        assert "has ffn = 56, this run has 72" in said[0]
        assert "model.norm.weight is missing" in said[1]
