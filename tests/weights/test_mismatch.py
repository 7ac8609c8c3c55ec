"""Weights of another model than the recipe's are refused where they say so themselves."""

import json
import os
import shlex
import shutil
from dataclasses import replace

import fsspec
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import load_config, write_workdir
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.pruning.run import write_checkpoint
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import to_ours_flat
from mask_rcnn_jax.weights.restore import load_variables, make_model, restore
from tests.commands.command import ROOT, error_line, run_inside
from tests.small_model import CATEGORIES, SMALL, random_variables
from tests.weights.system_names import system
from tests.weights.weight_writers import TorchFile

CONFIG = """
model = dict(
    type='MaskRCNN',
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[{mean}], std=[{std}], bgr_to_rgb={rgb}, pad_mask=True, pad_size_divisor=32),
    backbone=dict(type='ResNet', depth=50, style='{style}'))
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(1333, 800), keep_ratio=True)]
"""
PYTORCH = dict(
    mean="123.675, 116.28, 103.53", std="58.395, 57.12, 57.375", rgb=True, style="pytorch"
)
CAFFE = dict(mean="103.53, 116.28, 123.675", std="1.0, 1.0, 1.0", rgb=False, style="caffe")
STATED = [
    "--config.model.backbone.stride_in=3x3",
    "--config.model.input.channel_order=rgb",
    "--config.model.input.std=(58.395, 57.12, 57.375)",
    "--config.data.antialias=False",
]
SMALL = {name: value for name, value in SMALL.items() if name != "model.anchors.sizes"}
NORM = {"model.backbone.norm": "frozen"}  # that of coco_detectron2
SMALL_FLAGS = [f"--config.{name}={value}" for name, value in SMALL.items()]


def write_epoch(path, arrays, style=PYTORCH) -> str:
    """As mmengine writes it: the weights, and in `meta` the text of the config."""
    file = TorchFile()
    state = {name: file.tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}
    meta = {"epoch": 12, "cfg": CONFIG.format(**style)} if style else {}
    file.write(path, {"meta": meta, "state_dict": state})
    return str(path)


def mmdetection_arrays(recipe, value=0.5) -> dict[str, np.ndarray]:
    """Arrays in mmdetection's names and shapes that a recipe with a small ResNet takes."""
    expected = flatten_dict(abstract_variables(make_model(recipe, 3)), sep="/")
    ours = {name.partition("/")[2]: leaf.shape for name, leaf in expected.items()}
    arrays = {}
    for name, place in system("mmdetection")[0].items():
        folder, _, leaf = place.rpartition("/")  # frozen norms have no statistics
        place = f"{folder}/scale" if leaf in ("mean", "var") else place
        if place not in ours:
            continue
        shape = ours[place]
        shape = (*shape[:1:-1], *shape[:2]) if len(shape) == 4 else shape[::-1]
        if "fc_reg" in name:  # theirs has no boxes of background
            shape = (shape[0] - 4, *shape[1:])
        if name.startswith("roi_head.mask_head.conv_logits"):
            shape = (3, *shape[1:])
        arrays[name] = np.full(shape, value, np.float32)
    return arrays


@pytest.fixture(scope="module")
def epochs(tmp_path_factory):
    """A checkpoint that the small model takes, of a ResNet-10, in each style."""
    arrays = mmdetection_arrays(load_config("coco_detectron2", SMALL))
    folder = tmp_path_factory.mktemp("epochs")
    styles = {"pytorch": PYTORCH, "caffe": CAFFE, "none": None}
    return {n: write_epoch(folder / f"{n}.pth", arrays, style) for n, style in styles.items()}


def stated_in(error) -> list[str]:
    """The flags that an error says to set."""
    text = str(error)
    return shlex.split(text[text.index("--config.") :])


def warned(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_mmdetections_default_model_is_refused_with_the_entries_to_set(tmp_path):
    path = write_epoch(tmp_path / "epoch_12.pth", system("mmdetection")[1])
    with pytest.raises(ValueError, match=f"^{path} holds weights of mmdetection's") as caught:
        load_variables(path, load_config("coco_detectron2"))
    assert stated_in(caught.value) == STATED
    assert "\n" not in str(caught.value) and "--accept_mismatch" in str(caught.value)
    with pytest.raises(ValueError, match="holds weights of mmdetection's"):
        mrcnn.load("coco_detectron2", path)
    settings = dict(flag.removeprefix("--config.").split("=") for flag in STATED[:-1])
    settings["model.input.std"] = (58.395, 57.12, 57.375)
    with pytest.raises(ValueError) as caught:
        load_variables(path, load_config("coco_detectron2", settings))
    assert stated_in(caught.value) == STATED[-1:]


@pytest.mark.parametrize(
    "recipe, style", [("coco_mmdet", "pytorch"), ("coco_mmdet:caffe", "caffe")]
)
def test_the_right_recipe_takes_the_weights_without_a_word(recipe, style, epochs, caplog):
    load_variables(epochs[style], load_config(recipe, SMALL))
    assert warned(caplog) == []


def test_what_is_accepted_is_a_warning(epochs, caplog):
    path = epochs["pytorch"]
    fitting = load_variables(path, load_config("coco_mmdet", SMALL | NORM))
    recipe = load_config("coco_detectron2", SMALL)
    with pytest.raises(ValueError, match="holds weights of mmdetection's"):
        restore(recipe, path)
    found = restore(recipe, path, accept_mismatch=True).variables
    jax.tree.map(np.testing.assert_array_equal, found, fitting)
    entries = [line.partition(" is ")[0] for line in warned(caplog)]
    names = ("model.backbone.stride_in", "model.input.channel_order", "model.input.std")
    assert entries == [f"{path}: {name}" for name in (*names, "data.antialias")]


def test_what_is_only_usual_is_a_warning(epochs, caplog):
    """A file without a config may be of either style."""
    path = epochs["none"]
    load_variables(path, load_config("coco_detectron2", SMALL))
    assert len(warned(caplog)) == 1 and "the file does not say which" in caplog.text
    load_variables(path, load_config("coco_detectron2", SMALL | {"model.anchors.center": 0.5}))
    assert f"{path}: model.anchors.center is 0.5, mmdetection's Mask R-CNN has" in caplog.text


@pytest.mark.parametrize(
    "source, recipe, entry",
    [
        ("torchvision", "coco_detectron2", "model.backbone.stride_in=3x3"),
        ("torchvision_old", "coco_detectron2", "model.backbone.stride_in=3x3"),
        ("nvidia_tf2", "coco_detectron2", "model.input.channel_order=rgb"),
    ],
)
def test_what_a_systems_code_leaves_no_choice_of_is_stated(source, recipe, entry, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(system(source)[1], path)
    with pytest.raises(ValueError) as caught:
        pretrained.load(path, load_config(recipe).model)
    assert f"--config.{entry}" in stated_in(caught.value)
    usual = {"--config.model.anchors.rounding=half_sides", "--config.model.box_coder.weights"}
    assert not usual & set(stated_in(caught.value))


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    """A small model's weights with the manifest that `export` writes beside them."""
    folder = tmp_path_factory.mktemp("exported")
    save_file(
        to_ours_flat(random_variables(load_config("coco_torchvision", SMALL))),
        folder / "ours.safetensors",
    )
    arguments = ["--weights", folder / "ours.safetensors", "--format=safetensors"]
    config = [f"--config={ROOT}/configs/coco_torchvision.py", *SMALL_FLAGS]
    target = folder / "mine.safetensors"
    assert run_inside("export", *config, *arguments, "--output", target) == 0
    return target


@pytest.fixture
def exported(exported_once, tmp_path):
    shutil.copy(exported_once.with_name("mine.manifest.json"), tmp_path)
    os.link(exported_once, tmp_path / exported_once.name)
    return tmp_path / exported_once.name


BGR = {"model.input.channel_order": "bgr"}


@pytest.mark.parametrize("changed", [BGR, {"model.roi_align.aligned": True}])
def test_exported_weights_say_what_they_were(changed, exported, caplog):
    load_variables(exported, load_config("coco_torchvision", SMALL))
    assert warned(caplog) == []
    other = load_config("coco_torchvision", SMALL | changed)
    ((name, _),) = changed.items()
    with pytest.raises(ValueError, match=f"the model in .*mine.manifest.json, .*--config.{name}="):
        load_variables(exported, other)
    load_variables(exported, other, accept_mismatch=True)
    assert len(warned(caplog)) == 1 and name in caplog.text


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_weights_at_an_address_keep_what_is_said_beside_them(
    scheme, exported, tmp_path, monkeypatch, caplog
):
    """The names of the classes, and the model that they belong to."""
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    store, address = fsspec.filesystem(scheme), f"{scheme}://{tmp_path}/mine.safetensors"
    manifest = tmp_path / "mine.manifest.json"
    named = [{"id": i, "name": f"kind {i}"} for i in range(1, 4)]
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"classes": named}))
    if scheme == "memory":
        store.put(str(exported), str(exported))
        without = restore(load_config("coco_torchvision", SMALL), address).categories
        assert [one["name"] for one in without] == [f"class {i}" for i in range(1, 4)]
        store.put(str(manifest), str(manifest))
    assert restore(load_config("coco_torchvision", SMALL), address).categories == named
    assert warned(caplog) == []
    other = load_config("coco_torchvision", SMALL | BGR)
    for load in (lambda: restore(other, address), lambda: pretrained.load(address, other.model)):
        with pytest.raises(ValueError, match="the model in .*manifest.json"):
            load()


def test_a_manifest_of_another_file_or_a_damaged_one_says_nothing(exported, caplog):
    other = load_config("coco_torchvision", SMALL | BGR)
    manifest = exported.with_name("mine.manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"files": ["other.safetensors"]}))
    load_variables(exported, other)
    assert warned(caplog) == []
    manifest.write_text(json.dumps({"files": [exported.name], "config": [1]}))
    load_variables(exported, other)
    assert "mine.manifest.json is damaged, the recipe is not compared with it" in caplog.text


def test_nothing_is_imported_that_a_manifest_names(exported, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('code of the file ran')")
    monkeypatch.syspath_prepend(tmp_path)
    manifest = exported.with_name("mine.manifest.json")
    content = json.loads(manifest.read_text())
    content["config"]["model"]["backbone"] = {"name": "stranger:build"}
    content["config"]["model"]["input"] = {"channel_order": "bgr"}
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:  # the rest is compared
        load_variables(exported, load_config("coco_torchvision", SMALL))
    assert stated_in(caught.value) == ["--config.model.input.channel_order=bgr"]


def test_a_run_says_what_it_was(tmp_path, caplog):
    run = load_config("coco_torchvision", SMALL)
    write_workdir(tmp_path, run, CATEGORIES)
    write_checkpoint(tmp_path, random_variables(run))
    other = load_config("coco_torchvision", SMALL | BGR)
    load_variables(tmp_path, run)
    with pytest.raises(ValueError, match="--config.model.input.channel_order=rgb"):
        load_variables(tmp_path, other)
    load_variables(tmp_path, other, accept_mismatch=True)
    caplog.clear()
    other = load_config("coco_torchvision", SMALL | BGR | {"model.rpn.min_size": 2.0})
    with pytest.raises(ValueError, match="was trained with model.* go on with --accept_mismatch"):
        restore(other, tmp_path)
    restore(other, tmp_path, accept_mismatch=True)
    entries = ("model.input.channel_order", "model.rpn.min_size")
    assert [sum(entry in line for line in warned(caplog)) for entry in entries] == [1, 1]


def test_a_run_finds_as_many_objects_as_are_asked_for(tmp_path, caplog):
    run = load_config("coco_torchvision", SMALL)
    write_workdir(tmp_path, run, CATEGORIES)
    write_checkpoint(tmp_path, random_variables(run))
    more = {"model.rpn.pre_nms_topk_test": 4000, "model.rpn.post_nms_topk_test": 2000}
    caplog.clear()
    restore(load_config("coco_torchvision", SMALL | more), tmp_path)
    assert not warned(caplog)
    more = {"model.rpn.post_nms_topk_train": 2001}
    with pytest.raises(ValueError, match="was trained with model.rpn.post_nms_topk_train=2000"):
        restore(load_config("coco_torchvision", SMALL | more), tmp_path)


class TestStartingWithWeights:
    """A run chooses its own anchors, but not the colors that a trunk has learned."""

    def start(self, path, recipe, **options):
        model = mrcnn.build_model(recipe.model)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, "f4"), abstract_variables(model))
        given = replace(recipe.model, init_from=str(path))
        return pretrained.initialize_from(zeros, given, **options)

    def test_other_colors_are_refused(self, epochs, caplog):
        path = epochs["pytorch"]
        recipe = load_config("coco_detectron2", SMALL)
        with pytest.raises(ValueError) as caught:
            self.start(path, recipe)
        assert stated_in(caught.value) == STATED[1:3]  # the trunk of 10 layers has no other stride
        self.start(path, recipe, accept_mismatch=True)
        assert f"{path}: model.input.channel_order is 'bgr'" in caplog.text
        caplog.clear()
        self.start(path, load_config("coco_mmdet", SMALL))
        assert warned(caplog) == []

    def test_other_anchors_are_a_warning(self, exported, caplog):
        sizes = (8.0, 16.0, 32.0, 64.0, 128.0)
        self.start(
            exported, load_config("coco_torchvision", SMALL | {"model.anchors.sizes": sizes})
        )
        assert len(warned(caplog)) == 1 and "model.anchors.sizes" in caplog.text


@pytest.mark.parametrize("command", ["export", "evaluate", "infer", "serve", "prune"])
def test_the_commands_stop_in_one_line(command, epochs, tmp_path, capsys):
    arguments = {
        "export": ["--format=safetensors", "--output", tmp_path / "x.safetensors"],
        "evaluate": ["--output", tmp_path / "out"],
        "infer": ["--input", tmp_path / "a.jpg", "--output", tmp_path / "out"],
        "serve": ["--port=0"],
        "prune": ["--threshold=0.5", "--output", tmp_path / "pruned"],
    }[command]
    (tmp_path / "a.jpg").touch()
    config = [f"--config={ROOT}/configs/coco_detectron2.py", *SMALL_FLAGS]
    code = run_inside(command, *config, "--weights", epochs["pytorch"], *arguments)
    assert stated_in(error_line(code, capsys.readouterr().err)) == STATED[1:]


def test_the_flag_goes_on(epochs, tmp_path, capsys, caplog):
    config = [f"--config={ROOT}/configs/coco_detectron2.py", *SMALL_FLAGS]
    arguments = [
        "--weights",
        epochs["pytorch"],
        "--format=safetensors",
        "--output",
        tmp_path / "x.safetensors",
    ]
    assert run_inside("export", *config, *arguments, "--accept_mismatch") == 0
    assert (tmp_path / "x.safetensors").is_file() and len(warned(caplog)) == 4
