"""Numba kernels for the CPU, one module per family of ops."""
