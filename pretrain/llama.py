"""Trains a Llama, or a Qwen3 (`--model.qk-norm true`), with pipeline, tensor and data parallelism.

torchrun --standalone --nproc-per-node 4 pretrain/llama.py --preset llama-tiny --parallel.tp 2 --parallel.pp 2
python pretrain/llama.py --help                                  # all keys, their meanings and defaults
python pretrain/llama.py --preset llama-tiny --dry-run --world-size 4  # checks, and prints memory and traffic
"""

from __future__ import annotations

import sys

from threed.cli import launch

if __name__ == "__main__":
    sys.exit(launch.main(sys.argv[1:], arch="llama", prog="pretrain/llama.py"))
