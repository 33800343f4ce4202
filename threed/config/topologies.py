"""Chooses the parallel sizes for a number of ranks if the configuration gives none."""

from __future__ import annotations

from threed.config.checks import around, find_problems
from threed.config.groups import Config
from threed.core.source import names_model


def choose_sizes(config: Config, ranks: int) -> Config:
    """Returns the configuration with as many data-parallel ranks as the batch allows.

    `parallel.pp` becomes the number of ranks divided by the number of data-parallel ranks. The
    configuration is unchanged if it gives a parallel size, or if it has problems with the chosen
    sizes. It is also unchanged under ZeRO-3, which would have fewer ranks to shard over, and for
    custom models, whose number of layers is not known.

    Args:
        config: configuration as loaded.
        ranks: number of ranks.
    """
    p, batch, step = config.parallel, config.train.global_batch, config.train.micro_batch
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0 and batch % (step * n) == 0]
    given = (p.tp, p.pp, p.cp, p.dp) != (1, 1, 1, None)
    if given or not divisors or config.zero.stage == 3 or names_model(config.model.arch):
        return config
    sizes = p.model_copy(update={"pp": ranks // max(divisors)})
    chosen = config.model_copy(update={"parallel": sizes})
    return config if find_problems(chosen, ranks) else chosen


def explain_sizes(config: Config, ranks: int) -> str:
    """Returns a line with the reason for the result of `choose_sizes`; "" if it has one stage."""
    pp, batch, step = config.parallel.pp, config.train.global_batch, config.train.micro_batch
    if pp == 1:
        return ""
    why = (
        f"--train.global-batch {batch} is not divisible by --train.micro-batch {step} × dp {ranks}"
    )
    near = around(batch, step * ranks)
    return f"topology   pp {pp} × dp {ranks // pp} is chosen: {why}; for dp {ranks} use --train.global-batch {near}"
