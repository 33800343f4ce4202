"""Trains a GPT in three dimensions.

torchrun --standalone --nproc-per-node 4 pretrain/gpt.py --preset tiny --parallel.tp 2 --parallel.pp 2
python pretrain/gpt.py --help                                  # every key, its meaning and default
python pretrain/gpt.py --preset tiny --dry-run --world-size 4  # check, and print what it would take
"""

from __future__ import annotations

import sys

from threed.cli import launch

if __name__ == "__main__":
    sys.exit(launch.main(sys.argv[1:], arch="gpt", prog="pretrain/gpt.py"))
