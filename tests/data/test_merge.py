"""Several training sets in one: classes by name or by a map, ids, pixels, and what is refused."""

import pickle
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.coco import for_workers, load_coco
from mask_rcnn_jax.data.dataset import categories, check_dataset
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.merge import MergedDataset, merge, with_classes
from mask_rcnn_jax.data.options import DataOptions, ExampleOptions
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.data.source import load_train, load_val
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training.encoding import Found
from mask_rcnn_jax.training.evaluator import score
from mask_rcnn_jax.training.scored_file import evaluate_results
from mask_rcnn_jax.training.setup import open_datasets
from tests.data.small_set import rectangle, write_coco
from tests.helpers import tiny_config

MASK = np.zeros((40, 60), np.uint8)
MASK[3:9, 4:20] = 1
CODE = uncompressed_rle(MASK)
FIRST = [rectangle(2, 3, 9, 8, image_id=2), rectangle(5, 5, 20, 10, category_id=7)]
SECOND = [
    rectangle(1, 2, 30, 20, category_id=1) | {"segmentation": CODE, "iscrowd": 1},
    rectangle(4, 4, 8, 16, category_id=3, image_id=2),
    rectangle(9, 2, 7, 8, category_id=5, image_id=2)
    | {"segmentation": [[9, 2, 16, 2, 16, 10]] * 2},
]
# Of the first set: 3 cat, 7 dog.
SECOND_CLASSES = [{"id": 1, "name": "dog"}, {"id": 3, "name": "puma"}, {"id": 5, "name": "cat"}]


@pytest.fixture
def two(tmp_path):
    """Two sets with images of equal names and ids: (json, folder) each."""
    found = []
    for name, options in {
        "a": dict(sizes=[(40, 60), (60, 40)], annotations=FIRST),
        "b": dict(sizes=[(40, 60), (33, 47), (20, 20)], annotations=SECOND,
                  categories=SECOND_CLASSES),
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        found.append(tuple(map(str, write_coco(tmp_path / name, **options))))
    return found


def merged(two, class_map=(), **options) -> MergedDataset:
    return merge([load_coco(*paths, **options) for paths in two], dict(class_map))


def test_classes_of_equal_names_are_one(two):
    dataset = merged(two)
    assert dataset.class_names == ("cat", "dog", "puma")
    assert dataset.category_ids == (3, 7, 8)  # 3 is taken
    classes = [[a.class_index for a in record.annotations] for record in dataset.images]
    assert classes == [[2], [1], [2], [3, 1], []]
    check_dataset(dataset, "train_set")


def test_a_map_renames_before_classes_are_merged(two):
    dataset = merged(two, [("puma", "cat"), ("dog", "hound")])
    assert categories(dataset) == [{"id": 3, "name": "cat"}, {"id": 7, "name": "hound"}]
    classes = [[a.class_index for a in record.annotations] for record in dataset.images]
    assert classes == [[2], [1], [2], [1, 1], []]


def test_images_keep_their_objects_and_pixels(two):
    dataset, sets = merged(two), [load_coco(*paths) for paths in two]
    assert image_ids(dataset) == ["1:1", "1:2", "2:1", "2:2", "2:3"]
    originals = [(part, index) for part in sets for index in range(len(part.images))]
    assert len(dataset.images) == len(originals) == 5
    for index, (part, place) in enumerate(originals):
        ours, theirs = dataset.images[index], part.images[place]
        assert dataset.image_path(index) == ours.file_name == part.image_path(place)
        assert (ours.height, ours.width) == (theirs.height, theirs.width)
        np.testing.assert_array_equal(dataset.decode(index), part.decode(place))
        for a, b in zip(ours.annotations, theirs.annotations, strict=True):
            np.testing.assert_array_equal(a.box, b.box)
            assert (a.area, a.iscrowd) == (b.area, b.iscrowd)
            size = ours.height, ours.width
            np.testing.assert_array_equal(a.mask(*size), b.mask(*size))


def test_three_sets_of_codes_and_polygons(two, tmp_path):
    """Codes of the third lie behind those of the second."""
    (tmp_path / "c").mkdir()
    objects = [SECOND[0] | {"category_id": 9}, *SECOND[1:]]
    classes = [*SECOND_CLASSES[1:], {"id": 9, "name": "yak"}]
    third = write_coco(tmp_path / "c", [(40, 60), (50, 50)], objects, categories=classes)
    dataset, last = merged([*two, third]), load_coco(*third)
    assert dataset.class_names == ("cat", "dog", "puma", "yak")
    for index, record in enumerate(last.images):
        found = dataset.images[5 + index]
        assert found.id == f"3:{record.id}"
        for a, b in zip(found.annotations, record.annotations, strict=True):
            assert dataset.class_names[a.class_index - 1] == last.class_names[b.class_index - 1]
            size = record.height, record.width
            np.testing.assert_array_equal(a.mask(*size), b.mask(*size))


def test_workers_share_the_arrays(two):
    dataset = merged(two)
    content = pickle.dumps(for_workers(dataset))
    assert len(content) < len(pickle.dumps(dataset))
    other = pickle.loads(content)
    assert type(other) is MergedDataset and other.images[3].id == "2:2"
    np.testing.assert_array_equal(other.decode(4), dataset.decode(4))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_image_of_every_set_is_trained_on(two, workers):
    options = ExampleOptions(image_size=(64, 64), resize="fit", max_instances=4, mask_size=8)
    order = TrainOrder(seed=0, batch_size=5)
    loader = TrainLoader(merged(two), options, order, num_workers=workers)
    try:
        batch = next(loader)
    finally:
        loader.close()
    assert Counter(batch.image_index.tolist()) == dict.fromkeys(range(5), 1)
    shades = {0: 1, 1: 2, 2: 1, 3: 2, 4: 3}  # of the file names 001.png, ..
    for index, image in zip(batch.image_index.tolist(), batch.images, strict=True):
        assert image[0, 0, 0] == shades[index]


def test_raw_class_ids_stay_those_of_the_first_set(two):
    dataset = merged(two, class_ids="raw")
    assert dataset.category_ids == tuple(range(1, 9))
    assert [dataset.class_names[k - 1] for k in (1, 3, 7, 8)] == ["unused 1", "cat", "dog", "puma"]
    classes = [[a.class_index for a in record.annotations] for record in dataset.images]
    assert classes == [[7], [3], [7], [8, 3], []]


def test_raw_class_ids_stay_where_a_map_makes_two_classes_one(tmp_path):
    names = {1: "car", 2: "truck", 4: "boat"}
    classes = [{"id": i, "name": name} for i, name in names.items()]
    objects = [rectangle(2, 3, 9, 8, category_id=i) for i in names]
    files = write_coco(tmp_path, annotations=objects, categories=classes)
    paths = {"train_json": str(files[0]), "train_images": str(files[1])}
    data = replace(as_recipe(tiny_config()).data, class_ids="raw", **paths)
    for new, class_map in (("car", {"truck": "car"}), ("lorry", {"truck": "lorry"})):
        dataset = load_train(replace(data, class_map=tuple(class_map.items())))
        second = "unused 2" if new == "car" else new
        assert dataset.class_names == ("car", second, "unused 3", "boat")
        assert dataset.category_ids == (1, 2, 3, 4)
        classes = [a.class_index for a in dataset.images[0].annotations]
        assert classes == [1, 1 if new == "car" else 2, 4]
        check_dataset(dataset, "train_set")
    data = replace(data, class_ids="contiguous", class_map=(("truck", "car"),))
    assert categories(load_train(data)) == [{"id": 1, "name": "car"}, {"id": 4, "name": "boat"}]


def test_ids_that_are_strings_leave_no_room_for_new_classes(two, tmp_path):
    objects = [rectangle(2, 3, 9, 8, category_id="x")]
    classes = [{"id": "x", "name": "dog"}, {"id": "y", "name": "cat"}]
    first = load_coco(*write_coco(tmp_path, annotations=objects, categories=classes))
    expected = r"data.more_train: .*b/instances.json has the class 'puma', .* are strings"
    with pytest.raises(ValueError, match=expected):
        merge([first, load_coco(*two[1])], {})
    assert merge([first, load_coco(*two[1])], {"puma": "cat"}).category_ids == ("x", "y")


def test_a_set_to_evaluate_takes_the_numbers_of_training(two):
    training = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 8, "name": "puma"}]
    val = with_classes(load_coco(*two[1]), training, {})
    assert categories(val) == training
    assert [[a.class_index for a in r.annotations] for r in val.images] == [[2], [3, 1], []]
    assert image_ids(val) == [1, 2, 3] and val.images[1].file_name == "002.png"
    some = with_classes(load_coco(*two[0]), training, {})
    assert categories(some) == training  # no puma to be found
    expected = r"b/instances.json has the class 'puma', .* lack: \['cat', 'dog'\]; data.class_map"
    with pytest.raises(ValueError, match=expected):
        with_classes(load_coco(*two[1]), training[:2], {})
    mapped = with_classes(load_coco(*two[1]), training[:2], {"puma": "cat"})
    assert [[a.class_index for a in r.annotations] for r in mapped.images] == [[2], [1, 1], []]


def test_scores_are_those_of_the_same_set_with_other_ids(two):
    """Of boxes that are moved by a pixel; the crowd has none."""
    plain = load_coco(*two[1])
    training = [{"id": 8, "name": "cat"}, {"id": 2, "name": "puma"}, {"id": 5, "name": "dog"}]
    val = with_classes(plain, training, {})

    def metrics(dataset):
        boxes, masks = [], []
        for record in dataset.images:
            for k, a in enumerate(o for o in record.annotations if not o.iscrowd):
                x1, y1, x2, y2 = map(float, a.box)
                entry = {"image_id": record.id, "score": 0.9 - 0.1 * k,
                         "category_id": dataset.category_ids[a.class_index - 1]}  # fmt: skip
                boxes.append(entry | {"bbox": [x1 + 1, y1, x2 - x1, y2 - y1]})
                mask = np.roll(a.mask(record.height, record.width), 1, axis=1)
                code = uncompressed_rle(mask)
                masks.append(entry | {"segmentation": code})
        found = Found(boxes, masks, None, image_ids(dataset))
        scores = score(dataset, found, EvalOptions())
        return {name: value for name, value in scores.items() if name != "per_category"}

    ours, theirs = metrics(val), metrics(plain)
    assert 0.3 < theirs["mask_AP"] < 1
    assert ours == pytest.approx(theirs, abs=1e-9, nan_ok=True)


def recipe_of(two, **data) -> Recipe:
    config = tiny_config()
    (json_a, images_a), (json_b, images_b) = two
    config.data.update(train_json=json_a, train_images=images_a, val_json=json_b,
                       val_images=images_b, more_train=((json_b, images_b),))  # fmt: skip
    config.data.update(data)
    return as_recipe(config)


def test_a_config_names_further_sets(two):
    train_set, val_set, data = open_datasets(recipe_of(two).data, None, None)
    assert len(train_set.images) == 5 and len(val_set.images) == 3
    assert categories(val_set) == categories(train_set)
    assert data.train_json == two[0][0]
    alone = load_train(recipe_of(two, more_train=(), class_map=(("cat", "lion"),)).data)
    assert alone.class_names == ("lion", "dog") and image_ids(alone) == [1, 2]


def test_the_map_names_classes_that_only_the_set_to_evaluate_has(two):
    recipe = recipe_of(two, more_train=(), class_map=(("puma", "cat"),))
    train_set, val_set, _ = open_datasets(recipe.data, None, None)
    assert train_set.class_names == val_set.class_names == ("cat", "dog")
    assert [[a.class_index for a in r.annotations] for r in val_set.images] == [[2], [1, 1], []]
    recipe = recipe_of(two, more_train=(), class_map=(("puma", "cat"),), val_json="")
    with pytest.raises(ValueError, match=r"data.class_map has 'puma', expected one of \['cat', 'd"):
        open_datasets(recipe.data, None, None)


def test_a_given_dataset_takes_the_place_of_all_sets(two):
    recipe, given = recipe_of(two, class_map=(("puma", "cat"),)), load_coco(*two[1])
    train_set, val_set, data = open_datasets(recipe.data, given, None)
    assert train_set is given and type(val_set) is type(given)
    assert (data.more_train, data.class_map) == ((), ())


def test_without_further_sets_nothing_is_different(two):
    tree = recipe_of(two, more_train=()).to_dict()
    del tree["data"]["more_train"], tree["data"]["class_map"]  # as that of a run of before
    data = Recipe.read(tree).data
    train_set = load_train(data)
    assert type(train_set) is type(load_val(data, categories(train_set)))
    assert type(train_set) is not MergedDataset


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"class_map": (("lion", "cat"),)}, r"data.class_map has 'lion', expected one of \['cat'"),
        ({"class_map": (("cat", "a"), ("cat", "b"))}, "data.class_map has 'cat' twice"),
        ({"class_map": (("cat",),)}, r"data.class_map is \(\('cat',\),\), expected tuple"),
        ({"more_train": ("b.json", "b")}, r"data.more_train is \('b.json', 'b'\), expected tuple"),
        ({"more_train": (("no.json", "b"),)}, "no.json"),
        ({"source": "tfds"}, r"data.more_train is .*, expected \(\) with data.source=tfds"),
    ],
)
def test_mistakes_are_named(two, data, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load_train(recipe_of(two, **data).data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [("more_train", {}), ("class_map", {"more_train": (), "class_map": (("puma", "cat"),)})],
)
def test_results_are_not_scored_by_ids_that_may_be_others(two, tmp_path, name, data):
    with pytest.raises(ValueError, match=rf"data.{name} is .*, expected \(\) with --results"):
        evaluate_results(tmp_path / "results.json", recipe_of(two, **data))


def test_a_json_that_comes_twice_is_refused(two):
    with pytest.raises(ValueError, match="data.more_train: .*a/instances.json is given twice"):
        load_train(recipe_of(two, more_train=(two[0],)).data)


def test_the_entries_are_described():
    entries = parts.entries(DataOptions)
    assert "pairs of a json" in entries["more_train"].meaning
    assert entries["repeat_threshold"].default == 0.0
    assert load_config("coco").data.class_map == ()
    assert jax.tree.leaves(entries["class_map"].default) == []
