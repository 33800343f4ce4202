"""Exports load in `transformers`, strictly, and give our logits; what a layout cannot express is refused by name.

The checkpoints come from two steps of training on 2 pipeline x 2 tensor ranks. Weights are drawn large beforehand: with
freshly initialized ones attention is nearly uniform, and a permuted query would hardly show.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import configs
from tests.configs import batch, engine_of, share
from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.config import Config, ModelConfig
from threed.config.resolution import resolve
from threed.data.tokenizer import ByteTokenizer
from threed.interop.huggingface import layouts
from threed.interop.huggingface.export import export_hf

os.environ["HF_HUB_OFFLINE"] = "1"

VOCAB = 259  # the byte tokenizer's 257 and two unused; tp does not divide it
SEQ = 16
TOKENS = torch.randint(0, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(5))
LLAMA = {"arch": "llama", "heads": 4, "kv_heads": 2, "ffn": 72}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"arch": "gpt", "heads": 4, "dropout": 0.1},
    "gpt-untied": {"arch": "gpt", "heads": 4, "tied": False},
    "gpt-no-bias": {"arch": "gpt", "heads": 4, "bias": False, "ffn": 96},
    "llama": {**LLAMA, "rope_theta": 500.0, "norm_eps": 1e-6},
    "llama-bias-tied": {**LLAMA, "bias": True, "tied": True},
    "qwen3": {**LLAMA, "kv_heads": 1, "head_dim": 16, "qk_norm": True, "tied": True},
    **{name: configs.MODELS[name] for name in ("mistral", "qwen2", "gemma2", "gemma3")},
    "phi3": {
        **configs.MODELS["phi3"],
        "rope_scaling": {
            **configs.MODELS["phi3"]["rope_scaling"],
            "original_max_position_embeddings": SEQ,
        },
    },
}
CLASSES = {
    "gpt": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "phi": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma": "Gemma3ForCausalLM",
}  # fmt: skip


def config_of(name: str, world: int, **parallel: int) -> Config:
    """The resolved configuration of a small model."""
    config = Config.model_validate({
        "parallel": parallel,
        "model": {"layers": 3, "hidden": 32, "seq": SEQ, **MODELS[name]},
        "train": {"global_batch": 4, "micro_batch": 2, "steps": 10},
        "optim": {"warmup": 1, "lr": 1e-2, "eps": 1e-5},
    })  # fmt: skip
    return resolve(config, VOCAB, world)


def large(model: ModelConfig) -> dict[str, Tensor]:
    """Weights by our names with which every part of the model has a say."""
    draw, weights = torch.Generator().manual_seed(7), {}
    for name, shape in layouts.native_shapes(layouts.entries(model)).items():
        noise = torch.randn(shape, generator=draw)
        if len(shape) == 2:
            weights[name] = noise * (0.3 if "embedding" in name else 1.5 / shape[1] ** 0.5)
        else:
            # whose adds one
            weights[name] = 0.3 * noise + float("norm.weight" in name and "gemma" not in model.arch)
    return weights


def train_and_save(folder: Path, names: list[str]) -> list[dict[str, Tensor]]:
    """A step of each model, saved; the weights."""
    weights = []
    for name in names:
        engine = engine_of(config_of(name, 4, pp=2, tp=2))
        engine.load_full_state_dict(large(engine.config.model))
        engine.step(share(batch(0, 4), engine.topology))
        engine.save(folder / name)
        weights.append(engine.full_state_dict())
    return weights


def load_and_run(folder: Path, names: list[str]) -> list[Tensor]:
    """Logits [b s v] of each saved model on one process."""
    logits = []
    for name in names:
        engine = engine_of(config_of(name, 1))
        engine.load(folder / name)
        with torch.no_grad():
            logits.append(engine.logits(TOKENS))
    return logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Checkpoints of all models, their weights and their logits."""
    folder, names = tmp_path_factory.mktemp("saved"), list(MODELS)
    weights = run_ranks(4, train_and_save, folder, names)[0]
    (logits,) = run_ranks(1, load_and_run, folder, names)
    return {
        "folder": folder,
        "weights": dict(zip(names, weights, strict=True)),
        "logits": dict(zip(names, logits, strict=True)),
    }


def load_strictly(folder: Path) -> Any:
    """The model that transformers makes of a folder; AssertionError when a name is missing, left over or misshaped."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    return model.eval()


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of an export in transformers."""
    model = load_strictly(folder)
    assert model.dtype == dtype
    with torch.no_grad():
        return model(TOKENS).logits


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("name", MODELS)
def test_an_export_gives_our_logits_in_transformers(
    name: str, saved: dict[str, Any], tmp_path: Path
) -> None:
    out = export_hf(saved["folder"] / name, tmp_path / "out", ByteTokenizer())
    ours, others = saved["logits"][name], theirs(out)
    assert ours.std() > 0.5  # else a small difference means little
    print(f"{name}: largest difference of a logit {(ours - others).abs().max():.2e}")
    torch.testing.assert_close(others, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_a_model_of_the_right_class_that_generates(
    name: str, saved: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    out = export_hf(saved["folder"] / name, tmp_path / "out", ByteTokenizer())
    model, tokenizer = load_strictly(out), AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert type(model).__name__ == CLASSES[name.split("-")[0].rstrip("3")]
    ids = tokenizer("Zürich\n", return_tensors="pt").input_ids
    assert ids.tolist() == [list("Zürich\n".encode())]
    assert tokenizer.decode(ids[0]) == "Zürich\n"
    assert model.config.eos_token_id == tokenizer.eos_token_id == 256
    made = model.generate(
        TOKENS[:, :4], max_new_tokens=1, do_sample=False, attention_mask=torch.ones(3, 4)
    )
    assert torch.equal(made[:, 4], saved["logits"][name][:, 3].argmax(-1))


def test_parity_is_a_sharp_test(saved: dict[str, Any], tmp_path: Path) -> None:
    """Errors that converters make show by far more than the tolerance."""
    ours = saved["logits"]["llama"]
    layer = "model.layers.1."

    def differs(change: Any) -> float:
        out = export_hf(saved["folder"] / "llama", tmp_path / "out")
        weights = {name: w.clone() for name, w in load_file(out / "model.safetensors").items()}
        change(weights)
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        return float((theirs(out) - ours).abs().max())

    def permute_query(weights: dict[str, Tensor]) -> None:
        name = layer + "self_attn.q_proj.weight"
        weights[name] = weights[name].view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)

    def swap_norms(weights: dict[str, Tensor]) -> None:
        one, other = layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"
        weights[one], weights[other] = weights[other], weights[one]

    assert differs(lambda weights: None) < 1e-5
    assert differs(permute_query) > 1e-2
    assert differs(swap_norms) > 1e-2


# ------------------------------------------------------------------------------------------------------------- files


def test_the_file_holds_the_weights_bit_by_bit_and_tied_ones_once(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    for name in MODELS:
        out = export_hf(saved["folder"] / name, tmp_path / name)
        weights, ours = load_file(out / "model.safetensors"), saved["weights"][name]
        tied = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
        assert ("lm_head.weight" in weights) != tied
        back = layouts.hf_to_state_dict(weights, config_of(name, 1).model)
        assert back.keys() == ours.keys()
        assert all(torch.equal(back[key], ours[key]) for key in ours)
        with safe_open(out / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_gpt2_tensors_lie_where_the_layout_says(saved: dict[str, Any], tmp_path: Path) -> None:
    out = export_hf(saved["folder"] / "gpt", tmp_path / "out")
    theirs, ours = load_file(out / "model.safetensors"), saved["weights"]["gpt"]
    for part, name in enumerate(["query", "key", "value"]):
        columns = slice(32 * part, 32 * (part + 1))
        assert torch.equal(
            theirs["transformer.h.2.attn.c_attn.weight"][:, columns],
            ours[f"blocks.2.attention.{name}.weight"].t(),
        )
        assert torch.equal(
            theirs["transformer.h.2.attn.c_attn.bias"][columns],
            ours[f"blocks.2.attention.{name}.bias"],
        )
    assert torch.equal(
        theirs["transformer.h.1.mlp.c_fc.weight"], ours["blocks.1.mlp.up.weight"].t()
    )
    assert torch.equal(theirs["transformer.wte.weight"], ours["embedding.word.weight"])
    assert torch.equal(theirs["transformer.h.0.ln_2.bias"], ours["blocks.0.mlp_norm.bias"])


def test_configurations_say_it_for_transformers_4_and_5(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    read = {
        name: json.loads(
            (export_hf(saved["folder"] / name, tmp_path / name) / "config.json").read_text()
        )
        for name in ("gpt", "llama", "qwen3")
    }
    llama = read["llama"]
    assert llama["rope_theta"] == llama["rope_parameters"]["rope_theta"] == 500.0
    assert llama["dtype"] == llama["torch_dtype"] == "float32"
    assert (llama["num_key_value_heads"], llama["head_dim"], llama["rms_norm_eps"]) == (2, 8, 1e-6)
    assert llama["bos_token_id"] is llama["eos_token_id"] is None
    assert read["qwen3"]["head_dim"] == 16
    gpt = read["gpt"]
    assert (gpt["resid_pdrop"], gpt["embd_pdrop"], gpt["attn_pdrop"]) == (0.1, 0.1, 0.0)
    assert (gpt["n_positions"], gpt["n_inner"], gpt["vocab_size"]) == (SEQ, 128, VOCAB)


def test_large_models_come_in_shards_with_an_index(saved: dict[str, Any], tmp_path: Path) -> None:
    limit = 40_000
    out = export_hf(saved["folder"] / "llama", tmp_path / "out", shard_bytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert 3 < len(files) < len(index["weight_map"])
    total = 0
    for file in files:
        tensors = load_file(out / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
        total += size
    assert index["metadata"]["total_size"] == total
    torch.testing.assert_close(theirs(out), saved["logits"]["llama"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt-no-bias", "qwen3"])
def test_a_dtype_rounds_every_weight(name: str, saved: dict[str, Any], tmp_path: Path) -> None:
    model = config_of(name, 1).model
    whole = layouts.state_dict_to_hf(saved["weights"][name], model)
    for word, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        out = export_hf(saved["folder"] / name, tmp_path / word, dtype=word)
        weights = load_file(out / "model.safetensors")
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[key], whole[key].to(dtype)) for key in whole)
        assert theirs(out, dtype).isfinite().all()


def save_fp64_and_a_huge_value(folder: Path) -> None:
    """Two small checkpoints: of an fp64 run, and with a value that fp16 cannot say."""
    config = config_of("gpt", 1)
    engine = engine_of(
        config.model_copy(
            update={"precision": config.precision.model_copy(update={"dtype": "fp64"})}
        )
    )
    engine.save(folder / "fp64")
    engine = engine_of(config)
    weights = large(config.model)
    weights["blocks.1.mlp.up.weight"][3, 5] = -7e4
    engine.load_full_state_dict(weights)
    engine.save(folder / "huge")


def test_fp64_stays_fp64_and_fp16_overflow_is_refused(tmp_path: Path) -> None:
    run_ranks(1, save_fp64_and_a_huge_value, tmp_path)
    assert theirs(export_hf(tmp_path / "fp64", tmp_path / "wide"), torch.float64).isfinite().all()
    with pytest.raises(
        CheckpointError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight has values beyond 65504"
    ):
        export_hf(tmp_path / "huge", tmp_path / "narrow", dtype="fp16")
    assert not list(tmp_path.glob("narrow*"))
    export_hf(tmp_path / "huge", tmp_path / "narrow", dtype="bf16")


def export_in_little_memory(folder: Path) -> int:
    """Bytes of a checkpoint that is exported while no more than a few tensors' memory can be allocated."""
    config = config_of("llama", 1)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"layers": 12, "hidden": 128, "ffn": 1024})}
    )
    engine_of(config).save(folder / "step")
    gc.collect()  # the engine: its memory must not come and go while the export's is measured
    files = sum(file.stat().st_size for file in (folder / "step").glob("*.safetensors"))
    export_hf(folder / "step", folder / "warm-up")
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) * 1024
    tensor = 1024 * 128 * 4
    # The file is mapped privately, which counts as data though it takes no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (used + files + 8 * tensor,) * 2)
    export_hf(folder / "step", folder / "out")
    return (folder / "out" / "model.safetensors").stat().st_size // tensor


def test_export_holds_a_few_tensors_at_a_time(tmp_path: Path) -> None:
    assert run_ranks(1, export_in_little_memory, tmp_path)[0] > 35
    shutil.rmtree(tmp_path)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_names_and_shapes_that_do_not_fit_are_listed(saved: dict[str, Any]) -> None:
    model, weights = config_of("gpt", 1).model, dict(saved["weights"]["gpt"])
    del weights["blocks.0.mlp.up.bias"]
    weights["blocks.0.mlp.gate.weight"] = torch.zeros(2)
    weights["head.norm.weight"] = torch.zeros(31)
    with pytest.raises(CheckpointError) as error:
        layouts.state_dict_to_hf(weights, model)
    assert "blocks.0.mlp.up.bias is missing" in str(error.value)
    assert "blocks.0.mlp.gate.weight is unexpected" in str(error.value)
    assert "head.norm.weight is [31], not [32]" in str(error.value)
    with pytest.raises(CheckpointError) as error:
        layouts.state_dict_to_hf({"a": torch.zeros(1)}, model)
    assert str(error.value).count("is missing") == 10
    assert "more" in str(error.value)
    theirs = layouts.state_dict_to_hf(saved["weights"]["gpt"], model)
    del theirs["transformer.wpe.weight"]
    with pytest.raises(CheckpointError, match=r"transformer\.wpe\.weight is missing"):
        layouts.hf_to_state_dict(theirs, model)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            {"arch": "gpt", "heads": 4, "kv_heads": 2},
            "GPT-2 cannot express --model.kv-heads 2 for 4 heads",
        ),
        (
            {"arch": "gpt", "heads": 4, "head_dim": 16},
            "GPT-2 cannot express --model.head-dim 16 for 4 heads and width 32",
        ),
        ({**LLAMA, "qk_norm": True, "bias": True}, "Qwen3 cannot express --model.bias true with"),
        (
            {**LLAMA, "heads": 6, "head_dim": 8},
            "cannot express --model.hidden 32, which is not a multiple",
        ),
    ],
)
def test_what_a_layout_cannot_express_is_refused(model: dict[str, Any], problem: str) -> None:
    config = ModelConfig.model_validate(
        {"layers": 1, "hidden": 32, "seq": SEQ, "vocab": VOCAB, **model}
    )
    with pytest.raises(CheckpointError, match=problem):
        layouts.entries(config)


def test_biases_that_a_model_without_them_would_lose_are_refused(saved: dict[str, Any]) -> None:
    model = config_of("gpt-no-bias", 1).model
    theirs = layouts.state_dict_to_hf(saved["weights"]["gpt-no-bias"], model)
    assert not theirs["transformer.h.0.attn.c_attn.bias"].any()
    theirs["transformer.h.0.attn.c_attn.bias"] = torch.ones(96)
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0\.attn\.c_attn\.bias is not zero"):
        layouts.hf_to_state_dict(theirs, model)


def test_damage_is_not_exported_and_leaves_nothing_behind(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    step = shutil.copytree(saved["folder"] / "gpt", tmp_path / "step")
    with (step / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged"):
        export_hf(step, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["step"]


def test_an_earlier_export_is_replaced_and_anything_else_is_kept(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    out = export_hf(saved["folder"] / "gpt", tmp_path / "out", ByteTokenizer())
    export_hf(saved["folder"] / "llama", out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert not (out / "tokenizer.json").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("42")
    with pytest.raises(CheckpointError, match="not a Hugging Face folder"):
        export_hf(saved["folder"] / "llama", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "42"


def export_on_a_full_disk(step: Path, out: Path) -> str:
    """What export says when files cannot grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        export_hf(step, out)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    (said,) = run_ranks(1, export_on_a_full_disk, saved["folder"] / "gpt", tmp_path / "out")
    assert "could not write" in said
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    run_ranks(1, save_small_vocabulary, tmp_path)
    with pytest.raises(
        CheckpointError, match="the model has 53 tokens and tokenizer bytes has 257"
    ):
        export_hf(tmp_path / "step", tmp_path / "out", ByteTokenizer())


def save_small_vocabulary(folder: Path) -> None:
    """A checkpoint of a model with 53 tokens."""
    config = config_of("gpt", 1)
    engine_of(
        config.model_copy(update={"model": config.model.model_copy(update={"vocab": 53})})
    ).save(folder / "step")
