"""DeepSpeed's optimizers by name: a program passes them to `deepspeed.initialize`.

The engine reads the hyper-parameters and groups of such an optimizer, and runs its own updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from threed.interop.deepspeed.config.optimizers import DeepSpeedOptimizer

# DeepSpeed's names of compiled optimizers -> whether the engine has the optimizer
COMPATIBLE: dict[str, bool] = dict.fromkeys(
    ("cpu_adam", "fused_adam", "cpu_lion", "fused_lion", "async_io"), True
) | dict.fromkeys(
    "cpu_adagrad evoformer_attn fp_quantizer fused_lamb gds inference_core_ops inference_cutlass_builder"
    " quantizer ragged_device_ops ragged_ops random_ltd sparse_attn spatial_inference transformer"
    " stochastic_transformer transformer_inference deepspeed_not_implemented".split(),
    False,
)


class _NamedOptimizer(DeepSpeedOptimizer):
    """Hyper-parameters and parameter groups, without updates.

    Args:
        params: parameters, or parameter groups.
        kind: the type of the optimizer in a ds_config.
        values: hyper-parameters of the parameter groups, as in `optimizer.params` of a ds_config.
        common: further keys of `optimizer.params`, which are equal for all groups.
    """

    def __init__(
        self, params: Iterable[Any], kind: str, values: dict[str, Any], common: dict[str, Any]
    ) -> None:
        self._kind, self._common = kind, common
        super().__init__(params, values)

    def deepspeed_section(self) -> dict[str, Any]:
        """See `DeepSpeedOptimizer.deepspeed_section`. Values are taken from the first group."""
        first = self.param_groups[0]
        values = {key: first[key] for key in self.defaults}
        return {"type": self._kind, "params": values | self._common}

    def step(self, closure: Any = None) -> NoReturn:
        """Raises NotImplementedError, because the engine runs the updates."""
        name = type(self).__name__
        raise NotImplementedError(
            f"threed does not offer {name}.step(): use deepspeed.initialize(optimizer=...) and engine.step(),"
            " or an optimizer of torch"
        )


class DeepSpeedCPUAdam(_NamedOptimizer):
    """AdamW, or Adam with `adamw_mode=False`, for `deepspeed.initialize`.

    Args:
        model_params: parameters, or parameter groups.
        lr: learning rate.
        bias_correction: must be True.
        betas: decay rates of the moments.
        eps: constant in the denominator.
        weight_decay: weight decay.
        amsgrad: must be False.
        adamw_mode: whether weight decay is decoupled from the gradient.
        fp32_optimizer_states: must be True.

    Raises:
        NotImplementedError: for a value that the engine's optimizer does not have.
    """

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
        amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        _require(name, "bias_correction", bias_correction, True)
        _require(name, "amsgrad", amsgrad, False)
        _require(name, "fp32_optimizer_states", fp32_optimizer_states, True)
        self.adam_w_mode = adamw_mode
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, "Adam", values, {"adam_w_mode": bool(adamw_mode)})


class FusedAdam(DeepSpeedCPUAdam):
    """Same as `DeepSpeedCPUAdam`, with the order of arguments of DeepSpeed's FusedAdam.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        bias_correction: must be True.
        betas: decay rates of the moments.
        eps: constant in the denominator.
        adam_w_mode: whether weight decay is decoupled from the gradient.
        weight_decay: weight decay.
        amsgrad: must be False.
        set_grad_none: no effect.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode
        )


class DeepSpeedCPULion(_NamedOptimizer):
    """Lion, for `deepspeed.initialize`.

    Args:
        model_params: parameters, or parameter groups.
        lr: learning rate.
        betas: coefficients of the update and of the moment.
        weight_decay: weight decay.
        fp32_optimizer_states: must be True.

    Raises:
        NotImplementedError: for a value that the engine's optimizer does not have.
    """

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        _require(type(self).__name__, "fp32_optimizer_states", fp32_optimizer_states, True)
        values = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, "Lion", values, {})


class FusedLion(DeepSpeedCPULion):
    """Same as `DeepSpeedCPULion`, with the arguments of DeepSpeed's FusedLion.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: coefficients of the update and of the moment.
        weight_decay: weight decay.
        set_grad_none: no effect.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, weight_decay)


def _require(optimizer: str, key: str, value: bool, only: bool) -> None:
    if bool(value) is not only:
        raise NotImplementedError(
            f"threed does not offer {optimizer}({key}={value}): use {key}={only}"
        )
