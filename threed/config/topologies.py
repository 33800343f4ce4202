"""Chooses the parallel sizes for a number of ranks if the configuration gives none."""

from __future__ import annotations

from threed.config.checks import around, find_problems
from threed.config.groups import Config
from threed.core.source import names_model


def choose_sizes(config: Config, ranks: int) -> tuple[Config, str]:
    """Returns the configuration with as many data-parallel ranks as the batch allows.

    `parallel.pp` becomes the number of ranks divided by the number of data-parallel ranks. The
    configuration is unchanged if it gives a parallel size, or if it has problems with the chosen
    sizes. It is also unchanged under ZeRO-3, which would have fewer ranks to shard over, and for
    custom models, whose number of layers is not known.

    Args:
        config: configuration as loaded.
        ranks: number of ranks.

    Returns:
        The configuration, and a line with the reason for its sizes; "" if it is unchanged.
    """
    p, batch, step = config.parallel, config.train.global_batch, config.train.micro_batch
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0 and batch % (step * n) == 0]
    given = (p.tp, p.pp, p.cp, p.dp) != (1, 1, 1, None)
    if given or not divisors or config.zero.stage == 3 or names_model(config.model.arch):
        return config, ""
    pp = ranks // max(divisors)
    chosen = config.model_copy(update={"parallel": p.model_copy(update={"pp": pp})})
    if pp == 1 or find_problems(chosen, ranks):
        return config, ""
    why = (
        f"--train.global-batch {batch} is not divisible by --train.micro-batch {step} × dp {ranks}"
    )
    use = f"for dp {ranks} use --train.global-batch {around(batch, step * ranks)}"
    return chosen, f"topology   pp {pp} × dp {ranks // pp} is chosen: {why}; {use}"
