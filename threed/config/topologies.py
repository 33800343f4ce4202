"""Topologies for a number of ranks: the tables [topology.N] of a file, and a default topology.

A table has the values of keys for a run of N ranks:

    [topology.8]
    parallel.tp = 2
    zero.stage = 1

`read_topologies` checks the tables of a parsed file:

    topologies, problems = read_topologies(tables.pop("topology", {}))
    topologies["8"]                                  # {"parallel": {"tp": 2}, "zero": {"stage": 1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from threed.config.checks import around, find_problems
from threed.config.groups import Config
from threed.config.schema import key_name
from threed.core.source import names_model

# The keys that a topology may set: all keys of these groups, and `train.micro-batch`. None of
# them changes the batches, the model or the optimizer, so a run may resume with another topology.
GROUPS = ("parallel", "zero", "recompute")
Topologies = Mapping[str, Mapping[str, Mapping[str, Any]]]


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


def read_topologies(tables: Any) -> tuple[Topologies, list[str]]:
    """Checks the structure of all topologies of a file.

    Args:
        tables: the content of the table `topology`, as parsed.

    Returns:
        The valid topologies, {N: {group: {key: value}}}; and a list with a line for each invalid
        topology. The values of keys are not checked.
    """
    if not isinstance(tables, dict):
        return {}, ["topology is not a table; write [topology.8], for example"]
    found = {ranks: _problem(ranks, groups) for ranks, groups in tables.items()}
    valid = {ranks: groups for ranks, groups in tables.items() if not found[ranks]}
    return valid, [f"topology.{ranks}: {problem}" for ranks, problem in found.items() if problem]


def _problem(ranks: str, groups: Any) -> str:
    """Returns why a topology is invalid, or "" if it is valid."""
    if not (ranks.isdecimal() and ranks == str(int(ranks)) != "0" and isinstance(groups, dict)):
        return "not a table for a number of ranks; write [topology.8], for example"
    for group, keys in groups.items():
        if not isinstance(keys, dict):
            return f"{group} is outside any group; write group.key, such as parallel.tp"
        for key in map(key_name, keys):
            if group not in GROUPS and (group, key) != ("train", "micro-batch"):
                why = (
                    f"{group}.{key} must not depend on the number of ranks; put it under [{group}]"
                )
                return f"{why} (a topology sets only {', '.join(GROUPS)} and train.micro-batch)"
    return ""
