"""The table of docs/reference/configuration.md on resumes: every key is in it once, and a resume does what its row says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import keys
from tests.configs import engine_of
from tests.harness import run_ranks, run_script
from tests.runs import SEQ, TINY, configuration, open_text, run
from threed.checkpoint import run_folder
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.native import read_manifest
from threed.checkpoint.resuming import changes
from threed.config.arguments import GROUPS
from threed.config.flags import takes
from threed.config.groups import Config, key_name, python_name
from threed.config.resolution import resolve
from threed.data import Data, open_data
from threed.trainer import Trainer

Groups = dict[str, dict[str, Any]]


def rows_of_the_page() -> Iterator[tuple[list[str], str, str]]:
    """Keys, change and note of each row of the page's table."""
    table = (
        keys.PAGE.read_text(encoding="utf-8")
        .split("## When a run resumes")[1]
        .split("|---|---|---|\n")[1]
    )
    for line in table.strip().splitlines():
        _, names, change, note, _ = line.split("|")
        yield re.findall(r"`--([\w.-]+)`", names), change.strip(), note.strip()


PAGE = {key: (change, note) for names, change, note in rows_of_the_page() for key in names}


def test_every_key_is_in_the_table_once() -> None:
    named = [key for names, *_ in rows_of_the_page() for key in names]
    every = {
        f"{group}.{key_name(name)}" for group, kind in GROUPS.items() for name in kind.model_fields
    }
    assert sorted(named) == sorted(every), (
        "give each new key a row in threed/checkpoint/resuming.py"
    )
    assert {change for change, _ in PAGE.values()} == {"free", "applied", "refused"}


# ------------------------------------------------------------------------------------------------------- the comparison

OTHERS = {
    "optim.betas": "0.8,0.9", "optim.groups": "*.bias: lr=0.1", "model.rope-scaling": "linear: factor=2",
    "model.layer-pattern": "sf", "recompute.ops": "norm", "log.profile-steps": "2", "run.hang-timeout": "7",
    "train.time-limit": "3h", "parallel.partition": "uniform", "zero.shard-size": 1, "precision.loss-scale": 8.0,
    "parallel.cp-heads": 2,
    "parallel.schedule": "gpipe", "model.seq": 8, "train.max-norm-spike": 7.0, "experts.room": 2.0,
}  # fmt: skip


def other_value(group: str, name: str, now: Any) -> Any:
    """Another value of a key than it has now."""
    if (key := f"{group}.{key_name(name)}") in OTHERS:
        return OTHERS[key]
    kind = takes(GROUPS[group].model_fields[name])
    if kind == "N":
        return 3 if now in (None, 1, "none") else now + 1
    if kind == "X":
        return 0.125
    if kind in ("PATH", "TEXT"):
        return "other"
    return next(word for word in kind.split("|") if word not in ("auto", "none", str(now).lower()))


def changed(config: Config, group: str, name: str, value: Any) -> Config:
    """The resolved configuration with another value of one key, and no others."""
    values = getattr(config, group).model_dump() | {name: value}
    return config.model_copy(update={group: GROUPS[group].model_validate(values)})


def compared(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """What a comparison with a checkpoint says of each key that differs: refused, applied."""
    data = open_text(Path(folder))
    llama = {"model": {**TINY["model"], "arch": "llama", "kv_heads": 2}}
    run(Path(folder), data, train={"steps": 2}, **llama)
    manifest = read_manifest(Path(folder) / "run" / "checkpoints" / "step-2")
    config, found = configuration(Path(folder), data, 1, train={"steps": 2}, **llama), {}
    assert run_folder.refusals(manifest, config, data) == changes(manifest, config, data) == []
    for group, kind in GROUPS.items():
        for name in kind.model_fields:
            other = changed(
                config, group, name, other_value(group, name, getattr(getattr(config, group), name))
            )
            assert other != config, name
            found[f"{group}.{key_name(name)}"] = (
                run_folder.refusals(manifest, other, data), changes(manifest, other, data),
            )  # fmt: skip
    return found


def test_a_comparison_says_of_each_key_what_its_row_says(tmp_path: Path) -> None:
    [found] = run_ranks(1, compared, str(tmp_path))
    assert found.keys() == PAGE.keys()
    for key, (refused, applied) in found.items():
        change, note = PAGE[key]
        assert bool(refused) == (change == "refused"), (key, refused)
        assert bool(applied) == (change == "applied"), (key, applied)
        if applied:
            assert re.match(rf"{key} was .+ and is .+: {re.escape(note)}$", applied[0]), applied
            rates = key in (
                "optim.lr",
                "optim.min-lr",
                "optim.warmup",
                "optim.schedule",
                "train.steps",
            )
            assert len(applied) == 1 or rates, applied
        if refused:
            assert python_name(key.partition(".")[2]) in refused[0] or key == "optim.name", refused
            assert note in refused[0] or "resume with --optim.name" in refused[0]


# ------------------------------------------------------------------------------------------------------- real resumes

BASE: Groups = {
    "model": {"layers": 2, "hidden": 16, "heads": 2, "seq": SEQ, "positions": SEQ},
    "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "eval_samples": 6, "sample_tokens": 0, "grad_clip": 0.0},
    "checkpoint": {"every": 3, "keep": 9},
    "optim": {"warmup": 2, "lr": 1e-2, "min_lr": 1e-3},
}  # fmt: skip
FREE: dict[int, list[Groups]] = {
    1: [
        {"zero": {"stage": 3, "resident": 0, "prefetch": 2, "bucket_mib": 0.01}, "recompute": {"mode": "full"}},
        {
            "zero": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu", "order": "layer"},
            "recompute": {"mode": "full", "every": 2, "loss_chunks": 2, "mlp_chunks": 2, "offload": "cpu"},
        },
        {"zero": {"stage": 0}, "recompute": {"mode": "selective", "ops": "norm,activation"}},
        {"zero": {"stage": 3, "tile": 2}, "train": {"micro_batch": 4, "max_bad_steps": 3, "time_limit": "3h"}},
        {
            "train": {"micro_batch": 1, "eval_every": 1, "stop_after": 6},
            "checkpoint": {"every": 1, "async_": False, "write_limit_mib": 100.0, "keep_every": 2},
            "run": {"hang_timeout": 100}, "log": {"every": 1, "project": "other"},
        },
    ],
    2: [
        {"parallel": {"tp": 2, "sequence": False}},
        {"parallel": {"pp": 2, "partition": "uniform", "optimistic_step": True}},
        {"zero": {"stage": 3, "shard_size": 1}, "run": {"check_replicas": 1}},
    ],
}  # fmt: skip
APPLIED: dict[str, tuple[Groups, str]] = {
    "model.seq": ({"model": {"seq": 8}}, "16 and is 8"),
    "model.dropout": ({"model": {"dropout": 0.2}}, "0 and is 0.2"),
    "train.steps": ({"train": {"steps": 12}}, "6 and is 12"),
    "train.global-batch": ({"train": {"global_batch": 6}}, "4 and is 6"),
    "train.seed": ({"train": {"seed": 7}}, "1234 and is 7"),
    "train.eval-samples": ({"train": {"eval_samples": 3}}, "6 and is 3"),
    "train.grad-clip": ({"train": {"grad_clip": 0.01}}, "0 and is 0.01"),
    "optim.lr": ({"optim": {"lr": 5e-3}}, "0.01 and is 0.005"),
    "optim.min-lr": ({"optim": {"min_lr": 2e-3}}, "0.001 and is 0.002"),
    "optim.warmup": ({"optim": {"warmup": 5}}, "2 and is 5"),
    "optim.schedule": ({"optim": {"schedule": "linear"}}, "cosine and is linear"),
    "optim.betas": ({"optim": {"betas": (0.5, 0.6)}}, "0.9,0.95 and is 0.5,0.6"),
    "optim.eps": ({"optim": {"eps": 1e-2}}, "1e-08 and is 0.01"),
    "optim.weight-decay": ({"optim": {"weight_decay": 3.0}}, "0.1 and is 3"),
    "optim.groups": ({"optim": {"groups": "*.bias: lr=0.1"}}, r"none and is \*.bias: lr=0.1"),
    "precision.dtype": (
        {"precision": {"dtype": "fp32", "grad_dtype": "fp64", "reduce_dtype": "fp64"}},
        "fp64 and is fp32",
    ),
    "data.split": ({"data": {"split": 0.2}}, "0.1 and is 0.2"),
}
RATES = {"train.steps", "optim.lr", "optim.min-lr", "optim.warmup", "optim.schedule"}


def merged(*several: Groups) -> Groups:
    found: Groups = {}
    for groups in several:
        for name, values in groups.items():
            found[name] = {**found.get(name, {}), **values}
    return found


def trained(
    folder: Path, name: str, *several: Groups
) -> tuple[str, list[dict[str, float]], dict[str, float]]:
    """What a run prints, its metrics from step 4 on, and those of the last step."""
    groups = merged(BASE, *several)
    seq, split = groups["model"]["seq"], groups.setdefault("data", {"split": 0.1}).get("split", 0.1)
    data = open_data(
        str(folder / "text.txt"),
        "bytes",
        split,
        seq,
        groups["train"].get("seed", 1),
        cache=folder / "cache",
    )
    groups["run"] = {"dir": str(folder / name), "name": name, **groups.get("run", {})}
    world = 2 if groups.get("parallel") or "check_replicas" in groups["run"] else 1
    said = run(folder, data, world, **groups)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return said, [row for row in rows if row["step"] > 3], rows[-1]


def resumed(folder: str, world: int) -> dict[str, tuple[str, list[dict[str, float]]]]:
    """The same run resumed at step 3 with other keys: what each printed, and its metrics."""
    place = Path(folder)
    open_text(place)
    path = {"checkpoint": {"resume": str(place / "base" / "checkpoints" / "step-3")}}
    if world == 1:
        found = {"base": trained(place, "base")[:2], "again": trained(place, "again", path)[:2]}
        for key, (groups, _) in APPLIED.items():
            found[key] = trained(place, key, path, groups)[:2]
    else:
        found = {}
    for number, groups in enumerate(FREE[world]):
        found[f"free {number}"] = trained(place, f"free-{world}-{number}", path, groups)[:2]
    return found


LOOKED_AT = ("train/loss", "train/grad_norm", "train/lr", "val/loss")


def numbers(rows: list[dict[str, float]]) -> list[float]:
    last = len(rows) - 1
    return [
        row[name]
        for n, row in enumerate(rows)
        for name in LOOKED_AT
        if name in row and (n == last or "val" not in name)
    ]


def test_resumes_do_what_their_rows_say(tmp_path: Path) -> None:
    """Free: the losses, norms, rates are those of the run that was not interrupted. Applied: reported, and others."""
    [found] = run_ranks(1, resumed, str(tmp_path), 1)
    both = run_ranks(2, resumed, str(tmp_path), 2)[0]
    base = numbers(found["base"][1])
    for name, (said, rows) in {**found, **both}.items():
        if name == "again" or name.startswith("free"):
            assert "changed " not in said, name
            # fp64; sums in another order
            assert numbers(rows) == pytest.approx(base, rel=1e-9), name
    for key, (_, values) in APPLIED.items():
        said, rows = found[key]
        lines = [line for line in said.splitlines() if line.startswith("changed ")]
        change, note = PAGE[key]
        assert change == "applied"
        assert re.match(rf"changed    {key} was {values}: {re.escape(note)}$", lines[0]), lines
        assert len(lines) == 1 + (key in RATES), lines
        assert key not in RATES or re.match(
            r"changed    the learning rate of step 4 is [\d.e-]+, .* the", lines[1]
        )
        assert numbers(rows) != pytest.approx(base, rel=1e-9), key


def test_tokens_are_counted_over_a_change_of_the_sequence_length(tmp_path: Path) -> None:
    [found] = run_ranks(1, of_another_length, str(tmp_path))
    assert found == [SEQ * 4 * 3 + 8 * 4 * steps for steps in (1, 2, 3)]


def of_another_length(folder: str) -> list[float]:
    place = Path(folder)
    open_text(place)
    trained(place, "base", {"train": {"stop_after": 3}})
    _, rows, _ = trained(place, "base", {"model": {"seq": 8}})
    return [row["train/tokens"] for row in rows]


# -------------------------------------------------------------------------------------------------------------- refused


def refusals(folder: str) -> dict[str, str]:
    """What resumes raise that are refused; the run is as it was."""
    place, said = Path(folder), dict[str, str]()
    data = open_text(place)
    run(place, data, **BASE)
    manifest = (place / "run" / "checkpoints" / "step-6" / "manifest.json").read_bytes()
    others: dict[str, Groups] = {
        "layers": {"model": {"layers": 1}}, "norm_eps": {"model": {"norm_eps": 1e-3}},
        "optim": {"optim": {"name": "lion"}},
        "positions": {"model": {"seq": 32, "positions": None}},
    }  # fmt: skip
    for name, groups in others.items():
        with pytest.raises(CheckpointError) as refused:
            run(place, data, **merged(BASE, groups, {"train": {"steps": 9}}))
        said[name] = str(refused.value)
    with pytest.raises(CheckpointError) as refused:
        trainer(
            place,
            open_data(
                str(place / "text.txt"), str(tokenizer(place)), 0.1, SEQ, 1, cache=place / "cache"
            ),
        ).run()
    said["tokenizer"] = str(refused.value)
    assert (place / "run" / "checkpoints" / "step-6" / "manifest.json").read_bytes() == manifest
    return said


def trainer(place: Path, data: Data) -> Trainer:
    said = merged(
        TINY, BASE, {"run": {"dir": str(place / "run"), "name": "run"}, "train": {"steps": 9}}
    )
    return Trainer(engine_of(resolve(Config.model_validate(said), 257, 1)), data, [])


def tokenizer(folder: Path) -> Path:
    """A tokenizer.json of as many ids as there are bytes and an end of text, in another order."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    backend = Tokenizer(
        models.BPE({"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_what_is_refused_names_what_to_do(tmp_path: Path) -> None:
    [said] = run_ranks(1, refusals, str(tmp_path))
    assert "has layers = 2, this run has 1: resume with the same shape" in said["layers"]
    assert (
        "has norm_eps = 1e-05, this run has 0.001: resume with the same shape" in said["norm_eps"]
    )
    assert "resume with --optim.name adamw" in said["optim"]
    assert (
        "has positions = 16, this run has 32: give --model.positions 16 as well"
        in said["positions"]
    )
    assert "was trained with tokenizer bytes, and --data.tokenizer" in said["tokenizer"]
    assert (
        "resume with its tokenizer; or write the weights to a folder with `threed convert`"
        in said["tokenizer"]
    )


def moved(folder: str) -> list[list[str]]:
    """What a comparison refuses where the tokenizer's files are elsewhere, have another companion, or are others."""
    place = Path(folder)
    open_text(place)
    here, there = place / "here", place / "there"
    for copy in (here, there):
        copy.mkdir()
        tokenizer(copy)
    data, elsewhere = (
        open_data(str(place / "text.txt"), str(f), 0.1, SEQ, 1, cache=place / "c")
        for f in (here, there)
    )
    run(place, data, **merged(BASE, {"data": {"tokenizer": str(here)}}))
    manifest = read_manifest(place / "run" / "checkpoints" / "step-6")
    config = configuration(place, data, 1, **merged(BASE, {"data": {"tokenizer": str(there)}}))
    (there / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    companion = open_data(str(place / "text.txt"), str(there), 0.1, SEQ, 1, cache=place / "c")
    # and special tokens are read in another way, at once
    (there / "chat_template.jinja").write_text("{{ text }}")
    both = open_data(
        str(place / "text.txt"), str(there), 0.1, SEQ, 1, cache=place / "c", special_tokens="parse"
    )
    others = (data, elsewhere, companion, both, open_text(place))
    found = [run_folder.refusals(manifest, config, one) for one in others]
    applied = [changes(manifest, config, one) for one in others]
    # as a config.json in the same folder may have named another end
    manifest["state"]["extra"]["eot"] = 5
    found.append(run_folder.refusals(manifest, config, data))
    assert not any([*applied, changes(manifest, config, data)])
    return found


def test_files_of_a_tokenizer_may_move(tmp_path: Path) -> None:
    [[same, elsewhere, companion, both, other, end]] = run_ranks(1, moved, str(tmp_path))
    assert same == elsewhere == companion == both == []
    assert "gives other ids" in other[0]
    assert "gives other ids" in end[0]


def test_a_command_line_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "".join(f"line {n} has the square {n * n}\n" for n in range(500))
    )
    words = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.seq 16 --data.path text.txt --log.wandb off"
    words += " --train.global-batch 4 --train.sample-tokens 0 --run.dir run --train.steps"
    command = ["-m", "threed", "train", "gpt", *words.split()]
    environment = {**os.environ, "THREED_CACHE": str(tmp_path)}
    done = run_script(1, [*command, "2"], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "rate       warm-up over 1 of 2 steps to 0.001, then cosine to 0.0001" in done.stdout
    kind = "attention  flash attention: float32, 2 x 16 positions, 2 heads of 8, causal"
    assert done.stdout.count(kind) == 1
    other = ["4", "--data.tokenizer", str(tokenizer(tmp_path)), "--optim.name", "sgd"]
    done = run_script(1, [*command, *other], tmp_path, environment)
    assert done.returncode == 2
    assert "2 problems in the configuration; nothing was started" in done.stderr
    assert "was trained with tokenizer bytes" in done.stderr
    assert "resume with --optim.name adamw" in done.stderr
