"""The main job as a user starts it: torchrun on the pretraining scripts, on real text, in a folder of its own."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.harness import run_script
from tests.monitor.test_monitor_wandb import config_of_run
from tests.pictures import check_style
from tests.programs import Program
from threed.checkpoint import native
from threed.checkpoint.run_folder import resume_hint
from threed.config import Config
from threed.monitor import metrics
from threed.training.provenance import git_commit

ROOT = Path(__file__).parents[2]
QUICK = [
    "--model.layers", "3", "--model.hidden", "32", "--model.seq", "32", "--train.global-batch", "4", "--log.every", "2",
    "--train.eval-samples", "4", "--train.sample-tokens", "8", "--data.path", "text.txt", "--optim.warmup", "2",
]  # fmt: skip
EVERYWHERE = {
    "step", "train/loss", "train/lr", "train/grad_norm", "train/tokens", "train/skipped_steps", "perf/tokens_per_s",
    "perf/tokens_per_s_per_device", "perf/tflops_per_device", "perf/step_s", "perf/data_s", "perf/fwd_bwd_s",
    "perf/dp_comm_s", "perf/optim_s", "perf/ckpt_s", "mem/peak_rss_gib", "comm/tp_gib", "comm/pp_gib", "comm/dp_gib",
    "comm/cp_gib", "comm/ep_gib", "run/restarts", "pp/bubble_measured", "pp/bubble_predicted", "pp/bubble_ideal",
    "pp/slowest_stage",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = "".join(f"line {n} has the square {n * n} and the cube {n**3}\n" for n in range(2000))
    (tmp_path / "text.txt").write_text(text)
    return tmp_path


def command(ranks: int, script: str, *flags: str) -> list[str]:
    """The words after `python` of a run; one rank needs no launcher."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    return [*launcher, str(ROOT / "pretrain" / script), *flags]


def environment(folder: Path, draws: bool = False) -> dict[str, str]:
    """An environment without keys, with a cache of its own; `draws`: of programs that draw figures."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "THREED"))
    }
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "THREED_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        **({} if draws else {programs.NO_FIGURES: "1"}),
    }


def start(folder: Path, ranks: int, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, as a user does."""
    return programs.run(command(ranks, script, *flags), folder, environment(folder, draws=True))


def again(
    folder: Path, ranks: int, script: str, *flags: str, draws: bool = False
) -> subprocess.CompletedProcess[str]:
    """The same on ranks that are warm already; without figures, unless it `draws`."""
    words = [str(ROOT / "pretrain" / script), *flags]
    return run_script(ranks, words, folder, environment(folder, draws))


def test_a_run_leaves_everything_the_contract_names_and_resumes(folder: Path) -> None:
    flags = [
        "--preset",
        "tiny",
        *QUICK,
        "--parallel.tp",
        "2",
        "--parallel.pp",
        "2",
        "--train.steps",
        "6",
    ]
    first = start(folder, 4, "gpt.py", *flags, "--train.stop-after", "4")
    assert first.returncode == 0, first.stdout + first.stderr
    run = folder / "runs" / "tiny"
    for name in (
        "config.toml",
        "metrics.jsonl",
        "heartbeat/rank-3.json",
        "wandb",
        "hf/config.json",
    ):
        assert (run / name).exists(), name
    for name in ("loss", "pipeline", "memory"):
        check_style((run / "figures" / f"{name}.svg").read_text())
    rows = metrics.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert set(rows[-1]) >= EVERYWHERE | {"val/loss", "val/bits_per_byte"}
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    ((logged, config),) = map(config_of_run, (run / "wandb").glob("offline-run-*"))
    assert list(logged.tags) == ["gpt", "pp2", "tp2", "zero1", "fp32", "1f1b"]  # type: ignore[attr-defined]
    assert (config["world_size"], config["versions"]["torch"]) == (4, torch.__version__)  # type: ignore[index]
    assert config["parameters"] == 47_424
    assert config["git_commit"] == git_commit(ROOT)
    assert config["device"]
    for word in (
        "rank 3",
        "ideal bubble",
        "the model writes",
        "resume     torchrun",
        "figures/loss.svg",
    ):
        assert word in first.stdout, first.stdout
    assert "--train.stop-after" not in first.stdout.partition("resume     torchrun")[2]

    quick = ["--log.wandb", "off", "--checkpoint.export-hf", "false"]
    second = again(folder, 4, "gpt.py", *flags, *quick)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed    runs/tiny/checkpoints/step-4" in second.stdout
    resume = second.stdout.partition("resume     torchrun")[2].splitlines()[0]
    assert resume.count("--train.steps") == 1
    assert "--train.steps 12" in resume  # 6 are complete
    assert [row["step"] for row in metrics.read(run / "metrics.jsonl")] == [1, 2, 4, 6]
    assert native.read_manifest(run / "checkpoints" / "step-6")["state"]["consumed"] == 24

    assert again(folder, 4, "gpt.py", *flags, *quick, "--run.name", "straight").returncode == 0
    last = metrics.read(folder / "runs" / "straight" / "metrics.jsonl")[-1]
    assert last["train/loss"] == metrics.read(run / "metrics.jsonl")[-1]["train/loss"]


@pytest.mark.parametrize(
    "script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_examples_have_help_and_train_nothing(folder: Path, script: Path) -> None:
    """Under a launcher too: once, and without a process group."""
    done = run_script(
        2 if script.name == "custom_model.py" else 1,
        [str(script), "--help"],
        folder,
        environment(folder),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == 1
    assert (ast.get_docstring(ast.parse(script.read_text())) or "?").splitlines()[0] in done.stdout
    assert "step 1" not in done.stdout


def test_flags_that_an_example_has_not_are_refused(folder: Path) -> None:
    """Once, whatever the number of ranks."""
    script = str(ROOT / "examples" / "custom_model.py")
    errors = folder / "0" / "error.json"  # else rank 1 waits five seconds for the message of rank 0
    errors.parent.mkdir()
    known = environment(folder) | {"TORCHELASTIC_ERROR_FILE": str(errors)}
    done = run_script(2, [script, "--dry-run"], folder, known)
    assert done.returncode == 2
    problem = f"\n  - {script} has no --dry-run and no --world-size; `threed plan` has them"
    assert done.stderr.count(problem) == 1
    assert "step 1" not in done.stdout


def test_llama_trains_on_one_rank_and_its_export_loads(folder: Path) -> None:
    flags = ["--preset", "llama-tiny", *QUICK, "--train.steps", "2", "--optim.warmup", "1"]
    flags += ["--checkpoint.resume", "none"]
    flags += ["--log.wandb", "off"]
    done = start(folder, 1, "llama.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (goes_on,) = (line for line in done.stdout.splitlines() if line.startswith("resume"))
    # else its checkpoints would be set aside
    assert goes_on.endswith("--log.wandb off --train.steps 4 --checkpoint.resume auto")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "runs" / "llama-tiny" / "hf")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (folder / "runs" / "llama-tiny" / "wandb").exists()


def test_a_compiled_run_trains_to_the_same_losses(folder: Path) -> None:
    """Also in the step whose memory is looked at otherwise, which no compiled one is."""
    flags = [
        "--preset",
        "tiny",
        *QUICK,
        "--train.steps",
        "3",
        "--log.wandb",
        "off",
        "--checkpoint.export-hf",
        "false",
    ]
    flags += ["--log.every", "1", "--parallel.schedule", "zb-h1"]
    compiled = [
        "--run.compile",
        "true",
        "--run.compile-backend",
        "aot_eager",
        "--run.name",
        "compiled",
    ]
    for more in ([], compiled):
        done = again(folder, 1, "gpt.py", *flags, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, other = (
        metrics.read(folder / "runs" / name / "metrics.jsonl") for name in ("tiny", "compiled")
    )
    assert [row["train/loss"] for row in other] == pytest.approx(
        [row["train/loss"] for row in plain], rel=1e-4
    )


def test_everything_wrong_is_said_at_once_with_exit_code_2(folder: Path) -> None:
    done = again(folder, 1, "gpt.py", "--parallel.tp", "3", "--data.path", "nowhere")
    assert done.returncode == 2
    for word in ("world size 1", "--model.heads 8", "nowhere does not exist"):
        assert word in done.stderr
    assert not (folder / "runs").exists()


def test_a_resume_with_another_shape_is_refused_and_names_the_keys(folder: Path) -> None:
    flags = [
        "--preset",
        "tiny",
        *QUICK,
        "--train.steps",
        "1",
        "--checkpoint.export-hf",
        "false",
        "--log.wandb",
        "off",
    ]
    flags += ["--optim.warmup", "0"]
    assert again(folder, 1, "gpt.py", *flags).returncode == 0
    other = again(folder, 1, "gpt.py", *flags, "--model.hidden", "64")
    assert other.returncode != 0
    assert "hidden = 32, this run has 64" in other.stderr
    assert "problem in the configuration" not in other.stderr


def test_dry_run_prints_the_plan_and_trains_nothing(folder: Path) -> None:
    flags = [
        "--preset",
        "tiny",
        *QUICK,
        "--dry-run",
        "--world-size",
        "8",
        "--parallel.tp",
        "2",
        "--parallel.pp",
        "2",
    ]
    done = again(folder, 1, "gpt.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "pp1 dp1 tp1" in done.stdout
    assert "ideal bubble" in done.stdout


def test_an_interrupted_run_says_in_one_line_how_it_goes_on(folder: Path) -> None:
    flags = [
        "--preset", "tiny", *QUICK, "--train.steps", "9000", "--checkpoint.every", "5", "--log.wandb", "off",
        "--parallel.pp", "2",
    ]  # fmt: skip
    log = folder / "output.log"
    job = Program(command(2, "gpt.py", *flags), folder, environment(folder), log, log)
    try:
        wait_for(lambda: (folder / "runs" / "tiny" / "checkpoints" / "step-5").exists())
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        job.wait(240)
    finally:
        job.kill()
    output = log.read_text()
    own = [line for line in output.splitlines() if line.startswith("threed: interrupted")]
    assert len(own) == 1, output
    assert "the same command resumes from runs/tiny/checkpoints/step-" in own[0]
    assert output.count("Traceback") == 1, output  # the launcher's, which no program can keep quiet


def test_how_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def said(resume: str) -> str:
        config = Config.model_validate(
            {"run": {"dir": str(tmp_path)}, "checkpoint": {"resume": resume}}
        )
        return resume_hint(config, None)

    assert said("auto").startswith("no checkpoint was saved yet (--checkpoint.every N saves while")
    newest = tmp_path / "checkpoints" / "step-10"
    for path in (newest, newest.with_name("step-9"), newest.with_name("step-11.tmp")):
        path.mkdir(parents=True)
    assert said("auto") == f"the same command resumes from {newest}"
    assert said("none") == f"the same command with --checkpoint.resume auto resumes from {newest}"
    # the same command would go back to the one it was given
    assert said(str(newest)) == said("none")


def wait_for(condition: object, seconds: float = 240) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
