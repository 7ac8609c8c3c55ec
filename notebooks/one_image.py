# %% [markdown]
# # One image through one training step
#
# Mask R-CNN learns from boxes that it proposes itself. So its targets are not in the data: they are
# made anew in each step, from anchors, proposals and the objects that were drawn. This notebook
# stops after each of these decisions and draws it. It is also the place to look when training on
# your own data goes wrong: are there anchors for objects as small as yours? Are the masks where
# they should be?
#
# The run comes from the first command of the README; put your own in its place. Paths start at the
# folder that has `runs` in it, where that command was given: this one, or the nearest one above.

# %%
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageDraw

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.options import example_options
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.data.transforms import load_example
from mask_rcnn_jax.evaluation.visualize import draw_ground_truth, instance_color
from mask_rcnn_jax.ops.extent import STRIDES, valid_extent
from mask_rcnn_jax.training.step import loss_options, loss_terms
from mask_rcnn_jax.weights.restore import make_model

folders = [Path.cwd(), *Path.cwd().parents]
os.chdir(next((folder for folder in folders if (folder / "runs").is_dir()), "."))
RUN = os.environ.get("NOTEBOOK_RUN", "runs/quickstart")
INDEX = int(os.environ.get("NOTEBOOK_INDEX", "4"))  # which image of the training set

# %% [markdown]
# ## What the loader ships
#
# An example is the picture, resized onto a canvas of fixed size, and its objects in pixels of that
# canvas. Lists of objects have a fixed length too; `valid` says which rows are filled. Fixed shapes
# mean that the step is compiled once.

# %%
config = mrcnn.load_config(RUN)
dataset = load_split(config.data, "train")
example = load_example(dataset, INDEX, example_options(config))
batch = jax.tree.map(lambda leaf: np.asarray(leaf)[None], example)  # a batch of one

targets = example.targets
print("picture ", example.images.shape, example.images.dtype, "of which", example.image_sizes)
print("boxes   ", targets.boxes.shape, "of which", targets.valid.sum(), "are valid")
print("masks   ", targets.masks.shape)

canvas = example.images.astype(np.uint8)
Image.fromarray(
    draw_ground_truth(canvas, targets.boxes, targets.classes, targets.masks, dataset.class_names)
)

# %% [markdown]
# Boxes are all we need to draw from here on.

# %%
ZOOM = max(1, 512 // max(canvas.shape[:2]))
GREEN, RED, GREY = (80, 255, 80), (255, 70, 70), (150, 150, 150)


def blank():
    """The picture, enlarged."""
    return Image.fromarray(canvas).resize((ZOOM * canvas.shape[1], ZOOM * canvas.shape[0]))


def draw_boxes(picture, boxes, color):
    """Boxes [n, 4] in pixels of the canvas, on an enlarged picture."""
    pen = ImageDraw.Draw(picture)
    for box in np.asarray(boxes) * ZOOM:
        pen.rectangle(box.tolist(), outline=color, width=2)
    return picture


# %% [markdown]
# ## Anchors
#
# At every cell of every level of the pyramid stand a few boxes of fixed size: the anchors. Coarse
# levels have few and large ones. Here are those of the cell in the middle, a colour per level.
# Objects much smaller than the smallest anchor, or of stranger proportions than any, are hard to
# learn: see `model.anchors.sizes` and `model.anchors.aspect_ratios`.

# %%
model = make_model(config, len(dataset.class_names))
extent = valid_extent(canvas.shape[:2], batch.image_sizes, config.model.input.pad_multiple)
anchors = [np.asarray(level) for level in model.anchor_grid(extent).boxes]

picture, shapes = blank(), len(config.model.anchors.aspect_ratios)
for level, boxes in enumerate(anchors):
    rows, columns = (-(-side // STRIDES[level]) for side in canvas.shape[:2])
    cell = (rows // 2) * columns + columns // 2
    size = config.model.anchors.sizes[level]
    print(f"P{level + 2}: {rows} x {columns} cells, {len(boxes)} anchors of {size:g} pixels")
    draw_boxes(picture, boxes[cell * shapes : (cell + 1) * shapes], instance_color(level))
anchors = np.concatenate(anchors)
picture

# %% [markdown]
# ## The step
#
# `forward_train` runs both stages and returns what each layer said beside what it should have said.
# Drawing lots is part of it, so it takes a random key per image.

# %%
variables = mrcnn.load_variables(RUN, config)
forward = jax.jit(partial(model.apply, train=False, method="forward_train"))
outputs = forward(variables, batch, jax.random.split(jax.random.key(0), 1))
one = jax.tree.map(lambda leaf: np.asarray(leaf)[0], outputs)

# %% [markdown]
# ## Which anchors answer for an object
#
# An anchor that overlaps an object well is foreground, one that overlaps none is background, and
# what lies between is left out. Each object gets at least one anchor. Green: foreground. White: the
# objects.

# %%
for label, name in ((1, "foreground"), (0, "background"), (-1, "left out")):
    matched, sampled = np.sum(one.anchor_labels == label), np.sum(one.sampled_labels == label)
    print(f"{name:10} {matched:6} anchors, {sampled:6} after sampling")
objects = targets.boxes[targets.valid]
picture = draw_boxes(blank(), anchors[one.anchor_labels == 1], GREEN)
draw_boxes(picture, objects, (255, 255, 255))

# %% [markdown]
# Nearly all anchors are background. So the loss of the first stage sees a sample: up to
# `rpn_anchors_per_image` of them, up to half of it foreground.

# %%
picture = draw_boxes(blank(), anchors[one.sampled_labels == 0], GREY)
draw_boxes(picture, anchors[one.sampled_labels == 1], GREEN)

# %% [markdown]
# ## Proposals
#
# What the first stage says of its anchors: how likely each holds an object, and how to move it to
# fit. The best ones, without those that overlap a better one too much, are the proposals. The best
# twenty in green: a trained model puts several around each object. The rest of the list is grey.

# %%
proposals = one.proposals
print(f"{proposals.valid.sum()} proposals, the best score {proposals.scores[:5].round(2)}")
picture = draw_boxes(blank(), proposals.boxes[20:][proposals.valid[20:]], GREY)
draw_boxes(picture, proposals.boxes[:20][proposals.valid[:20]], GREEN)

# %% [markdown]
# ## What the second stage learns from
#
# From proposals and objects together, `rois_per_image` regions are drawn by lot: up to a quarter
# foreground, which overlap an object by more than half (green), the rest background (red). The
# features inside them go to the heads.

# %%
rois = one.rois
background = rois.valid & ~rois.foreground
print(f"{rois.foreground.sum()} foreground and {background.sum()} background regions")
picture = draw_boxes(blank(), rois.boxes[background], RED)
draw_boxes(picture, rois.boxes[rois.foreground], GREEN)

# %% [markdown]
# ## Mask targets
#
# A foreground region learns the mask of its object, as far as it lies inside the region: 28 x 28
# cells. Each row below is a region: its pixels, what its mask should be, and what the model says
# now. Regions that sit askew have targets that sit askew.

# %%
SIDE, ROWS, NEAREST = 112, 6, Image.Resampling.NEAREST
count = min(ROWS, int(rois.foreground.sum()))
sheet = Image.new("RGB", (3 * SIDE, max(count, 1) * SIDE))
predicted = 1 / (1 + np.exp(-one.mask_logits))
for row in range(count):
    crop = Image.fromarray(canvas).crop(np.round(rois.boxes[row]).tolist())
    name = dataset.class_names[rois.classes[row] - 1]
    ImageDraw.Draw(crop := crop.resize((SIDE, SIDE))).text((4, 2), name)
    sheet.paste(crop, (0, row * SIDE))
    for column, mask in ((1, one.mask_targets[row]), (2, predicted[row])):
        tile = Image.fromarray((255 * mask).astype(np.uint8))
        sheet.paste(tile.resize((SIDE, SIDE), NEAREST), (column * SIDE, row * SIDE))
sheet

# %% [markdown]
# ## Losses
#
# All of this ends in five numbers: two of the first stage, is it an object and where is it; three
# of the second, what is it, where is it, and which pixels are its own. Training lowers their sum.

# %%
for name, value in loss_terms(
    outputs, loss_options(config), model.rpn.batch_size_per_image
).items():
    print(f"{name:14} {float(value):.3f}")
