"""Checkpoints as training code writes them: its own objects beside the weights are not even
imported, and wrapped models and other architectures are recognized."""

import pickle
import sys
import types

import numpy as np
import pytest

from mask_rcnn_jax.config import load_tree
from mask_rcnn_jax.weights.convert import to_flax
from mask_rcnn_jax.weights.files import read_arrays
from mask_rcnn_jax.weights.pretrained import load_weights
from tests.weights.system_names import system
from tests.weights.weight_writers import Call, Name, TorchFile


class HistoryBuffer:
    """Pickled as mmengine's of this name is: with arrays, and with methods as attributes."""

    def __init__(self):
        self.history = np.arange(3.0)

    def mean(self):
        raise AssertionError("code of the file ran")

    def __getstate__(self):
        return {**self.__dict__, "statistics_methods": {"mean": HistoryBuffer.mean}}

    def __setstate__(self, state):
        raise AssertionError("code of the file ran")


class AttributeDict(dict):
    """As Lightning's: a dict of a class of its own."""


class Scalars(list):
    """A list of a class of its own."""


@pytest.fixture
def foreign(monkeypatch):
    """These classes below names of the packages that they imitate."""
    module = types.ModuleType("mmengine.logging")
    monkeypatch.setitem(sys.modules, "mmengine", types.ModuleType("mmengine"))
    monkeypatch.setitem(sys.modules, "mmengine.logging", module)
    for cls in (HistoryBuffer, AttributeDict, Scalars):
        setattr(module, cls.__name__, cls)
        monkeypatch.setattr(cls, "__module__", "mmengine.logging")


def write_epoch(path, arrays, meta) -> None:
    file = TorchFile()
    state = {name: file.tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}
    hub = {"log_scalars": {"loss": HistoryBuffer()}, "runtime_info": AttributeDict(a=1, b=2)}
    tree = {"meta": meta, "message_hub": hub | {"more": Scalars([1, 2])}, "state_dict": state}
    file.write(path, tree)


@pytest.mark.parametrize("style, lines", [("pytorch", 3), ("caffe", 0)])
def test_an_epoch_of_mmdetection_3_is_read_with_its_config(tmp_path, foreign, style, lines):
    names, arrays = system("mmdetection")
    values = ("True", "58.395, 57.12, 57.375") if style == "pytorch" else ("False", "1.0, 1.0, 1.0")
    text = (
        f"model = dict(backbone=dict(type='ResNet', style='{style}'),\n"
        f"    data_preprocessor=dict(bgr_to_rgb={values[0]}, std=[{values[1]}]))"
    )
    path = tmp_path / "epoch_12.pth"
    write_epoch(path, arrays, {"cfg": text, "epoch": 12})
    for name in ("mmengine.logging", "mmengine"):
        sys.modules.pop(name, None)  # nothing may need them
    model = load_tree("coco_detectron2").model
    variables, report = load_weights(path, model)
    np.testing.assert_equal(variables, to_flax(arrays, norm="frozen", eps=1e-5)[0])
    assert len(report) == 1 + lines, report
    assert "mmengine" not in sys.modules


def test_a_foreign_object_gives_no_way_to_others(tmp_path):
    file = TorchFile()
    foreign = Call(Name("mmengine.logging", "HistoryBuffer"), ())
    tensor = file.tensor(np.ones(2, "<f4"))
    for evil in (
        Call(Name("builtins", "getattr"), (Name("collections", "OrderedDict"), "fromkeys")),
        Call(Name("builtins", "getattr"), (tensor, "numpy")),
        Name("mmengine_evil", "run"),
        Name("os", "system"),
    ):
        path = file.write(tmp_path / "w.pth", {"a": tensor, "hub": [foreign, evil]})
        with pytest.raises(ValueError, match="refused: the pickle imports"):
            read_arrays(path)


@pytest.mark.parametrize("prefix", ["model.", "module.", "model.module.", "model._orig_mod."])
def test_prefixes_of_wrapped_models_are_removed(tmp_path, prefix, foreign):
    _, arrays = system("torchvision_resnet")
    path = tmp_path / "last.ckpt"
    write_epoch(path, {prefix + name: array for name, array in arrays.items()}, {})
    assert read_arrays(path).keys() == arrays.keys()


@pytest.mark.parametrize("name", ["ema_state", "model_ema"])
def test_an_average_beside_the_weights_is_said(tmp_path, name, caplog):
    file, values = TorchFile(), np.arange(3, dtype=np.float32)
    last, average = ({"fc.bias": file.tensor(values + k)} for k in range(2))
    path = file.write(tmp_path / "w.pth", {name: average, "model": last, "optimizer": {"a": 1}})
    with caplog.at_level("INFO"):
        np.testing.assert_array_equal(read_arrays(path)["fc.bias"], values)
    assert [record.message for record in caplog.records] == [
        f"weights: 'model' is read, not the average '{name}' beside it"
    ]


@pytest.mark.parametrize(
    "names, says",
    [
        (["backbone.stem.conv1.weight", "roi_heads.res5.0.conv1.weight"], "a C4 backbone"),
        (["roi_heads.box.feature_extractor.head.layer4.0.conv1.weight"], "a C4 backbone"),
        (["backbone.conv1.weight", "roi_head.shared_head.layer4.0.conv1.weight"], "a C4 backbone"),
        (
            ["backbone.stem.conv1.weight", "proposal_generator.rpn_head.conv.weight"],
            "a backbone without a feature pyramid, such as DC5",
        ),
        (
            ["backbone.conv1.weight", "rpn_head.rpn_conv.weight", "roi_head.bbox_head.fc_cls.bias"],
            "a backbone without a feature pyramid, such as DC5",
        ),
    ],
)
def test_detectors_without_a_feature_pyramid_are_named(names, says):
    arrays = {name: np.zeros((2, 2, 1, 1), np.float32) for name in names}
    with pytest.raises(ValueError, match=rf"weights of a detector with {says}.*expected a feature"):
        to_flax(arrays, norm="frozen", eps=1e-5)


@pytest.mark.parametrize("source", ["detectron2", "mmdetection", "torchvision_resnet"])
def test_resnext_is_named(source):
    names, arrays = system(source)
    for name, path in names.items():
        if path.endswith("/conv2/kernel"):
            arrays[name] = np.zeros((64, 2, 3, 3), np.float32)
    with pytest.raises(ValueError, match="weights of a ResNeXt, whose .*conv2 has 32 groups"):
        to_flax(arrays, norm="frozen", eps=1e-5)


def test_the_imitated_object_is_pickled_as_the_real_one(foreign):
    """Protocol 2, torch's, writes a method as a call of getattr."""
    assert b"getattr" in pickle.dumps(HistoryBuffer(), 2)
