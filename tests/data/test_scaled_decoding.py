"""JPEGs decoded at a part of their size: colors, EXIF, what they are resized to, their objects."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.images.decode import decode_bytes, decode_image, reduction
from tests.data.small_set import rectangle, write_coco

HEIGHT, WIDTH = 240, 320


def picture(height=HEIGHT, width=WIDTH):
    """Smooth, another color in each corner."""
    corners = np.array([[[250, 20, 30], [40, 220, 60]], [[20, 60, 240], [230, 230, 20]]], np.uint8)
    return cv2.resize(corners, (width, height), interpolation=cv2.INTER_LINEAR)


@pytest.mark.parametrize(
    "size, at_least, factor",
    [
        ((3000, 4000), (800, 1066), 2),
        ((4000, 3000), (1066, 800), 2),
        ((3000, 4000), (1066, 800), 2),  # yet to be turned
        ((4000, 6000), (800, 1200), 4),
        ((6400, 9600), (800, 1200), 8),
        ((64000, 96000), (800, 1200), 8),
        ((1599, 2132), (800, 1066), 1),
        ((1600, 2132), (800, 1066), 2),
        ((480, 640), (800, 1066), 1),
        # 1/4 has 1001 rows, which would be 4004: 0.6 pixels of 800 more
        ((4001, 6000), (800, 1200), 2),
        ((4003, 6000), (800, 1200), 4),
        ((8, 8), (1, 1), 8),
        ((1, 1), (1, 1), 1),
    ],
)
def test_factor_by_hand(size, at_least, factor):
    assert reduction(size, at_least) == factor


@pytest.mark.parametrize("orientation", [None, 3, 6])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_reduced_pixels_are_means_of_blocks(factor, orientation, tmp_path):
    path, exif = tmp_path / "a.jpg", Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(picture()).save(path, quality=98, subsampling=0, exif=exif)
    for upright in (False, True):
        whole = decode_image(path, upright=upright)
        need = tuple(side // factor for side in whole.shape[:2])
        reduced = decode_image(path, upright=upright, at_least=need)
        assert reduced.shape == (*need, 3)
        means = whole.reshape(need[0], factor, need[1], factor, 3).mean(axis=(1, 3))
        np.testing.assert_allclose(reduced, means, atol=3)


def test_expected_size_is_that_of_the_file(tmp_path):
    path = tmp_path / "a.jpg"
    Image.fromarray(picture(241, 323)).save(path)
    sizes = dict(expected_size=(241, 323), at_least=(10, 12))
    assert decode_image(path, **sizes).shape == (31, 41, 3)
    for wrong in ((241, 322), (323, 241)):
        with pytest.raises(ValueError, match="the file is .* the json says"):
            decode_image(path, expected_size=wrong, at_least=(10, 12))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp"])
def test_other_formats_are_decoded_whole(suffix):
    content = cv2.imencode(suffix, picture())[1].tobytes()
    assert decode_bytes(content, "a", at_least=(30, 40)).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    "keys", [{"antialias": True}, {"image_dtype": "float32"}, {"mask_frame": "image"}]
)
@pytest.mark.parametrize("turned", [False, True])
def test_batches_differ_in_gray_levels_alone(tmp_path, keys, turned):
    height, width = (WIDTH, HEIGHT) if turned else (HEIGHT, WIDTH)
    Image.fromarray(picture(height, width)).save(tmp_path / "1.jpg", quality=98, subsampling=0)
    images = [{"id": 1, "file_name": "1.jpg", "height": height, "width": width}]
    path, _ = write_coco(tmp_path, annotations=[rectangle(30, 40, 90, 70)], images=images)
    options = ExampleOptions((50, 90), "shortest_edge", 2, mask_size=8, max_vertices=6, **keys)
    batches = []
    for scaled in (False, True):
        dataset = load_coco(path, tmp_path)
        asked = replace(options, scaled_decoding=scaled)
        batches += EvalLoader(dataset, asked, batch_size=1, num_workers=0)
    whole, reduced = batches
    assert whole.images.any() and whole.targets.valid.sum() == 1
    difference = np.abs(whole.images.astype(float) - reduced.images)
    assert 0 < difference.max() <= 6 and not difference[whole.images == 0].all()
    for name in ("image_sizes", "scales", "image_index"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(reduced, name))
    for name in ("boxes", "classes", "masks", "valid", "polygons"):
        one, other = getattr(whole.targets, name), getattr(reduced.targets, name)
        np.testing.assert_array_equal(one, other)


def test_the_size_of_a_turned_file_is_named_in_full(tmp_path):
    path = tmp_path / "a.jpg"
    Image.fromarray(picture()).save(path)
    with pytest.raises(ValueError, match="the file is 240 x 320 .* the json says 320 x 240"):
        decode_image(path, expected_size=(WIDTH, HEIGHT), at_least=(40, 30))
