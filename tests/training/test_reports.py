"""The report that a finished run leaves: of its last evaluation, or of its training alone."""

import json

import pytest
from absl import logging

from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.training.reports import write_run_report
from tests.memory_set import ShapeSet


@pytest.fixture
def workdir(tmp_path):
    """Two steps and an evaluation that found a circle."""
    records = [{"step": step, "loss/total": 3.0 / step} for step in (1, 2)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    found = {"image_id": 1, "category_id": 1, "score": 0.5, "bbox": [1, 2, 30, 40]}
    (tmp_path / "eval" / "2").mkdir(parents=True)
    (tmp_path / "eval" / "2" / "bbox_results.json").write_text(json.dumps([found]))
    return tmp_path


def page_of(workdir, dataset, **eval_entries):
    write_run_report(EvalOptions(**eval_entries), workdir, 2, dataset)
    return (workdir / "report.html").read_text()


def test_it_shows_the_last_evaluation_and_the_training(workdir):
    page = page_of(workdir, ShapeSet("val", 4))
    assert f"Training of {workdir}, step 2" in page and "Total loss" in page
    assert "Score threshold" in page and "ShapeSet" in page
    assert "4 of 4 images" in page and "data:image/jpeg" in page
    assert "2 of 2 images" in page_of(workdir, ShapeSet("val", 4), max_images=2)


@pytest.mark.parametrize("why", ["no validation set", "no results", "LVIS's protocol"])
def test_without_an_evaluation_to_show_it_has_the_training_alone(why, workdir):
    dataset = None if why == "no validation set" else ShapeSet("val", 4)
    if why == "no results":
        (workdir / "eval" / "2" / "bbox_results.json").unlink()
    page = page_of(workdir, dataset, protocol="lvis" if why.startswith("LVIS") else "coco")
    assert "Total loss" in page and "Score threshold" not in page


def test_a_report_that_cannot_be_written_is_no_failure(workdir, caplog):
    (workdir / "eval" / "2" / "bbox_results.json").write_text("[")
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        write_run_report(EvalOptions(), workdir, 2, ShapeSet("val", 4))
    assert "report.html could not be written, the run is whole: JSONDecodeError" in caplog.text
    assert not (workdir / "report.html").exists()
