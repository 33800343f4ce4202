"""The module `deepspeed` that threed provides: its names, its import, and the program that runs scripts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import threed
from threed.interop import deepspeed
from threed.interop.deepspeed.__main__ import main
from threed.interop.deepspeed.names import ALIASES, OFFERED, REFUSED, VERSION, refusal
from threed.interop.deepspeed.namespace import modules

ROOT = Path(threed.__file__).parents[1]
# Names that transformers 5.24, accelerate 1.15, trl 1.16 and peft 0.21 use. An attribute after
# "()" is one of the result of a call.
TOUCHED = {
    "transformers": """
        __version__ accelerator.get_accelerator accelerator.get_accelerator().current_device_name comm.get_rank
        runtime.zero.partition_parameters._orig_torch_arange
        runtime.zero.partition_parameters.get_accelerator
        runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor
        utils.groups._get_sequence_parallel_rank utils.groups._get_sequence_parallel_world_size
        utils.is_initialized utils.logger zero.GatheredParameters zero.Init zero.register_external_parameter
    """,
    "accelerate": """
        DeepSpeedEngine checkpoint.utils.clone_tensors_for_torch_save comm.init_distributed comm.is_initialized
        initialize launcher.runner.DEEPSPEED_ENVIRONMENT_NAME ops.adam.DeepSpeedCPUAdam ops.lion.DeepSpeedCPULion
        runtime.lr_schedules.VALID_LR_SCHEDULES runtime.utils.move_to_device utils.set_z3_leaf_modules
        zero.GatheredParameters
    """,
    "trl": """
        comm.get_rank initialize runtime.engine.DeepSpeedEngine
        runtime.zero.partition_parameters.ZeroParamStatus zero.GatheredParameters
    """,
    "peft": "utils.safe_get_full_grad zero.GatheredParameters",
    "programs": """
        DeepSpeedConfig OnDevice PipelineModule add_config_arguments checkpointing.checkpoint
        checkpointing.configure checkpointing.is_configured checkpointing.model_parallel_cuda_manual_seed
        checkpointing.reset comm.all_reduce comm.barrier comm.get_local_rank comm.get_world_size get_accelerator
        init_distributed log_dist logger moe.utils.split_params_into_different_moe_groups_for_optimizer
        ops.adam.FusedAdam pipe.LayerSpec pipe.PipelineModule pipe.TiedLayerSpec
        runtime.activation_checkpointing.checkpointing.checkpoint runtime.config.DeepSpeedConfig
        runtime.dataloader.RepeatingLoader runtime.lr_schedules.WarmupCosineLR runtime.lr_schedules.WarmupDecayLR
        runtime.lr_schedules.WarmupLR runtime.lr_schedules.add_tuning_arguments runtime.pipe.engine.PipelineEngine
        runtime.pipe.topology.PipeDataParallelTopology runtime.utils.see_memory_usage runtime.utils.set_random_seed
        runtime.zero.config.ZeroStageEnum runtime.zero.offload_config.OffloadDeviceEnum
        utils.RepeatingLoader utils.groups._get_data_parallel_group utils.instrument_w_nvtx utils.log_dist
        utils.logging.logger utils.safe_get_full_fp32_param utils.safe_get_full_optimizer_state
        utils.safe_set_full_fp32_param utils.torch.required_torch_version utils.unset_z3_leaf_modules
        utils.z3_leaf_module utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
        utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
        utils.zero_to_fp32.load_state_dict_from_zero_checkpoint version
    """,
}  # fmt: skip
REFUSED_NAMES = """
    init_inference tp_model_init module_inject.replace_module moe.layer.MoE ops.adagrad.DeepSpeedCPUAdagrad
    ops.lamb.FusedLamb ops.adam.ZenFlowCPUAdam profiling.flops_profiler.FlopsProfiler
    runtime.fp16.onebit.adam.OnebitAdam runtime.hybrid_engine.DeepSpeedHybridEngine
    runtime.lr_schedules.LRRangeTest runtime.lr_schedules.OneCycle
    runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF
    runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter
    utils.groups._get_sequence_parallel_group utils.safe_set_full_grad zero.TiledLinear
""".split()


def find(path: str) -> Any:
    """Returns the object of a dotted name below `deepspeed`."""
    found: Any = deepspeed
    for part in path.split("."):
        found = getattr(found, part.removesuffix("()"))
        found = found() if part.endswith("()") else found
    return found


@pytest.mark.parametrize("library", TOUCHED)
def test_names_that_libraries_use(library: str) -> None:
    for path in TOUCHED[library].split():
        assert find(path) is not NotImplemented, path


def test_every_name_of_the_table_resolves() -> None:
    for name, module in modules().items():
        for attribute in dir(module):
            if not attribute.startswith("__"):
                assert getattr(module, attribute) is not NotImplemented, f"{name}.{attribute}"
    assert modules()["deepspeed.zero"] is deepspeed.runtime.zero is deepspeed.zero
    assert set(modules()) == {*OFFERED, *ALIASES}


@pytest.mark.parametrize("path", REFUSED_NAMES)
def test_refused_names(path: str) -> None:
    with pytest.raises(AttributeError, match=r"^threed does not offer deepspeed.*: use "):
        find(path)


def test_texts_of_refusals() -> None:
    adamw = "use AdamW of torch, or the config's optimizer AdamW, Adam, SGD or Lion"
    assert refusal("deepspeed.ops.lamb") == f"threed does not offer deepspeed.ops.lamb: {adamw}"
    for name in ("deepspeed.ops.lamb.Other", "deepspeed.runtime.x.FusedLamb"):
        assert refusal(name).endswith(adamw)
    assert refusal("deepspeed.other").endswith("threed's own API (docs/guide/deepspeed.md)")
    for name, text in REFUSED.items():
        if not name.startswith(("engine.", "PipelineModule.")):
            assert text.startswith("use "), name
    rows = ((name, " ".join(names.values()).split()) for name, names in OFFERED.items())
    offered = {f"{name}.{row.partition('=')[0]}" for name, names in rows for row in names}
    assert offered.isdisjoint(REFUSED)


# ------------------------------------------------------------------------------------------------------------- imports

INSTALLED = """
import importlib.util, sys
import importlib.metadata as metadata
import threed
threed.install_as_deepspeed()
threed.install_as_deepspeed()
assert importlib.util.find_spec("deepspeed") is not None and "deepspeed" not in sys.modules
assert metadata.version("deepspeed") == "VERSION"
assert metadata.distribution("deepspeed").metadata["Name"] == "deepspeed"
assert set(metadata.packages_distributions()["deepspeed"]) == {"deepspeed"}  # twice if DeepSpeed is installed
import deepspeed, deepspeed.runtime.lr_schedules, deepspeed.zero as zero
from deepspeed import comm, utils
assert deepspeed.__version__ == deepspeed.version == "VERSION" and utils is deepspeed.utils
assert sys.modules["deepspeed.zero"] is deepspeed.runtime.zero is zero
assert not {"torch", "transformers", "accelerate"} & set(sys.modules)

def error(code, kind):
    try:
        exec(code)
    except kind as raised:
        return str(raised)
    raise AssertionError(code)

for code in ("import deepspeed.ops.lamb", "from deepspeed.ops import lamb", "deepspeed.ops.lamb"):
    kind = ImportError if "import" in code else AttributeError
    assert error(code, kind) == threed.interop.deepspeed.names.refusal("deepspeed.ops.lamb"), code
text = error("from deepspeed.ops.adam import OnebitAdam", ImportError)
assert text.startswith("threed does not offer deepspeed.ops.adam.OnebitAdam: use AdamW"), text
assert hasattr(deepspeed, "missing") is False
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from threed.interop.deepspeed import zero as same
assert same.ZeroParamStatus is ZeroParamStatus and "torch" in sys.modules
"""
# code before `install_as_deepspeed` -> the error
LATE = {
    "import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed')": "DeepSpeed itself has been imported:"
    " call threed.install_as_deepspeed() first, before the import of deepspeed",
    "import sys, types; sys.modules['accelerate.utils'] = types.ModuleType('x')": "accelerate has been imported and found"
    " no deepspeed: call threed.install_as_deepspeed() first, before the import of accelerate",
    "import transformers.integrations.deepspeed": "transformers has been imported and found no deepspeed:"
    " call threed.install_as_deepspeed() first, before the import of transformers",
}  # fmt: skip


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_install_as_deepspeed() -> None:
    result = run("-c", INSTALLED.replace("VERSION", VERSION))
    assert result.returncode == 0, result.stderr


@pytest.mark.seldom("transformers")
@pytest.mark.parametrize("before", LATE, ids=["deepspeed", "accelerate", "transformers"])
def test_installed_too_late(before: str) -> None:
    if "transformers" in before and importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("transformers finds the installed DeepSpeed")
    result = run("-c", f"{before}\nimport threed\nthreed.install_as_deepspeed()")
    assert result.stderr.splitlines()[-1] == f"RuntimeError: {LATE[before]}"


SCRIPT = """
import pickle, sys
import neighbor
import deepspeed

class Pickled: ...

if __name__ == "__main__":
    print(sys.argv[1:], sys.path[0] in (sys.argv[0].rpartition("/")[0], ""), deepspeed.__version__)
    print(type(pickle.loads(pickle.dumps(Pickled()))).__module__, __file__)
    raise SystemExit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbor.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("target", [["SCRIPT"], ["-m", "script"]], ids=["script", "module"])
def test_a_script_runs(script: Path, target: list[str]) -> None:
    target = [str(script) if word == "SCRIPT" else word for word in target]
    result = run("-m", "threed.interop.deepspeed", *target, "3", "--x", folder=script.parent)
    want = f"['3', '--x'] True {VERSION}\n__main__ {script}\n"
    assert (result.stdout, result.returncode) == (want, 3), result.stderr


def test_errors_of_a_script(script: Path) -> None:
    result = run("-m", "threed.interop.deepspeed", str(script), "word")
    *_, line, _, last = result.stderr.splitlines()
    assert "raise SystemExit(int(sys.argv[1]))" in line
    assert str(script) in result.stderr
    assert last.startswith("ValueError: invalid literal for int()")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.py"], "no such script: none.py"),
        ([], "give the path of a script, or -m and the name of a module"),
        (["-m"], "give the path of a script, or -m and the name of a module"),
        (["--config", "x"], "give the path of a script, or -m and the name of a module"),
    ],
)
def test_a_missing_script(arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        main(arguments)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m threed.interop.deepspeed")


def test_the_module_is_not_installed_here() -> None:
    """The names are available without `install_as_deepspeed`."""
    assert (deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()) == (1, 0)
    assert "deepspeed" not in sys.modules or not isinstance(
        importlib.import_module("deepspeed"), type(deepspeed.zero)
    )
