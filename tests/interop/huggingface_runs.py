"""Tiny models and data of Hugging Face's libraries, and the runs that tests compare.

A module `tests.interop.x_runs` trains with one of the libraries:

    python -m tests.interop.x_runs OUT plain CASE...
    torchrun ... -m tests.interop.x_runs OUT threed CASE...

"plain" runs the library without DeepSpeed on one process, and "threed" with
`threed.install_as_deepspeed()`. All cases of a command run in the same processes. For each case,
rank 0 writes the numbers to OUT/MODE/CASE.json, and the trained model to OUT/MODE/CASE/final.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests import programs

ROOT = Path(__file__).resolve().parents[2]
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
VOCAB, LENGTH = 64, 12
LIBRARIES = (
    "accelerate",
    "peft",
    "transformers",
    "trl",
)  # look for DeepSpeed when they are imported
SMALL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": LLAMA,
    "qwen2": LLAMA,
    "gemma2": LLAMA | {"head_dim": 8},
    "mistral": LLAMA,
    "opt": {
        "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4,
        "max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": 32,
    },
}  # fmt: skip


BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {"bert": BERT, "t5": T5}
# class of the models of a family
AUTO: dict[str, Any] = dict.fromkeys(FAMILIES, AutoModelForCausalLM) | {
    "bert": AutoModelForSequenceClassification,
    "t5": AutoModelForSeq2SeqLM,
}


class Rows(torch.utils.data.Dataset[Any]):
    """Random sequences whose second half repeats the first; a third of them has masked labels."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, VOCAB, (count, LENGTH), generator=generator)
        self.tokens[:, LENGTH // 2 :] = self.tokens[:, : LENGTH // 2]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        if index % 3 == 0:
            labels[:7] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Unmasked(Rows):
    """The sequences of `Rows`, without masked labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Labeled(Rows):
    """Random sequences, each with one of three labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": torch.tensor(index % 3)}


def small_config(family: str, **values: Any) -> Any:
    """Returns the configuration of a tiny model.

    Args:
        family: key of `AUTO`.
        values: values that differ from the defaults of this module.
    """
    return AutoConfig.for_model(family, **(SMALL | (FAMILIES | OTHERS)[family] | values))


def save_models(out: Path) -> None:
    """Saves one tiny model of each family, from which all trainings start."""
    for family, auto in AUTO.items():
        set_seed(1)
        model = auto.from_config(small_config(family))
        model.save_pretrained(out / "models" / family)


def reset() -> None:
    """Removes the global state of transformers and Accelerate, for the next training."""
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def auto_config(stage: int, **zero: Any) -> dict[str, Any]:
    """Returns a DeepSpeed configuration, whose other values are "auto".

    Args:
        stage: ZeRO stage.
        zero: further values of "zero_optimization".
    """
    keys = (
        "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping",
    )  # fmt: skip
    # Under stage 3, also shard small parameters: these models have no others.
    fixed = {
        "stage": stage, "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    return {"zero_optimization": fixed | zero, **dict.fromkeys(keys, "auto")}


def main(train: Callable[[Path, str, str], None]) -> None:
    """Runs the cases of a command.

    Args:
        train: runs a case; its arguments are OUT, MODE and the name of the case.
    """
    for name in sys.argv[3:]:
        train(Path(sys.argv[1]), sys.argv[2], name)
        reset()


# Runs commands in turn, in programs that are forked from this one.
IN_TURN = """
import json, subprocess, sys
for words in json.loads(sys.argv[1]):
    if code := subprocess.run([sys.executable, *words]).returncode:
        sys.exit(code)
"""


def run(module: str, out: Path, mode: str, names: Iterable[str], ranks: int = 2) -> None:
    """Runs the cases of a module: "plain" on one process, and "threed" on `ranks` ranks."""
    (out / mode).mkdir(exist_ok=True)
    _run(module, command(module, out, mode, names, ranks), importing=mode == "threed")


def run_in_turn(module: str, *commands: tuple[Path, str, Iterable[str], int]) -> None:
    """Runs several commands of a module, in programs that are forked after one import of the libraries.

    The import takes more CPU time than most cases. So threed is also installed as deepspeed in the programs of "plain",
    which do not use it.

    Args:
        module: name of the module.
        commands: OUT, the mode, the names of the cases and the number of ranks of each command.
    """
    for out, mode, _, _ in commands:
        (out / mode).mkdir(exist_ok=True)
    words = [command(module, *about) for about in commands]
    _run(module, ["-c", IN_TURN, json.dumps(words)], importing=True)


def command(module: str, out: Path, mode: str, names: Iterable[str], ranks: int) -> list[str]:
    """Returns the command line of cases, without the interpreter."""
    start = [] if mode == "plain" else [*RANKS, str(ranks)]
    return [*start, "-m", f"tests.interop.{module}", str(out), mode, *names]


def _run(module: str, words: list[str], importing: bool) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Imported in torchrun's process, so that ranks have the libraries when they are forked. The parent of all ranks
    # may have imported the libraries, for other tests, before threed is installed as deepspeed.
    first = f"""
import sys, threed
for name in [name for name in sys.modules if name.partition(".")[0] in {LIBRARIES}]:
    del sys.modules[name]
threed.install_as_deepspeed()
import tests.interop.{module}
"""
    done = programs.run(words, ROOT, env, timeout=800, first=first if importing else "")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def compare_numbers(
    out: Path, name: str, limits: Mapping[str, float], ignored: Collection[str] = ()
) -> None:
    """Compares the numbers of "threed" with those of "plain".

    Args:
        out: folder of the runs.
        name: the case.
        limits: relative tolerance of each kind of number.
        ignored: kinds of numbers that may differ.
    """
    want, got = (
        json.loads((out / mode / f"{name}.json").read_text()) for mode in ("plain", "threed")
    )
    assert len(want) == len(got) >= 2
    for number, (plain, ours) in enumerate(zip(want, got, strict=True)):
        assert plain.keys() == ours.keys()
        for key, value in plain.items():
            close = key in ignored or math.isclose(
                ours[key], value, rel_tol=limits[key], abs_tol=0.0
            )
            assert close, (name, number, key, ours[key], value)


def logits(folder: Path, base: Path | None = None) -> torch.Tensor:
    """Returns the logits of a saved model, or of adapters for the model of the folder `base`."""
    model = AutoModelForCausalLM.from_pretrained(base or folder)
    if base is not None:
        model = PeftModel.from_pretrained(model, folder)
    tokens = torch.arange(3, 3 + 24).reshape(2, 12) % VOCAB
    with torch.no_grad():
        return model(input_ids=tokens).logits


def compare_logits(out: Path, name: str, base: Path | None = None) -> None:
    """Compares the models that both runs of a case have saved."""
    ours, plain = (logits(out / mode / name / "final", base) for mode in ("threed", "plain"))
    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-5)
