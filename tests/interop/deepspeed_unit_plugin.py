"""The pytest plugin of `deepspeed_unit`: starts the ranks of a test, and writes one line per result.

DeepSpeed's own launcher waits for all ranks, and ends pytest if a rank does not return. This one stops
the ranks soon after one of them has failed, and continues with the next test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

LIMIT, GRACE = 180.0, 8.0  # seconds for a test, and for the other ranks after an error
# Imported once, in the process from which the ranks are forked. An optimizer imports torch._dynamo, which
# takes longer than most tests.
PRELOADED = ["torch._dynamo", "pytest", "unit.common", "unit.simple_model"]
if "tests.interop.deepspeed_unit_site" in sys.modules:  # threed as deepspeed
    PRELOADED += [
        "threed.interop.deepspeed.pipeline_engine",
        "threed.interop.deepspeed.initialization",
    ]


def run_rank(test: Any, *args: Any) -> Any:
    """Runs a test on one rank; pytest's own exceptions, which end a worker, become AssertionErrors."""
    try:
        return test._dist_run(*args)
    except Exception:
        raise
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error


def launch(test: Any, ranks: int, init_method: str) -> None:
    """Runs a test on all ranks; replaces the launchers of DeepSpeed's tests."""
    from unit.common import get_master_port

    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(ranks, mp_context=context)
    port = get_master_port()
    results = [pool.submit(run_rank, test, rank, ranks, port, init_method) for rank in range(ranks)]
    try:
        _wait(results)
        errors = [e for result in results if result.done() and (e := result.exception())]
        if errors:
            raise min(errors, key=_order)
        if not all(result.done() for result in results):
            pytest.fail(f"no result after {LIMIT:.0f} s", pytrace=False)
        if skips := [text for result in results if (text := result.result())]:
            pytest.skip(str(skips[0]))
    finally:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(results: list[Future[Any]]) -> None:
    """Waits until all ranks have returned, or `GRACE` seconds after an error, at most `LIMIT`."""
    end, failed = time.monotonic() + LIMIT, False
    while not all(result.done() for result in results) and time.monotonic() < end:
        if not failed and any(result.done() and result.exception() for result in results):
            end, failed = min(end, time.monotonic() + GRACE), True
        time.sleep(0.05)


def _order(error: BaseException) -> int:
    """Returns the order of errors: refusals first, lost connections to failed ranks last."""
    text = str(error)
    return 0 if "threed does not offer" in text else 2 if "onnection" in text else 1


def pytest_collection_finish(session: pytest.Session) -> None:
    from unit.common import DistributedExec

    multiprocessing.set_forkserver_preload(PRELOADED)
    DistributedExec._launch_daemonic_procs = launch
    DistributedExec._launch_non_daemonic_procs = launch


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when != "call" and report.passed:
        return
    row = {"id": report.nodeid, "outcome": report.outcome, "error": "", "kinds": []}
    if call.excinfo is not None:
        error = call.excinfo.value
        row["error"] = str(error)
        row["kinds"] = [kind.__name__ for kind in type(error).__mro__]
    with open(os.environ["DEEPSPEED_UNIT_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
