"""The simplest server of an exported ONNX model, for `serving.py --peer`: FastAPI and onnxruntime.

Its masks are resized to whole pixels, and it has no limits.
"""

import json
import os
import sys

import cv2
import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from pycocotools import mask as coco_mask

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before it is imported
import onnxruntime  # noqa: E402

folder, port = sys.argv[1:]
with open(f"{folder}/manifest.json") as file:
    manifest = json.load(file)
classes = {entry["class"]: (entry["id"], entry["name"]) for entry in manifest["classes"]}
canvas_height, canvas_width = manifest["preprocessing"]["canvas"]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
names = [output.name for output in session.get_outputs()]
inputs = {value.name: value for value in session.get_inputs()}
app = FastAPI()


def detect(content: bytes, threshold: float) -> dict:
    image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    height, width = image.shape[:2]
    scale = min(canvas_height / height, canvas_width / width)
    size = int(height * scale), int(width * scale)
    canvas = np.zeros((1, canvas_height, canvas_width, 3), np.uint8)
    canvas[0, : size[0], : size[1]] = cv2.resize(image, size[::-1])
    if inputs["images"].shape[1] == 3:
        canvas = np.ascontiguousarray(canvas.transpose(0, 3, 1, 2))
    if "float" in inputs["images"].type:
        canvas = canvas.astype(np.float32)
    feeds = {"images": canvas, "image_sizes": np.array([size], np.int32)}
    values = session.run(names, {name: feeds[name] for name in inputs})
    found = {name: value[0] for name, value in zip(names, values, strict=True)}
    rows = np.flatnonzero(found["valid"] & (found["scores"] >= threshold))
    entries = [entry({name: v[row] for name, v in found.items()}, scale, image) for row in rows]
    return {"image": {"width": width, "height": height}, "detections": entries}


def entry(one: dict, scale: float, image: np.ndarray) -> dict:
    height, width = image.shape[:2]
    x1, y1, x2, y2 = box = np.clip(one["boxes"] / scale, 0, [width, height] * 2).tolist()
    left, top, right, bottom = int(x1), int(y1), int(np.ceil(x2)), int(np.ceil(y2))
    mask = np.zeros((height, width), np.uint8, order="F")
    if right > left and bottom > top:
        mask[top:bottom, left:right] = cv2.resize(one["masks"], (right - left, bottom - top)) >= 0.5
    rle = coco_mask.encode(mask)
    number, name = classes[int(one["classes"])]
    segmentation = {"size": [height, width], "counts": rle["counts"].decode()}
    bbox = [round(value, 3) for value in (box[0], box[1], x2 - x1, y2 - y1)]
    about = {"category_id": number, "category": name, "score": float(one["scores"])}
    return {**about, "bbox": bbox, "segmentation": segmentation}


@app.post("/detect")
async def answer(request: Request, score_threshold: float = 0.5) -> dict:
    return await run_in_threadpool(detect, await request.body(), score_threshold)


if __name__ == "__main__":
    server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="error"))
    print(f"ready: http://127.0.0.1:{port}/", flush=True)
    server.run()
