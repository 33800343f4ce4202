"""Trains a GPT with pipeline, tensor and data parallelism.

torchrun --standalone --nproc-per-node 4 pretrain/gpt.py --preset tiny --parallel.tp 2 --parallel.pp 2
python pretrain/gpt.py --help                                  # all keys, their meanings and defaults
python pretrain/gpt.py --preset tiny --dry-run --world-size 4  # checks, and prints memory and traffic
"""

from __future__ import annotations

import sys

from threed.cli import launch

if __name__ == "__main__":
    sys.exit(launch.main(sys.argv[1:], arch="gpt", prog="pretrain/gpt.py"))
