"""How many kernels a layer launches for a micro-batch, forward and backward: python -m tests.accelerator.launches

Counted on the pretend accelerator (`pretend`), so nothing is timed. What a step launches besides its layers' work for
each micro-batch (the ends of the model, the optimizer) is subtracted: steps with one layer and one micro-batch more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.accelerator.pretend import pretending
from threed.config import Config
from threed.config.resolution import resolve

SHAPE = {"hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32768}
MODELS: dict[str, dict[str, Any]] = {
    "GPT": {"arch": "gpt"},
    "Llama": {"arch": "llama", "kv_heads": 4, "ffn": 2816},
    "Mixtral": {
        "arch": "mixtral",
        "kv_heads": 4,
        "ffn": 2816,
        "experts": 8,
        "experts_per_token": 2,
        "expert_ffn": 704,
    },
    "DeepSeek": {
        "arch": "deepseek_v3",
        "nope_dim": 32,
        "rope_dim": 32,
        "value_dim": 64,
        "ffn": 2816,
        "experts": 16,
        "experts_per_token": 4,
        "expert_ffn": 704,
        "shared_experts": 1,
        "expert_groups": 4,
        "groups_per_token": 2,
        "expert_scale": 2.5,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, ZeRO 3, dp 8": {"zero": {"stage": 3, "resident": 0}, "dp": 8},
    "bf16, tp 8": {"parallel": {"tp": 8}},
    "bf16, full recompute": {"recompute": {"mode": "full"}},
    "bf16, dropout": {"model": {"dropout": 0.1}},
    "fp32": {"precision": {"dtype": "fp32"}},
}


def config_of(
    model: str, layers: int, microbatches: int, changes: Mapping[str, Any]
) -> tuple[Config, int]:
    """The configuration of a model, and the number of its ranks."""
    groups: dict[str, Any] = {"precision": {"dtype": "bf16"}, **changes}
    data, ranks = groups.pop("dp", 1), groups.get("parallel", {}).get("tp", 1)
    groups["model"] = {**SHAPE, **MODELS[model], "layers": layers, **groups.get("model", {})}
    if ranks > 1 and model == "Llama":
        groups["model"]["kv_heads"] = ranks
    groups["train"] = {"micro_batch": 1, "global_batch": microbatches * data, "steps": 10}
    return resolve(Config.model_validate(groups), SHAPE["vocab"], data * ranks), data * ranks


def launches_of_step(
    model: str, layers: int, microbatches: int, changes: Mapping[str, Any]
) -> Counter[str]:
    """The kernels of a second step, by operation: the first makes tables that stay, such as that of rotary angles."""
    config, world = config_of(model, layers, microbatches, changes)
    with pretending(0, world) as device:
        engine = device.engine(config)
        device.step(engine)
        device.step(engine)
        return device.launches


def of_a_layer(model: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Counter[str]:
    """The kernels of one layer and one micro-batch, by operation."""
    one, two = (
        {n: launches_of_step(model, layers, n, changes) for n in (1, 2)} for layers in (1, 2)
    )
    found = Counter(two[2])
    found.subtract(two[1])
    found.subtract(one[2])
    found.update(one[1])
    return Counter({name: count for name, count in found.items() if count})


def table() -> str:
    """A row for each way to run."""
    rows = [f"{'kernels a layer and micro-batch':<34}" + "".join(f"{model:>8}" for model in MODELS)]
    for case, changes in CASES.items():
        counts = [sum(of_a_layer(model, changes).values()) for model in MODELS]
        rows.append(f"{case:<34}" + "".join(f"{count:>8}" for count in counts))
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
    for model in MODELS:
        print(
            f"\n{model}, bf16: "
            + ", ".join(f"{name} {count}" for name, count in of_a_layer(model).most_common())
        )
