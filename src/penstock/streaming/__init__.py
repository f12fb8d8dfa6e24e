"""Experts that are not all in memory: where they lie in files, how they are read, and which of them are kept."""
