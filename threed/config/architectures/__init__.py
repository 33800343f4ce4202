"""Registry of decoder architectures. Each architecture is a record in a module of this package.

    record = REGISTERED["llama"]       by the value of `--model.arch`
    record = of_type("gemma3_text")    by the model_type of a Hugging Face configuration

A record (`record.Architecture`) defines the blocks of a decoder, the defaults of its configuration
keys, and its Hugging Face layout. To add an architecture, write a module like `mistral.py` and
import it below.

This package is internal.
"""

from __future__ import annotations

# isort: off
# `--help` and messages list the architectures in the order of these imports.
from threed.config.architectures import gpt as gpt
from threed.config.architectures import llama as llama
from threed.config.architectures import mistral as mistral
from threed.config.architectures import qwen2 as qwen2
from threed.config.architectures import qwen3 as qwen3
from threed.config.architectures import phi3 as phi3
from threed.config.architectures import gemma2 as gemma2
from threed.config.architectures import gemma3 as gemma3
from threed.config.architectures import mixtral as mixtral
from threed.config.architectures import qwen3_moe as qwen3_moe
from threed.config.architectures import deepseek_v3 as deepseek_v3
from threed.config.architectures import deepseek_v2 as deepseek_v2
from threed.config.architectures import gpt_oss as gpt_oss
# isort: on

from threed.config.architectures.record import REGISTERED as REGISTERED
from threed.config.architectures.record import Architecture as Architecture
from threed.core.source import names_model

__all__: list[str] = []

NAMES = tuple(REGISTERED)
# The architecture of custom models (`--model.arch FILE.py:NAME`), which accept every key.
CUSTOM = Architecture(
    "custom", "a custom model", "", "", (), learned_positions=True,
    takes=frozenset[str]().union(*(record.takes for record in REGISTERED.values())),
    limits=lambda keys: iter([f"--model.arch {keys['arch']}"]),
)  # fmt: skip


def record_of(arch: str) -> Architecture:
    """Returns the architecture for a value of `--model.arch`."""
    return CUSTOM if names_model(arch) else REGISTERED[arch]


def of_type(model_type: object) -> Architecture:
    """Returns the architecture with a Hugging Face model_type.

    Raises:
        ValueError: if the model_type is unknown; the message lists the known ones.
    """
    for record in REGISTERED.values():
        if record.model_type == model_type:
            return record
    known = ", ".join(record.model_type for record in REGISTERED.values())
    raise ValueError(f"model_type {model_type} is not one of {known}")
