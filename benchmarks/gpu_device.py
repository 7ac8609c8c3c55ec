"""Describe a GPU and its software, or measure the rates that bound every program on it.

    python -m benchmarks.gpu_device describe --json FILE
    python -m benchmarks.gpu_device ceilings --json FILE

`describe` fails without a GPU or what compiles kernels for it. `ceilings` times a matrix product, a
copy, convolutions of the model's shapes with both gradients, the last layer of bottlenecks as
product and as convolution, the stem with 3, 4 and 8 channels, and its top-k; `--small` does so with
tiny shapes, on a CPU too.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from mask_rcnn_jax.benchmarking import devices
from pallas_kernels import check_compile, support

PACKAGES = r"jax|jaxlib|flax|optax|orbax|numpy|nvidia-(cudnn|nccl|cublas)|torch|triton|grain"
GPU_FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
DIMENSIONS = ("NHWC", "HWIO", "NHWC")
# Height, width, channels in and out, and kernel side, for 832 x 1344 pixels.
CONVOLUTIONS = (
    (208, 336, 64, 64, 3),
    (104, 168, 128, 128, 3),
    (52, 84, 256, 256, 3),
    (26, 42, 512, 512, 3),
    (208, 336, 256, 256, 3),
    (208, 336, 64, 256, 1),
)
# The last layer of a bottleneck in each stage: height, width, channels in and out.
LAST_LAYERS = ((208, 336, 64, 256), (104, 168, 128, 512), (52, 84, 256, 1024), (26, 42, 512, 2048))
TOP_K = ((16, 209_664, 2000), (16, 279_279, 256), (1, 1_605_632, 8))  # rows, values, k


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["describe", "ceilings"])
    parser.add_argument("--small", action="store_true", help="tiny shapes; a CPU will do")
    parser.add_argument("--json", help="write the figures to this file")
    flags = parser.parse_args()
    figures: dict[str, object] = {}
    rows = describe() if flags.action == "describe" else ceilings(flags.small)
    for name, value in rows:
        print(f"{name}: {value}", flush=True)
        figures[name] = value
        if flags.json:
            Path(flags.json).write_text(json.dumps(figures, indent=1) + "\n")
    problem = None if flags.small else missing(tools=flags.action == "describe")
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return int(problem is not None)


def missing(tools: bool) -> str | None:
    """Return that a GPU, or one of NVIDIA's tools if asked for, is missing, or None."""
    if jax.default_backend() != "gpu":
        return "JAX finds no GPU"
    wanted = check_compile.missing_tools() if tools else []
    if wanted:
        root = check_compile.cuda_root()
        return f"no {' or '.join(wanted)} in {root}; set CUDA_ROOT to a CUDA toolkit"
    return None


def describe() -> Iterator[tuple[str, object]]:
    """Yield the GPU, the versions of what runs on it, and why kernels would not."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
        yield "nvidia-smi", subprocess.run(query, capture_output=True, text=True).stdout.strip()
    yield "packages", packages()
    yield "python", sys.version.split()[0]
    yield "cuda_root", str(check_compile.cuda_root())
    yield "jax", devices.describe()
    if jax.default_backend() == "gpu":
        yield "kernels_unsupported", {op: support.mosaic_unsupported(op) for op in support.KERNELS}


def packages() -> dict[str, str]:
    """Return the versions of the installed `PACKAGES`, the first on the path of each."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]  # None after an interrupted installation
        if name and re.match(PACKAGES, name.lower()):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def ceilings(small: bool) -> Iterator[tuple[str, object]]:
    """Yield each rate with its unit in the name."""
    key, images = jax.random.key(0), 1 if small else 16
    side = 128 if small else 8192
    a, b = (jax.random.normal(k, (side, side), jnp.bfloat16) for k in jax.random.split(key))
    yield f"product of {side}, bfloat16, TFLOP/s", _rate(2 * side**3, jnp.matmul, a, b)
    x = jax.random.normal(key, (1 << (16 if small else 30),), jnp.float32)
    yield "copy, read and written, TB/s", _rate(2 * x.nbytes, lambda x: x + 1, x)
    for height, width, channels, out, kernel in CONVOLUTIONS:
        if small:
            height, width, channels, out = height // 26, width // 42, channels // 16, out // 16
        x = jax.random.normal(key, (images, height, width, channels), jnp.bfloat16)
        w = jax.random.normal(key, (kernel, kernel, channels, out), jnp.bfloat16)
        grad = jax.random.normal(key, (images, height, width, out), jnp.bfloat16)
        work = 2 * images * height * width * channels * out * kernel**2
        name = f"convolution {kernel}x{kernel} {channels}->{out} at {height}x{width}, TFLOP/s"
        yield (
            name,
            {
                "forward": _rate(work, _convolve, x, w),
                "input": _rate(work, lambda x, w, g: jax.vjp(_convolve, x, w)[1](g)[0], x, w, grad),
                "kernel": _rate(
                    work, lambda x, w, g: jax.vjp(_convolve, x, w)[1](g)[1], x, w, grad
                ),
            },
        )
    for height, width, channels, out in LAST_LAYERS:
        if small:
            height, width, channels, out = height // 26, width // 42, channels // 16, out // 16
        x, residual = (
            jax.random.normal(key, (images, height, width, size), jnp.bfloat16)
            for size in (channels, out)
        )
        w = jax.random.normal(key, (1, 1, channels, out), jnp.bfloat16)
        b = jax.random.normal(key, (out,), jnp.bfloat16)
        forms = {"product": _multiply, "convolution": _convolve}
        yield (
            f"last layer of a bottleneck {channels}->{out} at {height}x{width}, ms",
            {
                name: _milliseconds(partial(_last_layer, form), x, w, b, residual)
                for name, form in forms.items()
            },
        )
    shape = (images, 69, 69) if small else (images, 837, 1349)
    stem = partial(_convolve, strides=(2, 2), padding="VALID")
    for channels, dtype in ((3, "bfloat16"), (4, "bfloat16"), (8, "bfloat16"), (3, "float16")):
        x = jax.random.normal(key, (*shape, channels), dtype)
        w = jax.random.normal(key, (7, 7, channels, 64), dtype)
        yield f"stem, {channels} channels, {dtype}, ms", _milliseconds(stem, x, w)
    for rows, count, k in TOP_K:
        if small:
            rows, count, k = 1, count // 1000, min(k, 16)
        scores = jax.random.uniform(key, (rows, count))
        name = f"top {k} of {rows} x {count}, ms"
        yield name, _milliseconds(partial(lax.top_k, k=k), scores)


def _convolve(x, w, strides=(1, 1), padding="SAME"):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=DIMENSIONS)


def _multiply(x, w):
    return jnp.einsum("nhwc,co->nhwo", x, w[0, 0])


def _last_layer(form, x, w, b, residual):
    """cuDNN can add bias and residual and apply ReLU in one pass, a product of XLA's not."""
    return jax.nn.relu(form(x, w) + b + residual)


def _milliseconds(function: Callable, *args) -> float:
    return devices.summary(devices.time_calls(jax.jit(function), *args))["ms"]


def _rate(work: float, function: Callable, *args) -> float:
    """Return tera-units of work per second."""
    return float(f"{1e-9 * work / _milliseconds(function, *args):.4g}")


if __name__ == "__main__":
    sys.exit(main())
