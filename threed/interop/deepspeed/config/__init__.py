"""DeepSpeed's configuration, read as threed's: a pure function from a ds_config.json to what an engine needs.

    translation = translate(read("ds_config.json"), world=8)
    translation.config · .accumulation · .learning_rate · .loss_scale      # what is acted on
    translation.notes                                                      # keys without effect, values of "auto"

`keys` has a model of the keys that are acted on, and tables of those without effect and those that
are refused. `reader` reads a file into the model. `translate` goes from group to group and looks at
keys that depend on each other, with `schedulers` for the learning rate. `optimizers` reads the
objects that stand in for keys. No key is ignored in silence, and all problems are raised at once,
as `threed.config.ConfigError`.

Names, defaults and formulas are those of DeepSpeed 0.19.8 (deepspeed/runtime/config.py, constants.py,
precision_config.py, zero/config.py, lr_schedules.py).
"""
