"""Trainings with Hugging Face's Trainer that test_transformers_trainer.py compares.

    python -m tests.interop.trainer_runs OUT plain CASE...
    torchrun ... -m tests.interop.trainer_runs OUT threed CASE...

"plain" runs the Trainer without DeepSpeed on one process, and "threed" with
`threed.install_as_deepspeed()`. All cases of a command run in the same processes. For each case,
rank 0 writes the logged numbers to OUT/MODE/CASE.json, and the trained model to OUT/MODE/CASE/final.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[2] == "threed":
    import threed

    threed.install_as_deepspeed()

import torch
from accelerate.state import AcceleratorState, PartialState
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

VOCAB, LENGTH, STEPS, BATCH = 64, 12, 4, 4
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
HOST = {"device": "cpu"}
OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
}  # fmt: skip
SCHEDULER = OPTIMIZER | {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ) | {"warmup_type": "linear"},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        family: key of `FAMILIES`.
        stage: ZeRO stage; ignored by "plain".
        zero: further values of "zero_optimization".
        ds: further sections of the DeepSpeed configuration.
        args: values of the TrainingArguments that differ from those of `train`.
        resume: another case, whose last checkpoint in the middle of its training is continued.
        twice: whether `Trainer.train` is called a second time.
        rates: relative learning rates of the updates, which "plain" sets by a scheduler of its own.
        peft: whether only adapters (LoRA) are trained.
    """

    family: str
    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    ds: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    twice: bool = False
    rates: tuple[float, ...] | None = None
    peft: bool = False


SAVES = {"save_strategy": "steps", "save_steps": 2}
CASES = {f"{family}-{stage}": Case(family, stage) for family in FAMILIES for stage in range(4)} | {
    "saves-2": Case("gpt2", 2, args=SAVES),
    "saves-3": Case("llama", 3, args=SAVES),
    "resumed-2": Case("gpt2", 2, args=SAVES, resume="saves-2"),
    "resumed-3": Case("llama", 3, args=SAVES, resume="saves-3"),
    "accumulation": Case("gpt2", 2, args={"gradient_accumulation_steps": 2}),
    "accumulation-3": Case("gemma2", 3, args={"gradient_accumulation_steps": 2}),
    "offload": Case("llama", 3, {"offload_optimizer": HOST, "offload_param": HOST}),
    "offload-1": Case("gpt2", 1, {"offload_optimizer": HOST}),
    "checkpointing": Case("llama", 3, args={"gradient_checkpointing": True}),
    "config-optimizer": Case("gpt2", 1, ds=OPTIMIZER),
    "config-scheduler": Case("qwen2", 3, ds=SCHEDULER, rates=(0.0, 0.0, 0.5, 1.0)),
    "bf16": Case("llama", 2, args={"bf16": True}),
    "best": Case(
        "gpt2", 3,
        args={"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True} | SAVES,
    ),
    "epochs": Case(
        "mistral", 3, args={"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    ),
    "sgd": Case("opt", 3, args={"optim": "sgd"}),
    "no-clip": Case("gpt2", 2, args={"max_grad_norm": 0.0, "weight_decay": 0.1}),
    "twice": Case("gpt2", 3, twice=True),
    "peft-3": Case("llama", 3, peft=True, args=SAVES),
    "peft-2": Case("llama", 2, peft=True),
}  # fmt: skip


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


class Log(TrainerCallback):
    """Collects the numbers that the Trainer logs."""

    KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        found = {key: float(logs[key]) for key in self.KEYS if key in logs}
        if found:
            self.rows.append({"step": state.global_step} | found)


def save_models(out: Path) -> None:
    """Saves one tiny model of each family, from which all trainings start."""
    for family, values in FAMILIES.items():
        set_seed(1)
        config = AutoConfig.for_model(family, **SMALL, **values)
        AutoModelForCausalLM.from_config(config).save_pretrained(out / "models" / family)


def ds_config(case: Case) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of a case, whose other values are "auto"."""
    keys = (
        "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping",
    )  # fmt: skip
    zero = {"stage": case.stage, "stage3_gather_16bit_weights_on_model_save": True, **case.zero}
    return {
        "zero_optimization": zero, **dict.fromkeys(keys, "auto"), "bf16": {"enabled": "auto"},
        **json.loads(json.dumps(case.ds)),
    }  # fmt: skip


def optimizers(model: torch.nn.Module, rates: tuple[float, ...] | None) -> tuple[Any, Any]:
    """Returns AdamW and a scheduler with the given relative learning rates, or (None, None)."""
    if rates is None:
        return None, None
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.0)
    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: (*rates, 0.0)[step])


def train(out: Path, mode: str, name: str) -> None:
    """Runs a case, and writes its results."""
    case = CASES[name]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    values: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "no", "lr_scheduler_type": "cosine"}
    args = TrainingArguments(
        output_dir=str(out / mode / name), use_cpu=True, report_to=[], disable_tqdm=True, seed=1, logging_steps=1,
        per_device_train_batch_size=BATCH // world, per_device_eval_batch_size=BATCH // world,
        learning_rate=1e-2, warmup_steps=2, adam_epsilon=1e-5,
        deepspeed=ds_config(case) if mode == "threed" else None, **(values | case.args),
    )  # fmt: skip
    set_seed(1)
    log = Log()
    model = AutoModelForCausalLM.from_pretrained(out / "models" / case.family)
    if case.peft:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    trainer = Trainer(
        model=model, args=args, train_dataset=Rows(32), eval_dataset=Rows(8), callbacks=[log],
        optimizers=optimizers(model, case.rates) if mode == "plain" else (None, None),
    )  # fmt: skip
    resume = case.resume and str(out / mode / case.resume / "checkpoint-2")
    trainer.train(resume_from_checkpoint=resume)
    if case.twice:
        # The first engine has ended, and the second one starts with a new optimizer.
        trainer.model_wrapped, trainer.optimizer = trainer.model, None
        trainer.train()
    if "eval_steps" in case.args:
        log.rows.append({"eval_loss": trainer.evaluate()["eval_loss"]})
    trainer.save_model(str(out / mode / name / "final"))
    if args.process_index == 0:
        (out / mode / f"{name}.json").write_text(json.dumps(log.rows))


def reset() -> None:
    """Removes the global state of transformers and Accelerate, for the next training."""
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def main(out: Path, mode: str, names: list[str]) -> None:
    for name in names:
        train(out, mode, name)
        reset()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
