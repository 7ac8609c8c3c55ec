"""Config entries for a dataset, of which the numbers are known."""

import ast
import shlex

import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.report.set_objects import SetObjects, collect, shared_images, size_counts
from mask_rcnn_jax.report.suggestions import advise, count_suggestions, image_size
from tests.data.small_set import rectangle, write_coco


def squares(size, sides, per_image=1, num_images=None):
    """Images of one (height, width) with squares of these sides, spread over each."""
    sides = np.asarray(sides, float)
    images = np.arange(len(sides)) // per_image
    count = num_images or int(images.max(initial=-1)) + 1
    rng = np.random.default_rng(0)
    limit = np.array(size[::-1]) - sides[:, None]
    corners = rng.uniform(0, 1, (len(sides), 2)) * limit
    boxes = np.concatenate([corners, corners + sides[:, None]], axis=1)
    none = np.zeros((0, 2), int)
    sizes = np.tile(size, (count, 1))
    return SetObjects(sizes, images, np.ones(len(sides), int), boxes, sides, none)


def size_for(objects, recipe="finetune", **entries):
    entries = {"augment": ()} | entries
    recipe = load_config(recipe, {f"data.{name}": value for name, value in entries.items()})
    return image_size(objects, recipe.data)


@pytest.mark.parametrize("size, side, expected", [
    ((480, 640), 60, (512, 704)),  # as it is, in multiples of 64
    ((480, 640), 15, (640, 896)),  # 20 pixels for objects of 15
    ((256, 256), 4, (512, 512)),  # twice and no more
    ((3000, 4000), 600, (800, 1088)),  # the published recipes' short side
    ((3000, 12000), 600, (800, 1333)),  # and long side
    ((640, 480), 60, (512, 704)),  # portraits
    ((30, 40), 20, (64, 128)),
])  # fmt: skip
def test_image_size_follows_images_and_small_objects(size, side, expected):
    found, reason = size_for(squares(size, [side] * 20))
    assert found == expected
    assert reason.startswith(f"The usual short side is {min(size)} pixels; 10% of the objects")


def test_a_canvas_has_the_shape_of_the_images():
    wide, tall = squares((300, 500), [60] * 9), squares((500, 300), [60] * 9)
    assert size_for(wide, "coco")[0] == (320, 576) and size_for(tall, "coco")[0] == (576, 320)
    assert size_for(squares((1000, 4000), [600] * 9), "coco")[0] == (384, 1344)


def test_tiles_are_suggested_where_no_size_is_enough():
    reason = size_for(squares((3000, 4000), [20] * 9))[1]
    assert reason.endswith("; cut images into tiles to find objects below 10.")
    assert "tiles" not in size_for(squares((480, 640), [15] * 9))[1]


@pytest.mark.parametrize("size, side, expected", [
    ((20_000, 20_000), 24, True),
    ((3000, 4000), 20, True),
    ((3000, 4000), 60, False),  # 16 pixels on the canvas
    ((1500, 1500), 5, False),  # hardly shrunk
    ((200, 300), 2, False),
])  # fmt: skip
def test_windows_are_suggested_where_images_are_shrunk_too_far(size, side, expected):
    objects = squares(size, [side] * 20)
    found = [
        s for s in advise(objects, load_config("finetune")).suggestions if "windows" in s.entry
    ]
    assert len(found) == expected
    if found:
        assert "--config.data.windows.size='(768, 768)'" in found[0].reason
        assert not found[0].is_change  # the other entries are those of whole images
        with_windows = load_config("finetune", {"data.windows.size": (768, 768)})
        assert "windows" not in " ".join(s.entry for s in advise(objects, with_windows).suggestions)


def test_sizes_stay_that_nothing_speaks_against():
    none = squares((100, 100), [], num_images=3)
    assert size_for(none)[0] == (800, 1333)
    keep = dict(resize="keep", image_size=(128, 192))
    assert size_for(squares((50, 60), [5] * 4), "coco", **keep)[0] == (128, 192)
    config = load_config("coco_torchvision:v2")
    advice = advise(squares((100, 100), [5] * 9), config)
    assert not advice.suggestions[0].is_change and "crops" in advice.suggestions[0].reason


def test_short_sides_follow_the_image_size():
    """Training would refuse those above the short side."""
    advice = advise(squares((480, 640), [60] * 20), load_config("coco_detectron2"))
    values = {s.entry: s.value for s in advice.suggestions}
    assert values["data.image_size"] == (512, 704)
    assert values["data.short_sides"] == (409, 430, 450, 471, 491, 512)


@pytest.mark.parametrize("images, epochs", [(24, 84), (199, 11), (200, None), (5000, None)])
def test_small_sets_get_enough_steps(images, epochs):
    """About 500 of 4 images, and never fewer than the recipe's."""
    advice = advise(squares((480, 640), [60] * images), load_config("finetune"))
    found = [s for s in advice.suggestions if s.entry == "train.epochs"]
    assert [s.value for s in found] == ([epochs] if epochs else [])
    if images == 24:
        assert found[0].reason.startswith("24 images make 60 steps of 4 in 10 epochs; ")
        assert "--config.train.epochs=84.0" in advice.flags


def test_runs_whose_steps_are_set_keep_them():
    entries = {"train.epochs": 0.0, "train.steps": 60}
    for recipe in (load_config("dense"), load_config("finetune", entries)):
        advice = advise(squares((480, 640), [60] * 24), recipe)
        assert "train.epochs" not in [s.entry for s in advice.suggestions]


def test_a_size_that_costs_fit_says_so():
    """Objects of 4 to 100 pixels and very different shapes, which the recipe's size enlarges more
    than the suggested one."""
    objects, rng = squares((256, 256), np.geomspace(4, 100, 400)), np.random.default_rng(0)
    half = objects.sides[:, None] * np.exp(rng.normal(0, 0.35, 400))[:, None] ** [1, -1] / 2
    centers = (objects.boxes[:, :2] + objects.boxes[:, 2:]) / 2
    boxes = np.concatenate([centers - half, centers + half], axis=1).clip(0, 256)
    advice = advise(objects._replace(boxes=boxes), load_config("finetune"))
    reason, (_, before), (_, after) = advice.suggestions[0].reason, advice.fits[0], advice.fits[-1]
    shares = [f"{fit.at_50:.1%} / {fit.at_70:.1%}" for fit in (before, after)]
    assert after.shares < before.shares and f" It costs fit: {' -> '.join(shares)} of" in reason
    (size, *_) = advise(squares((480, 640), [60] * 40), load_config("finetune")).suggestions
    assert size.is_change and "costs" not in size.reason


def test_a_size_near_the_recipe_s_stays():
    (size, *_) = advise(squares((800, 1200), [90] * 9), load_config("finetune")).suggestions
    assert size.value == (800, 1333)


def changes(counts, recipe="quickstart:long", **entries):
    config = load_config(recipe, {k.replace("__", "."): v for k, v in entries.items()})
    found = count_suggestions(np.array(counts), config)
    return {s.entry: s.value for s in found if s.is_change}


def test_limits_grow_with_the_objects_of_an_image():
    assert changes([99] * 100) == {
        "data.max_instances": 100,
        "eval.detections_per_image": 150,
        "model.rpn.post_nms_topk_train": 400,
        "model.rpn.pre_nms_topk_train": 800,
        "model.rpn.post_nms_topk_test": 400,
        "model.rpn.pre_nms_topk_test": 800,
        "model.rpn.batch_size_per_image": 256,  # half of which are for objects
        "model.sampling.batch_size_per_image": 448,  # of which a quarter
    }


def test_limits_of_few_objects():
    """`max_instances` follows the fullest image, the others all but one image in a hundred."""
    assert changes([3] * 10) == {}  # 20 are the recipe's
    assert changes([3] * 10, "finetune") == {"data.max_instances": 20}
    assert changes([3] * 999 + [90]) == {"data.max_instances": 100}
    assert changes([0] * 9) == changes([]) == {}
    assert changes([21], data__augment=("copy_paste",))["data.max_instances"] == 60


def test_limits_of_two_thousand_objects():
    """More RoIs than that cost too much: half of them are for objects, which take turns."""
    found = changes([2000] * 9, "finetune")
    assert {name: value for name, value in found.items() if "nms" not in name} == {
        "data.max_instances": 2000,
        "eval.detections_per_image": 3000,
        "model.rpn.batch_size_per_image": 4032,
        "model.sampling.positive_fraction": 0.5,
        "model.sampling.batch_size_per_image": 1024,
    }
    assert found["eval.pre_nms_topk"] == 6000
    for mode in ("train", "test"):
        assert found[f"model.rpn.post_nms_topk_{mode}"] == 4000
        assert found[f"model.rpn.pre_nms_topk_{mode}"] == 8000
    (first, *_) = count_suggestions(np.array([2000]), load_config("finetune"))
    assert first.reason.endswith("The recipe dense trains on crops of images with so many.")


def test_training_limits_follow_crops_and_the_others_images():
    objects = squares((1024, 1024), [16.0] * 4000, per_image=2000)
    before = load_config("dense")
    values = {s.entry: s.value for s in advise(objects, before).suggestions}
    # 20 pixels for objects of 16, in windows of 512 of 1280: 320 objects, and up to 5% more
    assert values["data.image_size"] == values["data.scale_jitter.size"] == (1280, 1280)
    assert 500 <= values["data.max_instances"] <= 760  # at scale 0.8
    assert values["eval.detections_per_image"] == 3000
    # Anchors for the objects of a crop, not for 2,000, which would take 4,000.
    assert values.get("model.rpn.batch_size_per_image", 1024) <= 1536
    assert "model.sampling.batch_size_per_image" not in values
    after = load_config("dense", values)
    assert advise(objects, after).flags == []


def test_crops_at_another_scale_than_evaluation_keep_their_size():
    config = load_config("dense", {"data.scale_jitter.size": (900, 900)})
    (size, *others) = advise(squares((1024, 1024), [16.0] * 90, 30), config).suggestions
    assert not size.is_change and not [s for s in others if "scale_jitter" in s.entry]


def test_proposals_of_a_device_are_not_those_of_an_image():
    entries = {"model__rpn__post_nms_scope": "batch"}
    found = changes([99] * 100, **entries)
    assert not [name for name in found if name.endswith("topk_train")]
    assert found["model.rpn.post_nms_topk_test"] == 400


def test_flags_are_what_a_shell_and_a_recipe_take():
    """Of discs, which sizes of one shape fit best, and of boxes in several shapes."""
    rng = np.random.default_rng(2)
    discs = squares((256, 256), rng.uniform(5, 18, 900), per_image=30)
    boxes = discs.boxes.copy()
    boxes[:, 3] += (boxes[:, 3] - boxes[:, 1]) * rng.uniform(1, 5, 900)
    for objects in (discs, discs._replace(boxes=boxes)):
        for recipe in ("quickstart", "finetune"):
            for flag in advise(objects, load_config(recipe)).flags:
                (word,) = shlex.split(flag)
                ast.literal_eval(word.partition("=")[2])


def test_advice_holds_together():
    """Nuclei, or something like them: small discs, many in an image, under a recipe for shapes."""
    rng = np.random.default_rng(2)
    objects = squares((256, 256), rng.uniform(5, 18, 900), per_image=30)
    config = load_config("quickstart")
    advice = advise(objects, config)
    values = {s.entry: s.value for s in advice.suggestions}
    assert values["data.image_size"] == advice.options.image_size == (512, 512)
    assert values["model.anchors.sizes"] == advice.anchors.sizes
    np.testing.assert_allclose(advice.boxes.boxes, objects.boxes * 2)
    names = [name for name, _ in advice.fits]
    assert names[0] == "recipe's anchors at 128 x 128" and names[1].endswith("at 512 x 512")
    at_recipe, *_, last = [fit for _, fit in advice.fits]
    assert last.at_50 > 0.9 and last.mean > at_recipe.mean + 0.2
    assert all(s.reason.endswith(".") for s in advice.suggestions)
    # The flags are entries that the recipe takes, and with them nothing is left to suggest.
    text = '--config.data.image_size="(512, 512)"'
    assert text in advice.flags and text in "\n".join(advice.lines)
    config = load_config("quickstart", {s.entry: s.value for s in advice.suggestions})
    again = advise(objects, config)
    assert again.flags == [] and len(again.fits) == 1
    assert not any("--config" in line for line in again.lines)


def test_one_image_without_objects():
    advice = advise(squares((50, 60), [], num_images=1), load_config("finetune"))
    assert advice.flags == [] and advice.boxes.boxes.shape == (0, 4)
    assert "There are no boxes" in advice.suggestions[1].reason


def test_objects_of_a_json(tmp_path):
    from mask_rcnn_jax.data.coco import load_coco

    objects = [
        rectangle(0, 0, 10, 20, image_id=2, area=64),
        rectangle(5, 5, 96, 96, category_id=7),
        rectangle(5, 5, 30, 40, iscrowd=1),
        rectangle(1, 2, 32, 32, image_id=2),
        rectangle(5, 5, 0, 9),  # left out
        rectangle(5, 5, 9, 9, image_id=4, iscrowd=1),
    ]
    files = write_coco(tmp_path, [(200, 300), (40, 60), (9, 9), (20, 20)], objects)
    dataset = load_coco(*files, bad_annotations="skip")
    assert dataset.num_left_out == 1
    found = collect(dataset.images)
    assert found.sizes.tolist() == [[200, 300], [40, 60], [9, 9], [20, 20]]
    assert found.images.tolist() == [0, 1, 1] and found.classes.tolist() == [2, 1, 1]
    assert found.sides.tolist() == [96, 8, 32] and size_counts(found.sides).tolist() == [1, 1, 1]
    assert found.boxes.tolist() == [[5, 5, 101, 101], [0, 0, 10, 20], [1, 2, 33, 34]]
    assert found.crowds.tolist() == [[0, 1], [3, 1]] and found.num_empty == 1
    assert found.counts.tolist() == [1, 2, 0, 0] and found.pairs().tolist() == [[0, 2], [1, 1]]


def test_classes_that_share_images():
    pairs = np.array([[0, 1], [0, 3], [1, 1], [2, 2], [2, 3], [2, 1], [9, 5]])
    assert shared_images(pairs, np.array([1, 3, 4])).tolist() == [[3, 2, 0], [2, 2, 0], [0, 0, 0]]
    assert shared_images(np.zeros((0, 2), int), np.array([1])).tolist() == [[0]]


@pytest.mark.parametrize("side", [2_000, 20_000])
def test_windows_are_what_training_sees(side):
    """However large the images are, boxes keep their size and limits are those of a window."""
    objects = squares((side, side), [24.0] * 400, per_image=400)
    recipe = load_config("finetune", {"data.windows.size": (512, 512)})
    advice = advise(objects, recipe)
    found = {s.entry: s.value for s in advice.suggestions}
    assert found["data.image_size"] == (512, 512)
    np.testing.assert_allclose(advice.boxes.boxes[:, 2:] - advice.boxes.boxes[:, :2], 24)
    assert (advice.boxes.canvases == 512).all() and advice.fits[-1][1].at_50 > 0.95
    assert found["data.max_instances"] < 200 and found["eval.detections_per_image"] >= 400
    assert found.get("model.rpn.post_nms_topk_test", 1000) <= 1000
    empty = squares((side, side), [], num_images=1)
    assert "There are no boxes" in advise(empty, recipe).suggestions[1].reason
