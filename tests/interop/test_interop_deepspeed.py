"""Checkpoints that DeepSpeed's own engine wrote become native ones: bit for bit, with moments, and training goes on."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import deepspeed_checkpoints as written
from tests.configs import engine_of
from tests.harness import run_ranks
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import read_all
from threed.checkpoint.reading import Reader
from threed.cli import commands
from threed.config import Config, ModelConfig
from threed.config.resolution import resolve
from threed.interop.convert import convert
from threed.interop.huggingface.layouts import entries
from threed.ops.precision import LossScale
from threed.zero.update import Scaler

MOMENTS = ("exp_avg", "exp_avg_sq")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `deepspeed_checkpoints` writes."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip(
            "DeepSpeed, which writes the files, is not installed (benchmarks/deepspeed_peers.py says how)"
        )
    out = tmp_path_factory.mktemp("deepspeed")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, written.__file__, str(out)], capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:3000] + done.stderr[-2000:]
    return out


def truth_of(folders: Path, name: str) -> dict[str, Tensor]:
    return load_file(folders / f"{name}.safetensors")


def model_of(reader: Reader) -> ModelConfig:
    return ModelConfig.model_validate(native.read_manifest(reader.path)["config"]["model"])


def compare(reader: Reader, truth: dict[str, Tensor], part: str, prefix: str) -> int:
    """Checks a part of all tensors that DeepSpeed has it of, bit for bit; how many there are."""
    count = 0
    for entry in entries(model_of(reader)):
        if (theirs := truth.get(f"{prefix}/{entry.name}")) is not None:
            for name, want in entry.split(theirs).items():
                assert torch.equal(read_all(reader.tensor(part, name)), want), (
                    f"{part} of {name}, beside {prefix}"
                )
                count += 1
    return count


@pytest.mark.parametrize("name", [name for name, (_, stage, *_) in written.CASES.items() if stage])
def test_masters_and_moments_are_those_of_the_engine_bit_for_bit(
    name: str, folders: Path, tmp_path: Path
) -> None:
    out = convert(folders / name, tmp_path / "native", allow_pickle=True)
    manifest, truth = native.read_manifest(out), truth_of(folders, name)
    assert native.verify(out, manifest) == []
    state = manifest["state"]
    steps = written.STEPS
    assert (state["steps"], state["consumed"], state["updates"]) == (
        steps,
        steps * written.ROWS,
        steps,
    )
    with Reader(out, manifest) as reader:
        trained = len(reader.shapes) - name.startswith("frozen")
        known = name != "llama-1-bf16"  # whose files the script refuses, `deepspeed_checkpoints`
        assert compare(reader, truth, "weight", "script") == len(reader.shapes) * known
        assert {len(parts) for parts in reader.parts.values()} == (
            {1, 3} if name.startswith("frozen") else {3}
        )
        # the engine's functions read other parameters' values, `deepspeed_checkpoints`
        if name.startswith("robin"):
            check_against_the_module(reader, truth)
            return
        assert compare(reader, truth, "weight", "weight") == trained
        assert [compare(reader, truth, part, part) for part in MOMENTS] == [trained, trained]


def check_against_the_module(reader: Reader, truth: dict[str, Tensor]) -> None:
    """The masters round to the weights in bf16 that the engine computes with."""
    for entry in entries(model_of(reader)):
        for name, want in entry.split(truth[f"module/{entry.name}"]).items():
            assert torch.equal(read_all(reader.tensor("weight", name)).bfloat16().float(), want), (
                name
            )


def test_the_order_of_round_robin_is_that_of_the_moments_too(folders: Path, tmp_path: Path) -> None:
    readers = []
    for name in ("robin-2-bf16", "gpt2-2-bf16"):
        out = convert(folders / name, tmp_path / name, allow_pickle=True)
        readers.append(Reader(out, native.read_manifest(out)))
    for name in readers[0].shapes:
        for part in ("weight", *MOMENTS):  # the same training: of gradients in bf16, the same sums
            assert torch.equal(
                read_all(readers[0].tensor(part, name)), read_all(readers[1].tensor(part, name))
            ), f"{part} of {name}"


@pytest.mark.parametrize("name", ["gpt2-0-fp32", "llama-0-bf16"])
def test_stage_0_has_weights_alone(name: str, folders: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="its states have no names: a run starts at step 0"):
        out = convert(folders / name, tmp_path / "native", allow_pickle=True)
    manifest, truth = native.read_manifest(out), truth_of(folders, name)
    assert (manifest["state"]["steps"], manifest["state"]["updates"]) == (0, 0)
    with Reader(out, manifest) as reader:
        assert all(parts == {"weight"} for parts in reader.parts.values())
        for entry in entries(model_of(reader)):
            for ours, want in entry.split(truth[f"module/{entry.name}"]).items():
                assert torch.equal(read_all(reader.tensor("weight", ours)).float(), want)


@pytest.mark.parametrize("name", ["llama-2-fp16", "gpt2-3-fp16"])
def test_the_loss_scale_goes_on_as_deepspeeds(name: str, folders: Path, tmp_path: Path) -> None:
    state = native.read_manifest(convert(folders / name, tmp_path / "native", allow_pickle=True))[
        "state"
    ]
    rule = LossScale(2.0**10, window=2, hysteresis=3)
    scaler, found = Scaler(rule, torch.device("cpu")), []
    scaler.restore(state)
    # behind an overflow 0.19.8 waits for one update more than its window, and we do not
    for _ in range(8):
        found.append(float(scaler.scale))
        scaler.update(torch.tensor(0.0))
    assert found == truth_of(folders, name)["scaler"].tolist()


@pytest.mark.parametrize("name", written.UNIVERSAL)
def test_universal_checkpoints_are_those_that_they_were_made_of(
    name: str, folders: Path, tmp_path: Path
) -> None:
    config, readers = folders / name / "config.json", []
    for folder in (name, f"{name}-universal"):
        out = convert(folders / folder, tmp_path / folder, allow_pickle=True, config=config)
        readers.append(Reader(out, native.read_manifest(out)))
    states = [native.read_manifest(reader.path)["state"] for reader in readers]
    assert [states[0][key] for key in ("steps", "consumed", "updates")] == [
        states[1][key] for key in ("steps", "consumed", "updates")
    ]
    assert readers[0].parts == readers[1].parts
    for key, parts in readers[0].parts.items():
        for part in parts:
            assert torch.equal(
                read_all(readers[0].tensor(part, key)), read_all(readers[1].tensor(part, key))
            ), f"{part} of {key}"


def removed(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


def put(name: str, tensor: Tensor) -> Callable[[Path], Any]:
    return lambda folder: torch.save({"param": tensor}, folder / name)


def renamed(name: str) -> Callable[[Path], Any]:
    """Gives the first parameter another name in the model's file."""

    def edit(folder: Path) -> None:
        file = next(folder.parent.glob("*model_states.pt"))
        head = torch.load(file, weights_only=False)
        group = head["param_shapes"][0]
        head["param_shapes"][0] = {name: group.pop(next(iter(group))), **group}
        torch.save(head, file)

    return edit


WORD = "transformer.wte.weight"
UNIVERSAL_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight is missing": (removed(f"{WORD}/fp32.pt"), f"has no zero/{WORD}/fp32.pt"),
    "a moment is missing": (
        removed(f"{WORD}/exp_avg.pt"),
        f"has moments of .*, but not of {WORD}",
    ),
    "both are missing": (
        removed(*(f"{WORD}/{part}.pt" for part in MOMENTS)),
        f"but not of {WORD}",
    ),
    "a longer moment": (
        put(f"{WORD}/exp_avg.pt", torch.ones(60, 24)),
        r"has shape \[60, 24\], but its parameter \[",
    ),
    "a moment with more dimensions": (
        put(f"{WORD}/exp_avg_sq.pt", torch.ones(53, 24, 2)),
        r"has shape \[53, 24, 2\]",
    ),
    "a shorter flat one": (
        put(f"{WORD}/exp_avg.pt", torch.ones(100)),
        r"has shape \[100\], but its parameter",
    ),
    "another number of updates": (
        put(f"{WORD}/step.pt", torch.tensor(1.0)),
        "different numbers of updates",
    ),
    "a name that is a path": (
        renamed("../../elsewhere"),
        "a parameter ../../elsewhere, which cannot be",
    ),
    "a name that is the folder above": (renamed(".."), "which cannot be the name of a folder"),
    "a name that is too long": (renamed("a" * 300), "which cannot be the name of a folder"),
}


@pytest.mark.parametrize("kind", UNIVERSAL_DAMAGE)
def test_universal_checkpoints_that_are_not_whole_are_refused(
    kind: str, folders: Path, tmp_path: Path
) -> None:
    folder = copy_of(folders, "gpt2-1-fp32-universal", tmp_path / "theirs")
    (edit, problem) = UNIVERSAL_DAMAGE[kind]
    edit(next(folder.rglob("zero")))
    with pytest.raises(CheckpointError, match=problem):
        convert(
            folder,
            tmp_path / "native",
            allow_pickle=True,
            config=folders / "gpt2-1-fp32/config.json",
        )
    assert not (tmp_path / "native").exists()


def test_a_universal_checkpoint_without_its_groups_says_what_is_left_out(
    folders: Path, tmp_path: Path
) -> None:
    folder = copy_of(folders, "gpt2-1-fp32-universal", tmp_path / "theirs")
    next(folder.rglob("optimizer_state.pt")).unlink()
    with pytest.warns(
        UserWarning,
        match=r"has no zero/optimizer_state\.pt: the loss scale of fp16 is not imported",
    ):
        convert(
            folder,
            tmp_path / "native",
            allow_pickle=True,
            config=folders / "gpt2-1-fp32/config.json",
        )


# ---------------------------------------------------------------------------------------------------------- going on


def go_on(folder: Path, zero: int, tp: int) -> tuple[Any, dict[str, Tensor]]:
    """Resumes a converted checkpoint and does the step that DeepSpeed did: its counters, and the weights."""
    saved = native.read_manifest(folder)["config"]["model"]
    config = Config.model_validate({
        "model": ModelConfig.model_validate(saved).model_dump() | {"seq": written.SEQ}, "zero": {"stage": zero},
        "precision": {"dtype": "fp32"}, "parallel": {"tp": tp},
        "optim": {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup": 0, "schedule": "constant"},
        "train": {"global_batch": written.ROWS, "micro_batch": 1, "grad_clip": 0.0, "steps": 10},
    })  # fmt: skip
    engine = engine_of(resolve(config, written.VOCAB, 2))
    engine.load(folder)
    counters = engine.steps, engine.consumed, float(engine.optimizer.updates)
    tokens = written.batch(written.STEPS)
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
    axis = engine.topology.axis("dp")
    share = slice(
        axis.index * len(tokens) // axis.size, (axis.index + 1) * len(tokens) // axis.size
    )
    engine.step({"tokens": tokens[share], "labels": labels[share]})
    return counters, engine.full_state_dict()


def go_on_all(cases: list[tuple[Path, int, int]]) -> list[Any]:
    return [go_on(*case) for case in cases]


def test_the_next_step_is_deepspeeds(folders: Path, tmp_path: Path) -> None:
    names = ["gpt2-1-fp32", "llama-2-fp32", "gpt2-3-fp32"]
    for name in names:
        convert(folders / name, tmp_path / name, allow_pickle=True)
    cases = [
        (tmp_path / name, zero, tp)
        for name, zero, tp in zip(names, (3, 1, 2), (1, 2, 1), strict=True)
    ]
    found = run_ranks(2, go_on_all, cases)[0]
    for name, (counters, weights) in zip(names, found, strict=True):
        assert counters == (written.STEPS, written.STEPS * written.ROWS, float(written.STEPS))
        truth, out = truth_of(folders, name), native.read_manifest(tmp_path / name)
        with Reader(tmp_path / name, out) as reader:
            for entry in entries(model_of(reader)):
                for ours, want in entry.split(truth[f"next/{entry.name}"]).items():
                    # An update is 1e-3 times moments' ratio, whose gradients are summed in another order, in fp32.
                    torch.testing.assert_close(
                        weights[ours], want, rtol=0, atol=2e-6, msg=f"{name}: {ours}"
                    )


# ---------------------------------------------------------------------------------------------------------- refusals


def copy_of(folders: Path, name: str, out: Path) -> Path:
    shutil.copytree(folders / name, out)
    return out


def edit_rename(old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / f"global_step3/{old}").rename(folder / f"global_step3/{new}")


def edit_remove(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


STATES = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (
        edit_remove("config.json"),
        "DeepSpeed does not save the model's configuration.*give --config FILE",
    ),
    "a rank is missing": (
        edit_remove(f"global_step3/{STATES.format(1)}"),
        "states of 1 data rank, but was saved by 2: copy the files of all machines",
    ),
    "the first is missing": (
        edit_remove(f"global_step3/{STATES.format(0)}"),
        "has no file of rank 0: copy the files of all",
    ),
    "no states": (
        edit_remove(*(f"global_step3/{STATES.format(rank)}" for rank in range(2))),
        "no optimizer files: copy",
    ),
    "tensor ranks": (
        edit_rename(STATES.format(1), STATES.format(1).replace("_00_", "_01_")),
        "a tensor-parallel model",
    ),
    "two kinds": (
        edit_rename(STATES.format(1), "bf16_" + STATES.format(1)),
        "states of several kinds",
    ),
    "a pipeline": (
        edit_rename(STATES.format(1), "layer_00-model_00-model_states.pt"),
        "is a checkpoint of a PipelineModule",
    ),
    "experts": (
        edit_rename(STATES.format(1), "layer_0_expert_0_mp_rank_00_model_states.pt"),
        "of experts",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_read_is_refused_by_name(kind: str, folders: Path, tmp_path: Path) -> None:
    edit, problem = REFUSALS[kind]
    folder = copy_of(folders, "gpt2-1-fp32", tmp_path / "theirs")
    edit(folder)
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)
    assert not (tmp_path / "native").exists()


def test_pickles_are_read_only_where_somebody_says_so(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, config = str(folders / "llama-2-fp32"), str(tmp_path / "moved.json")
    assert commands.main(["convert", source, str(tmp_path / "native")]) == 2
    assert (
        "a DeepSpeed checkpoint, which consists of pickles: --allow-pickle reads it"
        in capsys.readouterr().err
    )
    shutil.move(folders / "llama-2-fp32" / "config.json", config)
    try:
        words = ["convert", f"{source}/global_step3", str(tmp_path / "native"), "--allow-pickle"]
        assert commands.main(words) == 2
        assert commands.main([*words, "--config", config, "--tokenizer", "bytes"]) == 0
    finally:
        shutil.move(config, folders / "llama-2-fp32" / "config.json")
    assert native.read_manifest(tmp_path / "native")["config"]["data"]["tokenizer"] == "bytes"
    assert (
        commands.main(["convert", source, str(tmp_path / "hf"), "--allow-pickle", "--to", "hf"])
        == 2
    )
    assert "convert it to a native checkpoint first" in capsys.readouterr().err


def test_a_model_of_another_shape_is_refused(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not fit its configuration: .* is missing"):
        convert(
            folders / "llama-2-fp32",
            tmp_path / "native",
            allow_pickle=True,
            config=folders / "gpt2-1-fp32/config.json",
        )
