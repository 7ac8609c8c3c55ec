"""One small run through every command: what each leaves behind, and how a run is taken up again."""

import json
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.evaluation.coco import METRIC_NAMES
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.video.reader import Video
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.commands.command import (
    RECIPE,
    STEPS,
    check_done,
    config_flags,
    files_in,
    run,
    run_captured,
    start,
)
from tests.commands.conftest import DAMAGED
from tests.commands.small_run import RECIPE as SMALL_RECIPE
from tests.helpers import assert_tree_close, shared
from tests.video.videos import write_sound, write_video

LOSSES = ("loss/total", "loss/rpn_cls", "loss/rpn_box", "loss/box_cls", "loss/box_reg", "loss/mask")
NUMBERS = [prefix + name for prefix in ("", "mask_") for name in METRIC_NAMES]


def read_json(path: Path):
    return json.loads(path.read_text())


class TestTrain:
    def test_writes_the_config_and_the_classes(self, trained):
        content = read_json(trained.workdir / "config.json")
        assert content["config"]["train"]["steps"] == STEPS
        assert content["config"]["data"]["image_size"] == [64, 64]
        names = [(category["id"], category["name"]) for category in content["categories"]]
        assert names == [(1, "circle"), (2, "square"), (4, "triangle"), (7, "star")]

    def test_writes_a_line_of_metrics_per_step_and_one_per_evaluation(self, trained):
        *steps, last = read_metrics(trained.workdir / "metrics.jsonl")
        assert [record["step"] for record in steps] == [*range(1, STEPS + 1)]
        perf = {"perf/images_per_s", "perf/ms_per_step", "perf/peak_rss_mb"}
        names = {"step", *LOSSES, "lr", "grad_norm", *perf}
        for record in steps:
            assert set(record) == names
            assert sum(record[name] for name in LOSSES[1:]) == pytest.approx(record["loss/total"])
        assert last.keys() == {"step", "ap/box", "ap/mask", *(f"val_{name}" for name in LOSSES)}
        assert last["step"] == STEPS

    def test_writes_tensorboard_events(self, trained):
        events = list(trained.workdir.glob("events.out.tfevents.*"))
        assert len(events) == 1
        content = events[0].read_bytes()
        for name in ("loss/total", "ap/box", "ap_class/box/", "val_loss/mask", "000000.jpg"):
            assert name.encode() in content, f"no {name} in the events"

    def test_keeps_the_last_two_checkpoints(self, trained):
        assert saved_steps(trained.workdir) == [16, 20]

    def test_writes_the_evaluation(self, trained):
        folder = trained.workdir / "eval" / str(STEPS)
        metrics = read_json(folder / "metrics.json")
        assert set(metrics) == {*NUMBERS, "per_category"}
        assert set(metrics["per_category"]) == {"circle", "square", "triangle", "star"}
        boxes, masks = (read_json(folder / f"{name}_results.json") for name in ("bbox", "segm"))
        assert boxes and len(boxes) == len(masks)
        assert {entry["category_id"] for entry in boxes} <= {1, 2, 4, 7}
        assert {entry["image_id"] for entry in boxes} <= {1, 2, 3, 4}
        assert all(entry["segmentation"]["size"] == [64, 64] for entry in masks)

    def test_writes_annotated_pictures(self, trained):
        folder = trained.workdir / "eval" / str(STEPS) / "pictures"
        assert sorted(path.name for path in folder.iterdir()) == ["000000.jpg", "000001.jpg"]
        for path in folder.iterdir():
            height, width = decode_image(path).shape[:2]
            assert height >= 64 and width >= 128, "ground truth and detections, side by side"
        assert f"annotated images: {folder}" in trained.log

    def test_says_how_far_it_is_and_ends_with_the_coco_table(self, trained):
        assert re.search(rf"step 4 of {STEPS}  0:\d\d:\d\d left  loss [\d.]+ \(", trained.log)
        assert "compiling the training step for images of 64 x 64 ..." in trained.log
        assert "compiling the detector for images of 64 x 64 ..." in trained.log
        assert "images/s" in trained.log and "left" in trained.log
        assert "first step done after" in trained.log
        assert "a step takes 2 images: 2 devices, 1 at a time on each" in trained.log
        assert "AP       IoU 0.50:0.95" in trained.log

    def test_leaves_a_report_and_says_what_comes_next(self, trained):
        page = (trained.workdir / "report.html").read_text()
        assert "Score threshold" in page and "Total loss" in page
        assert f"\nreport: {trained.workdir / 'report.html'}\n" in trained.log
        following = trained.log.partition("\nnext:\n")[2].splitlines()[:3]
        commands = [shlex.split(line) for line in following]
        assert commands[0][-2:] == ["--logdir", str(trained.workdir)]
        assert [command[2] for command in commands[1:]] == [
            "mask_rcnn_jax.infer",
            "mask_rcnn_jax.export",
        ]
        assert Path(commands[1][commands[1].index("--input") + 1]).is_file()

    @pytest.mark.slow
    def test_what_comes_next_works_as_it_is_printed(self, trained, tmp_path, cache):
        workdir = tmp_path / "run"
        shutil.copytree(trained.workdir, workdir)
        for line in trained.log.partition("\nnext:\n")[2].splitlines()[1:3]:
            _, _, module, *arguments = shlex.split(line.replace(str(trained.workdir), str(workdir)))
            check_done(run(module.removeprefix("mask_rcnn_jax."), *arguments, cache=cache))
        assert (workdir / "infer" / "detections.json").is_file()
        assert (workdir / "export" / "manifest.json").is_file()

    def test_skips_and_counts_truncated_images(self, trained):
        for name in DAMAGED:
            assert trained.log.count(f"skipped {name}") == 1
        assert "2 images could not be decoded and were skipped" in trained.log

    def test_again_has_nothing_to_do_and_changes_nothing(self, trained):
        before = files_in(trained.workdir)
        done = check_done(run_captured("train", *trained.flags, "--workdir", trained.workdir))
        assert f"nothing to do: {trained.workdir} is finished at step {STEPS}" in done.stderr
        assert files_in(trained.workdir) == before

    @pytest.mark.parametrize(
        "sent, exit_code", [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)]
    )
    @pytest.mark.slow
    def test_a_stopped_run_ends_like_one_that_was_not(
        self, sent, exit_code, trained, tmp_path, cache
    ):
        """Stopped once its first checkpoint is there; then the same command again."""
        workdir = tmp_path / "run"
        command = ("train", *trained.flags, "--workdir", workdir)
        log = stop_at_first_checkpoint(command, workdir, sent, exit_code, tmp_path / "log", cache)
        stopped_at = max(saved_steps(workdir))
        if sent == signal.SIGTERM:
            assert f"stopped by SIGTERM, saved step {stopped_at} in {workdir} (exit code 75" in log
            assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == stopped_at

        done = check_done(run(*command, cache=cache))
        assert f"resuming at step {stopped_at} of {STEPS}" in done.stderr
        series, expected = (
            [
                {name: value for name, value in record.items() if not name.startswith("perf/")}
                for record in read_metrics(folder / "metrics.jsonl")
            ]
            for folder in (workdir, trained.workdir)
        )
        assert series == expected
        assert_tree_close(load_checkpoint(workdir), load_checkpoint(trained.workdir))


def saved_steps(workdir: Path) -> list[int]:
    """The steps of the finished checkpoints; one that is still being written has another name."""
    names = (path.name for path in (workdir / "checkpoints").iterdir())
    return sorted(int(name) for name in names if name.isdigit())


def stop_at_first_checkpoint(command, workdir, sent, exit_code, log, cache) -> str:
    """Start the command, send it a signal in the middle of training; returns what it said."""
    with open(log, "w") as output:
        process = start(*command, cache=cache, output=output)
        try:
            deadline = time.monotonic() + 300
            while not (workdir / "checkpoints" / "4").exists():
                assert process.poll() is None, f"ended before its signal:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"no checkpoint:\n{log.read_text()}"
                time.sleep(0.01)
            process.send_signal(sent)
            assert process.wait(300) == exit_code, log.read_text()
        finally:
            process.kill()
            process.wait()
    text = log.read_text()
    assert "Traceback" not in text, text
    assert not (workdir / "checkpoints" / str(STEPS)).exists(), "ended before its signal came"
    return text


class TestEvaluate:
    @pytest.mark.parametrize(
        "checkpoint", ["", pytest.param("checkpoints/20", marks=pytest.mark.slow)]
    )
    def test_scores_the_run_as_its_training_did(self, checkpoint, trained, tmp_path):
        before = files_in(trained.workdir)
        source = "--weights" if checkpoint else "--workdir"
        arguments = [source, trained.workdir / checkpoint, "--output", tmp_path / "out"]
        done = check_done(run_captured("evaluate", *trained.flags, *arguments, "--report"))
        assert "AP       IoU 0.50:0.95" in done.stdout and "star" in done.stdout
        written = {name for name in files_in(tmp_path / "out")}
        results = {"bbox_results.json", "segm_results.json", "metrics.json"}
        assert written == {*results, "report.html"}
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert f"Evaluation of {trained.workdir}, step {STEPS}" in page
        assert page.count("<polyline") >= 20 + len(LOSSES)  # precision and recall, curves of losses
        for name in results:
            expected = read_json(trained.workdir / "eval" / str(STEPS) / name)
            assert read_json(tmp_path / "out" / name) == expected, name
        assert files_in(trained.workdir) == before

    @pytest.mark.parametrize("kind, prefix", [("bbox", ""), ("segm", "mask_")])
    def test_scores_a_results_file(self, kind, prefix, trained, tmp_path):
        """With the results of the run, and with the ground truth as results."""
        folder = trained.workdir / "eval" / str(STEPS)
        arguments = ["--results", folder / f"{kind}_results.json", "--output", tmp_path / "out"]
        check_done(run_captured("evaluate", *trained.flags, *arguments))
        expected = read_json(folder / "metrics.json")
        metrics = read_json(tmp_path / "out" / "metrics.json")
        assert set(metrics) == {*(prefix + name for name in METRIC_NAMES), "per_category"}
        assert all(metrics[name] == expected[name] for name in metrics if name != "per_category")

    @pytest.mark.parametrize("kind, ap", [("bbox", "0.505"), ("segm", "0.320")])
    def test_scores_published_results(self, kind, ap):
        folder = shared("data/eval_oracle")
        truth = {"data.val_json": str(folder / "instances_val2014_100.json")}
        results = folder / f"instances_val2014_fake{kind}100_results.json"
        done = check_done(run_captured("evaluate", *config_flags(truth), "--results", results))
        row = next(line for line in done.stdout.splitlines() if line.startswith("AP "))
        assert row.split()[-1] == ap


@pytest.fixture(scope="module")
def inferred(trained, tmp_path_factory):
    """`infer` on a folder, a glob and a file; one of five pictures and one video are damaged."""
    folder = tmp_path_factory.mktemp("infer")
    shutil.copytree(trained.data_dir / "val", folder / "photos")
    (folder / "photos" / "broken.jpg").write_bytes(b"no picture")
    (folder / "photos" / "notes.txt").write_text("no picture either")
    write_video(folder / "photos" / "clip.avi", 8, "mpeg4", rate=30)
    write_sound(folder / "photos" / "sound.mp4")
    (folder / "more").mkdir()
    (folder / "clips" / "day").mkdir(parents=True)
    write_video(folder / "clips" / "day" / "a.mp4", 2)
    wide = np.random.default_rng(0).integers(0, 256, (50, 130, 3), dtype=np.uint8)
    cv2.imwrite(str(folder / "more" / "000000.png"), wide)
    cv2.imwrite(str(folder / "more" / "000000.jpg"), wide)
    inputs = ("photos", "more/*.png", "more/000000.jpg", "clips")
    arguments = [f"--input={folder / path}" for path in inputs]
    output = folder / "out"
    done = run_captured(
        "infer", "--workdir", trained.workdir, *arguments, "--output", output,
        "--score_threshold=0.01", "--batch_size=2", "--stride=2", "--max_frames=3",
        "--save=masks", "--save=csv", "--draw=boxes,masks", "--color_by=class", "--line_width=3",
    )  # fmt: skip
    return folder, output, check_done(done)


class TestInfer:
    def test_writes_one_picture_for_each_that_can_be_read(self, inferred):
        """Small pictures come out enlarged; the proportions stay."""
        folder, output, _ = inferred
        sources = {f"{k:06d}.jpg": folder / "photos" / f"{k:06d}.jpg" for k in range(4)}
        sources["000000_2.png"] = folder / "more" / "000000.png"
        sources["000000_3.jpg"] = folder / "more" / "000000.jpg"
        written = {path.name for path in output.iterdir()}
        lists = {"detections.json", "detections.csv"}
        assert written == {*sources, *lists, "masks", "clip.mp4", "clip.jsonl", "day"}
        masks = {path.name for path in (output / "masks").iterdir()}
        assert masks == {Path(name).stem + ".png" for name in sources}
        for name, source in sources.items():
            height, width = decode_image(source).shape[:2]
            drawn = decode_image(output / name).shape
            assert drawn[0] / drawn[1] == pytest.approx(height / width, rel=0.02), name

    def test_names_and_leaves_out_a_damaged_picture(self, inferred):
        folder, _, done = inferred
        assert f"skipped {folder / 'photos' / 'broken.jpg'}: truncated" in done.stderr
        assert "images: 7 of 7" in done.stderr
        assert f"skipped {folder / 'photos' / 'sound.mp4'}: holds no video" in done.stderr
        assert "2 of 10 inputs skipped" in done.stderr
        assert "frames: 4 of 4" in done.stderr
        assert "--save writes no files of videos" in done.stderr

    def test_writes_a_video_and_a_line_for_each_of_its_frames(self, inferred):
        _, output, _ = inferred
        video = Video(str(output / "clip.mp4"))
        assert video.rate == 15 and len(list(video.frames())) == 3
        lines = [json.loads(line) for line in (output / "clip.jsonl").read_text().splitlines()]
        assert [line["frame"] for line in lines] == [0, 2, 4]
        assert [line["time"] for line in lines] == pytest.approx([0, 2 / 30, 4 / 30], abs=1e-6)
        names = {"circle": 1, "square": 2, "triangle": 4, "star": 7}
        for line in lines:
            assert set(line) == {"file_name", "frame", "time", "detections"}
            assert line["file_name"] == "clip.avi"
            for entry in line["detections"]:
                assert names[entry["category"]] == entry["category_id"]
                assert entry["segmentation"]["size"] == [48, 64]

    def test_a_video_keeps_its_place_below_a_folder(self, inferred):
        _, output, _ = inferred
        assert len(list(Video(str(output / "day" / "a.mp4")).frames())) == 1
        assert json.loads((output / "day" / "a.jsonl").read_text())["file_name"] == "day/a.mp4"

    def test_writes_detections_in_coco_format(self, inferred):
        _, output, _ = inferred
        entries = read_json(output / "detections.json")
        keys = {"file_name", "category", "image_id", "category_id", "score", "bbox", "segmentation"}
        for entry in entries:
            assert set(entry) == keys
            assert entry["category_id"] in (1, 2, 4, 7) and entry["score"] >= 0.01
            if entry["file_name"] == "000000.png":
                assert entry["segmentation"]["size"] == [50, 130]
        names = {entry["file_name"] for entry in entries}
        assert names == {*(f"{k:06d}.jpg" for k in range(4)), "000000.png", "000000_2.jpg"}
        assert (output / "detections.csv").read_text().count("\n") == 1 + len(entries)

    def test_takes_a_checkpoint_and_leaves_out_what_scores_low(self, trained, tmp_path):
        arguments = ["--weights", trained.workdir / "checkpoints" / "16"]
        arguments += ["--input", trained.data_dir / "val", "--output", tmp_path]
        done = check_done(run_captured("infer", *arguments, "--score_threshold=1.0"))
        assert "0 detections in 4 images" in done.stderr
        assert read_json(tmp_path / "detections.json") == []
        assert len(list(tmp_path.glob("*.jpg"))) == 4


@pytest.mark.slow
def test_a_video_that_is_broken_off_can_be_played(trained, tmp_path, cache):
    """SIGTERM, which is handled as Ctrl-C is, and which no shell lets a job ignore."""
    clip = write_video(tmp_path / "clip.mp4", 2000)
    command = ("infer", "--workdir", trained.workdir, "--input", clip, "--output", tmp_path / "out")
    with open(tmp_path / "log", "w") as output:
        process = start(*command, cache=cache, output=output)
        try:
            lines, deadline = tmp_path / "out" / "clip.jsonl", time.monotonic() + 300
            while not (lines.exists() and lines.stat().st_size):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 130, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
    log = (tmp_path / "log").read_text()
    assert "error: interrupted" in log and "Traceback" not in log, log
    count = len(list(Video(str(tmp_path / "out" / "clip.mp4")).frames()))
    assert 0 < count < 2000 and count == len(lines.read_text().splitlines())


class TestLibrary:
    @pytest.mark.parametrize("source", [pytest.param("workdir", marks=pytest.mark.slow), "recipe"])
    def test_predictor_finds_what_infer_finds(self, source, trained, inferred):
        folder, output, _ = inferred
        path, overrides = trained.workdir, {"eval.score_threshold": 0.01}
        if source == "recipe":
            path, overrides = SMALL_RECIPE, trained.overrides | overrides | {"model.num_classes": 4}
        config = mrcnn.load_config(path, overrides=overrides)
        model = mrcnn.build_model(config.model)
        assert isinstance(model, mrcnn.MaskRCNN) and model.box_head.num_classes == 4
        predictor = mrcnn.Predictor(config, mrcnn.load_variables(trained.workdir, config))

        found = predictor(folder / "more" / "000000.png")  # 50 x 130 pixels
        boxes = found.boxes
        assert 0 < len(found) <= 5 and found.masks.shape == (len(found), 50, 130)
        assert (boxes >= 0).all() and (boxes <= [130, 50, 130, 50]).all()
        assert (boxes[:, :2] <= boxes[:, 2:]).all()

        entries = read_json(output / "detections.json")
        entries = [entry for entry in entries if entry["file_name"] == "000000.png"]
        category_ids = np.array([1, 2, 4, 7])[found.classes - 1]
        assert [entry["category_id"] for entry in entries] == category_ids.tolist()
        np.testing.assert_allclose([entry["score"] for entry in entries], found.scores, rtol=1e-5)
        sides = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
        np.testing.assert_allclose([entry["bbox"] for entry in entries], sides, atol=1e-3)

    def test_a_run_is_loaded_in_one_call(self, trained, inferred):
        folder, output, _ = inferred
        picture = folder / "more" / "000000.png"
        predictor = mrcnn.load(trained.workdir, score_threshold=0.01)
        found = predictor(picture)
        assert isinstance(found, mrcnn.Result) and found.path == str(picture)
        entries = read_json(output / "detections.json")
        boxes = [entry["bbox"] for entry in entries if entry["file_name"] == picture.name]
        np.testing.assert_allclose([one["bbox"] for one in found.to_coco()], boxes, atol=1e-3)
        assert {one["name"] for one in predictor.categories} >= set(found.names)
        assert (mrcnn.load(trained.workdir)(picture).scores >= 0.5).all()

    def test_an_entry_that_does_not_exist_is_named(self):
        with pytest.raises(ValueError, match="train.bath_size.*'train.batch_size'"):
            mrcnn.load_config(RECIPE, overrides={"train.bath_size": 4})

    def test_another_class_count_is_said_from_both_sides(self, trained):
        config = mrcnn.load_config(trained.workdir, overrides={"model.num_classes": 9})
        with pytest.raises(ValueError, match="run has 4 classes, expected 9"):
            mrcnn.load_variables(trained.workdir, config)


def test_debug_shows_the_traceback(cache):
    Path("a_file").touch()
    done = run("prepare", "shapes", "--data_dir", "a_file/data", "--debug", cache=cache)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "check_written" in done.stderr
