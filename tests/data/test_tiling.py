"""Where the tiles of an image lie, and the batches of them."""

from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.data.dataset import ImageRecord, UndecodableImage
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.tile_loader import TileLoader
from mask_rcnn_jax.data.tiles import Tiles, tiling, view_windows
from mask_rcnn_jax.images import parts


def test_tiles_worked_by_hand():
    """Four columns, of which each shares a quarter or more with the next, and two rows."""
    whole, *tiles = view_windows(150, 300, Tiles(100, 0.25))
    assert whole == (0, 0, 300, 150)
    columns, rows = [(0, 100), (66, 166), (133, 233), (200, 300)], [(0, 100), (50, 150)]
    assert tiles == [(x0, y0, x1, y1) for y0, y1 in rows for x0, x1 in columns]


@pytest.mark.parametrize("size", [(1, 1), (100, 100), (40, 100), (100, 99)])
def test_an_image_that_fits_a_tile_is_not_cut(size):
    assert view_windows(*size, Tiles(100)) == [(0, 0, *size[::-1])]
    assert view_windows(*size, None) == [(0, 0, *size[::-1])]


@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.2, 1 / 3, 0.9])
@pytest.mark.parametrize("size", [(101, 101), (64, 1000), (997, 40), (777, 1201), (100, 5000)])
def test_tiles_cover_the_image_and_overlap_enough(size, overlap):
    _, *tiles = view_windows(*size, Tiles(100, overlap))
    shapes = {(y1 - y0, x1 - x0) for x0, y0, x1, y1 in tiles}
    assert shapes == {tuple(min(side, 100) for side in size)}, "one shape for one program"
    for axis, side in ((0, size[1]), (1, size[0])):
        spans = sorted({(tile[axis], tile[axis + 2]) for tile in tiles})
        assert spans[0][0] == 0 and spans[-1][1] == side
        shared = [end - start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)]
        assert all(pixels >= int(100 * overlap) for pixels in shared)
        assert all(a < b for a, b in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize(
    ("size", "overlap", "message"),
    [
        (31, 0.2, "tile is 31, expected at least 32"),
        (-5, 0.2, "tile is -5, expected at least 32"),
        (64, -0.1, "overlap is -0.1, expected a fraction from 0 to 0.9"),
        (64, 1.0, "overlap is 1.0, expected"),
        (64, float("nan"), "overlap is nan, expected"),
    ],
)
def test_tiles_without_meaning_are_refused(size, overlap, message):
    with pytest.raises(ValueError, match=message):
        tiling(size, overlap)
    assert tiling(0, overlap) is None


class Noise:
    """Images of noise: a large one, a small one and a tall one."""

    class_names = ("a",)
    sizes = [(100, 150), (40, 30), (130, 64)]

    def __init__(self):
        self.decoded = []
        records = (ImageRecord(i + 1, str(i), *size, ()) for i, size in enumerate(self.sizes))
        self.images = list(records)

    def decode(self, index):
        self.decoded.append(index)
        return np.random.default_rng(index).integers(0, 256, (*self.sizes[index], 3), np.uint8)


OPTIONS = ExampleOptions((64, 128), "keep", max_instances=2)


def test_too_many_tiles_are_refused():
    with pytest.raises(ValueError, match="20000 x 20000 would be cut into .* tiles.*--tile larger"):
        view_windows(20_000, 20_000, Tiles(32, 0.9))


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_every_view_comes_once_with_its_pixels(batch_size):
    dataset = Noise()
    loader = TileLoader(dataset, OPTIONS, Tiles(64), batch_size=batch_size)
    seen = []
    for batch in loader:
        assert batch.images.shape == (batch_size, 64, 128, 3)
        for row, number in enumerate(batch.image_index.tolist()):
            if number < 0:
                assert not batch.images[row].any()
                continue
            seen.append(number)
            index, (x0, y0, x1, y1) = loader.views[number]
            height, width = batch.image_sizes[row]
            if (x0, y0) != (0, 0) or batch.scales[row].tolist() == [1, 1]:
                expected = Noise().decode(index)[y0:y1, x0:x1]
                np.testing.assert_array_equal(batch.images[row, :height, :width], expected)
    assert sorted(seen) == list(range(len(loader.views))) and loader.num_images == 3
    assert dataset.decoded == [0, 1, 2]
    assert [index for index, _ in loader.views].count(1) == 1, "it fits a tile"


@pytest.mark.parametrize("process_count", [2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_processes_share_the_images_and_step_together(process_count, batch_size):
    """More processes than images, too; some images have a canvas that others lack."""
    options = replace(OPTIONS, image_size=(48, 96), resize="shortest_edge")
    loaders = [
        TileLoader(Noise(), options, Tiles(64), batch_size=batch_size, process_index=index,
                   process_count=process_count)
        for index in range(process_count)
    ]  # fmt: skip
    seen = [loader.views[number] for loader in loaders for number in read_ints(loader)]
    assert sorted(seen) == sorted(TileLoader(Noise(), options, Tiles(64), batch_size=9).views)
    for loader in loaders:
        assert {index % process_count for index, _ in loader.views} <= {loaders.index(loader)}
        assert loader.num_images == 3
    shapes = [[batch.images.shape for batch in loader] for loader in loaders]
    assert all(others == shapes[0] for others in shapes)


def read_ints(loader):
    """The views in all batches, each once."""
    numbers = [number for batch in loader for number in batch.image_index.tolist() if number >= 0]
    assert sorted(numbers) == list(range(len(loader.views)))
    return numbers


def test_canvases_have_batches_of_their_own():
    options = replace(OPTIONS, image_size=(48, 96), resize="shortest_edge")
    loader = TileLoader(Noise(), options, Tiles(64), batch_size=3)
    assert {batch.images.shape[1:3] for batch in loader} == {(64, 128), (128, 64)}
    read_ints(loader)


def test_the_number_of_images_is_limited():
    loader = TileLoader(Noise(), OPTIONS, Tiles(64), batch_size=2, max_images=1)
    assert loader.num_images == 1 and {index for index, _ in loader.views} == {0}


def test_a_damaged_image_ends_the_pass():
    class Damaged(Noise):
        def decode(self, index):
            if index == 1:
                raise UndecodableImage("1.jpg: damaged")
            return super().decode(index)

    with pytest.raises(UndecodableImage, match="1.jpg"):
        list(TileLoader(Damaged(), OPTIONS, Tiles(64), batch_size=2))


class Parts(Noise):
    """It decodes windows, too."""

    def decode_window(self, index, window):
        x0, y0, x1, y1 = window
        self.decoded.append((index, window))
        return Noise().decode(index)[y0:y1, x0:x1]


def test_large_images_are_read_by_windows(monkeypatch):
    whole = list(TileLoader(Noise(), OPTIONS, Tiles(64), batch_size=4))
    monkeypatch.setattr(parts, "MAX_WHOLE_BYTES", 10_000)  # the second is smaller
    monkeypatch.setattr(parts, "STRIP_BYTES", 1)
    dataset = Parts()
    loader = TileLoader(dataset, OPTIONS, Tiles(64), batch_size=4)
    assert dataset.decoded == [], "nothing is read before it is asked for"
    for batch, expected in zip(loader, whole, strict=True):
        np.testing.assert_array_equal(batch.image_sizes, expected.image_sizes)
        np.testing.assert_array_equal(batch.scales, expected.scales)
        for row, number in enumerate(batch.image_index.tolist()):
            if loader.views[number][1][:2] != (0, 0):
                np.testing.assert_array_equal(batch.images[row], expected.images[row])
    assert [entry for entry in dataset.decoded if isinstance(entry, int)] == [1]
    sizes = {
        (window[2] - window[0]) * (window[3] - window[1])
        for _, window in filter(lambda entry: not isinstance(entry, int), dataset.decoded)
    }
    assert max(sizes) == 64 * 64, "no strip of an image is larger than a tile here"
