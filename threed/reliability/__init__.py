"""Fault handling: heartbeats, hangs, signals, preemption, dead ranks and faulty hardware.

supervision   supervises a rank: heartbeat, signals, time limit, watchdog, report of a failure
preemption    stops all ranks after the same step, on a signal or at a time limit
ownership     ensures that one run at a time uses a run folder, and that all ranks share the folder
elastic       keeps copies of the state in the machines' memory; resumes from them or a checkpoint
recheck       computes skipped steps a second time, to find faulty hardware

This package is internal.
"""

__all__: list[str] = []
