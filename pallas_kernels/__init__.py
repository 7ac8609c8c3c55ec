"""Operations of Mask R-CNN as Pallas Mosaic GPU kernels for NVIDIA GPUs. Needs JAX only."""
