"""The configuration: layers of settings, every refusal with its fix, derived values, and the way to TOML and back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threed.config.arguments import (
    GROUPS,
    PRESETS,
    format_problems,
    load,
    to_toml,
)
from threed.config.checks import check_vocab, find_problems
from threed.config.flags import help_text
from threed.config.groups import (
    Config,
    ConfigError,
    OptimConfig,
    ParamGroup,
    RunConfig,
    key_name,
    python_name,
)
from threed.config.program import program_config
from threed.config.requirements import REFUSALS
from threed.config.resolution import derive_dp, resolve

CONTRACT = {
    "parallel": "tp pp cp ep dp sequence schedule chunks partition",
    "zero": "stage bucket-mib shard-size offload-optimizer offload-params nvme-path prefetch resident tile",
    "recompute": "mode every partition offload arena",
    "precision": "dtype grad-dtype reduce-dtype loss-scale",
    "model": "layers hidden heads kv-heads head-dim ffn vocab seq dropout tied",
    "experts": "aux-loss z-loss bias-rate",
    "train": "steps stop-after global-batch micro-batch seed eval-every grad-clip",
    "optim": "name lr min-lr warmup schedule betas momentum eps weight-decay groups",
    "data": "path tokenizer split",
    "checkpoint": "every keep keep-every async write-limit-mib resume export-hf",
    "log": "every wandb project profile-steps",
    "run": "dir name",
}


def read(line: str, **kwargs: Any) -> Config:
    return load(line.split(), **kwargs)[0]


def problems(line: str, world_size: int = 1, **kwargs: Any) -> list[str]:
    """What is wrong with this command line, parse and combinations."""
    try:
        load(line.split(), world_size=world_size, **kwargs)
    except ConfigError as error:
        return error.problems
    return []


def problem(line: str, world_size: int = 1, **kwargs: Any) -> str:
    (only,) = problems(line, world_size, **kwargs)
    return only


# Keys and layers


def test_every_key_of_the_contract_is_there() -> None:
    assert list(GROUPS) == list(CONTRACT)
    for group, keys in CONTRACT.items():
        fields = GROUPS[group].model_fields
        assert set(keys.split()) <= {key_name(name) for name in fields}, group
        assert all(info.description and not info.is_required() for info in fields.values()), group


def test_defaults_of_the_contract() -> None:
    config = read("")
    assert (
        config.parallel.tp,
        config.parallel.pp,
        config.parallel.dp,
        config.parallel.schedule,
    ) == (
        1,
        1,
        None,
        "1f1b",
    )
    assert (config.zero.stage, config.zero.bucket_mib, config.zero.shard_size) == (1, 64.0, "all")
    assert (config.zero.resident, config.optim.momentum, config.optim.groups) == (65536, 0.9, ())
    assert (config.optim.betas, config.data.split, config.checkpoint.resume) == (
        (0.9, 0.95),
        0.05,
        "auto",
    )
    assert find_problems(config, 1) == []


def test_names_of_keys_and_fields() -> None:
    for group in GROUPS.values():
        for name in group.model_fields:
            assert python_name(key_name(name)) == name
    assert key_name("bucket_mib") == "bucket-mib"
    assert key_name("async_") == "async"


def test_later_layers_win(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[train]\nsteps = 7\nmicro_batch = 3\n[optim]\nbetas = [0.5, 0.6]\n"
    )
    defaults = {"train": {"steps": 5, "seed": 9, "micro-batch": 2}}
    config, options = load(
        ["--preset", "mine", "--train.steps", "8"], defaults=defaults, presets=tmp_path
    )
    assert (config.train.steps, config.train.micro_batch, config.train.seed) == (8, 3, 9)
    assert config.optim.betas == (0.5, 0.6)
    assert config.run.name == "mine"
    assert options.flags == {"preset", "train.steps"}
    by_path = load(["--config", str(tmp_path / "mine.toml")])[0]
    assert (by_path.train.steps, by_path.run.name) == (7, "mine")


def test_no_path_has_a_nul(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[run]\ndir = "a\\u0000b"\n[checkpoint]\nresume = "\\u0000"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(tmp_path / "mine.toml")])
    assert [line.split()[0] for line in caught.value.problems] == [
        "--checkpoint.resume",
        "--run.dir",
    ]
    assert all("must not have a NUL character" in line for line in caught.value.problems)


def test_a_name_as_a_flag_beats_the_folder_of_a_file(tmp_path: Path) -> None:
    """A run's config.toml holds its folder; a run of another name that starts from it must not train into that one."""
    file = tmp_path / "config.toml"
    file.write_text(to_toml(resolve(read("--run.name a"), vocab=260, world_size=1)))
    where = {
        "": ("a", "runs/a"),
        "--run.name b": ("b", "runs/b"),
        "--run.name b --run.dir there": ("b", "there"),
        "--run.dir there --run.name=b": ("b", "there"),
        "--run.dir there": ("a", "there"),
    }
    for flags, wanted in where.items():
        run = resolve(read(f"--config {file} {flags}"), vocab=260, world_size=1).run
        assert (run.name, run.dir) == wanted, flags
    file.write_text('[run]\ndir = "/somewhere"\n')
    assert read(f"--config {file} --train.steps 3").run.dir == "/somewhere"


def test_of_a_repeated_key_the_last_wins() -> None:
    assert read("--parallel.tp 2 --train.steps 3 --parallel.tp=4").parallel.tp == 4
    assert read("--parallel.tp zero --parallel.tp 4").parallel.tp == 4


def test_a_value_with_a_space_stays_as_it_is() -> None:
    assert load(["--run.name", "--a_b c"])[0].run.name == "--a_b c"


def test_forms_of_values() -> None:
    line = (
        "--parallel.sequence False --parallel.partition 3,2,2 --optim.betas 0.8,0.9 --optim.lr=3e-4"
    )
    line += " --zero.bucket-mib .5 --zero.shard_size 4 --log.profile-steps 10:12 --checkpoint.async true"
    config = read(line + " --parallel.dp none")
    assert config.parallel.sequence is False
    assert config.parallel.partition == (3, 2, 2)
    assert config.optim.betas == (0.8, 0.9)
    assert (config.optim.lr, config.zero.bucket_mib, config.zero.shard_size) == (3e-4, 0.5, 4)
    assert config.log.profile_steps == (10, 12)
    assert (config.checkpoint.async_, config.parallel.dp) == (True, None)
    assert read("--log.profile-steps 5").log.profile_steps == (5, 5)
    assert read("--precision.loss-scale 1024").precision.loss_scale == 1024.0


def test_options_of_the_program() -> None:
    _, options = load(["--dry-run", "--world-size", "8", "--parallel.tp", "2"])
    assert (options.dry_run, options.world_size, options.help) == (True, 8, "")
    config, options = load(["--nonsense", "--help"], defaults={"model": {"arch": "llama"}})
    assert options.help
    assert config.model.arch == "llama"


def test_a_custom_program_has_help_but_no_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 3\n")
    monkeypatch.chdir(tmp_path)
    program: Any = {"prog": "mine.py", "about": "Trains mine.", "defaults": {}, "world_size": 1}
    with pytest.raises(ConfigError, match="--preset mine: no such preset; there are none"):
        program_config(["--preset", "mine"], **program)
    with pytest.raises(SystemExit):
        program_config(["--help"], **program)
    text = " ".join(capsys.readouterr().out.split())
    assert "mine.py [--help] [--config FILE.toml] [--group.key" in text
    assert "Trains mine." in text


def test_a_config_is_frozen_and_hashable() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.parallel.tp = 2  # type: ignore[misc]
    assert hash(config) == hash(Config())


def test_the_configuration_needs_no_torch() -> None:
    code = """import sys
sys.modules.update(torch=None)
import threed.config.groups, threed.config.checks, threed.config.arguments"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Refusals of single keys


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--parallel.tpp 2", ["--parallel.tpp", "did you mean --parallel.tp?"]),
        ("--paralel.tp 2", ["--paralel.tp", "did you mean --parallel.tp?"]),
        ("--zero.bucket-mb 2", ["did you mean --zero.bucket-mib?"]),
        ("--train.lr 1", ["did you mean --optim.lr?"]),
        ("--micro-batch 1", ["no such flag", "--train.micro-batch"]),
        ("--xyzzy.plugh 1", ["no such key", "--help"]),
        ("--parallel.tp two", ["--parallel.tp two", "whole number"]),
        ("--parallel.tp 2.5", ["whole number"]),
        ("--parallel.tp 0", ["greater than or equal to 1"]),
        ("--optim.lr nan", ["--optim.lr nan", "finite"]),
        ("--optim.lr -1", ["greater than 0"]),
        ("--optim.betas 0.9", ["two numbers, such as 0.9,0.95"]),
        ("--optim.betas 0.9,1.5", ["--optim.betas 0.9,1.5", "less than 1"]),
        ("--parallel.sequence yes", ["must be true or false"]),
        ("--parallel.partition 3,x", ["3,2,2"]),
        ("--parallel.schedule ZBH1", ["did you mean zb-h1?"]),
        ("--parallel.optimistic-step maybe", ["must be auto, true or false"]),
        ("--parallel.memory-limit-gib 1e308", ["gib 1e308: must be less than"]),
        ("--zero.bucket-mib 1e308", ["mib 1e308: must be less than"]),
        ("--parallel.schedule 1f1d", ["1f1b, gpipe", "did you mean 1f1b?"]),
        ("--zero.stage 4", ["--zero.stage 4", "3"]),
        ("--zero.shard-size half", ["all or a positive whole number"]),
        ("--precision.loss-scale -2", ["dynamic or a positive number"]),
        ("--precision.loss-scale 0", ["dynamic or a positive number"]),
        ("--zero.resident -1", ["greater than or equal to 0"]),
        ("--optim.momentum 1", ["--optim.momentum 1", "less than 1"]),
        (
            "--optim.name muon",
            ["orthogonalizes full matrices", "shard", "use adamw, sgd or lion"],
        ),
        ("--optim.name adam", ["must be adamw, sgd or lion", "did you mean adamw?"]),
        ("--optim.name shampoo", ["must be adamw, sgd or lion"]),
        ("--log.profile-steps 5:3", ["first:last"]),
        ("--run.name a/b", ["plain folder name"]),
        ("--run.name ..", ["plain folder name"]),
        ("--data.split 1", ["less than 1"]),
        ("--model.dropout 1", ["less than 1"]),
        ("--train.steps", ["--train.steps: its value is missing", "--train.steps N"]),
        ("--precision.dtype --dry-run", ["its value is missing", "fp32|bf16"]),
        ("--data.path -x", ["--data.path -x", "begins with a hyphen", "write --data.path=-x"]),
        ("--optim.groups -b*:lr=1", ["write --optim.groups='-b*:lr=1'"]),
        ("--parallel.partition -1,2", ["write --parallel.partition=-1,2"]),
        ("-x --optim.lr 1", ["-x: not a flag"]),
        ("--tp", ["no such flag", "did you mean --parallel.tp?"]),
        ("tiny", ["tiny: not a flag"]),
        ("--data.path x y z", ["y z: no flags"]),
        ("--data.path 0.5 a 0.5 b", ["--data.path 0.5 a 0.5 b: threed reads one dataset"]),
        ("--data.split 949,50,1", ["--data.split 949,50,1: must be one number", "write 0.05"]),
        ("--preset tinny", ["no such preset", "llama-tiny", "tiny"]),
        ("--preset tiny --config x.toml", ["give one"]),
        ("--model.layers 10000", ["--model.layers 10000: must be less than or equal to 2000"]),
        (f"--model.experts {10**30}", ["less than or equal to 10000"]),
        ("--model.hidden 1000000007", ["less than or equal to 100000"]),
        ("--world-size 1000000007", ["--world-size 1000000007", "from 1 to 1000000"]),
        ("--train.micro-batch 1000000007", ["or --train.micro-batch 16"]),
        ("--preset tiny --preset=gpt2", ["--preset: given 2 times", "give one"]),
        ("--config nowhere.toml", ["no such file", "--preset"]),
        ("--world-size none", ["--world-size none", "whole number"]),
        ("--preset=", ["--preset : no such preset"]),
        ("--config=", ["--config : no such file"]),
        ("--dry-run=false", ["--dry-run=false: it takes no value", "leave it out"]),
        ("--help=false", ["--help=false: it takes no value"]),
    ],
)
def test_a_bad_flag_is_refused_with_its_fix(line: str, parts: list[str]) -> None:
    text = problem(line)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train]\nsteps = = 3\n", ["bad.toml", "line 2"]),
        ("steps = 3\n", ["steps is outside any group", "[train]"]),
        ("[trian]\nsteps = 3\n", ["--trian.steps (in", "bad.toml", "did you mean --train.steps?"]),
        (f"[model]\nlayers = {10**19}\n", ["--model.layers 1", "less than or equal to 2000"]),
        ("[trian]\n", ["bad.toml: [trian]: no such group", "did you mean train?"]),
        ("[1]", ["bad.toml: [1]: no such group"]),
        ("[train]\nsteps = true\n", ["--train.steps true (in", "must be a number"]),
        ("[train]\nsteps = 2.5\n", ["--train.steps 2.5", "whole number"]),
        ("[parallel]\nsequence = 1\n", ["--parallel.sequence 1", "true or false"]),
        ("[parallel]\npartition = [3, 2.5]\n", ["--parallel.partition [3, 2.5]"]),
        ("[train.steps]\nx = 3\n", ["--train.steps", "whole number"]),
    ],
)
def test_a_bad_file_is_refused_with_its_fix(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "bad.toml").write_text(text)
    found = problem(f"--config {tmp_path / 'bad.toml'}")
    for part in parts:
        assert part in found


@pytest.mark.parametrize("name", ["bad.json", "bad.yaml", "bad"])
def test_a_file_that_is_not_toml_is_refused_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"train": {"steps": 3}}')
    found = problem(f"--config {tmp_path / name}")
    assert found.startswith(f"{tmp_path / name}: invalid TOML")
    assert found.endswith("only TOML is read; convert the file to TOML")


def test_a_second_file_is_refused(tmp_path: Path) -> None:
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text("[train]\nsteps = 3\n")
    found = problem(f"--config {tmp_path}/a.toml --config {tmp_path}/b.toml")
    assert found.startswith("--config: given 2 times")


def test_what_is_not_a_regular_file_is_refused_as_such(tmp_path: Path) -> None:
    folder, pipe, run = tmp_path / "folder", tmp_path / "pipe", tmp_path / "run"
    folder.mkdir()
    os.mkfifo(pipe)
    run.mkdir()
    (run / "config.toml").touch()
    for path, text in {
        folder: "is a folder; give the path of a TOML file",
        run: f"is a folder; did you mean {run / 'config.toml'}?",
        pipe: "is not a regular file; write the configuration to a TOML file",
        Path("/dev/null"): "is not a regular file; write the configuration to a TOML file",
    }.items():
        assert problem(f"--config {path}").startswith(f"--config {path}: {text}")


def test_all_problems_come_at_once_and_without_noise() -> None:
    found = problems(
        "--parallel.tpp 3 --model.hidden x --optim.lr 0 --precision.dtype fp8 --train.global-batch 10",
        world_size=8,
    )
    assert [text.split(":")[0] for text in found] == [
        "--parallel.tpp",
        "--model.hidden x",
        "--optim.lr 0",
        "--precision.dtype fp8",
        "--train.global-batch 10 is not divisible by --train.micro-batch 2 × dp 8 = 16",
    ]
    report = format_problems(found)
    assert report.startswith("threed: 5 problems")
    assert report.count("\n  - ") == 5
    found = problems("--dry-run=false --help=no --model.hidden x --optim.lrr 1")
    assert [text.split(":")[0] for text in found] == [
        "--help=no",
        "--dry-run=false",
        "--optim.lrr",
        "--model.hidden x",
    ]
    # heads was misspelled and tp is no number: what follows from their defaults is nobody's mistake
    assert len(problems("--model.headz 6 --model.seq 96 --parallel.tp 3", world_size=3)) == 1
    assert len(problems("--parallel.tp x --parallel.dp 2", world_size=8)) == 1


# Refusals of combinations


@pytest.mark.parametrize(
    ("line", "world", "parts"),
    [
        (
            "--parallel.tp 2 --parallel.pp 2 --parallel.dp 2",
            6,
            ["tp 2 × pp 2 × dp 2 = 8", "start 8", "4 with --parallel.dp 1"],
        ),
        (
            "--parallel.tp 2 --parallel.dp 2",
            8,
            ["world size 8 ≠ tp 2 × pp 1 × dp 2 = 4", "--parallel.dp 4", "start 4"],
        ),
        (
            "--parallel.tp 2 --parallel.pp 2",
            6,
            ["world size 6", "tp 2 × pp 2 = 4", "start 4 or 8", "--nproc-per-node"],
        ),
        ("--parallel.tp 2 --parallel.pp 2", 2, ["start 4 or 8"]),
        (
            "--parallel.tp 4 --model.heads 6 --model.hidden 192",
            4,
            ["--model.heads 6", "--parallel.tp 4", "1, 2, 3 or 6"],
        ),
        (
            "--parallel.tp 4 --model.heads 12 --model.hidden 192 --model.kv-heads 6",
            4,
            ["--model.kv-heads 6", "1, 2, 3, 6 or 12"],
        ),
        ("--model.heads 8 --model.kv-heads 3", 1, ["--model.kv-heads 3", "1, 2, 4 or 8"]),
        ("--model.hidden 100", 1, ["--model.hidden 100", "96 or 104"]),
        ("--model.hidden 24 --model.arch llama", 1, ["heads of size 3", "--model.head-dim 4"]),
        (
            "--parallel.pp 4 --model.layers 3",
            4,
            ["--model.layers 3 < --parallel.pp 4", "at most 3"],
        ),
        (
            "--parallel.chunks 2",
            1,
            ["--parallel.chunks 2 with --parallel.schedule 1f1b", "use --parallel.chunks 1, or"],
        ),
        ("--parallel.pp 2 --parallel.partition 3,3,2", 2, ["for 3 stages", "give 2 numbers"]),
        ("--optim.momentum 0.5", 1, ["0.5 with --optim.name adamw", "use the default 0.9"]),
        ("--optim.name lion --optim.eps 1e-6", 1, ["--optim.eps 1e-06", "does not use it"]),
        ("--parallel.pp 2 --parallel.partition 3,3", 2, ["makes 6 layers", "8 are needed"]),
        (
            "--parallel.pp 2 --parallel.schedule zb-v --parallel.partition 4,4",
            2,
            ["give 4 numbers", "× 2 chunks of"],
        ),
        (
            "--parallel.pp 2 --parallel.schedule chimera --parallel.partition 2,2,2,2",
            2,
            ["for 4 stages", "give 2"],
        ),
        (
            "--parallel.pp 4 --parallel.schedule zb-v --model.layers 5",
            4,
            ["and head 7, for the 8 stages", "layers 6"],
        ),
        (
            "--parallel.pp 3 --parallel.schedule chimera",
            3,
            ["--parallel.schedule chimera: 3 stages", "use --parallel.pp 4"],
        ),
        (
            "--parallel.pp 2 --parallel.schedule dualpipe --train.global-batch 4",
            2,
            ["dualpipe: 2 micro-batches"],
        ),
        (
            "--parallel.tp 2 --model.seq 33",
            2,
            ["--model.seq 33", "32 or 34", "--parallel.sequence false"],
        ),
        (
            "--train.global-batch 10 --train.micro-batch 4",
            2,
            ["4 × dp 2 = 8", "use 8 or 16", "--train.micro-batch 1"],
        ),
        ("--train.global-batch 2 --train.micro-batch 4", 1, ["use 4, or", "--train.micro-batch 2"]),
        (
            "--train.global-batch 2147483648",
            1,
            ["makes 1073741824 micro-batches", "at most 100000", "a larger --train.micro-batch"],
        ),
        (
            "--train.steps 10 --train.stop-after 11",
            1,
            ["--train.stop-after 11", "--train.steps 11"],
        ),
        (
            "--train.steps 10 --optim.warmup 300",
            1,
            ["--optim.warmup 300", "steps 10", "warmup 5", "steps 301"],
        ),
        (
            "--train.steps 10 --optim.warmup 10 --optim.schedule constant",
            1,
            ["--optim.warmup 10", "steps 11"],
        ),
        ("--optim.lr 1e-4 --optim.min-lr 1e-3", 1, ["--optim.min-lr 0.001", "at most 0.0001"]),
        ("--model.qk-norm true", 1, ["--model.arch llama"]),
        ("--model.rope-theta 1e6", 1, ["--model.rope-theta 1000000 is", "--model.arch llama"]),
        (
            "--checkpoint.export-hf true --model.kv-heads 2",
            1,
            ["--model.kv-heads 2", "--checkpoint.export-hf false"],
        ),
        (
            "--precision.loss-scale 8",
            1,
            ["8 with --precision.dtype fp32", "only fp16", "--precision.dtype fp16"],
        ),
        (
            "--precision.loss-scale 0.5 --precision.dtype bf16",
            1,
            ["0.5 with --precision.dtype bf16"],
        ),
        (
            "--zero.shard-size 3",
            8,
            ["--zero.shard-size 3 does not divide dp 8", "use 1, 2, 4 or 8, or all"],
        ),
        (
            "--zero.shard-size 3 --parallel.cp 4",
            8,
            ["--zero.shard-size 3 does not divide dp 2 × cp 4 = 8", "use 1, 2, 4 or 8, or all"],
        ),
        (
            "--zero.shard-size 8 --parallel.tp 2 --zero.stage 3",
            8,
            ["does not divide dp 4", "1, 2 or 4, or all"],
        ),
        (
            "--zero.shard-size 2 --zero.stage 0",
            8,
            ["stage 0 shards nothing", "--zero.shard-size all", "--zero.stage 1"],
        ),
        ("--zero.shard-size 3 --zero.stage 0", 8, ["stage 0 shards nothing"]),
        (
            "--zero.offload-optimizer cpu --zero.stage 0",
            1,
            ["states that ZeRO shards", "use --zero.stage 1, 2 or 3"],
        ),
        (
            "--zero.offload-params cpu --zero.stage 2",
            2,
            ["do not shard parameters", "use --zero.stage 3"],
        ),
        ("--zero.offload-optimizer nvme", 1, ["--zero.nvme-path FOLDER"]),
        ("--zero.tile 4 --zero.stage 2", 2, ["use --zero.stage 3"]),
        (
            "--zero.offload-optimizer nvme --recompute.mode full --recompute.offload nvme",
            1,
            ["--zero.offload-optimizer nvme, --recompute.offload nvme: set --zero"],
        ),
        ("--zero.nvme-path /mnt", 1, ["--zero.offload-optimizer nvme, or leave it out"]),
        ("--zero.delayed-update true", 1, ["use --zero.offload-optimizer cpu"]),
        (
            "--zero.shard-size 3 --parallel.tp 3 --model.heads 6 --model.hidden 96 --model.seq 96",
            8,
            ["world size 8"],
        ),
    ],
)
def test_an_impossible_combination_is_refused_with_its_fix(
    line: str, world: int, parts: list[str]
) -> None:
    text = problem(line, world)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("line", "world"),
    [
        ("--parallel.tp 4 --model.kv-heads 2", 4),
        ("--parallel.tp 2 --model.vocab 261 --model.ffn 333", 2),
        ("--parallel.tp 2 --model.seq 33 --parallel.sequence false", 2),
        ("--parallel.pp 6 --model.layers 6", 6),
        ("--parallel.pp 3 --parallel.partition 3,3,2", 3),
        ("--parallel.pp 2 --parallel.partition 3,1,1,3 --parallel.schedule zb-v", 2),
        ("--parallel.pp 2 --parallel.partition measured --parallel.memory-limit-gib 1.5", 2),
        ("--parallel.partition measured", 1),
        ("--train.steps 3", 1),
        ("--train.steps 21 --optim.warmup 20", 1),
        ("--train.steps 1 --optim.warmup 0", 1),
        (
            "--model.arch llama --model.qk-norm true --model.head-dim 48 --checkpoint.export-hf true",
            1,
        ),
        ("--precision.dtype fp64 --precision.reduce-dtype fp64", 1),
        ("--precision.dtype bf16 --precision.grad-dtype bf16 --precision.reduce-dtype bf16", 1),
        ("--zero.stage 0 --parallel.schedule gpipe --parallel.chunks 1", 8),
        ("--zero.stage 2 --zero.shard-size 2 --zero.bucket-mib 1", 8),
        ("--zero.stage 2 --zero.shard-size 4 --parallel.cp 4", 4),
        (
            "--zero.stage 3 --zero.shard-size 4 --zero.prefetch 3 --zero.resident 0 --parallel.tp 2",
            8,
        ),
        (
            "--zero.stage 3 --zero.offload-optimizer nvme --zero.offload-params cpu --zero.nvme-path /mnt",
            2,
        ),
        ("--zero.offload-optimizer cpu --zero.delayed-update true", 2),
        ("--precision.dtype fp16 --precision.loss-scale 128 --precision.grad-dtype fp16", 1),
        ("--precision.dtype fp16 --precision.reduce-dtype bf16", 1),
        ("--optim.name sgd --optim.momentum 0", 1),
        ("--optim.name lion --optim.betas 0.9,0.99", 1),
        ("--optim.momentum 0.5 --optim.groups *.bias:name=sgd", 1),
    ],
)
def test_what_works_is_not_refused(line: str, world: int) -> None:
    assert problems(line, world) == []


def test_a_file_may_have_keys_that_another_optimizer_uses(tmp_path: Path) -> None:
    file = tmp_path / "adamw.toml"
    file.write_text("[optim]\neps = 1e-6\nbetas = [0.9, 0.95]\n")
    assert problems(f"--config {file} --optim.name sgd", 1) == []


def test_a_key_in_two_spellings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.toml"
    file.write_text(
        "[train]\nglobal_batch = 8\nglobal-batch = 16\n[checkpoint]\nasync_ = true\nasync = false\n"
    )
    with pytest.raises(ConfigError) as refused:
        load(["--config", str(file)])
    assert refused.value.problems == [
        f"{file}: train has both global-batch and global_batch, which are one key; remove one",
        f"{file}: checkpoint has both async and async_, which are one key; remove one",
    ]


@pytest.mark.parametrize(
    ("line", "warmup"),
    [
        ("", 20), ("--train.steps 40", 20), ("--train.steps 39", 19), ("--train.steps 1", 0),
        ("--train.steps 9 --optim.warmup 8", 8), ("--train.steps 9 --optim.warmup none", 4),
        ("--preset tiny", 15), ("--preset tiny --train.steps 16", 15), ("--preset tiny --train.steps 15", 7),
        ("--preset tiny --train.steps 15 --optim.warmup 3", 3),
    ],
)  # fmt: skip
def test_a_warm_up_that_nobody_names_fits_the_run(line: str, warmup: int) -> None:
    """That of a preset is for the preset's steps, and gives way to the default."""
    assert problems(line, 1) == []
    assert resolve(read(line), 257, 1).optim.warmup == warmup


@pytest.mark.parametrize(
    "line",
    ["--precision.dtype fp8"],
)
def test_a_feature_that_is_not_there_is_refused_by_name(line: str) -> None:
    flag, value = line.split()
    text = problem(line, world_size=4)
    assert text.startswith(f"{flag} {value.removesuffix('.0')}")
    assert "is not there yet; use " + flag in text


def test_each_refusal_lets_its_own_fix_through() -> None:
    for refusal in REFUSALS:
        for value in refusal.works:
            config = Config.model_validate({refusal.group: {refusal.field: value}})
            assert refusal.find(config) is None


def test_a_world_of_machines_is_counted_in_all() -> None:
    assert "--nnodes × --nproc-per-node, now 4 on this machine" in problem(
        "--parallel.tp 3 --model.heads 6 --model.hidden 192 --model.seq 96", 8, local_world=4
    )


def test_a_dry_run_is_checked_in_its_own_world() -> None:
    assert problems("--dry-run --world-size 8 --parallel.tp 8", world_size=1) == []
    assert problems("--parallel.tp 8", world_size=1) != []


def test_vocabulary_smaller_than_the_tokenizers() -> None:
    (text,) = check_vocab(read("--model.vocab 200"), 260)
    assert "--model.vocab 260" in text
    assert list(check_vocab(read("--model.vocab 300"), 260)) == []


# Parameter groups


@pytest.mark.parametrize(
    ("match", "names", "others"),
    [
        ("a.*|b", ["a.x", "b"], ["b.x", "a"]),
        ("a.* | b", ["a.x", "b"], ["a", " b"]),
        ("[ab].w|c", ["a.w", "b.w", "c"], ["c.w"]),
        ("a[|]b|c", ["a|b", "c"], ["a", "b"]),
        ("w[0]", ["w0", "w[0]"], ["w"]),
    ],
)
def test_alternatives_of_a_pattern(match: str, names: list[str], others: list[str]) -> None:
    group = ParamGroup(match=match)
    assert all(map(group.matches, names))
    assert not any(map(group.matches, others))


def groups_of(text: str) -> tuple[ParamGroup, ...]:
    return load(["--optim.groups", text])[0].optim.groups


def test_groups_of_a_flag() -> None:
    first = ParamGroup(match="embedding.*", lr=1e-4, weight_decay=0.0)
    second = ParamGroup(match="*.bias", weight_decay=0.5)
    assert groups_of("embedding.*: lr=1e-4, weight-decay=0; *.bias: weight_decay=.5") == (
        first,
        second,
    )
    assert groups_of(" *.bias :weight-decay = 0.5;embedding.*:weight-decay=0,lr=1e-4; ") == (
        second,
        first,
    )
    assert groups_of("blocks.[0-3].*: lr=none") == (ParamGroup(match="blocks.[0-3].*"),)
    assert groups_of("none") == ()
    (own,) = groups_of("embedding.*: name=sgd, lr=0.1")
    assert own == ParamGroup(match="embedding.*", name="sgd", lr=0.1)
    assert str(own) == "embedding.*: name=sgd, lr=0.1"


def test_groups_of_a_file_and_of_python(tmp_path: Path) -> None:
    expected = (
        ParamGroup(match="embedding.*", lr=1e-4, weight_decay=0.0),
        ParamGroup(match="*.bias", lr=2.0),
    )
    forms = [
        '[optim]\ngroups = ["embedding.*: lr=1e-4, weight-decay=0", "*.bias: lr=2"]\n',
        '[optim]\ngroups = "embedding.*: lr=1e-4, weight-decay=0; *.bias: lr=2"\n',
        """[[optim.groups]]
        match = "embedding.*"
        lr = 1e-4
        weight-decay = 0
        [[optim.groups]]
        match = "*.bias"
        lr = 2
        """,
    ]
    for number, text in enumerate(forms):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert read(f"--config {path}").optim.groups == expected
        assert read(f"--config {path} --optim.groups none").optim.groups == ()
    assert OptimConfig(groups=expected).groups == expected
    tables = [{"match": "embedding.*", "lr": 1e-4, "weight_decay": 0}, {"match": "*.bias", "lr": 2}]
    config = Config.model_validate({"optim": {"groups": tables}})
    assert config.optim.groups == expected
    assert hash(config) == hash(Config(optim=OptimConfig(groups=expected)))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "embedding.*",
            ["'embedding.*' is not of the form", "pattern: name=sgd, lr=X, weight-decay=X"],
        ),
        ("*.bias:", ["'*.bias:' is not of the form"]),
        (": lr=1", ["': lr=1' is not of the form"]),
        ("a: lr=1; b", ["'b' is not of the form"]),
        ("a: lr=1, b: lr=2", ["of 'a: lr=1, b' is not a pattern", "separate groups by ;"]),
        ("a: lr", ["'lr' of 'a: lr' is not a setting"]),
        ("a: lr=1,", ["'' of 'a: lr=1,' is not a setting"]),
        ("a: match=b", ["'match=b' of 'a: match=b' is not a setting"]),
        ("a: lr=1, lr=2", ["'a: lr=1, lr=2' has lr twice"]),
        ("a: weight-decay=1, weight_decay=2", ["has weight-decay twice"]),
        ("a: lr=fast", ["lr of 'a' must be a number"]),
        ("a: lr=-1", ["lr of 'a' must be greater than or equal to 0"]),
        ("a: weight-decay=nan", ["weight-decay of 'a' must be a finite number"]),
        ("a: lr=inf", ["lr of 'a' must be a finite number"]),
        ("a: betas=0", ["betas of 'a': no such setting; there are name, lr, weight-decay"]),
        ("a: name=adam", ["name of 'a' must be adamw, sgd or lion (did you mean adamw?)"]),
    ],
)
def test_a_bad_group_is_refused_with_its_fix(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        groups_of(text)
    (found,) = caught.value.problems
    for part in [f"--optim.groups {text}: ", *parts]:
        assert part in found


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("3", "--optim.groups 3 (in "),
        ("[3]", "3 is not of the form"),
        ('["a: lr=1; b: lr=2"]', "of 'a: lr=1; b' is not a pattern"),
        ("[{ lr = 1 }]", "match is missing"),
        ('[{ match = "a", lr = true }]', "lr of 'a' must be a number"),
        ('[{ match = "a", weigth-decay = 1 }]', "weigth-decay of 'a': no such setting"),
        ('[{ match = "a", weight-decay = 1, weight_decay = 2 }]', "has weight-decay twice"),
    ],
)
def test_a_bad_group_of_a_file_is_refused_with_its_fix(
    tmp_path: Path, value: str, part: str
) -> None:
    (tmp_path / "bad.toml").write_text(f"[optim]\ngroups = {value}\n")
    assert part in problem(f"--config {tmp_path / 'bad.toml'}")


rates = st.none() | st.floats(min_value=0, max_value=1e30)
matches = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() != "" and not set(text) & set(":;")
)


@given(st.lists(st.builds(ParamGroup, match=matches, lr=rates, weight_decay=rates), max_size=3))
def test_groups_round_trip(
    tmp_path_factory: pytest.TempPathFactory, groups: list[ParamGroup]
) -> None:
    config = resolve(
        Config(optim=OptimConfig(groups=tuple(groups)), run=RunConfig(name="x")),
        vocab=9,
        world_size=1,
    )
    file = tmp_path_factory.getbasetemp() / "groups.toml"
    file.write_bytes(to_toml(config).encode())
    assert read(f"--config {file}") == config
    dumped = json.loads(json.dumps(config.model_dump(mode="json")))
    assert Config.model_validate(dumped) == config


# Derived values


def test_dp_is_what_is_left_of_the_world() -> None:
    assert derive_dp(read("--parallel.tp 2 --parallel.pp 2"), 8) == 2
    assert derive_dp(read("--parallel.dp 3"), 3) == 3


def test_resolve_fills_in_gpt() -> None:
    config = resolve(
        read("--parallel.tp 2 --model.hidden 96 --model.heads 6"), vocab=260, world_size=8
    )
    model = config.model
    assert (model.kv_heads, model.head_dim, model.ffn, model.vocab, model.tied, model.bias) == (
        6,
        16,
        384,
        260,
        True,
        True,
    )
    assert (config.parallel.dp, config.parallel.sequence, config.parallel.chunks) == (4, True, 1)
    assert (config.precision.grad_dtype, config.precision.reduce_dtype) == ("fp32", "fp32")
    assert config.optim.min_lr == pytest.approx(1e-4)
    assert (config.run.name, config.run.dir) == ("gpt", "runs/gpt")


def test_resolve_fills_in_llama() -> None:
    model = resolve(
        read("--model.arch llama --model.hidden 4096 --model.heads 32 --model.vocab 300"), vocab=260
    ).model
    # Llama 7B: 4096 -> 11008 is 8/3 h rounded up to a multiple of 256; to one of 64 it is 10944
    assert (model.ffn, model.vocab, model.tied, model.bias) == (10944, 300, False, False)


def test_resolve_keeps_what_was_said() -> None:
    line = "--precision.dtype fp64 --model.ffn 7 --model.tied false --model.kv-heads 2 --model.head-dim 10"
    line += " --optim.min-lr 0 --run.name x --run.dir y --parallel.tp 2 --parallel.sequence false"
    config = resolve(read(line), vocab=260)
    model = config.model
    assert (model.ffn, model.tied, model.kv_heads, model.head_dim) == (7, False, 2, 10)
    assert (config.optim.min_lr, config.run.dir, config.parallel.sequence, config.parallel.dp) == (
        0.0,
        "y",
        False,
        None,
    )
    assert (config.precision.grad_dtype, config.precision.reduce_dtype) == ("fp64", "fp64")
    assert resolve(config, vocab=1) == config


# To TOML and back, help, presets


def test_toml_of_defaults_and_resolved_round_trips(tmp_path: Path) -> None:
    line = "--parallel.tp 2 --parallel.partition 5,3 --parallel.pp 2 --log.profile-steps 2:3 --run.name résumé"
    for config in (read(""), resolve(read(line), vocab=260, world_size=4)):
        path = tmp_path / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        again = read(
            f"--config {path}", defaults={"train": {"steps": 77}, "data": {"path": "elsewhere"}}
        )
        named = again.model_copy(update={"run": config.run}) if config.run.name is None else again
        assert named == config


texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(lambda text: text != "none")


@given(
    name=texts.filter(lambda text: re.fullmatch(r"[^/\\]*[^/\\.][^/\\]*", text) is not None),
    path=texts,
    lr=st.floats(min_value=1e-30, max_value=1e30),
    seed=st.integers(0, 2**63 - 1),
    flag=st.sampled_from([None, True, False]),
)
def test_any_value_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    path: str,
    lr: float,
    seed: int,
    flag: bool | None,
) -> None:
    groups = {
        "run": {"name": name, "dir": path},
        "data": {"path": path},
        "optim": {"lr": lr},
        "train": {"seed": seed},
    }
    config = Config.model_validate({**groups, "parallel": {"sequence": flag}})
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(to_toml(config).encode())
    assert read(f"--config {file}") == config


@given(st.lists(st.text(alphabet="-.= abtpx019", max_size=12), max_size=6))
def test_no_command_line_breaks_the_parser(argv: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load(argv)[0], Config)


def test_help_names_every_key_with_its_default() -> None:
    text = help_text(read("--train.steps 77"), "pretrain/gpt.py", width=90)
    for group, model in GROUPS.items():
        for name in model.model_fields:
            assert f"  --{group}.{key_name(name)} " in text
    assert "--parallel.tp N " in text
    assert "--precision.dtype fp32|bf16|fp16|fp8|fp64" in text
    assert "--parallel.sequence true|false" in text
    assert "(default 77)" in text
    assert "(default )" not in text
    assert '--optim.groups "PATTERN: name=sgd, lr=X, weight-decay=X; …"' in text
    assert "--optim.name adamw|sgd|lion" in text
    assert "llama-tiny" in text
    assert max(len(line) for line in text.splitlines() if "|" not in line) <= 90


@pytest.mark.parametrize("name", [path.stem for path in sorted(PRESETS.glob("*.toml"))])
def test_presets_are_sound(name: str) -> None:
    assert problems(f"--preset {name}", world_size=1) == []
    layouts = [("tp 2", "pp 2", 4), ("tp 1", "pp 4", 8), ("tp 4", "pp 1", 8), ("tp 1", "pp 1", 8)]
    for tp, pp, world in layouts:
        assert problems(f"--preset {name} --parallel.{tp} --parallel.{pp}", world) == []


def test_the_tiny_preset_fits_its_promise() -> None:
    config = resolve(read("--preset tiny --parallel.tp 2 --parallel.pp 2"), vocab=260, world_size=4)
    assert config.run.dir == "runs/tiny"
    tokens = config.train.steps * config.train.global_batch * config.model.seq
    assert tokens <= 1_000_000


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("3h", 10800),
        ("1h30m", 5400),
        ("90m", 5400),
        ("1:30:00", 5400),
        ("45s", 45),
        ("0.5h", 1800),
        ("2d", 172800),
        ("90", 90),
    ],
)
def test_times_are_read_in_several_forms(said: str, seconds: float, tmp_path: Path) -> None:
    config, _ = load(["--train.time-limit", said, "--run.hang-timeout", said])
    assert (config.train.time_limit, config.run.hang_timeout) == (seconds, seconds)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(["--config", str(tmp_path / "config.toml")])[0] == config


@pytest.mark.parametrize(
    "said", ["1:30", "3 hours", "-5", "inf", "nan", "1:75:00", "h", "", "0x10"]
)
def test_what_is_no_time_is_refused_with_an_example(said: str) -> None:
    with pytest.raises(ConfigError, match="3h, 90m, 1:30:00, or seconds"):
        load(["--train.time-limit", said])


def test_a_time_limit_of_nothing_and_a_watchdog_that_is_off() -> None:
    with pytest.raises(ConfigError, match="time-limit"):
        load(["--train.time-limit", "0"])
    assert load(["--run.hang-timeout", "0", "--train.time-limit", "none"])[0].run.hang_timeout == 0


@pytest.mark.parametrize(
    ("ranks", "flags", "sizes"),
    [
        (1, "", (1, None)),
        (2, "", (1, None)),  # dp 2
        (3, "", (3, None)),
        (6, "", (3, None)),  # dp 2
        (64, "", (8, None)),  # dp 8
        (6, "--parallel.pp 6", (6, None)),
        (6, "--train.global-batch 6", (1, None)),  # dp 6
        (6, "--parallel.tp 1", (3, None)),
    ],
)
def test_a_topology_is_chosen_if_no_key_gives_one(
    ranks: int, flags: str, sizes: tuple[int, int | None]
) -> None:
    """The preset has a global batch of 8 and 8 layers."""
    words = ["--preset", "small", *flags.split()]
    config, options = load(words, world_size=ranks, choose_topology=True)
    assert (config.parallel.pp, config.parallel.dp) == sizes
    assert config.parallel.tp == 1
    chosen = sizes[0] > 1 and "--parallel.pp" not in flags
    assert (
        options.notice.startswith(f"topology   pp {sizes[0]} × dp {ranks // sizes[0]} is chosen:")
        == chosen
    )


def test_the_reason_for_a_chosen_pipeline_names_the_batches_without_one() -> None:
    words = ["--preset", "gpt2", "--train.global-batch"]
    _, options = load([*words, "512"], world_size=7, choose_topology=True)
    assert options.notice == (
        "topology   pp 7 × dp 1 is chosen: --train.global-batch 512 is not divisible by --train.micro-batch 8 × dp 7;"
        " for dp 7 use --train.global-batch 504 or 560"
    )
    config, options = load([*words, "504"], world_size=7, choose_topology=True)
    assert (config.parallel.pp, options.notice) == (1, "")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--model.layers 2",
        "--parallel.dp 3",
        "--parallel.pp 1",
        "--zero.stage 3",
        "--parallel.partition 8,2",
    ],
)
def test_a_topology_is_not_chosen_otherwise(flags: str) -> None:
    choose = flags != ""
    with pytest.raises(ConfigError, match="global-batch 8 is not divisible by"):
        load(["--preset", "small", *flags.split()], world_size=3, choose_topology=choose)
