"""Train transformer language models on many devices: pipeline x tensor x ZeRO data parallelism, in any combination."""

__version__ = "0.1.0"
