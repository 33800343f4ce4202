"""The stages of `benchmarks/gpu.py`, a module each: `python -m benchmarks.gpu_stages.NAME` runs one alone."""
