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
from accelerate.utils.memory import release_memory
from peft import LoraConfig, PromptEncoderConfig, get_peft_model
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, OptunaBackend
from transformers.trainer_utils import BestRun, HPSearchBackend

from tests.interop.huggingface_runs import (
    AUTO,
    FAMILIES,
    VOCAB,
    Labeled,
    Rows,
    Unmasked,
    auto_config,
    main,
)

STEPS, BATCH = 4, 4
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
        again: for each further call of `Trainer.train`, the checkpoint from which it resumes, or None.
        rates: relative learning rates of the updates, which "plain" sets by a scheduler of its own.
        peft: whether only adapters (LoRA) are trained.
        prompt: whether, with `peft`, a prompt is trained (p-tuning) instead of LoRA.
        whole: further modules that peft trains and saves with the adapters.
        evaluates: whether the model is evaluated before the training.
        vocab: size to which the embeddings are resized before the training.
        generates: whether the trained model generates tokens, which are compared.
        searches: whether hyper-parameters are searched before the training, on one rank.
    """

    family: str
    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    ds: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    again: tuple[str | None, ...] = ()
    rates: tuple[float, ...] | None = None
    peft: bool = False
    prompt: bool = False
    whole: tuple[str, ...] = ()
    evaluates: bool = False
    vocab: int | None = None
    generates: bool = False
    searches: bool = False


# For losses that ignore `num_items_in_batch`, the Trainer otherwise multiplies the loss by the number
# of ranks, also without DeepSpeed.
RANK_MEANS = {"average_tokens_across_devices": False}
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
    "reentrant-3": Case(
        "llama", 3,
        args={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "bf16": Case("llama", 2, args={"bf16": True}),
    # On a CPU, the Trainer without DeepSpeed ignores fp16 and computes in fp32.
    "fp16": Case("llama", 2, ds={"fp16": {"enabled": "auto", "initial_scale_power": 8}}, args={"fp16": True}),
    "smoothing": Case("gpt2", 2, args={"label_smoothing_factor": 0.1}),
    "lengths": Case("gpt2", 2, args={"train_sampling_strategy": "group_by_length"}),
    "rebalance": Case("gpt2", 2, args={"train_sampling_strategy": "batch_rebalance"}),
    "fraction": Case("gpt2", 2, args={"max_steps": -1, "num_train_epochs": 1.5}),
    "compiled": Case("gpt2", 1, args={"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "fused": Case("gpt2", 1, args={"optim": "adamw_torch_fused"}),
    "best": Case(
        "gpt2", 3,
        args={"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True} | SAVES,
    ),
    "epochs": Case(
        "mistral", 3, args={"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    ),
    "sgd": Case("opt", 3, args={"optim": "sgd"}),
    "no-clip": Case("gpt2", 2, args={"max_grad_norm": 0.0, "weight_decay": 0.1}),
    **{
        f"again-{stage}": Case(family, stage, args=SAVES, again=(None, "checkpoint-2"))
        for stage, family in enumerate(("opt", "llama", "qwen2", "gpt2"))
    },
    "peft-3": Case("llama", 3, peft=True, args=SAVES),
    "peft-whole-3": Case("llama", 3, peft=True, whole=("lm_head", "embed_tokens"), args=SAVES),
    "peft-2": Case("llama", 2, peft=True),
    "prompt-3": Case("llama", 3, peft=True, prompt=True, args=SAVES),
    "evaluated-3": Case("llama", 3, evaluates=True, generates=True),
    "resized-3": Case("gpt2", 3, vocab=VOCAB + 8),
    "classifier-3": Case("bert", 3, args=RANK_MEANS),
    "sequences-2": Case("t5", 2, args=RANK_MEANS),
    "sequences-3": Case("t5", 3, args=RANK_MEANS),
    "model-only-3": Case("qwen2", 3, args=SAVES | {"save_only_model": True}),
    "search-3": Case("llama", 3, searches=True),
}  # fmt: skip


class Log(TrainerCallback):
    """Collects the numbers that the Trainer logs."""

    KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        found = {key: float(logs[key]) for key in self.KEYS if key in logs}
        if found:
            self.rows.append({"step": state.global_step} | found)


class Trial(dict[str, Any]):
    """A trial with the attributes of Optuna's, and of a type that needs no further package."""

    def __init__(self, number: int, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.number, self.params = number, params


class Grid(OptunaBackend):
    """A search over three learning rates; the calls are those of transformers' Optuna backend."""

    @staticmethod
    def is_available() -> bool:
        return True

    def run(self, trainer: Trainer, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
        """Returns the trial with the least loss."""
        runs = []
        for number, rate in enumerate((1e-3, 1e-2, 1e-4)):
            trial = Trial(number, {"learning_rate": rate})
            trainer.train(trial=trial)
            objective = trainer.compute_objective(trainer.evaluate())
            runs.append(BestRun(str(number), objective, trial.params))
            trainer.model_wrapped, trainer.model = release_memory(
                trainer.model_wrapped, trainer.model
            )
            trainer.accelerator.clear()
        return min(runs, key=lambda run: run.objective)


def search(trainer: Trainer) -> None:
    """Sets the learning rate to the best one of a search."""
    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA] = Grid
    best = trainer.hyperparameter_search(lambda trial: trial.params, backend="optuna")
    assert isinstance(best, BestRun)
    assert best.run_id == "1"
    trainer.args.learning_rate = best.hyperparameters["learning_rate"]


def ds_config(case: Case) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of a case, whose other values are "auto"."""
    more = json.loads(json.dumps(case.ds))
    return auto_config(case.stage, **case.zero) | {"bf16": {"enabled": "auto"}} | more


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
    values: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "lr_scheduler_type": "cosine",
    }
    make_args, make_trainer = TrainingArguments, Trainer
    if case.family == "t5":
        make_args, make_trainer = Seq2SeqTrainingArguments, Seq2SeqTrainer
        values |= {"predict_with_generate": True, "generation_max_length": 6}
    args = make_args(
        output_dir=str(out / mode / name), use_cpu=True, report_to=[], disable_tqdm=True, seed=1, logging_steps=1,
        per_device_train_batch_size=BATCH // world, per_device_eval_batch_size=BATCH // world,
        learning_rate=1e-2, warmup_steps=2, adam_epsilon=1e-5,
        deepspeed=ds_config(case) if mode == "threed" else None, **(values | case.args),
    )  # fmt: skip
    set_seed(1)
    log = Log()
    model = load(out, case)
    starts = {"model_init": lambda: load(out, case)} if case.searches else {"model": model}
    trainer = make_trainer(
        **starts, args=args, train_dataset=rows(case, 32), eval_dataset=rows(case, 8), callbacks=[log],
        optimizers=optimizers(model, case.rates) if mode == "plain" else (None, None),
    )  # fmt: skip
    if case.evaluates:
        trainer.evaluate()
    if case.searches:
        search(trainer)
    resume = case.resume and str(out / mode / case.resume / "checkpoint-2")
    trainer.train(resume_from_checkpoint=resume)
    for checkpoint in case.again:
        trainer.evaluate()
        if mode == "plain":  # with DeepSpeed, the Trainer creates a new optimizer in every call
            trainer.optimizer = None
        trainer.train(resume_from_checkpoint=checkpoint and str(out / mode / name / checkpoint))
    log.rows += final_numbers(case, trainer)
    trainer.save_model(str(out / mode / name / "final"))
    if args.process_index == 0:
        (out / mode / f"{name}.json").write_text(json.dumps(log.rows))


def load(out: Path, case: Case) -> torch.nn.Module:
    """Returns the model of a case before the training."""
    model = AUTO[case.family].from_pretrained(out / "models" / case.family)
    if case.vocab is not None:
        model.resize_token_embeddings(case.vocab, mean_resizing=False)
    if case.peft:
        whole = [*case.whole] or None
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=whole)
        prompt = PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
        )
        model = get_peft_model(model, prompt if case.prompt else lora)
    return model


def rows(case: Case, count: int) -> torch.utils.data.Dataset[Any]:
    kinds = {"bert": Labeled, "t5": Unmasked}
    return kinds.get(case.family, Rows)(count)


def final_numbers(case: Case, trainer: Trainer) -> list[dict[str, float]]:
    """Returns numbers of the trained model: predictions and generated tokens, in which order matters."""
    if case.family in ("bert", "t5"):
        found = trainer.predict(rows(case, 8))
        values = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        return [{"eval_loss": found.metrics["test_loss"], "total": weighted(values)}]
    if case.generates:
        tokens = rows(case, 2)[0]["input_ids"][None, :4]
        with torch.no_grad():
            made = trainer.model_wrapped.generate(
                input_ids=tokens, max_new_tokens=6, do_sample=False
            )
        return [{"total": weighted(made.numpy())}]
    if "eval_steps" in case.args:
        return [{"eval_loss": trainer.evaluate()["eval_loss"]}]
    return []


def weighted(values: Any) -> float:
    """Returns a weighted sum of an array; the weights differ by position."""
    flat = torch.as_tensor(values, dtype=torch.float64).flatten()
    return float((flat * torch.arange(1, len(flat) + 1).sqrt()).sum())


if __name__ == "__main__":
    main(train)
