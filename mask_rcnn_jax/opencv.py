"""OpenCV, imported when something of it is first used: not by commands that read no image."""

import os
from typing import Any


def set_limits() -> None:
    """Set, where it is not set, what OpenCV looks up once: when it is imported first."""
    # Pixels of an image that it decodes. A small file may claim gigabytes; 2^30 is its own limit.
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", "178956970")
    # Its own lines about damaged files name no file; ours do.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")


def __getattr__(name: str) -> Any:
    set_limits()
    import cv2

    return getattr(cv2, name)
