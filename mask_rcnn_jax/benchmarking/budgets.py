"""Limits for a compiled training step, and the table that shows it."""

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, fields

from mask_rcnn_jax.benchmarking.gpu_compile import Program


def load(path: str) -> dict[str, dict[str, float]]:
    """The limits of a TOML file: a table `any`, and one for each number of images a device.

    Raises ValueError for a name that is no field of `Program`, OSError if the file is not there.
    """
    with open(path, "rb") as file:
        try:
            limits = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
    known = {field.name for field in fields(Program) if field.type in (int, float)}
    for name, table in limits.items():
        unknown = {field.removeprefix("least_") for field in table} - known
        if unknown:
            raise ValueError(f"{path}: [{name}] has {sorted(unknown)}, expected of {sorted(known)}")
    return limits


def excesses(program: Program, limits: dict[str, dict[str, float]]) -> list[str]:
    """What is above its limit, or below one called `least_..`, a line for each."""
    values = asdict(program)
    where = f"{program.images_per_device} images on each of {program.devices} devices"
    tables = (limits.get("any", {}), limits.get(f"images_{program.images_per_device}", {}))
    found = []
    for name, limit in (item for table in tables for item in table.items()):
        least = name.startswith("least_")
        value = values[name.removeprefix("least_")]
        if value < limit if least else value > limit:
            found.append(f"{name} is {value} with {where}, the limit is {limit}")
    return found


def table(target: str, programs: Sequence[Program]) -> str:
    """A line for each figure, a column for each program; for people, and for a README."""
    rows = [
        {name: value for name, value in asdict(program).items() if isinstance(value, int | float)}
        for program in programs
    ]
    lines = [f"| {target} |" + "".join(" |" for _ in rows), "|---|" + "---|" * len(rows)]
    for name in rows[0]:
        lines.append(f"| {name} | " + " | ".join(str(row[name]) for row in rows) + " |")
    return "\n".join(lines)
