"""A recipe, parsed: frozen, typed and checked."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import optax

from mask_rcnn_jax import parts
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.models.build import BUILDERS, ModelOptions
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.ranges import FROM_0_TO_1
from mask_rcnn_jax.recipe.distillation import DistillOptions
from mask_rcnn_jax.recipe.optimizer import OptimOptions
from mask_rcnn_jax.recipe.options import EvalOptions, TrainOptions


@dataclass(frozen=True)
class Recipe:
    """All that a run is made of; each section is a dataclass that says what its entries mean.

    `load_config` makes one from a recipe's file or a run. `dataclasses.replace` makes another with
    other values; a recipe itself does not change.
    """

    data: DataOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    loss: LossOptions = LossOptions()
    distill: DistillOptions = DistillOptions()
    optim: OptimOptions = OptimOptions()
    train: TrainOptions = TrainOptions()
    eval: EvalOptions = EvalOptions()

    def __post_init__(self):
        for part in BUILDERS:
            getattr(self.model, part).check()
        inclusive = self.model.box_coder.inclusive == "all"
        if self.data.inclusive_boxes != inclusive:
            object.__setattr__(self, "data", replace(self.data, inclusive_boxes=inclusive))
        channels, count = self.model.input.channels, self.data.bands.count
        if channels != count:
            names = ", ".join(self.data.bands.names) or "red, green, blue"
            found = f"model.input.mean and std have {channels} values"
            measured = "; `prepare stats` measures them" if self.data.bands.names else ""
            raise ValueError(f"{found}, expected {count}, for {names}{measured}")
        self._check_keypoints()
        kind = self.model.mask_targets.kind
        frame = "image" if kind == "whole" else "box"
        if self.data.mask_frame != frame:
            raise ValueError(f"model.mask_targets.kind={kind} needs data.mask_frame={frame}")
        if kind == "polygons" and not self.data.max_vertices:
            needed = "a positive data.max_vertices, such as 512"
            raise ValueError(f"model.mask_targets.kind=polygons needs {needed}")
        points, sigmas = len(self.data.keypoints), len(self.eval.keypoint_sigmas)
        if sigmas not in (0, points):
            expected = f"one for each of the {points} names in data.keypoints"
            raise ValueError(f"eval.keypoint_sigmas has {sigmas} values, expected {expected}")
        if points and self.eval.augments:
            expected = "expected neither with data.keypoints, which views do not merge"
            raise ValueError(f"eval.tta_scales and eval.tta_flip are set, {expected}")

    def _check_keypoints(self) -> None:
        if not self.model.has_keypoints:
            return
        found, named = self.model.keypoint_head.get("num_keypoints", None), self.data.keypoints
        if not named or found not in (None, len(named)):
            raise ValueError(
                f"model.keypoint_head.num_keypoints is {found}, but data.keypoints names "
                f"{len(named)}"
            )

    @classmethod
    def read(cls, tree: parts.Section, *, imports: bool = True) -> "Recipe":
        """Build the sections of a tree, such as a ConfigDict; missing entries have their defaults.

        imports: whether functions of a user's that the model names are imported; without them the
        model can be described, not built.

        Raises ValueError, naming the entry, if one is unknown, has a wrong type or is not among the
        choices.
        """
        sections: dict[str, Any] = {f.name: f.type for f in fields(cls)}
        if unknown := set(tree.keys()) - sections.keys():
            found = f"a recipe has no section {min(unknown)!r}"
            raise ValueError(f"{found}, expected one of {list(sections)}")
        if "data" not in tree:
            raise ValueError("data is missing: a recipe says what to train on")
        model = ModelOptions.read(tree.get("model", {}), imports=imports)
        built = {
            name: parts.build(sections[name], tree[name], name) for name in tree if name != "model"
        }
        return cls(**built, model=model)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all entries, as `read` takes them."""
        return parts.to_section(self)

    def changes(self) -> dict[str, dict[str, Any]]:
        """Return the entries that differ from their defaults, as `read` takes them."""
        return parts.changes(self)

    @property
    def learns_boxes_only(self) -> bool:
        """Whether the model learns no masks, so that boxes are enough."""
        return self.loss.mask_weight == 0 or not self.model.has_masks

    @property
    def keypoint_threshold(self) -> float:
        """Lowest score of a keypoint that is drawn: of a heatmap's largest value 2, as in Detectron
        and maskrcnn-benchmark, of a probability 0.05, as in detectron2; of a user's head that does
        not say which it has, all are drawn."""
        head = self.model.keypoint_head
        score = head.get("score", getattr(head.builder, "score", None))
        return {"logit": 2.0, "softmax": 0.05}.get(score, -math.inf)

    def with_classes(self, num_classes: int) -> "Recipe":
        """Return a recipe for so many classes."""
        return replace(self, model=replace(self.model, num_classes=num_classes))

    def with_score_threshold(self, score: float) -> "Recipe":
        """Set the lowest score of what is found, after soft-NMS, too, which lowers scores.

        Raises ValueError if it is not from 0 to 1.
        """
        FROM_0_TO_1.check(score, "score_threshold")
        lowest = max(self.eval.soft_min_score, score)
        return replace(self, eval=replace(self.eval, score_threshold=score, soft_min_score=lowest))

    def schedule(self) -> optax.Schedule:
        """Return the learning rate by step."""
        return self.optim.rates(self.train.batch_size, self.train.steps)
