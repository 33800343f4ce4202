"""The files of a tokenizer in a folder: finding, hashing and copying them.

Use: `files = find_files("path/to/folder")` (or the path of a tokenizer.json); `files.hashes()`; `files.save_hf(out)`.

`PATTERNS` are the files that `transformers` reads and writes, all of them plain data. Code (`*.py`) and pickles are
neither read nor copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.parse import read_json

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIALS_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# Sets of files with a full vocabulary, in order of preference.
VOCABULARIES = (
    (JSON,),
    *((name,) for name in SENTENCEPIECE),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)
VOCABULARY_NAMES = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt"
PATTERNS = (
    JSON, CONFIG, SPECIALS_MAP, ADDED, *SENTENCEPIECE, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model.v*",
    "*.spm", "*.tiktoken", "tekken.json", "encoder.json", "vocab.bpe", "chat_template.jinja", "chat_template.json",
    "chat_templates/*.jinja", "additional_chat_templates/*.jinja", "*preprocessor_config.json", "processor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer in the folder `place`, by the names under which they are copied."""

    place: Path
    files: Mapping[str, Path]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The names of the files with the vocabulary; empty without a vocabulary."""
        return next(
            (names for names in VOCABULARIES if all(name in self.files for name in names)), ()
        )

    @property
    def spec(self) -> str:
        """The absolute path by which `find_files` finds these files again."""
        return str(self.files.get(JSON, self.place).absolute())

    def read(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file; empty without the file. Raises ValueError if it is not an object."""
        return read_json(self.files[name]) if name in self.files else {}

    def read_beside(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file of the model in the same folder; empty without the file."""
        path = self.place / name
        return read_json(path) if path.is_file() else {}

    def hashes(self) -> dict[str, str]:
        """Returns the sha256 of each file."""
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()
        }

    def save_hf(self, folder: Path, model_type: str | None = None) -> None:
        """Copies all files into `folder`."""
        # Read before anything is written: the folder may be the one that the files are in.
        contents = {name: path.read_bytes() for name, path in self.files.items()}
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def folder_files(folder: Path) -> TokenizerFiles:
    """Returns the files of a tokenizer in a folder; there may be none."""
    found = sorted(
        {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    )
    return TokenizerFiles(folder, {path.relative_to(folder).as_posix(): path for path in found})


def find_files(spec: str) -> TokenizerFiles:
    """Returns the tokenizer files that `spec` names: a folder, or the path of a tokenizer.json.

    With the path of a tokenizer.json the other files in its folder are included.

    Raises:
        ValueError: there is no vocabulary; the message has the fix.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        found = folder_files(path)
        if not found.vocabulary:
            names = f" (found {', '.join(found.files)})" if found.files else ""
            raise ValueError(
                f"tokenizer {spec!r}: the folder has no vocabulary{names}. Use --data.tokenizer bytes, or a folder with"
                f" {VOCABULARY_NAMES}"
            )
        return found
    if not path.is_file():
        raise ValueError(
            f"tokenizer {spec!r} does not exist. Use --data.tokenizer bytes, the folder of a tokenizer, or the path of"
            " a tokenizer.json; nothing is downloaded"
        )
    found = folder_files(path.parent)
    if path.name in found.files and path.name != JSON:
        raise ValueError(
            f"tokenizer {spec!r} is one file of a tokenizer: give --data.tokenizer {path.parent}"
        )
    return TokenizerFiles(path.parent, {**found.files, JSON: path})
