# %% [markdown]
# # Predict on one image with a trained model
#
# A run's workdir holds everything needed to use its model: the recipe and the classes in
# `config.json`, the weights in `checkpoints/<step>`. This notebook loads them and runs the model on
# an image.
#
# The run below comes from the README's first command. Replace it with your own: the `--workdir` of
# a training run, or one of its `checkpoints/<step>`. Paths are relative to the nearest folder that
# contains `runs`, starting at the current one.

# %%
import os
from pathlib import Path

import jax
import numpy as np
from PIL import Image

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import read_workdir
from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.evaluation.paste import paste_mask
from mask_rcnn_jax.evaluation.visualize import draw_detections
from mask_rcnn_jax.weights.run_checkpoint import find_checkpoint

folders = [Path.cwd(), *Path.cwd().parents]
os.chdir(next((folder for folder in folders if (folder / "runs").is_dir()), "."))
RUN = os.environ.get("NOTEBOOK_RUN", "runs/quickstart")
IMAGE = os.environ.get("NOTEBOOK_IMAGE", "data/shapes/val/000004.jpg")
SCORE = float(os.environ.get("NOTEBOOK_SCORE", "0.5"))  # lowest score drawn

# %% [markdown]
# ## The recipe and the weights
#
# `load_config` returns the recipe the run was trained with. `load_variables` reads the Orbax
# checkpoint without the optimizer state, and checks every array against the model. Each layer's
# weights are plain arrays under the layer's name.

# %%
checkpoint = find_checkpoint(RUN)
config = mrcnn.load_config(checkpoint.workdir)
variables = mrcnn.load_variables(checkpoint.folder, config)

print(f"step {checkpoint.step} of {checkpoint.workdir}")
for name, layers in variables["params"].items():
    count = sum(leaf.size for leaf in jax.tree.leaves(layers))
    print(f"{name:10} {count:12,} parameters")

# %% [markdown]
# Classes count from 1; 0 is background. Their names come from the training annotations, in the same
# order.

# %%
_, categories = read_workdir(checkpoint.workdir)
class_names = [category["name"] for category in categories]
class_names

# %% [markdown]
# ## The image
#
# A predictor takes images of any size as uint8 arrays, height x width x RGB. It resizes them as in
# training and returns boxes in pixels of the original image. The first call compiles the model;
# later calls are fast.

# %%
image = decode_image(IMAGE)
predictor = mrcnn.Predictor(config, variables)
detections = predictor(image)

print(f"{image.shape[1]} x {image.shape[0]} pixels, {len(detections)} detections")
for k in range(len(detections)):
    name = class_names[detections.classes[k] - 1]
    print(f"{name:10} {detections.scores[k]:.2f}  box {detections.boxes[k].round(1)}")

# %% [markdown]
# Most detections with a low score are false. Evaluation uses them all, but drawings
# show only scores of at least 0.5. Small images are enlarged.

# %%
drawn = draw_detections(image, detections, class_names, score_threshold=SCORE)
Image.fromarray(drawn)

# %% [markdown]
# ## One mask
#
# The network predicts, for each cell of a 28 x 28 grid over the box, the probability that it
# belongs to the object. Masks keep this form until they are pasted into an image.

# %%
best = 0  # detections are sorted by descending score
grid = detections.masks[best]
Image.fromarray((255 * grid).astype(np.uint8)).resize((280, 280), Image.Resampling.NEAREST)

# %% [markdown]
# `paste_mask` stretches the grid over the box and returns the object's pixels: a boolean window and
# its upper left corner in the image. Cutting objects out then takes one line.

# %%
height, width = image.shape[:2]
window, (x, y) = paste_mask(grid, detections.boxes[best], height, width)
rows, columns = slice(y, y + window.shape[0]), slice(x, x + window.shape[1])
cut_out = np.where(window[..., None], image[rows, columns], 255).astype(np.uint8)
print(f"{window.sum()} pixels belong to the {class_names[detections.classes[best] - 1]}")
Image.fromarray(cut_out).resize((4 * window.shape[1], 4 * window.shape[0]))

# %% [markdown]
# For several images at once, call `predictor([image, another])`. For folders, videos
# and COCO results, use the command `python -m mask_rcnn_jax.infer`, see docs/inference.md.
