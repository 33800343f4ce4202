"""Tiny models of `transformers`, their batches, and training in plain PyTorch for comparison."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from threed.models.wrapped import Wrapped, loss_of
from threed.testing.ranks import preload

# transformers imports the module of a model at its first use, which takes seconds. Here the parent of the ranks does it.
preload(
    "tests.hf_models",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "gpt2", "llama", "qwen3", "t5")
    ),
)

VOCAB, LENGTH = 61, 12
COMMON = {"vocab_size": VOCAB, "use_cache": False}
LLAMA = {
    **COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
BERT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {
    **COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
T5 = {
    **COMMON, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip


class Odd(nn.Module):
    """A module with structures that frameworks often handle wrongly.

    A block runs twice. Weights belong to other modules (the head uses an embedding's, the root
    module a block's). One weight is never used, one is a scalar, and one is used only in every
    second step. With `span`, several blocks are in one reentrant checkpoint. With `whim`, the ranks
    even use different weights.
    """

    def __init__(self, span: bool = False, whim: bool = False) -> None:
        super().__init__()
        width = 16
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(4)
        )
        self.unused = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.LayerNorm(width)
        self.span, self.whim = span, whim

    def through(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[3]):
            x = x + block(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = checkpoint(self.through, x, use_reentrant=True) if self.span else self.through(x)
        if int(input_ids[0, 1 if self.whim else 0]) % 2:
            x = x + self.blocks[2](x)
        x = self.norm(x @ self.blocks[1][0].weight.t() @ self.blocks[1][2].weight.t()) * self.scale
        return F.cross_entropy(
            F.linear(x, self.embed.weight).flatten(0, 1), labels.flatten(), ignore_index=-100
        )


def make(name: str, seed: int = 0) -> nn.Module:
    """Returns the model `name` with the same fp64 weights in each call.

    Inside `torch.device("meta")` it is on the meta device.
    """
    torch.manual_seed(seed)
    models: dict[str, Any] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
        "odd": Odd,
        "odd-span": lambda: Odd(span=True),
        "odd-whim": lambda: Odd(whim=True),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    }
    model: nn.Module = models[name]()
    return model.double().train()


def batch(step: int, rows: int) -> dict[str, Tensor]:
    """Returns a global batch of a step.

    Some labels are negative, with a different share in each row. Each row begins with the number of
    the step.
    """
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(1, VOCAB, (rows, LENGTH), generator=draw)
    ids[:, 0] = step + 1
    ignored = torch.rand(rows, LENGTH, generator=draw) < torch.linspace(0, 0.5, rows).view(-1, 1)
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def train_plainly(
    model: nn.Module, steps: int, rows: int, pieces: int, *, lr: float = 3e-3, clip: float = 0.5
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Trains with torch's AdamW.

    The mean losses of the `pieces` micro-batches are weighted by their numbers of valid labels.

    Returns:
        The loss and the gradient norm of each step, and the weights after the last step.
    """
    wrapped = Wrapped(model)  # only to count the items of a loss
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        full = batch(step, rows)
        parts = [{k: v.chunk(pieces)[i] for k, v in full.items()} for i in range(pieces)]
        items = [wrapped.count(part) for part in parts]
        whole = torch.stack(items).sum()
        losses.append(0.0)
        for n, part in zip(items, parts, strict=True):
            loss = loss_of(model(**part)) * (n / whole)
            loss.backward()
            losses[-1] += float(loss.detach())
        for (
            p
        ) in trained:  # a weight that was never used has no gradient, and torch does not update it
            p.grad = torch.zeros_like(p) if p.grad is None and p in optimizer.state else p.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return (
        losses,
        norms,
        {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)},
    )
