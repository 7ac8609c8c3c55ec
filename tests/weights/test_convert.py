"""Names, layouts and class orders of every system, and the way back to torchvision."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.configs import coco_torchvision
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.conv import UpConv, pixel_shuffle
from mask_rcnn_jax.weights.convert import (
    identify,
    num_classes_in,
    to_flax,
    to_ours_flat,
    to_torchvision,
)
from mask_rcnn_jax.weights.sources import SOURCES
from tests.helpers import shared
from tests.weights.system_names import CLASSES, IDS, OURS, SYSTEMS, TORCH, arrays_of, system


def flat(variables):
    """{path without its collection: array}."""
    return {"/".join(path[1:]): value for path, value in flatten_dict(dict(variables)).items()}


@pytest.fixture(scope="module")
def model_paths():
    """Paths of the variables of a ResNet-50 model, by norm."""
    paths = {}
    for norm in ("frozen", "affine"):
        config = coco_torchvision.get_config()
        config.model.update(num_classes=CLASSES, backbone=dict(norm=norm))
        variables = abstract_variables(build_model(config.model))
        paths[norm] = {"/".join(path) for path in flatten_dict(dict(variables))}
    return paths


@pytest.mark.parametrize(("source", "names"), SYSTEMS, ids=IDS)
@pytest.mark.parametrize("norm", ["frozen", "affine"])
def test_every_name_finds_its_place_and_none_is_empty(source, names, norm, model_paths):
    variables, found = to_flax(arrays_of(source, names), norm=norm, eps=1e-5)
    assert found == source == identify(names)[0]
    paths = {"/".join(path) for path in flatten_dict(variables)}
    if num_classes_in(variables) is None:
        expected = {path for path in model_paths[norm] if path.split("/")[1] == "backbone"}
    else:
        expected = model_paths[norm]
        assert num_classes_in(variables) == CLASSES
    assert paths == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("source", "names"), SYSTEMS, ids=IDS)
def test_every_array_lands_where_its_name_says(source, names):
    """By the sum over each array, which no change of layout or order changes."""
    arrays = arrays_of(source, names)
    variables = flat(to_flax(arrays, norm="affine", eps=1e-5)[0])
    for name, path in names.items():
        if "norm" in path and not SOURCES[source].has_eps:
            continue  # folded, see test_systems_without_an_epsilon
        assert variables[path].sum() == pytest.approx(arrays[name].sum(), rel=1e-6), name


def test_names_of_torchvision_are_those_of_torchvision():
    lines = shared("torchvision_keys.txt").read_text().splitlines()
    expected = {line.split("\t")[0] for line in lines if line.startswith(("backbone", "r"))}
    assert set(SYSTEMS[0][1]) == expected


class TestLayout:
    """Each layer computes what theirs does, by slow sums in their own layout."""

    rng = np.random.default_rng(0)

    def test_convolution(self):
        names, arrays = system("torchvision")
        variables, _ = to_flax(arrays, norm="frozen", eps=1e-5)
        name = "rpn.head.bbox_pred.weight"
        kernel = variables["params"]["rpn_head"]["anchor_deltas"]["kernel"]
        assert kernel[0, 1, 1, 7] == arrays[name][7, 1, 0, 1]

    def test_first_fully_connected_layer(self):
        _, arrays = system("torchvision")
        kernel = to_flax(arrays, norm="frozen", eps=1e-5)[0]["params"]["box_head"]["fc1"]["kernel"]
        maps = self.rng.normal(size=(7, 7, 2))
        theirs = arrays["roi_heads.box_head.fc6.weight"] @ maps.transpose(2, 0, 1).reshape(-1)
        np.testing.assert_allclose(maps.reshape(-1) @ kernel, theirs, rtol=1e-5)

    @pytest.mark.parametrize("source", ["torchvision", "nvidia_tf2"])
    def test_up_convolution(self, source):
        """out[o, 2y + i, 2x + j] = sum over c of in[c, y, x] * weight[c, o, i, j]."""
        names, arrays = system(source)
        name = next(n for n, path in names.items() if path == "mask_head/mask_deconv/kernel")
        weight = arrays[name]  # torch: [in, out, i, j]; Keras: [i, j, out, in]
        if source == "nvidia_tf2":
            weight = weight.transpose(3, 2, 0, 1)
        x = self.rng.normal(size=(2, 3, 4)).astype(np.float32)  # [c, y, x]
        expected = np.zeros((2, 6, 8))
        for i, j in itertools.product(range(2), range(2)):
            expected[:, i::2, j::2] = np.einsum("cyx,co->oyx", x, weight[:, :, i, j])
        layer = UpConv(2, jnp.float32, jax.nn.initializers.zeros)
        params = to_flax(arrays, norm="frozen", eps=1e-5)[0]["params"]["mask_head"]["mask_deconv"]
        variables = jax.tree.map(jnp.asarray, {"params": params})
        ours = layer.apply(variables, jnp.asarray(x.transpose(1, 2, 0)[None]))[0]
        ours = pixel_shuffle(jnp.moveaxis(ours, -1, 0))
        expected += params["bias"][:, None, None]
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)

    def test_tensorflow_kernels_stay_as_they_are(self):
        names, arrays = system("nvidia_tf2")
        ours = flat(to_flax(arrays, norm="frozen", eps=1e-5)[0])
        for name in ("fpn/l3/kernel", "box_head/fc6/kernel", "mask_head/mask-conv-l2/kernel"):
            np.testing.assert_array_equal(ours[names[name]], arrays[name])

    @pytest.mark.parametrize("part", ["kernel", "bias"])
    def test_tensorflow_box_deltas_become_x_first(self, part):
        names, arrays = system("nvidia_tf2")
        ours = flat(to_flax(arrays, norm="frozen", eps=1e-5)[0])
        for name in (f"rpn_head/rpn-box/{part}", f"box_head/box-predict/{part}"):
            theirs, mine = arrays[name], ours[names[name]]
            for slot in range(theirs.shape[-1] // 4):
                dy, dx, dh, dw = np.moveaxis(theirs[..., 4 * slot : 4 * slot + 4], -1, 0)
                np.testing.assert_array_equal(
                    mine[..., 4 * slot : 4 * slot + 4], np.stack([dx, dy, dw, dh], axis=-1)
                )

    @pytest.mark.parametrize("source", ["detectron2", "mmdetection"])
    def test_background_comes_first(self, source):
        names, arrays = system(source)
        ours = flat(to_flax(arrays, norm="frozen", eps=1e-5)[0])
        theirs = {path: arrays[name] for name, path in names.items()}
        scores = theirs["box_head/cls_score/bias"]
        np.testing.assert_array_equal(ours["box_head/cls_score/bias"], [scores[-1], *scores[:-1]])
        np.testing.assert_array_equal(
            ours["box_head/cls_score/kernel"][:, 1], theirs["box_head/cls_score/kernel"][0]
        )
        boxes = theirs["box_head/bbox_pred/kernel"]
        np.testing.assert_array_equal(ours["box_head/bbox_pred/kernel"][:, 4:], boxes.T)
        assert not ours["box_head/bbox_pred/kernel"][:, :4].any()
        masks = theirs["mask_head/mask_predictor/bias"]
        np.testing.assert_array_equal(ours["mask_head/mask_predictor/bias"], [0.0, *masks])


class TestNorm:
    def test_frozen_is_folded_by_hand(self):
        _, arrays = system("torchvision")
        for part, value in zip(TORCH, (3.0, 1.0, 4.0, 2.24), strict=True):
            arrays[f"backbone.body.bn1.{part}"] = np.full(2, value, np.float32)
        stem = to_flax(arrays, norm="frozen", eps=0.01)[0]["batch_stats"]["backbone"]["stem_norm"]
        np.testing.assert_allclose(stem["scale"], 2.0, rtol=1e-6)  # 3 / sqrt(2.24 + 0.01)
        np.testing.assert_allclose(stem["bias"], -7.0, rtol=1e-6)  # 1 - 4 * 2

    @pytest.mark.parametrize("norm", ["affine", "batch"])
    def test_statistics_are_kept(self, norm):
        names, arrays = system("torchvision_resnet")
        ours = flat(to_flax(arrays, norm=norm, eps=1e-3)[0])
        for name, path in names.items():
            if "norm" in path:
                np.testing.assert_array_equal(ours[path], arrays[name], err_msg=name)

    @pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-4, 1e-3])
    @pytest.mark.parametrize("norm", ["frozen", "affine"])
    def test_systems_without_an_epsilon(self, norm, eps):
        """maskrcnn-benchmark: w * x / sqrt(var) and so on; whatever epsilon our model adds."""
        names, arrays = system("maskrcnn_benchmark")
        gamma, beta, mean, var = (arrays[f"backbone.body.stem.bn1.{part}"] for part in TORCH)
        ours = flat(to_flax(arrays, norm=norm, eps=eps)[0])
        ours = {leaf: ours.get(f"backbone/stem_norm/{leaf}") for leaf in OURS}
        scale = gamma / np.sqrt(var.astype(np.float64))
        np.testing.assert_allclose(ours["scale"], scale, rtol=1e-6)
        np.testing.assert_allclose(ours["bias"], beta - mean * scale, rtol=1e-5, atol=1e-6)
        if norm == "affine":
            assert not ours["mean"].any()
            np.testing.assert_array_equal(ours["var"] + np.float32(eps), np.float32(1))

    def test_both_files_called_r50_pkl(self):
        """Detectron's scale and shift are taken as they are, detectron2's statistics are folded."""
        names, arrays = system("detectron_msra")
        ours = flat(to_flax(arrays, norm="frozen", eps=0.1)[0])
        np.testing.assert_array_equal(
            ours["backbone/res4_5/norm3/scale"], arrays["res4_5_branch2c_bn_s"]
        )
        np.testing.assert_array_equal(ours["backbone/stem_norm/bias"], arrays["res_conv1_bn_b"])
        names, arrays = system("detectron2_msra")
        ours = flat(to_flax(arrays, norm="frozen", eps=0.1)[0])
        expected = arrays["res_conv1_bn_gamma"] / np.sqrt(arrays["res_conv1_bn_running_var"] + 0.1)
        np.testing.assert_allclose(ours["backbone/stem_norm/scale"], expected, rtol=1e-6)


class TestMistakes:
    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ([], "names of no known system: 0"),
            (["a.b", "c.d"], r"names of no known system: 2 \(a\.b, c\.d\); expected torchvision"),
            (["params/backbone/x", "conv1"], "no known system"),
        ],
    )
    def test_unknown_names_are_listed(self, names, message):
        with pytest.raises(ValueError, match=message):
            identify(names)

    @pytest.mark.parametrize(("source", "names"), SYSTEMS, ids=IDS)
    def test_name_that_does_not_belong_is_listed(self, source, names):
        with pytest.raises(ValueError, match=r"but 1 \(layer9\.extra/kernel\) have no counterpart"):
            identify([*names, "layer9.extra/kernel"])

    def test_names_out_of_range_do_not_belong(self):
        names, _ = system("torchvision_resnet")
        with pytest.raises(ValueError, match=r"1 \(layer5\.0\.conv1\.weight\)"):
            identify([*names, "layer5.0.conv1.weight"])

    def test_torchvisions_second_version_is_not_mistaken_for_the_first(self):
        names, _ = system("torchvision")
        with pytest.raises(ValueError, match=r"1 \(backbone\.fpn\.inner_blocks\.0\.1\.weight\)"):
            identify([*names, "backbone.fpn.inner_blocks.0.1.weight"])

    def test_two_names_of_one_layer(self):
        names, _ = system("torchvision_resnet")
        with pytest.raises(ValueError, match="conv1.weight and backbone.body.conv1.weight are"):
            identify([*names, "backbone.body.conv1.weight"])

    @pytest.mark.parametrize(
        ("source", "unused"),
        [
            ("torchvision_resnet", ["fc.weight", "fc.bias", "bn1.num_batches_tracked"]),
            ("detectron2", ["proposal_generator.anchor_generator.cell_anchors.0", "pixel_mean"]),
            ("detectron_msra", ["fc1000_w", "pred_b", "conv1_b", "res2_0_branch1_b",
                                "res2_0_branch2a_w_momentum"]),
            ("maskrcnn_benchmark", ["rpn.anchor_generator.cell_anchors.4"]),
            ("google_resnet", ["dense/kernel", "global_step", "conv2d_3/kernel/Momentum"]),
            ("nvidia_rn50", ["resnet50/output/dense/bias", "current_loss_scale", "global_step"]),
        ],
    )  # fmt: skip
    def test_what_has_no_place_by_nature_is_left_out(self, source, unused):
        names, arrays = system(source)
        expected = flat(to_flax(arrays, norm="frozen", eps=1e-5)[0])
        more = arrays | {name: np.zeros(3, np.float32) for name in unused}
        assert flat(to_flax(more, norm="frozen", eps=1e-5)[0]).keys() == expected.keys()

    def test_incomplete_normalization_is_named(self):
        _, arrays = system("torchvision_resnet")
        del arrays["layer1.0.bn2.running_var"], arrays["layer1.0.bn2.bias"]
        with pytest.raises(ValueError, match=r"backbone/res2_0/norm2 lacks bias, var"):
            to_flax(arrays, norm="frozen", eps=1e-5)

    def test_group_norm_has_no_counterpart(self):
        with pytest.raises(
            ValueError, match=r"model\.backbone\.norm is 'group', which torchvision's ResNet"
        ):
            to_flax(system("torchvision_resnet")[1], norm="group", eps=1e-5)

    @pytest.mark.parametrize(
        ("source", "name", "rows", "message"),
        [
            ("detectron2", "roi_heads.box_predictor.bbox_pred.bias", 4, "has 8 outputs for 4"),
            ("torchvision", "roi_heads.box_predictor.bbox_pred.bias", 4, "has 4 outputs for 4"),
            ("torchvision", "roi_heads.mask_predictor.mask_fcn_logits.bias", 1, "has 1 outputs"),
        ],
    )
    def test_heads_that_do_not_tell_classes_apart_are_refused(self, source, name, rows, message):
        _, arrays = system(source)
        with pytest.raises(ValueError, match=message):
            to_flax(arrays | {name: np.zeros(rows, np.float32)}, norm="frozen", eps=1e-5)

    def test_box_head_of_another_grid_is_refused(self):
        _, arrays = system("torchvision")
        arrays["roi_heads.box_head.fc6.weight"] = np.zeros((2, 2 * 25), np.float32)
        with pytest.raises(
            ValueError, match="fc6.weight has 50 inputs, expected a multiple of 7 x 7 cells"
        ):
            to_flax(arrays, norm="frozen", eps=1e-5)


class TestBack:
    @pytest.mark.parametrize("norm", ["frozen", "affine", "batch"])
    def test_round_trip_by_torchvision_is_exact(self, norm):
        ours, _ = to_flax(system("torchvision")[1], norm=norm, eps=1e-5)
        theirs = to_torchvision(ours, norm_eps=1e-5)
        assert set(theirs) == set(system("torchvision")[0])
        again, found = to_flax(theirs, norm=norm, eps=1e-5)
        assert found == "torchvision"
        jax.tree.map(np.testing.assert_array_equal, again, ours)

    def test_shapes_are_those_of_torchvision(self):
        lines = shared("torchvision_keys.txt").read_text().splitlines()
        pairs = (line.split("\t") for line in lines if line.startswith(("backbone", "r")))
        shapes = {name: tuple(map(int, shape.strip("(),").split(","))) for name, shape in pairs}
        config = coco_torchvision.get_config()
        config.model.num_classes = 90
        abstract = abstract_variables(build_model(config.model))
        ours = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        theirs = to_torchvision(ours, norm_eps=1e-5)
        assert {name: array.shape for name, array in theirs.items()} == shapes

    def test_frozen_norm_adds_up_to_one(self):
        ours, _ = to_flax(system("torchvision")[1], norm="frozen", eps=1e-5)
        theirs = to_torchvision(ours, norm_eps=1e-5)
        variance = theirs["backbone.body.bn1.running_var"]
        np.testing.assert_array_equal(variance + np.float32(1e-5), np.float32(1))
        assert not theirs["backbone.body.bn1.running_mean"].any()

    def test_another_epsilon_is_converted(self):
        """var + their 1e-5 is our var + 1e-3."""
        _, arrays = system("torchvision")
        ours, _ = to_flax(arrays, norm="affine", eps=1e-3)
        theirs = to_torchvision(ours, norm_eps=1e-3)
        name = "backbone.body.layer3.5.bn3.running_var"
        np.testing.assert_allclose(theirs[name] + 1e-5, arrays[name] + 1e-3, rtol=1e-6)

    @pytest.mark.parametrize("norm", ["frozen", "batch"])
    def test_round_trip_by_our_own_names_is_exact(self, norm):
        ours, _ = to_flax(system("torchvision")[1], norm=norm, eps=1e-5)
        names = to_ours_flat(ours)
        assert "params/mask_head/mask_fcn4/bias" in names
        again, source = to_flax(names, norm=norm, eps=1e-5)
        assert source == "ours"
        jax.tree.map(np.testing.assert_array_equal, again, ours)

    def test_group_norm_and_unknown_layers_are_refused(self):
        norm = {"backbone": {"stem_norm": {"scale": np.ones(2), "bias": np.ones(2)}}}
        with pytest.raises(ValueError, match="model.backbone.norm='group'"):
            to_torchvision({"params": norm, "batch_stats": {}}, norm_eps=1e-5)
        for module in ("fpn", "box_head", "mask_head"):
            norm = {module: {"norm1": {"scale": np.ones(2), "bias": np.ones(2)}}}
            with pytest.raises(ValueError, match=f"model.{module}.norm='group' or 'layer'$"):
                to_torchvision({"params": norm, "batch_stats": {}}, norm_eps=1e-5)
        other = {"backbone": {"stem_conv2": {"kernel": np.ones((1, 1, 2, 2))}}}
        with pytest.raises(ValueError, match="no counterpart of backbone/stem_conv2/kernel"):
            to_torchvision({"params": other, "batch_stats": {}}, norm_eps=1e-5)
