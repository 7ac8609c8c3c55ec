"""A teacher beside the model: what its losses are made of, and which teachers are refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from safetensors.numpy import save_file

from mask_rcnn_jax import consent, parts
from mask_rcnn_jax.config import as_recipe, load_config, read_workdir, write_workdir
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.teacher import TeacherOutputs, teach
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.recipe.distillation import DistillOptions
from mask_rcnn_jax.training import teacher as loading
from mask_rcnn_jax.training import work
from mask_rcnn_jax.training.distill import (
    Distillation,
    cells_inside,
    translate,
)
from mask_rcnn_jax.training.step import StepOptions, TrainState, make_mesh, make_train_step
from mask_rcnn_jax.weights.convert import to_ours_flat
from tests.helpers import any_variables, assert_finite_tree, tiny_batch, tiny_config
from tests.training.stubbed_run import run as stubbed_run
from tests.training.stubbed_run import stubbed, write_as_before

__all__ = ["stubbed"]

ALL = DistillOptions(box_weight=0.5, rpn_weight=2.0, mask_weight=4.0, teacher="a run")
NAMES = ("features", "cls", "box", "mask", "rpn")
WEIGHTS = {"features": 1.0, "cls": 1.0, "box": 0.5, "mask": 4.0, "rpn": 2.0}


class Trunk(nn.Module):
    """A convolution for each map: what is trained makes no difference here, and compiles."""

    trains_batch_stats = False

    @nn.compact
    def __call__(self, x, *, train):
        maps = [nn.relu(nn.Conv(8, (4, 4), (4, 4))(x))]
        for _ in range(3):
            maps.append(nn.relu(nn.Conv(8, (2, 2), (2, 2))(maps[-1])))
        return maps


def small_config():
    config = tiny_config()
    config.model.fpn.channels = config.model.rpn.channels = 8
    config.model.mask_head.update(channels=8, num_convs=1)
    config.model.box_head.update(channels=8, num_fcs=1)
    return config


@functools.cache
def model():
    return build_model(small_config().model).clone(backbone=Trunk())


def distillation(options=ALL, **changes) -> Distillation:
    fields = {"teacher": model(), "student": model(), "steps": 10, **changes}
    return Distillation(options, **fields)


@functools.cache
def variables(seed: int) -> dict:
    """Random ones; those of seed 1 are larger, so that scores differ from each other."""
    return jax.tree.map(lambda x: (1 + seed) * x, any_variables(model(), seed))


def wide_batch():
    """Three images on canvases of 64 x 96, the last one without objects."""
    batch = tiny_batch(3)
    images = np.pad(batch.images, ((0, 0), (0, 0), (0, 32), (0, 0)))
    images[0, :, 64:] = 50
    sizes = np.array([[64, 96], [60, 64], [64, 40]], np.int32)
    return dataclasses.replace(batch, images=images, image_sizes=sizes)


@functools.cache
def forward():
    train = functools.partial(model().apply, train=True, method="forward_train")
    return jax.jit(lambda student, batch: train(student, batch, None))


@functools.cache
def losses():
    """Losses of distillation alone, and gradients in the outputs of the student and the teacher."""

    def total(outputs, teacher, batch):
        terms = distillation().add({"loss/total": 1.0}, teacher, batch, outputs, jnp.int32(0))
        return terms["loss/total"], terms

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True, allow_int=True))


def run(teacher, batch=None):
    batch = wide_batch() if batch is None else batch
    (_, terms), gradients = losses()(forward()(variables(0), batch), teacher, batch)
    return jax.device_get((terms, gradients))


def of_outputs(gradient) -> dict:
    names = ("pyramid", "rpn_logits", "class_logits", "box_deltas", "mask_logits")
    return {name: float(optax.tree.norm(getattr(gradient, name))) for name in names}


@pytest.mark.slow
def test_a_teacher_like_the_student_changes_nothing_but_another_one_does():
    terms, (gradient, _) = run(variables(0))
    for name in NAMES:  # scores to rounding
        np.testing.assert_allclose(terms[f"loss/distill_{name}"], 0, atol=1e-6, err_msg=name)
    assert max(of_outputs(gradient).values()) < 1e-5, of_outputs(gradient)
    terms, (gradient, _) = run(variables(1))
    found = {name: terms[f"loss/distill_{name}"] for name in NAMES}
    assert min(found.values()) > 1e-5, found
    np.testing.assert_allclose(terms["loss/total"], 1 + sum(found.values()), rtol=1e-6)
    assert min(of_outputs(gradient).values()) > 1e-4, of_outputs(gradient)


@pytest.mark.slow
def test_no_gradient_reaches_the_teacher():
    _, (_, gradient) = run(variables(1))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_images_without_objects_have_no_foreground_to_compare():
    batch = wide_batch()
    targets = batch.targets.replace(valid=np.zeros_like(batch.targets.valid))
    terms, (gradient, _) = run(variables(1), batch.replace(targets=targets))
    assert terms["loss/distill_mask"] == 0 == terms["loss/distill_box"]
    assert terms["loss/distill_features"] > 0 < terms["loss/distill_cls"]
    assert_finite_tree((terms, of_outputs(gradient)))


def test_what_lies_beyond_an_image_changes_nothing():
    batch = wide_batch()
    images = batch.images.copy()
    images[1, 60:], images[1, :, 64:], images[2, :, 40:] = 200, 17, 99
    terms, _ = run(variables(1))
    changed, _ = run(variables(1), batch.replace(images=images))
    assert changed == terms


@pytest.mark.slow
def test_masks_are_compared_with_what_the_teacher_predicts_there():
    """`predict_masks` at the student's RoIs, one on each image, and the divergence in NumPy."""
    batch, teacher = wide_batch(), variables(1)
    outputs = jax.device_get(forward()(variables(0), batch))
    rois, rows = outputs.mask_rois, np.flatnonzero(outputs.mask_rois.foreground)
    assert len(set(rois.images[rows])) > 1
    given = batch.images[rois.images], batch.image_sizes[rois.images]
    predict = jax.jit(functools.partial(model().apply, method="predict_masks"))
    masks = predict(teacher, *given, rois.boxes[:, None], rois.classes[:, None])
    p, logits = np.float64(masks)[rows, 0], np.float64(outputs.mask_logits)[rows]
    own = sum(np.where(x > 0, x * np.log(np.maximum(x, 1e-30)), 0) for x in (p, 1 - p))
    cross = p * np.logaddexp(0, -logits) + (1 - p) * np.logaddexp(0, logits)
    terms, _ = run(teacher)
    np.testing.assert_allclose(terms["loss/distill_mask"], 4 * np.mean(own + cross), rtol=1e-4)


def test_weights_grow_and_fall_over_the_run():
    options = DistillOptions(warmup_until=0.4, decay_from=0.5)
    factors = [float(options.factor(jnp.int32(step), 10)) for step in range(10)]
    np.testing.assert_allclose(factors, [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2], rtol=1e-6)
    assert float(DistillOptions().factor(jnp.int32(10**6), 10)) == 1
    last = DistillOptions(decay_from=0.5).factor(jnp.int32(10), 10)
    assert last == 0


def test_cells_inside_by_hand():
    """At stride 4, a height of 5 is two cells and a width of 8 as well."""
    inside = cells_inside(jnp.array([[5, 8], [0, 0]]), 4, (3, 3))
    np.testing.assert_array_equal(inside[0], [[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert not inside[1].any()


def test_deltas_are_translated_between_box_coders():
    """A width of 10 or, with inclusive corners, 11; a move by half of it, times the weight."""
    boxes = jnp.array([[[20.0, 30.0, 30.0, 50.0]]])
    ours, theirs = BoxCoder(), BoxCoder(weights=(1.0, 1.0, 1.0, 1.0), inclusive="all")
    moved = translate(jnp.array([[[0.5, 0.0, 0.0, 0.0]]]), boxes, theirs, ours)
    np.testing.assert_allclose(moved, [[[10 * 5.5 / 10, 0, 0, 0]]], atol=1e-5)
    deltas = jnp.array([[[0.1, 0.2, 0.3, 0.4]]])
    np.testing.assert_array_equal(translate(deltas, boxes, ours, ours), deltas)


@pytest.mark.slow
def test_without_a_teacher_a_step_takes_its_state_and_batch_alone():
    config, tx = small_config(), optax.sgd(1e-2)
    state = jax.eval_shape(lambda v: TrainState.start(v, tx), abstract_variables(model()))
    options = StepOptions(as_recipe(config).loss, 0, 0.5)
    step = make_train_step(model(), tx, lambda _: 1e-2, make_mesh(), options)
    traced = step.trace(state, tiny_batch(4))
    arguments = len(jax.tree.leaves((state, tiny_batch(4))))
    assert len(traced.jaxpr.in_avals) == arguments
    assert not [name for name in traced.out_info[1] if "distill" in name]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"temperature": 0.0}, "distill.temperature is 0.0, expected above 0"),
        ({"cls_weight": -1.0}, "distill.cls_weight is -1.0, expected at least 0"),
        ({"decay_from": 1.5}, "distill.decay_from is 1.5, expected from 0 to 1"),
        ({"inherit": True}, "distill.inherit is True, but teacher is ''"),
        ({"feature_loss": "l2"}, "distill.feature_loss is 'l2', expected one of ['pearson', "),
        (
            {"teacher": "x", "feature_weight": 0, "cls_weight": 0, "mask_weight": 0},
            "distill.teacher is 'x', but all weights of its losses are 0",
        ),
    ],
)
def test_faulty_entries_are_named(entries, words):
    with pytest.raises(ValueError) as error:
        parts.build(DistillOptions, entries, "distill")
    assert str(error.value).startswith(words)


@functools.cache
def abstract_outputs():
    """Shapes of the outputs of student and teacher, of equal models."""
    student = functools.partial(model().apply, method="forward_train", train=True)
    given = abstract_variables(model()), tiny_batch(1)
    outputs = jax.eval_shape(lambda v, b: student(v, b, None), *given)
    taught = jax.eval_shape(functools.partial(model().apply, method=teach), *given, outputs)
    return outputs, taught


def changed_teacher(**fields) -> TeacherOutputs:
    return dataclasses.replace(abstract_outputs()[1], **fields)


def shapes(*sizes) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


SIDES = (16, 8, 4, 2, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pyramid": shapes(*((1, s // 2, s, 32) for s in SIDES))},
         "maps of 8x16 4x8 2x4 1x2 0x1 cells, the model 16x16 8x8 4x4 2x2 1x1"),
        ({"pyramid": shapes(*((1, s, s, 256) for s in SIDES))},
         "maps of 256 channels, the model 8, and distill.feature_loss='pearson' needs as many"),
        ({"stages": [shapes((1, 16, 6), (1, 16, 6, 4))]}, "5 classes, the training set 2"),
        ({"tasks": {}}, "no mask head, expected distill.mask_weight=0"),
    ],
)  # fmt: skip
def test_teachers_that_do_not_fit_are_refused(fields, words):
    student, _ = abstract_outputs()
    with pytest.raises(ValueError, match="^distill.teacher: a run has") as error:
        loading.check_fit(distillation(), student, changed_teacher(**fields))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_teachers_of_other_parts_are_refused_where_a_loss_needs_them():
    student, taught = abstract_outputs()
    loading.check_fit(distillation(), student, taught)
    sigmoid = dataclasses.replace(model().classifier, kind="sigmoid")
    anchors = dataclasses.replace(model().anchors, sizes=(8.0, 16.0, 32.0, 64.0, 128.0))
    for part, entry, words in (
        ({"classifier": sigmoid}, "cls_weight", "model.classifier.kind='sigmoid'"),
        ({"anchors": anchors}, "rpn_weight", "other model.anchors, expected distill.rpn_weight=0"),
    ):
        other = model().clone(**part)
        with pytest.raises(ValueError, match=words):
            loading.check_fit(distillation(teacher=other), student, taught)
        free = dataclasses.replace(ALL, **{entry: 0.0})
        loading.check_fit(distillation(free, teacher=other), student, taught)


def test_teachers_that_cannot_be_loaded_are_one_line(tmp_path):
    config, file = small_config(), tmp_path / "weights.pth"
    file.write_bytes(b"nothing of the kind")
    for entries, words in (
        ({"teacher": str(tmp_path / "none")}, "holds no checkpoint, expected"),
        ({"teacher": str(file)}, "no run: distill.recipe must name its recipe"),
        ({"teacher": str(file), "recipe": "none"}, "no recipe or run 'none'"),
        ({"teacher": str(file), "recipe": "quickstart"}, "weights.pth: unknown format"),
        ({"teacher": str(tmp_path / "x.pth"), "recipe": "quickstart"}, "x.pth"),
    ):
        config.distill.update(recipe="")
        config.distill.update(entries)
        with pytest.raises(ValueError, match="^distill.teacher") as error:
            loading.open_teacher(as_recipe(config), model())
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_weights_file_is_a_teacher_with_its_recipe(tmp_path, monkeypatch):
    config = small_config()
    write_workdir(tmp_path / "recipe", as_recipe(config), [])
    taught = any_variables(build_model(config.model))
    save_file(to_ours_flat(taught), tmp_path / "teacher.safetensors")
    config.distill.update(
        teacher=str(tmp_path / "teacher.safetensors"), recipe=str(tmp_path / "recipe")
    )
    monkeypatch.setattr(loading, "_check_outputs", lambda *_: None)
    found, (weights,) = loading.open_teacher(as_recipe(config), model(), ["any", "names"])
    jax.tree.map(np.testing.assert_array_equal, weights, taught)
    assert found.teacher == build_model(config.model)


def test_a_teacher_of_other_images_is_named_in_a_warning_or_refused(monkeypatch, caplog):
    """A run's config has lists where a recipe has tuples."""
    config, own = small_config(), small_config()
    own.data.image_size = [64, 64]
    found = as_recipe(own), [{"name": "cat"}], None
    monkeypatch.setattr(loading, "restore_recipe", lambda *_: found)
    monkeypatch.setattr(loading, "load_variables", lambda *_: variables(0))
    monkeypatch.setattr(loading, "_check_outputs", lambda *_: None)
    config.distill.teacher = "runs/large"
    assert loading.open_teacher(as_recipe(config), model(), ["cat"])[1] == (variables(0),)
    with pytest.raises(ValueError, match="class 1 of runs/large is 'cat'"):
        loading.open_teacher(as_recipe(config), model(), ["cow"])
    assert not caplog.records
    config.data.image_size = (64, 128)
    loading.open_teacher(as_recipe(config), model())
    text = "made for data.image_size=[64, 64] and would see images of this run's [64, 128]"
    assert [text in record.getMessage() for record in caplog.records] == [True]
    config.data.resize = "keep"
    with pytest.raises(
        ValueError, match='^distill.teacher: runs/large was made for data.resize="f'
    ):
        loading.open_teacher(as_recipe(config), model())
    config.data.update(resize="fit", bands={"names": ("red", "green", "nir")})
    with pytest.raises(ValueError, match="for bands red, green, blue, this run has red, green, ni"):
        loading.open_teacher(as_recipe(config), model())


def given_teacher(monkeypatch, names=None, seed=1):
    """Its outputs are looked at in `test_what_a_teacher_costs_is_logged`."""
    monkeypatch.setattr(loading, "_check_outputs", lambda *_: None)
    monkeypatch.setattr(loading, "_load", lambda *_: (model(), variables(seed), names))


def test_a_teacher_is_known_by_its_checksum(monkeypatch):
    config = small_config()
    config.distill.teacher = "a run"
    given_teacher(monkeypatch)
    found, (weights,) = loading.open_teacher(as_recipe(config), model())
    assert found.steps == config.train.steps and weights is variables(1)
    config.distill.checksum = checksum = found.options.checksum
    assert len(checksum) == 64
    loading.open_teacher(as_recipe(config), model())
    given_teacher(monkeypatch, seed=0)
    with pytest.raises(ValueError, match=f"^distill.checksum is '{checksum}', but that of a run"):
        loading.open_teacher(as_recipe(config), model())


@pytest.mark.slow
def test_what_a_teacher_costs_is_logged(monkeypatch, caplog):
    """A model like the student takes less than this, which also computes its targets."""
    config = small_config()
    config.distill.teacher = "a run"
    monkeypatch.setattr(loading, "_load", lambda *_: (model(), variables(1), None))
    with caplog.at_level("INFO"):
        loading.open_teacher(as_recipe(config), model())
    found = re.search(r"takes (\S+) GFLOP per image, the model (\S+) forward", caplog.text)
    theirs, ours = map(float, found.groups())
    assert 0 < theirs < ours
    share = 100 * theirs / (theirs + 3 * ours)
    assert f"about {share:.0f} % of a step" in caplog.text


def test_a_teacher_of_other_classes_is_refused(monkeypatch):
    config = small_config()
    config.distill.teacher = "a run"
    given_teacher(monkeypatch, ["cat", "dog"])
    loading.open_teacher(as_recipe(config), model(), ["cat", "dog"])
    with pytest.raises(ValueError, match="class 2 of a run is 'dog', that of the training set 'c"):
        loading.open_teacher(as_recipe(config), model(), ["cat", "cow"])


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_teacher(tmp_path, stubbed, monkeypatch):
    def open_as(checksum):
        found = distillation(DistillOptions(checksum=checksum))
        monkeypatch.setattr(work, "open_teacher", lambda *_: (found, ()))

    open_as("one")
    stubbed_run(tmp_path, steps=4)
    assert read_workdir(tmp_path)[0].distill.checksum == "one"
    stubbed_run(tmp_path, steps=6)
    open_as("two")
    with pytest.raises(ValueError, match="distill.checksum was 'one' and is 'two' now"):
        stubbed_run(tmp_path, steps=8)


def test_runs_from_before_distillation_go_on(tmp_path, stubbed):
    stubbed_run(tmp_path, steps=4)
    write_as_before(tmp_path, "distill")
    with consent.allow_code("tests.small_trunk"):
        assert load_config(tmp_path).distill.teacher == ""
    stubbed_run(tmp_path, steps=6)
