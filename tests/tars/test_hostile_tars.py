"""Tars that are damaged, or made to harm, end in one line that names them."""

import io
import tarfile
import time

import pytest

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.tars.members import list_folder
from tests.tars.making import member, write_tar

BLOCK = tarfile.BLOCKSIZE


def refused(tar, words, error=ValueError):
    with pytest.raises(error, match=words) as found:
        list_folder(str(tar), "")
    assert str(tar) in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.jpg", "a/../../b.jpg", "a/../b.jpg"])
def test_names_that_lead_out_of_a_folder(tmp_path, name):
    tar = write_tar(tmp_path / "a.tar", member("ok.jpg", b"a"), member(name, b"a"))
    refused(tar, f"the name '{name}', expected one below a folder")


LINKS = {
    "symbolic": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "hard": {"type": tarfile.LNKTYPE, "linkname": "ok.jpg"},
    "pipe": {"type": tarfile.FIFOTYPE},
    "device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
    "unknown": {"type": b"Z"},
}


@pytest.mark.parametrize("kind", LINKS)
def test_links_and_devices_are_no_files(tmp_path, kind):
    tar = write_tar(tmp_path / "a.tar", member("ok.jpg", b"a"), member("x.jpg", **LINKS[kind]))
    assert list_folder(str(tar), "") == {"ok.jpg": True, "x.jpg": False}
    with pytest.raises(OSError, match="'x.jpg' in .*a.tar is a link, or sparse, or no file; it is"):
        read_regular(tar / "x.jpg")
    assert read_regular(tar / "ok.jpg") == b"a"


def test_a_sparse_member_is_no_file(tmp_path):
    header = bytearray(member("x.jpg", type=tarfile.GNUTYPE_SPARSE)[0].tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (1 << 20, 512)  # one part, behind a hole
    header[124:136] = b"%011o\0" % 512
    header[483:495] = b"%011o\0" % ((1 << 20) + 512)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + b"x" * 512 + bytes(2 * BLOCK))
    assert list_folder(f"{tmp_path}/a.tar", "") == {"x.jpg": False}


def test_the_same_name_twice(tmp_path):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"1"), member("./a.jpg", b"2"))
    refused(tar, "'a.jpg' is there twice, expected once")


def test_tars_that_are_cut_off(tmp_path):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a" * 2000), member("b.jpg", b"b" * 2000))
    content, whole = tar.read_bytes(), []
    for size in range(0, 6 * 512 + 5 * 512, 100):
        part = tmp_path / f"{size}.tar"
        part.write_bytes(content[:size])
        try:
            whole.append(list_folder(str(part), ""))
        except ValueError as error:
            assert str(part) in str(error) and "\n" not in str(error)
    # A cut between two members, or behind the last, cannot be told from an end.
    assert whole and all(found in ({"a.jpg": True}, {"a.jpg": True, "b.jpg": True})
                         for found in whole)  # fmt: skip


def test_a_damaged_header_is_not_the_end(tmp_path):
    tar = write_tar(tmp_path / "a.tar", *(member(f"{n}.jpg", b"a" * 600) for n in range(3)))
    content = bytearray(tar.read_bytes())
    assert content[3 * BLOCK :].startswith(b"1.jpg")
    content[3 * BLOCK + 2] ^= 1
    tar.write_bytes(content)
    refused(tar, "cannot be read as a tar .damaged at byte 1536.")


def test_a_tar_behind_another_is_not_lost(tmp_path):
    one, other = (write_tar(tmp_path / f"{n}.tar", member(n, b"a")) for n in "ab")
    (tmp_path / "both.tar").write_bytes(one.read_bytes() + other.read_bytes())
    refused(tmp_path / "both.tar", "it goes on after its end, byte 1024: several tars?")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_tars_are_refused(tmp_path, kind):
    for name in ("a.tar", f"a.tar.{kind}"):
        tar = write_tar(tmp_path / name, member("a.jpg", b"a"), mode=f"w:{kind}")
        refused(tar, "a tar that is compressed.* cannot be read file by file; decompress it")


def test_other_files_are_no_tars(tmp_path):
    for n, content in enumerate((b"", b"\xff\xd8" * 999, b"{}", bytes(range(256)) * 8)):
        path = tmp_path / f"{n}.tar"
        path.write_bytes(content)
        refused(path, "cannot be read as a tar")


def with_size(info, size):
    """A header of a member with any size, negative too."""
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("size", [-1, -512, -100_000, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_sizes_that_are_none(tmp_path, size, kind):
    first = with_size(member("ok.jpg")[0], 0)
    header = with_size(member("a.jpg", type=kind)[0], size)
    (tmp_path / "a.tar").write_bytes(first + header + b"1" * 512 + bytes(2 * BLOCK))
    refused(tmp_path / "a.tar", "cannot be read as a tar")


def test_entries_that_python_takes_long_for(tmp_path):
    digits = b"9" * 60_000
    header = with_size(member("a", type=tarfile.XHDTYPE)[0], len(digits))
    buffer = io.BytesIO(header + digits.ljust(118 * BLOCK, b"9"))
    (tmp_path / "a.tar").write_bytes(buffer.getvalue() + bytes(2 * BLOCK))
    start = time.process_time()
    refused(tmp_path / "a.tar", "a header of digits at byte 512")
    assert time.process_time() - start < 2  # 4 s, and 8 for twice as many


def test_headers_within_headers(tmp_path):
    header = with_size(member("a", type=tarfile.GNUTYPE_LONGNAME)[0], 5) + b"name".ljust(BLOCK)
    (tmp_path / "a.tar").write_bytes(header * 2000 + bytes(2 * BLOCK))
    refused(tmp_path / "a.tar", "cannot be read as a tar")


def test_names_that_are_no_unicode_are_read_and_others_are_found(tmp_path):
    tar = write_tar(
        tmp_path / "a.tar", member("a\udcff.jpg", b"1"), member("b.jpg", b"2"),
        format=tarfile.GNU_FORMAT,
    )  # fmt: skip
    assert list_folder(str(tar), "") == {"a\udcff.jpg": True, "b.jpg": True}
    assert read_regular(f"{tar}/a\udcff.jpg") == b"1"
