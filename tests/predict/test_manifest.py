"""A damaged manifest.json is refused in one line that names the file and the entry."""

import json
import shutil

import pytest

from mask_rcnn_jax.predict.engines import load_exported
from tests.commands.command import run_captured
from tests.helpers import GOLDENS

SAVED = GOLDENS / "version_0_1_0" / "onnx"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(SAVED, tmp_path / "exported")


def change(folder, name, value):
    path = folder / "manifest.json"
    tree = json.loads(path.read_text())
    *sections, last = name.split(".")
    section = tree
    for key in sections:
        section = section[int(key) if isinstance(section, list) else key]
    section[last] = value
    path.write_text(json.dumps(tree))


SIZE = "expected height and width, from 1 to 65535"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("classes", [], r"classes is \[\], expected a list of classes"),
        ("classes", {}, "classes is {}, expected a list of classes"),
        ("classes", [{}], "classes.0.id is missing, expected a number or a text"),
        ("classes", ["a"], "classes.0.id is missing"),
        ("classes", [[1]], "classes.0.id is missing"),
        ("classes.1.id", 1.5, "classes.1.id is 1.5, expected a number or a text"),
        ("classes.1.name", None, "classes.1.name is None, expected a text"),
        ("format", "tflite", "format is 'tflite', expected onnx or stablehlo"),
        ("format", ["onnx"], r"format is \['onnx'\], expected onnx or stablehlo"),
        ("inputs", [], "inputs.images.shape is missing"),
        ("inputs.images", {}, "inputs.images.shape is missing"),
        ("inputs.images.shape", [], r"inputs.images.shape is \[\], expected four sides"),
        ("inputs.images.shape", [0, 64, 128, 3], r"shape is \[0, 64, 128, 3\], expected four"),
        ("preprocessing", [], r"preprocessing is \[\], expected an object"),
        ("preprocessing.canvas", "x", f"preprocessing.canvas is 'x', {SIZE}"),
        ("preprocessing.canvas", [64, 10**9], f"canvas is .64, 1000000000., {SIZE}"),
        ("preprocessing.picture_size", [0, 0], rf"picture_size is \[0, 0\], {SIZE}"),
        ("preprocessing.picture_size", [64], rf"picture_size is \[64\], {SIZE}"),
        ("preprocessing.picture_size", False, f"picture_size is False, {SIZE}"),
        ("config", [], r"config is \[\], expected an object"),
        ("config.model", [], r"config.model is \[\], expected an object"),
        ("config.data", None, "config.data is None, expected an object"),
        ("config.eval.nms", "none", "eval.nms is 'none', expected one of"),
        ("config.model.fpn.name", "none", "model.fpn.name is 'none', expected one of"),
        ("config.model.rpn", 5, "model.rpn is 5, expected a section with"),
    ],
)
def test_an_entry_of_a_wrong_kind_is_named(name, value, words, folder):
    change(folder, name, value)
    with pytest.raises(ValueError, match=f"manifest.json.*{words}") as error:
        load_exported(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "5", "{", '"x"', "[" * 100_000, "\xff\xfe"])
def test_what_is_no_manifest_is_refused(text, folder):
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{folder}/manifest.json is damaged: "):
        load_exported(folder)


@pytest.mark.parametrize("entry", ["evaluate", "infer", "serve"])
def test_commands_say_it_in_one_line(entry, folder, tmp_path):
    change(folder, "preprocessing.picture_size", [0, 0])
    more = {"evaluate": ["--output=out"], "infer": ["--output=out", "--input=a.jpg"], "serve": []}
    done = run_captured(entry, "--artifact", folder, *more[entry])
    assert done.returncode == 2 and not done.stdout
    assert "manifest.json is damaged: preprocessing.picture_size is [0, 0]" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_size_of_images_that_is_none_is_no_fault(folder):
    change(folder, "preprocessing.picture_size", None)
    pytest.importorskip("onnxruntime")
    assert load_exported(folder).sample_sizes == [(64, 128)]
