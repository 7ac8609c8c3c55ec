"""The page about a dataset: right for one image and for many, whatever is in it."""

import base64
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax import memory
from mask_rcnn_jax.config import RECIPES as CONFIGS
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.report import set_examples
from mask_rcnn_jax.report.set_examples import chosen_images, examples
from mask_rcnn_jax.report.set_objects import SetObjects, collect
from mask_rcnn_jax.report.set_page import write_set_page
from tests.browser import chromium
from tests.commands.command import error_line, run_inside
from tests.data.small_set import CATEGORIES, rectangle, write_coco
from tests.report.test_page import Page, assert_asks_for_nothing


def page_of(tmp_path, sizes=((40, 60),), objects=(), **replaced):
    """The page about a set on disk, and the suggestions for quickstart."""
    files = write_coco(tmp_path, sizes, objects, **replaced)
    path = tmp_path / "out" / "stats.html"
    advice = write_set_page(path, *files, load_config("quickstart"))
    page = Page(path.read_text(encoding="utf-8"))
    assert_asks_for_nothing(page)
    return page, advice


def cells_of(page):
    """Texts of the cells of all tables, in order."""
    return [text for tag, text in page.texts if tag in ("td", "th") and text]


def bars_of(page, label):
    """Titles of the bars in the chart with a label."""
    charts = {attrs["aria-label"]: n for n, attrs in enumerate(page.all("svg"))}
    chart = page.text.split("<svg ")[1 + charts[label]].split("</svg>")[0]
    return re.findall("<title>(.*?)</title>", chart)[1:]  # the first is that of the chart


OBJECTS = [
    *(rectangle(5 * n, 5, 8, 16, image_id=2) for n in range(4)),
    rectangle(10, 10, 40, 40, category_id=7),
    rectangle(100, 10, 100, 150, category_id=3),
    rectangle(5, 5, 30, 40, iscrowd=1),
    rectangle(5, 5, 0, 9),  # without area: left out
]
SIZES = [(200, 300), (40, 60), (50, 50)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("set"), SIZES, OBJECTS)[0]


class TestPage:
    def test_has_all_sections(self, page):
        links = [attrs["href"] for attrs in page.all("a")]
        assert links == ["#suggestions", "#images", "#objects", "#classes", "#examples"]
        assert [attrs["id"] for attrs in page.all("section") if "id" in attrs] == [
            link[1:] for link in links
        ]
        assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in page.all("svg"))
        assert all(attrs["alt"] for attrs in page.all("img"))

    def test_counts_what_is_there(self, page):
        numbers = [text for tag, text in page.texts if tag == "b"][:9]
        assert numbers == ["3", "1", "2", "6", "2.0", "4", "67%", "17%", "17%"]
        facts = [text for tag, text in page.texts if tag == "dd"]
        assert facts[1:] == ["50 × 60", "1", "1"]  # usual size, crowds, left out

    def test_draws_what_is_there(self, page):
        assert bars_of(page, "Objects per image") == [
            "0 objects: 1",
            "2 objects: 1",
            "4 objects: 1",
        ]
        sides = bars_of(page, "Side of objects in pixels of the image")
        assert [title.rpartition(": ")[2] for title in sides] == ["4", "1", "1"]
        assert sides[0].startswith("11.3 to 13.5 px")  # the square root of 128
        sizes = bars_of(page, "Image sizes")
        assert len(sizes) == 3 and sizes[-1].endswith(": 1")
        ratios = bars_of(page, "Height to width of boxes")
        assert [title.rpartition(": ")[2] for title in ratios] == ["1", "1", "4"]

    def test_tables_have_every_class(self, page):
        cells = cells_of(page)
        start = cells.index("cat")
        assert cells[start : start + 6] == ["cat", "5", "0.833", "2", "1", "11"]
        assert cells[start + 6 : start + 12] == ["dog", "1", "0.167", "1", "0", "40"]
        assert page.all("td", title="dog with cat: 1")

    def test_flags_can_be_pasted(self, page):
        (flags,) = [text for tag, text in page.texts if tag == "pre"]
        assert all(line.startswith("--config.") for line in flags.split(" \\\n"))


@pytest.mark.parametrize("objects", [(), OBJECTS[4:5], OBJECTS[6:7]])
def test_one_image_gives_a_page(objects, tmp_path):
    """Without objects, with one, with a crowd alone."""
    page, advice = page_of(tmp_path, [(200, 300)], objects)
    assert page.says("There are no objects.") == (objects != OBJECTS[4:5])
    assert len(page.all("img")) == 1
    assert not re.search(r"\bnan\b", page.text)
    assert bool(advice.flags) == (objects == OBJECTS[4:5])


def test_names_cannot_become_elements(tmp_path):
    names = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>']
    classes = [entry | {"name": name} for entry, name in zip(CATEGORIES, names, strict=True)]
    page, _ = page_of(tmp_path, SIZES, OBJECTS, categories=classes)
    assert len(page.all("script")) == 1 and page.says(names[0]) and page.says(names[1])


def test_images_that_cannot_be_read_are_said(tmp_path):
    files = write_coco(tmp_path, SIZES, OBJECTS)
    (files[1] / "001.png").write_bytes(b"no image")
    path = tmp_path / "stats.html"
    write_set_page(path, *files, load_config("quickstart"))
    page = Page(path.read_text(encoding="utf-8"))
    assert page.says("The image could not be read.") and len(page.all("img")) == 1


def objects_with(pairs, num_images):
    """Objects of which only image and class matter."""
    images, classes = np.array(sorted(pairs), int).reshape(-1, 2).T
    ones, none = np.ones(len(images)), np.zeros((0, 2), int)
    sizes = np.full((num_images, 2), 100)
    return SetObjects(sizes, images, classes, np.ones((len(images), 4)), ones, none)


def test_examples_show_every_class_rare_ones_first():
    """Class 1 in all images, class 2 in the images 40 and 41, class 3 in the last, with class 2."""
    pairs = [(i, 1) for i in range(99)] + [(40, 2), (41, 2), (99, 2), (99, 3)]
    chosen = chosen_images(objects_with(pairs, 100))
    assert chosen[0] == 99  # of class 3, and of class 2
    # Four of each, if there are; the images of class 2 have class 1, too.
    assert set(chosen) == {99, 0, 40, 41, 98}
    assert chosen_images(objects_with([], 2)) == [0, 1]
    many = [(i, i % 100 + 1) for i in range(1000)]
    assert len(set(chosen_images(objects_with(many, 1000)))) == set_examples.MAX_SHOWN
    one = chosen_images(objects_with([(i, 1) for i in range(111)], 111))
    assert one == list(range(0, 111, 10))  # spread over the set


def test_an_example_shows_its_objects(tmp_path):
    dataset = load_coco(*write_coco(tmp_path, [(200, 300)], [rectangle(30, 20, 150, 150)]))
    (example,) = examples(dataset, collect(dataset.images))
    assert example.classes == [("cat", 1)] and example.size == (200, 300)
    image = cv2.imdecode(np.frombuffer(base64.b64decode(example.uri.split(",")[1]), np.uint8), 1)
    assert image.shape == (267, 400, 3)
    inside, outside = image[80:200, 60:220], image[80:200, 260:390]
    assert inside.max(axis=2).min() > 40 and outside.max() < 20


def test_examples_stop_before_the_page_grows_large(tmp_path, monkeypatch):
    dataset = load_coco(*write_coco(tmp_path, [(90, 90)] * 9, [rectangle(3, 2, 50, 50)]))
    objects = objects_with([(i, 1 + i) for i in range(9)], 9)
    sizes = [len(example.uri) for example in examples(dataset, objects)]
    monkeypatch.setattr(set_examples, "MAX_BYTES", sum(sizes[:4]))
    assert len(sizes) == 9 and len(examples(dataset, objects)) == 4


class TestCommand:
    def test_writes_the_page_and_prints_flags(self, tmp_path, capsys):
        json_path, image_dir = write_coco(tmp_path, SIZES, OBJECTS)
        given = ["stats", "--json", json_path, "--images", image_dir]
        path = tmp_path / "new" / "stats.html"
        code = run_inside("prepare", *given, "--output", path, "--config=quickstart")
        said = capsys.readouterr().out
        assert code == 0 and path.is_file()
        assert "data.max_instances: 20, as in the recipe. An image has up to 4 objects" in said
        assert "\n--config.data.image_size=" in said or " \\\n--config" in said
        assert said.splitlines()[-1].startswith(f"{path}: ")

    def test_without_a_recipe_it_is_that_for_own_data(self, tmp_path, capsys, monkeypatch):
        json_path, image_dir = write_coco(tmp_path, SIZES, OBJECTS)
        given = ["stats", "--json", json_path, "--images", image_dir]
        monkeypatch.chdir(tmp_path)
        assert run_inside("prepare", *given) == 0
        assert "data.image_size: (800, 1333) -> " in capsys.readouterr().out
        assert (tmp_path / "stats.html").exists()

    @pytest.mark.parametrize("given, words", [
        (["--images=."], "prepare stats needs --json and --images"),
        (["--json=a.json", "--images=.", "--output=a.png"], "expected an .html or a .py to write"),
        (["--json=a.json", "--json=b.json", "--images=."], "prepare stats needs --json and --ima"),
        (
            ["--json=a.json", "--images=.", "--output=a.py", f"--config={CONFIGS}/coco.py"],
            "/coco.py, expected the name of a recipe",
        ),
        (["--json=gone.json", "--images=.", "--output=a.html"], "no annotation file 'gone.json'"),
    ])  # fmt: skip
    def test_what_is_missing_is_said(self, given, words, capsys):
        code = run_inside("prepare", "stats", *given)
        assert words in error_line(code, capsys.readouterr().err)

    @pytest.mark.parametrize("side, count, start", [(30, 3, "finetune"), (4, 150, "dense")])
    def test_writes_a_recipe_with_reasons(self, side, count, start, tmp_path, monkeypatch, capsys):
        (tmp_path / "mine").mkdir()
        monkeypatch.chdir(tmp_path / "mine")
        places = [(7 * (n % 20), 7 * (n // 20)) for n in range(count)]
        objects = [rectangle(x, y, side, side, image_id=i + 1) for i in range(4) for x, y in places]
        json_path, image_dir = write_coco(tmp_path, [(60, 150)] * 4, objects)
        given = ["stats", "--json", json_path, "--images", image_dir, "--output", "my_recipe.py"]
        monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * 10**9)
        assert run_inside("prepare", *given) == 0
        text, said = Path("my_recipe.py").read_text(), capsys.readouterr().out
        assert f"config = {start}.get_config()" in text
        config, plain = load_config("my_recipe.py"), load_config(start)
        assert config.data.train_json == str(json_path) and config.data.val_json == ""
        assert "# Nothing is evaluated; `prepare split --val 0.2`" in text
        assert config.train.images_per_device == 1 and "GB, 2.0 are free here" in said
        assert config.data.image_size != plain.data.image_size
        assert config.data.max_instances == (20 if start == "finetune" else 180)
        for line in text.splitlines():
            assert len(line) < 100 or "config." in line

    def test_a_machine_that_is_too_small_is_said(self, tmp_path, monkeypatch, capsys):
        json_path, image_dir = write_coco(tmp_path, SIZES, OBJECTS)
        monkeypatch.setattr(memory, "available_bytes", lambda device: 10**8)
        given = ["--json", json_path, "--images", image_dir, "--output", tmp_path / "mine.py"]
        assert run_inside("prepare", "stats", *given) == 0
        said = capsys.readouterr().out
        assert "GB, 0.1 are free here. No smaller batch or size would fit" in said
        assert load_config(tmp_path / "mine.py").train.images_per_device == 0

    def test_an_absent_image_is_one_line(self, tmp_path, capsys):
        json_path, image_dir = write_coco(tmp_path, SIZES, OBJECTS)
        (image_dir / "002.png").unlink()
        given = ["--json", json_path, "--images", image_dir, "--output", tmp_path / "a.html"]
        code = run_inside("prepare", "stats", *given)
        assert "image '002.png' is listed but not in" in error_line(code, capsys.readouterr().err)


@pytest.mark.slow
def test_in_a_browser(tmp_path):
    """At both widths: no message in the console, no request, and nothing wider than the view."""
    classes = [{"id": i, "name": f"a class with a long name {i}"} for i in range(1, 31)]
    objects = [
        rectangle(i, i, 9 + i, 9 + i, image_id=i % 3 + 1, category_id=i % 30 + 1) for i in range(90)
    ]
    files = write_coco(tmp_path, [(200, 300)] * 3, objects, categories=classes)
    path = tmp_path / "stats.html"
    write_set_page(path, *files, load_config("finetune"))
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 390):
            browser.open(path.as_uri(), width)
            assert browser.complaints() == [] and browser.requests() == []
            assert browser.run("document.documentElement.scrollWidth") <= width
            browser.run("document.querySelector('table.sortable button').click()")
            first = "document.querySelector('table.sortable tbody th').textContent"
            assert browser.run(first) == "a class with a long name 1"


@pytest.mark.slow
def test_a_large_set(tmp_path):
    """All numbers of a large set are exact; the page stays small."""
    count, per_image = 20_000, 8
    rng = np.random.default_rng(0)
    x, y, w, h = rng.uniform((0, 0, 10, 10), (300, 200, 200, 200), (count * per_image, 4)).T
    classes = rng.integers(1, 81, len(x)).tolist()
    (tmp_path / "images").mkdir()
    names = [f"{i:06d}.jpg" for i in range(count)]
    cv2.imwrite(str(tmp_path / "images" / names[0]), np.zeros((480, 640, 3), np.uint8))
    for name in names[1:]:
        (tmp_path / "images" / name).symlink_to(names[0])
    boxes = np.stack([x, y, w, h], axis=1).round(2).tolist()
    content = {
        "images": [{"id": i, "file_name": n, "height": 480, "width": 640}
                   for i, n in enumerate(names)],
        "categories": [{"id": k, "name": f"class {k}"} for k in range(1, 81)],
        "annotations": [
            rectangle(*box, image_id=i // per_image, category_id=k, id=i + 1)
            for i, (box, k) in enumerate(zip(boxes, classes, strict=True))
        ],
    }  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(content))
    path = tmp_path / "stats.html"
    write_set_page(
        path, tmp_path / "train.json", tmp_path / "images", load_config("coco_detectron2")
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 3e6
    cells = cells_of(page)
    counted = np.bincount(classes, minlength=81)
    for k in (1, 80):
        assert cells[cells.index(f"class {k}") + 1] == f"{counted[k]:,}"
    assert bars_of(page, "Objects per image") == [f"8 objects: {count:,}"]
