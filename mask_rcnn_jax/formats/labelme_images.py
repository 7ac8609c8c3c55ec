"""Find the images of labelme's jsons, and write those that only the jsons hold."""

import base64
import io
import os
import posixpath
from pathlib import Path

from mask_rcnn_jax.annotations.reader import read_json, read_regular
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.image_files import ImageFiles, file_below
from mask_rcnn_jax.images.decode import MAX_BYTES, decode_bytes
from mask_rcnn_jax.images.headers import open_header
from mask_rcnn_jax.terminal.safe_text import file_name

_ENDINGS = {"JPEG": ".jpg", "PNG": ".png", "BMP": ".bmp", "TIFF": ".tif", "WEBP": ".webp"}
_ENDINGS |= {"AVIF": ".avif", "HEIF": ".heic"}


def find_image(
    path: Path, name: str, files: ImageFiles, image_dir: str | os.PathLike | None
) -> Path | None:
    """Find the image that a json names, in the image folder or else below the folder of jsons.

    Args:
        path: the json.
        name: its `imagePath`, with slashes.
        files: the images below that folder.
        image_dir: the image folder; None if it is that of the jsons.
    """
    if image_dir is not None:
        return files.find_any(name, str(path))
    beside = (path.parent.relative_to(files.folder) / posixpath.basename(name)).as_posix()
    return file_below(files.folder, path.parent / name) or files.find_any(beside, str(path))


def absent_image(path: Path, name: str, files: ImageFiles) -> str:
    """Say why a json's image is not there."""
    place = os.path.abspath(path.parent / name)
    folder = os.path.abspath(files.folder)  # elsewhere, it is that of --images
    is_below = path.absolute().is_relative_to(folder)
    if is_below and not Path(place).is_relative_to(folder):
        return f"{path}: image {show(name)} is outside {files.folder}; --images names its folder"
    return f"{path}: no image {show(name)} in {files.folder}{files.hint(name)}"


class HeldImages:
    """Writes the images in `imageData` of jsons to a folder, which is created for the first."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self._taken: set[str] = set()

    def write(self, path: Path, name: str) -> Path | None:
        """Write the image that a json holds; None if it holds none.

        Raises ValueError for what is no image, and for another file in its place.
        """
        text = read_json(path).get("imageData")  # again, rather than all of them in memory
        if not isinstance(text, str) or not text.strip():
            return None
        where = f"{path}: 'imageData'"
        if len(text) > MAX_BYTES:
            raise ValueError(
                f"{where} has {len(text):,} characters, at most {MAX_BYTES:,} are read"
            )
        try:
            content = base64.b64decode(text.partition("base64,")[2] or text, validate=True)
        except ValueError as error:
            raise ValueError(f"{where} is not an image in base64") from error
        decode_bytes(content, where)
        with open_header(io.BytesIO(content)) as image:
            ending = _ENDINGS.get(image.format or "", ".png")
        target = self.folder / file_name(posixpath.basename(name), ending, self._taken)
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            if read_regular(target) != content:
                raise ValueError(f"{where} would be written to {target}, which is another file")
        else:
            target.write_bytes(content)
        self.count += 1
        return target
