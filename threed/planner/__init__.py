"""Forecasts the memory, traffic and time per step of a run, from the model built on the meta device."""
