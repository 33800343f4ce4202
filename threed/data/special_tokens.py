"""The special tokens that a tokenizer's configuration names: the end of a document, and bos.

    named = read_specials(files)             from the configuration files
    named.complete(document)                 adds tokens that a tokenizer.json lacks
    end_of_document(named, ids, specials)    the token that ends a document
    beginning(named, document, ids)          the ids that the tokenizer adds before a text
    hide(document)                           from here on, no text is encoded to special tokens

Here `document` is the JSON object in a tokenizer.json, `ids` maps all tokens to their ids, and
`specials` has the special tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from threed.data.tokenizer_files import ADDED, CONFIG, SPECIALS_MAP, TokenizerFiles

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
# Names of the end-of-document token in published tokenizers, most specific first.
DOCUMENT_ENDS = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Names of the end-of-turn token, which is the eos_token of chat models.
TURN_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<turn|>",
    "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|assistant|>", "<|observation|>",
})  # fmt: skip


@dataclass(frozen=True)
class NamedSpecials:
    """The special tokens in a tokenizer's configuration files.

    Attributes:
        roles: the token of each role in `ROLES` (such as eos_token) that the files specify.
        added: all tokens in the files, in the format of added_tokens in a tokenizer.json. The id is
            None if the files do not state it.
        add_bos: whether texts begin with the bos token; None if the files do not specify it.
        model_ends: the ids that end a generation, from config.json and generation_config.json.
        model_bos: the bos id from config.json.
    """

    roles: Mapping[str, str]
    added: tuple[dict[str, Any], ...]
    add_bos: bool | None
    model_ends: tuple[int, ...]
    model_bos: int | None

    def complete(self, document: dict[str, Any]) -> bool:
        """Adds the tokens in the configuration files (`added`) to added_tokens of a tokenizer.json.

        A token is added if added_tokens lacks it and its id is known from the vocabulary or the
        configuration files. If added_tokens has the token and the configuration files mark it as
        special, it is marked as special in added_tokens, too.

        Args:
            document: the object in the tokenizer.json, which is changed in place.

        Returns:
            Whether anything changed.
        """
        entries = {entry["content"]: entry for entry in document.get("added_tokens") or []}
        vocabulary = model_vocabulary(document)
        changed = False
        for token in self.added:
            entry = entries.get(token["content"])
            number = vocabulary.get(token["content"], token["id"])
            if entry is None and number is not None:
                entries[token["content"]] = {**token, "id": number}
                changed = True
            elif entry is not None and token["special"] and not entry["special"]:
                entry["special"] = changed = True
        if changed:
            document["added_tokens"] = sorted(entries.values(), key=lambda entry: entry["id"])
        return changed


def read_specials(files: TokenizerFiles) -> NamedSpecials:
    """Reads the special tokens from the configuration files of a tokenizer.

    The files are tokenizer_config.json, special_tokens_map.json and added_tokens.json, and the
    model's config.json and generation_config.json in the same folder. Missing files are treated as
    empty.

    Raises:
        ValueError: if a file is malformed; the message has its name.
    """
    config, mapped = files.read(CONFIG), files.read(SPECIALS_MAP)
    merged = {**mapped, **{key: value for key, value in config.items() if value is not None}}
    roles = {role: name for role in ROLES if (name := _content(merged.get(role)))}
    add_bos = config.get("add_bos_token")
    models = [files.read_model_config(name) for name in ("config.json", "generation_config.json")]
    ends = [number for model in models for number in _numbers(model.get("eos_token_id"))]
    return NamedSpecials(
        roles, tuple(_added(config, merged, files.read(ADDED), roles)), add_bos if isinstance(add_bos, bool) else None,
        tuple(dict.fromkeys(ends)), next(iter(_numbers(models[0].get("bos_token_id"))), None),
    )  # fmt: skip


def _added(
    config: Mapping[str, Any],
    merged: Mapping[str, Any],
    numbers: Mapping[str, Any],
    roles: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Returns the tokens of all configuration files, in the format of added_tokens.

    Args:
        config: content of tokenizer_config.json, of which only added_tokens_decoder is read.
        merged: contents of tokenizer_config.json and special_tokens_map.json, combined. Both files
            may have lists of special tokens.
        numbers: content of added_tokens.json: the id of each token.
        roles: the token of each role.
    """
    decoder = config.get("added_tokens_decoder")
    by_id = decoder.items() if isinstance(decoder, dict) else ()
    tokens = [_entry(value, int(key)) for key, value in by_id if re.fullmatch("[0-9]{1,9}", key)]
    tokens += [
        _entry({"content": name, "special": False}, n)
        for name, value in numbers.items()
        for n in _numbers(value)
    ]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = merged.get(key)
        values = more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
        tokens += [_entry(value, None) for value in values]
    tokens += [_entry(name, None) for name in roles.values()]
    return [token for token in tokens if token["content"]]


def _entry(value: object, number: int | None) -> dict[str, Any]:
    """Returns a token as an entry of added_tokens.

    Flags that `value` does not have are False, except `special`, which is True.

    Args:
        value: the token, or a mapping with the token as "content" and with flags.
        number: the id of the token; None if it is unknown.
    """
    given = value if isinstance(value, Mapping) else {}
    flags = {
        name: bool(given.get(name, False))
        for name in ("single_word", "lstrip", "rstrip", "normalized")
    }
    return {
        "id": number,
        "content": _content(value),
        **flags,
        "special": bool(given.get("special", True)),
    }


def _content(value: object) -> str:
    name = value.get("content") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else ""


def _numbers(value: object) -> list[int]:
    """Returns the valid ids in a value that is an id or a list of ids."""
    values = value if isinstance(value, list) else [value]
    return [n for n in values if isinstance(n, int) and not isinstance(n, bool) and n >= 0]


def model_vocabulary(document: Mapping[str, Any]) -> dict[str, int]:
    """Returns the id of each token in the vocabulary of a tokenizer.json, without added tokens."""
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: i for i, (piece, _) in enumerate(vocabulary)}


def end_of_document(named: NamedSpecials, ids: Mapping[str, int], specials: frozenset[str]) -> str:
    """Returns the token that ends a document.

    The first of these rules that gives a token decides:
    1. The tokenizer's eos_token, if it is one of `DOCUMENT_ENDS`.
    2. The first of `DOCUMENT_ENDS` among the model's eos ids.
    3. The tokenizer's eos_token, unless it ends a turn (`TURN_ENDS`).
    4. The first of `DOCUMENT_ENDS` among the special tokens.
    5. The model's first eos id that does not end a turn.
    6. The tokenizer's eos_token.

    Args:
        named: the special tokens in the configuration files.
        ids: the id of each token.
        specials: all special tokens.

    Raises:
        ValueError: if no rule gives a token, or the eos_token is not in the vocabulary.
    """
    named_end = named.roles.get("eos_token", "")
    if named_end and named_end not in ids:
        raise ValueError(
            f"eos_token {named_end!r} is not in the vocabulary. Correct it in {CONFIG}"
        )
    if named_end in DOCUMENT_ENDS:
        return named_end
    tokens = {number: token for token, number in ids.items() if token in specials}
    of_model = [tokens[number] for number in named.model_ends if number in tokens]
    ends = [name for name in DOCUMENT_ENDS if name in of_model]
    ends += [named_end] if named_end and named_end not in TURN_ENDS else []
    ends += [name for name in DOCUMENT_ENDS if name in specials]
    ends += [name for name in of_model if name not in TURN_ENDS] + [
        name for name in [named_end] if name
    ]
    if not ends:
        names = ", ".join(DOCUMENT_ENDS[:4])
        raise ValueError(
            f"no end-of-text token. Name an eos_token in {CONFIG}, or add one of {names} as special token"
        )
    return ends[0]


def beginning(
    named: NamedSpecials, document: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the ids that the tokenizer itself adds before a text; may be empty.

    If tokenizer_config.json has add_bos_token, it determines the ids. Otherwise the post_processor
    of tokenizer.json does.

    Raises:
        ValueError: if an id is not in the vocabulary.
    """

    if named.add_bos is None:
        prefix = _prefix(document.get("post_processor"))
        if unknown := sorted(set(prefix) - set(ids.values())):
            raise ValueError(
                f"the post_processor begins texts with id {unknown[0]}, which is not in the vocabulary"
            )
        return prefix
    bos = bos_id(named, ids)
    if named.add_bos and bos is None:
        raise ValueError(
            f"{CONFIG} has add_bos_token true, but no bos_token that is in the vocabulary"
        )
    return (bos,) if named.add_bos and bos is not None else ()


def bos_id(named: NamedSpecials, ids: Mapping[str, int]) -> int | None:
    """Returns the id of the bos token, or None if the vocabulary does not have it.

    bos_token in the tokenizer's configuration has precedence over the bos id in config.json.
    """
    if "bos_token" in named.roles:
        return ids.get(named.roles["bos_token"])
    return named.model_bos if named.model_bos in ids.values() else None


def _prefix(processor: Any) -> tuple[int, ...]:
    kind = processor["type"] if isinstance(processor, Mapping) else ""
    if kind == "Sequence":
        return tuple(
            number for part in reversed(processor["processors"]) for number in _prefix(part)
        )
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (int(processor["cls"][1]),)
    if kind != "TemplateProcessing":
        return ()
    found: list[int] = []
    for piece in processor["single"]:
        if "SpecialToken" not in piece:
            break
        found += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(found)


def specials_in_text(document: Mapping[str, Any]) -> frozenset[str]:
    """Returns the tokens to which text is never encoded if `special_tokens` is "text".

    These are all special tokens except the unknown token.
    """
    unknown = document["model"].get("unk_token")
    specials = (
        entry["content"] for entry in document.get("added_tokens") or [] if entry["special"]
    )
    return frozenset(name for name in specials if name != unknown)


def hide(document: dict[str, Any]) -> bool:
    """Renames the special tokens in the vocabulary of a tokenizer.json, in place.

    Unigram and WordLevel models match every token of their vocabulary by its spelling, so without
    this change, a text that spells a special token would be encoded to that token. The new names
    are random, so that no text contains them. The unknown token keeps its name, because the model
    refers to it by name. BPE merges of renamed tokens are removed.

    Returns:
        Whether any token was renamed.
    """
    model, vocabulary = document["model"], model_vocabulary(document)
    names = sorted(specials_in_text(document) & vocabulary.keys())
    hidden = {name: f"\U0010fffd{secrets.token_hex(16)}" for name in names}
    if not hidden:
        return False
    for entry in document["added_tokens"]:
        entry["content"] = hidden.get(entry["content"], entry["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, hidden)]
    return True


def _touches(merge: str | list[str], hidden: Mapping[str, str]) -> bool:
    """Returns whether a hidden token is an input or the result of a BPE merge."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in hidden or right in hidden or left + right in hidden
