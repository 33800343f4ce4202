"""Modules of transformers that a program has changed: they train as what they are, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import threed
from tests.hf_decoders import batch, casts, config_of, make, randomized, train
from threed.config import ConfigError
from threed.interop.huggingface.changes import find_changes
from threed.interop.huggingface.planned import PlannedDecoder

Change = Callable[[Any], None]


def linear(old: nn.Linear, bias: bool) -> nn.Linear:
    """Returns a linear layer with the weight of `old`."""
    new = nn.Linear(old.in_features, old.out_features, bias, dtype=torch.float64)
    new.weight.data.copy_(old.weight)
    return new


def bias(m: Any) -> None:
    m.model.layers[0].self_attn.q_proj = linear(m.model.layers[0].self_attn.q_proj, True)


def bias_of_head(m: Any) -> None:
    m.lm_head = linear(m.lm_head, True)


def tied(m: Any) -> None:
    m.lm_head.weight = m.model.embed_tokens.weight


def more_rows(m: Any) -> None:
    hidden = m.config.hidden_size
    m.model.embed_tokens = nn.Embedding(m.config.vocab_size + 9, hidden, dtype=torch.float64)
    m.lm_head = nn.Linear(hidden, m.config.vocab_size + 9, bias=False, dtype=torch.float64)


def another_norm(m: Any) -> None:
    m.model.norm = nn.LayerNorm(m.config.hidden_size, bias=False, dtype=torch.float64)


def activation(m: Any) -> None:
    m.model.layers[0].mlp.act_fn = nn.ReLU()


def scaling(m: Any) -> None:
    m.model.layers[1].self_attn.scaling = 0.9


def epsilon(m: Any) -> None:
    m.model.norm.variance_epsilon = 0.5


def frequencies(m: Any) -> None:
    m.model.rotary_emb.inv_freq = m.model.rotary_emb.inv_freq * 0.5


CHANGES: list[tuple[Change, str]] = [
    (bias, r"describes no parameter model\.layers\.0\.self_attn\.q_proj\.bias"),
    (bias_of_head, r"describes no parameter lm_head\.bias"),
    (tied, r"model\.embed_tokens\.weight, lm_head\.weight are one parameter"),
    (more_rows, r"model\.embed_tokens\.weight has shape \[70, 32\], but \[61, 32\]"),
    (another_norm, r"model\.norm is a LayerNorm, but a LlamaRMSNorm by its configuration"),
    (activation, r"model\.layers\.0\.mlp\.act_fn is a ReLU, but a SiLUActivation"),
    (scaling, r"model\.layers\.1\.self_attn\.scaling is 0\.9, but 0\.35"),
    (epsilon, r"model\.norm\.variance_epsilon is 0\.5, but 1e-0"),
    (frequencies, r"model\.rotary_emb\.inv_freq does not follow from its configuration"),
]


def changed(change: Change) -> Any:
    module = randomized(make("llama", torch.float64))
    change(module)
    return module


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_a_changed_module_is_sliced_as_it_is(change: Change, text: str) -> None:
    module = changed(change)
    with pytest.raises(ConfigError, match=text):
        threed.from_transformers(module, plan=False)
    plain, topology = copy.deepcopy(module), threed.Topology()
    with casts(torch.float64):
        model = threed.from_transformers(module)
        assert isinstance(model, PlannedDecoder)
        engine = threed.Engine(model, topology, config_of(model, torch.float64, topology))
        loss = train(engine, torch.float64).losses[0]
        data = batch(0)
        logits = plain.train()(input_ids=data["tokens"]).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
    assert loss == pytest.approx(expected.item(), abs=1e-9)


def test_an_own_head_of_a_tied_configuration_is_kept() -> None:
    module = randomized(make("llama", torch.float64, tie_word_embeddings=True))
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().flip(0).clone())
    with pytest.raises(ConfigError, match=r"describes no parameter lm_head\.weight"):
        threed.from_transformers(module, plan=False)
    assert isinstance(threed.from_transformers(module), PlannedDecoder)


@pytest.mark.parametrize("plan", [None, True, False])
def test_a_layer_that_is_used_twice_is_refused(plan: bool | None) -> None:
    module = make("llama", torch.float64)
    module.model.layers[1] = module.model.layers[0]
    with pytest.raises(
        ConfigError, match=r"layers\.1\.self_attn\.q_proj\.weight are one parameter"
    ):
        threed.from_transformers(module, plan=plan)


class Doubled(hf.LlamaForCausalLM):
    """A model with a forward of its own."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return super().forward(*args, **keywords)


class Named(hf.LlamaForCausalLM):
    """A model with the forward of transformers."""

    def describe(self) -> str:
        return "a model"


class Needy(hf.LlamaForCausalLM):
    """A model whose constructor has another argument."""

    def __init__(self, config: Any, more: int) -> None:
        super().__init__(config)
        self.more = more


def test_code_of_the_program() -> None:
    module = make("llama")
    assert list(find_changes(module)) == []
    module.model.layers[0].register_forward_hook(lambda *_: None)
    module.model.norm.forward = lambda x: x
    found = [
        "model.layers.0 has forward hooks",
        "model.norm has a forward of its own (LlamaRMSNorm)",
    ]
    assert list(find_changes(module)) == found
    config = make("llama").config
    assert list(find_changes(Named(config))) == []
    (needy,) = find_changes(Needy(config, 1))
    assert needy.startswith("a Needy cannot be created from its configuration (")
    assert list(find_changes(Doubled(config))) == ["Doubled has a forward of its own (Doubled)"]


def test_what_programs_set_later_is_allowed() -> None:
    module = make("llama").eval()
    module.config.pad_token_id = 0
    module.config.use_cache = False
    module.gradient_checkpointing_enable()
    module.to(torch.bfloat16)
    assert list(find_changes(module)) == []
