"""Costs of a decoder's layers on one tensor rank, computed from published formulas.

`transformer_costs(Decoder(hidden=4096, heads=32, ffn=16384, vocab=50304, seq=2048), layers=32)`
returns a `Cost` for the embedding, each block, and the head. `communication_bytes` returns the
bytes that a rank with some of these layers sends per step. No layer is run, so tests can compare
the results with the planner's.

Matrix products are counted with 2mnk FLOPs, and attention over the full s x s square (without a
discount for causal masks, as in PaLM, arXiv 2204.02311, appendix B). Norms, activation functions
and softmax are not counted. Activation bytes are the bytes that autograd stores for the backward of
threed's layers; attention stores its inputs, its output and one number per row, but not the s x s
scores.

Letters: b micro-batch, s sequence, h hidden size, a heads, k key/value heads, d head size, f
feed-forward width, v vocabulary size, t tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from threed.config import ModelConfig
from threed.planner.gathering import gathering
from threed.schedules.action import Action, Kind

INDEX_BYTES = 8  # token ids are int64
MASK_BYTES = 1  # masks are booleans: of dropout, and of tokens in a vocabulary shard


# Bytes that one rank sends in a collective with a bandwidth-optimal ring (arXiv 1910.02054, section 7.1).


def all_gather(full: int, ranks: int) -> int:
    """Returns the bytes sent if every rank gets all `full` bytes, of which it had one part."""
    return full * (ranks - 1) // ranks


def reduce_scatter(full: int, ranks: int) -> int:
    """Returns the bytes sent if `full` bytes are summed and every rank keeps one part."""
    return full * (ranks - 1) // ranks


def all_reduce(full: int, ranks: int) -> int:
    """Returns the bytes sent if `full` bytes are summed and every rank gets the full sum."""
    return 2 * full * (ranks - 1) // ranks


@dataclass(frozen=True)
class Cost:
    """Costs of one pipeline layer on one tensor rank, per micro-batch unless stated otherwise.

    Attributes:
        activation_bytes: bytes stored from the forward to the backward.
        offloaded_bytes: the same, but not on the device.
        working_bytes: bytes needed only while the layer's backward runs (an estimate).
        output_bytes: bytes of the output.
        tp_bytes: bytes sent to the other tensor ranks in forward and backward.
        partial_elements: elements that this rank sends per step to sum gradients over the tensor
            ranks.
        tied_parameters: the part of `parameters` that layers of one stage share with each other.
        sizes: elements of each parameter on this rank; their sum is `parameters`. Empty means one
            parameter.
        backward_reads: whether the backward needs the weights (a look-up does not).
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
        """The number of elements of the largest parameter."""
        return max(self.sizes, default=self.parameters)

    def sliced(self, resident: int) -> int:
        """Returns the elements of the parameters that ZeRO-3 shards.

        These are parameters with at least `resident` elements.
        """
        return sum(size for size in self.sizes or (self.parameters,) if size >= resident)

    @property
    def flops(self) -> int:
        """The FLOPs of forward and backward."""
        return self.flops_forward + self.flops_backward


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The dimensions of a decoder-only transformer on one tensor rank.

    Attributes:
        element_bytes: bytes per element of the compute dtype.
        positions: number of learned positions; 0 for rotary or no positions.
        tensor, tensor_rank: t, and this rank's index. Vocabulary and f need not be divisible by t.
        sequence: whether each tensor rank holds only s/t positions between matrix products.
        fused_norm: whether RMSNorm stores only its input. torch's composed one also stores the
            normalized input; both are at least fp32.
        recompute: operations that blocks recompute (attention, activation, norm).
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
        """The number of tokens of a micro-batch."""
        return self.seq * self.micro_batch

    @property
    def local_tokens(self) -> int:
        """The number of tokens whose activations between blocks are on this rank."""
        return self.tokens // self.tensor if self.scattered else self.tokens

    @property
    def head_size(self) -> int:
        """The head size d."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """The features of this rank's query heads, a/t * d."""
        return self.heads // self.tensor * self.head_size

    @property
    def kv_width(self) -> int:
        """The features of this rank's key heads, k/t * d; at least one head per rank."""
        return max((self.kv_heads or self.heads) // self.tensor, 1) * self.head_size

    @property
    def kv_sharers(self) -> int:
        """The number of tensor ranks that hold the same key/value head."""
        return max(self.tensor // (self.kv_heads or self.heads), 1)

    @property
    def wide_bytes(self) -> int:
        """Bytes per element of statistics and of softmax, which are at least fp32."""
        return max(self.element_bytes, 4)

    def share(self, size: int) -> int:
        """Returns this rank's part of `size`, split over the tensor ranks as evenly as possible."""
        return size * (self.tensor_rank + 1) // self.tensor - size * self.tensor_rank // self.tensor


def transformer_costs(dims: Decoder, layers: int) -> list[Cost]:
    """Returns the costs of the pipeline layers in order: embedding, `layers` blocks, head."""
    block = block_cost(dims)
    blocks = [replace(block, name=f"blocks.{index}") for index in range(layers)]
    return [embedding_cost(dims), *blocks, head_cost(dims)]


def embedding_cost(dims: Decoder) -> Cost:
    """Returns the cost of word vectors, split by vocabulary, and of learned positions.

    A look-up has no FLOPs.
    """
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
    """Returns the cost of a block: norm, attention, norm and feed-forward, with two residuals.

    Per micro-batch, four all-reduces of s b h elements are needed. With sequence parallelism, an
    all-gather and a reduce-scatter replace each, with the same number of bytes (arXiv 2205.05198,
    section 4.2.2).
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
    """Returns the cost of the last norm, the projection to the vocabulary, and cross entropy.

    Cross entropy stores the exponentials of the logits: in the memory of the logits, or in an fp32
    copy if the logits have 16 bits. The ranks exchange three numbers per token: maximum, sum, and
    the target's logit.
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
    """Returns the elements of each parameter of a block.

    Query, key and value are one parameter, unless ranks share key/value heads; gate and up are one
    parameter.
    """
    q, kv, f, h = dims.query_width, dims.kv_width, dims.share(dims.ffn), dims.hidden
    projections = (q, 2 * kv) if dims.kv_sharers > 1 else (q + 2 * kv,)
    outputs = (*projections, f * (2 if dims.gated else 1))
    weights = (*(h * out for out in outputs), q * h, f * h)
    biases = (*outputs, h, h) if dims.bias else ()
    head_norms = (dims.head_size,) * 2 if dims.qk_norm else ()
    return (*weights, *biases, *_norm_sizes(dims) * 2, *head_norms)


def _block_partial_elements(dims: Decoder) -> int:
    """Returns the elements of a block's parameters whose gradients are partial sums.

    Every tensor rank holds these parameters, but applies them only to a part of the sequence or of
    the heads.
    """
    between = 2 * sum(_norm_sizes(dims)) + 2 * dims.hidden * dims.bias if dims.scattered else 0
    shared = 2 * dims.kv_width * (dims.hidden + dims.bias)
    return all_reduce(between + 2 * dims.head_size * dims.qk_norm, dims.tensor) + all_reduce(
        shared, dims.kv_sharers
    )


def _norm_bytes(dims: Decoder, kind: str, tokens: int, width: int, input_kept: bool = False) -> int:
    """Returns the bytes that a norm stores.

    They are its input, unless another operation stores it anyway, and statistics per row. torch's
    composed RMSNorm computes in fp32 or wider: it stores a 16-bit input as an fp32 copy, and also
    the normalized input.
    """
    elements, kept_input = tokens * width, 0 if input_kept else dims.element_bytes
    if kind == "layernorm":
        return elements * kept_input + 2 * tokens * dims.wide_bytes
    if dims.fused_norm:
        return elements * kept_input + tokens * dims.wide_bytes
    copied = dims.wide_bytes if dims.element_bytes < 4 else kept_input
    return elements * (copied + dims.wide_bytes) + tokens * dims.wide_bytes


def _kept_and_rebuilt(dims: Decoder) -> tuple[int, int]:
    """Returns the bytes that a block stores, and the bytes that it recomputes at once.

    The second number is the largest one of all recomputed operations.
    """
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
    """Returns the bytes that attention stores in addition to the packed projection of q, k and v.

    They are its output (the input of the output projection) and one number per row and head. Rotary
    positions and norms of q and k create new tensors q and k, while v keeps the projection alive.
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
    """Returns the bytes that the activation function stores: its output.

    If it is gated, these are silu(gate) and the product.
    """
    return dims.tokens * dims.share(dims.ffn) * (2 if dims.gated else 1) * dims.element_bytes


def _normed_bytes(dims: Decoder) -> int:
    """Returns the bytes that a norm and the next projection store.

    The projection stores its (gathered) input.
    """
    return _norm_bytes(dims, dims.norm, dims.local_tokens, dims.hidden) + _hidden_bytes(
        dims, dims.tokens
    )


def fully_recomputed(cost: Cost, sliced: int = 1, buffers: int = 0) -> Cost:
    """Returns the cost of a layer with full recompute.

    The layer stores only its input, which has the size of its output, and runs its forward again
    before the backward.

    Args:
        cost: the cost without recompute.
        sliced: number of tensor ranks over which inputs are sliced. Inputs are gathered again, one
            ahead of the running layer.
        buffers: number of inputs that are transferred at once from and to their storage; 0 means
            that they stay on the device.
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
    """Returns the parameters of a stage's layers on one tensor rank; tied ones count once.

    For all layers, this is the size of the model.
    """
    tied = [cost.tied_parameters for cost in costs if cost.tied_parameters]
    return sum(cost.parameters for cost in costs) - sum(tied) + max(tied, default=0)


def sliced_parameters(costs: Sequence[Cost], resident: int) -> int:
    """Returns the part of `stage_parameters` that ZeRO-3 shards.

    These are parameters with at least `resident` elements.
    """
    tied = [cost.tied_parameters for cost in costs if cost.tied_parameters >= max(resident, 1)]
    return sum(cost.sliced(resident) for cost in costs) - sum(tied) + max(tied, default=0)


def train_flops_per_token(dims: Decoder, layers: int) -> float:
    """Returns the model FLOPs of forward and backward per token, for the MFU.

    They are 6 per weight of matrix products, plus 12 l a d s, for the full model without
    recomputation and with full attention (arXiv 2204.02311, appendix B). Unlike there, the
    projection to the vocabulary is counted, and the embedding is not.
    """
    whole = replace(dims, tensor=1, tensor_rank=0, sequence=False)
    return sum(cost.flops for cost in transformer_costs(whole, layers)) / whole.tokens


def decoder(
    config: ModelConfig, *, micro_batch: int, tensor: int = 1, tensor_rank: int = 0, sequence: bool = False,
    element_bytes: int = 4,
) -> Decoder:  # fmt: skip
    """Returns the dimensions of a resolved model on one tensor rank."""
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
    """Returns the compute actions of a rank without a pipeline.

    They are the forward and the backward of each micro-batch in turn.
    """
    return tuple(
        Action(kind, microbatch) for microbatch in range(microbatches) for kind in (Kind.F, Kind.B)
    )


def gathered_by(number: int, layer: Cost, resident: int) -> dict[int, int]:
    """Returns the elements that a layer gathers, by group.

    Its own parameters have the layer's number, and the table that tied layers share has the key -1.
    """
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
    """Returns the bytes that a rank with these layers sends per step over tp, pp, dp and cp.

    Args:
        layers: costs of the rank's layers.
        microbatches: number of micro-batches.
        shards: number of data ranks that share a set of slices.
        replicas: number of such sets.
        param_bytes: bytes per parameter element.
        reduce_bytes: bytes per gradient element that is sent.
        zero_stage: the ZeRO stage.
        resident: under ZeRO-3, parameters with fewer elements stay full.
        prefetch: number of layers that are gathered ahead.
        actions: the rank's actions (`plan.ranks[rank]`), on which the gathers of ZeRO-3 depend; by
            default F and B of each micro-batch in turn.
        input_bytes: bytes that the stage receives per micro-batch, which is also the size of the
            gradient that it sends back; 0 on the first stage.
        last: whether the stage is the last of the model.
        tied_elsewhere: whether another stage has a replica of the tied parameters, with whose
            gradient it is summed.
        parameters: number of parameters; by default the sum over the layers.
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
        "cp": 0, "ep": 0,
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
    """Returns the bytes sent to sum gradients over data ranks and to distribute the parameters.

    Stage 0 all-reduces gradients. Stages 1 to 3 reduce-scatter them over `shards` (stage 1 once,
    stages 2 and 3 in every micro-batch), all-reduce the slices over `replicas` once, and all-gather
    parameters in their own dtype: stages 1 and 2 once, stage 3 `gathered` elements in all (by
    default, every parameter in every forward and backward). With one shard, all stages are equal to
    stage 0.
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
    """Returns the elements that a rank sums over other axes.

    They are its slice if ZeRO has scattered the gradients, otherwise all elements.
    """
    return -(-elements // shards) if zero_stage >= 1 else elements
