"""benchmarks/gpu.py: its stages run, stop, fail and continue as documented.

The tests of the program use small stages that are written here; a rehearsal runs the real ones on
the CPU. The kernels, as the stage `kernels` calls them, run on the emulator.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Planned
from benchmarks.gpu_stages import (
    build,
    kernel_cases,
    kernels,
    largest,
    nccl,
    record,
    sanitizer,
    step,
    table,
    tests,
    timing,
)
from benchmarks.gpu_stages import stage as stages
from tests import programs
from tests.cuda.emulator import COMPILER, emulated, parameters
from threed.ops import fused_cpu

ROOT = Path(__file__).resolve().parents[1]
needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BEGIN = """
import argparse, os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu_stages.record import DONE, Record
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
out = parser.parse_known_args()[0].out
made = Record(out, "{name}", rehearsal=False, device="fake")
made.put(answer=42)
with open(out / "{name}.runs", "a") as file:
    file.write("ran\\n")
"""
BODIES = {
    "right": "made.end(DONE)",
    "raises": "raise RuntimeError('no such luck')",
    "dies": "os.kill(os.getpid(), 9)",
    "forgets": "",
    # a child in a separate session, like those of torchrun, which survives its parent
    "hangs": """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
made.put(child=child.pid)
time.sleep(600)
""",
    "leaves": """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
made.put(child=child.pid)
made.end(DONE)
""",
}
Conduct = Callable[..., int]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Planned]]:
    """Returns a function that creates stages of given kinds, each in a separate module."""

    def make(*kinds: str, limit: float = 60) -> list[Planned]:
        for kind in kinds:
            (tmp_path / f"fake_{kind}.py").write_text(BEGIN.format(name=kind) + BODIES[kind])
        return [Planned(kind, f"it {kind}", 2, limit, f"fake_{kind}") for kind in kinds]

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return make


def conduct(folder: Path, planned: list[Planned], *flags: str) -> int:
    return gpu.conduct(gpu.parse(["--out", str(folder), *flags]), planned)


def ended(folder: Path, name: str) -> dict[str, Any]:
    found = record.read(folder, name)
    assert found is not None
    return found


def runs(folder: Path, name: str) -> int:
    """Returns how often a stage has run."""
    path = folder / f"{name}.runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def alive(pid: int) -> bool:
    """Returns whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------- the conductor


def test_a_finished_stage_is_not_run_again(
    tmp_path: Path, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, out = plan("right", "leaves"), tmp_path / "out"
    assert conduct(out, planned) == 0
    assert ended(out, "right")["status"] == record.DONE
    assert ended(out, "right")["figures"] == {"answer": 42}
    assert conduct(out, planned) == 0
    assert (runs(out, "right"), runs(out, "leaves")) == (1, 1)
    assert "finished already" in capsys.readouterr().out
    assert conduct(out, planned, "--again", "right") == 0
    assert (runs(out, "right"), runs(out, "leaves")) == (2, 1)
    assert conduct(out, planned, "--only", "leaves", "--again") == 0
    assert (runs(out, "right"), runs(out, "leaves")) == (2, 2)
    assert conduct(out, planned, "--again") == 0
    assert (runs(out, "right"), runs(out, "leaves")) == (3, 3)


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("raises", record.CRASHED, "exit code 1: RuntimeError: no such luck"),
        ("dies", record.CRASHED, "signal 9 (SIGKILL): (it said nothing)"),
        ("forgets", record.CRASHED, "it ended without a finished record"),
    ],
)
def test_the_others_go_on_after_a_stage_that_fails(
    kind: str, status: str, said: str, tmp_path: Path, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, out = plan(kind, "right"), tmp_path / "out"
    assert conduct(out, planned) == 1
    found = ended(out, kind)
    assert (found["status"], found["message"]) == (status, said)
    assert found["figures"] == {"answer": 42}  # the figures up to the end
    assert ended(out, "right")["status"] == record.DONE
    assert f"not done: {kind}" in capsys.readouterr().out
    assert conduct(out, planned) == 1  # the stage does not count as finished
    assert (runs(out, kind), runs(out, "right")) == (2, 1)


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path: Path, plan: Any) -> None:
    out = tmp_path / "out"
    assert conduct(out, [*plan("hangs", limit=2), *plan("right")]) == 1
    found = ended(out, "hangs")
    assert (found["status"], found["message"]) == (record.OUT_OF_TIME, "ended after 2 seconds")
    assert found["figures"]["answer"] == 42
    assert not alive(found["figures"]["child"])
    assert ended(out, "right")["status"] == record.DONE


def test_what_a_finished_stage_leaves_behind_is_ended(tmp_path: Path, plan: Any) -> None:
    assert conduct(tmp_path / "out", plan("leaves")) == 0
    assert not alive(ended(tmp_path / "out", "leaves")["figures"]["child"])


def test_an_interrupt_ends_the_stage_and_is_recorded(tmp_path: Path, plan: Any) -> None:
    plan("hangs")
    out = tmp_path / "out"
    code = (
        "import signal\n"
        "from benchmarks import gpu\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background processes ignore it by default
        "try:\n"
        f"    gpu.conduct(gpu.parse(['--out', {str(out)!r}]), [gpu.Planned('hangs', '', 2, 60, 'fake_hangs')])\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(130)"
    )
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    end = time.monotonic() + 60
    while "child" not in record.figures(out, "hangs") and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert ended(out, "hangs")["status"] == record.INTERRUPTED
    assert not alive(ended(out, "hangs")["figures"]["child"])


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"stage": "other", "status": "done", "figures": {}}', ""]
)
def test_a_corrupt_record_is_told_of_and_made_anew(
    text: str, tmp_path: Path, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, out = plan("right"), tmp_path / "out"
    assert conduct(out, planned) == 0
    (out / "right.json").write_text(text)
    assert conduct(out, planned) == 0
    assert "set aside as right.corrupt, the stage runs again" in capsys.readouterr().out
    assert (out / "right.corrupt").read_text() == text
    assert ended(out, "right")["status"] == record.DONE
    assert runs(out, "right") == 2


def test_what_has_no_time_is_recorded_so(
    tmp_path: Path, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, out = plan("right"), tmp_path / "out"
    assert conduct(out, planned, "--minutes", "0.01") == 0
    found = ended(out, "right")
    assert (found["status"], found["message"], found["figures"]) == (record.NOT_RUN, "no time", {})
    assert "not run: no time" in capsys.readouterr().out
    assert runs(out, "right") == 0
    assert conduct(out, planned) == 0
    assert ended(out, "right")["status"] == record.DONE
    # figures of an earlier run remain
    assert conduct(out, planned, "--minutes", "0.01", "--again") == 0
    assert ended(out, "right")["status"] == record.DONE


def test_calls_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert gpu.main(["--only", "kernel", *out]) == 2
    assert (
        "no such stage: kernel; there are build, tests, bandwidth, features, roof, kernels,"
        in capsys.readouterr().err
    )
    assert gpu.main(["--again", "steps", *out]) == 2
    assert "no such stage: steps" in capsys.readouterr().err
    assert gpu.main(["--device", "cpu", *out]) == 2
    assert "for a rehearsal: add --small" in capsys.readouterr().err
    record.write(
        tmp_path,
        {"stage": "step", "status": "done", "rehearsal": False, "device": "GPU", "figures": {}},
    )
    assert gpu.main(["--device", "cpu", "--small", *out]) == 2
    assert "holds figures of a GPU: choose another --out" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "out")]) == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_stages_are_listed_with_how_far_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(tmp_path, {"stage": "step", "status": "crashed", "figures": {}})
    (tmp_path / "nccl.json").write_text("?")
    assert gpu.main(["--list", "--out", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert tuple(lines) == tuple(planned.name for planned in gpu.STAGES) == stages.STAGES
    assert lines["step"].endswith("[crashed]")
    assert lines["nccl"].endswith("[corrupt]")
    assert lines["build"].endswith(")")


def test_stages_fit_into_the_time_that_is_promised() -> None:
    assert max(planned.limit for planned in gpu.STAGES) < 9 * 60
    assert sum(planned.expected for planned in gpu.STAGES) <= 60 * gpu.parse([]).minutes == 20 * 60
    for planned in gpu.STAGES:
        assert planned.expected <= planned.limit
        assert (ROOT / "benchmarks" / "gpu_stages" / f"{planned.name}.py").is_file()


def test_figures_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    options = stages.parser("sizes", "").parse_args(
        ["--device", "cpu", "--small", "--out", str(tmp_path)]
    )
    record.write(
        tmp_path,
        {"stage": "step", "status": "done", "rehearsal": True, "device": "NVIDIA X", "figures": {}},
    )
    with pytest.raises(stages.NotHere, match="holds figures of another device"):
        stages.Stage("sizes", options)


def test_a_process_of_a_stage_is_ended_with_its_children(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--seconds", "60"]
    running = stages.Stage("sizes", stages.parser("sizes", "").parse_args(words))
    child = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import subprocess, sys; print('begun', flush=True); {child}"
    done = running.run([sys.executable, "-c", code], 4)
    assert (done.returncode, done.stdout) == (
        124,
        "begun\n",
    )  # returns at once, because no process has the pipe open
    assert done.stderr.endswith("killed after 2 seconds")
    assert running.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3


PROGRAMS = ("nccl", "largest")  # start worlds of their own


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([s.name for s in gpu.STAGES if s.name not in PROGRAMS], id="most"),
        pytest.param([s.name for s in gpu.STAGES], id="everything", marks=pytest.mark.grid),
    ],
)
def test_a_rehearsal(names: list[str], tmp_path: Path) -> None:
    command = ["benchmarks/gpu.py", "--device", "cpu", "--small", "--out", str(tmp_path), "--only"]
    command += names
    environment = {**os.environ, "OMP_NUM_THREADS": "1", programs.NO_FIGURES: "1"}
    done = programs.run(command, ROOT, environment, timeout=800)
    assert done.returncode == 0, done.stdout + "".join(
        path.read_text() for path in tmp_path.glob("*.log")
    )
    for name in names:
        found = ended(tmp_path, name)
        assert (found["status"], found["rehearsal"]) == (record.DONE, True), name
    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json") if path.stem != "table"
    }
    again = programs.run(command, ROOT, environment, timeout=200)
    assert again.returncode == 0
    assert again.stdout.count("finished already") == len(names) - 1
    assert before == {path: path.stat().st_mtime_ns for path in before}
    page = (tmp_path / "table.md").read_text()
    assert page.startswith(
        "## GPU\n\n**REHEARSAL in tiny shapes: no figure here is a measurement.**"
    )
    cases = record.figures(tmp_path, "kernels")["cases"]
    assert all(
        "ours" not in case["sides"] and "median_ms" in case["sides"]["eager"]
        for case in cases.values()
    )
    assert not [
        f"{name}: {one}"
        for name, one in record.figures(tmp_path, "step")["others"].items()
        if "wrong" in one
    ]


# -------------------------------------------------------------------------------------------------------- what is timed


@needs_emulator
@pytest.mark.slow
def test_our_kernels_are_right_as_they_are_called() -> None:
    """On the emulator, compared with fp64.

    Each case starts the kernels that it names, and together the cases start all kernels.
    """
    started: set[str] = set()
    torch.manual_seed(0)
    for family in kernel_cases.FAMILIES:
        for case in family(kernel_cases.SMALL, torch.device("cpu")):
            truth = kernels.truth_of(case)
            with emulated(torch_writes=True) as machine:
                off, wrong = kernels.wrong(case, "ours", case.ours, truth)
            assert not wrong, (case.name, off, wrong)
            names = {launch.name for launch in machine.launches}
            assert set(case.kernels) <= names, case.name
            started |= names
            written = [t for launch in machine.launches for t in launch.traffic.values()]
            assert sum(t.read + t.written for t in written) >= 0.99 * case.nbytes, case.name
    assert started == set(parameters())


@needs_emulator
def test_a_wrong_kernel_is_noticed() -> None:
    case = next(
        c for c in kernel_cases.sums_of(kernel_cases.SMALL, torch.device("cpu")) if "rows" in c.name
    )
    truth = kernels.truth_of(case)
    halved = lambda *inputs: lambda: tuple(x / 2 for x in case.plain(lambda f: f)(*inputs)())  # noqa: E731
    assert kernels.wrong(case, "ours", halved, truth)[0] == pytest.approx(0.5)
    assert "result 0 of ours is off by" in kernels.wrong(case, "ours", halved, truth)[1]

    def nothing(*inputs):
        return lambda: tuple(x * torch.nan for x in case.plain(lambda f: f)(*inputs)())

    assert kernels.wrong(case, "ours", nothing, truth)[1]


GONE = {
    "cross entropy": {"cross_entropy", "scale"}, "norms with residual": {"norm", "norm_backward"},
    "GELU": {"gelu", "gelu_backward"}, "sums of bias gradients": {"column_sums"}, "AdamW": {"adamw"},
    "sums of squares": {"square_sum"},
}  # fmt: skip


@needs_emulator
@pytest.mark.slow
def test_a_switch_leaves_its_kernels_out_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cpu, "MIN_NUMEL", 1 << 40)  # otherwise the CPU kernels would be used
    plan = replace(
        step.plan_for(0, small=True), config=step.GPTConfig(1, 64, 4, 16, 128), batch=2, micro=1
    )
    batch = step.reference.batches(plan.config, 1, plan.batch)[0]
    with emulated(torch_writes=True, checks=False) as machine:
        ours = step.Ours(plan, step.reference.initial_weights(plan.config), torch.device("cpu"))

        def launched() -> set[str]:
            machine.launches.clear()
            assert step.value(ours.step(*batch)) < 7
            # the second stage of several sums
            return {launch.name for launch in machine.launches} - {"add_parts"}

        every = launched()
        assert set().union(*GONE.values()) == every
        for name in step.SWITCHES:
            with step.without(name):
                assert every - launched() == GONE.get(name, every), name
        assert launched() == every


def test_a_gpus_idle_time_is_what_no_kernel_covers() -> None:
    assert timing.busy([(0, 10), (5, 12), (30, 40), (41, 50), (32, 35)]) == {
        "span_us": 50, "idle_us": 19, "gaps": 2, "long_gaps": 1, "kernels": 5,
    }  # fmt: skip
    assert timing.busy([])["span_us"] == 0


def test_times_are_summed_up_by_quartiles() -> None:
    found = timing.summary([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found["low_ms"], found["median_ms"], found["high_ms"], found["runs"]) == (
        2.0,
        3.0,
        4.0,
        5,
    )
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.interleaved(sides, torch.device("cpu"), rounds=3, warm_up=0)
    assert "".join(order) == "abcbcacab"
    assert timing.interleaved({}, torch.device("cpu")) == {}


def test_losses_agree_or_it_is_said_which_do_not() -> None:
    assert step.agree([4.0, 3.0], [4.001, 3.02]) == ""
    assert "losses of step 1 are 0.0100 apart" in step.agree([4.0, 3.0], [4.04, 3.0])
    assert "losses of step 2" in step.agree([4.0, 3.0], [4.0, float("nan")])


def test_a_gpu_that_is_too_small_is_refused_by_name() -> None:
    assert step.plan_for(80 << 30, small=False).micro == 4
    with pytest.raises(stages.NotHere, match="need 60 GB, and this GPU has 26"):
        step.plan_for(24 << 30, small=False)


@pytest.mark.parametrize(("guess", "fits"), [(16, 20), (16, 16), (16, 11), (1, 1), (3, 7), (8, 0)])
def test_the_largest_is_found_from_a_guess(guess: int, fits: int) -> None:
    tried: list[int] = []

    def work(layers: int) -> dict[str, Any]:
        tried.append(layers)
        return (
            {"layers": layers} if layers <= fits else {"layers": layers, "failed": "out of memory"}
        )

    found = largest.search(guess, work, tries=20)
    if fits == 0:
        assert found["largest"] == {"note": "not measured"}
    else:
        step_size = max(1, guess // 8)
        assert fits - step_size < found["largest"]["layers"] <= fits
        assert found["next"] == {
            "layers": found["largest"]["layers"] + step_size,
            "failed": "out of memory",
        }
    assert len(tried) == len(set(tried))


def test_the_search_for_the_largest_ends_with_its_time() -> None:
    answers = iter([{"layers": 8}, None])
    found = largest.search(8, lambda layers: next(answers))
    assert found == {"largest": {"layers": 8}, "next": {"layers": 9, "failed": "no time"}}


def test_planted_faults_are_judged_by_kernel() -> None:
    none = dict.fromkeys(sanitizer.TOOLS, "")
    seen = {
        "right": none, "no_barrier": {**none, "racecheck": "reported"}, "left_early": none, "blocks_that_write": none,
        "right_sum": {**none, "memcheck": "reported"}, "divergent": {**none, "synccheck": sanitizer.verdict(124)},
    }  # fmt: skip
    found = sanitizer.judged(seen)
    assert found["planted"] == 4
    assert found["found"] == {
        "no_barrier": ["racecheck: reported"],
        "divergent": ["synccheck: hung"],
    }
    assert found["missed"] == ["left_early"]
    assert list(found["not_looked_for"]) == ["blocks_that_write"]
    assert found["false_alarms"] == ["right_sum: memcheck: reported"]


STAND_INS = {
    # reports errors for the deliberate faults from the third on, and none for threed's kernels
    "compute-sanitizer": """#!/bin/sh
shift 4
case "$1" in *planted) [ "$2" -lt 2 ] && exit 0; exit 99;; esac
printf "ran one\\nran two\\n===== ERROR SUMMARY: 0 errors\\n"
""",
    "planted": "#!/bin/sh\nprintf 'right\\n%s\\nno_barrier\\n' $FIRST\n",
}


@pytest.mark.parametrize(
    ("first", "wrong"), [("right_sum", ""), ("divergent", "no tool reported: divergent")]
)
def test_the_sanitizers_stage_asks_about_every_kernel(
    first: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scripts instead of compute-sanitizer and of the program with the faulty kernels."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("FIRST", first)
    monkeypatch.setattr(sanitizer, "tool", lambda: str(tmp_path / "compute-sanitizer"))
    monkeypatch.setattr(sanitizer, "built", lambda folder, architecture: tmp_path / "planted")
    monkeypatch.setattr(sanitizer, "_capability", lambda stage: (9, 0))
    monkeypatch.setattr(stages.Stage, "cuda", True)
    monkeypatch.setattr(stages, "device_name", lambda device: "a stand-in")
    words = ["--device", "cpu", "--small", "--out", str(tmp_path / "out")]
    running = stages.Stage("sanitizer", stages.parser("sanitizer", "").parse_args(words))
    if wrong:
        with pytest.raises(AssertionError, match=wrong):
            sanitizer.run(running)
    else:
        sanitizer.run(running)
    found = record.figures(tmp_path / "out", "sanitizer")
    assert {
        name: (one["cases"], one["errors"]) for name, one in found["ours"].items()
    } == dict.fromkeys(sanitizer.TOOLS, (2, 0))
    assert list(found["planted"]["found"]) == ["no_barrier"]
    assert "| planted faults reported | 1 of " in table.page(tmp_path / "out")


def test_what_a_sanitizer_counts_is_read() -> None:
    assert (
        sanitizer.reports("=== x\n===== Invalid read\n===== ERROR SUMMARY: 3 errors")["errors"] == 3
    )
    text = "===== RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"
    assert sanitizer.reports(text) == {"errors": 2, "said": [text]}
    assert sanitizer.reports("Segmentation fault")["errors"] is None


def test_faults_beyond_the_tools_are_planted_ones() -> None:
    source = (ROOT / "tests" / "cuda" / "planted.cu").read_text()
    assert all(f"CASE({name}" in source for name in sanitizer.BEYOND)


@pytest.mark.skipif(not build.versions()["nvcc"].startswith("Cuda"), reason="needs nvcc")
@pytest.mark.slow
def test_planted_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    names = sanitizer.names_of(sanitizer.built(tmp_path, "90"))
    assert "no_barrier" in names
    assert set(sanitizer.BEYOND) <= set(names)


def test_results_of_pytest_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y">'
        '<failure message="assert 1 == 2&#10;more"/></testcase><testcase classname="b" name="z"><skipped/></testcase>'
        '<testcase classname="b" name="w"><error message="no"/></testcase></testsuite></testsuites>'
    )
    counts, failures = tests.results(report)
    assert counts == {"passed": 1, "failed": 1, "error": 1, "skipped": 1}
    assert failures == ["a::y: assert 1 == 2", "b::w: no"]


def test_the_stage_collects_every_test_that_needs_a_gpu() -> None:
    """`pytest -m gpu` in all of tests/ takes 15 s to collect, so the stage names the files."""
    marked = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if "mark.gpu" in path.read_text()
    }
    named = [ROOT / path for path in tests.PATHS]
    assert all(path.exists() for path in named)
    here = Path(__file__).relative_to(ROOT)
    missing = [
        path for path in marked - {here} if not any((ROOT / path).is_relative_to(n) for n in named)
    ]
    assert not missing, f"add to PATHS of benchmarks/gpu_stages/tests.py: {missing}"


def test_ways_of_training_fill_the_world() -> None:
    for world in (1, 2, 4, 8):
        for name, way in nccl.ways(world).items():
            assert world % (way["pp"] * way["tp"]) == 0, name
            assert nccl.BATCH % (world // (way["pp"] * way["tp"])) == 0, name
    assert set(nccl.REHEARSED) <= {*nccl.ways(1), *nccl.ways(2)}


# ----------------------------------------------------------------------------------------------------------- the tables


def test_tables_without_figures_say_not_measured(tmp_path: Path) -> None:
    page = table.page(tmp_path)
    assert "REHEARSAL" not in page
    for title in table.SECTIONS:
        below = page.split(f"### {title}\n")[1].split("###")[0]
        assert "not measured" in below, title
    assert_tables_are_whole(page)


def test_tables_of_some_stages(tmp_path: Path) -> None:
    times = {"median_ms": 0.5, "low_ms": 0.4, "high_ms": 0.6, "runs": 3}
    sides = {
        "ours": {**times, "share": 0.9}, "eager": {**times, "median_ms": 1.0}, "compiled": {"wrong": "off | by one"},
        "liger": {"note": "not measured: not installed"},
    }  # fmt: skip
    whole = {
        "rehearsal": False,
        "device": "NVIDIA X",
        "commit": "abc",
        "seconds": 9.0,
        "message": "",
    }
    cases = {"AdamW": {"bytes": 10**6, "kernels": ["adamw"], "sides": sides}}
    record.write(
        tmp_path,
        {
            **whole,
            "stage": "kernels",
            "status": "out of time",
            "figures": {"cases": cases, "left_out": ["x"]},
        },
    )
    partly = {
        "ours": {"step_s": 0.5, "tokens_per_s": 65536.0, "mfu": 0.6, "losses": [4.0]},
        "target_mfu": 0.58,
    }
    record.write(tmp_path, {**whole, "stage": "step", "status": "running", "figures": partly})
    (tmp_path / "nccl.json").write_text("{")
    page = table.page(tmp_path)
    assert "| kernels | out of time | 9.0 | NVIDIA X | abc | – |" in page
    assert "| nccl | corrupt |" in page
    row = next(line for line in page.splitlines() if line.startswith("| AdamW"))
    assert (
        "| 0.5 (0.4–0.6) | 90 % | 1 (0.4–0.6) | off / by one | liger: not measured: not installed | 2.00 |"
        in row
    )
    assert "No time was left for: x." in page
    assert "| threed | 0.500 | 65,536 | 60 % | not measured |" in page
    assert (
        "Targets: MFU 58 % (reached), not measured times as fast as compiled plain PyTorch (not measured)."
        in page
    )
    assert_tables_are_whole(page)


def assert_tables_are_whole(page: str) -> None:
    """Checks that every row of a table has as many cells as its heading."""
    for block in page.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1, rows


def test_the_tables_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--only",
        "table",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "table.json").read_text())["status"] == record.DONE
    assert (tmp_path / "out" / "table.md").is_file()
