"""The stages of `benchmarks/gpu.py`; `python -m benchmarks.gpu_stages.NAME` runs one stage."""
