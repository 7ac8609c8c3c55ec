"""Results in parts: merged, they are those of one run; what is done is not done again."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import cv2
import jax
import numpy as np
import pytest

from mask_rcnn_jax.predict.engines import Exported, ExportedModel
from mask_rcnn_jax.predict.parts import settings_of
from mask_rcnn_jax.weights.restore import restore
from tests.commands.command import check_done, error_line, files_in, run_captured, start

COUNT = 37


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Of several sizes, in a list; one is damaged, one is absent, one occurs twice."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for n in range(COUNT - 2):
        size = ((64, 64), (48, 64), (64, 40))[n % 3]
        cv2.imwrite(str(folder / f"{n:02}.png"), rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    (folder / "05.png").write_bytes(b"no picture")
    names = [f"{folder}/{n:02}.png" for n in range(COUNT - 2)]
    names[20:20] = [names[3], f"{folder}/absent.png"]
    (folder / "list.txt").write_text("\n".join(names) + "\n")
    return folder


def infer(run, pictures, output, *more):
    arguments = ["--workdir", run.workdir, "--output", output, "--score_threshold=0", *more]
    if not any(str(one).startswith("--input") for one in more):
        arguments.append(f"--input=@{pictures}/list.txt")
    return run_captured("infer", *arguments)


@pytest.fixture(scope="module")
def whole(untrained, pictures, tmp_path_factory) -> bytes:
    """detections.json of one run."""
    output = tmp_path_factory.mktemp("whole")
    done = check_done(infer(untrained, pictures, output, "--no_images"))
    assert "2 of 37 inputs skipped" in done.stderr
    assert [path.name for path in output.iterdir()] == ["detections.json"]
    content = (output / "detections.json").read_bytes()
    entries = json.loads(content)
    names = (pictures / "list.txt").read_text().split()
    assert len({entry["image_id"] for entry in entries}) == COUNT - 2
    assert all(names[entry["image_id"] - 1] == entry["file_name"] for entry in entries)
    return content


@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_merged_parts_are_one_run(form, untrained, pictures, whole, tmp_path):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    for shard in ("0/2", "1/2"):
        flags = [f"--shard={shard}", "--part_size=5", f"--part_format={form}"]
        check_done(infer(untrained, pictures, tmp_path, *flags))
    names = [path.name for path in tmp_path.iterdir()]
    assert all(
        name.startswith(("part-00000-of-00002-0000", "part-00001-of-00002")) for name in names
    )
    done = check_done(run_captured("infer", "--merge", tmp_path, "--output", tmp_path / "merged"))
    assert (tmp_path / "merged" / "detections.json").read_bytes() == whole
    assert f"{COUNT} images: {COUNT - 2} done, 2 skipped" in done.stderr
    assert "skipped 1: No such file or directory" in done.stderr
    lines = (tmp_path / "merged" / "skipped.jsonl").read_text().splitlines()
    skipped = [json.loads(line) for line in lines]
    assert [Path(one["file_name"]).name for one in skipped] == ["05.png", "absent.png"]
    assert [one["image_id"] for one in skipped] == [6, 22]


def test_a_part_has_a_line_for_each_image(untrained, pictures, whole, tmp_path):
    check_done(infer(untrained, pictures, tmp_path, "--part_size=30"))
    parts = sorted(tmp_path.glob("*.jsonl"))
    assert [p.name for p in parts] == [f"part-00000-of-00001-{n:06}.jsonl" for n in (0, 1)]
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [line["image_id"] for line in lines] == list(range(1, COUNT + 1))
    assert (lines[1]["height"], lines[1]["width"]) == (48, 64)
    assert {len(line) for line in lines if "skipped" not in line} == {5}
    found = [
        e | {"file_name": line["file_name"]} for line in lines for e in line.get("detections", ())
    ]
    assert found == json.loads(whole)
    assert "truncated" in lines[5]["skipped"] and str(pictures) not in lines[5]["skipped"]
    check_done(run_captured("infer", "--merge", tmp_path))
    assert (tmp_path / "detections.json").read_bytes() == whole


@pytest.mark.slow
def test_a_part_that_is_there_is_not_read_again(untrained, pictures, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(pictures, own)
    listed = (pictures / "list.txt").read_text().replace(str(pictures), str(own))
    (own / "list.txt").write_text(listed)
    output = tmp_path / "out"
    check_done(infer(untrained, own, output, "--part_size=10"))
    before = files_in(output)
    assert len(before) == 8
    for path in own.glob("*.png"):  # but for those of the part that is done anew
        if not 20 <= int(path.stem) < 28 and path.stem != "03":
            path.write_bytes(b"gone")
    (output / "part-00000-of-00001-000002.json").unlink()
    done = check_done(infer(untrained, own, output, "--part_size=10"))
    assert "4 parts, of which 3 were there" in done.stderr
    assert files_in(output) == before
    (output / "part-00000-of-00001-000002.jsonl").unlink()
    line = run_captured("infer", "--merge", output)
    line = error_line(line.returncode, line.stderr)
    assert "part-00000-of-00001-000002 missing; run infer --shard i/1 for i = 0" in line


@pytest.mark.parametrize(
    "more, words",
    [
        (["--score_threshold=0.1"], ["made with score_threshold 0.0, not 0.1", "another --output"]),
        (["--part_size=11"], ["made with part_size 10, not 11"]),
        (["--tile=32"], ["made with tile 0, not 32"]),
        (["--config.eval.nms_thresh=0.3"], ["made with recipe "]),
        (["--shard=0/3"], ["holds part-00000-of-00001-000000.json", "not of 3 shards"]),
        (["--part_format=parquet"], ["holds part-00000-of-00001-000000.jsonl", "in parquet"]),
        (["--input=SHORTER"], ["000000.jsonl is of other images than --input has now (10 images"]),
    ],
)  # fmt: skip
def test_parts_of_different_runs_are_not_mixed(more, words, untrained, pictures, made, tmp_path):
    if "--part_format=parquet" in more:
        pytest.importorskip("pyarrow")
    lines = (pictures / "list.txt").read_text().splitlines(keepends=True)
    (tmp_path / "shorter.txt").write_text("".join(lines[1:]))
    more = [one.replace("SHORTER", f"@{tmp_path}/shorter.txt") for one in more]
    if any("config" in one for one in more):
        more = [*untrained.flags, *more]
    before = files_in(made)
    done = infer(untrained, pictures, made, "--part_size=10", *more)
    line = error_line(done.returncode, done.stderr)
    for word in words:
        assert word in line
    assert files_in(made) == before


@pytest.fixture(scope="module")
def made(untrained, pictures, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("made")
    check_done(infer(untrained, pictures, output, "--part_size=10"))
    return output


def test_other_weights_are_noticed(untrained):
    recipe, variables, *_ = restore(None, untrained.workdir)
    other = jax.tree.map(np.array, variables)
    value = jax.tree.leaves(other)[0].reshape(-1)
    value[0] = np.nextafter(value[0], np.float32(1))
    one, two = (settings_of(recipe, weights, 0, 0.2) for weights in (variables, other))
    assert one["weights"] != two["weights"] and one | {"weights": 0} == two | {"weights": 0}


def test_other_files_of_an_exported_model_are_noticed(untrained, tmp_path):
    recipe, path = restore(None, untrained.workdir).recipe, tmp_path / "model.onnx"
    found = []
    for content in (b"one", b"other", b"one"):
        path.write_bytes(content)
        model = ExportedModel((64, 64), None, lambda *_: None, path=path)
        exported = Exported(recipe, [], None, (model,), "model")
        found.append(settings_of(recipe, exported, 0, 0.2)["weights"])
    assert found[0] == found[2] != found[1]


def test_merge_says_what_does_not_belong_together(untrained, pictures, made, tmp_path):
    def refused(change) -> str:
        folder = tmp_path / "parts"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        change(folder)
        done = run_captured("infer", "--merge", folder)
        assert not (folder / "detections.json").exists()
        assert not list(folder.glob(".*"))
        return error_line(done.returncode, done.stderr)

    last = "part-00000-of-00001-000003"
    assert f"{last} missing" in refused(lambda f: (f / f"{last}.json").unlink())
    assert "no parts" in refused(lambda f: [p.unlink() for p in f.iterdir()])
    assert f"{last}.json is damaged" in refused(lambda f: (f / f"{last}.json").write_text("{"))
    assert f"{last}.jsonl is damaged" in refused(
        lambda f: os.truncate(f / f"{last}.jsonl", (f / f"{last}.jsonl").stat().st_size - 9)
    )
    second = "part-00000-of-00001-000001.jsonl"
    assert "image 11 of --input is missing" in refused(
        lambda f: (f / second).write_text("".join((f / second).read_text().splitlines(True)[1:]))
    )
    assert "hold fewer images" in refused(
        lambda f: (f / f"{last}.jsonl").write_text(
            "".join((f / f"{last}.jsonl").read_text().splitlines(True)[:-1])
        )
    )
    assert "of 1 and of 4 shards" in refused(
        lambda f: (f / "part-00000-of-00004-000000.jsonl").touch()
    )


@pytest.mark.slow
def test_a_folder_is_shared_by_the_names_below_it(untrained, tmp_path):
    folder = f"--input={untrained.data_dir / 'val'}"
    check_done(infer(untrained, None, tmp_path / "one", folder, "--no_images"))
    for shard in range(2):
        check_done(infer(untrained, None, tmp_path / "parts", folder, f"--shard={shard}/2"))
    lines = [p.read_text().count("\n") for p in (tmp_path / "parts").glob("*.jsonl")]
    assert sum(lines) == 4 and len(lines) == 2
    check_done(run_captured("infer", "--merge", tmp_path / "parts"))
    one, merged = (tmp_path / name / "detections.json" for name in ("one", "parts"))
    assert merged.read_bytes() == one.read_bytes()


def test_nothing_but_missing_files_is_no_result(untrained, pictures, tmp_path):
    names = [f"/no/such/disk/{n}.png\n" for n in range(12)]
    (tmp_path / "list.txt").write_text("".join(names))
    done = infer(untrained, tmp_path, tmp_path / "out", "--shard=0/1")
    line = error_line(done.returncode, done.stderr)
    assert "none of 12 images could be read, such as /no/such/disk/0.png: No such file" in line
    assert not list((tmp_path / "out").iterdir())
    done = infer(untrained, tmp_path, tmp_path / "out", "--no_images")
    assert "no input could be read: /no/such/disk/0.png: No such" in error_line(
        done.returncode, done.stderr
    )


def test_a_shard_without_images_is_a_part_without_lines(untrained, pictures, tmp_path):
    (tmp_path / "list.txt").write_text(f"{pictures}/00.png\n")
    for shard in range(2):
        check_done(infer(untrained, tmp_path, tmp_path / "out", f"--shard={shard}/2"))
    sizes = sorted(path.stat().st_size for path in (tmp_path / "out").glob("*.jsonl"))
    assert len(sizes) == 2 and sizes[0] == 0 < sizes[1]
    check_done(run_captured("infer", "--merge", tmp_path / "out"))
    entries = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert {entry["file_name"] for entry in entries} == {f"{pictures}/00.png"}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--shard=2/2"], "--shard is '2/2', expected i/n"),
        (["--part_format=jsonl"], "--part_format is for parts"),
        (["--shard=0/2", "--save=csv"], "--save writes files beside one json"),
        (["--shard=0/2", "--input=0.mp4"], "0.mp4 is a video, and parts are of images"),
        (["--merge=out"], "--merge takes --output alone, not --workdir"),
    ],
)
def test_flags_that_do_not_fit(flags, words, untrained, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("0.mp4").touch()
    done = infer(untrained, pictures, tmp_path / "out", *flags)
    assert words in error_line(done.returncode, done.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--input=a.png"], "--merge takes --output alone, not --input"),
        (["--shard=0/2"], "--merge takes --output alone, not --shard"),
        ([], "--merge : no parts"),
    ],
)
def test_merge_takes_no_flags_of_a_run(flags, words, tmp_path):
    """Nor an empty name, as a shell makes of a variable that is not set."""
    folder = tmp_path if flags else ""
    done = run_captured("infer", f"--merge={folder}", *flags)
    assert words in error_line(done.returncode, done.stderr)


@pytest.mark.slow
def test_sigterm_ends_with_the_code_that_says_again(untrained, pictures, whole, tmp_path, cache):
    """A named pipe in the list holds the second part up until the signal has come."""
    output = tmp_path / "out"
    names = (pictures / "list.txt").read_text().splitlines()
    command = ("infer", "--workdir", untrained.workdir, "--output", output, "--score_threshold=0")
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(names * 40))
    command = (*command, f"--input=@{listed}", "--part_size=20")
    process = start(*command, cache=cache)
    first = output / "part-00000-of-00001-000000.json"
    while not first.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=100)
    assert process.returncode == os.EX_TEMPFAIL, log
    assert log.count("stopped early: the same command goes on") == 1
    assert not list(output.glob(".*"))
