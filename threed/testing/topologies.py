"""Names of topologies: words joined by '-', such as tp2-seq-pp2-dp2-zero3.

tpN ppN dpN   tensor, pipeline and data ranks
cpN  cpNhM    context ranks, M of which exchange positions for heads (by default, the number with
              which a rank sends the fewest bytes)
epN           expert ranks, N of which hold different experts
seq           sequence parallelism over the tensor ranks
zeroN         ZeRO stage (0 by default)
recompute     full recompute of every layer
offload       optimizer states, and at stage 3 parameters, are stored in host memory
microN        micro-batches of N sequences
"""

from __future__ import annotations

import math
import re

from threed.config import Config, ConfigError, ParallelConfig
from threed.config.resolution import context_multiple
from threed.schedules.registry import is_asynchronous

DEFAULT = (
    "micro1", "recompute", "tp2", "tp2-seq", "pp2", "dp2-zero1", "dp2-zero3", "tp2-pp2", "pp2-dp2-zero2",
    "dp2-zero3-offload", "tp2-seq-pp2-dp2-zero3-recompute",
)  # fmt: skip
RANKS = 8  # maximum number of ranks of a topology
_WORD = re.compile(
    r"(tp|pp|dp|ep|micro)([1-9]\d*)|(zero)([0-3])|(seq|recompute|offload)"
    r"|(cp)([1-9]\d*)(?:h([1-9]\d*))?"
)


def words(name: str) -> dict[str, int]:
    """Parses the name of a topology.

    Args:
        name: words joined by '-'.

    Returns:
        The number in each word, such as {"tp": 2, "seq": 1}; 1 for a word without a number.

    Raises:
        ValueError: if the name is invalid, or needs more than `RANKS` ranks.
    """
    parsed: dict[str, int] = {}
    for word in name.split("-"):
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(
                f"topology {name!r}: {word!r} is not a word of a topology; join {_LIST} by '-'"
            )
        key = found[1] or found[3] or found[5] or found[6]
        if key in parsed:
            raise ValueError(f"topology {name!r} has {key} twice")
        parsed[key] = int(found[2] or found[4] or found[7] or 1)
        if found[8]:
            parsed["heads"] = int(found[8])
    if ranks_of(parsed) > RANKS:
        raise ValueError(f"topology {name!r} takes {ranks_of(parsed)} ranks, more than {RANKS}")
    return parsed


_LIST = "tp2, pp2, dp2, ep2, cp2, cp2h2 (any number), seq, zero0 to zero3, recompute, offload, micro1 (any number)"


def ranks_of(parsed: dict[str, int]) -> int:
    """Returns the number of ranks of a parsed topology."""
    return math.prod(parsed.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


def plain(config: Config) -> Config:
    """Returns the configuration for one process, in which the keys for pipelines have their default
    values.

    An asynchronous schedule is kept, because it changes the results of training.

    Args:
        config: the configuration for all topologies.
    """
    keys = ["chunks", "partition", "memory_limit_gib", "optimistic_step"]
    keys += [] if is_asynchronous(config.parallel.schedule) else ["schedule"]
    defaults = {key: getattr(ParallelConfig(), key) for key in keys}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=defaults)})


def configured(config: Config, parsed: dict[str, int]) -> Config:
    """Returns the configuration for a topology.

    Args:
        config: the configuration for all topologies.
        parsed: the parsed name of the topology: the result of `words`.

    Raises:
        ConfigError: if the configuration is invalid in the topology.
    """
    stage = parsed.get("zero", 0)
    if "offload" in parsed and not stage:
        why = "it moves the states that ZeRO shards"
        raise ConfigError([f"offload: {why}; add zero1 or more"])
    if "seq" in parsed and parsed.get("tp", 1) == 1:
        raise ConfigError(["seq: sequences are split over tensor ranks; add tp2 or more"])
    sizes = {axis: parsed.get(axis, 1) for axis in ("tp", "pp", "dp", "cp")}
    place = "cpu" if "offload" in parsed else "none"
    params = place if stage == 3 else "none"
    zero = {"stage": stage, "offload_optimizer": place, "offload_params": params}
    holders = math.prod(sizes[axis] for axis in ("dp", "cp", "tp"))
    if holders % parsed.get("ep", 1):
        raise ConfigError([f"ep{parsed['ep']}: it does not divide the {holders} ranks of a stage"])
    if sizes["cp"] % parsed.get("heads", 1):
        given = f"cp{sizes['cp']}h{parsed['heads']}"
        raise ConfigError([f"{given}: {parsed['heads']} does not divide the {sizes['cp']} ranks"])
    mode = "full" if "recompute" in parsed else "none"
    micro = parsed.get("micro", config.train.micro_batch)
    share, rest = divmod(config.train.global_batch, sizes["dp"])
    if rest or share % micro:
        rows = f"--train.global-batch {config.train.global_batch}"
        parts = f"micro-batches of {micro} on {sizes['dp']} data ranks"
        raise ConfigError([f"{rows} cannot be split into {parts}"])
    parallel = {
        **sizes,
        "ep": parsed.get("ep", 1),
        "sequence": "seq" in parsed,
        "cp_heads": parsed.get("heads", "auto"),
    }
    found = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "zero": config.zero.model_copy(update=zero),
            "recompute": config.recompute.model_copy(update={"mode": mode}),
            "train": config.train.model_copy(update={"micro_batch": micro}),
        }
    )
    pieces = context_multiple(found) * (sizes["tp"] if "seq" in parsed else 1)
    if config.model.seq % pieces:
        over = f"{sizes['tp']} tensor ranks" if sizes["cp"] == 1 else f"{pieces} parts"
        raise ConfigError([f"--model.seq {config.model.seq} cannot be split over {over}"])
    return found
