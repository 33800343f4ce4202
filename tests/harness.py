"""Real ranks in tests: `threed.testing.run_ranks`, with what tests need imported once, in the warm parent.

results = run_ranks(4, work, arg)      # work(arg) on 4 ranks; what each returned, in rank order

One world runs many configurations: topologies are made once per world.
"""

from __future__ import annotations

from threed.testing.ranks import preload
from threed.testing.ranks import run_ranks as run_ranks

# torch.testing.assert_close needs DTensor where there is a process group: a second of work.
preload("tests.configs", "pytest", "hypothesis", "torch.distributed.tensor")
