"""Write swin_detections.npz: what a Mask R-CNN and a Cascade Mask R-CNN of mmdetection with small
Swin transformers find with random weights.

    python tests/goldens/swin/make_detections.py

in the environment of `make.py`. The models are those of configs/swin of mmdetection and of
Swin-Transformer-Object-Detection with few channels, proposals and detections. Weights follow from
their names (`tests.models.swin_weights`).
"""

import json
import sys
from pathlib import Path

import mmdet_stub  # noqa: F401

# isort: split
import mmdet.models  # noqa: F401
import numpy as np
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.models import swin_weights as case  # noqa: E402

FILE = Path(__file__).with_name("swin_detections.npz")
STDS = [[0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067]]
C, CLASSES = case.CHANNELS, case.CLASSES


def coder(stds):
    return dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=stds)


def box_head(stds, cascade):
    options = dict(type="Shared2FCBBoxHead", fc_out_channels=2 * C, reg_class_agnostic=False)
    if cascade:
        options |= dict(type="ConvFCBBoxHead", num_shared_convs=4, num_shared_fcs=1)
        options |= dict(conv_out_channels=C, norm_cfg=dict(type="BN"), reg_decoded_bbox=True)
        options["loss_bbox"] = dict(type="GIoULoss", loss_weight=10.0)
    options |= dict(in_channels=C, roi_feat_size=7, num_classes=CLASSES, bbox_coder=coder(stds))
    return options


def extractor(size):
    layer = dict(type="RoIAlign", output_size=size, sampling_ratio=0)
    strides = [4, 8, 16, 32]
    return dict(type="SingleRoIExtractor", roi_layer=layer, out_channels=C, featmap_strides=strides)


def detector(cascade):
    widths = [case.WIDTH * 2**i for i in range(4)]
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    roi_head = dict(type="StandardRoIHead", bbox_head=box_head(STDS[0], False))
    if cascade:
        roi_head = dict(type="CascadeRoIHead", num_stages=3, stage_loss_weights=[1, 0.5, 0.25])
        roi_head["bbox_head"] = [box_head(stds, True) for stds in STDS]
    mask_head = dict(type="FCNMaskHead", num_convs=4, in_channels=C, conv_out_channels=C)
    roi_head |= dict(mask_head=mask_head | dict(num_classes=CLASSES))
    roi_head |= dict(bbox_roi_extractor=extractor(7), mask_roi_extractor=extractor(14))
    trunk = dict(embed_dims=case.WIDTH, depths=case.DEPTHS, num_heads=case.HEADS)
    nms = dict(type="nms", iou_threshold=0.7)
    rpn = dict(nms_pre=case.PROPOSALS, max_per_img=case.PROPOSALS, nms=nms, min_bbox_size=0)
    rcnn = dict(score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5))
    rcnn |= dict(max_per_img=case.DETECTIONS, mask_thr_binary=0.5)
    anchors = dict(
        type="AnchorGenerator", scales=[8], ratios=[0.5, 1.0, 2.0], strides=[4, 8, 16, 32, 64]
    )
    return dict(
        type="CascadeRCNN" if cascade else "MaskRCNN",
        data_preprocessor=dict(type="DetDataPreprocessor", mean=mean, std=std, pad_size_divisor=32),
        backbone=dict(type="SwinTransformer", window_size=case.WINDOW, **trunk),
        neck=dict(type="FPN", in_channels=widths, out_channels=C, num_outs=5),
        rpn_head=dict(
            type="RPNHead",
            in_channels=C,
            feat_channels=C,
            anchor_generator=anchors,
            bbox_coder=coder([1.0] * 4),
        ),
        roi_head=roi_head,
        train_cfg=None,
        test_cfg=dict(rpn=rpn, rcnn=rcnn),
    )


def fill(model):
    state = {n: x for n, x in model.state_dict().items() if not n.endswith(case.UNUSED)}
    arrays = {n: torch.from_numpy(case.random_array(n, tuple(x.shape))) for n, x in state.items()}
    model.load_state_dict(arrays, strict=False)
    model.eval()
    return {name: tuple(x.shape) for name, x in state.items()}


def detections(cascade):
    model = MODELS.build(ConfigDict(detector(cascade)))
    shapes, masks = fill(model), []
    head = model.roi_head.mask_head[-1] if cascade else model.roi_head.mask_head
    paste = head.predict_by_feat

    def keep(mask_preds, *args, activate_map=False, **kwargs):
        masks.append(mask_preds[0] if activate_map else mask_preds[0].sigmoid())
        return paste(mask_preds, *args, activate_map=activate_map, **kwargs)

    head.predict_by_feat = keep
    image = torch.from_numpy(case.random_photo().transpose(2, 0, 1).copy())
    sample, size = DetDataSample(), image.shape[1:]
    sample.set_metainfo(dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0)))
    data = model.data_preprocessor(dict(inputs=[image], data_samples=[sample]))
    with torch.inference_mode():
        found = model(**data, mode="predict")[0].pred_instances
    rows = torch.arange(len(found.labels))
    probabilities = masks[0][rows, found.labels][:, ::4, ::4]
    return shapes, dict(
        boxes=found.bboxes, scores=found.scores, labels=found.labels, masks=probabilities
    )


def main():
    saved = {}
    DefaultScope.get_instance("mmdet", scope_name="mmdet")
    for name, cascade in (("mask", False), ("cascade", True)):
        shapes, found = detections(cascade)
        saved[f"{name}/shapes"] = np.array(json.dumps(shapes))
        saved |= {f"{name}/{key}": value.numpy() for key, value in found.items()}
        print(name, {key: tuple(value.shape) for key, value in found.items()})
        print(found["scores"][:8], found["boxes"][:3])
    np.savez_compressed(FILE, **saved)


if __name__ == "__main__":
    main()
