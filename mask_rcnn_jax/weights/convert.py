"""Convert arrays named and laid out by any known system to our variables, and to torchvision's.

The names themselves are in `sources`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.weights.dino_names import joined
from mask_rcnn_jax.weights.layout import (
    WITHOUT_STATISTICS,
    as_box_head,
    check_classes,
    check_groups,
    check_norm,
    check_roi_side,
    convert_norm,
    fold_patches,
    is_merging,
    join_attention,
    to_our_layout,
    to_torch_layout,
    unit_variance,
)
from mask_rcnn_jax.weights.sources import RANGES, SOURCES, Source

OURS = "ours"
COLLECTIONS = ("params", "batch_stats")
LAYER_LEAVES = ("kernel", "bias")  # the others, outside norms, have one layout everywhere
TORCHVISION_EPS = 1e-5  # batch norm epsilon of torchvision's models
NORM_EPS = 1e-5  # of our batch norms outside the backbone
NORMED_PARTS = ("backbone", "fpn", "box_head", "mask_head")
ATTRIBUTE = "backbone."  # of models that have a trunk
LISTED = 4  # names listed by an error message
# Parts of names in torch's detectors: with the last ResNet stage in the heads, of the region
# proposal network, of a feature pyramid.
C4_SIGNS = ("roi_heads.res5.", "feature_extractor.head.layer4.", "roi_head.shared_head.layer4.")
RPN_SIGNS = ("proposal_generator.rpn_head.", "rpn.head.", "rpn_head.")
FPN_SIGNS = ("fpn", "neck.", "simfp_")


def to_flax(
    arrays: Mapping[str, np.ndarray],
    *,
    norm: str | None,
    eps: float,
    model: Mapping[str, Any] | None = None,
) -> tuple[dict, str]:
    """Convert arrays under any known system's names to our variables.

    Args:
        arrays: float32 arrays by name. A backbone's classifier and training state are ignored.
        norm: the backbone's norm. "frozen" folds each batch normalization into a scale and a bias;
            "affine", "batch" and the like keep its statistics. None: as in the file.
        eps: the backbone's norm epsilon. Weights of systems without an epsilon are adjusted so that
            the layer computes the same.
        model: config section of the model, whose norms in other parts, groups of channels and kind
            of box deltas the file must fit. None: norms as in the file, the others as in a ResNet
            with two fully connected layers.

    Returns {"params": ..., "batch_stats": ...} of float32 numpy arrays, either the backbone alone
    or all modules; and the source, see `identify`. Classes keep their order, background first: if a
    system has no background slot for boxes and masks, zeros fill it.
    """
    arrays = joined(_of_trunk(arrays))
    name, paths = identify(list(arrays))
    if name == OURS:
        return {"params": {}, "batch_stats": {}, **unflatten_dict(arrays, sep="/")}, name
    source = SOURCES[name]
    sections = {part: (model or {}).get(part, {}) for part in NORMED_PARTS}
    class_agnostic = sections["box_head"].get("class_agnostic", False)
    params, stats, parts_of = {}, {}, {}
    for theirs, path in paths.items():
        module, leaf = path.rsplit("/", 1)
        array = np.asarray(arrays[theirs], np.float32)
        if source.unfolds and is_merging(module):
            array = fold_patches(array)
        if _is_norm(module):
            parts_of.setdefault(module, {})[leaf] = array
        else:
            if source.layout == "torch":
                check_groups(path, array, sections["backbone"].get("groups", 1))
            if leaf in LAYER_LEAVES:
                kind = as_box_head(module)
                array = to_our_layout(kind, theirs, array, source, class_agnostic)
            elif leaf in ("gamma", "logit_scale"):
                array = array.reshape(-1)  # torchvision's are [C, 1, 1]
            params[path] = array
    join_attention(params)
    wanted = {part: section.get("norm") for part, section in sections.items()} | {"backbone": norm}
    wanted["cascade"] = wanted["box_head"]
    for module, parts in parts_of.items():
        part = module.partition("/")[0]
        kind = check_norm(module, parts, wanted.get(part), source)
        part_eps = eps if part == "backbone" else NORM_EPS
        converted = convert_norm(module, parts, kind, part_eps, source.has_eps)
        for collection, leaves in zip((params, stats), converted, strict=True):
            collection |= {f"{module}/{leaf}": value for leaf, value in leaves.items()}
    check_classes(params, class_agnostic)
    params, stats = (unflatten_dict(flat, sep="/") for flat in (params, stats))
    return {"params": params, "batch_stats": stats}, name


def _of_trunk(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Return the arrays of a trunk that was saved as a model's attribute under its own names."""
    signs = {sign for source in SOURCES.values() for sign in source.signs}
    if signs & arrays.keys() or not all(name.startswith(ATTRIBUTE) for name in arrays):
        return arrays
    return {name.removeprefix(ATTRIBUTE): array for name, array in arrays.items()}


def num_classes_in(variables: Mapping) -> int | None:
    """Return our variables' foreground class count K; None without a box head."""
    head = variables["params"].get("box_head", {}).get("cls_score")
    return None if head is None else head["bias"].shape[0] - 1


def to_ours_flat(variables: Mapping) -> dict[str, np.ndarray]:
    """Flatten to names like "params/backbone/stem_conv/kernel", which `to_flax` reads back."""
    flat = flatten_dict({name: variables[name] for name in COLLECTIONS}, sep="/")
    return {name: np.asarray(value, order="C") for name, value in flat.items()}


def to_torchvision(variables: Mapping, *, norm_eps: float) -> dict[str, np.ndarray]:
    """Convert our variables to a state dict of torchvision's `MaskRCNN` that computes the same.

    A frozen norm becomes a batch norm with mean 0 whose variance and epsilon sum to exactly 1.
    norm_eps: our backbone's batch norm epsilon. Torchvision's is 1e-5; variances absorb the
    difference, so a round trip is exact only if they are equal.

    Raises ValueError for arrays without a counterpart in torchvision.
    """
    is_v2 = any("fpn_lateral2_norm" in variables[name].get("fpn", {}) for name in COLLECTIONS)
    return _to_torch(variables, "torchvision_v2" if is_v2 else "torchvision", norm_eps)


def to_detectron2(variables: Mapping, *, norm_eps: float) -> dict[str, np.ndarray]:
    """Convert our variables to a state dict of detectron2's `GeneralizedRCNN`.

    As `to_torchvision`; group norm has a counterpart. What background has of boxes and masks of its
    own, which nothing reads, is left out.
    """
    arrays = _to_torch(variables, _detectron2_source(variables["params"]), norm_eps)
    names = {name: name for name in arrays}
    if "conv2" in variables["params"]["rpn_head"]:
        one, several = (f"proposal_generator.rpn_head.conv{i}." for i in ("", ".conv0"))
        names |= {one + leaf: several + leaf for leaf in ("weight", "bias")}
    if "cascade" in variables["params"]:
        numbered = r"(roi_heads\.box_(?:head|predictor)\.)(?=[a-z])"
        names = {name: re.sub(numbered, r"\g<1>0.", new) for name, new in names.items()}
    return {names[name]: array for name, array in arrays.items()}


def _detectron2_source(params: Mapping) -> str:
    """Return the key in `SOURCES` of detectron2's detector with our backbone."""
    if "pos_embed" in params["backbone"]:
        return "detectron2_vitdet"
    return "detectron2_regnet" if "a" in params["backbone"].get("res2_0", {}) else "detectron2"


def _to_torch(variables: Mapping, system: str, norm_eps: float) -> dict[str, np.ndarray]:
    source = SOURCES[system]
    params, stats = (flatten_dict(dict(variables[name]), sep="/") for name in COLLECTIONS)
    check_roi_side(params, source)
    to_name = partial(_to_name, source)
    result = {}
    for path, value in (params | stats).items():
        module, leaf = path.rsplit("/", 1)
        value = np.asarray(value, np.float32)
        if not _is_norm(module):
            if leaf in LAYER_LEAVES:
                value = to_torch_layout(as_box_head(module), value, source)
        elif leaf == "scale" and path in params and f"{module}/var" not in stats:
            if not system.startswith("detectron2"):
                part = as_box_head(module).partition("/")[0]
                norms = " or ".join(repr(norm) for norm in WITHOUT_STATISTICS)
                raise ValueError(f"torchvision has no counterpart of model.{part}.norm={norms}")
        elif leaf == "scale" and f"{module}/var" not in stats:
            result[to_name(f"{module}/mean")] = np.zeros_like(value)
            result[to_name(f"{module}/var")] = unit_variance(value, TORCHVISION_EPS)
        elif leaf == "var" and norm_eps != TORCHVISION_EPS and module.startswith("backbone/"):
            value = value + np.float32(norm_eps - TORCHVISION_EPS)
        result[to_name(path)] = np.ascontiguousarray(value)
    return result


def identify(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Identify the system that uses these names, and map names to our paths.

    Returns a key of `SOURCES` or "ours", and {name: path} without unused names. Raises ValueError
    listing the names if no system fits or some names do not belong to it.
    """
    if names and all(name.split("/")[0] in COLLECTIONS for name in names):
        return OURS, {}
    present = set(names)
    fits, misfits = {}, {}
    for key, source in SOURCES.items():
        if present.isdisjoint(source.signs):
            continue
        paths, unknown = _paths(names, source)
        if unknown:
            misfits[key] = unknown
        else:
            fits[key] = paths
    if len(fits) == 1:
        return next(iter(fits.items()))
    if fits:
        raise ValueError(f"these names fit several systems: {', '.join(sorted(fits))}")
    _check_architecture(names)
    if misfits:
        key = min(misfits, key=lambda key: len(misfits[key]))
        raise ValueError(
            f"names like those of {SOURCES[key].title}, "
            f"but {listing(misfits[key])} have no counterpart in our model"
        )
    known = ", ".join(source.title for source in SOURCES.values())
    raise ValueError(f"names of no known system: {listing(sorted(names))}; expected {known}")


def _check_architecture(names: Sequence[str]) -> None:
    """Raise ValueError, naming it, for a detector of another architecture than ours."""
    heads = [name for name in names if any(sign in name for sign in C4_SIGNS)]
    if heads:
        kind = f"a C4 backbone, whose last stage is in the heads ({heads[0]})"
    elif any(n.startswith(RPN_SIGNS) for n in names) and not any(
        s in n for n in names for s in FPN_SIGNS
    ):
        kind = "a backbone without a feature pyramid, such as DC5"
    else:
        return
    raise ValueError(f"the weights of a detector with {kind}; expected a feature pyramid (FPN)")


def _paths(names: Sequence[str], source: Source) -> tuple[dict[str, str], list[str]]:
    """Return our path by name, and the names unknown to `source`."""
    paths, unknown, taken = {}, [], {}
    for name in names:
        path = _to_path(name, source)
        if path is None:
            if not re.fullmatch(source.unused, name):
                unknown.append(name)
        elif path in taken:
            raise ValueError(f"{taken[path]} and {name} are both the layer {path}")
        else:
            paths[name] = path
            taken[path] = name
    return paths, unknown


def _to_path(name: str, source: Source) -> str | None:
    """Map `layer1.0.bn2.running_var` to `backbone/res2_0/norm2/var`; None if no row fits."""
    paths = (_translate(name, theirs, ours) for theirs, ours in _templates(source))
    return next(filter(None, paths), None)


def _to_name(source: Source, path: str) -> str:
    """Invert `_to_path`."""
    names = (_translate(path, ours, theirs) for theirs, ours in _templates(source))
    name = next(filter(None, names), None)
    if name is None:
        raise ValueError(f"{source.title} has no counterpart of {path}")
    return name


def _templates(source: Source) -> Iterator[tuple[str, str]]:
    """Yield array name templates, theirs and ours."""
    for theirs, ours in source.rows:
        parts = source.norm_parts if _is_norm(ours) else source.parts
        for part, leaf in parts.items():
            yield theirs + part, f"{ours}/{leaf}"
    yield from source.tables


def _translate(text: str, template: str, target: str) -> str | None:
    """Rewrite `text` from `template` to `target` form; None if it does not match."""
    match = _pattern(template).fullmatch(text)
    if match is None:
        return None
    values = {}
    for number, offset in _numbers(template):
        values[number] = int(match[number]) - offset
        low, high = RANGES[number]
        if not low <= values[number] <= high:
            return None
    for number, offset in _numbers(target):
        target = re.sub(rf"\{{{number}[^}}]*\}}", str(values[number] + offset), target)
    return target


@cache
def _pattern(template: str) -> re.Pattern:
    """Compile a template of `sources` to a regular expression."""
    pattern = ""
    for piece in re.split(r"(\{[^}]*\}|\[|\])", template):
        if piece.startswith("{"):
            pattern += rf"(?P<{_numbers(piece)[0][0]}>\d+)"
        else:
            pattern += {"[": "(?:", "]": ")?"}.get(piece, re.escape(piece))
    return re.compile(pattern)


@cache
def _numbers(template: str) -> list[tuple[str, int]]:
    """Return each number in a template as (name, offset): "{level-2}" is ("level", -2)."""
    return [(name, int(offset or 0)) for name, offset in re.findall(r"{(\w+)([+-]\d+)?}", template)]


def _is_norm(module: str) -> bool:
    return "norm" in module.rsplit("/", 1)[-1]


def listing(names: Iterable[str]) -> str:
    """Format the name count and the first few names."""
    names = list(names)
    shown = ", ".join(names[:LISTED] + ["..."] * (len(names) > LISTED))
    return f"{len(names)} ({shown})" if names else "0"
