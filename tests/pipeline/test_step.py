"""One step as all ranks see it: skipping together, nothing read on the host, evaluation, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.configs import Case, batch, config_of, engine_of, share, topology_of
from tests.harness import run_ranks
from threed.config import Config
from threed.distributed.sharding import Piece
from threed.engine import Engine, StepMetrics
from threed.ops.matmul import Matmul
from threed.ops.precision import LossScale
from threed.zero.offload import OffloadedOptimizer
from threed.zero.reductions import Gradient, squares
from threed.zero.state import fill_states


def with_(config: Config, **groups: dict[str, object]) -> Config:
    """The configuration with some keys of some groups changed."""
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in groups.items()}
    return config.model_copy(update=changed)


def data(engine: Engine, step: int = 0) -> dict[str, Tensor]:
    return share(batch(step, engine.config.train.global_batch), engine.topology)


def state(engine: Engine) -> list[Tensor]:
    """Copies of everything that a step changes; publishes a delayed update, as the next step would."""
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.publish_delayed()
    engine.optimizer.wait()
    held = [group.params.clone() for group in engine.layout.groups if not group.sliced]
    for s in engine.optimizer.states:
        for storage in (s.bucket.storage, *s.storages.values()):
            staged = storage.fetch()
            held.append(staged.wait().clone())
            staged.drop()
    return [*held, engine.optimizer.updates.clone()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------------ skipping


def poison_sink(engine: Engine, value: float) -> None:
    """The next gradient of one parameter comes out with `value` in it, on this rank."""
    sink = next(s for s in engine.reducer.sinks if s.slot.spec.decay and s.slot.param.numel())
    inner = sink.add_product

    def add_product(a: Tensor, b: Tensor, by: Matmul) -> None:
        sink.add_product = inner  # type: ignore[method-assign]
        a = a.clone()
        a[0, 0] = value
        inner(a, b, by)

    sink.add_product = add_product  # type: ignore[method-assign]


def poison_slice(engine: Engine, value: float, owned: bool = True) -> None:
    """The next step finds `value` in a slice of summed gradients that counts in the norm, if this rank has one."""
    inner = engine.reducer.finish

    def finish() -> list[Gradient]:
        engine.reducer.finish = inner  # type: ignore[method-assign]
        gradients = inner()
        fitting = (
            i for i, bucket in enumerate(engine.layout.buckets) if bucket.group.owned == owned
        )
        gradient = gradients[next(fitting, 0)]
        staged = gradient.storage.fetch()
        staged.wait()[0] = value
        gradient.squares = squares(staged.wait())
        staged.store()
        return gradients

    engine.reducer.finish = finish  # type: ignore[method-assign]


def poison_copy(engine: Engine, value: float) -> None:
    """The same, in a slice whose copy on another rank is the one that counts; where there is none, in any."""
    poison_slice(engine, value, owned=False)


POISONS: dict[str, Callable[[Engine, float], None]] = {
    "sink": poison_sink, "slice": poison_slice, "copy": poison_copy,
}  # fmt: skip


def check_skip(case: Case, where: str, value: float) -> None:
    """Each rank in turn: of a step without the poison, one with it, and one without, the twin takes two."""
    config = with_(config_of(case), optim={"schedule": "linear"})
    rule = LossScale(hysteresis=1 + case.world)
    engine, twin = (
        engine_of(config, loss_scale=rule if case.dtype == "fp16" else None) for _ in range(2)
    )
    engine.step(data(engine, 0))
    twin.step(data(twin, 0))
    for rank in range(case.world):
        before = state(engine)
        if engine.topology.rank == rank:
            POISONS[where](engine, value)
        bad = engine.step(data(engine, 1))
        assert bad.skipped == rank + 1
        assert where != "sink" or not bad.grad_norm < float("inf")
        assert same(state(engine), before), (
            f"poison on rank {rank}: rank {engine.topology.rank} stepped"
        )
        good, want = engine.step(data(engine, 2 + rank)), twin.step(data(twin, 2 + rank))
        assert good.skipped == rank + 1
        assert (good.step, want.step) == (2 * rank + 3, rank + 2)
        assert good.lr == want.lr == bad.lr, "a skipped step advanced the learning rate"
        assert (good.loss, good.grad_norm) == (want.loss, want.grad_norm)
        assert same(state(engine), state(twin))


# Contain every place and value of the poison, stage of ZeRO, kind of dtype and place of states.
SKIPS_ALWAYS = (0, 6, 9, 11)
SKIPS = [
    (Case(pp=2, tp=2, sequence=True, layers=2), "sink", float("nan")),
    (Case(pp=2, dp=2, layers=2, dtype="fp32"), "slice", float("inf")),
    (Case(dp=2, tp=2, layers=2, zero=0, model="qwen-tied"), "sink", float("-inf")),
    (Case(dp=2, tp=2, layers=2, dtype="bf16"), "slice", float("nan")),
    (Case(dp=2, tp=2, layers=2, zero=3, dtype="fp16", model="llama"), "sink", float("inf")),
    (Case(pp=2, dp=2, layers=2, zero=2, microbatches=1), "sink", float("nan")),
    (Case(dp=4, layers=2, zero=3, shard=2, dtype="bf16"), "slice", float("inf")),
    (Case(pp=2, tp=2, layers=2, sequence=True, dtype="fp16"), "copy", float("nan")),
    (Case(dp=2, tp=2, layers=2, zero=2, model="qwen-tied"), "copy", float("inf")),
    (Case(dp=2, layers=2, zero=0, dtype="fp32"), "copy", float("-inf")),
    (
        Case(
            dp=2, tp=2, layers=2, zero=2, offload_optimizer="cpu", dtype="bf16", model="qwen-tied"
        ),
        "sink",
        float("nan"),
    ),
    (
        Case(pp=2, dp=2, layers=2, zero=3, offload_optimizer="nvme", offload_params="nvme"),
        "sink",
        float("inf"),
    ),
    (
        Case(dp=2, layers=2, zero=3, offload_optimizer="nvme", dtype="fp16", bucket_mib=0.01),
        "slice",
        float("inf"),
    ),
]


@pytest.mark.seldom("case6*")
@pytest.mark.parametrize(
    ("case", "where", "value"),
    [
        pytest.param(*skip, marks=() if number in SKIPS_ALWAYS else pytest.mark.grid)
        for number, skip in enumerate(SKIPS)
    ],
)
def test_one_ranks_bad_gradient_makes_no_rank_step(case: Case, where: str, value: float) -> None:
    """Bit for bit: weights, moments, counter and rate are those of a run that never had the step."""
    run_ranks(case.world, check_skip, case, where, value)


def test_a_bad_loss_skips_on_one_process_too() -> None:
    engine = engine_of(config_of(Case(dtype="fp32", layers=2)))
    before = state(engine)
    engine.layout.slots[0].param.data[0] = float("nan")
    poisoned = state(engine)
    metrics = engine.step(data(engine))
    assert metrics.loss_tensor.isnan()
    assert metrics.bad_steps == 1
    assert metrics.skipped == 1
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(state(engine), poisoned, strict=True)
    )
    engine.layout.slots[0].param.data.copy_(
        before[0][: engine.layout.slots[0].param.numel()].view_as(engine.layout.slots[0].param)
    )
    metrics = engine.step(data(engine))
    assert (metrics.skipped, metrics.bad_steps) == (1, 0)


# -------------------------------------------------------------------------------------------------- nothing on the host


class HostReads(TorchDispatchMode):
    """Counts what brings a tensor's value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in (
            "aten::_local_scalar_dense",
            "aten::item",
            "aten::is_nonzero",
            "aten::equal",
        ):
            self.seen.append(func._schema.name)
        if func._schema.name in (
            "aten::nonzero",
            "aten::masked_select",
            "aten::unique_consecutive",
            "aten::_unique2",
        ):
            self.seen.append(func._schema.name)  # their shape depends on values
        return func(*args, **(kwargs or {}))


def check_no_reads(case: Case) -> None:
    engine = engine_of(config_of(case))
    engine.step(data(engine, 0))
    inputs, counter = data(engine, 1), HostReads()
    plain = {name: getattr(Tensor, name) for name in ("tolist", "numpy", "__array__")}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read on the host")

    for name in plain:
        setattr(Tensor, name, refuse)
    try:
        with counter:
            metrics = engine.step(inputs)
    finally:
        for name, method in plain.items():
            setattr(Tensor, name, method)
    assert counter.seen == []
    with counter:
        assert metrics.loss > 0
    assert counter.seen, "reading a metric is a read: the counter works"


@pytest.mark.parametrize(
    "case",
    [
        Case(layers=2, dropout=0.1),
        Case(pp=2, tp=2, sequence=True, layers=2, dropout=0.1),
        Case(dp=2, tp=2, layers=2, model="qwen-tied", dtype="bf16"),
    ],
    ids=str,
)
def test_a_step_reads_no_tensor_on_the_host(case: Case) -> None:
    """Outside the fused Adam kernel of the CPU, which looks at its scalars itself."""
    run_ranks(case.world, check_no_reads, case)


# ---------------------------------------------------------------------------------------------------------- evaluation


def check_evaluation(case: Case) -> None:
    config = config_of(case)
    engine, twin = engine_of(config), engine_of(config)
    for step in range(2):
        before = state(engine)
        grads = [group.grads.clone() for group in engine.layout.groups]
        loss = engine.evaluate(data(engine, step))
        assert same(state(engine), before)
        assert same([group.grads for group in engine.layout.groups], grads)
        assert all(slot.param.grad is None for slot in engine.layout.slots)
        metrics, want = engine.step(data(engine, step)), twin.step(data(twin, step))
        assert float(loss) == pytest.approx(metrics.loss, rel=1e-12)
        assert (metrics.loss, metrics.grad_norm) == (want.loss, want.grad_norm)
    assert (engine.steps, engine.consumed) == (twin.steps, twin.consumed)
    assert same(state(engine), state(twin))


@pytest.mark.parametrize(
    "case",
    [
        Case(layers=2),
        Case(pp=2, tp=2, sequence=True),
        pytest.param(Case(pp=2, dp=2, tp=2, sequence=True), marks=pytest.mark.grid),
        Case(pp=4, zero=0),
    ],
    ids=str,
)
def test_evaluation_is_the_training_loss_and_leaves_no_trace(case: Case) -> None:
    run_ranks(case.world, check_evaluation, case)


def test_evaluation_has_no_dropout() -> None:
    wet, dry = (engine_of(config_of(Case(layers=2, dropout=p))) for p in (0.3, 0.0))
    assert float(wet.evaluate(data(wet))) == float(dry.evaluate(data(dry)))
    assert wet.step(data(wet)).loss != dry.step(data(dry)).loss


def test_dropout_belongs_to_the_sample_wherever_it_stands() -> None:
    """Rows in another order, in other micro-batches, with their sample numbers: the same loss and the same step."""
    config = config_of(Case(layers=2, dropout=0.3))
    first, second = engine_of(config), engine_of(config)
    rows = config.train.global_batch
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    plain = batch(0, rows)
    mixed = {**{key: value[order] for key, value in plain.items()}, "samples": order}
    a, b = first.step(plain), second.step(mixed)
    assert a.loss == pytest.approx(b.loss, rel=1e-12)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12)


# ------------------------------------------------------------------------------------------------------------ handshake


def check_refused(case: Case, other: Case) -> str:
    """Rank 1 means another run."""
    with pytest.raises(
        ValueError, match="rank 1 has a different configuration than rank 0"
    ) as caught:
        engine_of(config_of(other if dist.get_rank() == 1 else case))
    return str(caught.value)


OTHERS = [
    (Case(dp=2), Case(dp=2, dropout=0.1), "model.dropout: '0' and '0.1'"),
    (Case(dp=2), Case(dp=2, bucket_mib=1.0), "zero.bucket-mib"),
    (
        Case(pp=2),
        Case(pp=2, model="gpt-untied"),
        "model.tied: 'true' and 'false'",
    ),  # other groups: they would wait for each other for ever
    (Case(tp=4), Case(tp=4, model="qwen-tied"), "model.arch: 'gpt' and 'llama'"),
    (Case(pp=2, dp=2), Case(pp=2, dp=2, layers=7), "model.layers"),
]


@pytest.mark.parametrize(("case", "other", "key"), OTHERS)
def test_ranks_with_other_configurations_are_refused_at_once(
    case: Case, other: Case, key: str
) -> None:
    for message in run_ranks(case.world, check_refused, case, other, timeout=30):
        assert "same flags" in message
        assert key in message, message


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [(0, "batch of 0 sequences"), (5, "5 sequences is not a multiple of micro-batch 2")],
)
def test_batches_that_cannot_be_cut_are_refused(rows: int, complaint: str) -> None:
    engine = engine_of(config_of(Case(layers=2, microbatches=3)))
    ids = torch.zeros(rows, 16, dtype=torch.int64)
    for run in (engine.step, engine.evaluate):
        with pytest.raises(ValueError, match=complaint):
            run({"tokens": ids, "labels": ids})
    assert engine.steps == engine.consumed == 0
    engine.step(data(engine))


def test_an_empty_batch_of_a_module_is_refused() -> None:
    config = Config.model_validate({"train": {"global_batch": 1, "micro_batch": 1}})
    engine = Engine(torch.nn.Linear(1, 1), topology_of(1, 1), config)
    with pytest.raises(ValueError, match="batch of 0 sequences"):
        engine.step({})


def check_sequence() -> None:
    engine = engine_of(
        config_of(Case(tp=2, sequence=True, layers=2, model="llama", microbatches=3))
    )
    ids = torch.zeros(2, 15, dtype=torch.int64)
    with pytest.raises(ValueError, match="sequence length 15 is not a multiple of tp 2"):
        engine.step({"tokens": ids, "labels": ids})


def test_sequences_that_cannot_be_cut_or_have_no_position_are_refused() -> None:
    run_ranks(2, check_sequence)
    engine = engine_of(config_of(Case(layers=2, microbatches=3)))
    ids = torch.zeros(2, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="position 16 is beyond the 16 learned positions"):
        engine.step({"tokens": ids, "labels": ids})


# -------------------------------------------------------------------------------------------------------------- metrics


def check_metrics() -> StepMetrics:
    engine = engine_of(config_of(Case(dp=2, tp=2, layers=2, microbatches=3)))
    metrics = [engine.step(data(engine, step)) for step in range(2)]
    assert [m.step for m in metrics] == [1, 2]
    assert metrics[0].tokens == 12 * 16
    assert engine.consumed == 24
    assert {*metrics[0].seconds} == {"fwd_bwd_s", "dp_comm_s", "optim_s"}
    began = time.perf_counter()
    seconds = engine.step(data(engine, 2)).seconds
    assert seconds["fwd_bwd_s"] > 0.2 * (time.perf_counter() - began)
    kept = metrics[0].loss, metrics[0].grad_norm, metrics[0].lr
    engine.step(data(engine, 2))
    assert (metrics[0].loss, metrics[0].grad_norm, metrics[0].lr) == kept, (
        "a later step changed an earlier one's figures"
    )
    return metrics[0]


def test_metrics_keep_their_values() -> None:
    run_ranks(4, check_metrics)


def check_load_after_step() -> None:
    """New weights while the last step's are still on their way: the new ones win, everywhere."""
    engine = engine_of(config_of(Case(dp=2, layers=2, bucket_mib=0.01)))
    box: list[Any] = [engine.full_state_dict()]
    dist.broadcast_object_list(box, 0)
    for _ in range(10):
        engine.step(data(engine))
        engine.load_full_state_dict(box[0])
        for slot in engine.layout.slots:
            for piece in slot.spec.pieces:
                got = (
                    slot.param.detach()
                    .reshape(-1)[piece.offset : piece.offset + piece.numel]
                    .view(piece.size)
                )
                assert torch.equal(got, box[0][piece.name]), piece.name
    with pytest.raises(KeyError, match=r"weights are missing: embedding\.word\.weight"):
        engine.load_full_state_dict({k: v for k, v in box[0].items() if "word" not in k})


def test_loaded_weights_replace_those_on_their_way() -> None:
    run_ranks(2, check_load_after_step)


def break_an_update(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A step whose second bucket fails."""
    inner, done = engine.optimizer._update, []

    def update(*args: Any, **more: Any) -> None:
        if done:
            raise OSError("no memory")
        done.append(inner(*args, **more))

    with patch.context() as inside:
        inside.setattr(engine.optimizer, "_update", update)
        with pytest.raises(OSError, match="no memory"):
            engine.step(data(engine, 1))


def break_a_load(engine: Engine, _: pytest.MonkeyPatch) -> None:
    """Weights of which the second cannot be read."""
    given: list[Piece] = []

    def write(part: str, piece: Piece, out: Tensor) -> None:
        given.append(piece)
        if len(given) == 2:
            raise OSError("no such file")
        out.zero_()

    with pytest.raises(OSError, match="no such file"):
        fill_states(engine.optimizer, write)


@pytest.mark.parametrize("breaks", [break_an_update, break_a_load])
@pytest.mark.parametrize("zero", [{}, {"stage": 2, "offload_optimizer": "cpu"}])
def test_what_broke_off_is_neither_trained_on_nor_saved(
    breaks: Callable[[Engine, pytest.MonkeyPatch], None], zero: dict[str, object], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Some weights would be a step older than others; after a load the engine trains as one that never failed."""
    config = with_(config_of(Case(layers=2, bucket_mib=0.01)), zero=zero)
    engine, other = engine_of(config), engine_of(config)
    for one in (engine, other):
        one.step(data(one))
    engine.save(tmp_path / "step-1")
    breaks(engine, monkeypatch)
    for work in (
        lambda: engine.step(data(engine, 1)),
        lambda: engine.save(tmp_path / "b"),
        engine.full_state_dict,
    ):
        with pytest.raises(RuntimeError, match=r"interrupted .* load a checkpoint"):
            work()
    assert not (tmp_path / "b").exists()
    engine.load(tmp_path / "step-1")
    assert engine.step(data(engine, 1)).loss == other.step(data(other, 1)).loss
    assert same(state(engine), state(other))
