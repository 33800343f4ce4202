"""Reading pickled checkpoint files without running them."""
