"""OpenCV, imported when something of it is first used: not by commands that read no image."""

from typing import Any


def __getattr__(name: str) -> Any:
    import cv2

    return getattr(cv2, name)
