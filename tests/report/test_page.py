"""The page itself: whole, quiet, harmless and small, whatever it is made of."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.evaluation import coco
from mask_rcnn_jax.report.analysis import analyze
from mask_rcnn_jax.report.browser import MAX_IMAGES
from mask_rcnn_jax.report.error_images import SIDE, draw_error, error_window
from mask_rcnn_jax.report.page import write_report
from mask_rcnn_jax.report.tables import MAX_CONFUSED, confusion_table
from tests.commands.command import RECIPE, error_line, run_inside
from tests.report.report_case import HEIGHT, WIDTH, ground_truth, results_of

VOID = {"meta", "link", "img", "br"}
# Attributes from which a browser would fetch something.
ADDRESSES = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "formaction"}


class Page(HTMLParser):
    """A page's elements, texts and nesting; fails on a tag that is not closed in its place."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.text = text
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [*self._open]))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [*self._open]))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data.strip()))

    def all(self, tag, **wanted):
        """Attributes of all elements of a tag, with these among them."""
        return [
            attrs
            for name, attrs, _ in self.elements
            if name == tag and wanted.items() <= attrs.items()
        ]

    def says(self, words):
        return any(words in text for _, text in self.texts)


def page_of(gt, results, *, picture=None, records=(), title="a model", kinds=("box", "mask")):
    """The page of results {kind: results}; `picture` stands for every file that is asked for."""
    found = []
    pair = [results[kind] if kind in kinds else None for kind in ("box", "mask")]
    coco.score(gt, *pair, callback=lambda evaluation: found.append(analyze(evaluation)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        about = {"Ground truth": "val.json"}
        write_report(path, title, about, found, lambda _: picture, records)
        return Page(path.read_text(encoding="utf-8"))


def errors_of(page):
    """Attributes of the images of errors; the others are on buttons."""
    return [attrs for tag, attrs, above in page.elements if tag == "img" and "button" not in above]


def both(results=results_of):
    return {kind: results(kind) for kind in ("box", "mask")}


def noise(height=HEIGHT, width=WIDTH):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def assert_asks_for_nothing(page):
    for tag, attrs, _ in page.elements:
        for name in ADDRESSES & attrs.keys():
            local = attrs[name].startswith("data:") or (tag == "a" and attrs[name].startswith("#"))
            assert local, f"<{tag} {name}={attrs[name]!r}>"
        assert not [name for name in attrs if name.startswith("on")], f"<{tag}> has a handler"
    for words in ("http:", "https:", "url(", "@import", "//www"):
        assert words not in page.text


@pytest.fixture(scope="module")
def page():
    return page_of(ground_truth(), both(), picture=noise())


class TestPage:
    def test_has_all_sections_and_asks_for_nothing(self, page):
        assert_asks_for_nothing(page)
        links = [attrs["href"] for attrs in page.all("a")]
        assert links == [f"#{attrs['id']}" for attrs in page.all("section") if "id" in attrs]
        names = "curves categories threshold images scores confusion objects misses false-positives"
        assert links == [f"#{name}" for name in names.split()]
        assert len(page.all("script")) == len(page.all("style")) == 1
        assert page.all("meta", name="viewport")

    def test_forbids_all_but_its_own_script(self, page):
        (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
        assert policy["content"].startswith("default-src 'none'; img-src data:;")
        assert "script-src 'sha256-" in policy["content"]

    def test_shows_the_numbers_of_pycocotools(self, page):
        metrics = coco.score(ground_truth(), *both().values())
        shown = [text for tag, text in page.texts if tag == "b"][:6]
        names = ["AP", "AP50", "AP75", "mask_AP", "mask_AP50", "mask_AP75"]
        assert shown == [f"{metrics[name]:.3f}" for name in names]

    def test_can_be_read_by_machines_that_read_aloud(self, page):
        assert page.all("html", lang="en")
        assert all(attrs["alt"] for attrs in page.all("img"))
        assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in page.all("svg"))
        assert all("scope" in attrs for attrs in page.all("th"))
        assert len(page.all("caption")) == len(page.all("table")) == 5

    def test_sorts_by_any_column_of_the_categories(self, page):
        heads = [tag for tag, _, above in page.elements if tag == "button" and "th" in above]
        # Name, objects, AP and AP50 of boxes and of masks; name and seven counts and shares.
        assert len(heads) == 6 + 8
        assert len(page.all("th", **{"aria-sort": "descending"})) == 2
        # Best first; a category without objects is last and has no number.
        rows = [text for tag, text in page.texts if tag == "th" and text in ("cat", "dog", "bird")]
        assert rows[:3] == ["cat", "dog", "bird"]
        assert page.all("td", **{"data-v": ""}) and page.says("-")

    def test_shows_each_error_in_two_images(self, page):
        pictures = errors_of(page)
        assert len(pictures) == 2 * (2 + 2)
        for attrs in pictures:
            kind, data = attrs["src"].split(",", 1)
            assert kind == "data:image/jpeg;base64"
            decoded = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), 1)
            assert max(decoded.shape[:2]) == SIDE
        assert page.all("img", alt="Ground truth around the missed dog in one.jpg")
        assert page.all("img", alt="Predictions around the false positive cat in two.jpg")
        assert page.says("cost 0.80, found with score 0.20 · two.jpg")

    def test_numbers_of_the_confusion_matrix(self, page):
        titles = {attrs["title"] for attrs in page.all("td") if "title" in attrs}
        assert titles == {
            "dog found as dog: 1", "dog found as cat: 1", "cat found as cat: 1", "cat missed: 1",
            "nothing there found as cat: 1",
        }  # fmt: skip

    def test_has_no_training_without_records(self, page):
        assert not page.says("Training")


HOSTILE = "<script>alert('x')</script>"
BREAKING = "\"'><img src=https://x.example/y onerror=alert(1)>&lt;"


def test_names_do_no_harm():
    gt = ground_truth(names=(HOSTILE, BREAKING, "&amp;"), file_names=(BREAKING, HOSTILE))
    results = both()
    records = [{"step": i, f"loss/{BREAKING}": 1.0} for i in range(3)]
    for picture in (noise(), None):
        page = page_of(gt, results, picture=picture, title=HOSTILE + BREAKING, records=records)
        assert len(page.all("script")) == 1
        assert all(attrs["src"].startswith("data:") for attrs in page.all("img"))
        assert not any(name.startswith("on") for _, attrs, _ in page.elements for name in attrs)
        # What was said is said, as text.
        for words in (HOSTILE, BREAKING, "&amp;"):
            assert ("th", words) in page.texts


def test_unreadable_images_are_reported():
    page = page_of(ground_truth(), both(), picture=None)
    assert not page.all("img")
    assert page.says("2 of these images could not be read.")
    assert page.says("The image could not be read.")
    assert page.says("found with score 0.20")


@pytest.mark.parametrize("kinds", [("box",), ("mask",), ("box", "mask")])
@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("found", [True, False])
def test_every_kind_of_nothing_gives_a_page(kinds, truth, found):
    gt = ground_truth() if truth else {**ground_truth(), "annotations": []}
    page = page_of(gt, both() if found else both(lambda kind: []), picture=noise(), kinds=kinds)
    assert_asks_for_nothing(page)
    assert len([text for tag, text in page.texts if tag == "b" and "." in text or text == "-"])
    assert page.says("There are no objects.") == (not truth)
    assert page.says("There are no detections.") == (not found)


def test_no_images_and_no_categories_give_a_page():
    page = page_of({"images": [], "categories": [], "annotations": []}, {"box": [], "mask": []})
    assert page.says("There are no objects.") and page.says("None.")


def test_losses_of_the_run():
    records = [
        {"step": i, "loss/total": 5 / i, "loss/mask": None if i == 3 else 1.0, "lr": 1e-4 * i}
        for i in range(1, 2001)
    ]
    records += [{"step": 2000, "ap/box": 0.5, "val_loss/total": 0.4}, {"step": "x", "lr": 1}]
    page = page_of(ground_truth(), both(), records=records)
    labels = [attrs["aria-label"] for attrs in page.all("svg")]
    assert [label.split(",")[0] for label in labels[6:]] == [
        "Total loss",
        "Masks",
        "Learning rate",
        "AP of boxes (blue) and masks (amber)",
    ]
    lines = [attrs["points"].split() for attrs in page.all("polyline", **{"class": "line"})]
    # Precision over recall has a line for each IoU and type; long curves are thinned.
    assert [len(line) for line in lines] == [101] * 20 + [240] * 3
    assert len(page.all("circle")) == 2  # one point is no line: validation loss and AP
    assert_asks_for_nothing(page)


def test_curves_of_ap_show_what_can_be_compared(tmp_path):
    """AP@K with the last K."""
    aps = [{"step": s, "ap/box": 0.1, f"ap/box_at_{k}": 0.5} for s, k in enumerate((9, 9, 8, 8, 8))]
    records = [{"step": 0, "loss/total": 1.0}, *aps]
    write_report(tmp_path / "r.html", "a run", {}, [], lambda _: None, records)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    charts = [attrs["aria-label"] for attrs in page.all("svg")]
    assert charts[-1].startswith("AP@8 of boxes (blue) and masks (amber)")
    (line,) = page.all("polyline", **{"class": "line"})
    assert len(line["points"].split()) == 3


def test_a_run_without_an_evaluation_has_its_training_alone(tmp_path):
    records = [{"step": i, "loss/total": 5 / i} for i in (1, 2, 3)]
    write_report(tmp_path / "r.html", "a run", {}, [], lambda _: None, records)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert_asks_for_nothing(page)
    assert [attrs["id"] for attrs in page.all("section")] == ["training"]
    assert page.says("Total loss") and not page.says("pycocotools")
    write_report(tmp_path / "r.html", "a run", {}, [], lambda _: None, [])
    assert not Page((tmp_path / "r.html").read_text(encoding="utf-8")).all("section")


@pytest.mark.parametrize("records", [[], [{"step": 1, "lr": 0.1}], [{"step": 1, "loss/a": None}]])
def test_a_run_without_losses_has_no_curves(records):
    assert not page_of(ground_truth(), both(), records=records).says("Training")


@pytest.mark.parametrize(
    "box, height, width, expected",
    [
        ((50, 40, 40, 40), 200, 300, (38, 28, 102, 92)),  # 1.6 times the object
        ((0, 0, 100, 40), 200, 300, (0, 0, 160, 160)),  # moved into the picture
        ((120, 100, 2, 2), 100, 300, (97, 52, 145, 100)),  # 48 pixels at least
        ((500, 500, 4, 4), 1000, 2000, (352, 352, 652, 652)),  # 0.3 of the picture at least
        ((0, 0, 300, 200), 200, 300, (0, 0, 300, 200)),
        ((10, 10, 3, 3), 20, 30, (0, 0, 30, 20)),  # a picture smaller than any window
        ((-1e308, 1.7e308, 1e308, 1.7e308), 200, 300, (0, 0, 300, 200)),
        ((400, -90, 10, 10), 200, 300, (240, 0, 300, 60)),  # outside the picture
    ],
)
def test_window(box, height, width, expected):
    assert error_window(box, height, width) == expected


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_the_error_is_yellow_where_it_is_and_only_there(kind):
    found = []
    pair = (results_of("box"), None) if kind == "box" else (None, results_of("mask"))
    coco.score(ground_truth(), *pair, callback=lambda evaluation: found.append(analyze(evaluation)))
    black = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    for error, yellow_side in ((found[0].misses[0], 0), (found[0].false_positives[0], 1)):
        for side, uri in enumerate(draw_error(black, error)):
            data = np.frombuffer(base64.b64decode(uri.split(",")[1]), np.uint8)
            blue, green, red = cv2.imdecode(data, 1).astype(int).transpose(2, 0, 1)
            yellow = (np.minimum(red, green) > blue + 50).sum()
            assert (yellow > 200) == (side == yellow_side)


def test_many_categories_share_a_row():
    found = []
    gt = ground_truth()
    gt["categories"] += [{"id": i, "name": f"other {i}"} for i in range(8, 8 + 2 * MAX_CONFUSED)]
    coco.score(gt, results_of("box"), None, callback=lambda one: found.append(analyze(one)))
    table = Page(confusion_table(found[0]))
    # A column for each category kept, the others, "missed"; the names of as many rows.
    assert len(table.all("th", scope="col")) == len(table.all("th", scope="row"))
    assert len(table.all("th", scope="col")) == MAX_CONFUSED + 1
    assert ("th", "others") in table.texts and ("th", "cat") in table.texts
    assert table.all("td", title="dog found as cat: 1")


def large_set(num_images, num_categories):
    """Ground truth and results of boxes: two objects in each image, most of them found, some of
    them as something else too."""
    rng = np.random.default_rng(0)
    gt = {
        "images": [
            {"id": i, "height": 480, "width": 640, "file_name": f"{i:012d}.jpg"}
            for i in range(num_images)
        ],
        "categories": [{"id": k, "name": f"category {k}"} for k in range(num_categories)],
        "annotations": [],
    }
    results = []
    for i in range(num_images):
        for _ in range(2):
            corner, size = rng.integers(0, 300, 2), rng.integers(20, 150, 2)
            annotation = {
                "image_id": i,
                "category_id": int(rng.integers(num_categories)),
                "bbox": [*corner.tolist(), *size.tolist()],
            }
            gt["annotations"].append(annotation)
            if rng.uniform() < 0.3:
                continue
            results.append({**annotation, "score": float(rng.uniform())})
            if rng.uniform() < 0.5:  # of any category
                wrong = int(rng.integers(num_categories))
                results.append({**results[-1], "category_id": wrong, "score": float(rng.uniform())})
    return gt, results


@pytest.mark.slow
def test_5000_images_of_80_categories_stay_under_20_mb():
    gt, results = large_set(5000, 80)
    # Noise is the most that a JPEG can weigh.
    page = page_of(gt, {"box": results}, picture=noise(480, 640), kinds=("box",))
    assert len(errors_of(page)) == 64 and len(page.all("img")) == 64 + MAX_IMAGES
    size = len(page.text.encode())
    pictures = sum(len(attrs["src"]) for attrs in page.all("img"))
    assert size < 20e6
    assert size - pictures < 0.5e6  # tables and charts, of which the confusion matrix is largest


class TestCommand:
    @pytest.fixture
    def flags(self, tmp_path):
        """Flags that name the worked example, the first of its pictures and its results."""
        (tmp_path / "images").mkdir()
        cv2.imwrite(str(tmp_path / "images" / "one.jpg"), noise())
        assert decode_image(tmp_path / "images" / "one.jpg").shape == (HEIGHT, WIDTH, 3)
        gt = ground_truth(file_names=("one.jpg", "half of a pair \ud800.jpg"))
        (tmp_path / "val.json").write_text(json.dumps(gt))
        (tmp_path / "results.json").write_text(json.dumps(results_of("mask")))
        return [
            f"--config={RECIPE}",
            f"--config.data.val_json={tmp_path / 'val.json'}",
            f"--config.data.val_images={tmp_path / 'images'}",
            f"--results={tmp_path / 'results.json'}",
            "--report",
        ]

    def test_writes_the_report_of_a_results_file(self, flags, tmp_path, caplog):
        assert run_inside("evaluate", *flags, "--output", tmp_path / "out") == 0
        page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        assert_asks_for_nothing(page)
        assert page.says(f"Evaluation of {tmp_path / 'results.json'}")
        assert len(errors_of(page)) == 4  # a miss and a false positive in the first image
        assert page.says("1 of these images could not be read.")
        assert "1 images could not be read, the first: image 2" in caplog.text

    def test_needs_a_folder(self, flags, capfd):
        code = run_inside("evaluate", *flags)
        assert "--report with --results needs --output" in error_line(code, capfd.readouterr().err)
