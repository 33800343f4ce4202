"""JSON and TOML from outside: what is beyond the bounds, there twice or no number is refused in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from threed.config import ConfigError
from threed.config.arguments import load
from threed.core.parse import MOST_DEPTH, ParseError, parse_json, read_json, read_toml
from threed.data.sources import find_text
from threed.interop.deepspeed.config.reader import read

DEEP = b"[" * 100_000
REFUSED: dict[str, tuple[bytes, str]] = {
    "deep": (b'{"a": ' + DEEP, "nested too deeply"),
    "deep enough for what comes after": (
        b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
        "nested too deeply",
    ),
    "no UTF-8": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "digits": (b'{"a": 1' + b"0" * 5000 + b"}", "more than 40 digits"),
    "some digits": (b'{"a": 1' + b"0" * 50 + b"}", "more than 40 digits"),
    "twice": (b'{"a": {"b": 1, "b": 2}}', "b: given twice"),
    "NaN": (b'{"a": NaN}', "NaN is not a number"),
    "infinite": (b'{"a": 1e999}', "1e999 is too large"),
    "cut": (b'{"a": ', "Expecting value"),
    "a list": (b"[1]", "holds list"),
    "more behind": (b"{} {}", "Extra data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_json_beyond_the_bounds_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    text, problem = REFUSED[name]
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ParseError, match=re.escape(problem)) as error:
        read_json(tmp_path / "x.json")
    assert str(error.value).startswith(f"{tmp_path}/x.json: ")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read(tmp_path / "x.json")


def test_what_is_within_the_bounds_is_read(tmp_path: Path) -> None:
    most = MOST_DEPTH - 2
    text = (
        '\ufeff{"a": [1, -2.5, 1000000000000000019884624838656, "é", null], "b": '
        + "[" * most
        + "]" * most
        + "}"
    )
    (tmp_path / "x.json").write_text(text)
    assert read_json(tmp_path / "x.json")["a"] == [1, -2.5, 10**30 + 19884624838656, "é", None]
    assert parse_json('{"score": NaN}', "line 1", finite=False)["score"] != 0


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 100)
    for path, most, problem in [
        (tmp_path / "pipe", 10, "is not a regular file"),  # and nothing waits for its writer
        (tmp_path, 10, "is not a regular file"),
        (tmp_path / "large", 99, "has 100 bytes; at most 99"),
        (tmp_path / "none", 10, "No such file"),
        (Path("a\0b"), 10, r"a\\x00b: cannot be read: .*embedded null"),
    ]:
        with pytest.raises(ParseError, match=problem):
            read_json(path, most)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"a = " + DEEP, "nested too deeply"),
        (b"a" + b".a" * 200 + b" = 1", "nested too deeply"),
        (b"a" + b" . a" * 60_000, "has 240,001 bytes; at most 131,072"),
        (
            b'"a b".' * 20_000 + b"a = 1",
            "nested too deeply",
        ),  # a parser may take the square of the time
        (b"a .\t" * 20_000 + b"a = 1", "nested too deeply"),
        (b"[train]\nsteps = 1" + b"0" * 5000, "Exceeds the limit"),
        (b"[train]\nsteps = 1" + b"0" * 100, "more than 40 digits"),
        (b"[train]\nsteps = 1\nsteps = 2", "Cannot overwrite a value"),
        (b"\xff", "can't decode byte 0xff"),
        (b"[train", "Expected"),
    ],
)
def test_toml_beyond_the_bounds_is_a_problem_of_the_configuration(
    text: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_bytes(text)
    with pytest.raises(ParseError, match=problem):
        read_toml(tmp_path / "x.toml")
    with pytest.raises(ConfigError, match=problem) as error:
        load(["--config", str(tmp_path / "x.toml")])
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    "line",
    [DEEP, b'{"text": 1' + b"0" * 5000 + b"}", b'{"text": "a", "text": "b"}', b'{"\x1b": 1}'],
)
def test_a_line_of_text_beyond_the_bounds_is_named(line: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a", "score": NaN}\n' + line)
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: invalid JSON ") as error:
        list(find_text(tmp_path / "x.jsonl").pieces())
    assert str(error.value).isprintable()


def test_numbers_of_a_list_are_no_deep_key(tmp_path: Path) -> None:
    numbers = " ".join(f"1.{n}" for n in range(128))
    text = f"longrope: short-factor={numbers}, long-factor={numbers}"
    (tmp_path / "x.toml").write_text(f"[model]\nrope-scaling = '{text}'")
    assert len(read_toml(tmp_path / "x.toml")["model"]["rope-scaling"].split()) > 256
