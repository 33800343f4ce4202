"""Parameters of a wrapped module that the program uses by itself, in every way, at every moment, under every stage:
the values of plain PyTorch, or an error that names the parameter."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.configs import topology_of
from tests.harness import run_ranks
from threed.config import Config
from threed.engine import Engine

WIDTH, ROWS, STEPS = 6, 4, 3
NAME = "blocks.1.weight"


class Net(nn.Module):
    """Three blocks, of which the last may share the weight of the second; `probe` runs before them in the forward."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if variant == "tied":
            self.blocks[2].weight = self.blocks[1].weight
        if variant == "frozen":
            self.blocks[1].weight.requires_grad_(False)
        self.probe: Callable[[], None] | None = None
        weight = self.blocks[1].weight
        self.closure = lambda: (weight * 2).sum()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.probe is not None:
            self.probe()
        for block in self.blocks:
            x = x + block(x).tanh()
        return F.mse_loss(x, y)


# An action takes the module and its parameter, and gives a number; or a function that gives it, to be called later.
Later = Callable[[], Any]
Action = Callable[[Net, nn.Parameter], Later]


def now(act: Callable[[Net, nn.Parameter], Any]) -> Action:
    """An action that keeps nothing but the module and the parameter."""
    return lambda module, param: lambda: act(module, param)


def scale(kept: Tensor) -> Tensor:
    with torch.no_grad():
        return kept.mul_(0.9).sum()


def unpickled(kept: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    return next(iter(torch.load(io.BytesIO(buffer.getvalue())).values()))


def hook(module: Net, param: nn.Parameter) -> Later:
    """Halves the gradients from now on."""
    if param.requires_grad:
        param.register_hook(lambda grad: grad * 0.5)
    return lambda: 0.0


def inferred(param: Tensor) -> Tensor:
    with torch.inference_mode():
        return param.sum().clone()


@torch.compile(backend="eager")
def compiled_sum(x: Tensor) -> Tensor:
    return (x * 3).sum()


ACTIONS: dict[str, Action] = {
    "attribute": now(lambda module, param: module.blocks[1].weight.sum()),
    "closure": now(lambda module, param: module.closure()),
    "hook": hook,
    "parameters": now(lambda module, param: sum(p.detach().abs().sum() for p in module.parameters())),
    "view": lambda module, param: (lambda kept: lambda: kept.sum())(param.detach().view(-1)[:9]),
    "view with history": lambda module, param: (lambda kept: lambda: kept.sum())(param.t()[1:]),
    "view, changed": lambda module, param: (lambda kept: lambda: scale(kept))(param.detach()[1]),
    "numpy": lambda module, param: (lambda kept: lambda: kept.sum())(param.detach().numpy()),
    "dlpack": lambda module, param: (lambda kept: lambda: kept.sum())(torch.from_dlpack(param.detach())),
    "list": now(lambda module, param: param.tolist()[0][0]),
    "pickle": now(lambda module, param: pickle.loads(pickle.dumps(param)).sum()),
    "save": lambda module, param: (lambda kept: lambda: unpickled(kept).sum())({"a": param.detach()}),
    "deepcopy": now(lambda module, param: copy.deepcopy(module.blocks[1]).weight.sum()),
    "deepcopy of all": now(lambda module, param: copy.deepcopy(module).blocks[1].weight.sum()),
    "state_dict": lambda module, param: (lambda kept: lambda: kept[NAME].sum())(module.state_dict()),
    "state_dict, saved": lambda module, param: (lambda kept: lambda: unpickled(kept).sum())(module.state_dict()),
    "data": lambda module, param: (lambda kept: lambda: kept.sum())(param.data),
    "data, changed": lambda module, param: (lambda kept: lambda: scale(kept))(param.data),
    "data, replaced": now(lambda module, param: setattr(param, "data", param.data * 0.9) or param.detach().sum()),
    "in place": now(lambda module, param: scale(param)),
    "foreach": now(lambda module, param: torch._foreach_norm([param.detach()])[0]),
    "grad": now(lambda module, param: torch.func.grad(lambda w: (w * w).sum())(param.detach()).sum()),
    "grad of a view": lambda module, param: (
        lambda kept: lambda: torch.func.grad(lambda w: (w * w).sum())(kept).sum()
    )(param.detach()[1:]),
    "grad, undetached": now(lambda module, param: torch.func.grad(lambda w: (w * w).sum())(param).sum()),
    "vmap": now(lambda module, param: torch.func.vmap(lambda row: row.square().sum())(param).sum()),
    "functional_call": now(
        lambda module, param: torch.func.functional_call(
            module.blocks[1], dict(module.blocks[1].named_parameters()), (torch.ones(2, WIDTH, dtype=torch.float64),)
        ).sum()
    ),
    "compile": now(lambda module, param: compiled_sum(param)),
    "inference": now(lambda module, param: inferred(param)),
    "vector": now(lambda module, param: nn.utils.parameters_to_vector([param]).sum()),
    "product": now(lambda module, param: (torch.ones(2, WIDTH, dtype=torch.float64) @ param).sum()),
    "repr": now(lambda module, param: float(len(repr(param)) > 0)),
    "like": now(lambda module, param: torch.zeros_like(param).sum() + param.new_ones(2).sum()),
    "shape": now(lambda module, param: param.shape[0] + param.stride(0) + param.numel() + len(param) + param.dim()),
}  # fmt: skip
MOMENTS = ("before", "in", "after", "gathered", "kept", "outdated")
VARIANTS = ("plain", "frozen", "tied")


@dataclass(frozen=True)
class Case:
    """What is done, when, under which stage, to which kind of parameter. kept: taken in `gathered()`, used after it;
    outdated: after one more step."""

    action: str
    moment: str
    variant: str


def made(variant: str) -> Net:
    torch.manual_seed(0)
    return Net(variant).double()


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        key: torch.randn(2 * ROWS, WIDTH, generator=draw, dtype=torch.float64) for key in ("x", "y")
    }


class Plain:
    """Plain PyTorch on one process."""

    def __init__(self, module: Net, stage: int) -> None:
        self.module = module
        trained = [param for param in module.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )

    def forward(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        return self.module(**batch(step))

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    def gathered(self) -> Any:
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}


class Sharded:
    """The engine, on some ranks."""

    def __init__(self, module: Net, stage: int, **zero: Any) -> None:
        self.module, self.topology = module, topology_of(1, 1)
        self.engine = Engine(module, self.topology, Config.model_validate({
            "zero": {"stage": stage, "resident": 0, "bucket_mib": 1e-4, **zero}, "precision": {"dtype": "fp64"},
            "train": {
                "global_batch": 2 * ROWS, "micro_batch": 2 * ROWS // self.topology.dp, "grad_clip": 0.0, "steps": 9,
            },
            "optim": {"lr": 1e-2, "warmup": 0, "schedule": "constant", "betas": (0.9, 0.95), "eps": 1e-8,
                      "weight_decay": 0.0},
        }))  # fmt: skip

    def forward(self, step: int) -> Tensor:
        self.engine.begin(1)
        dp, rank = self.topology.dp, self.topology.rank
        return self.module(**{key: value.chunk(dp)[rank] for key, value in batch(step).items()})

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        self.engine.update()

    def gathered(self) -> Any:
        return self.engine.gathered()

    def weights(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()


def outcome(use: Later) -> float | str:
    """The number, or the error."""
    try:
        return float(use())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def run(
    kind: type[Plain] | type[Sharded], case: Case, stage: int = 0, without: bool = False
) -> Any:
    """Trains three steps; at one moment of the second one (not if `without`) something is done to a parameter. Returns
    what that gave, and the weights."""
    module = made(case.variant)
    trainer = kind(module, stage)
    param = module.blocks[1].weight
    results: list[float | str] = []

    def act() -> None:
        if not without:
            results.append(outcome(lambda: ACTIONS[case.action](module, param)()))

    def take() -> Later:
        try:
            return ACTIONS[case.action](module, param)
        except RuntimeError as error:
            results.append(f"{type(error).__name__}: {error}")
            return lambda: 0.0

    trainer.backward(trainer.forward(0))
    if case.moment == "before":
        act()
    elif case.moment == "gathered":
        with trainer.gathered():
            act()
    elif case.moment in ("kept", "outdated") and not without:
        with trainer.gathered():
            use = take()
        if case.moment == "outdated":
            trainer.backward(trainer.forward(9))
        results.append(outcome(use))
    elif case.moment == "outdated":
        trainer.backward(trainer.forward(9))
    module.probe = act if case.moment == "in" else None
    loss = trainer.forward(1)
    module.probe = None
    if case.moment == "after":
        act()
    trainer.backward(loss)
    trainer.backward(trainer.forward(2))
    return results, trainer.weights()


@functools.cache
def want(case: Case, without: bool) -> Any:
    return run(Plain, case, without=without)


def run_all(cases: list[Case], stage: int) -> list[Any]:
    return [run(Sharded, case, stage) for case in cases]


def named(error: str) -> bool:
    """Whether an error names the parameter, and what to do."""
    kinds = ("RuntimeError: ", "InternalTorchDynamoError: RuntimeError: ")
    return (
        error.startswith(kinds)
        and "blocks." in error
        and ("gathered" in error or "clone()" in error)
    )


def compare(case: Case, stage: int, got: Any) -> str:
    """Returns what is wrong with an outcome, if anything."""
    results, weights = got
    refused = [result for result in results if isinstance(result, str)]
    if any(not named(error) for error in refused):
        return f"{case} stage {stage}: {refused}"
    if refused and stage < 3:
        return f"{case} stage {stage} refused: {refused}"
    values, expected = want(case, bool(refused))
    if not refused and not all(
        math.isclose(a, b, rel_tol=1e-9) for a, b in zip(results, values, strict=True)
    ):
        return f"{case} stage {stage}: {results}, right: {values}"
    for name in weights:
        off = float((weights[name] - expected[name]).abs().max())
        if not off < 1e-9:
            return f"{case} stage {stage}: {name} is off by {off:.2g}, result {results}"
    return ""


def check(cases: list[Case], stage: int) -> None:
    got = run_ranks(2, run_all, cases, stage, timeout=600)[0]
    wrong = [
        text for case, one in zip(cases, got, strict=True) if (text := compare(case, stage, one))
    ]
    assert not wrong, "\n".join(wrong)


# What changes a parameter between its forward and its backward is an error of plain PyTorch's.
CHANGES = ("view, changed", "in place")
# Memory that is handed out to other libraries shows what was there then; no object is left that could be asked.
FOREIGN = ("numpy", "dlpack")
EVERYTHING = [
    Case(action, moment, variant)
    for action, moment, variant in itertools.product(ACTIONS, MOMENTS, VARIANTS)
    if not (action in CHANGES and moment == "after")
    and not (action in FOREIGN and moment == "outdated")
]


# torch.func and torch.vmap do not call `__torch_function__`.
TRANSFORMS = [
    Case(action, moment, "plain")
    for action, moment in itertools.product(
        ("grad", "grad of a view", "vmap"), ("before", "kept", "outdated")
    )
]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.grid), 2, 3])
def test_uses_of_parameters(stage: int) -> None:
    """Every action; a fifth of a third of all cases and the transforms under stage 3, and an eighth of a third under
    each other, where parameters are whole."""
    in_turns = [case for n, case in enumerate(EVERYTHING) if (n // 3 + n // 18 + n) % 3 == 0]
    below = {case.action for first in range(3) for case in in_turns[first::8]}
    assert below == {case.action for case in in_turns[::5]} == {*ACTIONS}
    check([*in_turns[::5], *TRANSFORMS] if stage == 3 else in_turns[stage::8], stage)


@pytest.mark.grid
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_uses_of_parameters(stage: int) -> None:
    check(EVERYTHING, stage)


# ------------------------------------------------------------------------------------------- references and contexts


class Holder:
    """A helper that is no module, and keeps a parameter."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Scaled(torch.autograd.Function):
    """x w, with a view of the weight in its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.turned = weight.t()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        return dy @ ctx.turned, x.t() @ dy


def penalty(module: Any, x: Tensor) -> Tensor:
    """The square of a gradient, by torch.func: no hooks on saved tensors are allowed there."""
    gradient = torch.func.grad(lambda row: module.blocks[2](module.blocks[1](row).tanh()).sum())(x)
    return gradient.square().mean()


def tangent(module: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda v: module.blocks[1](v).tanh(), (x,), (torch.ones_like(x),))[
        1
    ].mean()


def on_host(module: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x @ module.blocks[1].weight).tanh().mean()


def recomputed(module: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(
        lambda v: (v @ module.blocks[1].weight).tanh(), x, use_reentrant=False
    ).mean()


Term = Callable[[Any, Tensor], Tensor]


def captured(module: Any) -> Term:
    weight = module.blocks[1].weight
    return lambda _, x: (x @ weight).mean()


def partial(module: Any) -> Term:
    bound = functools.partial(F.linear, weight=module.blocks[0].weight)
    return lambda _, x: bound(x).mean()


def helped(module: Any) -> Term:
    helper = Holder(module.blocks[2].weight)
    return lambda _, x: helper(x).mean()


def listed(module: Any) -> Term:
    weights = {"all": [list(module.parameters())[::2]]}
    return lambda _, x: torch.stack([(x @ weight).mean() for weight in weights["all"][0]]).sum()


def in_a_function(module: Any) -> Term:
    weight = module.blocks[1].weight
    return lambda _, x: Scaled.apply(x, weight).tanh().mean()


EXTRAS: dict[str, Callable[[Any], Term]] = {
    "closure": captured, "partial": partial, "helper": helped, "list": listed, "function": in_a_function,
    "penalty": lambda _: penalty, "tangent": lambda _: tangent, "on host": lambda _: on_host,
    "recomputed": lambda _: recomputed,
}  # fmt: skip


class Extra(Net):
    """Adds a term that uses parameters in another way; from the second step on, or always."""

    def __init__(self, extra: str, later: bool) -> None:
        super().__init__("plain")
        self.extra, self.calls, self.later = EXTRAS[extra](self), 0, later

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(x, y)
        return loss + self.extra(self, x) if self.calls > 1 or not self.later else loss


def train_extra(
    kind: type[Plain] | type[Sharded], extra: str, later: bool, stage: int
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trainer = kind(Extra(extra, later).double(), stage)
    for step in range(STEPS):
        trainer.backward(trainer.forward(step))
    return trainer.weights()


def train_extras(cases: list[tuple[str, bool, int]]) -> list[dict[str, Tensor]]:
    return [train_extra(Sharded, *case) for case in cases]


EVERY_EXTRA = [
    (extra, later, stage) for extra in EXTRAS for later in (False, True) for stage in (1, 3)
]
# under stage 1, where parameters are whole, a half of them
SOME_EXTRAS = [
    case
    for case in EVERY_EXTRA
    if case[2] == 3 or case[1] == (list(EXTRAS).index(case[0]) % 2 == 0)
]


@pytest.mark.parametrize(
    "cases",
    [SOME_EXTRAS, pytest.param(EVERY_EXTRA, marks=pytest.mark.grid)],
    ids=["some", "all"],
)
def test_parameters_that_others_refer_to(cases: list[tuple[str, bool, int]]) -> None:
    for case, got in zip(cases, run_ranks(2, train_extras, cases, timeout=300)[0], strict=True):
        for name, right in train_extra(Plain, *case).items():
            torch.testing.assert_close(
                got[name], right, rtol=0, atol=1e-9, msg=lambda m, c=case, n=name: f"{c} {n} {m}"
            )


def train_transformed_from_a_drive(folder: str) -> list[dict[str, Tensor]]:
    drive = functools.partial(Sharded, offload_params="nvme", nvme_path=folder)
    return [train_extra(drive, extra, False, 3) for extra in TRANSFORMED]  # type: ignore[arg-type]


TRANSFORMED = ("penalty", "tangent")


def test_parameters_of_a_transformed_function_are_read_from_a_drive(tmp_path: Path) -> None:
    """Reads that start in a torch.func transform need ordinary buffers, too."""
    found = run_ranks(1, train_transformed_from_a_drive, str(tmp_path))[0]
    for extra, got in zip(TRANSFORMED, found, strict=True):
        for name, right in train_extra(Plain, extra, False, 3).items():
            torch.testing.assert_close(got[name], right, rtol=0, atol=1e-9)


def check_contexts() -> None:
    """What autograd has saved of a sharded parameter is not readable outside of the backward either."""
    trainer, x = Sharded(made("plain"), 3), torch.zeros(1)
    nodes, values = [trainer.forward(0).grad_fn], []
    while nodes:
        node = nodes.pop()
        nodes += [following for following, _ in node.next_functions if following is not None]
        for name in ("_saved_mat1", "_saved_mat2", "_saved_self"):
            if hasattr(type(node), name):  # None if it was not needed
                values.append(
                    outcome(
                        lambda n=node, a=name: (
                            getattr(n, a) if getattr(n, a) is not None else x
                        ).sum()
                    )
                )  # type: ignore[misc]
    assert any(isinstance(value, str) for value in values)
    assert all(
        named(value) if isinstance(value, str) else not math.isnan(value) for value in values
    )


def check_refusals() -> None:
    trainer = Sharded(made("plain"), 3)
    trainer.backward(trainer.forward(0))
    module = trainer.module
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.weight is sharded.*engine\.gathered.*full_state_dict"
    ):
        module.state_dict()
    part = module.blocks[0].state_dict()  # peft reads the names of a part
    assert {name: value.shape for name, value in part.items()} == {
        name: param.shape for name, param in module.blocks[0].named_parameters()
    }
    assert not any(value.requires_grad for value in part.values())
    with pytest.raises(RuntimeError, match=r"blocks\.0\.weight is sharded.*when this tensor"):
        unpickled(part)
    with trainer.gathered(), pytest.raises(RuntimeError, match=r"when this tensor was created"):
        part["weight"].sum()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.weight is sharded"):
        module.to(torch.float32)
    with trainer.gathered(), torch.no_grad():
        kept = module.blocks[1].weight.detach()
    with pytest.raises(RuntimeError, match=r"shares memory with blocks\.1\.weight.*clone"):
        kept.zero_()
    right = trainer.weights()
    refused = pytest.raises(
        RuntimeError, match=r"blocks\.2\.weight was set to values of shape \[7, 6\] and"
    )
    with refused, trainer.gathered():
        module.blocks[2].weight.data = torch.zeros(WIDTH + 1, WIDTH, dtype=torch.float64)  # type: ignore[union-attr]
    assert all(torch.equal(right[name], value) for name, value in trainer.weights().items())
    refused = pytest.raises(
        RuntimeError, match=r"blocks\.2\.bias was set to values of shape \[6\] and torch\.float32"
    )
    with refused, trainer.gathered():
        module.to(torch.float32)
    trainer.backward(trainer.forward(1))


def test_contexts_and_refusals() -> None:
    run_ranks(2, check_contexts)
    run_ranks(2, check_refusals)


class Hooked(Net):
    """Attributes and hooks of parameters, put there after the engine; pre-hooks of the root, put there before it."""


def masked(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        for param in module.parameters():
            if param.dim() > 1:
                param.mul_((torch.arange(param.shape[1]) % 2 == 0).to(param.dtype))


def train_hooked(kind: type[Plain] | type[Sharded], stage: int) -> dict[str, Tensor]:
    module = made("plain")
    module.register_forward_pre_hook(masked)
    trainer = kind(module, stage)
    weight: Any = module.blocks[1].weight
    weight.register_hook(lambda grad: grad * 0.5)
    weight.tag = 7
    sums: list[float] = []
    module.register_forward_hook(lambda module, args, out: out + weight.square().sum())
    for step in range(STEPS):
        trainer.backward(trainer.forward(step))
    with trainer.gathered():
        sums.append(float(weight.sum()))
    assert weight.tag == 7
    assert module.blocks[1].weight is weight
    return trainer.weights()


def test_hooks_and_attributes() -> None:
    right = train_hooked(Plain, 0)
    for stage in range(4):
        for name, got in run_ranks(2, train_hooked, Sharded, stage)[0].items():
            torch.testing.assert_close(got, right[name], rtol=0, atol=1e-9)


def train_compiled(stage: int, how: str, backend: str) -> dict[str, Tensor]:
    module: Any = made("plain")
    if how == "before":
        module = torch.compile(module, backend=backend)
    if how == "blocks":
        for n, block in enumerate(module.blocks):
            module.blocks[n] = torch.compile(block, backend=backend)
    trainer = Sharded(module, stage)
    if how == "after":
        module.compile(backend=backend)
    for step in range(STEPS):
        trainer.backward(trainer.forward(step))
    return {name.replace("_orig_mod.", ""): value for name, value in trainer.weights().items()}


def train_all_compiled(cases: list[tuple[int, str, str]]) -> list[dict[str, Tensor]]:
    return [train_compiled(*case) for case in cases]


COMPILED = [(3, how, "eager") for how in ("before", "after", "blocks")]
COMPILED += [(1, "after", "eager")]
FURTHER = [(1, "before", "eager"), (1, "blocks", "eager")]
# tests/pipeline/test_compile.py has inductor daily
FURTHER += [(3, how, "inductor") for how in ("blocks", "after")] + [(1, "blocks", "inductor")]


@pytest.mark.parametrize(
    "cases", [COMPILED, pytest.param(FURTHER, marks=pytest.mark.grid)], ids=["some", "others"]
)
def test_compiled_modules(cases: list[tuple[int, str, str]]) -> None:
    """torch.compile before and after the engine, of all and of blocks."""
    trainer = Plain(made("plain"), 0)
    for step in range(STEPS):
        trainer.backward(trainer.forward(step))
    for case, got in zip(
        cases, run_ranks(2, train_all_compiled, cases, timeout=400)[0], strict=True
    ):
        for name, right in trainer.weights().items():
            torch.testing.assert_close(
                got[name], right, rtol=0, atol=1e-9, msg=lambda m, c=case: f"{c} {m}"
            )
