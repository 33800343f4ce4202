"""What keeps a run going or ends it well: heartbeats, hangs, signals, preemption, lost ranks, bad hardware.

supervision   watches one rank: heartbeat, signals, time limit, watchdog, and who reports a failure
preemption    all ranks stop after the same step
ownership     one run per run folder, which all ranks share
elastic       copies in the machines' memory, and what a start resumes from
recheck       computes skipped steps twice, to find hardware that errs
"""
