"""Partition by measured times: what is measured, kept, cut by, and trained; `benchmarks/partition.py` has the speed.

Layers that sleep are the slow ones: their times hold on a busy machine, and their FLOPs say nothing of it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import looping
from tests.configs import SEQ, VOCAB, Case, batch, config_of, share, topology_of
from tests.harness import run_ranks
from tests.users_layers import whole
from threed import models, schedules
from threed.arguments import load_checked
from threed.config import Config, ConfigError
from threed.engine import Engine
from threed.forecast import Forecast
from threed.layer_times import layer_times
from threed.layers import Embedding, LanguageModelHead, LayerNorm, MicroBatch, RowParallelLinear, Slicing
from threed.planner import balanced, uniform
from threed.planner.grid import Grid
from threed.planner.measured import LayerBytes, LayerTimes, divide, most_kept, stage_costs
from threed.topology import Topology

NAP = 0.002  # seconds: of a quick block's forward; its backward takes twice as long
