"""Registers the emulated device before the first test, because autograd counts the kinds of devices only once.

A process whose first backward precedes the registration could not run a backward on the device. Processes that run
programs and ranks import no conftest, so they do not have the device unless a test asks for it.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.accelerator import pretend


def pytest_collection_finish() -> None:
    with suppress(pytest.skip.Exception):
        pretend.device()
