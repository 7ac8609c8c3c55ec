"""Compare boxes with the extent of their masks, and name the form in which they seem to be.

Honest boxes may be loose, or larger than a mask that something covers. So a set is reported where
most of the boxes that do not fit as they are do fit in another form, where boxes miss their masks,
or where most boxes fit in no form.
"""

from array import array
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.annotations.reader import GroundTruth
from mask_rcnn_jax.annotations.segmentation import segmentation_box

LOOSE = 2.0  # pixels that each side may be off
FITS, SURE = 0.7, 0.8  # IoU from which on a box fits as it is, and in another form
BETTER = 0.05  # IoU by which another form must fit better than that of COCO
INSIDE = 0.5  # of its mask's extent must be in a box
MOST = 0.5  # of the boxes that do not fit must fit in another form, or else not fit at all
NEARLY_ALL = 0.95  # of a set's boxes are in a form that all are taken for
MANY = 10  # boxes from this number on need not fit to the pixel
FEW = 3  # boxes below this number could fit a scale, or be off, by chance
SAMPLE = 20_000  # boxes that other forms are tried on

# Each makes (x1, y1, x2, y2) of four numbers; the third and fourth are sides, or a corner.
_FORMS = {
    "x, y, width, height": lambda a, b, c, d: (a, b, a + c, b + d),
    "x1, y1, x2, y2": lambda a, b, c, d: (a, b, c, d),
    "center x, center y, width, height": lambda a, b, c, d: (
        *(a - c / 2, b - d / 2),
        *(a + c / 2, b + d / 2),
    ),
    "y, x, height, width": lambda a, b, c, d: (b, a, b + d, a + c),
    "y1, x1, y2, x2": lambda a, b, c, d: (b, a, d, c),
    "x, y, height, width": lambda a, b, c, d: (a, b, a + d, b + c),
    "x1, x2, y1, y2": lambda a, b, c, d: (a, c, b, d),
}
# What forms with swapped axes are if it is the masks whose axes are swapped.
_TURNED = {"y, x, height, width": "x, y, width, height", "y1, x1, y2, x2": "x1, y1, x2, y2"}
_UNITS = {"": 1.0, " in percent of the image": 0.01, " as fractions of the image": 1.0}


class Boxes(NamedTuple):
    """Boxes beside their masks."""

    positions: np.ndarray  # [n] int64 in 'annotations'
    given: np.ndarray  # [n, 4] float64, the four numbers of the json
    extents: np.ndarray  # [n, 4] float64 (x1, y1, x2, y2) of the masks, inside the image
    limits: np.ndarray  # [n, 2] float64 (width, height) of the image
    are_sound: np.ndarray  # [n] bool: nothing else is known to be wrong
    have_codes: bool  # some masks are run-length encodings

    def at(self, places: np.ndarray) -> "Boxes":
        """Some of the boxes."""
        numbers = self.given[places], self.extents[places], self.limits[places]
        return Boxes(self.positions[places], *numbers, self.are_sound[places], self.have_codes)


def boxes_of(truth: GroundTruth) -> Boxes:
    """Gather the boxes of all annotations that have a sound segmentation, whatever the box."""
    entries, sizes, have_codes = truth.content["annotations"], truth.sizes, False
    positions, rows = array("q"), array("d")
    for position, (entry, checked) in enumerate(zip(entries, truth.checked, strict=True)):
        box, size = entry.get("bbox"), sizes[entry["image_id"]]
        segmentation = checked.entry.get("segmentation")
        if not segmentation or size is None or not _is_box(box):
            continue
        have_codes |= isinstance(segmentation, dict)
        positions.append(position)
        extent, is_sound = _extent(segmentation, *size), checked.fault is None
        rows.extend((*box, *extent, size[1], size[0], is_sound))
    table = np.frombuffer(rows, np.float64).reshape(-1, 11)
    limits = table[:, 8:10]
    extents = _inside(table[:, 4:8], limits)
    kept = (extents[:, 2:] > extents[:, :2]).all(axis=1)
    columns = table[kept, :4], extents[kept], limits[kept], table[kept, 10] > 0
    return Boxes(np.frombuffer(positions, np.int64)[kept], *columns, have_codes)


def _extent(segmentation: Any, height: int, width: int) -> tuple[float, float, float, float]:
    """Corners (x1, y1, x2, y2) around a mask; a million polygons take seconds."""
    if isinstance(segmentation, list):
        if len(segmentation) == 1:
            xs, ys = segmentation[0][::2], segmentation[0][1::2]
        else:
            xs = [x for part in segmentation for x in part[::2]]
            ys = [y for part in segmentation for y in part[1::2]]
        return min(xs), min(ys), max(xs), max(ys)
    x, y, w, h = segmentation_box(segmentation, height, width)
    return x, y, x + w, y + h


def _is_box(box: object) -> bool:
    return (
        isinstance(box, list)
        and len(box) == 4
        and all(type(value) in (int, float) and abs(value) < 1e9 for value in box)
        and min(box[2:]) > 0
    )


class _Form(NamedTuple):
    """How four numbers may be meant."""

    numbers: str  # a key of `_FORMS`
    unit: str = ""  # a key of `_UNITS`
    scale: float = 1.0
    text: str = ""  # about the scale

    def corners(self, boxes: Boxes) -> np.ndarray:
        """[n, 4] float64 (x1, y1, x2, y2) in pixels, not clipped."""
        found = np.stack(_FORMS[self.numbers](*boxes.given.T), axis=1) * self.scale
        return found * np.tile(boxes.limits, 2) * _UNITS[self.unit] if self.unit else found

    def box(self, box: list[float], size: tuple[int, int]) -> list[float]:
        """[x, y, width, height] in pixels of four numbers, without the scale; `size` is the image's
        (height, width)."""
        x1, y1, x2, y2 = _FORMS[self.numbers](*box)
        if self.unit:
            x1, x2 = (value * size[1] * _UNITS[self.unit] for value in (x1, x2))
            y1, y2 = (value * size[0] * _UNITS[self.unit] for value in (y1, y2))
        return [x1, y1, x2 - x1, y2 - y1]

    def fit(self, boxes: Boxes, least: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Corners inside the image [n, 4], their IoU with the masks [n], and which fit [n]."""
        corners = _inside(self.corners(boxes), boxes.limits)
        overlaps = _overlaps(corners, boxes.extents)
        return corners, overlaps, _are_near(corners, boxes.extents) | (overlaps >= least)


COCO = _Form("x, y, width, height")


def misfits(boxes: Boxes) -> tuple[str, int] | None:
    """Return a line about boxes that do not fit, and the position of the first; None if they do."""
    total, masks = len(boxes.given), "masks" if boxes.have_codes else "polygons"
    corners, overlaps, fits = COCO.fit(boxes, FITS)
    bad = np.flatnonzero(~fits)
    if not len(bad):
        return None
    if form := _best_form(boxes.at(bad)):
        _, others, fit_so = form.fit(boxes, SURE)
        is_better = fit_so & (others > overlaps + BETTER) & ~_are_near(corners, boxes.extents)
        wrong = np.flatnonzero(~fits | is_better)
        share = float(fit_so[wrong].mean())
        they = "they" if share == 1 else f"{np.count_nonzero(fit_so[wrong])} of these"
        meant = f"{form.numbers}{form.unit}{form.text}"
        text = f"{len(wrong)} of {total} boxes do not fit their {masks}; {they} fit as {meant}"
        expected = f", expected {COCO.numbers} in pixels"
        return text + expected, int(boxes.positions[wrong[0]])
    bad = bad[boxes.are_sound[bad]]
    missed = bad[_shares_inside(corners[bad], boxes.extents[bad]) < INSIDE]
    if len(missed):
        first = int(boxes.positions[missed[0]])
        return f"{len(missed)} of {total} boxes miss most of their {masks}", first
    poor = bad[overlaps[bad] < 0.5]
    if len(poor) >= FEW and len(poor) > MOST * total:
        first = int(boxes.positions[poor[0]])
        return f"{len(poor)} of {total} boxes are more than twice as large as their {masks}", first
    return None


def form_of_all(boxes: Boxes) -> _Form | None:
    """The form, other than COCO's, that a set's boxes are in beyond doubt; None if there is none.

    Nearly all fit in it, to the pixel if they are few, most do not as they are, none only as it is,
    and no further form fits them, or none to the pixel. Whether boxes or masks are scaled by a
    factor is unknown, and so is which of them have swapped axes, unless masks would leave an image.
    """
    every = boxes
    boxes = boxes.at(np.arange(0, len(boxes.given), -(-len(boxes.given) // SAMPLE) or 1))
    if len(boxes.given) < FEW or COCO.fit(boxes, FITS)[2].mean() > 1 - MOST:
        return None
    forms = [_Form(numbers, unit) for numbers in _FORMS for unit in _UNITS]
    fitting = [form for form in forms if form.fit(boxes, SURE)[2].mean() >= NEARLY_ALL]
    if len(fitting) > 1 or len(boxes.given) < MANY:
        near = {f: _are_near(f.fit(boxes, SURE)[0], boxes.extents).mean() for f in fitting}
        fitting = [form for form in fitting if near[form] >= NEARLY_ALL]
    if len(fitting) != 1 or _may_be_masks(fitting[0], every):
        return None
    fits_alone = COCO.fit(every, FITS)[2] & ~fitting[0].fit(every, SURE)[2]
    return None if fits_alone.any() else fitting[0]


def _may_be_masks(form: _Form, boxes: Boxes) -> bool:
    """Whether the axes of the masks may be swapped in place of those of the boxes."""
    if form.numbers not in _TURNED:
        return False
    turned = boxes._replace(extents=boxes.extents[:, [1, 0, 3, 2]])
    is_inside = (turned.extents[:, 2:] <= boxes.limits + LOOSE).all()
    other = _Form(_TURNED[form.numbers], form.unit)
    return bool(is_inside and other.fit(turned, SURE)[2].mean() >= NEARLY_ALL)


def _best_form(boxes: Boxes) -> _Form | None:
    """The form that fits most of the boxes, which do not fit as COCO's; None if none does."""
    boxes = boxes.at(np.arange(0, len(boxes.given), -(-len(boxes.given) // SAMPLE)))
    best, most = COCO, 0.0
    for numbers in _FORMS:
        for unit in _UNITS:
            plain = _Form(numbers, unit)
            for form in (plain, *_scaled(plain, boxes)):
                share = float(form.fit(boxes, SURE)[2].mean())
                if share > most + 1e-9:
                    best, most = form, share
    return best if most >= MOST else None


def _scaled(form: _Form, boxes: Boxes) -> list[_Form]:
    """The form with a factor by which all boxes seem to be scaled; none for few boxes."""
    corners = form.corners(boxes)
    sides = corners[:, 2:] - corners[:, :2]
    wanted = boxes.extents[:, 2:] - boxes.extents[:, :2]
    plain = (sides > 0).all(axis=1)
    if np.count_nonzero(plain) < FEW or "percent" in form.unit:
        return []
    scale = float(np.median(wanted[plain] / sides[plain]))
    if 0.9 < scale < 1.1 or not 1e-6 < scale < 1e6:
        return []
    larger = max(scale, 1 / scale)
    if abs(larger / round(larger) - 1) < 0.02:  # boxes are whole pixels
        larger = round(larger)
    scale = larger if scale > 1 else 1 / larger
    if form.unit:
        text = f", of which {1 / scale:.4g} is the whole"
    else:
        text = f" times {larger:.4g}" if scale > 1 else f" divided by {larger:.4g}"
    return [form._replace(scale=scale, text=text)]


def _inside(corners: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Corners (x1, y1, x2, y2) [n, 4], clipped to images (width, height) [n, 2]."""
    return np.clip(corners, 0, np.tile(limits, 2))


def _are_near(corners: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """[n] bool: each side is nearly where it should be."""
    has_area = (corners[:, 2:] > corners[:, :2]).all(axis=1)
    return has_area & (np.abs(corners - extents) <= LOOSE).all(axis=1)


def _overlaps(boxes: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """IoU of each box with its mask's extent: [n]."""
    common = _common(boxes, extents)
    return common / np.maximum(_areas(boxes) + _areas(extents) - common, 1e-9)


def _shares_inside(boxes: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """How much of each mask's extent is in its box: [n]."""
    return _common(boxes, extents) / np.maximum(_areas(extents), 1e-9)


def _common(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    low, high = np.maximum(boxes[:, :2], others[:, :2]), np.minimum(boxes[:, 2:], others[:, 2:])
    return np.prod(np.maximum(high - low, 0), axis=1)


def _areas(boxes: np.ndarray) -> np.ndarray:
    return np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)
