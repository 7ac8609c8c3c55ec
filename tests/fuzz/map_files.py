"""Labels on a map beside a GeoTIFF: GeoJSON, GeoPackages and shapefiles."""

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from tests.formats import test_geo_labels as geo
from tests.fuzz import hostile
from tests.fuzz.format_parsers import convert_and_load

DRIVERS = {".gpkg": "GPKG", ".shp": "ESRI Shapefile"}


@cache
def files() -> dict[str, dict[str, bytes]]:
    """The files of a set by the ending of its labels, and those of the image."""
    with TemporaryDirectory() as made:
        folder, found = Path(made), {}
        geo.write_image(folder / "a.tif")
        square = geo.feature(geo.ring(10, 20, 30, 40), kind="Polygon", species="a", height=3.5)
        holed = geo.feature(geo.ring(50, 50, 20, 20), geo.ring(55, 55, 10, 10), species="b")
        found[""] = {path.name: path.read_bytes() for path in folder.iterdir()}
        labels = geo.write_labels(folder / "case.geojson", square, holed)
        found[".geojson"] = {labels.name: labels.read_bytes()}
        for ending, driver in DRIVERS.items():
            path = geo.as_layer(labels, folder / f"case{ending}", driver)
            beside = set(folder.glob("case.*")) - {labels, folder / "case.gpkg"} | {path}
            found[ending] = {path.name: path.read_bytes() for path in beside}
        return found


def write(folder: Path, case: Any) -> Path:
    ending, name, edits = case
    set_folder = folder / "map"
    shutil.rmtree(set_folder, ignore_errors=True)
    set_folder.mkdir()
    members = dict(files()[ending])
    name = sorted(members)[name % len(members)]
    if ending == ".geojson" and isinstance(edits, tuple):
        edits, changes = edits
        members[name] = hostile.dump(hostile.edit_json(json.loads(members[name]), edits))
        edits = changes
    members[name] = hostile.edit_bytes(members[name], edits)
    for other, content in (files()[""] | members).items():
        (set_folder / other).write_bytes(content)
    return set_folder / f"case{ending}"


def read(path: Path) -> None:
    output = path.parent / "out.json"
    convert_and_load("geo", path, path.parent, output, attribute="species")


cases = st.one_of(
    st.tuples(st.just(".geojson"), st.just(0), st.tuples(hostile.json_edits, hostile.no_edits)),
    st.tuples(st.sampled_from([".geojson", *DRIVERS]), hostile.places, hostile.byte_edits),
)
MAPS = {"maps": (cases, write, read)} if importlib.util.find_spec("pyogrio") else {}
