"""Pipeline schedules as data: build a plan, check it, simulate it, add its communication, draw it.

    plan = build("1f1b", stages=4, microbatches=8)  # compute actions per rank, checked
    simulate(plan, Costs(1, 1, 1))                  # makespan, bubble, peak activations, messages
    lower(plan)                                     # adds sends, receives and reductions
    svg(simulate(plan, Costs(1, 1, 1)).spans)       # Gantt chart of simulated or measured times

A custom schedule is a function (stages, microbatches) -> Plan. The decorator `@schedule("mine")`
registers the function under a name. `build` and `--parallel.schedule` also accept FILE.py:function
for a function that is not registered, and FILE.csv for a plan in the CSV format of
torch.distributed.pipelining. `to_csv` writes a plan in that format.
"""

from threed.schedules.action import Action, Kind, together
from threed.schedules.all_forward_all_backward import gpipe
from threed.schedules.bidirectional import chimera, dualpipe, dualpipev
from threed.schedules.deadlock_check import validate
from threed.schedules.double_buffered import two_bw
from threed.schedules.from_file import read_csv
from threed.schedules.gantt import svg
from threed.schedules.lowering import lower
from threed.schedules.one_forward_one_backward import interleaved, one_f_one_b
from threed.schedules.plan import Plan, SizesError
from threed.schedules.registry import available, build, register, schedule
from threed.schedules.simulation import Costs, Timeline, simulate
from threed.schedules.torch_csv import from_csv, to_csv
from threed.schedules.v_shape import v_half, v_min, zb_v
from threed.schedules.zero_bubble import zb_h1, zb_h2
from threed.schedules.zero_bubble_search import zb_auto

__all__ = [
    "build", "available", "Costs", "simulate", "Timeline", "svg", "lower", "validate",
    "Plan", "Action", "Kind", "together", "schedule", "register", "SizesError", "read_csv", "from_csv", "to_csv",
    "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "zb_auto", "chimera",
    "dualpipe", "dualpipev", "two_bw",
]  # fmt: skip
