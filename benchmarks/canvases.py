"""How much of its canvas an image fills, with more and more canvases, for the images of COCO jsons.

    python -m benchmarks.canvases instances_val2017.json --config coco_torchvision --most 8

"images/s" are those of a detector whose time follows the pixels, in multiples of `--base`, the
recipe's own canvases. "torchvision" pads each image by itself to multiples of 32.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.canvases import choose_canvases, pixels
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import resize_plan

TORCHVISION = ExampleOptions((800, 1333), "shortest_edge", 1)


def table(sizes: Counter, options: ExampleOptions, base: int, most: int) -> list[str]:
    """Lines of a Markdown table; base: pixels of all canvases that images/s are compared with."""
    number = sum(sizes.values())
    lines = ["| canvases | image | Mpx an image | images/s | torchvision | beside the full ones |"]
    lines += ["|---|---|---|---|---|---|"]
    seen = set()
    for count in range(1, most + 1):
        chosen = choose_canvases(sizes.elements(), options, most=count)
        if chosen in seen:
            continue
        seen.add(chosen)
        with_canvases = replace(options, canvases=chosen)
        own, computed = pixels(sizes, with_canvases)
        used = {resize_plan(*size, with_canvases).canvas for size in sizes}
        padded = sum(count * _padded(size) for size, count in sizes.items())
        figures = [len(used), f"{own / computed:.3f}", f"{computed / number / 1e6:.3f}"]
        figures += [f"{base / computed:.3f}", f"{computed / padded:.3f}"]
        figures += [", ".join(f"{height} x {width}" for height, width in chosen) or "-"]
        lines.append(f"| {' | '.join(map(str, figures))} |")
    return lines


def _padded(size: tuple[int, int]) -> int:
    height, width = resize_plan(*size, TORCHVISION).size
    return (-(-height // 32) * 32) * (-(-width // 32) * 32)


def read_sizes(paths: Sequence[str]) -> Counter:
    """Count (height, width) of the images in jsons; those of equal file names once."""
    images = {}
    for path in paths:
        with open(path) as file:
            images.update({image["file_name"]: image for image in json.load(file)["images"]})
    return Counter((image["height"], image["width"]) for image in images.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", nargs="+")
    parser.add_argument("--config", default="coco_torchvision", help="how images are resized")
    parser.add_argument("--base", default="coco", help="recipe whose images/s count as 1")
    parser.add_argument("--most", type=int, default=8, help="canvases in all")
    flags = parser.parse_args()
    sizes = read_sizes(flags.json)
    options, base = (load_config(name).data for name in (flags.config, flags.base))
    print(f"{sum(sizes.values())} images")
    print("\n".join(table(sizes, options, pixels(sizes, base)[1], flags.most)))


if __name__ == "__main__":
    main()
