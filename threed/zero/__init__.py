"""ZeRO: flat buffers of parameters, gradient reduction, and an optimizer sharded over ranks."""
