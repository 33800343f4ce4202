"""Structure of the package: levels of imports, users of torch.distributed, sizes of files.

Imports go to lower levels only, without cycles; two modules use torch.distributed. Imports are read
from the source, so lazy ones and those under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Packages and modules of `threed` from the lowest level up. A package imports only from itself and from lower levels, so
# there are no cycles.
LEVELS = (
    ("core",),
    ("schedules",),
    ("config",),
    ("distributed",),
    ("memory", "ops"),
    ("layers",),
    ("models",),
    ("data", "monitor", "pipeline", "zero"),
    ("checkpoint",),
    ("planner", "interop.huggingface", "interop.pickles"),
    ("engine",),
    ("interop", "reliability", "testing"),
    ("training",),
    ("trainer",),
    ("cli",),
    ("__main__",),
)
FLOORS = {f"threed.{name}": floor for floor, names in enumerate(LEVELS) for name in names}
FLOORS |= {"threed": len(LEVELS), "pretrain": len(LEVELS) + 1}
DISTRIBUTED = tuple(
    f"threed.distributed.{m}" for m in ("topology", "collectives", "symmetric_memory")
)
# Modules that can be imported without torch. They import only each other and `GROUND_LIBRARIES`.
WITHOUT_TORCH = (
    "threed.config",
    "threed.schedules",
    "threed.core.atomic",
    "threed.core.block_patterns",
    "threed.core.disk",
    "threed.core.errors",
    "threed.core.exports",
    "threed.core.messages",
    "threed.core.native",
    "threed.core.packages",
    "threed.core.parse",
    "threed.core.process",
    "threed.core.source",
    "threed.core.svg_style",
    "threed.distributed.grid",
    "threed.distributed.launcher",
    "threed.models.pipeline_layout",
    "threed.models.measured_partition",
    "threed.models.partition",
)
GROUND_LIBRARIES = {*sys.stdlib_module_names, "pydantic", "pydantic_core"}
FILE_LINES, FUNCTION_LINES = (
    460,
    80,
)  # limits: for a file without docstrings; for a function with its docstring


parse = functools.cache(ast.parse)


def find_violations(root: Path) -> list[str]:
    """Returns every violation in `threed/` and `pretrain/` under `root`, as `module: problem`."""
    sources = {
        _module_name(root, path): path
        for folder in ("threed", "pretrain")
        for path in (root / folder).rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    problems: list[str] = []
    texts = {module: path.read_text(encoding="utf-8") for module, path in sources.items()}
    trees = {module: parse(text) for module, text in texts.items()}
    exports = {
        name: module
        for package in trees.keys() - {"threed"}
        for name, module in _lazy_exports(trees[package], package)
    }
    for module, path in sorted(sources.items()):
        text, tree = texts[module], trees[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        imported = set(_imports(tree, package))
        graph[module] = {
            _home(exports.get(name, name), sources)
            for name in imported
            if name.split(".")[0] in ("threed", "pretrain")
        }
        problems += _check_floor(module, graph[module], imported)
        problems += _check_distributed(module, tree, imported)
        problems += _check_sizes(module, tree, len(text.splitlines()))
    return [*problems, *_check_cycles(graph)]


def _module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _export_blocks(tree: ast.Module) -> list[ast.If]:
    """Returns a package's blocks `if TYPE_CHECKING: import the names, else: lazy(...)`."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and "= lazy(__name__" in "".join(map(ast.unparse, node.orelse))
    ]


def _lazy_exports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yields each exported name and the module that defines it.

    An example of a name is `threed.checkpoint.load`.
    """
    for block in _export_blocks(tree):
        for node in block.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from ((f"{package}.{alias.name}", node.module) for alias in node.names)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields absolute dotted names of imports.

    For `from a import b` this is `a.b`, because `b` may be a module. The lazy exports of a package
    do not count as imports of the package, but of the modules that use them: see `find_violations`.
    """
    exports = {id(node) for block in _export_blocks(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in exports:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _function(node) in ("import_module", "__import__"):
            yield from (
                arg.value
                for arg in node.args[:1]
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def _function(call: ast.Call) -> str:
    """Returns the name of a called function, without that of its module."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _home(name: str, sources: dict[str, Path]) -> str:
    """Returns the module that defines `name`: itself, or the nearest parent that is a file."""
    while name not in sources and "." in name:
        name = name.rpartition(".")[0]
    return name


def _package(module: str) -> str | None:
    """Returns the entry of LEVELS to which a module belongs.

    It is the module's name, or the name of its nearest parent in LEVELS.
    """
    name = module
    while name not in FLOORS and "." in name:
        name = name.rpartition(".")[0]
    return name if name in FLOORS and (name == module or name != "threed") else None


def _check_floor(module: str, targets: set[str], imported: set[str]) -> Iterator[str]:
    package = _package(module)
    if package is None:
        yield f"{module}: has no floor; add it to LEVELS"
        return
    for target in sorted(targets):
        other = _package(target)
        if other is not None and other != package and FLOORS[other] >= FLOORS[package]:
            yield f"{module}: imports upward, from {package} to {target}"
    if module.startswith(WITHOUT_TORCH):
        for name in sorted(imported):
            if not name.startswith(WITHOUT_TORCH) and name.split(".")[0] not in GROUND_LIBRARIES:
                yield f"{module}: imports {name}, and must be importable without torch"


def _check_distributed(module: str, tree: ast.Module, imported: set[str]) -> Iterator[str]:
    if module in DISTRIBUTED:
        return
    named = any(
        name == "torch.distributed" or name.startswith("torch.distributed.") for name in imported
    )
    used = any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and ast.unparse(node) == "torch.distributed"
        for node in ast.walk(tree)
    )
    if named or used:
        yield f"{module}: torch.distributed belongs to {' and '.join(DISTRIBUTED)}"


def _docstring_lines(tree: ast.Module) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return sum((text.end_lineno or text.lineno) - text.lineno + 1 for text in texts)


def _check_sizes(module: str, tree: ast.Module, lines: int) -> Iterator[str]:
    lines -= _docstring_lines(tree)
    if lines > FILE_LINES:
        yield f"{module}: {lines} lines, more than {FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{module}: {node.name} has {length} lines, more than {FUNCTION_LINES}"


def _check_cycles(graph: dict[str, set[str]]) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(
            {module: targets - {module} for module, targets in graph.items()}
        ).prepare()
    except graphlib.CycleError as error:
        yield f"import cycle: {' <- '.join(error.args[1])}"


def test_the_structure_holds() -> None:
    assert find_violations(ROOT) == []
    paths = [ROOT.joinpath(*name.split(".")) for name in (*FLOORS, *WITHOUT_TORCH)]
    assert [p.name for p in paths if not p.is_dir() and not p.with_suffix(".py").is_file()] == []


def test_the_root_of_the_package_is_a_table_of_contents() -> None:
    """It has at most 24 names, and each package has a docstring."""
    entries = {path for path in (ROOT / "threed").iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 24, sorted(path.name for path in entries)
    for path in entries:
        if path.is_dir():
            assert ast.get_docstring(ast.parse((path / "__init__.py").read_text())), path


# Users of threed.interop: the command line, a run, `threed.load`, and the engine for `Engine.load`.
USERS_OF_INTEROP = {
    "cli.commands",
    "cli.launch",
    "engine.base",
    "reliability.elastic",
    "trainer",
    "training.final_report",
}


def test_nothing_below_imports_interop_but_for_the_engine() -> None:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "threed").rglob("*.py"):
        module = _module_name(ROOT, path)
        if not module.startswith("threed.interop") and module != "threed":
            tree = parse(path.read_text(encoding="utf-8"))
            names = {n for n in _imports(tree, module) if n.startswith("threed.interop")}
            found |= {module.removeprefix("threed."): names} if names else {}
    assert found.keys() == USERS_OF_INTEROP
    assert {name.rpartition(".")[2] for name in found["engine.base"]} == {"is_hf_folder", "load_hf"}


def test_one_module_names_cuda() -> None:
    """All other modules use `torch.accelerator` or `threed.core.device`."""
    naming = [
        path
        for path in (ROOT / "threed").rglob("*.py")
        if "torch.cuda" in path.read_text(encoding="utf-8")
    ]
    assert naming == [ROOT / "threed" / "core" / "device.py"]


PLANTED = {
    "upward import": (
        "threed/config/groups.py",
        "from threed.engine import Engine",
        "threed.config.groups: imports upward",
    ),
    "upward, lazily": (
        "threed/core/rng.py",
        "def f():\n    import threed.layers.norm",
        "threed.core.rng: imports upward",
    ),
    "upward, for types": (
        "threed/layers/norm.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from threed.models import gpt",
        "threed.layers.norm: imports upward",
    ),
    "upward, relative": (
        "threed/layers/norm.py",
        "from ..zero.layout import Unit",
        "threed.layers.norm: imports upward",
    ),
    "sideways": (
        "threed/zero/layout.py",
        "from threed.pipeline import stage",
        "threed.zero.layout: imports upward",
    ),
    "upward, to the exports": (
        "threed/engine/base.py",
        "import threed",
        "threed.engine.base: imports upward",
    ),
    "upward, to a lazy export": (
        "threed/engine/base.py",
        "from threed.checkpoint import load",
        "threed.engine.base: imports upward, from threed.engine to threed.interop.loading",
    ),
    "upward, from a package with lazy exports": (
        "threed/checkpoint/__init__.py",
        "from threed.interop.loading import load",
        "threed.checkpoint: imports upward",
    ),
    "upward, by name": (
        "threed/core/rng.py",
        "import importlib\nimportlib.import_module('threed.engine')",
        "threed.core.rng: imports upward",
    ),
    "torch on the ground": (
        "threed/schedules/gantt.py",
        "import torch",
        "threed.schedules.gantt: imports torch",
    ),
    "distributed": (
        "threed/engine/base.py",
        "import torch.distributed as dist",
        "threed.engine.base: torch.distributed belongs",
    ),
    "distributed, from": (
        "threed/engine/base.py",
        "from torch import distributed",
        "threed.engine.base: torch.distributed belongs",
    ),
    "distributed, used": (
        "threed/engine/base.py",
        "import torch\ntorch.distributed.barrier()",
        "torch.distributed belongs",
    ),
    "no floor": ("threed/attic.py", "", "threed.attic: has no floor"),
    "long file": ("threed/core/rng.py", "x = 1\n" * 461, "threed.core.rng: 461 lines"),
    "long function": (
        "threed/core/rng.py",
        "def f():\n" + "    x = 1\n" * 80,
        "threed.core.rng: f has 81 lines",
    ),
}


# A package whose names are defined in a higher package, and imported on first use.
LAZY = """
if TYPE_CHECKING:
    from threed.interop.loading import load
else:
    __getattr__, __dir__ = lazy(__name__, {"load": "threed.interop.loading"})
"""


@pytest.mark.parametrize(("path", "text", "problem"), PLANTED.values(), ids=PLANTED.keys())
def test_the_check_bites(tmp_path: Path, path: str, text: str, problem: str) -> None:
    for name in (
        "__init__",
        "engine",
        "core/rng",
        "layers/__init__",
        "layers/norm",
        "models/gpt",
        "pipeline/stage",
        "zero/layout",
    ):
        _write(tmp_path / f"threed/{name}.py", "import math\n")
    _write(tmp_path / "pretrain/gpt.py", "from threed import engine\n")
    _write(tmp_path / "threed/interop/loading.py", "from threed.engine import Engine\n")
    _write(tmp_path / "threed/checkpoint/__init__.py", LAZY)
    assert find_violations(tmp_path) == []
    _write(tmp_path / path, text)
    found = find_violations(tmp_path)
    assert found
    assert problem in found[0]


def test_a_cycle_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "threed/zero/layout.py", "from threed.zero.norm import norm")
    _write(tmp_path / "threed/zero/norm.py", "def norm():\n    from . import layout")
    (found,) = find_violations(tmp_path)
    assert found.startswith("import cycle: ")
    assert "threed.zero.layout" in found
    assert "threed.zero.norm" in found


def test_a_package_may_gather_its_modules(tmp_path: Path) -> None:
    _write(tmp_path / "threed/zero/__init__.py", "from threed.zero.layout import Layout")
    _write(tmp_path / "threed/zero/layout.py", "from threed.zero import norm")
    _write(tmp_path / "threed/zero/norm.py", "import math")
    assert find_violations(tmp_path) == []


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
