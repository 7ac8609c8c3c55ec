"""OME-TIFFs of several files, of which one alone is no image."""

import uuid

import numpy as np
import pytest
import tifffile

from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.images.opening import open_raster

SCHEMA = "http://www.openmicroscopy.org/Schemas/OME/2016-06"


def plane(channel, name, number):
    file = f'<UUID FileName="{name}">urn:uuid:{number}</UUID>'
    return f'<TiffData IFD="0" FirstC="{channel}">{file}</TiffData>'


@pytest.mark.parametrize("other", ["other.tif", "gone.tif", "../other.tif"])
def test_planes_in_other_files_are_neither_read_nor_left_out(other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tifffile.imwrite("other.tif", np.full((20, 30), 77, np.uint8), metadata=None)
    one, two = uuid.UUID(int=1), uuid.UUID(int=2)
    sizes = 'DimensionOrder="XYCZT" Type="uint8" SizeX="30" SizeY="20" SizeC="2" SizeZ="1"'
    planes = plane(0, "mine.tif", one) + plane(1, other, two)
    pixels = f'<Pixels ID="Pixels:0" {sizes} SizeT="1">{planes}</Pixels>'
    image = f'<Image ID="Image:0">{pixels}</Image>'
    text = f'<?xml version="1.0"?><OME xmlns="{SCHEMA}" UUID="urn:uuid:{one}">{image}</OME>'
    mine = tmp_path / "mine.tif"
    tifffile.imwrite(mine, np.ones((20, 30), np.uint8), description=text, metadata=None)
    for source, name in ((mine, "mine.tif"), (mine.read_bytes(), "image")):
        with pytest.raises(UndecodableImage, match=f"{name}: an OME-TIFF with planes in other"):
            with open_raster(source):
                pass
