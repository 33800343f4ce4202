"""DeepSpeed's public modules, under DeepSpeed's names. This package is internal."""
