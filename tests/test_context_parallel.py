"""Context parallelism gives the losses, gradient norms and weights of one process."""

from __future__ import annotations

from tests.configs import Case
from tests.test_equivalence import run_all

CASES = [
    Case(cp=2),
    Case(cp=2, cp_heads=1),
    Case(cp=4, cp_heads=2, model="llama"),
    Case(cp=2, tp=2, sequence=True, model="mistral", cp_heads=1),
]


def test_cases() -> None:
    run_all(CASES)
