"""Commands with a run at an address: what they read of it, and what they write there."""

import json
import os

import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import store_folders
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.weights import stored_run
from mask_rcnn_jax.weights.restore import load_variables
from tests.buckets import KINDS, bucket
from tests.commands.command import check_done, error_line, files_in, run_captured
from tests.helpers import assert_tree_close


@pytest.fixture(scope="module", params=KINDS)
def run_there(request, untrained, tmp_path_factory):
    """The address of a copy of a run."""
    with bucket(request.param, tmp_path_factory.mktemp("store")) as address:
        run = f"{address}/runs/mine"
        store_folders.put_files(run, files_in(untrained.workdir), untrained.workdir)
        yield run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def there(address: str) -> dict[str, bytes]:
    names = store_folders.list_tree(address)
    return {name: store_folders.read_bytes(f"{address}/{name}") for name in names}


def test_a_run_is_scored_where_it_is(run_there, untrained, tmp_path):
    check_done(run_captured("evaluate", "--workdir", untrained.workdir, "--output", tmp_path / "a"))
    flags = ["--workdir", run_there, "--config.eval.max_images=4"]  # the config comes from there
    check_done(run_captured("evaluate", *flags))
    assert there(f"{run_there}/eval/20") == files_in(tmp_path / "a")


@pytest.mark.slow
def test_images_go_to_an_address(run_there, untrained, tmp_path):
    images = ["--input", untrained.data_dir / "val", "--score_threshold=0"]
    for weights, output in (
        (untrained.workdir, tmp_path / "a"),
        (f"{run_there}/checkpoints/20", f"{run_there}/found"),
    ):
        check_done(run_captured("infer", "--weights", weights, *images, "--output", output))
    assert there(f"{run_there}/found") == files_in(tmp_path / "a")
    assert not list((tmp_path / "home" / "outputs").iterdir())


def test_exports_go_to_an_address_and_are_read_there(run_there, untrained):
    output = f"{run_there}/out/mine.safetensors"
    flags = ["--workdir", run_there, "--output", output, "--format=safetensors"]
    check_done(run_captured("export", *flags))
    assert there(f"{run_there}/out").keys() == {"mine.safetensors", "mine.manifest.json"}
    config = load_config(untrained.workdir)
    expected = load_variables(untrained.workdir, config)
    assert_tree_close(load_variables(output, load_config(run_there)), expected)
    flags = ["--workdir", run_there, "--output", f"{run_there}/hub", "--format=hub"]
    check_done(run_captured("export", *flags))
    assert_tree_close(load_variables(f"{run_there}/hub", config), expected)


@pytest.mark.slow
def test_a_pruned_run_at_an_address_is_a_start(run_there):
    output = f"{run_there}/half"
    flags = [
        "--workdir",
        run_there,
        "--output",
        output,
        "--target_operations=0.8",
        "--min_channels=8",
    ]
    check_done(run_captured("prune", *flags))
    config = load_config(output)
    assert config.model.init_from == output and load_variables(output, config)
    done = run_captured("prune", *flags)
    said = error_line(done.returncode, done.stderr)
    assert said.startswith(f"--output is {output}, which is there already")


@pytest.mark.slow
def test_a_predictor_is_that_of_the_folder(run_there, untrained):
    image = np.zeros((64, 64, 3), np.uint8)
    ours, theirs = (
        mrcnn.load(run, score_threshold=0.0)(image).boxes for run in (run_there, untrained.workdir)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_no_checkpoint_is_there(run_there):
    content = store_folders.read_bytes(f"{run_there}/config.json")
    empty = f"{run_there}/empty"
    store_folders.write_bytes(f"{empty}/config.json", content)
    done = run_captured("evaluate", "--workdir", empty)
    said = error_line(done.returncode, done.stderr)
    assert said.startswith(f"{empty} holds no whole checkpoint")


def test_results_that_cannot_be_copied_are_kept(untrained, tmp_path, home, monkeypatch):
    """The store is gone once the detector is done."""
    place = tmp_path / "bucket"
    output, replace = f"file://{place}/found", os.replace

    def replace_and_lose(*paths):
        if place.is_dir():
            place.rmdir()
            place.touch()
        return replace(*paths)

    monkeypatch.setattr(os, "replace", replace_and_lose)
    flags = ["--workdir", untrained.workdir, "--output", output]
    done = run_captured("evaluate", *flags)
    assert "cannot be written" in error_line(done.returncode, done.stderr)
    (kept,) = (home / "outputs").iterdir()
    assert f"{output} is not complete; what was written is in {kept}" in done.stderr
    assert "AP" in json.loads((kept / "found" / "metrics.json").read_text())


def test_old_copies_are_forgotten(run_there, home):
    found = stored_run.local(run_there)
    old = found.parent.with_name("0" * 16)
    old.mkdir()
    os.utime(old, (0, 0))
    assert stored_run.local(run_there) == found and not old.exists()
