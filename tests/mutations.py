"""Small changes of meaning of Python source, and marks that record executed statements.

    mutants = find("threed/engine/base.py", text)                  # every change that the operators below can make
    changed = apply(text, mutants[0])
    marked, names = instrument("threed/engine/base.py", text, 0)   # the source with `_hits[n] = 1` before each statement

Both use the syntax tree of `ast`. There are no changes of code that does not affect results:
docstrings, annotations, decorators, texts of errors, log output, and keywords without effect on a
CPU.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
TALK = (
    "print",
    "warn",
    "warning",
    "info",
    "debug",
    "log",
    "write",
    "echo",
)  # functions that only log or report
SYMMETRIC = (
    "min",
    "max",
    "gcd",
    "lcm",
    "equal",
    "allclose",
    "maximum",
    "minimum",
    "isinstance",
    "getattr",
    "cast",
)
ON_DEVICES = (
    "device",
    "non_blocking",
    "pin_memory",
    "stream",
    "stacklevel",
    "strict",
    "daemon",
    "help",
    "exist_ok",
)


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from `start` to `end` of a file are replaced by `after`.

    Attributes:
        function: qualified name of the function with the change; empty outside of functions.
        statement: name of the statement with the change, as `instrument` names it.
        source: hash of the function's text; a stored result is valid as long as it is the same.
    """

    path: str
    line: int
    function: str
    statement: str
    operator: str
    before: str
    after: str
    start: int
    end: int
    source: str

    @property
    def key(self) -> str:
        """A name of the change that does not depend on the position of its function in the file."""
        parts = (self.path, self.statement, self.operator, self.before, self.after, self.source)
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function} [{self.operator}] {self.before} → {self.short}"

    @property
    def kind(self) -> str:
        """The operator, without the name of the keyword that it removes."""
        return "drop keyword" if self.operator.startswith("drop keyword") else self.operator

    @property
    def short(self) -> str:
        """The beginning of the new text."""
        return self.after[:80]


def apply(text: str, mutant: Mutant) -> str:
    """Returns the source with a change."""
    raw = text.encode()
    return (raw[: mutant.start] + mutant.after.encode() + raw[mutant.end :]).decode()


def find(path: str, text: str) -> list[Mutant]:
    """Returns all changes of a file, in the order of the file."""
    return _Finder(path, text).found


def means_something_else(text: str, mutant: Mutant) -> bool:
    """Returns whether the changed source can be parsed and has a different syntax tree."""
    try:
        changed = ast.parse(apply(text, mutant))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(text))


def instrument(path: str, text: str, first: int) -> tuple[str, list[str]]:
    """Adds a mark before each statement inside a function.

    Args:
        path: path of the file.
        text: its source.
        first: number of the first mark.

    Returns:
        The new source, and the names of the marked statements.
    """
    tree = ast.parse(text)
    names: list[str] = []
    for function, body, index in _blocks(tree):
        marked: list[ast.stmt] = []
        for statement in body:
            if not (_is_text(statement) and statement is body[0]):
                mark = ast.parse(f"_hits[{first + len(names)}] = 1").body[0]
                names.append(f"{path}::{function}::{next(index)}")
                marked.append(mark)
            marked.append(statement)
        body[:] = marked
    at = next(
        (i for i, s in enumerate(tree.body) if not _is_text(s) and not _is_future(s)),
        len(tree.body),
    )
    tree.body.insert(at, ast.parse("from threed._hits import hits as _hits").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)), names


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _blocks(tree: ast.Module) -> list[tuple[str, list[ast.stmt], Iterator[int]]]:
    """Returns every list of statements inside a function.

    Each comes with the name of the function and a counter of the function's statements.
    """
    found: list[tuple[str, list[ast.stmt], Iterator[int]]] = []

    def walk(node: ast.AST, prefix: str, function: str, counter: Iterator[int]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                inside = function if isinstance(child, ast.ClassDef) else name
                enter(
                    child,
                    f"{name}.",
                    inside,
                    counter if isinstance(child, ast.ClassDef) else iter(range(10**6)),
                )
            else:
                enter(child, prefix, function, counter)

    def enter(node: ast.AST, prefix: str, function: str, counter: Iterator[int]) -> None:
        if function and not isinstance(node, ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block:
                    found.append((function, block, counter))
        walk(node, prefix, function, counter)

    walk(tree, "", "", iter(range(10**6)))
    return found


class _Finder:
    """Visits the nodes of a file and collects its changes."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.raw = path, text.encode()
        self.tree = ast.parse(text)
        starts = [0]
        for line in self.raw.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.names = self._name_statements()
        self.found: list[Mutant] = []
        self.function, self.statement, self.source = "", "", self._hash(self.tree.body)
        for statement in self.tree.body:
            self.source = self._hash([statement])
            self._statement(statement, "")

    def _name_statements(self) -> dict[int, str]:
        """Returns the name that `instrument` gives to each statement."""
        names = {}
        for function, body, index in _blocks(self.tree):
            for statement in body:
                if not (_is_text(statement) and statement is body[0]):
                    names[id(statement)] = f"{self.path}::{function}::{next(index)}"
        return names

    def _hash(self, body: list[ast.stmt]) -> str:
        return hashlib.sha256("".join(map(ast.dump, body)).encode()).hexdigest()[:12]

    def _statement(self, node: ast.stmt, prefix: str) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom) or _talks(node):
            return
        outer = self.function, self.statement, self.source
        self.statement = self.names.get(id(node), f"{self.path}::{self.function}::")
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                self._statement(inner, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node, prefix)
        else:
            for operator, new in _of_statement(node, self.function):
                self._add(operator, node, ast.unparse(new))
            for child in ast.iter_child_nodes(node):
                self._child(child, node, prefix)
        self.function, self.statement, self.source = outer

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self._expression(default)
        self.function = f"{prefix}{node.name}"
        self.source = self._hash([node])
        for inner in node.body:
            self._statement(inner, f"{prefix}{node.name}.")
        constructor = node.name in (
            "__init__",
            "__post_init__",
        )  # without them, the first use fails
        if (
            len(node.body) > 2
            and not constructor
            and not any(
                isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) for n in ast.walk(node)
            )
        ):
            body = node.body[1:] if _is_text(node.body[0]) else node.body
            self.statement = self.names.get(id(body[0]), "")
            self._add("return early", body[0], "return")

    def _child(self, node: ast.AST, parent: ast.AST, prefix: str) -> None:
        if isinstance(node, ast.stmt):
            self._statement(node, prefix)
        elif isinstance(node, ast.expr):
            if isinstance(parent, ast.AnnAssign) and node is parent.annotation:
                return
            is_condition = node is getattr(parent, "test", None) or node in getattr(
                parent, "ifs", ()
            )
            if is_condition and not _is_negated_by_comparison(node):
                self._add("negate", node, f"(not ({ast.unparse(node)}))")
            self._expression(node)
        else:
            for child in ast.iter_child_nodes(node):
                self._child(child, node, prefix)

    def _expression(self, node: ast.expr) -> None:
        # before Python 3.12, the parts of an f-string have no positions
        if isinstance(node, ast.JoinedStr):
            return
        for operator, new in _of_expression(node):
            self._add(operator, node, ast.unparse(new))
        for child in ast.iter_child_nodes(node):
            self._child(child, node, "")

    def _add(self, operator: str, node: ast.stmt | ast.expr | ast.keyword, after: str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = " ".join(self.raw[start:end].decode().split())
        self.found.append(
            Mutant(
                self.path, node.lineno, self.function, self.statement, operator, before[:80], after, start, end,
                self.source,
            )
        )  # fmt: skip


def _talks(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _called(node.value) in TALK
    )


def _called(node: ast.Call) -> str:
    """Returns the last name of a called function: f for f(x) and for a.b.f(x)."""
    function = node.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def _of_statement(node: ast.stmt, function: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "drop call", ast.Pass()
    if isinstance(node, ast.AugAssign):
        if type(node.op) in ARITHMETIC:
            yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
        yield "drop assignment", ast.Pass()
    made = function.endswith(("__init__", "__post_init__"))
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        and not made
    ):
        yield "drop assignment", ast.Pass()


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        swapped: list[ast.cmpop] = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", ast.Compare(node.left, swapped, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _joins(node):
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield (
            "and/or",
            ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop not", node.operand
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _is_negated_by_comparison(node: ast.expr) -> bool:
    opposites = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    return (
        isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], opposites)
    )


def _joins(node: ast.BinOp) -> bool:
    """Returns whether an operation joins strings or lists, which have no other operators."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )


def _of_constant(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "true/false", ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "constant + 1", ast.Constant(node.value + 1)
        yield (
            "constant - 1",
            ast.UnaryOp(ast.USub(), ast.Constant(1))
            if node.value == 0
            else ast.Constant(node.value - 1),
        )


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = _called(node)
    if name in TALK:
        return
    if name in NAMES and isinstance(node.func, ast.Name):
        yield "min/max/any/all", ast.Call(ast.Name(NAMES[name]), node.args, node.keywords)
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    if len(node.args) > 1 and not starred and name not in SYMMETRIC:
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second):
            yield "swap arguments", ast.Call(node.func, [second, first, *rest], node.keywords)
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in ON_DEVICES:
            left = [other for other in node.keywords if other is not keyword]
            yield f"drop keyword {keyword.arg}", ast.Call(node.func, node.args, left)
