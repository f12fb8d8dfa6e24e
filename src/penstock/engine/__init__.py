"""The engine: text in and out, sampling, caches, and the loop that runs requests."""
