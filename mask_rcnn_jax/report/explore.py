"""The report's sections that follow its score threshold: counts and images."""

from collections.abc import Callable
from html import escape

import numpy as np

from mask_rcnn_jax.report.analysis import Analysis
from mask_rcnn_jax.report.browser import browser, max_outlines
from mask_rcnn_jax.report.outcomes import last_positions
from mask_rcnn_jax.report.tables import counts_table


def threshold_section(main: Analysis) -> str:
    """Return the counts by category below the slider."""
    position = _position(main)
    return (
        "<h2>Score threshold</h2>"
        f'<p class="soft">What remains of the {main.kind} detections with a score at or above the '
        "threshold. It starts at the best F1 of all categories together.</p>"
        f'<div class="controls">{_slider(main, position)}</div>'
        f"{counts_table(main, position)}"
    )


def images_section(main: Analysis, read_image: Callable[[dict], np.ndarray | None]) -> str:
    """Return the images below the slider and their filters; arguments as for `write_report`."""
    names = sorted(enumerate(main.categories), key=lambda pair: pair[1])
    options = "".join(f'<option value="{k}">{escape(name)}</option>' for k, name in names)
    shown = len(main.browsed)
    most = max_outlines(shown)
    which = "" if shown == main.num_images else ", half of them those with most errors"
    shapes = browser(main.browsed, main.categories, main.limits, main.kind == "mask", read_image)
    return (
        "<h2>Images</h2>"
        f'<p class="soft">{shown:,} of {main.num_images:,} images{which}, with at most '
        f"{most:,} objects and {most:,} detections each. "
        '<span class="key found"></span>true and <span class="key wrong"></span>false detections, '
        '<span class="key object"></span>objects, <span class="key missed"></span>missed ones. '
        "Crowds are left out. A click enlarges an image and names its detections.</p>"
        f'<div class="controls">{_slider(main, _position(main))}'
        f'<label>Category <select class="category"><option value="">all</option>{options}</select>'
        '</label><label>Order <select class="order"><option value="errors">most errors first'
        '</option><option value="missed">most missed first</option><option value="wrong">most '
        'false first</option><option value="">as in the json</option></select></label>'
        '<label><input type="checkbox" class="objects" checked/> objects</label>'
        '<label><input type="checkbox" class="detections" checked/> detections</label></div>'
        f'{shapes}<p><button class="more" hidden>Show more</button></p>'
    )


def _slider(main: Analysis, position: int) -> str:
    """The threshold; all sliders of the page move together."""
    low, high = main.histogram_range
    return (
        f'<label class="slider">Score at least <output>{main.limits[position]:.2f}</output>'
        f'<input type="range" class="threshold" min="0" max="{len(main.limits) - 1}" '
        f'value="{position}" data-low="{low:g}" data-high="{high:g}"/></label>'
    )


def _position(main: Analysis) -> int:
    """The slider's position at the start."""
    return max(0, int(last_positions([main.threshold], main.limits)[0]))
