"""Uses `transformers` to convert tokenizers that have no tokenizer.json, and checks the result.

`import_tokenizer(files)` returns the text of a tokenizer.json. `transformers` builds a tokenizer
from nearly any folder, even from an empty one. So the vocabulary of the result is compared with the
vocabulary files.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from threed.core.parse import plain, read_file
from threed.data.tokenizer_files import SENTENCEPIECE, TokenizerFiles

# Fraction of the tokens in the vocabulary file that must have the same id in the result. It is
# below 1, because a configuration may rename placeholder tokens.
SAME_IDS = 0.9


def import_tokenizer(files: TokenizerFiles) -> str:
    """Returns the text of a tokenizer.json, converted without running code from the folder.

    Raises:
        ValueError: if a package is missing, the files cannot be read, or the vocabulary of the
            result differs from the files; the message states the fix.
    """
    names = " and ".join(files.vocabulary)
    fix = "or give --data.tokenizer a folder with a tokenizer.json"
    packages = (
        "transformers",
        *(("sentencepiece", "google.protobuf") if names in SENTENCEPIECE else ()),
    )
    if missing := [name for name in packages if not _is_installed(name)]:
        pip_names = " ".join(missing).replace("google.", "")
        raise ValueError(
            f"tokenizer {files.place}: {names} without a tokenizer.json is read by {', '.join(missing)}, which is not"
            f" installed. pip install {pip_names} (all of them: 'threed[hf]'), {fix}"
        )
    try:
        backend = _load(files)
        same = _share_of_same_ids(_entries(files), backend.get_vocab(True))
    except Exception as error:  # transformers and its dependencies raise errors of any type
        kinds = ("tokenizer_config.json", "config.json")
        why, correct = plain(error), "Correct it"
        if not any((files.place / name).exists() for name in kinds):
            why = "no tokenizer_config.json says what kind of tokenizer it is"
            correct = 'Add one, such as {"tokenizer_class": "GPT2Tokenizer"}'
        raise ValueError(
            f"tokenizer {files.place}: transformers cannot read {names} there: {why}. {correct}, {fix}"
        ) from error
    if same < SAME_IDS:
        raise ValueError(
            f"tokenizer {files.place}: transformers converts it to a vocabulary that differs from {names} ({same:.0%} of"
            f" the ids are the same). Name its tokenizer_class in tokenizer_config.json, {fix}"
        )
    return backend.to_str()


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of `name` is missing
        return False


def _load(files: TokenizerFiles) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(files.place), local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} has no equivalent in the `tokenizers` library"
        )
    return tokenizer.backend_tokenizer


def _entries(files: TokenizerFiles) -> Mapping[str, int]:
    """Returns the id of each token in the first vocabulary file."""
    name = files.vocabulary[0]
    path = files.files[name]
    if name in SENTENCEPIECE:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    text = read_file(path).decode("utf-8")
    if name == "vocab.txt":
        return {line: i for i, line in enumerate(text.rstrip("\n").split("\n"))}
    return json.loads(text)


def _share_of_same_ids(entries: Mapping[str, int], vocabulary: Mapping[str, int]) -> float:
    same = sum(vocabulary.get(token) == number for token, number in entries.items())
    return same / max(1, len(entries))
