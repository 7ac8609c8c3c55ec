"""Write the samples with other libraries: `python -m tests.formats.samples.write NAME`.

NAME is `supervision` (0.31.2, for yolo and voc_xml), `datumaro` (1.13.12, for datumaro, cvat and
voc), `fiftyone` (1.22.1, for cvat_video), `labelstudio` (label-studio-sdk 2.1.2), `labelme`
(6.3.1), `cityscapes` (cityscapesScripts 2.3.0), `skimage` (0.26.0, for label_images),
`supervisely` (6.74.51), `webdataset` (1.0.2) or `rfdetr` (1.11.2).
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as maskUtils

from tests.formats.samples import scene

HERE = Path(__file__).parent


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in scene.SIZES:
        Image.fromarray(scene.image(name)).save(folder / f"{name}.png", optimize=True)


def write_with_supervision() -> None:
    import supervision as sv

    found = {}
    for name, objects in scene.objects().items():
        masks = np.array([mask for _, mask, _ in objects])
        classes = np.array([scene.CLASSES.index(label) for label, _, _ in objects])
        boxes = sv.mask_to_xyxy(masks)
        found[str(HERE / "images" / f"{name}.png")] = sv.Detections(
            xyxy=boxes, mask=masks, class_id=classes
        )
    dataset = sv.DetectionDataset(list(scene.CLASSES), list(found), found)
    exact = {"approximation_percentage": 0.0}
    dataset.as_yolo(None, str(HERE / "yolo/labels"), str(HERE / "yolo/data.yaml"), **exact)
    dataset.as_pascal_voc(None, str(HERE / "voc_xml"), **exact)


def write_with_datumaro() -> None:
    import datumaro as dm

    items, masked = [], []
    for name, objects in scene.objects().items():
        shapes, masks, group = [], [], 0
        for label, mask, polygon in objects:
            index, group = scene.CLASSES.index(label), group + 1
            if polygon is None:
                shapes.append(dm.Mask(mask.astype(np.uint8), label=index, id=group, group=group))
            else:
                shapes.append(dm.Polygon(polygon, label=index, id=group, group=group))
            entry = {"label": index, "id": group, "group": group}
            y1, x1, y2, x2 = scene.bounds(mask)
            masks.append(dm.Bbox(x1, y1, x2 - x1, y2 - y1, **entry))
            masks.append(dm.Mask(mask.astype(np.uint8), **entry))
        media = dm.Image.from_file(str(HERE / "images" / f"{name}.png"))
        items.append(dm.DatasetItem(name, subset="default", media=media, annotations=shapes))
        masked.append(items[-1].wrap(annotations=masks))
    for kind, content in (("datumaro", items), ("cvat", items), ("voc", masked)):
        folder, options = HERE / kind, {"label_map": "source"} if kind == "voc" else {}
        shutil.rmtree(folder, ignore_errors=True)
        dataset = dm.Dataset.from_iterable(content, categories=list(scene.CLASSES))
        dataset.export(str(folder), kind, save_media=False, **options)
    path = HERE / "datumaro/annotations/default.json"  # it has absolute paths
    path.write_text(path.read_text().replace(str(HERE), "/home/me"))


def write_with_label_studio() -> None:
    from label_studio_sdk.converter.brush import mask2rle
    from label_studio_sdk.converter.imports.coco import create_segmentation, new_task

    tasks = []
    for name, objects in scene.objects().items():
        height, width = scene.SIZES[name]
        task = new_task("annotations", "/data/upload/3", f"0a1b2c3d-{name}.png")
        for place, (label, mask, polygon) in enumerate(objects):
            outline = [] if polygon is None else polygon
            region = create_segmentation(0, outline, [label], "tag", height, width, "image")
            region["id"] = f"r{place}"  # a random one otherwise
            if polygon is None:
                value = {"format": "rle", "rle": mask2rle(mask.astype(np.uint8) * 255)}
                region |= {"type": "brushlabels", "value": value | {"brushlabels": [label]}}
            task["annotations"][0]["result"].append(region)
        tasks.append(task)
    (HERE / "labelstudio.json").write_text(json.dumps(tasks))


def write_with_labelme() -> None:
    from labelme._label_file import write_label_file
    from labelme.utils import img_arr_to_b64

    folder = HERE / "labelme"
    folder.mkdir(exist_ok=True)
    for name, objects in scene.objects().items():
        shapes = []
        for group, (label, mask, polygon) in enumerate(objects):
            shape = {"label": label, "group_id": group, "description": "", "flags": {}}
            if polygon is None:
                y1, x1, y2, x2 = scene.bounds(mask)
                crop = img_arr_to_b64(mask[y1:y2, x1:x2])
                corners = [[float(x1), float(y1)], [x2 - 1.0, y2 - 1.0]]
                shape |= {"shape_type": "mask", "points": corners, "mask": crop}
            else:
                points = np.reshape(polygon, (-1, 2)).tolist()
                shape |= {"shape_type": "polygon", "points": points, "mask": None}
            shapes.append(shape)
        height, width = scene.SIZES[name]
        sizes = {"image_height": height, "image_width": width}
        path = str(folder / f"{name}.json")
        write_label_file(path, shapes=shapes, image_path=f"../images/{name}.png", **sizes)


def write_with_cityscapes() -> None:
    """Polygons, of which the later ones cover the earlier, and what they make of the pixels."""
    from cityscapesscripts.helpers.annotation import Annotation, CsPoly, Point
    from cityscapesscripts.preparation.json2instanceImg import json2instanceImg

    for name, polygons in scene.STREETS.items():
        content = Annotation()
        content.imgHeight, content.imgWidth = scene.SIZES[name]
        for place, (label, outline) in enumerate(polygons):
            drawn = CsPoly()
            drawn.id, drawn.label = place, label
            drawn.polygon = [Point(x, y) for x, y in np.reshape(outline, (-1, 2)).tolist()]
            content.objects.append(drawn)
        for kind in ("polygons.json", "instanceIds.png"):
            (HERE / "cityscapes" / kind[:8]).mkdir(parents=True, exist_ok=True)
        path = HERE / "cityscapes" / "polygons" / f"{name}_gtFine_polygons.json"
        content.toJsonFile(str(path))
        image = HERE / "cityscapes" / "instance" / f"{name}_gtFine_instanceIds.png"
        json2instanceImg(str(path), str(image))


def write_with_skimage() -> None:
    from skimage import io

    (HERE / "label_images").mkdir(exist_ok=True)
    for name, objects in scene.objects().items():
        labels = np.zeros(scene.SIZES[name], np.uint16)
        for value, (_, mask, _) in enumerate(objects, start=1):
            labels[mask] = 300 * value
        path = HERE / "label_images" / f"{name}_mask.png"
        io.imsave(str(path), labels, check_contrast=False)


def write_with_supervisely() -> None:
    import supervisely as sly

    kinds = {name: sly.ObjClass(name, sly.AnyGeometry) for name in scene.CLASSES}
    folder = HERE / "supervisely" / "ds" / "ann"
    folder.mkdir(parents=True, exist_ok=True)
    for name, objects in scene.objects().items():
        labels = []
        for label, mask, polygon in objects:
            if polygon is None:
                shape = sly.Bitmap(mask)
            else:
                points = np.reshape(polygon, (-1, 2))[:, ::-1].tolist()
                shape = sly.Polygon([sly.PointLocation(*point) for point in points])
            labels.append(sly.Label(shape, kinds[label]))
        content = sly.Annotation(scene.SIZES[name], labels).to_json()
        for entry in content["objects"]:  # the time
            for key in ("createdAt", "updatedAt"):
                entry.pop(key, None)
        (folder / f"{name}.png.json").write_text(json.dumps(content))


def coco_objects(objects: list) -> list[dict]:
    """What COCO has of the objects of an image; category 5 is the first class, 6 the second."""
    found = []
    for label, mask, polygon in objects:
        code = maskUtils.encode(np.asfortranarray(mask, np.uint8))
        box = maskUtils.toBbox(code).tolist()
        entry = {"category_id": scene.CLASSES.index(label) + 5, "bbox": box, "iscrowd": 0}
        code["counts"] = code["counts"].decode()
        found.append(entry | {"segmentation": code if polygon is None else [polygon]})
    return found


def write_with_webdataset() -> None:
    import webdataset as wds

    (HERE / "webdataset").mkdir(exist_ok=True)
    pattern = str(HERE / "webdataset" / "set-%06d.tar")
    with wds.ShardWriter(pattern, maxcount=1, mtime=0) as writer:
        for name, objects in scene.objects().items():
            shapes = coco_objects(objects)
            for shape in shapes:
                shape["category"] = scene.CLASSES[shape.pop("category_id") - 5]
            png = (HERE / "images" / f"{name}.png").read_bytes()
            writer.write({"__key__": name, "png": png, "json": {"annotations": shapes}})


def write_with_rfdetr() -> None:
    from rfdetr.datasets.webdataset import pack_coco_to_shards

    images, annotations = [], []
    for place, (name, objects) in enumerate(scene.objects().items(), start=3):
        height, width = scene.SIZES[name]
        images.append({"id": place, "file_name": f"{name}.png", "height": height, "width": width})
        annotations += [shape | {"image_id": place} for shape in coco_objects(objects)]
    for number, entry in enumerate(annotations):
        entry |= {"id": number, "area": entry["bbox"][2] * entry["bbox"][3]}
    categories = [{"id": n, "name": name} for n, name in enumerate(scene.CLASSES, start=5)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        pack_coco_to_shards(HERE / "images", file.name, HERE / "rfdetr", max_shard_bytes=1)


def write_with_fiftyone() -> None:
    """It writes every frame that shows an object, and the frame after each."""
    import fiftyone as fo
    from fiftyone.utils import cvat

    height, width = scene.SIZES["street one"]
    tracks, count = [], 0
    for number, (label, frames) in enumerate(scene.tracks()):
        count, shapes = len(frames), {}
        for frame, polygon in enumerate(frames, start=1):
            if polygon is not None:
                points = [(np.reshape(polygon, (-1, 2)) / [width, height]).tolist()]
                shapes[frame] = fo.Polyline(label=label, points=points, closed=True, filled=True)
        tracks.append(cvat.CVATTrack.from_labels(number, shapes, (width, height)))
    labels = cvat.CVATTaskLabels([{"name": name, "attributes": []} for name in scene.CLASSES])
    size = {"frame_width": width, "frame_height": height}
    metadata = fo.VideoMetadata(total_frame_count=count, **size)
    path = str(HERE / "cvat_video.xml")
    cvat.CVATVideoAnnotationWriter().write(labels, tracks, metadata, path, id=1, name="clip")


if __name__ == "__main__":
    write_images(HERE / "images")
    writers = {"supervision": write_with_supervision, "datumaro": write_with_datumaro}
    writers |= {"fiftyone": write_with_fiftyone, "labelstudio": write_with_label_studio}
    writers |= {"labelme": write_with_labelme, "cityscapes": write_with_cityscapes}
    writers |= {"skimage": write_with_skimage, "supervisely": write_with_supervisely}
    writers |= {"webdataset": write_with_webdataset, "rfdetr": write_with_rfdetr}
    writers[sys.argv[1]]()
