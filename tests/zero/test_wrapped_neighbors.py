"""Wrapped modules whose program changes them, computes or fails in less usual ways: the values of plain PyTorch, or an
error that names the parameter, under every stage."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.harness import run_ranks
from tests.zero.test_wrapped_access import WIDTH, Net, Plain, Sharded
from threed.models import Wrapped

Trainer = Plain | Sharded


class Extended(Net):
    """Adds a term to the loss."""

    def __init__(self, term: Callable[[Any, Tensor], Tensor] | None) -> None:
        super().__init__("plain")
        self.term = term

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss if self.term is None else loss + self.term(self, x)


def made(term: Callable[[Any, Tensor], Tensor] | None = None) -> Any:
    torch.manual_seed(0)
    return Extended(term).double()


def step(trainer: Any, number: int) -> None:
    trainer.backward(trainer.forward(number))


# -------------------------------------------------------------------------------------------------------------- right


def selective(module: Any, x: Tensor) -> Tensor:
    """Selective checkpointing compares the operations of the recomputation with those of the forward."""
    saved = [torch.ops.aten.addmm.default]
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        lambda _, op, *a, **k: (
            CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    )
    run = lambda v: module.blocks[2](module.blocks[1](v).tanh())  # noqa: E731
    return checkpoint(run, x, use_reentrant=False, context_fn=contexts).square().mean()


@torch.compile(backend="eager", fullgraph=True)
def whole(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh()


def compiled(module: Any, x: Tensor) -> Tensor:
    return whole(x, module.blocks[1].weight).mean()


def train_with(
    term: Callable[[Any, Tensor], Tensor], kind: type[Trainer], stage: int
) -> dict[str, Tensor]:
    trainer = kind(made(term), stage)
    for number in range(3):
        step(trainer, number)
    return trainer.weights()


def interrupted(kind: type[Trainer], stage: int) -> dict[str, Tensor]:
    """An interrupt leaves no forward open, for which later gathers would be held."""
    trainer: Any = kind(made(), stage)
    step(trainer, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    block = trainer.module.blocks[1]
    for register in (
        block.register_forward_hook, block.register_forward_pre_hook, block.register_full_backward_hook,
        block.weight.register_hook,
    ):  # fmt: skip
        handle = register(interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(trainer, 1)
        handle.remove()
    step(trainer, 1)
    return trainer.weights()


def in_gathered(kind: type[Trainer], stage: int) -> dict[str, Tensor]:
    """gathered() in gathered(), in the forward, and around a step."""
    trainer: Any = kind(made(), stage)
    step(trainer, 0)
    with trainer.gathered(), torch.no_grad():
        with trainer.gathered():
            trainer.module.blocks[1].weight.mul_(0.5)
        trainer.module.blocks[1].weight.add_(0.1)
    with trainer.gathered():
        step(trainer, 1)

    def term(module: Any, x: Tensor) -> Tensor:
        with trainer.gathered():
            return module.blocks[1].weight.square().mean()

    trainer.module.term = term
    step(trainer, 2)
    return trainer.weights()


def gradients_of_weights(kind: type[Trainer], stage: int) -> dict[str, Tensor]:
    """torch.autograd.grad for parameters, between the forward and the backward; values set by `set_`."""
    trainer: Any = kind(made(), stage)
    step(trainer, 0)
    loss, blocks = trainer.forward(1), trainer.module.blocks
    found = torch.autograd.grad(loss, [blocks[0].weight, blocks[2].bias], retain_graph=True)
    assert [grad.shape for grad in found] == [(WIDTH, WIDTH), (WIDTH,)]
    trainer.backward(loss)
    with trainer.gathered(), torch.no_grad():
        blocks[1].weight.set_(torch.eye(WIDTH, dtype=torch.float64))
        blocks[2].weight.as_subclass(Tensor).mul_(0.5)
    step(trainer, 2)
    return trainer.weights()


def thawed(kind: type[Trainer], stage: int) -> dict[str, Tensor]:
    """Frozen before its first use, and trained later."""
    trainer: Any = kind(made(), stage)
    trainer.module.blocks[1].requires_grad_(False)
    step(trainer, 0)
    trainer.module.blocks[1].requires_grad_(True)
    step(trainer, 1)
    return trainer.weights()


RIGHT: dict[str, Callable[[type[Trainer], int], dict[str, Tensor]]] = {
    "selective checkpointing": functools.partial(train_with, selective),
    "fullgraph": functools.partial(train_with, compiled),
    "interrupted": interrupted,
    "gathered": in_gathered,
    "gradients": gradients_of_weights,
    "thawed": thawed,
}


def train_all(stage: int) -> dict[str, dict[str, Tensor]]:
    return {
        name: run(Sharded, stage)
        for name, run in RIGHT.items()
        if (name, stage) != ("fullgraph", 3)
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_values_of_plain_pytorch(stage: int) -> None:
    for name, weights in run_ranks(2, train_all, stage, timeout=240)[0].items():
        for key, right in RIGHT[name](Plain, 0).items():
            torch.testing.assert_close(
                weights[key], right, rtol=0, atol=1e-9, msg=lambda m, n=f"{name}, {key}": f"{n} {m}"
            )


# ------------------------------------------------------------------------------------------------------------ refused


def add(trainer: Any) -> None:
    trainer.module.late = nn.Linear(2, 2)


def freeze(trainer: Any) -> None:
    trainer.module.blocks[1].weight.requires_grad_(False)


def unfreeze(trainer: Any) -> None:
    trainer.module.blocks[0].weight.requires_grad_(True)


def remove(trainer: Any) -> None:
    trainer.module.blocks[2] = nn.Identity()


def exchange(trainer: Any) -> None:
    zeros = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    torch.utils.swap_tensors(trainer.module.blocks[1].weight, zeros)


def duplicate(trainer: Any) -> None:
    copy.deepcopy(trainer.engine)


def set_storage(trainer: Any) -> None:
    with torch.no_grad():
        trainer.module.blocks[1].weight.set_(torch.zeros(1, dtype=torch.float64))


def use_plain(trainer: Any) -> None:
    trainer.module.blocks[1].weight.as_subclass(Tensor).sum()


def compile_whole(trainer: Any) -> None:
    trainer.module.term = compiled


EVERY, SHARDED = (0, 1, 2, 3), (3,)
REFUSED: dict[str, tuple[Callable[[Any], None], str, tuple[int, ...]]] = {
    "add": (
        add,
        r"late\.weight was added to the module after the engine was built.*build a new engine",
        EVERY,
    ),
    "freeze": (freeze, r"blocks\.1\.weight was frozen.*set requires_grad back", EVERY),
    "unfreeze": (unfreeze, r"blocks\.0\.weight was unfrozen.*would not be trained", EVERY),
    "remove": (
        remove,
        r"blocks\.2\.(weight|bias) was replaced by another parameter, or removed",
        EVERY,
    ),
    "exchange": (
        exchange,
        r"\[6, 6\] was exchanged|blocks\.1\.weight.*was added to the module",
        EVERY,
    ),
    "duplicate": (
        duplicate,
        r"an Engine, which contains one, cannot be copied or pickled.*engine\.save",
        EVERY,
    ),
    "set": (set_storage, r"blocks\.1\.weight is sharded", SHARDED),
    "as a plain tensor": (use_plain, r"blocks\.1\.weight is sharded", SHARDED),
    "fullgraph": (compile_whole, r"gathered here.*without fullgraph=True", SHARDED),
}


def refusal(name: str, stage: int) -> str:
    module = made()
    module.blocks[0].weight.requires_grad_(False)
    trainer = Sharded(module, stage)
    step(trainer, 0)
    try:
        REFUSED[name][0](trainer)
        step(trainer, 1)
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "not refused"


def refusals(stage: int) -> dict[str, str]:
    return {
        name: refusal(name, stage) for name, (_, _, stages) in REFUSED.items() if stage in stages
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_would_be_lost_is_refused_by_name_on_every_rank(stage: int) -> None:
    for said in run_ranks(2, refusals, stage, timeout=120):
        assert all(re.search(REFUSED[name][1], text, re.DOTALL) for name, text in said.items()), (
            said
        )


def test_scripted_modules_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"^1: compiled by torch\.jit.*before torch\.jit\.script"):
        Wrapped(module)
