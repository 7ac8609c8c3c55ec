"""Layer names of DINOv2's and DINOv3's vision transformers in transformers, timm and Meta's files.

Rows and templates are as in `sources`, for the names that `joined` returns.
"""

import re
from collections.abc import Mapping

import numpy as np

from mask_rcnn_jax.weights.trunk_names import Rows

# Hugging Face's layers of queries in DINOv3 and DINOv2, which Swin's differ from; keys and values
# have names alike.
_QUERY = re.compile(r"(.*\blayer\.\d+\.attention\.(?:attention\.)?)(?:q_proj|query)\.weight")
_KINDS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
# Gates and what they weigh in one layer, gates first: ViT-g of transformers, Meta and timm.
_PACKED = re.compile(r"(.*\.mlp\.)(weights_in|w12|fc1)\.(weight|bias)")
# Scales of the branches, which MAE's vision transformer of the same names lacks.
META_SIGN, TIMM_SIGN = "blocks.0.ls1.gamma", "blocks.0.gamma_1"
UNUSED = r".*mask_token|rope_embed\.periods|(local_)?cls_norm\..*|head\..*|classifier\..*"


def joined(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Return a file's arrays with queries, keys and values in one layer and gates in another, as in
    our trunk; those of other models as they are.

    Keys' biases are left out, see `models.dino.Attention`; biases that a file leaves out are 0.
    Raises ValueError for a bias of keys that matters, because they are rotated.
    """
    if any(map(_QUERY.fullmatch, arrays)):
        return _split_gates(_join_projections(arrays))
    if META_SIGN in arrays or TIMM_SIGN in arrays:
        return _split_gates(_split_biases(arrays))
    return arrays


def _split_gates(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = dict(arrays)
    for name, array in arrays.items():
        if (match := _PACKED.fullmatch(name)) is None:
            continue
        prefix, layer, leaf = match.groups()
        after = arrays.get(f"{prefix}fc2.weight", array)
        if layer != "fc1" or len(array) == 2 * after.shape[-1]:  # fc1 is also that of a GELU
            gate, inner = np.array_split(found.pop(name), 2)
            found |= {f"{prefix}fc1_g.{leaf}": gate, f"{prefix}fc1_x.{leaf}": inner}
    return found


def _join_projections(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For Hugging Face's names."""
    found, rotates = dict(arrays), not any(n.endswith("position_embeddings") for n in arrays)
    for prefix in [match[1] for match in map(_QUERY.fullmatch, arrays) if match]:
        kinds = next(kinds for kinds in _KINDS if f"{prefix}{kinds[0]}.weight" in found)
        if absent := [kind for kind in kinds if f"{prefix}{kind}.weight" not in found]:
            raise ValueError(f"{prefix}{absent[0]}.weight is not in the file")
        weights = [found.pop(f"{prefix}{kind}.weight") for kind in kinds]
        found[f"{prefix}qkv.weight"] = np.concatenate(weights)
        biases = [found.pop(f"{prefix}{kind}.bias", np.zeros(len(w), np.float32))
                  for kind, w in zip(kinds, weights, strict=True)]  # fmt: skip
        found[f"{prefix}q_bias"], key, found[f"{prefix}v_bias"] = biases
        _check_key_bias(f"{prefix}{kinds[1]}.bias", key, rotates)
    return found


def _split_biases(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For the names of timm and Meta, whose weights are in one layer already."""
    found = dict(arrays)
    for name, weight in arrays.items():
        if not name.endswith(".attn.qkv.weight"):
            continue
        prefix = name.removesuffix("qkv.weight")
        mask = found.pop(f"{prefix}qkv.bias_mask", None)  # 0 for keys
        bias = found.pop(f"{prefix}qkv.bias", np.zeros(len(weight), np.float32))
        query, key, value = np.split(bias, 3)
        _check_key_bias(f"{prefix}qkv.bias", key, mask is None and "pos_embed" not in arrays)
        found.setdefault(f"{prefix}q_bias", query)
        found.setdefault(f"{prefix}v_bias", value)
    table = found.get("pos_embed")
    if table is not None and round((table.shape[1] - 1) ** 0.5) ** 2 != table.shape[1] - 1:
        # timm's models with registers have the class token's position in the token.
        found["pos_embed"] = np.concatenate([np.zeros_like(table[:, :1]), table], axis=1)
    return found


def _check_key_bias(name: str, bias: np.ndarray, rotates: bool) -> None:
    if rotates and np.any(bias):
        raise ValueError(f"{name} is not 0 for keys, and DINOv3's published models have none there")


def huggingface_dinov3(prefix: str) -> tuple[Rows, Rows]:
    """Return rows and tables for transformers' DINOv3ViTModel."""
    theirs, ours = prefix + "layer.{block}.", "backbone/block{block}/"
    layers = [("mlp.up_proj", "fc1"), ("mlp.gate_proj", "gate"), ("mlp.down_proj", "fc2")]
    layers += [("attention.qkv", "attn/qkv"), ("attention.o_proj", "attn/proj"), *_NORMS]
    tables = [("attention.q_bias", "attn/q_bias"), ("attention.v_bias", "attn/v_bias"), *_GAMMAS]
    return (
        (
            ("embeddings.patch_embeddings", "backbone/patch_embed"),
            ("norm", "backbone/norm"),
            *((theirs + name, ours + path) for name, path in layers),
        ),
        (*_EMBEDDINGS, *((theirs + name, ours + path) for name, path in tables)),
    )


def huggingface_dinov2(prefix: str) -> tuple[Rows, Rows]:
    """Return rows and tables for transformers' Dinov2Model and Dinov2WithRegistersModel, of files
    and, with other names in the attention, of transformers 5's models."""
    theirs, ours = prefix + "encoder.layer.{block}.", "backbone/block{block}/"
    layers, tables = [("mlp.fc1", "fc1"), ("mlp.fc2", "fc2"), *_NORMS], [*_GAMMAS]
    layers += [("mlp.fc1_x", "fc1"), ("mlp.fc1_g", "gate"), ("mlp.weights_out", "fc2")]
    for inner, output in (("attention.attention.", "output.dense"), ("attention.", "o_proj")):
        layers += [(f"{inner}qkv", "attn/qkv"), (f"attention.{output}", "attn/proj")]
        tables += [(f"{inner}{letter}_bias", f"attn/{letter}_bias") for letter in "qv"]
    embeddings = [(prefix + name, path) for name, path in _EMBEDDINGS]
    return (
        (
            (f"{prefix}embeddings.patch_embeddings.projection", "backbone/patch_embed"),
            (f"{prefix}layernorm", "backbone/norm"),
            *((theirs + name, ours + path) for name, path in layers),
        ),
        (
            *embeddings,
            (f"{prefix}embeddings.position_embeddings", "backbone/pos_embed"),
            *((theirs + name, ours + path) for name, path in tables),
        ),
    )


def timm_and_meta(registers: tuple[str, ...], has_table: bool) -> tuple[Rows, Rows]:
    """Return rows and tables for the names of timm and of Meta's own files.

    registers: the names that one of the generations has for them.
    """
    theirs, ours = "blocks.{block}.", "backbone/block{block}/"
    layers = [("attn.qkv", "attn/qkv"), ("attn.proj", "attn/proj"), *_NORMS]
    layers += [("mlp.fc1", "fc1"), ("mlp.fc2", "fc2")]
    layers += [("mlp.fc1_x", "fc1"), ("mlp.fc1_g", "gate")]  # timm's, gated
    layers += [("mlp.w1", "gate"), ("mlp.w2", "fc1"), ("mlp.w3", "fc2")]  # Meta's
    tables = [(f"attn.{letter}_bias", f"attn/{letter}_bias") for letter in "qv"]
    for i in (1, 2):
        tables += [(f"ls{i}.gamma", f"gamma{i}"), (f"gamma_{i}", f"gamma{i}")]
    return (
        (
            ("patch_embed.proj", "backbone/patch_embed"),
            ("norm", "backbone/norm"),
            *((theirs + name, ours + path) for name, path in layers),
        ),
        (
            ("cls_token", "backbone/cls_token"),
            *((name, "backbone/register_tokens") for name in registers),
            *((("pos_embed", "backbone/pos_embed"),) if has_table else ()),
            *((theirs + name, ours + path) for name, path in tables),
        ),
    )


_NORMS = tuple((f"norm{i}", f"norm{i}") for i in (1, 2))
_GAMMAS = tuple((f"layer_scale{i}.lambda1", f"gamma{i}") for i in (1, 2))
_EMBEDDINGS = tuple(
    (f"embeddings.{name}", f"backbone/{name}") for name in ("cls_token", "register_tokens")
)
