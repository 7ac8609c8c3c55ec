"""Run a module with bottlenecks' 1x1 convolutions as matrix products on a GPU, too.

    python -m benchmarks.as_products mask_rcnn_jax.benchmark infer --config coco ..
    python -m benchmarks.as_products benchmarks.compiled_step --config coco --mode infer ..

As convolutions of cuDNN they take bias, residual and ReLU, but XLA leaves convolutions out of CUDA
graphs, which may cost a single image more than they save.
"""

import runpy
import sys
from collections.abc import Callable

from jax import lax

from mask_rcnn_jax.models import conv


def _product_everywhere(stride: int) -> dict[str, Callable]:
    def product(x, kernel):
        # As in `Conv.contract`: XLA's Triton code generator crashes on strided reads.
        x = lax.optimization_barrier(x[:, ::stride, ::stride]) if stride > 1 else x
        return conv._product(x, kernel)

    return dict(default=product)


if __name__ == "__main__":
    conv._pointwise_forms = _product_everywhere
    sys.argv = sys.argv[1:]
    if not sys.argv:
        raise SystemExit("error: expected the name of a module, and its arguments")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
