"""Modules that people bring: GANs, teachers, buffers, causal models inside others. All as in plain PyTorch."""

from __future__ import annotations

import copy
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threed
from tests.configs import topology_of
from tests.harness import run_ranks
from threed.config import Config, ConfigError
from threed.distributed.sharding import storage_of
from threed.engine import Engine
from threed.models.wrapped import Wrapped

ROWS, WIDTH, VOCAB, STEPS = 8, 6, 20, 4
Result = tuple[list[float], dict[str, Tensor]]


def config_of(stage: int, micro: int, **groups: dict[str, Any]) -> Config:
    zero = {"stage": stage, "resident": 0, "bucket_mib": 1e-3, **groups.get("zero", {})}
    return Config.model_validate({
        "zero": zero,
        "precision": {"dtype": "fp64", **groups.get("precision", {})},
        "train": {"global_batch": ROWS, "micro_batch": micro, "grad_clip": 0.5, "steps": 9},
        "optim": {"lr": 1e-2, "warmup": 0, "schedule": "constant", "betas": (0.9, 0.95), "weight_decay": 0.1},
    })  # fmt: skip


def made(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def engine_of(module: nn.Module, stage: int, micro: int = 0, **groups: dict[str, Any]) -> Engine:
    topology = topology_of(1, 1)
    return Engine(module, topology, config_of(stage, micro or ROWS // topology.dp, **groups))


def mine(full: dict[str, Tensor]) -> dict[str, Tensor]:
    topology = topology_of(1, 1)
    return {key: value.chunk(topology.dp)[topology.rank] for key, value in full.items()}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if (p.dim() > 1) == m], "weight_decay": 0.1 * m}
        for m in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def plain_steps(module: nn.Module, batches: list[dict[str, Tensor]], after: Any = None) -> Result:
    optimizer, losses = adamw(module), []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
        if after is not None:
            after(module)
    return losses, {
        name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)
    }


def same(got: Result, want: Result, atol: float = 1e-9) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    same_weights(got[1], want[1], atol)


def same_weights(got: dict[str, Tensor], want: dict[str, Tensor], atol: float = 1e-9) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n} {m}"
        )


# ------------------------------------------------------------------------------------------------------- two engines


class Maker(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH))


class Judge(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


HOW = ("zero_grad", "optimizer", "keep", "frozen")


def judged(y: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(y, torch.full_like(y, float(real)))


def gan_data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        key: torch.randn(ROWS, n, generator=draw, dtype=torch.float64)
        for key, n in (("z", 4), ("x", WIDTH))
    }


def gan_plainly(how: str) -> list[dict[str, Tensor]]:
    """how: what happens to the gradients that the maker's loss gives the judge."""
    maker, judge = made(Maker), made(Judge)
    first, second = (
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.0) for m in (maker, judge)
    )
    for step in range(STEPS):
        data = gan_data(step)
        if how != "keep":
            second.zero_grad()
        fake = maker(data["z"])
        (judged(judge(data["x"]), True) + judged(judge(fake.detach()), False)).backward()
        second.step()
        second.zero_grad()  # an engine's step leaves none of its own
        first.zero_grad()
        judge.requires_grad_(how != "frozen")
        judged(judge(fake), True).backward()
        judge.requires_grad_(True)
        first.step()
    return [
        {name: p.detach().clone() for name, p in m.named_parameters(remove_duplicate=False)}
        for m in (maker, judge)
    ]


def gan_engines(stage: int, seed: int = 0) -> tuple[Any, Any]:
    ds = {
        "train_micro_batch_size_per_gpu": ROWS // topology_of(1, 1).dp,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 60,
        },
    }
    maker, *_ = threed.initialize(model=made(Maker, seed), config=ds)
    judge, *_ = threed.initialize(model=made(Judge, seed), config=ds)
    return maker, judge


def gan_step(maker: Any, judge: Any, how: str, step: int) -> None:
    data = mine(gan_data(step))
    if how == "zero_grad":
        judge.zero_grad()
    elif how == "optimizer":
        judge.optimizer.zero_grad()
    fake = maker(data["z"])
    judge.backward(judged(judge(data["x"]), True) + judged(judge(fake.detach()), False))
    judge.step()
    maker.zero_grad()
    judge.module.requires_grad_(how != "frozen")
    maker.backward(judged(judge(fake), True))
    judge.module.requires_grad_(True)
    maker.step()


def gan(stage: int, how: str) -> list[dict[str, Tensor]]:
    engines = gan_engines(stage)
    for step in range(STEPS):
        gan_step(*engines, how, step)
    return [engine.full_state_dict() for engine in engines]


def gans(cases: list[tuple[int, str]]) -> list[list[dict[str, Tensor]]]:
    return [gan(*case) for case in cases]


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.grid)])
def test_two_engines_of_a_gan(stages: tuple[int, ...]) -> None:
    """The maker's loss gives the judge gradients too: dropped by zero_grad, else they add up as in plain PyTorch."""
    cases = [(stage, how) for stage in stages for how in HOW]
    for (_, how), got in zip(cases, run_ranks(2, gans, cases)[0], strict=True):
        for weights, want in zip(
            got, gan_plainly("zero_grad" if how == "optimizer" else how), strict=True
        ):
            same_weights(weights, want)


def test_the_optimizers_of_the_gan_matter() -> None:
    """The ways of `HOW` are not the same training: else the test above would show nothing."""
    kept, dropped = gan_plainly("keep")[1], gan_plainly("zero_grad")[1]
    assert max(float((kept[name] - dropped[name]).abs().max()) for name in kept) > 1e-3


def test_gradients_of_two_loss_scales_never_mix() -> None:
    """In fp16 the maker's loss has a scale of its own: what it leaves in the judge is refused, or dropped."""
    ds = {
        "train_micro_batch_size_per_gpu": ROWS, "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }  # fmt: skip
    maker, *_ = threed.initialize(model=Maker(), config=ds)
    judge, *_ = threed.initialize(model=Judge(), config=ds)
    for dropped in (True, False):
        data = {key: value.half() for key, value in gan_data(0).items()}
        fake = maker(data["z"])
        judge.backward(judged(judge(data["x"]), True))
        judge.step()
        maker.backward(judged(judge(fake), True))
        maker.step()
        if dropped:
            judge.zero_grad()
    refused = pytest.raises(
        RuntimeError,
        match="has a gradient of another engine's backward, scaled by that engine's loss",
    )
    with refused:  # it is there before the judge's backward
        judge.backward(judged(judge(gan_data(1)["x"].half()), True))
    judge.zero_grad()
    fake = maker(gan_data(1)["z"].half())
    judge.backward(judged(judge(gan_data(1)["x"].half()), True))
    maker.backward(judged(judge(fake), True))
    with refused:  # it came after
        judge.step()


class Sometimes(nn.Module):
    """`rare` is used only where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:
        y = self.often(x) + (self.rare(x) if bool(rare[0]) else 0)
        return y.square().mean()


def go_back(stage: int, folder: str) -> dict[str, Tensor]:
    """Uses `rare` after a save, and goes back to it."""
    engine = engine_of(made(Sometimes), stage)
    data = [
        mine({"x": gan_data(step)["x"], "rare": torch.full((ROWS,), step == 1)})
        for step in range(3)
    ]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        engine.step(data[0])
    engine.save(f"{folder}/one")
    engine.step(data[1])
    engine.load(f"{folder}/one")
    engine.step(data[2])
    return engine.full_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_used_after_a_save_is_unused_again_when_that_is_loaded(
    stage: int, tmp_path: Path
) -> None:
    want = plain_steps(
        made(Sometimes), [{"x": gan_data(n)["x"], "rare": torch.zeros(ROWS)} for n in (0, 2)]
    )[1]
    same_weights(run_ranks(2, go_back, stage, str(tmp_path))[0], want)


def zero_grad_in_between(stage: int) -> dict[str, Tensor]:
    """Of the first step's two micro-batches zero_grad drops the first; the second step is whole."""
    ds = {
        "train_batch_size": ROWS, "gradient_accumulation_steps": 2, "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = threed.initialize(model=made(Judge), config=ds)
    for step in range(2):
        for number, x in enumerate(mine(gan_data(step))["x"].chunk(2)):
            if (step, number) == (0, 1):
                with pytest.warns(
                    UserWarning, match="drops the gradients of 1 of this step's 2 micro-batches"
                ):
                    engine.zero_grad()
            engine.backward(judged(engine(x), True))
            with pytest.raises(RuntimeError, match="zero_grad between backward and step"):
                engine.zero_grad()
            engine.step()
    # running the module begins a step, as running the engine does; zero_grad drops its gradients
    engine.module(mine(gan_data(0))["x"]).sum().backward()
    engine.zero_grad()
    return engine.full_state_dict()


def several(work: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    return [work(*case) for case in cases]


def test_zero_grad_drops_what_is_there() -> None:
    judge = made(Judge)
    for step in range(2):
        parts = gan_data(step)["x"].chunk(2)  # a rank's share each; half of it is a micro-batch
        used = [part.chunk(2)[1] if step == 0 else part for part in parts]
        judge.zero_grad()
        sum(judged(judge(x), True) * (len(x) / ROWS) for x in used).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in judge.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
    for got in run_ranks(2, several, zero_grad_in_between, [(stage,) for stage in range(4)])[0]:
        same_weights(
            got, {name: p.detach() for name, p in judge.named_parameters(remove_duplicate=False)}
        )


# ---------------------------------------------------------------------------------------------------- changed by hand

WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda k, q: k.mul_(0.5).add_(q, alpha=0.5),  # MoCo, BYOL
    "new data": lambda k, q: setattr(k, "data", k.data * 0.5 + q.data * 0.5),
    "data in place": lambda k, q: k.data.mul_(0.5).add_(0.5 * q.detach().data),  # DINO
}


class Taught(nn.Module):
    """A student, and a frozen teacher that follows it at the beginning of each training forward."""

    def __init__(self, way: str, inside: bool = True) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.way, self.inside = way, inside

    @torch.no_grad()
    def follow(self) -> None:
        for k, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            WAYS[self.way](k, q)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training and self.inside:
            self.follow()
        with torch.no_grad():
            aim = self.teacher(y)
        own = self.student(x)
        return (own - aim).square().mean() + own.square().mean()


def pairs(steps: int = STEPS) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        {k: torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for k in "xy"}
        for _ in range(steps)
    ]


def taught(
    way: str, stage: int, zero: dict[str, Any], folder: str
) -> tuple[Result, dict[str, Tensor]]:
    """The training, in two halves: the second is another engine's, with a lower stage, from a checkpoint."""
    zero = {**zero, "nvme_path": folder} if "nvme" in zero.values() else zero
    engine = engine_of(made(lambda: Taught(way)), stage, zero=zero)
    losses = [engine.step(mine(batch)).loss for batch in pairs()[:2]]
    engine.save(Path(folder) / f"{way}-{stage}-{len(zero)}")
    again = engine_of(made(lambda: Taught(way), seed=9), max(0, stage - 1))
    again.load(Path(folder) / f"{way}-{stage}-{len(zero)}")
    ends = [e.step(mine(batch)).loss for batch in pairs()[2:] for e in (engine, again)]
    assert ends[::2] == pytest.approx(ends[1::2], rel=1e-12)
    return (losses + ends[::2], engine.full_state_dict()), again.full_state_dict()


@pytest.mark.seldom("in place")
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_that_follows_in_the_forward(way: str) -> None:
    want = plain_steps(made(lambda: Taught(way)), pairs())
    with tempfile.TemporaryDirectory() as folder:
        cases = [(way, stage, {}, folder) for stage in range(4)]
        cases.append((way, 3, {"offload_params": "cpu", "offload_optimizer": "cpu"}, folder))
        if way != "new data":
            cases.append((way, 3, {"offload_params": "nvme"}, folder))
        for got, again in run_ranks(2, several, taught, cases)[0]:
            same(got, want)
            same_weights(again, want[1])


def between(way: str, stage: int, whole: bool) -> Result:
    module = made(lambda: Taught(way, inside=False))
    engine = engine_of(module, stage)
    losses = []
    for batch in pairs():
        losses.append(engine.step(mine(batch)).loss)
        if whole:
            with engine.gathered() as inside:
                assert inside is module
                module.follow()  # type: ignore[operator]
        elif stage < 3:
            module.follow()  # type: ignore[operator]
        else:
            with pytest.raises(
                RuntimeError, match=r"teacher\.0\.weight is sharded.*engine\.gathered"
            ):
                module.follow()  # type: ignore[operator]
            return [], {}
    return losses, engine.full_state_dict()


@pytest.mark.seldom("in place")
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_that_follows_between_steps(way: str) -> None:
    want = plain_steps(made(lambda: Taught(way, inside=False)), pairs(), Taught.follow)
    cases = [(way, stage, whole) for stage in range(4) for whole in (False, True)]
    for case, got in zip(cases, run_ranks(2, several, between, cases)[0], strict=True):
        if case[1:] != (3, False):
            same(got, want)


def clip(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.clamp_(-0.2, 0.2)


def clipped(stage: int, dtype: str) -> tuple[Result, list[dict[str, Tensor]]]:
    """Also the weights before and after the first clipping."""
    precision = {"dtype": dtype, "cast_inputs": True}
    engine = engine_of(made(lambda: Taught("in place", inside=False)), stage, precision=precision)
    losses, weights = [], []
    for batch in pairs():
        losses.append(engine.step(mine(batch)).loss)
        weights.append(engine.full_state_dict())
        with engine.gathered() as module:
            clip(module)
        weights.append(engine.full_state_dict())
    return (losses, engine.full_state_dict()), weights[:2]


def test_weights_that_are_clipped() -> None:
    """As a Wasserstein GAN's are. Masters of bf16 weights follow; what was not clipped stays as precise as it was."""
    want = plain_steps(made(lambda: Taught("in place", inside=False)), pairs(), clip)
    cases = [(stage, dtype) for dtype in ("fp64", "bf16") for stage in range(4)]
    for (_, dtype), (got, both) in zip(
        cases, run_ranks(2, several, clipped, cases)[0], strict=True
    ):
        if dtype == "fp64":
            same(got, want)
        else:
            limit = float(torch.tensor(0.2, dtype=torch.bfloat16))
            for name, after in both[1].items():
                before = both[0][name]
                clear = before.abs() < 0.199  # bf16 rounds some of what is nearer to the limit
                assert torch.equal(after[clear], before[clear])
                assert float(after.abs().max()) <= limit


def check_refused() -> None:
    module = made(Judge)
    engine = engine_of(module, 1)
    module[0].weight = nn.Parameter(torch.zeros_like(module[0].weight))
    with pytest.raises(RuntimeError, match=r"0\.weight was replaced by another parameter"):
        engine.full_state_dict()
    with pytest.raises(ConfigError, match=r"0: an embedding with max_norm"):
        engine_of(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), 1)
    sharded = made(Judge)
    engine_of(sharded, 3)
    weight = sharded[0].weight
    for change in (
        weight.zero_,
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: weight.data.add_(1),
    ):
        with pytest.raises(RuntimeError, match=r"0\.weight is sharded \(ZeRO stage 3\)"):
            change()


def test_what_would_be_lost_is_refused() -> None:
    run_ranks(2, check_refused)


class Renormalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, 8, max_norm=0.5), nn.Linear(8, VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.embed(x)).flatten(0, 1), labels.flatten())


def tokens(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(40 + step)
    return {key: torch.randint(0, VOCAB, (ROWS, WIDTH), generator=draw) for key in ("x", "labels")}


def test_an_embedding_that_renormalizes_its_rows() -> None:
    want = plain_steps(made(Renormalized), [tokens(step) for step in range(STEPS)])
    for zero in ({}, {"offload_optimizer": "cpu"}, {"offload_params": "cpu"}):
        engine = engine_of(made(Renormalized), 3 if "offload_params" in zero else 1, zero=zero)
        same(
            ([engine.step(tokens(step)).loss for step in range(STEPS)], engine.full_state_dict()),
            want,
        )


# ------------------------------------------------------------------------------------------------------------- buffers


class Sinusoid(nn.Module):
    """The classic table of positions, a buffer; and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, VOCAB)
        self.register_buffer(
            "table", torch.arange(WIDTH * 8.0).view(WIDTH, 8).sin(), persistent=False
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.norm((self.embed(x) + self.table).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.out(y).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.filterwarnings("ignore:buffers are each rank's own")
def test_buffers_are_in_the_compute_dtype(dtype: str) -> None:
    """As `module.to(dtype)` makes them: the loss is the same number."""
    torch.manual_seed(0)
    module = Sinusoid()
    plain = copy.deepcopy(module).to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    engine = engine_of(module, 1, precision={"dtype": dtype})
    assert engine.step(tokens(0)).loss == float(plain(**tokens(0)).detach())
    assert all(
        b.dtype == dict(plain.named_buffers())[name].dtype for name, b in module.named_buffers()
    )


def batch_norm(stage: int) -> Result:
    engine = engine_of(made(Sinusoid), stage, micro=2)
    losses = [engine.step(mine(tokens(step))).loss for step in range(STEPS)]
    return losses, engine.full_state_dict()


@pytest.mark.filterwarnings("ignore:buffers are each rank's own")
def test_batch_norm_with_the_same_micro_batches() -> None:
    plain = made(Sinusoid)

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            parts = zip(x.chunk(4), labels.chunk(4), strict=True)
            return torch.stack([self.inner(*part) for part in parts]).mean()

    losses, weights = plain_steps(Cut(), [tokens(step) for step in range(STEPS)])
    want = losses, {name.removeprefix("inner."): value for name, value in weights.items()}
    for got in run_ranks(2, several, batch_norm, [(stage,) for stage in range(4)])[0]:
        buffers = {
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        }  # those of data rank 0's rows
        assert got[1].keys() - want[1].keys() == buffers
        same((got[0], {name: value for name, value in got[1].items() if name not in buffers}), want)


# -------------------------------------------------------------------------------------------------- what a loss counts


class MaskedMean(nn.Module):
    """A mean over valid labels written by hand, which is 0 / 0 without any; -1 or -100 is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logs = F.log_softmax(self.out(self.embed(x).tanh()), -1)
        valid = labels >= 0
        picked = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(picked * valid).sum() / valid.sum()


def masked(step: int, ignored: int) -> dict[str, Tensor]:
    batch = tokens(step)
    batch["labels"][:, 3:] = ignored
    batch["labels"][2, 1:] = ignored
    batch["labels"][-3:] = ignored  # whole micro-batches of one and two rows have none
    return batch


def counted(stage: int, micro: int, ignored: int) -> Result:
    engine = engine_of(made(MaskedMean), stage, micro)
    return [
        engine.step(mine(masked(step, ignored))).loss for step in range(STEPS)
    ], engine.full_state_dict()


def test_labels_below_zero_are_not_counted() -> None:
    want = plain_steps(made(MaskedMean), [masked(step, -1) for step in range(STEPS)])
    cases = [
        (stage, micro, ignored) for stage in (1, 3) for micro in (4, 2, 1) for ignored in (-1, -100)
    ]
    for got in run_ranks(2, several, counted, cases)[0]:
        same(got, want)


class Tuned(nn.Module):
    """A causal model inside a user's module, which gives it the labels, or its own, or computes the loss itself."""

    def __init__(self, labels: str) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        shape = {
            "vocab_size": VOCAB,
            "n_positions": 16,
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 2,
            "use_cache": False,
        }
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.lm = GPT2LMHeadModel(
            GPT2Config(**shape, **drops, bos_token_id=None, eos_token_id=None)
        )
        self.labels = labels

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.labels == "its own":
            return self.lm(input_ids=x, labels=labels.clone()).loss
        if self.labels == "given":
            return self.lm(input_ids=x, labels=labels).loss
        return F.cross_entropy(self.lm(input_ids=x).logits.flatten(0, 1), labels.flatten())


def answers(step: int) -> dict[str, Tensor]:
    """Labels whose rows differ in length, so that it matters whether the first one is counted."""
    batch = tokens(step)
    for row in range(ROWS):
        batch["labels"][row, 1 + (row + 1) // 2 + 1 :] = -100
    batch["labels"][3, 1:] = -100
    return batch


def tuned(
    labels: str, stage: int, micro: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    engine = engine_of(made(lambda: Tuned(labels)), stage, micro)
    metrics = [engine.step(mine(answers(step))) for step in range(2)]
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], engine.full_state_dict()


@pytest.mark.parametrize("labels", ["given", "not given"])
def test_a_causal_model_inside_a_module(labels: str) -> None:
    """transformers computes its loss in fp32, to about 1e-7; the gradient is the same on both sides."""
    losses, weights = plain_steps(made(lambda: Tuned(labels)), [answers(step) for step in range(2)])
    cases = [(labels, 1, 4), (labels, 1, 2), (labels, 3, 1)]
    for got in run_ranks(2, several, tuned, cases)[0]:
        assert got[0] == pytest.approx(losses, rel=1e-6)
        same_weights(got[2], weights, atol=1e-9 if labels == "not given" else 1e-7)


def test_labels_of_which_nothing_is_known_are_refused() -> None:
    module = made(lambda: Tuned("its own"))
    with pytest.raises(
        ValueError, match=r"lm computes the loss from labels that are not the batch's"
    ):
        engine_of(module, 0, micro=2).step(answers(0))
    counts = Wrapped(
        made(lambda: Tuned("its own")), count=lambda i: (i["labels"][:, 1:] >= 0).sum().double()
    )
    want = engine_of(made(lambda: Tuned("given")), 0, micro=2).step(answers(0))
    assert engine_of(counts, 0, micro=2).step(answers(0)).grad_norm == pytest.approx(
        want.grad_norm, rel=1e-9
    )


# ------------------------------------------------------------------------------------------------ what is never used


class Idle(nn.Module):
    """One layer is never used, one from the third step on, and one on the second rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.later, self.some = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, step: Tensor, some: Tensor) -> Tensor:
        z = self.used(x).tanh()
        z = self.later(z) if int(step[0]) >= 2 else z
        z = torch.cat([self.some(z[some]), z[~some]]) if bool(some.any()) else z
        return F.mse_loss(z, y)


def idle_batches() -> list[dict[str, Tensor]]:
    some = torch.arange(ROWS) >= ROWS // 2
    return [{**b, "step": torch.full((ROWS,), n), "some": some} for n, b in enumerate(pairs(6))]


class IdleOnOne(Idle):
    """The same on one process: each half is what a rank has."""

    def forward(self, **batch: Tensor) -> Tensor:
        halves = [{key: value.chunk(2)[i] for key, value in batch.items()} for i in range(2)]
        return (Idle.forward(self, **halves[0]) + Idle.forward(self, **halves[1])) / 2


def idle(stage: int, folder: str) -> tuple[Result, list[str]]:
    engine = engine_of(made(Idle), stage)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [engine.step(mine(batch)).loss for batch in idle_batches()[:4]]
    engine.save(Path(folder) / str(stage))
    engine = engine_of(made(Idle, seed=3), stage)
    engine.load(Path(folder) / str(stage))
    losses += [engine.step(mine(batch)).loss for batch in idle_batches()[4:]]
    return (losses, engine.full_state_dict()), [
        str(w.message) for w in told if "not used" in str(w.message)
    ]


def test_what_was_never_used_stays_as_it_is() -> None:
    """torch's AdamW leaves alone what has no gradient, and counts each parameter's updates by itself."""
    want = plain_steps(made(IdleOnOne), idle_batches())
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(2, several, idle, [(stage, folder) for stage in (0, 1, 2)])
    for got, told in found[0]:
        same(got, want)
        assert len(told) == 1
        names = told[0].partition(": ")[2].split(", ")
        assert set(names) == {"never.weight", "never.bias", "later.weight", "later.bias"}
    assert all(told == [] for _, told in found[1])


# ---------------------------------------------------------------------------------------------- refused by name


class WithBody(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


class Router(nn.Module):
    """Parameters in two dtypes."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.router = nn.Linear(WIDTH, 4).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.body(x.bfloat16()).float()).square().mean()


class Graph(nn.Module):
    def __init__(self, links: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("links", links, persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def tied_pair() -> tuple[nn.Module, nn.Module]:
    first, second = (nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    second[0].weight = first[0].weight
    return first, second


def body_pair(frozen: bool = False) -> tuple[nn.Module, nn.Module]:
    body = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
    return WithBody(body), WithBody(body)


def part_and_whole() -> tuple[nn.Module, nn.Module]:
    whole = WithBody(nn.Linear(WIDTH, WIDTH))
    return whole.body, whole


PAIRS: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], str]] = {
    "body": (body_pair, "body.weight, body.bias: shared with a module that has an engine"),
    "frozen body": (lambda: body_pair(frozen=True), "body.weight, body.bias: shared"),
    "tied": (tied_pair, "0.weight: shared"),
    "part and whole": (part_and_whole, "body.weight, body.bias: shared"),
    "whole and part": (lambda: part_and_whole()[::-1], "weight, bias: shared"),
}


def sharing(share: Callable[[nn.Module, nn.Module], object]) -> nn.Module:
    """A module whose second layer shares memory with the first, but not the parameter."""
    module = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    share(module[0], module[1])
    return module


def share_rows(first: Any, second: Any) -> None:
    rows = torch.randn(2 * WIDTH, WIDTH)
    first.weight, second.weight = nn.Parameter(rows[:WIDTH]), nn.Parameter(rows[3 : 3 + WIDTH])


ONES = torch.eye(WIDTH)
MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dtypes": (Router, r"several dtypes: router.weight \(torch.float32\)"),
    "frozen in another dtype": (lambda: Router(frozen=True), r"several dtypes: router.weight"),
    "coo": (lambda: Graph(ONES.to_sparse()), r"not dense: links \(torch.sparse_coo\)"),
    "csr, not persistent": (lambda: Graph(ONES.to_sparse_csr(), False), r"not dense: links \(torch.sparse_csr\)"),
    "quantized": (
        lambda: Graph(torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8)), r"not dense: links \(quantized\)",
    ),
    "another parameter of a tensor": (
        lambda: sharing(lambda a, b: setattr(b, "weight", nn.Parameter(a.weight))), r"0.weight and 1.weight share memory",
    ),
    "data of another parameter": (
        lambda: sharing(lambda a, b: setattr(b.bias, "data", a.bias.data)), r"0.bias and 1.bias share memory",
    ),
    "rows of another parameter": (lambda: sharing(share_rows), r"0.weight and 1.weight share memory"),
    "a buffer": (
        lambda: sharing(lambda a, b: b.register_buffer("old", a.weight.data[1:])), r"0.weight and 1.old share memory",
    ),
}  # fmt: skip


def refused_here(stage: int) -> dict[str, str]:
    """What every rank gets for a pair of modules, of which the first has an engine, and for other modules."""
    said = {}
    for name, (make, _) in PAIRS.items():
        first, second = make()
        engine_of(first, stage)
        before = [(storage_of(p), p.shape) for p in second.parameters() if p.device.type != "meta"]
        said[name] = message_of(lambda second=second: engine_of(second, stage))  # type: ignore[misc]
        assert before == [
            (storage_of(p), p.shape) for p in second.parameters() if p.device.type != "meta"
        ]
    for name, (build, _) in MODULES.items():
        said[name] = message_of(lambda build=build: engine_of(build(), stage))  # type: ignore[misc]
    return said


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_modules_that_cannot_be_right_are_refused_by_name_on_every_rank(stage: int) -> None:
    for said in run_ranks(2, refused_here, stage):
        for name, (_, words) in {**PAIRS, **MODULES}.items():
            assert re.search(words, said[name]), (name, said[name])


def test_a_buffer_that_becomes_sparse_is_refused_by_name() -> None:
    module = Graph(ONES.clone())
    engine = engine_of(module, 1)
    module.links = ONES.to_sparse()
    with pytest.raises(ValueError, match="not dense: links"):
        engine.step({"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)})


class Looks(nn.Module):
    """Keeps the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, **inputs: Tensor) -> Tensor:
        self.seen = {name: value.dtype for name, value in inputs.items()}
        return self.linear(inputs["fp32"].to(self.linear.weight.dtype)).square().mean()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("casts", [False, True])
def test_a_batch_keeps_its_dtypes_unless_they_are_to_be_cast(dtype: str, casts: bool) -> None:
    kinds = {
        "fp32": torch.float32,
        "fp64": torch.float64,
        "bf16": torch.bfloat16,
        "ids": torch.int32,
        "on": torch.bool,
    }
    module = Looks()
    engine = engine_of(module, 1, precision={"dtype": dtype, "cast_inputs": casts})
    batch = {name: torch.ones(ROWS, 1).to(kind) for name, kind in kinds.items()}
    for run in (engine.step, engine.evaluate):
        run(batch)
        assert module.seen == {
            n: engine.batches.dtype if casts and k.is_floating_point else k
            for n, k in kinds.items()
        }


def test_an_error_about_dtypes_names_the_key() -> None:
    engine = engine_of(WithBody(nn.Linear(WIDTH, WIDTH)), 1, precision={"dtype": "bf16"})
    with pytest.raises(RuntimeError, match="dtype") as caught:
        engine.step({"x": torch.randn(ROWS, WIDTH)})
    assert "x is torch.float32" in caught.value.__notes__[0]
    assert "precision.cast_inputs" in caught.value.__notes__[0]


# --------------------------------------------------------------------------------------------------- gradient hooks


def hooked_after(stage: int, kind: str) -> dict[str, Tensor]:
    """Hooks that are registered after the engine is made zero every second element."""
    module = made(lambda: WithBody(nn.Linear(WIDTH, WIDTH)))
    engine = engine_of(module, stage)
    for param in module.parameters():
        if kind == "hook":
            param.register_hook(odd_only)
        else:
            param.register_post_accumulate_grad_hook(mask_in_place)
    for step in range(STEPS):
        engine.step(mine({"x": gan_data(step)["x"]}))
    return engine.full_state_dict()


def odd_only(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient)


def mask_in_place(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = odd_only(param.grad)


def test_hooks_after_the_engine_change_gradients() -> None:
    module = made(lambda: WithBody(nn.Linear(WIDTH, WIDTH)))
    for param in module.parameters():
        param.register_hook(odd_only)
    want = plain_steps(module, [{"x": gan_data(step)["x"]} for step in range(STEPS)])[1]
    cases = [(stage, kind) for stage in range(3) for kind in ("hook", "post-accumulate")]
    for got in run_ranks(2, several, hooked_after, cases)[0]:
        same_weights(got, want)
