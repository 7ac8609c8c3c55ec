"""Models on a hub on this machine: pushed, fetched, and refused in one line where need be."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load, save

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.exporting.hub_folder import HubOptions, hub_files
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.network import Limits
from mask_rcnn_jax.terminal.safe_text import one_line
from mask_rcnn_jax.weights import hub, model_folder, pretrained
from mask_rcnn_jax.weights.restore import Restored, make_model, restore
from tests.small_model import CATEGORIES, random_variables, small_config

pytest.importorskip("huggingface_hub")

from tests.weights.hub_server import TOKEN, Repository, running_hub  # noqa: E402

# The client uploads so, and httpx would like it otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
ADDRESS = "hf://me/mine"
CHANGES = {
    "data__train_json": "/home/me/secret/train.json",
    "data__apply_exif": "always",
    "model__input__mean": (1.0, 2.0, 3.0),
    "model__init_from": "/home/me/weights.pth",
    "eval__nms_thresh": 0.4,
    "train__loggers": ("wandb",),
}


@pytest.fixture(scope="module")
def model() -> Restored:
    recipe = small_config("coco", (128, 128), **CHANGES)
    variables = jax.tree.map(np.asarray, random_variables(recipe))
    return Restored(recipe, {"batch_stats": {}, **variables}, CATEGORIES, None)


@pytest.fixture(scope="module")
def files(model) -> dict[str, bytes]:
    return hub_files(model, [], HubOptions())


@pytest.fixture
def server(tmp_path):
    with running_hub(tmp_path / "home") as server:
        yield server


@pytest.fixture
def mine(server, files) -> Repository:
    """The repository of the model."""
    server.repositories["me/mine"] = made = Repository()
    made.commit(files)
    return made


def refused(address: str = ADDRESS, kind: type[Exception] = ValueError) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(kind) as caught:
        mrcnn.load(address)
    assert one_line(caught.value) == str(caught.value) and len(str(caught.value)) < 1500
    return str(caught.value)


def changed(files: dict[str, bytes], **others: bytes) -> dict[str, bytes]:
    """The files with others in their place, whose checksums are right."""
    kept = {name: files[name] for name in (model_folder.CONFIG, model_folder.WEIGHTS)}
    kept |= {name.replace("_", "."): data for name, data in others.items()}
    return {**files, **kept, model_folder.SUMS: model_folder._sums(kept)}


def config_with(files: dict[str, bytes], section: str, **entries) -> dict[str, bytes]:
    tree = json.loads(files[model_folder.CONFIG])
    tree["config"].setdefault(section, {}).update(entries)
    return changed(files, config_json=json.dumps(tree).encode())


def test_what_is_pushed_is_loaded_and_predicts_the_same_bits(
    server, model, files, tmp_path, monkeypatch
):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    address = hub.push(tmp_path, list(files), "me/mine", private=True)
    assert address == f"hf://me/mine@{server.repositories['me/mine'].refs['main']}"
    assert server.repositories["me/mine"].private

    image = generate_image(0, "val", 0, (128, 128))[0]
    arguments = model.variables, 1, model.categories
    expected = mrcnn.Predictor(model.recipe.with_score_threshold(0.1), *arguments)(image)
    found = mrcnn.load(address, score_threshold=0.1)(image)
    assert len(expected) > 0 and found.names == expected.names
    for name in ("boxes", "scores", "masks"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_all_that_makes_the_model_comes_with_it_and_nothing_of_the_machine(mine, model):
    found = restore(None, ADDRESS)
    assert found.categories == CATEGORIES and found.checkpoint is None
    jax.tree.map(np.testing.assert_array_equal, found.variables, model.variables)
    assert found.recipe == model_folder.portable(model.recipe)
    assert found.recipe.model.input == model.recipe.model.input
    assert found.recipe.eval == model.recipe.eval and found.recipe.data.apply_exif == "always"
    text = mine.commits[mine.refs["main"]][model_folder.CONFIG].decode()
    assert "secret" not in text and "weights.pth" not in text and "wandb" not in text


def test_a_revision_stays_what_it_was(mine, model, files):
    first = mine.refs["main"]
    mine.refs["v1"] = first
    arrays = {name: array + 1 for name, array in load(files[model_folder.WEIGHTS]).items()}
    second = mine.commit(changed(files, model_safetensors=save(arrays)))
    for name, commit in (("main", second), ("v1", first), (first, first)):
        assert hub.fetch(f"{ADDRESS}@{name}").name == commit
    found = restore(None, f"{ADDRESS}@v1").variables
    jax.tree.map(np.testing.assert_array_equal, found, model.variables)


def test_a_commit_that_is_kept_is_taken_without_asking(mine, server):
    address = f"{ADDRESS}@{mine.refs['main']}"
    folder = hub.fetch(address)
    server.requests.clear()
    assert hub.fetch(address) == folder and server.requests == []


def test_without_an_answer_the_last_revision_is_taken(mine, server, caplog):
    folder = hub.fetch(ADDRESS)
    server.status = 503
    assert hub.fetch(ADDRESS) == folder
    assert "503" in caplog.text and "the copy that is kept is taken" in caplog.text
    text = refused("hf://me/other", OSError)
    assert text.startswith("hf://me/other: ") and "no copy of it is kept in /" in text


def test_only_our_own_files_are_fetched(mine, server, tmp_path):
    mine.commit({"pytorch_model.bin": b"\x80", "../../escaped.py": b"", "config.py": b"1 / 0"})
    folder = hub.fetch(ADDRESS)
    assert sorted(os.listdir(folder)) == sorted(model_folder.MOST_BYTES)
    asked = {request.rpartition("/")[2] for request in server.requests if "resolve" in request}
    assert asked == {"SHA256SUMS", "config.json", "model.safetensors"}


def test_addresses_that_name_no_model(server):
    for address in ("hf://", "hf://me", "hf://me/a/b", "hf://me/a@", "hf://../a", "hf://me/a@../b"):
        assert f"{address} names no model, expected hf://owner/name or" in refused(address)
    assert "hf:/me names no model" in refused(Path("hf://me"))


def test_what_is_not_there_or_not_for_everybody(mine, server, monkeypatch):
    assert "hf://me/other: there is no such repository" in refused("hf://me/other")
    assert "hf://me/mine@v9: there is no such revision" in refused(f"{ADDRESS}@v9")
    mine.private = True
    assert "or it is private and needs a token: set HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.fetch(ADDRESS).name == mine.refs["main"]


def test_terms_that_nobody_has_accepted(mine):
    mine.gated = True
    assert "asks for terms to be accepted" in refused()


def test_files_that_are_missing_or_too_large(mine, files):
    del mine.commits[mine.refs["main"]]["SHA256SUMS"]
    assert "holds no model of mask_rcnn_jax: no SHA256SUMS" in refused()
    mine.commit(changed(files, config_json=b"[" * (5 << 20)))
    assert "config.json has 5,242,880 bytes, expected at most 4,194,304" in refused()


@pytest.mark.parametrize("etag", ["/{}/x", "../../../x", "..", "a/b", "x" * 300])
def test_no_file_has_a_name_that_a_hub_says(mine, server, tmp_path, etag):
    server.etag = etag.format(tmp_path)
    folder = hub.fetch(ADDRESS)
    home = tmp_path / "home" / "hub" / "models--me--mine"
    assert folder == home / "snapshots" / mine.refs["main"]
    found = {path.relative_to(home) for path in tmp_path.rglob("*") if path.is_file()}
    inside = {folder.relative_to(home) / name for name in model_folder.MOST_BYTES}
    assert found == {*inside, Path("refs/main")}


def endless(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        handler.wfile.write(b"x" * (1 << 20))


def dripping(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 160\r\n\r\n")
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.05)


def longer(handler):
    handler._answer(b"x" * (1 << 20))


@pytest.mark.parametrize(
    "body, said",
    [
        (endless, "the server sent more than 160 bytes"),
        (longer, "the server offers 1048576 bytes, expected 160"),
        (dripping, "fewer than 1000 a second"),
    ],
)
def test_a_body_ends(mine, server, monkeypatch, tmp_path, body, said):
    monkeypatch.setattr("mask_rcnn_jax.download._LIMITS", Limits(window=0.2))
    mine.commit({"SHA256SUMS": b"x" * 160})
    server.body = body
    begin = time.monotonic()
    text = refused(kind=OSError)
    assert text.startswith(f"{ADDRESS}: ") and "SHA256SUMS" in text and said in text
    assert time.monotonic() - begin < 5
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200


def sized(size: object, sha: object = "a" * 40) -> dict:
    return {"sha": sha, "siblings": [{"rfilename": n, "size": size} for n in hub.MOST_BYTES]}


@pytest.mark.parametrize(
    "about, said",
    [
        (sized("x"), "SHA256SUMS has 'x' bytes, expected at most 65,536"),
        (sized(None), "SHA256SUMS has None bytes"),
        (sized(True), "SHA256SUMS has True bytes"),
        (sized(-1), "SHA256SUMS has -1 bytes"),
        (sized([1]), "SHA256SUMS has [1] bytes"),
        (sized(1e400), "SHA256SUMS has inf bytes"),
        (sized(1, "../../x"), "the hub's commit is '../../x', expected 40 hexadecimal digits"),
        (sized(1, ["a" * 40]), "expected 40 hexadecimal digits"),
        (sized(1, "A" * 40_000), "expected 40 hexadecimal digits"),
        ([], "describes no model, expected json with sha and siblings"),
        ({"sha": "a" * 40, "siblings": 1}, "describes no model"),
        ({"sha": "a" * 40, "siblings": ["x"]}, "describes no model"),
        ("x", "describes no model"),
    ],
)
def test_a_hub_whose_answers_make_no_sense(server, tmp_path, about, said):
    server.about = about
    text = refused()
    assert text.startswith(f"{ADDRESS}: ") and said in text
    assert not (tmp_path / "home").exists()


def test_another_commit_than_the_one_that_was_asked_for(server):
    server.about = sized(1)
    assert f"expected {'b' * 40}" in refused(f"{ADDRESS}@{'b' * 40}")


def test_a_description_has_an_end(server, monkeypatch):
    monkeypatch.setattr(hub, "_MOST_DESCRIPTION", 1000)
    server.about = ["x"] * 1000
    assert "more than 1,000 bytes" in refused(kind=OSError)


def test_the_token_is_for_the_hub_alone(mine, server, monkeypatch):
    """Large files are on another host."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    mine.private = True
    hub.fetch(ADDRESS)
    sent = {path.split("/")[1]: token for path, token in server.tokens}
    assert sent == {"api": f"Bearer {TOKEN}", "me": f"Bearer {TOKEN}", "cdn": ""}


def test_without_a_network_nothing_is_asked(mine, server, monkeypatch):
    folder = hub.fetch(ADDRESS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert hub.fetch(ADDRESS) == folder
    assert "hf://me/other: HF_HUB_OFFLINE is set; no copy" in refused("hf://me/other", OSError)
    assert server.requests == []


def test_damage_is_noticed(mine, files, server):
    mine.commit({"model.safetensors": files["model.safetensors"][:-4] + b"\0\0\0\1"})
    text = refused()
    assert "model.safetensors is damaged: its SHA-256 is" in text
    assert text.endswith("models--me--mine to fetch it again")
    mine.commit(files)
    folder = hub.fetch(ADDRESS)
    (folder / "config.json").write_text("{}")  # as a failing disk does
    assert "config.json is damaged" in refused()
    shutil.rmtree(folder.parents[1])
    assert hub.fetch(ADDRESS).name == mine.refs["main"]


def test_a_connection_that_ends_early(mine, server):
    server.cut = 1000
    text = refused(kind=OSError)
    assert text.startswith(f"{ADDRESS}: ")
    server.cut = None
    assert hub.fetch(ADDRESS).name == mine.refs["main"]


def test_weights_of_other_shapes(mine, files):
    arrays = load(files["model.safetensors"])
    name = next(name for name in arrays if "fpn" in name and arrays[name].ndim == 4)
    arrays[name] = np.zeros((1, 1, 1, 10**6), np.float32)
    mine.commit(changed(files, model_safetensors=save(arrays)))
    assert "does not fit the model" in refused() and "misshapen" in refused()
    mine.commit(changed(files, model_safetensors=b"\x80\x04cos\nsystem\n."))
    assert "model.safetensors" in refused()


@pytest.mark.parametrize(
    "section, entries, said",
    [
        ("model", {"backdoor": 1}, "model has no entry 'backdoor'"),
        ("model", {"backbone": {"name": "os:system"}}, "its code runs only with --allow_code os"),
        ("data", {"augment": ["pickle:loads"]}, "its code runs only with --allow_code pickle"),
        ("data", {"image_size": "large"}, "data.image_size is 'large'"),
        ("model", {"fpn": [[[]]]}, "model.fpn is"),
    ],
)
def test_a_config_of_a_stranger(mine, files, section, entries, said):
    mine.commit(config_with(files, section, **entries))
    text = refused()
    assert said in text and "config.json" in text


def test_places_that_a_stranger_names_are_not_looked_at(mine, files):
    mine.commit(config_with(files, "data", val_json="/etc/passwd", source="tfds", tfds_dir="/etc"))
    data = restore(None, ADDRESS).recipe.data
    assert (data.val_json, data.source, data.tfds_dir) == ("val.json", "json", "tfds")


def test_losses_of_ones_own_stay_where_they_are(model):
    own = replace(model.recipe.loss, own=("mine:loss",), own_weights=(2.0,))
    recipe = replace(model.recipe, loss=own)
    assert model_folder.portable(recipe) == model_folder.portable(model.recipe)
    assert model_folder.own_code(recipe) == {}


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"config": 1}', b"[" * 100_000, b"\xff"])
def test_a_config_that_is_none(mine, files, text):
    mine.commit(changed(files, config_json=text))
    assert "config.json is damaged" in refused()


def test_a_run_starts_from_it(mine, model):
    pretrained.check_source(ADDRESS)
    recipe = replace(model.recipe, model=replace(model.recipe.model, init_from=ADDRESS))
    found = pretrained.initialize_from(abstract_variables(make_model(recipe, 3)), recipe.model)
    jax.tree.map(np.testing.assert_array_equal, found["params"], model.variables["params"])
    other = replace(recipe.model, input=replace(recipe.model.input, mean=(9.0, 9.0, 9.0)))
    with pytest.raises(
        ValueError, match=r"--accept_mismatch .*model.input.mean=.\(1.0, 2.0, 3.0\)"
    ):
        pretrained.load(ADDRESS, other)
    with pytest.raises(ValueError, match="model.init_from: hf://me/other: there is no such"):
        pretrained.check_source("hf://me/other")


def test_the_folder_itself_is_a_model(model, files, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = restore(None, tmp_path)
    assert found.categories == CATEGORIES
    jax.tree.map(np.testing.assert_array_equal, found.variables, model.variables)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        restore(None, tmp_path)


def test_pushes_that_fail_say_why(server, files, tmp_path, monkeypatch):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match="--push_to is 'mine', expected owner/name"):
        hub.check_push("mine")
    with pytest.raises(ValueError, match="needs a token of the hub: set HF_TOKEN, or run `hf"):
        hub.check_push("me/mine")
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(ValueError, match=r"the token may not do that \(401\)"):
        hub.push(tmp_path, list(files), "me/mine", private=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ValueError, match=r"--push_to others/a: the token may not .* \(403\)"):
        hub.push(tmp_path, list(files), "others/a", private=False)
    server.repositories["me/public"] = Repository()
    server.repositories["me/public"].commit({})
    with pytest.raises(ValueError, match="--push_to me/public is public, and --private was given"):
        hub.push(tmp_path, list(files), "me/public", private=True)
    server.status = 500
    with pytest.raises(OSError, match="--push_to me/mine: .*500"):
        hub.push(tmp_path, list(files), "me/mine", private=False)
