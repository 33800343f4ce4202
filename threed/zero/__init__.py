"""ZeRO: flat buffers, gradient reduction, and an optimizer that updates this rank's slices."""
