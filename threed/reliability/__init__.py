"""Fault handling: heartbeats, hangs, signals, preemption, dead ranks and faulty hardware.

supervision   supervises a rank: heartbeat, signals, time limit, watchdog, report of a failure
preemption    stops all ranks after the same step
ownership     ensures that one run at a time uses a run folder, and that all ranks share it
elastic       keeps copies of the state in the machines' memory, and resumes from memory or a
checkpoint
recheck       recomputes skipped steps, to find faulty hardware
"""
