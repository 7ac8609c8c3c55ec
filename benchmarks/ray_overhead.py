"""What Ray Data costs beside the same work without it: images/s, and CPU seconds of an image.

    python benchmarks/ray_overhead.py runs/mine photos --few 16 --many 80

Each way runs on few and on many of the images; the difference leaves out what happens once, such as
starting, loading and compiling. CPU seconds are those of the whole machine, so let it be idle.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RAY = {"Ray, 1 actor with 2 cores": (1, 2), "Ray, 2 actors with 1 core": (2, 1)}
ALONE, INFER = "the actor's class in one process", "infer, with annotated images"


def work(way: str, model: str, images: str, output: str) -> None:
    """Detect objects in this process, or by Ray."""
    sys.path.insert(0, str(EXAMPLES))
    import ray_predict

    if way in RAY:
        ray_predict.ray.cloudpickle.register_pickle_by_value(ray_predict)
        ray_predict.ACTORS, ray_predict.CORES = RAY[way]
        ray_predict.main(model, images, output)
        return
    import pyarrow as pa
    from pyarrow import parquet

    import mask_rcnn_jax as mrcnn

    detect = ray_predict.Detect(partial(mrcnn.load, model, **ray_predict.OPTIONS))
    paths, size = sorted(Path(images).iterdir()), ray_predict.IMAGES
    os.makedirs(output)
    for first in range(0, len(paths), size):
        group = paths[first : first + size]
        columns = {"bytes": [p.read_bytes() for p in group], "path": [str(p) for p in group]}
        parquet.write_table(detect(pa.table(columns)), f"{output}/{first}.parquet")


def busy() -> float:
    """CPU seconds of this machine since it started."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def measure(way: str, model: str, photos: list[Path], count: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of a process that works on so many images."""
    with tempfile.TemporaryDirectory() as folder:
        images, output = f"{folder}/images", f"{folder}/out"
        os.makedirs(images)
        for i in range(count):
            photo = photos[i % len(photos)]
            shutil.copy(photo, f"{images}/{i:05d}{photo.suffix}")
        command = [__file__, "--way", way, "--output", output, model, images]
        if way == INFER:
            source = "--weights" if Path(model).is_file() else "--workdir"
            command = ["-m", "mask_rcnn_jax.infer", source, model, "--input", images]
            command += ["--output", output]
        started, before = time.monotonic(), busy()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - started, busy() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "images"):
        parser.add_argument(name)
    for name, value in (("--few", 16), ("--many", 80)):
        parser.add_argument(name, type=int, default=value)
    for name in ("--way", "--output"):  # of a process that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        return work(given.way, given.model, given.images, given.output)
    photos = sorted(Path(given.images).iterdir())
    print("| | images/s | s an image | CPU s an image |\n|---|---|---|---|")
    for way in (INFER, ALONE, *RAY):
        few, many = (measure(way, given.model, photos, n) for n in (given.few, given.many))
        wall, cpu = ((b - a) / (given.many - given.few) for a, b in zip(few, many, strict=True))
        print(f"| {way} | {1 / wall:.3f} | {wall:.3f} | {cpu:.3f} |", flush=True)


if __name__ == "__main__":
    main()
