"""Files of DeepSeek-V3 with layers of multi-token prediction: both ways, copies, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.interop.test_moe_families import assert_same, tensors
from tests.mtp_reference import reference, save, weights
from threed import from_transformers
from threed.checkpoint.files import CheckpointError
from threed.config import Config
from threed.config.architectures import REGISTERED
from threed.config.checks import find_problems
from threed.interop.convert import convert
from threed.interop.huggingface.folder import HFFolder
from threed.interop.huggingface.layouts import (
    config_of,
    entries,
    hf_to_state_dict,
    model_of,
    state_dict_to_hf,
)

DEPTHS = 2
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def files(folder: Path, copies: bool = True, **changes: Any) -> Path:
    """Writes a folder in the published layout, with or without copies of embedding and head."""
    module = reference(DEPTHS, **changes).to(torch.bfloat16)
    save(module, folder)
    found = tensors(folder)
    if copies:
        for index in range(2, 2 + DEPTHS):
            for copy, original in COPIES.items():
                shared = found.get(original, found["model.embed_tokens.weight"])
                found[f"model.layers.{index}.{copy}"] = shared.clone()
    write(folder, found)
    return folder


def write(folder: Path, found: dict[str, Tensor]) -> None:
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_converted_both_ways_without_a_change(tied: bool, tmp_path: Path) -> None:
    folder = files(tmp_path / "theirs", tie_word_embeddings=tied)
    back = convert(convert(folder, tmp_path / "native"), tmp_path / "back")
    assert_same(tensors(back), tensors(folder))
    names = tensors(back).keys()
    assert {f"model.layers.3.{copy}" for copy in COPIES} <= names
    config = json.loads((back / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTHS
    assert model_of(config) == HFFolder(folder).model


def test_copies_may_be_missing(tmp_path: Path) -> None:
    folder, more = files(tmp_path / "without", copies=False), files(tmp_path / "with")
    back = convert(convert(folder, tmp_path / "native"), tmp_path / "back")
    assert_same(tensors(back), tensors(more))


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_with_other_values_is_refused(copy: str, tmp_path: Path) -> None:
    folder = files(tmp_path / "theirs")
    found, name = tensors(folder), f"model.layers.3.{copy}"
    found[name][5, 7] += 1
    write(folder, found)
    with pytest.raises(CheckpointError, match=f"{name} differs from {COPIES[copy]}"):
        convert(folder, tmp_path / "native")
    with pytest.raises(CheckpointError, match=f"{name} differs from {COPIES[copy]}"):
        hf_to_state_dict(found, HFFolder(folder).model)


def test_a_model_without_these_layers_reads_the_others(tmp_path: Path) -> None:
    folder = HFFolder(files(tmp_path / "theirs"), multi_token=False)
    assert folder.model.mtp_depth == 0
    assert list(folder.problems()) == []
    assert not any(name.startswith(("blocks.2.", "blocks.3.")) for name in folder.shapes)


def test_a_value_that_is_no_number_is_equal_to_itself() -> None:
    module = reference(0)
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan
    model = model_of(json.loads(module.config.to_json_string()))
    found = hf_to_state_dict(weights(module), model)
    assert found["head.norm.weight"].isnan().any()


def test_a_missing_part_of_a_layer_is_named(tmp_path: Path) -> None:
    folder = files(tmp_path / "theirs")
    found = tensors(folder)
    del found["model.layers.3.eh_proj.weight"]
    write(folder, found)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight is missing"):
        convert(folder, tmp_path / "native")


def test_files_of_transformers_lack_the_layers_that_their_configuration_counts(
    tmp_path: Path,
) -> None:
    module = reference(0)
    module.config.num_mtp_layers = 1  # the default of transformers
    module.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    folder = HFFolder(tmp_path)
    assert folder.model.mtp_depth == 0
    assert list(folder.problems()) == []
    assert from_transformers(module).config.mtp_depth == 0


def test_weights_are_converted_both_ways() -> None:
    module = reference(DEPTHS)
    model = model_of(json.loads(module.config.to_json_string()))
    native = hf_to_state_dict(weights(module), model)
    assert native["blocks.3.join.weight"].shape == (32, 64)
    assert {"blocks.2.embedding_norm.weight", "blocks.3.head_norm.weight"} <= native.keys()
    back = state_dict_to_hf(native, model)
    assert back.keys() - weights(module).keys() == {
        f"model.layers.{index}.{copy}" for index in (2, 3) for copy in COPIES
    }
    assert_same({name: back[name] for name in weights(module)}, weights(module))
    assert config_of(model)["num_nextn_predict_layers"] == DEPTHS


@pytest.mark.parametrize("arch", [name for name in REGISTERED if name != "deepseek_v3"])
def test_layouts_without_these_layers_refuse_them_by_name(arch: str) -> None:
    keys = {"arch": arch, "mtp_depth": 1, "heads": 4}
    for export in (False, True):
        config = Config.model_validate({"model": keys, "checkpoint": {"export_hf": export}})
        found = [text for text in find_problems(config, 1) if "mtp-depth" in text]
        if arch == "gpt":
            assert any("--model.mtp-depth 1 is for --model.arch llama" in text for text in found)
        else:
            assert len(found) == export
            assert all("the Hugging Face layout cannot express that" in text for text in found)
    with pytest.raises(CheckpointError, match=r"cannot express .*--model\.mtp-depth 1"):
        entries(Config.model_validate({"model": {**keys, "vocab": 64}}).model)
