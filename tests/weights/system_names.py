"""Every system's names of a ResNet-50 model, spelled out layer by layer.

An account of its own beside the tables that are tested: loops where those have templates.
"""

import itertools

import numpy as np

from mask_rcnn_jax.weights.sources import SOURCES

BLOCKS = {2: 3, 3: 4, 4: 6, 5: 3}  # of a ResNet-50
TORCH = ("weight", "bias", "running_mean", "running_var")
TF = ("gamma", "beta", "moving_mean", "moving_variance")
OURS = ("scale", "bias", "mean", "var")
CLASSES = 3  # without background


def blocks():
    """(stage, block, its layers in order), from the stem on."""
    for stage, count in BLOCKS.items():
        for block in range(count):
            yield stage, block, ["shortcut", "conv1", "conv2", "conv3"][block > 0 :]


def norm_of(layer):
    return {"shortcut": "shortcut_norm"}.get(layer, layer.replace("conv", "norm"))


def resnet(conv, norm, kernel="weight", parts=TORCH, separator=".", ours=OURS):
    """Their names of a ResNet-50 backbone: `conv` and `norm` name a layer given stage, block and
    which; a stage of 0 is the stem."""
    names = {}
    for stage, block, layers in [(0, 0, ["stem"]), *blocks()]:
        for layer in layers:
            where = f"backbone/res{stage}_{block}/" if stage else "backbone/"
            module = "stem_conv" if layer == "stem" else layer
            names[conv(stage, block, layer) + separator + kernel] = f"{where}{module}/kernel"
            module = "stem_norm" if layer == "stem" else norm_of(layer)
            for part, leaf in zip(parts, ours, strict=True):
                names[norm(stage, block, layer) + separator + part] = f"{where}{module}/{leaf}"
    return names


def torch_resnet(prefix, stem=""):
    def conv(stage, block, layer):
        if not stage:
            return f"{prefix}{stem}conv1"
        return f"{prefix}layer{stage - 1}.{block}.{layer.replace('shortcut', 'downsample.0')}"

    def norm(stage, block, layer):
        name = conv(stage, block, layer).replace("downsample.0", "downsample.1")
        head, dot, last = name.rpartition(".")
        return head + dot + last.replace("conv", "bn")

    return resnet(conv, norm)


def detectron2_resnet(prefix):
    def conv(stage, block, layer):
        return prefix + (f"res{stage}.{block}.{layer}" if stage else "stem.conv1")

    return resnet(conv, lambda *which: f"{conv(*which)}.norm")


def msra_resnet(parts, ours):
    branch = {"shortcut": "1", "conv1": "2a", "conv2": "2b", "conv3": "2c"}

    def conv(stage, block, layer):
        return f"res{stage}_{block}_branch{branch[layer]}" if stage else "conv1"

    def norm(stage, block, layer):
        return conv(stage, block, layer) + "_bn" if stage else "res_conv1_bn"

    return resnet(conv, norm, "w", parts, "_", ours)


def google_resnet(prefix):
    counter = itertools.count()
    index = {"": 0}
    for which in [(0, 0, "stem"), *((s, b, layer) for s, b, names in blocks() for layer in names)]:
        index[which] = next(counter)

    def numbered(kind):
        return lambda *which: prefix + kind + (f"_{index[which]}" if index[which] else "")

    return resnet(numbered("conv2d"), numbered("batch_normalization"), "kernel", TF, "/")


def nvidia_rn50():
    def layer_name(stage, block, layer):
        if not stage:
            return "resnet50/conv2d"
        name = "shortcut/conv2d" if layer == "shortcut" else f"bottleneck_{layer[-1]}"
        return f"resnet50/btlnck_block_{stage - 2}_{block}/{name}"

    return resnet(
        lambda *which: layer_name(*which) + "/conv2d",
        lambda *which: layer_name(*which) + "/BatchNorm",
        "kernel", TF, "/",
    )  # fmt: skip


def heads(lateral, output, rpn, box, mask, separator=".", kernel="weight"):
    """Names of FPN and heads: `lateral` and `output` by level, the others as lists of layers."""
    layers = {}
    for level in range(2, 6):
        layers[lateral(level)] = f"fpn/fpn_lateral{level}"
        layers[output(level)] = f"fpn/fpn_output{level}"
    ours = {
        "rpn_head": ["conv", "objectness_logits", "anchor_deltas"],
        "box_head": ["fc1", "fc2", "cls_score", "bbox_pred"],
        "mask_head": [*(f"mask_fcn{i}" for i in (1, 2, 3, 4)), "mask_deconv", "mask_predictor"],
    }
    for (module, paths), theirs in zip(ours.items(), (rpn, box, mask), strict=True):
        layers |= {name: f"{module}/{path}" for name, path in zip(theirs, paths, strict=True)}
    names = {f"{name}{separator}{kernel}": f"{path}/kernel" for name, path in layers.items()}
    return names | {f"{name}{separator}bias": f"{path}/bias" for name, path in layers.items()}


def torchvision(fpn, rpn, mask):
    roi = "roi_heads."
    return torch_resnet("backbone.body.") | heads(
        lambda level: f"backbone.fpn.inner_blocks.{level - 2}{fpn}",
        lambda level: f"backbone.fpn.layer_blocks.{level - 2}{fpn}",
        [f"rpn.head.{rpn}", "rpn.head.cls_logits", "rpn.head.bbox_pred"],
        [f"{roi}{layer}" for layer in ("box_head.fc6", "box_head.fc7", "box_predictor.cls_score",
                                       "box_predictor.bbox_pred")],
        [*(f"{roi}mask_head.{name}" for name in mask), f"{roi}mask_predictor.conv5_mask",
         f"{roi}mask_predictor.mask_fcn_logits"],
    )  # fmt: skip


def all_systems():
    """Source and, by their names, our paths."""
    detectron2 = detectron2_resnet("backbone.bottom_up.") | heads(
        lambda level: f"backbone.fpn_lateral{level}",
        lambda level: f"backbone.fpn_output{level}",
        [f"proposal_generator.rpn_head.{name}" for name in ("conv", "objectness_logits",
                                                            "anchor_deltas")],
        [f"roi_heads.{name}" for name in ("box_head.fc1", "box_head.fc2",
                                          "box_predictor.cls_score", "box_predictor.bbox_pred")],
        [*(f"roi_heads.mask_head.mask_fcn{i}" for i in (1, 2, 3, 4)), "roi_heads.mask_head.deconv",
         "roi_heads.mask_head.predictor"],
    )  # fmt: skip
    benchmark = torch_resnet("backbone.body.", "stem.") | heads(
        lambda level: f"backbone.fpn.fpn_inner{level - 1}",
        lambda level: f"backbone.fpn.fpn_layer{level - 1}",
        ["rpn.head.conv", "rpn.head.cls_logits", "rpn.head.bbox_pred"],
        [f"roi_heads.box.{name}" for name in ("feature_extractor.fc6", "feature_extractor.fc7",
                                              "predictor.cls_score", "predictor.bbox_pred")],
        [*(f"roi_heads.mask.feature_extractor.mask_fcn{i}" for i in (1, 2, 3, 4)),
         "roi_heads.mask.predictor.conv5_mask", "roi_heads.mask.predictor.mask_fcn_logits"],
    )  # fmt: skip
    mmdetection = torch_resnet("backbone.") | heads(
        lambda level: f"neck.lateral_convs.{level - 2}.conv",
        lambda level: f"neck.fpn_convs.{level - 2}.conv",
        ["rpn_head.rpn_conv", "rpn_head.rpn_cls", "rpn_head.rpn_reg"],
        [f"roi_head.bbox_head.{name}" for name in ("shared_fcs.0", "shared_fcs.1", "fc_cls",
                                                   "fc_reg")],
        [*(f"roi_head.mask_head.convs.{i}.conv" for i in range(4)), "roi_head.mask_head.upsample",
         "roi_head.mask_head.conv_logits"],
    )  # fmt: skip
    nvidia_tf2 = resnet(
        lambda stage, block, layer: "resnet50/" + (
            f"group_{stage - 1}/block_{block}/{layer}" if stage else "stem"
        ),
        lambda stage, block, layer: "resnet50/" + (
            f"group_{stage - 1}/block_{block}/{layer}/bn" if stage else "stem/bn"
        ),
        "kernel", TF, "/",
    ) | heads(
        lambda level: f"fpn/l{level}",
        lambda level: f"fpn/post_hoc_d{level}",
        ["rpn_head/rpn", "rpn_head/rpn-class", "rpn_head/rpn-box"],
        [f"box_head/{name}" for name in ("fc6", "fc7", "class-predict", "box-predict")],
        [*(f"mask_head/mask-conv-l{i}" for i in range(4)), "mask_head/conv5-mask",
         "mask_head/mask_fcn_logits"],
        "/", "kernel",
    )  # fmt: skip
    return [
        ("torchvision", torchvision(".0", "conv.0.0", [f"{i}.0" for i in range(4)])),
        ("torchvision_old", torchvision("", "conv", [f"mask_fcn{i}" for i in (1, 2, 3, 4)])),
        ("torchvision_resnet", torch_resnet("")),
        ("torchvision_resnet", torch_resnet("backbone.body.")),
        ("detectron2", detectron2),
        ("detectron2_resnet", detectron2_resnet("")),
        ("detectron2_resnet", detectron2_resnet("backbone.bottom_up.")),
        ("detectron_msra", msra_resnet("sb", OURS[:2])),
        ("detectron2_msra", msra_resnet(("gamma", "beta", "running_mean", "running_var"), OURS)),
        ("maskrcnn_benchmark", benchmark),
        ("mmdetection", mmdetection),
        ("google_resnet", google_resnet("")),
        ("google_resnet", google_resnet("resnet50/")),
        ("nvidia_rn50", nvidia_rn50()),
        ("nvidia_tf2", nvidia_tf2),
    ]


SYSTEMS = all_systems()
IDS = [f"{source}-{next(iter(names))}" for source, names in SYSTEMS]


def arrays_of(source, names, seed=0):
    """Random arrays under these names: shapes in that system's layout, two channels everywhere."""
    rng = np.random.default_rng(seed)
    last = SOURCES[source].background == "last"
    outputs = {"cls_score": CLASSES + 1, "bbox_pred": 4 * (CLASSES + (not last)),
               "mask_predictor": CLASSES + (not last), "objectness_logits": 3,
               "anchor_deltas": 12}  # fmt: skip
    arrays = {}
    for name, path in names.items():
        *_, layer, leaf = path.split("/")
        out = outputs.get(layer, 2)
        if leaf != "kernel":
            shape = (out,)
        elif path.startswith("box_head"):
            shape = (out, 7 * 7 * 2 if layer == "fc1" else 2)
        else:
            shape = (out, 2, 2, 2)
        if leaf == "kernel" and SOURCES[source].layout == "tf":
            shape = (*shape[2:], *shape[1::-1])
        arrays[name] = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    return arrays


def system(source):
    names = next(names for key, names in SYSTEMS if key == source)
    return names, arrays_of(source, names)
