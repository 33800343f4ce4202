"""Reads pickles as data, without executing anything in them. Tensors are read on demand.

    reader = PickleReader()
    state = reader.torch_file(Path("mp_rank_00_model_states.pt"))      # a file of torch.save
    index = reader.bare(Path(".metadata"))                             # a file with only a pickle
    read_box(state["module"]["lm_head.weight"], (0, 0), (1, 100))      # reads values on demand

A pickle is a program for a stack machine: opcodes name functions and call them. This reader is safe
against malicious pickles for three reasons:

- No function that a pickle names is imported or called. `find_class` returns a `PickledObject` with
  the name. If a pickle calls it and `KNOWN` has a replacement for the name, the replacement is
  called; replacements build tensors and containers. For other names, the result of the call is a
  `PickledObject` with the arguments. Names in the standard library that no checkpoint needs raise
  an error.
- Time and memory are bounded by the size of the pickle and its number of opcodes: no opcode copies
  more than a few arguments, no opcode hashes nested tuples, and each name is stored once.
- The number of opcodes is limited before a pickle is loaded, and the number of values afterwards.
  These limits apply to the total of all files of one reader.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import FileTensor, read_all

# With these limits, the objects of a reader use less than 1.5 GB of memory, and the strings less
# than 1 GB (4 bytes per character).
MOST_BYTES = 2**28  # limit on the bytes of all pickles of one reader
MOST_OBJECTS = 12_000_000  # limit on the number of opcodes plus values in all pickles of one reader
MOST_DEPTH = 40  # limit on the nesting depth of values
MOST_BITS = 1024  # limit on the number of bits of an integer
# limit on dimensions of a tensor, items of a tuple key, and arguments of a `KNOWN` call
MOST_DIMENSIONS = 16
MOST_NAME = 1000  # limit on the characters of the name of a class or function
MOST_NAMES = 2**22  # limit on the characters of all such names in a file
MOST_DIRECTORY = 2**24  # limit on the bytes of a zip file's directory
MOST_EXPANDED = 2**20  # limit on the elements of a tensor that repeats values (stride 0)

# Opcodes that no checkpoint needs; a pickle with one of them is refused.
REFUSED = "INST OBJ DICT EXT1 EXT2 EXT4 NEWOBJ_EX NEXT_BUFFER READONLY_BUFFER".split()
HEADER = b"PK\x03\x04"  # first bytes of each record (file) in a zip file
TOO_MUCH = "it has more in it than any checkpoint"
STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Bool": torch.bool,
}  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in (*STORAGES.values(), torch.uint8)}
# Modules and names in the standard library that pickles of checkpoints need. Names in other
# packages are always accepted; no name is imported.
HARMLESS = {
    "argparse", "collections", "copyreg", "datetime", "decimal", "enum", "fractions", "pathlib", "signal", "types",
    "uuid", "_io.BytesIO", "_codecs.encode", "builtins.int", "builtins.float", "builtins.str", "builtins.bool",
    "builtins.bytes", "builtins.bytearray", "builtins.complex", "builtins.slice", "builtins.range", "builtins.object",
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------- names and calls


@dataclass(slots=True, eq=False, repr=False)
class PickledObject:
    """A class or function that a pickle names, or the result of calling this class or function.

    If the result is an object of a subclass of list or dict, its items are dropped.

    Attributes:
        name: the full name of the class or function.
        args: the arguments of the call; empty if the class or function is not called.
        state: the state that the pickle stores for the object: a dict of its attributes, or the
            return value of its `__getstate__`. None without a stored state.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __repr__(self) -> str:
        return self.name

    def extend(self, values: Any) -> None:
        """Discards the items that a pickle adds to the object."""

    append = extend


def _call_result(function: Any, args: Any) -> Any:
    """Returns the result of a call in a pickle, without calling the named function.

    If `KNOWN` has a replacement for the function's name, the replacement is called. Otherwise the
    result is a `PickledObject` with the function's name and the arguments.

    Args:
        function: the `PickledObject` that is called.
        args: the tuple of arguments.

    Raises:
        ValueError: if `function` is not a `PickledObject`, or `args` is not a tuple or is too long.
    """
    if not isinstance(function, PickledObject) or type(args) is not tuple:
        raise ValueError("it calls an object that is not a function")
    known = KNOWN.get(function.name)
    if known is None:
        return PickledObject(function.name, args)
    if len(args) > MOST_DIMENSIONS:  # Python copies the arguments, which needs memory
        raise ValueError("it calls a function with more arguments than any checkpoint")
    return known(*args)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> FileTensor:
    """Replaces torch._utils._rebuild_tensor, _rebuild_tensor_v2 and _rebuild_tensor_v3.

    Only _rebuild_tensor_v3 has an argument for the dtype; otherwise the storage has the dtype.
    """
    numbers = (offset, *size, *stride)
    if len(numbers) > 2 * MOST_DIMENSIONS or not all(
        type(n) is int and 0 <= n < 2**63 for n in numbers
    ):
        raise ValueError("a tensor has no valid shape")
    if not isinstance(storage, FileTensor):
        raise ValueError("a tensor has no storage")
    named = len(more) > 2 and isinstance(more[2], PickledObject)
    dtype = DTYPES[more[2].name] if named else storage.dtype
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    reach = 0 if 0 in size else 1 + last
    if (offset + reach) * dtype.itemsize > math.prod(storage.shape) * storage.dtype.itemsize:
        raise ValueError("a tensor extends beyond its storage")
    if math.prod(size) > max(reach, MOST_EXPANDED):
        raise ValueError(f"a tensor of {list(size)} has only {reach} values in the file")
    return FileTensor(storage.path, dtype, tuple(size), tuple(stride), offset, storage.first)


def _empty_dict(*args: Any) -> dict[Any, Any]:
    """Replaces constructors of dictionaries. A pickle adds the items with later opcodes."""
    if any(isinstance(arg, (dict, list, tuple)) for arg in args):
        raise ValueError("it has a dictionary in the format of Python 2")
    return {}


def _first_argument(*args: Any) -> Any:
    """Replaces functions that convert or wrap their first argument, such as torch.Size and set.

    Returns the argument unchanged; without arguments, returns an empty list.
    """
    return args[0] if args else []


def _member(owner: Any, name: Any, *more: Any) -> PickledObject:
    """Replaces getattr, which Python 3.11.0 to 3.11.3 use to pickle the members of enums."""
    if not isinstance(owner, PickledObject) or type(name) is not str or more:
        raise ValueError(
            "it names builtins.getattr, which no checkpoint needs: it may be made to do harm"
        )
    return PickledObject(owner.name, (name,))


KNOWN: dict[str, Callable[..., Any]] = {
    "builtins.getattr": _member,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _first_argument,
    "torch._utils._rebuild_parameter_with_state": _first_argument,
    "torch._tensor._rebuild_from_type_v2": lambda name, _, args, *state: _call_result(name, args),
    "torch.Size": _first_argument,
    "collections.OrderedDict": _empty_dict,
    "collections.defaultdict": _empty_dict,
    "builtins.dict": _empty_dict,
    **dict.fromkeys(
        [f"builtins.{name}" for name in ("set", "frozenset", "list", "tuple")], _first_argument
    ),
}


# ------------------------------------------------------------------------------------------------------------- reading


PURE: Any = pickle._Unpickler  # the implementation in Python; Any, as it has no annotations


class _Unpickler(PURE):
    """Python's unpickler, changed so that names and calls become data, and sets become lists.

    Args:
        data: the bytes of the pickle.
        archive: the torch.save file that contains the pickle and its tensors; None for a pickle
            without tensors.
    """

    def __init__(self, data: bytes, archive: _Archive | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._archive = archive
        self._names: dict[str, str] = {}
        self._room = MOST_NAMES

    def find_class(self, module: str, name: str) -> PickledObject:
        """Returns a `PickledObject` with the full name; imports nothing.

        Raises ValueError if it is a name in the standard library that no checkpoint needs.
        """
        # Pickles of protocol 2 have Python 2's names, which are translated here.
        module, name = NAME_MAPPING.get((module, name), (module, name))
        module = IMPORT_MAPPING.get(module, module)
        full, top = f"{module}.{name}", module.partition(".")[0]
        if len(full) > MOST_NAME:
            raise ValueError("it has a longer name than any checkpoint")
        if top in sys.stdlib_module_names and full not in KNOWN and not {full, top} & HARMLESS:
            why = "which no checkpoint needs: it may be malicious"
            raise ValueError(f"it names {full}, {why}")
        if full not in self._names:
            self._room -= len(full)
            if self._room < 0:
                raise ValueError("it has more names than any checkpoint")
            self._names[full] = full
        return PickledObject(self._names[full])

    def persistent_load(self, pid: Any) -> FileTensor:
        """Returns the tensor storage with the persistent id `pid`, as a 1-D tensor [n]."""
        if self._archive is None or type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
            raise ValueError("it refers to an object that is not in it")
        kind, key = pid[1:3]
        if type(key) is not str or not isinstance(kind, PickledObject):
            raise ValueError("a tensor's storage has no name")
        dtype = STORAGES.get(kind.name.rpartition(".")[2].removesuffix("Storage"), torch.uint8)
        first, last = self._archive.span(f"data/{key}")
        shape = ((last - first) // dtype.itemsize,)
        return FileTensor(self._archive.path, dtype, shape, (1,), 0, first)

    def _call(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = _call_result(self.stack[-1], args)

    def _set_state(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], PickledObject):
            self.stack[-1].state = state

    def _set_item(self) -> None:
        value = self.stack.pop()
        self._put([self.stack.pop(), value])

    def _set_items(self) -> None:
        self._put(self.pop_mark())

    def _put(self, items: list[Any]) -> None:
        """Stores items in the dictionary on top of the stack.

        If a `PickledObject` is on top of the stack instead, the items are dropped.

        Args:
            items: keys and values in turn: key, value, key, value, ...
        """
        for key, value in zip(items[::2], items[1::2], strict=True):
            nested = isinstance(key, tuple) and any(isinstance(part, tuple) for part in key)
            if nested or (isinstance(key, tuple) and len(key) > MOST_DIMENSIONS):
                raise ValueError("it has a key that is a tuple with more items than any checkpoint")
            if type(self.stack[-1]) is dict:
                self.stack[-1][key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        **PURE.dispatch,
        pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.BUILD[0]: _set_state,
        pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items,
        pickle.EMPTY_SET[0]: PURE.load_empty_list, pickle.ADDITEMS[0]: PURE.load_appends,
        pickle.FROZENSET[0]: PURE.load_list,
    }  # fmt: skip


def _check_opcodes(data: bytes, allowed: int) -> int:
    """Returns the number of opcodes of a pickle.

    Raises:
        ValueError: if there are more than `allowed` opcodes, or an opcode that no checkpoint needs.
    """
    count = 0
    for opcode, arg, _ in pickletools.genops(data):
        count += 1
        if count > allowed:
            raise ValueError(TOO_MUCH)
        if opcode.name in REFUSED:
            raise ValueError(f"it has the opcode {opcode.name}, which no checkpoint needs")
        if isinstance(arg, int) and arg.bit_length() > MOST_BITS:
            raise ValueError(f"it has an integer of more than {MOST_BITS} bits")
    return count


def _count(value: Any, allowed: int, depth: int = 0) -> int:
    """Returns how many values an object consists of: the object itself and all nested values.

    A value that occurs twice counts twice. Strings and bytes count in proportion to their length.

    Args:
        value: the object.
        allowed: maximum number of values.
        depth: number of containers around the object.

    Raises:
        ValueError: if there are more than `allowed` values, or they are nested too deeply.
    """
    count, inside = 1, tuple[Any, ...]()
    if isinstance(value, (str, bytes, bytearray)):
        count += len(value) // 32
    elif isinstance(value, dict):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple)):
        inside = tuple(value)
    elif isinstance(value, PickledObject):
        inside = (value.args, value.state)
    if inside and depth == MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    for item in inside:
        count += _count(item, allowed - count, depth + 1)
    if count > allowed:
        raise ValueError(TOO_MUCH)
    return count


# --------------------------------------------------------------------------------------------------------------- files


class _Window(io.RawIOBase):
    """Bytes [first, last) of a file as a file object, with which `zipfile` reads the directory."""

    def __init__(self, file: BinaryIO, first: int, last: int) -> None:
        self._file, self._first, self._size, self._at = file, first, last - first, 0

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = max(0, to + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._at)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > MOST_DIRECTORY:
            raise ValueError("its directory is larger than that of any checkpoint")
        self._file.seek(self._first + self._at)
        self._at += size
        return self._file.read(size)


class _Archive:
    """The output of torch.save, an uncompressed zip file, at bytes [first, last) of a file."""

    def __init__(self, file: BinaryIO, path: Path, first: int, last: int) -> None:
        self.path, self._file, self._first, self._last = path, file, first, last
        window = _Window(file, first, last)
        if window.read(4) != HEADER:
            fix = "save it again with a later version"
            raise ValueError(
                f"it is not a torch.save file, or was written by torch before 1.6: {fix}"
            )
        names = zipfile.ZipFile(window).infolist()
        self._records = {info.filename.partition("/")[2]: info for info in names}
        if len(self._records) < len(names) or "data.pkl" not in self._records:
            raise ValueError("it is not a torch.save file")
        if "byteorder" in self._records and self.data("byteorder", 64).strip() != b"little":
            raise ValueError("it was written on a big-endian machine")

    def span(self, name: str) -> tuple[int, int]:
        """Returns the byte range [first, last) of the zip record `name` in the file."""
        info = self._records.get(name)
        if info is None or info.compress_type or info.compress_size != info.file_size:
            raise ValueError("a record is missing or compressed")
        self._file.seek(self._first + info.header_offset)
        header = self._file.read(30)
        if len(header) < 30 or not header.startswith(HEADER):
            raise ValueError("it is damaged")
        first = self._first + info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if first + info.file_size > self._last:
            raise ValueError("it is truncated")
        return first, first + info.file_size

    def data(self, name: str, most: int) -> bytes:
        """Returns the bytes of a zip record; raises ValueError for more than `most` bytes."""
        first, last = self.span(name)
        if last - first > most:
            raise ValueError(f"its {name} is larger than that of any checkpoint")
        self._file.seek(first)
        data = self._file.read(last - first)
        if zlib.crc32(data) != self._records[name].CRC:
            raise ValueError("it is damaged")
        return data


class PickleReader:
    """Reads the pickles of one checkpoint.

    The limits in this module apply to the total of all files that one reader reads. The returned
    values consist of None, bool, int, float, str, bytes, tuple, dict, list, `PickledObject` and
    `FileTensor`. Sets become lists.

    Args:
        most_objects: limit on the number of opcodes plus values in all files.
    """

    def __init__(self, most_objects: int = MOST_OBJECTS) -> None:
        self._bytes, self._objects = MOST_BYTES, most_objects

    def torch_file(self, path: Path, first: int = 0, last: int | None = None) -> Any:
        """Returns the object that torch.save wrote to a file.

        Args:
            path: the file.
            first: offset of torch.save's output in the file, in bytes.
            last: offset of the end of this output, in bytes; None means the end of the file.

        Raises:
            CheckpointError: if the file cannot be read, is damaged or malicious, or exceeds the
                limits.
        """
        value = None
        with _opened(path, last or 0) as (file, size):
            archive = _Archive(file, path, first, size if last is None else last)
            value = self._load(archive.data("data.pkl", self._bytes), archive)
        return value

    def bare(self, path: Path) -> Any:
        """Returns the object in a file that contains only a pickle, without tensors.

        Raises CheckpointError in the same cases as `torch_file`.
        """
        value = None
        with _opened(path) as (file, _):
            value = self._load(file.read(self._bytes + 1), None)
        return value

    def _load(self, data: bytes, archive: _Archive | None) -> Any:
        self._bytes -= len(data)
        if self._bytes < 0:
            raise ValueError("its pickle is larger than that of any checkpoint")
        self._objects -= _check_opcodes(data, self._objects)
        value = _Unpickler(data, archive).load()
        self._objects -= _count(value, self._objects)
        return value


@contextmanager
def _opened(path: Path, end: int = 0) -> Iterator[tuple[BinaryIO, int]]:
    """Context manager that yields (open file, size of the file in bytes).

    Any error becomes a CheckpointError, including errors in the body of the `with` statement. A
    file with fewer than `end` bytes is an error, too.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not end <= size or not size:
                raise ValueError("it is truncated" if size else "it is empty")
            file.seek(0)
            yield file, size
    except Exception as error:  # a malicious file can make zipfile and pickle raise any exception
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {plain(why)}") from None


@contextmanager
def as_written_by(program: str, path: Path) -> Iterator[None]:
    """Context manager that turns errors from an unexpected layout into a CheckpointError.

    Args:
        program: the program whose checkpoint is read in the `with` statement, for the message.
        path: path of the checkpoint, for the message.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        text = f"{type(error).__name__}: {plain(error)}"
        raise CheckpointError(
            f"{path} does not have the layout of {program} checkpoints ({text})"
        ) from None


def number(value: Any) -> float | None:
    """Returns a pickled number or one-element tensor as a float; None for other values."""
    if isinstance(value, FileTensor) and math.prod(value.shape) == 1:
        return float(read_all(value).double())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None
