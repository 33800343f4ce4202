"""A program written for DeepSpeed: trains a Llama of `transformers` with the offload of a ds_config.json.

python examples/deepspeed_offload.py
torchrun --standalone --nproc-per-node 2 examples/deepspeed_offload.py examples/ds_offload.json

ds_offload.json offloads parameters and optimizer states to the folder runs/swap: set nvme_path to a folder on your NVMe
drive. If you set a device to "cpu" or "none", the losses stay the same, except for rounding with "none" on one rank.
The model is built on the meta device, so that its full parameters are never in memory at once. The program downloads no
files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import threed
from threed.data import open_data

try:
    import transformers
except ImportError:
    sys.exit("this example needs the package transformers: pip install transformers")

STEPS, SEQ = 20, 128


def build_model(vocab: int) -> torch.nn.Module:
    """Returns a Llama on the meta device, where the engine initializes its parameters slice by slice."""
    shapes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    rest = {
        "max_position_embeddings": SEQ,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=vocab, **shapes, **rest)
        )


def train(config: str | Path, steps: int = STEPS) -> list[float]:
    """Trains and returns the loss of each step."""
    data = open_data(None, "bytes", 0.05, SEQ, seed=1234)
    engine, _, _, _ = threed.initialize(model=build_model(data.vocab), config=config)
    micro, losses = engine.train_micro_batch_size_per_gpu(), []
    for step in range(steps):
        first = (
            step * engine.train_batch_size()
            + engine.global_rank * micro * engine.gradient_accumulation_steps()
        )
        for number in range(engine.gradient_accumulation_steps()):
            tokens = data.train.batch(first + number * micro, micro)["tokens"].to(engine.device)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        losses.append(engine.metrics.loss)
        if engine.global_rank == 0:
            print(
                f"step {engine.global_steps} loss {losses[-1]:.5f} lr {engine.get_lr()[0]:.2e}",
                flush=True,
            )
    return losses


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).with_name("ds_offload.json")
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        default=default,
        help="a ds_config.json (default %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    try:
        train(arguments.config)
    except (ValueError, OSError) as error:  # an invalid file, or an error of the drive
        sys.exit(str(error))
