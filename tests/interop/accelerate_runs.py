"""Trainings with Accelerate that test_accelerate.py compares; `huggingface_runs` describes the commands.

"plain" is the same loop with an Accelerator without a plugin, on one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[2] == "threed":
    import threed

    threed.install_as_deepspeed()

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

from tests.interop.huggingface_runs import Rows, auto_config, main

BATCH, ROWS, EVALUATED = 4, 28, 10
RATE, WARMUP, TOTAL = 1e-2, 2, 8
# Under stage 3, also shard small parameters: these models have no others.
THRESHOLD = "stage3_param_persistence_threshold"


def auto(stage: int, *sections: str) -> dict[str, Any]:
    """Returns a DeepSpeed configuration in which every value with a default is "auto"."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", THRESHOLD)
    rates = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    known = {
        "optimizer": {
            "type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-5},
        },
        "scheduler": {
            "type": "WarmupDecayLR", "params": dict.fromkeys(rates, "auto") | {"warmup_type": "linear"},
        },
    }  # fmt: skip
    config = auto_config(stage, **dict.fromkeys(sizes, "auto"))
    return config | {name: known[name] for name in sections}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        stage: ZeRO stage; ignored by "plain".
        accumulation: number of micro-batches of a step.
        family: key of `FAMILIES`.
        plugin: further arguments of the DeepSpeedPlugin.
        config: the plugin's DeepSpeed configuration, used instead of arguments.
        precision: `mixed_precision` of the Accelerator.
        run: kind of the training, see `train`.
        split: whether each batch of the loader is split over the ranks (`split_batches`), so that the
            scheduler is stepped once per step on any number of ranks.
        counts: numbers of micro-batches of the steps, if the program itself sets the boundaries.
        resume: another case, whose state after its second step is continued.
    """

    stage: int
    accumulation: int = 1
    family: str = "gpt2"
    plugin: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    precision: str = "no"
    run: str = "script"
    split: bool = False
    counts: tuple[int, ...] = ()
    resume: str | None = None


CASES = {
    f"script-{stage}-{accumulation}": Case(stage, accumulation, family)
    for stage, family in enumerate(("opt", "gpt2", "llama", "gemma2"))
    for accumulation in (1, 2)
} | {
    "split-2": Case(2, 2, "llama", split=True),
    "resumed-2": Case(2, 2, "llama", split=True, resume="split-2"),
    "resumed-3": Case(3, 2, "gemma2", resume="script-3-2"),
    "auto-2": Case(2, 2, config=auto(2)),
    "auto-3": Case(3, config=auto(3)),
    "dummies-1": Case(1, 2, config=auto(1, "optimizer", "scheduler")),
    "dummies-3": Case(3, 2, "llama", config=auto(3, "optimizer", "scheduler")),
    "callable-3": Case(3, config=auto(3, "optimizer")),
    "boundaries-0": Case(0, 2, counts=(1, 3, 2, 1)),
    "boundaries-3": Case(3, 2, counts=(1, 3, 2, 1)),
    "offload-2": Case(2, plugin={"offload_optimizer_device": "cpu"}),
    "offload-3": Case(
        3, family="llama", plugin={"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    ),
    "init-3": Case(3, family="llama", plugin={"zero3_init_flag": True}),
    "bf16-2": Case(2, precision="bf16", family="llama"),
    "freed-1": Case(1, run="freed"),
    "freed-3": Case(3, family="llama", run="freed"),
    "two-models": Case(2, 2, run="two models"),
    "inference": Case(2, 2, run="inference"),
}  # fmt: skip


def make_accelerator(case: Case, mode: str) -> Accelerator:
    """Returns the Accelerator of a case."""
    data = DataLoaderConfiguration(split_batches=case.split)
    if mode == "plain":
        return Accelerator(
            cpu=True, gradient_accumulation_steps=case.accumulation, mixed_precision=case.precision,
            dataloader_config=data,
        )  # fmt: skip
    PartialState(cpu=True)  # otherwise, Accelerator starts one process on a machine without GPUs
    plugins: Any = plugin(case, case.stage)
    if case.run in ("two models", "inference"):
        plugins = {"first": plugins, "second": plugin(case, 3)}
    return Accelerator(
        gradient_accumulation_steps=case.accumulation, mixed_precision=case.precision,
        deepspeed_plugins=plugins, dataloader_config=data,
    )  # fmt: skip


def plugin(case: Case, stage: int) -> DeepSpeedPlugin:
    """Returns a plugin with the values of a case."""
    if case.config is not None:
        return DeepSpeedPlugin(hf_ds_config=case.config, zero3_init_flag=False)
    values = {"zero3_init_flag": False} | case.plugin
    made = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=case.accumulation, gradient_clipping=1.0,
        zero3_save_16bit_model=True, **values,
    )  # fmt: skip
    made.deepspeed_config["zero_optimization"][THRESHOLD] = 0
    return made


def loader(accelerator: Accelerator, count: int) -> DataLoader[Any]:
    parts = 1 if accelerator.split_batches else accelerator.num_processes
    return DataLoader(Rows(count), batch_size=BATCH // parts)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the mean loss of all tokens, of which each rank has the same number."""
    tokens = batch["input_ids"]
    return model(input_ids=tokens, labels=tokens).loss


class Script:
    """The script of Accelerate's documentation: a model, its optimizer, and a loop.

    Args:
        accelerator: the Accelerator.
        model: the model.
        case: the case.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, case: Case) -> None:
        self.accelerator, self.case = accelerator, case
        optimizer, scheduler = optimizers(accelerator, model, case)
        self.model, self.optimizer, self.loader, self.evaluated, self.scheduler = accelerator.prepare(
            model, optimizer, loader(accelerator, ROWS), loader(accelerator, EVALUATED), scheduler
        )  # fmt: skip

    def train(self, steps: int, skipped: int = 0) -> list[dict[str, float]]:
        """Trains steps after skipped micro-batches; returns losses, norms and rates."""
        rows: list[dict[str, float]] = []
        batches = iter(self.accelerator.skip_first_batches(self.loader, skipped))
        last = self.boundaries()
        self.model.train()
        while len(rows) < steps:
            batch = next(batches)
            with self.micro_batch(next(last, None)):
                loss = loss_of(self.model, batch)
                rows += self.update(loss)
        return rows

    def update(self, loss: torch.Tensor) -> list[dict[str, float]]:
        """Runs the rest of a micro-batch; returns the numbers of the step if it has ended."""
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if not self.accelerator.sync_gradients:
            return []
        mean = self.accelerator.gather(loss.detach()).float().mean().item()
        rate = self.scheduler.get_last_lr()[0]
        return [{"loss": mean, "grad_norm": float(norm), "learning_rate": rate}]

    def boundaries(self) -> Iterator[bool]:
        """Yields whether each micro-batch is the last of its step, if the program sets it."""
        for count in self.case.counts:
            yield from [False] * (count - 1) + [True]

    def micro_batch(self, last: bool | None) -> Any:
        """Returns the context of a micro-batch."""
        if last is None:
            return self.accelerator.accumulate(self.model)
        self.accelerator.sync_gradients = last
        return self.accelerator.autocast()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns the mean loss of the samples, without those that fill the last batch."""
        self.model.eval()
        losses = []
        for batch in self.evaluated:
            logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1).float()
            target = batch["input_ids"][:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
            per_sample = loss.view(len(batch["input_ids"]), -1).mean(1)
            losses.append(self.accelerator.gather_for_metrics(per_sample))
        assert len(torch.cat(losses)) == EVALUATED
        return {"eval_loss": torch.cat(losses).mean().item()}

    def save(self, folder: Path) -> None:
        """Saves the model in Hugging Face's format, and again by `save_model`."""
        self.accelerator.save_model(self.model, folder / "again")
        state = self.accelerator.get_state_dict(self.model)
        self.accelerator.unwrap_model(self.model).save_pretrained(
            folder, is_main_process=self.accelerator.is_main_process, state_dict=state,
            save_function=self.accelerator.save,
        )  # fmt: skip


def optimizers(accelerator: Accelerator, model: torch.nn.Module, case: Case) -> tuple[Any, Any]:
    """Returns the optimizer and the scheduler of a case, made before `prepare`."""
    config = case.config or {}
    scale = 1 if accelerator.split_batches else accelerator.num_processes

    def linear(optimizer: Any, scale: int = 1) -> Any:
        return get_linear_schedule_with_warmup(optimizer, WARMUP * scale, TOTAL * scale)

    if "optimizer" in config and accelerator.deepspeed_plugin:
        dummy = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.0)
        how: dict[str, Any] = {"lr_scheduler_callable": linear}
        if "scheduler" in config:
            how = {"total_num_steps": TOTAL * scale, "warmup_num_steps": WARMUP}
        return dummy, DummyScheduler(dummy, **how)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-5, weight_decay=0.0)
    if "scheduler" in config:
        return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, delayed)
    return adamw, linear(adamw, scale)


def delayed(step: int) -> float:
    """Returns the relative rate of DeepSpeed's scheduler, which begins one step later."""
    done = max(step - 1, 0)
    return done / WARMUP if done < WARMUP else (TOTAL - done) / (TOTAL - WARMUP)


def load(out: Path, family: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(out / "models" / family)


def train_script(accelerator: Accelerator, case: Case, out: Path, folder: Path) -> list[Any]:
    """Trains two steps, saves, trains two further steps, and repeats these after `load_state`."""
    script = Script(accelerator, load(out, case.family), case)
    rest = 2 * case.accumulation
    if case.resume:
        accelerator.load_state(str(folder.parent / case.resume / "state"))
        rows = script.train(2, rest)
    elif case.counts:
        rows = [*script.train(len(case.counts)), script.evaluate()]
    else:
        rows = [script.evaluate(), *script.train(2), script.evaluate()]
        accelerator.save_state(str(folder / "state"))
        rows += script.train(2, rest)
        accelerator.load_state(str(folder / "state"))
        repeated = script.train(2, rest)
        assert repeated == rows[-2:], (repeated, rows)
    script.save(folder / "final")
    return rows


def train_freed(accelerator: Accelerator, case: Case, out: Path, folder: Path) -> list[Any]:
    """Trains, frees the memory, and prepares the same model and then another one."""
    script = Script(accelerator, load(out, case.family), case)
    rows = script.train(2)
    model = accelerator.unwrap_model(script.model)
    accelerator.free_memory()
    again = Script(accelerator, model, case)
    rows += again.train(2)
    accelerator.free_memory()
    other = Script(accelerator, load(out, "opt"), case)
    rows += [*other.train(2), other.evaluate()]
    other.save(folder / "final")
    return rows


def select(accelerator: Accelerator, name: str) -> None:
    """Selects a plugin for the following calls of `prepare`."""
    if plugins := accelerator.state.deepspeed_plugins:
        accelerator.state.select_deepspeed_plugin(name)
        plugins[name].deepspeed_config["train_micro_batch_size_per_gpu"] = (
            BATCH // accelerator.num_processes
        )


def train_two_models(accelerator: Accelerator, case: Case, out: Path, folder: Path) -> list[Any]:
    """Trains two models in one loop, by two plugins and two Accelerators."""
    second = Accelerator(
        cpu=accelerator.deepspeed_plugin is None, gradient_accumulation_steps=case.accumulation
    )
    one = Script(accelerator, load(out, "gpt2"), case)
    select(accelerator, "second")
    two = Script(second, load(out, "llama"), case)
    rows: list[Any] = []
    for batch in one.loader:
        with accelerator.accumulate(one.model, two.model):
            rows += one.update(loss_of(one.model, batch))
            rows += two.update(loss_of(two.model, batch))
    rows += [one.evaluate(), two.evaluate()]
    select(accelerator, "first")
    two.save(folder / "final")
    return rows


def train_inference(accelerator: Accelerator, case: Case, out: Path, folder: Path) -> list[Any]:
    """Trains a model with the logits of another one, which has no optimizer."""
    script = Script(accelerator, load(out, "gpt2"), case)
    select(accelerator, "second")
    teacher = accelerator.prepare(load(out, "llama"))
    teacher.eval()
    select(accelerator, "first")
    rows: list[Any] = []
    for batch in script.loader:
        with accelerator.accumulate(script.model):
            with torch.no_grad():
                target = teacher(input_ids=batch["input_ids"]).logits.softmax(-1)
            logits = script.model(input_ids=batch["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
            rows += script.update(loss)
    script.save(folder / "final")
    return rows


def train(out: Path, mode: str, name: str) -> None:
    """Runs a case, and writes its results."""
    case, folder = CASES[name], out / mode / name
    set_seed(1)
    accelerator = make_accelerator(case, mode)
    train_case = {
        "script": train_script, "freed": train_freed, "two models": train_two_models,
        "inference": train_inference,
    }[case.run]  # fmt: skip
    rows = train_case(accelerator, case, out, folder)
    if accelerator.is_main_process:
        (out / mode / f"{name}.json").write_text(json.dumps(rows))
    accelerator.wait_for_everyone()
    accelerator.free_memory()


if __name__ == "__main__":
    main(train)
