"""The keys of families of models: which family has which, scalings of rotary angles, and models saved before."""

from __future__ import annotations

from pathlib import Path

import pytest

from threed.checkpoint.run_folder import model_differences
from threed.config import Config, ConfigError
from threed.config.architectures.rope_scaling import RopeScaling
from threed.config.arguments import load, to_toml
from threed.config.checks import find_problems
from threed.config.resolution import resolve

LLAMA3 = (
    "llama3: factor=8, low-freq-factor=1, high-freq-factor=4, original-max-position-embeddings=64"
)


def read_all(words: list[str]) -> Config:
    """The configuration that these words make."""
    return load(words)[0]


def test_a_scaling_of_rotary_angles_is_a_flag_a_table_and_a_line_of_toml(tmp_path: Path) -> None:
    config = read_all(["--model.arch", "llama", "--model.rope-scaling", LLAMA3])
    table = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert config.model.rope_scaling == RopeScaling(**table)
    assert (
        Config.model_validate({"model": {"arch": "llama", "rope_scaling": table}}).model
        == config.model
    )
    assert Config.model_validate(config.model_dump(mode="json")) == config
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_all(["--config", str(tmp_path / "run.toml")]).model == config.model
    long = "longrope: short-factor=1 1.5, long-factor=2 4.5, original-max-position-embeddings=8"
    assert RopeScaling.model_validate(long).long_factor == (2.0, 4.5)
    assert str(RopeScaling.model_validate(long)).startswith(
        "longrope: original-max-position-embeddings=8"
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--model.arch llama --model.window 5",
            "--model.window 5 is for --model.arch mistral or qwen2 or qwen3",
        ),
        (
            "--model.arch mistral --model.layer-pattern sf",
            "is for --model.arch qwen2 or qwen3 or gemma2 or gemma3",
        ),
        (
            "--model.arch gemma3 --model.attention-softcap 5",
            "--model.attention-softcap 5 is for --model.arch gemma2",
        ),
        (
            "--model.arch qwen2 --model.bias true",
            "--model.bias true is for --model.arch gpt or llama or qwen3",
        ),
        (
            "--model.arch phi3 --model.mlp-bias true",
            "--model.mlp-bias true is for --model.arch gpt or llama:",
        ),
        (
            "--model.arch gemma2 --model.rope-local-theta 5",
            "--model.rope-local-theta 5 is for --model.arch gemma3",
        ),
        (
            "--model.query-pre-attn-scalar 9",
            "--model.query-pre-attn-scalar 9 is for --model.arch gemma2 or gemma3",
        ),
        ("--model.logit-softcap 9", "--model.logit-softcap 9 is for --model.arch gemma2 or gemma3"),
        (
            "--model.arch llama --model.experts 8",
            (
                "--model.experts 8 is for --model.arch mixtral or qwen3_moe or deepseek_v3 or deepseek_v2 or gpt_oss:"
                " leave it out with llama"
            ),
        ),
        (
            "--model.arch mixtral --model.expert-ffn 8",
            "--model.expert-ffn 8 is for --model.arch qwen3_moe",
        ),
        (
            "--model.arch mixtral --model.experts 4 --model.experts-per-token 5",
            "--model.experts-per-token 5 with --model.experts 4: use at most 4",
        ),
        (
            "--model.arch qwen3_moe --model.layers 3 --model.dense-layers 2 --model.expert-every 2",
            "no block has experts",
        ),
        ("--model.positions 9 --model.seq 12", "--model.positions 9 is less than --model.seq 12"),
        (
            "--model.arch llama --model.partial-rotary-factor 0.5",
            "--model.partial-rotary-factor 0.5 is for --model.arch",
        ),
        (
            "--model.arch phi3 --model.head-dim 10 --model.partial-rotary-factor 0.5",
            "--model.partial-rotary-factor 0.5 turns 5 dimensions of a head",
        ),
    ],
)
def test_a_key_that_a_family_does_not_have_is_refused_with_those_that_have_it(
    flags: str, problem: str
) -> None:
    found = find_problems(read_all(flags.split()), 1)
    assert [text for text in found if problem in text], found
    assert find_problems(Config(model=resolve(Config(), 260).model), 1) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("dynamic: factor=2", "must be linear, llama3, yarn or longrope"),
        ("linear", 'such as "linear: factor=2"'),
        ("yarn: factor=2", "yarn needs original_max_position_embeddings"),
        ("linear: factor=-2", "must be greater than 0"),
        ("linear: factor=2, beta-fast=3", "linear has no beta_fast"),
        ("linear: factor=2, color=3", "color of 'linear': no such setting; there are factor, "),
        ("linear: factor=2, factor=3", "has factor twice"),
        (
            "llama3: factor=8, low-freq-factor=4, high-freq-factor=1, original-max-position-embeddings=8",
            "must be below",
        ),
    ],
)
def test_a_scaling_that_is_none_is_refused_at_the_flag(given: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_all(["--model.rope-scaling", given])
    (line,) = error.value.problems
    assert line.startswith("--model.rope-scaling")
    assert problem in line


@pytest.mark.parametrize("groups", [1, 2])
def test_more_experts_per_token_than_experts_are_one_problem(groups: int) -> None:
    words = f"--model.arch deepseek_v3 --model.experts-per-token 9 --model.expert-groups {groups}"
    (problem,) = find_problems(read_all(words.split()), 1)
    assert problem == "--model.experts-per-token 9 with --model.experts 8: use at most 8"


def test_the_numbers_of_longrope_are_as_many_as_a_head_turns_pairs() -> None:
    scaling = "longrope: short-factor=1 1, long-factor=2 2, original-max-position-embeddings=8"
    words = ["--model.arch", "phi3", "--model.head-dim", "6", "--model.rope-scaling", scaling]
    found = find_problems(read_all(words), 1)
    assert any("2 numbers of short-factor: a head turns 3 pairs" in text for text in found)


def test_a_model_that_was_saved_before_keys_came_means_what_it_meant() -> None:
    old = {
        "arch": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": 260,
        "seq": 16, "dropout": 0.0, "tied": False, "bias": False, "norm_eps": 1e-5, "rope_theta": 1e4, "qk_norm": True,
    }  # fmt: skip
    config = resolve(Config.model_validate({"model": old}), 260, 1)
    state = {"steps": 3, "extra": {}}
    assert model_differences({"config": {"model": old}, "state": state}, config) == []
    assert (
        len(
            model_differences(
                {"config": {"model": {**old, "rope_theta": 2e4}}, "state": state}, config
            )
        )
        == 1
    )
