"""Reads a Hugging Face folder: its configuration, and its tensors by our names, as a `TensorSource`.

    folder = HFFolder(Path("Llama-3.1-8B"))       # CheckpointError for what is no such folder, or is not understood
    for problem in folder.problems(): ...         # what of its tensors does not fit its configuration
    folder.tensor("weight", "blocks.3.attention.query.weight").read((0, 0), out)

Files are mapped into memory; each is opened when something in it is first read. Both spellings of names are read: of a
model with its head (`model.layers...`) and of a base model (`layers...`); a tied head may be there too, or alone.
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

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import LazyTensor, Shape, read_slabs
from threed.checkpoint.manifest import MANIFEST
from threed.data.tokenizer_files import VOCABULARY_NAMES, folder_files
from threed.interop.huggingface.layouts import (
    HEAD,
    Entry,
    entries,
    model_of,
    name_problems,
    our_shapes,
)
from threed.parse import ParseError, read_json
from threed.sharding import slices
from threed.zero.records import WEIGHT

ADAPTER = "adapter_config.json"
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Header = tuple[str, Shape]  # dtype, as safetensors spells it, and shape


def is_hf_folder(path: Path) -> bool:
    """Returns whether a folder is one of Hugging Face's, by its files."""
    return not (path / MANIFEST).is_file() and (
        (path / CONFIG).is_file() or (path / INDEX).is_file()
    )


def has_weights(path: Path) -> bool:
    """Returns whether a folder of Hugging Face's has weights that are read."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


class HFTensors(ABC):
    """The tensors of a model of Hugging Face's, as a `TensorSource`.

    Attributes:
        path: the folder that they are in.
        config: their configuration as it is.
        model: that configuration as keys of ours; `seq` is the longest sequence.
        table: the names and shapes of their tensors, and which of ours each consists of.
        shapes, parts: of our tensors, by our names.
    """

    def __init__(self, path: Path, config: Path) -> None:
        self.path = path
        self.config = read_object(config)
        try:
            self.model = model_of(self.config)
        except CheckpointError as error:
            raise CheckpointError(f"{config}: {error}") from None
        names = self._open_all()
        if self.model.layers > len(names):  # before a table is made of so many
            raise CheckpointError(
                f"{path}: its configuration has {self.model.layers} layers, and it has fewer tensors"
            )
        self.table = entries(self.model)
        self.shapes = our_shapes(self.table)
        self.parts: dict[str, Sequence[str]] = dict.fromkeys(self.shapes, (WEIGHT,))
        self._entries = {name: entry for entry in self.table for name, _ in entry.ours}
        self._record = self.model.layout
        self._bare = not any(name.startswith(self._record.prefix) for name in names)
        self._stands_for: dict[str, str] = {}
        embedding = self._spelt(self._record.rules[0].hf)
        if self.model.tied and HEAD in names and embedding not in names:
            self._stands_for[embedding] = HEAD

    @abstractmethod
    def _open_all(self) -> set[str]:
        """Returns the names of all tensors."""

    @abstractmethod
    def _find(self, found: dict[str, Header]) -> Iterator[str]:
        """Puts every tensor into `found`; yields what is wrong with the files."""

    @abstractmethod
    def _theirs(self, part: str, key: str) -> LazyTensor:
        """Returns a part of a tensor by its name in the files."""

    # ------------------------------------------------------------------------------------------------------- checks

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with its files, and what of their tensors is missing, unexpected or misshaped."""
        found: dict[str, Header] = {}
        yield from self._find(found)
        wanted = {self._key(entry): entry.shape for entry in self.table}
        unused = self._left_out() | ({HEAD} if self.model.tied else set())
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
                yield f"{name} in {self.path} is {plain(found[name][0])}: there are {', '.join(DTYPES)}; dequantise it"
                return
        extra_head = self.model.tied and HEAD in found and HEAD not in wanted
        if extra_head and read.keys() == wanted.keys():
            yield from self._head_problems(found)

    def _head_problems(self, found: Mapping[str, Header]) -> Iterator[str]:
        """Yields whether the head of a tied model, where a file has it too, is another than its embedding."""
        embedding = self._key(self.table[0])
        slabs = (read_slabs(self._theirs(WEIGHT, name)) for name in (HEAD, embedding))
        same = found[HEAD] == found[embedding]
        if not same or not all(torch.equal(*both) for both in zip(*slabs, strict=True)):
            yield (
                f"{HEAD} in {self.path} is another tensor than {embedding}, and its configuration ties both:"
                ' set "tie_word_embeddings" to false there, or leave the head out'
            )

    # -------------------------------------------------------------------------------------------------------- names

    def _spelt(self, name: str) -> str:
        return name.removeprefix(self._record.prefix) if self._bare else name

    def _key(self, entry: Entry) -> str:
        """Returns the name of an entry in the files."""
        name = self._spelt(entry.name)
        return self._stands_for.get(name, name)

    def _left_out(self) -> set[str]:
        """Returns names of buffers that old versions saved, which models compute."""
        blocks, names = map(str, range(self.model.layers)), self._record.buffers
        return {self._spelt(name.replace("{i}", block)) for block in blocks for name in names}

    # ------------------------------------------------------------------------------------------------------ reading

    def tensor(self, part: str, name: str) -> LazyTensor:
        """Returns a part of one of our tensors."""
        entry = self._entries[name]
        return entry.part(name, self._theirs(part, self._key(entry)))


@dataclass(frozen=True, eq=False)
class _Mapped:
    """A tensor of a mapped file."""

    values: Any  # a slice of safetensors

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.values.get_dtype()]

    @property
    def shape(self) -> Shape:
        return tuple(self.values.get_shape())

    def read(self, start: Shape, out: Tensor) -> None:
        out.copy_(self.values[slices(start, out.shape)])


class HFFolder(HFTensors):
    """A folder of safetensors with its configuration.

    Attributes:
        steps: of its training, which the folder does not have.
    """

    steps = 0

    def __init__(self, path: Path) -> None:
        if (path / ADAPTER).exists():
            fix = f"merge it into the weights first (PEFT's merge_and_unload), or remove {ADAPTER}"
            raise CheckpointError(f"{path} has an adapter, which is not read: {fix}")
        super().__init__(path, path / CONFIG)

    def tokenizer(self, fix: str) -> str:
        """Returns the folder, as `--data.tokenizer`.

        Raises:
            CheckpointError: it has no tokenizer; the message ends with `fix`.
        """
        if not folder_files(self.path).vocabulary:
            raise CheckpointError(f"the folder has no tokenizer ({VOCABULARY_NAMES}): {fix}")
        return str(self.path.absolute())

    def _open_all(self) -> set[str]:
        self._places = _places(self.path)
        self._files: dict[str, Any] = {}
        return set(self._places or _contents(self._open(SINGLE)))

    def _find(self, found: dict[str, Header]) -> Iterator[str]:
        for file in dict.fromkeys(self._places.values()) or [SINGLE]:
            inside = _contents(self._open(file))
            named = {name for name, place in self._places.items() if place == file} or set(inside)
            if others := sorted(named ^ set(inside)):
                some = plain(", ".join(others[:10]))
                yield f"{self.path / file} and {INDEX} do not name the same tensors: {some}"
            found |= inside

    def _theirs(self, part: str, key: str) -> LazyTensor:
        file = self._places.get(key, "") if self._places else SINGLE
        try:
            return _Mapped(self._open(file).get_slice(key))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file} cannot be read: {plain(error)}") from None

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = _open(self.path / file)
        return self._files[file]


# ---------------------------------------------------------------------------------------------------------------- files


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; CheckpointError for another thing."""
    try:
        return read_json(path)
    except ParseError as error:
        raise CheckpointError(str(error)) from None


def _places(path: Path) -> dict[str, str]:
    """Returns the file of every tensor, as the index says; nothing where there is one file only."""
    if (path / SINGLE).exists():
        return {}
    if not (path / INDEX).exists():
        pickled = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{path} has its weights as {plain(pickled[0])}, which can run any code when it is read: have"
                " transformers write safetensors, where you trust it (from_pretrained, then save_pretrained)"
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
                f"{path / INDEX} names {plain(file)}, which is no safetensors file of its folder"
            )
    return places


def _open(file: Path) -> Any:
    try:
        # through links, which a cache of downloads is made of
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError("it is no plain file")
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {plain(error)}") from None


def _contents(handle: Any) -> dict[str, Header]:
    """Returns dtype and shape of every tensor of an open file."""
    found = ((key, handle.get_slice(key)) for key in list(handle.keys()))
    return {key: (values.get_dtype(), tuple(values.get_shape())) for key, values in found}
