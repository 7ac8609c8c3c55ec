"""Configs of detectron2 in YAML become recipes: those of its zoo the variants in configs/."""

import re

import pytest

from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.formats import d2_fields, d2_heads
from mask_rcnn_jax.formats.d2_recipe import write_recipe
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.training.checks import check_start
from tests.commands.command import ROOT, error_line, run_inside

BASE = """\
MODEL:
  META_ARCHITECTURE: "GeneralizedRCNN"
  BACKBONE: {NAME: build_resnet_fpn_backbone}
  RESNETS: {OUT_FEATURES: [res2, res3, res4, res5]}
  FPN: {IN_FEATURES: [res2, res3, res4, res5]}
  ANCHOR_GENERATOR:
    SIZES: [[32], [64], [128], [256], [512]]
    ASPECT_RATIOS: [[0.5, 1.0, 2.0]]
  RPN:
    IN_FEATURES: [p2, p3, p4, p5, p6]
    PRE_NMS_TOPK_TRAIN: 2000
    PRE_NMS_TOPK_TEST: 1000
    POST_NMS_TOPK_TRAIN: 1000
    POST_NMS_TOPK_TEST: 1000
  ROI_HEADS: {NAME: StandardROIHeads, IN_FEATURES: [p2, p3, p4, p5]}
  ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_FC: 2, POOLER_RESOLUTION: 7}
  ROI_MASK_HEAD: {NAME: MaskRCNNConvUpsampleHead, NUM_CONV: 4, POOLER_RESOLUTION: 14}
DATASETS:
  TRAIN: ("coco_2017_train",)
  TEST: ("coco_2017_val",)
SOLVER:
  IMS_PER_BATCH: 16
  BASE_LR: 0.02
  STEPS: (60000, 80000)
  MAX_ITER: 90000
INPUT:
  MIN_SIZE_TRAIN: (640, 672, 704, 736, 768, 800)
VERSION: 2
"""
LONG = "SOLVER: {STEPS: [210000, 250000], MAX_ITER: 270000}\n"
MASKS = "MODEL:\n  MASK_ON: True\n"
GROUP = """\
  RESNETS: {NORM: GN, STRIDE_IN_1X1: False}
  FPN: {NORM: GN}
  ROI_BOX_HEAD: {NUM_CONV: 4, NUM_FC: 1, NORM: GN}
  ROI_MASK_HEAD: {NORM: GN}
"""
CASCADE = """\
  ROI_HEADS: {NAME: CascadeROIHeads}
  ROI_BOX_HEAD: {CLS_AGNOSTIC_BBOX_REG: True}
  RPN: {POST_NMS_TOPK_TRAIN: 2000}
"""
EXT = """\
  PIXEL_STD: [57.375, 57.120, 58.395]
  RESNETS: {STRIDE_IN_1X1: False, NUM_GROUPS: 32, WIDTH_PER_GROUP: 8, DEPTH: 101}
"""
POINTREND = """\
  ROI_BOX_HEAD: {TRAIN_ON_PRED_BOXES: True}
  ROI_MASK_HEAD:
    NAME: PointRendMaskHead
    POOLER_TYPE: ""
    FC_DIM: 1024
    NUM_FC: 2
    OUTPUT_SIDE_RESOLUTION: 7
    IN_FEATURES: [p2]
    POINT_HEAD_ON: True
  POINT_HEAD: {FC_DIM: 256, NUM_FC: 3, IN_FEATURES: [p2]}
INPUT: {MASK_FORMAT: bitmask}
"""
KEYPOINTS = """\
MODEL:
  KEYPOINT_ON: True
  ROI_HEADS: {NUM_CLASSES: 1}
  ROI_BOX_HEAD: {SMOOTH_L1_BETA: 0.5}
  RPN: {POST_NMS_TOPK_TRAIN: 1500}
DATASETS:
  TRAIN: ("keypoints_coco_2017_train",)
  TEST: ("keypoints_coco_2017_val",)
"""
OF_SETS = {"data.num_workers", "model.num_classes", "model.init_from", "optim.decay_on"}


def write(folder, text):
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "fpn.yaml").write_text(BASE)
    path = folder / "mine.yaml"
    path.write_text("_BASE_: base/fpn.yaml\n" + text)
    return path


def recipe_of(folder, text):
    """The entries of the recipe for a config, and the notes."""
    notes = write_recipe(write(folder, text), folder / "recipe.py")
    return flatten(load_config(folder / "recipe.py").to_dict()), notes


@pytest.mark.parametrize(
    "text, variant",
    [
        (MASKS, "1x"),
        (MASKS + LONG, "3x"),
        (MASKS + GROUP + LONG, "gn_3x"),
        (MASKS + CASCADE, "cascade_1x"),
        (MASKS + EXT + LONG, "x101_3x"),
    ],
)
def test_configs_of_the_zoo_are_the_recipes(text, variant, tmp_path):
    found, notes = recipe_of(tmp_path, text)
    expected = flatten(load_config(f"coco_detectron2:{variant}").to_dict())
    different = {name for name in found if found[name] != expected[name]}
    # Frozen norms do not decay, whatever `decay_on` says.
    others = {"data.num_workers", *({"model.init_from"} if variant != "gn_3x" else ())}
    assert different - {"optim.decay_on"} == others and not notes
    assert found["optim.decay_on"] == ("kernel", "kernel_bias")
    with pytest.raises(ValueError, match="the weights are random, and some do not learn"):
        check_start(as_recipe(load_config(tmp_path / "recipe.py")))


@pytest.mark.parametrize(
    "text, recipe, noted",
    [
        (KEYPOINTS, "coco_keypoints:detectron2", []),
        (KEYPOINTS + LONG, "coco_keypoints:detectron2_3x", []),
        (MASKS + POINTREND, "coco_detectron2:pointrend_1x", ["MODEL.ROI_BOX_HEAD.TRAIN_ON"]),
        (MASKS + EXT + POINTREND + LONG, "coco_detectron2:pointrend_x101",
         ["MODEL.ROI_BOX_HEAD.TRAIN_ON"]),
    ],
)  # fmt: skip
def test_configs_with_other_heads_are_the_recipes(text, recipe, noted, tmp_path):
    found, notes = recipe_of(tmp_path, text)
    expected = flatten(load_config(recipe).to_dict())
    assert {name for name in found if found[name] != expected[name]} <= OF_SETS
    assert [note[: len(start)] for note, start in zip(notes, noted, strict=True)] == noted
    build_model(load_config(tmp_path / "recipe.py", {"model.num_classes": 1}).model)


def test_keypoints_of_one_s_own_are_named(tmp_path):
    found, notes = recipe_of(
        tmp_path,
        "MODEL:\n  KEYPOINT_ON: True\n  ROI_KEYPOINT_HEAD: {NUM_KEYPOINTS: 3,\n"
        "    CONV_DIMS: [64, 64], NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS: False, LOSS_WEIGHT: 4.0}\n"
        "TEST: {KEYPOINT_OKS_SIGMAS: [0.1, 0.2, 0.3]}\n",
    )
    assert found["model.keypoint_head.num_keypoints"] == len(found["data.keypoints"]) == 3
    assert found["model.keypoint_head.channels"] == 64
    assert found["model.keypoint_head.num_convs"] == 2
    assert found["loss.keypoint_weight"] == 4.0 and found["loss.keypoint_average"] == "budget"
    assert found["eval.keypoint_sigmas"] == (0.1, 0.2, 0.3)
    assert "NUM_KEYPOINTS = 3: set data.keypoints, their names" in notes[0]


@pytest.mark.parametrize(
    "text, entries",
    [
        ("MODEL: {MASK_ON: False}", {"model.mask_head.name": "none"}),
        (
            MASKS + POINTREND.replace("PointRendMaskHead", "CoarseMaskHead").replace(
                "POINT_HEAD: {", "ROI_HEADS: {NAME: PointRendROIHeads}\n"
                "  POINT_HEAD: {SUBDIVISION_STEPS: 3, "),
            {"model.mask_head.name": "pointrend", "model.mask_head.subdivisions": 3},
        ),
        (
            MASKS + "  WEIGHTS: detectron2://ImageNetPretrained/MSRA/R-50.pkl",
            {"model.init_from": "detectron2_msra_r50"},
        ),
        (MASKS + "  WEIGHTS: out/model_final.pth", {"model.init_from": "out/model_final.pth"}),
        (
            MASKS + "  ANCHOR_GENERATOR: {SIZES: [[8, 16]], ASPECT_RATIOS: [[4.0]]}",
            {
                "model.anchors.sizes": (8.0,) * 5,
                "model.anchors.aspect_ratios": ((0.5, 2.0), (1.0, 4.0)),
            },
        ),
        (
            MASKS + "  RPN: {CONV_DIMS: [-1, -1], IOU_THRESHOLDS: [0.2, 0.6]}",
            {"model.rpn.num_convs": 2, "model.rpn.bg_iou_thresh": 0.2},
        ),
        (MASKS + "SOLVER: {AMP: {ENABLED: True}}", {"train.precision": "float16"}),
        (
            MASKS + "SOLVER: {LR_SCHEDULER_NAME: WarmupCosineLR, BASE_LR_END: 0.002}",
            {"optim.schedule": "cosine", "optim.end_factor": 0.1},
        ),
        (
            MASKS + "SOLVER: {IMS_PER_BATCH: 2, BASE_LR: 0.00025, MAX_ITER: 300, STEPS: []}",
            {"train.batch_size": 2, "optim.reference_batch": 2, "optim.decay_at": (),
             "optim.warmup_until": 1.0, "optim.warmup_factor": 0.001 / 0.3007,
             "optim.learning_rate": 0.00025 * 0.3007},
        ),
        (
            MASKS + "SOLVER: {CLIP_GRADIENTS: {ENABLED: True, CLIP_VALUE: 0.5}}",
            {"optim.clip_value": 0.5, "optim.clip_norm": 0.0},
        ),
        (
            MASKS + "SOLVER: {WEIGHT_DECAY_NORM: 0.0001}",
            {"optim.decay_on": ("kernel", "bias", "scale")},
        ),
        (
            MASKS + "INPUT: {FORMAT: RGB, MASK_FORMAT: bitmask, RANDOM_FLIP: none}",
            {"model.input.channel_order": "rgb", "model.mask_targets.kind": "crops",
             "model.input.mean": (103.53, 116.28, 123.675), "data.flip_probability": 0.0},
        ),
        (
            MASKS + "INPUT: {MIN_SIZE_TRAIN: [700, 703], MIN_SIZE_TRAIN_SAMPLING: range}",
            {"data.short_sides": (700, 701, 702, 703)},
        ),
        (MASKS + "INPUT: {MIN_SIZE_TRAIN: 800}", {"data.short_sides": ()}),
        (
            MASKS + "DATALOADER: {SAMPLER_TRAIN: RepeatFactorTrainingSampler, "
            "REPEAT_THRESHOLD: 0.001, FILTER_EMPTY_ANNOTATIONS: False}",
            {"data.repeat_threshold": 0.001, "data.keep_empty": True},
        ),
        (MASKS + "SEED: 7\nTEST: {EVAL_PERIOD: 500}", {"train.seed": 7, "train.eval_every": 500}),
    ],
)  # fmt: skip
def test_a_field_sets_its_entry(text, entries, tmp_path):
    flat, _ = recipe_of(tmp_path, text)
    for name, value in entries.items():
        is_number = isinstance(value, float)
        assert flat[name] == (pytest.approx(value, rel=1e-9) if is_number else value), name


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("MODEL: [", 2, "no YAML"),
        ("MODEL: {MASK_ON: &a True, KEYPOINT_ON: *a}", 2, "an alias (*name)"),
        ("MODEL: {MASK_ON: !!python/object/apply:os.getcwd []}", 2, "the value cannot be read"),
        *(
            (f"MODEL: {{MASK_ON: !!{kind} foo}}", 2, "the value cannot be read")
            for kind in ("int", "bool", "timestamp")
        ),
        ("MODEL: {MASK_ON: 2020-13-45}", 2, "the value cannot be read ('month must be"),
        ("MODEL:\n  META_ARCHITECTURE: PanopticFPN", 3, "META_ARCHITECTURE is 'PanopticFPN', exp"),
        ("MODEL:\n  KEYPOINT_ON: True\n  ROI_KEYPOINT_HEAD: {NUM_KEYPOINTS: 0}", 4,
         "NUM_KEYPOINTS is 0, expected 1 to 1000"),
        ("MODEL:\n  KEYPOINT_ON: True\n  ROI_KEYPOINT_HEAD: {CONV_DIMS: [1, 2]}", 4,
         "CONV_DIMS is [1, 2], expected a list of equal numbers"),
        ("MODEL:\n  KEYPOINT_ON: True\n  ROI_KEYPOINT_HEAD: {POOLER_SAMPLING_RATIO: 2}", 4,
         "POOLER_SAMPLING_RATIO is 2, expected 0, as of ROI_BOX_HEAD"),
        ("MODEL:\n  KEYPOINT_ON: True\nTEST: {KEYPOINT_OKS_SIGMAS: [1]}", 4,
         "KEYPOINT_OKS_SIGMAS is [1], expected 17 numbers"),
        (MASKS + "  ROI_MASK_HEAD: {NAME: ImplicitPointRendMaskHead}", 4,
         "NAME is 'ImplicitPointRendMaskHead', expected 'MaskRCNNConvUpsampleHead' or 'PointRend"),
        (MASKS + POINTREND.replace("IN_FEATURES: [p2]", "IN_FEATURES: [p3]", 1), 11,
         "IN_FEATURES is ['p3'], expected ('p2',)"),
        (MASKS + POINTREND.replace("bitmask", "polygon"), 14,
         "MASK_FORMAT is 'polygon', expected 'bitmask' for PointRend"),
        ("MODEL: {BACKBONE: {NAME: build_trident_resnet_backbone}}", 2,
         "NAME is 'build_trident_resnet_backbone', expected 'build_resnet_fpn_backbone'"),
        ("MODEL: {RESNETS: {DEPTH: fifty}}", 2, "DEPTH is 'fifty', expected a whole number"),
        (f"SOLVER: {{MOMENTUM: {'9' * 400}}}", 2, "expected a number"),
        ("MODEL: {RESNETS: {NORM: IN}}", 2, "MODEL.RESNETS.NORM is 'IN', expected one of"),
        ("MODEL: {FPN: {NORM: [GN]}}", 2, "MODEL.FPN.NORM is ['GN'], expected one of"),
        ("MODEL: {RPN: {CONV_DIMS: [[1]]}}", 2, "CONV_DIMS is [[1]], expected a list of equal"),
        ("MODEL: {MINE: {A: 1}}", 2, "MODEL.MINE.A is 1, expected no such field"),
        ("MODEL: {RPN: {BBOX_REG_LOSS_TYPE: giou}}", 2, "is 'giou', expected 'smooth_l1'"),
        ("MODEL: {PIXEL_MEAN: [1, 2]}", 2, "PIXEL_MEAN is [1, 2], expected three numbers"),
        ("INPUT: {MAX_SIZE_TRAIN: 2000}", 2, "MAX_SIZE_TRAIN is 2000, expected MAX_SIZE_TEST"),
        ("INPUT: {MIN_SIZE_TRAIN: [900]}", 2, "MIN_SIZE_TRAIN is [900], expected whole numbers"),
        ("SOLVER: {MAX_ITER: 0}", 2, "MAX_ITER is 0, expected a number above 0"),
        ("MODEL: {ANCHOR_GENERATOR: {SIZES: [[1, 2], [2, 5]]}}", 2, "SIZES is [[1, 2], [2, 5]]"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_place(text, line, words, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        write_recipe(path, tmp_path / "recipe.py")
    message = str(error.value)
    assert message.startswith(f"{path}, line {line}: ") and words in message, message
    assert "\n" not in message and not list(tmp_path.glob("recipe*"))


@pytest.mark.parametrize(
    "text, words",
    [
        ("_BASE_: other.yaml", "line 1: _BASE_ is 'other.yaml', expected a file"),
        ("_BASE_: {a: 1}", "line 1: _BASE_ is {'a': 1}, expected a file"),
        ("_BASE_: " + "a" * 9000, "line 1: _BASE_ is 'a.*, expected a file"),
        ("_BASE_: mine.yaml", "more than 50 files"),
        ("MODEL: " + "[" * 500 + "]" * 500, "no YAML .*more than 100 lists in one another"),
        ("- 1", "no config of detectron2"),
        ("SOLVER: {MAX_ITER: 5}", "has no MODEL, expected a config of detectron2"),
        # detectron2's own default is no feature pyramid.
        (
            "MODEL: {MASK_ON: True}",
            "BACKBONE.NAME is left out, which means 'build_resnet_backbone', ",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_named(text, words, tmp_path):
    path = write(tmp_path, "")
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        write_recipe(path, tmp_path / "recipe.py")


def test_what_has_no_counterpart_is_named(tmp_path):
    found, notes = recipe_of(
        tmp_path,
        MASKS + "  WEIGHTS: detectron2://ImageNetPretrained/MSRA/R-101.pkl\n"
        "DATASETS: {TRAIN: [mine]}\nINPUT: {CROP: {ENABLED: True, SIZE: [0.5, 0.5]}}\n"
        "TEST: {AUG: {ENABLED: False, FLIP: True}}\nMY_OWN: 3\n",
    )
    assert [re.split(" = |: ", note)[0] for note in notes] == [
        "DATASETS.TRAIN",
        "MODEL.WEIGHTS",
        "INPUT.CROP.SIZE",
        "MY_OWN",
    ]
    zoo = "https://dl.fbaipublicfiles.com/detectron2/ImageNetPretrained/MSRA/R-101.pkl"
    assert f"fetch '{zoo}' and set model.init_from" in notes[1] and not found["model.init_from"]


def test_every_field_has_a_row_in_the_documentation():
    page = (ROOT / "docs" / "d2_config.md").read_text()
    names = {*d2_fields.SAME, *d2_heads.SAME_MASK, *d2_heads.SAME_POINTREND}
    names |= {*d2_heads.SAME_KEYPOINTS}
    missing = {n for n in names if f"{n.rpartition('.')[2]}`" not in page}
    assert not missing


def test_the_command_writes_a_recipe_and_refuses_a_lazy_config(tmp_path, capsys):
    output, path = tmp_path / "new" / "recipe.py", write(tmp_path, MASKS)
    assert run_inside("prepare", "d2_config", path, f"--output={output}") == 0
    assert capsys.readouterr().out.splitlines() == [f"{output}: train with --config {output}"]
    lazy = tmp_path / "lazy.py"
    lazy.write_text("from detectron2.config import LazyCall as L\n")
    code = run_inside("prepare", "d2_config", lazy, f"--output={output}")
    assert "lazy.py is a LazyConfig, which is Python to run" in error_line(
        code, capsys.readouterr().err
    )
