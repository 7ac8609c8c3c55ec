"""A text of thousands of characters, wherever it stands in a set, is cut in messages."""

import json

import pytest

from mask_rcnn_jax.weights.files import read_arrays
from tests.fuzz import format_parsers, hostile, parsers
from tests.fuzz.reader import LINE

DOCUMENTS = {
    "labelme json": parsers.LABELME,
    "VIA json": parsers.VIA,
    "CVAT XML": format_parsers.CVAT,
    "CVAT video XML": format_parsers.TRACKS,
    "VOC XML": format_parsers.VOC,
    "YOLO labels": format_parsers.YOLO,
    "Cityscapes json": format_parsers.CITYSCAPES,
    "Label Studio json": format_parsers.LABEL_STUDIO,
    "Datumaro json": format_parsers.DATUMARO,
    "Supervisely json": format_parsers.SUPERVISELY,
}
TEXT = "x" * 5000


@pytest.mark.parametrize("name", DOCUMENTS)
def test_in_annotations(name, tmp_path):
    parsers.set_up(tmp_path)
    parser = parsers.PARSERS[name]
    for place in range(len(list(hostile.nodes(DOCUMENTS[name])))):
        path = parser.write(tmp_path, ([("set", place, TEXT)], []))
        try:
            parser.read(path)  # and looks at lines about what is left out
        except (ValueError, OSError) as error:
            assert len(str(error)) < LINE, f"{place}: {str(error)[:300]}"


@pytest.mark.parametrize("line", [
    f"{TEXT}: 1", f"train_batch_size: {TEXT}", f'"{TEXT}', f"data_config {{ {TEXT}: 1 }}",
    f"wandb_config {{ mode: {TEXT} }}", f"num_epochs: {'9' * 5000}", f"data_config {{ {TEXT} ",
    f'data_config {{ image_size: "{TEXT}" }}', f'maskrcnn_config {{ arch: "{TEXT}" }}',
])  # fmt: skip
def test_in_a_spec_of_tao(line, tmp_path):
    path = tmp_path / "spec.txt"
    path.write_text(f"total_steps: 9\n{line}\n")
    with pytest.raises(ValueError, match="spec.txt") as error:
        parsers.read_spec(path)
    assert len(str(error.value)) < LINE


def test_in_the_header_of_weights(tmp_path):
    header = json.dumps({"w": {"dtype": TEXT, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "case.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="case.safetensors: not a readable") as error:
        read_arrays(path)
    assert len(str(error.value)) < LINE


def test_in_the_config_of_a_run(tmp_path):
    parsers.set_up(tmp_path)
    path = parsers.PARSERS["config.json"].write(tmp_path, ([], []))
    content = json.loads(path.read_text())
    content["config"]["data"]["train_json"] = TEXT
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="data.train_json was 'xxx") as error:
        parsers.read_config(path)
    assert len(str(error.value)) < LINE


def test_in_the_name_of_an_element(tmp_path):
    parsers.set_up(tmp_path)
    path = parsers.PARSERS["VOC XML"].write(tmp_path, ([], []))
    text = path.read_text()
    assert text.count("<polygon>") == 1
    path.write_text(text.replace("<polygon>", f"<polygon><{TEXT}>a</{TEXT}>"))
    with pytest.raises(ValueError, match="<xxx.* ... xxx") as error:
        parsers.PARSERS["VOC XML"].read(path)
    assert len(str(error.value)) < LINE
