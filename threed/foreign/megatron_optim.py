"""What Megatron's optimizer has of a rank's parameters: masters, moments, steps and the loss scale.

    states = flat_states(weights, [{WEIGHT: place, ...}], buckets)     of the distributed optimizer's buffers
    states = grouped_states(weights, state)                            of the other ones, whole tensors in groups

weights: of a rank by name, in the order of the model, which is that of `named_parameters`. Where nothing says what the
values are of, masters are compared with weights (`megatron_flat`); `LeftOut` says why states are not taken.

Layouts: megatron/core/optimizer/optimizer.py (Float16OptimizerWithFloat16Params, FP32Optimizer: state_dict),
distrib_optimizer.py (state_dict, get_parameter_state_dp_zero), grad_scaler.py, __init__.py (_get_param_groups), of
NVIDIA/Megatron-LM, commit d98e8a64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.foreign.megatron_flat import Buffer, fits, numel, positions
from threed.foreign.outlines import Place, number
from threed.foreign.source import Progress
from threed.foreign.spread import Boxes, Chain, Elements, Spread
from threed.zero.records import WEIGHT

MOMENTS = ("exp_avg", "exp_avg_sq")
PARTS = {"param": WEIGHT, "fp32_param": WEIGHT, **{part: part for part in MOMENTS}}
FRESH = "a run begins at step 0, with moments of zero"
Parts = dict[str, Boxes]


class LeftOut(Exception):
    """Why the states of a checkpoint are not taken, and what would help."""


@dataclass
class States:
    """Parts of parameters by Megatron's names, and how far the training was; note: what is left out."""

    parts: dict[str, Parts] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    scale: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def flat_states(
    weights: Mapping[str, Boxes], vectors: Mapping[str, Elements], buckets: Sequence[int] | None
) -> dict[str, Parts]:
    """Returns parts of a buffer's parameters; vectors: by part. LeftOut where what they are of is not certain."""
    if WEIGHT not in vectors:
        raise LeftOut("its optimizer has no masters")
    if len({vector.numel for vector in vectors.values()}) != 1:
        raise LeftOut("parts of its optimizer have different lengths")
    starts = positions(list(weights.values()), Buffer(vectors[WEIGHT], buckets))
    if starts is None:
        raise LeftOut(
            "its optimizer's flat buffers do not fit its weights, or fit them in more than one way"
        )
    chains = {part: Chain([vector]) for part, vector in vectors.items()}
    return {
        name: {
            part: Spread(weight.shape, chain.cut(at, at + numel(weight)))
            for part, chain in chains.items()
        }
        for (name, weight), at in zip(weights.items(), starts, strict=True)
    }


def buffers_of(state: Any) -> list[dict[str, Elements]]:
    """Returns the buffers of what `save_parameter_state` saved, by part. LeftOut for an older form."""
    if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
        raise LeftOut("its optimizer's file is older than core 0.6, or of experts")
    found = []
    for index in range(len(state)):
        if index in state:
            (tensors,) = state[index].values()  # of a pair of dtypes
            found.append({PARTS[key]: value for key, value in tensors.items() if key in PARTS})
    if not found or not all(
        isinstance(value, Place) and len(value.shape) == 1
        for some in found
        for value in some.values()
    ):
        raise LeftOut("its optimizer's file has no flat tensors")
    return found


# ------------------------------------------------------------------------------------------------- tensors in groups


def grouped_states(weights: Mapping[str, Boxes], state: Mapping[str, Any]) -> dict[str, Parts]:
    """Returns parts of parameters, of an optimizer that is not distributed. LeftOut where it is not certain."""
    inner = state["optimizer"] if "fp32_from_fp16_params" in state else state
    states, masters = inner["state"], state.get("fp32_from_fp16_params")
    groups = []
    for index, group in enumerate(inner["param_groups"]):
        queue = [_parts(states.get(key)) for key in group["params"]]
        if masters is not None:
            if len(masters[index]) != len(queue):
                raise LeftOut(
                    "its parameters have several formats, and nothing says which of its masters are whose"
                )
            queue = [
                {**parts, WEIGHT: _whole(place)}
                for parts, place in zip(queue, masters[index], strict=True)
            ]
        groups.append((group, queue))
    found = {name: _next(name, weight, groups) for name, weight in weights.items()}
    if any(queue for _, queue in groups):
        raise LeftOut("its optimizer has more parameters than its model")
    return {name: dict(parts) for name, parts in found.items()}


def _next(
    name: str, weight: Boxes, groups: Sequence[tuple[Mapping[str, Any], list[dict[str, Spread]]]]
) -> dict[str, Spread]:
    """Takes a parameter's parts from the group whose next ones fit it."""
    able = [(group, queue) for group, queue in groups if queue and _fits(weight, queue[0])]
    if len(able) > 1:  # as one by shape: biases and norms are not decayed
        plain_ones = name.endswith(".bias") or len(weight.shape) == 1
        able = [pair for pair in able if (not pair[0].get("wd_mult", 1.0)) == plain_ones]
    if len(able) != 1:
        raise LeftOut(f"none of its optimizer's states, or several, can be those of {plain(name)}")
    return able[0][1].pop(0)


def _fits(weight: Boxes, parts: Mapping[str, Spread]) -> bool:
    if any(part.shape != weight.shape for part in parts.values()):
        return False
    return WEIGHT not in parts or fits(weight, parts[WEIGHT].elements)


def _parts(state: Any) -> dict[str, Spread]:
    if not isinstance(state, Mapping):
        raise LeftOut("its optimizer has no states of some parameters")
    return {part: _whole(state[part]) for part in MOMENTS if part in state}


def _whole(place: Any) -> Spread:
    if not isinstance(place, Place):
        raise LeftOut("its optimizer's states are no tensors")
    return Spread(place.shape, place)


# ------------------------------------------------------------------------------------------------------ how far it was


def certain(read: Callable[[], States], where: Path) -> States:
    """Returns the states that `read` does, or none and a note where it raises LeftOut. CheckpointError, naming the
    checkpoint, where its entries are others than Megatron's."""
    try:
        return read()
    except LeftOut as why:
        return States(
            note=f"masters and moments are left out, weights alone are read: {why}; {FRESH}"
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        text = f"{type(error).__name__}: {plain(error)}"
        raise CheckpointError(
            f"{where}: its optimizer's states are not as Megatron writes them ({text})"
        ) from None


def add_counters(
    states: States, common: Mapping[str, Any], args: Mapping[str, Any], optimizer: Any
) -> None:
    """Adds how far the training was, and its loss scale; without its number of updates, moments are left out.

    common: what all ranks have, with `iteration`. optimizer: state of one, which has groups with a step.
    """
    updates = step_of(optimizer)
    both = any(set(MOMENTS) <= parts.keys() for parts in states.parts.values())
    if updates is None or not both:
        why = "does not say how many updates it did" if both else "has no moments of Adam"
        states.parts = {
            name: {WEIGHT: parts[WEIGHT]} for name, parts in states.parts.items() if WEIGHT in parts
        }
        states.note = f"its optimizer {why}: {FRESH}"
        return
    samples = args.get("consumed_train_samples")
    done = Progress(_count(common.get("iteration")), _count(samples), updates)
    states.progress = Progress(max(done.steps, int(updates)), done.samples, updates)
    states.scale = scale_of(optimizer)


def step_of(state: Any) -> float | None:
    """Returns how many updates an optimizer did: in its groups, of all of its tensors, or of each."""
    if isinstance(state, list):
        return next((step for part in state if (step := step_of(part)) is not None), None)
    if not isinstance(state, Mapping):
        return None
    each = state.get("state")
    some = [each.get("common_step"), *each.values()] if isinstance(each, Mapping) else []
    groups = [*(state.get("param_groups") or ()), *some]
    steps = [
        number(group.get("step") if isinstance(group, Mapping) else group)
        for group in groups
        if group is not None
    ]
    known = [step for step in steps if step is not None and 0 <= step < 2**53]
    return max(known) if known else step_of(state.get("optimizer"))


def scale_of(state: Any) -> dict[str, float]:
    """Returns the loss scale, as a checkpoint keeps it, of a dynamic one."""
    found = state.get("grad_scaler") if isinstance(state, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    scale, good, left = (
        number(found.get(key)) for key in ("scale", "growth_tracker", "hysteresis_tracker")
    )
    if scale is None or good is None or left is None:
        return {}
    return {
        "loss_scale": scale,
        "good_steps": good,
        "hysteresis_left": max(left, 1.0),
    }  # at 0 and 1 it halves next


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
