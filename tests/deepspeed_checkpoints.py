"""Writes checkpoints with DeepSpeed's engine on CPUs, for tests of `threed convert --allow-pickle`.

    torchrun --standalone --nproc-per-node 2 tests/deepspeed_checkpoints.py OUT

OUT/NAME is a checkpoint of `engine.save_checkpoint`, with a config.json.

OUT/NAME.safetensors has the expected values of every parameter: weight, exp_avg and exp_avg_sq from
the engine; the weight according to DeepSpeed's script zero_to_fp32 (script); and the weight one
step later (next).

OUT/NAME-universal is the output of DeepSpeed's ds_to_universal for some of the checkpoints.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

STEPS, ROWS, SEQ, VOCAB = 3, 4, 10, 53
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True}
UNIVERSAL = ("gpt2-1-fp32", "llama-3-bf16")
FP16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 3}
CASES: dict[
    str, tuple[str, int, bool, dict[str, Any]]
] = {  # model, stage, whether bf16, more keys of the configuration
    "gpt2-1-fp32": ("gpt2", 1, False, {}),
    "llama-2-fp32": ("llama", 2, False, {}),
    "elastic-1-fp32": ("gpt2", 1, False, {"elastic_checkpoint": True}),
    "gpt2-3-fp32": (
        "gpt2",
        3,
        False,
        {"sub_group_size": 700, "stage3_param_persistence_threshold": 40},
    ),
    "llama-1-bf16": ("llama", 1, True, {}),
    "gpt2-2-bf16": ("gpt2", 2, True, {}),
    "robin-2-bf16": ("gpt2", 2, True, {"round_robin_gradients": True}),
    "llama-3-bf16": ("llama", 3, True, {}),
    "frozen-2-bf16": ("llama", 2, True, {}),
    "frozen-3-fp32": ("llama", 3, False, {}),
    "llama-2-fp16": ("llama", 2, False, {}),
    "gpt2-3-fp16": ("gpt2", 3, False, {}),
    "gpt2-0-fp32": ("gpt2", 0, False, {}),
    "llama-0-bf16": ("llama", 0, True, {}),
}


def make(name: str) -> nn.Module:
    """Returns a small model with unusual sizes. GPT-2 has a tied embedding, Llama does not."""
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {
            "vocab_size": VOCAB,
            "n_positions": 16,
            "n_embd": 18,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 22,
        }
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 26,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 16,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def batch(step: int) -> Tensor:
    """Returns the tokens of a step for all ranks, [rows seq]."""
    return torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))


def write(deepspeed: Any, out: Path, name: str) -> None:
    """Trains a few steps and saves the checkpoint and the expected values."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    kind, stage, bf16, more = CASES[name]
    model = make("gpt2" if kind == "gpt2" else "llama")
    if name.startswith("frozen"):
        model.get_input_embeddings().requires_grad_(False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // world, "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, **more}, "bf16": {"enabled": bf16}, "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }  # fmt: skip
    if name == "llama-1-bf16":
        # selects another optimizer of DeepSpeed, which writes other files
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if name.endswith("fp16"):
        settings["fp16"] = FP16
    groups = [{"params": decayed}, {"params": plain}]
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, model_parameters=groups, dist_init_required=False
    )

    def step(number: int) -> None:
        ids = batch(number).chunk(world)[rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    for number in range(STEPS):
        step(number)
    engine.save_checkpoint(str(out / name))
    found: dict[str, Tensor] = {}

    def collect(part: str, read: Any) -> None:
        if "round_robin_gradients" in more:
            return  # DeepSpeed 0.19.8 returns values of other parameters here, which do not match the module's weights
        for key, parameter in engine.module.named_parameters():
            value = read(parameter) if parameter.requires_grad and stage else None
            if value is not None:
                found[f"{part}/{key}"] = value.detach().clone()

    if 0 < stage < 3:  # DeepSpeed 0.19.8 links the optimizer states before they exist
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    collect("weight", safe_get_full_fp32_param)
    for part in ("exp_avg", "exp_avg_sq"):
        collect(part, lambda p, part=part: safe_get_full_optimizer_state(p, part))
    if stage < 3:
        found |= {
            f"module/{key}": p.detach().float().clone()
            for key, p in engine.module.named_parameters()
        }
    if name.endswith("fp16"):
        found["scaler"] = torch.tensor(scales(copy.deepcopy(engine.optimizer.loss_scaler)))
    step(STEPS)
    collect("next", safe_get_full_fp32_param)
    if rank == 0:
        model.config.save_pretrained(out / name)
        # DeepSpeed 0.19.8's script refuses the files of that optimizer
        known = stage and name != "llama-1-bf16"
        script = get_fp32_state_dict_from_zero_checkpoint(str(out / name)) if known else {}
        found |= {f"script/{key}": value.clone() for key, value in script.items()}
        save_file(
            {key: value.contiguous() for key, value in found.items()}, out / f"{name}.safetensors"
        )


def scales(scaler: Any) -> list[float]:
    """Returns the loss scale at the save, and after each further update, if none overflows."""
    found = []
    for _ in range(8):
        found.append(float(scaler.cur_scale))
        scaler.update_scale(False)
    return found


def make_universal(folder: Path, out: Path) -> None:
    """Converts a checkpoint with DeepSpeed's ds_to_universal."""
    from deepspeed.checkpoint import ds_to_universal

    words = ["--input_folder", str(folder), "--output_folder", str(out), "--inject_missing_state"]
    sys.argv = ["ds_to_universal", *words, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch.distributed as dist

    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    linear = torch.nn.functional.linear
    deepspeed.init_distributed("gloo")
    for name in CASES:
        write(deepspeed, out, name)
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 has replaced this function
    if dist.get_rank() == 0:
        for name in UNIVERSAL:
            make_universal(out / name / f"global_step{STEPS}", out / f"{name}-universal")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
