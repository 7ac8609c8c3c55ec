"""Models on a hub in the commands: `export --push_to`, and `--weights hf://owner/name`."""

import json
import shutil

import pytest

from mask_rcnn_jax.weights.model_folder import MOST_BYTES
from tests.commands.command import check_done, error_line, files_in, run_captured

pytest.importorskip("huggingface_hub")

from tests.weights.hub_server import TOKEN, running_hub  # noqa: E402

# As in tests/weights/test_hub.py.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


@pytest.fixture
def server(tmp_path):
    with running_hub(tmp_path / "home") as server:
        yield server


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def export(run, folder, *flags):
    flags = ["--format=hub", "--output", folder, *flags]
    return run_captured("export", "--workdir", run.workdir, *flags)


@pytest.mark.slow
def test_a_run_is_pushed_and_scores_the_same(server, token, untrained, tmp_path):
    record = json.dumps({"step": 20, "ap/box": 0.25})
    (untrained.workdir / "metrics.jsonl").write_text(f"{record}\n")
    flags = ["--license=mit", "--push_to=me/mine", "--private"]
    done = check_done(export(untrained, tmp_path / "hub", *flags))
    address = done.stdout.splitlines()[-1].removeprefix("pushed: ")
    repository = server.repositories["me/mine"]
    assert address == f"hf://me/mine@{repository.refs['main']}" and repository.private
    pushed = repository.commits[repository.refs["main"]]
    assert files_in(tmp_path / "hub") == {n: d for n, d in pushed.items() if n != ".gitattributes"}
    assert {*MOST_BYTES, "README.md"} == files_in(tmp_path / "hub").keys()
    assert b"| AP, box | 0.2500 |" in pushed["README.md"] and b"license: mit" in pushed["README.md"]
    assert "who loads the model needs this code and --allow_code" in done.stderr

    data = [f"--config.{n}={v}" for n, v in untrained.overrides.items() if n.startswith("data.val")]
    scored = []
    for source in (["--workdir", untrained.workdir], ["--weights", address, *data]):
        output = tmp_path / f"scores{len(scored)}"
        check_done(run_captured("evaluate", *source, "--output", output))
        scored.append(json.loads((output / "metrics.json").read_text()))
    assert scored[0] == scored[1]

    image = next((untrained.data_dir / "val").iterdir())
    flags = ["--weights", address, "--input", image, "--output", tmp_path / "found"]
    check_done(run_captured("infer", *flags))
    assert (tmp_path / "found" / "detections.json").exists()


def test_code_of_a_stranger_is_refused_and_the_way_round_named(
    server, token, untrained, tmp_path, monkeypatch
):
    check_done(export(untrained, tmp_path / "hub", "--push_to=me/mine"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    image = next((untrained.data_dir / "val").iterdir())
    flags = ["--weights=hf://me/mine", "--input", image, "--output", tmp_path / "found"]
    done = run_captured("infer", *flags)
    text = error_line(done.returncode, done.stderr)
    assert "its code runs only with --allow_code tests.small_trunk" in text
    check_done(run_captured("infer", *flags, "--allow_code=tests.small_trunk"))


def test_training_starts_from_it(server, token, untrained, tmp_path):
    check_done(export(untrained, tmp_path / "hub", "--push_to=me/mine"))
    flags = [
        *untrained.changed({"model.init_from": "hf://me/other"}),
        "--workdir",
        tmp_path / "new",
    ]
    done = run_captured("train", *flags)
    text = error_line(done.returncode, done.stderr)
    assert text.startswith("model.init_from: hf://me/other: there is no such repository")
    shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_flags_that_do_not_go_together(server, untrained, tmp_path, monkeypatch):
    out = tmp_path / "hub"
    for flags, said in (
        (["--push_to=mine"], "--push_to is 'mine', expected owner/name"),
        (["--push_to=me/mine"], "--push_to me/mine needs a token of the hub: set HF_TOKEN"),
        (["--private"], "--private is for --push_to"),
        (["--license=my own"], "--license is 'my own', expected an identifier of SPDX"),
        (["--int8", "--calibration=x"], "--int8 does not apply to --format=hub"),
    ):
        done = export(untrained, out, *flags)
        assert said in error_line(done.returncode, done.stderr), flags
    flags = ["--workdir", untrained.workdir, "--format=onnx", "--output", out, "--license=mit"]
    done = run_captured("export", *flags)
    text = "--license, --push_to and --private are for --format=hub"
    assert error_line(done.returncode, done.stderr) == text
    assert not out.exists()


def test_a_model_needs_no_recipe(server, token, untrained, tmp_path):
    check_done(export(untrained, tmp_path / "hub", "--push_to=me/mine"))
    weights = "--weights=hf://me/mine"
    done = run_captured("evaluate", weights)
    assert error_line(done.returncode, done.stderr).endswith(
        "is no run: it needs --output (output in Python)"
    )
    flags = ["--config.model.fpn.channel=8", "--output", tmp_path / "scores"]
    done = run_captured("evaluate", weights, *flags)
    text = error_line(done.returncode, done.stderr)
    assert "there is no config entry 'model.fpn.channel'" in text
    check_done(run_captured("export", weights, "--format=hub", "--output", tmp_path / "again"))
    first, second = (files_in(tmp_path / name) for name in ("hub", "again"))
    for name in MOST_BYTES:
        assert first[name] == second[name]
