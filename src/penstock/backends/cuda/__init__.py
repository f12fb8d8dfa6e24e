"""Triton kernels for NVIDIA GPUs, one module per family of ops."""
