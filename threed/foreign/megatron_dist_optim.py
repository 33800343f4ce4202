"""What Megatron's optimizer has in a `torch_dist` checkpoint, in each of the ways in which it is cut.

    states = states_of(dist, names, tensors, common, args, unstacked)

In the model's shapes (`optimizer.state.exp_avg.decoder...`): of optimizers that are not distributed, and, since core
0.15, of distributed ones with --dist-ckpt-optim-fully-reshardable, whose masters are `optimizer.state.param...`. Before
that, `fully_sharded_model_space`: a tensor [x, y] of which each rank has [x / f, y / g] is [f, g, x / f * y / g], so
that data ranks could save ranges of the last dimension (core_v0.14.0, dist_checkpointing/strategies/torch.py,
sharded_tensor_to_torch_sharded_tensor). In flat buffers, of each tensor and pipeline rank: since 0.15 `dp_reshardable`,
with buckets (optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable); and `dp_zero_gather_scatter`.

What flat buffers are of, their sizes and values say (`megatron_flat`); the order of parameters is that of models/gpt/
gpt_model.py, transformer/transformer_layer.py, attention.py and mlp.py (NVIDIA/Megatron-LM, commit d98e8a64).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count, takewhile
from typing import Any

from threed.checkpoint.files import plain
from threed.foreign.distcp import DistFolder, Pieces
from threed.foreign.megatron import LAYER, Rank, Tensors, joined_parts, share
from threed.foreign.megatron_flat import numel
from threed.foreign.megatron_optim import (
    PARTS,
    LeftOut,
    Parts,
    States,
    add_counters,
    buffers_of,
    certain,
    flat_states,
)
from threed.foreign.spread import Boxed, Boxes, Chain, Elements, Shape, Spread
from threed.zero.records import WEIGHT

STATE = "optimizer.state."
GROUP = "optimizer.distributed.dp_group_idx_"
BUCKET = re.compile(
    re.escape(GROUP) + r"(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)"
)
ADVICE = "Megatron saves them in the model's shapes with --dist-ckpt-optim-fully-reshardable"
FIRST = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
LAST = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight")
MODULES = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
MOST_TRIES = 20  # numbers of layers of a stage that are tried, of those whose sizes fit
Size = tuple[int, int]  # values, and parameters
Buckets = tuple[
    dict[str, Elements], list[int] | None
]  # parts of a buffer, and the sizes of its buckets


def states_of(
    dist: DistFolder, names: Mapping[str, str], tensors: Tensors, common: Mapping[str, Any], args: Mapping[str, Any],
    unstacked: Callable[[Tensors], Tensors],
) -> States:  # fmt: skip
    """Returns what the optimizer has; what is not certain is left out, and said.

    names: keys of the model's tensors, by Megatron's names. tensors: the model's, by the numbers of layers.
    """

    def read() -> States:
        states = States()
        if any(name.startswith(STATE) for name in dist.shapes):
            states.parts = _of_the_model(dist, names, unstacked)
            _check_alike(states.parts, tensors, args)
            optimizer = common.get("optimizer")
        elif any(name.startswith(GROUP) for name in (*dist.shapes, *dist.objects)):
            states.parts = _of_buffers(dist, tensors, args)
            optimizer = {
                key: _alone(dist.entry(f"{GROUP}0.{key}/shard_0_1"))
                for key in ("optimizer", "grad_scaler")
            }
        else:
            raise LeftOut("it was saved without its optimizer, or with several ones")
        add_counters(states, common, args, optimizer)
        return states

    return certain(read, dist.path)


def _alone(found: Any) -> Any:
    """Returns what is in a list of its own, as objects are saved."""
    return found[0] if isinstance(found, list) and found else found


# ------------------------------------------------------------------------------------------------ the model's shapes


def _of_the_model(
    dist: DistFolder, names: Mapping[str, str], unstacked: Callable[[Tensors], Tensors]
) -> dict[str, Parts]:
    """Returns parts of tensors that have the names of the model's."""
    found: dict[str, Parts] = {}
    for kind, part in PARTS.items():
        keys = {
            name: f"{STATE}{kind}.{key}"
            for name, key in names.items()
            if f"{STATE}{kind}.{key}" in dist.shapes
        }
        pieces = dist.pieces(list(keys.values())) if keys else {}
        whole = {
            name: _shaped(name, dist.shapes[names[name]], dist.shapes[key], pieces[key])
            for name, key in keys.items()
        }
        for name, tensor in unstacked(whole).items():
            found.setdefault(name, {})[part] = tensor
    return found


def _check_alike(parts: Mapping[str, Parts], tensors: Tensors, args: Mapping[str, Any]) -> None:
    """Raises LeftOut where some parameters have other parts than others."""
    tied = not args.get("untie_embeddings_and_output_weights")
    names = [
        name for name in tensors if not (tied and name == LAST[-1])
    ]  # a copy, which no optimizer has
    for name in names:
        if parts.get(name, {}).keys() != parts.get(names[0], {}).keys():
            raise LeftOut(f"it has other states of {plain(name)} than of {plain(names[0])}")


def _shaped(name: str, shape: Shape, own: Shape, pieces: Pieces) -> Boxes:
    """Returns a tensor of the model's shape, from pieces of it, or of fragments that are flat."""
    if own == shape:
        return Boxed(shape, pieces)
    if (
        len(own) != len(shape) + 1
        or 0 in own
        or any(size % n for size, n in zip(shape, own, strict=False))
    ):
        raise LeftOut(
            f"states of {plain(name)} are of shape {list(own)}, and it is of {list(shape)}"
        )
    local = tuple(size // n for size, n in zip(shape, own, strict=False))
    ranges: dict[Shape, list[tuple[int, Spread]]] = {}
    for first, piece in pieces:
        if any(n != 1 for n in piece.shape[:-1]):
            raise LeftOut(f"states of {plain(name)} have pieces of several fragments")
        ranges.setdefault(first[:-1], []).append((first[-1], piece))
    parts: list[tuple[Shape, Boxes]] = []
    for fragment, some in ranges.items():
        flat = Chain([piece.elements for _, piece in sorted(some, key=lambda pair: pair[0])])
        parts.append(
            (tuple(f * n for f, n in zip(fragment, local, strict=True)), Spread(local, flat))
        )
    return Boxed(shape, parts)


# ----------------------------------------------------------------------------------------------------- flat buffers


def _of_buffers(dist: DistFolder, tensors: Tensors, args: Mapping[str, Any]) -> dict[str, Parts]:
    """Returns parts of tensors that lie in buffers of each tensor and pipeline rank, for each virtual stage."""
    groups = _bucketed(dist) or _gathered(dist)
    tp, gated = int(args["tensor_model_parallel_size"]), bool(args.get("swiglu"))
    pp = len(groups) // max(1, tp)
    chunks = {len(buffers) for buffers in groups.values()}
    if (
        sorted(groups) != list(range(tp * pp))
        or len(chunks) != 1
        or int(args["pipeline_model_parallel_size"]) != pp
    ):
        raise LeftOut(
            f"its optimizer has {len(groups)} groups of flat buffers, which its args do not explain; {ADVICE}"
        )
    stages = [(chunk, stage) for chunk in range(chunks.pop()) for stage in range(pp)]
    found: dict[Rank, list[dict[str, Parts]]] = {
        (rank, stage): [] for rank in range(tp) for stage in range(pp)
    }
    layers = _in_order(tensors)
    sizes = [_size(names, tensors, tp, gated) for names in layers]
    for chunk, stage in stages:
        first, last = (chunk, stage) == stages[0], (chunk, stage) == stages[-1]
        buffers = [groups[stage * tp + rank][chunk] for rank in range(tp)]
        ends = _size(
            _stage_names([], tensors, first, last, len(stages) > 1).values(), tensors, tp, gated
        )
        for number in _numbers(buffers[0][0][WEIGHT].numel, ends, sizes):
            names = _stage_names(layers[:number], tensors, first, last, len(stages) > 1)
            shares = [{local: share(name, tensors[name], rank, tp, gated) for local, name in names.items()}
                      for rank in range(tp)]  # fmt: skip
            if (own := _fitting(shares, buffers)) is not None:
                break
        else:
            raise LeftOut(
                f"its optimizer's flat buffers do not fit its weights, or in more than one way; {ADVICE}"
            )
        layers, sizes = layers[number:], sizes[number:]
        for rank in range(tp):
            found[rank, stage].append(own[rank])
    if layers:
        raise LeftOut(f"its optimizer's flat buffers have fewer layers than its model; {ADVICE}")
    return joined_parts(found, gated, dist.path)


def _size(names: Iterable[str], tensors: Tensors, tp: int, gated: bool) -> Size:
    sizes = [numel(share(name, tensors[name], 0, tp, gated)) for name in names]
    return sum(sizes), len(sizes)


def _numbers(have: int, ends: Size, layers: Iterable[Size]) -> list[int]:
    """Returns how many of the layers a stage may have, by the number of values of its buffer.

    ends: the size of what is before and behind its layers. Values are compared for these numbers alone.
    """
    totals = accumulate(
        layers, lambda before, layer: (before[0] + layer[0], before[1] + layer[1]), initial=ends
    )
    fit = [
        number for number, (size, count) in enumerate(totals) if size <= have <= size + 64 * count
    ]
    return fit[:MOST_TRIES]


def _fitting(
    shares: Sequence[Mapping[str, Boxes]], buffers: Sequence[Buckets]
) -> list[dict[str, Parts]] | None:
    """Returns parts of each tensor rank's parameters if their sizes and values fit its buffer."""
    found = []
    for weights, (vectors, buckets) in zip(shares, buffers, strict=True):
        size, have = sum(map(numel, weights.values())), vectors[WEIGHT].numel
        if not size <= have <= size + 64 * len(weights):
            return None
        try:
            found.append(flat_states(weights, vectors, buckets))
        except LeftOut:
            return None
    return found


def _bucketed(dist: DistFolder) -> dict[int, list[Buckets]]:
    """Returns the buffers of each group: buckets one after the other, each of ranges of data ranks."""
    matches = [
        match for name in dist.shapes if (match := BUCKET.fullmatch(name)) and match[5] in PARTS
    ]
    pieces = dist.pieces([match[0] for match in matches]) if matches else {}
    places: dict[tuple[int, int], dict[str, dict[int, str]]] = {}
    for match in matches:
        parts = places.setdefault((int(match[1]), int(match[2])), {})
        parts.setdefault(PARTS[match[5]], {})[int(match[4])] = match[0]
    if len({(match[1], match[2]) for match in matches}) != len(
        {(match[1], match[2], match[3]) for match in matches}
    ):
        raise LeftOut("its optimizer has buffers of several formats")
    groups: dict[int, list[Buckets]] = {}
    for (group, buffer), parts in sorted(places.items()):
        if any(sorted(keys) != list(range(len(keys))) for keys in parts.values()):
            raise LeftOut("buckets of its optimizer are missing")
        if buffer != len(groups.setdefault(group, [])):
            raise LeftOut("buffers of its optimizer are missing")
        vectors = {
            part: _in_a_row([pieces[keys[n]] for n in range(len(keys))])
            for part, keys in parts.items()
        }
        sizes = [
            numel(Boxed(dist.shapes[name], pieces[name]))
            for _, name in sorted(parts[WEIGHT].items())
        ]
        groups[group].append((vectors, sizes))
    return groups


def _in_a_row(buckets: Sequence[Pieces]) -> Elements:
    return Chain(
        [piece.elements for some in buckets for _, piece in sorted(some, key=lambda pair: pair[0])]
    )


def _gathered(dist: DistFolder) -> dict[int, list[Buckets]]:
    """Returns the buffers of each group, of objects as a legacy file is one."""
    objects = set(dist.objects)
    names = list(
        takewhile(
            objects.__contains__, (f"{GROUP}{group}.param_state/shard_0_1" for group in count())
        )
    )
    return {
        group: [(buffer, None) for buffer in buffers_of(_alone(state))]
        for group, state in enumerate(dist.entries(names))
    }


# ------------------------------------------------------------------------------------------------------------- names


def _in_order(tensors: Tensors) -> list[list[str]]:
    """Returns names of each layer's parameters, in the order of Megatron's modules."""
    layers: dict[int, list[tuple[int, int, str]]] = {}
    for name in tensors:
        if (match := LAYER.fullmatch(name)) is not None:
            module, _, kind = match[2].rpartition(".")
            if module not in MODULES or kind not in KINDS:
                raise LeftOut(
                    f"the order of its parameters is not known, for it has {plain(name)}; {ADVICE}"
                )
            layers.setdefault(int(match[1]), []).append(
                (MODULES.index(module), KINDS.index(kind), name)
            )
    return [[name for *_, name in sorted(layers[number])] for number in sorted(layers)]


def _stage_names(
    layers: Sequence[Sequence[str]], tensors: Tensors, first: bool, last: bool, several: bool
) -> dict[str, str]:
    """Returns names of a stage's parameters in order, as it numbers its layers, and those in the whole model."""
    return dict(_stage_pairs(layers, tensors, first, last, several))


def _stage_pairs(
    layers: Sequence[Sequence[str]], tensors: Tensors, first: bool, last: bool, several: bool
) -> Iterator[tuple[str, str]]:
    if first:
        yield from ((name, name) for name in FIRST if name in tensors)
    for number, names in enumerate(layers):
        yield from ((re.sub(r"layers\.\d+", f"layers.{number}", name), name) for name in names)
    if last:
        yield from ((name, name) for name in LAST if name in tensors)
        if several and LAST[-1] not in tensors:
            yield LAST[-1], FIRST[0]  # a copy of the embedding, for it is tied
