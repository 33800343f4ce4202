"""Reads pickled checkpoint files without executing any code in them."""
