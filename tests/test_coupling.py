"""No object sets fields of another object, and modules have no state, except where listed here."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from threed.zero.optimizer import Optimizer

ROOT = Path(__file__).parents[1]
# tuples: `isinstance` with a union takes several times as long, and the checks look at a million nodes
FUNCTIONS, PARTS = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Subscript, ast.Attribute)

OTHER = "an object of another library, whose interface is this field"
PARAMETER = "a parameter carries what belongs to it, wherever the program refers to it"
LAYER = "a layer is changed in place: the user's code refers to the object"
# Assignments to a field of an object with a class of another module, with the reason.
SET: dict[str, str] = {
    "data.tokenizer: self._backend.encode_special_tokens": OTHER,
    "interop.deepspeed.__main__: sys.argv": OTHER,
    "interop.deepspeed.api.zero: param.ds_status": PARAMETER,
    "interop.deepspeed.views: optimizer._opt_called": OTHER,
    "layers.compiled: module.opaque": LAYER,
    "layers.compiled: module.traced": LAYER,
    "layers.compiled: torch._dynamo.config.recompile_limit": OTHER,
    "ops.flex: torch._dynamo.config.recompile_limit": OTHER,
    "layers.linear: module.__class__": LAYER,
    "layers.recompute: module.recompute": LAYER,
    "layers.slicing: param.sink": PARAMETER,
    "memory.mapped: param.data": PARAMETER,
    "memory.mapped: param.region": PARAMETER,
    "models.wrapped: module.training": OTHER,
    "pipeline.trace: param.grad": OTHER,
    "pipeline.trace: param.sink": PARAMETER,
    "reliability.recheck: memory.fill_uninitialized_memory": OTHER,
    "distributed.sharding: param.spec": PARAMETER,
    "testing.ranks: os.environ": OTHER,
    "zero.parameter_access: out.__class__": PARAMETER,
    "zero.parameter_access: self.slot.param.__class__": PARAMETER,
    "zero.contributions: slot.param.grad": OTHER,
    "zero.gather: group.slots[0].param.tile_gatherer": PARAMETER,
    "zero.reducer: slot.param.grad": OTHER,
    "zero.sinks: slot.param.sink": PARAMETER,
    "zero.versions: param.data": OTHER,
}
# Module-level objects that functions change, with the reason.
STATE: dict[str, str] = {
    "core.device: _assumed": "the GPU that a forecast assumes; reset at the end of its block",
    "config.architectures.record: REGISTERED": "architectures of the user, added before a configuration is read",
    "interop.deepspeed.api.checkpointing: _configured": "whether the program has configured it, as in DeepSpeed",
    "ops.attention: _BORDERS": "borders of documents, read from the device once per micro-batch",
    "ops.attention_backends: _checked": "a message is given once per process",
    "ops.attention_backends: _chosen": "torch's choice of a kernel, per combination of arguments",
    "ops.attention_backends: _described": "the kernels that have run in this process, for the log",
    "ops.flex: _MASKS": "lists of blocks of documents, once per micro-batch",
    "ops.launch: OPERATORS": "torch's registry of operators is per process, too",
    "schedules.registry: _SCHEDULES": "schedules of the user, added before a configuration is read",
    "testing.ranks: _pipe": "the rank of a process that `run_ranks` has started",
    "testing.ranks: _preloaded": "modules that processes are forked with",
    "pipeline.meta_results: _known": "results of operations, which depend on their arguments only",
    "zero.contributions: _running": "autograd's engine is per process, too",
}
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "set", "setdefault", "update",
}  # fmt: skip


@functools.cache
def sources(root: Path) -> list[tuple[str, ast.Module]]:
    """Returns every module of the package, with its name without `threed.`."""
    found = []
    for path in sorted((root / "threed").rglob("*.py")):
        parts = path.relative_to(root / "threed").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found.append((name, ast.parse(path.read_text())))
    return found


def functions(tree: ast.AST) -> Iterator[tuple[Any, list[ast.AST]]]:
    """Yields every function, with all its nodes."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield node, list(ast.walk(node))


def stored(node: ast.AST) -> list[ast.expr]:
    """Returns the targets of a statement's assignments."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    else:
        return []
    return [
        part
        for target in targets
        for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def fields(tree: ast.Module) -> set[str]:
    """Returns the names of the fields of a module's classes."""
    found = set[str]()
    for node in (
        node for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for node in ast.walk(kind)
    ):
        for target in stored(node):
            if isinstance(target, ast.Name):
                found.add(target.id)
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.add(target.attr)
    return found


def made(nodes: list[ast.AST]) -> set[str]:
    """Returns the names of objects that a function creates."""
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def foreign_fields(tree: ast.Module) -> set[str]:
    """Returns assignments to fields of objects that are foreign to the code.

    These objects are neither of this module's classes nor created by the function.
    """
    own, found = fields(tree), set[str]()
    for _, nodes in functions(tree):
        mine = {"self", "cls", "ctx"} | made(nodes)
        set_here = (target for node in nodes for target in stored(node))
        found |= {
            ast.unparse(target)
            for target in set_here
            if isinstance(target, ast.Attribute)
            and target.attr not in own
            and ast.unparse(target.value) not in mine
        }
    return found


def module_state(tree: ast.Module) -> set[str]:
    """Returns the module-level names whose objects a function changes or replaces."""
    names = {
        name.id
        for node in tree.body
        for target in stored(node)
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    found = set[str]()
    for function, nodes in functions(tree):
        replaced = {n for node in nodes if isinstance(node, ast.Global) for n in node.names}
        arguments = function.args
        local = {a.arg for a in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)}
        local |= {
            n.id
            for n in nodes
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } - replaced  # fmt: skip
        names_of_others = names - local
        found |= replaced | {name for name in map(changed, nodes) if name in names_of_others}
    return found


def changed(node: ast.AST) -> str | None:
    """Returns the name whose object an expression changes, or None."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGES
    ):
        node = node.func.value
    elif isinstance(node, PARTS) and not isinstance(node.ctx, ast.Load):
        node = node.value
    else:
        return None
    return node.id if isinstance(node, ast.Name) else None


def test_no_object_sets_the_fields_of_another() -> None:
    found = {
        f"{module}: {target}" for module, tree in sources(ROOT) for target in foreign_fields(tree)
    }
    assert found == SET.keys()


def test_modules_have_no_state() -> None:
    found = {f"{module}: {name}" for module, tree in sources(ROOT) for name in module_state(tree)}
    assert found == STATE.keys()


def test_the_optimizer_has_at_most_eight_public_methods() -> None:
    """`zero.state` has functions for what is not a part of a step, such as filling states with values."""
    methods = [
        name
        for name, value in vars(Optimizer).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert 0 < len(methods) <= 8, methods


PLANTED = {
    "a field": ("def f(engine):\n    engine.saver.hurries = f", {"engine.saver.hurries"}, set()),
    "a method": (
        "class A:\n    def f(self):\n        self.other.run = f",
        {"self.other.run"},
        set(),
    ),
    "several": ("def f(a, b):\n    a.x, b = 1, 2", {"a.x"}, set()),
    "added to": ("def f(a):\n    a.x += 1", {"a.x"}, set()),
    "its own": ("class A:\n    def f(self):\n        self.x = 1", set(), set()),
    "of a class here": ("class A:\n    x: int\ndef f(a):\n    a.x = 1", set(), set()),
    "made here": ("def f():\n    a = A()\n    a.x = 1", set(), set()),
    "a table": ("T = {1: 2}\ndef f():\n    return T[1]", set(), set()),
    "a list": ("T = []\ndef f():\n    T.append(1)", set(), {"T"}),
    "a dict": ("T = {}\ndef f():\n    T[1] = 2", set(), {"T"}),
    "global": ("T = None\ndef f():\n    global T\n    T = 1", set(), {"T"}),
    "a local list": ("T = []\ndef f():\n    T = []\n    T.append(1)", set(), set()),
}


@pytest.mark.parametrize(("text", "fields_set", "state"), PLANTED.values(), ids=PLANTED.keys())
def test_the_checks_bite(text: str, fields_set: set[str], state: set[str]) -> None:
    tree = ast.parse(text)
    assert foreign_fields(tree) == fields_set
    assert module_state(tree) == state
