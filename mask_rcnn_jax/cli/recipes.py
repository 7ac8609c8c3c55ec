"""What recipes and public weights there are, as lines of text."""

import ast
from typing import NamedTuple

from mask_rcnn_jax.cli.help import format_entries
from mask_rcnn_jax.config import RECIPES, load_config, load_own, recipe_names
from mask_rcnn_jax.parts import describe
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights.published import PUBLISHED, SHIPPED, recipe_of


class Known(NamedTuple):
    """What a recipe or a variant of one says of itself."""

    name: str  # as `--config` takes it
    system: str  # that it reproduces, or what it is for
    box_ap: float | None  # published for COCO val2017, in percent
    mask_ap: float | None

    @property
    def aps(self) -> str:
        both = self.box_ap, self.mask_ap
        if both == (None, None):
            return "-"
        return " / ".join("-" if ap is None else str(ap) for ap in both)

    @property
    def weights(self) -> list[str]:
        """Names of public weights of a detector that this recipe fits."""
        return [name for name in (*SHIPPED, *PUBLISHED) if recipe_of(name) == self.name]


def known_recipes() -> list[Known]:
    """Return all recipes and variants, those for your own sets first.

    They are read, and not run, from the `SYSTEMS` of each recipe: that is quick.
    """
    names = sorted(recipe_names(), key=lambda name: (name.startswith(("coco", "lvis")), name))
    return [
        Known(f"{name}:{variant}" if variant else name, *about)
        for name in names
        for variant, about in _constant(name, "SYSTEMS").items()
    ]


def recipe_lines() -> list[str]:
    """Format a table of all recipes and variants, with the public weights that fit below each."""
    known = known_recipes()
    width = max(len(one.name) for one in known) + 2
    lines = [f"{'recipe':{width}}box / mask AP  what it is"]
    for one in known:
        lines.append(f"{one.name:{width}}{one.aps:15}{one.system}")
        lines += [f"{'':{width + 15}}--weights {name}" for name in one.weights]
    return [
        *lines,
        "",
        "The APs are those that the systems publish for COCO val2017, in percent.",
        "`recipes NAME` shows one; --config NAME takes it.",
    ]


def describe_recipe(name: str, *, lists_all: bool = False) -> list[str]:
    """Describe one recipe: its docstring, and the entries that are no defaults, or all.

    Raises ValueError for an unknown name or variant.
    """
    stem, lines = name.partition(":")[0], []
    if stem not in recipe_names():
        recipe = load_config(name)  # a file of the user's, or the error that lists the names
    else:
        recipe = load_own(name)
        lines = [ast.get_docstring(_tree(stem)) or "", ""]
    for one in known_recipes():  # a default variant has two names, of which one is listed
        if one.name == name:
            lines.append(f"{name}: {one.system}; published box / mask AP: {one.aps}")
            lines += [*(f"--weights {weights}" for weights in one.weights), ""]
    shown = recipe.to_dict() if lists_all else recipe.changes()
    return [*lines, format_entries(flatten(shown), describe(recipe))]


def weights_lines() -> list[str]:
    """Format a table of all public weights, with the recipe and the published APs of each."""
    aps = {one.name: one.aps for one in known_recipes()}
    width, wide = max(map(len, PUBLISHED)) + 2, max(map(len, aps)) + 2
    lines = [f"{'weights':{width}}{'recipe':{wide}}box / mask AP"]
    for name in (*SHIPPED, *PUBLISHED):
        recipe = recipe_of(name) or "a backbone, for model.init_from"
        lines.append(f"{name:{width}}{recipe:{wide}}{aps.get(recipe, '')}".rstrip())
    return [
        *lines,
        "",
        "--weights NAME, model.init_from=NAME and mrcnn.load(NAME) download what they need;",
        "`prepare weights NAME --data_dir DIR` only downloads.",
    ]


def _tree(name: str) -> ast.Module:
    return ast.parse((RECIPES / f"{name}.py").read_text())


def _constant(name: str, constant: str) -> dict:
    """Return a constant of a recipe's file, {} if it has none."""
    for node in _tree(name).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant:
            return ast.literal_eval(node.value)
    return {}
