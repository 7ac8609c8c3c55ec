"""Mask and keypoint heads of detectron2's configs, as entries of a recipe."""

from typing import Any

from mask_rcnn_jax.annotations.keypoints import PERSON
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.d2_fields import KEYPOINT, LEVELS, MASK, POINT
from mask_rcnn_jax.formats.fields import Fields

SAME_MASK = {
    f"{MASK}.NUM_CONV": "model.mask_head.num_convs",
    f"{MASK}.CONV_DIM": "model.mask_head.channels",
}
SAME_POINTREND = {
    f"{MASK}.CONV_DIM": "model.mask_head.channels",
    f"{MASK}.FC_DIM": "model.mask_head.fc_channels",
    f"{MASK}.NUM_FC": "model.mask_head.num_fcs",
    f"{MASK}.OUTPUT_SIDE_RESOLUTION": "model.mask_head.coarse_size",
    f"{POINT}.FC_DIM": "model.mask_head.point_channels",
    f"{POINT}.NUM_FC": "model.mask_head.num_point_fcs",
    f"{POINT}.TRAIN_NUM_POINTS": "model.mask_head.train_points",
    f"{POINT}.OVERSAMPLE_RATIO": "model.mask_head.oversample",
    f"{POINT}.IMPORTANCE_SAMPLE_RATIO": "model.mask_head.importance",
    f"{POINT}.SUBDIVISION_STEPS": "model.mask_head.subdivisions",
    f"{POINT}.SUBDIVISION_NUM_POINTS": "model.mask_head.subdivision_points",
}
SAME_KEYPOINTS = {
    f"{KEYPOINT}.LOSS_WEIGHT": "loss.keypoint_weight",
    f"{KEYPOINT}.MIN_KEYPOINTS_PER_IMAGE": "data.min_keypoints",
}
POINTREND: dict[str, tuple] = {
    f"{MASK}.IN_FEATURES": (LEVELS[:1],),
    f"{MASK}.POOLER_RESOLUTION": (14,),
    f"{MASK}.POINT_HEAD_ON": (True,),
    f"{MASK}.CLS_AGNOSTIC_MASK": (False,),
    f"{POINT}.NAME": ("StandardPointHead",),
    f"{POINT}.IN_FEATURES": (LEVELS[:1],),
    f"{POINT}.CLS_AGNOSTIC_MASK": (False,),
    f"{POINT}.COARSE_PRED_EACH_LAYER": (True,),
}
KEYPOINTS: dict[str, tuple] = {
    f"{KEYPOINT}.NAME": ("KRCNNConvDeconvUpsampleHead",),
    f"{KEYPOINT}.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS": (True, False),
    f"{KEYPOINT}.POOLER_RESOLUTION": (14,),
}
MAX_KEYPOINTS = 1000
NORMS = {
    **{"FrozenBN": "frozen", "BN": "batch", "SyncBN": "sync_batch", "nnSyncBN": "sync_batch"},
    **{"naiveSyncBN": "naive_sync_batch", "GN": "group", "": "none"},
}


def norm(fields: Fields, name: str, default: str) -> str:
    """The norm that a field names."""
    kind = fields.get(name, default)
    if not isinstance(kind, str) or kind not in NORMS:
        raise fields.fault(name, f"one of {list(NORMS)}")
    return NORMS[kind]


def mask_head(fields: Fields, base: str) -> dict[str, Any]:
    """The entries of the mask head. base: the recipe that they change."""
    if not fields.get("MODEL.MASK_ON"):
        fields.ignore([MASK, POINT])
        no_masks = {"model.mask_targets.kind": "crops", "data.max_vertices": 0}
        return {"model.mask_head.name": "none", **no_masks}
    if fields.get(f"{MASK}.NAME") not in ("PointRendMaskHead", "CoarseMaskHead"):
        kind = norm(fields, f"{MASK}.NORM", "")
        return {"model.mask_head.norm": kind, **fields.same(SAME_MASK, base)}
    if f"{MASK}.POINT_HEAD_ON" not in fields.values:
        raise fields.fault(f"{MASK}.POINT_HEAD_ON", "True")
    fields.check(POINTREND)
    entries: dict[str, Any] = {"model.mask_head.name": "pointrend"}
    entries |= fields.same(SAME_POINTREND, "coco_detectron2:pointrend")
    width = fields.values.get("MODEL.FPN.OUT_CHANNELS", 256)
    if fields.values.get(f"{MASK}.CONV_DIM", 256) != width:
        raise fields.fault(f"{MASK}.CONV_DIM", f"{width}, that of MODEL.FPN.OUT_CHANNELS")
    if fields.values.get("INPUT.MASK_FORMAT") != "bitmask":
        raise fields.fault("INPUT.MASK_FORMAT", "'bitmask' for PointRend")
    fields.ignore(f"{MASK}.{name}" for name in ("NUM_CONV", "POOLER_TYPE", "NORM"))
    fields.ignore([f"{POINT}.NUM_CLASSES"])
    return entries


def keypoint_head(fields: Fields, notes: list[str]) -> dict[str, Any]:
    """The entries of the keypoint head, and of the keypoints of the data."""
    sigmas = fields.get("TEST.KEYPOINT_OKS_SIGMAS", ())
    if not fields.get("MODEL.KEYPOINT_ON", False):
        fields.ignore([KEYPOINT])
        return {}
    fields.check(KEYPOINTS)
    dims = fields.get(f"{KEYPOINT}.CONV_DIMS", (512,) * 8)
    is_list = isinstance(dims, list | tuple) and all(type(dim) is int for dim in dims)
    if not is_list or not 1 <= len(dims) <= 100 or len(set(dims)) > 1:
        raise fields.fault(f"{KEYPOINT}.CONV_DIMS", "a list of equal numbers")
    count = fields.get(f"{KEYPOINT}.NUM_KEYPOINTS", len(PERSON))
    if type(count) is not int or not 1 <= count <= MAX_KEYPOINTS:
        raise fields.fault(f"{KEYPOINT}.NUM_KEYPOINTS", f"1 to {MAX_KEYPOINTS}")
    names: tuple[str, ...] = PERSON
    if count != len(PERSON):
        names = tuple(f"point_{n}" for n in range(1, count + 1))
        text = "set data.keypoints, their names; those with left and right are mirrored"
        notes.append(f"{KEYPOINT}.NUM_KEYPOINTS = {count}: {text}")
    average = fields.get(f"{KEYPOINT}.NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS", True)
    entries: dict[str, Any] = {
        "model.keypoint_head.name": "conv_deconv",
        "model.keypoint_head.num_keypoints": count,
        "model.keypoint_head.channels": dims[0],
        "model.keypoint_head.num_convs": len(dims),
        "model.keypoint_head.score": "softmax",
        "loss.keypoint_average": "visible" if average else "budget",
        "data.keypoints": names,
        "data.keypoint_offset": 0.5,
        "data.min_keypoints": 1,
    }
    if sigmas not in ((), []):
        values = fields.numbers("TEST.KEYPOINT_OKS_SIGMAS", f"{count} numbers", count)
        entries["eval.keypoint_sigmas"] = tuple(map(float, values))
    return entries | fields.same(SAME_KEYPOINTS, "coco_keypoints:detectron2")


def datasets(fields: Fields, notes: list[str]) -> dict[str, Any]:
    """The entries of the sets that detectron2 has under a name."""
    entries: dict[str, Any] = {}
    kind = "keypoints_coco" if fields.values.get("MODEL.KEYPOINT_ON") else "coco"
    for name, part, side in (("TRAIN", "train", "train"), ("TEST", "val", "val")):
        names = fields.get(f"DATASETS.{name}", ())
        names = tuple(names) if isinstance(names, list | tuple) else (names,)
        if "lvis" in str(names):
            entries["eval.protocol"] = "lvis"
        if names != (f"{kind}_2017_{part}",):
            advice = f"set data.{side}_json and data.{side}_images"
            notes.append(f"DATASETS.{name} = {show(names)}: {advice}")
        elif kind != "coco":
            entries["data.tfds_dir"] = ""
            json = f"data/coco/annotations/person_keypoints_{part}2017.json"
            entries[f"data.{side}_json"] = json
    return entries
