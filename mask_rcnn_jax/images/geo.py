"""Where the pixels of a GeoTIFF are on the map, by rasterio (the extra `geo`)."""

import os
import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.annotations.reader import open_regular
from mask_rcnn_jax.images.decode import tiff_directories
from mask_rcnn_jax.tars.patterns import place_of

_TRANSFORM = {33550, 33922, 34264}  # tags
# GDAL looks for coordinates in these beside a TIFF, too; in others, which may name files, it does
# not (`GDAL_PAM_ENABLED`).
_WORLD = (".tfw", ".tifw", ".tiffw", ".wld", ".tab")
INSTALL = "`pip install 'mask-rcnn-jax[geo]'` installs what is missing"


class Place(NamedTuple):
    """Where an image is.

    Attributes:
        size: (height, width) of the image.
        matrix: [2, 3], (column, row, 1) of a pixel's upper left corner -> (x, y) on the map.
        crs: the coordinate reference system, rasterio's; None if the file has none.
    """

    size: tuple[int, int]
    matrix: np.ndarray
    crs: Any

    def to_map(self, points: np.ndarray) -> np.ndarray:
        """Map pixels [n, 2] (x, y) to coordinates, float64."""
        return points.astype(np.float64) @ self.matrix[:, :2].T + self.matrix[:, 2]

    def to_pixels(self, points: np.ndarray) -> np.ndarray:
        """Invert `to_map`."""
        inverse = np.linalg.inv(self.matrix[:, :2])
        return (points.astype(np.float64) - self.matrix[:, 2]) @ inverse.T

    @property
    def name(self) -> str | None:
        """The name of the coordinate reference system, such as "EPSG:32633"; None without one."""
        return None if self.crs is None else self.crs.to_string()


def import_rasterio() -> Any:
    """Return rasterio; ValueError says how to install it."""
    try:
        import rasterio
        import rasterio.warp
    except ImportError as error:
        raise ValueError(f"coordinates on the map are read by rasterio; {INSTALL}") from error
    return rasterio


def import_pyogrio() -> Any:
    """Return pyogrio's functions on arrays; ValueError says how to install it."""
    try:
        import pyogrio.raw
    except ImportError as error:
        raise ValueError(f"files of geometries need pyogrio; {INSTALL}") from error
    return pyogrio


def read_place(path: str | os.PathLike) -> Place | None:
    """Where a GeoTIFF is; None for a TIFF without coordinates, and for other files.

    Raises ValueError for a GeoTIFF without rasterio, OSError if there is no file.
    """
    path = os.path.abspath(path)
    if in_tar := place_of(path) is not None:
        open_regular(path).close()
    else:
        os.stat(path)
        stem = os.path.splitext(path)[0]
        for beside in (stem + suffix for suffix in _WORLD):
            if os.path.lexists(beside):
                open_regular(beside).close()
    try:
        rasterio = import_rasterio()
    except ValueError:
        if _has_coordinates(path):
            raise
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        try:
            with rasterio.Env(GDAL_PAM_ENABLED=False), ExitStack() as stack:
                by_path = is_text(path) and not in_tar and "!" not in path
                source = path if by_path else stack.enter_context(open_regular(path))
                file = stack.enter_context(rasterio.open(source, driver="GTiff"))
                size, transform, crs = (file.height, file.width), file.transform, file.crs
        except rasterio.errors.RasterioError:
            return None
    matrix = np.array(tuple(transform)[:6], np.float64).reshape(2, 3)
    identity = np.array_equal(matrix, [[1, 0, 0], [0, 1, 0]])
    if identity or not np.isfinite(matrix).all() or not np.linalg.det(matrix[:, :2]):
        return None
    return Place(size, matrix, crs)


def is_text(path: str) -> bool:
    """Whether a path is valid Unicode, as GDAL needs it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has_coordinates(path: str) -> bool:
    """Whether a TIFF has the tags of a GeoTIFF's transform."""
    try:
        with open_regular(path) as file:
            return not _TRANSFORM.isdisjoint(next(tiff_directories(file)))
    except Exception:  # whatever the parsers raise for other files
        return False


def reprojected(points: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Points [n, 2] of one coordinate reference system in another; both are rasterio's.

    Infinite where they have no place in it.
    """
    if source == target or source is None or target is None:
        return points
    try:
        x, y = import_rasterio().warp.transform(source, target, *points.T.tolist())
    except Exception:  # one of no public class where PROJ finds no way at all
        return np.full(points.shape, np.inf)
    return np.column_stack([x, y])
