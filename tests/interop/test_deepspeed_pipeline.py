"""DeepSpeed's `PipelineModule` on threed's pipeline: equal to one process of plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threed
from tests.harness import run_ranks
from threed.config import ConfigError
from threed.interop.deepspeed.api.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from threed.interop.deepspeed.pipeline_engine import PipelineEngine
from threed.interop.deepspeed.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec

VOCAB, HIDDEN, STEPS, MICROS = 13, 6, 3, 4
LR, CLIP, DECAY = 0.02, 0.3, 0.1
Result = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """A layer of the model; passes the token ids on, which need no gradient."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, ids = given
        if self.training and self.counts:
            self.count = self.count + 1
        return x + self.linear(self.norm(x)).tanh() * (1 + ids.unsqueeze(-1) % 2), ids


def embed(module: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return module(given[0]), given[1]


def head(module: nn.Embedding, given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0] @ module.weight.t()


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def tied_layers(counts: bool = True) -> list[Any]:
    """Embedding and head with one weight, blocks, and functions, also an in-place one."""
    tied = TiedLayerSpec("word", nn.Embedding, VOCAB, HIDDEN, forward_fn=embed)
    blocks = [LayerSpec(Block, counts) for _ in range(3)]
    end = TiedLayerSpec("word", nn.Embedding, VOCAB, HIDDEN, forward_fn=head)
    return [
        lambda ids: (ids, ids),
        tied,
        *blocks,
        lambda given: (given[0].mul_(1.5), given[1]),
        end,
    ]


def plain_layers() -> list[Any]:
    """Modules of one tensor, with an in-place ReLU at the start of the second stage."""
    make = [nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
    return [*make, nn.ReLU(inplace=True), nn.Linear(HIDDEN, VOCAB), nn.Identity()]


def make(layers: Callable[[], list[Any]], stages: int, **more: Any) -> PipelineModule:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return PipelineModule(layers(), num_stages=stages, **{"loss_fn": loss, **more})
    finally:
        torch.set_default_dtype(torch.float32)


def micro_batches(varying: bool = False) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of all micro-batches of all steps."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + varying * (number % 3) for number in range(STEPS * MICROS)]
    return [
        (torch.randint(VOCAB, (2, n), generator=generator), torch.randint(VOCAB, (2, n), generator=generator))
        for n in lengths
    ]  # fmt: skip


def share(model: PipelineModule, varying: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """This data rank's micro-batches."""
    every, each = micro_batches(varying), MICROS // model.axes.dp
    first = model.axes.axis("dp").index * each
    for step in range(STEPS):
        yield from every[step * MICROS + first :][:each]


def config(model: PipelineModule, stage: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROS // model.axes.dp,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 9},
        **more,
    }  # fmt: skip


def rate(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def train_plainly(
    layers: Callable[[], list[Any]], varying: bool = False, twice: float = 1
) -> Result:
    """Plain PyTorch in one process.

    Args:
        layers: returns the layers.
        varying: whether micro-batches have several shapes.
        twice: factor of the learning rate of the embedding.
    """
    model = make(layers, 1)
    groups: list[dict[str, Any]] = [
        {
            "params": [
                p for n, p in model.named_parameters() if ("word" in n or n == "0.weight") == own
            ],
            "lr": lr,
        }
        for own, lr in ((True, LR * twice), (False, LR))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, every = [], micro_batches(varying)
    for step in range(STEPS):
        losses.append(0.0)
        for tokens, labels in every[step * MICROS :][:MICROS]:
            one = loss(model(tokens), labels) / MICROS
            one.backward()
            losses[-1] += float(one.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, model.state_dict()


def check(found: Result, wanted: Result) -> None:
    assert found[1].keys() == wanted[1].keys()
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-12)
    for name, value in wanted[1].items():
        if not name.endswith("count"):
            torch.testing.assert_close(found[1][name].double(), value, rtol=0, atol=1e-12)


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def run(
    model: PipelineModule, varying: bool = False, stage: int = 1, **arguments: Any
) -> PipelineEngine:
    given = {"lr_scheduler": scheduled, **arguments}
    engine = threed.initialize(model=model, config=config(model, stage), **given)[0]
    assert isinstance(engine, PipelineEngine)
    return engine


def steps(engine: PipelineEngine, count: int = STEPS, varying: bool = False) -> list[float]:
    data = share(engine.module, varying)
    return [float(engine.train_batch(data)) for _ in range(count)]


def on_four_ranks(folder: str) -> list[Result]:
    """pp 2 x dp 2 under every ZeRO stage; saves a checkpoint after two steps."""
    results = []
    for stage in range(4):
        engine = run(make(tied_layers, 2), stage=stage)
        data = share(engine.module)
        losses = [float(engine.train_batch(data)) for _ in range(2)]
        if stage == 3:
            engine.save_checkpoint(folder, tag=f"zero{stage}", client_state={"epoch": 7})
        losses.append(float(engine.train_batch(data)))
        assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * MICROS * 2)
        results.append((losses, engine.full_state_dict()))
    return results


def test_pipeline_and_data_ranks_equal_one_process(tmp_path: Path) -> None:
    wanted = train_plainly(tied_layers)
    for found in run_ranks(4, on_four_ranks, str(tmp_path))[0]:
        check(found, wanted)
        assert found[1]["2.count"] == STEPS * MICROS // 2
    engine = run(make(tied_layers, 1))
    path, state = engine.load_checkpoint(tmp_path)
    assert (path, state, engine.global_steps) == (
        f"{tmp_path}/zero3/manifest.json",
        {"epoch": 7},
        2,
    )
    data = list(share(engine.module))
    last = float(engine.train_batch(iter(data[2 * MICROS :])))
    check(([*wanted[0][:2], last], engine.full_state_dict()), wanted)


def by_name(model: PipelineModule, twice: float) -> list[dict[str, Any]]:
    """Groups of this stage: the embedding (empty on the second stage), and all others."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if ("word" in n or n == "0.weight") == own], "lr": lr}
        for own, lr in ((True, LR * twice), (False, LR))
    ]


def on_two_ranks() -> list[Result]:
    results: list[Result] = []

    def add(engine: PipelineEngine, varying: bool = False) -> None:
        results.append((steps(engine, varying=varying), engine.full_state_dict()))

    # tied layers with recomputation of two layers at a time, another schedule
    add(run(make(lambda: tied_layers(False), 2, activation_checkpoint_interval=2)))
    add(run(make(tied_layers, 2, partition_method="type:block", schedule="zb-h1")))
    # instances, a passed optimizer with groups of which one is empty on a stage
    model = make(plain_layers, 2, partition_method="uniform")
    assert model.parts == [0, 3, 6]
    optimizer = torch.optim.AdamW(by_name(model, 3.0), lr=LR, weight_decay=DECAY)
    engine = run(model, optimizer=optimizer, lr_scheduler=scheduled(optimizer))
    add(engine)
    assert engine.get_lr() == [3 * LR, LR] == [group["lr"] for group in optimizer.param_groups]
    # several shapes in one step
    engine = run(make(plain_layers, 2), model_parameters=None)
    add(engine, varying=True)
    evaluate(engine)
    return results


def evaluate(engine: PipelineEngine) -> None:
    last, data = engine.is_last_stage(), list(share(engine.module))[:MICROS]
    mean = engine.eval_batch(iter(data))
    each = engine.eval_batch(iter(data), reduce_output=None, bcast_loss=False)
    both, logits = engine.eval_batch(iter(data), return_logits=True)
    outputs = engine.eval_batch(
        iter(data), compute_loss=False, reduce_output=None, num_micro_batches=2
    )
    assert both == mean
    assert (each is None, logits is None, outputs is None) == (not last,) * 3
    if last:
        torch.testing.assert_close(torch.stack(each).mean(), mean)
        torch.testing.assert_close(loss(logits, data[-1][1]), each[-1])
        torch.testing.assert_close(loss(outputs[1], data[1][1]), each[1])
    assert engine.module.training
    zeros = {n: torch.zeros_like(v) for n, v in nn.Sequential(*plain_layers()).named_parameters()}
    assert zeros.keys() == set(engine.trainer.names)
    saved = engine._zero3_consolidated_16bit_state_dict()
    engine.load_state_dict(zeros)
    found = float(engine.eval_batch(iter(data)))
    torch.testing.assert_close(found, math.log(VOCAB), rtol=1e-6, atol=0)
    assert saved == {} or {v.dtype for v in saved.values()} == {torch.float64}
    module = engine.module
    engine.destroy()
    assert all(type(p) is nn.Parameter and not p.any() for p in module.parameters())
    if last:
        module.get_submodule("4").requires_grad_(False)
    again = run(module)
    assert float(again.eval_batch(iter(data))) == found
    trained = again._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert (trained == {}) == (again.global_rank > 0)
    assert trained == {} or zeros.keys() - trained.keys() == {"4.weight", "4.bias"}


def test_two_stages_in_many_ways() -> None:
    tied = train_plainly(tied_layers)
    wanted = [tied, tied, train_plainly(plain_layers, twice=3.0), train_plainly(plain_layers, True)]
    for found, one in zip(run_ranks(2, on_two_ranks)[0], wanted, strict=True):
        check(found, one)


def problem(layers: list[Any], **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        PipelineModule(layers, **{"num_stages": 1, **arguments})
    return str(caught.value)


def test_modules_that_are_refused() -> None:
    linear, tied = LayerSpec(nn.Linear, 2, 2), TiedLayerSpec("a", nn.Linear, 2, 2)
    assert "layer 1 is a int: pass a LayerSpec, an nn.Module or a function" in problem([linear, 3])
    assert "no layers" in problem([])
    assert "pass at least 1, or topology" in problem([linear], num_stages=None)
    assert "num_stages 2: world size 1 is not" in problem([linear] * 2, num_stages=2)
    assert "use 'parameters', 'uniform' or 'type:REGEX'" in problem(
        [linear], partition_method="best"
    )
    assert "'type:Conv' matches no layer: the layers are Linear" in problem(
        [linear], partition_method="type:Conv"
    )
    assert "schedule 'dualpipe' does not run one stage per rank" in problem(
        [linear], schedule="dualpipe"
    )
    assert "schedule '2bw'" in problem([linear], schedule="2bw")
    model_axis = PipeModelDataParallelTopology(1, 2, 1)
    assert "does not offer a PipelineModule with a model axis" in problem(
        [linear], topology=model_axis
    )
    swapped = ProcessTopology(["data", "pipe"], [2, 2])
    assert "use PipeDataParallelTopology" in problem([linear], topology=swapped)
    assert "a Linear, and layer 1 is a Bilinear" in problem(
        [tied, TiedLayerSpec("a", nn.Bilinear, 2, 2, 2)]
    )
    assert "give both the same arguments" in problem([tied, TiedLayerSpec("a", nn.Linear, 2, 3)])
    assert "tied_weight_attr ['table'] does not exist" in problem(
        [TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="table")]
    )
    with pytest.raises(RuntimeError, match=r"pass a class of torch.nn.Module"):
        LayerSpec(len)
    inner = PipelineModule([linear], num_stages=1)
    assert "is a PipelineModule: pass its layers instead" in problem([inner])
    for name in ("save_state_dict", "load_state_dir", "allreduce_tied_weight_gradients"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(inner, name)()
    for name in ("_is_checkpointable", "ckpt_prefix"):
        with pytest.raises(AttributeError, match=f"does not offer PipelineModule.{name}: use"):
            getattr(inner, name)
    with pytest.raises(AttributeError, match="object has no attribute 'own'"):
        _ = inner.own


def test_steps_that_are_refused() -> None:
    engine = run(make(lambda: plain_layers()[:5], 1, loss_fn=None))
    data = micro_batches()
    for method in (engine, engine.forward, engine.backward, engine.step):
        with pytest.raises(RuntimeError, match=r"use train_batch\(\) or eval_batch\(\)"):
            method(data[0][0])
    for call in (engine.no_sync, lambda: engine.set_gradient_accumulation_boundary(True)):
        with pytest.raises(RuntimeError, match=r"use train_batch\(\)"):
            call()
    with pytest.raises(ValueError, match=r"the last layer .Linear. returned shape .* pass loss_fn"):
        engine.train_batch(iter(data))
    with pytest.raises(ValueError, match=r"a micro-batch is a Tensor: the iterator must yield"):
        engine.train_batch(iter([data[0][0]]))
    with pytest.raises(ValueError, match=r"labels contain a str"):
        engine.train_batch(iter([(data[0][0], "label")] * MICROS))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"use eval_batch"):
        engine.train_batch(iter(data))
    with pytest.raises(NotImplementedError, match=r"compute_loss False: use 'avg' for losses"):
        engine.eval_batch(iter(data), compute_loss=False)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(data[:1]))
    with pytest.raises(
        NotImplementedError, match="gathered of a PipelineEngine: use full_state_dict"
    ):
        engine.gathered()
    mixed = make(lambda: [nn.Linear(2, 2), nn.Linear(2, 2).float()], 1)
    with pytest.raises((ConfigError, ValueError), match=r"several dtypes|one dtype"):
        run(mixed)
    with pytest.raises(ConfigError, match=r"pipeline: no such key: stage"):
        threed.initialize(model=mixed, config=config(mixed, pipeline={"stage": 2}))


def test_values_do_not_depend_on_the_stages_or_the_program() -> None:
    state = torch.get_rng_state()
    specs = [LayerSpec(nn.Linear, 3, 3) for _ in range(3)]
    model = PipelineModule(specs, num_stages=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model.get_parameter("0.weight"), model.get_parameter("1.weight"))
    torch.rand(3)
    again = PipelineModule(specs, num_stages=1)
    assert torch.equal(model.get_parameter("2.weight"), again.get_parameter("2.weight"))
    seeded = PipelineModule(specs, num_stages=1, seed_layers=True, base_seed=5)
    torch.manual_seed(7)
    assert torch.equal(seeded.get_parameter("2.weight"), nn.Linear(3, 3).weight)


def test_topologies() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert topology.get_rank(pipe=1, data=2) == 5
    assert topology.get_coord(4) == (1, 1)
    assert topology.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_comm_lists("model") == []
    assert (topology.get_dim("pipe"), topology.get_dim("model"), topology.world_size()) == (2, 0, 6)
    assert topology.get_axis_list("data", 1) == topology.filter_match(data=1) == [1, 4]
    assert PipeModelDataParallelTopology(1, 2, 2).get_rank_repr(3) == "model_01"
    model = PipelineModule([nn.Linear(2, 2)], topology=PipeDataParallelTopology(1, 1))
    grid = model.mpu()
    assert (grid.get_stage_id(), grid.get_data_parallel_world_size(), grid.stage_to_global(0)) == (
        0,
        1,
        0,
    )
    assert (model.stage_owner(0), model.partitions(), model.num_pipeline_stages()) == (0, [0, 1], 1)


class Distance(nn.Module):
    """A last layer that returns the loss."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(*given)


def test_data_loaders_and_a_loss_of_the_last_layer() -> None:
    linear = nn.Linear(3, 2, dtype=torch.float64)
    first = linear.weight.detach().clone(), linear.bias.detach().clone()
    layers = [linear, lambda x: (x[..., :1], x[..., 1:]), Distance()]
    model = make(lambda: layers, 1, loss_fn=None)
    assert model(torch.ones(1, 3, dtype=torch.float64)).dim() == 0
    rows = [torch.rand(3, dtype=torch.float64) for _ in range(8)]
    engine, _, loader, _ = threed.initialize(
        model=model, config=config(model), training_data=rows,
        collate_fn=lambda some: (torch.stack(some), None),
    )  # fmt: skip
    assert isinstance(engine, PipelineEngine)
    y = F.linear(torch.stack(rows), *first)
    wanted = F.mse_loss(y[:, :1], y[:, 1:])
    torch.testing.assert_close(float(engine.train_batch()), float(wanted), rtol=0, atol=1e-12)
    losses = [float(engine.train_batch())]
    engine.set_dataloader(loader)
    losses.append(float(engine.train_batch()))
    with pytest.raises(StopIteration):  # the loader is read once
        engine.train_batch()
    engine.set_batch_fn(lambda row: (row.unsqueeze(0), None))
    losses.append(float(engine.train_batch(iter(rows))))
    assert losses == sorted(losses, reverse=True)
    assert engine.agg_train_loss == losses[-1]
    assert (engine.micro_batches, engine.micro_batch_size, engine.global_steps) == (4, 2, 4)
