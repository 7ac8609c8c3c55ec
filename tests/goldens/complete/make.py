"""Write what complete narrow models of other systems find, one file for each:

    python tests/goldens/complete/make.py torchvision torchvision_v2 torchvision_keypoints
    PYTHONPATH=D2:D2/projects/PointRend python tests/goldens/complete/make.py detectron2 ...
    python tests/goldens/complete/make.py mmdetection mmdetection_swin mmdetection_swin_cascade

by names of `tests.parity.systems.SYSTEMS`, whose weights are drawn there; D2 is a checkout of
github.com/facebookresearch/detectron2, which needs none of its compiled code. The systems' own
configs are used but for sizes, and an image goes the systems' own way from its pixels to masks.

Refuses a model whose outputs depend on rounding: weights that differ by 1e-6 must give the same.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent / "swin")]  # for mmdet_stub
from tests.parity.systems import (  # noqa: E402
    ANCHORS,
    CHANNELS,
    CLASSES,
    HIDDEN,
    LONG,
    PROPOSALS,
    ROIS,
    SHORT,
    SIZES,
    SYSTEMS,
    TRAINED,
    diamonds,
    draw,
    image,
    objects,
)
from tests.survivors import Survivors, pair_survivors  # noqa: E402

C, NOISE = CHANNELS, 1e-6


def torchvision_model(name):
    from torchvision.models import resnet50
    from torchvision.models.detection import faster_rcnn, keypoint_rcnn, mask_rcnn, rpn
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops import FrozenBatchNorm2d

    v2, points = name.endswith("v2"), name.endswith("keypoints")
    norm = torch.nn.BatchNorm2d if v2 else None
    trunk = resnet50(weights=None, norm_layer=norm or FrozenBatchNorm2d)
    for part in () if v2 else (trunk.conv1, trunk.layer1):  # three of five parts learn
        part.requires_grad_(False)
    layers, widths = {f"layer{i + 1}": str(i) for i in range(4)}, [256, 512, 1024, 2048]
    backbone = BackboneWithFPN(trunk, layers, widths, C, norm_layer=norm)
    anchors = faster_rcnn._default_anchorgen()
    box_head = faster_rcnn.TwoMLPHead(C * 49, HIDDEN)
    if v2:
        box_head = faster_rcnn.FastRCNNConvFCHead((C, 7, 7), [C] * 4, [HIDDEN], norm_layer=norm)
    options = dict(
        min_size=SHORT,
        max_size=LONG,
        rpn_anchor_generator=anchors,
        rpn_head=rpn.RPNHead(C, anchors.num_anchors_per_location()[0], conv_depth=1 + v2),
        rpn_post_nms_top_n_test=PROPOSALS,
        rpn_post_nms_top_n_train=PROPOSALS,
        rpn_batch_size_per_image=ANCHORS,
        box_batch_size_per_image=ROIS,
        box_detections_per_img=SYSTEMS[name].detections,
        box_head=box_head,
        box_predictor=faster_rcnn.FastRCNNPredictor(HIDDEN, 2 if points else CLASSES + 1),
    )
    if points:
        options |= dict(
            keypoint_head=keypoint_rcnn.KeypointRCNNHeads(C, [C] * 8),
            keypoint_predictor=keypoint_rcnn.KeypointRCNNPredictor(C, 17),
        )
        model = keypoint_rcnn.KeypointRCNN(backbone, **options)
    else:
        options |= dict(
            mask_head=mask_rcnn.MaskRCNNHeads(C, [C] * 4, 1, norm_layer=norm),
            mask_predictor=mask_rcnn.MaskRCNNPredictor(C, C, CLASSES + 1),
        )
        model = mask_rcnn.MaskRCNN(backbone, **options)

    def predict(pixels):
        [found] = model([torch.from_numpy(pixels).permute(2, 0, 1) / 255])
        fields = dict(boxes=found["boxes"], scores=found["scores"], classes=found["labels"])
        if points:
            return fields | dict(keypoints=found["keypoints"], points=found["keypoints_scores"])
        return fields | dict(masks=found["masks"][:, 0] > 0.5)

    def train(images):
        given = [torch.from_numpy(pixels).permute(2, 0, 1) / 255 for pixels in images]
        targets = []
        for i in range(len(images)):
            boxes, classes, _ = objects(i)
            one = dict(boxes=boxes, labels=classes, masks=diamonds(boxes).astype(np.uint8))
            targets.append({key: torch.from_numpy(value) for key, value in one.items()})
        return model(given, targets)

    return model.eval(), predict, train, f"torchvision {torchvision.__version__}"


def detectron2_model(name):
    import detectron2
    from detectron2.config import get_cfg
    from detectron2.engine.defaults import DefaultPredictor
    from detectron2.structures import Boxes, Instances, PolygonMasks
    from detectron2.utils.events import EventStorage

    root, cfg = Path(detectron2.__file__).parents[1], get_cfg()
    path = "configs/COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
    if name.endswith("cascade"):
        path = "configs/Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml"
    elif name.endswith("pointrend"):
        from point_rend import add_pointrend_config

        add_pointrend_config(cfg)
        path = "configs/InstanceSegmentation/pointrend_rcnn_R_50_FPN_1x_coco.yaml"
        path = f"projects/PointRend/{path}"
    cfg.merge_from_file(str(root / path))
    sizes = {
        "MODEL.DEVICE": "cpu",
        "MODEL.WEIGHTS": "",
        "INPUT.MIN_SIZE_TEST": SHORT,
        "INPUT.MAX_SIZE_TEST": LONG,
        "MODEL.FPN.OUT_CHANNELS": C,
        "MODEL.RPN.POST_NMS_TOPK_TEST": PROPOSALS,
        "MODEL.RPN.POST_NMS_TOPK_TRAIN": PROPOSALS,
        "MODEL.RPN.BATCH_SIZE_PER_IMAGE": ANCHORS,
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": ROIS,
        "MODEL.ROI_HEADS.NUM_CLASSES": CLASSES,
        "MODEL.ROI_BOX_HEAD.FC_DIM": HIDDEN,
        "MODEL.ROI_MASK_HEAD.CONV_DIM": C,
        "TEST.DETECTIONS_PER_IMAGE": SYSTEMS[name].detections,
    }
    if name.endswith("pointrend"):
        sizes |= {"MODEL.ROI_MASK_HEAD.FC_DIM": HIDDEN, "MODEL.POINT_HEAD.FC_DIM": C}
        sizes |= {"MODEL.POINT_HEAD.NUM_CLASSES": CLASSES}
    cfg.merge_from_list([part for item in sizes.items() for part in item])
    predictor = DefaultPredictor(cfg)

    def predict(pixels):
        found = predictor(np.ascontiguousarray(pixels[..., ::-1]))["instances"]
        fields = dict(boxes=found.pred_boxes.tensor, scores=found.scores)
        return fields | dict(classes=found.pred_classes + 1, masks=found.pred_masks)

    def train(images):
        given = []
        for i, pixels in enumerate(images):
            boxes, classes, polygons = objects(i)
            one = Instances(pixels.shape[:2], gt_boxes=Boxes(boxes))
            one.gt_classes = torch.from_numpy(classes - 1)
            one.gt_masks = PolygonMasks([[polygon.reshape(-1)] for polygon in polygons])
            planes = torch.from_numpy(pixels[..., ::-1].transpose(2, 0, 1).copy())
            given.append(dict(image=planes, instances=one))
        with EventStorage():
            return predictor.model(given)

    command = ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.check_output(command, text=True).strip()
    return predictor.model, predict, train, f"detectron2 {commit}"


def mmdetection_model(name):
    import mmdet_stub  # noqa: F401

    # isort: split
    import mmdet
    from mmdet.apis import inference_detector, init_detector
    from mmengine.config import Config

    def read(path):
        return Config.fromfile(Path(mmdet.__file__).parent / ".mim/configs" / path)

    config = read("mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py")
    swin, cascade = "swin" in name, name.endswith("cascade")
    if swin:
        config = of_swin = read("swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py")
    if cascade:  # as Swin-Transformer-Object-Detection has it
        config = read("cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py")
        config.model.backbone, config.model.neck = of_swin.model.backbone, of_swin.model.neck
    model, heads = config.model, config.model.roi_head
    model.backbone.init_cfg = None
    model.neck.out_channels = C
    model.rpn_head.update(in_channels=C, feat_channels=C)
    for extractor in (heads.bbox_roi_extractor, heads.mask_roi_extractor):
        extractor.out_channels = C
    for head in heads.bbox_head if cascade else [heads.bbox_head]:
        head.update(in_channels=C, fc_out_channels=HIDDEN, num_classes=CLASSES)
        if cascade:
            head.update(type="ConvFCBBoxHead", num_shared_convs=4, num_shared_fcs=1)
            head.update(conv_out_channels=C, norm_cfg=dict(type="BN"), reg_class_agnostic=False)
    heads.mask_head.update(in_channels=C, conv_out_channels=C, num_classes=CLASSES)
    model.test_cfg.rpn.max_per_img = PROPOSALS
    model.test_cfg.rcnn.max_per_img = SYSTEMS[name].detections
    for step in config.test_dataloader.dataset.pipeline:
        if step.type == "Resize":
            step.scale = (LONG, SHORT)
    built = init_detector(config, palette="random", device="cpu")

    def predict(pixels):
        found = inference_detector(built, np.ascontiguousarray(pixels[..., ::-1])).pred_instances
        fields = dict(boxes=found.bboxes, scores=found.scores, masks=found.masks)
        return fields | dict(classes=found.labels + 1)

    return built, predict, None, f"mmdet {mmdet.__version__}"


def found_by(predict):
    with torch.inference_mode():
        found = [predict(image(i)) for i in range(len(SIZES))]
    return [{key: np.asarray(value) for key, value in one.items()} for one in found]


def losses_of(model, train):
    """Losses, norms of their sum's gradients, and norms of statistics after the step."""
    model.train()
    model.zero_grad()
    terms = train([image(i, (SHORT, LONG)) for i in range(len(SIZES))])
    sum(terms.values()).backward()
    model.eval()
    learned = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    norms = {name: p.grad.norm().item() for name, p in learned}
    live = [n for n, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    state = model.state_dict()
    stored = [f"{name}.running_{part}" for name in live for part in ("mean", "var")]
    statistics = {name: state[name].norm().item() for name in stored}
    return {name: value.item() for name, value in terms.items()}, norms, statistics


def moved(one, other):
    """How far apart boxes, scores and keypoints of one image are, if all are in both."""
    sides = [Survivors(f["boxes"], f["scores"], f["classes"]) for f in (one, other)]
    rows = pair_survivors(*sides, iou_thresh=0.5, box_close=5e-3, score_close=5e-5)
    assert len(rows[0]) == len(one["scores"]) == len(other["scores"]), "rounding decides"
    names = [name for name in ("boxes", "scores", "keypoints") if name in one]
    return [np.abs(one[name][rows[0]] - other[name][rows[1]]).max() for name in names]


def main(name):
    system = SYSTEMS[name]
    model, predict, train, version = globals()[f"{system.library}_model"](name)
    state = {key: a for key, a in model.state_dict().items() if a.is_floating_point()}
    shapes = {key: tuple(a.shape) for key, a in state.items()}
    drawn, rng = draw(shapes, system.gains), np.random.default_rng(0)
    found, losses = [], []
    for scale in (0, NOISE, NOISE):
        arrays = {
            key: torch.from_numpy(np.float32(a * (1 + scale * rng.standard_normal(a.shape))))
            for key, a in drawn.items()
        }
        model.load_state_dict(arrays, strict=False)  # counters and indices stay
        found.append(found_by(predict))
        if name in TRAINED:
            losses.append(losses_of(model, train))
            for first, last, limit in zip(losses[0], losses[-1], (1e-4, 1e-2, 1e-5), strict=True):
                most = max((abs(last[key] / first[key] - 1) for key in first), default=0)
                print(name, f"and {len(first)} losses, gradients or statistics by", most)
                assert most < limit
        apart = [moved(*pair) for pair in zip(found[0], found[-1], strict=True)]
        print(name, f"weights * (1 +- {scale}) move boxes, scores, ... by", np.max(apart, axis=0))
    saved = {"shapes": np.array(json.dumps(shapes))}
    saved["versions"] = np.array(f"{version}, torch {torch.__version__}")
    for i, one in enumerate(found[0]):
        print(i, "objects of each class", np.bincount(one["classes"]))
        if "masks" in one:
            one["masks"] = np.packbits(one["masks"], axis=-1)
        saved |= {f"{key}{i}": value for key, value in one.items()}
    if losses:
        names = ("losses", "gradients", "statistics")
        saved |= dict(zip(names, map(json.dumps, losses[0]), strict=True))
    path = HERE / f"{name}.npz"
    np.savez_compressed(path, **saved)
    print(saved["versions"], path.stat().st_size, "bytes")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        main(given)
