"""Plain vision transformer for detection (Li et al., "Exploring Plain Vision Transformer Backbones
for Object Detection", 2022)."""

from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.drop_path import drop_path, fold_in
from mask_rcnn_jax.models.init import normal, normal_dense
from mask_rcnn_jax.models.norm import make_norm
from mask_rcnn_jax.models.trunk import TransformerTrunk
from mask_rcnn_jax.platforms import by_platform
from mask_rcnn_jax.ranges import Count, Range, check

PATCH = 16  # pixels per side
Side = Annotated[int, Range(f"a multiple of {PATCH}", lambda side: side > 0 and side % PATCH == 0)]
Attend = Literal["xla", "cudnn"]


class ViT(TransformerTrunk, kw_only=True):
    """Vision transformer to one map of stride 16, without class token and final norm.

    Attributes:
        width: channels.
        depth: blocks.
        num_heads: attention heads.
        global_blocks: blocks, counted from 0, that attend to the whole map; the others to windows.
        window: side of a window; cells.
        image_size: side of the images that the global blocks' relative positions are for, pixels;
            they are interpolated for others.
        pretrain_size: the same for the absolute positions.
        attention: "cudnn" is the fused kernel of NVIDIA GPUs, with `train.precision` "bfloat16" or
            "float16"; other devices take "xla".
    """

    width: Count = 768
    depth: Count = 12
    num_heads: Count = 12
    global_blocks: tuple[int, ...] = (2, 5, 8, 11)
    window: Count = 14
    image_size: Side = 1024
    pretrain_size: Side = 224
    attention: Attend = "xla"
    exempt_from_decay: tuple[str, ...] = ("pos_embed", "norm1", "norm2")

    def __post_init__(self):
        check(self)
        if self.width % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, expected a divisor of width={self.width}"
            )
        if not all(0 <= block < self.depth for block in self.global_blocks):
            expected = f"blocks from 0 to {self.depth - 1}"
            raise ValueError(f"global_blocks is {self.global_blocks}, expected {expected}")
        super().__post_init__()

    @property
    def block_widths(self) -> dict[str, int]:
        """Channels of each block."""
        return {f"block{i}": self.width for i in range(self.depth)}

    @property
    def num_layers(self) -> int:
        """Number of layers for `optim.layer_decay`."""
        return self.depth

    def layer_id(self, name: str) -> int:
        """Number of a layer, 0 for the embeddings."""
        return 1 + int(name.removeprefix("block")) if name.startswith("block") else 0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, keys: jax.Array | None = None
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to [[B, H / 16, W / 16, C]].

        keys: [B] PRNG keys for `drop_path`; None leaves nothing out.
        """
        options: dict[str, Any] = dict(kernel_init=normal, dtype=self.dtype, name="patch_embed")
        x = Conv(self.width, (PATCH, PATCH), PATCH, **options)(x.astype(self.dtype))
        side = self.pretrain_size // PATCH
        shape = (1, 1 + side**2, self.width)  # the first row is of a class token, which is unused
        table = self.param("pos_embed", normal, shape, jnp.float32)
        x = x + table_positions(table, x.shape[1:3]).astype(self.dtype)
        make_block = nn.remat(Block) if self.remat else Block
        for name, i, rate, hidden in self.blocks:
            window = 0 if i in self.global_blocks else self.window
            x = make_block(
                self.num_heads,
                window,
                window or self.image_size // PATCH,
                rate,
                self.attention,
                hidden,
                self.dtype,
                name=name,
            )(x, None if keys is None or not train else fold_in(keys, i))
        return [x]


class Block(nn.Module):
    """Attention and two fully connected layers, each behind a norm and beside a shortcut."""

    heads: int
    window: int  # side in cells, 0: the whole map
    table_side: int  # side in cells of the map that relative positions are for
    drop_rate: float
    attention: Attend
    hidden: int  # channels between the fully connected layers
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Map [B, H, W, C] to the same shape; keys [B], see `ViT`."""
        norm = make_norm("layer", train=False, dtype=self.dtype)
        dense = partial(normal_dense, dtype=self.dtype)
        y, cells = norm(name="norm1")(x), x.shape[1:3]
        if self.window:
            y = to_windows(y, self.window)
        y = Attention(self.heads, self.table_side, self.attention, self.dtype, name="attn")(y)
        if self.window:
            y = from_windows(y, cells)
        x = x + drop_path(y, self.drop_rate, keys, 0)
        y = dense(self.hidden, name="fc1")(norm(name="norm2")(x))
        y = nn.gelu(y.astype(jnp.float32), approximate=False)
        y = dense(x.shape[-1], name="fc2")(y.astype(self.dtype))
        return x + drop_path(y, self.drop_rate, keys, 1)


class Attention(nn.Module):
    """Multi-head attention over a map, with decomposed relative positions (Li et al., "MViTv2",
    2022): the logit of two cells gets query · row of their distance in y, and the same in x."""

    heads: int
    table_side: int
    attention: Attend
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, H, W, C] to the same shape."""
        batch, height, width, channels = x.shape
        head = channels // self.heads
        dense = partial(normal_dense, dtype=self.dtype)
        qkv = dense(3 * channels, name="qkv")(x)
        qkv = qkv.reshape(batch, height * width, 3, self.heads, head)
        query, key, value = (qkv[:, :, i] for i in range(3))
        shape = (2 * self.table_side - 1, head)
        grid = query.reshape(batch, height, width, self.heads, head)
        biases = []
        for name, size, product in (
            ("rel_pos_h", height, "byxnc,yjc->bnyxj"),
            ("rel_pos_w", width, "byxnc,xjc->bnyxj"),
        ):
            table = self.param(name, nn.initializers.zeros, shape, jnp.float32)
            rows = relative_positions(table, size).astype(self.dtype)
            biases.append(jnp.einsum(product, grid, rows, preferred_element_type=jnp.float32))
        bias = biases[0][..., :, None] + biases[1][..., None, :]
        bias = bias.reshape(batch, self.heads, height * width, height * width)
        y = attend(query, key, value, bias, self.attention)
        return dense(channels, name="proj")(y.reshape(x.shape))


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, kind: Attend
) -> jax.Array:
    """Attention [B, T, N, c] with a float32 bias [B, N, T, T] or none; softmax is in float32."""
    if kind == "cudnn" and query.dtype == jnp.float32:
        raise ValueError(
            "model.backbone.attention is 'cudnn', which needs train.precision bfloat16 or float16"
        )

    def xla(query, key, value, bias):
        return jax.nn.dot_product_attention(query, key, value, bias, implementation="xla")

    def wide(*arrays):  # JAX has no float16 attention for CPUs
        arrays = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
        return xla(*arrays).astype(query.dtype)

    def cudnn(query, key, value, bias):
        bias = None if bias is None else bias.astype(query.dtype)
        return jax.nn.dot_product_attention(query, key, value, bias, implementation="cudnn")

    branches = {"cpu": wide} if query.dtype == jnp.float16 else {}
    if kind == "cudnn" and jax.default_backend() == "gpu":  # tracing it needs the library
        branches["cuda"] = cudnn
    return by_platform(query, key, value, bias, **branches, default=xla)


def to_windows(x: jax.Array, window: int) -> jax.Array:
    """Divide [B, H, W, C] into windows [B * n, window, window, C], padded with zeros."""
    batch, height, width, channels = x.shape
    x = jnp.pad(x, ((0, 0), (0, -height % window), (0, -width % window), (0, 0)))
    x = x.reshape(batch, x.shape[1] // window, window, x.shape[2] // window, window, channels)
    return x.swapaxes(2, 3).reshape(-1, window, window, channels)


def from_windows(x: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Invert `to_windows` for maps of size (H, W)."""
    window, channels = x.shape[1], x.shape[-1]
    rows, columns = (-(-side // window) for side in size)
    x = x.reshape(-1, rows, columns, window, window, channels).swapaxes(2, 3)
    x = x.reshape(-1, rows * window, columns * window, channels)
    return x[:, : size[0], : size[1]]


def table_positions(
    table: jax.Array, size: tuple[int, ...], *, antialias: bool = False
) -> jax.Array:
    """Resize a square table [1, 1 + n * n, C], without its first row, to [1, H, W, C], bicubic."""
    side = round((table.shape[1] - 1) ** 0.5)
    grid = table[0, 1:].reshape(side, side, -1)
    if size == (side, side):
        return grid[None]
    resize = antialiased if antialias else partial(interpolation, kernel=cubic)
    rows, columns = (resize(side, cells) for cells in size)
    return jnp.einsum("yi,xj,ijc->yxc", rows, columns, grid, precision="highest")[None]


def relative_positions(table: jax.Array, size: int) -> jax.Array:
    """Return the rows [size, size, c] for query and key positions, from a table [2 n - 1, c]."""
    if len(table) != 2 * size - 1:
        matrix = interpolation(len(table), 2 * size - 1, linear)
        table = jnp.matmul(matrix, table, precision="highest")
    places = np.arange(size)[:, None] - np.arange(size)[None] + size - 1
    return table[places]


def interpolation(old: int, new: int, kernel: Any) -> np.ndarray:
    """Return the matrix [new, old] that resizes as torch's `interpolate` does: pixel centers at one
    half, no antialiasing, values beyond the ends equal to those at the ends."""
    centers = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(centers).astype(int)
    matrix = np.zeros((new, old))
    for tap in range(-1, 3):
        place = first + tap
        weight = kernel(np.abs(centers - place))
        np.add.at(matrix, (np.arange(new), np.clip(place, 0, old - 1)), weight)
    return matrix.astype(np.float32)


def antialiased(old: int, new: int) -> np.ndarray:
    """Return the matrix [new, old] of torch's bicubic `interpolate` with antialiasing: a kernel as
    wide as the larger of both cells, and no weight beyond the ends."""
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale - 0.5
    distance = np.abs(np.arange(old)[None] - centers[:, None]) / max(scale, 1)
    matrix = cubic(distance, a=-0.5)
    return (matrix / matrix.sum(axis=1, keepdims=True)).astype(np.float32)


def linear(distance: np.ndarray) -> np.ndarray:
    """Weight of linear interpolation."""
    return np.maximum(1 - distance, 0)


def cubic(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Weight of cubic convolution (Keys, 1981), with torch's parameter."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))
