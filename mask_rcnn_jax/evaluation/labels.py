"""Place text labels beside boxes: readable, inside the image, with little overlap."""

import functools
import unicodedata
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# A label is left out if more than this share of it would cover other labels, or if more than this
# share of an object would be covered.
_MAX_OVERLAP = 0.35
_SMALLEST_FONT = 9  # pixels, where the usual size finds no place
# Characters of a name that are looked at; few labels have room for a hundred.
_MAX_NAME = 1000


def draw_labels(
    canvas: np.ndarray,
    boxes: np.ndarray,
    names: Sequence[str],
    values: Sequence[str],
    colors: Sequence[tuple[int, int, int]],
) -> None:
    """Draw the labels in order, each where it hides the least of earlier labels.

    Args:
        canvas: uint8 [H, W, 3] RGB, modified in place.
        boxes: [n, 4] in pixels.
        names: first part of each label; truncated if long.
        values: second part of each label; never truncated.
        colors: RGB background of each label.
    """
    height, width = canvas.shape[:2]
    scale = float(np.sqrt(height * width))
    max_width = max(0.4 * width, min(width, 130))
    taken, covered = np.zeros((len(boxes), 4)), np.zeros(len(boxes))
    areas = np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 1), axis=1)
    placed = 0
    for i, box in enumerate(boxes):
        usual = _font_size(box, scale)
        for font_size in (usual, max(_SMALLEST_FONT, round(0.7 * usual))):
            text = _fit(names[i], values[i], font_size, max_width)
            label_height, label_width = np.minimum(_size(text, font_size), (height, width))
            spots = _label_spots(box, label_height, label_width, height, width)
            others = _near(spots, taken[:placed])
            hidden = _overlap(spots, taken[others]).sum(axis=1) / (label_height * label_width)
            near = _near(spots, boxes)
            shares = _overlap(spots, boxes[near]) / areas[near]  # of objects
            worst = np.where(shares > 0, covered[near] + shares, 0).max(axis=1, initial=0)
            best = int(np.argmin(hidden + worst))
            if max(hidden[best], worst[best]) <= _MAX_OVERLAP:
                x0, y0, x1, y1 = spots[best]
                label = _render(text, font_size, colors[i])
                canvas[y0:y1, x0:x1] = label[:label_height, :label_width]
                taken[placed] = spots[best]
                covered[near] += shares[best]
                placed += 1
                break


def _font_size(box: np.ndarray, scale: float) -> int:
    """Font size in pixels: grows with the image, smaller on small objects, at least 11."""
    full = 0.017 * scale + 3
    side = np.sqrt(max(box[2] - box[0], 0) * max(box[3] - box[1], 0))
    return max(11, round(float(np.clip(0.3 * side, 0.6 * full, full))))


def _label_spots(box: np.ndarray, h: int, w: int, height: int, width: int) -> np.ndarray:
    """Candidate positions of an h x w label inside the image, best first: int [s, 4]."""
    x1, y1, x2, y2 = np.round(box)
    spots = [(x1, y1 - h), (x1, y1), (x1, y2), (x1, y2 - h)]
    spots += [(x2 - w, y1 - h), (x2 - w, y1), (x2 - w, y2), (x2 - w, y2 - h)]
    spots += [(x2, y1), (x1 - w, y1), (x1, y1 - 2 * h), (x1, y2 + h)]
    spots += [(x1, y1 + step * h) for step in range(1, 4)]
    corner = np.clip(np.array(spots), 0, (width - w, height - h)).astype(int)
    return np.concatenate([corner, corner + (w, h)], axis=1)


def _near(spots: np.ndarray, rectangles: np.ndarray) -> np.ndarray:
    """Indices of the rectangles [t, 4] that may overlap a spot [s, 4]; few, of thousands."""
    low, high = spots[:, :2].min(axis=0), spots[:, 2:].max(axis=0)
    meets = (rectangles[:, :2] < high) & (rectangles[:, 2:] > low)
    return np.flatnonzero(meets[:, 0] & meets[:, 1])


def _overlap(spots: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Number of pixels of each spot [s, 4] covered by each rectangle [t, 4]: [s, t]."""
    low = np.maximum(spots[:, None, :2], taken[None, :, :2])
    high = np.minimum(spots[:, None, 2:], taken[None, :, 2:])
    return np.prod(np.maximum(high - low, 0), axis=2)


@functools.lru_cache(maxsize=512)
def _fit(name: str, value: str, font_size: int, max_width: float) -> str:
    """Join name and value, truncating the name to fit into max_width pixels."""
    name = _printable(name)[:_MAX_NAME]
    room = max_width - 2 * _padding(font_size)

    def cut(length: int) -> str:
        kept = name[:length].rstrip()
        return f"{kept}... {value}".strip() if kept else value

    def fits(text: str) -> bool:
        return _font(text, font_size).getlength(text) <= room

    text = f"{name} {value}".strip()
    if fits(text):
        return text
    low, high = 0, len(name)  # `cut(low)` fits or is as short as can be, `cut(high)` does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(cut(middle)) else (low, middle)
    return cut(low)


def _printable(name: str) -> str:
    """Reduce the name to one line, and to ASCII if no font has its other letters; no font has lone
    surrogates."""
    name = " ".join(name.encode(errors="replace").decode().split())
    if name.isascii() or _dejavu(10):
        return name
    return unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode() or "?"


@functools.lru_cache(maxsize=512)
def _size(text: str, font_size: int) -> tuple[int, int]:
    """Height and width of a label in pixels."""
    font = _font(text, font_size)
    ascent, descent = font.getmetrics()
    return ascent + descent + 1, int(np.ceil(font.getlength(text))) + 2 * _padding(font_size)


@functools.lru_cache(maxsize=512)
def _render(text: str, font_size: int, color: tuple[int, int, int]) -> np.ndarray:
    """Render a label, text on the instance's color: uint8 [h, w, 3]."""
    font, pad = _font(text, font_size), _padding(font_size)
    size = _size(text, font_size)[::-1]
    dark_text = np.dot(color, (0.299, 0.587, 0.114)) > 120
    label = Image.new("RGB", size, color)
    text_color = (0, 0, 0) if dark_text else (255, 255, 255)
    ImageDraw.Draw(label).text((pad, 0), text, fill=text_color, font=font)
    return np.asarray(label)


def _padding(font_size: int) -> int:
    return max(2, font_size // 5)


def _font(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Pillow's built-in font for ASCII, the same on every machine; else DejaVu if installed."""
    font = None if text.isascii() else _dejavu(size)
    return font or _load_default(size)  # type: ignore[return-value]


_load_default = functools.cache(ImageFont.load_default)


@functools.cache
def _dejavu(size: int) -> ImageFont.FreeTypeFont | None:
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return None
