"""Which paths lead through tars, and which tars a pattern means."""

import pytest

from mask_rcnn_jax.tars.patterns import are_tars, expand, place_of


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("a.tar/b.jpg", ("a.tar", "b.jpg")),
        ("s/train-{000..127}.tar/x/b.jpg", ("s/train-{000..127}.tar", "x/b.jpg")),
        ("s3://bucket/*.tar/b.jpg", ("s3://bucket/*.tar", "b.jpg")),
        ("a.TAR/b.tar/c.jpg", ("a.TAR", "b.tar/c.jpg")),
        ("a.tar.gz/b.jpg", ("a.tar.gz", "b.jpg")),
        ("a.tgz/b.jpg", ("a.tgz", "b.jpg")),
        ("a.tar", None),
        ("tar/b.jpg", None),
        ("a.tars/b.jpg", None),
        ("a.tar.d/b.jpg", None),
    ],
)
def test_a_path_leads_through_the_first_tar(path, place):
    assert place_of(path) == place


def test_a_folder_with_such_a_name_is_no_tar(tmp_path):
    inner = tmp_path / "old.tar" / "new.tar"
    inner.parent.mkdir()
    assert place_of(inner / "a.jpg") == (str(inner), "a.jpg")
    assert not are_tars(inner.parent) and are_tars(inner) and are_tars(f"{inner}/")
    inner.mkdir()
    assert place_of(inner / "a.jpg") is None and not are_tars(inner)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{8..11}.tar", ["a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"]),
        ("a-{008..010}.tar", ["a-008.tar", "a-009.tar", "a-010.tar"]),
        ("{b,a}-{0..1}.tar", ["b-0.tar", "b-1.tar", "a-0.tar", "a-1.tar"]),
        ("{a,b{1,2}}.tar", ["a.tar", "b1.tar", "b2.tar"]),
    ],
)
def test_braces_are_those_of_a_shell(pattern, names):
    assert expand(pattern) == names


def test_patterns_are_sorted_and_names_with_signs_are_themselves(tmp_path):
    names = ["b.tar", "a.tar", "[a].tar", "{1,2}.tar"]
    for name in names:
        (tmp_path / name).touch()
    assert expand(f"{tmp_path}/*.tar") == sorted(f"{tmp_path}/{name}" for name in names)
    assert expand(f"{tmp_path}/[a].tar") == [f"{tmp_path}/[a].tar"]
    assert expand(f"{tmp_path}/{{1,2}}.tar") == [f"{tmp_path}/{{1,2}}.tar"]


def test_no_tar_and_too_many_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file matches .*/\*.tar"):
        expand(f"{tmp_path}/*.tar")
    for pattern in ("{0..99999999999}", "{0..99999}{0..99999}{0..99999}"):
        with pytest.raises(ValueError, match="more than 1,000,000 tars"):
            expand(f"a-{pattern}.tar")
    with pytest.raises(ValueError, match="more than 16 braces"):
        expand("{a,b}" * 800 + ".tar")
    with pytest.raises(ValueError, match="a.tar.gz: a tar that is compressed cannot be read file"):
        expand("a.tar.gz")
