# %% [markdown]
# # Fine-tune on data of your own
#
# From a folder of pictures with annotations to a model that finds what you drew: write the json,
# check it, train from somebody's weights, look at the scores and at a picture.
#
# To run anywhere, this notebook makes its own pictures, and starts from the run that the README's
# first command leaves behind. Its 68 steps reached box AP 0.51 and mask AP 0.48 on 16 held-out
# pictures; the whole notebook took 88 seconds of processor time (a shared machine, two cores of an
# AMD EPYC, 2026-11-21). With photos you would start from torchvision's COCO weights; how is said
# below. docs/own_data.md says how annotations of labelme, VIA and others become a COCO json.

# %%
import json
import os
from pathlib import Path

from PIL import Image

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import cli
from mask_rcnn_jax.data.coco import check_coco, decode_image, load_coco
from mask_rcnn_jax.data.segmentation import crop_mask
from mask_rcnn_jax.evaluation.visualize import draw_detections, draw_ground_truth, side_by_side
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.training.loop import train_and_evaluate
from mask_rcnn_jax.training.metrics import read_metrics

folders = [Path.cwd(), *Path.cwd().parents]
os.chdir(next((folder for folder in folders if (folder / "runs").is_dir()), "."))
BASE = os.environ.get("NOTEBOOK_RUN", "runs/quickstart")  # whose weights to start from
FOLDER = Path(os.environ.get("NOTEBOOK_FOLDER", "runs/notebook"))  # everything goes here
EPOCHS = float(os.environ.get("NOTEBOOK_EPOCHS", "6"))

# %% [markdown]
# ## The data
#
# A COCO json has three lists: images, categories, annotations. An annotation says in which image
# it is, of which category, and where: a box `[x, y, width, height]` and an outline. Ids may be
# any numbers. That is all; other keys are ignored.
#
# Let us make pictures of shapes, and pretend that we care for two kinds of things only: what rolls
# and what does not.

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
# With your own data, leave that cell out and name your files: `jsons = {"train": "my/train.json",
# "val": "my/val.json"}` and the folders of images in the same way.
#
# Always check first. Every fault has a line of its own: a box outside its image, a polygon of two
# points, a picture that is not there or cannot be read.

# %%
for split in jsons:
    problems = check_coco(jsons[split], images[split])
    print(f"{split}: {len(problems)} problems", *problems, sep="\n")

# %% [markdown]
# And look: most mistakes in data are found by eye.

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
# pictures, and the model of the run whose weights we start from, since weights fit only the model
# that they were trained in; with it its optimiser, Adam, since small models with group norm learn
# slowly with the other's. The recipe as it is fits torchvision's weights: leave out the four lines
# below it and say `"model.init_from": "weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth"`.

# %%
config = mrcnn.load_config(
    "finetune",
    {
        "data.train_json": str(jsons["train"]),
        "data.train_images": str(images["train"]),
        "data.val_json": str(jsons["val"]),
        "data.val_images": str(images["val"]),
        "data.image_size": (128, 128),  # short side, and the most that the long side may have
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
config.model, config.optim = base.model, base.optim
config.model.num_classes = 0  # what the annotations have
config.model.init_from = BASE

# %% [markdown]
# ## Training
#
# The lines below say which layers start anew: those whose size follows the number of classes. All
# others have their weights from the start, and so a few minutes are enough. Run this cell again
# and it goes on where it was, or says that there is nothing to do; for another recipe take another
# folder.

# %%
cli.set_up_logging()  # the lines that the commands show
state = train_and_evaluate(config, str(FOLDER / "run"))

# %% [markdown]
# `metrics.jsonl` has a line for each logged step; TensorBoard shows the same. The loss should fall,
# quickly first. If it does not, try a smaller learning rate; if it falls and the scores below stay
# low, look at the annotations again.

# %%
metrics = read_metrics(FOLDER / "run" / "metrics.jsonl")
losses = {record["step"]: record["loss/total"] for record in metrics if "loss/total" in record}
for step, loss in losses.items():
    print(f"step {step:4}  loss {loss:.3f}  {'#' * round(8 * loss)}")

# %% [markdown]
# ## Scores
#
# Average precision of boxes and masks on pictures that the model has not learned from: 0 is
# nothing found, 1 is everything found, with exact outlines. The number after AP is the overlap
# that counts as found; AP alone is the mean over 0.50 to 0.95. Later, and for other data:
# `python -m mask_rcnn_jax.evaluate --workdir ...`.

# %%
last = max(int(folder.name) for folder in (FOLDER / "run" / "eval").iterdir())
scores = json.loads((FOLDER / "run" / "eval" / str(last) / "metrics.json").read_text())
for name in ("AP", "AP50", "mask_AP", "mask_AP50"):
    print(f"{name:10} {scores[name]:.3f}")
for name, aps in scores["per_category"].items():
    print(f"{name:10} box AP {aps['AP']:.3f}  mask AP {aps['mask_AP']:.3f}")

# %% [markdown]
# ## A picture
#
# What was drawn on the left, what was found on the right.

# %%
trained = mrcnn.load_config(FOLDER / "run")
predictor = mrcnn.Predictor(trained, mrcnn.load_variables(FOLDER / "run", trained))
found = predictor(image)
picture = draw_detections(image, found, val_set.class_names)
Image.fromarray(side_by_side(truth, picture))
