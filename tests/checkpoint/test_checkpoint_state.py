"""What a run consists of beside weights and moments: buffers, generators, and that a checkpoint is this model's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import threed
from tests.configs import Case, batch, config_of, share, topology_of
from tests.harness import run_ranks
from threed import layers
from threed.checkpoint.files import CheckpointError
from threed.cli.commands import main
from threed.config import Config, ModelConfig
from threed.engine import Engine
from threed.layers import MicroBatch, Slicing

# -------------------------------------------------------------------------------------------------- layers with buffers


class Stats(nn.Module):
    """A residual layer that takes a running mean away; `key` is what its parameters are called."""

    def __init__(self, key: str, hidden: int, slicing: Slicing) -> None:
        super().__init__()
        self.norm = layers.RMSNorm(f"{key}.norm", hidden, slicing)
        self.inner = nn.Module()
        self.inner.register_buffer("mask", torch.arange(hidden) % 3 > 0)
        self.register_buffer("mean", torch.zeros(hidden, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("none", None)
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if micro.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean((0, 1))
            self.seen.add_(1)
        return x + self.norm(x - self.mean) * self.inner.mask


class Named(Stats):
    """One with a name of its own."""

    def __init__(self, key: str, hidden: int, slicing: Slicing) -> None:
        super().__init__(key, hidden, slicing)
        self.name = key


class Model:
    """Embedding, three layers with buffers, of which one has no name, and a head."""

    change: Callable[[list[nn.Module]], object] = staticmethod(lambda made: None)

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        h, s, vocab = self.hidden, self.slicing, self.config.vocab or 0
        stats = [Named("first", h, s), Stats("second", h, s), Named("third", h, s)]
        head = layers.LanguageModelHead(
            "head", "head.weight", layers.RMSNorm("head.norm", h, s), vocab, h, s
        )
        made = [layers.Embedding("embedding", vocab, h, s), *stats, head]
        type(self).change(made)
        return made

    def costs(self, micro_batch: int) -> list[float]:
        return [1.0] * 5


BUFFERS = [
    f"{layer}.{key}"
    for layer in ("first", "layers.2", "third")
    for key in ("mean", "seen", "inner.mask")
]


def engine_for(case: Case, kind: type[Model] = Model) -> Engine:
    config = config_of(case)
    topology = topology_of(case.pp, case.tp)
    return Engine(kind(config.model, Slicing(topology.axis("tp"))), topology, config)


def case_of(pp: int = 1, dp: int = 1, tp: int = 1, **settings: Any) -> Case:
    """Eight rows, whatever dp is."""
    return Case(pp, dp, tp, model="llama", microbatches=-8, **settings)


def steps(engine: Engine, count: int) -> list[float]:
    return [engine.step(share(batch(engine.steps, 8), engine.topology)).loss for _ in range(count)]


Facts = tuple[dict[str, Tensor], float, list[float]]


def facts_of(engine: Engine) -> Facts:
    """All weights and buffers, what an evaluation gives, and what data rank 0's next step begins with."""
    loss = float(engine.evaluate(share(batch(99, 8), engine.topology)))
    return (
        engine.full_state_dict(),
        loss,
        [float(v.double().sum()) for _, v in sorted(local(engine).items())],
    )


def local(engine: Engine) -> dict[str, Tensor]:
    """This rank's persistent buffers."""
    return {
        name: place.value
        for name, place in engine.buffers.persistent().items()
        if place.value is not None
    }


def depart(folder: Path, case: Case) -> Facts:
    engine = engine_for(case)
    steps(engine, 2)
    engine.save(folder)
    return facts_of(engine)


def arrive(folder: Path, case: Case, onward: Path | None = None) -> tuple[Facts, list[float]]:
    engine = engine_for(case)
    engine.load(folder)
    facts = facts_of(engine)
    if onward is not None:
        engine.save(onward)
    return facts, steps(engine, 2)


def test_buffers_of_layers_go_from_any_topology_to_any(tmp_path: Path) -> None:
    wanted, loss, _ = run_ranks(2, depart, tmp_path / "a", case_of(dp=2, zero=3))[0]
    assert {name for name in wanted if not name.endswith("weight")} == set(BUFFERS)
    assert wanted["first.seen"].dtype == torch.int64
    assert wanted["first.seen"] == 2
    assert wanted["first.inner.mask"].dtype == torch.bool
    assert float(wanted["layers.2.mean"].abs().max()) > 0
    moved = run_ranks(4, arrive, tmp_path / "a", case_of(pp=2, tp=2, zero=1), tmp_path / "b")
    back = run_ranks(2, arrive, tmp_path / "b", case_of(dp=2, zero=1))
    for (got, after, _), _ in (moved[0], back[0]):
        assert got.keys() == wanted.keys()
        assert all(
            torch.equal(got[name], values) and got[name].dtype == values.dtype
            for name, values in wanted.items()
        )
        assert after == pytest.approx(loss, rel=1e-9)  # fp64, another order of sums
    assert not moved[1][0][0]
    assert back[0][0][2] == back[1][0][2]  # an evaluation begins with alike data ranks


def test_a_resumed_run_goes_on_with_its_buffers(tmp_path: Path) -> None:
    """The probe that found them missing: what an evaluation gives before a save and after the load."""
    engine = engine_for(case_of())
    steps(engine, 2)
    engine.save(tmp_path / "step-2")
    other = engine_for(case_of())
    other.load(tmp_path / "step-2")
    assert facts_of(other)[1] == facts_of(engine)[1]
    assert steps(other, 2) == steps(engine, 2)
    weights = engine.full_state_dict()
    with pytest.raises(KeyError, match=r"weights are missing: third\.mean"):
        other.load_full_state_dict(
            {name: values for name, values in weights.items() if name != "third.mean"}
        )
    with pytest.raises(ValueError, match=r"first\.mean: shape \(3,\), the model has \(32,\)"):
        other.load_full_state_dict({**weights, "first.mean": torch.zeros(3)})
    other.load_full_state_dict({**weights, "first.seen": torch.tensor(40)})
    assert int(other.full_state_dict()["first.seen"]) == 40


def test_inspect_lists_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_for(case_of()).save(tmp_path / "step-0")
    assert main(["inspect", str(tmp_path / "step-0")]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layers.2.seen", "[]", "buffer,", "int64"] in said
    assert ["first.inner.mask", "[32]", "buffer,", "bool"] in said


# ---------------------------------------------------------------------------------------------------- what layers must


class OnMeta(Model):
    @staticmethod
    def change(made: list[nn.Module]) -> None:
        made[3].to("meta")


class Shared(Model):
    """Two layers of one name, on both stages."""

    @staticmethod
    def change(made: list[nn.Module]) -> None:
        made[3] = Named("first", 32, Slicing())


class Constant(Stats):
    """Its buffers never change."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x + self.norm(x) * self.inner.mask


class SharedConstant(Model):
    @staticmethod
    def change(made: list[nn.Module]) -> None:
        for at in (1, 3):
            made[at] = Constant("same", 32, Slicing())
            made[at].name = "same"  # type: ignore[assignment]


def refuse_shared() -> list[str]:
    """What each rank hears of a buffer that changes in two layers of one name; those that stay are one buffer."""
    said = ""
    try:
        steps(engine_for(case_of(pp=2), Shared), 1)
    except ValueError as error:
        said = str(error)
    engine = engine_for(case_of(pp=2), SharedConstant)
    steps(engine, 1)
    return [said, *(name for name in engine.full_state_dict() if name.startswith("same."))]


def test_a_shared_layer_may_not_change_its_buffers() -> None:
    first, second = run_ranks(2, refuse_shared)
    assert first[0] == second[0]
    assert (
        "first.mean, first.seen: changes in training, in several layers with that name" in first[0]
    )
    assert sorted(first[1:]) == ["same.inner.mask", "same.mean", "same.norm.weight", "same.seen"]


def test_what_buffers_may_not_be() -> None:
    with pytest.raises(
        ValueError,
        match=r"buffers on the meta device have no values: third\.inner\.mask|third\.mean",
    ):
        engine_for(case_of(), OnMeta)
    with pytest.raises(
        ValueError, match=r"first\.mean.* changes in the forward of a layer that is recomputed"
    ):
        steps(engine_for(case_of(recompute="full")), 1)
    steps(engine_for(case_of(recompute="full"), SharedConstant), 0)


def differ_over_tp(folder: Path) -> list[str]:
    engine = engine_for(case_of(tp=2))
    engine.buffers.persistent()["first.mean"].store(torch.full((32,), 1.0 * engine.topology.rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save(folder / "one")
        engine.save(folder / "two")
    return [str(one.message) for one in caught]


def test_tensor_ranks_that_disagree_are_named_once(tmp_path: Path) -> None:
    first, second = run_ranks(2, differ_over_tp, tmp_path)
    assert len(first) == 1
    assert (
        "buffers differ between tensor ranks, and the first one's are saved: first.mean;"
        in first[0]
    )
    assert second == []


# ------------------------------------------------------------------------------------------------------ wrapped modules


class Counting(nn.Linear):
    """A layer with a state that is neither a parameter nor a buffer."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_an_extra_state_is_said_to_be_lost_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    engine = Engine(model, topology_of(1, 1), Config())
    with pytest.warns(UserWarning, match=r"get_extra_state are not saved: 1; keep the values in"):
        engine.save(tmp_path / "one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save(tmp_path / "two")


class Raw(nn.Module):
    """Running statistics that nothing counts: batch_norm's kernel leaves their version counters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running, self.spread, training=self.training)


class Norms(nn.Module):
    """Batch norms, a buffer that is replaced, one that stays, and a cache whose shape is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 2)
        self.bn, self.raw = nn.BatchNorm1d(6), Raw()
        self.register_buffer("rows", torch.tensor(0))
        self.register_buffer("scale", torch.full((2,), 0.5).expand(2))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.rows = self.rows + len(x) + topology_of(1, 1).rank
            self.cache = torch.zeros(2 + topology_of(1, 1).rank)
        z = self.raw(torch.tanh(self.bn(self.up(x))))
        return (self.down(z) * self.scale - y).square().mean()


def rows_of(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    make = lambda n: torch.randn(8, n, generator=draw, dtype=torch.float64)  # noqa: E731
    return {"x": make(5) + step, "y": make(2)}


def wrapped(net: nn.Module, stage: int, micro: int = 2, dtype: str = "fp64") -> Engine:
    config = Config.model_validate({
        "zero": {"stage": stage, "resident": 0}, "precision": {"dtype": dtype},
        "train": {"global_batch": 8, "micro_batch": micro, "grad_clip": 0.0},
        "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
    })  # fmt: skip
    return Engine(net, topology_of(1, 1), config)


def plainly() -> tuple[list[float], dict[str, Tensor], float]:
    """Three steps under torch's DistributedDataParallel; this rank's losses, buffers, and an evaluation."""
    rank = topology_of(1, 1).rank
    net = Norms()
    ddp = DistributedDataParallel(net)
    sgd, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(3):
        mine = {key: value.chunk(2)[rank].chunk(2) for key, value in rows_of(step).items()}
        total = 0.0
        for micro in range(2):
            inputs = {key: value[micro] for key, value in mine.items()}
            if micro == 0:
                with ddp.no_sync():
                    loss = ddp(**inputs) / 2
                    loss.backward()
            else:
                loss = ddp(**inputs) / 2
                loss.backward()
            total += float(loss.detach())
        sgd.step()
        sgd.zero_grad()
        losses.append(total)
    kept = {name: value.clone() for name, value in net.named_buffers() if name != "cache"}
    ddp.eval()
    with torch.no_grad():
        return (
            losses,
            kept,
            float(ddp(**{key: value.chunk(2)[rank] for key, value in rows_of(9).items()})),
        )


def as_ddp() -> list[str]:
    """What differs from DistributedDataParallel on this rank, stage by stage."""
    losses, kept, evaluation = plainly()
    topology, wrong = topology_of(1, 1), []
    for stage in range(4):
        engine = wrapped(Norms(), stage)
        got = [engine.step(share(rows_of(step), topology)).loss for step in range(3)]
        buffers = dict(engine.module.named_buffers())
        mine = torch.tensor([losses, [evaluation] * 3], dtype=torch.float64)
        want = threed.distributed.collectives.sum_of_scalars(mine, topology.axis("world")) / 2
        gaps = {
            name: float((buffers[name] - value).double().abs().max())
            for name, value in kept.items()
        }
        gaps["losses"] = float((torch.tensor(got, dtype=torch.float64) - want[0]).abs().max())
        gaps["evaluation"] = abs(
            float(engine.evaluate(share(rows_of(9), topology))) - float(want[1, 0])
        )
        full = engine.full_state_dict()
        if topology.rank == 0:
            gaps |= {
                f"full {n}": float((full[n] - v).double().abs().max()) for n, v in kept.items()
            }
        wrong += [
            f"stage {stage}: {name} is off by {gap}" for name, gap in gaps.items() if gap > 1e-9
        ]
    return wrong


def test_buffers_over_data_ranks_are_those_of_torchs_data_parallel() -> None:
    assert run_ranks(2, as_ddp) == [[], []]


class Drop(nn.Module):
    """Dropout from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.drop, self.down = nn.Linear(5, 16), nn.Dropout(0.4), nn.Linear(16, 2)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.drop(self.up(x))) - y).square().mean()


def train_wrapped(engine: Engine, count: int) -> list[float]:
    return [engine.step(share(rows_of(engine.steps), engine.topology)).loss for _ in range(count)]


def drop_depart(folder: Path) -> list[list[float]]:
    out = []
    for stage in range(4):
        engine = wrapped(Drop(), stage)
        torch.manual_seed(50 + engine.topology.rank)
        train_wrapped(engine, 2)
        engine.save(folder / str(stage))
        out.append(train_wrapped(engine, 2))
    return out


def drop_arrive(folder: Path) -> tuple[list[list[float]], list[str]]:
    out = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in range(4):
            engine = wrapped(Drop(), stage)
            engine.load(folder / str(stage))
            out.append(train_wrapped(engine, 2))
    return out, [str(one.message) for one in caught]


def test_dropout_of_a_wrapped_module_goes_on_bit_for_bit(tmp_path: Path) -> None:
    wanted = run_ranks(2, drop_depart, tmp_path)
    assert run_ranks(2, drop_arrive, tmp_path) == [(losses, []) for losses in wanted]
    # on one process: other masks, but always the same
    elsewhere = [drop_arrive(tmp_path) for _ in range(2)]
    assert elsewhere[0] == elsewhere[1]
    assert all(mine != its for mine, its in zip(elsewhere[0][0], wanted[0], strict=True))
    assert len(elsewhere[0][1]) == 4
    assert "no generator states for this topology: dropout masks of a" in elsewhere[0][1][0]


def undropped(seed: int) -> Engine:
    """An engine of a module that draws no random numbers; the generator is seeded as in a run."""
    module = Drop()
    module.drop = nn.Identity()  # type: ignore[assignment]
    engine = wrapped(module, 1)
    torch.manual_seed(seed + engine.topology.rank)
    return engine


def undropped_depart(folder: Path) -> None:
    engine = undropped(50)
    train_wrapped(engine, 2)
    engine.save(folder)


def test_a_module_without_dropout_needs_no_generator_states(tmp_path: Path) -> None:
    run_ranks(2, undropped_depart, tmp_path / "saved")
    for seed, count in ((50, 0), (51, 1)):  # with another seed, it may have drawn numbers
        engine = undropped(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load(tmp_path / "saved")
        assert len([one for one in caught if "no generator states" in str(one.message)]) == count


# ------------------------------------------------------------------------------------------------------ another's model


class Toy(nn.Module):
    def __init__(
        self, vocab: int, hidden: int, blocks: int, frozen: str = "", buffer: str = ""
    ) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks))
        if buffer:
            self.register_buffer(buffer, torch.ones(2))
        self.double()
        for name, param in self.named_parameters():
            param.requires_grad_(not (frozen and name.startswith(frozen)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.emb(x)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return F.cross_entropy(self.out(y).flatten(0, -2), labels.flatten())


def adam(net: nn.Module) -> Engine:
    config = {"precision": {"dtype": "fp64"}, "train": {"global_batch": 8, "micro_batch": 8}}
    return Engine(net, topology_of(1, 1), Config.model_validate(config))


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(1))
    return {"x": ids, "labels": ids}


def refusal(folder: Path, net: nn.Module) -> str:
    engine = adam(net)
    before = engine.full_state_dict()
    with pytest.raises(CheckpointError) as caught:
        engine.load(folder)
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


def test_another_models_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    folder = adam(Toy(60, 16, 4)).save(tmp_path / "big")
    small = refusal(folder, Toy(53, 8, 2))
    assert (
        "the model has no weights blocks.2.bias, blocks.2.weight, blocks.3.bias, blocks.3.weight"
        in small
    )
    assert "emb.weight is [60, 16] in the checkpoint and [53, 8] in the model" in small
    assert "the model has no weights blocks.3.bias, blocks.3.weight" in refusal(
        folder, Toy(60, 16, 3)
    )
    assert "the checkpoint has no weights blocks.4.bias, blocks.4.weight" in refusal(
        folder, Toy(60, 16, 5)
    )
    assert "the checkpoint has no buffers extra" in refusal(folder, Toy(60, 16, 4, buffer="extra"))
    other = adam(Toy(60, 16, 4, buffer="extra")).save(tmp_path / "buffer")
    assert "the model has no buffers extra" in refusal(other, Toy(60, 16, 4))


def test_the_deepspeed_door_refuses_it_too(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    big, *_ = threed.initialize(model=Toy(60, 16, 4), config=config)
    big.save_checkpoint(tmp_path)
    small, *_ = threed.initialize(model=Toy(60, 16, 2), config=config)
    with pytest.raises(CheckpointError, match=r"the model has no weights blocks\.2\.bias"):
        small.load_checkpoint(tmp_path)


def said_by(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in caught]


def test_more_or_less_may_be_frozen_on_resume(tmp_path: Path) -> None:
    engine = adam(Toy(50, 8, 2, frozen="emb"))
    engine.step(tokens())
    engine.save(tmp_path / "step-1")
    weights, other = engine.full_state_dict(), adam(Toy(50, 8, 2, frozen="blocks.1"))
    said = said_by(lambda: other.load(tmp_path / "step-1"))
    assert len(said) == 2
    assert "no moments of emb.weight, which were frozen: they begin at zero" in said[0]
    assert "moments of blocks.1.bias, blocks.1.weight are left out" in said[1]
    assert all(torch.equal(other.full_state_dict()[name], value) for name, value in weights.items())
    other.step(tokens())
    after = other.full_state_dict()
    moved = {name for name, value in weights.items() if not torch.equal(after[name], value)}
    assert moved == {"emb.weight", "out.weight", "out.bias", "blocks.0.weight", "blocks.0.bias"}
