"""Read specs of the TAO Toolkit's Mask R-CNN: protobuf messages in text format."""

import ast
import difflib
import math
import os
import re
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.terminal.safe_text import cut

MAX_BYTES = 1 << 20
MAX_LIST = 1000  # characters
_YAML = re.compile(r"^\w+:[ \t]*(#.*)?$", re.MULTILINE)  # a key whose value is the lines below it
MODES = ("ONLINE", "OFFLINE", "DISABLED")  # of Weights & Biases
MESSAGES: dict[str, dict[str, str]] = {
    "Experiment": {
        "uint32": "train_batch_size save_checkpoints_steps num_steps_per_eval total_steps "
        "eval_batch_size warmup_steps seed report_frequency num_epochs num_examples_per_epoch "
        "logging_frequency",
        "double": "momentum l2_weight_decay l1_weight_decay warmup_learning_rate "
        "init_learning_rate global_gradient_clip_ratio",
        "bool": "visualize_images_summary use_amp",
        "string": "skip_checkpoint_variables checkpoint learning_rate_steps "
        "learning_rate_decay_levels pruned_model_path",
        "DataConfig": "data_config",
        "MaskRCNNConfig": "maskrcnn_config",
        "WandBConfig": "wandb_config",
        "ClearMLConfig": "clearml_config",
    },
    "DataConfig": {
        "uint32": "num_classes eval_samples prefetch_buffer_size shuffle_buffer_size n_workers "
        "max_num_instances",
        "bool": "augment_input_data skip_crowd_during_training",
        "string": "image_size training_file_pattern validation_file_pattern val_json_file",
    },
    "MaskRCNNConfig": {
        "uint32": "gt_mask_size rpn_batch_size_per_im batch_size_per_im fast_rcnn_mlp_head_dim "
        "mrcnn_resolution train_rpn_pre_nms_topn train_rpn_post_nms_topn "
        "test_detections_per_image test_rpn_pre_nms_topn test_rpn_post_nms_topn min_level "
        "max_level num_scales anchor_scale nlayers",
        "double": "rpn_box_loss_weight fast_rcnn_box_loss_weight mrcnn_weight_loss_mask "
        "rpn_positive_overlap rpn_negative_overlap rpn_fg_fraction rpn_min_size fg_fraction "
        "fg_thresh bg_thresh_hi bg_thresh_lo train_rpn_nms_threshold test_nms "
        "test_rpn_nms_thresh",
        "bool": "freeze_bn include_mask",
        "string": "bbox_reg_weights aspect_ratios arch freeze_blocks",
    },
    "WandBConfig": {
        "bool": "enabled reinit",
        "string": "key project entity name wandb_dir notes",
        "strings": "tags",
        "Mode": "mode",
    },
    "ClearMLConfig": {
        "bool": "reuse_last_task_id continue_last_task deferred_init",
        "string": "project task",
        "strings": "tags",
    },
}


class Spec:
    """The fields that a spec gives, by name, and where it gives them."""

    def __init__(self, path: str | os.PathLike):
        """Raises ValueError or OSError, naming the file and the line, if it cannot be read."""
        self.path = os.fspath(path)
        try:
            self._text = read_regular(path, MAX_BYTES).decode()
            message = text_format.Parse(self._text, _experiment()())
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: no text in UTF-8 ({error.reason})") from error
        except text_format.ParseError as error:
            if _YAML.search(self._text):
                expected = "expected the protobuf text of its mask_rcnn"
                raise ValueError(f"{self.path}: a spec in YAML, {expected}") from error
            where, _, what = str(error).partition(" : ")
            line = where.partition(":")[0]
            is_placed = what and line.isdigit()
            at = f", line {line}: {cut(what)}" if is_placed else f": {cut(str(error))}"
            raise ValueError(f"{self.path}{at}{_meant(what)}".replace("tao.", "")) from error
        self.values: dict[str, Any] = {}
        for field, value in message.ListFields():
            inner = value.ListFields() if field.name in ("data_config", "maskrcnn_config") else ()
            self.values[field.name] = value
            self.values |= {f.name: v for f, v in inner}
        for block, names in (
            ("", "use_amp"),
            ("data_config", "augment_input_data skip_crowd_during_training"),
            ("maskrcnn_config", "freeze_bn include_mask"),
        ):
            if not block or block in self.values:
                self.values = dict.fromkeys(names.split(), False) | self.values
        for name, value in self.values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise self.fault(name, "a finite number")

    def fault(self, name: str, expected: str) -> ValueError:
        """The error for a field, with its line."""
        found = re.search(rf"^[^#\n]*\b{name}\b", self._text, re.MULTILINE)
        end = found.end() if found else 0
        line = self._text.count("\n", 0, end) + 1
        shown = repr(self.values[name])[:100]
        return ValueError(f"{self.path}, line {line}: {name} is {shown}, expected {expected}")

    def required(self, name: str) -> Any:
        """The value of a field; ValueError if the spec does not give it."""
        if name not in self.values:
            raise ValueError(f"{self.path} lacks {name}")
        return self.values[name]

    def positive(self, name: str) -> Any:
        """The value of a field, above 0."""
        if not self.required(name) > 0:
            raise self.fault(name, "a number above 0")
        return self.values[name]

    def numbers(self, name: str, expected: str, pairs: bool = False) -> tuple:
        """A list in a string, of finite numbers or of pairs of them."""
        text = self.required(name)
        try:
            found = ast.literal_eval(text.strip()[:MAX_LIST])
            items = found if pairs else [found]
            if not all(isinstance(one, tuple | list) for one in (found, *items)):
                raise ValueError(found)
            for number in (number for item in items for number in item):
                if type(number) not in (int, float) or not abs(number) <= 1e9:
                    raise ValueError(number)
            if any(len(item) != 2 for item in items if pairs):
                raise ValueError(found)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise self.fault(name, expected) from error
        return tuple(map(tuple, items)) if pairs else tuple(found)


def _meant(fault: str) -> str:
    """Say what may be meant by a field that a message does not have."""
    found = re.search(r'type "tao\.(\w+)" has no field named "(\w+)"', fault)
    if not found:
        return ""
    fields = {name: " ".join(kinds.values()).split() for name, kinds in MESSAGES.items()}
    for message, names in fields.items():
        if found[2] in names:
            block = MESSAGES["Experiment"].get(message)
            return f"; it belongs into {block}" if block else "; it belongs outside the blocks"
    close = difflib.get_close_matches(found[2], fields[found[1]], 1)
    return f", did you mean {close[0]!r}?" if close else ""


@cache
def _experiment() -> Any:
    """The class of the message."""
    file = descriptor_pb2.FileDescriptorProto(name="spec.proto", package="tao", syntax="proto2")
    kinds = descriptor_pb2.FieldDescriptorProto
    types = {"uint32": kinds.TYPE_UINT32, "double": kinds.TYPE_DOUBLE, "bool": kinds.TYPE_BOOL}
    types |= {"string": kinds.TYPE_STRING, "strings": kinds.TYPE_STRING, "Mode": kinds.TYPE_ENUM}
    mode = file.enum_type.add(name="Mode")
    for number, name in enumerate(MODES):
        mode.value.add(name=name, number=number)
    for message, fields in MESSAGES.items():
        proto = file.message_type.add(name=message)
        for kind, names in fields.items():
            label = kinds.LABEL_REPEATED if kind == "strings" else kinds.LABEL_OPTIONAL
            for name in names.split():
                field = proto.field.add(name=name, number=len(proto.field) + 1, label=label)
                field.type = types.get(kind, kinds.TYPE_MESSAGE)
                if kind[0].isupper():
                    field.type_name = f".tao.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tao.Experiment"))
