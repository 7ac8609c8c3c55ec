"""What bad input gets: one clear line, exit code 2, and nothing written before it is lost."""

import json
import shutil
import sys

import cv2
import jax
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.commands.command import (
    RECIPE,
    SMALL,
    config_flags,
    data_entries,
    error_line,
    files_in,
    run,
    run_inside,
)
from tests.commands.conftest import cut_off
from tests.data.small_set import CATEGORIES, rectangle, write_coco
from tests.helpers import assert_finite_tree
from tests.video.videos import write_sound


@pytest.fixture(scope="module")
def compilations():
    """A name for everything that XLA compiled in this process so far."""
    names = []

    def note(event: str, _: float, **kwargs) -> None:
        if "backend_compile" in event:
            names.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture
def fails(capsys, compilations):
    """`fails(entry, *arguments)` is the error line of a command that fails before it compiles."""

    def fails(entry, *arguments) -> str:
        before = len(compilations)
        code = run_inside(entry, *arguments)
        line = error_line(code, capsys.readouterr().err)
        assert not compilations[before:], f"compiled before the mistake was found: {line}"
        return line

    return fails


@pytest.fixture
def small_set(tmp_path):
    """A sound set of two pictures: (json, image folder)."""
    annotations = [rectangle(5, 5, 20, 20), rectangle(30, 30, 20, 10)]
    return write_coco(tmp_path, sizes=[(64, 64)] * 2, annotations=annotations)


@pytest.fixture
def sound(small_set):
    """A recipe on that set, for training and validation."""
    return SMALL | data_entries(small_set, small_set)


@pytest.fixture
def workdir(untrained):
    """The workdir of a finished run, in which nothing may change."""
    before = files_in(untrained.workdir)
    yield untrained.workdir
    after = files_in(untrained.workdir)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not changed, "a command that failed changed these files of the workdir"


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# Name of the row: (what is done to a sound json, what the error line must say).
JSON_FAULTS = {
    "no categories key": (lambda c: c.pop("categories"), ["not a COCO json", "'categories'"]),
    "no images key": (lambda c: c.pop("images"), ["not a COCO json", "'images'"]),
    "no annotations key": (lambda c: c.pop("annotations"), ["not a COCO json", "'annotations'"]),
    "image without height": (lambda c: c["images"][1].pop("height"), ["images[1]", "'height'"]),
    "no annotation at all": (lambda c: c["annotations"].clear(), ["'annotations' is empty"]),
    "no image at all": (
        lambda c: (c["images"].clear(), c["annotations"].clear()),
        ["'images' is empty"],
    ),
    "image listed but absent": (
        lambda c: c["images"][1].update(file_name="gone.png"),
        ["'gone.png'", "not in"],
    ),
    "duplicate image id": (lambda c: c["images"][1].update(id=1), ["images", "id 1 ", "2 times"]),
    "duplicate annotation id": (
        lambda c: c["annotations"][1].update(id=1),
        ["annotations", "id 1 ", "2 times"],
    ),
    "duplicate category id": (
        lambda c: c["categories"][1].update(id=7),
        ["categories", "id 7 ", "2 times"],
    ),
    "category id unknown": (
        lambda c: c["annotations"][1].update(category_id=99),
        ["annotation 2", "category_id 99", "not in 'categories'"],
    ),
    "image id unknown": (
        lambda c: c["annotations"][1].update(image_id=99),
        ["annotation 2", "image_id 99", "not in 'images'"],
    ),
}

# The same for the second annotation, on an image of 64 x 64.
ANNOTATION_FAULTS = {
    "box of no width": ({"bbox": [5, 5, 0, 10]}, ["[5, 5, 0, 10]", "no area"]),
    "box of negative height": ({"bbox": [5, 5, 10, -3]}, ["[5, 5, 10, -3]", "no area"]),
    "box with NaN": ({"bbox": [5, float("nan"), 10, 10]}, ["nan", "not a finite number"]),
    "box outside the image": ({"bbox": [70, 5, 10, 10]}, ["outside the image of 64 x 64"]),
    "box of three numbers": ({"bbox": [5, 5, 10]}, ["expected [x, y, width, height]"]),
    "polygon of two points": ({"segmentation": [[5, 5, 9, 9]]}, ["polygon", "three points"]),
    "RLE of another size": (
        {"segmentation": {"size": [32, 64], "counts": [2048]}},
        ["RLE", "32", "64"],
    ),
    "compressed RLE of another size": (
        {"segmentation": {"size": [32, 64], "counts": "PP2"}},
        ["RLE", "32", "64"],
    ),
}


@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_faulty_json(fault, fails, sound, small_set, tmp_path):
    change, words = JSON_FAULTS[fault]
    edit(small_set[0], change)
    line = fails("train", *config_flags(sound), "--workdir", tmp_path / "run")
    for word in [str(small_set[0]), *words]:
        assert word in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", ANNOTATION_FAULTS)
def test_faulty_annotation(fault, fails, sound, small_set, tmp_path):
    """Every line names the annotation, and how to go on without it."""
    replace, words = ANNOTATION_FAULTS[fault]
    edit(small_set[0], lambda content: content["annotations"][1].update(replace))
    line = fails("train", *config_flags(sound), "--workdir", tmp_path / "run")
    for word in [str(small_set[0]), "annotation 2", "data.bad_annotations=skip", *words]:
        assert word in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["no annotation file", "expected a COCO json"]),
        ('{"images": [', ["cannot be read as JSON"]),
        (b"\xff\xd8\xff\xe0", ["cannot be read as JSON"]),
        ('[{"image_id": 1}]', ["not a COCO json", "a list"]),
    ],
    ids=["missing", "cut off", "binary", "results"],
)
def test_unreadable_json(content, words, fails, sound, small_set, tmp_path):
    path = small_set[0]
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = fails("train", *config_flags(sound), "--workdir", tmp_path / "run")
    for word in [str(path), *words]:
        assert word in line


def test_faulty_annotations_may_be_left_out(fails, sound, small_set, tmp_path):
    """With `skip` the same json goes on, here to the next mistake."""
    edit(small_set[0], lambda content: content["annotations"][1].update(bbox=[5, 5, 0, 10]))
    overrides = sound | {"data.bad_annotations": "skip", "model.num_classes": 9}
    line = fails("train", *config_flags(overrides), "--workdir", tmp_path / "run")
    assert "model.num_classes is 9, but the annotations have 2 categories" in line


def test_validation_set_of_other_classes(fails, sound, small_set, tmp_path):
    categories = [CATEGORIES[0], {"id": 3, "name": "horse"}]
    (tmp_path / "val").mkdir()
    val = write_coco(tmp_path / "val", annotations=[rectangle(1, 1, 9, 9)], categories=categories)
    overrides = sound | data_entries(small_set, val)
    line = fails("train", *config_flags(overrides), "--workdir", tmp_path / "run")
    assert str(val[0]) in line and "(3, 'cat')" in line and "(3, 'horse')" in line


# Name of the row: (entries of the config, what the error line must say).
CONFIG_FAULTS = {
    "unknown entry": ({"train.bath_size": 4}, ["did you mean 'train.batch_size'?"]),
    "unknown section": (
        {"tran.batch_size": 4},
        ["'tran.batch_size', did you mean 'train.batch_size' or 'eval.batch_size'?"],
    ),
    "entry of other systems": ({"optim.lr": 1}, ["did you mean 'optim.learning_rate'?"]),
    "entry of another backbone": (
        {"model.backbone.frozen_blocks": 2},
        ["with model.backbone.name=resnet, did you mean 'model.backbone.frozen_stages'?"],
    ),
    "entry of a head that is none": (
        {"model.keypoint_head.num_keypoints": 5},
        ["with model.keypoint_head.name=none; a recipe of yours replaces the whole section"],
    ),
    "entry that a section has not": (
        {"model.rpn.num_classes": 5},
        ["there is no config entry 'model.rpn.num_classes', did you mean 'model.num_classes'?"],
    ),
    "a list of names without quotes": (
        {"data.augment": "horizontal_flip,blur"},
        ["data.augment is 'blur', expected one of"],
    ),
    "a section": (
        {"model.backbone": "resnet101"},
        ["model.backbone is a section, expected one of its entries:", " model.backbone.depth,"],
    ),
    "value of another type": ({"train.batch_size": "four"}, ["train.batch_size", "four"]),
    "batch not for all devices": (
        {"train.batch_size": 3},
        ["train.batch_size is 3", "multiple of the 2 devices"],
    ),
    "no batch": ({"train.batch_size": 0}, ["train.batch_size is 0"]),
    "never log": ({"train.log_every": 0}, ["train.log_every is 0, expected at least 1"]),
    "never evaluate": ({"train.eval_every": -1}, ["train.eval_every is -1, expected at least 0"]),
    "negative workers": ({"data.num_workers": -1}, ["data.num_workers is -1", "at least 0"]),
    "no evaluation batch": ({"eval.batch_size": 0}, ["eval.batch_size is 0"]),
    "no part": ({"optim.accumulate_steps": 0}, ["optim.accumulate_steps is 0"]),
    "parts that leave a rest": (
        {"train.images_per_device": 3},
        ["train.batch_size is 2", "the 2 devices times train.images_per_device=3"],
    ),
    "unknown remat": ({"train.remat": "some"}, ["train.remat is 'some'", "backbone"]),
    "scale below its floor": (
        {"train.precision": "float16", "optim.loss_scale": 0.5},
        ["optim.loss_scale is 0.5", "optim.loss_scale_floor 1.0"],
    ),
    "unknown precision": ({"train.precision": "int8"}, ["train.precision is 'int8'", "float32"]),
    "unknown choice for bad annotations": (
        {"data.bad_annotations": "ignore"},
        ["data.bad_annotations is 'ignore'", "'skip'"],
    ),
    "weights that are not there": (
        {"model.init_from": "yolo11n-seg.pt", "data.train_json": "absent.json"},
        ["model.init_from: yolo11n-seg.pt: no such file or run"],
    ),
    "a run that is not there": ({"model.init_from": "runs/absent"}, ["runs/absent", "checkpoint"]),
    "a name that is nearly right": (
        {"model.init_from": "resnet5"},
        ["model.init_from: resnet5: no such file or run", "did you mean 'resnet50'?"],
    ),
    "weights at an address": (
        {"model.init_from": "nothing://bucket/weights.pth"},
        ["nothing://bucket/weights.pth: Protocol not known: nothing"],
    ),
    "random weights that do not learn": (
        {"model.backbone.frozen_stages": 2, "data.train_json": "absent.json"},
        ["some do not learn (stem, res2 of the backbone): name", "--config.model.init_from=random"],
    ),
    "class count of another set": (
        {"model.num_classes": 80},
        ["model.num_classes is 80", "have 2 categories"],
    ),
    "one side for an image size": (
        {"data.image_size": 512},
        ["data.image_size is (512,), expected tuple[int, int]"],
    ),
    "a size of no multiples": (
        {"data.image_size": (500, 500)},
        ["data.image_size is (500, 500), expected (height, width), both multiples of 64"],
    ),
    "an augmentation of another library": (
        {"data.augment": "HorizontalFlip"},
        ["data.augment is 'HorizontalFlip', expected one of ['brightness',", "'horizontal_flip',"],
    ),
    "epochs in words": ({"train.epochs": "ten"}, ["train.epochs=ten: expected a number, not 'ten"]),
    "a hub's model without its name": (
        {"model.init_from": "hf://owner"},
        ["model.init_from: hf://owner names no model, expected hf://owner/name"],
    ),
    "a pattern that freezes nothing": (
        {"optim.freeze": ("fnp/*",), "model.init_from": "random"},
        ["optim.freeze has 'fnp/*', which matches no parameter; did you mean fpn"],
    ),
    "adapters of a trunk without attention": (
        {"optim.lora.rank": 4, "model.init_from": "random"},
        ["optim.lora.kernels has 'backbone/*/attn', which matches no kernel; "],
    ),
    "a loss that is not there": ({"loss.own": ("no_module_of_mine:loss",)}, ["no_module_of_mine"]),
    "images of another set": (
        {"data.train_images": str(RECIPE.parent)},
        [
            "'001.png' is listed but not in",
            "(and 1 more problems; `python -m mask_rcnn_jax.prepare",
        ],
    ),
    "no such image folder": ({"data.train_images": "nowhere"}, ["no image folder 'nowhere'"]),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_faulty_config(fault, fails, sound, tmp_path):
    entries, words = CONFIG_FAULTS[fault]
    line = fails("train", *config_flags(sound | entries), "--workdir", tmp_path / "run")
    for word in words:
        assert word in line
    assert not (tmp_path / "run").exists()


# Calls of Python, and what the error must say; flags of commands are no answer to them.
CALLS = {
    "value of another type": (
        lambda: mrcnn.load_config("finetune", {"train.steps": "5"}),
        "train.steps is '5', expected int",
    ),
    "entry of other systems": (
        lambda: mrcnn.load_config("finetune", {"optim.lr": 0.1}),
        "there is no config entry 'optim.lr', did you mean 'optim.learning_rate'?",
    ),
    "weights that are not there": (lambda: mrcnn.load("yolov8n-seg.pt"), "no such file or run"),
    "a name that is nearly right": (
        lambda: mrcnn.load("maskrcnn_resnet50_fpn_v2"),
        "no such file or run, and no name of `prepare weights`, did you mean "
        "'maskrcnn_resnet50_fpn_v2_coco'?",
    ),
    "weights without a recipe": (
        lambda: mrcnn.load(RECIPE),
        "is a file of weights, which needs its recipe as well: load(recipe, weights)",
    ),
    "a workdir that is a file": (
        lambda: mrcnn.train("quickstart", RECIPE),
        "is a file, expected a folder",
    ),
    "no workdir": (lambda: mrcnn.train("quickstart", None), "workdir is None, expected a path"),
    "an empty workdir": (lambda: mrcnn.train("quickstart", ""), "workdir is '', expected a path"),
    "no recipe": (lambda: mrcnn.load_config(None), "name_or_path is None, expected the name of a"),
    "overrides as on a command line": (
        lambda: mrcnn.load_config("finetune", ["train.steps=5"]),
        "overrides is ['train.steps=5'], expected a dict, such as {'train.steps': 5}",
    ),
    "an override without a name": (
        lambda: mrcnn.load_config("finetune", {5: 5}),
        "there is no config entry '5'",
    ),
    "a recipe in place of a run": (
        lambda: mrcnn.load(mrcnn.load_config("finetune")),
        "model is Recipe(",
    ),
    "no weights": (lambda: mrcnn.load("finetune", 5), "weights is 5, expected a path"),
    "no variables": (lambda: mrcnn.load_variables(None, "finetune"), "path is None"),
    "nothing to evaluate": (lambda: mrcnn.evaluate(None), "weights is None, expected a path"),
    "an output that is a file": (
        lambda: mrcnn.evaluate("nuclei_resnet10", output=RECIPE),
        "quickstart.py is a file, expected a folder",
    ),
    "no logger": (
        lambda: mrcnn.train("quickstart", "run", loggers=None),
        "loggers has None, expected 'wandb'",
    ),
    "no code to allow": (
        lambda: mrcnn.allow_code([json]).__enter__(),
        "expected modules, packages or functions",
    ),
    "a score in percent": (
        lambda: mrcnn.load_config("finetune").with_score_threshold(50),
        "score_threshold is 50, expected from 0 to 1",
    ),
    "a score in words": (
        lambda: mrcnn.load_config("finetune").with_score_threshold("0.5"),
        "score_threshold is '0.5', expected a number, from 0 to 1",
    ),
    "a batch in words": (
        lambda: mrcnn.Predictor(mrcnn.load_config("finetune"), {"params": {}}, "1"),
        "batch_size is '1', expected a number, at least 1",
    ),
    "a tile in words": (
        lambda: mrcnn.evaluate("nuclei_resnet10", output="out", tile="64"),
        "tile is '64', expected a number, at least 32 pixels",
    ),
    "weights that are no variables": (
        lambda: mrcnn.Predictor(mrcnn.load_config("finetune"), {}),
        "variables has no 'params', expected what load_variables returns",
    ),
    "a shape for a size": (
        lambda: mrcnn.Annotation.from_polygons([[1, 1, 5, 1, 5, 5]], 1, (8, 8, 3)),
        "image_size is (8, 8, 3), expected (height, width)",
    ),
}


@pytest.mark.parametrize("fault", CALLS)
def test_faulty_call(fault):
    call, words = CALLS[fault]
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value) and "--" not in str(error.value).replace(str(RECIPE), "")


RECIPES = {
    "absent": (None, "no recipe or run"),
    "syntax error": ("def get_config(:\n", "invalid syntax"),
    "no get_config": ("x = 1\n", "get_config"),
    "import that fails": ("import nothing_of_that_name\n", "nothing_of_that_name"),
}


@pytest.mark.parametrize("overrides", [[], ["--config.train.steps=3"]], ids=["", "override"])
@pytest.mark.parametrize("fault", RECIPES)
def test_faulty_recipe(fault, overrides, fails, tmp_path):
    content, words = RECIPES[fault]
    recipe = tmp_path / "recipe.py"
    if content:
        recipe.write_text(content)
    line = fails("train", "--config", recipe, *overrides, "--workdir", tmp_path / "run")
    assert "--config" in line and words in line


@pytest.mark.parametrize(
    "entry, arguments, words",
    [
        ("train", ["--workdir=w"], ["--config must have a value"]),
        ("train", ["finetune"], ["--config must have a value, did you mean --config finetune?"]),
        ("train", ["my.py"], ["--config must have a value, did you mean --config my.py?"]),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "data.train_json=x.json"],
            ["'data.train_json=x.json', did you mean --config.data.train_json=x.json?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "imgsz=512"],
            ["unexpected argument 'imgsz=512', did you mean --config.data.image_size=512?"],
        ),
        (
            "infer",
            ["--output=out", "--input=a.jpg", "--weights=nuclei_resnet10", "conf=0.3"],
            ["unexpected argument 'conf=0.3', did you mean --score_threshold=0.3?"],
        ),
        (
            "infer",
            ["a.jpg"],
            ["--input and --output must have a value, did you mean --input a.jpg?"],
        ),
        ("export", ["onnx"], ["must have a value, did you mean --format onnx?"]),
        ("serve", ["nuclei_resnet10"], ["did you mean --weights nuclei_resnet10?"]),
        ("infer", ["hf://a/b"], ["must have a value, did you mean --weights hf://a/b?"]),
        (
            "serve",
            ["runs/mine"],
            ["unexpected argument 'runs/mine', did you mean --workdir runs/m"],
        ),
        (
            "train",
            ["--config=quickstart", "--config.optim.learning_rate=fast"],
            ["optim.learning_rate=fast: expected a number, not 'fast'"],
        ),
        (
            "train",
            ["--config=quickstart", "--config.data.keep_empty=maybe"],
            ["data.keep_empty=maybe: expected true or false, not 'maybe'"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--noconfig.data.keep_emty"],
            ["there is no config entry 'data.keep_emty', did you mean 'data.keep_empty'?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--weights=resnet50"],
            ["'weights', did you mean --config.model.init_from?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--model=yolo11n-seg.pt"],
            ["'model', did you mean --config.model.init_from?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--data=coco.yaml"],
            ["'data', did you mean --config.data.train_json?"],
        ),
        ("train", ["--config=quickstart", "--device=0"], ["'device', did you mean --platform?"]),
        (
            "train",
            ["--config=quickstart", "--batch=4"],
            ["'batch', did you mean --config.train.batch_size?"],
        ),
        (
            "train",
            ["data=y.yaml", "epochs=10"],
            ["--config must have a value, did you mean --config.data.train_json=y.yaml?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--config.data.image_size=512"],
            ["data.image_size is (512,), expected tuple[int, int], such as (512, 512)"],
        ),
        ("infer", ["--model=w.pth"], ["'model', did you mean --weights?"]),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--config.train.loggers=tensorboard"],
            ["train.loggers has 'tensorboard'", "TensorBoard and metrics.jsonl are always on"],
        ),
        ("serve", ["--workdir=w", "--input=i"], ["'input', which infer and prepare have"]),
        ("serve", ["--config=quickstart", "--workdir=w", "--input=i"], ["'input', which infer"]),
        ("export", ["--workdir=w", "--save=csv"], ["'save', which infer has"]),
        ("evaluate", ["--workdir=w", "--port=1"], ["'port', which demo and serve have"]),
        ("infer", ["--workdir=w", "--gpus=8"], ["'gpus', which prepare has"]),
        ("prepare", [], ["prepare needs an action, expected one of shapes, cells,"]),
        ("prepare", ["chek"], ["prepare has no action 'chek', did you mean 'check'?"]),
        ("prepare", ["zzz"], ["prepare has no action 'zzz', expected one of shapes, cells,"]),
        ("train", [*config_flags({}), "--workdri=w"], ["workdri", "Did you mean: workdir"]),
        ("train", ["--config", "--workdir=w"], ["--config", "no recipe or run '--workdir=w'"]),
        ("train", ["--config=", "--workdir=w"], ["--config must have a value"]),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--batch_size=4"],
            ["did you mean --config.train.batch_size or --config.eval.batch_size?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--optim.learning_rate=4"],
            ["did you mean --config.optim.learning_rate?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--learningrate=4"],
            ["did you mean --config.optim.learning_rate?"],
        ),
        (
            "infer",
            ["--weights=w", "--input=i", "--output=o", "--config.eval.paste=integer"],
            ["config.eval.paste", "an entry of --config, which is missing"],
        ),
        (
            "infer",
            ["--workdir=w", "--input=i", "--output=o", "--config.eval.paste=integer"],
            ["w is no workdir of a run: it has no config.json"],
        ),
        (
            "infer",
            ["--artifact=a", "--input=i", "--output=o", "--config.eval.paste=integer"],
            ["--artifact: a holds no exported model: it has no manifest.json"],
        ),
        ("evaluate", ["--results=r"], ["--results needs --config"]),
        (
            "evaluate",
            [*config_flags({}), "--results=r", "--engine=jax"],
            ["--engine is for exported models: it needs --artifact"],
        ),
        (
            "evaluate",
            config_flags({}),
            ["--workdir, --weights, --artifact and --results"],
        ),
        (
            "evaluate",
            [*config_flags({}), "--workdir=w", "--results=r"],
            ["--workdir, --weights, --artifact and --results"],
        ),
        (
            "evaluate",
            [*config_flags({}), "--workdir=nowhere"],
            ["nowhere does not exist and holds no checkpoint"],
        ),
        ("evaluate", ["--weights=some.pth"], ["some.pth is no run", "--config and --output"]),
        (
            "infer",
            ["--weights=some.pth", f"--input={RECIPE}", "--output=out"],
            ["some.pth: no such file or run, and no name of `prepare weights`"],
        ),
        (
            "infer",
            [f"--weights={RECIPE}", f"--input={RECIPE}", "--output=out"],
            [f"{RECIPE} is not a run: it needs a recipe (--config)"],
        ),
        (
            "infer",
            ["--weights=nothing://a/w.pth", f"--input={RECIPE}", "--output=out"],
            ["nothing://a/w.pth: Protocol not known: nothing"],
        ),
        (
            "infer",
            ["--weights=hf://owner", f"--input={RECIPE}", "--output=out"],
            ["hf://owner names no model, expected hf://owner/name or hf://owner/name@revision"],
        ),
        (
            "infer",
            ["--weights=resnet50", f"--input={RECIPE}", "--output=out"],
            ["resnet50 is a backbone, expected a detector; use model.init_from"],
        ),
        (
            "infer",
            ["--workdir=w", "--input=i", "--output=o", "--conf=.3"],
            ["'conf', did you mean --score_threshold?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--resume"],
            ["'resume': the same command, with the same --workdir, resumes a run"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--imgsz=640"],
            ["did you mean --config.data.image_size?"],
        ),
        (
            "train",
            ["--config=quickstart", "--workdir=w", "--config.train.steps=ten"],
            ["train.steps", "expected a whole number, not 'ten'"],
        ),
        (
            "infer",
            [*config_flags({}), "--weights=some.pth", f"--input={RECIPE}", "--output=out"],
            ["some.pth: no such file"],
        ),
        ("evaluate", [*config_flags({}), "--results=nowhere.json"], ["nowhere.json"]),
        # A name brings its recipe.
        ("evaluate", ["--weights=nuclei_resnet10"], ["is no run: it needs --output"]),
        (
            "infer",
            ["--weights=nuclei_resnet10", "--input=i", "--output=o", "--config.eval.batch_size=0"],
            ["eval.batch_size is 0, expected at least 1"],
        ),
        ("infer", ["--workdir=w", "--input=i"], ["--output", "must have a value"]),
        ("infer", ["--workdir=w", "--output=o"], ["--input", "must have a value"]),
        (
            "infer",
            ["--input=i", "--output=o"],
            ["one of --workdir, --weights and --artifact"],
        ),
        (
            "infer",
            ["--workdir=w", "--input=i", "--output=o", "--score_threshold=2"],
            ["score_threshold", "1.0"],
        ),
        ("infer", ["--workdir=w", "--input=nowhere/*.jpg", "--output=o"], ["nowhere/*.jpg"]),
        ("infer", ["--workdir=w", "--input=i", "--output=o", "--stride=0"], ["stride", "0"]),
        ("infer", ["--workdir=w", "--input=i", "--output=o", "--max_frames=-1"], ["max_frames"]),
        ("prepare", ["check", "A", "B"], ["check got 'A B' without a flag", "--json --images"]),
        ("prepare", ["split", "--json=a", "--output=b", "--val=0.2x"], ["no annotation file 'a'"]),
        ("prepare", ["repair", "--json=a", "--output=b"], ["no annotation file 'a'"]),
        (
            "prepare",
            ["convert", "--from=coco", "--input=a", "--output=b"],
            ["--from=coco: value should be one of <labelme|via|yolo|"],
        ),
        (
            "prepare",
            ["convert", "--from=yolo", "--input=data.yaml", "--output=b"],
            ["no file or folder 'data.yaml', expected yolo annotations"],
        ),
        (
            "prepare",
            ["weights", "resnet5", "--data_dir=w"],
            ["unknown weights 'resnet5', did you mean 'resnet50'?"],
        ),
        ("prepare", ["weights", "yolo11n", "--data_dir=w"], ["one that `prepare weights` lists"]),
        ("prepare", ["weights", "resnet50"], ["prepare weights needs --data_dir"]),
        *(
            ("prepare", [action, "none.py", "--output=r.py"], [f"none.py{said}"])
            for action, said in (
                ("mmdet_config", ": no such file or folder"),
                ("tao_spec", ": no such file or folder"),
                ("d2_config", " is a LazyConfig, which is Python to run"),
            )
        ),
        ("prepare", ["d2_config", "a.py", "--output=r.py"], ["take `prepare mmdet_config`"]),
        (
            "prepare",
            ["mmdet_config", "a.yaml", "--output=r.py"],
            ["a.yaml: expected a config of mmdetection in Python; `prepare d2_config` reads"],
        ),
        ("prepare", ["d2_config", "no.yaml", "--output=r.py"], ["no.yaml: no such file or folder"]),
        ("recipes", ["finetun"], ["no recipe or run 'finetun', did you mean 'finetune'?"]),
        ("demo", ["--input=a.jpg"], ["'input', which infer and prepare have"]),
        ("export", ["--workdir=w", "--format=hub", "--output=o", "--push_to=a"], ["owner/name"]),
        ("export", ["--workdir=w", "--format=safetensors"], ["--output must have a value"]),
        (
            "infer",
            ["--workdir=w", "--input=i", "--output=o", "--score_threshold=50%"],
            ["--score_threshold=50%: expected a number, not '50%'"],
        ),
        ("prepare", ["repair", "--output=b"], ["needs --json, --output", "--images"]),
        ("serve", ["--port=0"], ["serve needs exactly one of --workdir, --weights and --artifact"]),
        ("serve", ["--port=0", "--workdir=nowhere"], ["nowhere"]),
        ("serve", ["--port=70000", "--workdir=w"], ["port", "65535"]),
        ("serve", ["--workdir=w", "--host=no.such.invalid"], ["--host no.such.invalid: "]),
        ("serve", ["--workdir=w", "--max_megapixels=200"], ["max_megapixels", "178"]),
        ("infer", ["--workdir=w", "--input=i", "--output=o", "--tile=9"], ["tile is 9", "32"]),
        ("evaluate", ["--workdir=w", "--tile=9"], ["tile is 9, expected at least 32 pixels"]),
        ("evaluate", ["--workdir=w", "--tile=99", "--overlap=1"], ["overlap", "0.9"]),
    ],
)
def test_faulty_flags(entry, arguments, words, fails, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = fails(entry, *arguments)
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "entry, arguments, words",
    [
        ("train", [*config_flags({"data.train_json": "none.json"}), "--workdir=w"], "none.json"),
        pytest.param(
            "train", [*config_flags({"train.bath_size": 4}), "--workdir=w"], "batch_size",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "infer", ["--workdir=w", "--input=none", "--output=o"], "--input none: does not exist",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_same_from_a_shell(entry, arguments, words, cache):
    done = run(entry, *arguments, cache=cache)
    assert words in error_line(done.returncode, done.stderr)
    *before, _ = done.stderr.splitlines()
    assert before in ([], ["reading the data ..."]) and not done.stdout


@pytest.mark.parametrize(
    "entry, arguments, named",
    [
        ("train", ["--config=quickstart", "--workdir=FILE"], "--workdir"),
        ("train", ["--config=quickstart", "--workdir=FILE/run"], "--workdir"),
        ("evaluate", ["--workdir=FILE"], "--workdir"),
        ("infer", ["--workdir=w", "--input=i", "--output=FILE"], "--output"),
        ("export", ["--workdir=w", "--format=onnx", "--output=FILE/a/b"], "--output"),
        ("export", ["--workdir=w", "--format=hub", "--output=FILE"], "--output"),
        ("prepare", ["shapes", "--data_dir=FILE"], "--data_dir"),
        ("prepare", ["merge", "--json=a", "--output=FILE/a.json"], "--output"),
    ],
)
def test_a_file_where_a_folder_is_to_be_is_found_before_all_else(
    entry, arguments, named, fails, tmp_path
):
    (file := tmp_path / "file").write_text("mine")
    line = fails(entry, *[argument.replace("FILE", str(file)) for argument in arguments])
    assert line.startswith(f"{named} is '{file}") and f"{file} is a file, expected a folder" in line
    assert file.read_text() == "mine"


def test_unwritable_workdir(fails, sound, tmp_path):
    """Below a regular file nobody may write, not even root."""
    (tmp_path / "file").write_text("mine")
    line = fails("train", *config_flags(sound), "--workdir", tmp_path / "file" / "run")
    assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "mine"


def test_workdir_of_another_config(fails, untrained, workdir):
    flags = untrained.changed({"optim.learning_rate": 0.5})
    line = fails("train", *flags, "--workdir", workdir)
    for word in (str(workdir), "optim.learning_rate was 0.001 and is 0.5", "another --workdir"):
        assert word in line


def test_workdir_of_other_categories(fails, untrained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(untrained.workdir, workdir)
    edit(workdir / "config.json", lambda content: content["categories"].pop())
    before = files_in(workdir)
    line = fails("train", *untrained.flags, "--workdir", workdir)
    assert str(workdir) in line and "other categories" in line
    assert files_in(workdir) == before


@pytest.mark.parametrize("content", ["", "{}", '{"config": {}, "cat'])
def test_damaged_config_json(content, fails, untrained, tmp_path):
    shutil.copytree(untrained.workdir, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(content)
    arguments = ["--workdir", tmp_path / "run"]
    pictures = ["--input", untrained.data_dir / "val", "--output", tmp_path / "out"]
    lines = [
        fails("train", *untrained.flags, *arguments),
        fails("evaluate", *untrained.flags, *arguments),
        fails("infer", *arguments, *pictures),
    ]
    assert all(str(path) in line for line in lines), lines
    assert path.read_text() == content


def test_evaluation_set_of_other_classes(fails, untrained, workdir, small_set):
    flags = untrained.changed(data_entries(small_set, small_set))
    line = fails("evaluate", *flags, "--workdir", workdir)
    assert f"{small_set[0]} has 2 categories, {workdir} has 4" in line


def test_config_that_does_not_fit_the_checkpoint(fails, untrained, workdir, tmp_path):
    """A class count, then a layer, that the checkpoint does not have; evaluate, then infer."""
    pictures = ["--input", untrained.data_dir / "val", "--output", tmp_path / "out"]
    for entry, arguments in (("evaluate", ["--output", tmp_path / "out"]), ("infer", pictures)):
        more = ["--workdir", workdir, *arguments]
        classes = untrained.changed({"model.num_classes": 7})
        assert "model.num_classes is 7" in fails(entry, *classes, *more)
        layers = untrained.changed({"model.mask_head.channels": 64})
        line = fails(entry, *layers, *more)
        assert f"{workdir} was trained with model.mask_head.channels=32, the config says 64" in line


def test_no_such_checkpoint(fails, untrained, workdir):
    for weights, words in (
        (workdir / "checkpoints" / "3", "is not a checkpoint of a run"),
        (untrained.data_dir, "holds no checkpoint"),
    ):
        line = fails("evaluate", *untrained.flags, "--weights", weights)
        assert str(weights) in line and words in line


@pytest.mark.parametrize(
    "content, words",
    [
        ("{}", ["expected a json list"]),
        ('[{"image_id": 1}]', ["entry 0", "'category_id'"]),
        (
            '[{"image_id": 77, "category_id": 3, "score": 0.5, "bbox": [1, 1, 2, 2]}]',
            ["entry 0", "image 77"],
        ),
    ],
    ids=["not a list", "missing key", "unknown image"],
)
def test_faulty_results(content, words, fails, sound, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(content)
    line = fails("evaluate", *config_flags(sound), "--results", path)
    for word in words:
        assert word in line


def test_infer_without_pictures(fails, workdir, tmp_path):
    (tmp_path / "notes.txt").write_text("no picture")
    out = tmp_path / "out"
    line = fails("infer", "--workdir", workdir, "--input", tmp_path, "--output", out)
    assert f"--input {tmp_path}: no images" in line
    assert not out.exists()


def test_infer_never_writes_over_its_input(fails, untrained, workdir, tmp_path):
    shutil.copytree(untrained.data_dir / "val", tmp_path / "mine")
    before = files_in(tmp_path / "mine")
    arguments = ["--input", tmp_path / "mine", "--output", tmp_path / "mine"]
    line = fails("infer", "--workdir", workdir, *arguments)
    assert "would overwrite 4 files" in line
    assert files_in(tmp_path / "mine") == before


def test_infer_with_nothing_but_damaged_pictures(fails, workdir, tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    arguments = ["--input", tmp_path / "1.jpg", "--output", tmp_path / "out"]
    line = fails("infer", "--workdir", workdir, *arguments)
    assert "no input could be read" in line and "1.jpg" in line


@pytest.mark.parametrize(
    "content, words",
    [(b"", "Invalid data"), (b"no video", "Invalid data"), (None, "holds no video, only audio")],
)
def test_infer_with_nothing_but_a_broken_video(content, words, fails, workdir, tmp_path):
    clip = write_sound(tmp_path / "clip.mp4")
    if content is not None:
        clip.write_bytes(content)
    line = fails("infer", "--workdir", workdir, "--input", clip, "--output", tmp_path / "out")
    assert "no input could be read" in line and str(clip) in line and words in line
    assert not (tmp_path / "out").exists()


def test_infer_without_pyav(fails, untrained, workdir, tmp_path, monkeypatch):
    """Said before anything is loaded, and only where there are videos."""
    (tmp_path / "clip.mp4").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "av", None)
    arguments = ["--input", tmp_path / "clip.mp4", "--output", tmp_path / "out"]
    line = fails("infer", "--workdir", workdir, *arguments)
    assert "pip install 'mask-rcnn-jax[video]'" in line


def test_infer_to_an_unwritable_folder(fails, untrained, workdir, tmp_path):
    (tmp_path / "file").write_text("mine")
    arguments = ["--input", untrained.data_dir / "val", "--output", tmp_path / "file" / "out"]
    assert str(tmp_path / "file") in fails("infer", "--workdir", workdir, *arguments)


def test_evaluation_names_a_truncated_image(untrained, workdir, tmp_path, capsys):
    folder = tmp_path / "val"
    shutil.copytree(untrained.data_dir / "val", folder)
    cut_off(folder / "000002.jpg")
    flags = untrained.changed({"data.val_images": str(folder)})
    arguments = ["--workdir", workdir, "--output", tmp_path / "out"]
    line = error_line(run_inside("evaluate", *flags, *arguments), capsys.readouterr().err)
    assert f"{folder / '000002.jpg'}: truncated" in line


@pytest.mark.slow
def test_image_of_another_size_than_the_json_says(untrained, tmp_path, capsys):
    shutil.copytree(untrained.data_dir / "train", tmp_path / "train")
    for path in (tmp_path / "train").iterdir():
        cv2.imwrite(str(path), np.zeros((48, 80, 3), np.uint8))
    flags = untrained.changed({"data.train_images": str(tmp_path / "train")})
    code = run_inside("train", *flags, "--workdir", tmp_path / "run")
    line = error_line(code, capsys.readouterr().err)
    assert str(tmp_path / "train") in line
    assert "the file is 48 x 80" in line and "the json says 64 x 64" in line


def test_a_mistake_found_after_the_run_was_opened_is_one_line_too(sound, tmp_path, cache):
    """Checkpoints are open by then, and their threads must not have the last word."""
    flags = config_flags(sound | {"optim.warmup_until": 0.9})
    done = run("train", *flags, "--workdir", tmp_path / "run", cache=cache)
    assert "optim.warmup_until is 0.9" in error_line(done.returncode, done.stderr)
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    trained, tmp_path, cache
):
    """The learning rate jumps half way: step 11 ruins the parameters, and step 12 shows it."""
    flags = trained.changed({"optim.decay_at": (0.5,), "optim.decay_levels": (1e30,)})
    workdir = tmp_path / "run"
    done = run("train", *flags, "--workdir", workdir, cache=cache)
    line = error_line(done.returncode, done.stderr, expected_code=1)
    assert "step 12: " in line and "loss/total" in line and "images [" in line
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "8"]
    assert_finite_tree(load_checkpoint(workdir))
    assert [record["step"] for record in read_metrics(workdir / "metrics.jsonl")] == [*range(1, 12)]
