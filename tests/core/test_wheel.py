"""What `pip install` gives: the wheel is built, installed without the repository, and trains in an empty folder.

Nothing downloads: the new environment sees the packages of this one, but not its threed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
QUICK = "--train.steps 2 --train.global-batch 4 --model.layers 2 --model.hidden 32 --model.seq 32 --data.path text.txt"
LESS = "--train.sample-tokens 0 --train.eval-samples 4 --checkpoint.export-hf false --log.wandb off"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None,
        reason="needs hatchling, which pip gets itself",
    ),
]


def environment(**changed: str) -> dict[str, str]:
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "THREED", "WANDB"))
    }
    return {**plain, "OMP_NUM_THREADS": "1", **changed}


def run(words: list[str], folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(**changed),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def build_wheel(folder: Path, **changed: str) -> tuple[Path, str]:
    """The wheel of this checkout, and what the build said."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = run(command, ROOT, PYTHONPATH=os.pathsep.join(sys.path), **changed)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    return build_wheel(tmp_path_factory.mktemp("dist"))[0]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new environment with the wheel."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = str(home / "bin" / "python")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, str(wheel)], env=environment(), check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Lines of a .pth are added as they are: the .pth files in those folders, and so an editable threed, are not read.
    (site / "others.pth").write_text(
        "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    )
    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, but for a text to train on."""
    (tmp_path / "text.txt").write_text(
        "".join(f"the square of {n} is {n * n}\n" for n in range(2000))
    )
    return tmp_path


def test_the_wheel_has_what_a_user_needs_and_says_where_it_runs(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    names = set(files.namelist())
    assert {
        "threed/core/native/csrc/cpu/adam.cpp",
        "threed/core/native/lib/cpu.so",
        "threed/py.typed",
    } <= names
    assert {
        f"threed/config/presets/{path.name}"
        for path in (ROOT / "threed" / "config" / "presets").iterdir()
    } <= names
    assert re.search(r"-py3-none-(?!any)", wheel.name)
    library = files.read("threed/core/native/lib/cpu.so")
    glibc = [(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    if promised := re.search(r"manylinux_(\d+)_(\d+)_", wheel.name):
        assert max(glibc) <= (int(promised[1]), int(promised[2]))


def test_links_of_the_readme_work_outside_of_the_repository(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in files.namelist() if name.endswith("/METADATA"))
    text = files.read(metadata).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    (repository,) = re.findall(r"^Project-URL: Repository, (.*)$", text, re.MULTILINE)
    own = [link.removeprefix(repository) for link in links if link.startswith(repository)]
    assert any(link.startswith("/raw/main/docs/images/") for link in own)
    for link in own:
        path = re.sub(r"^/(raw|blob)/main/", "", link).partition("#")[0]
        assert (ROOT / path).exists(), link


def test_without_a_compiler_the_wheel_has_the_sources_and_fits_any_platform(tmp_path: Path) -> None:
    none = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    wheel, said = build_wheel(tmp_path / "dist", **none, CXX="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "no compiler" in said
    names = zipfile.ZipFile(wheel).namelist()
    assert "threed/core/native/csrc/cpu/adam.cpp" in names
    assert "threed/core/native/lib/cpu.so" not in names


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_an_installed_package_plans_and_trains_by_preset(
    ranks: int, python: str, folder: Path
) -> None:
    at = run([python, "-c", "import threed; print(threed.__file__)"], folder).stdout.strip()
    assert not Path(at).is_relative_to(ROOT)
    plan = run(
        [str(Path(python).parent / "threed"), *"plan --preset tiny --world-size 8".split()], folder
    )
    assert plan.returncode == 0, plan.stderr
    assert "rank 7" in plan.stdout
    launcher = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    words = f"-m threed train gpt --preset tiny --parallel.pp {ranks} {QUICK} {LESS}"
    done = run([*launcher, *words.split()], folder, THREED_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step     2/2 |" in done.stdout
    further = words.replace(" --train.steps 2", "") + " --train.steps 4"
    again = f"resume     torchrun --standalone --nproc-per-node {ranks} {further}"
    assert again in done.stdout.splitlines()
    assert (folder / "runs" / "tiny" / "checkpoints" / "step-2" / "manifest.json").is_file()


def test_an_installed_package_has_the_native_library(python: str, folder: Path) -> None:
    native = run([python, "-m", "threed.core.native.build", "--check"], folder)
    assert "site-packages/threed/core/native/lib/cpu.so" in native.stdout, (
        native.stdout + native.stderr
    )


@pytest.mark.grid
def test_an_installed_package_verifies_a_model_of_ones_own(python: str, folder: Path) -> None:
    """tests/testing/test_verify.py verifies one daily, with the package of the working tree."""
    shutil.copy(ROOT / "examples" / "custom_model.py", folder / "mine.py")
    verify = [python, "-m", "threed", "verify", "mine.py:ParallelModel", "--topologies", "tp2"]
    done = run(verify, folder)
    assert done.returncode == 0, done.stdout + done.stderr
