"""Detect objects with an exported model, without mask_rcnn_jax: in onnxruntime, JAX or Triton.

    pip install numpy pillow onnxruntime
    python detect.py out/onnx photo.jpg --output found

    pip install numpy pillow jax flatbuffers
    python detect.py out/stablehlo photo.jpg

    pip install numpy pillow
    python detect.py out/onnx photo.jpg --triton http://localhost:8000/v2/models/mine

The folder is an output of `export`; of it, Triton needs the manifest here alone.
"""

import argparse
import itertools
import json
import math
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

# Names of types in requests to Triton.
DTYPES = {"uint8": "UINT8", "float32": "FP32", "int32": "INT32", "bool": "BOOL"}
# A function from the model's inputs to its outputs, by name.
Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


class Found(NamedTuple):
    """An object."""

    name: str
    score: float
    box: np.ndarray  # x1, y1, x2, y2 in pixels of the image
    mask: np.ndarray | None  # bool [height, width] of the image
    keypoints: np.ndarray | None = None  # [P, 3] x, y in pixels of the image, and score


def read_image(path: Path, rules: dict) -> np.ndarray:
    """uint8 [height, width, 3] in RGB, upright by EXIF or as stored; of 16 bits the upper 8."""
    is_stored = rules.get("orientation", "").startswith("as stored")
    with Image.open(path) as opened:
        image = opened.copy() if is_stored else ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # convert() would make everything above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("RGB"))


def detect(run: Run, manifest: dict, image: np.ndarray, threshold: float = 0.5) -> list[Found]:
    """Find the objects with at least this score in an image, uint8 [height, width, 3] in RGB."""
    inputs, size = prepare(image, manifest)
    out = {name: values[0] for name, values in run(inputs).items()}
    names = {entry["class"]: entry["name"] for entry in manifest["classes"]}
    height, width = image.shape[:2]
    to_image = np.array([width / size[1], height / size[0]] * 2)
    rule = manifest["postprocessing"]["mask_rule"]
    found = []
    for i in np.flatnonzero(out["valid"].astype(bool) & (out["scores"] >= threshold)):
        box = np.clip(out["boxes"][i] * to_image, 0, [width, height] * 2).astype(np.float32)
        mask = paste(out["masks"][i], box, height, width, rule) if "masks" in out else None
        points = out["keypoints"][i] * [*to_image[:2], 1] if "keypoints" in out else None
        about = names[int(out["classes"][i])], float(out["scores"][i])
        found.append(Found(*about, box, mask, points))
    return found


def prepare(image: np.ndarray, manifest: dict) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
    """Return the model's inputs, and (height, width) of the image on the canvas."""
    rules, wanted = manifest["preprocessing"], manifest["inputs"]["images"]
    size = resized_size(image.shape[0], image.shape[1], rules)
    canvas = np.zeros((*rules["canvas"], 3), wanted["dtype"])
    canvas[: size[0], : size[1]] = resize(image, size, rules)
    batch, is_planar = wanted["shape"][0], wanted["shape"][1] == 3
    batch = 1 if isinstance(batch, str) else batch  # any number of images
    if is_planar:
        canvas = canvas.transpose(2, 0, 1)
    inputs = {"images": np.ascontiguousarray(np.repeat(canvas[None], batch, axis=0))}
    if "image_sizes" in manifest["inputs"]:
        inputs["image_sizes"] = np.array([size] * batch, np.int32)
    return inputs, size


def resized_size(height: int, width: int, rules: dict) -> tuple[int, int]:
    """(height, width) of an image on the canvas; ValueError for an image that it does not take."""
    height_limit, width_limit = rules["canvas"]
    if "picture_size" in rules:
        if [height, width] != rules["picture_size"]:
            raise ValueError(f"the image is {height} x {width}, not {rules['picture_size']}")
        return tuple(rules["resized_size"])
    if rules["resize"] != "shortest_edge":
        if rules["resize"] == "keep" and height <= height_limit and width <= width_limit:
            return height, width
        if height_limit * width <= width_limit * height:
            size = height_limit, width * height_limit // height
        else:
            size = height * width_limit // width, width_limit
    else:
        if (height > width) != (height_limit > width_limit):
            raise ValueError(f"an image of {height} x {width} belongs on a canvas that is turned")
        size = _shortest_edge(height, width, rules)
    return min(max(1, size[0]), height_limit), min(max(1, size[1]), width_limit)


def _shortest_edge(height: int, width: int, rules: dict) -> tuple[int, int]:
    """The size with the wanted short side, unless its long one would exceed a limit."""
    short, long = sorted(rules["image_size"])
    low, high = min(height, width), max(height, width)
    if rules["rounding_of_sides"] == "floor":
        scale = min(short / low, long / high)
        return math.floor(height * scale), math.floor(width * scale)
    if rules["rounding_of_sides"] == "round":
        scale = short / low
        sides = [short if side == low else side * scale for side in (height, width)]
        if max(sides) > long:
            sides = [side * (long / max(sides)) for side in sides]
        return int(sides[0] + 0.5), int(sides[1] + 0.5)
    if high / low * short > long:  # "caffe"
        short = max(1, round(long * low / high))
    sides = [short if side == low else int(short * side / low) for side in (height, width)]
    return sides[0], sides[1]


def resize(image: np.ndarray, size: tuple[int, int], rules: dict) -> np.ndarray:
    """Resize bilinearly to (height, width)."""
    if image.shape[:2] == size:
        return image
    if rules["interpolation"] == "PIL bilinear":
        return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    pixels = image.astype(np.float32)
    for axis, after in enumerate(size):
        before = pixels.shape[axis]
        place = np.clip((np.arange(after) + 0.5) * (before / after) - 0.5, 0, before - 1)
        low = place.astype(int)
        share = np.expand_dims((place - low).astype(np.float32), (1, 2) if axis == 0 else (0, 2))
        high = pixels.take(np.minimum(low + 1, before - 1), axis)
        pixels = pixels.take(low, axis) * (1 - share) + high * share
    return np.rint(pixels) if rules["rounded_to_whole_numbers"] else pixels


def paste(mask: np.ndarray, box: np.ndarray, height: int, width: int, rule: str) -> np.ndarray:
    """bool [height, width]: the pixels of an object, of probabilities [M, M] over its box."""
    whole = np.zeros((height, width), bool)
    x1, y1, x2, y2 = box
    (top, rows), (left, columns) = (
        _weights(low, high, limit, len(mask), rule)
        for low, high, limit in ((y1, y2, height), (x1, x2, width))
    )
    values = rows @ mask @ columns.T
    part = values >= 0.5 if rule == "continuous" else values > 0.5
    whole[top : top + len(rows), left : left + len(columns)] = part
    return whole


def _weights(
    low: np.float32, high: np.float32, limit: int, cells: int, rule: str
) -> tuple[int, np.ndarray]:
    """First pixel of a side of a box, and the shares [n, cells] of the mask's cells in n pixels."""
    if rule == "continuous" and not high > low:
        return 0, np.zeros((0, cells), np.float32)
    if rule == "continuous":  # pixels with their centers in the box
        start, length = float(low), float(high) - float(low)
        first, last = math.ceil(start - 0.5), math.floor(float(high) - 0.5)
        pixels = np.arange(max(first, 0), min(last + 1, limit))
        place = (pixels + 0.5 - start) * cells / length - 0.5
    else:  # a mask with a border of a cell, on a box that is larger by as much, in whole pixels
        center, half = (high + low) * np.float32(0.5), (high - low) * np.float32(0.5)
        half *= np.float32((cells + 2) / cells)
        first, last = int(center - half), int(center + half)
        pixels = np.arange(max(first, 0), min(last + 1, limit))
        place = (pixels - first + 0.5) * (cells + 2) / (last + 1 - first) - 0.5
        place = np.clip(place, 0, cells + 1) - 1
    shares = np.maximum(1 - np.abs(place[:, None] - np.arange(cells)), 0)
    return (int(pixels[0]) if len(pixels) else 0), shares.astype(np.float32)


def load_onnxruntime(path: Path) -> Run:
    """Load a model on the CPU, without onnxruntime's telemetry unless the user asks for it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before it is imported
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def load_stablehlo(path: Path) -> Run:
    """Load a program for the device that JAX finds."""
    import jax
    from jax import export

    program = jax.jit(export.deserialize(bytearray(path.read_bytes())).call)
    return lambda inputs: jax.tree.map(np.asarray, dict(program(*inputs.values())))


def load(folder: Path, name: str | None = None) -> Run:
    """Load the model of an exported folder, or its file of that name."""
    path = folder / (name or "model.stablehlo")
    path = path if name or path.exists() else folder / "model.onnx"
    return load_stablehlo(path) if path.suffix == ".stablehlo" else load_onnxruntime(path)


def triton(url: str) -> Run:
    """Ask a server for a model's outputs, in KServe's protocol with Triton's binary tensors.

    url: of the model, http://HOST:8000/v2/models/NAME.
    """

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        described = [
            {
                "name": name,
                "shape": array.shape,
                "datatype": DTYPES[array.dtype.name],
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in inputs.items()
        ]
        wanted = {"inputs": described, "parameters": {"binary_data_output": True}}
        header = json.dumps(wanted).encode()
        body = header + b"".join(array.tobytes() for array in inputs.values())
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(header)),
        }
        request = urllib.request.Request(f"{url}/infer", body, headers)
        with urllib.request.urlopen(request) as answer:
            length = int(answer.headers["Inference-Header-Content-Length"])
            about, data = json.loads(answer.read(length)), answer.read()
        dtypes, outputs, start = {name: dtype for dtype, name in DTYPES.items()}, {}, 0
        for output in about["outputs"]:
            end = start + output["parameters"]["binary_data_size"]
            values = np.frombuffer(data[start:end], dtypes[output["datatype"]])
            outputs[output["name"]], start = values.reshape(output["shape"]), end
        return outputs

    return run


def draw(image: np.ndarray, found: list[Found]) -> Image.Image:
    """Draw masks, boxes, names and keypoints."""
    colors = np.array([[230, 60, 60], [60, 160, 230], [60, 190, 90], [230, 160, 40]])
    pixels = image.astype(np.float32)
    for i, item in enumerate(found):
        if item.mask is not None:
            pixels[item.mask] = pixels[item.mask] * 0.6 + colors[i % 4] * 0.4
    drawn = Image.fromarray(pixels.astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
    for i, item in enumerate(found):
        color = tuple(colors[i % 4].tolist())
        pen.rectangle(item.box.tolist(), outline=color, width=2)
        pen.text((item.box[0] + 3, item.box[1] + 2), f"{item.name} {item.score:.2f}", fill=color)
        for x, y, _ in [] if item.keypoints is None else item.keypoints.tolist():
            pen.ellipse([x - 2, y - 2, x + 2, y + 2], fill="white", outline=color)
    return drawn


def unused(folder: Path, stem: str) -> Path:
    """stem.png, or stem_2.png and so on: no drawing replaces a file."""
    names = (f"{stem}.png" if n == 1 else f"{stem}_{n}.png" for n in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--model", help="a file in the folder; default: its model")
    parser.add_argument("--triton", metavar="URL", help="http://HOST:8000/v2/models/NAME")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--output", type=Path, help="a folder for annotated images")
    args = parser.parse_args()
    manifest = json.loads((args.folder / "manifest.json").read_text())
    run = triton(args.triton) if args.triton else load(args.folder, args.model)
    for path in args.images:
        try:
            image = read_image(path, manifest["preprocessing"])
            found = detect(run, manifest, image, args.threshold)
        except (OSError, ValueError) as error:  # none, or one that the model does not take
            parser.exit(2, f"{path}: {error}\n")
        for item in found:
            area = "" if item.mask is None else f" {item.mask.sum()} pixels"
            box = ", ".join(f"{side:.1f}" for side in item.box)
            print(f"{path.name}: {item.name} {item.score:.3f} [{box}]{area}")
        if not found:
            print(f"{path.name}: no object with a score of at least {args.threshold}")
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            draw(image, found).save(unused(args.output, path.stem))


if __name__ == "__main__":
    main()
