"""Several mask heads side by side."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from mask_rcnn_jax.models.channels import Channels
from mask_rcnn_jax.models.roi_heads import MaskHead
from mask_rcnn_jax.ranges import Count


class MeanMaskHead(MaskHead):
    """Mask heads whose mean is the mask, as those of the stages of mmdetection's cascades.

    All learn from the same RoIs and from the mean.

    Attributes:
        num_classes: K, without background.
        channels: channels per convolution.
        predictor_init: as in `MaskHead`.
        num_convs: 3x3 convolutions.
        norm: norm behind each of them, which then has no bias, see `models.norm`.
        roi_size: side of the RoI features; masks have twice as many cells per side.
        widths: channels where `prune` left fewer, by name, such as (("heads_0/mask_fcn1", 128),);
            (): `channels`.
        heads: number of heads.
    """

    heads: Count = 3

    @property
    def prunable(self) -> dict[str, Channels]:
        """Each head's channels."""
        own = super().prunable
        return {f"heads_{i}/{name}": own[name] for i in range(self.heads) for name in own}

    @nn.compact
    def __call__(
        self, roi_features: jax.Array, classes: jax.Array, train: bool = False
    ) -> jax.Array:
        """Map [B, R, P, P, C] and classes [B, R] to their mask logits, [B, R, 2P, 2P]."""
        names = ("num_classes", "channels", "predictor_init", "dtype", "num_convs", "norm")
        options = {name: getattr(self, name) for name in (*names, "roi_size")}
        logits = []
        for i in range(self.heads):
            start = f"heads_{i}/"
            own = tuple((n.removeprefix(start), w) for n, w in self.widths if n.startswith(start))
            head = MaskHead(**options, widths=own, name=f"heads_{i}")
            logits.append(head(roi_features, classes, train))
        if self.heads == 1:
            return logits[0]
        yes, no = (
            jax.nn.logsumexp(jax.nn.log_sigmoid(sign * jnp.stack(logits)), axis=0)
            for sign in (1, -1)
        )
        return yes - no
