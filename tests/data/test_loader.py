import gc
import json
import mmap
from collections import Counter
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory

import grain
import jax
import numpy as np
import pytest

from mask_rcnn_jax.data import workers as workers_module
from mask_rcnn_jax.data.canvases import canvas_buckets
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.compact import compact
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from tests.data.small_set import rectangle
from tests.helpers import assert_tree_close

RECIPE = ExampleOptions(image_size=(64, 128), resize="shortest_edge", max_instances=2, mask_size=8)
MULTI_SCALE = replace(RECIPE, short_sides=(20, 40, 64))
LANDSCAPE, PORTRAIT, SQUARE = (64, 128), (128, 64), (64, 64)
BUCKETS = replace(RECIPE, canvases=(SQUARE,))
# 11 landscapes, 5 portraits
SIZES = [(20, 30)] * 4 + [(30, 20)] * 2 + [(25, 25)] * 7 + [(40, 20)] * 3
OBJECTS = [rectangle(2, 3, 9, 8, image_id=k) for k in (1, 2, 5, 7, 8, 14)]


@pytest.fixture
def dataset(coco_files):
    return load_coco(*coco_files(sizes=SIZES, annotations=OBJECTS))


def train_batches(
    dataset,
    steps,
    options=RECIPE,
    *,
    start=0,
    processes=1,
    global_batch=4,
    seed=3,
    workers=0,
    keep_empty=True,
    augment=None,
):
    """[step][process] -> Batch."""
    loaders = [
        TrainLoader(
            dataset,
            options,
            TrainOrder(
                seed=seed,
                start_step=start,
                batch_size=global_batch // processes,
                process_index=p,
                process_count=processes,
                keep_empty=keep_empty,
            ),
            num_workers=workers,
            augment=augment,
        )
        for p in range(processes)
    ]
    try:
        return [[next(loader) for loader in loaders] for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()


def global_batches(batches):
    """Per step: the canvas, and the images and their sizes, one process after the other."""
    sets = []
    for parts in batches:
        (shape,) = {part.images.shape[1:3] for part in parts}
        rows = [
            (int(index), *size.tolist())
            for part in parts
            for index, size in zip(part.image_index, part.image_sizes, strict=True)
        ]
        sets.append((shape, rows))
    return sets


def test_batch_is_what_structures_promise(dataset):
    ((batch,),) = train_batches(dataset, 1)
    height, width = batch.images.shape[1:3]
    assert (height, width) in (LANDSCAPE, PORTRAIT)
    expected = {
        "images": ((4, height, width, 3), np.uint8),
        "image_sizes": ((4, 2), np.int32),
        "scales": ((4, 2), np.float32),
        "image_index": ((4,), np.int32),
    }
    targets = {
        "boxes": ((4, 2, 4), np.float32),
        "classes": ((4, 2), np.int32),
        "masks": ((4, 2, 8, 8), np.uint8),
        "valid": ((4, 2), np.bool_),
        "polygons": ((4, 2, 0, 3), np.float32),
    }
    for holder, spec in ((batch, expected), (batch.targets, targets)):
        for name, (shape, dtype) in spec.items():
            assert getattr(holder, name).shape == shape and getattr(holder, name).dtype == dtype
    # image k is filled with the value k + 1
    np.testing.assert_array_equal(batch.images[:, 0, 0, 0], batch.image_index + 1)


def test_options_shape_the_batch(dataset):
    options = replace(RECIPE, image_dtype="float32", mask_frame="image", max_vertices=6)
    ((batch,),) = train_batches(dataset, 1, options)
    canvas = batch.images.shape[1:3]
    assert batch.images.dtype == np.float32
    assert (batch.targets.masks.shape, batch.targets.masks.dtype) == ((4, 2, *canvas), np.uint8)
    assert batch.targets.polygons.shape == (4, 2, 6, 3)
    for evaluated in eval_loader(dataset, options):
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.ndim == b.ndim, evaluated, batch)
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("options, processes", [(RECIPE, 2), (MULTI_SCALE, 4), (BUCKETS, 4)])
def test_global_batches_do_not_depend_on_the_process_count(dataset, processes, options):
    whole = global_batches(train_batches(dataset, 12, options))
    assert global_batches(train_batches(dataset, 12, options, processes=processes)) == whole
    assert len({canvas for canvas, _ in whole}) == 2 + len(options.canvases)


@pytest.mark.parametrize(
    "options, start, processes", [(RECIPE, 1, 1), (MULTI_SCALE, 7, 2), (BUCKETS, 11, 4)]
)
def test_starting_later_gives_the_suffix(dataset, start, processes, options):
    whole = global_batches(train_batches(dataset, 14, options))
    later = train_batches(dataset, 14 - start, options, start=start, processes=processes)
    assert global_batches(later) == whole[start:]


def short_sides(batches):
    return [int(b.image_sizes[0].min()) for (b,) in batches]


def test_short_sides_are_drawn_uniformly_for_each_image(dataset):
    batches = train_batches(dataset, 480, MULTI_SCALE, global_batch=1)
    counts = Counter(short_sides(batches))
    assert set(counts) == {20, 40, 64}
    # 160 of each, with a standard deviation of 10
    assert all(abs(count - 160) < 40 for count in counts.values())
    seen = {}
    for (batch,) in batches:
        seen.setdefault(int(batch.image_index[0]), set()).add(int(batch.image_sizes[0].min()))
    assert all(sides == {20, 40, 64} for sides in seen.values())  # new in every epoch
    assert {b.images.shape[1:3] for (b,) in batches} == {LANDSCAPE, PORTRAIT}


def test_short_sides_do_not_change_the_order_and_follow_the_seed(dataset):
    plain = train_batches(dataset, 30, global_batch=1)
    drawn = train_batches(dataset, 30, MULTI_SCALE, global_batch=1)
    assert [b.image_index[0] for (b,) in plain] == [b.image_index[0] for (b,) in drawn]
    assert set(short_sides(plain)) == {64}
    again = train_batches(dataset, 30, MULTI_SCALE, global_batch=1)
    other = train_batches(dataset, 30, MULTI_SCALE, global_batch=1, seed=4)
    assert short_sides(again) == short_sides(drawn) != short_sides(other)


def test_evaluation_does_not_draw_short_sides(dataset):
    for drawn, plain in zip(eval_loader(dataset, MULTI_SCALE), eval_loader(dataset), strict=True):
        assert_tree_close(drawn, plain)


def test_a_far_step_is_reached_at_once(dataset):
    ((batch,),) = train_batches(dataset, 1, start=10**7)
    assert batch.images.shape[0] == 4


def test_another_seed_gives_another_order(dataset):
    first = global_batches(train_batches(dataset, 10))
    assert global_batches(train_batches(dataset, 10)) == first
    assert global_batches(train_batches(dataset, 10, seed=4)) != first


@pytest.mark.parametrize(
    "options, sizes",
    [(RECIPE, {LANDSCAPE: 11, PORTRAIT: 5}), (BUCKETS, {LANDSCAPE: 4, SQUARE: 7, PORTRAIT: 5})],
)
def test_every_epoch_is_a_new_permutation_of_each_bucket(dataset, options, sizes):
    batches = train_batches(dataset, 80, options, global_batch=1)
    buckets = canvas_buckets(dataset, range(len(SIZES)), options)
    assert {canvas: len(bucket) for canvas, bucket in buckets.items()} == sizes
    for canvas, bucket in buckets.items():
        order = [b.image_index[0] for (b,) in batches if b.images.shape[1:3] == canvas]
        size = len(bucket)
        epochs = [tuple(order[k : k + size]) for k in range(0, 4 * size, size)]
        assert all(sorted(epoch) == sorted(bucket) for epoch in epochs)
        assert len(set(epochs)) == 4


def test_buckets_take_turns_by_their_size(dataset):
    shapes = Counter(b.images.shape[1:3] for (b,) in train_batches(dataset, 160, global_batch=1))
    assert abs(shapes[LANDSCAPE] - 110) <= 1 and abs(shapes[PORTRAIT] - 50) <= 1


def test_bucket_smaller_than_a_batch_repeats(coco_files):
    dataset = load_coco(*coco_files(sizes=SIZES[:5]), require_annotations=False)
    batches = train_batches(dataset, 10, global_batch=4)
    portraits = [b.image_index.tolist() for (b,) in batches if b.images.shape[1:3] == PORTRAIT]
    assert portraits and all(rows == [4] * 4 for rows in portraits)


def test_empty_images_can_be_left_out(dataset):
    seen = [b.image_index for (b,) in train_batches(dataset, 12, keep_empty=False)]
    assert set(np.concatenate(seen).tolist()) == {0, 1, 4, 6, 7, 13}
    with_empty = [b.image_index for (b,) in train_batches(dataset, 12)]
    assert len(set(np.concatenate(with_empty).tolist())) == len(SIZES)


def test_nothing_to_train_on_is_named(coco_files):
    dataset = load_coco(*coco_files(), require_annotations=False)
    with pytest.raises(ValueError, match="no image to train on, .* data.keep_empty is False"):
        train_batches(dataset, 1, keep_empty=False)


@pytest.mark.parametrize(
    "options, kept",
    [
        (RECIPE, {0}),
        (replace(RECIPE, skip_crowd=False), {0, 1, 2}),
        (replace(RECIPE, inclusive_boxes=True), {0}),
        (replace(RECIPE, inclusive_boxes=True, skip_crowd=False), {0, 1}),
    ],
)
def test_images_without_targets_are_empty(coco_files, options, kept):
    objects = [
        rectangle(1, 1, 9, 9),
        rectangle(1, 1, 9, 9, image_id=2, iscrowd=1),
        rectangle(1, 1, 1, 9, image_id=3, iscrowd=1),  # empty if it ends at its last pixel
    ]
    dataset = load_coco(*coco_files(sizes=[(20, 30)] * 4, annotations=objects))
    seen = [b.image_index for (b,) in train_batches(dataset, 3, options, keep_empty=False)]
    assert set(np.concatenate(seen).tolist()) == kept


def test_worker_processes_give_the_same_batches(dataset):
    threads = train_batches(dataset, 6, MULTI_SCALE)
    workers = train_batches(dataset, 6, MULTI_SCALE, workers=2)
    for (a,), (b,) in zip(threads, workers, strict=True):
        assert_tree_close(a, b)
        assert isinstance(b.images.base.base, mmap.mmap | memoryview)  # not copied


@pytest.mark.slow
def test_workers_give_the_same_masks_and_polygons(dataset, monkeypatch):
    """Of few objects, which are sent alone, in much padding; while another one is reading."""
    monkeypatch.setattr("mask_rcnn_jax.data.eval_loader.IMAGES_PER_WORKER", 1)
    options = replace(RECIPE, max_instances=50, max_vertices=6)
    threads = list(eval_loader(dataset, options))
    sent = [compact(batch, np.zeros).targets for batch in threads]
    assert sum(len(targets.masks) for targets in sent) == len(OBJECTS)
    assert sum(len(targets.polygons) for targets in sent) == len(OBJECTS)
    loader = eval_loader(dataset, options, num_workers=1)
    reading = iter(loader)
    kept = [next(reading)]
    for batch, expected in zip(loader, threads, strict=True):
        assert_tree_close(batch, expected)
        padding = ~batch.targets.valid
        assert batch.targets.masks.shape == (4, 50, 8, 8)
        assert not batch.targets.masks[padding].any()
        assert (batch.targets.polygons[padding] == [0, 0, -1]).all()
    assert len([*kept, *reading]) == len(threads)


def test_objects_beyond_max_instances_are_counted_and_logged_once(coco_files, caplog):
    many = [rectangle(0, 0, side, side) for side in (3, 9, 5, 7)]
    crowd = rectangle(0, 0, 9, 9, iscrowd=1)
    dataset = load_coco(*coco_files(annotations=[*many, crowd]))
    options = replace(RECIPE, max_instances=3)
    loader = TrainLoader(dataset, options, TrainOrder(seed=0, batch_size=1), num_workers=0)
    batches = [next(loader) for _ in range(3)]
    loader.close()
    assert loader.overflowed == 1 and all(b.targets.valid.all() for b in batches)
    scale = batches[0].scales[0, 1]
    np.testing.assert_allclose(batches[0].targets.boxes[0, :, 2], np.array([9, 5, 7]) * scale)
    assert caplog.text.count("the 1 smallest of 4 objects are left out") == 1


def test_objects_without_an_outline_are_counted_and_logged_once(coco_files, caplog):
    mask = np.zeros((40, 60), np.uint8)
    mask[3:9, 4:20] = 1
    encoded = rectangle(4, 3, 16, 6, segmentation=uncompressed_rle(mask))
    pentagon = rectangle(2, 2, 9, 9, segmentation=[[2, 2, 11, 2, 11, 11, 6, 11, 2, 11]])
    two_parts = rectangle(2, 2, 9, 9, segmentation=[[2, 2, 4, 2, 4, 4], [8, 8, 11, 8, 11, 11]])
    objects = [rectangle(1, 1, 9, 9), encoded, pentagon, two_parts, encoded | {"iscrowd": 1}]
    dataset = load_coco(*coco_files(annotations=objects))
    for vertices, undrawn in ((0, 0), (4, 3), (5, 2), (6, 1)):
        options = replace(RECIPE, max_instances=9, max_vertices=vertices)
        loader = TrainLoader(dataset, options, TrainOrder(seed=0, batch_size=1), num_workers=0)
        drawn = (next(loader).targets.polygons[0, :, :, 2] >= 0).any(axis=1).sum()
        loader.close()
        assert loader.undrawn == undrawn
        assert drawn == (4 - undrawn if vertices else 0)
    assert caplog.text.count("objects have no outline") == 3
    line = "3 of 4 objects have no outline to draw a mask target from: 1 are run-length codes, 2"
    assert caplog.text.count(line) == 1


def truncate(dataset, index):
    with open(dataset.image_path(index), "r+b") as file:
        file.truncate(40)


def test_undecodable_image_is_replaced_and_named_once(dataset, caplog):
    whole = train_batches(dataset, 16)
    truncate(dataset, 5)  # a portrait; the next portrait is image 13
    loader = TrainLoader(dataset, RECIPE, TrainOrder(seed=3, batch_size=4), num_workers=0)
    batches = [next(loader) for _ in range(16)]
    loader.close()
    for (before,), after in zip(whole, batches, strict=True):
        expected = np.where(before.image_index == 5, 13, before.image_index)
        np.testing.assert_array_equal(after.image_index, expected)
        np.testing.assert_array_equal(after.images[:, 0, 0, 0], expected + 1)
    assert loader.skipped == {"006.png"}
    assert caplog.text.count("skipped 006.png") == 1


def test_no_decodable_image_stops(dataset):
    for index in (4, 5, 13, 14, 15):
        truncate(dataset, index)
    with pytest.raises(
        ValueError, match="no image of 5 can be decoded, the last: .*png: truncated"
    ):
        train_batches(dataset, 10)


def test_size_that_disagrees_is_not_skipped(coco_files):
    entry = {"id": 1, "file_name": "001.png", "height": 60, "width": 40}
    dataset = load_coco(*coco_files(images=[entry]), require_annotations=False)
    with pytest.raises(ValueError, match="001.png: the file is 40 x 60"):
        train_batches(dataset, 1)


def eval_loader(dataset, options=RECIPE, **keys):
    return EvalLoader(dataset, options, **({"batch_size": 4, "num_workers": 0} | keys))


@pytest.mark.parametrize("options", [RECIPE, BUCKETS])
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_evaluation_sees_every_image_once(dataset, processes, batch_size, options):
    keys = {"batch_size": batch_size, "process_count": processes}
    passes = [
        list(eval_loader(dataset, options, process_index=p, **keys)) for p in range(processes)
    ]
    index = np.concatenate([batch.image_index for part in passes for batch in part])
    assert sorted(index[index >= 0].tolist()) == list(range(len(SIZES)))
    # all processes run the same programs in the same order
    shapes = [[batch.images.shape for batch in part] for part in passes]
    assert all(part == shapes[0] for part in shapes)
    assert all(shape[0] == batch_size for shape in shapes[0])
    loader = eval_loader(dataset, options, **keys)
    assert len(loader) == len(shapes[0]) and loader.num_images == len(SIZES)
    together = [
        np.concatenate([b.image_index for b in parts]) for parts in zip(*passes, strict=True)
    ]
    assert loader.is_full == [bool((index >= 0).all()) for index in together]


def test_evaluation_pads_the_last_batch_of_a_canvas(dataset):
    batches = list(eval_loader(dataset))
    assert [(b.image_index < 0).sum() for b in batches] == [0, 0, 1, 0, 3]
    last = batches[-1]
    np.testing.assert_array_equal(last.image_index, [15, -1, -1, -1])
    assert not last.images[1:].any() and not last.targets.valid[1:].any()
    assert (last.image_sizes[1:] == 1).all() and (last.scales[1:] == 1).all()


def test_evaluation_may_be_repeated_left_early_and_cut_short(dataset):
    loader = eval_loader(dataset, max_images=6)
    next(iter(loader))
    for _ in range(2):
        index = np.concatenate([batch.image_index for batch in loader])
        assert sorted(index[index >= 0].tolist()) == list(range(6))
    assert eval_loader(dataset, max_images=0).num_images == len(SIZES)
    assert eval_loader(dataset, max_images=99).num_images == len(SIZES)


@pytest.mark.parametrize(("each", "started"), [(100, 0), (8, 2), (1, 4)])
def test_few_images_are_read_in_threads(dataset, each, started, monkeypatch):
    monkeypatch.setattr("mask_rcnn_jax.data.eval_loader.IMAGES_PER_WORKER", each)
    asked = []

    def reader(source, num_workers, prefix, size):
        asked.append(num_workers)
        return in_threads(source, 0, "")

    in_threads = workers_module.Reader
    monkeypatch.setattr(workers_module, "Reader", reader)
    assert len(list(eval_loader(dataset, num_workers=4))) == 5 and asked == [started]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_evaluation_names_an_undecodable_image(dataset, workers, monkeypatch):
    monkeypatch.setattr("mask_rcnn_jax.data.eval_loader.IMAGES_PER_WORKER", 1)
    truncate(dataset, 5)
    with pytest.raises(ValueError, match="006.png: truncated or damaged"):
        list(eval_loader(dataset, num_workers=workers))


def exists(name):
    try:
        SharedMemory(name).close()
    except FileNotFoundError:
        return False
    return True


def test_shared_memory_of_a_batch_that_fails_is_used_again(dataset, monkeypatch):
    names = []

    def noted(*arguments):
        batch = empty_batch(*arguments)
        names.append(batch.images.block.name)
        return batch

    monkeypatch.setattr("mask_rcnn_jax.data.eval_loader.empty_batch", noted)
    truncate(dataset, 5)
    prefix = workers_module.shared_prefix(1)
    batches = eval_loader(dataset)._batches(prefix)
    failures = []
    for step in [*range(len(batches))] * 2:
        try:
            batches[step]
        except ValueError as error:
            failures.append(str(error))
    assert ["006.png" in failure for failure in failures] == [True, True]
    assert len(names) == 2 * len(batches) and len(set(names)) == 1 and exists(names[0])
    workers_module.Reader(grain.MapDataset.range(1), 0, prefix).close()
    assert not exists(names[0])


@pytest.mark.parametrize("failing", range(3))
def test_shared_memory_is_free_again_when_a_later_array_finds_none(dataset, failing):
    """Three arrays of a batch take shared memory; the last are the masks and polygons sent."""
    taken = []
    prefix = workers_module.shared_prefix(1)

    def zeros(*arguments):
        if len(taken) == failing:
            raise OSError("No space left on device")
        array = workers_module.zeros(prefix)(*arguments)
        taken.append(array.block)
        return array

    options = replace(RECIPE, max_vertices=6)
    batches = replace(eval_loader(dataset, options)._batches(""), zeros=zeros)
    with pytest.raises(OSError, match="No space left"):
        batches[0]
    gc.collect()
    assert len(taken) == failing and not any(block.memory[0] for block in taken)


def test_original_ids_are_found_by_image_index(coco_files):
    files = coco_files(sizes=[(20, 30)] * 2)
    content = json.loads(files[0].read_text())
    content["images"][0]["id"], content["images"][1]["id"] = "900", "b"
    files[0].write_text(json.dumps(content))
    dataset = load_coco(*files, require_annotations=False)
    (batch,) = eval_loader(dataset, batch_size=2)
    assert [dataset.images[i].id for i in batch.image_index] == ["900", "b"]
