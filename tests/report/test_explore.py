"""The threshold and the images of the report, as their reader moves and filters them."""

import re

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.evaluation import coco
from mask_rcnn_jax.report.analysis import analyze
from mask_rcnn_jax.report.browser import MAX_IMAGES, MAX_PARTS, UNITS, browsed_images
from mask_rcnn_jax.report.outcomes import Outcome
from mask_rcnn_jax.report.page import write_report
from tests.browser import chromium
from tests.report.report_case import HEIGHT, OBJECTS, WIDTH, ground_truth, results_of
from tests.report.test_page import both, noise, page_of

RECORDS = [{"step": i, "loss/total": 5 / i, "loss/mask": 2 / i, "lr": 1e-4} for i in range(1, 50)]


def outcome(image, score, is_true=False):
    return Outcome({"image_id": image, "bbox": [0, 0, 9, 9], "area": 81}, 0, score, is_true)


def test_half_of_many_images_are_those_with_most_errors():
    images = [{"id": n} for n in range(100)]
    objects = [outcome(n, 0.9) for n in range(100)] + [outcome(n, 0.4) for n in range(60, 76)]
    false = [outcome(n, 0.9) for n in range(60, 76)] + [outcome(99, 0.9), outcome(98, 0.4)]
    chosen = browsed_images(images, objects, false, threshold=0.5)
    places = [one.image["id"] for one in chosen]
    assert len(places) == MAX_IMAGES and places == sorted(places)
    assert set(range(60, 76)) < set(places) and {0, 99} < set(places)
    others = [n for n in places if not 60 <= n < 76]
    assert max(np.diff([n if n < 60 else n - 16 for n in others])) <= 6  # evenly


@pytest.mark.parametrize(("images", "shown"), [(1, 2000), (5, 800), (100, 125)])
def test_few_images_of_many_objects_are_shown_with_more_of_them(images, shown):
    """4,000 outlines in all; many images share them."""
    objects = [outcome(n, 0.9) for n in range(images) for _ in range(2000)]
    chosen = browsed_images([{"id": n} for n in range(images)], objects, objects, threshold=0.5)
    assert {(len(one.objects), len(one.detections)) for one in chosen} == {(shown, shown)}


def test_the_table_starts_at_the_best_threshold():
    page = page_of(ground_truth(), both(), picture=noise())
    assert [attrs["value"] for attrs in page.all("input", type="range")] == ["75", "75"]
    rows = [attrs for attrs in page.all("tr") if "data-found" in attrs]
    assert len(rows) == 4 and all(attrs["data-found"].count(",") == 100 for attrs in rows)
    told = [text for tag, text in page.texts if tag in ("td", "th")]
    start = len(told) - told[::-1].index("All") - 1
    assert told[start + 1 : start + 8] == ["4", "2", "2", "2", "0.500", "0.500", "0.500"]


def test_outlines_lie_on_their_objects():
    """Of boxes exactly, of masks to the tolerance; coordinates are thousandths of the image."""
    for kinds in (("box",), ("mask",)):
        page = page_of(ground_truth(), both(), picture=noise(), kinds=kinds)
        shapes = [
            attrs["d"] for tag, attrs, above in page.elements if tag == "path" and "g" in above
        ]
        extents = set()
        for path in shapes:
            if kinds == ("box",):
                x, y, width, height = map(
                    int, re.fullmatch(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path).groups()
                )
                extents.add((x, y, x + width, y + height))
            else:
                points = np.array(re.findall(r"(-?\d+) (-?\d+)", path), int)
                extents.add((*points.min(axis=0).tolist(), *points.max(axis=0).tolist()))
        unit = UNITS / max(HEIGHT, WIDTH)
        for _, _, x, y, side in OBJECTS:
            expected = np.array([x, y, x + side, y + side]) * unit
            distance = min(np.abs(np.array(extent) - expected).max() for extent in extents)
            assert distance <= (1 if kinds == ("box",) else unit), (x, y, side, extents)


def test_holes_are_outlined_and_an_empty_mask_is_not():
    from pycocotools import mask as coco_mask

    from mask_rcnn_jax.report.browser import _mask_path

    mask = np.zeros((50, 60), np.uint8, order="F")
    assert _mask_path(coco_mask.encode(mask), 1.0) == ""
    mask[10:40, 10:40] = 1
    mask[20:30, 20:30] = 0
    assert _mask_path(coco_mask.encode(mask), 1.0).count("M") == 2
    mask[:, :] = 0
    mask[::2, ::2] = 1  # 750 parts
    assert _mask_path(coco_mask.encode(mask), 1.0).count("M") == MAX_PARTS


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two images with the worked example's objects."""
    folder, found = tmp_path_factory.mktemp("report"), []
    image = cv2.GaussianBlur(noise(), (0, 0), 4)
    coco.score(
        ground_truth(), results_of("box"), results_of("mask"),
        callback=lambda evaluation: found.append(analyze(evaluation)),
    )  # fmt: skip
    path = folder / "report.html"
    write_report(path, "A model", {"Ground truth": "v.json"}, found, lambda _: image, RECORDS)
    return path


def move(page, position):
    slider = "document.querySelector('input.threshold')"
    page.run(f"{slider}.value = {position}")
    for name in ("input", "change"):
        page.run(f"{slider}.dispatchEvent(new Event('{name}'))")


def choose(page, control, value):
    page.run(f"document.querySelector('{control}').value = '{value}'")
    page.run(f"document.querySelector('{control}').dispatchEvent(new Event('change'))")


def row(page, name):
    rows = "[...document.querySelectorAll('table.counts tr')].map(row => row.innerText.trim())"
    (line,) = [line.split() for line in page.run(rows) if line.startswith(name)]
    return line[1:]


def shown(page):
    """Caption of each image that can be seen, in order."""
    figures = "[...document.querySelectorAll('.browser figure')]"
    visible = f"{figures}.filter(one => one.checkVisibility())"
    return page.run(f"{visible}.map(one => one.querySelector('figcaption').innerText)")


@pytest.mark.slow
def test_in_a_browser(report, tmp_path):
    with chromium(tmp_path / "profile") as page:
        for width in (1280, 390):
            page.open(report.as_uri(), width)
            assert page.complaints() == [] and page.requests() == []
            assert page.run("document.documentElement.scrollWidth") <= width
            assert row(page, "cat") == ["2", "1", "1", "2", "0.333", "0.500", "0.400"]
            page.screenshot(tmp_path / f"{width}.png")  # to look at
            picture = cv2.imread(str(tmp_path / f"{width}.png"))
            assert picture.shape[1] == width and picture.shape[0] > 2000 and picture.std() > 10
            assert shown(page) == ["one.jpg 1 found, 1 missed, 1 false",
                                   "two.jpg 1 found, 1 missed, 1 false"]  # fmt: skip
            move(page, 20)
            assert row(page, "cat") == ["2", "2", "0", "5", "0.286", "1.000", "0.444"]
            assert row(page, "All") == ["4", "3", "1", "6", "0.333", "0.750", "0.462"]
            assert page.run("document.querySelector('output').innerText") == "0.20"
            assert shown(page) == ["one.jpg 1 found, 1 missed, 4 false",
                                   "two.jpg 2 found, 0 missed, 2 false"]  # fmt: skip
            choose(page, "select.order", "missed")
            choose(page, "select.category", 1)
            assert shown(page) == ["two.jpg 0 found, 0 missed, 1 false"]
            outlines = "document.querySelectorAll('.browser g:not([hidden])').length"
            assert page.run(outlines) == 1
            move(page, 61)
            assert shown(page) == []
            choose(page, "select.category", "")
            move(page, 100)
            assert row(page, "All") == ["4", "0", "4", "0", "-", "0.000", "0.000"]
            page.run("document.querySelector('button.frame').click()")
            frame = "document.querySelector('button.frame')"
            assert page.run(f"{frame}.getAttribute('aria-expanded')") == "true"
            assert page.run(f"{frame}.getBoundingClientRect().width") > min(width - 60, 1000)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.complaints() == [] and page.requests() == []
