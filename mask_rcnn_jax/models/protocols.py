"""What the model asks of its backbone, neck and heads: a protocol for each of these sections.

A part need not be a subclass. `ability` reads an attribute that it may lack. In a protocol's
`__call__`, `*` separates the arguments that a part must take, by place or by name, from those that
it may leave out; one with a default is given in training only.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.channels import Channels, Widths
from mask_rcnn_jax.ops.extent import ValidExtent


class PartLike(Protocol):
    """Any part of a model.

    Attributes:
        trains_batch_stats: False if training leaves `batch_stats` alone.
        prunable: channels that `prune` may narrow, by name, see `models.channels`.
        widths: beside `prunable`, an entry: the channels that are left, by name.
    """

    trains_batch_stats: bool = True
    prunable: Mapping[str, Channels] = {}
    widths: Widths = ()


class BackboneLike(PartLike, Protocol):
    """Images to feature maps.

    Attributes:
        frozen: prefixes of layers that the optimizer leaves alone.
        exempt_from_decay: names of layers and parameters, at any depth, without
            `optim.weight_decay`.
        num_layers: number of layers, for `optim.layer_decay`.
        layer_id: function of a top-level layer's name: its index, 0 to `num_layers`, for
            `optim.layer_decay`; `num_layers + 1` learns as fast as the heads.
    """

    frozen: tuple[str, ...] = ()
    exempt_from_decay: tuple[str, ...] = ()
    num_layers: int | None = None
    layer_id: Callable[[str], int] | None = None

    def __call__(
        self, x: jax.Array, /, train: bool, *, extent: ValidExtent, keys: jax.Array | None
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to maps of strides 4, 8, 16, 32, or what `fpn` takes.

        Args:
            extent: `ops.extent.ValidExtent`; maps should be zero outside it.
            keys: a random key per image in training, a function of seed, step and image; None
                otherwise.
        """
        ...


class NeckLike(PartLike, Protocol):
    """A backbone's maps to a feature pyramid."""

    def __call__(
        self, features: list[jax.Array], extent: ValidExtent, /, train: bool
    ) -> list[jax.Array]:
        """Map to five maps of strides 4 to 64, zero outside the extent; `MaskRCNN` subsamples the
        last, or drops it, where `anchors.sizes` has more or fewer."""
        ...


class BoxHeadLike(PartLike, Protocol):
    """RoI features to classes and boxes.

    Attributes:
        num_classes: K, without background; ONNX export needs it.
        class_agnostic: False if classes have boxes of their own, of which a cascade refines one.
        roi_size: side P of the RoI features.
    """

    num_classes: int | None = None
    class_agnostic: bool = True
    roi_size: int = 7

    def __call__(
        self, roi_features: jax.Array, /, *, valid: jax.Array | None = None, train: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Map [B, R, P, P, C] to class logits [B, R, K + 1] and box deltas [B, R, K + 1, 4].

        Args:
            valid: [B, R] in training, the rows that are not padding.
            train: True in training, for batch norm.
        """
        ...


class MaskHeadLike(PartLike, Protocol):
    """RoI features to masks.

    Attributes:
        roi_size: side P of the RoI features.
        mask_size: side of the masks in prediction; None: twice `roi_size`.
    """

    roi_size: int = 14
    mask_size: int | None = None

    def __call__(
        self,
        roi_features: jax.Array,
        classes: jax.Array,
        /,
        *,
        sample: Callable[[jax.Array], jax.Array],
        keys: jax.Array | None = None,
        train: bool = False,
    ) -> Any:
        """Map [B, R, P, P, C] and classes [B, R], 0 for padding, to mask logits [B, R, M, M].

        In training, all images' RoIs are in one row, B = 1. A head may have another M then, and may
        return a pair: with these logits, `models.outputs.PointOutputs`, logits at points of its own
        choice, which have a loss of their own.

        Args:
            sample: a function of points [B, R, P, 2], (x, y) as fractions of the RoIs' boxes, to
                features [B, R, P, C] of the finest map, bilinear, zero outside.
            keys: a random key per RoI [B, R] where losses are computed; None in prediction.
            train: True in training, for batch norm.
        """
        ...


class KeypointHeadLike(PartLike, Protocol):
    """RoI features to a heatmap per keypoint.

    Attributes:
        roi_size: side S of the RoI features.
        score: of a keypoint, "logit" or "softmax", see `models.keypoints.KeypointHead`.
    """

    roi_size: int = 14
    score: str = "logit"

    def __call__(
        self, roi_features: jax.Array, classes: jax.Array, /, *, train: bool = False
    ) -> jax.Array:
        """Map [B, R, S, S, C] and classes [B, R], 0 for padding, to logits [B, R, P, 4S, 4S].

        In training, all images' RoIs are in one row, B = 1.

        Args:
            train: True in training, for batch norm.
        """
        ...


# By section.
PROTOCOLS: dict[str, type] = {
    "backbone": BackboneLike,
    "fpn": NeckLike,
    "box_head": BoxHeadLike,
    "mask_head": MaskHeadLike,
    "keypoint_head": KeypointHeadLike,
}


def ability(part: Any, protocol: type, name: str) -> Any:
    """Return an attribute of a part, or the protocol's default if the part lacks it."""
    return getattr(part, name, getattr(protocol, name))


def taken(part: Any, **given: Any) -> dict[str, Any]:
    """Return those arguments whose names are in a part's call."""
    names = inspect.signature(type(part).__call__).parameters
    return {name: value for name, value in given.items() if name in names}


def check_call(part: Any, named: parts.Named, protocol: Any) -> None:
    """Raise ValueError, naming the section, if a part cannot be called as its protocol says."""
    wrong = f"{named.where}.name is {named.name!r}, expected a module"
    if not callable(part) or type(part).__call__ is protocol.__call__:
        raise ValueError(f"{wrong} with a __call__, got {type(part).__name__}")
    own = inspect.signature(type(part).__call__)
    expected = inspect.signature(protocol.__call__).parameters.values()
    places = [p.name for p in expected if p.kind is p.POSITIONAL_ONLY]  # with `self`
    names = [p for p in expected if p.kind is not p.POSITIONAL_ONLY]
    in_training = [p for p in names if p.kind is not p.KEYWORD_ONLY or p.name in own.parameters]
    in_prediction = [p for p in in_training if p.default is p.empty]
    for given in (in_training, in_prediction):
        by_name = [p.name for p in given]
        try:
            own.bind(*places, **dict.fromkeys(by_name))
        except TypeError as error:
            arguments = ", ".join([*places[1:], *by_name])
            raise ValueError(f"{wrong} that takes ({arguments}): {error}") from error
