"""Find the image files that annotations name."""

import os
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.data.checking import UPLOAD

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".jp2", ".gif")


class ImageFiles:
    """The images below a folder, by their path or base name. Links to folders are not followed."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise NotADirectoryError(f"no folder {os.fspath(folder)!r}, expected images")
        self.paths: list[str] = []
        for place, folders, names in os.walk(self.folder):
            folders.sort()
            found = os.path.relpath(place, self.folder).replace(os.sep, "/")
            prefix = "" if found == "." else f"{found}/"
            self.paths += [prefix + name for name in sorted(names) if is_image(name)]
        self._by_base, self._by_stem = defaultdict(list), defaultdict(list)
        for path in self.paths:
            base = posixpath.basename(path)
            self._by_base[_composed(base)].append(path)
            self._by_stem[_composed(posixpath.splitext(base)[0])].append(path)

    def find(self, name: str, where: str) -> Path:
        """Return the file that a name means.

        The name may be a path or an address, have backslashes, %20 for a blank, and folders from
        another machine. If several files have its base name, the one with most folders in common.
        Accents may be characters of their own or not.

        Raises:
            ValueError: starting with `where`, if there are none or several.
        """
        found = self.find_any(name, where)
        if found is None:
            raise ValueError(f"{where}: no image {show(name)} in {self.folder}")
        return found

    def find_any(self, name: str, where: str) -> Path | None:
        """Return the file that a name means, None if there is none; else as `find`."""
        for wanted in _meanings(name):
            base = _composed(posixpath.basename(wanted))
            if found := self._choose(wanted, self._by_base[base], where):
                return found
        return None

    def find_stem(self, name: str, where: str) -> Path | None:
        """Return the image for a name without suffix, None if there is none; else as `find`."""
        return self._choose(name, self._by_stem[_composed(posixpath.basename(name))], where)

    def _choose(self, wanted: str, paths: list[str], where: str) -> Path | None:
        if wanted in paths:
            return self.folder / wanted
        if len(paths) > 1:
            plain = _composed(wanted)
            paths = [path for path in paths if _composed(path) == plain] or paths
            shared = [_shared_end(plain, _composed(path)) for path in paths]
            best = [path for path, n in zip(paths, shared, strict=True) if n == max(shared)]
            if len(best) > 1:
                both = f"{show(best[0])} and {show(best[1])}"
                raise ValueError(f"{where}: {show(wanted)} may be {both} in {self.folder}")
            paths = best
        return self.folder / paths[0] if paths else None


def is_image(name: str) -> bool:
    """Check a file's name for the suffix of an image."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _composed(name: str) -> str:
    """A name whose accents are parts of their letters: macOS has them apart, other tools do not."""
    return unicodedata.normalize("NFC", name)


def _shared_end(wanted: str, path: str) -> int:
    """How many folders, from the last on, two paths have in common."""
    count = 0
    for one, other in zip(wanted.split("/")[-2::-1], path.split("/")[-2::-1], strict=False):
        if one != other:
            break
        count += 1
    return count


def _meanings(name: str) -> Iterable[str]:
    """Paths that a name may stand for, the most literal first."""
    plain = name.replace("\\", "/")
    try:
        address = urlsplit(plain)
        query = parse_qs(address.query).get("d", []) if "?" in plain else []
    except ValueError:
        address, query = urlsplit(""), []
    found = [plain, unquote(plain), *query, unquote(address.path)]
    uploads = [f"{posixpath.dirname(path)}/{UPLOAD.sub('', posixpath.basename(path))}"
               for path in found if UPLOAD.match(posixpath.basename(path))]  # fmt: skip
    return [path for path in dict.fromkeys(found + uploads) if posixpath.basename(path)]
