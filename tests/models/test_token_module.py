"""`TokenModule`: the loss of a module that returns logits or a loss, and what it refuses."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from threed.layers import MicroBatch, Slicing
from threed.models import TokenModule, for_tokens
from threed.models.custom import ForwardError

VOCAB = 11
TOKENS = torch.arange(12).remainder(VOCAB).view(2, 6)
LABELS = TOKENS.roll(-1, 1).clone().index_fill_(1, torch.tensor(5), -7)


class Logits(nn.Module):
    """Returns logits in the form that `form` makes of them."""

    def __init__(self, form: Any = lambda logits: logits, width: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.form = nn.Embedding(VOCAB, 8), form
        self.head = nn.Linear(8, width)

    def forward(self, ids: Tensor) -> Any:
        return self.form(self.head(self.embedding(ids)))


class Loss(Logits):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.head(self.embedding(ids)).flatten(0, 1)
        assert labels is not None
        kept = labels.flatten() >= 0
        return self.form(nn.functional.cross_entropy(logits[kept], labels.flatten()[kept]))


class GPTLMHeadModel(Loss):
    """Like a causal model of transformers: it would shift the labels again."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        assert labels is None
        return {"logits": self.head(self.embedding(ids))}


def micro(weight: float = 0.1) -> MicroBatch:
    inputs = {"tokens": TOKENS, "labels": LABELS, "samples": torch.arange(2)}
    return MicroBatch(weight=torch.tensor(weight, dtype=torch.float64), inputs=inputs)


@pytest.mark.parametrize(
    "module",
    [
        Logits(),
        Logits(lambda logits: {"logits": logits}),
        Logits(lambda logits: SimpleNamespace(logits=logits)),
        Logits(lambda logits: (logits, None)),
        Logits(width=VOCAB),
        Loss(),
        Loss(lambda loss: {"loss": loss}),
        GPTLMHeadModel(),
    ],
)
def test_the_loss_is_the_weighted_mean_over_valid_labels(module: nn.Module) -> None:
    plain = Logits()
    kept = LABELS >= 0
    want = nn.functional.cross_entropy(plain(TOKENS)[kept], LABELS[kept])
    wrapped = TokenModule(module, VOCAB)
    assert wrapped(None, micro()).item() == pytest.approx(0.1 * want.item(), rel=1e-6)  # fp32
    assert int(wrapped.count({"tokens": TOKENS, "labels": LABELS})) == int(kept.sum())
    assert dict(wrapped.module.named_parameters()).keys() == dict(plain.named_parameters()).keys()


class TwoInputs(Logits):
    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(target)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (TwoInputs(), r"forward\(source: .*missing a required argument: 'target'; its forward must take token ids"),
        (Logits(lambda logits: logits.mean(1)), r"returned \(2, 11\) for token ids \(2, 6\): its forward must"),
        (Logits(lambda logits: [logits]), "returned list for token ids"),
        (Logits(width=7), r"logits of 7 token ids, the data have 11: use the number `config.vocab`"),
        (Loss(lambda loss: loss.expand(2)), r"a tensor of shape \(2,\)"),
    ],
)  # fmt: skip
def test_another_forward_is_refused(module: nn.Module, problem: str) -> None:
    with pytest.raises(ForwardError, match=problem):
        TokenModule(module, VOCAB)(None, micro())


class Features(nn.Linear):
    """A module of feature vectors, which fails with token ids."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_an_error_in_the_first_forward_states_what_the_module_gets() -> None:
    problem = (
        r"Features failed with token ids \(2, 6\): RuntimeError: .*dtype.* \(test_token_module.py, line \d+\);"
        r" its forward must .* threed\.Engine"
    )
    with pytest.raises(ForwardError, match=problem) as refused:
        TokenModule(Features(4, 2), VOCAB)(None, micro())
    assert isinstance(refused.value.__cause__, RuntimeError)
    for error in (MemoryError("none left"), torch.OutOfMemoryError("none left")):
        with pytest.raises(type(error), match=r"^none left$"):
            TokenModule(Logits(partial(fails, error)), VOCAB)(None, micro())
    model, module = None, Logits()
    model = TokenModule(module, VOCAB)
    model(None, micro())
    with pytest.raises(IndexError) as failed:
        model.logits(TOKENS + 1000)
    assert not isinstance(failed.value, ForwardError)  # its forward has already succeeded


def fails(error: Exception, logits: Tensor) -> Tensor:
    raise error


def test_an_object_that_is_no_model_is_refused_with_what_it_lacks() -> None:
    class Layers(nn.Module):
        hidden = 8

        def layers(self) -> list[nn.Module]:
            return []

    for model, problem in (
        (object(), "returned a object without `layers`, `hidden`, `slicing`"),
        (Layers(), "returned a Layers without `slicing`"),
    ):
        with pytest.raises(ValueError, match=problem):
            for_tokens(model, VOCAB, "mine.py:build")
    layered = SimpleNamespace(layers=list, hidden=8, slicing=Slicing())
    assert for_tokens(layered, VOCAB, "mine.py:build") is layered  # type: ignore[comparison-overlap]
