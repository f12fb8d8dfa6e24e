"""What runs the kernels beside it: the CUDA device, sampling, the expert tier, compilation, features and bandwidth.

No module here holds a family of ops; those are in the folder above, one module each.
"""
