"""Pretrained weights: from a file's arrays to the variables of our model.

Three steps, each of which can be read and tested alone: read the file, rename and transpose its
arrays into our tree, and merge that tree into freshly initialised variables. Nothing is dropped
or left out silently: what does not fit ends in an error that lists both sides.
"""

import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

# torchvision's name of a backbone inside a whole detector.
_DETECTOR_PREFIX = "backbone.body."
_BLOCK = re.compile(r"layer([1-4])\.(\d+)\.(conv[123]|bn[123]|downsample\.[01])\.(\w+)")
_STEM = re.compile(r"(conv1|bn1)\.(\w+)")
_BATCH_NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
# The arrays whose shape depends on the number of classes.
CLASS_DEPENDENT = ("box_head/cls_score", "box_head/bbox_pred", "mask_head/mask_predictor")
# How many names of one kind an error message lists.
_LISTED = 4


def load_safetensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads a .safetensors file; half precision becomes float32."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from error
    return {name: _widen(tensor) for name, tensor in tensors.items()}


def torchvision_resnet_to_flax(
    tensors: Mapping[str, np.ndarray], *, eps: float = 1e-5, norm: str = "frozen"
) -> dict:
    """Turns a ResNet under torchvision's names into our backbone's variables.

    Args:
        tensors: `conv1.weight`, `layer1.0.bn1.running_var`, ... , all with or all without the
            prefix `backbone.body.`. The classifier `fc` and `num_batches_tracked` are not used.
        eps: what the batch normalisation adds to the variance.
        norm: "frozen" folds each batch normalisation into a scale and a bias; "batch" keeps it
            trainable.

    Returns:
        {"params": {"backbone": ...}, "batch_stats": {"backbone": ...}} of numpy arrays, with
        convolution kernels as [height, width, in, out].
    """
    if norm not in ("frozen", "batch"):
        raise ValueError(
            f"model.norm={norm!r} has no counterpart in a torchvision ResNet, "
            "expected 'frozen' or 'batch'"
        )
    kernels, norms, unknown = {}, {}, []
    for name, tensor in _backbone_tensors(tensors).items():
        target = _rename(name)
        if target is None:
            unknown.append(name)
        elif target[-1] == "kernel":
            kernels[target] = np.ascontiguousarray(tensor.transpose(2, 3, 1, 0))
        else:
            norms.setdefault(target[:-1], {})[target[-1]] = tensor
    if unknown or not kernels:
        raise ValueError(
            "not a torchvision ResNet: "
            + (f"unexpected {_some(unknown)}" if unknown else "no convolution in it")
        )
    params, stats = dict(kernels), {}
    for path, parts in norms.items():
        lacking = [part for part in _BATCH_NORM_PARTS if part not in parts]
        if lacking:
            raise ValueError(f"normalisation {'/'.join(path)} lacks {', '.join(lacking)}")
        norm_params, norm_stats = _convert_norm(parts, eps, norm)
        params |= {(*path, key): value for key, value in norm_params.items()}
        stats |= {(*path, key): value for key, value in norm_stats.items()}
    return {"params": unflatten_dict(params), "batch_stats": unflatten_dict(stats)}


def merge_into(
    variables: Mapping,
    loaded: Mapping,
    *,
    reinit: Sequence[str] = CLASS_DEPENDENT,
    source: str = "the weights",
) -> tuple[dict, list[str]]:
    """Puts loaded arrays in the place of freshly initialised ones.

    Args:
        variables: the model's {"params": ..., "batch_stats": ...}, initialised.
        loaded: the same tree or a part of it. Each module at the top level (backbone, fpn, ...)
            must be there as a whole or not at all.
        reinit: prefixes of the arrays whose initial values stay where their shape differs.
        source: the file, for messages.

    Returns:
        The merged variables, and lines that say what was taken and what was not.
    """
    ours = flatten_dict(dict(variables))
    theirs = flatten_dict(dict(loaded))
    modules = {path[1] for path in theirs}
    differing = [p for p in theirs if p in ours and np.shape(ours[p]) != np.shape(theirs[p])]
    reinitialised = [path for path in differing if _has_prefix(path, reinit)]
    misshapen = [path for path in differing if path not in reinitialised]
    missing = [path for path in ours if path[1] in modules and path not in theirs]
    unexpected = [path for path in theirs if path not in ours]
    if missing or unexpected or misshapen:
        shapes = [f"{_text(p)} {_versus(theirs[p], ours[p])}" for p in misshapen]
        raise ValueError(
            f"{source}: does not fit the model: "
            f"missing {_some(map(_text, missing))}; "
            f"unexpected {_some(map(_text, unexpected))}; "
            f"misshapen {_some(shapes)}"
        )
    taken = [path for path in theirs if path not in reinitialised]
    merged = {**ours, **{p: np.asarray(theirs[p], dtype=ours[p].dtype) for p in taken}}
    untouched = sorted({path[1] for path in ours} - modules)
    report = [f"{source}: {len(taken)} arrays taken for {', '.join(sorted(modules))}"]
    report += [f"{module}: not in the file, initialised" for module in untouched]
    report += [
        f"{_text(path)}: {_versus(theirs[path], ours[path])}, initialised" for path in reinitialised
    ]
    return {"batch_stats": {}, **unflatten_dict(merged)}, report


def _backbone_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of the backbone, without prefix; the classifier and the counters left out."""
    kept = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(_DETECTOR_PREFIX)
        if not name.startswith("fc.") and not name.endswith(".num_batches_tracked"):
            kept[name] = tensor
    return kept


def _rename(name: str) -> tuple[str, ...] | None:
    """Our path of a torchvision name; a normalisation keeps torchvision's last part. None: unknown.

    layer1.0.conv2.weight -> (backbone, res2_0, conv2, kernel)
    layer1.0.downsample.1.running_var -> (backbone, res2_0, shortcut_norm, running_var)
    """
    if match := _STEM.fullmatch(name):
        layer, part = match.groups()
        modules = ("backbone",)
        module = {"conv1": "stem_conv", "bn1": "stem_norm"}[layer]
    elif match := _BLOCK.fullmatch(name):
        stage, block, layer, part = match.groups()
        modules = ("backbone", f"res{int(stage) + 1}_{block}")
        module = {"downsample.0": "shortcut", "downsample.1": "shortcut_norm"}.get(layer, layer)
        module = module.replace("bn", "norm")
    else:
        return None
    if "norm" in module:
        return (*modules, module, part) if part in _BATCH_NORM_PARTS else None
    return (*modules, module, "kernel") if part == "weight" else None


def _convert_norm(parts: Mapping[str, np.ndarray], eps: float, norm: str) -> tuple[dict, dict]:
    """The params and the batch_stats of one batch normalisation, each leaf [C] float32."""
    gamma, beta, mean, var = (np.asarray(parts[p], np.float32) for p in _BATCH_NORM_PARTS)
    if norm == "batch":
        return {"scale": gamma, "bias": beta}, {"mean": mean, "var": var}
    scale = gamma / np.sqrt(var + np.float32(eps))
    return {}, {"scale": scale, "bias": beta - mean * scale}


def _widen(tensor: np.ndarray) -> np.ndarray:
    """float16 and bfloat16 as float32, anything else as it is."""
    half = tensor.dtype.name in ("float16", "bfloat16")
    return tensor.astype(np.float32) if half else tensor


def _has_prefix(path: tuple[str, ...], prefixes: Sequence[str]) -> bool:
    """Whether a path, its collection aside, lies under one of the prefixes."""
    name = "/".join(path[1:])
    return any(name == prefix or name.startswith(prefix + "/") for prefix in prefixes)


def _text(path: tuple[str, ...]) -> str:
    return "/".join(path)


def _versus(theirs: np.ndarray, ours: np.ndarray) -> str:
    return f"{np.shape(theirs)} in the file, {np.shape(ours)} in the model"


def _some(names) -> str:
    """A count and the first few names."""
    names = list(names)
    if not names:
        return "0"
    shown = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f"{len(names)} ({shown})"
