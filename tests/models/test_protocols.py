"""A part of a user's own says what it can do, or nothing, and is told what it must do."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.protocols import (
    PROTOCOLS,
    BackboneLike,
    MaskHeadLike,
    PartLike,
    ability,
)
from mask_rcnn_jax.signatures import meanings
from tests import small_trunk
from tests.helpers import tiny_config


@pytest.mark.parametrize("protocol", [PartLike, *PROTOCOLS.values()])
def test_every_ability_has_a_meaning_and_a_default(protocol):
    own = inspect.get_annotations(protocol)
    assert list(meanings(protocol)) == list(own)
    assert all(hasattr(protocol, name) for name in own)


def test_a_part_that_says_nothing_has_the_defaults():
    trunk = small_trunk.FourConvolutions()
    assert ability(trunk, BackboneLike, "frozen") == ()
    assert ability(trunk, BackboneLike, "trains_batch_stats") is True
    assert ability(None, MaskHeadLike, "roi_size") == 14
    with pytest.raises(AttributeError, match="no attribute 'froze'"):
        ability(trunk, BackboneLike, "froze")


class Subclass(BackboneLike, small_trunk.FourConvolutions):
    trains_batch_stats = False
    frozen = ("conv0",)

    __call__ = small_trunk.FourConvolutions.__call__


class Silent(BackboneLike, nn.Module):
    """Has the protocol's call alone."""


class Mute(nn.Module):
    """Has no call at all."""


class WithoutTrain(nn.Module):
    def __call__(self, x):
        return [x]


class Demanding(nn.Module):
    def __call__(self, x, *, train, extent, sizes):
        return [x]


class OneMap(nn.Module):
    def __call__(self, maps, train):
        return maps


class NeedsValid(nn.Module):
    num_classes: int

    def __call__(self, x, valid):
        return x, x


class OfAnyClass(nn.Module):
    def __call__(self, x, *, train=False):
        return x


def with_part(section, name):
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model[section] = {"name": f"{__name__}:{name}"}
    return config.model


def test_a_subclass_has_the_parameters_of_its_module():
    section = with_part("backbone", "Subclass")
    model = build_model(section)
    assert model.backbone.frozen == ("conv0",) and model.backbone.layer_id is None
    section.backbone = small_trunk.SECTION
    assert abstract_variables(model) == abstract_variables(build_model(section))


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ("backbone", "Mute", "with a __call__, got Mute"),
        ("backbone", "Silent", "with a __call__, got Silent"),
        ("backbone", "WithoutTrain", "that takes (x, train): got an unexpected keyword argument"),
        ("backbone", "Demanding", "that takes (x, train, extent): missing a required .* 'sizes'"),
        ("fpn", "OneMap", "that takes (features, extent, train): multiple values for argument"),
        ("box_head", "NeedsValid", "that takes (roi_features): missing a required .* 'valid'"),
        ("mask_head", "OfAnyClass", "that takes (roi_features, classes, train): too many"),
    ],
)
def test_a_part_that_cannot_be_called_is_named(section, name, message):
    start = f"^model.{section}.name is '{__name__}:{name}', expected a module "
    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=start + message) as error:
        build_model(with_part(section, name))
    assert "\n" not in str(error.value)


class Wrapped(nn.Module):
    """Takes whatever it is given, which is `train` alone: it names nothing else."""

    @nn.compact
    def __call__(self, *inputs, **options):
        assert options == {"train": False}
        return small_trunk.FourConvolutions()(*inputs, **options)


def test_arguments_without_a_name_are_not_given():
    model = build_model(with_part("backbone", "Wrapped"))
    kernels = abstract_variables(model)["params"]["backbone"]["FourConvolutions_0"]
    assert kernels["conv0"]["kernel"] == jax.ShapeDtypeStruct((5, 5, 3, 8), jnp.float32)
