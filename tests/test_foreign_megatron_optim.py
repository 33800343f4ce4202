"""Masters and moments of Megatron's optimizers come in bit for bit, and the next update is the one that they say."""

from __future__ import annotations

import math
import os
import pickle
import random
import re
import shutil
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import megatron_checkpoints as written
from tests import reference_models
from tests.configs import engine_of
from tests.harness import run_ranks
from tests.megatron_checkpoints import GPT, LLAMA
from tests.megatron_optimizers import STEP, Distributed, InBuffers, OfTheModel, Whole
from tests.test_foreign_megatron import EVEN
from threed.checkpoint import native
from threed.checkpoint.convert import convert
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.reading import Reader
from threed.config import Config
from threed.foreign import distcp
from threed.foreign.megatron_dist_optim import MOST_TRIES, _numbers
from threed.resolution import resolve

TIED = LLAMA | {"untie_embeddings_and_output_weights": False}
FOUR = [[0], [1], [2], [3]]
LEGACY: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "one bucket": (LLAMA, {}, Distributed),
    "buckets": (LLAMA, {"tp": 2, "layers": EVEN}, lambda states: Distributed(states, 700)),
    "small buckets": (GPT, {"tp": 2}, lambda states: Distributed(states, 1)),
    "tied, buckets": (TIED, {"tp": 2, "layers": EVEN}, lambda states: Distributed(states, 1000)),
    "virtual stages": (
        LLAMA,
        {"tp": 2, "layers": FOUR, "virtual": 2},
        lambda states: Distributed(states, 500),
    ),
    "not Transformer Engine": (GPT, {"tp": 2, "layers": EVEN, "engine": False}, Distributed),
    "not distributed": (LLAMA, {"tp": 2, "layers": EVEN}, Whole),
    "not distributed, tied": (GPT, {"tp": 2, "layers": EVEN}, Whole),
    "not distributed, virtual": (LLAMA, {"layers": FOUR, "virtual": 2}, Whole),
    "fp32": (GPT, {"tp": 2, "layers": EVEN}, lambda states: Whole(states, masters=False)),
}


def check(out: Path, states: dict[str, dict[str, Tensor]], scale: bool = True) -> None:
    manifest = native.read_manifest(out)
    assert native.verify(out, manifest) == []
    state = manifest["state"]
    assert [state[key] for key in ("steps", "consumed", "updates", "skips")] == [
        100,
        3200,
        STEP,
        100 - STEP,
    ]
    assert (state.get("loss_scale"), state.get("good_steps"), state.get("hysteresis_left")) == (
        (2.0**14, 7.0, 1.0) if scale else (None, None, None)
    )
    with Reader(out, manifest) as reader:
        for part, tensors in states.items():
            for name, want in tensors.items():
                assert torch.equal(reader.full(part, name), want), f"{part} of {name}"


@pytest.mark.parametrize("case", LEGACY)
def test_legacy_states_are_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    args, layout, optimizer = LEGACY[case]
    states = written.states_of(written.model_of(args))
    fp32 = case == "fp32"
    weights = {
        name: tensor if fp32 else tensor.bfloat16() for name, tensor in states["weight"].items()
    }
    folder = written.write_legacy(
        tmp_path / "theirs", args, weights, **layout, optimizer=optimizer(states)
    )
    check(convert(folder, tmp_path / "native", allow_pickle=True), states, scale=not fp32)


def edited(file: Path, change: Callable[[Any], Any]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def buffers(state: Any) -> dict[str, Tensor]:
    return next(iter(state[0].values()))


LEFT_OUT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "other parts of the optimizer": (
        "distrib_optim.pt",
        lambda state: buffers(state).pop("exp_avg_sq"),
    ),
    "do not fit its weights": ("distrib_optim.pt", lambda state: buffers(state)["param"].mul_(2)),
    "older than core": ("distrib_optim.pt", lambda state: state.pop("buckets_coalesced")),
    "how many updates": (
        "model_optim_rng.pt",
        lambda state: state["optimizer"]["optimizer"]["param_groups"].clear(),
    ),
}


@pytest.mark.parametrize("why", LEFT_OUT)
def test_states_that_are_not_certain_are_left_out_and_said(why: str, tmp_path: Path) -> None:
    states = written.states_of(written.model_of(LLAMA))
    weights = {name: tensor.bfloat16() for name, tensor in states["weight"].items()}
    folder = written.write_legacy(
        tmp_path / "theirs", LLAMA, weights, 2, EVEN, optimizer=Distributed(states)
    )
    name, change = LEFT_OUT[why]
    for rank in ("00", "01"):
        edited(folder / f"iter_0000100/mp_rank_{rank}_000/{name}", change)
    with pytest.warns(UserWarning, match=f"{why}.*a run begins at step 0"):
        out = convert(folder, tmp_path / "native", allow_pickle=True)
    manifest = native.read_manifest(out)
    assert (manifest["state"]["steps"], manifest["state"]["updates"]) == (0, 0)
    with Reader(out, manifest) as reader:
        assert all(parts == {"weight"} for parts in reader.parts.values())
        for key, want in weights.items():
            assert torch.equal(reader.full("weight", key).bfloat16(), want)


MISSING: dict[str, Callable[[Path], Any]] = {
    "has 3 of 4 files distrib_optim.pt": lambda folder: (
        folder / "mp_rank_01_001/distrib_optim.pt"
    ).unlink(),
    "are of several iterations": lambda folder: edited(
        folder / "mp_rank_01_001/model_optim_rng.pt", lambda state: state.update(iteration=200)
    ),
    "exp_avg_sq of .* below zero": lambda folder: edited(
        folder / "mp_rank_00_000/distrib_optim.pt",
        lambda state: buffers(state)["exp_avg_sq"].neg_(),
    ),
    "exp_avg of .* not finite": lambda folder: edited(
        folder / "mp_rank_00_000/distrib_optim.pt",
        lambda state: buffers(state)["exp_avg"].fill_(math.nan),
    ),
}


@pytest.mark.parametrize("problem", MISSING)
def test_states_that_are_not_whole_are_refused(problem: str, tmp_path: Path) -> None:
    states = written.states_of(written.model_of(LLAMA))
    weights = {name: tensor.bfloat16() for name, tensor in states["weight"].items()}
    folder = written.write_legacy(
        tmp_path / "theirs", LLAMA, weights, 2, EVEN, optimizer=Distributed(states)
    )
    MISSING[problem](folder / "iter_0000100")
    with pytest.raises(CheckpointError, match=problem):
        convert(folder, tmp_path / "native", allow_pickle=True)


# --------------------------------------------------------------------------------------------------------- torch_dist

ONE = [[0, 1, 2, 3]]
DIST: dict[str, tuple[dict[str, Any], Any]] = {
    "fully reshardable": (LLAMA, OfTheModel),
    "not distributed": (GPT, lambda states: OfTheModel(states, "fp32_param")),
    "model space": (LLAMA, lambda states: OfTheModel(states, "fp32_param", flat=True)),
    "buckets": (LLAMA, lambda states: InBuffers(states, EVEN, bucket=700)),
    "buckets, one stage": (GPT, lambda states: InBuffers(states, ONE)),
    "buckets, tied": (TIED, lambda states: InBuffers(states, [[0], [1, 2, 3]], bucket=1000)),
    "buckets, virtual": (LLAMA, lambda states: InBuffers(states, FOUR, virtual=2, bucket=500)),
    "gathered": (GPT, lambda states: InBuffers(states, EVEN, bucket=700, gathered=True)),
}


def write_all(place: Path) -> None:
    for number, (name, (args, optimizer)) in enumerate(DIST.items()):
        states = written.states_of(written.model_of(args))
        weights = {key: tensor.bfloat16() for key, tensor in states["weight"].items()}
        made = optimizer(states)
        pp = len(made.layers) // made.virtual if isinstance(made, InBuffers) else 1
        args = args | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": pp}
        written.write_dist(place / name, args, weights, optimizer=made, entry=bool(number % 2))


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of torch_dist with an optimizer's states, which two ranks wrote."""
    place = tmp_path_factory.mktemp("dist")
    run_ranks(2, write_all, place)
    return place


@pytest.mark.parametrize("case", DIST)
def test_torch_dist_states_are_the_same_bit_for_bit(case: str, dists: Path, tmp_path: Path) -> None:
    check(
        convert(dists / case, tmp_path / "native", allow_pickle=True),
        written.states_of(written.model_of(DIST[case][0])),
    )


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "param", ""])
def test_torch_dist_states_of_some_parameters_are_left_out_and_said(
    kind: str, dists: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(dists / "fully reshardable", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensors = metadata.state_dict_metadata
    for key in [
        key for key in tensors if key.startswith(f"optimizer.state.{kind}") and "linear_fc2" in key
    ]:
        del tensors[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.warns(UserWarning, match="it has other states of .*linear_fc2.* than of "):
        out = convert(folder, tmp_path / "native", allow_pickle=True)
    manifest = native.read_manifest(out)
    assert (manifest["state"]["steps"], manifest["state"]["updates"]) == (0, 0)
    with Reader(out, manifest) as reader:
        assert all(parts == {"weight"} for parts in reader.parts.values())
        for key, want in written.states_of(written.model_of(LLAMA))["weight"].items():
            assert torch.equal(reader.full("weight", key), want.bfloat16())


def test_stages_are_tried_with_as_many_layers_as_their_sizes_allow() -> None:
    deep = [(50_000, 10)] * 5000
    assert _numbers(1_000 + 60 * 50_000 + 2_000, (1_000, 3), deep) == [60]
    assert _numbers(999, (1_000, 3), deep) == []
    assert _numbers(5_000, (0, 0), [(1, 1)] * 5000) == list(range(77, 77 + MOST_TRIES))


def test_one_process_looks_at_the_buffers_of_all_ranks(
    dists: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, real = list[int](), distcp.outline

    def counted(jobs: Any) -> list[Any]:
        groups.append(len(jobs))
        return real(jobs)

    monkeypatch.setattr(distcp, "outline", counted)
    convert(dists / "gathered", tmp_path / "native", allow_pickle=True)
    assert groups.count(4) == 1  # two stages of two tensor ranks


# ---------------------------------------------------------------------------------------------------------- going on

LR, BETAS, EPS, ROWS, SEQ = 1e-3, (0.9, 0.95), 1e-8, 4, 12


def tokens() -> Tensor:
    return torch.randint(52, (ROWS, SEQ), generator=torch.Generator().manual_seed(3))


def go_on(folder: Path) -> dict[str, Tensor]:
    """Resumes a converted checkpoint on 2 stages of 2 tensor ranks and does a step: the weights then."""
    saved = native.read_manifest(folder)["config"]["model"]
    config = Config.model_validate({
        "model": saved | {"seq": SEQ}, "precision": {"dtype": "fp32"}, "parallel": {"tp": 2, "pp": 2},
        "optim": {"lr": LR, "betas": BETAS, "weight_decay": 0.0, "warmup": 0, "schedule": "constant"},
        "train": {"global_batch": ROWS, "micro_batch": 1, "grad_clip": 0.0, "steps": 110},
    })  # fmt: skip
    engine = engine_of(resolve(config, 52, 4))
    engine.load(folder)
    assert (engine.steps, engine.consumed, float(engine.optimizer.updates)) == (100, 3200, STEP)
    rows = tokens()
    engine.step(
        {"tokens": rows, "labels": torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], -100)], 1)}
    )
    return engine.full_state_dict()


def go_on_all(folders: list[Path]) -> list[dict[str, Tensor]]:
    return [go_on(folder) for folder in folders]


def next_step(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same step by torch's AdamW, of a model in plain PyTorch, from the states as they were written."""
    model = reference_models.llama(
        vocab=52, h=24, layers=4, heads=6, kv=2, ffn=20, tied=False, qk_norm=False, theta=5e4
    )
    model.take(states["weight"])
    for module in model.modules():
        if isinstance(module, reference_models.RMSNorm):
            module.eps = 1e-6
    named = model.named()
    optimizer = torch.optim.AdamW(named.values(), LR, BETAS, EPS, weight_decay=0.0)
    for name, parameter in named.items():
        moments = {part: states[part][name].clone() for part in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(STEP)), **moments}
    rows = tokens()
    torch.nn.functional.cross_entropy(
        model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
    ).backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def test_the_next_step_is_the_one_that_the_states_say(dists: Path, tmp_path: Path) -> None:
    states = written.states_of(written.model_of(LLAMA))
    weights = {name: tensor.bfloat16() for name, tensor in states["weight"].items()}
    sources = [dists / name for name in ("fully reshardable", "model space", "buckets")]
    for name, optimizer in (("distributed", Distributed(states, 700)), ("whole", Whole(states))):
        sources.append(
            written.write_legacy(tmp_path / name, LLAMA, weights, 2, EVEN, optimizer=optimizer)
        )
    folders = [
        convert(source, tmp_path / "native" / source.name, allow_pickle=True) for source in sources
    ]
    want = next_step(states)
    moved = max(float((want[name] - states["weight"][name]).abs().max()) for name in want)
    assert moved > LR  # so the tolerance is a small part of what is compared
    for folder, found in zip(folders, run_ranks(4, go_on_all, folders)[0], strict=True):
        for name, tensor in want.items():
            # An update is 1e-3 times moments' ratio, whose gradients are summed in another order, in fp32.
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=2e-6, msg=f"{folder.name}: {name}"
            )


# ------------------------------------------------------------------------------------------------------------- fuzz

MOST_S = 10.0
FUZZ = int(os.environ.get("FUZZ", "6"))  # mutants of each folder


def fuzzed(
    folder: Path, files: list[Path], place: Path, draw: random.Random, count: int
) -> list[str]:
    """Converts with one of the files damaged, so many times: what refused it, or "" where nothing did."""
    said = []
    for number in range(count):
        file = draw.choice(files)
        data = bytearray(file.read_bytes())
        kept = bytes(data)
        first, last = (0, len(data)) if file.name == ".metadata" else pickle_of(data, draw)
        for _ in range(draw.choice([1, 1, 2, 5, 30])):
            data[draw.randrange(first, last)] = draw.choice(
                [draw.randrange(256), draw.choice(b"\x80()]}.0Nc\x81\x85Rbqrtsuehjk\xff"), 1]
            )
        file.write_bytes(renewed(data, first, kept))
        start = time.monotonic()
        try:
            with warnings.catch_warnings(action="ignore"):
                convert(folder, place / str(number), allow_pickle=True)
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
        finally:
            file.write_bytes(kept)
        assert (
            time.monotonic() - start < 10 * MOST_S
        )  # the limit of a quiet machine, and room for others
    return said


def pickle_of(data: bytearray, draw: random.Random) -> tuple[int, int]:
    """The bytes of one of the pickles in files of torch.save that are one behind the other."""
    firsts = [
        match.end()
        for match in re.finditer(
            rb"PK\x03\x04.{26}[^/]*/data\.pkl(FB.{2}Z*)?", bytes(data), re.DOTALL
        )
    ]
    first = draw.choice(firsts)
    return first, data.index(b"PK\x07\x08", first)


def renewed(data: bytearray, first: int, old: bytes) -> bytes:
    """The file with the checksum of its pickle renewed, so that the damage is seen by more than that."""
    if not old.startswith(b"PK"):
        return bytes(data)
    end = old.index(b"PK\x07\x08", first)
    crc = [struct.pack("<I", zlib.crc32(some[first:end])) for some in (old, bytes(data))]
    return bytes(data).replace(crc[0], crc[1]) if old.count(crc[0]) in (1, 2) else bytes(data)


def test_damaged_states_are_refused_in_one_line_or_left_out(dists: Path, tmp_path: Path) -> None:
    states = written.states_of(written.model_of(LLAMA))
    weights = {name: tensor.bfloat16() for name, tensor in states["weight"].items()}
    legacy = [written.write_legacy(tmp_path / type(o).__name__, LLAMA, weights, 2, EVEN, optimizer=o)
              for o in (Distributed(states, 700), Whole(states))]  # fmt: skip
    draw, said = random.Random(4), []
    for folder in legacy:
        said += fuzzed(
            folder, sorted(folder.rglob("*.pt")), tmp_path / "native" / folder.name, draw, FUZZ
        )
    for name in ("buckets", "model space", "gathered"):
        folder = tmp_path / name
        shutil.copytree(dists / name, folder)
        files = [file for file in sorted(folder.iterdir()) if file.name != "metadata.json"]
        said += fuzzed(folder, files, tmp_path / "native" / name, draw, FUZZ)
    assert all(text.isprintable() for text in said)
    assert any(said)
