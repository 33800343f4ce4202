"""The engine: trains a model on a topology, one optimizer step per call.

    topo    = Topology(pp=2, tp=2)
    engine  = Engine(model, topo, config)
    metrics = engine.step(batch)         # batch: this data rank's share of the global batch
    engine.save(path)                    # engine.start_save(path).wait() writes in the background

A step counts the valid tokens of the global batch; runs the pipeline plan, while gradients are
reduced bucket by bucket; computes the gradient norm; updates this rank's slices of the parameters;
and gathers the parameters, overlapped with the next forward. Usually the host does not wait for the
value of a tensor during a step. It waits when the program reads a property of `StepMetrics`.

`threed` exports the public classes; the modules of this package are internal.
"""

from threed.engine.base import Engine as Engine
from threed.engine.layered import LayeredEngine as LayeredEngine
from threed.engine.module import ModuleEngine as ModuleEngine
from threed.zero.step_metrics import StepMetrics as StepMetrics

__all__: list[str] = []
