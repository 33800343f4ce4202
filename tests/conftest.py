"""Settings of all tests: one thread per rank, no downloads, no GPU tests without a GPU."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Inductor uses the processor's instruction set without first compiling a test program for each instruction set.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Hypothesis has no deadline, because a machine with other work may stall. In CI its examples are the same in each run.
# If it is missing, the modules that need it are skipped (TOOLS).
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("threed", deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("threed")

# Packages that only some tests need. If one is missing, the modules that import it are skipped.
TOOLS = ("einops", "hatchling", "hypothesis", "matplotlib", "tokenizers", "transformers", "wandb")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores files without tests marked `alone` if only such tests are selected.

    Importing these files would take longer than the tests.
    """
    selects_alone = config.option.markexpr.startswith("alone")
    if (
        selects_alone
        and collection_path.suffix == ".py"
        and "mark.alone" not in collection_path.read_text()
    ):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips a module that needs a missing package of TOOLS, with the command that installs it."""
    report = yield
    missing = (
        re.search(r"ModuleNotFoundError: .*?'(\w+)'", str(report.longrepr))
        if report.failed
        else None
    )
    if missing is not None and missing[1] in TOOLS:
        reason = f"Skipped: needs {missing[1]}: pip install {missing[1]}"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Excludes what earlier modules left from garbage collection.

    Otherwise a collection takes up to a second in the last modules. Tests that measure memory
    collect garbage many times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ends_its_process_group() -> Generator[None, None, None]:
    """Ends the process group that a test has created in this process, such as by `threed.initialize`.

    With a process group, the tests that follow would, for example, forecast for the group's device.
    """
    had_one = _has_process_group()
    yield
    if _has_process_group() and not had_one:
        sys.modules["torch.distributed"].destroy_process_group()


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def keep_to_a_core() -> None:
    """Binds this worker and the ranks that it starts to one core, if there are enough workers.

    Ranks mostly wait for each other. Waking a rank on another core makes the tests take 9 % longer.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    cores = sorted(getattr(os, "sched_getaffinity", lambda _: ())(0))
    if worker and int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(cores) > 1:
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def schedule_as_batch() -> None:
    """Schedules this process, and the ranks that it starts, in batch mode, unless it has another policy already.

    Otherwise a thread of gloo that a message wakes interrupts the thread that holds the lock of its connection,
    and then polls until its time slice ends.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def collect_from_the_end(config: pytest.Config) -> None:
    """Makes every second worker collect the files of `testpaths` in reverse order.

    In a new clone, pytest rewrites the assertions of each file and stores the bytecode. Workers that
    start at opposite ends each rewrite about half of the files, which saves 2 to 4 s per worker.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if int(number) % 2 and config.args == config.getini("testpaths"):
        files = config.rootpath.glob("tests/**/test_*.py")
        config.args = [str(path) for path in sorted(files, reverse=True)]


def pytest_configure(config: pytest.Config) -> None:
    collect_from_the_end(config)
    gc.disable()  # until the tests are collected; a fifth of the time of collecting them
    schedule_as_batch()
    keep_to_a_core()
    if config.option.markexpr != "gpu":  # otherwise all ranks of a test would use the same GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# The files that take longest, in falling order of time. They start first, so that all workers end at about the same
# time. All their tests are marked `slow`.
LONGEST = (
    "test_benchmarks_gpu", "test_transformers_trainer", "test_equivalence", "test_trl", "test_accelerate",
    "test_from_transformers", "test_compile", "test_bytes", "test_faults", "test_elastic",
    "test_wrapped_access", "test_diagnostics", "test_elastic_agents", "test_fuzz", "test_wheel", "test_late",
    "test_static", "test_schedules_training", "test_pretend",
    "test_zero_memory", "test_pretrain", "test_footprint", "test_verify", "test_cuda_engine", "test_recompute_memory",
    "test_zero_wrapped", "test_zero_offload", "test_users_models", "test_planted", "test_executor",
    "test_zero_offload_wrapped", "test_recompute", "test_zero_optimizers", "test_benchmarks", "test_step",
    "test_checkpoint_resume", "test_zero_layout", "test_wrapped_models", "test_forecast", "test_schedules_torch",
    "test_tokenizer_layouts", "test_deepspeed_errors", "test_gradient_hooks", "test_resuming", "test_step_weights",
    "test_precision", "test_trace", "test_layer_major", "test_optimistic", "test_norm",
    "test_scale", "test_own_models", "test_boundary", "test_wrapped_elsewhere", "test_zero_resume", "test_data_samples",
    "test_users_probes", "test_zero_tile", "test_chunks", "test_deepspeed_offload_run", "test_precision_wire",
    "test_layers", "test_zero_offload_memory", "test_loss_chunks", "test_mlp_chunks", "test_checkpoint_retention",
    "test_zero_wrapped_edges", "test_vocabulary_padding", "test_checkpoint_native",
    "test_partition_measured", "test_deepspeed_pipeline", "test_deepspeed_namespace", "test_destroy",
)  # fmt: skip
# The files that start after those of LONGEST. They mark their slow tests themselves.
NEXT = (
    "test_custom_models", "test_documents", "test_context_parallel", "test_graphs", "test_zero_dealt", "test_order",
    "test_sequence_chunks", "test_site", "test_pipeline_order", "test_planner_gathering", "test_adam", "test_floors",
    "test_fuzz_inputs", "test_longest", "test_coupling", "test_zero_meta", "test_tensor_overlap", "test_docs",
    "test_checkpoint_beside", "test_bad_numbers", "test_faults_machines", "test_checkpoint_matrix",
    "test_faults_disks", "test_interop_pickles", "test_run_folder", "test_two_bw", "test_zero_early",
    "test_interop_hf_import", "test_checkpoint_load", "test_bad_data", "test_packages", "test_launcher",
    "test_late_saves", "test_models_families", "test_collectives", "test_zero_pairs", "test_wrapped_neighbors",
    "test_planner_memory", "test_ops_adam", "test_native_build", "test_validation", "test_schedules_files",
    "test_zero_init", "test_deepspeed_zero", "test_deepspeed_engine",
    "test_zero_offload_faults", "test_interop_hf", "test_schedules_by_times", "test_topology",
)  # fmt: skip


def move_seldom_variants_to_the_grid(items: list[pytest.Item], config: pytest.Config) -> None:
    """Marks the variants that are named by `@pytest.mark.seldom(...)` with `grid`.

    Raises:
        pytest.UsageError: if a name matches no variant.
    """
    unused: dict[str, set[str]] = {}  # names without a variant, by test function
    for item in items:
        if (mark := item.get_closest_marker("seldom")) is None or not hasattr(item, "callspec"):
            continue
        matching = {name for name in mark.args if fnmatch.fnmatchcase(item.callspec.id, name)}
        if matching:
            item.add_marker(pytest.mark.grid)
        unused.setdefault(item.nodeid.partition("[")[0], set(mark.args)).difference_update(matching)
    if any(unused.values()) and not any("::" in arg for arg in config.args):
        wrong = [f"{test}: no variant {sorted(names)}" for test, names in unused.items() if names]
        raise pytest.UsageError("\n".join(wrong))


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    places = {name: place for place, name in enumerate((*LONGEST, *NEXT))}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), item.path))
    for item in items:
        if item.path.stem in LONGEST:
            item.add_marker(pytest.mark.slow)
    move_seldom_variants_to_the_grid(items, config)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device, which torch {torch.__version__} does not see; run it by pytest -m gpu"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Names the modules that the parent of all ranks imports, and freezes objects.

    Otherwise each rank would import the module of its test, which takes up to 60 ms. The objects of
    all imported modules are excluded from garbage collection: they exist until the end, and a
    collection that visits them takes most of a second.
    """
    tests = (item for item in session.items if isinstance(item, pytest.Function))
    files = {str(item.path): None for item in tests if hasattr(item.module, "run_ranks")}
    os.environ["TESTS_WITH_RANKS"] = os.pathsep.join(files)
    if len(files) > 20:  # with fewer ranks, it would take longer than it saves
        sys.modules["threed.testing.ranks"].preload("tests.huge_pages")  # after all other modules
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def truth() -> dict[tuple[str, ...], list[tuple[int, float]]]:
    """Losses of runs without a fault, by the flags of their topology.

    `fault_runs` adds the losses of a topology when a test needs them.
    """
    return {}
