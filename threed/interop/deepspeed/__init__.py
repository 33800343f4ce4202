"""DeepSpeed's API on top of threed, configured by a ds_config.json.

    engine, optimizer, loader, scheduler = threed.initialize(
        model=model, config="ds_config.json", training_data=data
    )
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)   # accumulates gradients
        engine.step()           # updates the weights at the accumulation boundary

Instead of these calls, `engine.train_batch(iterator)` runs a full step: all forwards and backwards,
and the update. `initialization.initialize` inspects the model and the given optimizer, translates the
configuration (package `config`), and wraps a `threed.engine.ModuleEngine`. Rank 0 prints
`engine.notes`: the keys without effect, and the values chosen for "auto". Any nn.Module can be
trained, with any ZeRO stage. docs/guide/deepspeed.md lists the supported keys. The module
`checkpoint_reader` reads DeepSpeed's checkpoints.

This package has the names of the module `deepspeed`, which are imported on their first use:

    from threed.interop import deepspeed
    deepspeed.init_distributed()
    with deepspeed.zero.GatheredParameters(module.weight): ...

After `threed.install_as_deepspeed()`, `import deepspeed` imports the same names. `names` lists
them, the package `api` defines them, and `python -m threed.interop.deepspeed script.py` runs a
script that imports deepspeed.

This package is internal.
"""

from typing import Any

from threed.interop.deepspeed import namespace

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    return getattr(namespace.modules()["deepspeed"], name)
