"""Print NVIDIA's published tables with the figures of `reproduce_job` beside them.

python -m benchmarks.reproduce runs/reproduce/parts > report.md
"""

import json
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parent / "published.toml"
COLUMNS = {"tf32": "tf32", "float32": "tf32", "float16": "mixed", "bfloat16": "mixed"}


def report(parts: Path, published: Mapping[str, Any] | None = None) -> str:
    """Format everything in `parts`, which has files RECIPE/PRECISION/KIND-NUMBERS.json.

    published: the tables, those of published.toml if None.
    """
    if published is None:
        published = tomllib.loads(PUBLISHED.read_text())
    folders: dict[str, list[Path]] = defaultdict(list)
    for folder in sorted(parts.glob("*/*/")):
        folders[folder.parent.name].append(folder)
    lines = ["# Ours beside the published figures"]
    for recipe, precisions in folders.items():
        page = published.get(recipe, {})
        what = f"{page['page']}, on {page['device']}" if page else "nothing"
        lines += ["", f"## {recipe}", "", f"Published: {what}. Ours: {_device(precisions)}."]
        tables = (
            ("Accuracy on COCO val2017", accuracy_rows, ACCURACY),
            ("Training, images/s", training_rows, TRAINING),
            ("Prediction, images/s", prediction_rows, PREDICTION),
        )
        for title, read, header in tables:
            rows = [row for folder in precisions for row in read(folder, page)]
            if rows:
                lines += ["", f"### {title}", "", *_table(header, rows)]
    return "\n".join(lines) + "\n"


ACCURACY = (
    *("GPUs", "precision", "seeds", "box AP", "mask AP", "hours of steps"),
    *("published box AP", "mask AP", "hours"),
)
TRAINING = ("GPUs", "images per GPU", "precision", "images/s", "efficiency", "published")
PREDICTION = ("GPUs", "images per GPU", "precision", "images/s", "published")


def accuracy_rows(folder: Path, page: Mapping[str, Any]) -> list[list[str]]:
    """Read accuracy-GPUS-SEED.json, of which the seeds share a row."""
    runs: dict[int, list[Path]] = defaultdict(list)
    for path, (gpus, _) in _numbered(folder, "accuracy"):
        runs[gpus].append(path)
    rows = []
    for gpus, paths in sorted(runs.items()):
        metrics = [json.loads(path.read_text()) for path in paths]
        aps = [_mean([100 * run[name] for run in metrics]) for name in ("AP", "mask_AP")]
        hours = statistics.mean(run["hours"] for run in metrics)
        theirs = _published(page, "accuracy", folder.name, gpus=gpus) or ("", "", "")
        ours = [*aps, f"{hours:.2f}"]
        rows.append([str(gpus), folder.name, str(len(paths)), *ours, *map(str, theirs)])
    return rows


def training_rows(folder: Path, page: Mapping[str, Any]) -> list[list[str]]:
    """Read train-IMAGES.json, tables of weak scaling."""
    rows = []
    for path, (images,) in _numbered(folder, "train"):
        for row in json.loads(path.read_text())["rows"]:
            gpus = row["devices"]
            theirs = _published(page, "train", folder.name, gpus=gpus, images=images)
            ours = [f"{row['images_per_s']:.1f}", f"{row['efficiency']:.2f}"]
            rows.append([str(gpus), str(images), folder.name, *ours, str(theirs or "")])
    return rows


def prediction_rows(folder: Path, page: Mapping[str, Any]) -> list[list[str]]:
    """Read infer-GPUS-IMAGES.json."""
    rows = []
    for path, (gpus, images) in _numbered(folder, "infer"):
        figures = json.loads(path.read_text())
        check_devices(str(path), figures, gpus)
        theirs = _published(page, "infer", folder.name, gpus=gpus, images=images)
        ours = f"{figures['images_per_s']:.1f}"
        rows.append([str(gpus), str(images), folder.name, ours, str(theirs or "")])
    return rows


def check_devices(name: str, figures: Mapping[str, Any], gpus: int) -> None:
    """Raise ValueError if figures that say it are of another number of devices."""
    if (devices := figures.get("devices", gpus)) != gpus:
        raise ValueError(f"{name} was measured on {devices} devices, expected {gpus}")


def _numbered(folder: Path, kind: str) -> list[tuple[Path, tuple[int, ...]]]:
    """List the files KIND-NUMBER-... of a folder with their numbers, in the order of these."""
    found = [(path, path.stem.split("-")[1:]) for path in folder.glob(f"{kind}-*.json")]
    numbered = [(path, tuple(map(int, numbers))) for path, numbers in found]
    return sorted(numbered, key=lambda item: item[1])


def _published(page: Mapping[str, Any], kind: str, precision: str, **where: int) -> Any:
    """Return a published figure, None if there is none for those GPUs and images."""
    for entry in page.get(kind, ()):
        if all(entry[name] == value for name, value in where.items()):
            return entry.get(COLUMNS.get(precision, ""))
    return None


def _mean(values: Sequence[float]) -> str:
    """Format the mean, with the standard deviation if there are several."""
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _device(folders: Sequence[Path]) -> str:
    """Name the devices of the benchmarks, with JAX's version."""
    files = [path for folder in folders for path in folder.glob("[ti]*-*.json")]
    figures = [json.loads(path.read_text()) for path in files]
    return ", ".join(sorted({f"{f['device']} with JAX {f['jax']}" for f in figures})) or "no device"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("error: reproduce needs one folder, the parts of launch/reproduce.sh")
    print(report(Path(sys.argv[1])), end="")
