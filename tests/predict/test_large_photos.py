"""The server decodes large JPEGs at a part of their size; results are in the photo's pixels."""

import io
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.images.decode import decode_bytes
from mask_rcnn_jax.predict import pixels
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.serving import service as service_module
from mask_rcnn_jax.serving.service import Service
from tests.predict.conftest import two_canvas_config


@pytest.fixture
def predictor(variables):
    config = two_canvas_config()
    config.data.scaled_decoding = True
    return Predictor(config, variables)


@pytest.fixture
def prepared(predictor, monkeypatch):
    """What the network is given for a file; nothing runs it."""

    def stream(images):
        given.extend(image for _, image in images)
        raise RuntimeError("not to be run")

    def prepare(content):
        request = SimpleNamespace(
            read_body=lambda: content, release_body=lambda: None, has_gone=lambda: False
        )
        with pytest.raises(RuntimeError, match="not to be run"):
            service.detect(request, "")
        return given.pop()

    given = []
    monkeypatch.setattr(service_module, "_warm_up", lambda predictor: True)  # compiles
    monkeypatch.setattr(predictor, "stream", stream)
    service = Service(predictor)
    yield prepare
    service.close()


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("suffix", ["jpeg", "png"])
def test_a_photo_is_prepared_as_if_it_were_decoded_whole(
    predictor, prepared, orientation, suffix, monkeypatch
):
    corners = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    photo, exif = cv2.resize(corners, (810, 401)), Image.Exif()
    exif[0x0112] = orientation
    file, decoded = io.BytesIO(), []
    Image.fromarray(photo).save(file, suffix, exif=exif, quality=98)
    content = file.getvalue()

    def noted(*arguments, **keys):
        decoded.append(decode_bytes(*arguments, **keys))
        return decoded[-1]

    monkeypatch.setattr(pixels, "decode_bytes", noted)
    found = prepared(content)
    expected = predictor.prepare(decode_bytes(content, "", upright=True))
    size = (401, 810) if orientation == 1 else (810, 401)
    reduced = {(401, 810): (101, 203), (810, 401): (203, 101)}[size]
    assert decoded[0].shape[:2] == (reduced if suffix == "jpeg" else size)
    assert found.image.shape == expected.image.shape == (*size, 3)
    assert found.plan == expected.plan and found.canvas.dtype == expected.canvas.dtype
    difference = np.abs(found.canvas.astype(int) - expected.canvas)
    assert difference.max() <= (8 if suffix == "jpeg" else 0)
