"""Generates text with a model in training: one token per forward, through the training pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.engine import Engine, LayeredEngine, ModuleEngine
from threed.models import TokenModule


class NotFiniteError(RuntimeError):
    """Raised on every rank if the logits are not finite, so that no token can be sampled."""


class NoLogitsError(RuntimeError):
    """Raised on every rank if the model is a module that cannot return logits for token ids."""


def generate(
    engine: Engine, prompt: list[int], count: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Continues a prompt. Collective; returns the same tokens on every rank.

    The input of every forward has the model's sequence length, so all forwards have the same shape.
    A shorter text is padded on the right; causal attention does not see the padding. Of a longer
    text, only the last tokens are used.

    Args:
        engine: engine with the model.
        prompt: token ids, at least one.
        count: number of tokens to generate.
        temperature: divisor of the logits.
        seed: seed of the sampling.

    Returns:
        Token ids of the prompt and the continuation.

    Raises:
        NotFiniteError: if the logits are not finite.
        NoLogitsError: if the model is a module that does not read token ids, or that returns no
            logits when it is called without labels.
    """
    length, device = engine.config.model.seq, engine.topology.device
    draw = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        window = ids[-length:]
        tokens = torch.tensor([window + [0] * (length - len(window))], device=device)
        token = _next(engine, tokens, len(window) - 1, temperature, draw)
        if token < 0:
            raise NotFiniteError("the model's logits are not finite (NaN or infinite)")
        ids.append(token)
    return ids


def _logits(engine: Engine, tokens: Tensor) -> Tensor | None:
    """Returns logits on the last stage, and None on other stages. Collective.

    Args:
        engine: engine with the model.
        tokens: token ids [batch, seq].

    Returns:
        This tensor rank's shard of the logits, [batch, seq, vocab / tensor ranks].
    """
    if isinstance(engine, LayeredEngine):
        return engine.logits(tokens)
    model = engine.model
    if not isinstance(engine, ModuleEngine) or not isinstance(model, TokenModule):
        raise NoLogitsError("the model does not read token ids")
    if not model.gives_logits:
        raise NoLogitsError(f"{model.title} returns no logits without labels")
    with engine.evaluating(), engine.inference():
        return model.logits(tokens)


def _next(
    engine: Engine, tokens: Tensor, position: int, temperature: float, draw: torch.Generator
) -> int:
    """Samples the next token on the last stage and broadcasts it to the other stages. Returns the
    token, or -1 if the logits are not finite."""
    logits = _logits(engine, tokens)
    chosen = torch.zeros(1, dtype=torch.int64, device=tokens.device)
    if logits is not None:
        scores = _gather(engine, logits[0, position]).cpu().double() / temperature
        shares = torch.softmax(scores, 0)
        finite = bool(shares.isfinite().all())
        chosen += int(torch.multinomial(shares, 1, generator=draw)) if finite else -1
    pp, last = engine.topology.axis("pp"), engine.blueprint.pipeline.layout.ends[0]
    return int(collectives.broadcast(chosen, pp, last))


def _gather(engine: Engine, shard: Tensor) -> Tensor:
    """Gathers logits [vocab] from all tensor ranks. The sizes of their shards may differ by one."""
    axis, vocab = engine.topology.axis("tp"), engine.config.model.vocab or 0
    widths = [b - a for a, b in (collectives.split(vocab, axis.size, i) for i in range(axis.size))]
    padded = shard.new_zeros(max(widths))
    padded[: shard.numel()] = shard
    rows = collectives.all_gather(padded, axis).view(axis.size, -1)
    return torch.cat([row[:n] for row, n in zip(rows, widths, strict=True)])
