"""Swin transformers (Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted
Windows", 2021) returning C2..C5."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.drop_path import drop_path, fold_in
from mask_rcnn_jax.models.init import normal, normal_dense
from mask_rcnn_jax.models.norm import LayerNorm
from mask_rcnn_jax.models.shifted_windows import distances, from_windows, mask, pad_to, to_windows
from mask_rcnn_jax.models.trunk import DropRate, TransformerTrunk, of_stages, stage_widths
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Count, check

PATCH = 4  # pixels per side
EPS = 1e-5  # of norms
OTHER_WINDOW = -1e9  # logit of keys that a query does not see
NORMS = (
    *("norm1", "norm2", "stem_norm"),
    *(f"down{stage}_norm" for stage in (3, 4, 5)),
    *(f"output{stage}_norm" for stage in (2, 3, 4, 5)),
)


class Swin(TransformerTrunk, kw_only=True):
    """Swin transformer without the classifier, with a norm behind each of its four maps.

    A map ends in whole windows: behind a block's first norm, zeros fill the rest of the last ones,
    and attention sees them, as in mmdetection. So do places outside the extent that lie in its last
    windows; it sees nothing beyond them, and maps are those of an image padded to the extent alone,
    whatever the canvas. Every second block shifts its windows, also where one covers a whole side
    of the map, as in mmdetection; torchvision and transformers do not shift them there.

    Attributes:
        depths: blocks of each of the four stages.
        width: channels of the first stage; each stage doubles them.
        num_heads: attention heads in each stage.
        windows: side of a window in each stage; cells.
        shift_single: shift windows also along a side of a canvas's map that one window covers, as
            the paper's detectors and mmdetection do; False: not there, as torchvision does.
    """

    depths: Annotated[tuple[int, ...], of_stages(1)] = (2, 2, 6, 2)
    width: Count = 96
    num_heads: Annotated[tuple[int, ...], of_stages(1)] = (3, 6, 12, 24)
    windows: Annotated[tuple[int, ...], of_stages(2)] = (7, 7, 7, 7)
    shift_single: bool = True
    drop_path: DropRate = 0.2
    exempt_from_decay: tuple[str, ...] = ("position_bias", *NORMS)

    post_norm = False  # norms are behind layers, not before

    def __post_init__(self):
        check(self)
        for stage, heads in enumerate(self.num_heads):
            if (channels := self.width * 2**stage) % heads:
                expected = f"a divisor of {channels} channels"
                raise ValueError(f"num_heads is {self.num_heads}, expected {expected} for {heads}")
        super().__post_init__()

    @property
    def block_widths(self) -> dict[str, int]:
        """Channels of each block."""
        return stage_widths(self.depths, self.width)

    @property
    def num_layers(self) -> int:
        """Number of layers for `optim.layer_decay`: that of blocks."""
        return sum(self.depths)

    def layer_id(self, name: str) -> int:
        """Number of a layer: 0 for the stem, then one per block, as in SimMIM.

        Layers between two stages count to the block before; the norms of the maps learn as fast as
        the heads.
        """
        kind, _, rest = name.partition("_")
        if kind == "stem":
            return 0
        if kind.startswith("output"):
            return self.num_layers + 1
        before = sum(self.depths[: int(kind[-1]) - 2])
        return before + 1 + int(rest) if kind.startswith("res") else before

    @nn.nowrap
    def shifts(self, stage: int, sides: tuple[int, ...]) -> tuple[int, int]:
        """Return how far every second block of a stage shifts its windows, down and right; cells.

        sides: height and width of the map.
        """
        window = self.windows[stage - 2]
        down, right = (window // 2 * (self.shift_single or side > window) for side in sides)
        return down, right

    @nn.nowrap
    def make_attention(self, stage: int, shifts: tuple[int, int]) -> Callable[..., nn.Module]:
        """Return what makes the attention of a block of a stage, 2 to 5."""
        heads, window = self.num_heads[stage - 2], self.windows[stage - 2]
        return partial(Attention, heads, window, shifts, self.dtype)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        extent: ValidExtent | None = None,
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to C2..C5.

        keys: [B] PRNG keys for `drop_path`; None leaves nothing out.
        """
        norm = partial(LayerNorm, epsilon=EPS, dtype=self.dtype)
        options: dict[str, Any] = dict(kernel_init=normal, dtype=self.dtype)
        make_block = nn.remat(Block) if self.remat else Block
        blocks = iter(self.blocks)
        keys = keys if train else None
        x = pad_to(x.astype(self.dtype), PATCH)
        x = Conv(self.width, (PATCH, PATCH), PATCH, name="stem_conv", **options)(x)
        x = norm(name="stem_norm")(x)
        features, cells = [], None
        for stage, depth in enumerate(self.depths, start=2):
            if stage > 2:
                x = merge_patches(mask(x, cells), f"down{stage}", self.post_norm, self.dtype)
            cells = None if extent is None or extent.size is None else extent.cells(2**stage)
            for i in range(depth):
                name, number, rate, hidden = next(blocks)
                shifts = self.shifts(stage, x.shape[1:3]) if i % 2 else (0, 0)
                attend, dtype = self.make_attention(stage, shifts), self.dtype
                block = make_block(attend, rate, hidden, self.post_norm, dtype, name=name)
                x = block(x, cells, None if keys is None else fold_in(keys, number))
            features.append(norm(name=f"output{stage}_norm")(x))
        return features


class Block(nn.Module):
    """Attention and two fully connected layers, each beside a shortcut, with norms before or behind
    them."""

    attend: Callable[..., nn.Module]  # makes the layer of attention
    drop_rate: float
    hidden: int  # channels between the fully connected layers
    post_norm: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, cells: jax.Array | None, keys: jax.Array | None) -> jax.Array:
        """Map [B, H, W, C] to the same shape.

        cells: [2] int32, valid rows and columns, the others hold zeros; None: all. keys: [B], see
        `Swin`.
        """
        norm = partial(LayerNorm, epsilon=EPS, dtype=self.dtype)
        dense = partial(normal_dense, dtype=self.dtype)
        attend = self.attend(name="attn")

        def mlp(y: jax.Array) -> jax.Array:
            y = dense(self.hidden, name="fc1")(y)
            y = nn.gelu(y.astype(jnp.float32), approximate=False)
            return dense(x.shape[-1], name="fc2")(y.astype(self.dtype))

        branches = [lambda y: attend(mask(y, cells), cells), mlp]
        for i, branch in enumerate(branches):
            layer = norm(name=f"norm{i + 1}")
            y = layer(branch(x)) if self.post_norm else branch(layer(x))
            x = x + drop_path(y, self.drop_rate, keys, i)
        return x


class Attention(nn.Module):
    """Multi-head attention in windows, with a learned bias for each distance of two cells."""

    heads: int
    window: int
    shifts: tuple[int, int]  # of the windows, down and right; cells
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, cells: jax.Array | None) -> jax.Array:
        """Map [B, H, W, C], zero outside `cells`, to the same shape."""
        windows, labels = to_windows(x, self.window, self.shifts, cells)
        query, key, value = self.project(windows)
        logits = jnp.einsum("wqhc,wkhc->whqk", query, key, preferred_element_type=jnp.float32)
        logits = logits + self.position_bias()[None]
        if labels is not None:
            sees = labels[:, :, None] == labels[:, None]
            by_image = logits.reshape(-1, len(labels), *logits.shape[1:])
            by_image = jnp.where(sees[None, :, None], by_image, OTHER_WINDOW)
            logits = by_image.reshape(logits.shape)
        share = nn.softmax(logits).astype(self.dtype)
        y = jnp.einsum("whqk,wkhc->wqhc", share, value).reshape(windows.shape)
        y = normal_dense(x.shape[-1], dtype=self.dtype, name="proj")(y)
        return from_windows(y, self.window, self.shifts, x.shape)

    def project(self, windows: jax.Array) -> tuple[jax.Array, ...]:
        """Return queries, keys and values [N, T, heads, c] of windows [N, T, C]."""
        channels = windows.shape[-1]
        qkv = normal_dense(3 * channels, dtype=self.dtype, name="qkv")(windows)
        query, key, value = split_heads(qkv, self.heads)
        return query * (channels // self.heads) ** -0.5, key, value

    def position_bias(self) -> jax.Array:
        """Return what is added to the logits of queries and keys, [heads, T, T] float32."""
        shape = ((2 * self.window - 1) ** 2, self.heads)
        table = self.param("position_bias", normal, shape, jnp.float32)
        return jnp.moveaxis(table[distances(self.window)], -1, 0)


def merge_patches(x: jax.Array, name: str, post_norm: bool, dtype: DTypeLike) -> jax.Array:
    """Map [B, H, W, C] to [B, H / 2, W / 2, 2 C], in the caller's scope; zeros fill odd sides.

    The four cells of a patch are upper left, lower left, upper right, lower right.
    """
    x = pad_to(x, 2)
    x = jnp.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], axis=-1)
    norm = LayerNorm(epsilon=EPS, dtype=dtype, name=f"{name}_norm")
    options: dict[str, Any] = dict(use_bias=False, dtype=dtype, name=f"{name}_reduction")
    reduce = normal_dense(x.shape[-1] // 2, **options)
    return norm(reduce(x)) if post_norm else reduce(norm(x))


def split_heads(qkv: jax.Array, heads: int) -> list[jax.Array]:
    """Split [N, T, 3 C] into three [N, T, heads, C / heads]."""
    qkv = qkv.reshape(*qkv.shape[:2], 3, heads, -1)
    return [qkv[:, :, i] for i in range(3)]
