"""Trains a Llama (with `--model.qk-norm true` a Qwen3) in three dimensions.

torchrun --standalone --nproc-per-node 4 pretrain/llama.py --preset llama-tiny --parallel.tp 2 --parallel.pp 2
python pretrain/llama.py --help                                  # every key, its meaning and default
python pretrain/llama.py --preset llama-tiny --dry-run --world-size 4  # check, and print what it would take
"""

from __future__ import annotations

import sys

from threed.cli import launch

if __name__ == "__main__":
    sys.exit(launch.main(sys.argv[1:], arch="llama", prog="pretrain/llama.py"))
