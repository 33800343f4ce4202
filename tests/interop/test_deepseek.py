"""DeepSeek-V3 against `transformers`: logits, folders, configuration and training on expert ranks.

A token whose scores nearly agree could get other experts than in `transformers`; with these weights none does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.hf_decoders import casts, difference, engine_of, make, randomized, train, train_plainly
from tests.interop.test_moe_families import TOKENS, TOLERANCE, assert_same, tensors
from tests.models.test_models_families import ours
from threed.checkpoint.files import CheckpointError
from threed.distributed.topology import Topology
from threed.interop.convert import convert
from threed.interop.huggingface.layouts import config_of, hf_to_state_dict, model_of

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "more": {"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
}


def theirs(name: str, dtype: torch.dtype) -> Any:
    """Returns the model of `transformers`, with random selection biases."""
    return randomized(make("deepseek_v3", dtype, **MODELS[name]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_configuration_are_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    module = theirs(name, dtype)
    module.save_pretrained(tmp_path)
    model = model_of(json.loads((tmp_path / "config.json").read_text()))
    weights = hf_to_state_dict(tensors(tmp_path), model)
    with torch.no_grad(), casts(dtype):
        want = module(input_ids=TOKENS).logits
        found = ours(model, weights, TOKENS)
    assert want.std() > 0.3
    torch.testing.assert_close(found, want, rtol=0, atol=TOLERANCE[dtype])
    assert model_of(config_of(model)) == model
    assert model_of(type(module.config)(**config_of(model)).to_dict()) == model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_folders_are_converted_both_ways_without_a_change(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs(name, torch.float32).to(dtype).save_pretrained(tmp_path / "theirs")
    native = convert(tmp_path / "theirs", tmp_path / "native")
    assert_same(tensors(convert(native, tmp_path / "back")), tensors(tmp_path / "theirs"))


SHAPES: list[dict[str, int]] = [{"ep": 1}, {"ep": 2}, {"pp": 2, "dp": 1}, {"tp": 2, "dp": 1}]
STILL = {"bias_rate": 0.0}  # `transformers` does not train selection biases


def trained(shapes: list[dict[str, int]]) -> list[Any]:
    """Trains on the ranks of each shape; returns losses and weights, which only rank 0 has."""
    out = []
    for shape in shapes:
        topology = Topology(pp=shape.get("pp", 1), tp=shape.get("tp", 1))
        engine = engine_of(
            "deepseek_v3", False, torch.float64, topology, parallel={"ep": shape.get("ep", 1)}, experts=STILL
        )  # fmt: skip
        out.append(train(engine, torch.float64))
    return out


def test_training_is_that_of_the_module_on_expert_tensor_and_pipeline_ranks() -> None:
    want = train_plainly("deepseek_v3", torch.float64)
    for got in run_ranks(2, trained, SHAPES)[0]:
        assert difference(got, want) < 1e-9


def test_files_with_more_layers_than_the_model_are_refused(tmp_path: Path) -> None:
    """Other than a layer of multi-token prediction, which the configuration counts."""
    from safetensors.torch import load_file, save_file

    theirs("plain", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(32, 64)}
    save_file(more, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj"):
        convert(tmp_path, tmp_path / "native")
