"""Microscopy's measures: those of StarDist and cellpose, and by hand where masks overlap."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from mask_rcnn_jax import load_config
from mask_rcnn_jax.evaluation import cells, coco
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.training.scored_file import evaluate_results
from tests.evaluation.cells_case import GOLDEN, SEEDS, THRESHOLDS, make_case
from tests.evaluation.test_coco import ground_truth, perfect_results
from tests.evaluation.test_many_objects import discs

RULES = Scoring(protocol="cells")


def entry(mask, **keys) -> dict:
    code = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    text = {"size": code["size"], "counts": code["counts"].decode()}
    keys = {"image_id": 1, "category_id": 1} | keys
    return keys | {"segmentation": text, "bbox": coco_mask.toBbox(code).tolist()}


def as_coco(pairs) -> tuple[dict, list[dict]]:
    """Pairs of label images, or of lists of masks, as ground truth and results of any order."""
    annotations, results, rng = [], [], np.random.default_rng(0)
    for image_id, (true, found) in enumerate(pairs, start=1):
        for masks, kept in ((true, annotations), (found, results)):
            if isinstance(masks, np.ndarray):
                masks = [masks == n for n in range(1, masks.max() + 1)]
            kept += [entry(mask, image_id=image_id) for mask in masks]
    for number, one in enumerate(annotations, start=1):
        area = float(coco_mask.area(one["segmentation"]))
        one |= {"id": number, "iscrowd": 0, "area": area}
    for one in results:
        one["score"] = float(rng.uniform(0.5, 1))
    height, width = np.shape(pairs[0][0])[-2:]
    sizes = {"height": height, "width": width}
    images = [{"id": n, "file_name": f"{n}.png"} | sizes for n in range(1, len(pairs) + 1)]
    categories = [{"id": 1, "name": "cell"}]
    return {"images": images, "categories": categories, "annotations": annotations}, results


def measured(gt, results, **rules) -> dict:
    pair = (None, results) if not results or "segmentation" in results[0] else (results, None)
    return coco.score(gt, *pair, rules=Scoring(protocol="cells", **rules))["cells"]


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_cells_measure_as_with_stardist_and_cellpose(seed):
    pairs, golden = make_case(seed), json.loads(GOLDEN.read_text())[seed]
    found = measured(*as_coco(pairs))
    assert found["thresholds"] == THRESHOLDS and found["geometry"] == "mask"
    for name, expected in golden["stardist"].items():
        ours = found[{"accuracy": "AP"}.get(name, name)]
        assert ours == pytest.approx(expected, rel=1e-6), name
    by_image = np.array(golden["average_precision"])
    measurable = by_image[by_image[:, 0] >= 0]
    assert found["AP_by_image"] == pytest.approx(measurable.mean(axis=0), rel=1e-6)
    assert found["mean"]["AP_by_image"] == pytest.approx(measurable.mean(), rel=1e-6)
    ap = [one["AP"] for one in found["per_image"]]
    assert ap == pytest.approx(by_image.mean(axis=1), rel=1e-6)
    assert [one["AP_50"] for one in found["per_image"]] == pytest.approx(by_image[:, 0], rel=1e-6)
    for one, (a, b), expected in zip(
        found["per_image"], pairs, golden["aggregated_jaccard_index"], strict=True
    ):
        assert (one["n_true"], one["n_pred"]) == (a.max(), b.max())
        if expected >= 0:
            assert one["AJI_cellpose"] == pytest.approx(expected)
            assert one["AJI"] == pytest.approx(kumar(a, b))
        else:
            assert one["AJI_cellpose"] == one["AJI"] == (0 if a.any() or b.any() else -1)


def kumar(true, found) -> float:
    """The aggregated Jaccard index by algorithm 1 of Kumar et al. (2017)."""
    objects, detections = (
        [labels == n for n in range(1, labels.max() + 1)] for labels in (true, found)
    )
    common, union, used = 0, 0, set()
    for one in objects:
        ious = [(one & other).sum() / (one | other).sum() for other in detections]
        j = int(np.argmax(ious))
        if not ious[j]:
            union += one.sum()
            continue
        common, union = common + (one & detections[j]).sum(), union + (one | detections[j]).sum()
        used.add(j)
    union += sum(other.sum() for j, other in enumerate(detections) if j not in used)
    return common / union


def best_pairs(ious, threshold, least):
    """Of all one-to-one pairs with IoUs of `least`: the most that reach the threshold, then the
    largest sum."""
    best, chosen = (0, 0.0), []
    rows, columns = range(len(ious)), range(len(ious[0]))
    for size in range(1, min(len(ious), len(ious[0])) + 1):
        for some in itertools.combinations(rows, size):
            for others in itertools.permutations(columns, size):
                values = [ious[i][j] for i, j in zip(some, others, strict=True)]
                key = sum(v >= threshold for v in values), sum(values)
                if min(values) >= least and (key[0], round(key[1], 9)) > best:
                    best = key[0], round(key[1], 9)
                    chosen = list(zip(some, others, strict=True))
    return chosen


RECTANGLE = st.tuples(*(st.integers(0, 9) for _ in range(2)), *(st.integers(2, 7),) * 2)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(RECTANGLE, min_size=1, max_size=4), st.lists(RECTANGLE, min_size=1, max_size=4))
def test_overlapping_masks_by_trying_all_pairs(true, found):
    def masks(rectangles):
        grid = np.zeros((len(rectangles), 16, 16), bool)
        for mask, (x, y, width, height) in zip(grid, rectangles, strict=True):
            mask[y : y + height, x : x + width] = True
        return grid

    true, found = masks(true), masks(found)
    ours = measured(*as_coco([(list(true), list(found))]))
    shared = (true[:, None] & found[None]).sum((2, 3))
    ious = shared / (true[:, None] | found[None]).sum((2, 3))
    for t, threshold in enumerate(THRESHOLDS):
        pairs = best_pairs(ious.tolist(), threshold, threshold)
        assert ours["tp"][t] == len(pairs)
        total = sum(ious[i, j] for i, j in pairs)
        assert ours["mean_true_score"][t] == pytest.approx(total / len(true))
    pairs = best_pairs(ious.tolist(), 0.5, 1e-9)
    common = np.zeros((16, 16), bool)
    for i, j in pairs:
        common |= true[i] & found[j]
    foreground = np.concatenate([true, found]).any(axis=0).sum()
    assert ours["AJI_cellpose"] == pytest.approx(common.sum() / foreground)


def test_boxes_are_measured_where_there_are_no_masks():
    gt, results = discs(1, 3)
    boxes = [{k: v for k, v in one.items() if k != "segmentation"} for one in results]
    boxes[0] = boxes[0] | {"bbox": [*np.add(boxes[0]["bbox"][:2], (4, 0)), *boxes[0]["bbox"][2:]]}
    found = measured(gt, boxes)
    assert found["geometry"] == "box" and "AJI" not in found
    assert found["tp"] == [9] * 1 + [8] * 9  # 13 x 13 pixels, 9 of 13 columns in common: 9 / 17
    both = coco.score(gt, boxes, results, rules=RULES)
    assert both["cells"]["geometry"] == "mask" and both["cells"]["tp"] == [9] * 10


def test_few_pixels_more_than_half_are_a_pair_whatever_the_score():
    """The best detection by score takes no object from one that fits better."""
    true = np.zeros((20, 40), bool)
    true[5:15, 5:25] = True
    better, worse = (np.roll(true, shift, 1) for shift in (1, 5))
    gt, results = as_coco([([true], [worse, better])])
    results[0]["score"], results[1]["score"] = 0.99, 0.51
    found = measured(gt, results)
    assert (found["tp"][0], found["fp"][0], found["fn"][0]) == (1, 1, 0)
    assert found["mean_matched_score"][0] == pytest.approx(190 / 210)
    assert found["panoptic_quality"][0] == pytest.approx(190 / 210 / 1.5)
    one = measured(gt, results, cells_score_threshold=0.9)
    assert one["score_threshold"] == 0.9 and one["fp"][0] == 0
    assert one["mean_matched_score"][0] == pytest.approx(150 / 250)
    none = measured(gt, results, cells_score_threshold=1.0)
    assert (none["tp"][0], none["fp"][0], none["fn"][0], none["f1"][0]) == (0, 0, 1, 0)


def test_a_detection_in_a_crowd_is_ignored_as_in_coco():
    crowd, inside, outside, true = (np.zeros((40, 40), bool) for _ in range(4))
    crowd[20:], inside[25:35, 5:15], outside[16:21, 20:30], true[2:9, 2:9] = True, True, True, True
    gt, results = as_coco([([true, crowd], [true, inside, outside])])
    gt["annotations"][1]["iscrowd"] = 1
    found = measured(gt, results)
    assert (found["tp"][0], found["fp"][0], found["fn"][0]) == (1, 1, 0)  # a fifth lies in it
    assert found["per_image"][0]["n_true"] == 1 and found["per_image"][0]["n_pred"] == 2
    assert found["AJI"] == found["AJI_cellpose"] == pytest.approx(49 / (49 + 50))


def test_categories_count_only_where_they_are_measured():
    gt = ground_truth()  # a cat and a dog, a cat beside a crowd of dogs
    _, masks = perfect_results(gt)
    swapped = [one | {"category_id": 10 - one["category_id"]} for one in masks]
    found = measured(gt, swapped)
    assert found["f1"] == [1.0] * 10 and found["AJI"] == 1
    assert found["per_category"]["cat"]["f1"] == [0.0] * 10
    assert found["per_category"]["dog"]["fp"] == [2] * 10
    found = measured(gt, [*masks, masks[0] | {"category_id": 99}])
    assert found["fp"] == [0] * 10 and list(found["per_category"]) == ["cat", "dog"]
    assert found["per_category"]["dog"]["f1"] == [1.0] * 10


def test_nothing_to_find_and_nothing_found():
    gt = ground_truth()
    _, masks = perfect_results(gt)
    none = measured(gt, [])
    assert none["f1"] == none["AP_by_image"] == none["panoptic_quality"] == [0.0] * 10
    empty = gt | {"annotations": []}
    nothing = measured(empty, [])
    assert nothing["AP_by_image"] == [-1.0] * 10 and nothing["AJI"] == -1
    assert nothing["per_category"] == {} and nothing["fn"] == [0] * 10
    false = measured(empty, masks)
    assert false["precision"] == [0.0] * 10 and false["AJI"] == 0 and false["fp"] == [3] * 10
    coco.format_table(coco.score(empty, None, [], rules=RULES))
    hollow = entry(np.zeros((100, 120))) | {"score": 0.9}
    found = measured(gt, [*masks, hollow | {"category_id": 7}])
    assert found["fp"] == [1] * 10 and found["AJI"] == 1


def test_a_subset_of_images_is_measured_alone():
    gt = ground_truth()
    _, masks = perfect_results(gt)
    found = coco.score(gt, None, masks, rules=RULES, image_ids=[2])["cells"]
    assert [one["image_id"] for one in found["per_image"]] == [2] and found["tp"][0] == 1


def test_thousands_of_objects_are_measured_without_all_pairs_at_once(monkeypatch):
    gt, results = discs(1, 40)
    expected = measured(gt, results)
    assert expected["f1"] == [1.0] * 10 and expected["AJI"] == expected["AJI_cellpose"] == 1
    monkeypatch.setattr(cells, "BLOCK", 10_000)
    assert measured(gt, results) == expected


def test_a_threshold_is_a_number():
    with pytest.raises(ValueError, match="eval.cells_score_threshold is nan, expected a number"):
        load_config("quickstart", {"eval.cells_score_threshold": float("nan")})


def test_a_results_file_is_measured_and_printed(tmp_path, capsys):
    gt = ground_truth()
    boxes, masks = perfect_results(gt)
    results = [b | m for b, m in zip(boxes, masks, strict=True)]
    paths = [tmp_path / name for name in ("gt.json", "results.json")]
    for path, content in zip(paths, (gt, results), strict=True):
        path.write_text(json.dumps(content))
    entries = {"data.val_json": str(paths[0]), "eval.protocol": "cells"}
    recipe = load_config("quickstart", entries | {"eval.cells_score_threshold": 0.6})
    metrics = evaluate_results(paths[1], recipe, output=tmp_path, report=True)
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert metrics["mask_AP"] == pytest.approx(1) and (tmp_path / "report.html").exists()
    printed = capsys.readouterr().out.splitlines()
    assert any(row.startswith("cells: masks of score 0.60 or more") for row in printed)
    assert [row for row in printed if row.startswith("panoptic_quality") and row.endswith("1.000")]
    assert [row for row in printed if row.startswith("  dog") and row.count("1.000") == 3]
    assert cells.logged(metrics["cells"])["cells/panoptic_quality_50"] == 1
