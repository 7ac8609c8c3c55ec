"""Heads of RoIs in configs of mmdetection 3, alone or in a cascade, as entries of a recipe."""

from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Fields
from mask_rcnn_jax.formats.mmdet_backbones import norm
from mask_rcnn_jax.formats.mmdet_fields import (
    BOX,
    BOX_ROIS,
    DETECTORS,
    HEADS,
    MASK,
    MASK_LOSS,
    MASK_ROIS,
    MASKS,
    POINT,
    RCNN_TEST,
    RCNN_TRAIN,
)

STDS = "bbox_coder.target_stds"
# Fields of lists with an item for each stage of a cascade, and what may differ between the items.
STAGED: dict[str, tuple[str, ...]] = {
    BOX: (STDS,),
    RCNN_TRAIN: ("assigner.pos_iou_thr", "assigner.neg_iou_thr", "assigner.min_pos_iou"),
    MASK: (),
    BOX_ROIS: (),
    MASK_ROIS: (),
}
MAX_STAGES = 16


def unstack(fields: Fields) -> list[dict[str, str]]:
    """Leave one box head, mask head and so on in the fields of a cascade, for all of its stages.

    Returns the names of the fields that may differ, for each stage, by those of the fields that
    are left; [] for other detectors.

    Raises ValueError where more than that differs.
    """
    if fields.values.get("model.type") != "CascadeRCNN":
        return []
    count = fields.get("model.roi_head.num_stages")
    if type(count) is not int or not 2 <= count <= MAX_STAGES:
        raise fields.fault("model.roi_head.num_stages", f"2 to {MAX_STAGES}")
    stages: list[dict[str, str]] = [{} for _ in range(count)]
    for at, free in STAGED.items():
        if not fields.named(f"{at}.0"):
            listed = [{name.removeprefix(f"{at}."): name for name in fields.named(at)}] * count
        else:
            listed = [
                {name.removeprefix(f"{at}.{i}."): name for name in fields.named(f"{at}.{i}")}
                for i in range(count)
            ]
        if fields.named(at) and (not all(listed) or fields.named(f"{at}.{count}")):
            raise fields.fault("model.roi_head.num_stages", f"the number of items of {at}")
        for key in dict.fromkeys(key for stage in listed for key in stage):
            names = [stage.get(key, f"{at}.{i}.{key}") for i, stage in enumerate(listed)]
            values = [fields.values.get(name) for name in names]
            if key in free:
                for stage, name in zip(stages, names, strict=True):
                    stage[f"{at}.{key}"] = name
            elif odd := [i for i in range(count) if values[i] != values[0]]:
                raise fields.fault(names[odd[0]], f"{show(values[0])}, as in the first stage")
            _move(fields, names, f"{at}.{key}")
    return stages


def _move(fields: Fields, names: list[str], name: str) -> None:
    """Give the first of some fields another name, and count the others as read."""
    first = names[0]
    if first != name:
        fields.values[name] = fields.values[first]
        if first in fields.places:
            fields.places[name] = fields.places[first]
        fields.unread[name] = None
        fields.ignore(names)


def heads(fields: Fields, stages: list[dict[str, str]], notes: list[str]) -> dict[str, Any]:
    """The entries of heads, box coder, RoIAlign and cascade. stages: see `unstack`."""
    kind = fields.get(f"{BOX}.type")
    fields.check({"model.roi_head.type": (DETECTORS[fields.values["model.type"]],)})
    entries: dict[str, Any] = {f"model.box_head.{k}": v for k, v in HEADS.get(kind, {}).items()}
    if kind == "ConvFCBBoxHead":
        for name in ("num_convs", "num_fcs"):
            field = f"{BOX}.{name.replace('_', '_shared_')}"
            value = fields.get(field, 0)
            if type(value) is not int or not 0 <= value <= 100:
                raise fields.fault(field, "a whole number")
            entries[f"model.box_head.{name}"] = value
    if fields.named(f"{BOX}.norm_cfg") and kind != "Shared2FCBBoxHead":
        entries["model.box_head.norm"] = norm(fields, BOX, "BN")
    fields.ignore([f"{BOX}.norm_cfg"])
    entries["model.box_coder.weights"] = tuple(round(1 / s, 12) for s in _stds(fields, stages, 0))
    entries |= _roi_align(fields) | _mask_head(fields, len(stages))
    return entries | (_cascade(fields, stages, notes) if stages else {})


def _stds(fields: Fields, stages: list[dict[str, str]], stage: int) -> tuple:
    name = stages[stage][f"{BOX}.{STDS}"] if stages else f"{BOX}.{STDS}"
    fields.ignore([f"{BOX}.{STDS}"])
    stds = fields.numbers(name, "four numbers above 0", 4)
    if min(stds) <= 0:
        raise fields.fault(name, "four numbers above 0")
    return stds


def _roi_align(fields: Fields) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, default in (("sampling_ratio", 0), ("aligned", True)):
        value = fields.get(f"{BOX_ROIS}.roi_layer.{key}", default)
        other = f"{MASK_ROIS}.roi_layer.{key}"
        if fields.get(other, value) != value:
            raise fields.fault(other, f"{value!r}, as of the box head")
        entries[f"model.roi_align.{key}"] = value
    return entries


def _mask_head(fields: Fields, stages: int) -> dict[str, Any]:
    detector = fields.values["model.type"]
    if detector == "FasterRCNN" and fields.named(MASK):
        raise fields.fault("model.type", "'MaskRCNN' with a mask_head")
    if not fields.named(MASK):
        if detector in ("MaskRCNN", "PointRend"):
            raise fields.fault("model.type", "'FasterRCNN' without a mask_head")
        return {"model.mask_head.name": "none"}
    kind = "CoarseMaskHead" if detector == "PointRend" else "FCNMaskHead"
    same, fixed = MASKS[kind]
    fields.check({f"{MASK}.type": (kind,), **MASK_LOSS, **fixed})
    if detector == "PointRend":
        if not fields.named(POINT):
            raise fields.fault(f"{POINT}.type", "'MaskPointHead'")
        least = {f"{RCNN_TEST}.subdivision_steps": 1, f"{RCNN_TEST}.subdivision_num_points": 196}
        for field, low in least.items():  # below, mmdetection keeps cells of the coarse mask
            if fields.number(field, low) < low:
                raise fields.fault(field, f"at least {low}")
        name = {"model.mask_head.name": "pointrend"}
        return name | fields.same(same, "coco_detectron2:pointrend")
    several = {"model.mask_head.name": "mean", "model.mask_head.heads": stages} if stages else {}
    return several | fields.same(same, "coco_mmdet")


def _cascade(fields: Fields, stages: list[dict[str, str]], notes: list[str]) -> dict[str, Any]:
    ious = []
    for i, stage in enumerate(stages):
        high, low, least = (
            stage.get(name, name) for name in (f"{RCNN_TRAIN}.{key}" for key in STAGED[RCNN_TRAIN])
        )
        iou = float(fields.number(high))
        if i and fields.get(low, iou) != iou:
            raise fields.fault(low, f"{iou}, that of pos_iou_thr")
        fields.get(least)
        ious.append(iou)
    weights = [tuple(1 / std for std in _stds(fields, stages, i)) for i in range(1, len(stages))]
    name = "model.roi_head.stage_loss_weights"
    if (given := fields.get(name)) is not None:
        notes.append(f"{name} = {show(given)}: all stages weigh the same")
    return {
        "model.cascade.fg_iou_thresh": tuple(ious[1:]),
        "model.cascade.box_weights": tuple(weights),
        "model.cascade.weight_factors": tuple(float(n) for n in range(2, len(stages) + 1)),
        "model.cascade.mean_of": "logits",
    }
