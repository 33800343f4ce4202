"""The program that looks at pickles: a process of its own, which needs nothing but the standard library.

    python -I -S outliner.py < jobs.json        a line of JSON about itself, then one for each job

A job is [file, first byte, last byte, kind]; kind "zip" is what torch.save writes, "pickle" is a bare one. The answer
is {"ok": value} or {"error": text}. In a value a tensor is {"$tensor": [dtype, shape, stride, first element, first byte
of its storage in the file, bytes of it]}, any other object of a class {"$object": name, "args": [...], "state": ...}.

Nothing that a pickle names is looked up or called: each name stands for a class that keeps what it is given, or for a
few functions of this file. Where that should have a hole, these remain, set before the first byte is read: no memory
beyond 2 GiB, no CPU time beyond some minutes, no byte written to a file, no new process, no network where Linux lets a
user give it up, and an audit hook that refuses every event but reading the files of the jobs.
"""

from __future__ import annotations

import codecs
import collections
import ctypes
import io
import json
import math
import os
import pickle
import resource
import struct
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterable
from typing import Any, BinaryIO

MEMORY, CPU_S = 2**31, 300
MOST_PICKLE = 2**28  # bytes
MOST_NODES, MOST_DEPTH = 3_000_000, 40
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000

STORAGES = {
    "Double": "F64", "Float": "F32", "BFloat16": "BF16", "Half": "F16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL",
}  # fmt: skip
TYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
# Of the standard library: all others are refused by name. Classes of other packages are kept as names.
HARMLESS = {
    "argparse", "collections", "copyreg", "datetime", "decimal", "enum", "fractions", "pathlib", "signal",
    "types", "uuid", "_io.BytesIO",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- what names mean


class Thing:
    """An object of a class that is not looked up: what it was made of."""

    title = ""
    args: list[Any]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **more: Any) -> Thing:
        made = object.__new__(cls)
        made.args, made.state, made.items = [*args, *([more] if more else [])], None, []
        return made

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append([key, value])

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.items.extend(values)


class Table(dict[Any, Any]):
    """A dictionary of a subclass."""

    def __init__(self, *args: Any, **more: Any) -> None:
        if args and isinstance(args[-1], (dict, list, tuple)):  # a defaultdict has a factory before
            self.update(args[-1])

    def __setstate__(self, state: Any) -> None:
        pass  # attributes, such as the versions in a state_dict


class Storage:
    """The bytes of tensors: where they are in the file."""

    def __init__(self, dtype: str, first: int, nbytes: int) -> None:
        self.dtype, self.first, self.nbytes = dtype, first, nbytes


class Tensor:
    """A view of a storage."""

    def __init__(
        self, storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None
    ) -> None:
        if not isinstance(storage, Storage):
            raise ValueError("a tensor has no storage")
        self.place = [
            dtype or storage.dtype,
            list(size),
            list(stride),
            offset,
            storage.first,
            storage.nbytes,
        ]
        if not all(
            type(n) is int and n >= 0 for some in (*self.place[1:3], self.place[3:]) for n in some
        ):
            raise ValueError("a tensor has no valid place or shape")

    def __setstate__(self, state: Any) -> None:
        pass


def rebuild_v2(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
    """Stands for torch._utils._rebuild_tensor and its second version."""
    return Tensor(storage, offset, size, stride)


def rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> Tensor:
    """Stands for torch._utils._rebuild_tensor_v3, which names the dtype."""
    return Tensor(storage, offset, size, stride, TYPES[dtype.title])


def rebuild_typed(function: Any, kind: Any, args: Any, *state: Any) -> Any:
    """Stands for torch._tensor._rebuild_from_type_v2: calls none but the two above."""
    return function(*args) if function in (rebuild_v2, rebuild_v3) else Thing(function, kind, args)


def first_of(value: Any, *more: Any) -> Any:
    """Stands for what wraps its first argument, such as a parameter."""
    return value


def reconstruct(kind: Any, *more: Any) -> Any:
    """Stands for copyreg._reconstructor: an object that has its attributes and nothing else."""
    return kind.__new__(kind) if isinstance(kind, type) and issubclass(kind, Thing) else Thing()


def encode(text: str, *more: Any) -> bytes:
    """Stands for _codecs.encode, by which old protocols spell bytes."""
    return text.encode("latin1")


KNOWN = {
    "torch._utils._rebuild_tensor": rebuild_v2,
    "torch._utils._rebuild_tensor_v2": rebuild_v2,
    "torch._utils._rebuild_tensor_v3": rebuild_v3,
    "torch._tensor._rebuild_from_type_v2": rebuild_typed,
    "torch._utils._rebuild_parameter": first_of,
    "torch._utils._rebuild_parameter_with_state": first_of,
    "torch.Size": tuple,
    "collections.OrderedDict": Table,
    "collections.defaultdict": Table,
    "copyreg._reconstructor": reconstruct,
    "_codecs.encode": encode,
}
BUILTINS = {
    "set": set,
    "frozenset": frozenset,
    "list": list,
    "tuple": tuple,
    "dict": Table,
    "int": Thing,
    "float": Thing,
}
BUILTINS |= dict.fromkeys(
    ("str", "bool", "bytes", "bytearray", "complex", "slice", "range", "object"), Thing
)


def meaning(module: str, name: str, made: dict[str, Any]) -> Any:
    """Returns what stands for a name; ValueError for one that no checkpoint needs."""
    module, name = NAME_MAPPING.get(
        (module, name), (module, name)
    )  # old pickles have Python 2's names
    module = IMPORT_MAPPING.get(module, module)
    full, top = f"{module}.{name}", module.partition(".")[0]
    if full in KNOWN:
        return KNOWN[full]
    builtin = module == "builtins" and name in BUILTINS
    if builtin and BUILTINS[name] is not Thing:
        return BUILTINS[name]
    if (
        not builtin
        and full not in HARMLESS
        and top not in HARMLESS
        and top in sys.stdlib_module_names
    ):
        raise ValueError(f"it names {full}, which no checkpoint needs: it may be made to do harm")
    if full not in made:
        made[full] = type("Thing", (Thing,), {"title": full})
    return made[full]


# -------------------------------------------------------------------------------------------------------------- files


class Window(io.RawIOBase):
    """Bytes [first, last) of a file, as a file."""

    def __init__(self, file: BinaryIO, first: int, last: int) -> None:
        self.file, self.first, self.size, self.at = file, first, last - first, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, to: int, whence: int = 0) -> int:
        self.at = max(0, to + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, out: Any) -> int:
        self.file.seek(self.first + self.at)
        data = self.file.read(max(0, min(len(out), self.size - self.at)))
        out[: len(data)] = data
        self.at += len(data)
        return len(data)


class Outliner(pickle.Unpickler):
    """Unpickles into things; records: of the zip file around it, by name."""

    def __init__(
        self, file: BinaryIO, window: Any = None, records: Any = None, prefix: str = ""
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self.window, self.records, self.prefix = window, records, prefix
        self.made: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        return meaning(module, name, self.made)

    def persistent_load(self, pid: Any) -> Storage:
        if (
            self.records is None
            or not isinstance(pid, tuple)
            or len(pid) < 5
            or pid[0] != "storage"
        ):
            raise ValueError("it refers to what is not in it")
        kind = getattr(pid[1], "title", "").rpartition(".")[2].removesuffix("Storage")
        info = self.records.get(f"{self.prefix}/data/{pid[2]}")
        if info is None or info.compress_type or info.compress_size != info.file_size:
            raise ValueError("a tensor's bytes are not there, or compressed")
        self.window.seek(info.header_offset)
        header = self.window.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ValueError("it is damaged")
        first = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if first + info.file_size > self.window.size:
            raise ValueError("it is cut off")
        return Storage(STORAGES.get(kind, "U8"), self.window.first + first, info.file_size)


def outline(file: BinaryIO, first: int, last: int, kind: str) -> Any:
    """Returns the value of a job, as JSON has it."""
    window = Window(file, first, last)
    if kind == "pickle":
        if window.size > MOST_PICKLE:
            raise ValueError("it is larger than any index")
        return Encoder().encode(Outliner(io.BytesIO(window.read(window.size))).load())
    if window.read(4) != b"PK\x03\x04":
        raise ValueError(
            "it is no file of torch.save, or of a version before 1.6: save it again with a later one"
        )
    records = {
        info.filename: info for info in zipfile.ZipFile(io.BufferedReader(window)).infolist()
    }
    names = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(names) != 1:
        raise ValueError("it is no file of torch.save")
    prefix, info = names[0].removesuffix("/data.pkl"), records[names[0]]
    order = records.get(f"{prefix}/byteorder")
    if (
        info.compress_type
        or (order is not None and order.compress_type)
        or info.file_size > MOST_PICKLE
    ):
        raise ValueError("its pickle is compressed, or larger than any")
    archive = zipfile.ZipFile(io.BufferedReader(Window(file, first, last)))
    if order is not None and archive.read(order).strip() != b"little":
        raise ValueError("it was written on a big-endian machine")
    return Encoder().encode(
        Outliner(io.BytesIO(archive.read(info)), Window(file, first, last), records, prefix).load()
    )


class Encoder:
    """Turns values into what JSON has, within bounds: a few bytes of pickle can stand for more than fits anywhere."""

    def __init__(self) -> None:
        self.nodes = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ValueError("it has more in it than any checkpoint")
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else {"$int": "long"}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": len(value)}
        if depth > MOST_DEPTH:
            return {"$deep": True}
        if isinstance(value, dict):
            return self.table(value, depth + 1)
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.encode(item, depth + 1) for item in value]
        if isinstance(value, Tensor):
            return {"$tensor": value.place}
        if isinstance(value, Thing):
            args, state = self.encode(value.args, depth + 1), self.encode(value.state, depth + 1)
            return {"$object": value.title, "args": args, "state": state}
        return {"$class": getattr(value, "title", "")}

    def table(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(item, depth) for key, item in value.items()}
        return {
            "$dict": [
                [self.encode(key, depth + 1), self.encode(item, depth)]
                for key, item in value.items()
            ]
        }


# ------------------------------------------------------------------------------------------------------------- limits


def cut_off() -> list[str]:
    """Gives up memory, time, files, processes and, where it may, the network; returns what it could not."""
    left = []
    for name, most in (("AS", MEMORY), ("CPU", CPU_S), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0)):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (AttributeError, OSError, ValueError) as error:
            left.append(f"limit {name}: {error}")
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) and libc.unshare(
            CLONE_NEWUSER | CLONE_NEWNET
        ):  # as root, or as any user
            raise OSError(os.strerror(ctypes.get_errno()))
    except (AttributeError, OSError) as error:
        left.append(f"network: {error}")
    return left


def refuse_events(paths: set[str]) -> None:
    """Lets this process do nothing more that Python audits, but read these files."""
    free = {"pickle.find_class", "object.__getattr__", "object.__setattr__", "struct.unpack"}

    def check(event: str, args: Any) -> None:
        reads = (
            event == "open"
            and args[0] in paths
            and not (args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        )
        if event not in free and not reads:
            raise RuntimeError(f"it tries to {event} {args[0] if args else ''}".strip())

    sys.addaudithook(check)


def main() -> None:
    """Prints, as lines of JSON, outlines of the pickles that standard input lists, once this process is cut off."""
    jobs = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    codecs.lookup("cp437")  # of names in zip files: nothing is imported later
    print(json.dumps({"left": cut_off()}), file=out)
    refuse_events({job[0] for job in jobs})
    opened: collections.OrderedDict[str, BinaryIO] = collections.OrderedDict()
    for name, first, last, kind in jobs:
        try:
            if name not in opened:
                if len(opened) >= 64:
                    opened.popitem(last=False)[1].close()
                opened[name] = open(name, "rb")  # noqa: SIM115
            text = json.dumps({"ok": outline(opened[name], first, last, kind)})
        except MemoryError:
            text = json.dumps(
                {"error": f"it needs more than {MEMORY >> 30} GiB of memory to be looked at"}
            )
        except RecursionError:
            text = json.dumps({"error": "it is nested too deeply"})
        except Exception as error:
            text = json.dumps({"error": f"{error}" or type(error).__name__})
        print(text, file=out, flush=True)


if __name__ == "__main__":
    main()
