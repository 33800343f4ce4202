"""Reads pickled files as data: nothing in them is executed, and tensors stay in their files.

    reader = PickleReader()
    state = reader.torch_file(Path("mp_rank_00_model_states.pt"))      # a file of torch.save
    index = reader.bare(Path(".metadata"))                             # a bare pickle
    read_box(state["module"]["lm_head.weight"], (0, 0), (1, 100))      # values, read on demand

A pickle is a program for a stack machine. It is harmless here for three reasons:

- `find_class` imports nothing. Every name stands for a class of this module: a few have a meaning (tensors, OrderedDict,
  torch.Size), all others are `Thing`, which keeps its arguments and its state. Names of the standard library that no
  checkpoint needs are refused.
- No class here calls what it is given, or copies it beyond its arguments. Memory is therefore in proportion to the number
  of opcodes and arguments.
- These are counted before the pickle is loaded, and values afterwards, with limits for all files of one reader.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import FileTensor, read_all

# Limits: memory of the objects is below 1.5 GB, and of texts below 1 GB (4 bytes per character).
MOST_BYTES = 2**28  # of the pickles that one reader reads
MOST_OBJECTS = 12_000_000  # opcodes and values that one reader reads
MOST_DEPTH = 40  # of values
MOST_NESTED = 4096  # items of a tuple on all levels: its hash is computed recursively, in C
MOST_CLASSES = 10_000
MOST_BITS = 1024  # of an integer
MOST_DIMENSIONS = 16
MOST_NAME = 1000  # characters of the name of a class
MOST_DIRECTORY = 2**24  # bytes of the directory of a zip file
MOST_EXPANDED = 2**20  # elements of a tensor that has fewer values in its file

STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Bool": torch.bool,
}  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in (*STORAGES.values(), torch.uint8)}
# Names of the standard library that checkpoints need; classes of other packages are never refused.
HARMLESS = {
    "argparse", "collections", "copyreg", "datetime", "decimal", "enum", "fractions", "pathlib", "signal", "types",
    "uuid", "_io.BytesIO", "_codecs.encode", "builtins.int", "builtins.float", "builtins.str", "builtins.bool",
    "builtins.bytes", "builtins.bytearray", "builtins.complex", "builtins.slice", "builtins.range", "builtins.object",
}  # fmt: skip


# ------------------------------------------------------------------------------------- classes that names stand for


class Thing:
    """An object of a class that is not imported; items of a subclass of list or dict are dropped.

    Attributes:
        name: the full name of the class.
        args: the arguments that it was made with.
        state: its attributes, or what its `__getstate__` returned; None if there are none.
    """

    __slots__ = ("args", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Any:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        """Does nothing: `__new__` has stored the arguments."""

    def __repr__(self) -> str:
        return self.name

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drops an item."""

    def append(self, value: Any) -> None:
        """Drops an item."""

    def extend(self, values: Any) -> None:
        """Drops items."""


class Table(dict[Any, Any]):
    """An OrderedDict, defaultdict or dict: pickles add its items one by one. Attributes are dropped."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        if any(isinstance(arg, (dict, list, tuple)) for arg in args):
            raise ValueError("it has a dictionary in the format of Python 2")

    def __setstate__(self, state: Any) -> None:
        """Drops attributes."""


class _Storage:
    """The bytes of tensors, by their place in a file."""

    __slots__ = ("dtype", "first", "nbytes", "path")

    def __init__(self, path: Path, dtype: torch.dtype, first: int, nbytes: int) -> None:
        self.path, self.dtype, self.first, self.nbytes = path, dtype, first, nbytes

    def __setstate__(self, state: Any) -> None:
        """Drops attributes."""


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> FileTensor:
    """Stands for torch._utils._rebuild_tensor, its second version, and its third one, which has a dtype as well."""
    if not isinstance(storage, _Storage) or len(_size(size)) != len(_size(stride)):
        raise ValueError("a tensor has no storage, or no valid shape")
    dtype = DTYPES[more[2].name] if len(more) > 2 and _is_class(more[2]) else storage.dtype
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    reach = 0 if 0 in size else reach
    if (_size((offset,))[0] + reach) * dtype.itemsize > storage.nbytes:
        raise ValueError("a tensor lies outside of the file")
    if math.prod(size) > max(reach, MOST_EXPANDED):
        raise ValueError(f"a tensor of {list(size)} has only {reach} values in the file")
    return FileTensor(storage.path, dtype, size, stride, offset, storage.first)


def _typed_tensor(function: Any, kind: Any, args: Any, *state: Any) -> FileTensor:
    """Stands for torch._tensor._rebuild_from_type_v2."""
    if function not in (_TENSOR, _PARAMETER):
        raise ValueError("a tensor is of a kind that is not read")
    return _tensor(*args) if function is _TENSOR else _parameter(*args)


def _parameter(value: Any, *more: Any) -> FileTensor:
    """Stands for torch._utils._rebuild_parameter."""
    if not isinstance(value, FileTensor):
        raise ValueError("a parameter has no tensor")
    return value


def _size(values: Any = ()) -> tuple[int, ...]:
    """Stands for torch.Size."""
    if type(values) is not tuple or len(values) > MOST_DIMENSIONS:
        raise ValueError("a shape is not one")
    if not all(type(n) is int and 0 <= n < 2**63 for n in values):
        raise ValueError("a shape has values that are not lengths")
    return values


def _items(values: Any = None) -> list[Any]:
    """Stands for set, frozenset, list and tuple, which pickles make of a list."""
    if values is not None and type(values) is not list:
        raise ValueError("a set is not made of a list")
    return [] if values is None else values


def _class_of(function: Callable[..., Any]) -> type[Thing]:
    """Returns a class whose instances are what a function returns."""
    return type("Thing", (Thing,), {"__slots__": (), "__new__": lambda cls, *args: function(*args)})


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Thing)


_TENSOR, _PARAMETER = _class_of(_tensor), _class_of(_parameter)
KNOWN: dict[str, type] = {
    "torch._utils._rebuild_tensor": _TENSOR,
    "torch._utils._rebuild_tensor_v2": _TENSOR,
    "torch._utils._rebuild_tensor_v3": _TENSOR,
    "torch._tensor._rebuild_from_type_v2": _class_of(_typed_tensor),
    "torch._utils._rebuild_parameter": _PARAMETER,
    "torch._utils._rebuild_parameter_with_state": _PARAMETER,
    "torch.Size": _class_of(_size),
    "collections.OrderedDict": Table,
    "collections.defaultdict": Table,
    "builtins.dict": Table,
    **{f"builtins.{name}": _class_of(_items) for name in ("set", "frozenset", "list", "tuple")},
}


class _Unpickler(pickle.Unpickler):
    """Unpickles into the classes of this module; archive: what persistent ids refer to."""

    def __init__(self, data: bytes, archive: _Archive | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._archive = archive
        self._classes: dict[str, type[Thing]] = {}

    def find_class(self, module: str, name: str) -> type:
        module, name = NAME_MAPPING.get((module, name), (module, name))  # Python 2's, in protocol 2
        module = IMPORT_MAPPING.get(module, module)
        if len(module) + len(name) > MOST_NAME:
            raise ValueError("it has a class with a longer name than any checkpoint")
        full, top = f"{module}.{name}", module.partition(".")[0]
        if full in KNOWN:
            return KNOWN[full]
        if top in sys.stdlib_module_names and not {full, top} & HARMLESS:
            raise ValueError(
                f"it names {full}, which no checkpoint needs: it may be made to do harm"
            )
        if full not in self._classes:
            if len(self._classes) == MOST_CLASSES:
                raise ValueError("it names more classes than any checkpoint")
            self._classes[full] = type("Thing", (Thing,), {"__slots__": (), "name": full})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> _Storage:
        if self._archive is None or type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
            raise ValueError("it refers to what is not in it")
        if type(pid[2]) is not str or len(pid[2]) > MOST_NAME:
            raise ValueError("a tensor's storage has no name")
        kind = pid[1].name if _is_class(pid[1]) else ""
        dtype = STORAGES.get(kind.rpartition(".")[2].removesuffix("Storage"), torch.uint8)
        first, last = self._archive.span(f"{self._archive.prefix}/data/{pid[2]}")
        return _Storage(self._archive.path, dtype, first, last - first)


# ------------------------------------------------------------------------------------------------------------ limits


def _check_opcodes(data: bytes, allowed: int) -> int:
    """Returns how many opcodes a pickle has, and arguments of calls, which Python copies.

    The stack is simulated with sizes for values: 1, and for a tuple the number of its items on all levels.

    Raises:
        ValueError: there are more than `allowed`, or an opcode would take memory or stack beyond the limits.
    """
    sizes, marks, memo, count = list[int](), list[int](), dict[int, int](), 0
    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        name, count = opcode.name, count + 1
        if count > allowed:
            raise ValueError("it has more in it than any checkpoint")
        if name.startswith("EXT") or name == "NEWOBJ_EX":
            raise ValueError(f"it has the opcode {name}, which no checkpoint needs")
        if isinstance(arg, int) and arg.bit_length() > MOST_BITS:
            raise ValueError(f"it has an integer of more than {MOST_BITS} bits")
        if name == "MARK":
            marks.append(len(sizes))
        elif name == "POP" and marks and marks[-1] == len(sizes):
            marks.pop()
        elif "PUT" in name or name == "MEMOIZE":
            index = len(memo) if name == "MEMOIZE" else arg
            if index > count or not sizes:
                raise ValueError("it numbers its objects with gaps, or none")
            memo[index] = sizes[-1]
        elif "GET" in name:
            if arg not in memo:
                raise ValueError("it refers to an object that it does not have")
            sizes.append(memo[arg])
        elif not opcode.stack_before:
            sizes += [1] * len(opcode.stack_after)
        else:
            items = _popped(opcode, sizes, marks)
            count += sum(items) if name in ("REDUCE", "NEWOBJ") else 0
            size = items[0] if name == "DUP" else 1
            if name.startswith("TUPLE") or name == "FROZENSET":
                size += sum(items)
            if size > MOST_NESTED:
                raise ValueError("it has a tuple with more items than any checkpoint")
            sizes += [size] * len(opcode.stack_after)
    return count


def _popped(opcode: pickletools.OpcodeInfo, sizes: list[int], marks: list[int]) -> list[int]:
    """Removes what an opcode takes from the stack, and returns it."""
    before = opcode.stack_before
    first = len(sizes)
    if pickletools.markobject in before:
        first = marks.pop() if marks else -1
        before = before[: before.index(pickletools.markobject)]
    first -= len(before)
    if first < 0:
        raise ValueError("it takes more from its stack than there is")
    items = sizes[first:]
    del sizes[first:]
    return items


def _count(value: Any, allowed: int, depth: int = 0) -> int:
    """Returns how many values are in a value, where what occurs twice counts twice; texts count by their length.

    Raises:
        ValueError: there are more than `allowed`, or they are nested too deeply.
    """
    count, inside = 1, tuple[Any, ...]()
    if isinstance(value, (str, bytes, bytearray)):
        count += len(value) // 32
    elif isinstance(value, dict):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = tuple(value)
    elif isinstance(value, Thing):
        inside = (value.args, value.state)
    if inside and depth == MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    for item in inside:
        count += _count(item, allowed - count, depth + 1)
    if count > allowed:
        raise ValueError("it has more in it than any checkpoint")
    return count


# ------------------------------------------------------------------------------------------------------------- files


class _Window(io.RawIOBase):
    """Bytes [first, last) of a file, as a file that is read in small pieces."""

    def __init__(self, file: BinaryIO, first: int, last: int) -> None:
        self._file, self._first, self._size, self._at = file, first, last - first, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = max(0, to + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._at)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > MOST_DIRECTORY:
            raise ValueError("its directory is larger than that of any checkpoint")
        self._file.seek(self._first + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


class _Archive:
    """A file of torch.save: the records of a zip file, which are not compressed."""

    def __init__(self, file: BinaryIO, path: Path, first: int, last: int) -> None:
        self.path, self._file, self._first, self._last = path, file, first, last
        window = _Window(file, first, last)
        if window.read(4) != b"PK\x03\x04":
            raise ValueError(
                "it is no file of torch.save, or of a version before 1.6: save it again with a later one"
            )
        self._records = {info.filename: info for info in zipfile.ZipFile(window).infolist()}
        names = [name for name in self._records if name.endswith("/data.pkl")]
        if len(names) != 1 or names[0].count("/") != 1:
            raise ValueError("it is no file of torch.save")
        self.prefix = names[0].removesuffix("/data.pkl")
        order = f"{self.prefix}/byteorder"
        if order in self._records and self.data("byteorder", 64).strip() != b"little":
            raise ValueError("it was written on a big-endian machine")

    def span(self, name: str) -> tuple[int, int]:
        """Returns the first and the last byte of a record in the file."""
        info = self._records.get(name)
        if info is None or info.compress_type or info.compress_size != info.file_size:
            raise ValueError("a record is not there, or compressed")
        self._file.seek(self._first + info.header_offset)
        header = self._file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ValueError("it is damaged")
        first = self._first + info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if first + info.file_size > self._last:
            raise ValueError("it is cut off")
        return first, first + info.file_size

    def data(self, name: str, most: int) -> bytes:
        """Returns the bytes of a record."""
        first, last = self.span(f"{self.prefix}/{name}")
        if last - first > most:
            raise ValueError(f"its {name} is larger than that of any checkpoint")
        self._file.seek(first)
        data = self._file.read(last - first)
        if zlib.crc32(data) != self._records[f"{self.prefix}/{name}"].CRC:
            raise ValueError("it is damaged")
        return data


class PickleReader:
    """Reads the files of one checkpoint, with limits for all of them together.

    Args:
        most_objects: opcodes and values, of all files.

    Values are None, bool, int, float, str, bytes, list, tuple, dict, set, `Thing` and `FileTensor`.
    """

    def __init__(self, most_objects: int = MOST_OBJECTS) -> None:
        self._bytes, self._objects = MOST_BYTES, most_objects

    def torch_file(self, path: Path, first: int = 0, last: int | None = None) -> Any:
        """Returns what torch.save wrote to a file, or to its bytes [first, last).

        Raises:
            CheckpointError: the file cannot be read, is damaged, harmful, or beyond the limits.
        """

        def load(file: BinaryIO, size: int) -> Any:
            archive = _Archive(file, path, first, size if last is None else last)
            return self._load(archive.data("data.pkl", self._bytes), archive)

        return self._opened(path, load, last or 0)

    def bare(self, path: Path) -> Any:
        """Returns what a pickle contains. Raises CheckpointError like `torch_file`."""
        return self._opened(path, lambda file, _: self._load(file.read(self._bytes + 1), None))

    def _opened(self, path: Path, load: Callable[[BinaryIO, int], Any], end: int = 0) -> Any:
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no plain file")
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if not end <= size or not size:
                    raise ValueError("it is cut off" if size else "it is empty")
                file.seek(0)
                return load(file, size)
        except OSError as error:
            why = error.strerror or str(error)
        except Exception as error:  # of a hostile file: whatever zipfile and pickle raise
            why = str(error) or type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {plain(why)}")

    def _load(self, data: bytes, archive: _Archive | None) -> Any:
        self._bytes -= len(data)
        if self._bytes < 0:
            raise ValueError("its pickle is larger than that of any checkpoint")
        self._objects -= _check_opcodes(data, self._objects)
        value = _Unpickler(data, archive).load()
        self._objects -= _count(value, self._objects)
        return value


@contextmanager
def as_written_by(program: str, path: Path) -> Iterator[None]:
    """Raises CheckpointError if the block fails because values that were read do not have the program's layout."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        text = f"{type(error).__name__}: {plain(error)}"
        raise CheckpointError(f"{path} is not as {program} writes checkpoints ({text})") from None


def number(value: Any, default: float | None = None) -> float | None:
    """Returns a number that was pickled as such, or as a tensor of one element."""
    if isinstance(value, FileTensor) and math.prod(value.shape) == 1:
        return float(read_all(value).double())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return default
