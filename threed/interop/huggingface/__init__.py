"""Hugging Face folders: read, written, and loaded into an engine."""
