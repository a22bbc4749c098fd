"""Triton kernels of the op, for NVIDIA GPUs; `docs/kernels.md` explains them. Importing them needs triton."""
