"""Schedules of a user's own: functions in a file, plans as CSV text, and both from the command line of training."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from tests.configs import engine_of
from tests.harness import run_ranks
from tests.runs import configuration, open_text
from tests.training.test_pretrain import QUICK, again
from tests.training.test_pretrain import folder as folder  # a fixture
from threed import schedules
from threed.cli.commands import main
from threed.config import ConfigError, ParallelConfig
from threed.config.arguments import load
from threed.config.resolution import resolve
from threed.monitor import metrics
from threed.schedules import Plan, build, from_csv, lower, read_csv, registry, validate
from threed.schedules.registry import names_file, own_chunks

MINE = '''
from threed.schedules import Action, Kind, Plan, gpipe, lower, schedule
from threed.schedules.all_forward_all_backward import forward_only


@schedule("rounds", chunks=2)
def two_rounds(stages, microbatches):
    """Two chunks a rank, one after the other, forward and backward."""
    order = [(Kind.F, chunk) for chunk in (0, 1)] + [(Kind.B, chunk) for chunk in (1, 0)]
    actions = tuple(Action(kind, m, chunk) for kind, chunk in order for m in range(microbatches))
    return Plan("rounds", stages, microbatches, 2, (actions,) * stages)


def unnamed(stages, microbatches):
    return two_rounds(stages, microbatches)


def nothing(stages, microbatches):
    pass


def words(stages, microbatches):
    return Plan("words", stages, microbatches, 1, (("F0.0", "B0.0"),) * stages)


def fails(stages, microbatches):
    return Plan("fails", stages, microbatches, 1 // 0, ())


def of_any(stages, microbatches, chunks):
    return gpipe(stages, microbatches)


def one_way(stages, microbatches):
    return forward_only(stages, microbatches)


def other(stages, microbatches):
    return gpipe(stages + 1, microbatches)


def incomplete(stages, microbatches):
    return Plan("incomplete", stages, microbatches, 1, gpipe(stages, microbatches).ranks[:1] + ((),) * (stages - 1))


def strange(stages, microbatches):
    return Plan("strange", stages, microbatches, 1, None)


def leaves(stages, microbatches):
    raise SystemExit(3)


def short(stages):
    pass


def texts(stages, microbatches):
    return Plan("texts", stages, microbatches, 1, ((Action("F", 0), Action("B", 0)),) * stages)


def floats(stages, microbatches):
    return Plan("floats", stages, microbatches, 1, ((Action(Kind.F, 0.0), Action(Kind.B, 0)),) * stages)


def pairs(stages, microbatches):
    return Plan("pairs", stages, microbatches, 1, ((Action(Kind.FB, 1, 0, ("B", 0, 0)),),) * stages)


def halves(stages, microbatches):
    return Plan("halves", stages, microbatches / 2, 1, gpipe(stages, microbatches).ranks)


def sends(stages, microbatches):
    return lower(gpipe(stages, microbatches))


def lists(stages, microbatches):
    plan = two_rounds(stages, microbatches)
    placement = [[plan.stage_of(rank, chunk) for chunk in (0, 1)] for rank in range(stages)]
    return Plan("lists", stages, microbatches, 2, [list(actions) for actions in plan.ranks], placement)


class Holder:
    __hash__ = None

    def __call__(self, stages, microbatches):
        return lists(stages, microbatches)


held = Holder()
'''

BY_RANK = """
from torch import distributed
from threed.schedules import gpipe, one_f_one_b


def by_rank(stages, microbatches):
    return (gpipe, one_f_one_b)[distributed.get_rank()](stages, microbatches)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # what the file registers goes with it
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


# ----------------------------------------------------------------------------------------------------------- functions


def test_a_function_is_found_by_its_name_or_that_of_its_schedule(mine: str) -> None:
    for name in ("two_rounds", "rounds", "unnamed"):
        assert build(f"{mine}:{name}", 2, 3).total_stages == 4
        assert build(f"{mine}:{name}", 2, 3, chunks=2).name == "rounds"
        validate(lower(build(f"{mine}:{name}", 3, 4)))
    for name in (
        "lists",
        "held",
    ):  # of lists, from something that cannot be hashed: a run does hash it
        plan = build(f"{mine}:{name}", 2, 3)
        assert hash(plan) is not None
        assert plan.ranks == build(f"{mine}:rounds", 2, 3).ranks
    assert build("rounds", 2, 3) is not None  # the file is imported, so its schedule has its name
    assert own_chunks(f"{mine}:rounds") == 2
    assert own_chunks(f"{mine}:unnamed") is None  # its plan says it
    assert own_chunks(f"{mine}:unnamed", 2, 3) == 2


WRONG_FUNCTIONS = (
    ("nothing", None, r"mine\.py:nothing\(2, 4\): it returns None, not a threed\.schedules\.Plan"),
    ("words", None, r"words\(2, 4\): plan words: rank 0: 'F0\.0' is not an Action"),
    (
        "texts",
        None,
        r"texts\(2, 4\): plan texts: rank 0: \('F', 0, 0, None\) is not an Action; .* Action\.parse",
    ),
    (
        "floats",
        None,
        r"plan floats: rank 0: \(<Kind\.F: 'F'>, 0\.0, 0, None\) is not an Action; .* whole numbers",
    ),
    ("pairs", None, r"plan pairs: rank 0: .* \('B', 0, 0\)\) is not an Action"),
    (
        "halves",
        None,
        r"plan halves: stages, micro-batches and chunks must be whole numbers of at least 1",
    ),
    ("sends", None, r"plan gpipe: rank 0: SF0\.0: use compute actions only"),
    ("fails", None, r"fails\(2, 4\): ZeroDivisionError at line \d+ of mine\.py: "),
    ("of_any", None, r"of_any\(stages, microbatches, chunks\): it needs a number of chunks"),
    ("of_any", 2, r"of_any: a plan of 1 chunk, not 2: use 1 chunk"),
    ("unnamed", 3, r"unnamed: a plan of 2 chunks, not 3"),
    ("rounds", 3, r"rounds: chunks is 3; this schedule has 2"),
    (
        "one_way",
        None,
        r"one_way\(2, 4\): plan forward-only has no backward: nothing would be trained",
    ),
    (
        "other",
        None,
        r"other: a plan for 3 stages and 4 micro-batches, but the run needs one for 2 and 4",
    ),
    ("strange", None, r"strange\(2, 4\): TypeError: "),
    ("leaves", None, r"leaves\(2, 4\): SystemExit at line \d+ of mine\.py: 3"),
    ("incomplete", None, r"incomplete\(2, 4\): plan incomplete: rank 1: F0\.0 is missing"),
    ("short", None, r"short\(stages\): it must take \(stages, microbatches\)"),
    (
        "Holder",
        None,
        r"there is no function 'Holder' in it; its functions are fails, floats, .*, rounds, sends, short",
    ),
    ("gone", None, r"there is no function 'gone' in it; its functions are fails"),
    ("", None, r"write .*mine\.py:FUNCTION; its functions are fails"),
)


def test_what_is_wrong_with_a_function_is_said(mine: str) -> None:
    for name, chunks, message in WRONG_FUNCTIONS:
        with pytest.raises(ValueError, match=message):
            build(f"{mine}:{name}", 2, 4, chunks)


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("raise RuntimeError('no such thing')")
    with pytest.raises(
        ValueError, match=r"breaks\.py cannot be imported: RuntimeError: no such thing"
    ):
        build(f"{tmp_path}/breaks.py:f", 2, 4)
    for name in ("gone.py:f", "gone.py"):
        with pytest.raises(ValueError, match=r"gone\.py: no such file"):
            build(f"{tmp_path}/{name}", 2, 4)


def test_the_decorator_leaves_the_function_and_takes_a_name_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))

    def mine(stages: int, microbatches: int) -> Plan:
        return schedules.gpipe(stages, microbatches)

    assert schedules.schedule("mine")(mine) is mine
    assert build("mine", 2, 3) == build("gpipe", 2, 3)
    schedules.schedule("mine")(mine)  # as where its file is read again
    with pytest.raises(ValueError, match="'mine' exists already"):
        schedules.schedule("mine")(schedules.one_f_one_b)
    assert ParallelConfig(schedule="mine").schedule == "mine"  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------------------------------ CSV text


WRONG_TEXTS = (
    ("", "the file is empty"),
    (" ,\n\n", "the file is empty"),
    ("0F0,0B0\n\n1F0,1B0", "row 2 computes nothing"),
    ("0F0,0B0\n1SEND_F0", "row 2 computes nothing"),
    ("0F0,0X0", r"row 1, cell 2: '0X0': not an action of torch"),
    ("F0.0", "row 1, cell 1: 'F0.0': not an action of torch"),
    ("\0\1", "row 1, cell 1: .*: not an action of torch"),
    ("0F0junk", "row 1, cell 1: '0F0junk': not an action of torch"),
    ("0F0,(0F1;0W0)OVERLAP_F_B", "row 1, cell 2: .*not an action of torch"),
    ("0F0,(0F1)OVERLAP_F_B", "row 1, cell 2: .*not an action of torch"),
    ("0" * 9000, "row 1, cell 1: .*not an action of torch"),
    ('"' + "0F0," * 50_000, "not CSV: field larger than field limit"),
    ("0F0,-1B0", "row 1, cell 2: '-1B0': not an action of torch"),
    ("0F0;0B0", "row 1, cell 1: '0F0;0B0': not an action of torch"),
    ("rank,action\n0F0,0B0", "row 1, cell 1: 'rank': not an action of torch"),
    ("9" * 9000 + "F0", "row 1, cell 1: .*not an action of torch"),
    ("0F0,0B0\n1F0,1B0,0F1", "row 2, cell 3: '0F1': stage 0 is in row 1 already"),
    (
        "0F0,0B0\n1F0,0RECV_F0,1B0",
        "row 2, cell 2: '0RECV_F0': this row computes nothing of stage 0",
    ),
    ("0F0,0B0\n2F0,2B0", "no row has stage 1, but one has stage 2"),
    ("999999999F0", "no row has stage 0, but one has stage 999999999"),
    (
        "0F0,1F0,1B0,0B0\n2F0,2B0",
        "row 1 has 2 stages and row 2 has 1; all ranks must have the same number",
    ),
    ("0F0,0F2,0B0,0B2", "stage 0 has no F of micro-batch 1; the plan has 2 micro-batches"),
    ("0F0,0F999999999,0B0,0B999999999", "stage 0 has no F of micro-batch 1"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0", "stage 1 has no F of micro-batch 1"),
    ("0F0", "stage 0 has no B, or I and W, of micro-batch 0"),
    ("0F0,0I0", "stage 0 has no W of micro-batch 0"),
    ("0F0,0B0,0B0", "row 1, cell 3: '0B0': 0B0 appears twice"),
    ("0B0,0F0", "row 1, cell 1: '0B0': 0B0 appears before 0F0"),
    ("0F0,0W0,0I0", "row 1, cell 2: '0W0': 0W0 appears before 0I0"),
    ("0F0,(0F1;0B1)OVERLAP_F_B", "row 1, cell 2: .*: 0B1 appears before 0F1"),
    ("0F0,0I0,0B0", "row 1, cell 3: '0B0': this micro-batch already had its backward"),
    ("1F0,0F0,1B0,0B0", "stalls: rank 0 waits at F1.0 for F0.0 of rank 0"),
)


def test_what_is_wrong_with_a_csv_text_is_said_by_row_and_cell() -> None:
    for text, message in WRONG_TEXTS:
        with pytest.raises(ValueError, match=rf"mine\.csv.*{message}"):
            from_csv(text, "mine.csv")


def test_a_csv_text_may_have_spaces_empty_cells_communication_and_pairs() -> None:
    rows = [
        "0UNSHARD,0F0, ,0SEND_F0,0F1,0RECV_B0,0B0,0B1,",
        '"1F0",(1F1;1B0)OVERLAP_F_B,1B1,1REDUCE_GRAD',
        "",
    ]
    text = "\n".join(rows)
    assert str(from_csv(text)) == "rank 0: F0.0 F0.1 B0.0 B0.1\nrank 1: F0.0 F0.1+B0.0 B0.1"
    turned = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert turned.placement == ((0, 3), (1, 2))
    assert str(turned).startswith("rank 0: F0.0 F1.0 B1.0 B0.0")


def test_a_csv_file_is_read_or_it_is_said_why_not(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name, message in (
        ("gone", "No such file"), ("folder", "Is a directory"), ("bytes", "not text"),
        ("pipe", "it is not a regular file, but a"),
        ("zero", "it is not a regular file, but a pipe"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}\.csv: {message}"):
            read_csv(f"{tmp_path}/{name}.csv")
    text = schedules.to_csv(build("1f1b", 2, 3)).replace("\n", "\r\n")
    (tmp_path / "plan.csv").write_text("\ufeff" + text, newline="")  # as spreadsheets write
    assert build(f"{tmp_path}/plan.csv", 2, 3).ranks == build("1f1b", 2, 3).ranks
    with pytest.raises(
        ValueError,
        match=r"plan\.csv: a plan for 2 stages and 3 micro-batches, but the run needs .* 4 and 3",
    ):
        build(f"{tmp_path}/plan.csv", 4, 3)
    with pytest.raises(ValueError, match="chunks is 2; this schedule has 1"):
        build(f"{tmp_path}/plan.csv", 2, 3, chunks=2)


# ------------------------------------------------------------------------------------------------------- command lines


def test_the_tool_takes_files_and_writes_csv(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["schedule", "mine.py:rounds", *sizes, "--csv", "rounds.csv"]) == 0
    first = capsys.readouterr().out
    assert main(["schedule", "rounds.csv", "--svg", "rounds.svg"]) == 0
    assert capsys.readouterr().out == first
    assert "rounds.csv: 2 stages, 4 micro-batches" in Path("rounds.svg").read_text()
    for words, message in (
        (["rounds.csv", "--stages", "3"], "the run needs one for 3 and 4"),
        (["1f1b", "--stages", "3"], "give --stages and --microbatches"),
        (["mine.py:fails", *sizes], "ZeroDivisionError"),
        (["ZBH1", *sizes], "did you mean 'zb-h1'?"),
        (["1f1b", *sizes, "--send", "nan"], "send is nan; times are finite and not negative"),
        (["1f1b", *sizes, "--forward", "inf", "--json"], "forward is inf; times are finite"),
    ):
        assert main(["schedule", *words]) == 2
        assert message in capsys.readouterr().err


def test_the_tool_takes_the_time_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pair.csv").write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    for more, makespan in (([], 6.0), (["--overlapped", "2"], 5.0)):
        assert main(["schedule", str(tmp_path / "pair.csv"), *more]) == 0
        assert f"makespan          {makespan}" in capsys.readouterr().out


def problems(line: str, world: int = 2) -> str:
    with pytest.raises(ConfigError) as found:
        load(line.split(), world_size=world)
    return str(found.value)


def test_wrong_files_are_among_all_problems_of_a_run(mine: str, tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text(schedules.to_csv(build("1f1b", 4, 8)))
    batch = "--parallel.pp 2 --train.global-batch 8 --train.micro-batch 2"
    for schedule, message in (
        ("nothing.py:f", "--parallel.schedule nothing.py: no such file"),
        (f"{mine}:gone", "there is no function 'gone' in it; its functions are fails"),
        (f"{mine}:fails", "ZeroDivisionError at line"),
        (f"{mine}:rounds --parallel.chunks 3", "this schedule has 2; use --parallel.chunks 2, or"),
        (f"{tmp_path}/gone.csv", "gone.csv: No such file"),
        (
            f"{tmp_path}/plan.csv",
            (
                "plan.csv: a plan for 4 stages and 8 micro-batches, but the run needs one for 2 and 4; "
                "use --parallel.pp 4 and --train.global-batch 8 × --train.micro-batch × dp, or another"
            ),
        ),
    ):
        text = problems(f"{batch} --parallel.schedule {schedule} --model.heads 7")
        assert message in text
        assert "--model.hidden 256 is not divisible by --model.heads 7" in text
    text = problems(f"--parallel.pp 2 --parallel.schedule {mine}:rounds --parallel.chunks 3")
    given = f"--parallel.chunks 3 with --parallel.schedule {mine}:rounds"
    assert f"{given}: chunks is 3" in text  # `schedule` is said once
    text = problems("--parallel.pp 3 --train.global-batch 48 --parallel.schedule chimera")
    assert "--parallel.schedule chimera: 3 stages" in text
    assert "; use --parallel.pp 4, or another --parallel.schedule" in text
    plan = f"--parallel.schedule {tmp_path}/plan.csv --parallel.pp 4"
    text = problems(f"{plan} --train.global-batch 8 --train.micro-batch 2", world=4)
    assert "; use --train.global-batch 16 or --train.micro-batch 1, or another" in text
    # dp cannot be known
    text = problems(f"--parallel.pp 3 --parallel.schedule {tmp_path}/plan.csv", world=2)
    assert "use --parallel.pp 4 and --train.global-batch 8 × --train.micro-batch × dp" in text
    assert "must be 1f1b, gpipe, " in problems("--parallel.schedule mine.txt")


def test_a_resolved_configuration_has_the_whole_path_and_the_chunks(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = load(["--parallel.pp", "2", "--parallel.schedule", "mine.py:unnamed"], world_size=2)
    assert resolve(config, 10, 2).parallel.schedule == f"{tmp_path}/mine.py:unnamed"
    assert resolve(config, 10, 2).parallel.chunks == 2
    assert resolve(config, 10).parallel.chunks is None  # nor is dp known
    assert not names_file(resolve(config.model_validate({}), 10, 2).parallel.schedule)


def flags_of(plan: Plan) -> list[str]:
    """What a short run with this plan is told, beside --parallel.schedule: the plans of tests/data/schedules too."""
    return [
        "--preset", "tiny", *QUICK, "--parallel.pp", str(plan.stages), "--precision.dtype", "fp64",
        "--train.global-batch", str(plan.microbatches), "--train.micro-batch", "1", "--log.every", "1",
        "--log.wandb", "off", "--checkpoint.export-hf", "false", "--train.sample-tokens", "0",
    ]  # fmt: skip


def test_runs_with_a_schedule_of_ones_own_train_as_others_do(
    mine: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build("gpipe", 2, 4)
    flags = [*flags_of(plan), "--model.layers", "4", "--train.steps", "3"]
    (folder / "plan.csv").write_text(schedules.to_csv(plan))

    def losses(name: str, schedule: str, draws: bool = False) -> list[float]:
        words = [*flags, "--run.name", name, "--parallel.schedule", schedule]
        done = again(folder, 2, "gpt.py", *words, draws=draws)
        assert done.returncode == 0, done.stdout + done.stderr
        return [row["train/loss"] for row in metrics.read(folder / "runs" / name / "metrics.jsonl")]

    named = losses("named", "gpipe")
    assert losses("csv", "plan.csv") == named  # the same actions in the same order
    # Two chunks a rank are four stages: gradient norms are summed in another order.
    assert losses("function", "mine.py:unnamed", draws=True) == pytest.approx(named, rel=1e-12)
    run = folder / "runs" / "function"
    parallel = tomllib.loads((run / "config.toml").read_text())["parallel"]
    assert (parallel["schedule"], parallel["chunks"]) == (f"{folder}/mine.py:unnamed", 2)
    assert (
        "One step of mine.py:unnamed on 2 pipeline ranks"
        in (run / "figures" / "pipeline.svg").read_text()
    )
    monkeypatch.chdir(run)  # who goes on from elsewhere finds the file
    assert load(["--config", "config.toml"], world_size=2)[0].parallel.chunks == 2


def differ(folder: str) -> str:
    """What an engine says of a function that gives every rank another plan."""
    parallel = {"pp": 2, "schedule": f"{folder}/mine.py:by_rank"}
    config = configuration(Path(folder), open_text(Path(folder)), 2, parallel=parallel)
    with pytest.raises(ValueError, match="a different plan") as found:
        engine_of(config)
    return str(found.value)


def test_ranks_whose_plans_differ_are_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BY_RANK)
    said = run_ranks(2, differ, str(tmp_path))
    assert [text.partition(" of ")[0] for text in said] == ["rank 1 has a different plan"] * 2


def test_a_run_with_a_wrong_schedule_ends_with_exit_code_2(mine: str, folder: Path) -> None:
    done = again(
        folder,
        1,
        "gpt.py",
        "--preset",
        "tiny",
        *QUICK,
        "--parallel.schedule",
        "mine.py:x",
        "--model.heads",
        "5",
    )
    assert done.returncode == 2
    assert "2 problems in the configuration" in done.stderr
    assert "mine.py:x: there is no function 'x' in it; its functions are" in done.stderr
    assert "nothing was started" in done.stderr
