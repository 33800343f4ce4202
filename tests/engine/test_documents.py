"""Rows of several documents: no document depends on another, and training equals one document at a time."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from examples.sparse_attention import SparseModel
from tests import configs, programs
from tests.configs import SEQ, VOCAB, Case, config_of, documents, engine_of, share
from tests.harness import run_ranks, run_script
from tests.training.test_pretrain import environment
from threed import layers, models
from threed.config import Config, ConfigError
from threed.engine import Engine, LayeredEngine
from threed.layers import Causal, MicroBatch, Slicing, embedding
from threed.monitor import metrics
from threed.ops import attention, rotary
from threed.ops.positions import in_documents
from threed.pipeline.batches import Batches
from threed.planner.forecast import Forecast
from threed.testing import Results, differences, results_of

TOLERANCE = 1e-9  # fp64: only the order of sums differs
CASES = [
    Case(model="llama", tp=2, recompute="selective"),
    Case(model="gpt", tp=2, sequence=True, recompute="full"),
    Case(model="gemma2", tp=2, sequence=True),
    Case(model="mistral", tp=2),
    Case(model="gpt", cp=2, cp_heads=1),
    Case(model="llama", cp=2, cp_heads=2, recompute="full"),
    Case(model="gemma2", cp=2, cp_heads=1, tp=2, sequence=True, zero=3),
    Case(model="gpt", pp=2, schedule="zb-h1", microbatches=4),
    Case(model="llama", pp=2, recompute="full"),
    Case(model="mistral", pp=2, schedule="zb-h1", recompute="selective", microbatches=4),
    Case(model="gemma2", pp=2),
    Case(model="gpt", dp=2, zero=3, recompute="selective"),
    Case(model="llama", dp=2, zero=2),
    Case(model="gemma2", dp=2, zero=3, recompute="full"),
    Case(model="phi3", tp=2, recompute="full"),
    Case(model="mistral", tp=2, pp=2, dp=2, sequence=True, zero=3, schedule="zb-v", layers=6),
]  # fmt: skip
# every model, every axis, and every kind of recomputation; the others run in the grid
EVERYDAY = [CASES[number] for number in (1, 5, 6, 9, 11, 14)]


def batch(step: int, rows: int) -> dict[str, Tensor]:
    return {**configs.batch(step, rows), "documents": documents(step, rows)}


def parts(numbers: Tensor) -> Iterator[tuple[int, slice]]:
    """The documents [b s], as (row, positions)."""
    for row, of_row in enumerate(numbers):
        for number in of_row.unique():
            at = (of_row == number).nonzero().flatten()
            yield row, slice(int(at[0]), int(at[-1]) + 1)


def one_by_one(full: dict[str, Tensor]) -> list[MicroBatch]:
    """A micro-batch per document, without padding.

    The last token of a document has a label only at the end of a row, where the batch gives the
    next token.
    """
    alone = []
    for row, at in parts(full["documents"]):
        tokens, labels = (full[name][row : row + 1, at].clone() for name in ("tokens", "labels"))
        if at.stop < SEQ:
            labels[:, -1] = -1
        alone.append((tokens, labels))
    weight = 1 / torch.cat([labels.flatten() for _, labels in alone]).ge(0).sum().double()
    return [MicroBatch(*pair, torch.arange(1), weight) for pair in alone]


def trained_alone(case: Case) -> Results:
    """Trains one document at a time, in one process."""
    engine, metrics = engine_of(config_of(case.truth)), []
    for step in range(configs.STEPS):
        full = batch(step, case.rows)
        micros = one_by_one(full)
        with mock.patch.object(engine.batches, "micro_batches", lambda *_, m=micros: m):
            metrics.append(engine.step(full))
    return results_of(engine, metrics)


def write_truths(cases: Sequence[Case], folder: str) -> None:
    """Writes the truths of cases that are not there yet."""
    for case in cases:
        if not (path := Path(folder, _name(case))).exists():
            torch.save(vars(trained_alone(case)), path)


def _name(case: Case) -> str:
    return f"{case.model}-{case.rows}-{case.layers}.pt"


def compare(cases: Sequence[Case], folder: str, fault: str = "none") -> list[str]:
    """The differences of this rank's results from documents that are trained alone."""
    wrong = []
    for case in cases:
        with FAULTS[fault]():
            config = config_of(case)
            engine, rows = engine_of(config), config.train.global_batch
            metrics = [
                engine.step(share(batch(step, rows), engine.topology))
                for step in range(configs.STEPS)
            ]
            truth = torch.load(f"{folder}/{_name(case)}", mmap=True, weights_only=False)
            found = differences(engine, metrics, Results(**truth), TOLERANCE)
        wrong += [f"{case}\nrank {engine.topology.rank}: {finding}" for finding in found]
    return wrong


# ------------------------------------------------------------------------------ planted faults


def _go_on(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that do not begin again."""
    return in_documents(numbers * 0)


@contextmanager
def _positions() -> Iterator[None]:
    with (
        mock.patch.object(rotary, "in_documents", _go_on),
        mock.patch.object(embedding, "in_documents", _go_on),
    ):
        yield


def _joined(numbers: Tensor) -> attention.Borders:
    """The last two documents of each row as one."""
    last = numbers.amax(1, keepdim=True)
    return _borders(torch.where(numbers == last, last - 1, numbers))


_borders = attention.borders
FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "positions that go on": _positions,
    "labels across borders": lambda: mock.patch.object(
        Batches, "_end_documents", return_value=None
    ),
    "a mask that leaks": lambda: mock.patch.object(attention, "borders", _joined),
}


# --------------------------------------------------------------------------------- equivalence


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of truths, which `write_truths` fills."""
    return str(tmp_path_factory.mktemp("truths"))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EVERYDAY, id="some"),
        pytest.param([c for c in CASES if c not in EVERYDAY], id="others", marks=pytest.mark.grid),
    ],
)
def test_packed_documents_train_as_if_alone(cases: list[Case], truths: str) -> None:
    wrong = list[str]()
    run_ranks(1, write_truths, cases, truths)
    for shape in sorted({(case.pp, case.dp, case.cp, case.tp) for case in cases}):
        mine = [case for case in cases if (case.pp, case.dp, case.cp, case.tp) == shape]
        for found in run_ranks(mine[0].world, compare, mine, truths, timeout=600):
            wrong += found
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("model", ["gpt", "phi3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, model: str, truths: str) -> None:
    """And nothing without one."""
    case = next(case for case in CASES if case.model == model and case.world == 2)
    alone = replace(
        case,
        pp=1,
        dp=1,
        tp=1,
        cp=1,
        cp_heads="auto",
        sequence=False,
        schedule="1f1b",
        recompute="none",
    )
    run_ranks(1, write_truths, [alone], truths)
    [found] = run_ranks(1, compare, [alone], truths, fault)
    assert any("loss" in line for line in found) if fault != "none" else not found, found


# ------------------------------------------------------------------------------------ every bit


def bits(model: str, tp: int, sequence: bool, dtype: str, fault: str = "none") -> list[str]:
    """What changes outside of a document when one of its tokens changes."""
    case = Case(model=model, tp=tp, sequence=sequence, dtype=dtype)
    engine, full = engine_of(config_of(case)), batch(0, case.rows)
    row, at = list(parts(full["documents"]))[-2]  # in the row with the most documents
    with FAULTS[fault]():
        before = _passes(engine, full)
        full["tokens"][row, at.start] = (full["tokens"][row, at.start] + 1) % VOCAB
        after = _passes(engine, full)
    wrong, inside = [], False
    where = engine.batches.slicing.positions(SEQ).indices(torch.device("cpu"))
    for name, old in before.items():
        changed = (old != after[name]).any(-1)  # [s/t b]
        own = torch.zeros_like(changed)
        own[(at.start <= where) & (where < at.stop), row] = True
        inside |= bool((changed & own).any())
        wrong += [f"{case}: {name} of other documents"] * bool((changed & ~own).any())
    return wrong if inside else [f"{case}: no change in the document"] * (sequence is False)


def _passes(engine: Engine, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of the last block, and the gradient of the first block's input, [s/t b h]."""
    [stage] = engine.executor.stages
    micro = MicroBatch(full["tokens"], documents=full["documents"])
    first, *blocks, _ = stage.layers
    x = first(None, micro).detach().requires_grad_()
    y = functools.reduce(lambda y, block: block(y, micro), blocks, x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return {"output": y.detach(), "gradient": torch.autograd.grad(y, x, dy)[0]}


EVERY_MODEL = ("gpt", "llama", "gemma2", "mistral")


@pytest.mark.seldom("1-False*")
@pytest.mark.parametrize(
    ("tp", "sequence", "models"),
    [
        (1, False, EVERY_MODEL),
        (2, True, ("gemma2",)),
        pytest.param(2, True, EVERY_MODEL, marks=pytest.mark.grid),
    ],
)
def test_a_token_changes_no_bit_of_other_documents(
    tp: int, sequence: bool, models: tuple[str, ...]
) -> None:
    for found in run_ranks(tp, all_bits, tp, sequence, models):
        assert not found, found


def all_bits(tp: int, sequence: bool, models: tuple[str, ...]) -> list[str]:
    """What changes, for every dtype."""
    cases = itertools.product(models, ("fp64", "fp32", "bf16"))
    return [line for model, dtype in cases for line in bits(model, tp, sequence, dtype)]


def test_a_mask_that_leaks_changes_other_documents() -> None:
    [found] = run_ranks(1, bits, "llama", 1, False, "fp64", "a mask that leaks")
    assert [line.rpartition(": ")[2] for line in found] == [
        "output of other documents",
        "gradient of other documents",
    ]


# --------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in made)])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("core", [Causal(), Causal(700), Causal(0, 2.0)], ids=str)
def test_no_tensor_has_all_pairs_of_positions(core: Causal, dtype: torch.dtype) -> None:
    length = 2048
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, 1, 2, 16, generator=draw).to(dtype).requires_grad_() for _ in range(3)
    )
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor([1500, 3, 45, 500]))[None]
    with Largest() as largest:
        core(q, k, v, numbers).sum().backward()
    assert largest.elements <= attention.SCORES_ON_CPU < length**2 / 4
    assert q.grad is not None


# ------------------------------------------------------------------------------------- refusals


class Own(nn.Module):
    """Attention that knows of no documents."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def own_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


def test_attention_that_takes_no_documents_is_refused_by_name() -> None:
    x, numbers = torch.zeros(4, 1, 8), torch.zeros(1, 4, dtype=torch.int64)
    norms = nn.Identity(), nn.Identity()
    block = layers.Block("blocks.7", norms, Own(), nn.Identity(), Slicing())
    with pytest.raises(ValueError, match=r"blocks\.7: Own does not support packed documents: give"):
        block(x, MicroBatch(documents=numbers))
    attention = layers.Attention("blocks.7.attention", 8, 2, Slicing(), core=own_core)
    with pytest.raises(ValueError, match=r"blocks\.7\.attention: the core own_core does not"):
        attention(x, numbers)
    usual = layers.Attention("blocks.7.attention", 8, 2, Slicing())
    blocks = [
        layers.Block("blocks.7", norms, one, nn.Identity(), Slicing()) for one in (attention, usual)
    ]
    assert [one.documents for one in (block, *blocks)] == [False, False, True]


def test_a_plan_refuses_packing_for_a_core_without_documents() -> None:
    config = _with(config_of(Case(model="llama")), "data", packing=True)
    with pytest.raises(ConfigError, match=r"--data\.packing true: blocks\.0 .*may mix the tokens"):
        Forecast.of(config, 1, lambda slicing: SparseModel(config.model, slicing))


class Stem(nn.Module):
    """A layer that may do anything."""

    name = "stem"

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x


class WithStem(models.Decoder):
    """A decoder with a layer of a user."""

    def layers(self) -> list[nn.Module]:
        first, *rest = super().layers()
        return [first, Stem(), *rest]


class Regression(nn.Linear):
    """A module that is wrapped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def refusals() -> dict[str, str]:
    """The messages of what cannot work."""
    config = config_of(Case(model="llama"))
    packed = _with(config, "data", packing=True)
    full, said = batch(0, config.train.global_batch), {}

    def attempt(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"

    def build(config: Config) -> Engine:
        slicing, topology = Slicing(), configs.topology_of(1, 1)
        return LayeredEngine(WithStem(config.model, slicing), topology, config)

    attempt("a layer", lambda: build(config).step(full))
    attempt("a layer, packing", lambda: build(packed))
    attempt("a module", lambda: Engine(Regression(2, 1), configs.topology_of(1, 1), packed))
    compiled = _with(packed, "run", compile=True)
    attempt("compiled", lambda: engine_of(compiled))
    attempt("a forecast", lambda: Forecast.of(compiled, 1))
    attempt(
        "a layer, forecast",
        lambda: Forecast.of(packed, 1, lambda slicing: WithStem(config.model, slicing)),
    )
    engine = engine_of(packed)
    plain = {name: value for name, value in full.items() if name != "documents"}
    attempt("no documents", lambda: engine.step(plain))
    attempt("dtype", lambda: engine.step({**full, "documents": full["documents"].int()}))
    attempt("shape", lambda: engine.step({**full, "documents": full["documents"][:, 1:]}))
    backwards = engine.step({**full, "documents": full["documents"].flip(1)})
    attempt("order", lambda: backwards.loss)
    return said


def _with(config: Config, group: str, **values: object) -> Config:
    return config.model_copy(update={group: getattr(config, group).model_copy(update=values)})


def test_what_cannot_work_is_refused_by_name() -> None:
    [said] = run_ranks(1, refusals)
    expected = {
        "a layer": "ValueError: the batch has 'documents': stem (Stem) may mix the tokens",
        "a layer, packing": "ConfigError: --data.packing true: stem (Stem) may mix the tokens",
        "a module": "ConfigError: --data.packing true: a wrapped module (Regression) has no mask",
        "compiled": "ConfigError: --data.packing true: on CPUs attention reads the borders",
        "a forecast": "ConfigError: --data.packing true: on CPUs attention reads the borders",
        "a layer, forecast": "ConfigError: --data.packing true: stem (Stem) may mix the tokens",
        "no documents": "ValueError: --data.packing true, and the batch has no 'documents'",
        "dtype": "ValueError: the batch's 'documents' are int32 [8, 16]: pass one int64 number",
        "shape": "ValueError: the batch's 'documents' are int64 [8, 15]: pass one int64 number",
        "order": "DataError: up to step 1, since metrics were last read: 'documents' that decrease",
    }
    assert said.keys() == expected.keys()
    assert not [name for name, start in expected.items() if not said[name].startswith(start)], said


# --------------------------------------------------------------------------------- command line

TRAIN = [
    "-m", "threed", "train", "llama", "--model.layers", "2", "--model.hidden", "32", "--model.heads", "4",
    "--model.seq", "32", "--train.steps", "8", "--train.global-batch", "8", "--train.micro-batch", "2",
    "--train.eval-samples", "4", "--train.sample-tokens", "8", "--optim.warmup", "2", "--log.wandb", "off",
    "--log.every", "1", "--data.path", "texts.jsonl", "--data.split", "0.2",
]  # fmt: skip
TOPOLOGIES = {
    "one": [],
    "tp2": ["--parallel.tp", "2"],
    "pp2": ["--parallel.pp", "2", "--parallel.schedule", "zb-h1", "--recompute.mode", "full"],
    "dp2": ["--zero.stage", "3"],
}


@pytest.mark.parametrize(
    "names", [("one", "pp2", "dp2"), pytest.param(("one", "tp2"), marks=pytest.mark.grid)]
)
def test_the_command_line_packs_a_file_of_documents(names: tuple[str, ...], tmp_path: Path) -> None:
    lines = [f"document {n} is about {n * n} things"[: 9 + n % 23] for n in range(300)]
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "texts.jsonl").write_text(text)

    def train(name: str, *flags: str) -> list[dict[str, float]]:
        ranks, flags = (1 if name in ("one", "plain") else 2), (*flags, "--run.dir", f"runs/{name}")
        done = run_script(ranks, [*TRAIN, *flags], tmp_path, environment(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the model writes" in done.stdout
        return metrics.read(tmp_path / "runs" / name / "metrics.jsonl")

    packed = ("--data.packing", "true", "--precision.dtype", "fp64")
    found = {name: train(name, *packed, *TOPOLOGIES[name]) for name in names}
    for name in ("train/loss", "val/loss", "val/bits_per_byte"):
        one, *others = ([row[name] for row in rows if name in row] for rows in found.values())
        assert one
        assert others == [pytest.approx(one, rel=1e-9)] * len(others)  # fp64, other orders of sums
    assert train("plain", "--precision.dtype", "fp64")[0] != found["one"][0]
    again = run_script(
        1, [*TRAIN, *packed[2:], "--run.dir", "runs/one", "--train.steps", "9"], tmp_path, environment(tmp_path)
    )  # fmt: skip
    assert "changed    data.packing was true and is false: " in again.stdout, again.stderr


def test_a_plan_counts_all_pairs(tmp_path: Path) -> None:
    plan = ["-m", "threed", "plan", "gpt", "--preset", "tiny", "--data.packing"]
    done = [programs.run([*plan, word], tmp_path, environment(tmp_path)) for word in ("true", "false")]  # fmt: skip
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout == done[1].stdout
