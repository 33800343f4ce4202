"""The pipeline: stages of layers, and an executor that walks a rank's plan."""
