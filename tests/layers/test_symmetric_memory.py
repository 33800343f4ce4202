"""Linear layers by torch's symmetric memory train like one process.

The operators exist for GPUs only. Here torch's own substitutes run on CPUs: torch registers them for meta tensors, and
its tests use them in place of the operators. So these tests find wrong arguments, shapes and gradients, but not races.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed._symmetric_memory as torch_symmetric_memory

from tests.configs import STEPS, Case, Result, batch, config_of, engine_of, share, train
from tests.harness import run_ranks
from threed.config import Config, ConfigError
from threed.distributed import symmetric_memory
from threed.distributed.topology import Topology
from threed.layers import ColumnLinear, RowLinear, Slicing, sequence_chunks
from threed.testing import differences

TOLERANCE = 1e-9  # fp64: only the order of sums differs


@contextmanager
def on_cpus(calls: list[str]) -> Iterator[None]:
    """Context in which the operators run on CPUs, in layers of any size; `calls` gets their names."""

    def counted(name: str) -> object:
        substitute = getattr(torch_symmetric_memory, f"_{name}_fallback")

        def run(*args: object, **keywords: object) -> object:
            calls.append(name)
            return substitute(*args, **keywords)

        return run

    with ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("symm_mem", "IMPL"))
        for name in symmetric_memory.OPERATORS:
            library.impl(name, counted(name), "CPU")
        stack.enter_context(patch.object(symmetric_memory, "_missing", lambda device: None))
        stack.enter_context(patch.object(symmetric_memory, "can_access", lambda *_: True))
        stack.enter_context(patch.object(sequence_chunks, "count", lambda *_: 2))
        yield


def with_keys(case: Case, gathered: bool) -> Config:
    """Returns the configuration of a case with symmetric memory."""
    config = config_of(case)
    keys = {"parallel": {"symmetric_memory": True}, "recompute": {"gathered": gathered}}
    groups = {n: getattr(config, n).model_copy(update=more) for n, more in keys.items()}
    return config.model_copy(update=groups)


CASES = [
    Case(tp=2, sequence=True, dropout=0.1),
    Case(tp=2, sequence=True, model="llama", recompute="selective", microbatches=2),
    Case(tp=2, sequence=True, model="mixtral"),
    Case(tp=4, sequence=True, model="qwen-tied", recompute="full", zero=3),
    Case(pp=2, tp=2, sequence=True, schedule="zb-v", model="llama", dropout=0.1, microbatches=3),
]  # fmt: skip


def compare(case: Case, truth: Result) -> tuple[list[str], set[str]]:
    """Returns the differences from one process, and the operators that ran."""
    found, calls = list[str](), list[str]()
    for gathered in (False, True):
        with on_cpus(calls):
            engine = engine_of(with_keys(case, gathered))
            rows = engine.config.train.global_batch
            steps = [engine.step(share(batch(i, rows), engine.topology)) for i in range(STEPS)]
            wrong = differences(engine, steps, truth, TOLERANCE)
        found += [f"gathered {gathered}: {text}" for text in wrong]
    return found, set(calls)


@pytest.mark.seldom("qwen-tied-tp4*")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-tp{case.tp}-pp{case.pp}")
def test_training_equals_one_process(case: Case) -> None:
    for found, calls in run_ranks(case.world, compare, case, train(case.truth), timeout=600):
        assert found == []
        assert calls == set(symmetric_memory.OPERATORS)


def sent() -> tuple[list[int], list[str]]:
    """Returns the bytes sent in a forward and backward of two layers, and the operators that ran.

    The bytes are without symmetric memory, then with it.
    """
    topology, found, calls = Topology(tp=2), [], list[str]()
    tp = topology.axis("tp")
    for symmetric in (False, True):
        slicing = Slicing(tp, True, symmetric_memory=symmetric)
        up = ColumnLinear("m", 6, [("up", 16)], slicing).to_empty(device="cpu")
        down = RowLinear("m.down", 16, 6, slicing).to_empty(device="cpu")
        for param in (*up.parameters(), *down.parameters()):
            torch.nn.init.normal_(param)
        before = tp.traffic["tp"]
        with on_cpus(calls):
            down(up(torch.randn(4, 3, 6, requires_grad=True))).sum().backward()
        found.append(tp.traffic["tp"] - before)
    return found, calls


def test_bytes_are_those_of_collectives() -> None:
    gather, reduce = symmetric_memory.OPERATORS
    for (without, symmetric), calls in run_ranks(2, sent):
        assert without == symmetric > 0
        assert calls == [gather, reduce, gather]  # the forwards, and the backward of the row layer


def problems() -> list[str | None]:
    """Returns what `find_problem` says: on a CPU, on two machines, without access, and without a problem."""
    axis = Topology(tp=2).axis("tp")
    found = [symmetric_memory.find_problem(axis, torch.device("cpu"))]
    device = torch.device("cuda", axis.index)
    with on_cpus([]):
        with patch.object(socket, "gethostname", lambda: f"machine-{axis.index}"):
            found.append(symmetric_memory.find_problem(axis, device))
        with patch.object(symmetric_memory, "can_access", lambda own, other: own.index == 1):
            found.append(symmetric_memory.find_problem(axis, device))
        found.append(symmetric_memory.find_problem(axis, device))
    return found


def test_ranks_agree_why_it_cannot_be_used() -> None:
    for found in run_ranks(2, problems):
        assert found == [
            "the device is cpu",
            "the tensor ranks are on several machines",
            "GPU 0 cannot access the memory of GPU 1",
            None,
        ]


def refused() -> str:
    topology = Topology(tp=2)
    config = with_keys(Case(tp=2, sequence=True), gathered=False)
    with pytest.raises(ConfigError) as error:
        Slicing.of(topology, config)
    return str(error.value)


def test_it_is_refused_on_cpus() -> None:
    text = (
        "--parallel.symmetric-memory true: the device is cpu; use --parallel.symmetric-memory false"
    )
    assert run_ranks(2, refused) == [text, text]


def test_an_older_torch_is_named() -> None:
    with patch.object(symmetric_memory, "OPERATORS", ("missing",)):
        problem = symmetric_memory._missing(torch.device("cuda", 0))
    assert problem is not None
    assert problem.startswith(f"torch {torch.__version__} does not have it")
