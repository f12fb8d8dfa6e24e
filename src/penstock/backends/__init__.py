"""Kernels per device. Nothing here is imported until an op needs it."""
