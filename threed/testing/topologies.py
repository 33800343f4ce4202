"""Topologies by name: words joined by '-', such as tp2-seq-pp2-dp2-zero3.

tpN ppN dpN   tensor, pipeline and data ranks        seq        sequences are cut over the tensor ranks
zeroN         ZeRO's stage (0 without the word)      recompute  every layer runs again in the backward
offload       optimizer states, and at stage 3 parameters, live in the host's memory
microN        micro-batches of N sequences
"""

from __future__ import annotations

import math
import re

from threed.config import Config, ConfigError, ParallelConfig
from threed.schedules import is_asynchronous

DEFAULT = (
    "micro1", "recompute", "tp2", "tp2-seq", "pp2", "dp2-zero1", "dp2-zero3", "tp2-pp2", "pp2-dp2-zero2",
    "dp2-zero3-offload", "tp2-seq-pp2-dp2-zero3-recompute",
)  # fmt: skip
RANKS = 8  # at most
_WORD = re.compile(r"(tp|pp|dp|micro)([1-9]\d*)|(zero)([0-3])|(seq|recompute|offload)")


def words(name: str) -> dict[str, int]:
    """What a topology's words say, by word; ValueError for a name that is none."""
    said: dict[str, int] = {}
    for word in name.split("-"):
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"topology {name!r}: {word!r} is no word of one; join {_LIST} by '-'")
        key = found[1] or found[3] or found[5]
        if key in said:
            raise ValueError(f"topology {name!r} says {key} twice")
        said[key] = int(found[2] or found[4] or 1)
    if ranks_of(said) > RANKS:
        raise ValueError(f"topology {name!r} takes {ranks_of(said)} ranks, more than {RANKS}")
    return said


_LIST = "tp2, pp2, dp2 (any number), seq, zero0 to zero3, recompute, offload, micro1 (any number)"


def ranks_of(said: dict[str, int]) -> int:
    """How many ranks it takes."""
    return math.prod(said.get(axis, 1) for axis in ("tp", "pp", "dp"))


def plain(config: Config) -> Config:
    """Returns the configuration with the defaults of the keys for several pipeline ranks, as one process runs it. An
    asynchronous schedule is kept, since it changes the results of training."""
    keys = ["chunks", "partition", "memory_limit_gib", "optimistic_step"]
    keys += [] if is_asynchronous(config.parallel.schedule) else ["schedule"]
    defaults = {key: getattr(ParallelConfig(), key) for key in keys}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=defaults)})


def configured(config: Config, said: dict[str, int]) -> Config:
    """The configuration in a topology. Raises ConfigError where it makes no sense."""
    stage = said.get("zero", 0)
    if "offload" in said and not stage:
        why = "states of the optimizer live elsewhere from ZeRO's stage 1 on"
        raise ConfigError([f"offload: {why}; add zero1 or more"])
    if "seq" in said and said.get("tp", 1) == 1:
        raise ConfigError(["seq: sequences are cut over tensor ranks; add tp2 or more"])
    if "seq" in said and config.model.seq % said["tp"]:
        given = f"--model.seq {config.model.seq}"
        raise ConfigError([f"{given} cannot be cut over {said['tp']} tensor ranks"])
    sizes = {axis: said.get(axis, 1) for axis in ("tp", "pp", "dp")}
    place = "cpu" if "offload" in said else "none"
    params = place if stage == 3 else "none"
    zero = {"stage": stage, "offload_optimizer": place, "offload_params": params}
    mode = "full" if "recompute" in said else "none"
    micro = said.get("micro", config.train.micro_batch)
    share, rest = divmod(config.train.global_batch, sizes["dp"])
    if rest or share % micro:
        rows = f"--train.global-batch {config.train.global_batch}"
        parts = f"micro-batches of {micro} on {sizes['dp']} data ranks"
        raise ConfigError([f"{rows} cannot be cut into {parts}"])
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={**sizes, "sequence": "seq" in said}),
            "zero": config.zero.model_copy(update=zero),
            "recompute": config.recompute.model_copy(update={"mode": mode}),
            "train": config.train.model_copy(update={"micro_batch": micro}),
        }
    )
