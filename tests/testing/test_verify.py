"""`threed.testing` and `threed verify`: planted faults are found by name, right models are the same."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.configs import Case, Result, train, trained
from tests.harness import run_ranks
from tests.planted_faults import FAULTS, Model
from threed import models
from threed.cli.commands import main
from threed.config import Config, ConfigError
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.testing import (
    DEFAULTS,
    RanksFailed,
    Report,
    diagnose,
    differences,
    results_of,
    same_everywhere,
)
from threed.testing.ranks import _World, note
from threed.testing.topologies import DEFAULT, configured, ranks_of, words

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_model.py"

# Of every fault: the topology that shows it, the parameter that is named, and a word of what is said.
PLANTED = {
    "MissingPartial": ("tp2-seq", "blocks.1.gain.weight", "partial=slicing.partial"),
    "PartialTooMany": ("tp2", "blocks.1.gain.weight", "2 times that of one process"),
    "MissingSum": ("tp2", None, "layers.reduce_from"),
    "MissingCopy": ("tp2", None, "layers.copy_to"),
    "WrongSlice": ("tp2-seq", "blocks.1.position.weight", "its output differs"),
    "TorchsDropout": ("tp2", None, "torch's global random numbers"),
    "InPlace": ("tp2", None, "change a copy"),
    "InPlaceUnseen": ("recompute", None, "changes its input in place"),
    "ShapeOfTheRank": ("tp2", "blocks.1.extra.weight", ""),
    "OutputOfTheRank": ("tp2", None, "has shape [15, 2, 32], on one process [16, 2, 32]"),
    "DoubledName": ("tp2", "blocks.1.norm.weight", ""),
    "SlicingWithoutAxis": ("tp2", None, "replicated=slicing.replicated"),
    "SomeRanksOnly": ("tp2", None, "a collective that only some of them call"),
    "StateOfItsOwn": ("recompute", None, "its forward runs twice"),
    "BufferOfTheRank": ("tp2", "blocks.1.level", "differs between tensor ranks"),
    "EndsOnOneRank": ("tp2", None, "rank 1 ended with exit code 3"),
    "NoNumber": ("tp2", None, "the loss of step 1 is NaN"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_layer_named(fault: str) -> None:
    topology, parameter, says = PLANTED[fault]
    report = same_everywhere(FAULTS[fault], None, [topology])
    assert not report.same
    assert report.exit_code == 1
    assert not report.refused
    found = report.differences[0]
    assert found.layer == "blocks.1", report
    assert parameter is None or found.parameter == parameter, report
    assert says in found.what, report
    assert {d.layer for d in report.differences} == {"blocks.1"}, report


def test_the_models_without_a_fault_are_the_same() -> None:
    """In all topologies of the default set."""
    report = same_everywhere(Model)
    assert report.same, report
    assert report.topologies == list(DEFAULT)
    assert report.refused == []


def test_schedules_are_compared_with_whole_backwards_in_model_order() -> None:
    """Also one that a single process cannot have, and a cut that is for two."""
    for parallel in (
        {"schedule": "chimera", "partition": (1, 4)},
        {"schedule": "zb-v", "optimistic_step": True},
    ):
        report = same_everywhere(
            Model, None, ["pp2"], config=Config.model_validate({**DEFAULTS, "parallel": parallel})
        )
        assert report.same, report


def test_2bw_is_compared_with_its_own_rule_on_one_process() -> None:
    """Also a planted fault is found, and its parameter named, though a step leaves backwards to the next."""
    config = Config.model_validate({**DEFAULTS, "parallel": {"schedule": "2bw"}})
    report = same_everywhere(Model, None, ["pp2", "dp2-zero1", "tp2"], config=config)
    assert report.same, report
    assert report.refused == []
    report = same_everywhere(FAULTS["PartialTooMany"], None, ["pp2-tp2"], config=config)
    assert [found.parameter for found in report.differences] == ["blocks.1.gain.weight"], report
    assert "2 times that of one process" in report.differences[0].what


def results_twice(case: Case) -> list[bool]:
    """Whether results are the same when they are read again; and those of an engine that was drained before."""
    engine, metrics = trained(case)
    first, second = results_of(engine, metrics), results_of(engine, metrics)
    engine, metrics = trained(case)
    engine.finish()
    third = results_of(engine, metrics)
    return [
        a.moments.keys() == b.moments.keys()
        and all(
            torch.equal(values, b.parts[part][name])
            for part in a.parts
            for name, values in a.parts[part].items()
        )
        for a, b in ((first, second), (first, third))
    ]


def test_results_are_those_of_an_ended_step() -> None:
    case = Case(pp=2, schedule="2bw", microbatches=4, zero=0)
    assert run_ranks(2, results_twice, case) == [[True, True]] * 2


def test_the_example_is_the_same_on_the_command_line() -> None:
    """As a user runs it: a process of its own, which prints nothing but the report."""
    words = ["-m", "threed", "verify", f"{EXAMPLE}:ParallelModel", "--json", "--model.layers", "2"]
    words += ["--topologies", "tp2-seq,pp2-dp2-zero3"]
    done = programs.run(words, Path("/"), {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    same = {
        "same": True,
        "topologies": ["tp2-seq", "pp2-dp2-zero3"],
        "refused": [],
        "differences": [],
    }
    assert json.loads(done.stdout) == same


def examples() -> list[str]:
    """The models of the examples: classes with layers."""
    found = []
    for path in sorted(EXAMPLE.parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            methods = {
                item.name for item in getattr(node, "body", ()) if isinstance(item, ast.FunctionDef)
            }
            if isinstance(node, ast.ClassDef) and "layers" in methods:
                found.append(f"{path.name}:{node.name}")
    return found


# Others only with the grid: tests/layers/test_own_models.py compares them in other topologies.
ALWAYS = ("convolution_stem.py:ConvolutionModel",)


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=() if e in ALWAYS else pytest.mark.grid) for e in examples()],
)
def test_the_examples_are_the_same(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    topologies = "tp2-seq,pp2-dp2-zero3-recompute"
    assert main(["verify", f"{EXAMPLE.parent / example}", "--topologies", topologies]) == 0, (
        capsys.readouterr().out
    )
    assert f"equal          {topologies.replace(',', ', ')}\nsame\n" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- the command, in process

USERS = """
import torch
from beside import WIDTH
from tests.planted_faults import MissingSum, Model
print("a model that talks")

class Mine(Model):
    def __init__(self, config, slicing):
        print("built")
        super().__init__(config, slicing)

class Faulty(Mine):
    fault = MissingSum

class Fails(Mine):
    def __init__(self, config, slicing):
        raise TypeError("not today")

class Other:
    def __init__(self, config, slicing):
        pass

class Plain(torch.nn.Module):
    def __init__(self, config, slicing):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab, WIDTH)
        torch.nn.init.constant_(self.table.weight, 0.5)
        self.out = torch.nn.Linear(WIDTH, config.vocab)
        torch.nn.init.constant_(self.out.weight, 0.1)

    def forward(self, tokens, labels):
        logits = self.out(self.table(tokens).tanh())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def batch(config, step):
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, config.model.vocab, (config.train.global_batch, config.model.seq), generator=draw)
    return {"tokens": ids, "labels": ids.roll(1)}
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    (tmp_path / "users.py").write_text(USERS)
    return tmp_path / "users.py"


def test_a_users_file_with_a_batch_of_its_own(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["verify", f"{users}:Faulty", "--topologies", "pp2,tp2", "--json", "--train.steps", "1"]
        )
        == 1
    )
    facts = json.loads(capsys.readouterr().out)
    (found,) = facts["differences"]
    assert facts == {
        "same": False,
        "topologies": ["pp2", "tp2"],
        "refused": [],
        "differences": [found],
    }
    assert (found["topology"], found["layer"]) == ("tp2", "blocks.1")
    assert found["largest"] > 1e-3
    assert found.keys() == {"topology", "layer", "parameter", "what", "largest"}


def test_a_module_is_compared_where_it_can_be_trained(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["verify", f"{users}:Plain", "--topologies", "tp2,dp2-zero3", "--model.seq", "8"]) == 0
    )
    out = capsys.readouterr().out
    assert "not compared   tp2: Plain cannot be split by pp 1 or tp 2" in out
    assert "equal          dp2-zero3" in out
    assert out.endswith("same (1 of 2 topologies compared)\n")


def test_what_cannot_be_compared_is_said(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*words: str) -> str:
        assert main(["verify", *words]) == 2
        printed = capsys.readouterr()
        return printed.out + printed.err

    assert "its classes are Mine, Faulty, Fails, Other, Plain" in says(f"{users}:Nobody")
    assert "write FILE.py:NAME" in says("nothing")
    assert "no such file" in says("nothing.py:Model")
    assert "TypeError: not today (users.py, line 17)" in says(
        f"{users}:Fails", "--topologies", "tp2"
    )
    assert "TypeError: Other is not a model: pass an nn.Module, or layers with" in says(
        f"{users}:Other"
    )
    assert "'tq2' is not a word of a topology" in says(f"{users}:Mine", "--topologies", "tq2")
    assert "takes 16 ranks, more than 8" in says(f"{users}:Mine", "--topologies", "tp4-pp4")
    assert "--timeout -1: must be more than" in says(f"{users}:Mine", "--timeout", "-1")
    assert "the topologies set them" in says(f"{users}:Mine", "--parallel.tp", "2")
    assert "did you mean --model.layers" in says(f"{users}:Mine", "--model.layer", "2")
    assert "has no 'Nobody'" in says("--train.steps", "3", "--timeout", "5", f"{users}:Nobody")
    for text, what in (
        ("1 / 0", "ZeroDivisionError"),
        ("exit(3)", "SystemExit: 3; guard"),
        ("(", "SyntaxError"),
    ):
        users.with_name(f"{what[:4]}.py").write_text(text)
        assert what in says(f"{users.with_name(what[:4])}.py:Model")


WRONG_BATCHES = {
    "None": "returned NoneType: it must return tensors by name, with 8 rows",
    "{'tokens': torch.zeros(3, 16).long()}": "returned tokens [3, 16]: it must return tensors",
    "{'tokens': torch.zeros(8, 16).long(), 'labels': 1}": "returned tokens [8, 16], labels without rows",
    "{'tokens': torch.zeros(8, 16)}": "returned tokens of torch.float32: ids are integers",
    "{'tokens': torch.zeros(8, 16).long(), 'noise': torch.rand(8)}": "returned other values when it was called again",
    "{}['oops']": "KeyError: 'oops' (users.py, line ",
}


@pytest.mark.parametrize("gives", WRONG_BATCHES)
def test_a_batch_that_is_none_is_refused_and_not_blamed_on_the_model(
    gives: str, users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users.write_text(
        f"{USERS.partition('def batch')[0]}def batch(config, step):\n    return {gives}\n"
    )
    assert main(["verify", f"{users}:Mine", "--topologies", "tp2"]) == 2
    assert (
        f"not compared   one process: {'' if 'oops' in gives else 'batch(config, 0) '}{WRONG_BATCHES[gives]}"
        in (capsys.readouterr().out)
    )


def test_a_batch_that_depends_on_the_process_is_refused(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn once and kept, so that every process repeats its own."""
    users.write_text(
        f"{USERS.partition('def batch')[0]}drawn = {{}}\n\ndef batch(config, step):\n"
        "    ids = drawn.setdefault(step, torch.randint(0, 50, (8, 16)))\n    return {'tokens': ids, 'labels': ids}\n"
    )
    assert main(["verify", f"{users}:Plain", "--topologies", "dp2"]) == 2
    want = "not compared   dp2: batch(config, 0) returned other values when it was called again, perhaps on another rank: seed"
    assert want in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- the function


class Odd(models.Decoder):
    """Three heads: no two tensor ranks can share them."""


def test_a_topology_that_the_sizes_do_not_fit_is_refused_not_wrong() -> None:
    sizes = {**DEFAULTS, "model": {**DEFAULTS["model"], "layers": 1, "heads": 3, "hidden": 24}}
    report = same_everywhere(Odd, None, ["tp2", "pp4"], config=Config.model_validate(sizes))
    assert not report.same
    assert report.exit_code == 2
    assert [r.topology for r in report.refused] == ["tp2", "pp4"]
    assert "3" in report.refused[0].why
    assert report.differences == report.topologies == []


def test_what_cannot_go_to_other_processes_is_said() -> None:
    with pytest.raises(ValueError, match="define them at a module's top level"):
        same_everywhere(lambda config, slicing: None)


def test_compiled_layers_are_not_compared() -> None:
    compiled = Config.model_validate({**DEFAULTS, "run": {"compile": True}})
    with pytest.raises(ValueError, match="compiled layers cannot be observed"):
        same_everywhere(Odd, None, ["pp2"], config=compiled)


def test_a_report_says_same_only_where_something_was_compared() -> None:
    assert not Report().same
    assert Report().exit_code == 2
    assert Report(topologies=["tp2"]).same


def test_words_of_topologies() -> None:
    said = words("tp2-seq-pp2-dp2-zero3-recompute-offload-micro1")
    assert said == {
        "tp": 2,
        "seq": 1,
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "recompute": 1,
        "offload": 1,
        "micro": 1,
    }
    config = configured(Config.model_validate(DEFAULTS), said)
    assert (
        config.parallel.tp,
        config.parallel.pp,
        config.parallel.dp,
        config.parallel.sequence,
    ) == (2, 2, 2, True)
    assert (config.zero.stage, config.zero.offload_optimizer, config.zero.offload_params) == (
        3,
        "cpu",
        "cpu",
    )
    assert (config.recompute.mode, config.train.micro_batch) == ("full", 1)
    assert all(ranks_of(words(name)) <= 8 for name in DEFAULT)
    for name in ("offload", "seq", "dp3", "tp3-seq"):
        with pytest.raises(ConfigError):
            configured(Config.model_validate(DEFAULTS), words(name))
    with pytest.raises(ValueError, match="twice"):
        words("tp2-tp4")


# -------------------------------------------------------------------------------------------------- the parts of it


def spoilt(case: Case, folder: str) -> list[str]:
    """On a rank: what differs from the truth, and from truths of which one number is wrong."""
    truth, found = torch.load(f"{folder}/truth.pt"), []
    engine, metrics = trained(case)
    for part, name in (
        ("", ""),
        ("weights", "blocks.0.mlp.up.weight"),
        ("exp_avg", "blocks.1.mlp.down.bias"),
    ):
        wrong = Result(**truth)
        if name:
            tensors = wrong.weights if part == "weights" else wrong.moments[part]
            tensors[name].view(-1)[-1] += 1e-8
        found.append(" ".join(str(f) for f in differences(engine, metrics, wrong, 1e-9)))
    wrong.weights["another.weight"] = torch.zeros(2)
    wrong.losses[1] *= 1 + 1e-8
    return [*found, " ".join(str(f) for f in differences(engine, metrics, wrong, 1e-9))]


def write_truth(case: Case, folder: str) -> None:
    """On a rank: what one process gives."""
    torch.save(vars(train(case)), f"{folder}/truth.pt")


def test_one_wrong_number_is_found_on_the_rank_that_holds_it(tmp_path: Path) -> None:
    case = Case(dp=2, tp=2, zero=3, layers=2)
    run_ranks(1, write_truth, case.truth, str(tmp_path))
    ranks = run_ranks(4, spoilt, case, str(tmp_path))
    assert [found[0] for found in ranks] == [""] * 4
    weight = [found[1] for found in ranks]
    # the last rows: the second tensor rank's; the last of them: the second data rank's
    assert weight[:3] == [""] * 3
    assert "weight of blocks.0.mlp.up.weight" in weight[3]
    # two copies
    assert ["exp_avg of blocks.1.mlp.down.bias" in found[2] for found in ranks].count(True) == 2
    assert "loss: " in ranks[2][3]
    assert "shards of another.weight []: no rank holds it" in ranks[0][3]


def hang(rank: int) -> None:
    """On a rank: one hangs, the other fails."""
    everyone = Topology().axis("world")
    if everyone.index == rank:
        note("call 3, the forward of blocks.1")
    collectives.barrier(everyone)
    if everyone.index == rank:
        time.sleep(60)
    raise RuntimeError("without the other")


def test_heads_that_do_not_divide_the_context_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="cp4h3: 3 does not divide the 4 ranks"):
        configured(Config(), words("cp4h3"))


def test_a_rank_that_hangs_is_named_with_what_it_did_last() -> None:
    with pytest.raises(
        RanksFailed, match=r"ranks still running: \[1\], last seen at \{1: 'call 3, "
    ) as caught:
        run_ranks(2, hang, 1)
    assert caught.value.silent == [1]
    assert "RuntimeError: without the other" in caught.value.failures[0]


def test_ranks_that_wait_for_each_other_are_named_by_the_one_that_is_least_far() -> None:
    world = _World(pipes=[None, None])  # type: ignore[list-item]
    world.notes = {0: "call 12, the forward of blocks.2", 1: "call 9, the forward of blocks.1"}
    layer, what = diagnose.explain_lost_ranks(RanksFailed(world), 30)
    assert layer == "blocks.1"
    assert "the ranks still wait for each other after 30 seconds" in what
    assert "rank 0 in call 12, the forward of blocks.2" in what
