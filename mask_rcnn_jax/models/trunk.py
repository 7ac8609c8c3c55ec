"""What the trunks have in common; one from outside needs none of it (`models.protocols`)."""

from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.channels import Channels, Widths, make_channels, narrow
from mask_rcnn_jax.models.norm import LIVE
from mask_rcnn_jax.ranges import NotNegative, Range, check

STAGES = 4
DropRate = Annotated[float, Range("at least 0 and below 1", lambda rate: 0 <= rate < 1)]
MLP_RATIO = 4


class Trunk(nn.Module, kw_only=True):
    """A backbone whose blocks can be recomputed and whose channels can be pruned.

    Attributes:
        remat: recompute each block from its input in the backward pass.
        widths: channels where `prune` left fewer, by name; (): all.
    """

    dtype: DTypeLike = jnp.float32
    remat: bool = False
    widths: Widths = ()

    def __post_init__(self):
        check(self)
        narrow(self.prunable, self.widths)
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """Channels that may be narrowed, see `models.channels`."""
        raise NotImplementedError


class ConvTrunk(Trunk, kw_only=True):
    """A stem and the stages res2 to res5 of convolutions with norms of one kind.

    Attributes:
        norm: norm behind every convolution, see `models.norm`.
        norm_eps: added to the variance.
        frozen_stages: untrained stages among stem, res2, .. res5, counted from the stem.
        widths: channels where `prune` left fewer, by name, such as (("res3", 48),); (): all.
    """

    norm: Literal[
        "frozen", "affine", "batch", "sync_batch", "naive_sync_batch", "group", "layer"
    ] = "frozen"
    norm_eps: NotNegative = 1e-5
    frozen_stages: Annotated[int, Range("0 to 5", lambda stages: 0 <= stages <= 5)] = 2

    @property
    def frozen(self) -> tuple[str, ...]:
        """Name prefixes of the untrained layers."""
        return ("stem", "res2", "res3", "res4", "res5")[: self.frozen_stages]

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        return self.norm in LIVE


class BlockEntries(NamedTuple):
    """What a transformer's block gets."""

    name: str
    number: int  # from 0, over all stages
    drop_rate: float
    hidden: int  # channels between its fully connected layers


class TransformerTrunk(Trunk, kw_only=True):
    """Blocks with layer norms and two fully connected layers: transformers and ConvNeXt.

    Attributes:
        drop_path: probability in training that the last block's branches are left out for an image
            (stochastic depth, Huang et al., 2016); it falls to 0 at the first block.
        exempt_from_decay: names of layers and parameters that `optim.weight_decay` leaves alone.
        widths: channels where `prune` left fewer, by name, such as (("res2_0/fc1", 128),), in "vit"
            and "dino" (("block0/fc1", 1024),); (): all.
    """

    drop_path: DropRate = 0.1
    exempt_from_decay: tuple[str, ...] = ()

    trains_batch_stats = False

    @property
    def block_widths(self) -> dict[str, int]:
        """Channels of each block, by name, in order."""
        raise NotImplementedError

    @property
    def prunable(self) -> dict[str, Channels]:
        """The channels between each block's fully connected layers; norms look at all others."""
        widths = self.block_widths.items()
        return {f"{name}/fc1": make_channels(MLP_RATIO * width) for name, width in widths}

    @property
    def blocks(self) -> list[BlockEntries]:
        """What each block gets, in order."""
        names, channels = self.block_widths, narrow(self.prunable, self.widths)
        rates = np.linspace(0, self.drop_path, len(names)).tolist()
        counts = [channels[f"{name}/fc1"].count for name in names]
        return list(map(BlockEntries, names, range(len(names)), rates, counts))


def stage_widths(depths: tuple[int, ...], width: int) -> dict[str, int]:
    """Return the channels of blocks res2_0, .. in stages of these depths, which double them."""
    stages = enumerate(depths)
    return {f"res{2 + k}_{i}": width * 2**k for k, depth in stages for i in range(depth)}


def of_stages(least: int) -> Range:
    """The range of a number of at least `least` for each stage."""
    text = f"{STAGES} numbers of at least {least}"
    return Range(text, lambda values: len(values) == STAGES and min(values) >= least)
