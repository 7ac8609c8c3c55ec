"""Channels that layers share, and that pruning narrows (`pruning.choice`).

A part that can be narrowed has an entry `widths` and a property `prunable`:

    widths: Widths = ()

    @property
    def prunable(self) -> dict[str, Channels]:
        return {"conv": make_channels(256)}

and builds its layers with `narrow(self.prunable, self.widths)`. A channel must be 0 wherever its
filters, with their biases and norms, are 0: no layer norm over them, no activation that moves 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm

from mask_rcnn_jax.models.norm import GROUPS

Widths = tuple[tuple[str, int], ...]  # names and numbers; others stay as they are


@dataclass(frozen=True)
class Channels:
    """Channels that one layer writes, or several whose outputs are added.

    Attributes:
        count: channels.
        unit: neighbors that stay together, as a convolution or norm groups them.
        full: channels without pruning.
    """

    count: int
    unit: int
    full: int

    def groups(self, full: int) -> int:
        """Return how many groups are left; each keeps its size. full: without pruning."""
        return full * self.count // self.full


def make_channels(full: int, norm: str = "none", groups: int = 1) -> Channels:
    """Return channels before pruning.

    norm: the layers' kind; "layer" looks at all channels, so that none can be removed.
    groups: in a convolution that reads and writes them.
    """
    unit = full // groups if groups > 1 else 1
    if norm in ("group", "layer"):
        unit = lcm(unit, full // GROUPS if norm == "group" else full)
    return Channels(full, unit, full)


def narrow(prunable: Mapping[str, Channels], widths: Widths) -> dict[str, Channels]:
    """Return a part's channels with the numbers that `widths` gives.

    Raises ValueError for an unknown name or a number that does not divide into units.
    """
    found = dict(prunable)
    for name, width in widths:
        if name not in found:
            raise ValueError(f"widths names {name!r}, expected names of {sorted(found)}")
        unit = found[name].unit
        if width < 1 or width % unit:
            expected = f"a multiple of {unit}" if unit > 1 else "at least 1"
            raise ValueError(f"widths has {width} for {name!r}, expected {expected}")
        found[name] = replace(found[name], count=width)
    return found
