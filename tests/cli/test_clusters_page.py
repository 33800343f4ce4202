"""docs/guide/clusters.md: its scripts and manifests parse, and their commands have valid flags."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import blocks, check_tool, world_of
from tests.test_floors import ROOT

PAGE = next(ROOT.glob("docs/**/clusters.md"))


def check_training(words: list[str]) -> None:
    """Checks the flags of `torchrun … -m threed train …` or `threed train …`."""
    start = words.index("threed")
    asked = [{"$SLURM_JOB_NUM_NODES": "8"}.get(word, word) for word in words[:start]]
    world = world_of(asked) if "--nnodes" in asked else 64
    check_tool(words[start + 1 :], world)


def test_the_scripts_of_the_page_are_valid(tmp_path: Path) -> None:
    scripts = blocks(PAGE, "bash")
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        command = script.replace("\\\n", " ")
        (line,) = re.findall(r"^srun .*", command, re.MULTILINE)
        check_training(shlex.split(line))
        options = re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", script, re.MULTILINE)
        assert len(options) == script.count("#SBATCH")
        assert dict(options)["--signal"] == "TERM@600"


def test_the_manifests_of_the_page_are_valid() -> None:
    yaml = pytest.importorskip("yaml")  # comes with transformers
    job, jobs = (yaml.safe_load(text) for text in blocks(PAGE, "yaml"))
    assert (job["kind"], job["spec"]["trainer"]["numNodes"]) == ("TrainJob", 8)
    check_training(job["spec"]["trainer"]["command"])
    (node,) = jobs["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    check_training(command)
    name = f"{jobs['metadata']['name']}-{node['name']}-0-0.{jobs['metadata']['name']}"
    assert command[command.index("--rdzv-endpoint") + 1].startswith(name)
    shutdown = int(command[command.index("--shutdown-timeout") + 1])
    assert 30 < shutdown < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
