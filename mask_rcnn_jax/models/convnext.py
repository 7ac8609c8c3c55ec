"""ConvNeXt backbones (Liu et al., "A ConvNet for the 2020s", 2022) returning C2..C5."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv, Dense
from mask_rcnn_jax.models.drop_path import drop_path
from mask_rcnn_jax.models.norm import make_norm
from mask_rcnn_jax.models.trunk import TransformerTrunk, of_stages, stage_widths
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Count, Positive

BLOCKS_PER_LAYER = 3  # in the third stage, for `optim.layer_decay`

_normal = nn.initializers.normal(0.02)


class Block(nn.Module):
    """7x7 depthwise convolution, norm and two fully connected layers, beside a shortcut."""

    layer_scale: float
    drop_rate: float
    number: int  # from 0, over all stages
    hidden: int  # channels between the fully connected layers
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, inside: jax.Array | None, keys: jax.Array | None) -> jax.Array:
        """Map [B, H, W, C] to the same shape.

        inside: [1, H, W, 1] bool, cells that the convolution sees; None: all. keys: see `ConvNeXt`.
        """
        channels = x.shape[-1]
        options: dict[str, Any] = dict(kernel_init=_normal, dtype=self.dtype)
        depthwise = Conv(channels, (7, 7), padding=3, groups=channels, name="dwconv", **options)
        y = depthwise(x if inside is None else jnp.where(inside, x, 0))
        y = make_norm("layer", train=False, dtype=self.dtype)(name="norm")(y)
        options["bias_init"] = nn.initializers.zeros
        y = Dense(self.hidden, name="fc1", **options)(y)
        y = nn.gelu(y.astype(jnp.float32), approximate=False)
        y = Dense(channels, name="fc2", **options)(y.astype(self.dtype))
        scale = nn.initializers.constant(self.layer_scale)
        gamma = self.param("gamma", scale, (channels,), jnp.float32)
        y = (y * gamma[None, None, None]).astype(self.dtype)
        return x + drop_path(y, self.drop_rate, keys, self.number)


class ConvNeXt(TransformerTrunk, kw_only=True):
    """ConvNeXt without the classifier, with a norm behind each of its four maps.

    Attributes:
        depths: blocks of each of the four stages.
        width: channels of the first stage; each stage doubles them.
        layer_scale: initial factor of the channels of every block's branch (gamma).
    """

    depths: Annotated[tuple[int, ...], of_stages(1)] = (3, 3, 9, 3)
    width: Count = 96
    layer_scale: Positive = 1e-6
    exempt_from_decay: tuple[str, ...] = ("scale", "bias", "gamma")

    @property
    def block_widths(self) -> dict[str, int]:
        """Channels of each block."""
        return stage_widths(self.depths, self.width)

    @property
    def num_layers(self) -> int:
        """Number of layers for `optim.layer_decay`: 6 in the smallest model, 12 in the others."""
        return 4 + (self.depths[2] - 1) // BLOCKS_PER_LAYER

    def layer_id(self, name: str) -> int:
        """Number of a layer, as in mmdetection's "layer_wise" decay.

        0 for the stem, one per stage but one per three blocks of the third; the norms of the maps
        learn as fast as the heads.
        """
        kind, _, rest = name.partition("_")
        if kind == "stem":
            return 0
        if kind.startswith("output"):
            return self.num_layers + 1
        block = int(rest) if kind.startswith("res") else 0
        layers = {2: 1, 3: 2, 4: 3 + block // BLOCKS_PER_LAYER, 5: self.num_layers}
        return layers[int(kind[-1])]

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        extent: ValidExtent | None = None,
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to C2..C5; layers read zeros outside `extent`.

        keys: [B] PRNG keys for `drop_path`; None leaves nothing out.
        """
        norm = make_norm("layer", train=False, dtype=self.dtype)
        options: dict[str, Any] = dict(kernel_init=_normal, dtype=self.dtype)
        make_block = nn.remat(Block) if self.remat else Block
        blocks = iter(self.blocks)
        keys = keys if train else None

        x = Conv(self.width, (4, 4), 4, name="stem_conv", **options)(x.astype(self.dtype))
        x = norm(name="stem_norm")(x)
        features = []
        for stage, depth in enumerate(self.depths, start=2):
            if stage > 2:
                x = norm(name=f"down{stage}_norm")(x)
                x = x if extent is None else extent.mask(x)
                x = Conv(2 * x.shape[-1], (2, 2), 2, name=f"down{stage}_conv", **options)(x)
            inside = None if extent is None else extent.inside(x.shape[1:3])
            for _ in range(depth):
                name, number, rate, hidden = next(blocks)
                block = make_block(self.layer_scale, rate, number, hidden, self.dtype, name=name)
                x = block(x, inside, keys)
            features.append(norm(name=f"output{stage}_norm")(x))
        return features
