"""Limits for a compiled training step, and a table of its figures."""

import tomllib
from collections.abc import Sequence
from dataclasses import fields

from mask_rcnn_jax.benchmarking.gpu_compile import CompiledStep

FIGURES = tuple(field.name for field in fields(CompiledStep) if field.type in (int, float))


def load(path: str) -> dict[str, dict[str, float]]:
    """Load limits from a TOML file: a table `any`, and tables `images_N` by images per device.

    Raises ValueError for a name that is not a figure of `CompiledStep`, OSError for a missing file.
    """
    with open(path, "rb") as file:
        try:
            limits = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
    for name, table in limits.items():
        unknown = {field.removeprefix("least_") for field in table} - set(FIGURES)
        if unknown:
            raise ValueError(f"{path}: [{name}] has {sorted(unknown)}, expected {sorted(FIGURES)}")
    return limits


def violations(step: CompiledStep, limits: dict[str, dict[str, float]]) -> list[str]:
    """Describe each figure above its limit, or below a limit named `least_..`."""
    where = f"{step.images_per_device} images on each of {step.devices} devices"
    tables = (limits.get("any", {}), limits.get(f"images_{step.images_per_device}", {}))
    found = []
    for name, limit in (item for table in tables for item in table.items()):
        value = getattr(step, name.removeprefix("least_"))
        if value < limit if name.startswith("least_") else value > limit:
            found.append(f"{name} is {value} with {where}, the limit is {limit}")
    return found


def table(target: str, steps: Sequence[CompiledStep]) -> str:
    """Format the figures as a Markdown table with one column per step."""
    lines = [f"| {target} |" + " |" * len(steps), "|---|" + "---|" * len(steps)]
    for name in FIGURES:
        lines.append(f"| {name} | " + " | ".join(str(getattr(step, name)) for step in steps) + " |")
    return "\n".join(lines)
