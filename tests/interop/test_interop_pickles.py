"""Pickles that would do harm do nothing, and are refused by name; those of torch.save are read as torch reads them."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import math
import os
import pickle
import resource
import struct
import subprocess
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import FileTensor, read_all, read_box
from threed.interop.pickles import pickle_reader
from threed.interop.pickles.pickle_reader import (
    MOST_OBJECTS,
    PickledObject,
    PickleReader,
    number,
)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def look(value: Any, path: Path) -> Any:
    torch.save(value, path)
    return read(path)


def read(path: Path, first: int = 0, last: int | None = None) -> Any:
    return PickleReader().torch_file(path, first, last)


def read_bare(path: Path) -> Any:
    return PickleReader().bare(path)


# --------------------------------------------------------------------------------------------------- what there is


class Settings:
    """A class of a program's own."""

    def __init__(self) -> None:
        self.layers, self.nested = 3, {"a": [1, 2.5, None, float("inf")]}


def test_values_are_those_that_were_saved(tmp_path: Path) -> None:
    table = collections.OrderedDict(a=1, b=True)
    value = {
        "weight": torch.arange(12.0).view(3, 4), 7: "seven", (1, "x"): [2**40, -1.5, float("nan")], "table": table,
        "settings": Settings(), "names": argparse.Namespace(tp=2), "more": types.SimpleNamespace(x=(1, 2)),
        "size": torch.Size([2, 3]), "bytes": b"abc", "set": {3}, "dtype": torch.bfloat16,
    }  # fmt: skip
    found = look(value, tmp_path / "x.pt")
    assert torch.equal(read_all(found["weight"]), value["weight"])
    assert (found[7], found[1, "x"][:2]) == ("seven", [2**40, -1.5])
    assert math.isnan(found[1, "x"][2])
    assert (found["table"], found["size"], found["set"]) == ({"a": 1, "b": True}, (2, 3), [3])
    assert isinstance(found["settings"], PickledObject)
    assert found["settings"].name.endswith("test_interop_pickles.Settings")
    assert found["settings"].state == {"layers": 3, "nested": {"a": [1, 2.5, None, float("inf")]}}
    assert (found["names"].state, found["more"].state) == ({"tp": 2}, {"x": (1, 2)})
    assert (found["names"].name, found["more"].name) == (
        "argparse.Namespace",
        "types.SimpleNamespace",
    )


TENSORS = {
    "a view": torch.arange(20.0)[3:15].view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "every other": torch.arange(12.0)[1::2],
    "no dimension": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "expanded": torch.tensor([1.0]).expand(4),
    "parameter": torch.nn.Parameter(torch.randn(2, 3)),
}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_tensors_are_read_as_torch_reads_them(dtype: torch.dtype, tmp_path: Path) -> None:
    value = {
        name: tensor.to(dtype) if name != "parameter" else tensor
        for name, tensor in TENSORS.items()
    }
    found = look(value, tmp_path / "x.pt")
    for name, want in value.items():
        assert torch.equal(read_all(found[name]), want), name
        start = tuple(n // 3 for n in want.shape)
        some = want[tuple(slice(first, None) for first in start)]
        assert torch.equal(read_box(found[name], start, some.shape), some), name
    assert number(found["no dimension"]) == float(value["no dimension"])


def test_a_part_of_a_file_may_be_one_of_its_own(tmp_path: Path) -> None:
    parts = []
    for n in (3, 70):
        buffer = io.BytesIO()
        torch.save(torch.arange(float(n)), buffer)
        parts.append(buffer.getvalue())
    (tmp_path / "x").write_bytes(b"before!" + b"".join(parts))
    first, middle = 7, 7 + len(parts[0])
    found = [read(tmp_path / "x", first, middle), read(tmp_path / "x", middle)]
    assert [read_all(tensor).tolist() for tensor in found] == [list(range(3)), list(range(70))]


# ------------------------------------------------------------------------------------------------------------- harm


HARM: dict[str, Any] = {
    "os.system": lambda mark: Call(os.system, f"touch {mark}"),
    "a process": lambda mark: Call(subprocess.call, ["touch", str(mark)]),
    "eval": lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Call(open, str(mark), "w"),
    "exec": lambda mark: Call(exec, f"open({str(mark)!r}, 'w')"),
    "import": lambda mark: Call(__import__, "antigravity"),
    "getattr": lambda mark: Call(getattr, "text", "upper"),
    "in a tensor": lambda mark: {
        "module": {"w": torch.ones(2), "x": Call(os.system, f"touch {mark}")}
    },
}


@pytest.mark.parametrize("kind", HARM)
def test_what_would_do_harm_is_refused_by_name_and_not_run(kind: str, tmp_path: Path) -> None:
    torch.save(HARM[kind](tmp_path / "mark"), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"it names [\w.]+, which no checkpoint needs"):
        read(tmp_path / "x.pt")
    bare = (
        pickle.dumps(HARM[kind](tmp_path / "mark"))
        if kind != "in a tensor"
        else b"cposix\nsystem\n(S'true'\ntR."
    )
    (tmp_path / "bare").write_bytes(bare)
    with pytest.raises(CheckpointError, match=r"it names [\w.]+, which no checkpoint needs"):
        read_bare(tmp_path / "bare")
    assert not (tmp_path / "mark").exists()


def test_a_member_of_an_enum_is_read_as_python_3_11_2_writes_it(tmp_path: Path) -> None:
    found = look({"format": Call(getattr, torch.nn.Linear, "forward")}, tmp_path / "x.pt")
    assert found["format"].name == "torch.nn.modules.linear.Linear"
    assert found["format"].args == ("forward",)


def test_functions_of_other_packages_are_names(tmp_path: Path) -> None:
    found = look(Call(torch.hub.load, "somebody/something", "model"), tmp_path / "x.pt")
    assert (found.name, found.args) == ("torch.hub.load", ("somebody/something", "model"))


def bomb() -> bytes:
    """Lists of lists of lists, which are few bytes of pickle."""
    value: Any = ["x"]
    for _ in range(30):
        value = [value, value]
    return pickle.dumps(value)


DAMAGE: dict[str, tuple[bytes, str]] = {
    "more than fits": (bomb(), "more in it than any checkpoint"),
    "a long text": (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.", "cannot be read|ended with"),
    "not a pickle": (b"hello", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "cut off": (pickle.dumps(list(range(1000)))[:500], "cannot be read"),
    "an extension": (b"\x80\x02\x82\x01.", "cannot be read"),
    "a reference": (pickle.dumps(1)[:2] + b"Pstorage\n.", "refers to an object that is not in it"),
}


@pytest.mark.parametrize("share", [100, pytest.param(1, marks=pytest.mark.grid)])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind: str, share: int, tmp_path: Path) -> None:
    """With a share of the limits, because reaching them takes up to 20 s; with all of them in the grid."""
    data, problem = DAMAGE[kind]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match=problem):
        PickleReader(MOST_OBJECTS // share).bare(tmp_path / "x")


def test_files_that_are_not_torchs_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"by torch before 1\.6: save it again"):
        read(tmp_path / "old.pt")
    torch.save({"a": torch.ones(300)}, tmp_path / "new.pt")
    data = (tmp_path / "new.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.pt cannot be read"):
        read(tmp_path / "cut.pt")
    with (
        zipfile.ZipFile(tmp_path / "new.pt") as old,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed,
    ):
        for name in old.namelist():
            packed.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        read(tmp_path / "packed.pt")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read(tmp_path / "none.pt")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    old = b"K\x00K\x04\x85"  # offset 0, size (4,)
    assert data.count(old) == 1
    (tmp_path / "y.pt").write_bytes(data.replace(old, b"K\x01K\x04\x85"))
    with pytest.raises(CheckpointError, match=r"y\.pt"):
        read(tmp_path / "y.pt")
    place = read(tmp_path / "x.pt")
    assert isinstance(place, FileTensor)
    with pytest.raises(CheckpointError, match=r"\[3\] at \[2\] of a tensor of shape \[4\]"):
        read_box(place, (2,), (3,))


@pytest.mark.parametrize("rows", [2**11, 2**40])
def test_a_tensor_whose_values_lie_on_one_another_takes_no_memory(
    rows: int, tmp_path: Path
) -> None:
    torch.save(torch.zeros(1, 1024, dtype=torch.bfloat16).expand(rows, 1024), tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError,
        match=rf"x\.pt cannot be read: a tensor of \[{rows}, 1024\] has only 1024 values",
    ):
        read(tmp_path / "x.pt")


# ----------------------------------------------------------------------------------------------------------- limits


MANY = 100_000
THING = b"ccollections\nCounter\n"  # a class that is kept as a name
BOMBS: dict[str, tuple[bytes, str]] = {
    "a tuple in a tuple, as a key": (b"}" + b"(" + b")" + b"\x85" * 10**6 + b"Nu.", "a tuple with"),
    "a tuple of itself twice": (b"}" + b"(" + b")" + b"2\x86" * 60 + b"Nu.", "a tuple with more items"),
    "lists in lists": (b"]" * 10**5 + b"a" * (10**5 - 1) + b".", "nested too deeply"),
    "a list in itself": (b"]q\x00h\x00a.", "nested too deeply"),
    "sets": (b"(" + b"\x8f" * (MANY * 150) + b"l.", "more in it than any checkpoint"),
    "texts": (
        b"(\x8d" + struct.pack("<Q", 10**6) + b"x" * 10**6 + b"q\x00" + b"h\x00" * 10**6 + b"l.",
        "more in it than any checkpoint",
    ),
    "copies of arguments": (
        THING + b"q\x00(" + b"N" * 4000 + b"tq\x010(" + b"h\x00h\x01R" * MANY + b"l.",
        "more in it than any checkpoint",
    ),
    "copies of a dictionary": (
        b"ccollections\nOrderedDict\nq\x00(}q\x01(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(1000))
        + b"u" + b"h\x00h\x01\x85R" * MANY + b"l.",
        "more in it|format of Python 2",
    ),
    "copies of arguments of a known function": (
        b"ccollections\nOrderedDict\nq\x00(" + b"N" * MANY + b"tq\x010(" + b"h\x00h\x01R" * MANY + b"l.",
        "more arguments than any checkpoint",
    ),
    "copies of bytes": (
        b"(\x8d" + struct.pack("<Q", 10**7) + b"x" * 10**7 + b"q\x00" + b"c_codecs\nencode\nq\x01"
        + b"h\x01h\x00\x85R" * 1000 + b"l.",
        "more in it than any checkpoint",
    ),
    "long names": (b"ca" + b"a" * 10**6 + b"\nb\n.", "a longer name than any checkpoint"),
    "many long names": (
        b"(\x8c\xffm" + b"m" * 254 + b"q\x00" + b"".join(b"h\x00\x8c\x05%05d\x93" % n for n in range(MANY)) + b"l.",
        "more names than any checkpoint",
    ),
    "a long integer": (b"\x8b" + struct.pack("<i", 10**6) + b"\x01" * 10**6 + b".", "an integer of more"),
    "named arguments": (THING + b")}\x92.", "the opcode NEWOBJ_EX, which no checkpoint needs"),
}  # fmt: skip


@pytest.mark.seldom("texts-10", "copies of arguments-10")
@pytest.mark.parametrize("share", [10, pytest.param(1, marks=pytest.mark.grid)])
@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_refused_within_bounds_of_memory(kind: str, share: int, tmp_path: Path) -> None:
    """With a share of the limits, as above."""
    data, problem = BOMBS[kind]
    (tmp_path / "x").write_bytes(data)
    run_ranks(1, refused_within, tmp_path / "x", problem, share)


def refused_within(path: Path, problem: str, share: int) -> None:
    """Reads in a process with 2 GiB more address space than it has; or a share of that, and 256 MiB for arenas."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2**31 // share + 2**28 * (share > 1)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with pytest.raises(CheckpointError, match=problem):
        PickleReader(MOST_OBJECTS // share).bare(path)


def test_names_and_indexes_are_data(tmp_path: Path) -> None:
    """20,000 names need no classes, and an index of 2**31 no memory."""
    names = [b"ca\nb%d\n" % n for n in range(20_000)]
    (tmp_path / "x").write_bytes(b"(" + b"".join(names) + b"lr\xff\xff\xff\x7f.")
    found = read_bare(tmp_path / "x")
    assert [thing.name for thing in found] == [f"a.b{n}" for n in range(20_000)]


def test_a_name_is_kept_once(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(
        b"(\x8c\xff" + b"m" * 255 + b"q\x00\x8c\x01cq\x01" + b"h\x00h\x01\x93" * MANY + b"l."
    )
    found = [one for one in read_bare(tmp_path / "x") if isinstance(one, PickledObject)]
    assert len(found) == MANY
    assert len({id(thing.name) for thing in found}) == 1


def test_limits_are_for_all_files_of_a_reader(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps([None] * 1000))
    reader = PickleReader(most_objects=5000)
    assert [len(reader.bare(tmp_path / "x")) for _ in range(2)] == [1000, 1000]
    with pytest.raises(CheckpointError, match="more in it than any checkpoint"):
        reader.bare(tmp_path / "x")


def test_a_large_directory_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        for n in range(80):
            file.writestr("a" * 60_000 + str(n), b"")
    data = (tmp_path / "x.pt").read_bytes()
    end = data.rindex(b"PK\x05\x06")
    first = struct.unpack("<I", data[end + 16 : end + 20])[0]
    size = struct.pack("<II", 2**25 + end - first, first)
    padded = data[:end] + b"\0" * 2**25 + data[end : end + 12] + size + data[end + 20 :]
    (tmp_path / "x.pt").write_bytes(padded)
    with pytest.raises(CheckpointError, match="its directory is larger than that of any"):
        read(tmp_path / "x.pt")


STATE = b"}X\x04\x00\x00\x00pathX\x0b\x00\x00\x00/etc/passwds"
CLASS = b"ctorch._utils\n_rebuild_tensor_v2\n"


def test_a_pickle_cannot_change_where_a_tensor_is(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:-1] + STATE + b"b." if name.endswith(".pkl") else data)
    found = read(tmp_path / "y.pt")
    assert found.path == tmp_path / "y.pt"
    assert torch.equal(read_all(found), torch.arange(4.0))


@pytest.mark.parametrize("name", [b"ctorch\nSize\n", CLASS, b"ccollections\nOrderedDict\n", THING])
@pytest.mark.parametrize("change", [b"b", b"N\x86b", b"0a", b"(Nu"])
def test_a_pickle_cannot_change_a_class(name: bytes, change: bytes, tmp_path: Path) -> None:
    before = {known: dict(vars(of)) for known, of in pickle_reader.KNOWN.items()}
    (tmp_path / "x").write_bytes(name + STATE + change + b".")
    with contextlib.suppress(CheckpointError):
        read_bare(tmp_path / "x")
    assert {known: dict(vars(of)) for known, of in pickle_reader.KNOWN.items()} == before
