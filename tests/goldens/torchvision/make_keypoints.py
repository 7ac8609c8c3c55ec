"""Write keypoints.npz with torchvision 0.28.0 and torch 2.13.0, on a CPU:

python tests/goldens/torchvision/make_keypoints.py
"""

from pathlib import Path

import numpy as np
import torch
from torchvision.models.detection import roi_heads

POINTS = 5


def heatmaps(rng):
    """Boxes of all kinds of sides with heatmaps as heads make them."""
    sides = [(0.4, 3.2), (7.5, 91.0), (13.7, 20.1), (64.2, 38.9), (130.4, 57.3), (28.0, 28.0)]
    corner = rng.uniform(0, 50, (len(sides), 2))
    boxes = np.concatenate([corner, corner + sides], axis=1).astype(np.float32)
    low = torch.tensor(rng.normal(size=(len(sides), 4, 14, 14)).astype(np.float32))
    maps = torch.nn.functional.interpolate(low, scale_factor=2.0, mode="bilinear")
    points, scores = roi_heads.heatmaps_to_keypoints(maps, torch.tensor(boxes))
    return dict(low=low, maps_of_low=maps, map_boxes=boxes, points=points, point_scores=scores)


def losses(rng):
    """Logits, objects and RoIs, some with keypoints outside, on edges and not labeled."""
    gt = rng.uniform(0, 60, (3, POINTS, 3)).astype(np.float32)
    gt[..., 2] = rng.integers(0, 3, gt.shape[:2])
    corner = rng.uniform(0, 20, (7, 2))
    rois = np.concatenate([corner, corner + rng.uniform(15, 40, (7, 2))], axis=1)
    rois, matched = rois.astype(np.float32), rng.integers(0, 3, 7)
    gt[0, 0] = (*rois[0, 2:], 2)  # the last cell
    gt[1, 1] = (*rois[1, :2], 1)  # the first
    matched[:2] = (0, 1)
    logits = torch.tensor(rng.normal(size=(7, POINTS, 12, 12)).astype(np.float32))
    logits.requires_grad_()
    one = [torch.tensor(rois)], [torch.tensor(gt)], [torch.tensor(matched)]
    loss = roi_heads.keypointrcnn_loss(logits, *one)
    loss.backward()
    cells, valid = roi_heads.keypoints_to_heatmap(one[1][0][one[2][0]], one[0][0], 12)
    names = dict(gt=gt, rois=rois, matched=matched, logits=logits, loss=loss, cells=cells)
    return names | dict(counts=valid, gradient=logits.grad)


def main():
    rng = np.random.default_rng(0)
    arrays = heatmaps(rng) | losses(rng)
    arrays = {
        n: a.detach().numpy() if isinstance(a, torch.Tensor) else a for n, a in arrays.items()
    }
    del arrays["maps_of_low"]
    np.savez_compressed(Path(__file__).parent / "keypoints.npz", **arrays)


if __name__ == "__main__":
    main()
