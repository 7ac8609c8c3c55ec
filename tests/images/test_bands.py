"""Bands, pages and scaling of image files."""

import io
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.images.opening import open_raster

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")

FOUR = ("red", "green", "blue", "nir")
DEEP = np.random.default_rng(0).integers(0, 4096, (150, 111, 4)).astype(np.uint16)
WINDOW = 17, 30, 71, 103  # x1, y1, x2, y2
STORED = {
    "strips": dict(rowsperstrip=37, photometric="rgb", extrasamples=[0]),
    "tiles": dict(tile=(64, 48), compression="zlib", predictor=True, photometric="rgb"),
    "big": dict(bigtiff=True, byteorder=">", tile=(32, 32), compression="lzw", photometric="rgb"),
    "zstd": dict(compression="zstd", photometric="minisblack", planarconfig="contig"),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_reads_a_tiff_and_its_windows(tmp_path, stored, dtype):
    path, pixels = tmp_path / "a.tif", (DEEP % 256 if dtype == np.uint8 else DEEP).astype(dtype)
    options = dict(STORED[stored])
    if dtype == np.float32 and "predictor" in options:
        options["predictor"] = 3
    tifffile.imwrite(path, pixels, **options)
    with open_raster(path) as raster:
        assert (raster.size, raster.bands, raster.pages, raster.dtype) == ((150, 111), 4, 1, dtype)
        whole, part = raster.read(), raster.read(window=WINDOW)
    assert whole.dtype == dtype
    np.testing.assert_array_equal(whole, pixels)
    np.testing.assert_array_equal(part, pixels[30:103, 17:71])


def test_reads_planes_apart(tmp_path):
    planes = np.moveaxis(DEEP, 2, 0)
    for tile in (None, (32, 48)):
        tifffile.imwrite(
            tmp_path / "a.tif", planes, planarconfig="separate", photometric="rgb", tile=tile
        )
        with open_raster(tmp_path / "a.tif") as raster:
            np.testing.assert_array_equal(raster.read(window=WINDOW), DEEP[30:103, 17:71])


@pytest.mark.parametrize("kind", ["imagej", "ome"])
def test_channels_are_bands_and_slices_pages(tmp_path, kind):
    stack = np.random.default_rng(1).integers(0, 4096, (5, 2, 40, 31)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", stack, metadata={"axes": "ZCYX"}, **{kind: True})
    names = ("membrane", "nucleus")
    expected = {
        "max": stack.max(axis=0),
        "mean": np.rint(stack.mean(axis=0)),
        "middle": stack[2],
        "one": stack[3],
    }
    for pages, found in expected.items():
        bands = Bands(names=names, pages=pages, page=4, scale="bits")
        pixels = bands.read(tmp_path / "a.tif")
        assert pixels.dtype == np.uint16
        np.testing.assert_array_equal(pixels, np.moveaxis(found, 0, 2))
    with pytest.raises(ValueError, match="5 pages; data.bands.pages says which"):
        Bands(names=names, scale="bits").read(tmp_path / "a.tif")
    with pytest.raises(ValueError, match="5 pages, data.bands.page asks for 6"):
        Bands(names=names, scale="bits", pages="one", page=6).read(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("axes", "planes"), [("YXC", "contig"), ("CYX", "separate"), ("ZYXC", "contig")]
)
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_samples_of_a_page_are_its_bands_whatever_their_axis_is_called(
    tmp_path, axes, planes, compression
):
    sides = {"Z": 3, "Y": 20, "X": 30, "C": 2}
    stored = np.random.default_rng(1).integers(0, 4096, [sides[a] for a in axes]).astype(np.uint16)
    tifffile.imwrite(
        tmp_path / "a.tif", stored, metadata={"axes": axes}, planarconfig=planes,
        photometric="minisblack", compression=compression,
    )  # fmt: skip
    with open_raster(tmp_path / "a.tif") as raster:
        pages = [raster.read(page) for page in range(raster.pages)]
    bands_last = np.moveaxis(stored, axes.index("C"), -1)
    np.testing.assert_array_equal(pages, bands_last.reshape(-1, 20, 30, 2))


def test_pages_become_bands(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.moveaxis(DEEP, 2, 0), photometric="minisblack")
    bands = Bands(names=("nir", "red"), numbers=(4, 1), pages="bands", scale="bits")
    np.testing.assert_array_equal(bands.read(tmp_path / "a.tif"), DEEP[..., [3, 0]])


def test_a_three_band_tiff_is_its_png(tmp_path):
    rgb = (DEEP[..., :3] % 256).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), rgb[..., ::-1])
    tifffile.imwrite(tmp_path / "a.tif", rgb, photometric="rgb")
    bands = Bands(names=FOUR[:3])
    for name in ("a.png", "a.tif"):
        for source in (tmp_path / name, (tmp_path / name).read_bytes()):
            image = bands.scaled(bands.read(source, name=name))
            assert image.dtype == np.uint8
            np.testing.assert_array_equal(image, rgb)
            assert bands.to_rgb(image) is image


def test_reads_png_and_numpy(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), DEEP[..., [2, 1, 0, 3]])
    np.save(tmp_path / "a.npy", DEEP)
    np.save(tmp_path / "planes.npy", np.moveaxis(DEEP, 2, 0))
    np.savez_compressed(tmp_path / "a.npz", DEEP)
    for name in ("a.png", "a.npy", "planes.npy", "a.npz"):
        bands = Bands(names=FOUR, scale="bits")
        np.testing.assert_array_equal(bands.read(tmp_path / name, expected_size=(150, 111)), DEEP)
        window = bands.read(tmp_path / name, window=WINDOW)
        np.testing.assert_array_equal(window, DEEP[30:103, 17:71])


def test_reads_a_file_for_each_band(tmp_path):
    for number in range(4):
        tifffile.imwrite(tmp_path / f"s_B{number}.tif", DEEP[..., number])
    files = tuple(f"_B{number}" for number in range(4))
    bands = Bands(names=FOUR, files=files, scale="bits")
    np.testing.assert_array_equal(bands.read(tmp_path / "s_B0.tif"), DEEP)
    with pytest.raises(ValueError, match="no '_B0' in its name"):
        bands.read(tmp_path / "s_B1.tif")
    tifffile.imwrite(tmp_path / "s_B3.tif", DEEP[:50, :, 3])
    with pytest.raises(ValueError, match="files of its bands differ: uint16 150 x 111, uint16 50"):
        bands.read(tmp_path / "s_B0.tif")


def test_scales_fixed_by_bits_and_by_percentiles():
    names = FOUR
    bits = Bands(names=names, scale="bits", bits=12).scaled(DEEP)
    assert bits.dtype == np.float32
    np.testing.assert_allclose(bits, DEEP * (255 / 4095), rtol=1e-6)
    limits = ((0, 4095), (1000, 2000), (0, 4095), (0, 4095))
    fixed = Bands(names=names, scale="fixed", limits=limits).scaled(DEEP)
    np.testing.assert_allclose(fixed[..., 0], bits[..., 0], rtol=1e-6)
    expected = np.clip((DEEP[..., 1] - 1000.0) * 0.255, 0, 255)
    np.testing.assert_allclose(fixed[..., 1], expected, atol=1e-4)
    image = Bands(names=names, scale="image", percentiles=(1, 99))
    low, high = np.percentile(DEEP[..., 2], (1, 99))
    expected = np.clip((DEEP[..., 2] - low) / (high - low), 0, 1) * 255
    np.testing.assert_allclose(image.scaled(DEEP)[..., 2], expected, atol=1e-4)
    # Whatever the unit, the same picture.
    np.testing.assert_allclose(
        image.scaled(DEEP.astype(np.float32) / 7 - 3), image.scaled(DEEP), atol=1e-3
    )
    assert not image.scaled(np.full_like(DEEP, 7)).any()


def test_numbers_of_another_type_than_the_sets_are_named(tmp_path):
    """8 bits among 12, which would be nearly black."""
    np.save(tmp_path / "a.npy", (DEEP >> 4).astype(np.uint8))
    for entries, message in (
        (
            dict(scale="bits", bits=12),
            "a.npy: numbers of type uint8 never reach 4095, .*bands.bits",
        ),
        (
            dict(scale="fixed", limits=((100, 3000),)),
            "uint8 never reach 3000, .* data.bands.limits",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Bands(names=FOUR, **entries).read(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="data.bands.bits is 0, expected the bits of numbers of i"):
        Bands(names=FOUR, scale="bits").scaled(DEEP.astype(np.int32))


def test_large_whole_numbers_are_scaled_exactly():
    image = Bands(names=FOUR, scale="image")
    shifted = DEEP.astype(np.int32) + 1_000_000_000
    np.testing.assert_allclose(image.scaled(shifted), image.scaled(DEEP), atol=1e-4)


def test_a_part_is_scaled_as_its_image(tmp_path):
    np.save(tmp_path / "a.npy", DEEP)
    bands = Bands(names=FOUR, scale="image")
    limits = bands.file_limits(str(tmp_path / "a.npy"))
    part = bands.scaled(bands.read(tmp_path / "a.npy", window=WINDOW), limits)
    np.testing.assert_array_equal(part, bands.scaled(DEEP)[30:103, 17:71])


def test_shows_the_bands_that_are_named():
    image = Bands(names=FOUR, scale="bits", bits=12).scaled(DEEP)
    names = ("nir", "red", "green", "blue")
    shown = Bands(names=names, scale="bits").to_rgb(image)
    np.testing.assert_array_equal(shown, np.rint(image[..., 1:]).astype(np.uint8))
    gray = Bands(names=names, scale="bits", view=("nir",)).to_rgb(image)
    np.testing.assert_array_equal(gray, np.rint(image[..., [0, 0, 0]]).astype(np.uint8))
    two = Bands(names=("a", "b"), scale="bits").to_rgb(image[..., :2])
    assert two.shape == (150, 111, 3) and not two[..., 2].any()


def test_says_what_does_not_fit(tmp_path):
    np.save(tmp_path / "a.npy", DEEP)
    for bands, message in (
        (Bands(names=FOUR), "numbers of type uint16; data.bands.scale says how"),
        (Bands(names=FOUR[:3], scale="bits"), "4 bands, expected 3: red, green, blue"),
        (Bands(names=("a",), numbers=(5,), scale="bits"), "4 bands, data.bands.numbers asks for 5"),
    ):
        with pytest.raises(ValueError, match=message):
            bands.read(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="the file is 150 x 111 .height x width., the json says"):
        Bands(names=FOUR, scale="bits").read(tmp_path / "a.npy", expected_size=(111, 150))
    values = DEEP.astype(np.float32)
    values[3, 4, 1] = np.nan
    values[5, 6, 2] = np.inf
    np.save(tmp_path / "b.npy", values)
    with pytest.raises(UndecodableImage, match="b.npy: 2 values are not finite"):
        Bands(names=FOUR, scale="image").read(tmp_path / "b.npy")
    zero = Bands(names=FOUR, scale="image", nan="zero")
    scaled = zero.scaled(zero.read(tmp_path / "b.npy"))
    assert np.isfinite(scaled).all() and scaled[3, 4, 1] == scaled[5, 6, 2] == 0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["tif", "npy", "npz", "png"])
def test_a_cut_file_is_undecodable(tmp_path, kind, share):
    content = io.BytesIO()
    if kind == "tif":
        tifffile.imwrite(content, DEEP, tile=(64, 64), compression="zlib", photometric="rgb")
    elif kind == "png":
        content.write(cv2.imencode(".png", DEEP)[1].tobytes())
    else:
        (np.save if kind == "npy" else np.savez)(content, DEEP)
    path = Path(tmp_path / f"a.{kind}")
    path.write_bytes(content.getvalue()[: int(share * len(content.getvalue()))])
    with pytest.raises(UndecodableImage, match=f"a.{kind}: "):
        Bands(names=FOUR, scale="bits").read(path)


@pytest.mark.parametrize(
    "entries",
    [
        dict(names=("a", "a")),
        dict(scale="bits"),
        dict(names=("a",), numbers=(1, 2)),
        dict(names=("a",), numbers=(0,)),
        dict(names=("a",), scale="fixed"),
        dict(names=("a",), limits=((0.0, 1.0),)),
        dict(names=("a",), scale="fixed", limits=((1.0, 1.0),)),
        dict(names=("a",), percentiles=(50.0, 20.0)),
        dict(names=("a",), view=("b",)),
        dict(names=tuple(map(str, range(65)))),
    ],
)
def test_refuses_entries_without_meaning(entries):
    with pytest.raises(ValueError, match="expected"):
        Bands(**entries)


@pytest.mark.parametrize("planes", [False, True])
def test_windows_of_one_uncompressed_strip_are_not_read_whole(tmp_path, planes, monkeypatch):
    pixels = np.moveaxis(DEEP, 2, 0) if planes else DEEP
    options = dict(photometric="rgb", rowsperstrip=150, byteorder=">")
    options |= {"planarconfig": "separate"} if planes else {"extrasamples": [0]}
    tifffile.imwrite(tmp_path / "a.tif", pixels, **options)
    monkeypatch.setattr(tifffile.FileHandle, "read_segments", None)
    with open_raster(tmp_path / "a.tif") as raster:
        assert raster.by_window
        np.testing.assert_array_equal(raster.read(window=WINDOW), DEEP[30:103, 17:71])


def test_a_compressed_strip_of_the_whole_image_is_said_to_be_one(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", DEEP, photometric="rgb", rowsperstrip=150, compression=8)
    with open_raster(tmp_path / "a.tif") as raster:
        assert not raster.by_window


def test_refuses_tiles_that_would_take_too_much_memory(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, DEEP[:16, :16, 0], tile=(16, 16), compression="zlib")
    with tifffile.TiffFile(path, mode="r+") as tiff:
        for tag in ("TileWidth", "TileLength"):
            tiff.pages.first.tags[tag].overwrite(1 << 18)
    with pytest.raises(UndecodableImage, match="a.tif: a tile"), open_raster(path) as raster:
        raster.read(window=(0, 0, 4, 4))


@pytest.mark.parametrize(
    ("compression", "ending"), [("jpeg", ".jpg"), ("webp", ".webp"), ("jpeg2000", ".jp2")]
)
def test_refuses_a_tile_that_says_for_itself_that_it_is_large(tmp_path, compression, ending):
    rgb = np.zeros((16, 16, 3), np.uint8)
    stored = dict(tile=(16, 16), photometric="rgb", compression=compression)
    tifffile.imwrite(tmp_path / "a.tif", rgb, **stored)
    bands = Bands(names=FOUR[:3])
    assert bands.read(tmp_path / "a.tif").shape == (16, 16, 3)
    content = bytearray((tmp_path / "a.tif").read_bytes())
    inner = cv2.imencode(ending, np.zeros((700, 600, 3), np.uint8))[1].tobytes()
    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        tags = tiff.pages.first.tags
    for name, value in (("TileOffsets", len(content)), ("TileByteCounts", len(inner))):
        struct.pack_into("<I", content, tags[name].valueoffset, value)
    with pytest.raises(UndecodableImage, match="x.tif: a tile or strip of 700 x 600 pixels"):
        bands.read(bytes(content + inner), name="x.tif")


def test_what_a_small_file_claims_takes_no_memory(tmp_path):
    """13,000 x 13,000 pixels of 16 bands in float32 are 10 GB."""
    content = io.BytesIO()
    tifffile.imwrite(content, DEEP[:2, :16], photometric="minisblack", planarconfig="contig")
    data = bytearray(content.getvalue())
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    values = {256: 13_000, 257: 13_000, 277: 16, 278: 13_000}
    for at in range(start + 2, start + 2 + 12 * count, 12):
        (tag,) = struct.unpack_from("<H", data, at)
        if tag in values:
            struct.pack_into("<HI", data, at + 2, 4, 1)
            struct.pack_into("<I", data, at + 8, values[tag])
    path = tmp_path / "a.tif"
    path.write_bytes(data)
    with pytest.raises(UndecodableImage, match="a.tif: "):
        Bands(names=FOUR, numbers=(1, 2, 3, 4), scale="bits").read(path)
    with open_raster(path) as raster:
        assert raster.size == (13_000, 13_000)
        assert raster.bands == 16
        with pytest.raises(UndecodableImage, match="bytes, more than the 2,147,483,648"):
            raster.read()


@pytest.mark.parametrize("shape", [(2**40, 0, 48, 4), (0, 48, 4), (0,), (4, 0)])
def test_an_array_without_numbers_is_refused(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint16))
    for source in (tmp_path / "a.npy", (tmp_path / "a.npy").read_bytes()):
        with pytest.raises(UndecodableImage, match="a.npy: an array without numbers"):
            Bands(names=FOUR, scale="bits", pages="max").read(source, name="a.npy")


@pytest.mark.parametrize(
    ("dtype", "nodata", "said"),
    [
        ("float32", -9999, "-9999"),
        ("float32", np.finfo("f4").min, "-3.40282346638529e+38"),  # of GDAL, rounded beyond it
        ("float64", np.finfo("f8").min, "-1.79769313486232e+308"),
        ("float32", np.nan, "nan"),
        ("uint16", 65535, "65535"),
        ("int16", -32768, "-32768"),
        ("uint8", 255, "255"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_a_geotiff_calls_no_data_is_zero_and_does_not_count(tmp_path, dtype, nodata, said):
    path, pixels = tmp_path / "a.tif", (DEEP[..., :2] % 100 + 50).astype(dtype)
    bare = [pixels[20:].astype(np.float32), pixels[20:, 5:].astype(np.float32)]
    pixels[:20] = nodata
    pixels[:, :5, 1] = nodata
    tags = [(42113, "s", 0, said, False)]
    tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig", extratags=tags)
    for entries in (
        dict(scale="image", percentiles=(0, 100)),
        dict(scale="fixed", limits=((49, 149),)),
        dict(scale="bits", bits=8),
    ):
        bands = Bands(("a", "b"), **entries)
        found = bands.scaled(bands.read(path))
        assert not found[:20].any() and not found[:, :5, 1].any()
        lows, highs = {"fixed": ((49,) * 2, (149,) * 2), "bits": ((0,) * 2, (255,) * 2)}.get(
            bands.scale, ((50, 50), (149, 149))
        )
        for band, given in enumerate(bare):
            low, high = lows[band], highs[band]
            expected = (given[..., band] - low) * 255 / (high - low)
            shown = found[20:, 5 * band :, band]
            np.testing.assert_allclose(shown, expected, rtol=1e-5, atol=1e-4)
    if dtype == "uint8":
        whole = Bands(("a", "b")).read(path)
        assert whole.dtype == np.uint8 and not whole[:20].any() and whole[20:, 5:].min() == 50


@pytest.mark.parametrize("entry", range(1, 9))
def test_a_tiff_is_turned_as_its_png(tmp_path, entry):
    eight = (DEEP[..., :3] >> 4).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = entry
    Image.fromarray(eight).save(tmp_path / "a.png", exif=exif)
    tags = [(274, "H", 1, entry, True)]
    tifffile.imwrite(tmp_path / "a.tif", eight, photometric="rgb", extratags=tags)
    bands = Bands(("red", "green", "blue"))
    for upright in (False, True):
        turned = bands.read(tmp_path / "a.png", upright=upright)
        np.testing.assert_array_equal(bands.read(tmp_path / "a.tif", upright=upright), turned)
        part = bands.read(tmp_path / "a.tif", upright=upright, window=(20, 30, 60, 90))
        np.testing.assert_array_equal(part, turned[30:90, 20:60])


@pytest.mark.parametrize("as_bytes", [False, True])
def test_reads_stacks_of_imagej_that_have_one_directory(tmp_path, as_bytes, monkeypatch):
    """As ImageJ writes those above 4 GB. Of a file, no plane is read for a window."""
    stack = np.random.default_rng(1).integers(0, 4096, (5, 2, 40, 31)).astype(np.uint16)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, stack, imagej=True, metadata={"axes": "ZCYX"})
    data = bytearray(path.read_bytes())
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    struct.pack_into(order + "I", data, start + 2 + 12 * count, 0)  # no other directory
    path.write_bytes(data)
    with tifffile.TiffFile(path) as tiff:
        assert len(tiff.pages) == 1
    if not as_bytes:
        monkeypatch.setattr(tifffile.FileHandle, "read_array", None)
        monkeypatch.setattr(np, "frombuffer", None)
    with open_raster(bytes(data) if as_bytes else path) as raster:
        assert (raster.pages, raster.bands) == (5, 2)
        for page in range(5):
            part = raster.read(page, (3, 5, 20, 30))
            np.testing.assert_array_equal(part, np.moveaxis(stack[page, :, 5:30, 3:20], 0, 2))
