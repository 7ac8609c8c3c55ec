# %% [markdown]
# # Fine-tune on your own data
#
# From a folder of annotated images to a trained model: write the json, check it, train from
# existing weights, look at the scores and at an image.
#
# To run anywhere, this notebook generates its own images and starts from the run of the README's
# first command. Its 68 steps reached box AP 0.51 and mask AP 0.48 on 16 held-out images; the whole
# notebook took 88 seconds of processor time (a shared machine, two cores of an AMD EPYC,
# 2026-11-21). For photos, start from torchvision's COCO weights as described below.
# docs/own_data.md explains how to convert annotations of labelme, VIA and others to a COCO json.

# %%
import json
import os
from dataclasses import replace
from pathlib import Path

from PIL import Image

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import cli
from mask_rcnn_jax.data.coco import check_coco, decode_image, load_coco
from mask_rcnn_jax.data.segmentation import crop_mask
from mask_rcnn_jax.evaluation.visualize import draw_ground_truth, side_by_side
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics

folders = [Path.cwd(), *Path.cwd().parents]
os.chdir(next((folder for folder in folders if (folder / "runs").is_dir()), "."))
BASE = os.environ.get("NOTEBOOK_RUN", "runs/quickstart")  # initial weights
FOLDER = Path(os.environ.get("NOTEBOOK_FOLDER", "runs/notebook"))  # for all output
EPOCHS = float(os.environ.get("NOTEBOOK_EPOCHS", "6"))

# %% [markdown]
# ## The data
#
# A COCO json has three lists: images, categories, annotations. An annotation has an image, a
# category, a box `[x, y, width, height]` and an outline. Ids may be any numbers; other keys are
# ignored.
#
# Let us generate images of shapes and merge them into two categories: shapes that roll and shapes
# that stand.

# %%
images = {split: FOLDER / "data" / split for split in ("train", "val")}
jsons = {split: FOLDER / "data" / f"{split}.json" for split in images}

shapes = write_shapes(FOLDER / "data", train=48, val=16, seed=1)
for split, path in shapes.items():
    content = json.loads(path.read_text())
    round_ones = {entry["id"] for entry in content["categories"] if entry["name"] == "circle"}
    content["categories"] = [{"id": 1, "name": "rolls"}, {"id": 2, "name": "stands"}]
    for annotation in content["annotations"]:
        annotation["category_id"] = 1 if annotation["category_id"] in round_ones else 2
    jsons[split].write_text(json.dumps(content))

print(content["images"][0])
print({**content["annotations"][0], "segmentation": "[[x1, y1, x2, y2, ...]]"})

# %% [markdown]
# For your own data, replace that cell with your files: `jsons = {"train": "my/train.json", "val":
# "my/val.json"}`, and the image folders likewise.
#
# Always check first. Each problem gets a line: a box outside its image, a polygon of two points, a
# missing or unreadable image.

# %%
for split in jsons:
    problems = check_coco(jsons[split], images[split])
    print(f"{split}: {len(problems)} problems", *problems, sep="\n")

# %% [markdown]
# Then look: most annotation errors are found by eye.

# %%
val_set = load_coco(jsons["val"], images["val"])
record = val_set.images[0]
image = decode_image(val_set.image_path(0))
truth = draw_ground_truth(
    image,
    [annotation.box for annotation in record.annotations],
    [annotation.class_index for annotation in record.annotations],
    [
        crop_mask(annotation.segmentation, annotation.box, record.height, record.width)
        for annotation in record.annotations
    ],
    val_set.class_names,
)
Image.fromarray(truth)

# %% [markdown]
# ## The recipe
#
# The recipe `finetune` is made for this: few epochs, a small learning rate. Here it gets small
# images and the model of the initial run, because weights fit only the model they were trained in.
# It also gets that run's optimizer, Adam, because small models with group norm learn slowly with
# SGD. For torchvision's weights, use the recipe unchanged: leave out the three lines below it.

# %%
config = mrcnn.load_config(
    "finetune",
    {
        "data.train_json": str(jsons["train"]),
        "data.train_images": str(images["train"]),
        "data.val_json": str(jsons["val"]),
        "data.val_images": str(images["val"]),
        "data.image_size": (128, 128),  # short side, longest side allowed
        "data.num_workers": 0,
        "train.batch_size": 4,
        "train.epochs": EPOCHS,
        "train.log_every": 4,
        "train.eval_every": 10**6,  # at the end only
        "eval.batch_size": 4,
        "eval.loss_images": 0,
        "eval.pictures": 0,
    },
)
base = mrcnn.load_config(BASE)
model = replace(base.model, num_classes=0, init_from=BASE)  # classes: from the annotations
config = replace(config, model=model, optim=base.optim)

# %% [markdown]
# ## Training
#
# The log lists the layers that start from random weights: those sized by the number of classes. All
# others start from the initial weights, so a few minutes are enough. Running this cell again
# resumes the run, or reports that nothing is left to do; for another recipe, use another folder.

# %%
cli.set_up_logging()  # log as the commands do
state = train(config, FOLDER / "run")

# %% [markdown]
# `metrics.jsonl` has a line per logged step; TensorBoard shows the same. The loss
# should fall, quickly at first. If it does not, try a smaller learning rate; if it falls but the
# scores below stay low, check the annotations again.

# %%
metrics = read_metrics(FOLDER / "run" / "metrics.jsonl")
losses = {record["step"]: record["loss/total"] for record in metrics if "loss/total" in record}
for step, loss in losses.items():
    print(f"step {step:4}  loss {loss:.3f}  {'#' * round(8 * loss)}")

# %% [markdown]
# ## Scores
#
# Average precision (AP) of boxes and masks on held-out images: 0 means nothing found, 1 everything
# found with exact outlines. The number after AP is the IoU threshold in percent; AP alone is the
# mean over thresholds 0.50 to 0.95. For other data, run `python -m mask_rcnn_jax.evaluate --workdir
# ...`.

# %%
last = max(int(folder.name) for folder in (FOLDER / "run" / "eval").iterdir())
scores = json.loads((FOLDER / "run" / "eval" / str(last) / "metrics.json").read_text())
for name in ("AP", "AP50", "mask_AP", "mask_AP50"):
    print(f"{name:10} {scores[name]:.3f}")
for name, aps in scores["per_category"].items():
    print(f"{name:10} box AP {aps['AP']:.3f}  mask AP {aps['mask_AP']:.3f}")

# %% [markdown]
# ## An image
#
# Ground truth on the left, detections on the right.

# %%
drawn = mrcnn.load(FOLDER / "run")(image).plot()
Image.fromarray(side_by_side(truth, drawn))
