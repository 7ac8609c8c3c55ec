"""Configs of other systems, jsons to repair and models of a hub: what is written loads again."""

import ast
import copy
import hashlib
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st
from safetensors.numpy import save

from mask_rcnn_jax.annotations.reader import read_annotation_file
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.formats import d2_fields, d2_heads, d2_recipe, mmdet_recipe
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options
from mask_rcnn_jax.formats.repair import repair_json, repaired
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights import model_folder
from tests.formats import test_d2_config as d2
from tests.formats import test_mmdet_config as mmdet
from tests.formats import test_mmdet_models as models
from tests.fuzz import hostile
from tests.fuzz.format_parsers import writes
from tests.helpers import tiny_config

# mmdetection: values of the text, which are names, numbers, calls and so on, are replaced.

SCHEDULERS = """
scheduler = dict(type='CosineAnnealingLR', begin=1, T_max=11, end=12, eta_min_ratio=0.05)
param_scheduler = [dict(type='LinearLR', start_factor=0.1, end=1), scheduler]
model = dict(backbone={{_base_.model.backbone}}, test_cfg=dict(rcnn=dict(max_per_img=50 * 2)))
_base_.optim_wrapper.optimizer.lr = 0.02 / 8
"""
RESIZE = "dict(type='RandomResize', scale=[(1333, 640), (1333, 800)], keep_ratio=True)"
WHOLE = mmdet.MODEL + mmdet.DATA + mmdet.SCHEDULE + f"more = [{RESIZE}, {mmdet.LSJ}]\n"
CHANGED = mmdet.DEFAULT + SCHEDULERS
# Other trunks and heads, in one file.
CASCADE = models.CASCADE.replace("'CascadeRCNN',", "'CascadeRCNN', **trunk,")
POINTREND = models.POINTREND.replace("'PointRend',", "'PointRend', **trunk,")
SWIN, OLD_SWIN, CONVNEXT = (
    text.replace("model = ", "trunk = ") for text in (models.SWIN, models.OLD_SWIN, models.CONVNEXT)
)
OTHERS = [
    mmdet.DEFAULT + SWIN + CASCADE + models.ADAMW + models.KEYS + models.LONG + models.CHOICE,
    mmdet.DEFAULT + CONVNEXT + POINTREND + models.ADAMW + models.BY_LAYER,
    "_base_ = ['base/model.py']\n" + OLD_SWIN + CASCADE + models.OLD_TRAINING,
]
TEXTS = ["None", "True", "()", "[]", "{}", "dict()", "[[]]", "...", "b'a'", "1j", "{1}", "{1: 2}"]
TEXTS += ["0", "-1", "1.5", "1e999", "-1e999", "1e308", "9**9**9", "9" * 400, "9" * 5000, "0.0"]
TEXTS += ["'ResNet'", "'\\ud800'", "'a\\nb'", "'" + "a" * 5000 + "'", "'{{_base_.model}}'", "'\\0'"]
TEXTS += ["size", "model", "_base_.model", "_base_", "{{_base_.model}}", "dict(**coder)", "nothing"]
TEXTS += ["[size] * 70000", "'ab' * 70000", "size * size * size * size", "1 / 0", "-'a'", "-[]"]
TEXTS += ["(1, 2)", "[1, 2, 3]", "[0.5, 1.0, 2.0]", "dict(type='BN')", "[dict(type='SGD')]"]
TEXTS += ["lambda: 0", "open('/dev/zero').read()", "[a for a in b]", "f'{size}'", "(x := 1)"]
TEXTS += ["(" * 300 + ")" * 300, "[" * 90 + "]" * 90, "-" * 2000 + "1", "model['type']", "[1][5]"]
TEXTS += ["dict(_delete_=True)", "dict(type='LinearLR', end=0)", "dict(a=1, a=2)", "1 if 1 else 2"]
text_cases = st.one_of(
    *[st.tuples(st.sampled_from([WHOLE, CHANGED, *OTHERS]), st.lists(
        st.tuples(hostile.places, st.one_of(st.sampled_from(TEXTS), hostile.places)),
        min_size=1, max_size=3), hostile.no_edits)] * 3,
    st.tuples(st.sampled_from([WHOLE, CHANGED, *OTHERS]), st.just([]), hostile.byte_edits),
)  # fmt: skip


@cache
def spans(text: str) -> list[tuple[int, int]]:
    """Where the expressions of a text in Python begin and end."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    places = [(n.lineno, n.col_offset, n.end_lineno or 0, n.end_col_offset or 0) for n in found]
    return [(starts[a - 1] + b, starts[c - 1] + d) for a, b, c, d in places]


def edit_text(text: str, edits: list) -> str:
    """Replace expressions by others, or, for a number, by that expression of the text."""
    found = spans(text)
    chosen = {found[place % len(found)]: new for place, new in edits}
    end = len(text)
    for (start, stop), new in sorted(chosen.items(), reverse=True):
        if stop > end:
            continue  # in it, one is replaced already
        if isinstance(new, int):
            new = text[slice(*found[new % len(found)])]
        text, end = text[:start] + new + text[stop:], start
    return text


def write_mmdet(folder: Path, case: Any) -> Path:
    text, edits, changes = case
    path = mmdet.write(folder)
    path.write_bytes(hostile.edit_bytes(edit_text(text, edits).encode("utf-8", "replace"), changes))
    return path


def translates(write_recipe: Callable) -> Callable[[Path], None]:
    """A reader that translates a config; `write_recipe` loads what it has written."""

    def read(path: Path) -> None:
        output = path.parent / "recipe.py"
        output.unlink(missing_ok=True)
        try:
            notes = write_recipe(path, output)
        except (ValueError, OSError):
            assert not output.exists() and not output.with_name("recipe.py.tmp").exists()
            raise
        assert all("\n" not in note and len(note) < 1500 for note in notes), notes

    return read


# detectron2: a document in YAML, which json is, too.

D2 = yaml.safe_load(d2.BASE)
D2["SOLVER"]["CLIP_GRADIENTS"] = {"ENABLED": True, "CLIP_TYPE": "norm", "CLIP_VALUE": 1.0}
D2["MODEL"] |= {"MASK_ON": True, "RESNETS": D2["MODEL"]["RESNETS"] | {"NORM": "GN"}}


# Of the heads: a recipe, what its fields are like, and which possible values they have.
D2_HEADS: dict[bool, tuple[str, dict, dict]] = {
    False: ("coco_detectron2", d2_heads.SAME_MASK, {"MODEL.KEYPOINT_ON": (False,)}),
    True: (
        "coco_detectron2:pointrend",
        d2_heads.SAME_POINTREND,
        {
            **d2_heads.POINTREND,
            **d2_heads.KEYPOINTS,
            "MODEL.ROI_MASK_HEAD.NAME": ("PointRendMaskHead",),
            "INPUT.MASK_FORMAT": ("bitmask",),
            "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": ([64, 64],),
            "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": (3,),
            "TEST.KEYPOINT_OKS_SIGMAS": ([0.1, 0.2, 0.3],),
        },
    ),
}


@cache
def d2_document(has_other_heads: bool = False) -> dict:
    """Every field that is read, with a value that is."""
    document = copy.deepcopy(D2)
    recipe, heads, possible = D2_HEADS[has_other_heads]
    if has_other_heads:
        document["MODEL"].pop("ROI_MASK_HEAD")
    entries = flatten(load_config(recipe).to_dict())
    given = {name: entries[entry] for name, entry in (d2_fields.SAME | heads).items()}
    given |= {name: values[0] for name, values in (d2_fields.FIXED | possible).items()}
    for name, value in given.items():
        *blocks, last = name.split(".")
        block = document
        for key in blocks:
            block = block.setdefault(key, {})
        block.setdefault(last, value)
    return json.loads(json.dumps(document))


def dump_yaml(document: Any, edits: list) -> bytes:
    return hostile.dump(hostile.edit_json(document, edits))


def dump_block(document: Any, edits: list) -> bytes:
    return yaml.safe_dump(document).encode()


d2_cases = st.one_of(
    *[st.tuples(st.just(False), hostile.json_edits, hostile.no_edits)] * 3,
    st.tuples(st.just(True), hostile.no_edits, hostile.byte_edits),
)


def write_d2(folder: Path, case: Any, has_other_heads: bool = False) -> Path:
    is_block, edits, changes = case
    path = folder / "case.yaml"
    dump = dump_block if is_block else dump_yaml
    path.write_bytes(hostile.edit_bytes(dump(d2_document(has_other_heads), edits), changes))
    return path


# data.yaml of Ultralytics, with a split.

YOLO = {"path": ".", "train": "shown", "val": "../shown", "nc": 2, "names": ["a", "b"]}


def write_names(folder: Path, case: Any) -> Path:
    is_block, edits, changes = case
    path = writes("yolo_names", "case.yaml", dump_block if is_block else dump_yaml, YOLO)(
        folder, (edits, changes)
    )
    (path.parent / "shown" / "0.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n")
    return path


def read_names(path: Path) -> None:
    options = Options(path.parent / "out.json", split="val")
    content, folder, _ = convert("yolo", path, None, options)
    assert len(content["images"]) == 1
    options.output.write_text(json.dumps(content))
    load_coco(options.output, folder, require_annotations=False)
    options.output.unlink()


# Jsons to repair: what is left needs no more repair, and json can write it.


def read_repaired(path: Path) -> None:
    output = path.parent / "repaired" / "out.json"
    output.unlink(missing_ok=True)
    try:
        repair_json(path, path.parent, output)
    except (ValueError, OSError):
        assert not output.exists()
        raise
    _, more = repaired(read_annotation_file(output), path.parent)
    assert not more, f"needs to be repaired again: {more}"


# Models of a hub: a config, its checksums.


@cache
def hub_files() -> dict[str, bytes]:
    arrays = save({"a": np.zeros(3, np.float32)})
    categories = [{"id": 1, "name": "a"}]
    return model_folder.content(as_recipe(tiny_config()), categories, arrays, b"")


hub_cases = st.one_of(
    st.tuples(hostile.places, hostile.no_edits, hostile.byte_edits),
    *[st.tuples(st.just(0), hostile.json_edits, hostile.no_edits)] * 3,
)


def write_hub(folder: Path, case: Any) -> Path:
    """Bytes are changed after the checksums are made, entries of the config before."""
    place, edits, changes = case
    path = folder / "hub"
    path.mkdir(exist_ok=True)
    files = {name: data for name, data in hub_files().items() if name != "README.md"}
    if edits:
        files["config.json"] = hostile.dump(
            hostile.edit_json(json.loads(files["config.json"]), edits)
        )
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        listed = [f"{digest}  {name}\n" for name, digest in sums.items()]
        files["SHA256SUMS"] = "".join(listed).encode()
    name = list(files)[place % len(files)]
    files[name] = hostile.edit_bytes(files[name], changes)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path / name


def read_hub(path: Path) -> None:
    model_folder.check(path.parent)
    model_folder.read(path.parent)


CONFIGS = {
    "mmdetection configs": (
        text_cases, write_mmdet,
        translates(lambda path, output: mmdet_recipe.write_recipe(path, output, 8)),
    ),
    "detectron2 configs": (d2_cases, write_d2, translates(d2_recipe.write_recipe)),
    "detectron2 configs of other heads": (
        d2_cases, partial(write_d2, has_other_heads=True), translates(d2_recipe.write_recipe)
    ),
    "data.yaml": (d2_cases, write_names, read_names),
    "models of a hub": (hub_cases, write_hub, read_hub),
}  # fmt: skip
