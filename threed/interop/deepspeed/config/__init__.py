"""Translation of DeepSpeed's configuration into threed's, as a pure function.

    translation = translate(read("ds_config.json"), world=8)
    translation.config · .accumulation · .learning_rate · .loss_scale     # settings of the engine
    translation.notes                                   # keys without effect, values of "auto"

`keys` defines a schema of the supported keys, and tables of the keys without effect and the
unsupported keys. `reader` reads a file into the schema. `translate` converts one group of keys
after another and checks keys that depend on each other; `schedulers` has the learning rate
schedules. `optimizers` reads the torch optimizer or the parameter groups that a program passes
instead of the keys of `optimizer`. No key is silently ignored, and all problems are raised in one
`threed.config.ConfigError`.

Names, defaults and formulas follow DeepSpeed 0.19.8 (deepspeed/runtime/config.py, constants.py,
precision_config.py, zero/config.py, lr_schedules.py).

This package is internal.
"""

__all__: list[str] = []
