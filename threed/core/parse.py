"""Reads untrusted JSON and TOML with limits, and raises one-line errors.

    table = read_json(path)                 # a dict; a ParseError names the file and the reason
    value = parse_json(line, "a.jsonl, line 3", finite=False)       # from bytes or str
    tables = read_toml(path)

File size, nesting depth and digits per number are limited. Duplicate keys are an error, because
parsers differ in which of the values they use. NaN and infinities, which are not valid JSON, and
invalid UTF-8 are errors, too.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threed.core.errors import PicklableError

MOST_BYTES = 2**26  # maximum size of a JSON file, in bytes
MOST_TOML = 2**17  # maximum size of a TOML file, in bytes
MOST_DEPTH = 64  # maximum number of nesting levels
# maximum number of digits of an integer; some published files write 10^30 in digits for "no limit"
MOST_DIGITS = 40
_PART = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"'=,.]+)"""
_DEEP_KEY = re.compile(rf"""(?<![^\s"'=,.])(?:{_PART}[ \t]*\.[ \t]*){{{MOST_DEPTH + 1}}}""")


class ParseError(PicklableError, ValueError):
    """Raised for text that cannot be read or parsed. The message is one line.

    Attributes:
        reason: the message without the name of the file or text at its start.
    """

    def __init__(self, place: object, reason: str) -> None:
        super().__init__(f"{plain(place, 4000)}: {reason}")
        self.reason = reason


def plain(text: object, most: int = 500) -> str:
    """Returns text as one line that is safe to print.

    Args:
        text: text from an untrusted source; unprintable text is escaped.
        most: maximum number of characters; longer text is truncated.
    """
    start = str(text)[:most]
    return start if start.isprintable() else start.encode("unicode_escape").decode()


def read_json(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
        path: path of the JSON file.
        most: maximum size of the file in bytes.

    Raises:
        ParseError: if the file is not readable, too large, or not a JSON object.
    """
    value = parse_json(read_file(path, most), str(path))
    if not isinstance(value, dict):
        raise ParseError(path, f"holds {type(value).__name__}, not an object of keys")
    return value


def read_toml(path: Path, most: int = MOST_TOML) -> dict[str, Any]:
    """Returns the tables of a TOML file.

    Args:
        path: path of the TOML file.
        most: maximum size of the file in bytes.

    Raises:
        ParseError: if the file is not readable, too large, or not TOML.
    """
    return _parse(_toml, read_file(path, most), str(path), "TOML")


def _toml(text: str) -> dict[str, Any]:
    """Parses TOML; raises RecursionError for keys with many parts (a.b.c...).

    tomllib would take quadratic time for such keys.
    """
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def parse_json(data: bytes | str, place: str, *, finite: bool = True) -> Any:
    """Returns the value of a JSON text.

    Args:
        data: the text; bytes must be UTF-8.
        place: name of the text in error messages.
        finite: whether NaN and infinities are errors; if false, they are accepted.

    Raises:
        ParseError: if the text is not valid JSON, or exceeds a limit.
    """
    hooks: dict[str, Any] = (
        {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
    )
    return _parse(
        lambda text: json.loads(text, object_pairs_hook=_unique, parse_int=_whole, **hooks),
        data,
        place,
        "JSON",
    )


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns the bytes of a regular file. Refuses pipes, which could block.

    Args:
        path: path of the file.
        most: maximum size of the file in bytes.

    Raises:
        ParseError: if the file is not readable, not a regular file, or too large.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ParseError(
            path, f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ParseError(path, "is not a regular file")
        if about.st_size > most:
            raise ParseError(path, f"has {about.st_size:,} bytes; at most {most:,} are read")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise ParseError(path, f"cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)


def _parse(parse: Callable[[str], Any], data: bytes | str, place: str, language: str) -> Any:
    try:
        value = parse(data if isinstance(data, str) else data.decode("utf-8-sig"))
        _check(value)
        return value
    except (RecursionError, MemoryError):
        raise ParseError(place, f"invalid {language} (nested too deeply)") from None
    except ValueError as error:  # invalid UTF-8, JSON or TOML, or an exceeded limit
        raise ParseError(place, f"invalid {language} ({plain(error)})") from None


def _check(value: Any) -> None:
    """Checks a parsed value against the limits.

    Raises RecursionError if the value is nested too deeply, ValueError if an integer has too many
    digits.
    """
    level = [value]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, int) and abs(item) >= 10**MOST_DIGITS:
                raise ValueError(f"a number has more than {MOST_DIGITS} digits")
        if not inner:
            return
        level = inner
    raise RecursionError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in table if names.count(name) > 1)
        raise ValueError(f"{twice[:100]}: given twice")
    return table


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS + 1:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:30]} is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
