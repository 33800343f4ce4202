"""The native build, on a copy of its module with sources of a line: cache, lock, failures (the wheel: test_wheel.py).

What is compiled for real, and for which processor, tests/ops/test_ops_adam.py shows.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from threed.core.native import build

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

SOURCE = (
    'extern "C" {\n#include "answer.h"\nconst char* threed_instructions() { return "any"; }\n}\n'
)
STATUS = "from threed.core import native; print(native.status()['cpu'])"
ANSWER = "from threed.core import native; print(native.library('cpu').answer())"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A checkout with nothing but the build and a library of one function."""
    shutil.copytree(
        ROOT / "threed" / "core" / "native",
        tmp_path / "threed" / "core" / "native",
        ignore=shutil.ignore_patterns("lib"),
    )
    (tmp_path / "threed" / "__init__.py").touch()
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "csrc" / "cpu" / "one.cpp").write_text(SOURCE)
    (tmp_path / "csrc" / "cpu" / "answer.h").write_text("int answer() { return 42; }\n")
    return tmp_path


def environment(house: Path, **changed: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("CXX", "NVCC", "THREED_NATIVE")}
    return {**plain, "XDG_CACHE_HOME": str(house / "cache"), "PYTHONPATH": str(house), **changed}


def run(house: Path, *arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(arguments or ("-m", "threed.core.native.build"))]
    return subprocess.run(
        command, cwd=house, env=environment(house, **changed), capture_output=True, text=True
    )


def libraries(house: Path) -> list[Path]:
    return sorted((house / "cache" / "threed").glob("cpu-*.so"))


def slow_compiler(house: Path, seconds: float) -> str:
    """A compiler that notes each compilation in `compilations`, and takes its time."""
    script = house / "slow-c++"
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then exec {COMPILER} --version; fi\n'
        f'echo once >> "{house}/compilations"\nsleep {seconds}\nexec {COMPILER} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def compilations(house: Path) -> int:
    log = house / "compilations"
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for_compilations(house: Path, count: int) -> None:
    end = time.monotonic() + 120
    while compilations(house) < count:
        assert time.monotonic() < end, "the compiler was not called"
        time.sleep(0.01)


def test_the_first_use_compiles_and_later_ones_find_it(house: Path) -> None:
    compiler = slow_compiler(house, 0)
    assert run(house, "-c", ANSWER, CXX=compiler).stdout == "42\n"
    done = run(house, CXX=compiler)
    assert done.returncode == 0
    assert done.stderr == ""
    assert str(libraries(house)[0]) in done.stdout
    assert compilations(house) == 1


def test_sources_headers_and_flags_are_part_of_the_name(house: Path) -> None:
    assert run(house).returncode == 0
    (house / "csrc" / "cpu" / "answer.h").write_text("int answer() { return 43; }\n")
    assert run(house, "-c", ANSWER).stdout == "43\n"
    assert run(house, CXX=f"{COMPILER} -DOTHER").returncode == 0
    assert len(libraries(house)) == 3


def test_two_processes_at_once_compile_once(house: Path) -> None:
    settings = environment(house, CXX=slow_compiler(house, 0.5))
    command = [sys.executable, "-c", ANSWER]
    both = [
        subprocess.Popen(
            command,
            cwd=house,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=240) for process in both] == [("42\n", "")] * 2
    assert compilations(house) == 1


def test_a_killed_builder_leaves_no_lock_and_no_rubbish(house: Path) -> None:
    settings = environment(house, CXX=slow_compiler(house, 240))
    builder = subprocess.Popen(
        [sys.executable, "-m", "threed.core.native.build"],
        cwd=house,
        env=settings,
        start_new_session=True,
    )
    wait_for_compilations(house, 1)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    folder = house / "cache" / "threed"
    assert list(folder.glob("*.tmp"))
    assert run(house, "-c", ANSWER, CXX=slow_compiler(house, 0)).stdout == "42\n"
    assert not list(folder.glob("*.tmp"))
    assert len(libraries(house)) == 1


def test_a_compiler_that_outlives_its_builder_harms_nobody(house: Path) -> None:
    """Only the builder is killed: its compiler goes on writing, to a file that no one else uses."""
    settings = environment(house, CXX=slow_compiler(house, 1))
    builder = subprocess.Popen(
        [sys.executable, "-m", "threed.core.native.build"], cwd=house, env=settings
    )
    wait_for_compilations(house, 1)
    builder.kill()
    builder.wait()
    begin = time.monotonic()
    assert run(house, "-c", ANSWER, CXX=slow_compiler(house, 0)).stdout == "42\n"
    time.sleep(max(0.0, begin + 1.5 - time.monotonic()))
    assert run(house, "-c", ANSWER, CXX=slow_compiler(house, 0)).stdout == "42\n"
    assert compilations(house) == 2


def test_a_source_that_does_not_compile_warns_once_and_falls_back(house: Path) -> None:
    (house / "csrc" / "cpu" / "one.cpp").write_text("int broken( { return 1; }\n")
    done = run(house)
    assert done.returncode == 1
    assert re.search(r"one\.cpp:1:\d+: error: ", done.stderr)
    twice = "from threed.core import native; print(native.library('cpu'), native.library('cpu'))"
    done = run(house, "-c", twice)
    assert done.returncode == 0
    assert done.stdout == "None None\n"
    assert done.stderr.count("portable torch path") == 1
    assert re.search(r"one\.cpp:1:\d+: error: ", done.stderr)
    assert run(house, "-m", "threed.core.native.build", "--check").returncode == 1
    assert not libraries(house)


def test_without_a_compiler_it_says_so_and_does_without(house: Path) -> None:
    done = run(house, PATH=str(house))
    assert done.returncode == 0
    assert "no compiler: c++, g++, clang++ not found" in done.stdout
    done = run(house, "-c", STATUS, PATH=str(house))
    assert done.stdout.startswith("none: no compiler")
    assert done.stderr == ""
    done = run(house, "-m", "threed.core.native.build", "--check", PATH=str(house))
    assert done.returncode == 1
    assert "none: no compiler" in done.stdout
    assert "missing-c++ not found" in run(house, CXX="missing-c++").stdout


def test_a_cache_that_cannot_be_written_is_named(house: Path) -> None:
    (house / "cache").touch()
    done = run(house, "-c", STATUS)
    assert done.stdout.startswith(f"none: cannot build in {house / 'cache' / 'threed'}")
    assert "XDG_CACHE_HOME" in done.stdout


# Folders in which somebody else could replace the library.
CACHES: dict[str, Callable[[Path], object]] = {
    "a folder for everybody": lambda folder: folder.chmod(0o777),
    "a folder for a group": lambda folder: folder.chmod(0o770),
    "a folder of another user": lambda folder: os.chown(folder, 65534, -1),
}


def test_a_library_is_loaded_only_where_nobody_else_may_write(house: Path) -> None:
    script = "import os; os.umask(0)\n" + ANSWER  # the widest
    for name, change in CACHES.items():
        if "another user" in name and os.geteuid():
            continue  # only root can give files away
        shutil.rmtree(house / "cache", ignore_errors=True)
        (house / "cache").mkdir()
        assert run(house, "-c", script).stdout == "42\n"
        file = libraries(house)[0]
        assert file.parent.stat().st_mode & 0o7777 == 0o700
        assert not file.stat().st_mode & 0o022
        change(file.parent)
        done = run(house, "-c", STATUS)
        assert f"{file.parent} is owned or writable by other users" in done.stdout, (
            name,
            done.stdout,
        )
        assert done.stdout.startswith("none: ")
        assert "portable torch path" in done.stderr


def test_it_can_be_switched_off(house: Path) -> None:
    assert (
        run(house, "-c", STATUS, THREED_NATIVE="0").stdout
        == "none: switched off by THREED_NATIVE=0\n"
    )
    assert not libraries(house)


def test_it_runs_as_a_script_and_refuses_other_arguments(house: Path) -> None:
    script = str(house / "threed" / "core" / "native" / "build.py")
    assert str(house / "cache") in run(house, script, PYTHONPATH="").stdout
    assert "cpu    native (any): " in run(house, script, "--check", PYTHONPATH="").stdout
    done = run(house, script, "--arch", "90")
    assert done.returncode == 2
    assert "--check" in done.stderr


def test_an_installed_library_is_used_unless_it_does_not_load(house: Path) -> None:
    assert run(house).returncode == 0
    place = house / "threed" / "core" / "native" / "lib" / "cpu.so"
    place.parent.mkdir()
    shutil.move(libraries(house)[0], place)
    # where the wheel has its sources
    shutil.move(house / "csrc", house / "threed" / "core" / "native" / "csrc")
    assert run(house, "-c", STATUS, PATH=str(house)).stdout == f"native (any): {place}\n"
    place.write_bytes(b"of another system")
    assert run(house, "-c", STATUS).stdout == f"native (any): {libraries(house)[0]}\n"


def test_cuda_sources_would_be_found(house: Path) -> None:
    """Its library is the same code with another compiler, here a C++ one that ignores the flags it does not know."""
    assert "this version has no .cu sources" in run(house).stdout
    (house / "csrc" / "cuda").mkdir()
    (house / "csrc" / "cuda" / "one.cu").write_text('extern "C" int answer() { return 44; }\n')
    assert (
        "cuda   left out: no compiler: nothing-like-nvcc not found"
        in run(house, NVCC="nothing-like-nvcc").stdout
    )
    compiler = house / "fake-nvcc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {COMPILER} --version\n'
        f'[ "$1" = --list-gpu-code ] && {{ echo sm_80 sm_86; exit; }}\necho "$@" >> "{house}/flags"\n'
        f'for last; do :; done\nexec {COMPILER} -shared -fPIC -x c++ "{house}/csrc/cuda/one.cu" -o "$last"\n'
    )
    compiler.chmod(0o755)
    call = ANSWER.replace("cpu", "cuda")
    assert run(house, "-c", call, NVCC=str(compiler)).stdout == "44\n"
    flags = (house / "flags").read_text().split()
    assert [f for f in flags if f.startswith("-gencode")] == [  # of those that it knows
        "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=compute_80",
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_takes_the_flags(house: Path) -> None:
    (house / "csrc" / "cuda").mkdir()
    (house / "csrc" / "cuda" / "one.cu").write_text(
        '__global__ void fill(int* x) { *x = 45; }\nextern "C" int answer() { return 45; }\n'
    )
    assert run(house, "-c", ANSWER.replace("cpu", "cuda")).stdout == "45\n"


@pytest.mark.parametrize("command", ["'g++", "/etc/hostname"])
def test_a_compiler_that_is_none_is_a_build_error_with_its_variable(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(build.BuildError, match="CXX"):
        build.ensure(build.CPU, tmp_path)
