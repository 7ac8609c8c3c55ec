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
# A predictor takes files, images of Pillow and uint8 arrays (height x width x RGB) of any size. It
# resizes them as in training and returns boxes in pixels of the original image. The first call
# compiles the model; later calls are fast. `mrcnn.load(RUN)` does all of the above in one call.

# %%
predictor = mrcnn.Predictor(config, variables, categories=categories)
result = predictor(IMAGE)
result

# %%
for one in result:
    print(f"{one.names[0]:10} {one.scores[0]:.2f}  box {one.boxes[0].round(1)}")

# %% [markdown]
# Most detections with a low score are false. Evaluation uses them all; for a drawing, a condition
# selects some. Small images are enlarged.

# %%
drawn = result[result.scores >= SCORE].plot()
Image.fromarray(drawn)

# %% [markdown]
# ## One mask
#
# The network predicts, for each cell of a 28 x 28 grid over the box, the probability that it
# belongs to the object. Masks keep this form until they are pasted into the image.

# %%
best = result[0]  # detections are sorted by descending score
grid = best.mask_grids[0]
Image.fromarray((255 * grid).astype(np.uint8)).resize((280, 280), Image.Resampling.NEAREST)

# %% [markdown]
# `masks` are the pasted masks, a boolean array per object of the size of the image. Cutting the
# object out takes two lines.

# %%
x1, y1, x2, y2 = best.boxes[0].round().astype(int)
cut_out = np.where(best.masks[0][..., None], best.image, 255).astype(np.uint8)[y1:y2, x1:x2]
print(f"{best.masks.sum()} pixels belong to the {best.names[0]}")
Image.fromarray(cut_out).resize((4 * (x2 - x1), 4 * (y2 - y1)))

# %% [markdown]
# For several images at once, call `predictor([first, second])`. For folders, videos
# and COCO results, use the command `python -m mask_rcnn_jax.infer`, see docs/inference.md.
