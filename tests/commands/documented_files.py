"""Small files under the names that the README and the guides assume to be there."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import rasterio
import tifffile
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats.shapes import write_shapes
from tests import tfrecord_writer
from tests.commands.command import ROOT
from tests.commands.test_walk import CHEAP, WEIGHTS, write_labelme, write_weights
from tests.formats import test_d2_config, test_mmdet_config
from tests.tars.making import tar_folder
from tests.video.videos import write_video
from tests.weights.test_mismatch import mmdetection_arrays, write_epoch


def write_set(path: Path, content: dict, names, classes: dict | None = None) -> None:
    """A json of `content` with other file names and, by their names, other classes."""
    images = [entry | {"file_name": n} for entry, n in zip(content["images"], names, strict=True)]
    categories = [
        entry | {"name": (classes or {}).get(entry["name"], entry["name"])}
        for entry in content["categories"]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"images": images, "categories": categories}))


def by_name(content: dict) -> dict:
    """The same with ids of classes in the order of their names, as labelme's become."""
    known = sorted(content["categories"], key=lambda entry: entry["name"])
    ids = {entry["id"]: i for i, entry in enumerate(known, start=1)}
    entries = [a | {"category_id": ids[a["category_id"]]} for a in content["annotations"]]
    categories = [entry | {"id": ids[entry["id"]]} for entry in known]
    return content | {"annotations": entries, "categories": categories}


def names_of(content: dict) -> list[str]:
    return [Path(entry["file_name"]).name for entry in content["images"]]


def perfect_results(content: dict) -> list[dict]:
    """Every object, found with its mask."""
    sizes = {entry["id"]: (entry["height"], entry["width"]) for entry in content["images"]}
    results = []
    for entry in content["annotations"]:
        mask = segmentation_to_mask(entry["segmentation"], *sizes[entry["image_id"]])
        code = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
        code["counts"] = code["counts"].decode()
        said = {"segmentation": code, "score": 0.9}
        results.append(said | {key: entry[key] for key in ("image_id", "category_id")})
    return results


def write_records(coco: Path, folder: Path) -> None:
    """The same images as TFRecords, and their jsons."""
    shutil.copytree(coco / "annotations", folder / "annotations")
    for split in ("train", "val"):
        path = folder / "annotations" / f"instances_{split}2017.json"
        tfrecord_writer.write_coco(path, coco / f"{split}2017", folder / split)
        path.with_name(f"instances_{split}.json").symlink_to(path)
        (folder / split).symlink_to(coco / f"{split}2017")


def write_lvis(coco: Path, folder: Path) -> None:
    """Jsons in LVIS's layout, of COCO's images."""
    folder.mkdir()
    for split in ("train", "val"):
        path = coco / "annotations" / f"instances_{split}2017.json"
        content = json.loads(path.read_text())
        for image in content["images"]:
            name = image.pop("file_name")
            image |= {"coco_url": f"http://images.cocodataset.org/{split}2017/{name}"}
            image |= {"not_exhaustive_category_ids": [], "neg_category_ids": []}
        for entry, frequency in zip(content["categories"], "rcff", strict=True):
            entry["frequency"] = frequency
        (folder / f"lvis_v1_{split}.json").write_text(json.dumps(content))


def write_large(folder: Path, made: Path, content: dict) -> None:
    """Images for `data.windows`, and one of them as a map."""
    names = [Path(name).with_suffix(".tif") for name in names_of(content)]
    (folder / "images").mkdir()
    for name in names:
        image = cv2.imread(str(made / name.with_suffix(".jpg")))[..., ::-1]
        tifffile.imwrite(folder / "images" / name, image, tile=(32, 32))
    write_set(folder / "large.json", content, map(str, names))
    place = rasterio.Affine(0.5, 0, 500_000, 0, -0.5, 5_000_000)
    given = dict(driver="GTiff", height=64, width=64, count=3, dtype="uint8", crs="EPSG:32633")
    with rasterio.open(folder / "map.tif", "w", transform=place, **given) as file:
        file.write(image.transpose(2, 0, 1))


def write_doors(folder: Path) -> None:
    """Data sets as Ultralytics and matterport's Mask R-CNN have them, of one square each."""
    square = np.zeros((64, 64, 3), np.uint8)
    square[16:48, 16:48] = 200, 40, 40
    place = {"name": "polygon", "all_points_x": [16, 48, 48, 16], "all_points_y": [16, 16, 48, 48]}
    for split in ("train", "val"):
        entries = {}
        for part in ("mine/images", "mine/labels", "balloon"):
            (folder / part / split).mkdir(parents=True)
        for name in ("a", "b", "c"):
            for images in ("mine/images", "balloon"):
                cv2.imwrite(str(folder / images / split / f"{name}.png"), square)
            label = "1 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75\n"
            (folder / "mine" / "labels" / split / f"{name}.txt").write_text(label)
            regions = {"0": {"region_attributes": {}, "shape_attributes": place}}
            entries[f"{name}.png1"] = {"filename": f"{name}.png", "size": 1, "regions": regions}
        text = json.dumps(entries)
        (folder / "balloon" / split / "via_region_data.json").write_text(text)
    names = "train: images/train\nval: images/val\nnames: {0: circle, 1: square}\n"
    (folder / "mine" / "data.yaml").write_text(names)


def write_tars(folder: Path, photos: Path) -> None:
    """Tars of images, and those that RF-DETR packs."""
    (folder / "shards").mkdir()
    tar_folder(photos, *(folder / "shards" / f"photos-{n:06}.tar" for n in (0, 1)))
    shutil.copytree(ROOT / "tests" / "formats" / "samples" / "rfdetr", folder / "packed")


def write_pedestrians(folder: Path) -> None:
    """Penn-Fudan's layout: a label image for each image."""
    for name in ("PNGImages", "PedMasks"):
        (folder / "PennFudanPed" / name).mkdir(parents=True, exist_ok=True)
    label = np.zeros((64, 64), np.uint8)
    label[20:50, 10:30], label[5:60, 40:55] = 1, 2
    for i in range(60):
        image = str(folder / "PennFudanPed" / "PNGImages" / f"FudanPed{i:05}.png")
        cv2.imwrite(image, label * 100)
        cv2.imwrite(image.replace("PNGImages", "PedMasks").replace(".png", "_mask.png"), label)


def write_theirs(folder: Path) -> None:
    """Configs of mmdetection and detectron2, and weights that mmdetection trained on 3 classes."""
    (folder / "theirs").mkdir()
    one_size = "INPUT: {MIN_SIZE_TRAIN: [800]}\n"  # which the small `data.image_size` replaces
    test_d2_config.write(folder / "theirs", test_d2_config.MASKS + one_size)
    heads = "bbox_head=dict(num_classes=3), mask_head=dict(num_classes=3)"
    test_mmdet_config.write(folder / "theirs", f"model = dict(roi_head=dict({heads}))\n")
    small = {name: value for name, value in CHEAP.items() if name.startswith("model.")}
    arrays = mmdetection_arrays(load_config("coco_mmdet", small), 0.01)
    write_epoch(folder / "epoch_12.pth", arrays)


def arrange(folder: Path) -> None:
    """What the pages assume to be there, under the names that they give it."""
    photos, coco = folder / "photos", folder / "data" / "coco"
    photos.mkdir()
    write_labelme(photos)
    (folder / "my").mkdir()
    (folder / "my" / "images").symlink_to(photos)
    for name in ("benchmarks", "configs", "examples"):
        (folder / name).symlink_to(ROOT / name)

    made = write_shapes(folder / "made", train=80, val=4, size=(64, 64))
    content, few = (by_name(json.loads(made[split].read_text())) for split in ("train", "val"))
    names = names_of(content)
    for name, images, first, classes in (
        ("day.json", "photos/day", "d", {"circle": "Car", "square": "truck"}),
        ("night.json", "photos/night", "n", {"circle": "car", "square": "lorry"}),
        ("a/train.json", "a/images", "", {"circle": "auto"}),
        ("b/train.json", "b/images", "", {"circle": "truck"}),
    ):
        (folder / images).mkdir(parents=True)
        for file in names:
            shutil.copy(folder / "made" / "train" / file, folder / images / f"{first}{file}")
        write_set(folder / name, content, [f"{first}{file}" for file in names], classes)
    clips = [f"video{i % 8}_c/{file}" for i, file in enumerate(names)]
    for file, place in zip(names, clips, strict=True):
        (photos / place).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "made" / "train" / file, photos / place)
    write_set(folder / "all.json", content, clips)
    write_set(folder / "ls.json", content, [f"upload/3/d{file}" for file in names])
    write_large(folder, folder / "made" / "train", content)
    for split, of in (("train", content), ("val", few)):
        names = names_of(of)
        write_set(coco / "annotations" / f"instances_{split}2017.json", of, names)
        write_set(folder / "my" / f"{split}.json", few, names_of(few))  # until photos are converted
        shutil.copytree(folder / "made" / split, coco / f"{split}2017")
    (folder / "segm_results.json").write_text(json.dumps(perfect_results(few)))
    write_records(coco, folder / "data")
    write_lvis(coco, folder / "data" / "lvis")
    shutil.copy(coco / "annotations" / "instances_train2017.json", folder / "eight.json")
    (folder / "data" / "nuclei").mkdir()
    for name in ("annotations", "train", "val"):
        (folder / "data" / "nuclei" / name).symlink_to(folder / "data" / name)

    for name in ("photo.jpg", "new/one.jpg", "PennFudanPed/PNGImages/one.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "000000.jpg", folder / name)
    masks = folder / "PennFudanPed" / "PedMasks"
    masks.mkdir()
    label = np.zeros((64, 64), np.uint8)
    label[20:50, 10:30], label[5:60, 40:55] = 1, 2
    cv2.imwrite(str(masks / "one_mask.png"), label)
    for name in ("clip.mp4", "clip.mov"):
        write_video(folder / name, 3)
    write_tars(folder, photos)
    write_doors(folder)
    write_theirs(folder)
    write_pedestrians(folder)
    write_weights(folder / "pedestrians.pth", "coco_torchvision", num_classes=1)
    write_weights(folder / WEIGHTS)
    write_weights(folder / "weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth", "coco_torchvision")
