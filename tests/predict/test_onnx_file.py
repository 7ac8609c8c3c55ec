"""Weights that an ONNX model has in other files are refused, wherever the model names them."""

import shutil

import numpy as np
import pytest

from mask_rcnn_jax.predict.engines import load_exported
from mask_rcnn_jax.predict.onnx_file import check_whole
from mask_rcnn_jax.predict.programs import load_onnx
from tests.helpers import GOLDENS

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

SAVED = GOLDENS / "version_0_1_0" / "onnx"


def external(name: str = "w") -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    return tensor


def graph(nodes=(), tensors=()):
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    return helper.make_graph(list(nodes), "g", [], [out], list(tensors))


def constant(**attribute):
    return helper.make_node("Constant", [], ["y"], **attribute)


def model(of_graph=None, **more):
    found = helper.make_model(of_graph or graph(), opset_imports=[helper.make_opsetid("", 17)])
    for name, value in more.items():
        getattr(found, name).append(value)
    return found


def sparse(values, indices):
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[4])


def inside(found):
    """The graph in an If in a Loop."""
    branch = helper.make_node("If", ["c"], ["y"], then_branch=found, else_branch=graph())
    return graph([helper.make_node("Loop", ["n", "c"], ["y"], body=graph([branch]))])


WHOLE = numpy_helper.from_array(np.ones(2, np.float32), "whole")
PLACES = numpy_helper.from_array(np.arange(2), "places")
FUNCTION = helper.make_function("mine", "f", [], ["y"], [constant(value=external())], [])
TRAINING = onnx.TrainingInfoProto(initialization=graph(tensors=[external()]))
NO_LOCATION = external()
NO_LOCATION.ClearField("external_data")
NO_MARK = external()
NO_MARK.ClearField("data_location")


@pytest.mark.parametrize(
    "found",
    [
        model(graph(tensors=[WHOLE, external()])),
        model(graph(tensors=[NO_LOCATION])),
        model(graph(tensors=[NO_MARK])),
        model(graph([constant(value=external())])),
        model(graph([helper.make_node("Own", [], ["y"], many=[WHOLE, external()])])),
        model(inside(graph(tensors=[external()]))),
        model(inside(graph([constant(value=external())]))),
        model(graph([constant(sparse_value=sparse(external(), PLACES))])),
        model(graph([constant(sparse_value=sparse(WHOLE, external()))])),
        model(functions=FUNCTION),
        model(training_info=TRAINING),
    ],
)
def test_they_are_refused_wherever_they_are(found):
    with pytest.raises(ValueError, match="the weights 'w' are in another file"):
        check_whole(found.SerializeToString())


def test_sparse_initializers_are_looked_at():
    found = model()
    found.graph.sparse_initializer.append(sparse(external(), PLACES))
    with pytest.raises(ValueError, match="the weights 'w' are in another file"):
        check_whole(found.SerializeToString())


@pytest.mark.parametrize("number", [13, 14])  # external_data, data_location
def test_a_field_whose_number_others_cut_off_is_refused(number):
    """onnxruntime would take the number for that of another tensor's field, and see a file."""
    key = bytes([number << 3 | 0x80, 0x80, 0x80, 0x80, 0x10])  # and 2^32, as a varint
    tensor = TensorProto(name="w").SerializeToString() + key + b"\x01"
    graph = bytes([5 << 3 | 2, len(tensor)]) + tensor
    with pytest.raises(ValueError, match="a field's number has more than 32 bits"):
        check_whole(bytes([7 << 3 | 2, len(graph)]) + graph)


def test_a_whole_model_is_taken():
    loop = inside(graph([constant(value=WHOLE)], [WHOLE]))
    loop.node.append(constant(sparse_value=sparse(WHOLE, PLACES)))
    found = model(loop)
    check_whole(found.SerializeToString())
    check_whole((SAVED / "model.onnx").read_bytes())
    with pytest.raises(ValueError, match="a field ends beyond its message"):
        check_whole(found.SerializeToString()[:-1])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("int8", [False, True])
def test_an_engine_reads_no_other_file(engine, int8, tmp_path, monkeypatch):
    """Neither from the current folder, nor from the model's."""
    pytest.importorskip(engine)
    shutil.copytree(SAVED, tmp_path / "exported")
    path = tmp_path / "exported" / "model.onnx"
    found = onnx.load(path)
    tensor = next(t for t in found.graph.initializer if t.raw_data)
    data = tensor.raw_data
    for folder in (tmp_path, path.parent):
        (folder / "w.bin").write_bytes(data)
    tensor.ClearField("raw_data")
    tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    name = "model_int8.onnx" if int8 else "model.onnx"
    (path.parent / name).write_bytes(found.SerializeToString())
    monkeypatch.chdir(tmp_path)
    words = f"{engine} cannot load .*{name}: the weights '{tensor.name}' are in another file"
    with pytest.raises(ValueError, match=words) as error:
        load_exported(path.parent, engine, "int8" if int8 else None)
    assert "\n" not in str(error.value)


def test_onnxruntime_takes_the_format_that_was_checked():
    """It has one of its own, with such weights, too, which it would tell by these bytes."""
    pytest.importorskip("onnxruntime")
    producer = b"\x12\x06--ORTM"  # a field of the model
    content = producer + (SAVED / "model.onnx").read_bytes()
    images, sizes = np.zeros((1, 64, 128, 3), np.uint8), np.array([[64, 128]])
    assert load_onnx(content)(images, sizes).boxes.shape == (1, 5, 4)
