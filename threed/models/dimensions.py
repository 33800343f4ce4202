"""What a configured model costs: the planner's records for it."""

from __future__ import annotations

from collections.abc import Sequence

from threed.config import ModelConfig
from threed.planner import Decoder, transformer_costs


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


def layer_flops(config: ModelConfig, micro_batch: int) -> Sequence[float]:
    """FLOPs of every pipeline layer for one micro-batch: the costs that stages are balanced by.

    Of the whole layer, not of a tensor rank's part: every rank must cut the model alike.
    """
    return [cost.flops for cost in transformer_costs(decoder(config, micro_batch=micro_batch), config.layers)]
