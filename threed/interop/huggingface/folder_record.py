"""Record of a Hugging Face folder: special token ids and generation defaults, for a later export.

    record = record_of(config, generation, hashes)   # at import; saved as extra["hf"]
    config, files = for_export(record, tokenizer)    # at export

The record has the keys of config.json that do not describe the model (`KEPT`), the text of
generation_config.json, and the hashes of the tokenizer's files. A native checkpoint stores it in
its manifest. An export copies the tokenizer's files from the folder if their hashes still match.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from threed.checkpoint.files import CheckpointError
from threed.core.parse import ParseError, parse_json
from threed.data.tokenizer import Tokenizer

# Keys of config.json that do not describe the model. transformers uses some of them to select the
# class of the tokenizer.
KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "transformers_version",
    "_name_or_path", "initializer_range", "use_cache",
)  # fmt: skip
GENERATION = "generation_config.json"


def record_of(
    config: Mapping[str, Any], generation: str | None, hashes: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the record of a folder.

    Args:
        config: the object in config.json.
        generation: the text of generation_config.json, a JSON object; None if the file does not
            exist.
        hashes: sha256 of each of the tokenizer's files, by name; may be empty.
    """
    kept = {key: config[key] for key in KEPT if key in config}
    return {"config": kept, "generation": generation, "tokenizer": dict(hashes)}


def validated(record: object) -> dict[str, Any] | None:
    """Checks and returns a checkpoint's record; returns None if the checkpoint has no record.

    Raises CheckpointError if the record is malformed.
    """
    if record is None:
        return None
    if isinstance(record, dict):
        config, generation, hashes = (
            record.get(key) for key in ("config", "generation", "tokenizer")
        )
        sound = isinstance(config, dict) and isinstance(hashes, dict) and set(config) <= set(KEPT)
        if sound and (generation is None or isinstance(generation, str)):
            _generation(record)
            return record
    raise CheckpointError("its record of a Hugging Face folder (extra.hf) is not valid")


def matches(record: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Returns whether a record matches a tokenizer.

    They match if the tokenizer's files have the recorded hashes, or if the tokenizer's end-of-text
    id is an eos id in the record.
    """
    ends = [part.get("eos_token_id") for part in (record["config"], _generation(record))]
    known = [number for end in ends for number in (end if isinstance(end, list) else [end])]
    same = bool(tokenizer.files) and tokenizer.files == record["tokenizer"]
    return same or tokenizer.eot in known


def _generation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recorded generation_config.json, parsed; empty if the record has none."""
    try:
        found = parse_json(record["generation"] or "{}", GENERATION)
    except ParseError as error:
        raise CheckpointError(str(error)) from None
    return found if isinstance(found, dict) else {}


def for_export(
    record: dict[str, Any] | None, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys that an export adds to config.json, and additional JSON files to write.

    Uses the record if it matches the tokenizer or no tokenizer is given. Otherwise uses the
    tokenizer's special token ids, and issues a warning if there is a record, which is then ignored.

    Args:
        record: the record of the original folder, or None.
        tokenizer: the tokenizer that the export writes, or None.

    Returns:
        A tuple of the keys for config.json and the JSON files by name, as objects or as text.
    """
    if record is not None and (tokenizer is None or matches(record, tokenizer)):
        files = {} if record["generation"] is None else {GENERATION: record["generation"]}
        return record["config"], files
    if record is not None and tokenizer is not None:
        warnings.warn(
            f"special token ids and {GENERATION} are those of tokenizer {tokenizer.name}, not of the folder of the"
            " weights, because that folder has another tokenizer",
            stacklevel=2,
        )
    ids = _ids_of(tokenizer)
    return {"use_cache": True, "pad_token_id": None, **ids}, {GENERATION: ids}


def _ids_of(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Returns the bos and eos ids of a tokenizer.

    For a tokenizer without a bos token, the bos id is the end-of-text id, because that token
    precedes every document in training.
    """
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    bos = tokenizer.eot if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return {"bos_token_id": bos, "eos_token_id": tokenizer.eot}
