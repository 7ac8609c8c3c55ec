"""Results in shards: merged, they are those of one run; what is done is not done again."""

import json
import os
import signal
import time
from pathlib import Path

import cv2
import jax
import numpy as np
import pytest

from mask_rcnn_jax.predict.engines import Exported, ExportedModel
from mask_rcnn_jax.predict.shards import settings_of
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


def test_merged_shards_are_one_run(untrained, pictures, whole, tmp_path):
    for shard in ("0/2", "1/2"):
        check_done(infer(untrained, pictures, tmp_path, f"--shard={shard}"))
    files = [tmp_path / f"shard-0000{k}-of-00002.jsonl" for k in range(2)]
    assert sorted(tmp_path.iterdir()) == files
    merge = ["--merge", tmp_path, "--output", tmp_path / "merged", "--save", "csv"]
    done = check_done(run_captured("infer", *merge))
    assert (tmp_path / "merged" / "detections.json").read_bytes() == whole
    assert f"{COUNT} images: {COUNT - 2} done, 2 skipped, 0 failed" in done.stderr
    assert "skipped 1: No such file or directory" in done.stderr
    lines = (tmp_path / "merged" / "skipped.jsonl").read_text().splitlines()
    skipped = [json.loads(line) for line in lines]
    assert [Path(one["file_name"]).name for one in skipped] == ["05.png", "absent.png"]
    assert [one["image_id"] for one in skipped] == [6, 22]
    assert "truncated" in skipped[0]["skipped"] and str(pictures) not in skipped[0]["skipped"]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()[:-2]]
    lines.sort(key=lambda line: line["image_id"])
    assert [line["image_id"] for line in lines] == list(range(1, COUNT + 1))
    assert (lines[1]["height"], lines[1]["width"]) == (48, 64)
    check_done(infer(untrained, pictures, tmp_path / "one", "--no_images", "--save=csv"))
    tables = [(tmp_path / name / "detections.csv").read_bytes() for name in ("one", "merged")]
    assert tables[0] == tables[1] and len(tables[0].splitlines()) == len(json.loads(whole)) + 1


def test_a_shard_that_is_there_is_not_made_again(untrained, pictures, made):
    before = files_in(made)
    done = check_done(infer(untrained, pictures, made, "--shard=0/1"))
    path = made / "shard-00000-of-00001.jsonl"
    assert f"{path} is there: shard 0/1, {COUNT - 2} images done, 2 skipped" in done.stderr
    assert files_in(made) == before


@pytest.mark.parametrize(
    "more, words",
    [
        (["--score_threshold=0.1"], ["made with score_threshold 0.0, not 0.1", "another --output"]),
        (["--tile=32"], ["made with tile 0, not 32"]),
        (["--config.eval.nms_thresh=0.3"], ["made with recipe "]),
        (["--input=SHORTER"], ["00001.jsonl is of other images than --input has now (37 images"]),
    ],
)  # fmt: skip
def test_shards_of_different_runs_are_not_mixed(more, words, untrained, pictures, made, tmp_path):
    lines = (pictures / "list.txt").read_text().splitlines(keepends=True)
    (tmp_path / "shorter.txt").write_text("".join(lines[1:]))
    more = [one.replace("SHORTER", f"@{tmp_path}/shorter.txt") for one in more]
    if any("config" in one for one in more):
        more = [*untrained.flags, *more]
    before = files_in(made)
    done = infer(untrained, pictures, made, "--shard=0/1", *more)
    line = error_line(done.returncode, done.stderr)
    for word in words:
        assert word in line
    assert files_in(made) == before


@pytest.fixture(scope="module")
def made(untrained, pictures, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("made")
    check_done(infer(untrained, pictures, output, "--shard=0/1"))
    return output


@pytest.mark.parametrize("shard", [[], ["--shard=0/1"]])
@pytest.mark.parametrize("most, code", [("2", 0), ("0.06", 0), ("1", 1), ("0.05", 1), ("0", 1)])
def test_more_skipped_than_allowed_is_exit_code_1(most, code, shard, untrained, pictures, made):
    """2 of 37; what was made stays."""
    more = [*shard, f"--max_skipped={most}"] + ([] if shard else ["--no_images"])
    done = infer(untrained, pictures, made if shard else made / "one", *more)
    assert done.returncode == code, done.stderr
    line = f"error: 2 of {COUNT} inputs skipped, more than --max_skipped {most}\n"
    assert done.stderr.endswith(line) is bool(code)


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


def test_merge_says_what_does_not_belong_together(untrained, pictures, tmp_path):
    folder = tmp_path / "shards"
    for shard in range(2):
        check_done(infer(untrained, pictures, folder, f"--shard={shard}/2"))

    def refused() -> str:
        done = run_captured("infer", "--merge", folder)
        assert not (folder / "detections.json").exists()
        assert not list(folder.glob(".*"))
        return error_line(done.returncode, done.stderr)

    first, second = (folder / f"shard-0000{k}-of-00002.jsonl" for k in range(2))
    content = second.read_bytes()
    second.unlink()
    assert "1 of 2 shards missing; run infer --shard i/2 for i = 1" in refused()
    second.write_bytes(content[:-9])
    line = refused()
    assert f"{second} is damaged" in line and "run infer --shard i/2 for i = 1" in line
    other = folder / "shard-00000-of-00004.jsonl"
    other.touch()
    assert "holds shards of 2 and of 4, expected those of one run" in refused()
    other.unlink()
    lines = (pictures / "list.txt").read_text().splitlines(keepends=True)
    (tmp_path / "list.txt").write_text("".join(lines[1:]))
    second.unlink()
    check_done(infer(untrained, tmp_path, folder, "--shard=1/2"))
    assert "the shards had different inputs" in refused()
    second.unlink()
    check_done(infer(untrained, pictures, folder, "--shard=1/2", "--tile=32"))
    assert "made with tile 32, not 0" in refused()


@pytest.mark.slow
def test_a_folder_is_shared_by_the_names_below_it(untrained, tmp_path):
    folder = f"--input={untrained.data_dir / 'val'}"
    check_done(infer(untrained, None, tmp_path / "one", folder, "--no_images"))
    for shard in range(2):
        check_done(infer(untrained, None, tmp_path / "shards", folder, f"--shard={shard}/2"))
    lines = [p.read_text().count("\n") - 2 for p in (tmp_path / "shards").glob("*.jsonl")]
    assert sum(lines) == 4 and len(lines) == 2
    check_done(run_captured("infer", "--merge", tmp_path / "shards"))
    one, merged = (tmp_path / name / "detections.json" for name in ("one", "shards"))
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


def test_a_shard_may_be_without_images(untrained, pictures, tmp_path):
    (tmp_path / "list.txt").write_text(f"{pictures}/00.png\n")
    for shard in range(2):
        check_done(infer(untrained, tmp_path, tmp_path / "out", f"--shard={shard}/2"))
    lines = [path.read_text().count("\n") for path in (tmp_path / "out").glob("*.jsonl")]
    assert sorted(lines) == [2, 3]
    check_done(run_captured("infer", "--merge", tmp_path / "out"))
    entries = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert {entry["file_name"] for entry in entries} == {f"{pictures}/00.png"}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--shard=2/2"], "--shard is '2/2', expected i/n"),
        (["--max_skipped=-1"], "max_skipped"),
        (["--shard=0/2", "--save=csv"], "--save writes files beside one json"),
        (["--shard=0/2", "--input=0.mp4"], "0.mp4 is a video, and shards are of images"),
        (["--merge=out"], "--merge takes --output and --save csv alone, not --workdir"),
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
        (["--input=a.png"], "--merge takes --output and --save csv alone, not --input"),
        (["--shard=0/2"], "--merge takes --output and --save csv alone, not --shard"),
        (["--save=yolo"], "--save has 'yolo', expected some of csv"),
        ([], "--merge : no shards"),
    ],
)
def test_merge_takes_no_flags_of_a_run(flags, words, tmp_path):
    """Nor an empty name, as a shell makes of a variable that is not set."""
    folder = tmp_path if flags else ""
    done = run_captured("infer", f"--merge={folder}", *flags)
    assert words in error_line(done.returncode, done.stderr)


@pytest.mark.slow
def test_sigterm_ends_with_the_code_that_says_again(untrained, pictures, tmp_path, cache):
    output = tmp_path / "out"
    names = (pictures / "list.txt").read_text().splitlines()
    command = ("infer", "--workdir", untrained.workdir, "--output", output, "--score_threshold=0")
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(names * 40))
    process = start(*command, f"--input=@{listed}", "--shard=0/1", cache=cache)
    while not _has_begun(output) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=100)
    assert process.returncode == os.EX_TEMPFAIL, log
    assert log.count("stopped early: the same command starts the shard again") == 1
    assert not list(output.iterdir())


def _has_begun(output: Path) -> bool:
    return any(path.stat().st_size for path in output.glob(".*.tmp"))
