"""Tensor-parallel layers from which models are built.

Activations between blocks have shape [s b h]: sequence length, micro-batch size, hidden width. The
sequence is the first dimension, so that a gather along it is a concatenation. With sequence
parallelism over t tensor ranks, each rank has a part of the sequence, [s/t b h]. Every parameter
carries a `ShardSpec` and stays on the meta device until its pipeline stage is built.
"""

from threed.core.block_patterns import (
    BigBirdPattern,
    BlockPattern,
    DensePattern,
    FixedPattern,
    FunctionPattern,
    LongformerPattern,
    VariablePattern,
)  # fmt: skip
from threed.distributed.collectives import split
from threed.distributed.conjugate import copy_to, gather_from, reduce_from, scatter_to
from threed.distributed.sharding import Init, Piece, ShardSpec, attach, matrix, parameter, vector
from threed.layers.attention import Attention
from threed.layers.block import Block, Embedding
from threed.layers.contract import PipelineLayer
from threed.layers.dropout import Dropout
from threed.layers.embedding import PositionEmbedding, VocabEmbedding
from threed.layers.experts import MixtureOfExperts
from threed.layers.latent_attention import LatentAttention
from threed.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear
from threed.layers.loss import LanguageModelHead
from threed.layers.mlp import MLP, GatedMLP, clamped_swiglu, gelu, squared_relu
from threed.layers.multi_token import MultiTokenPrediction
from threed.layers.norm import LayerNorm, RMSNorm
from threed.layers.recompute import Recompute
from threed.layers.routing import LossFactors, Routing
from threed.layers.slicing import MicroBatch, Slicing
from threed.ops.attention import Causal, attend
from threed.ops.block_sparse import SparseAttention
from threed.ops.rotary import rotate

__all__ = [
    "Slicing", "MicroBatch", "PipelineLayer", "Embedding", "Block", "LanguageModelHead", "MultiTokenPrediction", "Attention",
    "LatentAttention", "Causal", "attend", "SparseAttention", "BlockPattern", "DensePattern", "FixedPattern",
    "VariablePattern", "BigBirdPattern", "LongformerPattern", "FunctionPattern", "rotate", "MLP", "GatedMLP", "gelu",
    "squared_relu", "clamped_swiglu", "MixtureOfExperts", "Routing", "LossFactors", "LayerNorm", "RMSNorm", "Dropout",
    "VocabEmbedding",
    "PositionEmbedding", "ColumnLinear", "RowLinear", "ReplicatedLinear", "Recompute", "ShardSpec", "Piece", "Init",
    "parameter", "matrix", "vector", "attach", "copy_to", "reduce_from", "gather_from", "scatter_to", "split",
]  # fmt: skip
