"""Compares a model's training in every topology with one process; runs functions on ranks.

    report = same_everywhere(MyModel)                     # in every topology of a default set
    report = same_everywhere(MyModel, my_batches, ["tp2", "pp2-dp2-zero3"], config=config)
    assert report.same, report
    results = run_ranks(4, work, arg)                     # work(arg) on 4 gloo ranks of this machine

`threed verify FILE.py:NAME` runs `same_everywhere` from the command line. docs/guide/verify.md
explains the function and the command.
"""

from threed.testing.compare import Results, differences, results_of
from threed.testing.ranks import RanksFailed, run_ranks
from threed.testing.same import DEFAULTS, Difference, Refused, Report, same_everywhere
from threed.testing.topologies import DEFAULT as TOPOLOGIES

__all__ = [
    "same_everywhere", "Report", "Difference", "Refused", "DEFAULTS", "TOPOLOGIES", "run_ranks", "RanksFailed",
    "results_of", "Results", "differences",
]  # fmt: skip
