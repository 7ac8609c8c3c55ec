"""The vision transformers of DINOv3 (Siméoni et al., "DINOv3", 2025) and DINOv2 (Oquab et al.,
"DINOv2: Learning Robust Visual Features without Supervision", 2023)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.channels import Channels, make_channels
from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.drop_path import drop_path, fold_in
from mask_rcnn_jax.models.init import normal, normal_dense
from mask_rcnn_jax.models.norm import make_norm
from mask_rcnn_jax.models.trunk import MLP_RATIO, TransformerTrunk
from mask_rcnn_jax.models.vit import Attend, attend, table_positions
from mask_rcnn_jax.ranges import Count, Positive, Whole, check

BASE = 100.0  # longest period of the rotations, in halves of the map


class Dino(TransformerTrunk, kw_only=True):
    """Vision transformer to maps of the stride of its patches, behind a norm.

    A class token and registers (Darcet et al., "Vision Transformers Need Registers", 2024) take
    part in the attention and are left out of the maps. All cells of the canvas attend to each
    other, also those beyond an image.

    Attributes:
        width: channels.
        depth: blocks.
        num_heads: attention heads.
        patch: side of the patches, pixels; the pyramid "simple" takes 16.
        registers: register tokens; 0 in DINOv2 without registers.
        table_side: side of the table of positions, cells, which is interpolated for other maps: 37
            in DINOv2; 0: rotary positions as in DINOv3 (Su et al., "RoFormer", 2021), which fit
            maps of any size.
        gated: SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020) in place of GELU, as in
            DINOv3's ViT-S+ and DINOv2's ViT-g.
        hidden: channels between a block's fully connected layers; 0: four times `width`.
        layers: blocks, counted from 0, whose maps are returned; (): the last.
        frozen_blocks: blocks that are not trained, counted from the first, and with them the
            embeddings; all of them: nothing of the trunk is trained.
        layer_scale: initial factor of the channels of every block's branches.
        norm_eps: added to the variance in norms: 1e-5 in DINOv3, 1e-6 in DINOv2.
        attention: "cudnn" is the fused kernel of NVIDIA GPUs, with `train.precision` "bfloat16" or
            "float16"; other devices take "xla".
    """

    width: Count = 384
    depth: Count = 12
    num_heads: Count = 6
    patch: Count = 16
    registers: Whole = 4
    table_side: Whole = 0
    gated: bool = False
    hidden: Whole = 0
    layers: tuple[int, ...] = ()
    frozen_blocks: Whole = 0
    layer_scale: Positive = 1e-5
    norm_eps: Positive = 1e-5
    attention: Attend = "xla"

    def __post_init__(self):
        check(self)
        unit = 1 if self.table_side else 4  # a rotary head is in quarters
        if self.width % (unit * self.num_heads):
            expected = f"a divisor of width={self.width}"
            if unit > 1:
                expected += f" that leaves a multiple of {unit}"
            raise ValueError(f"num_heads is {self.num_heads}, expected {expected}")
        if not all(0 <= block < self.depth for block in self.layers):
            expected = f"blocks from 0 to {self.depth - 1}"
            raise ValueError(f"layers is {self.layers}, expected {expected}")
        if self.frozen_blocks > self.depth:
            expected = f"from 0 to depth={self.depth}"
            raise ValueError(f"frozen_blocks is {self.frozen_blocks}, expected {expected}")
        super().__post_init__()

    @property
    def block_widths(self) -> dict[str, int]:
        """Channels of each block."""
        return {f"block{i}": self.width for i in range(self.depth)}

    @property
    def prunable(self) -> dict[str, Channels]:
        """The channels between each block's fully connected layers; norms look at all others."""
        channels = make_channels(self.hidden or MLP_RATIO * self.width)
        return {f"{name}/fc1": channels for name in self.block_widths}

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the layers that the optimizer leaves alone."""
        if not self.frozen_blocks:
            return ()
        embeddings = ("patch_embed", "cls_token", "register_tokens", "pos_embed")
        blocks = tuple(f"block{i}" for i in range(self.frozen_blocks))
        return (*embeddings, *blocks, *(("norm",) if self.frozen_blocks == self.depth else ()))

    @property
    def num_layers(self) -> int:
        """Number of layers for `optim.layer_decay`."""
        return self.depth

    def layer_id(self, name: str) -> int:
        """Number of a layer, 0 for the embeddings; the norm learns as fast as the heads."""
        if name == "norm":
            return self.depth + 1
        return 1 + int(name.removeprefix("block")) if name.startswith("block") else 0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, keys: jax.Array | None = None
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to a list of [B, H / patch, W / patch, C].

        keys: [B] PRNG keys for `drop_path`; None leaves nothing out.
        """
        options: dict[str, Any] = dict(kernel_init=normal, dtype=self.dtype, name="patch_embed")
        x = Conv(self.width, (self.patch, self.patch), self.patch, **options)(x.astype(self.dtype))
        batch, *size, channels = x.shape
        tokens, prefix = self._embed(x, (size[0], size[1])), 1 + self.registers
        rotations = (
            None if self.table_side else rotary(size[0], size[1], channels // self.num_heads)
        )
        make_block = nn.remat(Block) if self.remat else Block
        norm = make_norm("layer", train=False, dtype=self.dtype, eps=self.norm_eps)(name="norm")
        maps = []
        for name, i, rate, hidden in self.blocks:
            tokens = make_block(
                heads=self.num_heads,
                gated=self.gated,
                layer_scale=self.layer_scale,
                norm_eps=self.norm_eps,
                drop_rate=rate,
                attention=self.attention,
                hidden=hidden,
                dtype=self.dtype,
                name=name,
            )(tokens, rotations, None if keys is None or not train else fold_in(keys, i))
            if i < self.frozen_blocks:
                tokens = lax.stop_gradient(tokens)
            if i in (self.layers or (self.depth - 1,)):
                maps.append(norm(tokens[:, prefix:]).reshape(batch, *size, channels))
        return maps

    def _embed(self, x: jax.Array, size: tuple[int, int]) -> jax.Array:
        """Patches [B, H, W, C] to tokens [B, 1 + registers + H * W, C]: class token, registers and
        patches, with positions where they come from a table."""
        batch, channels = x.shape[0], x.shape[-1]
        start = self.param("cls_token", normal, (1, 1, channels), jnp.float32)
        if self.table_side:
            shape = (1, 1 + self.table_side**2, channels)  # the first row is of the class token
            table = self.param("pos_embed", normal, shape, jnp.float32)
            start = start + table[:, :1]
            # Meta resizes with antialiasing in the models with registers alone.
            positions = table_positions(table, size, antialias=self.registers > 0)
            x = x + positions.astype(self.dtype)
        if self.registers:
            shape = (1, self.registers, channels)
            registers = self.param("register_tokens", normal, shape, jnp.float32)
            start = jnp.concatenate([start, registers], axis=1)
        start = jnp.broadcast_to(start.astype(self.dtype), (batch, *start.shape[1:]))
        return jnp.concatenate([start, x.reshape(batch, -1, channels)], axis=1)


class Block(nn.Module):
    """Attention and fully connected layers, each behind a norm, scaled, and beside a shortcut."""

    heads: int
    gated: bool
    layer_scale: float
    norm_eps: float
    drop_rate: float
    attention: Attend
    hidden: int  # channels between the fully connected layers
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: jax.Array, rotations: tuple[jax.Array, jax.Array] | None, keys: jax.Array | None
    ) -> jax.Array:
        """Tokens [B, T, C] to the same shape; rotations: of the last tokens; keys [B]."""
        norm = make_norm("layer", train=False, dtype=self.dtype, eps=self.norm_eps)
        dense = partial(normal_dense, dtype=self.dtype)
        scale, width = nn.initializers.constant(self.layer_scale), x.shape[-1]

        def add(x: jax.Array, y: jax.Array, number: int) -> jax.Array:
            gamma = self.param(f"gamma{number}", scale, (width,), jnp.float32)
            y = (y * gamma[None, None]).astype(self.dtype)
            return x + drop_path(y, self.drop_rate, keys, number - 1)

        y = norm(name="norm1")(x)
        x = add(x, Attention(self.heads, self.attention, self.dtype, name="attn")(y, rotations), 1)
        y = norm(name="norm2")(x)
        inner = dense(self.hidden, name="fc1")(y).astype(jnp.float32)
        if self.gated:
            inner = inner * nn.silu(dense(self.hidden, name="gate")(y).astype(jnp.float32))
        else:
            inner = nn.gelu(inner, approximate=False)
        return add(x, dense(width, name="fc2")(inner.astype(self.dtype)), 2)


class Attention(nn.Module):
    """Multi-head attention of tokens.

    Keys have no bias: DINOv3 masks it, and with DINOv2's, which is not rotated, it adds the same to
    all logits of a query.
    """

    heads: int
    attention: Attend
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, rotations: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        """Tokens [B, T, C] to the same shape."""
        batch, count, channels = x.shape
        zeros = nn.initializers.zeros
        dense = partial(normal_dense, dtype=self.dtype)
        qkv = dense(3 * channels, use_bias=False, name="qkv")(x)
        query, key, value = jnp.split(qkv, 3, axis=-1)
        query, value = (
            y + self.param(name, zeros, (channels,), jnp.float32).astype(self.dtype)[None, None]
            for name, y in (("q_bias", query), ("v_bias", value))
        )
        shape = (batch, count, self.heads, channels // self.heads)
        query, key, value = (y.reshape(shape) for y in (query, key, value))
        if rotations is not None:
            query, key = (rotate(y, *rotations) for y in (query, key))
        y = attend(query, key, value, None, self.attention)
        return dense(channels, name="proj")(y.reshape(x.shape))


def rotary(rows: int, columns: int, head: int) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines [rows * columns, head] of the cells' rotations, float32.

    Cells have places from -1 to 1 along each axis, whatever its length. The first quarter of the
    angles of each half is of y, the second of x.
    """
    frequencies = BASE ** -(np.arange(head // 4) / (head // 4))
    places = [2 * (np.arange(size) + 0.5) / size - 1 for size in (rows, columns)]
    grid = np.stack(np.meshgrid(*places, indexing="ij"), axis=-1).reshape(-1, 2)
    angles = 2 * np.pi * grid[..., None] * frequencies
    angles = np.tile(angles.reshape(len(grid), -1), 2)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotate pairs of channels, of both halves, of the last tokens of x [B, T, heads, c]."""
    first = x.shape[1] - len(cosines)
    y = x[:, first:].astype(jnp.float32)
    low, high = jnp.split(y, 2, axis=-1)
    turned = jnp.concatenate([-high, low], axis=-1)
    y = y * cosines[None, :, None] + turned * sines[None, :, None]
    return jnp.concatenate([x[:, :first], y.astype(x.dtype)], axis=1)
