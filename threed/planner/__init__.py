"""Forecasts the memory, traffic and time per step of a run, from the model built on the meta device.

This package is internal.
"""

__all__: list[str] = []
