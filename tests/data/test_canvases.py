"""The smallest canvas that holds an image, and sets of canvases that leave little padding."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax import infer
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data import canvases
from mask_rcnn_jax.data.canvases import choose_canvases, evaluation_options
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.data.views import scaled_options
from mask_rcnn_jax.images.decode import decode_image, upright_size
from mask_rcnn_jax.predict.inputs import Input

EDGE = ExampleOptions((800, 1333), "shortest_edge", 1)
FIT = ExampleOptions((832, 1344), "fit", 1)
LENGTHS = ((832, 1088), (1216, 832), (832, 1216))


@pytest.mark.parametrize(
    "height, width, size, canvas",
    [
        (480, 640, (800, 1066), (832, 1088)),
        (640, 480, (1066, 800), (1216, 832)),  # no portrait canvas is shorter
        (427, 640, (800, 1199), (832, 1216)),
        (500, 500, (800, 800), (832, 1088)),
        (360, 640, (749, 1333), (832, 1344)),
        (640, 360, (1333, 749), (1344, 832)),
        (1, 4000, (1, 1333), (832, 1344)),
        (4000, 1, (1333, 1), (1344, 832)),
    ],
)
def test_an_image_takes_the_smallest_canvas_that_holds_it(height, width, size, canvas):
    plan = resize_plan(height, width, replace(EDGE, canvases=LENGTHS))
    assert plan == (canvas, size, resize_plan(height, width, EDGE).scale)


def test_a_fixed_canvas_may_have_smaller_ones():
    options = replace(FIT, canvases=((832, 640), (832, 1152)))
    assert resize_plan(640, 480, options)[:2] == ((832, 640), (832, 624))
    assert resize_plan(480, 640, options)[:2] == ((832, 1152), (832, 1109))
    keep = replace(FIT, resize="keep", canvases=((320, 640),))
    assert resize_plan(300, 600, keep)[:2] == ((320, 640), (300, 600))
    assert resize_plan(600, 300, keep)[:2] == ((832, 1344), (600, 300))


def test_an_image_shrinks_onto_the_canvas_of_its_batch():
    options = replace(EDGE, canvases=LENGTHS)
    plan = resize_plan(640, 480, options, canvas=(832, 1088))  # turned by an augmentation
    assert plan[:2] == ((832, 1088), (832, 624))
    plan = resize_plan(480, 640, replace(options, short_sides=(640,)), 640, canvas=(832, 1088))
    assert plan[:2] == ((832, 1088), (640, 853))


@pytest.mark.parametrize("canvas", [(832, 1408), (1344, 1344), (800, 1088), (0, 64), (-64, 64)])
def test_a_canvas_beyond_the_others_is_named(canvas):
    expected = r"expected \(height, width\), both multiples of 64, within 832 x 1344 or 1344 x 832"
    with pytest.raises(ValueError, match=expected):
        replace(EDGE, canvases=(canvas,))


def test_crops_and_scaled_views_have_one_canvas():
    overrides = {"data.canvases": LENGTHS, "data.augment": ("fixed_size_crop",)}
    assert load_config("finetune", overrides).data.in_training().canvases == ()
    assert scaled_options(replace(EDGE, canvases=LENGTHS), 0.5).canvases == ()


def pixels(sizes, options, canvases):
    plans = [(resize_plan(*size, replace(options, canvases=canvases)), n) for size, n in sizes]
    return sum(plan.canvas[0] * plan.canvas[1] * n for plan, n in plans)


def exhaustive(sizes, options, count):
    """The fewest pixels with so many further canvases, from all subsets of all canvases."""
    height, width = (side // 64 for side in options.image_size)
    grid = [(64 * y, 64 * x) for y in range(1, height + 1) for x in range(1, width + 1)]
    return min(pixels(sizes, options, some) for some in itertools.combinations(grid, count))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_choice_is_the_best_of_all(seed, count):
    options = ExampleOptions((192, 256), "keep", 1)
    rng = np.random.default_rng(seed)
    sizes = Counter(map(tuple, rng.integers(20, 300, (25, 2)).tolist()))
    chosen = choose_canvases(sizes.elements(), options, most=count + 1)
    counted = sizes.items()
    assert len(chosen) == count
    assert pixels(counted, options, chosen) == exhaustive(counted, options, count)


def test_choice_for_the_usual_photos():
    sizes = [(480, 640)] * 60 + [(640, 480)] * 20 + [(427, 640)] * 40 + [(300, 640)]
    chosen = choose_canvases(sizes, replace(EDGE, canvases=((64, 64),)), most=5)
    assert chosen == ((832, 1088), (832, 1216), (1088, 832))


def test_choice_lies_within_a_full_canvas():
    """896 x 896 would hold all of these, and is beyond 832 x 1344 and 1344 x 832."""
    sizes = [(100, 107)] * 30 + [(107, 100)] * 20
    chosen = choose_canvases(sizes, EDGE, most=3)
    assert chosen == ((832, 896),) and replace(EDGE, canvases=chosen).canvases == chosen


def test_a_canvas_must_be_worth_its_price():
    sizes, saved = [(480, 640)] * 10, 832 * (1344 - 1088)

    def choose(**keys):
        return choose_canvases([*sizes, (375, 640), (375, 640)], EDGE, most=6, **keys)

    assert choose(price=10 * saved - 1) == ((832, 1088),) and choose(price=10 * saved) == ()
    # Batches of four: three hold all twelve images, but ten and two take three and one.
    assert choose(rows=4) == () and choose(rows=2) == ((832, 1088),)
    assert choose_canvases([], EDGE, most=6) == choose_canvases(sizes, EDGE, most=1) == ()


@pytest.mark.parametrize("platform, worth", [("cpu", 118), ("gpu", 70_426), ("tpu", 70_426)])
def test_evaluation_takes_canvases_where_they_save_more_than_compiling(
    platform, worth, monkeypatch
):
    monkeypatch.setattr(canvases.jax, "default_backend", lambda: platform)
    data = load_config("coco_torchvision").data

    def chosen(count, options=data, most=6, multiple=32, share=1.0):
        limits = {"most": most, "multiple": multiple, "share": share}
        return evaluation_options(options, [(480, 640)] * count, rows=1, **limits).canvases

    assert chosen(worth) == ((832, 1088),) and chosen(worth - 1) == ()
    assert chosen(worth // 2, share=0.49) == ((832, 1088),)  # of twice as many
    assert chosen(10 * worth, most=0) == ()
    assert chosen(10 * worth, replace(data, canvases=LENGTHS)) == LENGTHS  # those of the recipe
    for multiple in (0, 128):  # detections would depend on the canvas
        assert chosen(10 * worth, multiple=multiple) == ()


@pytest.mark.parametrize("orientation", [None, 1, 3, 6, 8])
def test_size_is_read_from_the_header_as_it_is_decoded(orientation, tmp_path):
    path, exif = tmp_path / "a.jpg", Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    assert upright_size(path) == decode_image(path, upright=True).shape[:2]
    path.write_bytes(b"no image")
    assert upright_size(path) is None and upright_size(tmp_path / "absent.jpg") is None


@pytest.mark.parametrize("most_headers", [100, 4])
def test_infer_reads_sizes_from_headers(most_headers, tmp_path, monkeypatch):
    monkeypatch.setattr(canvases, "COMPILING", {"cpu": 6 * 832 * (1344 - 1088), "gpu": 1e99})
    monkeypatch.setattr(infer, "MOST_HEADERS", most_headers)
    paths = [str(tmp_path / f"{number}.png") for number in range(8)]
    for path in paths:
        Image.new("RGB", (64, 48)).save(path)
    place = PurePosixPath("a.png")
    images = [Input(path, place, place) for path in [*paths, "absent.png"]]
    recipe, web = load_config("coco_torchvision"), Input("https://example.org/a.jpg", place, place)
    assert infer._with_canvases(recipe, [*images[:4], web], 1) == recipe
    recipe = infer._with_canvases(recipe, images, 1)
    assert recipe.data.canvases == ((832, 1088),)
