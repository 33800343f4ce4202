"""Ranks and their communication: the grid and its process groups, collectives, and how parameters are sharded."""
