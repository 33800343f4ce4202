"""DeepSpeed's API on top of threed, configured by a ds_config.json.

    engine, optimizer, loader, scheduler = threed.initialize(
        model=model, config="ds_config.json", training_data=data
    )
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)   # adds the gradients of this batch's share of the global mean loss
        engine.step()           # updates at the accumulation boundary

Instead of these calls, `engine.train_batch(iterator)` runs a full step: all forwards and backwards,
and the update. `initialize.initialize` inspects the model and the given optimizer, translates the
configuration (`config`), and wraps a `threed.engine.ModuleEngine`. Rank 0 prints `engine.notes`:
keys without effect, and values chosen for "auto". Any nn.Module can be trained, with any ZeRO
stage. docs/guide/deepspeed.md lists the supported keys. `checkpoint` reads DeepSpeed's checkpoints.

This package is internal.
"""

__all__: list[str] = []
