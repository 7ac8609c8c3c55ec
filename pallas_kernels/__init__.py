"""Mask R-CNN operations as Pallas Mosaic GPU kernels for NVIDIA GPUs. Needs only JAX."""
