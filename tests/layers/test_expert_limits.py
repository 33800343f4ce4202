"""The rows of experts: overlap of their messages, rooms that grow, and capacities.

tests/test_experts.py has rooms and capacities in combination with all other settings.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.configs import Case, config_of, engine_of, topology_of, trained
from tests.harness import run_ranks
from tests.test_equivalence import run_cases, write_truths
from threed.config import Config
from threed.config.checks import find_problems
from threed.distributed import conjugate
from threed.engine.rooms import Rooms
from threed.layers import MixtureOfExperts, Slicing, dispatch, linear
from threed.layers import experts as experts_module
from threed.layers.dispatch import Limits
from threed.ops.positions import Positions
from threed.reliability.recheck import Recheck
from threed.zero.step_metrics import Faults

EP = Case(model="Softmax", layers=2, zero=1)


def order_of_work() -> list[str]:
    """The order of exchanges, and of products of the shared expert and of experts, in a step."""
    found = list[str]()
    engine = engine_of(config_of(replace(EP, model="Biased", dp=2, ep=2, microbatches=1)))
    (mixture,) = mixtures(engine)
    assert mixture.shared is not None
    parts = {
        id(mixture.shared.up.weight): "shared up", id(mixture.shared.down.weight): "shared down"
    }  # fmt: skip

    def noting(owner: Any, name: str, word_of: Any) -> Any:
        real = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            found.extend(filter(None, [word_of(*args)]))
            return real(*args, **more)

        return patch.object(owner, name, noted)

    with (
        noting(conjugate.Exchange, "launch", lambda *_: "start"),
        noting(conjugate.Exchange, "finish", lambda *_: "wait"),
        noting(linear, "product", lambda x, weights, *_: parts.get(id(weights[0]))),
        noting(linear, "gradients", lambda dy, x, _, terms, *__: parts.get(id(terms.weights[0]))),
        noting(experts_module.grouped, "product", lambda *_: "experts"),
    ):
        engine.step(batch_of(engine))
    return found


def test_the_shared_expert_runs_while_rows_travel() -> None:
    forward = ["start", "shared up", "wait", "experts", "experts", "start", "shared down", "wait"]
    backward = ["start", "shared down", "wait", "experts", "experts", "start", "shared up", "wait"]
    for found in run_ranks(2, order_of_work):
        assert found == forward + backward


def sends_of(case: Case) -> set[int]:
    """The numbers of rows that a rank sends to others in training."""
    found: set[int] = set()
    real = experts_module.conjugate.Exchange.__init__

    def init(self: Any, axis: Any, sends: Any, receives: Any) -> None:
        real(self, axis, sends, receives)
        found.update(sends)

    with patch.object(experts_module.conjugate.Exchange, "__init__", init):
        trained(case)
    return found


def test_rooms_are_of_equal_size() -> None:
    case = replace(EP, dp=2, ep=2)
    assert all(len(sends) > 1 for sends in run_ranks(2, sends_of, case))
    assert all(len(sends) == 1 for sends in run_ranks(2, sends_of, replace(case, room=2.0)))


def mixtures(engine: Any) -> list[MixtureOfExperts]:
    parts = [part for layer in engine.blueprint.layers for part in layer.modules()]
    return [part for part in parts if isinstance(part, MixtureOfExperts)]


def batch_of(engine: Any, seed: int = 0) -> dict[str, Tensor]:
    c = engine.config
    rows = c.train.global_batch // engine.topology.dp
    draw = torch.Generator().manual_seed(seed + engine.topology.axis("dp").index)
    tokens = torch.randint(c.model.vocab, (rows, c.model.seq + 1), generator=draw)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


def grows(case: Case) -> tuple[list[int], list[float], list[str]]:
    """The number of skipped steps after each step, the rooms at the end, and warnings."""
    engine = engine_of(config_of(case))
    before = weights_of(engine)
    skipped, same = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(8):
            metrics = engine.step(batch_of(engine, number))
            assert math.isnan(metrics.loss) == (metrics.skipped > (skipped or [0])[-1])
            skipped.append(metrics.skipped)
            now = weights_of(engine)
            same.append(all(torch.equal(now[name], before[name]) for name in now))
            before = now
    steps = [b - a for a, b in zip([0, *skipped], skipped, strict=False)]
    assert engine.topology.rank or same == [
        bool(skip) for skip in steps
    ]  # only rank 0 has the weights
    texts = [str(w.message) for w in caught]
    return skipped, [m.limits.room for m in mixtures(engine)], texts


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_that_does_not_fit_is_skipped_and_the_room_grows(pp: int) -> None:
    """All tokens go to the first experts (model Lopsided), so each rank needs a room of ep."""
    case = replace(EP, model="Lopsided", dp=2, ep=2, pp=pp, layers=2, microbatches=2, room=1.25)
    found = run_ranks(case.world, grows, case)
    for skipped, rooms, _ in found:
        assert skipped == [1, 2, 2, 2, 2, 2, 2, 2]
        assert rooms == [2.5, 2.5]
    texts = found[0][2]
    assert sum("the room is 2.5 from now on" in text for text in texts) == 2
    assert any("more rows for an expert rank than --experts.room" in text for text in texts)
    assert not any(texts for *_, texts in found[1:])


def saves(case: Case, folder: str) -> list[float]:
    """Trains until the rooms have grown, and saves; returns the rooms of a fresh engine that loads."""
    engine = engine_of(config_of(case))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(4):
            engine.step(batch_of(engine, number))
    engine.save(folder)
    return resumes(case, folder)[1]


def resumes(case: Case, folder: str) -> tuple[int, list[float]]:
    """The number of steps that are skipped after a load, and the rooms."""
    engine = engine_of(config_of(case))
    engine.load(folder)
    before = engine.step(batch_of(engine, 4)).skipped
    return engine.step(batch_of(engine, 5)).skipped - before, [
        mixture.limits.room for mixture in mixtures(engine)
    ]


def test_a_resumed_run_has_the_rooms_of_the_checkpoint(tmp_path: Any) -> None:
    case = replace(EP, model="Lopsided", dp=2, ep=2, layers=2, microbatches=2, room=1.25)
    folder = str(tmp_path / "step-4")
    assert run_ranks(2, saves, case, folder) == [[2.5, 2.5]] * 2
    for dp, pp, room in ((2, 2, 1.25), (4, 1, 1.25), (2, 1, 4.0)):
        other = replace(case, dp=dp, pp=pp, room=room)
        for skipped, rooms in run_ranks(other.world, resumes, other, folder):
            assert skipped == 0
            assert rooms == [max(2.5, room)] * 2
    none = replace(case, room=0.0)
    assert run_ranks(2, resumes, none, folder) == [(0, [0.0, 0.0])] * 2


def rechecked() -> tuple[list[str], list[int]]:
    """What a recheck prints, and the number of skipped steps after each step."""
    case = replace(EP, model="Lopsided", dp=2, ep=2, layers=2, microbatches=2, room=1.25)
    notes, engine = list[str](), engine_of(config_of(case))
    recheck = Recheck(engine, notes.append)
    return notes, [recheck.step(batch_of(engine, n)).skipped for n in range(4)]


def test_a_step_that_does_not_fit_is_not_computed_twice() -> None:
    for notes, skipped in run_ranks(2, rechecked):
        assert notes == []
        assert skipped == [1, 2, 2, 2]


# ------------------------------------------------------------------------------------------------------ capacity


def choices_by_hand(experts: Tensor, limit: int) -> Tensor:
    """Whether each choice is kept: token by token, in the order of the sequence."""
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for sample in range(experts.shape[1]):
        taken = dict[int, int]()
        for token, row in enumerate(experts[:, sample].tolist()):
            for k, expert in enumerate(row):
                taken[expert] = taken.get(expert, 0) + 1
                kept[token, sample, k] = taken[expert] <= limit
    return kept


def drops() -> float:
    """Compares a forward with one in which the dropped choices have weight zero; returns their share."""
    engine = engine_of(config_of(replace(EP, layers=1, capacity=0.5)))
    (mixture,) = mixtures(engine)
    x = torch.randn(12, 3, mixture.router.weight.shape[1], dtype=torch.float64)
    micro = experts_module.MicroBatch(weight=torch.ones((), dtype=torch.float64))
    limit = math.ceil(0.5 * mixture.per_token * len(x) / mixture.experts)
    scores = mixture.routing.scores(mixture.router(x))
    experts = mixture.routing.choose(scores, None, mixture.per_token)
    kept = choices_by_hand(experts, limit)
    real = experts_module.gates

    def gates(*args: Any) -> Tensor:
        return real(*args) * kept

    y = mixture(x, micro)
    mixture.set_limits(Limits())
    with patch.object(experts_module, "gates", gates):
        torch.testing.assert_close(y, mixture(x, micro), rtol=0, atol=1e-12)
    mixture.set_limits(Limits(capacity=0.5))
    whole = mixture(x, replace(micro, training=False))
    mixture.set_limits(Limits())
    assert torch.equal(whole, mixture(x, micro))  # outside of training nothing is dropped
    return 1 - float(kept.double().mean())


def test_choices_beyond_the_capacity_are_dropped_in_training() -> None:
    (share,) = run_ranks(1, drops)
    assert 0.1 < share < 0.9


def test_ranks_whose_choices_are_all_dropped_equal_one_process(tmp_path: Any) -> None:
    """All tokens go to the same experts (model Lopsided), which the first part of a sequence fills."""
    places = ({"tp": 2}, {"cp": 2, "cp_heads": 1}, {"tp": 2, "ep": 2, "recompute": "full"})
    cases = [replace(EP, model="Lopsided", capacity=0.25, **sizes) for sizes in places]
    truths = list(dict.fromkeys(case.truth for case in cases))
    run_ranks(1, write_truths, truths, str(tmp_path))
    wrong = [
        text for rank in run_ranks(2, run_cases, cases, str(tmp_path), trained) for text in rank
    ]
    assert not wrong, "\n".join(wrong)


def odd_length() -> bool:
    """12 positions on 2 x 2 ranks: a tensor rank's part ends inside a chunk of the ring."""
    case = replace(EP, cp=2, cp_heads=1, tp=2)
    slicing = Slicing.of(topology_of(1, 2, 2), config_of(case))
    mixture = MixtureOfExperts("mlp", 8, 6, 4, 2, slicing)
    draw = torch.Generator().manual_seed(0)
    experts = torch.rand(12, 3, 4, generator=draw).argsort(-1)[..., :2]
    mine = slicing.context.positions(12).part(2, slicing.tp.index)
    own = mine.rows(experts)
    chosen = torch.zeros(len(own), 3, 4).scatter_(-1, own, 1.0)
    kept = mixture._kept(chosen, own, 0.5, True)
    assert torch.equal(kept, mine.rows(choices_by_hand(experts, 3)))
    return bool(kept.all())


def test_a_capacity_with_parts_that_end_inside_a_chunk() -> None:
    assert not all(run_ranks(4, odd_length))


class Filling:
    """Counts of the flag of a layer that needs a room."""

    def __init__(self, need: float, room: float) -> None:
        self.mixture = MixtureOfExperts("mlp", 8, 6, 4, 2, Slicing())
        self.mixture.set_limits(Limits(room=room))
        faults = Faults(self.mixture.data_flags, torch.device("cpu"), warns=False)
        self.need, self.rooms = need, Rooms([self.mixture], faults)

    def skipped(self, steps: int) -> int:
        """Returns how many of some steps are skipped."""
        counts = [0.0]
        for _ in range(steps):
            self.rooms.grow()
            lacks = self.need > self.mixture.limits.room
            self.rooms.read(torch.tensor([counts[-1]], dtype=torch.float64))  # of the step before
            counts.append(counts[-1] + lacks)
        return int(counts[-1])


@pytest.mark.parametrize(("need", "skips"), [(1.2, 0), (2.0, 2), (6.0, 4), (32.0, 6)])
def test_rooms_grow_faster_while_they_are_too_small(need: float, skips: int) -> None:
    assert Filling(need, 1.25).skipped(20) == skips


def last_tokens_first(chosen: Tensor, *rest: Any) -> Tensor:
    return real_within(chosen.flip(0), *rest)


def of_each_rank(chosen: Tensor, experts: Tensor, limit: int, own: Positions, _: Any) -> Tensor:
    return real_within(chosen, experts, limit, own, [])


def in_order_of_rows(
    chosen: Tensor, experts: Tensor, limit: int, own: Positions, axes: Any
) -> Tensor:
    return real_within(chosen, experts, limit, own._replace(ranges=own.ranges[::-1]), axes)


real_within = dispatch.within_capacity


def differences(fault: str | None, case: Case, folder: str) -> list[str]:
    within = real_within if fault is None else globals()[fault]
    with patch.object(experts_module, "within_capacity", within):
        return run_cases([case], folder, trained)


def test_planted_faults_of_capacities_are_found(tmp_path: Any) -> None:
    case = replace(EP, cp=2, cp_heads=1, ep=2, capacity=0.75)
    run_ranks(1, write_truths, [case.truth], str(tmp_path))
    for fault in ("last_tokens_first", "of_each_rank", "in_order_of_rows"):
        assert any(run_ranks(2, differences, fault, case, str(tmp_path))), fault
    assert not any(run_ranks(2, differences, None, case, str(tmp_path)))


# ------------------------------------------------------------------------------------------------------ refusals


def test_limits_that_do_nothing_are_refused() -> None:
    config = Config.model_validate({"experts": {"room": 2.0}})
    assert any("--experts.room without --parallel.ep" in text for text in find_problems(config, 2))
    with pytest.raises(ValueError, match="room"):
        Config.model_validate({"experts": {"room": 0.5}})
    run_ranks(1, without_experts)


def without_experts() -> None:
    refused = r"--experts\.capacity 1: this model has no layers\.MixtureOfExperts; leave it out"
    with pytest.raises(ValueError, match=f"^{refused}$"):
        engine_of(config_of(Case(capacity=1.0)))
    config = config_of(EP)
    rate = config.experts.model_copy(update={"bias_rate": 0.01})
    with pytest.raises(ValueError, match=r"bias-rate 0\.01: this model has no selection biases"):
        engine_of(config.model_copy(update={"experts": rate}))


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_the_ends_of_groups_have_stride_1(experts: int, place: str) -> None:
    """`torch._grouped_mm` of torch 2.14 demands it, also of a single group."""
    received = torch.full((3, experts), 2, device=place)
    sizes = dispatch.even_sizes(3, experts, received.numel() * 2)
    groups = dispatch._sorted_by_expert(received, sizes, 0).groups
    assert groups.ends.stride() == (1,)
    if place == "cpu":
        assert groups.ends.tolist() == [6 * (n + 1) for n in range(experts)]
