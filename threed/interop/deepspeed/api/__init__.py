"""The modules of DeepSpeed's API: one module for each group of names in `names`.

    zero            gathered parameters, their marks, and the optimizer's states
    init            `zero.Init`
    comm            process groups
    accelerator     the device
    optimizers      DeepSpeed's optimizers, whose updates the engine runs
    lr_schedules    DeepSpeed's learning rate schedules
    checkpointing   activation checkpointing
    topology        the grids of ranks of pipelines
    config          the configuration, and enumerations of its values
    zero_to_fp32    weights of a checkpoint
    utils           other functions
    fixed           functions with a fixed result

This package is internal.
"""

__all__: list[str] = []
