"""The files of a tokenizer in a folder: find, hash and copy them.

Use: `files = find_files("path/to/folder")` (or the path of a tokenizer.json); `files.hashes()`;
`files.save_hf(out)`.

Only files that match `PATTERNS` are read and copied. They are the data files that `transformers`
reads and writes; code (`*.py`) and pickles are not among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.core.parse import read_json

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIALS_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# Sets of files, in order of preference. The files of a set together contain a full vocabulary.
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

# Repositories at huggingface.co with published tokenizers, by the vocabulary size of their models.
PUBLISHED = {
    32000: "mistralai/Mixtral-8x7B-v0.1",
    32768: "mistralai/Mistral-7B-v0.3",
    50257: "openai-community/gpt2",
    102400: "deepseek-ai/DeepSeek-V2-Lite",
    128256: "meta-llama/Meta-Llama-3-8B",
    129280: "deepseek-ai/DeepSeek-V3",
    151936: "Qwen/Qwen3-8B-Base",
    201088: "openai/gpt-oss-20b",
    262208: "google/gemma-3-12b-pt",
}


def how_to_download(vocab: int = 50257) -> str:
    """Returns the command that downloads a published tokenizer, with the flag that selects it.

    Args:
        vocab: vocabulary size of the tokenizer's model, a key of `PUBLISHED`; by default GPT-2's.
    """
    folder = PUBLISHED[vocab].rpartition("/")[2].lower()
    command = f"hf download {PUBLISHED[vocab]} --include 'tokenizer*' --local-dir {folder}"
    return f"{command}, then --data.tokenizer {folder}"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Attributes:
        place: the folder of the files.
        files: relative path in an output folder -> path of the file that is copied to it.
    """

    place: Path
    files: Mapping[str, Path]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The first set of names in `VOCABULARIES` for which all files exist, or () if none."""
        return next(
            (names for names in VOCABULARIES if all(name in self.files for name in names)), ()
        )

    @property
    def spec(self) -> str:
        """An absolute path for which `find_files` returns these files."""
        return str(self.files.get(JSON, self.place).absolute())

    def read(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file of the tokenizer, or {} if the file does not exist.

        Raises ValueError if the content is not a JSON object.
        """
        return read_json(self.files[name]) if name in self.files else {}

    def read_model_config(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file of the model, in the folder `place`; {} if missing."""
        path = self.place / name
        return read_json(path) if path.is_file() else {}

    def hashes(self) -> dict[str, str]:
        """Returns the sha256 of each file, by the keys of `files`."""
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()
        }

    def save_hf(self, folder: Path, model_type: str | None = None) -> None:
        """Copies all files into `folder`. `model_type` has no effect."""
        # Read all files before writing, since `folder` may be the folder of the files.
        contents = {name: path.read_bytes() for name, path in self.files.items()}
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def folder_files(folder: Path) -> TokenizerFiles:
    """Returns the files of a tokenizer in a folder; the result may be empty."""
    found = sorted(
        {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    )
    return TokenizerFiles(folder, {path.relative_to(folder).as_posix(): path for path in found})


def find_files(spec: str) -> TokenizerFiles:
    """Returns the tokenizer files of a folder or of a tokenizer.json.

    Args:
        spec: a folder, or the path of a tokenizer.json. In both cases the result includes the other
            tokenizer files in the folder.

    Raises:
        ValueError: if no vocabulary was found; the message states the fix.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        found = folder_files(path)
        _check_vocabulary(spec, found)
        return found
    if not path.is_file():
        raise ValueError(
            f"tokenizer {spec!r} does not exist. Use --data.tokenizer bytes, the folder of a tokenizer, or the path of"
            f" a tokenizer.json. threed does not download it; for that of GPT-2, for example: {how_to_download()}"
        )
    found = folder_files(path.parent)
    if path.name in found.files and path.name != JSON:
        _check_vocabulary(spec, found)
        raise ValueError(
            f"tokenizer {spec!r} is one file of a tokenizer: give --data.tokenizer {path.parent}"
        )
    if path.suffix != ".json":
        raise ValueError(
            f"tokenizer {spec!r} is not a tokenizer.json: give --data.tokenizer a folder with {VOCABULARY_NAMES}. A"
            " SentencePiece model under another name must be copied to tokenizer.model"
        )
    return TokenizerFiles(path.parent, {**found.files, JSON: path})


def _check_vocabulary(spec: str, found: TokenizerFiles) -> None:
    if not found.vocabulary:
        names = f" (found {', '.join(found.files)})" if found.files else ""
        raise ValueError(
            f"tokenizer {spec!r}: the folder has no vocabulary{names}. Use --data.tokenizer bytes, or a folder with"
            f" {VOCABULARY_NAMES}"
        )
