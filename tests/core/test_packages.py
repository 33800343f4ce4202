"""Without a package, every entry point works or names the package and the command that installs it."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.gpu_stages import tests as gpu_tests

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    "einops",
    "hatchling",
    "hypothesis",
    "matplotlib",
    "tokenizers",
    "tqdm",
    "transformers",
    "wandb",
)

# Runs entry points in forks of one process in which some packages cannot be imported: {name: [exit code, output]}.
DRIVER = """
import importlib, json, os, runpy, sys, traceback
from importlib.machinery import PathFinder
blocked, shared, commands = json.loads(sys.stdin.read())

find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.partition(".")[0] in blocked else find_spec(name, *more)
)
for name in shared:
    importlib.import_module(name)

def run(words):
    sys.argv = words[1:] if words[0] == "-m" else words
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")

found = {}
for name, words in commands.items():
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(writing, 1), os.dup2(writing, 2), os.close(reading)
        code = 1
        try:
            run(words)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str): print(end.code)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    found[name] = [os.waitstatus_to_exitcode(os.wait()[1]), text]
with open("found.json", "w") as file:
    json.dump(found, file)
"""

COLLECT = [
    "-m",
    "pytest",
    "-q",
    "--collect-only",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:hypothesispytest",
    "-p",
    "no:timeout",
]
TESTS = (
    "cuda/test_adam.py",
    "pipeline/test_chunks.py",
    "zero/test_precision.py",
    "layers/test_users_probes.py",
    "core/test_wheel.py",
)
TOOLS = {
    "import threed": ["-c", "import threed"],
    "import threed.engine": ["-c", "import threed.engine"],
    "initialize": ["-c", "import threed; threed.initialize"],
    "train": ["-m", "threed", "train", "gpt", "--help"],
    "plan": ["-m", "threed", "plan", "gpt", "--preset", "tiny"],
    "verify": ["-m", "threed", "verify", "--help"],
    "verify a model": ["-m", "threed", "verify", "none.py:Model"],
    "convert": ["-m", "threed", "convert", "--help"],
    "inspect": ["-m", "threed", "inspect", "--help"],
    "tokenize": ["-m", "threed", "tokenize", "--help"],
    "report": ["-m", "threed", "report", "--help"],
    "schedule": ["-m", "threed", "schedule", "1f1b", "--stages", "2", "--microbatches", "2"],
    "benchmarks/gpu.py": [str(ROOT / "benchmarks" / "gpu.py"), "--only", "table", "--out", "results"],
    **{f"{path.parent.name}/{path.name}": [str(path), "--help"]
       for folder in ("pretrain", "examples") for path in sorted((ROOT / folder).glob("*.py"))},
}  # fmt: skip


def run(
    folder: Path, blocked: tuple[str, ...], shared: tuple[str, ...], commands: dict[str, list[str]]
) -> dict[str, tuple[int, str]]:
    """Returns the exit code and the output of every command without the packages `blocked`; imports `shared` once."""
    command, given = [sys.executable, "-c", DRIVER], json.dumps([blocked, shared, commands])
    done = subprocess.run(
        command,
        input=given,
        cwd=folder,
        text=True,
        timeout=300,
        capture_output=True,
        env=_environment(folder),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[Any]] = json.loads((folder / "found.json").read_text())
    return {name: (code, text) for name, (code, text) in found.items()}


def _environment(folder: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB", "PYTEST"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder), "THREED_NATIVE": "0"}


def named(text: str) -> set[str]:
    """The packages that a message tells to install."""
    return {re.split("[><=]", word)[0] for word in re.findall(r"pip install '?([\w>=.]+)", text)}


def test_without_pydantic_everything_that_needs_it_names_it(tmp_path: Path) -> None:
    """The environment of a machine with torch, numpy, safetensors and pytest alone."""
    tests = {"pytest": [*COLLECT, str(ROOT / "tests" / "cuda" / "test_rotary.py")]}
    blocked = ("pydantic", "pydantic_core", *OPTIONAL)
    works = {"import threed", "schedule", "examples/own_schedule.py"}
    works |= {"convert", "inspect", "tokenize", "report", "verify"}  # their help
    for name, (code, text) in run(tmp_path, blocked, ("pytest", "torch"), TOOLS | tests).items():
        if name in works:
            assert code == 0, (name, text)
        else:
            assert code != 0, (name, text)
            assert named(text) <= {"pydantic", "transformers"}, (name, text)
            assert "needs the package" in text, (name, text)


@functools.cache
def tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    path.write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    return str(path)


def test_without_optional_packages_runs_work_and_what_needs_one_names_it(tmp_path: Path) -> None:
    """Training, its figures and its export; tools; examples; the tests of kernels."""
    (tmp_path / "text.txt").write_text(
        "".join(f"line {n} has the square {n * n}\n" for n in range(500))
    )
    small = [
        "--model.layers",
        "1",
        "--model.hidden",
        "16",
        "--model.heads",
        "2",
        "--model.seq",
        "16",
    ]
    small += [
        "--train.steps",
        "2",
        "--train.global-batch",
        "2",
        "--train.sample-tokens",
        "0",
        "--optim.warmup",
        "1",
    ]
    small += ["--data.path", "text.txt", "--train.eval-samples", "2"]
    export, tokenizer = str(tmp_path / "hf"), tokenizer_json(tmp_path)
    words = {
        "run": ["-m", "threed", "train", "gpt", "--preset", "tiny", *small],
        "report a run": ["-m", "threed", "report", "runs/tiny"],
        "export": ["-m", "threed", "convert", "runs/tiny/checkpoints/step-2", export],
        "tokens": ["-m", "threed", "tokenize", "text.txt", "text", "--tokenizer", tokenizer],
        "collect": [*COLLECT, "-m", "gpu", *(str(ROOT / "tests" / name) for name in TESTS)],
    }  # fmt: skip
    found = run(
        tmp_path,
        OPTIONAL,
        (
            "pytest",
            "threed.cli.commands",
            "threed.interop.deepspeed.initialization",
            "threed.cli.launch",
        ),
        TOOLS | words,
    )
    needs = {
        "export": "tokenizers", "tokens": "tokenizers",
        "examples/wrap_transformers.py": "transformers",
        "examples/deepspeed_offload.py": "transformers",
    }  # fmt: skip
    fails = {*needs, "verify a model"}  # there is no such file
    for name, (code, text) in found.items():
        assert (code != 0) == (name in fails), (name, text)
        if name in needs:
            assert named(text) == {needs[name]}, (name, text)
    assert named(found["run"][1]) == {"matplotlib", "tokenizers", "wandb"}
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step-2").is_dir()
    assert named(found["report a run"][1]) == {"matplotlib"}
    assert named(found["collect"][1]) == {"einops", "hypothesis"}
    assert "test_adam.py" in found["collect"][1]


# Packages that take long to import, or may be missing; no command imports them before it uses them.
HEAVY = {
    "accelerate", "datasets", "deepspeed", "einops", "liger_kernel", "matplotlib", "pandas", "peft", "sentencepiece",
    "tokenizers", "transformers", "triton", "trl", "wandb",
}  # fmt: skip
WATCHED = """
import runpy, sys
for name, words in {words!r}.items():
    sys.argv = words
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (name, end.code)
    print("AFTER", name, *sorted({heavy!r} & {{name.partition(".")[0] for name in sys.modules}}))
print("IMPORTED", *sorted({heavy!r} & {{name.partition(".")[0] for name in sys.modules}}))
"""


def test_no_command_imports_a_heavy_package_that_it_does_not_use(tmp_path: Path) -> None:
    """They are installed here. Collecting the tests of a GPU imports none either. torch's count of FLOPs imports triton.

    The commands run in turn in one process, which prints what is imported after each.
    """
    module = ["threed"]
    words = {
        "train": [*module, "train", "gpt", "--help"],
        "dry run": [*module, "train", "gpt", "--preset", "tiny", "--dry-run"],
        "plan": [*module, "plan", "gpt", "--preset", "tiny"],
        "plan for a GPU": [*module, "plan", "gpt", "--preset", "tiny", "--gpu", "h100"],
        "inspect": [*module, "inspect"],
        "verify": [*module, "verify", "--help"],
        "schedule": [*module, "schedule", "1f1b", "--stages", "2", "--microbatches", "2"],
        "GPU tests": [*COLLECT[1:], "-m", "gpu", *(str(ROOT / path) for path in gpu_tests.PATHS)],
    }  # fmt: skip
    stages = [f"benchmarks.gpu_stages.{stage.name}" for stage in gpu.STAGES]
    imports = ["threed", "threed.engine", "threed.trainer", "benchmarks.gpu", *stages]
    tests = {"GPU tests": words.pop("GPU tests")}  # pytest replaces modules of this process
    commands = {
        name: ["-c", WATCHED.format(words=given, heavy=HEAVY)]
        for name, given in (("commands", words), ("tests", tests))
    }
    code = f"import sys; import {', '.join(imports)}"
    show = f"print('IMPORTED', *sorted({HEAVY!r} & {{n.partition('.')[0] for n in sys.modules}}))"
    commands["imports"] = ["-c", f"{code}; {show}"]
    commands["one that does"] = ["-c", f"import einops, sys; {show}"]
    commands["torch"] = ["-c", f"import torch.utils.flop_counter, sys; {show}"]
    found = run(tmp_path, (), ("torch", "pytest"), commands)
    imported = {name: (code, text.splitlines()[-1]) for name, (code, text) in found.items()}
    assert imported.pop("one that does") == (0, "IMPORTED einops")
    allowed = {(0, "IMPORTED"), imported["torch"]}
    assert imported["torch"] in ((0, "IMPORTED"), (0, "IMPORTED triton"))
    wrong = {name: found[name] for name, value in imported.items() if value not in allowed}
    assert not wrong, wrong


def test_the_wheels_of_the_gpu_benchmark_are_all_that_a_bare_machine_lacks() -> None:
    """With the versions of constraints.txt, and with what they need themselves."""
    lines = [
        line.partition("#")[0].strip()
        for line in (ROOT / "benchmarks" / "gpu_wheels.txt").read_text().splitlines()
    ]
    wheels = {re.split("[=>]=", line)[0]: line for line in lines if line}
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    assert {line for line in wheels.values() if line not in pinned} == {
        "typing-extensions>=4.16.0", "liger-kernel==0.8.5"
    }  # fmt: skip
    own = wheels.keys() - {"liger-kernel"}
    for name in own:
        for needed in metadata.requires(name) or []:
            if "extra ==" not in needed:
                assert re.split(r"[^\w-]", needed)[0] in wheels, f"{name} needs {needed}"
    # What a bare machine has, as stated in docs/reference/performance.md; wandb is used only on request.
    bare = {"torch", "numpy", "einops", "safetensors", "tqdm", "tokenizers", "matplotlib"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        needs = tomllib.load(file)["project"]["dependencies"]
    assert {re.split("[=>]", need)[0] for need in needs} == bare | {"pydantic", "wandb"}
    page = (ROOT / "docs" / "reference" / "performance.md").read_text()
    commands = re.findall(
        r"^python benchmarks/gpu.py --minutes 9 --only ([a-z ]+?)(?: &&|$)", page, re.M
    )
    assert len(commands) == 3
    stages = {stage.name: stage for stage in gpu.STAGES}
    assert {name for command in commands for name in command.split()} == stages.keys()
    for command in commands:
        assert sum(stages[name].expected for name in command.split()) < 9 * 60


def test_a_package_that_is_needed_always_is_imported_in_one_module() -> None:
    """And one that is needed sometimes where it is used, not when threed is imported."""
    own = {*sys.stdlib_module_names, "threed", "numpy", "safetensors", "torch"}
    for path in sorted((ROOT / "threed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom) or (
                node.col_offset and path.name != "schema.py"
            ):
                continue
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            for name in names:
                allowed = own | (
                    {"pydantic", "pydantic_core"} if path.name == "schema.py" else set()
                )
                assert name.partition(".")[0] in allowed, f"{path}: import {name}"
