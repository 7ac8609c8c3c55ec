"""Small files whose heads or texts promise much take no more than what is there."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest

tifffile = pytest.importorskip("tifffile")

MEMORY, SECONDS = 60, 2  # MiB, and a busy machine
PIXELS = np.zeros((8, 8), np.uint8)


def tiff(text: str = "", pages: int = 1, pixels: np.ndarray = PIXELS, **options) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for number in range(pages):
            given = {"description": text} if text and not number else {}
            writer.write(pixels, metadata=None, contiguous=False, **given, **options)
    return file.getvalue()


def ome(pixels: str = "", planes: str = "<TiffData/>", more: str = "", side: int = 8) -> str:
    given = {"DimensionOrder": "XYCZT", "Type": "uint8", "SizeX": side, "SizeY": side}
    given |= {"SizeC": 1, "SizeZ": 1, "SizeT": 1}
    given |= dict(part.split("=") for part in pixels.split())
    sizes = " ".join(f'{name}="{value}"' for name, value in given.items())
    return f'<?xml version="1.0"?><OME>{more}<Image><Pixels {sizes}>{planes}</Pixels></Image></OME>'


def imagej(text: str) -> str:
    return f"ImageJ=1.53\n{text}"


def circle(pages: int) -> bytes:
    """Directories without tags that follow each other in a circle."""
    offsets = [8 + 6 * ((number + 1) % pages) for number in range(pages)]
    return b"II*\0\x08\0\0\0" + b"".join(struct.pack("<HI", 0, offset) for offset in offsets)


def levels(count: int) -> bytes:
    """A page whose overviews are all the page itself."""
    tags = [(65000, 4, count, (8,) * count, True)]
    content = tiff('{"shape": [8, 8]}', extratags=tags)
    return content.replace(struct.pack("<HH", 65000, 4), struct.pack("<HH", 330, 4))


def npz(behind: int, shape=(4, 4), name="a.npy") -> bytes:
    head, file = io.BytesIO(), io.BytesIO()
    given = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, given)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(name, "w") as inner:
            inner.write(head.getvalue() + bytes(16))
            for _ in range(behind):
                inner.write(bytes(1_000_000))
    return file.getvalue()


MODULO = (
    '<StructuredAnnotations><X Namespace="modulo" ID="m"><V><M><ModuloAlongT Type="phase" Start="0"'
    ' End="1e9"/></M></V></X></StructuredAnnotations>'
)
# What is written, and what the one line says; None is read.
FILES = {
    "a shape of tifffile's": (tiff('{"shape": [100000000, 8, 8]}'), "100,000,000 pages"),
    "a shape, compressed": (tiff('{"shape": [100000000, 8, 8]}', compression="zlib"), None),
    "a shape of levels": (levels(1), None),
    "times of OME": (tiff(ome("SizeT=50000000")), "50,000,000 pages"),
    "channels of OME": (tiff(ome("SizeC=20000000")), "20,000,000 pages"),
    "times of OME, of which one is there": (
        tiff(ome("SizeT=50000000", '<TiffData IFD="0" PlaneCount="1"/>')), "50,000,000 pages",
    ),
    "planes of OME": (tiff(ome("", '<TiffData IFD="0" PlaneCount="90000000"/>')), None),
    "the size of OME": (tiff(ome("SizeX=100000 SizeY=100000")), None),
    "images of OME": (
        tiff(ome().replace("<Image>", ome("SizeT=1000000")[26:-6] * 100 + "<Image>")),
        "1,000,000 pages",
    ),
    "a modulo of OME": (
        tiff(ome("SizeT=2", more=MODULO).replace("<Pixels", '<AnnotationRef ID="m"/><Pixels'), 2),
        None,
    ),
    "a document type in OME": (
        tiff(ome().replace("<OME>", '<!DOCTYPE x [<!ENTITY a "aaaa">]><OME>')), "document type",
    ),
    "frames of ImageJ": (tiff(imagej("images=100000000\nframes=100000000")), None),
    "slices of ImageJ, of a row": (
        tiff(imagej("images=100000000\nslices=100000000"), pixels=PIXELS[:1]), None,
    ),
    "pages in a circle": (circle(2), "pages"),
    "pages in a large circle": (circle(150), "pages"),
    "many pages": (circle(70_000)[:-4] + bytes(4), "pages"),
    "many levels": (levels(1000), "overviews"),
    "an array": (npz(300), None),
    "no array": (npz(300, (10**9,)), "bytes"),
    "an array that is not all there": (npz(0, (4, 5)), "truncated"),
}  # fmt: skip


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Read a file in a process that has imported everything."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.images.hostile_files"],
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    good = tmp_path_factory.mktemp("good") / "a.tif"
    good.write_bytes(tiff(ome("SizeT=2"), 2))

    def read(line):
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    assert read(good)["end"] == "read 2"  # and what is imported late is there
    yield read
    process.stdin.close()
    process.stdout.close()
    process.wait(10)


@pytest.mark.parametrize("what", FILES)
def test_a_promise_takes_nothing(what, read, tmp_path):
    content, message = FILES[what]
    path = tmp_path / ("a.npz" if content.startswith(b"PK") else "a.tif")
    path.write_bytes(content)
    for line, name in ((path, str(path)), (f"bytes {path}", "upload")):
        found = read(line)
        print(f"{what}, {len(content):,} bytes: {found}")
        assert found["memory"] <= MEMORY and found["seconds"] <= SECONDS, found
        if message:
            head, _, text = found["end"].partition(": ")
            assert head in ("UndecodableImage", "ImageTooLarge"), found
            assert text.startswith(f"{name}: ") and message in text and "\n" not in text
        elif line == path:
            assert found["end"].startswith("read "), found


@pytest.mark.parametrize("pages", [1, 2])
def test_no_file_that_a_tiff_names_is_opened(pages, read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other.tif").write_bytes(tiff())
    for name in ("pipe", "other.tif", "/etc/passwd"):
        planes = (
            '<TiffData IFD="0" FirstT="{0}"><UUID FileName="{1}">urn:uuid:{0}</UUID></TiffData>'
        )
        text = ome("SizeT=2", planes.format(0, "a.tif") + planes.format(1, name))
        (tmp_path / "a.tif").write_bytes(tiff(text, pages))
        found = read(tmp_path / "a.tif")
        assert "an OME-TIFF with planes in other files" in found["end"], found
        assert set(found["opened"]) <= {str(tmp_path / "a.tif")}


def test_a_file_of_several_images_is_read_where_the_first_is_its_own(read, tmp_path):
    planes = '<TiffData IFD="0" FirstT="0"><UUID FileName="{0}">urn:uuid:{0}</UUID></TiffData>'
    one, two = ome("", planes.format("a.tif")), ome("", planes.format("b.tif"))
    (tmp_path / "a.tif").write_bytes(tiff(one.replace("</OME>", two[26:])))
    assert read(tmp_path / "a.tif")["end"] == "read 1"
