"""Weights by name: where they are, their checksums, and the recipes that they fit."""

import difflib
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from absl import logging

from mask_rcnn_jax.disk import whole_file, write_whole
from mask_rcnn_jax.download import ProgressFactory, download
from mask_rcnn_jax.stores import home, is_address
from mask_rcnn_jax.terminal.progress import bytes_progress
from mask_rcnn_jax.weights import hub, model_folder, stored_run


class Published(NamedTuple):
    """A file of weights."""

    url: str
    checksum: str  # as `download` takes it; "": its publisher states none
    recipe: str  # that takes the file as `--weights`; "": a backbone, for `model.init_from` alone
    file: str = ""  # its name here; "": the one in `url`


def _torchvision(name: str, recipe: str = "") -> Published:
    """name: that of the file, which ends in the first digits of its SHA-256."""
    url = f"https://download.pytorch.org/models/{name}.pth"
    return Published(url, f"sha256:{name.rpartition('-')[2]}", recipe)


def _detectron2(folder: str, md5: str, recipe: str) -> Published:
    """md5: its first digits, which end the file's name (MODEL_ZOO.md)."""
    url = f"https://dl.fbaipublicfiles.com/detectron2/{folder}/model_final_{md5}.pkl"
    return Published(url, f"md5:{md5}", recipe)


def _mae(size: str, md5: str) -> Published:
    """md5: its first digits (README of MAE)."""
    url = f"https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_{size}.pth"
    return Published(url, f"md5:{md5}", "")


def _imagenet(system: str, file: str) -> Published:
    """A trunk of Detectron or detectron2 in Caffe2's names, without a published checksum."""
    url = f"https://dl.fbaipublicfiles.com/{system}/ImageNetPretrained/{file}"
    return Published(url, "", "", f"{system}_{file.rpartition('/')[2]}")


PUBLISHED = {
    "resnet18": _torchvision("resnet18-f37072fd"),
    "resnet34": _torchvision("resnet34-b627a593"),
    "resnet50": _torchvision("resnet50-0676ba61"),
    "resnet101": _torchvision("resnet101-63fe2227"),
    "resnet152": _torchvision("resnet152-394f9c45"),
    "convnext_tiny": _torchvision("convnext_tiny-983f1562"),
    "convnext_small": _torchvision("convnext_small-0c510722"),
    "maskrcnn_resnet50_fpn_coco": _torchvision(
        "maskrcnn_resnet50_fpn_coco-bf2d0c1e", "coco_torchvision:coco_v1"
    ),
    "maskrcnn_resnet50_fpn_v2_coco": _torchvision(
        "maskrcnn_resnet50_fpn_v2_coco-73cbd019", "coco_torchvision:v2"
    ),
    "detectron2_r50_lsj_100ep": _detectron2(
        "new_baselines/mask_rcnn_R_50_FPN_100ep_LSJ/42047764", "bb69de", "coco_detectron2:lsj_100ep"
    ),
    "detectron2_r50_lsj_200ep": _detectron2(
        "new_baselines/mask_rcnn_R_50_FPN_200ep_LSJ/42047638", "89a8d3", "coco_detectron2:lsj_200ep"
    ),
    "detectron2_r50_lsj_400ep": _detectron2(
        "new_baselines/mask_rcnn_R_50_FPN_400ep_LSJ/42019571", "14d201", "coco_detectron2:lsj_400ep"
    ),
    "detectron2_r101_lsj_100ep": _detectron2(
        "new_baselines/mask_rcnn_R_101_FPN_100ep_LSJ/42025812",
        "4f7b58",
        "coco_detectron2:lsj_100ep_r101",
    ),
    "detectron2_r101_lsj_200ep": _detectron2(
        "new_baselines/mask_rcnn_R_101_FPN_200ep_LSJ/42131867",
        "0bb7ae",
        "coco_detectron2:lsj_200ep_r101",
    ),
    "detectron2_r101_lsj_400ep": _detectron2(
        "new_baselines/mask_rcnn_R_101_FPN_400ep_LSJ/42073830",
        "f96b26",
        "coco_detectron2:lsj_400ep_r101",
    ),
    "detectron2_regnetx_4gf_lsj_100ep": _detectron2(
        "new_baselines/mask_rcnn_regnetx_4gf_dds_FPN_100ep_LSJ/42047771",
        "b7fbab",
        "coco_detectron2:lsj_100ep_regnetx_4gf",
    ),
    "detectron2_regnetx_4gf_lsj_200ep": _detectron2(
        "new_baselines/mask_rcnn_regnetx_4gf_dds_FPN_200ep_LSJ/42132721",
        "5d87c1",
        "coco_detectron2:lsj_200ep_regnetx_4gf",
    ),
    "detectron2_regnetx_4gf_lsj_400ep": _detectron2(
        "new_baselines/mask_rcnn_regnetx_4gf_dds_FPN_400ep_LSJ/42025447",
        "f1362d",
        "coco_detectron2:lsj_400ep_regnetx_4gf",
    ),
    "detectron2_regnety_4gf_lsj_100ep": _detectron2(
        "new_baselines/mask_rcnn_regnety_4gf_dds_FPN_100ep_LSJ/42047784",
        "6ba57e",
        "coco_detectron2:lsj_100ep_regnety_4gf",
    ),
    "detectron2_regnety_4gf_lsj_200ep": _detectron2(
        "new_baselines/mask_rcnn_regnety_4gf_dds_FPN_200ep_LSJ/42047642",
        "27b9c1",
        "coco_detectron2:lsj_200ep_regnety_4gf",
    ),
    "detectron2_regnety_4gf_lsj_400ep": _detectron2(
        "new_baselines/mask_rcnn_regnety_4gf_dds_FPN_400ep_LSJ/42045954",
        "ef3a80",
        "coco_detectron2:lsj_400ep_regnety_4gf",
    ),
    "detectron2_r50_1x": _detectron2(
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x/137260431", "a54504", "coco_detectron2"
    ),
    "detectron2_r50_3x": _detectron2(
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x/137849600", "f10217", "coco_detectron2:3x"
    ),
    "detectron2_x101_3x": _detectron2(
        "COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x/139653917",
        "2d9806",
        "coco_detectron2:x101_3x",
    ),
    "detectron2_gn_3x": _detectron2(
        "Misc/mask_rcnn_R_50_FPN_3x_gn/138602888", "dc5d9e", "coco_detectron2:gn_3x"
    ),
    "detectron2_cascade_1x": _detectron2(
        "Misc/cascade_mask_rcnn_R_50_FPN_1x/138602847", "e9d89b", "coco_detectron2:cascade_1x"
    ),
    "detectron2_cascade_3x": _detectron2(
        "Misc/cascade_mask_rcnn_R_50_FPN_3x/144998488", "480dd8", "coco_detectron2:cascade_3x"
    ),
    "detectron2_pointrend_1x": _detectron2(
        "PointRend/InstanceSegmentation/pointrend_rcnn_R_50_FPN_1x_coco/164254221",
        "736f5a",
        "coco_detectron2:pointrend_1x",
    ),
    "detectron2_pointrend": _detectron2(
        "PointRend/InstanceSegmentation/pointrend_rcnn_R_50_FPN_3x_coco/164955410",
        "edd263",
        "coco_detectron2:pointrend",
    ),
    "detectron2_pointrend_x101": _detectron2(
        "PointRend/InstanceSegmentation/pointrend_rcnn_X_101_32x8d_FPN_3x_coco/28119989",
        "ba17b9",
        "coco_detectron2:pointrend_x101",
    ),
    "detectron2_vitdet_b": _detectron2(
        "ViTDet/COCO/mask_rcnn_vitdet_b/f325346929", "61ccd1", "coco_vitdet"
    ),
    "detectron2_vitdet_l": _detectron2(
        "ViTDet/COCO/mask_rcnn_vitdet_l/f325599698", "6146ed", "coco_vitdet:l"
    ),
    "detectron2_vitdet_h": _detectron2(
        "ViTDet/COCO/mask_rcnn_vitdet_h/f329145471", "7224f1", "coco_vitdet:h"
    ),
    "detectron2_vitdet_cascade_b": _detectron2(
        "ViTDet/COCO/cascade_mask_rcnn_vitdet_b/f325358525", "435fa9", "coco_vitdet:cascade_b"
    ),
    "detectron2_vitdet_cascade_l": _detectron2(
        "ViTDet/COCO/cascade_mask_rcnn_vitdet_l/f328021305", "1a9f28", "coco_vitdet:cascade_l"
    ),
    "detectron2_vitdet_cascade_h": _detectron2(
        "ViTDet/COCO/cascade_mask_rcnn_vitdet_h/f328730692", "f05665", "coco_vitdet:cascade_h"
    ),
    "keypointrcnn_resnet50_fpn_coco": _torchvision(
        "keypointrcnn_resnet50_fpn_coco-fc266e95", "coco_keypoints:coco_v1"
    ),
    "detectron2_keypoints_r50_1x": _detectron2(
        "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x/137261548",
        "04e291",
        "coco_keypoints:detectron2",
    ),
    "detectron2_keypoints_r50_3x": _detectron2(
        "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x/137849621",
        "a6e10b",
        "coco_keypoints:detectron2_3x",
    ),
    "mae_vit_base": _mae("base", "8cad7c"),
    "mae_vit_large": _mae("large", "b8b06e"),
    "mae_vit_huge": _mae("huge", "9bdbb0"),
    "detectron_msra_r50": _imagenet("detectron", "MSRA/R-50.pkl"),
    "detectron2_msra_r50": _imagenet("detectron2", "MSRA/R-50.pkl"),
    "detectron2_fair_x101": _imagenet("detectron2", "FAIR/X-101-32x8d.pkl"),
}
# Weights in several files: what to do.
BY_HAND = {
    "nvidia_rn50_tf_amp": "a zip of NVIDIA's NGC catalog; fetch "
    "https://api.ngc.nvidia.com/v2/models/nvidia/rn50_tf_amp_ckpt/versions/20.06.0/zip (with a "
    "login, if it asks for one, from the page rn50_tf_amp_ckpt of catalog.ngc.nvidia.com), unpack "
    "it, and name its nvidia_rn50_tf_amp without an ending; resnet50 is public and fits, but for "
    "padding",
    "resnet-nhwc-2018-02-07": "a folder of Google's; copy it with `gsutil cp -r "
    "gs://cloud-tpu-checkpoints/retinanet/resnet50-checkpoint-2018-02-07 .`, and name its "
    "model.ckpt-112603 without an ending; resnet50 fits, but for the padding of a pooling",
}

# Weights that come with the package, by name, and the recipes that they fit; docs/results.md has
# their making.
SHIPPED = {"nuclei_resnet10": "nuclei"}
SHIPPED_FOLDER = Path(__file__).parent / "shipped"


def names() -> tuple[str, ...]:
    """Return all names, those of weights that ship first."""
    return *SHIPPED, *PUBLISHED, *BY_HAND


def find(weights: str | os.PathLike) -> str | os.PathLike:
    """Return the file of a name in `PUBLISHED`, fetched into `home` where it is not there yet, or
    in `SHIPPED`.

    What exists under the name is preferred. Anything else is returned as by `local`. Errors are
    those of `fetch` and of `local`.
    """
    return fetch(str(weights), home()) if is_name(weights) else local(weights)


def local(weights: str | os.PathLike) -> str | os.PathLike:
    """Return the file of the weights of a hub's model, which is fetched, or of a model's folder.

    Names, runs and files are returned as they are, what is at another address is fetched. Errors
    are those of `hub.fetch`, `stored_run.local` and `model_folder.check`.
    """
    if hub.is_hub(weights):
        return hub.fetch(weights) / model_folder.WEIGHTS
    if is_address(weights):
        weights = stored_run.local(weights)
    if model_folder.is_model_folder(weights):
        model_folder.check(Path(weights))
        return Path(weights) / model_folder.WEIGHTS
    return weights


def shipped(weights: str | os.PathLike) -> str | os.PathLike:
    """Return the file of a name in `SHIPPED`; anything else as it is."""
    return find(weights) if str(weights) in SHIPPED else weights


def recipe_of(name: str) -> str:
    """Return the recipe that weights by their name fit; "" for a backbone."""
    return SHIPPED.get(name) or (PUBLISHED[name].recipe if name in PUBLISHED else "")


def brought_recipe(weights: str | os.PathLike) -> str:
    """Return the recipe of `recipe_of` where weights are given by a name; otherwise ""."""
    return recipe_of(str(weights)) if is_name(weights) else ""


def with_recipe(weights: str | os.PathLike) -> str:
    """Return what a message calls weights: a name together with the recipe that they fit."""
    recipe = brought_recipe(weights)
    return f"{weights} (made for --config {recipe})" if recipe else str(weights)


def is_name(weights: str | os.PathLike) -> bool:
    """Whether it is one of `names` and no file, folder or checkpoint of TensorFlow, which is
    named without an ending."""
    return str(weights) in names() and not _exists(weights)


def _exists(weights: str | os.PathLike) -> bool:
    return os.path.exists(weights) or os.path.exists(f"{weights}.index")


def absent(weights: str | os.PathLike) -> ValueError:
    """Return the error for weights that are neither there nor a name."""
    close = _close_names(str(weights))
    hint = f", did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{weights}: no such file or run, and no name of `prepare weights`{hint}")


def is_nearly_name(weights: str | os.PathLike) -> bool:
    """Whether nothing of the name exists, but it is like one of `names`."""
    return not _exists(weights) and str(weights) not in names() and bool(_close_names(str(weights)))


def _close_names(name: str) -> list[str]:
    return difflib.get_close_matches(name, names(), 1)


def put(name: str, folder: str | os.PathLike) -> Path:
    """Return the file of `fetch` in the folder, into which one that ships is copied with its
    manifest, the names of its classes. Errors are those of `fetch`."""
    found = fetch(name, folder)
    if name not in SHIPPED:
        return found
    for file in SHIPPED_FOLDER.glob(f"{name}.*"):
        with whole_file(Path(folder) / file.name) as draft:
            shutil.copyfile(file, draft)
    return Path(folder) / found.name


def fetch(
    name: str, folder: str | os.PathLike, make_progress: ProgressFactory | None = bytes_progress
) -> Path:
    """Download weights by their name, unless they are there and whole, or ship.

    Where no checksum is published, that of the first download is kept beside the file, and what is
    there must have it from then on.

    Raises ValueError for an unknown name or one in `BY_HAND`, OSError, saying how to do without a
    network here, if the file cannot be had; see `download`.
    """
    if name in SHIPPED:
        return SHIPPED_FOLDER / f"{name}.safetensors"
    if name in BY_HAND:
        raise ValueError(f"{name} is {BY_HAND[name]}")
    if name not in PUBLISHED:
        close = _close_names(name)
        hint = (
            f"did you mean {close[0]!r}?" if close else "expected one that `prepare weights` lists"
        )
        raise ValueError(f"unknown weights {name!r}, {hint}")
    url, checksum, _, file = PUBLISHED[name]
    path = Path(folder) / (file or url.rpartition("/")[2])
    kept = path.with_name(f"{path.name}.sha256")
    is_first = not checksum and not kept.is_file()
    if not checksum and not is_first:
        checksum = f"sha256:{kept.read_text().strip()}"
        if not re.fullmatch("sha256:[0-9a-f]{64}", checksum):
            raise ValueError(f"{kept} holds no SHA-256; delete it to take {path} as it is")
    try:
        found = download(url, path, checksum or None, make_progress=make_progress)
        if is_first:
            with open(found, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            write_whole(kept, f"{digest}\n")  # others may read it at once
            logging.warning("%s: no checksum is published; from now on, %s counts", name, digest)
        return found
    except OSError as error:
        text = f"{error}; without a network, fetch it elsewhere and save it as {path}"
        raise OSError(text) from error
