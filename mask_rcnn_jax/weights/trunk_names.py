"""Backbones' layer names in the systems whose weights can be read, next to ours.

Rows and templates are as in `sources`.
"""

Rows = tuple[tuple[str, str], ...]


def torch_resnet(prefix: str, stem: str = "") -> Rows:
    """Return rows for torchvision's ResNet, whose names others adopted."""
    block = prefix + "layer{stage-1}.{block}."
    return (
        (f"{prefix}{stem}conv1", "backbone/stem_conv"),
        (f"{prefix}{stem}bn1", "backbone/stem_norm"),
        (block + "conv{conv}", "backbone/res{stage}_{block}/conv{conv}"),
        (block + "bn{conv}", "backbone/res{stage}_{block}/norm{conv}"),
        (block + "downsample.0", "backbone/res{stage}_{block}/shortcut"),
        (block + "downsample.1", "backbone/res{stage}_{block}/shortcut_norm"),
    )


def detectron2_resnet(prefix: str) -> Rows:
    """Return rows for detectron2's ResNet."""
    block = prefix + "res{stage}.{block}."
    return (
        (prefix + "stem.conv1", "backbone/stem_conv"),
        (prefix + "stem.conv1.norm", "backbone/stem_norm"),
        (block + "conv{conv}", "backbone/res{stage}_{block}/conv{conv}"),
        (block + "conv{conv}.norm", "backbone/res{stage}_{block}/norm{conv}"),
        (block + "shortcut", "backbone/res{stage}_{block}/shortcut"),
        (block + "shortcut.norm", "backbone/res{stage}_{block}/shortcut_norm"),
    )


def regnet(prefix: str) -> Rows:
    """Return rows for detectron2's RegNet and its paper's."""
    block, ours = prefix + "s{stage-1}.b{block+1}.", "backbone/res{stage}_{block}/"
    rows = [(f"f.{layer}", layer) for layer in ("a", "b", "c")]
    rows += [(f"f.{layer}_bn", f"{layer}_norm") for layer in ("a", "b", "c")]
    rows += [("f.se.f_ex.0", "se_fc1"), ("f.se.f_ex.2", "se_fc2")]
    rows += [("proj", "shortcut"), ("bn", "shortcut_norm")]
    return (
        (prefix + "stem.conv", "backbone/stem_conv"),
        (prefix + "stem.bn", "backbone/stem_norm"),
        *((block + theirs, ours + path) for theirs, path in rows),
    )


def torchvision_regnet() -> Rows:
    """Return rows for torchvision's RegNet."""
    rows = [("stem.0", "backbone/stem_conv"), ("stem.1", "backbone/stem_norm")]
    layers = [(f"f.{layer}", layer) for layer in ("a", "b", "c")] + [("proj", "shortcut")]
    for stage in (2, 3, 4, 5):
        theirs = f"trunk_output.block{stage - 1}.block{stage - 1}-{{block}}."
        ours = f"backbone/res{stage}_{{block}}/"
        for name, path in layers:
            rows.append((f"{theirs}{name}.0", ours + path))
            rows.append((f"{theirs}{name}.1", f"{ours}{path}_norm"))
        rows += [(f"{theirs}f.se.fc{i}", f"{ours}se_fc{i}") for i in (1, 2)]
    return tuple(rows)


def vit(prefix: str) -> tuple[Rows, Rows]:
    """Return rows and tables for MAE's vision transformer, whose names others adopted."""
    theirs, ours = prefix + "blocks.{block}.", "backbone/block{block}/"
    layers = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    rows = [(theirs + name, ours + name.replace("mlp.", "").replace(".", "/")) for name in layers]
    tables = [(f"{theirs}attn.{name}", f"{ours}attn/{name}") for name in ("rel_pos_h", "rel_pos_w")]
    return (
        ((prefix + "patch_embed.proj", "backbone/patch_embed"), *rows),
        ((prefix + "pos_embed", "backbone/pos_embed"), *tables),
    )


def convnext(prefix: str) -> tuple[Rows, Rows]:
    """Return rows and tables for the paper's ConvNeXt and mmpretrain's."""
    down = prefix + "downsample_layers.{stage-2}."
    theirs, ours = prefix + "stages.{stage-2}.{block}.", "backbone/res{stage}_{block}/"
    layers = [("norm", "norm"), ("dwconv", "dwconv"), ("pwconv1", "fc1"), ("pwconv2", "fc2")]
    layers += [(f"pointwise_conv{i}", f"fc{i}") for i in (1, 2)]  # mmpretrain's
    layers.append(("depthwise_conv", "dwconv"))
    return (
        (
            (f"{prefix}downsample_layers.0.0", "backbone/stem_conv"),
            (f"{prefix}downsample_layers.0.1", "backbone/stem_norm"),
            (down + "0", "backbone/down{stage}_norm"),
            (down + "1", "backbone/down{stage}_conv"),
            (prefix + "norm{stage-2}", "backbone/output{stage}_norm"),
            (prefix + "norms.{stage-2}", "backbone/output{stage}_norm"),  # Meta's DINOv3
            *((theirs + name, ours + path) for name, path in layers),
        ),
        ((theirs + "gamma", ours + "gamma"),),
    )


def huggingface_convnext(prefix: str) -> tuple[Rows, Rows]:
    """Return rows and tables for the DINOv3 ConvNeXt of Hugging Face's transformers."""
    down = prefix + "stages.{stage-2}.downsample_layers."
    theirs, ours = prefix + "stages.{stage-2}.layers.{block}.", "backbone/res{stage}_{block}/"
    layers = [("depthwise_conv", "dwconv"), ("layer_norm", "norm")]
    layers += (("pointwise_conv1", "fc1"), ("pointwise_conv2", "fc2"))
    return (
        (
            (f"{prefix}stages.0.downsample_layers.0", "backbone/stem_conv"),
            (f"{prefix}stages.0.downsample_layers.1", "backbone/stem_norm"),
            (down + "0", "backbone/down{stage}_norm"),
            (down + "1", "backbone/down{stage}_conv"),
            ("layer_norm", "backbone/output5_norm"),
            *((theirs + name, ours + path) for name, path in layers),
        ),
        ((theirs + "gamma", ours + "gamma"),),
    )


def timm_convnext() -> tuple[Rows, Rows]:
    """Return rows and tables for timm's ConvNeXt."""
    theirs, ours = "stages.{stage-2}.blocks.{block}.", "backbone/res{stage}_{block}/"
    layers = (("conv_dw", "dwconv"), ("norm", "norm"), ("mlp.fc1", "fc1"), ("mlp.fc2", "fc2"))
    return (
        (
            ("stem.0", "backbone/stem_conv"),
            ("stem.1", "backbone/stem_norm"),
            ("stages.{stage-2}.downsample.0", "backbone/down{stage}_norm"),
            ("stages.{stage-2}.downsample.1", "backbone/down{stage}_conv"),
            ("head.norm", "backbone/output5_norm"),
            *((theirs + name, ours + path) for name, path in layers),
        ),
        ((theirs + "gamma", ours + "gamma"),),
    )


def torchvision_convnext() -> tuple[Rows, Rows]:
    """Return rows and tables for torchvision's ConvNeXt."""
    rows = [("features.0.0", "backbone/stem_conv"), ("features.0.1", "backbone/stem_norm")]
    tables = []
    layers = [("block.0", "dwconv"), ("block.2", "norm"), ("block.3", "fc1"), ("block.5", "fc2")]
    for stage, number in zip((2, 3, 4, 5), (1, 3, 5, 7), strict=True):
        if stage > 2:
            rows.append((f"features.{number - 1}.0", f"backbone/down{stage}_norm"))
            rows.append((f"features.{number - 1}.1", f"backbone/down{stage}_conv"))
        theirs, ours = f"features.{number}.{{block}}.", f"backbone/res{stage}_{{block}}/"
        rows += [(theirs + name, ours + path) for name, path in layers]
        tables.append((theirs + "layer_scale", ours + "gamma"))
    return tuple(rows), tuple(tables)


def timm_mobilenetv4() -> Rows:
    """Return rows for timm's MobileNetV4 of convolutions."""
    theirs, ours = "blocks.{stage-2}.{block}.", "backbone/res{stage}_{block}/"
    rows = [("conv_stem", "backbone/stem_conv"), ("bn1", "backbone/stem_norm")]
    layers = [("conv", "conv"), ("bn1", "norm")]
    layers += [("conv_exp", "conv_exp"), ("conv_pwl", "conv_pwl"), ("bn2", "conv_pwl_norm")]
    for name in ("dw_start", "pw_exp", "dw_mid", "pw_proj"):
        layers += [(f"{name}.conv", name), (f"{name}.bn", f"{name}_norm")]
    return (*rows, *((theirs + name, ours + path) for name, path in layers))


def swin(prefix: str, merge: str = "{stage-3}") -> tuple[Rows, Rows]:
    """Return rows and tables for the paper's Swin and timm's.

    merge: number of the stage that a patch merging belongs to, the one before it or behind it.
    """
    theirs, ours = prefix + "layers.{stage-2}.blocks.{block}.", "backbone/res{stage}_{block}/"
    down = f"{prefix}layers.{merge}.downsample."
    layers = [("norm1", "norm1"), ("norm2", "norm2"), ("mlp.fc1", "fc1"), ("mlp.fc2", "fc2")]
    rows, tables = _swin_attention(theirs + "attn.", ours)
    return (
        (prefix + "patch_embed.proj", "backbone/stem_conv"),
        (prefix + "patch_embed.norm", "backbone/stem_norm"),
        (down + "norm", "backbone/down{stage}_norm"),
        (down + "reduction", "backbone/down{stage}_reduction"),
        (prefix + "norm{stage-2}", "backbone/output{stage}_norm"),
        *((theirs + name, ours + path) for name, path in layers),
        *rows,
    ), tables


def _swin_attention(theirs: str, ours: str, positions: str = "cpb_mlp") -> tuple[Rows, Rows]:
    """Return rows and tables for the attention of both versions of Swin."""
    rows = [(f"{theirs}{name}", f"{ours}attn/{name}") for name in ("qkv", "proj")]
    rows += [(f"{theirs}{positions}.{2 * i - 2}", f"{ours}attn/position_fc{i}") for i in (1, 2)]
    names = {"relative_position_bias_table": "position_bias"}
    names |= {name: name for name in ("logit_scale", "q_bias", "v_bias")}
    tables = tuple((theirs + name, f"{ours}attn/{path}") for name, path in names.items())
    return tuple(rows), tables


def mmdetection_swin(prefix: str) -> tuple[Rows, Rows]:
    """Return rows and tables for mmdetection's Swin and mmpretrain's."""
    theirs, ours = prefix + "stages.{stage-2}.blocks.{block}.", "backbone/res{stage}_{block}/"
    down = prefix + "stages.{stage-3}.downsample."
    layers = [("norm1", "norm1"), ("norm2", "norm2")]
    layers += [("ffn.layers.0.0", "fc1"), ("ffn.layers.1", "fc2")]
    rows, tables = _swin_attention(theirs + "attn.w_msa.", ours)
    return (
        (prefix + "patch_embed.projection", "backbone/stem_conv"),
        (prefix + "patch_embed.norm", "backbone/stem_norm"),
        (down + "norm", "backbone/down{stage}_norm"),
        (down + "reduction", "backbone/down{stage}_reduction"),
        (prefix + "norm{stage-2}", "backbone/output{stage}_norm"),
        *((theirs + name, ours + path) for name, path in layers),
        *rows,
    ), tables


def torchvision_swin() -> tuple[Rows, Rows]:
    """Return rows and tables for torchvision's Swin."""
    rows = [("features.0.0", "backbone/stem_conv"), ("features.0.2", "backbone/stem_norm")]
    layers = [("norm1", "norm1"), ("norm2", "norm2"), ("mlp.0", "fc1"), ("mlp.3", "fc2")]
    tables: list[tuple[str, str]] = []
    for stage, number in zip((2, 3, 4, 5), (1, 3, 5, 7), strict=True):
        for name in ("norm", "reduction") if stage > 2 else ():
            rows.append((f"features.{number - 1}.{name}", f"backbone/down{stage}_{name}"))
        theirs, ours = f"features.{number}.{{block}}.", f"backbone/res{stage}_{{block}}/"
        attention, of_attention = _swin_attention(theirs + "attn.", ours)
        rows += [(theirs + name, ours + path) for name, path in layers]
        rows += attention
        tables += of_attention
    return tuple(rows), tuple(tables)


def transformers_swin() -> tuple[Rows, Rows]:
    """Return rows and tables for transformers' Swin: its files, and version 5 in memory."""
    prefix = "[swin.][swinv2.]"
    layer = prefix + "encoder.layers."
    theirs, ours = layer + "{stage-2}.blocks.{block}.", "backbone/res{stage}_{block}/"
    down = layer + "{stage-3}.downsample."
    layers = [("layernorm_before", "norm1"), ("layernorm_after", "norm2")]
    layers += [("intermediate.dense", "fc1"), ("output.dense", "fc2")]
    layers.append(("attention.output.dense", "attn/proj"))
    layers += [(f"attention.self.{name}", f"attn/{name}") for name in ("query", "key", "value")]
    layers += [(f"attention.{name[0]}_proj", f"attn/{name}") for name in ("query", "key", "value")]
    layers += [("attention.o_proj", "attn/proj"), ("mlp.fc1", "fc1"), ("mlp.fc2", "fc2")]
    attention = theirs + "attention.self."
    rows, tables = _swin_attention(attention, ours, "continuous_position_bias_mlp")
    table = "attention.relative_position_bias.relative_position_bias_table"
    tables = (*tables, (theirs + table, ours + "attn/position_bias"))
    return (
        (prefix + "embeddings.patch_embeddings.projection", "backbone/stem_conv"),
        (prefix + "embeddings.norm", "backbone/stem_norm"),
        (down + "norm", "backbone/down{stage}_norm"),
        (down + "reduction", "backbone/down{stage}_reduction"),
        ("hidden_states_norms.stage{stage-1}", "backbone/output{stage}_norm"),
        *((theirs + name, ours + path) for name, path in layers),
        *rows,
    ), tables


def google_resnet50() -> Rows:
    """Return rows numbered in creation order: a stage's first block creates its shortcut first."""
    layers = [("stem_conv", "stem_norm")]
    for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True):
        layers.append((f"res{stage}_0/shortcut", f"res{stage}_0/shortcut_norm"))
        for path in (f"res{stage}_{block}" for block in range(blocks)):
            layers += [(f"{path}/conv{i}", f"{path}/norm{i}") for i in (1, 2, 3)]
    rows = []
    for index, (conv, norm) in enumerate(layers):
        number = f"_{index}" if index else ""
        rows.append((f"[resnet50/]conv2d{number}", f"backbone/{conv}"))
        rows.append((f"[resnet50/]batch_normalization{number}", f"backbone/{norm}"))
    return tuple(rows)


CAFFE2: Rows = (
    ("conv1", "backbone/stem_conv"),
    ("res_conv1_bn", "backbone/stem_norm"),
    ("res{stage}_{block}_branch1", "backbone/res{stage}_{block}/shortcut"),
    ("res{stage}_{block}_branch1_bn", "backbone/res{stage}_{block}/shortcut_norm"),
    ("res{stage}_{block}_branch2a", "backbone/res{stage}_{block}/conv1"),
    ("res{stage}_{block}_branch2a_bn", "backbone/res{stage}_{block}/norm1"),
    ("res{stage}_{block}_branch2b", "backbone/res{stage}_{block}/conv2"),
    ("res{stage}_{block}_branch2b_bn", "backbone/res{stage}_{block}/norm2"),
    ("res{stage}_{block}_branch2c", "backbone/res{stage}_{block}/conv3"),
    ("res{stage}_{block}_branch2c_bn", "backbone/res{stage}_{block}/norm3"),
)
_NVIDIA_RN50_BLOCK = "resnet50/btlnck_block_{stage-2}_{block}/"
NVIDIA_RN50: Rows = (
    ("resnet50/conv2d/conv2d", "backbone/stem_conv"),
    ("resnet50/conv2d/BatchNorm", "backbone/stem_norm"),
    (_NVIDIA_RN50_BLOCK + "bottleneck_{conv}/conv2d", "backbone/res{stage}_{block}/conv{conv}"),
    (_NVIDIA_RN50_BLOCK + "bottleneck_{conv}/BatchNorm", "backbone/res{stage}_{block}/norm{conv}"),
    (_NVIDIA_RN50_BLOCK + "shortcut/conv2d/conv2d", "backbone/res{stage}_{block}/shortcut"),
    (_NVIDIA_RN50_BLOCK + "shortcut/conv2d/BatchNorm", "backbone/res{stage}_{block}/shortcut_norm"),
)
