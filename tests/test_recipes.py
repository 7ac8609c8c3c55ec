"""The recipes: each describes a whole model, and docs/recipe_differences.md agrees with them."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights.restore import make_model
from tests.helpers import shared

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("coco", "coco_nvidia_tf1", "coco_tao", "coco_nvidia_pytorch", "coco_torchvision",
           "coco_detectron2")  # fmt: skip
VARIANTS = ("coco:buckets", "coco_detectron2:3x",
            "coco_nvidia_pytorch:bs64", "coco_nvidia_pytorch:bs32",
            "coco_nvidia_pytorch:1gpu", "coco_nvidia_pytorch:mlperf", "coco_tao:docs",
            "coco_torchvision:coco_v1", "coco_torchvision:v2", "coco_detectron2:lsj_100ep",
            "coco_detectron2:lsj_200ep", "coco_detectron2:lsj_400ep",
            "coco_detectron2:lsj_100ep_r101", "coco_detectron2:lsj_200ep_r101",
            "coco_detectron2:lsj_400ep_r101", "coco_detectron2:x101_3x",
            "coco_detectron2:gn_3x", "coco_detectron2:cascade_1x",
            "coco_detectron2:cascade_3x",
            "coco_mmdet:caffe", "lvis:lsj_100ep")  # fmt: skip
TRANSFORMERS = ("coco_vitdet", "coco_vitdet:l", "coco_vitdet:h", "coco_vitdet:cascade_b",
                "coco_vitdet:cascade_l", "coco_vitdet:cascade_h")  # fmt: skip
CONVNEXTS = ("coco_convnext", "coco_convnext:small")
SWINS = ("coco_swin", "coco_swin:tiny_1x", "coco_swin:small", "coco_swin:cascade_tiny",
         "coco_swin:cascade_tiny_1x", "coco_swin:cascade_small",
         "coco_swin:cascade_base")  # fmt: skip
DINOS = ("coco_dino", *(f"coco_dino:{size}" for size in (
    "convnext_s", "convnext_b", "convnext_l", "vit_s", "vit_splus", "vit_b", "vit_l", "v2_s",
    "v2_b", "v2_l", "v2_g", "v2_s_reg", "v2_b_reg", "v2_l_reg", "v2_g_reg")))  # fmt: skip
REGNETS = ("coco_detectron2:lsj_100ep_regnetx_4gf", "coco_detectron2:lsj_400ep_regnety_4gf")
KEYPOINTS = ("coco_keypoints", "coco_keypoints:coco_v1", "coco_keypoints:detectron2",
             "coco_keypoints:detectron2_3x")  # fmt: skip
POINTRENDS = ("coco_detectron2:pointrend_1x", "coco_detectron2:pointrend",
              "coco_detectron2:pointrend_x101")  # fmt: skip
MOBILENETS = ("edge", "edge:small_640", "edge:medium_640")
TRUNKS = (*TRANSFORMERS, *CONVNEXTS, *DINOS, *SWINS, *REGNETS, *MOBILENETS)
OTHERS = ("coco_mmdet", "dense", "dense:scratch", "dense:small", "finetune", "lvis", "nuclei",
          "quickstart", "quickstart:long")  # fmt: skip
OTHER_PARTS = ("model.backbone.", "model.fpn.")  # their sections have entries of their own
# One of each kind, but for the systems and cascades, which have tests of their own.
KINDS = ("coco_detectron2:x101_3x", "coco_convnext", "coco_dino:v2_s_reg", REGNETS[1], "quickstart")


@functools.cache
def recipe(name: str):
    stem, _, variant = name.partition(":")
    return load_config(f"{ROOT}/configs/{stem}.py" + (f":{variant}" if variant else ""))


@pytest.mark.parametrize("name", [*SYSTEMS, *VARIANTS, *TRUNKS, *KEYPOINTS, *POINTRENDS, *OTHERS])
def test_every_recipe_has_the_same_entries(name):
    config, reference = recipe(name).to_dict(), recipe("coco").to_dict()
    ours, theirs = flatten(config).keys(), flatten(reference).keys()
    if name in TRUNKS:
        has_pyramid = name in TRANSFORMERS or "dino:v" in name
        others = OTHER_PARTS if has_pyramid else OTHER_PARTS[:1]
        others += ("model.mask_head.heads",) if "swin:cascade" in name else ()
        ours, theirs = ({n for n in names if not n.startswith(others)} for names in (ours, theirs))
    if name in (*KEYPOINTS, *POINTRENDS):
        heads = ("model.mask_head.", "model.keypoint_head.")
        ours, theirs = ({n for n in names if not n.startswith(heads)} for names in (ours, theirs))
    if name in TRANSFORMERS:
        assert recipe(name).model.backbone.attention == "xla"
    assert ours == theirs
    decays = config["optim"]["decay_at"]
    assert len(decays) == len(config["optim"]["decay_levels"])
    assert 0 <= config["optim"]["warmup_until"] < decays[0]


@pytest.mark.parametrize(
    "name",
    [
        *KINDS,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*VARIANTS, *TRUNKS, *POINTRENDS, *OTHERS)
            if name not in KINDS
        ),
    ],
)
def test_recipes_have_models(name):
    variables = abstract_variables(make_model(recipe(name), 90))
    assert variables["params"]["box_head"]["cls_score"]["bias"].shape == (91,)


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_have_the_published_number_of_parameters(name):
    """torchvision counts 44,401,393 for R-50-FPN with 91 classes, without its 53 frozen norms."""
    config = recipe(name)
    params = abstract_variables(make_model(config, 90))["params"]
    norms = 0 if config.model.backbone.norm == "frozen" else 2 * 26_560
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 44_401_393 + norms


def test_the_learning_rate_of_vitdet():
    schedule = recipe("coco_vitdet").schedule()
    golden = json.loads(shared("goldens/modern/schedules.json").read_text())["vitdet_b"]
    assert recipe("coco_vitdet").train.steps == golden["max_iter"]
    for step, rate in golden["lr"].items():
        assert float(schedule(int(step))) == pytest.approx(rate, rel=1e-5), step
    longest = recipe("coco_vitdet:h")
    assert longest.train.steps == 138_281
    assert round(longest.optim.warmup_until * longest.train.steps) == 187
    steps = [round(share * longest.train.steps) for share in longest.optim.decay_at]
    assert steps == [122_916, 133_159]


@pytest.mark.parametrize(
    ("size", "width", "far", "decay"),
    [("b", 768, (2, 5, 8, 11), 0.7), ("l", 1024, (5, 11, 17, 23), 0.8),
     ("h", 1280, (7, 15, 23, 31), 0.9)],
)  # fmt: skip
def test_the_transformers_of_vitdet(size, width, far, decay):
    config = recipe(f"coco_vitdet:{size}")
    backbone = config.model.backbone
    assert (backbone.width, backbone.global_blocks) == (width, far)
    assert backbone.depth == far[-1] + 1 and width // backbone.num_heads in (64, 80)
    assert config.optim.layer_decay == decay
    assert backbone.exempt_from_decay == (() if size == "h" else ("pos_embed", "norm1", "norm2"))


def test_the_schedule_of_convnext():
    """36 epochs of 7330 steps, warmed up over 1000 from a thousandth, lower from 27 and 33 on."""
    config = recipe("coco_convnext")
    schedule = config.schedule()
    for step, rate in ((0, 1e-7), (500, 5.005e-5), (1000, 1e-4), (27 * 7330 - 1, 1e-4),
                       (27 * 7330, 1e-5), (33 * 7330, 1e-6)):  # fmt: skip
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-3), step
    assert config.train.steps == 36 * 7330 and config.train.batch_size == 16
    assert config.optim.layer_decay == 0.95 and config.optim.decay_on == ("kernel",)


@pytest.mark.parametrize(("name", "blocks", "layers"), [("", 18, 6), (":small", 36, 12)])
def test_the_trunks_of_convnext(name, blocks, layers):
    model = make_model(recipe(f"coco_convnext{name}"), 80)
    assert sum(model.backbone.depths) == blocks and model.backbone.num_layers == layers
    assert (model.backbone.width, model.backbone.layer_scale) == (96, 1.0)


@pytest.mark.parametrize(
    ("name", "epochs", "decays"), [("", 36, (27, 33)), (":tiny_1x", 12, (8, 11))]
)
def test_the_schedule_of_swin(name, epochs, decays):
    """Warmed up over 500 steps from a thousandth; norms and positions do not decay."""
    config = recipe(f"coco_swin{name}")
    schedule = config.schedule()
    for step, rate in ((0, 1e-7), (500, 1e-4), (decays[0] * 7330 - 1, 1e-4),
                       (decays[0] * 7330, 1e-5), (decays[1] * 7330, 1e-6)):  # fmt: skip
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-3), step
    assert config.train.steps == epochs * 7330 and config.optim.weight_decay == 0.05
    backbone = make_model(config, 80).backbone
    assert {"position_bias", "norm1", "down3_norm", "output2_norm"} < {*backbone.exempt_from_decay}


# timm 1.0.31's counts; of DINOv2 without keys' biases, with patches of 16 pixels and a position of
# the class token; of a ConvNeXt with norms of all maps.
@pytest.mark.parametrize(
    ("name", "count"),
    [("vit_s", 21_596_160), ("vit_splus", 28_692_480),
     pytest.param("vit_b", 85_659_648, marks=pytest.mark.slow),
     pytest.param("vit_l", 303_128_576, marks=pytest.mark.slow),
     ("v2_s", 22_056_192 - 12 * 384 + 384 * 3 * (16**2 - 14**2)),
     ("v2_b_reg", 86_582_016 - 11 * 768 + 768 * 3 * (16**2 - 14**2)),
     pytest.param("v2_g_reg", 1_136_483_840 - 39 * 1536 + 1536 * 3 * (16**2 - 14**2),
                  marks=pytest.mark.slow),
     ("convnext_l", 196_230_336 + 2 * (192 + 384 + 768))],
)  # fmt: skip
def test_trunks_of_dino_have_timm_s_number_of_parameters(name, count):
    trunk = recipe(f"coco_dino:{name}").model.backbone.make(dtype="float32", remat=False)
    images = jax.ShapeDtypeStruct((1, 64, 96, 3), "float32")
    shapes = jax.eval_shape(lambda x: trunk.init(jax.random.key(0), x, train=False), images)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == count


@pytest.mark.parametrize("name", ["coco_detectron2:cascade_3x", "coco_vitdet:cascade_b"])
def test_cascades(name):
    """detectron2 counts 71,984,926 parameters for R-50, without what we have for background."""
    config = recipe(name)
    params = abstract_variables(make_model(config, 80))["params"]
    heads = [params["box_head"], *params["cascade"].values()]
    assert len(heads) == 3
    assert all(head["bbox_pred"]["bias"].shape == (4,) for head in heads)
    if "vitdet" in name:
        assert all(head["norm4"]["scale"].shape == (256,) for head in heads)
    else:
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert count == 71_984_926 + 256 + 1  # the mask


@pytest.mark.parametrize("variant", ["lsj_100ep", "lsj_400ep_r101", "gn_3x"])
def test_norms_of_detectron2_do_not_decay(variant):
    """Its WEIGHT_DECAY_NORM is 0; biases of layers decay as kernels do."""
    config = recipe(f"coco_detectron2:{variant}")
    assert config.optim.decay_on == ("kernel", "kernel_bias")
    assert config.model.fpn.norm != "none"


@pytest.mark.parametrize("epochs", [100, 400])
def test_the_learning_rate_of_detectron2s_baselines(epochs):
    """Of chosen iterations, as its own scheduler gives it."""
    config = recipe(f"coco_detectron2:lsj_{epochs}ep")
    schedule = config.schedule()
    golden = json.loads(shared("goldens/modern/schedules.json").read_text())
    golden = golden[f"d2_lsj_{epochs}ep"]
    assert config.train.steps == golden["max_iter"]
    for step, rate in golden["lr"].items():
        assert float(schedule(int(step))) == pytest.approx(rate, rel=1e-5), step


def test_the_schedule_of_torchvisions_second_version():
    config = recipe("coco_torchvision:v2")
    schedule, epoch = config.schedule(), 117_266 // 64
    for step, rate in ((0, 1e-4), (500, 0.05005), (1000, 0.1), (352 * epoch - 1, 0.1),
                       (352 * epoch, 0.01), (384 * epoch, 0.001)):  # fmt: skip
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-4), step


@pytest.mark.parametrize(
    ("name", "steps", "rates"),
    [
        # warm-up 1000, steps (120000, 160000), max 180000 at 0.02
        ("lvis", 180_000, {0: 2e-5, 1000: 0.02, 119_999: 0.02, 120_000: 2e-3, 160_000: 2e-4}),
        # milestones [138889, 150463] of 156250, as ViTDet's; warm-up and rate of the LSJ baselines
        ("lvis:lsj_100ep", 156_250,
         {0: 0.0067, 500: 0.1, 138_888: 0.1, 138_889: 0.01, 150_463: 0.001}),
    ],
)  # fmt: skip
def test_the_schedule_of_lvis(name, steps, rates):
    config = recipe(name)
    schedule = config.schedule()
    assert config.train.steps == steps and config.data.repeat_threshold == 0.001
    assert config.eval.protocol == "lvis" and config.eval.detections_per_image == 300
    for step, rate in rates.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-4), step


@pytest.mark.parametrize("name", ["lsj_200ep_regnetx_4gf", "lsj_100ep_regnety_4gf"])
def test_regnets_differ_from_the_strong_resnet_in_their_trunk_alone(name):
    """As detectron2's configs do: its pixel_std is here in the order of R, G, B."""
    config, resnet = recipe(f"coco_detectron2:{name}"), recipe(f"coco_detectron2:{name[:9]}")
    ours, theirs = (flatten(each.to_dict()) for each in (config, resnet))
    common = ours.keys() & theirs.keys() - {"model.backbone.name", "model.backbone.depth"}
    assert {n for n in common if ours[n] != theirs[n]} == {"model.input.std"}
    assert config.model.input.std == (58.395, 57.12, 57.375)
    is_y = "regnety" in name
    backbone = dict(name="regnet", norm="sync_batch", norm_eps=1e-5, frozen_stages=0)
    backbone |= dict(depth=22, slope=31.41, multiplier=2.24, group_width=64) if is_y else {}
    backbone |= {} if is_y else dict(depth=23, slope=38.65, multiplier=2.43, group_width=40)
    backbone |= dict(initial_width=96, se_ratio=0.25 if is_y else 0.0, widths=())
    assert parts.to_section(config.model.backbone) == backbone


@pytest.mark.parametrize("name", [name for name in (*VARIANTS, *TRUNKS) if ":" in name])
def test_a_variant_differs_and_an_unknown_one_is_refused(name):
    stem = name.partition(":")[0]
    assert recipe(name) != recipe(stem)
    with pytest.raises(ValueError, match=f"{stem}:typo"):
        recipe(f"{stem}:typo")


def test_a_variant_that_became_a_recipe_is_named():
    with pytest.raises(ValueError, match="coco_detectron2:mmdetection: expected coco_mmdet, a rec"):
        recipe("coco_detectron2:mmdetection")


def test_a_recipe_without_variants_says_so():
    with pytest.raises(ValueError, match="nuclei.py:3x: this recipe has no variants"):
        recipe("nuclei:3x")


def test_buckets_have_the_photos_of_usual_shapes_on_canvases_of_their_own():
    config = recipe("coco:buckets")
    options = config.data
    for size, canvas in (((480, 640), (832, 1088)), ((427, 640), (832, 1216))):
        assert resize_plan(*size, options).canvas == canvas
        assert resize_plan(*size[::-1], options).canvas == canvas[::-1]
    changed = {"data.image_size", "data.resize", "data.canvases"}
    before, after = (flatten(each.to_dict()) for each in (recipe("coco"), config))
    assert {name for name in after if before[name] != after[name]} == changed


def test_targets_need_their_data():
    with pytest.raises(ValueError, match="needs a positive data.max_vertices"):
        load_config("coco", {"model.mask_targets.kind": "polygons"})
    with pytest.raises(ValueError, match="needs data.mask_frame=image"):
        load_config("coco", {"model.mask_targets.kind": "whole"})


@pytest.mark.parametrize(
    ("page", "row", "least"),
    [
        ("recipe_differences.md", r"^\| `((?:data|model|loss|optim|train|eval)\.[\w.]+)` \|", 50),
        ("extending.md", r"^\| (?:all four|backbone|\w+_head) \| `\w+` \|", 14),
    ],
)
def test_generated_tables_are_up_to_date(page, row, least):
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "docs" / page).read_text()
    assert tables.update(page) == text, "run python docs/tables.py"
    assert len(re.findall(row, text, re.M)) > least
