"""The presets of published models: their sizes, and the forecast memory of their topologies on 80 GB."""

from __future__ import annotations

import re

import pytest

from tests import recipes
from tests.test_floors import ROOT

# The published numbers of parameters, in billions: the sizes of the safetensors files of the
# repositories at huggingface.co; of Gemma 3 the text model (arXiv 2503.19786, table 1: 1,012 M in
# the embedding, 10,759 M in other layers).
PARAMETERS = {
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "qwen3-8b": 8.191,
    "qwen3-32b": 32.762,
    "gemma3-12b": 11.771,
    "mistral-7b": 7.248,
    "mixtral-8x7b": 46.703,
    "qwen3-30b-a3b": 30.532,
    "deepseek-v3": 671.026,
}
# 95 % of 80 GB. An H100 with 80 GB has 79.6 GiB (85.5 GB) of memory, so at least 9.5 GB remain for
# CUDA's context, NCCL's buffers and fragmentation.
LIMIT = 0.95 * 80
# The runs that are always tested: every preset, and every number of GPUs.
ALWAYS = [
    ("llama3-8b", 8), ("mistral-7b", 64), ("qwen3-8b", 512), ("gemma3-12b", 8), ("qwen3-32b", 64), ("llama3-70b", 512),
    ("mixtral-8x7b", 512), ("qwen3-30b-a3b", 64), ("deepseek-v3", 256),
]  # fmt: skip


@pytest.mark.seldom("qwen3-8b-512", "gemma3-12b*", "qwen3-32b*", "llama3-70b*")
@pytest.mark.parametrize(
    ("name", "world"),
    [pytest.param(*run, marks=() if run in ALWAYS else pytest.mark.grid) for run in recipes.RUNS],
)
def test_a_recipe_fits_into_80_gb_and_is_in_the_table(name: str, world: int) -> None:
    made = recipes.plan(name, world)
    row = recipes.row(name, made)
    assert made.parameters == pytest.approx(PARAMETERS[name] * 1e9, rel=0.005)
    assert len(made.ranks) == world
    assert recipes.peak(made) <= LIMIT
    busy = made.with_imbalance(1.25)  # of the busiest expert rank
    assert busy is None or busy.peak <= LIMIT * 1e9
    assert made.config.parallel.tp <= 8  # tensor groups stay in a machine with 8 GPUs
    # What the ranks of a machine store in host memory; machines with 8 GPUs usually have 2 TB.
    host = sum(rank.bytes.get("offloaded", 0) for rank in made.ranks[:8])
    assert host <= 1.4e12
    # The figures depend on the version of torch; the first three columns do not.
    page = next(ROOT.glob("docs/**/recipes.md")).read_text()
    columns = [column.strip() for column in row.split("|")]
    found = re.search(rf"^{re.escape('|'.join(row.split('|')[:4]))}\| ([\d.]+) \|", page, re.M)
    assert found is not None, f"stale: python -m tests.recipes\n{row}"
    assert float(found[1]) == pytest.approx(float(columns[4]), rel=0.03)
