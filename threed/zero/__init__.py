"""ZeRO: flat buffers and buckets, gradient reduction, and an optimizer that updates only what this rank owns."""
