"""What every layer of a decoder costs one tensor rank, by published formulas: an oracle that runs no layer.

Use: `transformer_costs(Decoder(hidden=4096, heads=32, ffn=16384, vocab=50304, seq=2048), layers=32)` gives a `Cost` for
the embedding, each block, and the head; `communication_bytes` what a rank that holds some of them sends in a step.

Counted are matmuls at 2mnk FLOPs, attention over the full s x s square (no causal discount, as in PaLM, arXiv
2204.02311, appendix B); norms, activation functions and softmax are not. Activation bytes are what autograd keeps for
the backward of this code's layers, where attention keeps its inputs, its output and one number per row, never the s x s
scores. Letters: b micro-batch, s sequence, h hidden, a heads, k kv heads, d head size, f feed-forward, v vocabulary, t
tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from threed.config import ModelConfig
from threed.planner.gathering import gathering
from threed.schedules.action import Action, Kind

INDEX_BYTES = 8  # token ids are int64
MASK_BYTES = 1  # booleans: dropout, tokens held by a vocabulary shard


# Bytes one rank sends in a collective over some ranks, as a bandwidth-optimal ring does it (arXiv 1910.02054, 7.1).


def all_gather(full: int, ranks: int) -> int:
    """Bytes sent when every rank gets all `full` bytes, of which it had one part."""
    return full * (ranks - 1) // ranks


def reduce_scatter(full: int, ranks: int) -> int:
    """Bytes sent when `full` bytes are summed and every rank keeps one part."""
    return full * (ranks - 1) // ranks


def all_reduce(full: int, ranks: int) -> int:
    """Bytes sent when `full` bytes are summed and every rank gets all of it."""
    return 2 * full * (ranks - 1) // ranks


@dataclass(frozen=True)
class Cost:
    """What one pipeline layer costs one tensor rank; per micro-batch, except what concerns parameters.

    activation_bytes: kept from forward to backward; offloaded_bytes: likewise, but not on the device. working_bytes:
    held only while the layer's backward runs (an estimate). output_bytes: what is handed to the next layer. tp_bytes:
    sent to the other tensor ranks in forward and backward. partial_elements: gradients to be summed over tensor ranks
    once a step, as elements this rank sends.
    tied_parameters: those of `parameters` that are one tensor wherever layers with such parameters share a stage.
    sizes: elements of each of its parameters on this rank, `parameters` in sum; empty: one parameter.
    backward_reads: whether its backward needs its weights (that of a look-up does not).
    """

    name: str
    parameters: int
    flops_forward: int
    flops_backward: int
    activation_bytes: int
    output_bytes: int
    working_bytes: int = 0
    tp_bytes: int = 0
    partial_elements: int = 0
    tied_parameters: int = 0
    sizes: tuple[int, ...] = ()
    backward_reads: bool = True
    offloaded_bytes: int = 0

    @property
    def largest(self) -> int:
        """Elements of its largest parameter."""
        return max(self.sizes, default=self.parameters)

    def sliced(self, resident: int) -> int:
        """Elements of its parameters that have `resident` elements or more: those that ZeRO-3 keeps as slices."""
        return sum(size for size in self.sizes or (self.parameters,) if size >= resident)

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return self.flops_forward + self.flops_backward


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The dimensions of a decoder-only transformer as one tensor rank sees it.

    element_bytes: of the compute dtype. positions: how many learned ones (0: rotary or none). tensor, tensor_rank: t
    and which of them; the vocabulary and f need not be divisible by t. sequence: between matmuls each tensor rank
    holds s/t positions. fused_norm: RMSNorm keeps its input only; torch's composed one also keeps the normalized
    input, both at least in fp32. recompute: operations that blocks compute again (attention, activation, norm).
    """

    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    micro_batch: int = 1
    tensor: int = 1
    tensor_rank: int = 0
    sequence: bool = False
    gated: bool = False
    norm: str = "layernorm"
    fused_norm: bool = False
    qk_norm: bool = False
    rotary: bool = False
    positions: int = 0
    bias: bool = True
    dropout: bool = False
    tied: bool = True
    element_bytes: int = 4
    recompute: tuple[str, ...] = ()

    @property
    def scattered(self) -> bool:
        """Whether activations between blocks are [s/t b h]."""
        return self.sequence and self.tensor > 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq * self.micro_batch

    @property
    def local_tokens(self) -> int:
        """Tokens of which this rank holds the activations between blocks."""
        return self.tokens // self.tensor if self.scattered else self.tokens

    @property
    def head_size(self) -> int:
        """d."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Features of this rank's query heads, a/t * d."""
        return self.heads // self.tensor * self.head_size

    @property
    def kv_width(self) -> int:
        """Features of this rank's key heads, k/t * d; with fewer kv heads than ranks each holds one."""
        return max((self.kv_heads or self.heads) // self.tensor, 1) * self.head_size

    @property
    def kv_sharers(self) -> int:
        """How many tensor ranks hold the same kv head."""
        return max(self.tensor // (self.kv_heads or self.heads), 1)

    @property
    def wide_bytes(self) -> int:
        """Bytes of the numbers that are never narrower than fp32: statistics, and what softmax works in."""
        return max(self.element_bytes, 4)

    def share(self, size: int) -> int:
        """This rank's part of `size`, cut over the tensor ranks as evenly as can be."""
        return size * (self.tensor_rank + 1) // self.tensor - size * self.tensor_rank // self.tensor


def transformer_costs(dims: Decoder, layers: int) -> list[Cost]:
    """Costs of the model's pipeline layers in order: embedding, `layers` blocks, head."""
    block = block_cost(dims)
    blocks = [replace(block, name=f"blocks.{index}") for index in range(layers)]
    return [embedding_cost(dims), *blocks, head_cost(dims)]


def embedding_cost(dims: Decoder) -> Cost:
    """Word vectors, cut by vocabulary, and learned positions, if any; a look-up has no FLOPs."""
    output = _hidden_bytes(dims, dims.local_tokens)
    words, positions = dims.share(dims.vocab) * dims.hidden, dims.positions * dims.hidden
    return Cost(
        name="embedding",
        parameters=words + positions,
        sizes=(words, positions) if positions else (words,),
        backward_reads=False,
        flops_forward=0,
        flops_backward=0,
        activation_bytes=dims.tokens * (INDEX_BYTES + MASK_BYTES * (dims.tensor > 1))
        + _dropout_bytes(dims),
        output_bytes=output,
        tp_bytes=all_reduce(_hidden_bytes(dims, dims.tokens), dims.tensor),
        partial_elements=all_reduce(positions, dims.tensor) if dims.scattered else 0,
        tied_parameters=words if dims.tied else 0,
    )


def block_cost(dims: Decoder) -> Cost:
    """Norm, attention, norm, feed-forward, each half added to its input.

    Four all-reduces of s b h elements travel per micro-batch, or with sequence parallelism their halves, the same bytes
    (arXiv 2205.05198, section 4.2.2).
    """
    heads = 2 * dims.query_width + 2 * dims.kv_width
    wide = dims.share(dims.ffn) * (3 if dims.gated else 2)
    matmuls = 2 * dims.tokens * dims.hidden * (heads + wide)
    attention = 4 * dims.tokens * dims.seq * dims.query_width
    forward, sizes, again = matmuls + attention, _block_sizes(dims), dims.recompute
    kept, rebuilt = _kept_and_rebuilt(dims)
    gathers = 2 * all_gather(_hidden_bytes(dims, dims.tokens), dims.tensor) if dims.scattered else 0
    return Cost(
        name="block",
        parameters=sum(sizes),
        sizes=sizes,
        flops_forward=forward,
        flops_backward=2 * forward + attention * ("attention" in again),
        activation_bytes=kept,
        output_bytes=_hidden_bytes(dims, dims.local_tokens),
        working_bytes=dims.tokens * dims.element_bytes * (wide + dims.hidden) + rebuilt,
        tp_bytes=4 * all_reduce(_hidden_bytes(dims, dims.tokens), dims.tensor)
        + gathers * ("norm" in again),
        partial_elements=_block_partial_elements(dims),
    )


def head_cost(dims: Decoder) -> Cost:
    """Final norm, projection to the vocabulary, and cross entropy on its shards.

    Cross entropy keeps the exponentials of the logits, in their own memory or, from 16-bit ones, in an fp32 copy, and
    exchanges three numbers per token (maximum, sum, the target's logit).
    """
    vocab, norm = dims.share(dims.vocab), sum(_norm_sizes(dims))
    forward = 2 * dims.tokens * dims.hidden * vocab
    normed = _norm_bytes(dims, dims.norm, dims.local_tokens, dims.hidden) + _hidden_bytes(
        dims, dims.tokens
    )
    narrow = dims.element_bytes if dims.element_bytes < 4 else 0
    exchange = all_gather(dims.tensor * 3 * dims.tokens * dims.wide_bytes, dims.tensor)
    return Cost(
        name="head",
        parameters=norm + vocab * dims.hidden,
        sizes=(*_norm_sizes(dims), vocab * dims.hidden),
        flops_forward=forward,
        flops_backward=2 * forward,
        activation_bytes=normed
        + dims.tokens
        * ((vocab + 1) * dims.wide_bytes + INDEX_BYTES + MASK_BYTES * (1 + (dims.tensor > 1))),
        output_bytes=0,
        working_bytes=dims.tokens * (vocab * narrow + dims.hidden * dims.element_bytes),
        tp_bytes=all_reduce(_hidden_bytes(dims, dims.tokens), dims.tensor) + exchange,
        partial_elements=all_reduce(norm, dims.tensor) if dims.scattered else 0,
        tied_parameters=vocab * dims.hidden if dims.tied else 0,
    )


def _hidden_bytes(dims: Decoder, tokens: int) -> int:
    return tokens * dims.hidden * dims.element_bytes


def _dropout_bytes(dims: Decoder) -> int:
    return dims.local_tokens * dims.hidden * MASK_BYTES * dims.dropout


def _norm_sizes(dims: Decoder) -> tuple[int, ...]:
    return (dims.hidden,) * (2 if dims.norm == "layernorm" else 1)


def _block_sizes(dims: Decoder) -> tuple[int, ...]:
    """Query, key and value are one parameter, unless ranks share kv heads; gate and up are one."""
    q, kv, f, h = dims.query_width, dims.kv_width, dims.share(dims.ffn), dims.hidden
    projections = (q, 2 * kv) if dims.kv_sharers > 1 else (q + 2 * kv,)
    outputs = (*projections, f * (2 if dims.gated else 1))
    weights = (*(h * out for out in outputs), q * h, f * h)
    biases = (*outputs, h, h) if dims.bias else ()
    head_norms = (dims.head_size,) * 2 if dims.qk_norm else ()
    return (*weights, *biases, *_norm_sizes(dims) * 2, *head_norms)


def _block_partial_elements(dims: Decoder) -> int:
    """Parameters that every tensor rank holds, where each saw part of the sequence or of the heads only."""
    between = 2 * sum(_norm_sizes(dims)) + 2 * dims.hidden * dims.bias if dims.scattered else 0
    shared = 2 * dims.kv_width * (dims.hidden + dims.bias)
    return all_reduce(between + 2 * dims.head_size * dims.qk_norm, dims.tensor) + all_reduce(
        shared, dims.kv_sharers
    )


def _norm_bytes(dims: Decoder, kind: str, tokens: int, width: int, input_kept: bool = False) -> int:
    """What a norm keeps: its input, unless another operation keeps it anyway, and statistics per row.

    Torch's composed RMSNorm works in fp32 at least: it keeps a 16-bit input as an fp32 copy, and the normalized input
    too.
    """
    elements, kept_input = tokens * width, 0 if input_kept else dims.element_bytes
    if kind == "layernorm":
        return elements * kept_input + 2 * tokens * dims.wide_bytes
    if dims.fused_norm:
        return elements * kept_input + tokens * dims.wide_bytes
    copied = dims.wide_bytes if dims.element_bytes < 4 else kept_input
    return elements * (copied + dims.wide_bytes) + tokens * dims.wide_bytes


def _kept_and_rebuilt(dims: Decoder) -> tuple[int, int]:
    """Bytes that a block keeps, and the most that an operation rebuilds at once of those that are computed again."""
    parts = {
        "attention": _attention_bytes(dims),
        "activation": _activation_bytes(dims),
        "norm": 2 * _normed_bytes(dims),
    }
    again = {name: parts[name] for name in dims.recompute}
    at_once = max(
        (size // 2 if name == "norm" else size for name, size in again.items()), default=0
    )
    inputs = 2 * _hidden_bytes(dims, dims.local_tokens) if "norm" in again else 0
    kept = sum(parts.values()) - sum(again.values()) + inputs
    projected = (
        dims.query_width + 2 * dims.kv_width + dims.share(dims.ffn) * (2 if dims.gated else 1)
    )
    return kept + dims.tokens * projected * dims.element_bytes + 2 * _dropout_bytes(dims), at_once


def _attention_bytes(dims: Decoder) -> int:
    """What attention keeps besides the packed projection of q, k and v: its output (which is also the input of the
    output projection) and one number per row and head. Rotary positions and q/k norms make new q and k, while v keeps
    the projection alive.
    """
    tokens, q, kv = dims.tokens, dims.query_width, dims.kv_width
    elements = tokens * (2 * q + kv if dims.rotary or dims.qk_norm else q)
    row_sums = tokens * (q // dims.head_size) * dims.wide_bytes
    heads_normed = 0
    if dims.qk_norm:
        rows = tokens * (q + kv) // dims.head_size
        heads_normed = _norm_bytes(dims, "rmsnorm", rows, dims.head_size, input_kept=True)
    return elements * dims.element_bytes + row_sums + heads_normed


def _activation_bytes(dims: Decoder) -> int:
    """The activation function's output; gated: silu(gate) and the product."""
    return dims.tokens * dims.share(dims.ffn) * (2 if dims.gated else 1) * dims.element_bytes


def _normed_bytes(dims: Decoder) -> int:
    """What a norm keeps, and the (gathered) input of the projection that follows it."""
    return _norm_bytes(dims, dims.norm, dims.local_tokens, dims.hidden) + _hidden_bytes(
        dims, dims.tokens
    )


def fully_recomputed(cost: Cost, sliced: int = 1, buffers: int = 0) -> Cost:
    """The cost of a layer that keeps its input only (of its output's size) and runs its forward again before the
    backward.

    sliced: inputs are, over so many tensor ranks, and gathered again, one ahead of the layer that runs. buffers: so
    many inputs are on their way at once to and from elsewhere; 0: they stay on the device.
    """
    kept = -(-cost.output_bytes // sliced)
    passing = buffers * kept + (2 * cost.output_bytes if sliced > 1 else 0)
    return replace(
        cost,
        flops_backward=cost.flops_backward + cost.flops_forward,
        activation_bytes=0 if buffers else kept,
        offloaded_bytes=kept if buffers else 0,
        working_bytes=cost.working_bytes + cost.activation_bytes + passing,
        tp_bytes=cost.tp_bytes + cost.tp_bytes // 2 + all_gather(cost.output_bytes, sliced),
    )


def stage_parameters(costs: Sequence[Cost]) -> int:
    """Parameters of the layers of one stage on one tensor rank; tied ones count once. Of a whole model: its size."""
    tied = [cost.tied_parameters for cost in costs if cost.tied_parameters]
    return sum(cost.parameters for cost in costs) - sum(tied) + max(tied, default=0)


def sliced_parameters(costs: Sequence[Cost], resident: int) -> int:
    """Those of `stage_parameters` that ZeRO-3 keeps as slices: of parameters with `resident` elements or more."""
    tied = [cost.tied_parameters for cost in costs if cost.tied_parameters >= max(resident, 1)]
    return sum(cost.sliced(resident) for cost in costs) - sum(tied) + max(tied, default=0)


def train_flops_per_token(dims: Decoder, layers: int) -> float:
    """Model FLOPs of forward and backward for one token, the basis of MFU: 6 per matmul weight + 12 l a d s.

    The whole model, whatever t is, without recomputation, attention in full (arXiv 2204.02311, appendix B; unlike
    there the projection to the vocabulary is counted and the embedding look-up is not).
    """
    whole = replace(dims, tensor=1, tensor_rank=0, sequence=False)
    return sum(cost.flops for cost in transformer_costs(whole, layers)) / whole.tokens


def decoder(
    config: ModelConfig, *, micro_batch: int, tensor: int = 1, tensor_rank: int = 0, sequence: bool = False,
    element_bytes: int = 4,
) -> Decoder:  # fmt: skip
    """The dimensions of a resolved model as one tensor rank sees them."""
    gpt = config.arch == "gpt"
    return Decoder(
        hidden=config.hidden, heads=config.heads, ffn=config.ffn or 4 * config.hidden, vocab=config.vocab or 0,
        seq=config.seq, kv_heads=config.kv_heads or config.heads, head_dim=config.head_dim or 0,
        micro_batch=micro_batch, tensor=tensor, tensor_rank=tensor_rank, sequence=sequence, gated=not gpt,
        norm="layernorm" if gpt else "rmsnorm", qk_norm=config.qk_norm, rotary=not gpt,
        positions=config.seq if gpt else 0, bias=bool(config.bias) if config.bias is not None else gpt,
        dropout=config.dropout > 0, tied=config.tied if config.tied is not None else gpt, element_bytes=element_bytes,
    )  # fmt: skip


def in_turn(microbatches: int) -> tuple[Action, ...]:
    """The compute actions of a rank without a pipeline: each micro-batch's forward and backward."""
    return tuple(
        Action(kind, microbatch) for microbatch in range(microbatches) for kind in (Kind.F, Kind.B)
    )


def gathered_by(number: int, layer: Cost, resident: int) -> dict[int, int]:
    """Elements of what a layer gathers: of its own, and of the table that tied layers share (-1)."""
    shared = layer.tied_parameters if layer.tied_parameters >= resident else 0
    return {
        key: size for key, size in ((number, layer.sliced(resident) - shared), (-1, shared)) if size
    }


def communication_bytes(
    layers: Sequence[Cost],
    *,
    microbatches: int,
    shards: int = 1,
    replicas: int = 1,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    zero_stage: int = 0,
    resident: int = 0,
    prefetch: int = 1,
    actions: Sequence[Action] | None = None,
    input_bytes: int = 0,
    last: bool = True,
    tied_elsewhere: bool = False,
    parameters: int | None = None,
) -> dict[str, int]:
    """Bytes sent per step over tp, pp, dp and cp by a rank that holds these layers.

    shards, replicas: data-parallel ranks that share one set of slices, and how many such sets there are. reduce_bytes:
    of a gradient element on its way. resident, prefetch: under ZeRO-3 parameters with fewer elements stay whole, and so
    many layers are gathered ahead. actions: what the rank does, on which ZeRO-3's gathers depend (`plan.ranks[rank]`);
    default: each micro-batch's forward and backward in turn. input_bytes: what this stage receives per micro-batch, and
    so the size of the gradient it sends back; 0 on the first stage. last: whether the stage ends the model.
    tied_elsewhere: its tied parameters have a copy on another stage, with which their gradient is summed. parameters:
    default what the layers say.
    """
    count = stage_parameters(layers) if parameters is None else parameters
    partial = sum(layer.partial_elements for layer in layers)
    tied = max((layer.tied_parameters for layer in layers), default=0) if tied_elsewhere else 0
    output = 0 if last else layers[-1].output_bytes
    gathered = None
    if zero_stage == 3 and layers:
        done = in_turn(microbatches) if actions is None else actions
        units = [gathered_by(number, layer, resident) for number, layer in enumerate(layers)]
        times = gathering(
            units, [layer.backward_reads for layer in layers], done, prefetch=prefetch
        ).times
        moved = sum(
            times[key] * size
            for key, size in {k: n for unit in units for k, n in unit.items()}.items()
        )
        gathered = moved + count - sliced_parameters(layers, resident)
    return {
        "tp": microbatches * sum(layer.tp_bytes for layer in layers)
        + _slice(partial, zero_stage, shards) * reduce_bytes,
        "pp": microbatches * (output + input_bytes)
        + all_reduce(_slice(tied, zero_stage, shards) * reduce_bytes, 2),
        "dp": data_parallel_bytes(
            count, shards, param_bytes, reduce_bytes, zero_stage,
            replicas=replicas, microbatches=microbatches, gathered=gathered,
        ),
        "cp": 0,
    }  # fmt: skip


def data_parallel_bytes(
    parameters: int,
    shards: int,
    param_bytes: int,
    reduce_bytes: int,
    zero_stage: int,
    *,
    replicas: int = 1,
    microbatches: int = 1,
    gathered: int | None = None,
) -> int:
    """Bytes sent to sum the gradients over data-parallel ranks and to give all of them the parameters.

    Stage 0 all-reduces gradients; stages 1 to 3 reduce-scatter them over `shards` (stage 1 once, 2 and 3 for every
    micro-batch), all-reduce the slices over `replicas` once, and all-gather parameters in their own dtype: stages 1 and
    2 once, stage 3 `gathered` elements in all (default: every parameter in every forward and backward). Over one shard
    all stages are stage 0.
    """
    if zero_stage == 0 or shards == 1:
        return all_reduce(parameters * reduce_bytes, shards * replicas)
    if zero_stage < 3:
        gathered = parameters
    elif gathered is None:
        gathered = 2 * microbatches * parameters
    reductions = microbatches if zero_stage >= 2 else 1
    return (
        reductions * reduce_scatter(parameters * reduce_bytes, shards)
        + all_reduce(_slice(parameters, zero_stage, shards) * reduce_bytes, replicas)
        + all_gather(gathered * param_bytes, shards)
    )


def _slice(elements: int, zero_stage: int, shards: int) -> int:
    """What a rank still sums over other axes: its slice, once ZeRO has scattered the gradients, or everything."""
    return -(-elements // shards) if zero_stage >= 1 else elements
