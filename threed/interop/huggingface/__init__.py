"""Reads and writes Hugging Face folders, and loads their weights into an engine."""
