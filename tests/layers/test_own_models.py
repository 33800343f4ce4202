"""The worked examples of docs/guide/own_models.md: each is what it is in plain PyTorch, and the same in every topology.

The plain models below share no code with threed. fp64 to 1e-9: the order of sums is all that differs.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.configs import share, topology_of
from tests.harness import run_ranks
from threed.config import Config
from threed.config.resolution import resolve
from threed.engine import Engine
from threed.layers import Slicing

VOCAB, SEQ, ROWS, STEPS = 53, 12, 8, 3
LR, EPS, DECAY, CLIP, BETAS = 3e-3, 1e-8, 0.1, 0.5, (0.9, 0.95)
Weights = dict[str, Tensor]
Result = tuple[list[float], list[float], Weights]

# ------------------------------------------------------------------------------------------------------ plain PyTorch


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]


def turn(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary positions on [b a s d]: angles in fp32, as in the layers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).float()[:, None] * (
        1.0 / theta ** (torch.arange(half).float() / half)
    )
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def look(
    q: Tensor, k: Tensor, v: Tensor, allowed: Callable[[int, int], bool], bias: Tensor | None = None
) -> Tensor:
    """Softmax attention on [b a s d], position by position as `allowed` says -> [b s (a d)]."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    length = q.shape[-2]
    for i in range(length):
        for j in range(length):
            if not allowed(i, j):
                scores[..., i, j] = -torch.inf
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def window_block(w: Weights, name: str, index: int, x: Tensor, c: Any) -> Tensor:
    at = norm(w, f"{name}.attention_norm", x)
    q = heads(linear(w, f"{name}.attention.query", at), c.heads)
    k, v = (
        heads(linear(w, f"{name}.attention.{part}", at), c.kv_heads) for part in ("key", "value")
    )
    if index % 2 == 0:
        y = look(turn(q), turn(k), v, lambda i, j: 0 <= i - j < c.seq // 4)
    else:
        q, k = norm(w, f"{name}.attention.query_norm", q), norm(w, f"{name}.attention.key_norm", k)
        slopes = torch.tensor(
            [2 ** (-8 * (n + 1) / c.heads) for n in range(c.heads)], dtype=torch.float64
        )
        far = torch.tensor([[float(i - j) for j in range(c.seq)] for i in range(c.seq)]).double()
        y = look(q, k, v, lambda i, j: j <= i, -slopes.view(-1, 1, 1) * far)
    x = x + linear(w, f"{name}.attention.out", y)
    at = norm(w, f"{name}.mlp_norm", x)
    gate = F.gelu(linear(w, f"{name}.mlp.gate", at), approximate="tanh")
    return x + linear(w, f"{name}.mlp.down", gate * linear(w, f"{name}.mlp.up", at))


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    up = linear(w, f"{name}.mlp.up", norm(w, f"{name}.mlp_norm", x))
    return x + linear(w, f"{name}.mlp.down", F.gelu(up, approximate="tanh"))


def latent_block(w: Weights, name: str, index: int, x: Tensor, c: Any) -> Tensor:
    at, d, rank = norm(w, f"{name}.attention_norm", x), c.hidden // c.heads, c.hidden // 4
    q = heads(linear(w, f"{name}.attention.query", at), c.heads)
    both = linear(w, f"{name}.attention.down", at)
    latent, one = norm(w, f"{name}.attention.norm", both[..., :rank]), both[..., rank:]
    k, v = (
        heads(linear(w, f"{name}.attention.{part}", latent), c.heads) for part in ("key", "value")
    )
    q = torch.cat((q[..., :d], turn(q[..., d:])), -1)
    k = torch.cat((k, turn(one.unsqueeze(1)).repeat(1, c.heads, 1, 1)), -1)
    return mlp(w, name, x + linear(w, f"{name}.attention.out", look(q, k, v, lambda i, j: j <= i)))


def sparse_block(w: Weights, name: str, index: int, x: Tensor, c: Any) -> Tensor:
    """Six blocks of two positions; the windows of the fixed pattern are blocks 0 to 3, and 4 and 5."""
    at = norm(w, f"{name}.attention_norm", x)
    q = heads(linear(w, f"{name}.attention.query", at), c.heads)
    k, v = (
        heads(linear(w, f"{name}.attention.{part}", at), c.kv_heads) for part in ("key", "value")
    )
    q, k = turn(q), turn(k)
    if index % 2 == 0:
        bias = torch.full((c.heads, c.seq, c.seq), -torch.inf, dtype=torch.float64)
        for head, i, j in itertools.product(range(c.heads), range(c.seq), range(c.seq)):
            summary = j // 2 in (3 - head % 4, min(7 - head % 4, 5))
            if summary or i // 8 == j // 8:
                bias[head, i, j] = 0.0
        y = look(q, k, v, lambda i, j: j <= i, bias)
    else:
        y = look(q, k, v, lambda i, j: j <= i and i // 2 - j // 2 in (0, 1, 2, 4))
    x = x + linear(w, f"{name}.attention.out", y)
    at = norm(w, f"{name}.mlp_norm", x)
    gate = F.gelu(linear(w, f"{name}.mlp.gate", at), approximate="tanh")
    return x + linear(w, f"{name}.mlp.down", gate * linear(w, f"{name}.mlp.up", at))


def plain_block(w: Weights, name: str, index: int, x: Tensor, c: Any) -> Tensor:
    at = norm(w, f"{name}.attention_norm", x)
    q, k, v = (
        heads(linear(w, f"{name}.attention.{part}", at), c.heads)
        for part in ("query", "key", "value")
    )
    y = look(turn(q), turn(k), v, lambda i, j: j <= i)
    return mlp(w, name, x + linear(w, f"{name}.attention.out", y))


def stem(w: Weights, x: Tensor) -> Tensor:
    """Each position by itself, from the four that it sees; there is nothing before the first."""
    rows = []
    for at in range(x.shape[1]):
        seen = [
            x[:, at - 3 + tap] @ w["stem.convolution.weight"][:, :, tap].t()
            for tap in range(4)
            if at - 3 + tap >= 0
        ]
        rows.append(sum(seen, w["stem.convolution.bias"]))
    return x + linear(w, "stem.down", F.gelu(torch.stack(rows, 1), approximate="tanh"))


def same(w: Weights, x: Tensor) -> Tensor:
    return x


# example file and class -> what stands between embedding and blocks, and a block
EXAMPLES = {
    "sliding_window:SlidingWindow": (same, window_block),
    "sparse_attention:SparseModel": (same, sparse_block),
    "latent_attention:LatentModel": (same, latent_block),
    "convolution_stem:ConvolutionModel": (stem, plain_block),
}


def logits(w: Weights, tokens: Tensor, c: Any, name: str) -> Tensor:
    begin, block = EXAMPLES[name]
    x = begin(w, w["embedding.word.weight"][tokens])
    for i in range(c.layers):
        x = block(w, f"blocks.{i}", i, x, c)
    return norm(w, "head.norm", x) @ w["embedding.word.weight"].t()


def plain_loop(name: str, config: Config, weights: Weights) -> Result:
    """Losses, gradient norms and the last weights."""
    w = {key: value.clone().requires_grad_() for key, value in weights.items()}
    decays = [p for key, p in w.items() if p.dim() > 1]
    rest = [p for key, p in w.items() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        rows = batch(step)
        optimizer.zero_grad()
        out = logits(w, rows["tokens"], config.model, name)
        loss = F.cross_entropy(out.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(w.values(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {key: value.detach() for key, value in w.items()}


# -------------------------------------------------------------------------------------------------------- with threed


@functools.cache
def example(name: str) -> Any:
    """The class of a model in an example's file."""
    file, kind = name.split(":")
    spec = importlib.util.spec_from_file_location(
        file, Path(__file__).parents[2] / "examples" / f"{file}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)


def configuration(world: int = 1, **groups: dict[str, Any]) -> Config:
    """Small and odd: 6 heads of size 6, 2 key/value heads, no vocabulary that anything divides."""
    values: dict[str, dict[str, Any]] = {
        "model": {"arch": "llama", "layers": 3, "hidden": 36, "heads": 6, "kv_heads": 2, "seq": SEQ},
        "precision": {"dtype": "fp64"},
        "zero": {"resident": 0},
        "train": {"global_batch": ROWS, "micro_batch": 2, "steps": STEPS, "grad_clip": CLIP},
        "optim": {
            "lr": LR, "min_lr": LR, "warmup": 0, "schedule": "constant", "eps": EPS, "betas": BETAS,
            "weight_decay": DECAY,
        },
    }  # fmt: skip
    merged = {
        key: {**values.get(key, {}), **groups.get(key, {})} for key in values.keys() | groups.keys()
    }
    return resolve(Config.model_validate(merged), VOCAB, world)


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous().index_fill(1, torch.tensor(step), -100),
    }


def engine_of(name: str, config: Config) -> Engine:
    p = config.parallel
    topology = topology_of(p.pp, p.tp, p.cp)
    slicing = Slicing.of(topology, config)
    return Engine(example(name)(config.model, slicing), topology, config)


def train(name: str, config: Config) -> Result:
    engine = engine_of(name, config)
    metrics = [engine.step(share(batch(step), engine.topology)) for step in range(STEPS)]
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], engine.full_state_dict()


@functools.cache
def alone(name: str) -> Result:
    """What one process gives."""
    return train(name, configuration())


def compare(got: Result, want: Result, what: str) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9, abs=0), what
    assert got[1] == pytest.approx(want[1], rel=1e-9, abs=0), what
    assert got[2].keys() == want[2].keys()
    for key, value in want[2].items():
        torch.testing.assert_close(
            got[2][key], value, rtol=0, atol=1e-9, msg=lambda m, k=key: f"{what}, {k}: {m}"
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_it_is_in_plain_pytorch(name: str) -> None:
    config = configuration()
    engine = engine_of(name, config)
    torch.testing.assert_close(  # before rounding grows over three steps
        engine.logits(batch(0)["tokens"]), logits(engine.full_state_dict(), batch(0)["tokens"], config.model, name),
        rtol=0, atol=1e-12,
    )  # fmt: skip
    compare(alone(name), plain_loop(name, config, engine.full_state_dict()), name)


WORLDS: list[dict[str, dict[str, Any]]] = [
    {"parallel": {"tp": 2, "sequence": True}},
    {"parallel": {"tp": 2, "sequence": False}},
    {"parallel": {"tp": 2, "sequence": True}, "recompute": {"mode": "full"}},
    {
        "parallel": {"tp": 2, "sequence": True},
        "recompute": {"mode": "selective", "ops": ("attention", "activation", "norm")},
    },
    {"parallel": {"pp": 2}},
    {"parallel": {"dp": 2}, "zero": {"stage": 3, "resident": 0, "bucket_mib": 0.01, "tile": 2}},
]


def train_everywhere(name: str, truth: Result, worlds: list[dict[str, dict[str, Any]]]) -> None:
    """On two ranks: topologies and ways of recomputing against one process."""
    for groups in worlds:
        got = train(name, configuration(2, **groups))
        if got[2]:
            compare(got, truth, f"{name}: {groups}")


@pytest.mark.seldom("*SlidingWindow*", "*SparseModel*")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_same_in_every_third_topology(name: str) -> None:
    """In the first and fourth, the second and fifth, or the others, in turn."""
    first = list(EXAMPLES).index(name) % 3
    run_ranks(2, train_everywhere, name, alone(name), WORLDS[first::3])


@pytest.mark.grid
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_same_in_every_topology(name: str) -> None:
    run_ranks(2, train_everywhere, name, alone(name), WORLDS)


def pp_and_tp(name: str, truth: Result) -> None:
    groups = {"parallel": {"tp": 2, "pp": 2}, "zero": {"stage": 3, "resident": 0}}
    got = train(name, configuration(4, **groups))
    if got[2]:
        compare(got, truth, name)


@pytest.mark.seldom("*SlidingWindow*", "*SparseModel*")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_same_where_stages_are_cut_too(name: str) -> None:
    run_ranks(4, pp_and_tp, name, alone(name))
