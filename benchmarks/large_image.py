"""Train, evaluate and detect on one large generated image; print the peak memory of each command.

    python benchmarks/large_image.py --folder out --side 20000 --discs 5000

The image is a tiled TIFF of noise with discs, written tile by tile; its json has a polygon for each
disc. Training reads windows of 512 x 512 pixels, `evaluate` and `infer` tiles that are reduced to
that size. The memory is that of the process and its children, looked at ten times a second. An
image that is there is not written again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile

TILE, WINDOW, CORNERS = 512, 512, 24


def make_discs(side: int, count: int) -> np.ndarray:
    """[count, 3] x, y and radius of discs on a jittered grid, which do not overlap."""
    rng = np.random.default_rng(0)
    across = int(np.ceil(count**0.5))
    step = side / across
    places = np.stack(np.divmod(np.arange(count), across), axis=1)[:, ::-1]
    radii = rng.uniform(0.15, 0.35, count) * min(step, 100)
    free = step - 2 * radii[:, None]
    return np.column_stack([places * step + radii[:, None] + rng.random((count, 2)) * free, radii])


def tiles(side: int, discs: np.ndarray) -> Iterator[np.ndarray]:
    """The tiles of the image, row after row."""
    rng = np.random.default_rng(1)
    rows, columns = np.mgrid[:TILE, :TILE] + 0.5
    for top in range(0, side, TILE):
        for left in range(0, side, TILE):
            tile = rng.integers(0, 100, (TILE, TILE, 3), np.uint8)
            x, y, radius = (discs - (left, top, 0)).T
            near = (x + radius > 0) & (x - radius < TILE) & (y + radius > 0) & (y - radius < TILE)
            for cx, cy, r in discs[near] - (left, top, 0):
                tile[(columns - cx) ** 2 + (rows - cy) ** 2 < r * r] += np.uint8(120)
            yield tile


def write_set(folder: Path, side: int, count: int) -> None:
    """Write large.tif and large.json."""
    discs = make_discs(side, count)
    shape = side, side, 3
    given = dict(shape=shape, dtype=np.uint8, tile=(TILE, TILE), photometric="rgb", bigtiff=True)
    tifffile.imwrite(folder / "large.tif", tiles(side, discs), compression="zlib", **given)
    turns = np.linspace(0, 2 * np.pi, CORNERS, endpoint=False)
    circle = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    annotations = []
    for number, (x, y, radius) in enumerate(discs.tolist(), start=1):
        outline = np.round(circle * radius + (x, y), 2).ravel().tolist()
        box = [x - radius, y - radius, 2 * radius, 2 * radius]
        entry = {"id": number, "image_id": 1, "category_id": 1, "iscrowd": 0, "bbox": box}
        annotations.append(entry | {"area": np.pi * radius**2, "segmentation": [outline]})
    image = {"id": 1, "file_name": "large.tif", "height": side, "width": side}
    content = {"images": [image], "categories": [{"id": 1, "name": "disc"}]}
    (folder / "large.json").write_text(json.dumps(content | {"annotations": annotations}))


def memory(pid: int) -> int:
    """Resident bytes of a process and its children."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(memory, map(int, children)))


def run(name: str, *arguments: str) -> None:
    """Run a command of the package, and print its seconds and its peak memory."""
    command = [sys.executable, "-m", "mask_rcnn_jax", name, *arguments]
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, memory(process.pid))
        time.sleep(0.1)
    seconds = time.perf_counter() - started
    cpu = sum(os.times()[2:4])
    print(f"{name}: exit {process.returncode}, {seconds:.0f} s, {peak / 1e6:.0f} MB", flush=True)
    print(f"  CPU seconds of all commands so far: {cpu:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--side", type=int, default=20_000)
    parser.add_argument("--discs", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tile", type=int, default=2048)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if not (given.folder / "large.json").exists():
        write_set(given.folder, given.side, given.discs)
    data = {f"{split}_json": given.folder / "large.json" for split in ("train", "val")}
    data |= {f"{split}_images": given.folder for split in ("train", "val")}
    data |= {"image_size": f"({WINDOW}, {WINDOW})", "max_instances": 100}
    data |= {"windows.size": f"({WINDOW}, {WINDOW})", "windows.place": "objects"}
    flags = [f"--config.data.{name}={value}" for name, value in data.items()]
    steps = ["--config.train.batch_size=2", f"--config.train.steps={given.steps}"]
    steps += [f"--config.train.{name}_every={10 * given.steps}" for name in ("eval", "checkpoint")]
    flags += [*steps, "--config.eval.batch_size=1", "--config.eval.detections_per_image=100"]
    workdir = f"--workdir={given.folder / 'run'}"
    cut = [f"--tile={given.tile}", "--overlap=0.05"]
    run("train", "--config=quickstart:long", workdir, *flags, "--config.data.val_json=")
    run("evaluate", "--config=quickstart:long", workdir, *flags, *cut)
    image, output = given.folder / "large.tif", given.folder / "out"
    run("infer", workdir, f"--input={image}", f"--output={output}", "--score_threshold=0.05", *cut)


if __name__ == "__main__":
    main()
