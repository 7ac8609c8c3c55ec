"""Keep what is indexed in a folder of the test."""

import pytest

from mask_rcnn_jax.tars.index import forget


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    forget()
    return tmp_path / "home"
