"""Convolution and dense layers in their fastest forms, forward and backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.cpu_kernels.convolution import DIMENSIONS, conv
from mask_rcnn_jax.cpu_kernels.depthwise import depthwise
from mask_rcnn_jax.cpu_kernels.grouped import grouped_conv
from mask_rcnn_jax.models.parameter import parameter
from mask_rcnn_jax.models.prepared import prepared
from mask_rcnn_jax.platforms import by_platform


class Conv(nn.Module):
    """Convolution with an optional fused per-channel affine map.

    Has the same parameters as `nn.Conv`, float32.
    """

    features: int
    kernel_size: tuple[int, int]
    stride: int = 1
    padding: int | str = 0  # pixels per side, or "SAME": TensorFlow's rule
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DTypeLike = jnp.float32
    groups: int = 1  # of channels, each convolved by itself

    sparse_cotangent = False
    output_axis = -1  # of the kernel

    @nn.compact
    def __call__(
        self, x: jax.Array, affine: tuple[jax.Array, jax.Array] | None = None
    ) -> jax.Array:
        """Map [B, H, W, C] to [B, h, w, features] in `dtype`.

        affine: (scale, bias) of the following norm, [features] each. Scaling the kernel saves a
        pass over the output and another over its gradient.
        """
        return self._apply(x, affine, valid=None)

    def _apply(self, x: jax.Array, affine, valid: jax.Array | None) -> jax.Array:
        # Float32 has not been timed as a convolution.
        fused = affine is not None and jnp.dtype(self.dtype).itemsize < 4
        is_product = self.kernel_size == (1, 1) and not fused
        compute = partial(self._weights, x.shape[-1], affine)
        kernel, bias = prepared(self, compute, round_bias=not is_product)
        y = self.contract(x.astype(self.dtype), kernel, valid, fused=fused)
        if bias is None:
            return y
        return add_bias(y, bias) if is_product else add_conv_bias(y, bias)

    def _weights(self, channels: int, affine) -> tuple[jax.Array, jax.Array | None]:
        """Return the kernel in `dtype` and the bias, float32, with `affine` folded in."""
        shape = (*self.kernel_size, channels // self.groups, self.features)
        kernel = parameter(self, "kernel", self.kernel_init, shape)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
        if affine is not None:
            scale, shift = affine
            kernel = kernel * scale[None, None, None]
            bias = shift if bias is None else bias * scale + shift
        return kernel.astype(self.dtype), bias

    def contract(
        self, x: jax.Array, kernel: jax.Array, valid: jax.Array | None, *, fused: bool = False
    ) -> jax.Array:
        """Convolve, with 1x1 kernels as a matrix product unless `fused` for a GPU.

        The product is the same sum; on CPU its gradients are several times faster than a 1x1
        convolution's, and on GPU it needs no algorithm search. `fused` says that a bias, perhaps a
        residual and a ReLU follow, which cuDNN adds to a convolution before it writes.
        """
        if self.kernel_size == (1, 1) and fused:
            return pointwise(x, kernel, self.stride)
        if self.kernel_size == (1, 1):
            if self.stride > 1:
                # A strided read fused into the product crashes XLA's Triton code generator
                # (openxla/xla issue 47381), as with `train.remat=backbone`.
                x = lax.optimization_barrier(x[:, :: self.stride, :: self.stride])
            return lax.dot_general(x, kernel[0, 0], (((3,), (0,)), ((), ())))
        pads: Any = self.padding if self.padding == "SAME" else ((self.padding, self.padding),) * 2
        if self._is_depthwise(x):
            return depthwise(x, kernel, self.stride)
        if self.groups > 1:
            return grouped_conv(x, kernel, self.groups, self.stride, pads)
        return conv(x, kernel, valid, self.stride, pads, self.sparse_cotangent)

    def _is_depthwise(self, x: jax.Array) -> bool:
        """Whether every channel is convolved by itself, around each or every stride-th cell."""
        height, width = self.kernel_size
        is_centered = height == width and height % 2 == 1 and self.padding == height // 2
        return is_centered and 1 < self.groups == self.features == x.shape[-1]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def pointwise(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Convolve x [B, H, W, C] with a kernel [1, 1, C, K]: a matrix product on a CPU.

    On an H100 in bfloat16, with bottlenecks as convolutions of cuDNN, a training step takes 5 %
    less time than with products, and a prediction 12 %: benchmarks/README.md.
    """
    return by_platform(x, kernel, **_pointwise_forms(stride))


def _pointwise_forms(stride: int) -> dict[str, Callable]:
    def product(x, kernel):
        return _product(x[:, ::stride, ::stride], kernel)

    def convolution(x, kernel):
        strides = (stride, stride)
        return lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=DIMENSIONS)

    return dict(cpu=product, default=convolution)


def _pointwise_gradients(stride: int, saved, grad: jax.Array):
    forms = {platform: _pull(form) for platform, form in _pointwise_forms(stride).items()}
    return by_platform(saved, grad, **forms)


pointwise.defvjp(
    lambda x, kernel, stride: (pointwise(x, kernel, stride), (x, kernel)), _pointwise_gradients
)


class SparselyTrainedConv(Conv):
    """`Conv` with a loss at few output positions, which makes its gradient cheaper on a CPU."""

    sparse_cotangent = True


class RoIConv(Conv):
    """`Conv` over RoIs that skips padding rows on a CPU."""

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        valid: jax.Array | None,
        affine: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Map [N, H, W, C] to [N, h, w, features]; rows not in `valid` [N] are unspecified.

        Gradients must be zero for invalid rows.
        """
        return self._apply(x, affine, valid)


class UpConv(nn.Module):
    """2x2 transposed convolution with stride 2, as one matrix product: its windows never overlap.

    The kernel [2, 2, out, in] matches `nn.ConvTranspose(transpose_kernel=True)`, whose gradient
    takes over ten times as long on CPU. The four outputs per pixel stay on separate axes, since
    pixelwise layers do not need their order; `pixel_shuffle` restores it.
    """

    features: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer

    output_axis = 2  # of the kernel

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """Map [N, H, W, C] to [N, H, W, 2, 2, features]; `valid` as in `RoIConv`."""
        shape = (2, 2, self.features, x.shape[-1])
        kernel = parameter(self, "kernel", self.kernel_init, shape)
        bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
        y = self.contract(x.astype(self.dtype), kernel.astype(self.dtype), valid)
        return add_bias(y.reshape(*x.shape[:3], 2, 2, self.features), bias)

    def contract(self, x: jax.Array, kernel: jax.Array, valid: jax.Array | None) -> jax.Array:
        """Multiply each pixel by the four kernels, to [N, H, W, 4 * features]."""
        kernel = kernel.reshape(-1, kernel.shape[-1]).T[None, None]
        return conv(x, kernel, valid, 1, ((0, 0), (0, 0)))


class Weights(nn.Module):
    """The parameters of a 1x1 `Conv` alone, for `products`."""

    features: int
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, channels: int) -> tuple[jax.Array, jax.Array]:
        """Return the kernel [1, 1, channels, features] and the bias [features], float32."""
        shape = (1, 1, channels, self.features)
        kernel = parameter(self, "kernel", self.kernel_init, shape)
        return kernel, parameter(self, "bias", nn.initializers.zeros, (self.features,))


class Dense(nn.Module):
    """Fully connected layer with the same parameters as `nn.Dense`, float32."""

    features: int
    kernel_init: nn.initializers.Initializer
    bias_init: nn.initializers.Initializer
    dtype: DTypeLike | None = None  # None: promoted from x and the kernel
    use_bias: bool = True

    output_axis = -1  # of the kernel

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [.., C] to [.., features]."""
        kernel = parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features))
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", self.bias_init, (self.features,))
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        y = self.contract(x, kernel)
        return y if bias is None else add_bias(y, bias)

    def contract(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Multiply [.., C] by a kernel [C, features]."""
        return x @ kernel


@jax.custom_vjp
def products(x: jax.Array, weights: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Return a 1x1 convolution of x [B, H, W, C] for each kernel and bias, in x's dtype.

    A GPU reads x once for all of them, forward and for each gradient, and a CPU takes them in turn.
    """
    return by_platform(x, weights, cpu=_products_in_turn, default=_products_alone)


def _products_in_turn(x: jax.Array, weights) -> list[jax.Array]:
    return [add_bias(_product(x, kernel), bias) for kernel, bias in weights]


def _products_alone(x: jax.Array, weights) -> list[jax.Array]:
    """`_products_at_once` in a program that has the same for other maps.

    XLA for GPUs would join their products, for which it copies the maps into one. A barrier for the
    kernels alone would be the same one for all maps, so that it would not keep them apart.
    """
    return _products_at_once(x, weights, lax.optimization_barrier)


def _products_at_once(x: jax.Array, weights, hold: Callable = lambda pair: pair) -> list[jax.Array]:
    kernels, biases = (jnp.concatenate(arrays, axis=-1) for arrays in zip(*weights, strict=True))
    x, kernels = hold((x, kernels.astype(x.dtype)))
    ends = np.cumsum([len(bias) for _, bias in weights])
    return jnp.split(add_bias(_product(x, kernels), biases), ends[:-1], axis=-1)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(x, kernel.astype(x.dtype)[0, 0], (((3,), (0,)), ((), ())))


def _pull(form: Callable) -> Callable:
    """Return the function that maps a form's inputs and its output's gradients to the inputs'."""
    return lambda inputs, grads: jax.vjp(form, *inputs)[1](grads)


def _product_gradients(saved, grads):
    forms = dict(cpu=_pull(_products_in_turn), default=_pull(_products_at_once))
    return by_platform(saved, grads, **forms)


products.defvjp(lambda x, weights: (products(x, weights), (x, weights)), _product_gradients)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a float32 bias to x [.., features] and keep x's dtype.

    Adds in float32, so that the bias gradient, a sum over up to a million positions, is float32
    too: JAX 0.10 would otherwise compute it in bfloat16 on an H100.
    """
    return (x + jnp.expand_dims(bias, range(x.ndim - 1))).astype(x.dtype)


@jax.custom_vjp
def add_conv_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`add_bias` to a convolution's output, in the form that XLA computes inside cuDNN on a GPU.

    There the bias has x's dtype. cuDNN adds it in float32 before it rounds the sum once, so that
    the bias is rounded in place of the products' sum. A CPU does the same as `add_bias`.
    """
    if x.dtype == bias.dtype:
        return add_bias(x, bias)
    return by_platform(x, bias, cpu=add_bias, default=_add_rounded_bias)


def _add_rounded_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return add_bias(x, bias.astype(x.dtype))


def _bias_gradients(_, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return grad, jnp.sum(grad, range(grad.ndim - 1), dtype=jnp.float32)


add_conv_bias.defvjp(lambda x, bias: (add_conv_bias(x, bias), None), _bias_gradients)


def pixel_shuffle(x: jax.Array) -> jax.Array:
    """Reorder [.., H, W, 2, 2] to [.., 2H, 2W]."""
    *leading, height, width, _, _ = x.shape
    return jnp.swapaxes(x, -3, -2).reshape(*leading, 2 * height, 2 * width)
