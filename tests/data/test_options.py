import pickle
from dataclasses import fields

import pytest

from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.recipe.recipe import Recipe

FIT = {"image_size": (128, 192), "resize": "fit", "max_instances": 3}
EDGE = {"image_size": (100, 160), "resize": "shortest_edge", "max_instances": 3}


def options_of(entries, inclusive="none") -> ExampleOptions:
    model = {"box_coder": {"inclusive": inclusive}}
    data = Recipe.read({"data": entries, "model": model}).data
    return ExampleOptions(
        **{field.name: getattr(data, field.name) for field in fields(ExampleOptions)}
    )


def test_entries_are_picked_out_of_the_config():
    entries = EDGE | {"antialias": True, "short_sides": (64, 80)}
    options = options_of({"train_json": "a.json", "num_workers": 4} | entries, "all")
    assert options == ExampleOptions(**entries, inclusive_boxes=True)
    assert (options.short_sides, options.antialias, options.mask_frame) == ((64, 80), True, "box")


def test_lists_of_a_stored_config_become_tuples():
    options = options_of(EDGE | {"image_size": [100, 160], "short_sides": [64, 80]})
    assert options == ExampleOptions(**EDGE, short_sides=(64, 80))


@pytest.mark.parametrize("name", ["image_size", "resize", "max_instances"])
def test_missing_entry_is_named(name):
    with pytest.raises(ValueError, match=f"data.{name} is missing"):
        options_of({key: value for key, value in FIT.items() if key != name})


def test_options_travel_to_worker_processes():
    options = ExampleOptions(**EDGE, short_sides=(64, 80))
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(ExampleOptions(**EDGE, short_sides=(64, 80)))


@pytest.mark.parametrize(
    "entries, words",
    [
        (FIT | {"resize": "stretch"}, "data.resize is 'stretch', expected one of .'fit'"),
        (
            EDGE | {"resize_rounding": "up"},
            "data.resize_rounding is 'up', expected one of",
        ),
        (EDGE | {"antialias": 2}, "data.antialias is 2, expected bool"),
        (
            EDGE | {"image_dtype": "bfloat16"},
            "data.image_dtype is 'bfloat16', expected one",
        ),
        (EDGE | {"mask_frame": "roi"}, "data.mask_frame is 'roi', expected one of .'box', 'image'"),
        (EDGE | {"skip_crowd": None}, "data.skip_crowd is None, expected"),
        (EDGE | {"max_instances": 0}, "data.max_instances is 0, expected at least 1"),
        (EDGE | {"mask_size": 0}, "data.mask_size is 0, expected at least 1"),
        (EDGE | {"max_vertices": -1}, "data.max_vertices is -1, expected at least 0"),
        (FIT | {"image_size": (800, 1344)}, "multiples of 64"),
        (FIT | {"image_size": (832, 1333)}, "multiples of 64"),
        (FIT | {"image_size": (0, 64)}, "multiples of 64"),
        (EDGE | {"image_size": (0, 64)}, r"data.image_size is \(0, 64\), expected \(short side"),
        (EDGE | {"image_size": (64,)}, r"data.image_size is \(64,\), expected tuple"),
        (EDGE | {"image_size": 64}, "data.image_size is 64, expected"),
        (FIT | {"resize_rounding": "round"}, "data.resize_rounding is 'round'.*data.resize='fit'"),
        (FIT | {"short_sides": (64,)}, r"data.short_sides is \(64,\), expected \(\).*data.resize="),
        (  # both at once, as a recipe of mmdetection's has both
            FIT | {"resize_rounding": "round", "short_sides": (64,)},
            r"data.resize_rounding is 'round', expected 'floor'; data.short_sides is \(64,\), exp",
        ),
        (EDGE | {"short_sides": (64, 101)}, r"data.short_sides is .*from 1 to 100, the short side"),
        (EDGE | {"short_sides": (0,)}, r"data.short_sides is \(0,\), expected integers"),
        (
            EDGE | {"antialias": True, "image_dtype": "float32"},
            "data.image_dtype is 'float32', expected 'uint8' if data.antialias=True",
        ),
    ],
)
def test_value_without_meaning_is_named(entries, words):
    with pytest.raises(ValueError, match=words) as error:
        options_of(entries)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [(512,), (0, 512), 512, ("a", "b")])
def test_a_wrong_crop_size_is_named(size):
    data = FIT | {"augment": ("fixed_size_crop",), "fixed_size_crop": {"size": size}}
    with pytest.raises(ValueError, match=r"^data.fixed_size_crop.size is ") as error:
        options_of(data)
    assert "\n" not in str(error.value)
