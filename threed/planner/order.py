"""Whether a step runs micro-batch by micro-batch or layer by layer, where that is left open (`--zero.order auto`).

Use: `choose(microbatches=8, kept=2**20, freed=2**30)`.

Layer by layer a rank moves every sliced parameter twice and every gradient once in a step, in place of once a
micro-batch each (arXiv 2512.17570). The price is memory: all micro-batches keep their activations at once.
"""

from __future__ import annotations

from typing import Literal


def choose(microbatches: int, kept: int, freed: int) -> Literal["micro", "layer"]:
    """Returns `layer` if it moves fewer bytes and its memory is not more than what slicing parameters has freed.

    kept: bytes that one micro-batch keeps on the device for its backward. freed: bytes of parameters that are not whole
    between uses: those of other ranks' slices, and all that are offloaded. So with `auto` ZeRO-3 never holds more than
    ZeRO-2 would, and sends no more than either does otherwise.
    """
    return "layer" if microbatches > 1 and freed and (microbatches - 1) * kept <= freed else "micro"
