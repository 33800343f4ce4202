"""Pickles that would do harm do nothing, and are refused by name; those of torch.save are read as torch reads them."""

from __future__ import annotations

import argparse
import collections
import io
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from threed.checkpoint.files import CheckpointError
from threed.foreign import outliner
from threed.foreign.outlines import Job, Place, Thing, number, outline


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def look(value: Any, path: Path) -> Any:
    torch.save(value, path)
    return outline([Job(path)])[0]


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
    assert torch.equal(found["weight"].whole(), value["weight"])
    assert (found[7], found[1, "x"][:2]) == ("seven", [2**40, -1.5])
    assert math.isnan(found[1, "x"][2])
    assert (found["table"], found["size"], found["set"]) == ({"a": 1, "b": True}, [2, 3], [3])
    assert isinstance(found["settings"], Thing)
    assert found["settings"].name.endswith("test_foreign_outlines.Settings")
    assert found["settings"].state == {"layers": 3, "nested": {"a": [1, 2.5, None, float("inf")]}}
    assert (found["names"].state, found["more"].state) == ({"tp": 2}, {"x": [1, 2]})
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
        assert torch.equal(found[name].whole(), want), name
        some = found[name].read(want.numel() // 3, want.numel())
        assert torch.equal(some, want.reshape(-1)[want.numel() // 3 :]), name
    assert number(found["no dimension"]) == float(value["no dimension"])


def test_a_part_of_a_file_may_be_one_of_its_own(tmp_path: Path) -> None:
    parts = []
    for n in (3, 70):
        buffer = io.BytesIO()
        torch.save(torch.arange(float(n)), buffer)
        parts.append(buffer.getvalue())
    (tmp_path / "x").write_bytes(b"before!" + b"".join(parts))
    first, middle = 7, 7 + len(parts[0])
    jobs = [Job(tmp_path / "x", first, middle), Job(tmp_path / "x", middle)]
    assert [place.whole().tolist() for place in outline(jobs)] == [list(range(3)), list(range(70))]


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
        outline([Job(tmp_path / "x.pt")])
    bare = (
        pickle.dumps(HARM[kind](tmp_path / "mark"))
        if kind != "in a tensor"
        else b"cposix\nsystem\n(S'true'\ntR."
    )
    (tmp_path / "bare").write_bytes(bare)
    with pytest.raises(CheckpointError, match=r"it names [\w.]+, which no checkpoint needs"):
        outline([Job(tmp_path / "bare", kind="pickle")])
    assert not (tmp_path / "mark").exists()


def test_functions_of_other_packages_are_names(tmp_path: Path) -> None:
    found = look(Call(torch.hub.load, "somebody/something", "model"), tmp_path / "x.pt")
    assert (found.name, found.args) == ("torch.hub.load", ["somebody/something", "model"])


def bomb() -> bytes:
    """Lists of lists of lists, which are few bytes of pickle."""
    value: Any = ["x"]
    for _ in range(30):
        value = [value, value]
    return pickle.dumps(value)


DAMAGE: dict[str, tuple[bytes, str]] = {
    "more than fits": (bomb(), "more in it than any checkpoint"),
    "a large memo": (b"\x80\x04Nr\xff\xff\xff\x7f.", "cannot be read|ended with"),
    "a long text": (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.", "cannot be read|ended with"),
    "not a pickle": (b"hello", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "cut off": (pickle.dumps(list(range(1000)))[:500], "cannot be read"),
    "an extension": (b"\x80\x02\x82\x01.", "cannot be read"),
    "a reference": (pickle.dumps(1)[:2] + b"Pstorage\n.", "refers to what is not in it"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(kind: str, tmp_path: Path) -> None:
    data, problem = DAMAGE[kind]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match=problem):
        outline([Job(tmp_path / "x", kind="pickle")])


def test_files_that_are_not_torchs_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"of a version before 1\.6: save it again"):
        outline([Job(tmp_path / "old.pt")])
    torch.save({"a": torch.ones(300)}, tmp_path / "new.pt")
    data = (tmp_path / "new.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.pt cannot be read"):
        outline([Job(tmp_path / "cut.pt")])
    with (
        zipfile.ZipFile(tmp_path / "new.pt") as old,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed,
    ):
        for name in old.namelist():
            packed.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        outline([Job(tmp_path / "packed.pt")])
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        outline([Job(tmp_path / "none.pt")])


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    old = b"K\x00K\x04\x85"  # offset 0, size (4,)
    assert data.count(old) == 1
    (tmp_path / "y.pt").write_bytes(data.replace(old, b"K\x01K\x04\x85"))
    with pytest.raises(CheckpointError, match=r"y\.pt"):
        outline([Job(tmp_path / "y.pt")])
    place = outline([Job(tmp_path / "x.pt")])[0]
    assert isinstance(place, Place)
    with pytest.raises(CheckpointError, match="elements 2 to 5 of a tensor of 4"):
        place.read(2, 5)


@pytest.mark.parametrize("rows", [2**11, 2**40])
def test_a_tensor_whose_values_lie_on_one_another_takes_no_memory(
    rows: int, tmp_path: Path
) -> None:
    torch.save(torch.zeros(1, 1024, dtype=torch.bfloat16).expand(rows, 1024), tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError, match=rf"x\.pt: a tensor of \[{rows}, 1024\] has only 1024 values"
    ):
        outline([Job(tmp_path / "x.pt")])


# ----------------------------------------------------------------------------------------------------------- limits

PROBE = """
import json, os, socket, sys
sys.path.insert(0, {folder!r})
import outliner
left, said = outliner.cut_off(), {{}}
def attempt(name, action):
    try:
        said[name] = str(action() or "done")
    except BaseException as error:
        said[name] = type(error).__name__
def fill():
    with open({mark!r}, "ab", buffering=0) as file:
        file.write(b"x" * 10)
attempt("write", fill)
attempt("memory", lambda: len(bytearray(3 * 2**30)))
attempt("network", lambda: socket.create_connection(("127.0.0.1", {port}), 5))
outliner.refuse_events({{{mark!r}}})
attempt("open", lambda: open("/etc/hostname").close())
attempt("write again", lambda: open({mark!r}, "ab").close())
attempt("run", lambda: os.system("true"))
attempt("fork", os.fork)
attempt("allowed", lambda: open({mark!r}, "rb").close())
os.write(1, json.dumps([left, said]).encode())
"""


def test_the_process_can_do_nothing_but_read_its_files(tmp_path: Path) -> None:
    (tmp_path / "mark").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as server:
        folder, port = str(Path(outliner.__file__).parent), server.getsockname()[1]
        program = PROBE.format(folder=folder, mark=str(tmp_path / "mark"), port=port)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=100
        )
    assert done.returncode == 0, done.stderr.decode()
    left, said = json.loads(done.stdout)
    assert (tmp_path / "mark").read_bytes() == b""
    assert (said.pop("network") == "done") == any("network" in text for text in left)
    assert said == {
        "write": "OSError", "memory": "MemoryError", "open": "RuntimeError", "write again": "RuntimeError",
        "run": "RuntimeError", "fork": "RuntimeError", "allowed": "done",
    }  # fmt: skip
