"""Imports Python files of the user, and finds a model in such a file by FILE.py:NAME."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


def load(file: str) -> ModuleType:
    """Imports a Python file as a module and returns the module.

    If the program has already imported the file, returns the existing module. Otherwise adds the
    file's folder to `sys.path` and imports it. Text that the import prints to stdout is redirected
    to stderr.

    Raises:
        ValueError: if the file does not exist or cannot be imported.
    """
    path = Path(file).resolve()
    name = f"threed_user_{path.stem}"
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(path):
        return known
    # The file may be the running program or a module that the program has imported. Such a file
    # must not be imported a second time.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("__file__") == str(path):
            return module
    if not path.is_file():
        raise ValueError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = ""
        if isinstance(error, SystemExit):
            hint = "; guard the code of the script with `if __name__ == '__main__':`"
        raise ValueError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


MODEL = ("config", "slicing")  # names of the arguments with which a model class is called
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def count_arguments(found: Any, given: Sequence[str], file: str = "") -> int:
    """Returns the number of arguments with which a user's class or function is called.

    The object may take fewer arguments than `given`. Arguments are passed by position. A parameter
    with a default value keeps it if its name differs from the name of the argument at this
    position. Then all later parameters keep their default values, too.

    Args:
        found: the class or function.
        given: names of the available arguments.
        file: the file of the object, for the message.

    Raises:
        ValueError: if the object requires arguments that are not in `given`.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # a callable of C code may have no signature
        return len(given)
    takes = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in takes):
        return len(given)
    wanted = [p.default is p.empty or p.name == n for p, n in zip(takes, given, strict=False)]
    count = wanted.index(False) if False in wanted else len(wanted)
    try:
        signature.bind(*given[:count])
    except TypeError:
        name = getattr(found, "__name__", type(found).__name__)
        forms = [f"{name}({', '.join(given[:n])})" for n in range(len(given), -1, -1)]
        where = f" of {file}" * bool(file)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        raise ValueError(
            f"{name}{inspect.Signature(plain)}{where} cannot be called as {' or '.join(forms)}: give all other"
            " parameters default values"
        ) from None
    return count


@dataclass(frozen=True)
class Source:
    """A callable object in a Python file. The file is imported at the first call in a process.

    Attributes:
        file: path of the file.
        name: name of the object in the file.
        given: names of the available arguments. The object may take fewer (`count_arguments`).
    """

    file: str
    name: str
    given: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        return self.found(*args[: self.count()])

    @property
    def found(self) -> Any:
        """The class or function, imported from the file."""
        return getattr(load(self.file), self.name)

    def count(self) -> int:
        """Returns the number of arguments with which the object is called.

        Raises:
            ValueError: if the object requires arguments that are not in `given`.
        """
        return count_arguments(self.found, self.given, self.file)


def names_model(text: str) -> bool:
    """Returns whether a text has the form FILE.py:NAME."""
    return text.rpartition(":")[0].endswith(".py")


def find_model(target: str) -> Source:
    """Finds a model in a file.

    Args:
        target: FILE.py:NAME. NAME is a class or function; it will be called with a `ModelConfig`
            and a `Slicing`, with a `ModelConfig`, or without arguments.

    Returns:
        The class or function as a `Source`.

    Raises:
        ValueError: if the file cannot be imported, or the object does not exist, is not callable,
            or requires other arguments.
    """
    file, _, name = target.rpartition(":")
    if not names_model(target):
        what = "NAME a model class called with a ModelConfig and a Slicing"
        raise ValueError(f"{target}: write FILE.py:NAME, {what}")
    module = load(file)
    if not callable(getattr(module, name, None)):
        classes = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
        own = ", ".join(n for n, v in classes.items() if v.__module__ == module.__name__)
        raise ValueError(f"{file} has no {name!r} to call; its classes are {own or 'none'}")
    source = Source(file, name, MODEL)
    source.count()
    return source


def name_of(model: Any) -> str:
    """Returns the text FILE.py:NAME of a class or function.

    Raises:
        ValueError: if it is not defined at the top level of a file.
    """
    name = getattr(model, "__qualname__", "")
    try:
        file = inspect.getsourcefile(model)
    except TypeError:
        file = None
    if file is None or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(
            f"{name or repr(model)} is not a class or function at the top level of a file"
        )
    return f"{Path(file).resolve()}:{name}"


def find_batch(target: str) -> Source | None:
    """Returns the function `batch` of FILE.py; None if FILE.py defines no such function.

    Args:
        target: text of the form FILE.py:NAME, such as the name of a custom model. NAME is not used.
    """
    file = target.rpartition(":")[0]
    has_one = callable(getattr(load(file), "batch", None))
    return Source(file, "batch", ("config", "step")) if has_one else None


def is_foreign(error: BaseException, package: Path) -> bool:
    """Returns whether an error was raised outside of a package, such as in a user's file.

    Args:
        error: the error, with its traceback.
        package: the folder of the package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and package not in Path(frames[-1].filename).parents


def place_of(error: BaseException) -> str:
    """Returns the line of the user's code in which an error arose, as " (FILE, line N)", or ""."""
    package = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if package not in file.parents and "site-packages" not in file.parts:
            return f" ({file.name}, line {frame.lineno})"
    return ""
