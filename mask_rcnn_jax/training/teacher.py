"""Load a run's teacher, check that it fits the model, and log its cost."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.options import ExampleOptions, canvas_size
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.host import on_host
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.outputs import TrainOutputs
from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.models.teacher import TeacherOutputs
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training.distill import Distillation
from mask_rcnn_jax.weights import published
from mask_rcnn_jax.weights.convert import num_classes_in, to_ours_flat
from mask_rcnn_jax.weights.model_folder import folder_of
from mask_rcnn_jax.weights.pretrained import is_run
from mask_rcnn_jax.weights.restore import load_variables, make_model, restore_recipe


def open_teacher(
    recipe: Recipe, student: MaskRCNN, class_names: Sequence[str] | None = None
) -> tuple[Distillation | None, tuple[dict, ...]]:
    """Return the losses of `distill` and the teacher's variables; None and () without one.

    The losses' options have the teacher's checksum, so that a resumed run and all its processes can
    compare it.

    Args:
        recipe: the run's, with its final `train.steps`.
        student: the model that is trained.
        class_names: the training set's, class 1 first; None: unknown.

    Raises:
        ValueError: the teacher cannot be loaded, is another one than `distill.checksum` says, or
            does not fit the model.
    """
    options = recipe.distill
    if not options.teacher:
        return None, ()
    with console.lasting("loading the teacher"):
        teacher, variables, names = _load(recipe)
        if names is not None and class_names is not None:
            _check_names(options.teacher, names, class_names)
        checksum = _checksum(variables)
        if options.checksum not in ("", checksum):
            raise ValueError(
                f"distill.checksum is {options.checksum!r}, but that of {options.teacher} is "
                f"{checksum!r}; name the right teacher, or leave the checksum empty"
            )
        options = replace(options, checksum=checksum)
        distillation = Distillation(options, teacher, student, recipe.train.steps)
        _check_outputs(distillation, variables, recipe.data.in_training())
    return distillation, (variables,)


def inherit(variables: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, Any]:
    """Return a student's initial variables with the teacher's outside the backbone.

    Each head is taken as a whole, since its layers read each other, and the pyramid layer by layer:
    those whose arrays have the same names and shapes in both.
    """
    ours, theirs = (flatten_dict(dict(tree), sep="/") for tree in (variables, teacher))
    shapes: list[dict[str, dict]] = [defaultdict(dict), defaultdict(dict)]
    for sides, tree in zip(shapes, (ours, theirs), strict=True):
        for name, array in tree.items():
            if not name.endswith(f"/{RANGE}"):
                sides[_unit(name)][name] = np.shape(array)
    units = sorted(unit for unit in shapes[0] if unit != "backbone")
    taken = [unit for unit in units if shapes[0][unit] == shapes[1].get(unit)]
    own = [unit for unit in units if unit not in taken]
    logging.info("with the teacher's weights: %s", ", ".join(taken) or "nothing")
    if own:
        logging.info("with others than the teacher's weights: %s", ", ".join(own))
    arrays = {n: np.asarray(theirs[n], ours[n].dtype) for unit in taken for n in shapes[0][unit]}
    return {"batch_stats": {}, **unflatten_dict({**ours, **arrays}, sep="/")}


def _unit(name: str) -> str:
    """Return the head or layer of the pyramid that an array belongs to, or "backbone"."""
    module, *rest = name.split("/")[1:]
    return "/".join([module, *rest[:1]]) if module in ("fpn", "cascade") else module


def _load(recipe: Recipe) -> tuple[MaskRCNN, dict, list[str] | None]:
    """Return the teacher, its variables, and its class names if it is a run."""
    options, path = recipe.distill, _local(recipe.distill.teacher)
    if not (options.recipe or is_run(path) or folder_of(path)):
        raise ValueError(f"distill.teacher is {path}, no run: distill.recipe must name its recipe")
    try:
        own = load_config(options.recipe) if options.recipe else None
        own, categories, checkpoint = restore_recipe(own, path)
        as_here = {name: getattr(recipe.train, name) for name in ("precision", "implementation")}
        own = replace(own, train=replace(own.train, **as_here))
        variables = load_variables(checkpoint.folder if checkpoint else path, own)
        classes = num_classes_in(variables)
        assert classes is not None  # `load_variables` refuses a backbone alone
        teacher = make_model(own, classes)
    except (ValueError, OSError) as error:
        raise ValueError(f"distill.teacher: {error}") from error
    for name, differ in (("resize", _refuse), ("image_size", logging.warning)):
        theirs, ours = (json.dumps(getattr(r.data, name)) for r in (own, recipe))
        if theirs != ours:
            text = (
                "distill.teacher: %s was made for data.%s=%s and would see images of this run's %s"
            )
            differ(text, path, name, theirs, ours)
    bands = [r.data.bands.names for r in (own, recipe)]
    if bands[0] != bands[1]:
        theirs, ours = (", ".join(names) or "red, green, blue" for names in bands)
        raise ValueError(
            f"distill.teacher: {path} was made for bands {theirs}, this run has {ours}"
        )
    names = None if categories is None else [category["name"] for category in categories]
    return teacher, variables, names


def _local(teacher: str) -> str | os.PathLike:
    try:
        return published.local(teacher)
    except (ValueError, OSError) as error:
        raise ValueError(f"distill.teacher: {error}") from error


def _refuse(text: str, *values: Any) -> None:
    raise ValueError(text % values)


def _check_names(path: str, names: Sequence[str], class_names: Sequence[str]) -> None:
    if len(names) != len(class_names):
        return  # the shapes will say so
    for number, (theirs, ours) in enumerate(zip(names, class_names, strict=True), start=1):
        if theirs != ours:
            raise ValueError(
                f"distill.teacher: class {number} of {path} is {theirs!r}, that of the training "
                f"set {ours!r}; a teacher needs the same classes in the same order"
            )


def _checksum(variables: dict) -> str:
    """Return a SHA-256 over all arrays: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, array in sorted(to_ours_flat(variables).items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _check_outputs(distillation: Distillation, variables: dict, options: ExampleOptions) -> None:
    """Trace both models on an image, compare their outputs, and log the teacher's cost.

    Operations are counted in the GPU program, before optimization: the CPU program has some in
    loops, which XLA counts once.
    """
    batch = empty_batch(1, canvas_size(options), options)
    student = distillation.student.clone(implementation="xla")
    ours, outputs = _trace(
        lambda v, b: student.apply(
            v, b, None, train=True, method="forward_train", mutable=["batch_stats"]
        )[0],
        abstract_variables(student),
        batch,
    )
    plain = replace(distillation, teacher=distillation.teacher.clone(implementation="xla"))
    theirs, taught = _trace(plain.teach, variables, batch, outputs)
    check_fit(distillation, outputs, taught)
    if not ours:
        return
    # A backward pass takes about twice a forward pass.
    share = 100 * theirs / (theirs + 3 * ours)
    text = "the teacher takes %.3g GFLOP per image, the model %.3g forward: about %.0f %% of a step"
    logging.info(text, theirs / 1e9, ours / 1e9, share)


def _trace(function: Callable, *args: Any) -> tuple[float, Any]:
    """Return a function's FLOPs, 0 if unknown, and the shapes and dtypes in its result."""
    with on_host():  # GPUs do not count
        traced = jax.jit(function).trace(*args)
        cost: Any = traced.lower(lowering_platforms=("cuda",)).cost_analysis()
    return (cost or {}).get("flops", 0.0), traced.out_info


def check_fit(distillation: Distillation, outputs: TrainOutputs, taught: TeacherOutputs) -> None:
    """Raise ValueError, naming the entry, if a loss cannot compare the teacher's outputs.

    outputs, taught: abstract, for one batch.
    """
    options, teacher = distillation.options, distillation.teacher
    student = distillation.student
    where = f"distill.teacher: {options.teacher} has"
    theirs, ours = ([x.shape for x in o.pyramid] for o in (taught, outputs))
    if [s[1:3] for s in theirs] != [s[1:3] for s in ours]:
        sides = [" ".join(f"{h}x{w}" for _, h, w, _ in shapes) for shapes in (theirs, ours)]
        raise ValueError(f"{where} maps of {sides[0]} cells, the model {sides[1]}")
    known, wanted = taught.stages[0][0].shape[-1] - 1, outputs.class_logits.shape[-1] - 1
    if known != wanted:
        raise ValueError(f"{where} {known} classes, the training set {wanted}")
    needs = options.feature_weight and options.feature_loss == "pearson"
    if needs and theirs[0][-1] != ours[0][-1]:
        raise ValueError(
            f"{where} maps of {theirs[0][-1]} channels, the model {ours[0][-1]}, and "
            "distill.feature_loss='pearson' needs as many: 'attention' does not"
        )
    kinds = teacher.classifier.kind, student.classifier.kind
    if options.cls_weight and kinds[0] != kinds[1]:
        raise ValueError(f"{where} model.classifier.kind={kinds[0]!r}, the model {kinds[1]!r}")
    for task in outputs.tasks:
        if options.weight(task) and task not in taught.tasks:
            raise ValueError(f"{where} no {task} head, expected distill.{task}_weight=0")
    if options.rpn_weight and teacher.anchors != student.anchors:
        raise ValueError(f"{where} other model.anchors, expected distill.rpn_weight=0")
    if options.inherit:
        coders = (model.cascade.coders(model.box_coder) for model in (teacher, student))
        others = {
            "model.anchors": teacher.anchors != student.anchors,
            "model.box_coder": any(a != b for a, b in zip(*coders, strict=False)),
            "model.classifier.kind": kinds[0] != kinds[1],
        }
        for name, differs in others.items():
            if differs:
                raise ValueError(f"{where} another {name}, expected distill.inherit=False")
