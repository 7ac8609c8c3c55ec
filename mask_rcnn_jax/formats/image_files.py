"""Find the image files that annotations name."""

import os
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from mask_rcnn_jax.annotations.absent import folded
from mask_rcnn_jax.annotations.reader import listed, raise_unlisted
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.images.file_names import UPLOAD
from mask_rcnn_jax.images.suffixes import is_image_name


class ImageFiles:
    """The images below a folder, by their path or base name. Links to folders are not followed."""

    def __init__(self, folder: str | os.PathLike, without: Path | None = None):
        """Look below a folder, but not in `without`, an absolute path."""
        self.folder = Path(folder)
        if self.folder.is_file():
            file = os.fspath(folder)
            raise NotADirectoryError(f"{file!r} is a file, expected the folder of the images")
        if not self.folder.is_dir():
            raise NotADirectoryError(f"no folder {os.fspath(folder)!r}, expected images")
        self.paths: list[str] = []
        self.others: list[str] = []  # files that are no images
        for place, _, names in listed(self.folder, _walk(self.folder, without)):
            found = os.path.relpath(place, self.folder).replace(os.sep, "/")
            prefix = "" if found == "." else f"{found}/"
            self.paths += [prefix + name for name in sorted(names) if is_image_name(name)]
            self.others += [prefix + name for name in sorted(names) if not is_image_name(name)]
        self._by_base, self._by_stem = defaultdict(list), defaultdict(list)
        # By lower case, too, where a name has no file otherwise.
        for fold in (_composed, folded):
            for path in self.paths:
                base = posixpath.basename(path)
                stem = fold(posixpath.splitext(base)[0])
                self._by_base[fold, fold(base)].append(path)
                self._by_stem[fold, stem].append(path)

    def find(self, name: str, where: str) -> Path:
        """Return the file that a name means.

        The name may be a path or an address, have backslashes, %20 for a blank, and folders from
        another machine. If several files have its base name, the one with most folders in common.
        Accents may be characters of their own or not. Letters in the other case count where no
        file has the name itself.

        Raises:
            ValueError: starting with `where`, if there are none or several.
        """
        found = self.find_any(name, where)
        if found is None:
            hint = self.hint(name)
            raise ValueError(f"{where}: no image {show(name)} in {self.folder}{hint}")
        return found

    def hint(self, name: str) -> str:
        """Say which file an absent image may be: one with another ending, or one not read; or else
        what is in the folder."""
        for wanted in _meanings(name):
            base = posixpath.basename(wanted)
            stem = folded(posixpath.splitext(base)[0])
            if paths := self._by_stem[folded, stem]:
                return f", but {show(paths[0])} is, with another ending"
            same = [p for p in self.others if folded(posixpath.basename(p)) == folded(base)]
            if same and not base.startswith("."):
                return f", but {show(same[0])} is, whose kind is not read"
        if not self.paths:
            return ", which has no image"
        return f", which has {len(self.paths)} images, such as {show(self.paths[0])}"

    def find_any(self, name: str, where: str) -> Path | None:
        """Return the file that a name means, None if there is none; else as `find`."""
        for fold in (_composed, folded):
            for wanted in _meanings(name):
                base = fold(posixpath.basename(wanted))
                if found := self._choose(wanted, self._by_base[fold, base], where, fold):
                    return found
        return None

    def find_stem(self, name: str, where: str) -> Path | None:
        """Return the image for a name without suffix, None if there is none; else as `find`."""
        for fold in (_composed, folded):
            paths = self._by_stem[fold, fold(posixpath.basename(name))]
            if found := self._choose(name, paths, where, fold):
                return found
        return None

    def _choose(
        self, wanted: str, paths: list[str], where: str, fold: Callable[[str], str]
    ) -> Path | None:
        if wanted in paths:
            return self.folder / wanted
        if len(paths) > 1:
            plain = fold(wanted)
            paths = [path for path in paths if fold(path) == plain] or paths
            shared = [_shared_end(plain, fold(path)) for path in paths]
            best = [path for path, n in zip(paths, shared, strict=True) if n == max(shared)]
            if len(best) > 1:
                both = f"{show(best[0])} and {show(best[1])}"
                raise ValueError(f"{where}: {show(wanted)} may be {both} in {self.folder}")
            paths = best
        return self.folder / paths[0] if paths else None


def _walk(folder: Path, without: Path | None) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, sorted by name, without one of the folders."""
    for place, folders, names in os.walk(folder, onerror=raise_unlisted):
        folders[:] = sorted(name for name in folders if Path(place, name).absolute() != without)
        yield place, folders, names


def file_below(folder: Path, path: Path) -> Path | None:
    """Return a path without `..`, if it is a file below a folder; None if it is not.

    As in `ImageFiles`, links to files are followed, and links to folders out of it are not.
    """
    plain = Path(os.path.normpath(path))
    if not plain.is_relative_to(os.path.normpath(folder)):
        plain, folder = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
        if not plain.is_relative_to(folder):
            return None
    try:
        is_below = plain.parent.resolve().is_relative_to(folder.resolve())
        return plain if is_below and plain.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


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
