"""What a Hugging Face folder says that is not of its model: the record that goes from folder to checkpoint to folder.

Use: `record = record_of(config, generation, hashes)`, kept as `extra["hf"]` of a native checkpoint, and at an export
`config, files = written(record, tokenizer)`.

The record has the keys of config.json about tokens and their ids, the text of generation_config.json, and the hashes of
the tokenizer's files. The files themselves are copied from the folder, if they have these hashes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from threed.checkpoint.files import CheckpointError
from threed.data.tokenizer import Tokenizer
from threed.parse import ParseError, parse_json

# Keys of a config.json that do not describe the model and are kept: transformers chooses the tokenizer's class by some.
KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "transformers_version",
    "_name_or_path", "initializer_range", "use_cache",
)  # fmt: skip
GENERATION = "generation_config.json"


def record_of(config: Mapping[str, Any], generation: str | None, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the record of a folder.

    Args:
        config: the object in config.json.
        generation: the text of generation_config.json, an object; None if there is no such file.
        hashes: sha256 of the tokenizer's files, by name; empty if there are none.
    """
    kept = {key: config[key] for key in KEPT if key in config}
    return {"config": kept, "generation": generation, "tokenizer": dict(hashes)}


def checked(record: object) -> dict[str, Any] | None:
    """Returns the record that a checkpoint has, or None if it has none; CheckpointError if it is malformed."""
    if record is None:
        return None
    if isinstance(record, dict):
        config, generation, hashes = (record.get(key) for key in ("config", "generation", "tokenizer"))
        sound = isinstance(config, dict) and isinstance(hashes, dict) and set(config) <= set(KEPT)
        if sound and (generation is None or isinstance(generation, str)):
            _generation(record)
            return record
    raise CheckpointError("its record of a Hugging Face folder (extra.hf) is not valid")


def belongs(record: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Returns whether the ids of a record are of this tokenizer: the files are the same, or its end of text is one of
    the record's eos ids."""
    ends = [part.get("eos_token_id") for part in (record["config"], _generation(record))]
    known = [number for end in ends for number in (end if isinstance(end, list) else [end])]
    same = bool(tokenizer.files) and tokenizer.files == record["tokenizer"]
    return same or tokenizer.eot in known


def _generation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object in generation_config.json; empty if there is none."""
    try:
        found = parse_json(record["generation"] or "{}", GENERATION)
    except ParseError as error:
        raise CheckpointError(str(error)) from None
    return found if isinstance(found, dict) else {}


def written(record: dict[str, Any] | None, tokenizer: Tokenizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what an export adds to config.json, and its further JSON files by name: objects, or their text.

    Both are those of the record if there is one that belongs to the tokenizer, else those that the tokenizer names.
    Warns if a record is left out.
    """
    if record is not None and (tokenizer is None or belongs(record, tokenizer)):
        files = {} if record["generation"] is None else {GENERATION: record["generation"]}
        return record["config"], files
    if record is not None and tokenizer is not None:
        warnings.warn(
            f"the ids of special tokens and {GENERATION} are those of tokenizer {tokenizer.name}, not those of the"
            " folder that the weights came from, whose tokenizer was another",
            stacklevel=2,
        )
    ids = _ids_of(tokenizer)
    return {"use_cache": True, "pad_token_id": None, **ids}, {GENERATION: ids}


def _ids_of(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Returns the ids that a tokenizer names. Without a bos token a document begins where another ends, as in
    training."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    bos = tokenizer.eot if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return {"bos_token_id": bos, "eos_token_id": tokenizer.eot}
