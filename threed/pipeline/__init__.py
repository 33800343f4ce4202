"""Pipeline parallelism: stages of layers, and an executor that runs the plan of a rank."""
