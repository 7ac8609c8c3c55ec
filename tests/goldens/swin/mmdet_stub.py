"""Let mmdet 3.3.0 run on a CPU without the compiled operations of mmcv: torchvision's in the place
of those that a Mask R-CNN needs, and empty classes for the others."""

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import mmcv
import torch
import torchvision
from mmengine.registry import MODELS

mmcv.__version__ = "2.1.0"  # mmdet refuses 2.2.0, of which it uses nothing new


@MODELS.register_module(force=True)
class RoIAlign(torch.nn.Module):
    def __init__(self, output_size, spatial_scale=1.0, sampling_ratio=0, aligned=True):
        super().__init__()
        self.output_size, self.spatial_scale = (output_size, output_size), spatial_scale
        self.sampling_ratio, self.aligned = sampling_ratio, aligned

    def forward(self, maps, rois):
        return torchvision.ops.roi_align(
            maps, rois, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned
        )


def batched_nms(boxes, scores, idxs, nms_cfg, class_agnostic=False):
    kept = torchvision.ops.batched_nms(boxes, scores, idxs, nms_cfg["iou_threshold"])
    return torch.cat([boxes[kept], scores[kept, None]], dim=1), kept


class Ops(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"RoIAlign": RoIAlign, "batched_nms": batched_nms}
        return known.get(name) or type(name, (torch.nn.Module,), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        is_ops = name == "mmcv.ops" or name.startswith("mmcv.ops.")
        return ModuleSpec(name, self, is_package=True) if is_ops else None

    def create_module(self, spec):
        return Ops(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
