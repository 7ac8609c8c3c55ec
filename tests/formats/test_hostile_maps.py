"""Labels on a map that name other files or addresses, which nothing opens."""

import http.server
import json
import os
import shutil
import sqlite3
import threading

import pytest

from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options
from mask_rcnn_jax.images.geo import read_place
from tests.formats.test_geo_labels import UTM, X, Y, as_layer, feature, ring, write_image
from tests.formats.test_geo_labels import write_labels as write

rasterio = pytest.importorskip("rasterio")
pyogrio = pytest.importorskip("pyogrio")

POLYGON = f"POLYGON(({X} {Y},{X + 9} {Y},{X + 9} {Y - 9},{X} {Y}))"
GRID = (
    'GEOGCS["x",DATUM["x",SPHEROID["b",6377397.155,299.1528]],PRIMEM["Greenwich",0],'
    'UNIT["degree",0.0174532925199433],EXTENSION["PROJ4",'
    '"+proj=longlat +ellps=bessel +nadgrids={} +no_defs"]]'
)


@pytest.fixture(scope="module")
def server():
    """Its address, and what it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def vrt(source):
    sql = f"SELECT *, ST_GeomFromText('{POLYGON}') AS g FROM secret"
    layer = f'<SrcDataSource>{source}</SrcDataSource><SrcSQL dialect="SQLITE">{sql}</SrcSQL>'
    more = f"<GeometryType>wkbPolygon</GeometryType><LayerSRS>{UTM}</LayerSRS>"
    text = f'<OGRVRTDataSource><OGRVRTLayer name="x">{layer}{more}</OGRVRTLayer></OGRVRTDataSource>'
    return text


def pipeline(folder):
    line = f"gdal vector pipeline read {folder}/secret.csv ! edit --crs {UTM}"
    return json.dumps({"type": "gdal_streamed_alg", "command_line": line})


def collection(crs=None, **more):
    labels = [feature(ring(0, 0, 9, 9), species="oak")]
    return json.dumps({"type": "FeatureCollection", "features": labels, "crs": crs, **more})


ATTACKS = {
    "a VRT of a file": lambda folder, url: vrt(f"CSV:{folder}/secret.csv"),
    "a VRT of an address": lambda folder, url: vrt(f"/vsicurl/{url}/a.geojson"),
    "a VRT behind a byte order mark": lambda folder, url: "\ufeff\n" + vrt(f"/vsicurl/{url}/a"),
    "WFS": lambda folder, url: f"<OGRWFSDataSource><URL>{url}/wfs</URL></OGRWFSDataSource>",
    "a pipeline": lambda folder, url: pipeline(folder),
    "a VRT in a json": lambda folder, url: json.dumps({"a": vrt(f"/vsicurl/{url}/a")}),
    "topojson": lambda folder, url: '{"type": "Topology", "objects": {}, "arcs": []}',
    "a reference system of an address": lambda folder, url: collection(
        {"type": "link", "properties": {"href": f"{url}/crs", "type": "proj4"}}
    ),
    "one whose name is an address": lambda folder, url: collection(
        {"type": "name", "properties": {"name": f"{url}/crs"}}
    ),
    "one whose name is a file": lambda folder, url: collection(
        {"type": "name", "properties": {"name": f"{folder}/secret.csv"}}
    ),
    "one with a grid": lambda folder, url: collection(
        {"type": "name", "properties": {"name": GRID.format(f"{folder}/pipe")}}
    ),
    "a member beside": lambda folder, url: json.dumps(
        {"type": "X", "other": {"type": "FeatureCollection"}, "url": url}
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_image(tmp_path / "a.tif")
    (tmp_path / "secret.csv").write_text("name\nhunter2\n")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def read(source):
    options = Options(source.parent / "out.json")
    return convert("geo", source, source.parent / "a.tif", options)


@pytest.mark.parametrize("suffix", ["geojson", "gpkg", "shp"])
@pytest.mark.parametrize("what", ATTACKS)
def test_no_other_file_is_read_and_no_address_asked(what, suffix, folder, server):
    url, asked = server
    asked.clear()
    source = folder / f"x.{suffix}"
    source.write_text(ATTACKS[what](folder, url))
    with pytest.raises(ValueError, match=rf"^{source}: ") as error:
        read(source)
    assert not asked and "hunter2" not in str(error.value) and "\n" not in str(error.value)


def test_properties_that_look_like_another_format_are_only_text(folder):
    """GDAL's drivers look for words anywhere in the beginning."""
    more = {"type": "gdal_streamed_alg", "command_line": "gdal vector pipeline read /x"}
    crs = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{UTM[5:]}"}}
    source = folder / "x.geojson"
    source.write_text(collection(crs, more=more, text=vrt("/etc/passwd")))
    assert [entry["name"] for entry in read(source)[0]["categories"]] == ["oak"]


def test_a_layer_of_a_geopackage_is_a_table(folder):
    labels = write(folder / "l.geojson", feature(ring(0, 0, 9, 9), species="oak"))
    good = as_layer(labels, folder / "good.gpkg", "GPKG")
    assert len(read(good)[0]["annotations"]) == 1
    bad = folder / "bad.gpkg"
    shutil.copy(good, bad)
    with sqlite3.connect(bad) as database:
        database.execute("ALTER TABLE good RENAME TO hidden")
        value = "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c)"
        database.execute(f"CREATE VIEW good AS SELECT fid, geom, {value} AS species FROM hidden")
    with pytest.raises(ValueError, match=r"bad.gpkg: 'good' is calculated, expected tables alone"):
        read(bad)


def test_another_database_is_no_geopackage(folder):
    with sqlite3.connect(folder / "x.gpkg") as database:
        database.execute("CREATE TABLE a (b)")
    with pytest.raises(ValueError, match="x.gpkg: not a GeoPackage, GeoJSON or Shapefile"):
        read(folder / "x.gpkg")


@pytest.mark.parametrize("suffix", ["dbf", "shx", "prj", "cpg", "shp"])
def test_parts_of_a_shapefile_are_regular_files(suffix, folder):
    labels = write(folder / "l.geojson", feature(ring(0, 0, 9, 9), species="oak"))
    source = as_layer(labels, folder / "b.shp", "ESRI Shapefile")
    assert len(read(source)[0]["annotations"]) == 1
    source.with_suffix(f".{suffix}").unlink()
    os.mkfifo(source.with_suffix(f".{suffix}"))
    with pytest.raises(OSError, match=rf"b.{suffix} is not a regular file"):
        read(source)


@pytest.mark.parametrize("beside", ["a.tfw", "a.wld", "a.tif.aux.xml", "a.tif.ovr", "a.tif.msk"])
def test_what_lies_beside_an_image_does_not_stop_it(beside, folder):
    os.mkfifo(folder / beside)
    if beside in ("a.tfw", "a.wld"):
        with pytest.raises(OSError, match=f"{beside} is not a regular file"):
            read_place(folder / "a.tif")
    else:
        assert read_place(folder / "a.tif").name == UTM
