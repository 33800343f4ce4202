"""Operators: a readable reference each, and the fast path where there is one."""
