"""Mutation test: changes the meaning of single statements, and runs the tests that cover each.

    python tests/mutants.py --map --folder DIR                  # once: which test runs which statement (25 min)
    python tests/mutants.py --seed 0 --count 80 --jobs 2 --folder DIR      # then the changes (about an hour)

Run it manually; pytest does not collect it. `tests/mutations.py` generates the changes. The seed
selects the same number of changes in each area, all kinds of changes in turn, and at most one per
statement. For each change, the tests that cover its statement run, beginning with those that most
likely detect it, until one fails ('killed') or hangs ('timeout'). At first tests of a minute in
total run; if all pass, the others follow.

The folder stores the results, by the change and the source of its function, so the second command
continues where it was stopped. The map is stored when it is complete; later only the test files that
have changed are mapped. `--retry` runs the surviving changes again. `tests/mutants.toml` lists the
survivors that a person has examined, with reasons, and separately those that do not change the
meaning.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import mmap
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.mutations import Mutant, apply, find, instrument, means_something_else  # noqa: E402

AREAS = {
    "engine": ["engine/*.py", "pipeline/batches.py", "training/sampling.py"],
    "trainer": ["trainer.py", "planner/forecast.py"],
    "zero": ["zero/*.py"],
    "pipeline": ["pipeline/*.py"],
    "layers": ["layers/*.py"],
    "checkpoint": ["checkpoint/*.py"],
    "planner": ["planner/*.py"],
}
MARKED = "not grid and not gpu and not alone"  # tests marked `alone` measure values that other processes disturb
FIRST, ALL = (
    60.0,
    400.0,
)  # seconds of tests (as measured for the map) in the first round, and in the second after a change has survived
HITS = "HITS_OF_TESTS"
RECORDER = f'''"""Marks of `tests/mutants.py`: one byte a statement, in a file that all processes of a test share."""
import mmap, os
with open(os.environ["{HITS}"], "r+b") as file:
    hits = mmap.mmap(file.fileno(), 0)
'''


# The map: which test runs which statement.


def pytest_configure(config: Any) -> None:
    """Registers the recorder in a worker of pytest, with `-p tests.mutants` and files of marks."""
    if HITS in os.environ and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        os.environ[HITS] += worker  # a file for each worker, and for the processes that it starts
        config.pluginmanager.register(_Recorder(Path(os.environ[HITS])))


class _Recorder:
    """Writes a line of JSON per test.

    It has the test's name, its seconds, whether it passed, and the numbers of the marks that it
    executed.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.hits = mmap.mmap(file.fileno(), 0)
        self.out = path.with_name(path.name.replace("hits.", "hits.jsonl.")).open("a")
        self.passed = True

    def pytest_runtest_logstart(self) -> None:
        self.hits[:] = bytes(len(self.hits))
        self.start, self.passed = time.monotonic(), True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed &= report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        marks = [number for number, hit in enumerate(bytes(self.hits)) if hit]
        record = {
            "test": nodeid,
            "seconds": time.monotonic() - self.start,
            "passed": self.passed,
            "marks": marks,
        }
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()


def sources() -> dict[str, list[str]]:
    """Returns the source files of each area, relative to the root."""
    package = ROOT / "threed"
    return {
        area: [
            str(path.relative_to(ROOT))
            for pattern in patterns
            for path in sorted(package.glob(pattern))
        ]
        for area, patterns in AREAS.items()
    }


def copy_tree(to: Path) -> None:
    """Copies the files that git tracks or would add to a new folder, and compiles them."""
    shutil.rmtree(to, ignore_errors=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def compile_tree(tree: Path) -> None:
    """Compiles a tree to byte code that is validated by hash, not by time.

    Files of the tree change and change back within a second, which a validation by time would miss.
    """
    command = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "checked-hash",
        "threed",
        "tests",
    ]
    subprocess.run(command, cwd=tree, check=True)


def mark_tree(tree: Path) -> list[str]:
    """Adds marks to a copy of the tree; returns the names of the marked statements."""
    copy_tree(tree)
    names: list[str] = []
    for path in itertools.chain(*sources().values()):
        text, more = instrument(path, (tree / path).read_text(), len(names))
        (tree / path).write_text(text)
        names += more
    (tree / "threed" / "_hits.py").write_text(RECORDER)
    compile_tree(tree)
    return names


def test_files() -> list[Path]:
    """Returns the test files, except those of the CUDA emulator."""
    files = (ROOT / "tests").rglob("test_*.py")
    return [path for path in files if path.parent.name != "cuda"]


def make_map(folder: Path, jobs: int) -> None:
    """Maps every test file that has changed since it was last mapped.

    It runs them with marks, and stores for each file which test ran which statement.
    """
    tests = sorted(test_files())
    missing = [test for test in tests if read_map(folder, test) is None]
    if not missing:
        return
    names = mark_tree(folder / "marked")
    print(
        f"the map: {len(missing)} of {len(tests)} test files, {len(names)} statements", flush=True
    )
    for worker in range(jobs):
        (folder / f"hits.gw{worker}").write_bytes(bytes(len(names)))
        (folder / f"hits.jsonl.gw{worker}").write_text("")
    workers = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    command = ["-p", "tests.mutants", "-m", MARKED, "--timeout", "1500", *workers]
    paths = {str(test.relative_to(ROOT)): test for test in missing}
    more = {HITS: str(folder / "hits.")}
    status, seconds, output = run_pytest(folder / "marked", [*command, *paths], 4 * 3600, more)
    if status not in (0, 1):
        sys.exit(f"pytest ended with {status}: {output[-4000:]}")
    records: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}
    for worker in range(jobs):
        lines = (folder / f"hits.jsonl.gw{worker}").read_text().splitlines()
        for record in map(json.loads, lines):
            records[record["test"].partition("::")[0]].append(record)
    for path, of_file in records.items():
        statements = collections.defaultdict(list)
        for index, record in enumerate(of_file):
            for mark in record.pop("marks"):
                statements[names[mark]].append(index)
        known = {"hash": hash_of(paths[path]), "tests": of_file, "statements": statements}
        _write(map_path(folder, paths[path]), json.dumps(known))
    told = [record["passed"] for of_file in records.values() for record in of_file]
    print(
        f"{len(told)} tests in {seconds / 60:.0f} min; {told.count(False)} failed or were skipped",
        flush=True,
    )


def at_once(work: Callable[[Any], Any], items: list[Any], jobs: int) -> Iterator[Any]:
    """Yields work(item) for each item in the order of completion, with `jobs` items at a time.

    If the caller stops, running items are ended, and the others are not started.
    """
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                end(process)


def map_path(folder: Path, test: Path) -> Path:
    return folder / "map" / f"{test.stem}.json"


def read_map(folder: Path, test: Path) -> dict[str, Any] | None:
    """Returns the map of a test file; None if there is none, or if the file has changed since."""
    path = map_path(folder, test)
    known = json.loads(path.read_text()) if path.is_file() else None
    return known if known and known["hash"] == hash_of(test) else None


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


# Running tests.


RUNNING: set[subprocess.Popen[str]] = set()


def end(process: subprocess.Popen[str]) -> None:
    """Kills a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_pytest(
    tree: Path, arguments: list[str], limit: float, more: dict[str, str]
) -> tuple[int | None, float, str]:
    """Runs pytest in a copy of the tree, and then ends all its processes.

    Returns:
        The exit code (None if the time limit was reached), the seconds, and the end of the output.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as temporary:
        settings = {
            **os.environ, "PYTHONPATH": str(tree), "TMPDIR": temporary, "PYTHONDONTWRITEBYTECODE": "1", "CI": "1",
            "OMP_NUM_THREADS": "1", **more,
        }  # fmt: skip
        quiet = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        start = time.monotonic()
        with open(f"{temporary}/output", "w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *quiet, *arguments], cwd=tree, env=settings, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            RUNNING.add(process)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                RUNNING.discard(process)
                end(process)
            output.seek(0)
            return status, time.monotonic() - start, output.read()[-40000:]


# The changes: drawing them, choosing their tests, running these.


def draw(seed: int, count: int) -> list[Mutant]:
    """Returns the changes that a seed selects, the same number in each area."""
    areas = sources()
    shares = [count // len(areas) + (number < count % len(areas)) for number in range(len(areas))]
    return [
        m
        for (area, paths), share in zip(areas.items(), shares, strict=True)
        for m in draw_of(area, paths, seed, share)
    ]


def draw_of(area: str, paths: list[str], seed: int, count: int) -> list[Mutant]:
    """Returns the changes of an area's files: all kinds in turn, at most one per statement.

    The position of a change in the random order depends only on the change, so edits elsewhere do
    not affect it.
    """
    kinds: dict[str, list[Mutant]] = {}
    texts = {path: (ROOT / path).read_text() for path in paths}
    for mutant in itertools.chain(*itertools.starmap(find, texts.items())):
        kinds.setdefault(mutant.kind, []).append(mutant)

    def place(name: str) -> str:
        return hashlib.sha256(f"{seed}|{area}|{name}".encode()).hexdigest()

    turns = [
        sorted(kinds[kind], key=lambda mutant: place(mutant.key))
        for kind in sorted(kinds, key=place)
    ]
    taken: dict[str, Mutant] = {}
    for mutant in itertools.chain(*itertools.zip_longest(*turns)):
        if (
            len(taken) < count
            and mutant is not None
            and means_something_else(texts[mutant.path], mutant)
        ):
            taken.setdefault(mutant.statement if mutant.function else mutant.key, mutant)
    return list(taken.values())


@dataclass
class Covering:
    """The tests that run each statement, from the maps of all test files."""

    seconds: dict[str, float] = field(default_factory=dict)
    statements: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    functions: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))

    def add(self, known: dict[str, Any]) -> None:
        """Adds the map of a test file, without the tests that failed with the marks."""
        names = [record["test"] if record["passed"] else None for record in known["tests"]]
        self.seconds |= {
            record["test"]: record["seconds"] for record in known["tests"] if record["passed"]
        }
        for statement, indices in known["statements"].items():
            tests = {name for index in indices if (name := names[index])}
            self.statements[statement] |= tests
            path, function, _ = statement.split("::")
            self.functions[f"{path}::{function}"] |= tests
            self.functions[f"{path}::"] |= tests

    def keep(self, there: set[str]) -> None:
        """Removes tests that no longer exist.

        If pytest is asked for a missing test, it ends with an error, which would count as a
        detected change.
        """
        for tests in (*self.statements.values(), *self.functions.values()):
            tests &= there

    def tests(self, mutant: Mutant) -> list[str]:
        """Returns the tests that cover a change, in the order in which they are run.

        The tests that most likely detect the change and the fastest ones come first; tests that run
        rarely executed statements of the function (such as a refusal) come before others. If the
        map does not contain the statement, the tests of its function or module are returned.
        """
        function = mutant.statement.rpartition("::")[0]
        found = self.statements.get(mutant.statement) or self.functions.get(function, set())
        beside = [
            tests for name, tests in self.statements.items() if name.rpartition("::")[0] == function
        ]
        rare = {
            test: min((len(tests) for tests in beside if test in tests), default=1)
            for test in found
        }
        words = {
            word
            for word in mutant.path.removesuffix(".py").split("/")
            if word not in ("threed", "__init__")
        }
        files: dict[str, list[str]] = {}
        for test in sorted(found, key=lambda test: (rare[test], self.seconds[test])):
            files.setdefault(test.partition("::")[0], []).append(test)

        def cost(file: str, place: int) -> float:
            named = sum(word in file for word in words)
            test = files[file][place]
            return (
                (self.seconds[test] + 0.3) * (1 + place / 4) * (4, 2, 1)[min(named, 2)] * rare[test]
            )

        order = [
            (cost(file, place), test) for file in files for place, test in enumerate(files[file])
        ]
        return [test for _, test in sorted(order)]


def by_files(tests: list[str]) -> list[str]:
    """Groups tests by file, in the order of each file's first test.

    So the fixtures of a file are created only once.
    """
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    return list(itertools.chain(*files.values()))


def try_tests(tree: Path, tests: list[str], seconds: dict[str, float]) -> tuple[str, str]:
    """Returns 'survived', 'killed' or 'timeout', and the test that detected the change."""
    if not tests:
        return "survived", ""
    each, together = max(seconds[test] for test in tests), sum(seconds[test] for test in tests)
    limits = ["--timeout", f"{60 + 5 * each:.0f}", "-o", "timeout_func_only=false"]
    status, _, output = run_pytest(
        tree,
        ["-x", "-p", "no:xdist", "-m", MARKED, *limits, *by_files(tests)],
        90 + 4 * together,
        {},
    )
    if status is None or "Timeout >" in output or "ranks still running" in output:
        return "timeout", ""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        ("survived", "")
        if status == 0
        else ("killed", lines[0][:300] if lines else f"exit status {status}")
    )


def judge(tree: Path, mutant: Mutant, covering: Covering) -> dict[str, Any]:
    """Runs the tests of a change and returns the result.

    The tests of the second round run only if those of the first round pass.
    """
    start, used, tests = time.monotonic(), 0.0, covering.tests(mutant)
    text = (ROOT / mutant.path).read_text()
    (tree / mutant.path).write_text(apply(text, mutant))
    rounds: list[list[str]] = [[], []]
    for test in tests:
        used += covering.seconds[test]
        if used <= ALL or not rounds[0]:
            rounds[used > FIRST and bool(rounds[0])].append(test)
    try:
        for part in rounds:
            status, by = try_tests(tree, part, covering.seconds)
            if status != "survived":
                break
    finally:
        (tree / mutant.path).write_text(text)
    if not tests:
        status, by = "survived", "no test runs it"
    ran = {
        "tests": len(tests),
        "ran": sum(map(len, rounds)),
        "seconds": round(time.monotonic() - start, 1),
    }
    return {"key": mutant.key, "mutant": str(mutant), "status": status, "by": by, **ran}


def run(
    mutants: list[Mutant], covering: Covering, folder: Path, jobs: int, retry: bool
) -> dict[str, dict[str, Any]]:
    """Judges the changes without a stored result; returns the results of all changes."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    known = {record["key"]: record for record in map(json.loads, lines)}
    left = [
        m for m in mutants if m.key not in known or (retry and known[m.key]["status"] == "survived")
    ]
    print(f"{len(mutants)} changes, {len(mutants) - len(left)} known", flush=True)
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(jobs if left else 0):
        tree = folder / f"tree{number}"
        copy_tree(tree)
        compile_tree(tree)
        trees.put(tree)

    def one(mutant: Mutant) -> dict[str, Any]:
        tree = trees.get()
        try:
            return judge(tree, mutant, covering)
        finally:
            trees.put(tree)

    start = time.monotonic()
    with path.open("a") as file:
        for done, record in enumerate(at_once(one, left, jobs), 1):
            known[record["key"]] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            minutes = (time.monotonic() - start) / 60
            print(
                f"{done}/{len(left)} {minutes:.1f} min: {record['status']} in {record['seconds']} s, ",
                end="",
            )
            print(f"{record['mutant']}; {record['by']}", flush=True)
    return known


def looked_at() -> dict[tuple[str, ...], dict[str, Any]]:
    """Returns the examined survivors, by file, function, operator, old and new text."""
    path = ROOT / "tests" / "mutants.toml"
    listed = tomllib.loads(path.read_text()).get("survivor", []) if path.is_file() else []
    return {
        tuple(one[name] for name in ("path", "function", "operator", "before", "after")): one
        for one in listed
    }


def report(mutants: list[Mutant], known: dict[str, dict[str, Any]]) -> float:
    """Prints the table and the survivors.

    Returns:
        The share of detected changes among the changes that change the meaning.
    """
    notes, rows = looked_at(), dict[str, collections.Counter[str]]()
    areas = {path: area for area, paths in sources().items() for path in paths}
    told: dict[str, list[str]] = {"equivalent": [], "survived": []}
    for mutant in mutants:
        status = known[mutant.key]["status"]
        note = notes.get(
            (mutant.path, mutant.function, mutant.operator, mutant.before, mutant.short)
        )
        if status == "survived":
            status = "equivalent" if note and note["equivalent"] else status
            told[status].append(
                f"  {mutant}\n    {note['why'] if note else known[mutant.key]['by'] or 'not looked at'}"
            )
        rows.setdefault(areas[mutant.path], collections.Counter())[status] += 1
    rows["all"] = sum(rows.values(), collections.Counter())
    columns = ("killed", "timeout", "survived", "equivalent")
    print("\n" + "area".ljust(12) + "".join(name.rjust(12) for name in columns))
    for area, row in rows.items():
        print(area.ljust(12) + "".join(str(row[name]).rjust(12) for name in columns))
    for status, lines in told.items():
        print(f"{status}: {len(lines)}", *lines, sep="\n")
    total = rows["all"]
    share = (total["killed"] + total["timeout"]) / max(1, sum(total.values()) - total["equivalent"])
    print(f"{share:.1%} of those that mean something else died")
    return share


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Do the tests notice small changes of meaning?")
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="where the map, the copies and the results are kept",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--map", action="store_true", help="only find out which test runs which statement"
    )
    parser.add_argument("--retry", action="store_true", help="run survivors again")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    return parser


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.folder.resolve()
    if options.list:
        print(*draw(options.seed, options.count), sep="\n")
        return
    make_map(folder, options.jobs)
    if options.map:
        return
    mutants = draw(options.seed, options.count)
    covering = Covering()
    for test in sorted(test_files()):
        if known := read_map(folder, test):
            covering.add(known)
    listing = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        MARKED,
    ]
    covering.keep(set(subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()))
    known = run(mutants, covering, folder, options.jobs, options.retry)
    sys.exit(report(mutants, known) < 0.95)


if __name__ == "__main__":
    main()
