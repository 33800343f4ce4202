"""Text from a model in training: one token at a time through the same pipeline, by forward-only plans."""

from __future__ import annotations

import torch
from torch import Tensor

from threed import collectives
from threed.engine import LayeredEngine


class NotFiniteError(RuntimeError):
    """A model whose next token cannot be drawn; the same on every rank."""


def generate(
    engine: LayeredEngine, prompt: list[int], count: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """`prompt` (at least one token id) continued by `count` tokens. Collective; the same on every rank.

    The context is the model's sequence length, filled up on the right: causal attention does not see the filling, and
    every forward has one shape. Past that length the window slides. NotFiniteError where the logits are not finite.
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


def _next(
    engine: LayeredEngine, tokens: Tensor, position: int, temperature: float, draw: torch.Generator
) -> int:
    """The next token: drawn where the model ends, told to the others; -1 where none can be drawn."""
    logits = engine.logits(tokens)
    chosen = torch.zeros(1, dtype=torch.int64, device=tokens.device)
    if logits is not None:
        scores = _whole(engine, logits[0, position]).cpu().double() / temperature
        shares = torch.softmax(scores, 0)
        finite = bool(shares.isfinite().all())
        chosen += int(torch.multinomial(shares, 1, generator=draw)) if finite else -1
    pp, last = engine.topology.axis("pp"), engine.blueprint.pipeline.cut.ends[0]
    return int(collectives.broadcast(chosen, pp, last))


def _whole(engine: LayeredEngine, shard: Tensor) -> Tensor:
    """Logits of the whole vocabulary [v] from this rank's [v/t]; shards may differ by one, so they travel padded."""
    axis, vocab = engine.topology.axis("tp"), engine.config.model.vocab or 0
    widths = [b - a for a, b in (collectives.split(vocab, axis.size, i) for i in range(axis.size))]
    padded = shard.new_zeros(max(widths))
    padded[: shard.numel()] = shard
    rows = collectives.all_gather(padded, axis).view(axis.size, -1)
    return torch.cat([row[:n] for row, n in zip(rows, widths, strict=True)])
