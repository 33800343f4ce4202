"""The models of `tests/users_models.py` in plain PyTorch, without code of threed.

    truth = train("albert", weights, batches, microbatches=3, evaluated=batch)

The results of every topology must equal these. Weights have the engine's global names. A model is a
function of the weights and of a micro-batch [b ...] that returns logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference_models import turn

LR, CLIP, DECAY, BETAS, EPS = 3e-3, 0.5, 0.1, (0.9, 0.95), 1e-8
HEADS = 4
WORD = "embedding.word.weight"

Weights = dict[str, Tensor]
Batch = dict[str, Tensor]


@dataclass
class Run:
    """Values on which a forward may depend in addition to weights and batch."""

    step: int = 0
    training: bool = True
    means: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)  # sums of the losses of middle layers


@dataclass
class Result:
    """The results of a few steps.

    They are losses, gradient norms, the weights after the last step, and the loss of an evaluated
    batch.
    """

    losses: list[float]
    norms: list[float]
    weights: Weights
    evaluation: float


def rms(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return (
        x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )


def dense(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].t()
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def heads(x: Tensor, count: int) -> Tensor:
    """Splits heads: [b s (a d)] -> [b a s d]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """Returns attention with joined heads: [b a s d] -> [b s (a d)]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return dense(w, f"{name}.down", F.gelu(dense(w, f"{name}.up", x), approximate="tanh"))


def block(w: Weights, name: str, x: Tensor, count: int = HEADS) -> Tensor:
    y = rms(w, f"{name}.attention_norm", x)
    q, k, v = (
        heads(dense(w, f"{name}.attention.{part}", y), count) for part in ("query", "key", "value")
    )
    x = x + dense(w, f"{name}.attention.out", attend(turn(q, 1e4), turn(k, 1e4), v))
    return x + mlp(w, f"{name}.mlp", rms(w, f"{name}.mlp_norm", x))


def head(w: Weights, x: Tensor, weight: str = WORD) -> Tensor:
    return rms(w, "head.norm", x) @ w[weight].t()


# ------------------------------------------------------------------------------------------------------------- models


def two_ties(w: Weights, batch: Batch, run: Run) -> Tensor:
    up = w["embedding.up.weight"]
    x = w[WORD][batch["tokens"]] @ up.t()
    return head(w, block(w, "blocks.1", block(w, "blocks.0", x)) @ up)


def three_way_tie(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = block(w, "blocks.0", w[WORD][batch["tokens"]])
    x = x + torch.tanh(rms(w, "memory.norm", x) @ w[WORD].t()) @ w[WORD]
    return head(w, block(w, "blocks.1", x))


def a_list(names: Sequence[str], weight: str) -> Callable[[Weights, Batch, Run], Tensor]:
    """Returns a model of an embedding, blocks with these names, and a head."""

    def forward(w: Weights, batch: Batch, run: Run) -> Tensor:
        x = w[WORD][batch["tokens"]]
        for name in names:
            x = block(w, name, x)
        return head(w, x, weight)

    return forward


def kernels(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = w[WORD][batch["tokens"]]
    y = rms(w, "gate.norm", x)
    x = x + (y @ w["gate.weight"][0]) * torch.sigmoid(y @ w["gate.weight"][1])
    y = F.pad(dense(w, "convolution.up", rms(w, "convolution.norm", x)), (0, 0, 3, 0))
    y = sum(y[:, i : i + x.shape[1]] * w["convolution.weight"][:, 0, i] for i in range(4))
    x = x + dense(w, "convolution.down", F.silu(y))
    y = rms(w, "stacked.norm", x)
    gate, up = y @ w["stacked.weight"][0].t(), y @ w["stacked.weight"][1].t()
    return head(w, x + dense(w, "stacked.down", F.silu(gate) * up))


def running(w: Weights, name: str, x: Tensor, run: Run) -> Tensor:
    length, hidden = x.shape[1:]
    mean = run.means.get(name, x.new_zeros(hidden))
    if run.training:
        run.means[name] = 0.9 * mean + 0.1 * x.detach().mean((0, 1))
    seen = x if run.training else x - mean
    # Evaluation follows the last step, and uses the scale of that step.
    scale = 1 / (1 + (run.step if run.training else run.step - 1))
    positions = torch.sin(torch.arange(length * hidden, dtype=torch.float64)).view(length, hidden)
    return x + positions + rms(w, f"{name}.norm", seen) * scale


def buffers(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = running(w, "running.0", w[WORD][batch["tokens"]], run)
    return head(w, running(w, "running.1", block(w, "blocks.0", x), run))


def cast(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = w[WORD][batch["tokens"]]
    for i in range(2):
        x = block(w, f"blocks.{i}", x).float().double()
    return head(w, x)


def pool(x: Tensor) -> Tensor:
    """Returns the means of neighboring positions: [b s h] -> [b s/2 h]."""
    return (x[:, 0::2] + x[:, 1::2]) / 2


def stretch(x: Tensor) -> Tensor:
    """Repeats each position: [b s h] -> [b 2s h]."""
    return x.repeat_interleave(2, dim=1)


def hourglass(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = block(w, "blocks.0", w[WORD][batch["tokens"]])
    x = block(w, "blocks.1", x[..., : x.shape[-1] // 2], HEADS // 2)
    x = block(w, "blocks.2", pool(torch.cat((x, x.square()), -1)))
    return head(w, stretch(x), "head.weight")


def latent_layer(w: Weights, name: str, x: Tensor, rank: int = 10, turned: int = 4) -> Tensor:
    y = rms(w, f"{name}.norm", x)
    down = dense(w, f"{name}.down", y)
    latent, shared = rms(w, f"{name}.latent_norm", down[..., :rank]), down[..., rank:]
    q = heads(dense(w, f"{name}.query", y), HEADS)
    k, v = (heads(dense(w, f"{name}.{part}", latent), HEADS) for part in ("key", "value"))
    k_turned = turn(heads(shared, 1), 1e4).expand(-1, HEADS, -1, -1)
    q = torch.cat((q[..., :-turned], turn(q[..., -turned:], 1e4)), -1)
    return x + dense(w, f"{name}.out", attend(q, torch.cat((k, k_turned), -1), v))


def latent(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = latent_layer(w, "latent.0", w[WORD][batch["tokens"]])
    return head(w, latent_layer(w, "latent.1", block(w, "blocks.0", x)))


def two_tensors(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = w[WORD][batch["tokens"]]
    memory = pool(torch.cat((x, x.square()), -1))
    x = block(w, "blocks.0", x) + w["value.word.weight"][batch["tokens"]]
    return head(w, block(w, "blocks.1", x) + stretch(dense(w, "head.memory", memory)))


def middle_losses(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = block(w, "blocks.0", w[WORD][batch["tokens"]])
    exits = [rms(w, "exit.0.norm", x) @ w[WORD].t()]
    x = block(w, "blocks.1", x)
    squares = x.square().mean(-1).sum()
    x = block(w, "blocks.2", x)
    exits.append(rms(w, "exit.1.norm", x) @ w["exit.1.weight"].t())
    run.losses = [0.05 * squares, *(0.3 * summed_loss(logits, batch["labels"]) for logits in exits)]
    return head(w, x)


def encoder(w: Weights, name: str, x: Tensor) -> Tensor:
    y = layer_norm(w, f"{name}.norm", x)
    q, k, v = (heads(dense(w, f"{name}.{part}", y), HEADS) for part in ("query", "key", "value"))
    x = x + dense(w, f"{name}.out", attend(q, k, v, causal=False))
    return x + mlp(w, f"{name}.mlp", layer_norm(w, f"{name}.mlp_norm", x))


def vision(w: Weights, batch: Batch, run: Run) -> Tensor:
    x = F.conv2d(batch["pixels"], w["patches.weight"], stride=4).flatten(2).transpose(1, 2)
    x = x + w["patches.positions.weight"]
    x = encoder(w, "blocks.1", encoder(w, "blocks.0", x))
    return layer_norm(w, "head.norm", x).mean(1) @ w["head.weight"].t()


TRUTHS: dict[str, Callable[[Weights, Batch, Run], Tensor]] = {
    "two-ties": two_ties,
    "three-way-tie": three_way_tie,
    "albert": a_list(["shared"] * 3, WORD),
    "a-b-a-b-a": a_list(
        ["shared.a", "shared.b", "shared.a", "shared.b", "shared.a"], "head.weight"
    ),
    "used-twice": a_list(["twice", *["universal"] * 3, "twice"], "head.weight"),
    "frozen-embedding": a_list(["blocks.0", "blocks.1"], "head.weight"),
    "frozen-middle": a_list(["blocks.0", "blocks.1", "blocks.2"], WORD),
    "kernels": kernels,
    "buffers": buffers,
    "cast": cast,
    "hourglass": hourglass,
    "latent": latent,
    "two-tensors": two_tensors,
    "middle-losses": middle_losses,
    "vision": vision,
}
FROZEN = {
    "frozen-embedding": ("embedding.", "blocks.0."),
    "frozen-middle": ("blocks.1.", "blocks.2.mlp."),
}


# ----------------------------------------------------------------------------------------------------------- training


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the losses of all labels that are at least 0."""
    counted = labels >= 0
    return F.cross_entropy(logits[counted], labels[counted], reduction="sum")


def loss_of(name: str, w: Weights, part: Batch, run: Run) -> Tensor:
    """Returns the sum of all losses of a model for a micro-batch."""
    run.losses = []
    loss = summed_loss(TRUTHS[name](w, part, run), part["labels"])
    return sum(run.losses, loss)


def train(
    name: str, weights: Weights, batches: Sequence[Batch], microbatches: int, evaluated: Batch
) -> Result:
    """Runs a step of AdamW on each batch, then evaluates one more batch.

    Args:
        name: name of the model.
        weights: initial weights.
        batches: the global batches of the steps.
        microbatches: number of micro-batches per step.
        evaluated: the batch to evaluate.
    """
    buffers = (".mean", ".scale")
    w = {
        key: value.double().clone().requires_grad_()
        for key, value in weights.items()
        if not key.endswith(buffers)
    }
    trained = {
        key: value
        for key, value in w.items()
        if not key.startswith(FROZEN.get(name, ("no such name",)))
    }
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    run, result = Run(), Result([], [], {}, 0.0)
    for run.step, batch in enumerate(batches):
        optimizer.zero_grad()
        result.losses.append(
            sum(backward(name, w, part, batch, run) for part in cut(batch, microbatches))
        )
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
    run.step, run.training = len(batches), False
    labels = evaluated["labels"]
    with torch.no_grad():
        result.evaluation = float(loss_of(name, w, evaluated, run) / (labels >= 0).sum())
    result.weights = {key: value.detach() for key, value in w.items()}
    for layer, mean in run.means.items():
        result.weights |= {
            f"{layer}.mean": mean,
            f"{layer}.scale": torch.tensor(1 / len(batches), dtype=torch.float64),
        }
    return result


def cut(batch: Batch, count: int) -> list[Batch]:
    """Splits a batch into micro-batches."""
    return [{key: value.chunk(count)[i] for key, value in batch.items()} for i in range(count)]


def backward(name: str, w: Weights, part: Batch, batch: Batch, run: Run) -> float:
    """Runs the backward of a micro-batch's part of the mean loss; returns this part."""
    loss = loss_of(name, w, part, run) / (batch["labels"] >= 0).sum()
    loss.backward()
    return float(loss.detach())
