"""Encodes the states of a program and its scheduler for a checkpoint: as JSON, and tensors apart.

    tensors: dict[str, Tensor] = {}
    values = encode({"epoch": 3, "ema": torch.zeros(4)}, "client_state", tensors)
    decode(json.loads(json.dumps(values)), tensors)     # the same state

JSON objects have string keys and JSON has no tuples, so other values are encoded as an object with
a single key, which names the type.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

TENSOR = "name of a tensor"  # {TENSOR: name in the file of tensors}
ARRAY = "name of a NumPy array"  # {ARRAY: name in the file of tensors}
TUPLE = "items of a tuple"  # {TUPLE: [item, ...]}
# {PAIRS[type]: [[key, value], ...]}
PAIRS = {Counter: "pairs of a Counter", dict: "pairs of a dict"}
_TYPES = {name: kind for kind, name in PAIRS.items()}
_TAGS = {TENSOR, ARRAY, TUPLE, *_TYPES}


def encode(state: Any, path: str, tensors: MutableMapping[str, Tensor]) -> Any:
    """Returns a state as JSON; `decode` decodes it.

    Args:
        state: numbers, strings, None, tensors, NumPy arrays of numbers, and lists, tuples, dicts and
            Counters of them.
        path: name of the state, for messages and for the names of tensors.
        tensors: gets the tensors of the state, on the CPU, by name.

    Raises:
        TypeError: if the state has a value of another type.
    """
    if state is None or isinstance(state, str | bool | int | float):
        return state
    if isinstance(state, Tensor):
        tensors[path] = state.detach().cpu().contiguous().clone()
        return {TENSOR: path}
    if isinstance(state, Mapping):
        return _encode_mapping(state, path, tensors)
    if isinstance(state, list | tuple):
        items = [encode(item, f"{path}[{n}]", tensors) for n, item in enumerate(state)]
        return items if isinstance(state, list) else {TUPLE: items}
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(state, numpy.number | numpy.bool_) and type(state.item()) in (
            bool,
            int,
            float,
        ):
            return state.item()
        if isinstance(state, numpy.ndarray) and state.dtype.kind in "biuf":
            tensors[path] = torch.from_numpy(state.copy())
            return {ARRAY: path}
    fix = "use numbers, strings, tensors, and lists, tuples and dicts of them"
    raise TypeError(f"{path}: a {type(state).__name__} cannot be saved: {fix}")


def _encode_mapping(
    state: Mapping[Any, Any], path: str, tensors: MutableMapping[str, Tensor]
) -> dict[str, Any]:
    kind = Counter if isinstance(state, Counter) else dict
    strings = all(isinstance(key, str) for key in state)
    if kind is dict and strings and not (len(state) == 1 and _TAGS & state.keys()):
        return {key: encode(value, f"{path}[{key!r}]", tensors) for key, value in state.items()}
    pairs = [
        [encode(key, f"{path}: a key", tensors), encode(value, f"{path}[{key!r}]", tensors)]
        for key, value in state.items()
    ]
    return {PAIRS[kind]: pairs}


def decode(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns a state that `encode` encoded.

    Args:
        state: the state as JSON.
        tensors: the tensors that `encode` set apart.

    Raises:
        KeyError: if a tensor is missing.
    """
    if isinstance(state, list):
        return [decode(item, tensors) for item in state]
    if not isinstance(state, Mapping):
        return state
    tag = next(iter(state)) if len(state) == 1 else None
    if tag == TENSOR:
        return tensors[state[TENSOR]]
    if tag == ARRAY:
        return tensors[state[ARRAY]].numpy()
    if tag == TUPLE:
        return tuple(decode(item, tensors) for item in state[TUPLE])
    if tag in _TYPES:
        pairs = [(decode(key, tensors), decode(value, tensors)) for key, value in state[tag]]
        return _TYPES[tag](dict(pairs))
    return {key: decode(value, tensors) for key, value in state.items()}
