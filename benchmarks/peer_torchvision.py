"""torchvision's side of `peers.py`: a step of its Mask R-CNN for every line that comes in."""

import argparse
import sys
import time

import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--mode")
parser.add_argument("--size")
parser.add_argument("--batch", type=int)
parser.add_argument("--precision")
parser.add_argument("--channels_last", action="store_true")
parser.add_argument("--compile", action="store_true")
arguments = parser.parse_args()

height, width = map(int, arguments.size.split(","))
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torchvision.models.detection.maskrcnn_resnet50_fpn(
    weights=None, weights_backbone=None, num_classes=91,
    min_size=min(height, width), max_size=max(height, width),
    box_score_thresh=0.0,  # random weights are sure of nothing, and 100 detections are wanted
)  # fmt: skip
# As `trainable_backbone_layers=3` does with pretrained weights.
for name, parameter in model.backbone.body.named_parameters():
    parameter.requires_grad_(name.startswith(("layer2", "layer3", "layer4")))
model.transform.postprocess = lambda result, *_: result  # masks are not pasted
model.to(device).train(arguments.mode == "train")
if arguments.channels_last:
    model.to(memory_format=torch.channels_last)
if arguments.compile:
    model.backbone = torch.compile(model.backbone)
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=1e-5, momentum=0.9, weight_decay=1e-4
)
images = [torch.rand(3, height, width, device=device) for _ in range(arguments.batch)]


def ellipses():
    """8 objects of about the sizes that `mask_rcnn_jax.benchmarking.inputs` draws."""
    centre = (0.1 + 0.8 * torch.rand(8, 2)) * torch.tensor([width, height])
    largest = min(height, width) / 3
    half = torch.exp(
        torch.rand(8, 2) * torch.log(torch.tensor(largest / 8)) + torch.log(torch.tensor(8.0))
    )
    limit = torch.tensor([width, height])
    boxes = torch.cat([(centre - half).clamp(min=0), torch.minimum(centre + half, limit)], dim=1)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    masks = [
        ((x - c[0]) / h[0]) ** 2 + ((y - c[1]) / h[1]) ** 2 <= 1
        for c, h in zip(centre, half, strict=True)
    ]
    return {
        "boxes": boxes.to(device),
        "labels": torch.randint(1, 91, (8,), device=device),
        "masks": torch.stack(masks).to(torch.uint8).to(device),
    }


targets = [ellipses() for _ in images]
scaler = torch.autocast(device, torch.bfloat16, enabled=arguments.precision == "bfloat16")


def step():
    if arguments.mode == "train":
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


for _ in range(2):
    step()
name = (
    torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
)
print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {name}", flush=True)
for _ in sys.stdin:
    started = time.perf_counter()
    step()
    print(time.perf_counter() - started, flush=True)
