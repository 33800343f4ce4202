"""Finds what a program has changed in a model of `transformers` after its construction.

A model that is rebuilt from `threed.layers` is described by its configuration and its weights. A
module that computes something else, such as with another activation or a forward hook, would be
trained as what its configuration says.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from threed.core.parse import plain

# Attributes that do not change the results of a forward, or that `_places` of `from_transformers`
# checks. A rebuilt model trains the row of the padding token like any other row.
_FREE = {"training", "gradient_checkpointing", "vocab_size", "padding_idx"}
# Rotary scalings whose frequencies change with the longest sequence so far.
_CHANGING = ("dynamic", "longrope")


def find_changes(module: Any) -> Iterator[str]:
    """Yields how a model differs from a new model with its configuration, except for its weights.

    Args:
        module: a model of `transformers`.
    """
    try:
        with torch.device("meta"):
            fresh = type(module)(copy.deepcopy(module.config))
    except Exception as error:  # the constructor may be the program's
        yield f"a {type(module).__name__} cannot be created from its configuration ({plain(error)})"
        return
    expected = dict(fresh.named_modules())
    for name, part in module.named_modules(remove_duplicate=False):
        own = _own_code(part)
        if own:
            yield f"{name or type(part).__name__} {own}"
        if name not in expected:
            yield f"its configuration describes no module {name}"
        elif type(part) is not type(expected[name]):
            kinds = type(part).__name__, type(expected[name]).__name__
            yield f"{name} is a {kinds[0]}, but a {kinds[1]} by its configuration"
        elif part is not module:
            yield from _changed_values(name, part, expected[name])
    yield from _changed_frequencies(module)


def shared_parameters(module: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several names."""
    names = defaultdict[int, list[str]](list)
    for name, param in module.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    return [found for found in names.values() if len(found) > 1]


def _own_code(part: nn.Module) -> str | None:
    """Returns which code of the program a module runs in its forward, or None."""
    if any(map(_is_own, (*part._forward_hooks.values(), *part._forward_pre_hooks.values()))):
        return "has forward hooks"
    replaced = "forward" in vars(part) and not hasattr(part, "_hf_hook")  # a hook of Accelerate
    if replaced or _is_own(type(part).forward):
        return f"has a forward of its own ({type(part).__name__})"
    return None


def _is_own(function: Any) -> bool:
    """Returns whether a function is neither of torch nor of `transformers`."""
    home = getattr(function, "__module__", None) or ""
    return home.partition(".")[0] not in ("torch", "transformers")


def _changed_values(name: str, part: nn.Module, fresh: nn.Module) -> Iterator[str]:
    """Yields the numbers, flags and texts of a module that its configuration does not say."""
    plain = (bool, int, float, str)
    own = {key: value for key, value in vars(part).items() if isinstance(value, plain)}
    for key in own.keys() & vars(fresh).keys() - _FREE:
        value = vars(fresh)[key]
        if not key.startswith("_") and isinstance(value, plain) and value != own[key]:
            yield f"{name}.{key} is {own[key]}, but {value} by its configuration"


def _changed_frequencies(module: Any) -> Iterator[str]:
    """Yields the rotary frequencies that do not follow from the configuration."""
    for name, part in module.named_modules():
        first = getattr(part, "rope_type", None) in _CHANGING
        frequencies = getattr(part, "original_inv_freq" if first else "inv_freq", None)
        if not isinstance(frequencies, torch.Tensor) or frequencies.is_meta:
            continue
        with torch.device("cpu"):
            fresh = type(part)(copy.deepcopy(module.config)).inv_freq
        same = frequencies.shape == fresh.shape and torch.allclose(
            frequencies.detach().cpu().double(), fresh.double(), rtol=1e-2, atol=0
        )
        if not same:
            yield f"{name}.inv_freq does not follow from its configuration"
