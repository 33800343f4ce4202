"""Translation of DeepSpeed's configuration into threed's, as a pure function.

    translation = translate(read("ds_config.json"), world=8)
    translation.config · .accumulation · .learning_rate · .loss_scale     # settings of the engine
    translation.notes                       # keys without effect, and values chosen for "auto"

The module `keys` defines the schema of the supported keys. It also has tables of the keys that have
no effect and of the keys that are not supported. `reader` parses a ds_config with this schema.
`translate` converts the keys group by group, and checks keys that depend on each other.
`schedulers` has the learning rate schedules. `optimizers` reads the torch optimizer or the
parameter groups that a program passes to `initialize` instead of setting the keys of `optimizer`.
No key is silently ignored, and all problems are raised in one `threed.config.ConfigError`.

Names, defaults and formulas follow DeepSpeed 0.19.8 (deepspeed/runtime/config.py, constants.py,
precision_config.py, zero/config.py, lr_schedules.py).

This package is internal.
"""

__all__: list[str] = []
