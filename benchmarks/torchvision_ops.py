"""Time torchvision's RoIAlign and NMS at the sizes of `mask_rcnn_jax.benchmark kernels`.

    python benchmarks/torchvision_ops.py FILE.json

Needs torch and torchvision with CUDA. Boxes are random, equal in number and kind but not in value.
"""

import json
import sys

import numpy as np
import torch
import torchvision


def milliseconds(function, repeats: int = 20) -> float:
    """Return the median time per call, measured by CUDA events."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(float(np.median(times)), 4)


def random_boxes(count: int, largest: float = 300.0) -> torch.Tensor:
    """Return [count, 4] boxes on 832 x 1344 pixels."""
    corner = torch.rand(count, 2, device="cuda") * torch.tensor([1000.0, 500.0], device="cuda")
    return torch.cat([corner, corner + 16 + torch.rand(count, 2, device="cuda") * largest], dim=1)


def roi_align(images: int, rois: int, size: int) -> dict[str, float]:
    """Pool P2 to P5 of 256 channels with 2 x 2 samples in float32, the kernel's compute dtype."""
    shapes = {str(i): (832 // s, 1344 // s) for i, s in enumerate((4, 8, 16, 32))}
    maps = {
        name: torch.randn(images, 256, *shape, device="cuda", requires_grad=True)
        for name, shape in shapes.items()
    }
    pool = torchvision.ops.MultiScaleRoIAlign(list(shapes), size, sampling_ratio=2)
    boxes = [random_boxes(rois) for _ in range(images)]
    out = pool(maps, boxes, [(832, 1344)] * images)
    grad = torch.randn_like(out)

    def both():
        pool(maps, boxes, [(832, 1344)] * images).backward(grad)

    with torch.no_grad():
        forward = milliseconds(lambda: pool(maps, boxes, [(832, 1344)] * images))
    return {"forward_ms": forward, "forward_and_backward_ms": milliseconds(both)}


def nms(problems: int, count: int, threshold: float) -> dict[str, float]:
    """Run all problems in one call, as torchvision's detectors do."""
    boxes, scores = random_boxes(problems * count), torch.rand(problems * count, device="cuda")
    group = torch.arange(problems, device="cuda").repeat_interleave(count)
    return {
        "ms": milliseconds(lambda: torchvision.ops.batched_nms(boxes, scores, group, threshold))
    }


def main(path: str) -> None:
    figures = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "device": torch.cuda.get_device_name(),
        "roi_align box_train_2_images_4_samples": roi_align(2, 512, 7),
        "roi_align box_train_8_images_4_samples": roi_align(8, 512, 7),
        "roi_align mask_train_8_images_4_samples": roi_align(8, 128, 14),
        "nms rpn_train_2_images": nms(10, 2000, 0.7),
        "nms rpn_train_8_images": nms(40, 2000, 0.7),
        "nms detections_1_image": nms(1, 4096, 0.5),
    }
    print(json.dumps(figures, indent=1))
    with open(path, "w") as file:
        json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
