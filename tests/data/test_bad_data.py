"""Steps with ids beyond the vocabulary, or without any label that counts, in every kind of run: nothing is updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from tests.pipeline.test_step import data, same, with_
from tests.reliability.test_bad_numbers import bits, often_and_in_the_grid
from threed import layers
from threed.distributed.topology import alone
from threed.engine import Engine
from threed.interop.deepspeed.initialization import initialize
from threed.layers import Slicing
from threed.zero.step_metrics import DataError

VOCAB = 53
Change = Callable[[dict[str, Tensor]], None]


def set_last(key: str, value: int) -> Change:
    """Returns what sets one element of the last row, which is the last data rank's."""

    def change(whole: dict[str, Tensor]) -> None:
        whole[key][-1, 3] = value

    return change


def ignore_all(whole: dict[str, Tensor]) -> None:
    whole["labels"].fill_(-100)


INVALID: dict[str, tuple[Change, str]] = {
    "token": (set_last("tokens", VOCAB), "token ids beyond the 53"),
    "negative token": (set_last("tokens", -100), "token ids beyond the 53"),
    "label": (set_last("labels", VOCAB + 7), "labels beyond the 53"),
    "no label": (ignore_all, ""),
}


def invalid(engine: Engine, step: int, change: Change) -> dict[str, Tensor]:
    whole = {
        key: value.clone() for key, value in batch(step, engine.config.train.global_batch).items()
    }
    change(whole)
    return share(whole, engine.topology)


def steps_of(case: Case, folder: Path, **groups: dict[str, Any]) -> list[str]:
    """What is wrong of a case: each kind of invalid batch costs a step and changes nothing; a save after it raises."""
    engine, wrong = engine_of(with_(config_of(case), **groups)), list[str]()
    engine.step(data(engine))
    before, scale = bits(engine), float(engine.optimizer.scaler.scale)
    for number, (name, (change, message)) in enumerate(INVALID.items(), 1):
        about = f"{case} {groups}, {name}"
        metrics = engine.step(invalid(engine, number, change))
        if not same(bits(engine), before) or float(engine.optimizer.scaler.scale) != scale:
            wrong.append(
                f"{about}: weights, moments, the loss scale or the number of updates changed"
            )
        if engine.bad_steps() != number or not metrics.loss_tensor.isnan():
            wrong.append(
                f"{about}: {engine.bad_steps()} in a row, loss {float(metrics.loss_tensor)}"
            )
        if message and message not in (said := refused(lambda: engine.save(folder / "never"))):
            wrong.append(f"{about}: a save raised {said!r}")
        if not engine.evaluate(invalid(engine, number, change)).isnan():
            wrong.append(f"{about}: an evaluation gives a number")
    if (folder / "never").exists():
        wrong.append(f"{case} {groups}: something was saved")
    engine.save(folder / "step")  # raised once on every rank; the state itself is valid
    if not engine.step(data(engine, 9)).loss > 0 or (bits(engine) and engine.bad_steps()):
        wrong.append(f"{case} {groups}: a valid step after them is skipped")
    return wrong


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except DataError as error:
        return str(error)
    return "nothing"


def look_at_all(cases: Sequence[Case], folder: str) -> list[str]:
    wrong: list[str] = []
    for number, case in enumerate(cases):
        wrong += steps_of(case, Path(folder) / f"{number}")
        if case.pp > 1 and case.schedule != "2bw":
            wrong += steps_of(
                case, Path(folder) / f"{number}-late", parallel={"optimistic_step": True}
            )
        if case.offload_optimizer == "cpu":
            wrong += steps_of(case, Path(folder) / f"{number}-late", zero={"delayed_update": True})
    return wrong


@pytest.mark.seldom("1-cases0")
@pytest.mark.filterwarnings("ignore:a step was skipped")
@pytest.mark.parametrize(("world", "cases"), often_and_in_the_grid())
def test_invalid_ids_and_batches_without_labels_change_nothing(
    world: int, cases: list[Case], tmp_path: Path
) -> None:
    """Stages of ZeRO, offload, updates in the backward, delayed and optimistic ones, pipelines (2bw too), formats."""
    cases = [*cases, Case(layers=2, dtype="fp16")] if world == 1 else cases
    for wrong in run_ranks(world, look_at_all, cases, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


def read_on_one_rank(folder: str) -> list[str]:
    """What reading metrics on one rank, then saves on all of them, raise."""
    engine = engine_of(config_of(Case(dp=2, layers=2)))
    metrics = engine.step(invalid(engine, 1, INVALID["label"][0]))
    first = refused(lambda: metrics.loss) if engine.topology.rank == 0 else "not read"
    return [first, *(refused(lambda: engine.save(Path(folder) / "step")) for _ in range(2))]


def test_a_save_raises_on_all_ranks_where_one_has_read_the_metrics(tmp_path: Path) -> None:
    for first, second, third in run_ranks(2, read_on_one_rank, str(tmp_path)):
        assert first == "not read" or "labels beyond the 53" in first
        assert "labels beyond the 53 of head" in second
        assert third == "nothing"
    assert (tmp_path / "step").exists()


def warned(_: int) -> tuple[int, float, list[str]]:
    engine = engine_of(config_of(Case(layers=2)))
    metrics = engine.step(invalid(engine, 1, ignore_all))
    with pytest.warns(UserWarning, match="skipped") as caught:
        loss = metrics.loss
    return metrics.skipped, loss, [str(warning.message) for warning in caught]


def test_a_batch_without_any_label_is_skipped_with_a_warning() -> None:
    [(skipped, loss, messages)] = run_ranks(1, warned, 0)
    assert skipped == 1
    assert loss != loss  # NaN, a mean over nothing, as torch's
    assert messages == ["a step was skipped: the global batch has no valid label (all are below 0)"]


class Small(nn.Module):
    """A module of the user with layers of `threed.layers`."""

    def __init__(self) -> None:
        super().__init__()
        slicing = Slicing(alone())
        self.word = layers.VocabEmbedding("word", VOCAB, 16, slicing).to_empty(device="cpu")
        nn.init.normal_(self.word.weight)
        self.out = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.out(self.word(tokens)).flatten(0, 1), labels.t().flatten()
        )


def deepspeed_steps(folder: str) -> list[str]:
    torch.manual_seed(1)
    settings: Mapping[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    engine, *_ = initialize(model=Small(), config=dict(settings))
    good = {"tokens": torch.randint(0, VOCAB, (2, 5)), "labels": torch.randint(0, VOCAB, (2, 5))}
    bad = {**good, "tokens": good["tokens"] + VOCAB * torch.eye(2, 5, dtype=torch.int64)}
    engine.train_batch(iter([good, good]))
    before, wrong = bits(engine.engine), list[str]()
    assert engine.eval_batch(iter([good, bad])).isnan()
    assert engine.eval_batch(iter([good, good])).isfinite()
    engine.backward(engine(**bad))
    engine.step()
    # in the middle of a step, which stays invalid
    assert engine.eval_batch(iter([good, good])).isfinite()
    engine.backward(engine(**good))
    engine.step()
    if not same(bits(engine.engine), before):
        wrong.append("weights or moments changed")
    if "token ids beyond the 53 of word" not in (
        said := refused(lambda: engine.save_checkpoint(folder))
    ):
        wrong.append(said)
    if not engine.train_batch(iter([good, good])).isfinite() or same(bits(engine.engine), before):
        wrong.append("a valid step after it is skipped")
    return wrong


def test_invalid_ids_of_a_deepspeed_engine_change_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, deepspeed_steps, str(tmp_path)) == [[]]


def refusals_of(case: Case) -> list[str]:
    """What batches without ids, or with ids of another dtype, raise in a step and an evaluation."""
    engine, said = engine_of(config_of(case)), list[str]()
    good = data(engine)
    for bad in (
        {"tokens": good["tokens"]},
        {"labels": good["labels"], "samples": torch.arange(len(good["labels"]))},
        {**good, "labels": good["labels"].float()},
        {**good, "labels": good["labels"].int()},
        {**good, "tokens": good["tokens"].double()},
        {key: value[:, 0] for key, value in good.items()},
        {key: value[:, :0] for key, value in good.items()},
        [good],
        *([{**good, "labels": good["labels"][:, :-1]}] if case.pp == 1 else []),
    ):
        for act in (engine.step, engine.evaluate):
            with pytest.raises(ValueError, match="the batch") as error:
                act(bad)
            said.append(str(error.value))
    assert engine.step(good).loss > 0
    return said


@pytest.mark.parametrize("case", [Case(layers=2), Case(pp=2, layers=2)], ids=str)
def test_batches_without_ids_are_refused_by_name(case: Case) -> None:
    for said in run_ranks(case.world, refusals_of, case):
        assert said[::2] == said[1::2]
        assert said[::2] == [
            "the batch has no 'labels': the model needs int64 'labels' [b s]",
            "the batch has no 'tokens': the model needs int64 'tokens' [b s]",
            "the batch's 'labels' are float32, not int64: pass integer ids",
            "the batch's 'labels' are int32, not int64: convert with batch['labels'].long()",
            "the batch's 'tokens' are float64, not int64: pass integer ids",
            "the batch's 'tokens' are [8]: the model needs 'tokens' [b s]",
            "the batch's 'tokens' are [8, 0]: pass at least one token per row",
            "the batch is a list: pass a dict of tensors",
            *(
                ["the batch's 'labels' are [4, 15] (in a micro-batch), and head gets [4, 16]"]
                if case.pp == 1
                else []
            ),
        ]
