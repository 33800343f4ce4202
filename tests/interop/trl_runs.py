"""Trainings with TRL that test_trl.py compares; `huggingface_runs` describes the commands."""

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

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.interop.huggingface_runs import auto_config, main, small_config

STEPS, BATCH = 3, 4
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}"
    "{% generation %}<assistant>{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<user>", "<assistant>")


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        trainer: "sft" or "dpo".
        stage: ZeRO stage; ignored by "plain".
        lora: whether only adapters are trained. Otherwise, DPO has a reference model.
        args: further values of the configuration.
    """

    trainer: str
    stage: int
    lora: bool = True
    args: dict[str, Any] = field(default_factory=dict)


PACKING = {"packing": True, "max_length": 32}
CASES = {
    "sft-lora-2": Case("sft", 2),
    "sft-lora-3": Case("sft", 3),
    "sft-packing-2": Case("sft", 2, lora=False, args=PACKING),
    "sft-packing-3": Case("sft", 3, lora=False, args=PACKING),
    "sft-assistant-2": Case("sft", 2, args={"assistant_only_loss": True}),
    "sft-assistant-3": Case("sft", 3, lora=False, args={"assistant_only_loss": True}),
    "sft-full-logits-3": Case("sft", 3, lora=False, args={"loss_type": "dft"}),
    "dpo-lora-2": Case("dpo", 2),
    "dpo-lora-3": Case("dpo", 3),
    "dpo-reference-2": Case("dpo", 2, lora=False),
    "dpo-reference-3": Case("dpo", 3, lora=False),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single characters."""
    tokens = [*SPECIAL, *(chr(code) for code in range(32, 127))]
    model = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[]))
    model.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]),
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def conversations() -> Dataset:
    """Returns conversations of different lengths for supervised fine-tuning."""
    return Dataset.from_list([
        {"messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": f"{n}!" * (1 + n % 3)},
        ]}
        for n in range(STEPS * BATCH * 2)
    ])  # fmt: skip


def preferences() -> Dataset:
    """Returns prompts, each with a chosen and a rejected answer."""
    return Dataset.from_list([
        {"prompt": f"say {n}:", "chosen": f" {n}!", "rejected": f" {n + 1}?"}
        for n in range(STEPS * BATCH)
    ])  # fmt: skip


class Log(TrainerCallback):
    """Collects the numbers that the trainer logs."""

    KEYS = ("loss", "grad_norm", "mean_token_accuracy")

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.rows.append({key: float(logs[key]) for key in self.KEYS if key in logs})


def train(out: Path, mode: str, name: str) -> None:
    """Runs a case, and writes its results."""
    case, world = CASES[name], int(os.environ.get("WORLD_SIZE", "1"))
    make_args, make_trainer = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[
        case.trainer
    ]
    values: dict[str, Any] = {"max_length": 24} | case.args
    args = make_args(
        output_dir=str(out / mode / name), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, seed=1,
        logging_steps=1, save_strategy="no", max_steps=STEPS, learning_rate=1e-2, adam_epsilon=1e-5,
        lr_scheduler_type="constant", gradient_checkpointing=False,
        per_device_train_batch_size=BATCH // world,
        deepspeed=auto_config(case.stage) if mode == "threed" else None, **values,
    )  # fmt: skip
    set_seed(1)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    log = Log()
    trainer = make_trainer(
        model=AutoModelForCausalLM.from_pretrained(out / "models" / "llama"), args=args,
        train_dataset=conversations() if case.trainer == "sft" else preferences(),
        processing_class=tokenizer(), callbacks=[log], peft_config=lora if case.lora else None,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(out / mode / name / "final"))
    if args.process_index == 0:
        (out / mode / f"{name}.json").write_text(json.dumps(log.rows))


def save_model(out: Path) -> None:
    """Saves the model from which all trainings start."""
    set_seed(1)
    model = AutoModelForCausalLM.from_config(small_config("llama", vocab_size=len(tokenizer())))
    model.save_pretrained(out / "models" / "llama")


if __name__ == "__main__":
    main(train)
