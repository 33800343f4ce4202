"""`tests.programs`: forked programs see and end like those of an interpreter, and so do the programs that they start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "COLOR": "blue"}
THREAD = """
import atexit, sys, threading, time
atexit.register(print, "exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("end")
"""
# the nested program ends while the first one has unwritten output and a temporary folder
NESTED = """
import os, subprocess, sys, tempfile, time
print("first", end=" ")
with tempfile.TemporaryDirectory() as folder:
    code = "import os; print('second', os.getcwd() == os.environ['AT'], os.getppid() == int(os.environ['PARENT']))"
    words = [sys.executable, "-c", code]
    about = {**os.environ, "AT": os.path.realpath(folder), "PARENT": str(os.getpid())}
    done = subprocess.run(words, cwd=folder, env=about, capture_output=True, text=True)
    print(done.returncode, done.stdout.strip(), done.stderr, os.path.isdir(folder))
"""


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("print('right')", 0, "right\n", ""),
        ("raise SystemExit('wrong')", 1, "", "wrong\n"),
        ("raise SystemExit(259)", 3, "", ""),
        ("raise SystemExit", 0, "", ""),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "", "KeyboardInterrupt\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "", ""),
        (THREAD, 0, "end\nthread\nexit\n", ""),
        (NESTED, 0, "first 0 second True True  True\n", ""),
    ],
)
def test_a_program_ends_like_that_of_an_interpreter(
    code: str, status: int, out: str, err: str, tmp_path: Path
) -> None:
    forked = programs.run(["-c", code], tmp_path, ENVIRONMENT)
    started = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    for done in (forked, started):
        assert (done.returncode, done.stdout) == (status, out), done.stderr
        assert done.stderr.endswith(err) if err else done.stderr == ""


def test_scripts_and_modules_see_what_an_interpreter_shows(tmp_path: Path) -> None:
    text = "import json, os, sys\nif __name__ == '__main__':\n"
    text += "    print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['COLOR'], sys.path[0]]))\n"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "shown.py").write_text(text)
    (tmp_path / "shown_module.py").write_text(text)
    script = programs.run(["-u", "scripts/shown.py", "a b"], tmp_path, ENVIRONMENT)
    module = programs.run(["-m", "shown_module", "a b"], tmp_path, ENVIRONMENT)
    folder, color = str(tmp_path), "blue"
    assert json.loads(script.stdout)[:3] == json.loads(module.stdout)[:3]
    assert json.loads(module.stdout) == [["a b"], folder, color, folder]
    assert (tmp_path / json.loads(script.stdout)[3]).samefile(tmp_path / "scripts")


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run(["-c", code], tmp_path, ENVIRONMENT, timeout=1)
    if (tmp_path / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
