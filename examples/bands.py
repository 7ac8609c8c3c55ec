"""Write 16-bit TIFFs of four bands, red, green, blue and near infrared, and their COCO jsons.

    python examples/bands.py --data_dir bands

Numbers are those of a camera of 12 bits. Needs the extra `tiff`.
"""

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
import tifffile

from mask_rcnn_jax.formats.shapes import write_shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True)
    folder = parser.parse_args().data_dir
    for split, json_path in write_shapes(folder, train=100, val=20).items():
        content = json.loads(json_path.read_text())
        for entry in content["images"]:
            photo = folder / split / entry["file_name"]
            colors = cv2.imread(str(photo))[..., ::-1].astype(np.float64)
            infrared = 60 + 0.5 * colors.mean(axis=2)
            pixels = (300 + 12 * np.dstack([colors, infrared])).astype(np.uint16)
            kinds = dict(photometric="rgb", extrasamples=["unspecified"])
            tifffile.imwrite(photo.with_suffix(".tif"), pixels, planarconfig="contig", **kinds)
            photo.unlink()
            entry["file_name"] = photo.with_suffix(".tif").name
        json_path.write_text(json.dumps(content))
        print(f"{json_path}: {len(content['images'])} images in {folder / split}")


if __name__ == "__main__":
    main()
