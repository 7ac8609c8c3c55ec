"""Convolutions and products in the form that runs fastest, forward and backward."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.cpu_kernels.convolution import conv


class Conv(nn.Module):
    """A convolution and a fixed affine map per channel that may follow it, fused.

    Parameters are those of `nn.Conv`, float32.
    """

    features: int
    kernel_size: tuple[int, int]
    stride: int = 1
    padding: int | str = 0  # pixels on every side, or "SAME": TensorFlow's rule
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DTypeLike = jnp.float32

    sparse_cotangent = False

    @nn.compact
    def __call__(
        self, x: jax.Array, affine: tuple[jax.Array, jax.Array] | None = None
    ) -> jax.Array:
        """[B, H, W, C] to [B, h, w, features] in `dtype`.

        affine: (scale, bias), [features] each, of a norm that follows. Scaling the kernel saves a
        pass over the output and one over its gradient.
        """
        return self._apply(x, affine, valid=None)

    def _apply(self, x: jax.Array, affine, valid: jax.Array | None) -> jax.Array:
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        if affine is not None:
            scale, shift = affine
            kernel = kernel * scale[None, None, None]
            bias = shift if bias is None else bias * scale + shift
        y = self._convolve(x.astype(self.dtype), kernel.astype(self.dtype), valid)
        return y if bias is None else add_bias(y, bias)

    def _convolve(self, x: jax.Array, kernel: jax.Array, valid: jax.Array | None) -> jax.Array:
        """1x1 kernels as a matrix product.

        It is the same sum; its gradients are several times faster than those of a 1x1 convolution
        on CPU, and it needs no algorithm search on GPU.
        """
        if self.kernel_size == (1, 1):
            if self.stride > 1:
                # A strided read fused into the product ends the process in XLA's Triton code
                # generator (openxla/xla issue 47381), as with `train.remat=backbone`.
                x = lax.optimization_barrier(x[:, :: self.stride, :: self.stride])
            return lax.dot_general(x, kernel[0, 0], (((3,), (0,)), ((), ())))
        pads = self.padding if self.padding == "SAME" else ((self.padding, self.padding),) * 2
        return conv(x, kernel, valid, self.stride, pads, self.sparse_cotangent)


class SparselyTrainedConv(Conv):
    """A `Conv` whose output the loss reads at few positions; its gradient is cheaper on a CPU."""

    sparse_cotangent = True


class RoIConv(Conv):
    """A `Conv` over RoIs, some of which are padding and are skipped on a CPU."""

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array) -> jax.Array:
        """[N, H, W, C] and valid [N] to [N, h, w, features]; other rows are unspecified.

        The gradient of a row that is not valid must be zero.
        """
        return self._apply(x, None, valid)


class UpConv(nn.Module):
    """2x2 transposed convolution of stride 2, as one matrix product: its windows never overlap.

    The kernel [2, 2, out, in] is that of `nn.ConvTranspose(transpose_kernel=True)`, whose gradient
    takes over ten times as long on CPU. Its four outputs per pixel stay beside each other, because
    whatever works on pixels alone need not know their order; `pixel_shuffle` brings them into it.
    """

    features: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """[N, H, W, C] to [N, H, W, 2, 2, features]; `valid` as in `RoIConv`."""
        channels = x.shape[-1]
        shape = (2, 2, self.features, channels)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        kernel = kernel.astype(self.dtype).reshape(-1, channels).T[None, None]
        y = conv(x.astype(self.dtype), kernel, valid, 1, ((0, 0), (0, 0)))
        return add_bias(y.reshape(*x.shape[:3], 2, 2, self.features), bias)


class Dense(nn.Module):
    """A fully connected layer with the parameters of `nn.Dense`, float32."""

    features: int
    kernel_init: nn.initializers.Initializer
    bias_init: nn.initializers.Initializer
    dtype: DTypeLike | None = None  # None: of x and the kernel

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[.., C] to [.., features]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        return add_bias(x @ kernel, bias)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """[.., features] in the dtype of x, and a bias in float32.

    Added in float32, so that the bias's gradient, a sum over up to a million positions, is made in
    float32: what JAX 0.10 compiles for an H100 would otherwise make it in bfloat16.
    """
    return (x + jnp.expand_dims(bias, range(x.ndim - 1))).astype(x.dtype)


def pixel_shuffle(x: jax.Array) -> jax.Array:
    """[.., H, W, 2, 2] to [.., 2H, 2W]."""
    *leading, height, width, _, _ = x.shape
    return jnp.swapaxes(x, -3, -2).reshape(*leading, 2 * height, 2 * width)
