"""The door for programs written for DeepSpeed: a ds_config.json in, its four objects out.

    engine, optimizer, loader, scheduler = threed.initialize(model=model, config="ds_config.json", training_data=data)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)           # divided by accumulation steps and ranks: the mean over the global batch
        engine.step()                   # acts at the accumulation boundary; or all of it: engine.train_batch(iterator)

`initialize` finds out what the model and the given optimizer tell, has `threed.ds_config` translate the rest, says on
rank 0 what has no effect and which defaults apply (`engine.notes`), and wraps a `threed.Engine`. The module itself is
trained, on any ZeRO stage; docs/deepspeed.md lists the keys.
"""

from threed.deepspeed.engine import DeepSpeedEngine
from threed.deepspeed.initialize import initialize
from threed.deepspeed.views import OptimizerView, SchedulerView

__all__ = ["DeepSpeedEngine", "OptimizerView", "SchedulerView", "initialize"]
