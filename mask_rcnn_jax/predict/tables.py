"""What `infer --save` hands on to programs that measure: label images and a table of regions."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mask_rcnn_jax.images.pixel_size import METERS
from mask_rcnn_jax.predict.result import Result


def import_tifffile() -> Any:
    """Return tifffile. Raises ValueError, naming the extra to install, if it is missing."""
    try:
        import tifffile
    except ImportError as error:
        install = "pip install 'mask-rcnn-jax[tiff]'"
        raise ValueError(f"--save label_images needs tifffile: {install}") from error
    return tifffile


def write_label_image(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write `Result.labels` as a TIFF, zlib-compressed, with the size of its pixels if known."""
    path = folder / "label_images" / name.with_suffix(".tif")
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {}
    if result.pixel_size:
        height, width, unit = result.pixel_size
        a_centimeter = METERS["cm"] / METERS[unit]
        options["resolution"] = a_centimeter / width, a_centimeter / height
        options["resolutionunit"] = "CENTIMETER"
    given = {"compression": "zlib", "photometric": "minisblack", "metadata": None}
    import_tifffile().imwrite(path, result.labels(), **given, **options)


def region_rows(result: Result, file_name: str) -> tuple[list[str], list[list[Any]]]:
    """The head and the rows of `regions.csv` for an image; "" for what cannot be known."""
    table = result.regions()
    columns = [_texts(name, column) for name, column in table.items()]
    rows = [[file_name, *row] for row in zip(*columns, strict=True)]
    return ["file_name", *table], rows


def _texts(name: str, column: np.ndarray) -> Iterator[Any]:
    if column.dtype.kind != "f":
        return iter(column.tolist())
    if name == "score":
        return (round(value, 4) for value in column.tolist())
    return ("" if value != value else f"{value:.10g}" for value in column.tolist())
