"""Specs of TAO become recipes: that of the blog post the one in configs/, others as they say."""

import re

import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats import tao_recipe, tao_spec
from mask_rcnn_jax.formats.tao_recipe import write_recipe
from mask_rcnn_jax.recipe.entries import flatten
from tests.commands.command import ROOT, error_line, run_inside

# https://developer.nvidia.com/blog/training-instance-segmentation-models-using-maskrcnn-on-the-transfer-learning-toolkit
BLOG = """\
seed: 123
use_amp: False
warmup_steps: 1000
checkpoint: "/workspace/resnet50.hdf5"
learning_rate_steps: "[60000, 80000, 90000]"
learning_rate_decay_levels: "[0.1, 0.01, 0.001]"
total_steps: 100000
train_batch_size: 3
eval_batch_size: 8
num_steps_per_eval: 10000
momentum: 0.9
l2_weight_decay: 0.00002
warmup_learning_rate: 0.0001
init_learning_rate: 0.02

data_config{
    image_size: "(832, 1344)"
    augment_input_data: True
    eval_samples: 500
    training_file_pattern: "/data/train*.tfrecord"
    validation_file_pattern: "/data/val*.tfrecord"
    val_json_file: "/data/annotations/instances_val2017.json"
    # dataset specific parameters
    num_classes: 91
    skip_crowd_during_training: True
}

maskrcnn_config {
    nlayers: 50
    arch: "resnet"
    freeze_bn: True
    freeze_blocks: "[0,1]"
    gt_mask_size: 112
    # Region Proposal Network
    rpn_positive_overlap: 0.7
    rpn_negative_overlap: 0.3
    rpn_batch_size_per_im: 256
    rpn_fg_fraction: 0.5
    rpn_min_size: 0.
    # Proposal layer.
    batch_size_per_im: 512
    fg_fraction: 0.25
    fg_thresh: 0.5
    bg_thresh_hi: 0.5
    bg_thresh_lo: 0.
    # Faster-RCNN heads.
    fast_rcnn_mlp_head_dim: 1024
    bbox_reg_weights: "(10., 10., 5., 5.)"
    # Mask-RCNN heads.
    include_mask: True
    mrcnn_resolution: 28
    # training
    train_rpn_pre_nms_topn: 2000
    train_rpn_post_nms_topn: 1000
    train_rpn_nms_threshold: 0.7
    # evaluation
    test_detections_per_image: 100
    test_nms: 0.5
    test_rpn_pre_nms_topn: 1000
    test_rpn_post_nms_topn: 1000
    test_rpn_nms_thresh: 0.7
    # model architecture
    min_level: 2
    max_level: 6
    num_scales: 1
    aspect_ratios: "[(1.0, 1.0), (1.4, 0.7), (0.7, 1.4)]"
    anchor_scale: 8
    # localization loss
    rpn_box_loss_weight: 1.0
    fast_rcnn_box_loss_weight: 1.0
    mrcnn_weight_loss_mask: 1.0
}
"""


RATIOS = ((1.0, 1.0), (1.4, 0.7), (0.7, 1.4))
TWO_SCALES = tuple((w * scale, h * scale) for scale in (1, 2**0.5) for w, h in RATIOS)
STEPS = '"[60000, 80000, 90000]"'


def recipe_of(text: str, folder, gpus: int = 8):
    """The config and the notes for a spec."""
    (folder / "spec.txt").write_text(text)
    notes = write_recipe(folder / "spec.txt", folder / "recipe.py", gpus)
    return load_config(folder / "recipe.py"), notes


def test_the_spec_of_the_blog_is_the_recipe_in_configs(tmp_path):
    config, notes = recipe_of(BLOG, tmp_path)
    found, expected = (flatten(c.to_dict()) for c in (config, load_config("coco_tao")))
    different = {name for name in found if found[name] != expected[name]}
    own = "source train_json train_images val_json val_images"
    assert different == {
        *(f"data.{name}" for name in own.split()),
        *("train.seed", "train.checkpoint_every", "eval.max_images"),
    }
    assert (found["train.seed"], found["eval.max_images"]) == (123, 500)
    assert found["data.source"] == "tfrecord"
    assert found["data.train_images"] == "/data/train*.tfrecord"
    assert found["data.val_json"] == "/data/annotations/instances_val2017.json"
    assert [note.partition(":")[0] for note in notes] == [
        "num_classes",
        "checkpoint",
        "training_file_pattern",
    ]
    assert notes[1].endswith("cannot be read; model.init_from is resnet50")


@pytest.mark.parametrize(
    "change, entries",
    [
        (("use_amp: False", "use_amp: true"), {"train.precision": "float16"}),
        (
            ("total_steps: 100000", "num_epochs: 10 num_examples_per_epoch: 100"),
            {"train.steps": 334},
        ),
        ((STEPS, '"[50000,80000, 90000]"'), {"optim.decay_at": (0.5, 0.8, 0.9)}),
        (("train_batch_size: 3", "train_batch_size: 2"), {"optim.reference_batch": 16}),
        (("freeze_bn: True", "freeze_bn: False"), {"model.backbone.norm": "batch"}),
        (("    freeze_bn: True\n", ""), {"model.backbone.norm": "batch"}),
        (
            ('"[0,1]"', '"[3, 1]"'),
            {
                "model.backbone.frozen_stages": 0,
                "optim.freeze": ("backbone/res2_*", "backbone/res4_*"),
            },
        ),
        (
            ('"[0,1]"', '"[0, 1, 4]"'),
            {"model.backbone.frozen_stages": 2, "optim.freeze": ("backbone/res5_*",)},
        ),
        (('"[0,1]"', '"[]"'), {"model.backbone.frozen_stages": 0}),
        (("include_mask: True", "include_mask: False"), {"loss.mask_weight": 0.0}),
        (
            ("resolution: 28", "resolution: 56"),
            {"model.mask_head.roi_size": 28, "model.box_head.roi_size": 14},
        ),
        (("augment_input_data: True", ""), {"data.flip_probability": 0.0}),
        (("rpn_min_size: 0.", "rpn_min_size: 2."), {"model.rpn.min_size": 2.0}),
        (("anchor_scale: 8", "anchor_scale: 4"), {"model.anchors.sizes": (16, 32, 64, 128, 256)}),
        (
            ("max_level: 6", "max_level: 5"),
            {"model.anchors.sizes": (32, 64, 128, 256), "model.roi_align.max_level": 5},
        ),
        (
            ("max_level: 6", "max_level: 7"),
            {"model.anchors.sizes": (32, 64, 128, 256, 512, 1024), "model.roi_align.max_level": 7},
        ),
        (("num_scales: 1", "num_scales: 2"), {"model.anchors.aspect_ratios": TWO_SCALES}),
        (
            ("seed: 123", 'wandb_config { enabled: true tags: "a" tags: "b" mode: OFFLINE }'),
            {"train.loggers": ("wandb",)},
        ),
        (("seed: 123", 'wandb_config { project: "a" }'), {"train.loggers": ()}),
        (("seed: 123", "wandb_config { enabled: false }"), {"train.loggers": ()}),
        (("seed: 123", "wandb_config { enabled: true mode: DISABLED }"), {"train.loggers": ()}),
        (
            ("seed: 123", "wandb_config { enabled: true } clearml_config { }"),
            {"train.loggers": ("wandb", "clearml")},
        ),
        (("/workspace/resnet50.hdf5", "/weights/r50.pth"), {"model.init_from": "/weights/r50.pth"}),
        (
            ("nlayers: 50", "nlayers: 18"),
            {"model.backbone.depth": 18, "model.init_from": "resnet18"},
        ),
        (
            ("nlayers: 50", "nlayers: 10"),
            {"model.backbone.depth": 10, "model.init_from": ""},
        ),
    ],
)
def test_a_field_sets_its_entry(change, entries, tmp_path):
    assert change[0] in BLOG
    config, _ = recipe_of(BLOG.replace(*change), tmp_path)
    flat = flatten(config.to_dict())
    for name, value in entries.items():
        assert flat[name] == value, name


@pytest.mark.parametrize(
    "change, words",
    [
        (("seed: 123", "seed: -1"), "line 1: "),
        (("use_amp: False", "enable_amp: False"), 'line 2: Message type "Experiment"'),
        (("warmup_steps: 1000", "warmup_steps: 1000 warmup_steps: 1"), "line 3: "),
        (('"(832, 1344)"', "832"), "line 17: "),
        (('"(832, 1344)"', '"(800, 1333)"'), "line 17: image_size is '(800, 1333)', expected"),
        ((STEPS, '"[60000, 80000]"'), "line 5: learning_rate_steps"),
        ((STEPS, '"__import__(1)"'), "line 5: learning_rate_steps"),
        (("total_steps: 100000", ""), "spec.txt lacks total_steps"),
        (("init_learning_rate: 0.02", ""), "spec.txt lacks init_learning_rate"),
        (('learning_rate_decay_levels: "[0.1, 0.01, 0.001]"', ""), "lacks learning_rate_decay"),
        (("total_steps: 100000", "total_steps: 0"), "line 7: total_steps is 0, expected a number"),
        (('"(832, 1344)"', "'{832: 1, 1344: 2}'"), "line 17: image_size is"),
        ((STEPS, "'{60000, 80000, 90000}'"), "line 5: learning_rate_steps is"),
        (('"[(1.0, 1.0), (1.4, 0.7), (0.7, 1.4)]"', "'[{1.0, 2.0}]'"), "aspect_ratios is"),
        (("init_learning_rate: 0.02", "init_learning_rate: nan"), "line 14: init_learning_rate"),
        (('arch: "resnet"', 'arch: "vgg"'), "line 30: arch is 'vgg', expected 'resnet'"),
        (("resolution: 28", "resolution: 54"), "mrcnn_resolution is 54, expected a multiple of 4"),
        (("resolution: 28", "resolution: 0"), "mrcnn_resolution is 0, expected a number above 0"),
        (("max_level: 6", "max_level: 8"), "max_level is 8, expected 5, 6 or 7"),
        (("nlayers: 50", "nlayers: 51"), "line 29: nlayers is 51, expected one of"),
        (('"[0,1]"', '"[1, 5]"'), "freeze_blocks is '[1, 5]', expected blocks, 0 (the stem) to 4"),
        (('"[0,1]"', '"[0, 1.5]"'), "freeze_blocks is '[0, 1.5]', expected blocks"),
        (("(10., 10., 5., 5.)", "(10., 10., 5.)"), "bbox_reg_weights"),
        (("maskrcnn_config {", "maskrcnn_config"), "line 29: "),
        (("train_batch_size", "train_bach_size"), "did you mean 'train_batch_size'?"),
        (("gt_mask_size", "gt_masksize"), "did you mean 'gt_mask_size'?"),
        (("seed: 123", "seed: 123 nlayers: 50"), "; it belongs into maskrcnn_config"),
        (("gt_mask_size", "use_amp: True gt_mask_size"), "; it belongs outside the blocks"),
        ((BLOG, "dataset:\n  train: a\n"), "a spec in YAML, expected the protobuf text"),
        ((BLOG, "encryption_key: tlt\ntrain: # a section\n  epochs: 1\n"), "a spec in YAML"),
    ],
)
def test_a_fault_is_one_line_with_its_place(change, words, tmp_path):
    assert change[0] in BLOG
    with pytest.raises(ValueError) as error:
        recipe_of(BLOG.replace(*change), tmp_path)
    text = str(error.value)
    assert text.startswith(str(tmp_path / "spec.txt")) and words in text and "\n" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["spec.txt"]


def test_what_has_no_counterpart_is_named(tmp_path):
    fields = [*tao_recipe.WITHOUT]
    numbers = [name for name in fields if "path" not in name and "variables" not in name]
    numbers.remove("num_classes")
    buffers = [name for name in numbers if "buffer" in name]
    top = [f"{name}: 1" for name in numbers if name not in buffers]
    top += ['pruned_model_path: "a"', 'skip_checkpoint_variables: "b"']
    text = BLOG.replace("seed: 123", " ".join(top))
    text = text.replace("num_classes: 91", "num_classes: 91 " + ": 1 ".join([*buffers, ""]))
    _, notes = recipe_of(
        text.replace("test_rpn_nms_thresh: 0.7", "test_rpn_nms_thresh: 0.6"), tmp_path
    )
    named = [note.partition(":")[0] for note in notes]
    assert named == [*fields, "checkpoint", "test_rpn_nms_thresh", "training_file_pattern"]


def test_what_a_logger_is_not_told_is_named(tmp_path):
    wandb = 'wandb_config { enabled: true key: "secret" project: "p" tags: "a" mode: OFFLINE }'
    blocks = f'{wandb} clearml_config {{ task: "t" }}'
    _, notes = recipe_of(BLOG.replace("seed: 123", blocks), tmp_path)
    named = [note.partition(":")[0] for note in notes if "_config." in note]
    wandb_fields = [f"wandb_config.{name}" for name in ("project", "mode", "tags", "key")]
    assert sorted(named) == sorted([*wandb_fields, "clearml_config.task"])
    assert "secret" not in (tmp_path / "recipe.py").read_text()


def test_every_field_in_the_table_of_the_documentation_is_read():
    page = (ROOT / "docs" / "tao_spec.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row[:2] == "| "]
    fields = {n for kinds in tao_spec.MESSAGES.values() for k in kinds.values() for n in k.split()}
    named = [name.rpartition(".")[2] for row in rows for name in re.findall("`([a-z0-9_.]+)`", row)]
    assert len(named) > 60 and set(named) <= fields


def test_the_table_in_the_documentation_has_every_field():
    page = (ROOT / "docs" / "tao_spec.md").read_text()
    blocks = ("Experiment", "DataConfig", "MaskRCNNConfig")
    fields = [n for b in blocks for names in tao_spec.MESSAGES[b].values() for n in names.split()]
    missing = [name for name in fields if f"{name}`" not in page and not name.endswith("_config")]
    assert len(fields) > 60 and missing == []


def test_the_command_writes_a_recipe_and_names_what_is_left_out(tmp_path, capsys):
    (tmp_path / "spec.txt").write_text(BLOG)
    output = tmp_path / "mine" / "recipe.py"
    assert run_inside("prepare", "tao_spec", tmp_path / "spec.txt", f"--output={output}") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "without counterpart: num_classes: classes are counted in the annotations"
    assert out[-1] == f"{output}: train with --config {output}"
    assert "those of one GPU: --gpus says" in out[-2]
    assert load_config(output).train.batch_size == 3
    for arguments, words in (
        (["tao_spec", tmp_path / "spec.txt"], "prepare tao_spec needs --output"),
        (["tao_spec", f"--output={output}"], "prepare tao_spec needs the path of one spec"),
        (["tao_spec", tmp_path / "none.txt", f"--output={output}"], "none.txt"),
    ):
        code = run_inside("prepare", *arguments)
        assert words in error_line(code, capsys.readouterr().err)
