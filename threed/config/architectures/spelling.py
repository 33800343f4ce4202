"""Reads and writes Hugging Face configurations (config.json), using the record of an architecture.

    keys = read(record, json.loads(text))       returns keys of config.ModelConfig
    table = write(record, keys)                 takes resolved keys

Versions 4 and 5 of `transformers` use different keys. Version 4 has rope_theta, rope_scaling with
type or rope_type, and sliding_window_pattern. Version 5 has rope_parameters, which may be separate
for each type of layer, and layer_types. `read` accepts the keys of both versions, and `write`
writes both. An unknown key is an error unless its value is null or false, because it may change the
computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from threed.config.architectures.record import Architecture, Keys
from threed.config.architectures.rope_scaling import KINDS

# Keys that are ignored in every configuration, because they do not change the computation.
ACCEPTED = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "auto_map", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "sep_token_id", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
LETTERS = {"sliding_attention": "s", "full_attention": "f"}
WORDS = {letter: word for word, letter in LETTERS.items()}
# names of activations, and the equivalent names that replace them in comparisons
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def read(record: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model keys of a Hugging Face configuration.

    Args:
        record: architecture of the model.
        config: the object in config.json.

    Raises:
        ValueError: if a key is missing, unknown, or has an unsupported value; the message lists all
            such keys.
    """
    reader = _Reader(record, config)
    try:
        keys = reader.read()
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"this {record.model_type} configuration has a value of a wrong type: {error}"
        ) from None
    if reader.problems:
        raise ValueError(
            f"this {record.model_type} configuration is not supported: {'; '.join(reader.problems)}"
        )
    return keys


def _activation(value: Any) -> Any:
    return ACTIVATIONS.get(value, value) if isinstance(value, str) else value


class _Reader:
    """Reads one configuration.

    Attributes:
        keys: model keys read so far.
        seen: configuration keys that are ignored or have been read. All other keys are unknown.
        problems: messages about keys that are missing or not supported.
    """

    def __init__(self, record: Architecture, config: Mapping[str, Any]) -> None:
        self.record, self.config = record, {**record.absent, **config}
        self.keys: dict[str, Any] = {"arch": record.name}
        self.seen = set(ACCEPTED | record.accepted | set(record.written))
        self.problems: list[str] = []

    def read(self) -> dict[str, Any]:
        for key in self.record.keys:
            absent = self._get(key.other, key.absent) if key.other else key.absent
            value = self._get(key.hf, absent)
            if value is ...:
                self.problems.append(f"{key.hf} is missing")
                continue
            try:
                value = key.read(value)
            except ValueError as error:
                self.problems.append(f"{key.hf} {_shortened(value)}: {error}")
            if self.keys.setdefault(key.native, value) != value:
                self.problems.append(
                    f"{key.hf} {value}, but an equivalent key has {self.keys[key.native]}"
                )
        for name, wanted in fixed(self.record, self.keys).items():
            found = self._get(name, wanted)
            if _activation(found) != _activation(wanted) and (found or wanted):
                self.problems.append(f"{name} {found}, not {wanted}")
        if not self.record.learned_positions:
            self._rope()
        self._windows()
        unknown = [
            name
            for name in self.config
            if name not in self.seen and self.config[name] not in (None, False)
        ]
        self.problems += [self._refusal(name, self.config[name]) for name in unknown]
        self.keys["seq"] = self.keys.get("positions")
        for name in ("attention_softcap", "logit_softcap", "window"):
            if self.keys.get(name, 0) is None and name in self.record.defaults:
                self.keys[name] = 0  # 0 disables the feature; None would be replaced by the default
        return self.keys

    def _get(self, name: str, absent: Any = None) -> Any:
        self.seen.add(name)
        return self.config.get(name, absent)

    def _refusal(self, name: str, value: Any) -> str:
        method = value.get("quant_method") if isinstance(value, Mapping) else None
        if name != "quantization_config" or not isinstance(method, str):
            return f"{name} {_shortened(value)} is not understood"
        load, save = "dequantized", "save_pretrained"
        # With its original format, transformers would keep the names of packed tensors.
        if method == "mxfp4":
            load = "quantization_config=Mxfp4Config(dequantize=True)"
            save = f"{save}, save_original_format=False"
        return (
            f"quantization_config: weights in {_shortened(method)} are not supported: load them with transformers"
            f" (from_pretrained, {load}), and save the model ({save})"
        )

    # -------------------------------------------------------------------------------------------------------- rotary

    def _rope(self) -> None:
        parameters, scaling, theta, fraction = (self._get(name) for name in _ROPE_KEYS)
        local = self._get("rope_local_base_freq") if self.record.local else None
        for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
            if value is not None and not isinstance(value, Mapping):
                self.problems.append(f"{name} {_shortened(value)}, which must be an object of keys")
                return
        given = dict(parameters or {})
        nested = any(kind in given for kind in LETTERS)
        if given and nested != self.record.local:
            found = "with" if nested else "without"
            self.problems.append(f"rope_parameters {found} separate parameters per type of layer")
        full = dict(given.get("full_attention") or {}) if nested else given
        if self.record.local:
            full.update(scaling or {})
            self._local(dict(given.get("sliding_attention") or {}), local)
        else:
            full = dict(scaling or full)
        theta = self.record.absent_theta if theta is None else theta
        self.keys["rope_theta"] = full.pop("rope_theta", None) or theta
        fraction = full.pop("partial_rotary_factor", None) or fraction
        if fraction not in (None, 1.0):
            self.keys["partial_rotary_factor"] = fraction
            if "partial_rotary_factor" not in self.record.takes:
                self.problems.append(f"partial_rotary_factor {fraction}")
        self._scaling(full)

    def _local(self, sliding: dict[str, Any], theta: Any) -> None:
        self.keys["rope_local_theta"] = sliding.pop("rope_theta", None) or theta or 10000.0
        kind = sliding.pop("rope_type", "default")
        if kind != "default" or sliding:
            self.problems.append(f"rotary scaling of layers with a sliding window ({kind})")

    def _scaling(self, given: dict[str, Any]) -> None:
        old = given.pop("type", None)
        kind = given.pop("rope_type", None) or old or "default"
        kind = self.record.scalings.get(kind, kind)
        original = self._get("original_max_position_embeddings", self.record.original_positions)
        if kind == "default":
            return
        if kind not in KINDS:
            self.problems.append(f"rope_type {kind}: supported are {', '.join(KINDS)}")
            return
        names = " ".join(KINDS[kind]).split()
        if unknown := sorted(set(given) - set(names)):
            self.problems.append(f"{', '.join(unknown)} of rope_type {kind}")
        table = {
            "rope_type": kind,
            **{name: given.get(name) for name in names if given.get(name) is not None},
        }
        if "original_max_position_embeddings" in names:
            known = (
                original
                or table.get("original_max_position_embeddings")
                or self.keys.get("positions")
            )
            table["original_max_position_embeddings"] = known
        self.keys["rope_scaling"] = table

    # ------------------------------------------------------------------------------------------------------- windows

    def _windows(self) -> None:
        record, keys = self.record, self.keys
        if record.window in ("none", "all"):
            keys |= {"window": keys["window"] or None} if "window" in keys else {}
            return
        if record.window == "max_window_layers":
            used, first = self._get("use_sliding_window", False), self._get("max_window_layers", 28)
            types = self._get("layer_types")
            if not used or not keys.get("window"):
                keys["window"] = None
                if "s" in (self._letters(types) or ""):
                    self.problems.append(
                        "layer_types with sliding_attention, but no sliding window"
                    )
                return
            letters = self._letters(types) or "".join(
                "fs"[i >= first] for i in range(self._layers())
            )
        else:
            period = self._get("sliding_window_pattern") or self._get("_sliding_window_pattern")
            letters = self._letters(self._get("layer_types")) or self._period(period)
        if shortest_pattern(letters) != record.layer_pattern:
            keys["layer_pattern"] = shortest_pattern(letters)

    def _period(self, period: Any) -> str:
        """Returns the layer pattern in which every `period`-th layer has full attention.

        Without a `period` (None), returns the pattern of the architecture.
        """
        if period is None or not self.record.local:
            return self.record.layer_pattern
        if not isinstance(period, int) or not 0 < period <= 1000:
            self.problems.append(f"sliding_window_pattern {_shortened(period)}")
            return "f"
        return "s" * (period - 1) + "f"

    def _layers(self) -> int:
        count = self.keys.get("layers")
        return count if isinstance(count, int) and 0 < count < 100_000 else 1

    def _letters(self, types: Any) -> str | None:
        """Returns one letter ("s" or "f") per layer; None without layer_types."""
        if types is None:
            return None
        known = (
            isinstance(types, list)
            and len(types) == self._layers()
            and all(kind in LETTERS for kind in types)
        )
        if not known:
            self.problems.append(
                f"layer_types {_shortened(types)}: one of {' and '.join(LETTERS)} for each layer is needed"
            )
            return "f"
        return "".join(LETTERS[kind] for kind in types)


def shortest_pattern(letters: str) -> str:
    """Returns the shortest pattern that, repeated, gives `letters`."""
    size = len(letters)
    return next(
        letters[:n] for n in range(1, size + 1) if (letters[:n] * (size // n + 1))[:size] == letters
    )


def fixed(record: Architecture, keys: Keys) -> dict[str, Any]:
    """Returns the values of Hugging Face's keys that have a required value (`Architecture.fixed`).

    Args:
        record: architecture of the model.
        keys: model keys.
    """
    return {name: value(keys) if callable(value) else value for name, value in record.fixed.items()}


def hf_key(record: Architecture, native: str) -> str:
    """Returns the Hugging Face configuration key of a model key, for messages.

    If there is no equivalent configuration key, returns the model key itself.
    """
    # No Hugging Face key is mapped to `seq`; `seq` takes the value of `positions`.
    native = "positions" if native == "seq" else native
    return next((key.hf for key in record.keys if key.native == native), native)


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write(record: Architecture, keys: Keys) -> dict[str, Any]:
    """Returns the Hugging Face configuration of a model.

    Args:
        record: architecture of the model.
        keys: all model keys, resolved.
    """
    table: dict[str, Any] = {"architectures": [record.hf_class], "model_type": record.model_type}
    # Without this key, transformers would use its default padding id, which may be outside the
    # vocabulary, and would not train the embedding of this id.
    table["pad_token_id"] = None
    for key in record.keys:
        table[key.hf] = key.write(_hf_value(key.native, keys[key.native]))
    if not record.learned_positions:
        table |= _rope(record, keys)
    if record.window == "layer_types" and not keys["window"]:
        # transformers requires a window for "sliding_attention" layers, so the file has a window
        # that covers all positions, which has no effect.
        table["sliding_window"] = keys["positions"]
    return table | _windows(record, keys) | fixed(record, keys) | dict(record.written)


def _hf_value(name: str, value: Any) -> Any:
    """Returns the value of a model key in Hugging Face's notation.

    threed turns off a soft cap or a window by 0, and Hugging Face by None, so 0 becomes None. A
    `query_pre_attn_scalar` without a fraction becomes an integer.
    """
    if name in ("attention_softcap", "logit_softcap", "window"):
        return value or None
    return int(value) if name == "query_pre_attn_scalar" and value == int(value) else value


def _rope(record: Architecture, keys: Keys) -> dict[str, Any]:
    theta = keys["rope_theta"]
    scaling = keys["rope_scaling"]
    fraction = keys["partial_rotary_factor"]
    given = {} if scaling is None else scaling.table()
    kind, rest = given.pop("rope_type", "default"), given
    parameters = {"rope_type": kind, **rest, "rope_theta": theta}
    table: dict[str, Any] = {"rope_theta": theta}
    if fraction != 1.0 or "partial_rotary_factor" in record.takes:
        parameters["partial_rotary_factor"] = table["partial_rotary_factor"] = fraction
    old = {"type": kind, "rope_type": kind, **rest}
    if record.original_positions is not None:
        table["original_max_position_embeddings"] = rest.get(
            "original_max_position_embeddings", keys["positions"]
        )
        old = {
            name: value
            for name, value in old.items()
            if name in ("type", "short_factor", "long_factor")
        }
        # For these models (Phi-3), transformers 4 accepts only these three keys in rope_scaling. If
        # `factor` or `attention_factor` is set, `rest` is emptied, so that no rope_scaling is
        # written.
        rest = {} if "factor" in rest or "attention_factor" in rest else rest
    if record.local:
        table["rope_local_base_freq"] = keys["rope_local_theta"]
        local = {"rope_type": "default", "rope_theta": keys["rope_local_theta"]}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    table["rope_parameters"] = parameters
    return table | ({"rope_scaling": old} if rest else {})


def _windows(record: Architecture, keys: Keys) -> dict[str, Any]:
    if record.window in ("none", "all"):
        return {}
    sliding, full = WORDS["s"], WORDS["f"]
    types = [sliding if record.has_window(keys, i) else full for i in range(keys["layers"])]
    if record.window == "layer_types":
        return {"layer_types": types}
    if not keys["window"]:
        return {"use_sliding_window": False, "layer_types": [full] * len(types)}
    first = types.index(sliding) if sliding in types else len(types)
    return {"use_sliding_window": True, "max_window_layers": first, "layer_types": types}
