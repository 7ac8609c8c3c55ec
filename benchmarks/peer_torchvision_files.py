"""Run torchvision's Mask R-CNN over a folder for `peers_files.py`."""

import json
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import cv2
import numpy as np
import torch
import torchvision
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models.detection.transform import resize_boxes

from benchmarks.peers_files import box_entries, serve_passes

settings = json.loads(sys.argv[1])
threads = torch.get_num_threads()
readers, writers = ThreadPoolExecutor(threads), ThreadPoolExecutor(threads)
cv2.setNumThreads(1)  # the pools use all cores


def load_weights(path: str) -> dict[str, torch.Tensor]:
    if not path.endswith(".safetensors"):
        return torch.load(path, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


weights = load_weights(settings["weights"])
classes = len(weights["roi_heads.box_predictor.cls_score.bias"])
model = torchvision.models.detection.maskrcnn_resnet50_fpn(
    weights=None,
    weights_backbone=None,
    num_classes=classes,
    min_size=settings["size"][0],
    max_size=settings["size"][1],
    box_score_thresh=settings["threshold"],
)
model.load_state_dict(weights)
model.eval()
for block in list(model.backbone.body.modules()):  # batch norm becomes part of the convolutions
    for conv, norm in (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")):
        if hasattr(block, norm):
            setattr(block, conv, fuse_conv_bn_eval(getattr(block, conv), getattr(block, norm)))
            setattr(block, norm, torch.nn.Identity())
    if getattr(block, "downsample", None):
        block.downsample = fuse_conv_bn_eval(*block.downsample)
if settings["channels_last"]:
    model.to(memory_format=torch.channels_last)
autocast = torch.autocast("cpu", torch.bfloat16, enabled=settings["precision"] != "float32")
with redirect_stdout(sys.stderr):  # stdout is for times
    truth = COCO(settings["json"]) if settings["json"] else None
ids = list(range(1, classes))
if truth and len(truth.cats) == len(ids):
    ids = sorted(truth.cats)
names = {k: entry["name"] for k, entry in (truth.cats if truth else {}).items()}


def read(name: str) -> tuple[str, np.ndarray, torch.Tensor]:
    """Return an image as uint8 [H, W, 3] RGB and as float [3, H, W] in 0..1."""
    turned = cv2.IMREAD_IGNORE_ORIENTATION if truth else 0
    data = np.fromfile(Path(settings["images"], name), np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB | turned)
    return name, image, torch.from_numpy(image.transpose(2, 0, 1) / np.float32(255))


def in_order(pool: ThreadPoolExecutor, function, items):
    """Apply a function in a pool to a few items at a time; yield results in order."""
    started = deque()
    for item in items:
        started.append(pool.submit(function, item))
        if len(started) > threads:
            yield started.popleft().result()
    while started:
        yield started.popleft().result()


def detect(images):
    for name, image, tensor in images:
        with autocast, torch.inference_mode():
            [found] = model([tensor])
        yield name, image, {key: value.numpy() for key, value in found.items()}


def encode(found: dict[str, np.ndarray]) -> list[dict]:
    """Return masks [n, 1, H, W] of probabilities as RLE."""
    pixels = (found["masks"][:, 0] > 0.5).astype(np.uint8).transpose(1, 2, 0)
    return coco_mask.encode(np.asfortranarray(pixels))


def entries_of(item) -> list[dict]:
    """Return results in COCO's format, with RLE."""
    name, _, found = item
    labels = [ids[k - 1] for k in found["labels"]]
    entries = box_entries(name, found["boxes"], found["scores"], labels)
    for entry, mask in zip(entries, encode(found), strict=True):
        mask["counts"] = mask["counts"].decode()
        entry["segmentation"] = mask
    return entries


def draw(image: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
    """Tint and outline masks, draw boxes and labels, large objects first."""
    image, boxes = image.copy(), found["boxes"]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    thickness = max(1, round(float(np.sqrt(image.shape[0] * image.shape[1])) / 480))
    for i in np.argsort(-areas, kind="stable"):
        color = [int(c) for c in np.random.default_rng(i).integers(64, 256, 3)]
        (x1, y1), (x2, y2) = np.floor(boxes[i, :2]).astype(int), np.ceil(boxes[i, 2:]).astype(int)
        window = image[y1:y2, x1:x2]
        inside = (found["masks"][i, 0, y1:y2, x1:x2] > 0.5).astype(np.uint8)
        tinted = cv2.addWeighted(window, 0.58, np.full_like(window, color), 0.42, 0)
        cv2.copyTo(tinted, inside, window)
        outlines, _ = cv2.findContours(inside, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
        corner = int(x1), int(y1)
        cv2.drawContours(image, outlines, -1, color, thickness, cv2.LINE_AA, offset=corner)
        cv2.rectangle(image, corner, (int(x2) - 1, int(y2) - 1), color, thickness)
        label = f"{names.get(ids[found['labels'][i] - 1], '')} {found['scores'][i]:.2f}"
        cv2.putText(image, label, corner, cv2.FONT_HERSHEY_SIMPLEX, 0.5, color, 1, cv2.LINE_AA)
    return image


def write(item) -> list[dict]:
    name, image, found = item
    drawn = cv2.cvtColor(draw(image, found), cv2.COLOR_RGB2BGR)
    cv2.imwrite(str(Path(settings["output"], name)), drawn)
    return entries_of(item)


def save(name: str, entries: list[dict]) -> None:
    Path(settings["output"], name).write_text(json.dumps(entries))


def predict() -> None:
    entries = []
    for name, _, found in detect(images):
        labels = [ids[k - 1] for k in found["labels"]]
        entries += box_entries(name, found["boxes"], found["scores"], labels)
    save("detections.json", entries)


def infer() -> None:
    detected = detect(in_order(readers, read, settings["files"]))
    save("detections.json", [entry for one in in_order(writers, write, detected) for entry in one])


def evaluate() -> None:
    images = {image["file_name"]: key for key, image in truth.imgs.items()}
    detected = detect(in_order(readers, read, settings["files"]))
    entries = []
    for one in in_order(writers, entries_of, detected):
        entries += [entry | {"image_id": images[entry.pop("file_name")]} for entry in one]
    save("segm_results.json", entries)
    boxes = [{k: v for k, v in entry.items() if k != "segmentation"} for entry in entries]
    save("bbox_results.json", boxes)
    metrics = {}
    for name, kind, rows in (("AP", "bbox", boxes), ("mask_AP", "segm", entries)):
        scored = COCOeval(truth, truth.loadRes(rows), kind)
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
        metrics[name] = float(scored.stats[0])
    Path(settings["output"], "metrics.json").write_text(json.dumps(metrics))


if settings["mode"] == "predict":
    images = [read(name) for name in settings["files"]]

    def without_pasting(found, sizes, original_sizes):
        for one, size, original in zip(found, sizes, original_sizes, strict=True):
            one["boxes"] = resize_boxes(one["boxes"], size, original)
        return found

    model.transform.postprocess = without_pasting
steps = {"predict": predict, "infer": infer, "evaluate": evaluate}
versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
serve_passes(steps[settings["mode"]], f"{versions}, {threads} threads")
