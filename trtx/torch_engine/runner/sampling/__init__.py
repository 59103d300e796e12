"""Sampling: one definition in integers, which torch and the Triton kernels compute identically."""
