"""The pipeline layers `Embedding` and `Block` of a decoder."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from threed.layers.attention import Attention, takes
from threed.layers.contract import PipelineLayer
from threed.layers.dropout import Dropout
from threed.layers.embedding import PositionEmbedding, VocabEmbedding
from threed.layers.linear import RowLinear
from threed.layers.norm import adds_bias, sum_and_norm
from threed.layers.recompute import Recompute
from threed.layers.slicing import MicroBatch, Slicing, is_plain


class Embedding(PipelineLayer):
    """Maps token ids [b s] to x [s b h]: word vectors plus learned positions, with dropout.

    x is [s/t b h] with sequence parallelism.

    Args:
        name: global name of the layer.
        vocab: number of rows of the token embedding.
        hidden: hidden width h.
        slicing: parallel layout and seed of dropout.
        positions: number of learned positions. None: no learned positions.
        dropout: probability of zeroing an element.
        std: standard deviation of the initial weights.
        scale: factor of the word vectors. It is rounded to fp32, then to the vectors' dtype.
        word: global name of the token embedding, the prefix of the name of its table. Default:
            `name`.word.
    """

    context = True
    backward_reads_weights = False
    documents = True
    # The layer saves only the ids and a mask with one byte per element, so its recomputation would
    # free little memory.
    recomputable = False

    def __init__(
        self, name: str, vocab: int, hidden: int, slicing: Slicing, *, positions: int | None = None,
        dropout: float = 0.0, std: float = 0.02, scale: float = 1.0, word: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.scale = name, scale
        self.word = VocabEmbedding(word or f"{name}.word", vocab, hidden, slicing, std=std)
        self.position: PositionEmbedding | None = None
        if positions:
            at = f"{name}.position"
            self.position = PositionEmbedding(at, positions, hidden, slicing, std=std)
        self.dropout = Dropout(f"{name}.dropout", dropout, slicing)

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """Returns the activations of the first block.

        Args:
            x: None, because this is the first layer.
            micro: the micro-batch; its tokens are read, int64 [b s].

        Returns:
            [s b h]; with sequence parallelism [s/t b h].

        Raises:
            ValueError: if the micro-batch has no tokens.
        """
        if micro.tokens is None:
            raise ValueError("the first pipeline stage needs the batch's 'tokens' [b s]")
        y = self.word(micro.tokens)
        if self.scale != 1.0:
            y = y * rounded(self.scale, y.dtype)
        y = y if self.position is None else self.position(y, micro.documents)
        return self.dropout(y, micro)


@functools.lru_cache(maxsize=64)
def rounded(number: float, dtype: torch.dtype) -> float:
    """Returns a number rounded to fp32, then to `dtype`."""
    return float(torch.tensor(number, dtype=torch.float32, device="cpu").to(dtype))


class Block(PipelineLayer):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)), each branch with dropout.

    The forward maps x [s b h] -> [s b h] (with sequence parallelism [s/t b h]).

    Args:
        name: global name of the layer.
        norms: the norm before attention and the norm before the MLP.
        attention: module [s b h] -> [s b h]. If its forward has a parameter `documents`, it is
            called with the micro-batch's documents, if there are any.
        mlp: module [s b h] -> [s b h]. If its forward has a parameter `micro`, it is called with the
            micro-batch.
        slicing: parallel layout and seed of dropout.
        dropout: probability of zeroing an element of a branch's output.
        post_norms: norms of the outputs of attention and MLP, before the residual addition.
            Default: no such norms.
    """

    recompute = Recompute()

    def __init__(
        self, name: str, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module, slicing: Slicing, *,
        dropout: float = 0.0, post_norms: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self._takes_documents = takes(attention, "documents")
        self._takes_micro = takes(mlp, "micro")
        self.attention_dropout, self.mlp_dropout = (
            Dropout(f"{name}.{branch}.dropout", dropout, slicing) if dropout else None
            for branch in ("attention", "mlp")
        )
        self.attention_post_norm = post_norms[0] if post_norms else None
        self.mlp_post_norm = post_norms[1] if post_norms else None

    @property
    def context(self) -> bool:  # type: ignore[override]
        """Whether attention and MLP state that they support context parallelism."""
        return all(getattr(part, "context", False) for part in (self.attention, self.mlp))

    @property
    def documents(self) -> bool:  # type: ignore[override]
        """Whether the attention keeps packed documents apart."""
        one = self.attention
        return one.documents if isinstance(one, Attention) else self._takes_documents

    @property
    def compilable(self) -> bool:  # type: ignore[override]
        """Whether torch.compile can compile the forward; not if the MLP reads the micro-batch."""
        return not self._takes_micro

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Returns the output of the block.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            micro: the micro-batch; its samples and step seed the dropout.

        Raises:
            ValueError: if the micro-batch has documents, which the attention does not support.
        """
        x, y = self._normed(self.attention_norm, x)
        bias = self._bias_for_norm(x)
        y = self._post(self.attention_post_norm, self._attend(y, micro.documents, bias is None))
        # A dropout adds the residual in its own pass. Without one, the norm does.
        drop = self.attention_dropout
        terms = (y, x, bias) if drop is None else (drop(y, micro, x),)
        x, y = self._normed(self.mlp_norm, *terms)
        y = self._post(self.mlp_post_norm, self.mlp(y, micro) if self._takes_micro else self.mlp(y))
        return x + y if self.mlp_dropout is None else self.mlp_dropout(y, micro, x)

    def _bias_for_norm(self, x: Tensor) -> Tensor | None:
        """Returns the bias of the attention's output if the kernel of the MLP's norm can add it.

        x is the block's input.
        """
        if self.attention_dropout is not None or self.attention_post_norm is not None:
            return None
        if not is_plain(self.attention, Attention) or type(self.recompute) is not Recompute:
            return None
        bias = self.attention.out.bias if is_plain(self.attention.out, RowLinear) else None
        return bias if bias is not None and adds_bias(self.mlp_norm, x, bias) else None

    def _attend(self, y: Tensor, documents: Tensor | None, add_bias: bool) -> Tensor:
        if not add_bias:
            return self.attention(y, documents, add_bias=False)
        if documents is None:
            return self.attention(y)
        if not self._takes_documents:
            raise ValueError(
                f"{self.name}: {type(self.attention).__name__} does not support packed documents: give its forward a"
                " parameter `documents` (int64 [b s]), or leave out the batch's 'documents' and --data.packing"
            )
        return self.attention(y, documents=documents)

    def _post(self, norm: nn.Module | None, y: Tensor) -> Tensor:
        """Applies the post-norm of a branch, if it has one, to its output y."""
        return y if norm is None else self.recompute.run("norm", norm, y)

    def _normed(
        self, norm: nn.Module, x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum x + residual + bias (x without a residual) and the norm of the sum.

        With selective recompute the sum is a separate operation, because the backward recomputes
        the norm from the sum.
        """
        if type(self.recompute) is Recompute:
            return sum_and_norm(norm, x, residual, bias)
        total = x if residual is None else x + residual
        return total, self.recompute.run("norm", norm, total)
