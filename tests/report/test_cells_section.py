"""Microscopy's measures on the page."""

import json

import numpy as np
import pytest

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.training.reports import write_run_report
from tests.commands.command import RECIPE, run_inside
from tests.report.report_case import ground_truth, results_of
from tests.report.test_page import Page, assert_asks_for_nothing

THRESHOLDS = [f"{threshold:.2f}" for threshold in np.arange(0.5, 0.96, 0.05)]


def rows_of(page: Page, caption: str) -> dict[str, list[str]]:
    """The cells of a table by the head of their row."""
    start = page.texts.index(("caption", caption))
    end = next(i for i, (_, t) in enumerate(page.texts) if i > start + 1 and t.startswith("Cat"))
    rows: dict[str, list[str]] = {}
    for tag, text in page.texts[start:end]:
        if tag == "th":
            rows[name := text] = []
        elif tag == "td":
            rows[name].append(text)
    return rows


@pytest.fixture
def files(tmp_path):
    content = {"val.json": ground_truth(), "segm_results.json": results_of("mask")}
    content["bbox_results.json"] = results_of("box")
    for name, value in content.items():
        (tmp_path / name).write_text(json.dumps(value))
    return tmp_path


@pytest.mark.parametrize("kind", ["mask", "box"])
def test_the_page_of_results_has_the_measures_of_cells(kind, files):
    """Of five detections three are true, two of two in the first image; four objects. A sixth is in
    the crowd."""
    results = files / f"{'segm' if kind == 'mask' else 'bbox'}_results.json"
    flags = [f"--config={RECIPE}", f"--config.data.val_json={files / 'val.json'}"]
    flags += ["--config.eval.protocol=cells", f"--results={results}", "--report"]
    assert run_inside("evaluate", *flags, "--output", files / "out") == 0
    page = Page((files / "out" / "report.html").read_text(encoding="utf-8"))
    assert_asks_for_nothing(page)
    assert page.all("a", href="#cells") and page.all("section", id="cells")
    rows = rows_of(page, "Measures by IoU threshold")
    assert [*rows][-11:] == [*THRESHOLDS, "Mean"]
    by_hand = "0.600 0.750 0.667 0.500 0.625 1.000 0.667".split()
    assert rows["0.50"] == rows["0.95"] == rows["Mean"] == by_hand
    assert page.says(f"{kind} detections with a score of 0.50 or more")
    found = page.says("Aggregated Jaccard index: 0.")
    assert found == (kind == "mask")
    text = dict.fromkeys(page.texts)
    assert ("caption", "Measures at IoU 0.50 per category; click a column to sort") in text


def test_other_protocols_have_none(files):
    flags = [f"--config={RECIPE}", f"--config.data.val_json={files / 'val.json'}", "--report"]
    flags += [f"--results={files / 'segm_results.json'}", "--output", files / "out"]
    assert run_inside("evaluate", *flags) == 0
    assert "Microscopy" not in (files / "out" / "report.html").read_text(encoding="utf-8")


def test_the_report_of_a_run_has_them(files):
    (files / "images").mkdir()
    for name in ("one.jpg", "two.jpg"):
        (files / "images" / name).touch()  # cannot be read
    folder = files / "eval" / "3"
    folder.mkdir(parents=True)
    for name in ("bbox_results.json", "segm_results.json"):
        (files / name).rename(folder / name)
    (files / "metrics.jsonl").write_text(json.dumps({"step": 3, "ap/box": 0.5}) + "\n")
    dataset = load_coco(files / "val.json", files / "images")
    write_run_report(EvalOptions(protocol="cells"), files, 3, dataset)
    page = Page((files / "report.html").read_text(encoding="utf-8"))
    assert rows_of(page, "Measures by IoU threshold")["0.50"][2] == "0.667"
