# %% [markdown]
# # One image through one training step
#
# Mask R-CNN learns from boxes that it proposes itself. So its targets are not in the data: every
# step computes them from anchors, proposals and annotated objects. This notebook stops after each
# of these stages and draws the result. It also helps when training on your own data goes wrong: are
# there anchors for objects as small as yours? Are the masks in the right place?
#
# The run comes from the README's first command; replace it with your own. Paths are relative to the
# nearest folder that contains `runs`, starting at the current one.

# %%
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.data.transforms import load_example
from mask_rcnn_jax.evaluation.visualize import draw_ground_truth, instance_color
from mask_rcnn_jax.ops.extent import STRIDES, valid_extent
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights.restore import make_model

folders = [Path.cwd(), *Path.cwd().parents]
os.chdir(next((folder for folder in folders if (folder / "runs").is_dir()), "."))
RUN = os.environ.get("NOTEBOOK_RUN", "runs/quickstart")
INDEX = int(os.environ.get("NOTEBOOK_INDEX", "4"))  # index in the training set

# %% [markdown]
# ## The loader's output
#
# An example is an image, resized onto a canvas of fixed size, and its objects in canvas pixels.
# Object arrays have a fixed length too; `valid` marks the filled rows. With fixed shapes, the step
# compiles only once.

# %%
config = mrcnn.load_config(RUN)
dataset = load_split(config.data, "train")
example = load_example(dataset, INDEX, config.data)
batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], example)  # a batch of one

targets = example.targets
print("image   ", example.images.shape, example.images.dtype, "of which", example.image_sizes)
print("boxes   ", targets.boxes.shape, "of which", targets.valid.sum(), "are valid")
print("masks   ", targets.masks.shape)

canvas = example.images.astype(np.uint8)
Image.fromarray(
    draw_ground_truth(canvas, targets.boxes, targets.classes, targets.masks, dataset.class_names)
)

# %% [markdown]
# From here on we draw only boxes.

# %%
ZOOM = max(1, 512 // max(canvas.shape[:2]))
GREEN, RED, GRAY = (80, 255, 80), (255, 70, 70), (150, 150, 150)


def blank():
    """Return the enlarged image."""
    return Image.fromarray(canvas).resize((ZOOM * canvas.shape[1], ZOOM * canvas.shape[0]))


def draw_boxes(drawing, boxes, color):
    """Draw boxes [n, 4], in canvas pixels, on an enlarged image."""
    pen = ImageDraw.Draw(drawing)
    for box in np.asarray(boxes) * ZOOM:
        pen.rectangle(box.tolist(), outline=color, width=2)
    return drawing


# %% [markdown]
# ## Anchors
#
# Every cell of every pyramid level has a few boxes of fixed size: the anchors. Coarse levels have
# fewer and larger anchors. Here are those of the central cell, one color per level. Objects much
# smaller than the smallest anchor, or with more extreme aspect ratios, are hard to learn: see
# `model.anchors.sizes` and `model.anchors.aspect_ratios`.

# %%
model = make_model(config, len(dataset.class_names))
extent = valid_extent(canvas.shape[:2], batch.image_sizes, config.model.input.pad_multiple)
anchors = [np.asarray(level) for level in model.anchor_grid(extent).boxes]

drawing, shapes = blank(), len(config.model.anchors.aspect_ratios)
for level, boxes in enumerate(anchors):
    rows, columns = (-(-side // STRIDES[level]) for side in canvas.shape[:2])
    cell = (rows // 2) * columns + columns // 2
    size = config.model.anchors.sizes[level]
    print(f"P{level + 2}: {rows} x {columns} cells, {len(boxes)} anchors of {size:g} pixels")
    draw_boxes(drawing, boxes[cell * shapes : (cell + 1) * shapes], instance_color(level))
anchors = np.concatenate(anchors)
drawing

# %% [markdown]
# ## The step
#
# `forward_train` runs both stages and returns predictions next to their targets. Sampling is part
# of it, so it takes a random key per image.

# %%
variables = mrcnn.load_variables(RUN, config)
forward = jax.jit(partial(model.apply, train=False, method="forward_train"))
outputs = forward(variables, batch, jax.random.split(jax.random.key(0), 1))
one = jax.tree.map(lambda leaf: np.asarray(leaf)[0], outputs)

# %% [markdown]
# ## Anchor labels
#
# Anchors with a high IoU with an object are foreground, anchors with a low IoU with all objects are
# background, and those in between are ignored. Each object gets at least one anchor. Foreground
# anchors are green, objects are white.

# %%
for label, name in ((1, "foreground"), (0, "background"), (-1, "ignored")):
    matched, sampled = np.sum(one.anchor_labels == label), np.sum(one.sampled_labels == label)
    print(f"{name:10} {matched:6} anchors, {sampled:6} after sampling")
objects = targets.boxes[targets.valid]
drawing = draw_boxes(blank(), anchors[one.anchor_labels == 1], GREEN)
draw_boxes(drawing, objects, (255, 255, 255))

# %% [markdown]
# Nearly all anchors are background. So the first stage's loss uses a sample of
# `model.rpn.batch_size_per_image` anchors, at most half of them foreground.

# %%
drawing = draw_boxes(blank(), anchors[one.sampled_labels == 0], GRAY)
draw_boxes(drawing, anchors[one.sampled_labels == 1], GREEN)

# %% [markdown]
# ## Proposals
#
# For each anchor, the first stage predicts an object score and a box regression. The
# highest-scoring boxes left after non-maximum suppression are the proposals. The top twenty are
# green: a trained model puts several around each object. The others are gray.

# %%
proposals = one.proposals
print(f"{proposals.valid.sum()} proposals, highest scores {proposals.scores[:5].round(2)}")
drawing = draw_boxes(blank(), proposals.boxes[20:][proposals.valid[20:]], GRAY)
draw_boxes(drawing, proposals.boxes[:20][proposals.valid[:20]], GREEN)

# %% [markdown]
# ## RoI sampling
#
# From proposals and objects together, `model.sampling.batch_size_per_image` RoIs are sampled at
# random: up to a quarter foreground, with an IoU of at least 0.5 with an object (green), the rest
# background (red). The heads receive the features inside them.

# %%
rois = one.rois
background = rois.valid & ~rois.foreground
print(f"{rois.foreground.sum()} foreground and {background.sum()} background RoIs")
drawing = draw_boxes(blank(), rois.boxes[background], RED)
draw_boxes(drawing, rois.boxes[rois.foreground], GREEN)

# %% [markdown]
# ## Mask targets
#
# A foreground RoI learns the part of its object's mask inside the RoI, as 28 x 28 cells. Each row
# below shows an RoI: its pixels, its mask target and the model's current prediction. The target of
# an off-center RoI is off-center too.

# %%
SIDE, ROWS, NEAREST = 112, 6, Image.Resampling.NEAREST
count = min(ROWS, int(rois.foreground.sum()))
sheet = Image.new("RGB", (3 * SIDE, max(count, 1) * SIDE))
masks = np.asarray(outputs.mask_targets)  # of all images, the foreground alone
predicted = 1 / (1 + np.exp(-np.asarray(outputs.mask_logits)))
for row in range(count):
    crop = Image.fromarray(canvas).crop(np.round(rois.boxes[row]).tolist())
    name = dataset.class_names[rois.classes[row] - 1]
    ImageDraw.Draw(crop := crop.resize((SIDE, SIDE))).text((4, 2), name)
    sheet.paste(crop, (0, row * SIDE))
    for column, mask in ((1, masks[row]), (2, predicted[row])):
        tile = Image.fromarray((255 * mask).astype(np.uint8))
        sheet.paste(tile.resize((SIDE, SIDE), NEAREST), (column * SIDE, row * SIDE))
sheet

# %% [markdown]
# ## Losses
#
# All of this ends in five losses: objectness and box regression for the first stage; class, box
# regression and mask for the second. Training minimizes their sum.

# %%
for name, value in loss_terms(outputs, config.loss, model.rpn.batch_size_per_image).items():
    print(f"{name:14} {float(value):.3f}")
