"""Run torchvision's Mask R-CNN for `peers.py`."""

import numpy as np
import torch
import torchvision
from peers import draw_boxes, peer_settings, serve
from torchvision.models.detection import backbone_utils

settings = peer_settings()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
sides = sorted((settings.height, settings.width))
resnet = torchvision.models.resnet50(norm_layer=torchvision.ops.misc.FrozenBatchNorm2d)
# With fixed statistics, as `maskrcnn_resnet50_fpn` has them with pretrained weights, and as many
# trainable layers.
model = torchvision.models.detection.MaskRCNN(
    backbone_utils._resnet_fpn_extractor(resnet, trainable_layers=3),
    num_classes=91,
    min_size=sides[0],
    max_size=sides[1],
    box_score_thresh=0.0,  # random weights give low scores, and 100 detections are wanted
)
model.transform.postprocess = lambda result, *_: result  # do not paste masks
model.to(device).train(settings.mode == "train")
if settings.channels_last:
    model.to(memory_format=torch.channels_last)
if settings.compile:
    model.backbone = torch.compile(model.backbone)
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=1e-5, momentum=0.9, weight_decay=1e-4
)
images = [
    torch.rand(3, settings.height, settings.width, device=device) for _ in range(settings.batch)
]


def target(boxes: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the target of an image with an ellipse in each box [N, 4]."""
    y, x = np.mgrid[: settings.height, : settings.width]
    center, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
    masks = [
        ((x - c[0]) / h[0]) ** 2 + ((y - c[1]) / h[1]) ** 2 <= 1
        for c, h in zip(center, half, strict=True)
    ]
    return {
        "boxes": torch.tensor(boxes, device=device),
        "labels": torch.randint(1, 91, (len(boxes),), device=device),
        "masks": torch.tensor(np.stack(masks).astype(np.uint8), device=device),
    }


targets = [target(boxes) for boxes in draw_boxes(settings)]
scaler = torch.autocast(device, torch.bfloat16, enabled=settings.precision != "float32")


def step():
    if settings.mode == "train":
        with scaler:
            loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        with scaler, torch.inference_mode():
            model(images)
    if device == "cuda":
        torch.cuda.synchronize()


threads = f"cpu, {torch.get_num_threads()} threads"
name = torch.cuda.get_device_name() if device == "cuda" else threads
serve(step, f"torch {torch.__version__}, torchvision {torchvision.__version__}, {name}")
