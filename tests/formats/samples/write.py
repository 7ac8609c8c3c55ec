"""Write the samples with other libraries: `python -m tests.formats.samples.write NAME`.

NAME is `supervision` (0.31.2, for yolo and voc_xml), `datumaro` (1.13.12, for datumaro, cvat and
voc), `fiftyone` (1.22.1, for cvat_video) or `labelstudio` (the run lengths of
label-studio-converter 0.0.59 in a file as Label Studio's documentation has it).
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

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
            rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
            x, y = columns[0], rows[0]
            masks.append(dm.Bbox(x, y, columns[-1] + 1 - x, rows[-1] + 1 - y, **entry))
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


def write_label_studio() -> None:
    from label_studio_converter.brush import mask2rle

    tasks = []
    for number, (name, objects) in enumerate(scene.objects().items(), start=1):
        height, width = scene.SIZES[name]
        regions = []
        for place, (label, mask, polygon) in enumerate(objects):
            region = {"id": f"r{place}", "original_width": width, "original_height": height}
            region |= {"image_rotation": 0, "from_name": "tag", "to_name": "image"}
            if polygon is None:
                value = {"format": "rle", "rle": mask2rle(mask.astype(np.uint8) * 255)}
                region |= {"type": "brushlabels", "value": value | {"brushlabels": [label]}}
            else:
                points = np.reshape(polygon, (-1, 2)) * 100 / [width, height]
                value = {"points": points.tolist(), "closed": True, "polygonlabels": [label]}
                region |= {"type": "polygonlabels", "value": value}
            regions.append(region)
        upload = f"/data/upload/3/0a1b2c3d-{name.replace(' ', '%20')}.png"
        annotation = {"id": number, "was_cancelled": False, "result": regions}
        tasks.append({"id": number, "annotations": [annotation], "data": {"image": upload}})
    (HERE / "labelstudio.json").write_text(json.dumps(tasks))


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
    writers |= {"fiftyone": write_with_fiftyone, "labelstudio": write_label_studio}
    writers[sys.argv[1]]()
