"""Reads a Hugging Face folder: configuration and tensors, as a `TensorSource` with native names.

    folder = HFFolder(Path("Llama-3.1-8B"))    # raises CheckpointError if not supported
    for problem in folder.problems(): ...      # texts about mismatches of tensors and configuration
    folder.tensor("weight", "blocks.3.attention.query.weight").read((0, 0), out)

Files are memory-mapped; each file is opened when it is first needed. The files of a model with a
head have tensor names with a prefix (`model.layers...`); the files of a base model have names
without this prefix (`layers...`). If head and embedding are tied, the files may contain the head,
the embedding or both.
"""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from threed.checkpoint.files import CheckpointError, plain, reading
from threed.checkpoint.lazy_tensors import LazyTensor, Shape, read_slabs
from threed.checkpoint.manifest import MANIFEST
from threed.config.architectures.record import HF_BLOCK
from threed.core.parse import ParseError, read_json
from threed.data.tokenizer_files import VOCABULARY_NAMES, folder_files
from threed.distributed.sharding import slices
from threed.interop.huggingface.layouts import (
    HEAD,
    Entry,
    entries,
    model_of,
    name_problems,
    native_shapes,
    too_large,
    unequal,
)
from threed.zero.state import WEIGHT

ADAPTER = "adapter_config.json"
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Header = tuple[str, Shape]  # (dtype as in safetensors, such as "F32"; shape) of a tensor


def is_hf_folder(path: Path) -> bool:
    """Returns whether a folder has the files of a Hugging Face folder."""
    return not (path / MANIFEST).is_file() and (
        (path / CONFIG).is_file() or (path / INDEX).is_file()
    )


def has_weights(path: Path) -> bool:
    """Returns whether a Hugging Face folder has safetensors weights."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


class HFTensors(ABC):
    """Base class for the tensors of a Hugging Face model, as a `TensorSource`.

    Args:
        path: the folder or checkpoint that contains the tensors.
        config: the path of config.json.
        multi_token: whether to read the layers of multi-token prediction, if the files have them.

    Attributes:
        path: the folder or checkpoint that contains the tensors.
        config: the parsed content of config.json.
        model: the model configuration, where `seq` is the number of positions.
        table: one entry per Hugging Face tensor, with the native tensors that it consists of;
            without copies (`Rule.copy`) that the files do not have.
        shapes: shape of each native tensor, by native name.
        parts: names of the saved parts of each native tensor (weight, exp_avg, exp_avg_sq), by
            native name.

    Raises:
        CheckpointError: if the configuration or the files are not supported or cannot be read.
    """

    def __init__(self, path: Path, config: Path, multi_token: bool = True) -> None:
        self.path = path
        self.config = read_object(config)
        try:
            self.model = model_of(self.config)
        except CheckpointError as error:
            raise CheckpointError(f"{config}: {error}") from None
        names = self._open_files()
        self._record = self.model.layout
        self._is_base_model = not any(name.startswith(self._record.prefix) for name in names)
        further = self._of_blocks(names, self.model.layers, self.model.mtp_depth)
        self._left_out = set() if multi_token else further
        if not (further and multi_token):
            # transformers keeps the number of these layers in the configuration, but not the layers
            self.model = self.model.model_copy(update={"mtp_depth": 0})
        if what := too_large(self.model, len(names) + self._stacked_rows(names)):
            raise CheckpointError(f"{path}: its configuration has {what}, but it has fewer tensors")
        self.table = [
            entry
            for entry in entries(self.model)
            if not entry.rule.copy or self._name_in_files(entry.name) in names
        ]
        self.shapes = native_shapes(self.table)
        self.parts: dict[str, Sequence[str]] = dict.fromkeys(self.shapes, (WEIGHT,))
        self._entries = {
            name: entry for entry in self.table if not entry.rule.copy for name, _ in entry.native
        }
        self._aliases: dict[str, str] = {}
        embedding = self._name_in_files(self._record.rules[0].hf)
        if self.model.tied and HEAD in names and embedding not in names:
            self._aliases[embedding] = HEAD

    @abstractmethod
    def _open_files(self) -> set[str]:
        """Opens the files, and returns the names of all tensors in the files."""

    @abstractmethod
    def _read_headers(self, found: dict[str, Header]) -> Iterator[str]:
        """Adds every tensor's header to `found`, by name; yields error texts about the files."""

    @abstractmethod
    def _hf_tensor(self, part: str, key: str) -> LazyTensor:
        """Returns one part of the tensor that has the name `key` in the Hugging Face files."""

    # ------------------------------------------------------------------------------------------------------- checks

    def problems(self) -> Iterator[str]:
        """Yields an error text for each problem of the files and tensors.

        Problems are tensors that are missing or unexpected, or that have a wrong shape or an
        unsupported dtype.
        """
        found: dict[str, Header] = {}
        yield from self._read_headers(found)
        wanted = {self._key(entry): entry.shape for entry in self.table}
        unused = self._ignored_buffers() | self._left_out | ({HEAD} if self.model.tied else set())
        read = {
            name: shape
            for name, (_, shape) in found.items()
            if name in wanted or name not in unused
        }
        for problem in name_problems(read, wanted):
            yield f"{self.path} does not fit its configuration: {plain(problem, 3000)}"
        if HEAD in wanted and HEAD not in found:
            yield f"{HEAD} is missing in {self.path}: a base model has no head; save the model with its language head"
        for name in wanted:
            if name in found and found[name][0] not in DTYPES:
                yield f"{name} in {self.path} is {plain(found[name][0])}: supported are {', '.join(DTYPES)}; dequantize it"
                return
        if read.keys() == wanted.keys():
            yield from self._copy_problems(found, wanted)

    def _copy_problems(
        self, found: Mapping[str, Header], wanted: Mapping[str, Shape]
    ) -> Iterator[str]:
        """Yields an error text for each copy of a shared weight that has other values."""
        embedding = self._key(self.table[0])
        has_extra_head = self.model.tied and HEAD in found and HEAD not in wanted
        if has_extra_head and not self._are_equal(HEAD, embedding, found):
            yield (
                f"{HEAD} in {self.path} differs from {embedding}, but its configuration ties them:"
                ' set "tie_word_embeddings" to false there, or remove the head'
            )
        for entry in self.table:
            if entry.rule.copy:
                original = self._key(self._entries[entry.native[0][0]])
                if not self._are_equal(self._key(entry), original, found):
                    yield f"{self.path}: {unequal(entry, self.table)}; remove the tensor"

    def _are_equal(self, name: str, other: str, found: Mapping[str, Header]) -> bool:
        """Returns whether two tensors in the files have the same dtype, shape and values."""
        slabs = (read_slabs(self._hf_tensor(WEIGHT, one)) for one in (name, other))
        same = found[name] == found[other]
        return same and all(torch.equal(*both) for both in zip(*slabs, strict=True))

    def _stacked_rows(self, names: set[str]) -> int:
        """Returns the number of experts' tensors in the files that are stacked in others."""
        ends = tuple(rule.hf.partition("{i}")[2] for rule in self._record.rules if rule.stacked)
        stacks = (self._hf_tensor(WEIGHT, name).shape for name in names if name.endswith(ends))
        return sum(shape[0] for shape in stacks if shape)

    # -------------------------------------------------------------------------------------------------------- names

    def _of_blocks(self, names: set[str], first: int, count: int) -> set[str]:
        """Returns the names of tensors of `count` blocks, from block number `first` on."""
        blocks = [HF_BLOCK.replace("{i}", str(first + n)) for n in range(count)]
        prefixes = tuple(self._name_in_files(f"{block}.") for block in blocks)
        return {name for name in names if name.startswith(prefixes)}

    def _name_in_files(self, name: str) -> str:
        return name.removeprefix(self._record.prefix) if self._is_base_model else name

    def _key(self, entry: Entry) -> str:
        """Returns the name under which the files store an entry's Hugging Face tensor."""
        name = self._name_in_files(entry.name)
        return self._aliases.get(name, name)

    def _ignored_buffers(self) -> set[str]:
        """Returns names of buffers that old versions of transformers saved, and threed ignores."""
        blocks = map(str, range(self.model.layers + self.model.mtp_depth))
        names = self._record.buffers
        return {
            self._name_in_files(name.replace("{i}", block)) for block in blocks for name in names
        }

    # ------------------------------------------------------------------------------------------------------ reading

    def tensor(self, part: str, name: str) -> LazyTensor:
        """Returns one part (weight, exp_avg, ...) of the native tensor `name`."""
        entry = self._entries[name]
        return entry.native_part(name, self._hf_tensor(part, self._key(entry)))


@dataclass(frozen=True, eq=False)
class _Mapped:
    """A tensor in a memory-mapped file."""

    values: Any  # the result of safetensors' `get_slice`, from which slices of the tensor are read

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.values.get_dtype()]

    @property
    def shape(self) -> Shape:
        return tuple(self.values.get_shape())

    def read(self, start: Shape, out: Tensor) -> None:
        out.copy_(self.values[slices(start, out.shape)])


class HFFolder(HFTensors):
    """A Hugging Face folder: config.json and safetensors files.

    Args:
        path: the folder.
        multi_token: see `HFTensors`.

    Attributes:
        steps: number of completed training steps; always 0, because the folder does not store it.

    Raises:
        CheckpointError: if the folder has an adapter or no safetensors, or if its model is not
            supported.
    """

    steps = 0

    def __init__(self, path: Path, multi_token: bool = True) -> None:
        if (path / ADAPTER).exists():
            fix = f"merge it into the weights first (PEFT's merge_and_unload), or remove {ADAPTER}"
            raise CheckpointError(f"{path} has an adapter, which is not supported: {fix}")
        super().__init__(path, path / CONFIG, multi_token)

    def tokenizer(self, fix: str) -> str:
        """Returns the folder's path, as a value for `--data.tokenizer`.

        Args:
            fix: the suggested fix; appended to the error message.

        Raises:
            CheckpointError: if the folder has no tokenizer.
        """
        if not folder_files(self.path).vocabulary:
            raise CheckpointError(f"the folder has no tokenizer ({VOCABULARY_NAMES}): {fix}")
        return str(self.path.absolute())

    def _open_files(self) -> set[str]:
        self._places = _places(self.path)
        self._files: dict[str, Any] = {}
        return set(self._places or _contents(self._open(SINGLE)))

    def _read_headers(self, found: dict[str, Header]) -> Iterator[str]:
        for file in dict.fromkeys(self._places.values()) or [SINGLE]:
            inside = _contents(self._open(file))
            named = {name for name, place in self._places.items() if place == file} or set(inside)
            if others := sorted(named ^ set(inside)):
                some = plain(", ".join(others[:10]))
                yield f"{self.path / file} and {INDEX} do not name the same tensors: {some}"
            found |= inside

    def _hf_tensor(self, part: str, key: str) -> LazyTensor:
        file = self._places.get(key, "") if self._places else SINGLE
        with reading(self.path / file, SafetensorError, OSError):
            return _Mapped(self._open(file).get_slice(key))

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = _open(self.path / file)
        return self._files[file]


# ---------------------------------------------------------------------------------------------------------------- files


def read_object(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file as a dict.

    Raises CheckpointError if the file cannot be read or does not contain a JSON object.
    """
    try:
        return read_json(path)
    except ParseError as error:
        raise CheckpointError(str(error)) from None


def _places(path: Path) -> dict[str, str]:
    """Returns tensor name -> name of the file that contains it, from the index of the shards.

    Returns an empty dict if the folder has the single file model.safetensors instead of shards.
    """
    if (path / SINGLE).exists():
        return {}
    if not (path / INDEX).exists():
        pickled = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{path} has its weights as {plain(pickled[0])}, which can run any code when it is read: if you trust"
                " it, convert it to safetensors with transformers (from_pretrained, then save_pretrained)"
            )
        raise CheckpointError(f"{path} has no weights: neither {SINGLE} nor {INDEX}")
    places = read_object(path / INDEX).get("weight_map")
    named = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    if not named or not places:
        raise CheckpointError(
            f"{path / INDEX}: its weight_map must have the name of a file for every tensor"
        )
    for file in dict.fromkeys(places.values()):
        if Path(file).name != file or not file.isprintable() or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path / INDEX} names {plain(file)}, which is not a safetensors file in its folder"
            )
    return places


def _open(file: Path) -> Any:
    with reading(file, SafetensorError, OSError):
        # A link to a regular file is accepted (`stat` follows it), because the files in download
        # caches are links.
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError("it is not a regular file")
        return safe_open(file, framework="pt")


def _contents(handle: Any) -> dict[str, Header]:
    """Returns (dtype, shape) of every tensor in an open file, by tensor name."""
    found = ((key, handle.get_slice(key)) for key in list(handle.keys()))
    return {key: (values.get_dtype(), tuple(values.get_shape())) for key, values in found}
