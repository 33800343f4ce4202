"""The architectures that there are: a file of data each, and a line here.

    record = REGISTERED["llama"]       by the name of `--model.arch`
    record = of_type("gemma3_text")    by the model_type of a Hugging Face configuration

A record (`record.Architecture`) says what a decoder is made of, what its keys mean where nobody says anything, and how
Hugging Face spells it. To add one, write a file like `mistral.py`, and import it below.
"""

from __future__ import annotations

# isort: off
from threed.architectures import gpt as gpt  # the order in which they are listed
from threed.architectures import llama as llama
from threed.architectures import mistral as mistral
from threed.architectures import qwen2 as qwen2
from threed.architectures import qwen3 as qwen3
from threed.architectures import phi3 as phi3
from threed.architectures import gemma2 as gemma2
from threed.architectures import gemma3 as gemma3
# isort: on

from threed.architectures.record import REGISTERED as REGISTERED
from threed.architectures.record import Architecture as Architecture

NAMES = tuple(REGISTERED)


def of_type(model_type: object) -> Architecture:
    """The architecture of a Hugging Face model_type; ValueError, with all that there are, where it is none."""
    for record in REGISTERED.values():
        if record.model_type == model_type:
            return record
    known = ", ".join(record.model_type for record in REGISTERED.values())
    raise ValueError(f"model_type {model_type} is none of {known}")
