"""Windows of large images in training."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.checks import MAX_PIXELS
from mask_rcnn_jax.data.coco import CocoDataset, load_coco
from mask_rcnn_jax.data.geometry import HorizontalFlip
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.data.window_examples import decode_window, objects_in
from mask_rcnn_jax.data.windows import Windows
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from mask_rcnn_jax.images import decode
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import UndecodableImage

tifffile = pytest.importorskip("tifffile")

HEIGHT, WIDTH = 200, 300
WINDOWS = Windows(size=(64, 128))
DATA = DataOptions(image_size=(128, 128), resize="fit", max_instances=8, mask_size=8)
DATA = replace(DATA, windows=WINDOWS)
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8)
Y, X = np.indices((HEIGHT, WIDTH))
PLACES = np.stack([X % 256, Y, X // 256], axis=2).astype(np.uint8)  # each pixel says where it is


def a_rectangle(x, y, width, height, **keys):
    """An object of a large image, as a polygon."""
    corners = [x, y, x + width, y, x + width, y + height, x, y + height]
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [x, y, width, height]}
    return entry | {"area": width * height, "iscrowd": 0, "segmentation": [corners]} | keys


def write_set(folder, names=("a.tif",), objects=(), size=(HEIGHT, WIDTH)):
    """A json and its folder, without the images."""
    entries = [{"id": n, "file_name": name, "height": size[0], "width": size[1]}
               for n, name in enumerate(names, start=1)]  # fmt: skip
    numbered = [entry | {"id": n} for n, entry in enumerate(objects, start=1)]
    content = {"images": entries, "categories": [{"id": 1, "name": "a"}], "annotations": numbered}
    (folder / "a.json").write_text(json.dumps(content))
    return folder / "a.json", folder


def write_tiff(path, pixels=PLACES, **options):
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64), compression="zlib", **options)


@pytest.fixture
def dataset(tmp_path):
    write_tiff(tmp_path / "a.tif")
    objects = [a_rectangle(10, 20, 30, 40), a_rectangle(100, 150, 60, 20)]
    return load_coco(*write_set(tmp_path, objects=objects))


def batches(dataset, steps, data=DATA, *, start=0, processes=1, workers=0, keep_empty=True, rows=4):
    """[step][process] -> Batch."""
    loaders = [
        TrainLoader(
            dataset,
            data.in_training(),
            TrainOrder(5, rows // processes, start, p, processes, keep_empty),
            num_workers=workers,
            augment=[HorizontalFlip()],
        )
        for p in range(processes)
    ]
    try:
        return [[next(loader) for loader in loaders] for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()


def same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.targets.boxes, b.targets.boxes)
        np.testing.assert_array_equal(a.targets.masks, b.targets.masks)


def test_a_window_is_the_canvas_and_is_cut_from_the_image(dataset):
    ((batch,),) = batches(dataset, 1)
    assert batch.images.shape == (4, 64, 128, 3)
    np.testing.assert_array_equal(batch.scales, 1)
    for image in batch.images:
        image = image if image[0, 0, 0] + 1 & 255 == image[0, 1, 0] else image[:, ::-1]  # flipped
        np.testing.assert_array_equal(image, window_at(image))


def window_at(image):
    """What the large image has where the first pixel says."""
    x, y = int(image[0, 0, 0]) + 256 * int(image[0, 0, 2]), int(image[0, 0, 1])
    return PLACES[y : y + 64, x : x + 128]


@pytest.mark.parametrize("place", ["random", "objects", "grid"])
def test_windows_depend_on_seed_and_step_alone(dataset, place):
    data = replace(DATA, windows=replace(WINDOWS, place=place))
    whole = batches(dataset, 4, data)
    same(
        [parts[0] for parts in whole[2:]],
        [parts[0] for parts in batches(dataset, 2, data, start=2)],
    )
    for (one,), parts in zip(whole, batches(dataset, 4, data, processes=2), strict=True):
        np.testing.assert_array_equal(one.images, np.concatenate([part.images for part in parts]))
    assert any((a.images != b.images).any() for (a,), (b,) in zip(whole, whole[1:], strict=False))


def test_a_grid_shows_everything_once_in_an_epoch(dataset):
    data = replace(DATA, windows=replace(WINDOWS, place="grid"))
    loader = TrainLoader(dataset, data.in_training(), TrainOrder(5, 12), num_workers=0)
    batch = next(loader)  # 4 x 3 windows
    loader.close()
    seen = np.zeros((HEIGHT, WIDTH), bool)
    for image in batch.images:
        np.testing.assert_array_equal(image, window_at(image))
        seen[image[..., 1], image[..., 0].astype(int) + image[..., 2].astype(int) * 256] = True
    assert seen.all()


def test_windows_around_objects_hold_objects(dataset):
    data = replace(DATA, windows=replace(WINDOWS, place="objects"))
    for (batch,) in batches(dataset, 5, data):
        assert batch.targets.valid.any(axis=1).all()


def test_without_keep_empty_every_window_has_an_object(tmp_path):
    write_tiff(tmp_path / "a.tif")
    dataset = load_coco(*write_set(tmp_path, objects=[a_rectangle(10, 20, 9, 9)]))
    for place in ("random", "grid"):
        data = replace(DATA, windows=replace(WINDOWS, place=place))
        found = [batch.targets.valid.any(axis=1) for (batch,) in batches(dataset, 5, data)]
        assert not np.all(found)
        for (batch,) in batches(dataset, 5, data, keep_empty=False):
            assert batch.targets.valid.any(axis=1).all()


def test_images_come_as_often_as_windows_fit(tmp_path):
    small = PIXELS[:60, :100]
    write_tiff(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", small, photometric="rgb")
    json_path, folder = write_set(tmp_path, ["a.tif", "b.tif"], [a_rectangle(10, 20, 9, 9)])
    json_path.write_text(
        json_path.read_text().replace(
            '"b.tif", "height": 200, "width": 300', '"b.tif", "height": 60, "width": 100'
        )
    )
    dataset = load_coco(json_path, folder)
    loader = TrainLoader(dataset, DATA.in_training(), TrainOrder(5, 13), num_workers=0)
    indices = next(loader).image_index
    loader.close()
    assert np.bincount(indices).tolist() == [12, 1]


def test_objects_of_windows_are_those_of_the_whole_image(tmp_path):
    write_tiff(tmp_path / "a.tif")
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[40:90, 60:200] = 1
    code = a_rectangle(60, 40, 140, 50, segmentation=uncompressed_rle(mask))
    crowd = a_rectangle(60, 40, 140, 50, segmentation=uncompressed_rle(mask), iscrowd=1)
    outline = a_rectangle(30, 60, 50, 50)
    dataset = load_coco(*write_set(tmp_path, objects=[code, outline, crowd]))
    window = 50, 30, 178, 94
    found = objects_in(dataset.images, 0, window, 0.0)
    assert [one.iscrowd for one in found] == [False, False, True]
    for one, whole in zip(found, dataset.images[0].annotations, strict=True):
        expected = whole.mask(HEIGHT, WIDTH)[30:94, 50:178]
        np.testing.assert_array_equal(one.mask(64, 128), expected)
        assert one.area == expected.sum()


KINDS = {
    "rgb": dict(photometric="rgb", tile=(64, 64)),
    "strips": dict(photometric="rgb", rowsperstrip=16, compression="lzw"),
    "one strip": dict(photometric="rgb", rowsperstrip=HEIGHT, compression="lzw"),
    "jpeg": dict(photometric="ycbcr", compression="jpeg", tile=(64, 64)),
    "alpha": dict(photometric="rgb", extrasamples=["unassalpha"]),
    "gray": dict(photometric="minisblack"),
    "white is 0": dict(photometric="miniswhite"),
    "16 bits": dict(photometric="rgb"),
    "palette": dict(
        photometric="palette", colormap=np.arange(768, dtype=np.uint16).reshape(3, 256) * 85
    ),
    "turned": dict(photometric="rgb", extratags=[(274, "H", 1, 3, True)]),
}


@pytest.mark.parametrize("kind", [*KINDS, "a.png", "a.jpg"])
def test_a_window_has_the_pixels_of_the_whole_image(tmp_path, kind):
    path = tmp_path / (kind if "." in kind else "a.tif")
    if "." in kind:
        cv2.imwrite(str(path), PIXELS)
    else:
        pixels = (
            np.kron(PIXELS[::8, ::8], np.ones((8, 8, 1), np.uint8)) if kind == "jpeg" else PIXELS
        )
        pixels = pixels[:HEIGHT, :WIDTH]
        if kind == "alpha":
            pixels = np.dstack([pixels, PIXELS[..., :1]])
        elif kind in ("gray", "white is 0", "palette"):
            pixels = pixels[..., 0]
        elif kind == "16 bits":
            pixels = pixels.astype(np.uint16) * 256
        tifffile.imwrite(path, pixels, **KINDS[kind])
    dataset = load_coco(*write_set(tmp_path, [path.name], [a_rectangle(1, 1, 9, 9)]))
    part = decode_window(dataset, 0, (50, 30, 178, 94), DATA)
    assert part.dtype == np.uint8 and part.flags.writeable
    assert np.abs(part.astype(int) - dataset.decode(0)[30:94, 50:178]).max() <= (kind == "jpeg")


def test_only_the_window_is_decoded(dataset, monkeypatch):
    monkeypatch.setattr(decode, "_decoded", None)
    assert len(batches(dataset, 2)) == 2


def test_bands_are_scaled_by_the_limits_of_the_whole_image(tmp_path):
    deep = np.random.default_rng(1).integers(0, 4096, (HEIGHT, WIDTH, 4)).astype(np.uint16)
    deep[:100] //= 8
    write_tiff(tmp_path / "a.tif", deep, extrasamples=[0])
    files = write_set(tmp_path, objects=[a_rectangle(1, 1, 9, 9)])
    bands = Bands(names=("r", "g", "b", "n"), scale="image")
    dataset = load_coco(*files, bands=bands)
    part = decode_window(dataset, 0, (50, 30, 178, 94), DATA)
    np.testing.assert_array_equal(part, dataset.decode(0)[30:94, 50:178])


class Own(CocoDataset):
    def decode(self, index, at_least=None):
        return np.zeros((HEIGHT, WIDTH, 3), np.uint8)


def test_a_dataset_that_decodes_itself_is_asked(dataset):
    own = Own(**vars(dataset))
    assert not decode_window(own, 0, (50, 30, 178, 94), DATA).any()


def test_an_image_that_is_damaged_is_skipped_and_named(tmp_path, caplog):
    write_tiff(tmp_path / "a.tif")
    (tmp_path / "b.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:-90_000])
    objects = [a_rectangle(10, 20, 9, 9), a_rectangle(10, 20, 9, 9, image_id=2)]
    dataset = load_coco(*write_set(tmp_path, ["a.tif", "b.tif"], objects))
    seen = [batch.image_index for (batch,) in batches(dataset, 6)]
    assert not np.all(np.concatenate(seen) == 1)
    assert "skipped b.tif" in caplog.text


def test_says_why_no_window_can_be_read(tmp_path):
    (tmp_path / "a.tif").write_bytes(b"II*\0")
    dataset = load_coco(*write_set(tmp_path, ["a.tif"], [a_rectangle(10, 20, 9, 9)]))
    with pytest.raises(ValueError, match="none of 1000 windows .*, the last: .*a.tif: "):
        batches(dataset, 1)


def test_says_how_many_objects_windows_lose(tmp_path, caplog):
    write_tiff(tmp_path / "a.tif")
    near = [a_rectangle(10 + n, 20, 4, 4) for n in range(10)]
    far = [a_rectangle(200 + n, 180, 4, 4) for n in range(8)]
    dataset = load_coco(*write_set(tmp_path, objects=near + far))
    batches(dataset, 1)
    expected = "1 windows of a grid hold more than data.max_instances=8 objects, up to 10; the 2 "
    assert expected in caplog.text


def test_whole_images_beyond_the_limit_name_windows(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 4, 3), np.uint8), photometric="rgb")
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        for tag in ("ImageWidth", "ImageLength"):
            tiff.pages.first.tags[tag].overwrite(20_000)
    files = write_set(tmp_path, objects=[a_rectangle(1, 1, 9, 9)], size=(20_000, 20_000))
    with pytest.raises(UndecodableImage, match=f"{MAX_PIXELS:,} pixels.*data.windows, --tile"):
        load_coco(*files).decode(0)


def test_refuses_sizes_that_are_no_canvas():
    for size in ((100, 128), (0, 64), (-64, 64)):
        with pytest.raises(ValueError, match="size is .* multiples of 64"):
            Windows(size=size)
    with pytest.raises(ValueError, match="min_visible is 2"):
        Windows(min_visible=2)
