"""The interface for programs written for DeepSpeed: takes a ds_config.json, returns its four objects.

    engine, optimizer, loader, scheduler = threed.initialize(model=model, config="ds_config.json", training_data=data)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)           # divided by accumulation steps and ranks: the mean over the global batch
        engine.step()                   # acts at the accumulation boundary; or all of it: engine.train_batch(iterator)

`initialize.initialize` reads facts from the model and the given optimizer, translates the configuration (`config`),
prints on rank 0 what has no effect and which defaults apply (`engine.notes`), and wraps a `threed.Engine`. The module
itself is trained, on any ZeRO stage; docs/deepspeed.md lists the keys. `checkpoint` reads DeepSpeed's checkpoints.
"""
