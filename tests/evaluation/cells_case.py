"""Generated label images of cells, and of what a model may find of them.

    PYTHONPATH=. python -m tests.evaluation.cells_case

writes what stardist 0.9.2 and cellpose 4.2.1 say of them to tests/goldens/cells/scores.json. They
need neither TensorFlow nor PyTorch: an empty package `torch` with a `__version__` will do.
"""

import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "goldens/cells/scores.json"
SEEDS = range(3)
THRESHOLDS = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]


def make_case(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of label images, int [96, 128]: moved, grown, split, merged, missed and false cells.

    One pair without cells, one without detections, one with neither (seed 1 alone), and one whose
    detections are the cells.
    """
    rng = np.random.RandomState(seed)  # its numbers never change
    pairs = []
    for kind in ("some", "some", "few", "no cells", "none found", "all found"):
        true = _ellipses(rng, 4 if kind == "few" else 60)
        found = _found(rng, true)
        if kind == "no cells":
            true, found = np.zeros_like(true), np.zeros_like(true) if seed == 1 else found
        if kind == "none found":
            found = np.zeros_like(true)
        pairs.append((true, true.copy() if kind == "all found" else found))
    return pairs


def _ellipses(rng, count: int) -> np.ndarray:
    labels, (y, x) = np.zeros((96, 128), np.int32), np.mgrid[:96, :128]
    for n in range(1, count + 1):
        (cy, cx), (ry, rx) = rng.uniform(0, (96, 128)), rng.uniform(3, 10, 2)
        labels[(((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 <= 1) & (labels == 0)] = n
    return relabeled(labels)


def _found(rng, true: np.ndarray) -> np.ndarray:
    found = np.zeros_like(true)
    for n in range(1, true.max() + 1):
        mask, fate = true == n, rng.random_sample()
        if fate < 0.1:
            continue
        shift = rng.randint(-2, 3, 2) if fate < 0.6 else (0, 0)
        mask = np.roll(mask, shift, (0, 1))
        if fate > 0.9:  # two halves, of the same number of pixels where that is possible
            pixels = np.flatnonzero(mask)
            found.ravel()[pixels[: len(pixels) // 2]] = 2 * n
            mask = np.isin(np.arange(mask.size), pixels[len(pixels) // 2 :]).reshape(mask.shape)
        elif fate > 0.8:  # joined with the next
            mask |= true == n + 1
        found[mask & (found == 0)] = 2 * n + 1
    for n in range(5):
        top, left = rng.randint(0, (90, 120))
        found[top : top + 6, left : left + 8] = 1000 + n
    return relabeled(found)


def relabeled(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_inverse=True)[1].reshape(labels.shape).astype(np.int32)


def score_with_packages(pairs: list[tuple[np.ndarray, np.ndarray]]) -> dict:
    """StarDist's measures of all pairs together, and cellpose's of each; NaN is -1."""
    import cellpose.metrics
    import stardist.matching

    true, found = (list(images) for images in zip(*pairs, strict=True))
    rows = stardist.matching.matching_dataset(true, found, THRESHOLDS, show_progress=False)
    names = ("tp", "fp", "fn", "precision", "recall", "f1", "accuracy", "mean_true_score")
    names += ("mean_matched_score", "panoptic_quality")
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = cellpose.metrics.average_precision(true, found, THRESHOLDS)[0]
        any_of_both = [bool(a.any() and b.any()) for a, b in pairs]
        indices = [
            cellpose.metrics.aggregated_jaccard_index([a], [b])[0] if both else -1
            for a, b, both in zip(true, found, any_of_both, strict=True)
        ]
    return {
        "stardist": {name: [float(getattr(row, name)) for row in rows] for name in names},
        "average_precision": np.nan_to_num(precision.astype(float), nan=-1.0).tolist(),
        "aggregated_jaccard_index": [float(value) for value in indices],
    }


def main() -> None:
    GOLDEN.parent.mkdir(exist_ok=True)
    scores = [score_with_packages(make_case(seed)) for seed in SEEDS]
    GOLDEN.write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    main()
