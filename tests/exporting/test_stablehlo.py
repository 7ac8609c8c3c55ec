"""The exported program against the original model, also run without this package."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.exporting.manifest import ModelInterface, make_manifest
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.ops.nms import nms, xla_nms
from mask_rcnn_jax.structures import Detections
from tests.exporting.alone import run_alone
from tests.small_model import (
    SMALL_TRUNK,
    generated,
    predict_function,
    random_variables,
    small_config,
)

pytest.importorskip("flatbuffers")

from mask_rcnn_jax.exporting.stablehlo import export_stablehlo  # noqa: E402
from mask_rcnn_jax.predict.programs import load_stablehlo  # noqa: E402

CANVAS = (64, 128)


@pytest.fixture(scope="module")
def exported():
    """Config and function of a small model, and its program for any batch size."""
    config = small_config("coco", CANVAS, train__implementation="xla", **SMALL_TRUNK)
    variables = random_variables(config)
    _, predict = predict_function(config)
    program = export_stablehlo(predict, variables, canvas=CANVAS, batch=None, dtype=np.uint8)
    return config, partial(jax.jit(predict), variables), program


def test_detections_match_the_original_in_any_batch(exported):
    config, predict, program = exported
    run = load_stablehlo(program)
    inputs = generated(config, [(60, 96), (96, 64), (90, 90)], CANVAS)
    images, sizes = (np.concatenate(parts) for parts in zip(*inputs, strict=True))

    def exported_predict(*batch):
        return Detections(**run(*batch))

    threshold = config.eval.score_threshold
    found = compare(predict, exported_predict, [(images, sizes)], threshold)
    assert found.pictures == 3 and found.detections >= 9
    assert found.boxes < 1e-3 and found.scores < 1e-5 and found.masks < 1e-4, found
    assert not found.unmatched


def test_program_runs_on_cpu_and_gpu_without_kernels(exported):
    program = jax.export.deserialize(bytearray(exported[2]))
    assert program.platforms == ("cpu", "cuda")
    assert "mosaic" not in program.mlir_module()
    assert [str(aval.dtype) for aval in program.in_avals] == ["uint8", "int32"]
    assert program.in_avals[0].shape[1:] == (*CANVAS, 3)


def test_one_image_is_computed_without_scatters():
    """Which compilers such as IREE may not support."""

    def predict(weights, images, sizes):
        boxes = jnp.linspace(0, 9, 4 * 300).reshape(1, 300, 4) * weights * sizes[0, 0]
        valid = nms(boxes, boxes[..., 0] > 0, iou_thresh=0.5, implementation="xla")
        return Detections(boxes, boxes[..., 0], valid, None, valid)

    for batch in (1, 2):
        program = export_stablehlo(predict, 1.0, canvas=CANVAS, batch=batch, dtype=np.uint8)
        text = jax.export.deserialize(bytearray(program)).mlir_module()
        assert ("stablehlo.scatter" in text) == (batch == 2)
        images, sizes = np.zeros((batch, *CANVAS, 3), np.uint8), np.ones((batch, 2), np.int32)
        found = load_stablehlo(program)(images, sizes)
        assert found["boxes"].shape == (batch, 300, 4) and found["valid"].any()


def test_program_names_no_folder_of_the_exporting_machine():
    """Not of this package, of JAX, or of the caller."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 100)  # as by default

    def predict(weights, images, sizes):
        boxes = jnp.ones((1, 5, 4)) * weights * sizes[0, 0]
        valid = nms(boxes, boxes[..., 0] > 0, iou_thresh=0.5, implementation="xla")
        return Detections(boxes, boxes[..., 0], valid, None, valid)

    try:
        program = export_stablehlo(predict, 1.0, canvas=CANVAS, batch=1, dtype=np.uint8)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    assert b"test_stablehlo.py" in program and b"nms.py" in program  # for compilers' messages
    assert b"mask_rcnn_jax/" not in program
    files = __file__, jax.__file__, xla_nms.__code__.co_filename
    assert not [file for file in files if str(Path(file).parent).encode() in program]
    assert jax.config.jax_hlo_source_file_canonicalization_regex is None  # as before


@pytest.mark.slow
def test_the_example_needs_what_it_says_only(exported, tmp_path):
    config, predict, program = exported
    (tmp_path / "model.stablehlo").write_bytes(program)
    categories = [{"id": i, "name": f"thing {i}"} for i in (3, 5, 9)]
    inputs = {"images": {"dtype": "uint8", "shape": ["batch", *CANVAS, 3]}}
    interface = ModelInterface(inputs, CANVAS, "float32")
    manifest = make_manifest(
        config, categories, format="stablehlo", files=[], interface=interface, details={}
    )
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    image = generate_image(0, "val", 0, CANVAS)[0]  # no resizing, whose rounding differs
    Image.fromarray(image).save(tmp_path / "image.png")
    done = run_alone(tmp_path, "jax", ".", "image.png", "--threshold", "0")
    assert done.returncode == 0, done.stderr
    found = predict(image[None], np.array([CANVAS], np.int32))
    lines = done.stdout.splitlines()
    assert len(lines) == int(found.valid.sum()) >= 3
    for i, line in enumerate(lines):
        name, score, box = re.match(r"image.png: (thing \d) ([\d.]+) \[(.*)\]", line).groups()
        assert name == categories[int(found.classes[0, i]) - 1]["name"]
        assert float(score) == pytest.approx(float(found.scores[0, i]), abs=1e-3)
        box = [float(number) for number in box.split(",")]
        np.testing.assert_allclose(box, found.boxes[0, i], atol=0.1)
