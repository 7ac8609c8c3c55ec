"""Public weights by name, from a server on this machine."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.weights import pretrained, published, restore
from mask_rcnn_jax.weights.pretrained import check_source
from mask_rcnn_jax.weights.published import (
    BY_HAND,
    PUBLISHED,
    Published,
    fetch,
    find,
    is_nearly_name,
    names,
)
from mask_rcnn_jax.weights.saved_model import saved_categories
from tests.formats.file_server import running

CONTENT = b"weights"
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
DETECTORS = [name for name, one in PUBLISHED.items() if one.recipe]


@pytest.fixture
def some(monkeypatch, tmp_path):
    """A server of weights "some" and "absent", and an empty home."""
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    with running() as server:
        server.files["/some.pth"] = CONTENT
        for name, recipe in (("some", "coco_torchvision:v2"), ("absent", "coco")):
            one = Published(server.url(f"/{name}.pth"), SHA256, recipe)
            monkeypatch.setitem(PUBLISHED, name, one)
        yield server


def test_a_name_is_fetched_once(some, tmp_path):
    path = find("some")
    assert path == tmp_path / "home" / "some.pth" and path.read_bytes() == CONTENT
    some.files.clear()
    assert find("some") == path


def test_weights_that_ship_are_copied_with_the_names_of_their_classes(tmp_path):
    (name,) = published.SHIPPED
    for _ in range(2):
        found = published.put(name, tmp_path / "weights")
    assert found == tmp_path / "weights" / f"{name}.safetensors"
    assert found.read_bytes() == Path(published.find(name)).read_bytes()
    assert saved_categories(found) == [{"id": 1, "name": "nucleus"}]
    assert len(list(found.parent.iterdir())) == 2


def test_what_exists_under_a_name_is_preferred(some, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").touch()
    assert find("some") == "some" and find("runs/mine") == "runs/mine"


def test_without_a_network_the_error_says_what_to_do(some, tmp_path):
    path = tmp_path / "home" / "absent.pth"
    with pytest.raises(OSError, match=f"/absent.pth: .*; without a network, .* save it as {path}"):
        find("absent")
    known = f"^model.init_from: .*save it as {path}, or name it: --config.model.init_from=FILE$"
    with pytest.raises(ValueError, match=known):
        check_source("absent")


def test_unknown_names_and_addresses_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown weights 'other', expected one that"):
        fetch("other", tmp_path)
    with pytest.raises(ValueError, match="nothing://bucket/weights.pth: Protocol not known"):
        find("nothing://bucket/weights.pth")


def test_a_file_of_a_nearly_right_name_is_no_mistake(tmp_path, monkeypatch):
    """TensorFlow's is a name without an ending."""
    monkeypatch.chdir(tmp_path)
    assert is_nearly_name("resnet5")
    (tmp_path / "resnet5.index").touch()
    assert not is_nearly_name("resnet5") and not any(map(is_nearly_name, names()))


def test_models_on_a_hub_need_its_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    text = r"models on a hub need huggingface_hub: pip install 'mask-rcnn-jax\[hub\]'"
    for load in (find, mrcnn.load):
        with pytest.raises(ValueError, match=text):
            load("hf://owner/name")


def test_a_name_brings_its_recipe(some, monkeypatch):
    asked = []

    def load(path, model, **_):
        asked.append((path, model.rpn.num_convs))
        raise ValueError("far enough")

    monkeypatch.setattr(restore.pretrained, "load", load)
    with pytest.raises(ValueError, match="far enough"):
        mrcnn.load("some")
    assert asked == [("some", 2)]  # `coco_torchvision:v2`


def test_errors_on_weights_by_name_say_which_recipe_they_are_made_for():
    (name, recipe) = next(iter(published.SHIPPED.items()))
    other = as_recipe(load_config("finetune")).model
    with pytest.raises(ValueError, match=rf"{name} \(made for --config {recipe}\) holds weights"):
        pretrained.load(name, other)
    variables = {"params": {"fpn": {"other": np.ones(2)}}}
    with pytest.raises(ValueError, match=rf"{name} \(made for --config {recipe}\): does not fit"):
        pretrained.merge_into({"params": {}}, variables, source=name)
    with pytest.raises(ValueError, match="^resnet50: does not fit"):  # goes into many recipes
        pretrained.merge_into({"params": {}}, variables, source="resnet50")


def test_without_a_published_checksum_the_first_one_counts(some, tmp_path, monkeypatch, caplog):
    url = some.url("/some.pth")
    monkeypatch.setitem(PUBLISHED, "first", Published(url, "", "", "mine.pkl"))
    path = fetch("first", tmp_path)
    digest = SHA256.removeprefix("sha256:")
    assert path == tmp_path / "mine.pkl" and path.read_bytes() == CONTENT
    assert (tmp_path / "mine.pkl.sha256").read_text().strip() == digest
    assert f"first: no checksum is published; from now on, {digest} counts" in caplog.text
    caplog.clear()
    assert fetch("first", tmp_path) == path and not caplog.text
    some.files["/some.pth"] = b"others"
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"has sha256 .*, expected {digest}"):
        fetch("first", tmp_path)


def test_a_first_checksum_is_whole_or_not_there(some, tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "first", Published(some.url("/some.pth"), "", "", "mine.pkl"))
    kept = tmp_path / "mine.pkl.sha256"
    (tmp_path / "mine.pkl").write_bytes(CONTENT)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # ended before it has its name
        patch.setattr(published.os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch("first", tmp_path)
    assert not kept.exists()
    kept.touch()
    with pytest.raises(ValueError, match=f"{kept} holds no SHA-256; delete it to take"):
        fetch("first", tmp_path)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_checkpoint_of_the_name_is_taken(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.index").touch()
    assert find(name) == name


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_in_several_files_say_what_to_do(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is a backbone, expected a detector"):
        mrcnn.load(name)
    for call in (lambda: fetch(name, tmp_path), lambda: find(name), lambda: check_source(name)):
        with pytest.raises(ValueError, match=f"{name} is a .*, and name its .* an ending; resnet"):
            call()


@pytest.mark.parametrize("name", [n for n, one in PUBLISHED.items() if one.checksum])
def test_every_name_has_a_verified_address(name, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(published, "download", lambda *given, **_: calls.append(given))
    fetch(name, tmp_path)
    ((url, path, checksum),) = calls
    kind, digits = checksum.split(":")
    assert url.startswith("https://") and path.parent == tmp_path
    if name.startswith("mae_"):  # whose README has it
        return
    assert kind in ("sha256", "md5") and path.stem[-len(digits) - 1 :] in (
        f"-{digits}",
        f"_{digits}",
    )


def test_every_detector_names_a_recipe_of_coco():
    assert len(DETECTORS) == 32
    for name in DETECTORS:
        load_config(PUBLISHED[name].recipe)
