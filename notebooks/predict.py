# %% [markdown]
# # A trained model and a picture
#
# A run leaves everything behind that is needed to use its model: the recipe and the classes in
# `config.json`, the weights in `checkpoints/<step>`. Here we take them up again and let the model
# look at a picture.
#
# The run below comes from the first command of the README. Put your own in its place: the
# `--workdir` of a training, or one of its `checkpoints/<step>`. Paths start at the folder that has
# `runs` in it: this one, or the nearest one above.

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
PICTURE = os.environ.get("NOTEBOOK_PICTURE", "data/shapes/val/000004.jpg")
SCORE = float(os.environ.get("NOTEBOOK_SCORE", "0.5"))  # what scores lower is not shown

# %% [markdown]
# ## The recipe and the weights
#
# `load_config` gives the recipe that the run was trained with, so that nothing has to be set up
# again. `load_variables` reads the orbax checkpoint, without the optimiser's part, and compares
# every array with what the recipe's model needs. The weights of a layer are plain arrays, by the
# layer's name.

# %%
checkpoint = find_checkpoint(RUN)
config = mrcnn.load_config(checkpoint.workdir)
variables = mrcnn.load_variables(checkpoint.folder, config)

print(f"step {checkpoint.step} of {checkpoint.workdir}")
for name, layers in variables["params"].items():
    count = sum(leaf.size for leaf in jax.tree.leaves(layers))
    print(f"{name:10} {count:12,} parameters")

# %% [markdown]
# The model counts classes from 1; 0 is background. Their names are those of the annotations that it
# was trained on, in the same order.

# %%
_, categories = read_workdir(checkpoint.workdir)
class_names = [category["name"] for category in categories]
class_names

# %% [markdown]
# ## The picture
#
# A predictor takes pictures of any size as uint8 arrays, height x width x RGB. It resizes them as
# in training, and gives boxes in pixels of the picture you passed in. The first call compiles the
# model; later ones are quick.

# %%
image = decode_image(PICTURE)
predictor = mrcnn.Predictor(config, variables)
detections = predictor(image)

print(f"{image.shape[1]} x {image.shape[0]} pixels, {len(detections)} detections")
for k in range(len(detections)):
    name = class_names[detections.classes[k] - 1]
    print(f"{name:10} {detections.scores[k]:.2f}  box {detections.boxes[k].round(1)}")

# %% [markdown]
# Most detections with a low score are second guesses. Evaluation wants them; people do not, so
# pictures are drawn from a score of 0.5 up. Small pictures are enlarged.

# %%
picture = draw_detections(image, detections, class_names, score_threshold=SCORE)
Image.fromarray(picture)

# %% [markdown]
# ## One mask
#
# The network says for each cell of a 28 x 28 grid, laid over the box, how likely it belongs to the
# object. That is all a mask is until somebody needs it in the picture.

# %%
best = 0  # detections come by falling score
grid = detections.masks[best]
Image.fromarray((255 * grid).astype(np.uint8)).resize((280, 280), Image.Resampling.NEAREST)

# %% [markdown]
# `paste_mask` stretches the grid over the box and gives the pixels inside the object, as a small
# window of the picture and the place of its upper left corner. Cutting objects out is then one
# line.

# %%
height, width = image.shape[:2]
window, (x, y) = paste_mask(grid, detections.boxes[best], height, width)
rows, columns = slice(y, y + window.shape[0]), slice(x, x + window.shape[1])
cut_out = np.where(window[..., None], image[rows, columns], 255).astype(np.uint8)
print(f"{window.sum()} pixels belong to the {class_names[detections.classes[best] - 1]}")
Image.fromarray(cut_out).resize((4 * window.shape[1], 4 * window.shape[0]))

# %% [markdown]
# Several pictures at once: `predictor([image, another])`. Folders, videos and COCO results from the
# command line: `python -m mask_rcnn_jax.infer`, see docs/inference.md.
