"""Records the data of a Hugging Face folder that a later export to Hugging Face needs.

    record = record_of(config, generation, hashes)   # at import; saved as extra["hf"]
    config, files = for_export(record, tokenizer)    # at export

The record has the keys of config.json that do not describe the model, such as special token ids
(`KEPT`); the text of generation_config.json; and the hashes of the tokenizer's files. A native
checkpoint stores the record in its manifest. An export copies the tokenizer's files from the
original folder if their hashes still match.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from threed.checkpoint.files import CheckpointError
from threed.core.parse import ParseError, parse_json
from threed.data.tokenizer import Tokenizer

# Keys of config.json that a record contains. They do not describe the model, but transformers uses
# some of them, for example to select the class of the tokenizer.
KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "transformers_version",
    "_name_or_path", "initializer_range", "use_cache", "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip
GENERATION = "generation_config.json"


def record_of(
    config: Mapping[str, Any], generation: str | None, hashes: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the record of a Hugging Face folder.

    Args:
        config: the parsed content of config.json.
        generation: the text of generation_config.json, which must be a JSON object; None if the
            file does not exist.
        hashes: SHA-256 of each of the tokenizer's files, by file name; may be empty.
    """
    kept = {key: config[key] for key in KEPT if key in config}
    return {"config": kept, "generation": generation, "tokenizer": dict(hashes)}


def validated(record: object) -> dict[str, Any] | None:
    """Checks and returns the record in a checkpoint; returns None without a record.

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
    """Returns whether a record fits a tokenizer.

    It fits if the tokenizer's files have the hashes in the record, or if the tokenizer's
    end-of-text id is one of the eos ids in the record.
    """
    ends = [part.get("eos_token_id") for part in (record["config"], _generation(record))]
    known = [number for end in ends for number in (end if isinstance(end, list) else [end])]
    same = bool(tokenizer.files) and tokenizer.files == record["tokenizer"]
    return same or tokenizer.eot in known


def _generation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record's generation_config.json, parsed; empty if the folder had no such file."""
    try:
        found = parse_json(record["generation"] or "{}", GENERATION)
    except ParseError as error:
        raise CheckpointError(str(error)) from None
    return found if isinstance(found, dict) else {}


def for_export(
    record: dict[str, Any] | None, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys that an export adds to config.json, and additional JSON files to write.

    They are taken from the record if the record matches the tokenizer, or if no tokenizer is given.
    Otherwise they contain the tokenizer's special token ids. If the record does not match the
    tokenizer, it is ignored, and a warning is issued.

    Args:
        record: the record of the folder from which the weights were imported, or None.
        tokenizer: the tokenizer that the export writes, or None.

    Returns:
        (keys and values for config.json, contents of the JSON files by file name). A content is a
        JSON object or a text.
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
    """Returns the bos and eos ids of a tokenizer, under the keys of config.json.

    For a tokenizer without a bos token, the bos id is the end-of-text id, because the end-of-text
    token precedes every document in training.
    """
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    bos = tokenizer.eot if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return {"bos_token_id": bos, "eos_token_id": tokenizer.eot}
