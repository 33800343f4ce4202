"""Fault handling: heartbeats, hangs, signals, preemption, lost ranks, faulty hardware.

supervision   supervises a rank: heartbeat, signals, time limit, watchdog, report of a failure
preemption    all ranks stop after the same step
ownership     one run per run folder, which all ranks share
elastic       copies in the machines' memory, and the state that a start resumes from
recheck       recomputes skipped steps, to find faulty hardware
"""
