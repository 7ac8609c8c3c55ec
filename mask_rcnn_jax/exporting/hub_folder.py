"""The folder that `export --format hub` writes."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from absl import logging
from safetensors.numpy import save

from mask_rcnn_jax import consent, parts
from mask_rcnn_jax.exporting.card import Facts, make_card
from mask_rcnn_jax.weights import hub, model_folder
from mask_rcnn_jax.weights.convert import to_flax, to_ours_flat
from mask_rcnn_jax.weights.restore import Restored


@dataclass(frozen=True)
class HubOptions:
    """Flags of `export --format hub`; a field has the name of its flag."""

    license: str = ""
    push_to: str = ""
    private: bool = False

    def check(self) -> None:
        """Raise ValueError for a wrong value, and for a push that must fail."""
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*|", self.license, re.ASCII):
            expected = "expected an identifier of SPDX, such as apache-2.0"
            raise ValueError(f"--license is {self.license!r}, {expected}")
        if self.private and not self.push_to:
            raise ValueError("--private is for --push_to")
        if self.push_to:
            hub.check_push(self.push_to)


def hub_files(
    restored: Restored, evaluations: Sequence[Mapping[str, Any]], options: HubOptions
) -> dict[str, bytes]:
    """Return the files of the folder by name; the weights are read back and compared.

    evaluations: records of metrics.jsonl up to the checkpoint.
    """
    recipe, variables, categories, checkpoint = restored
    arrays = to_ours_flat(variables)
    backbone = recipe.model.backbone
    norm, eps = backbone.get("norm", None), backbone.get("norm_eps", 1e-5)
    again, _ = to_flax(arrays, norm=norm, eps=eps, model=parts.to_section(recipe.model))
    jax.tree.map(np.testing.assert_array_equal, again, variables)
    content = save(arrays)
    if code := model_folder.own_code(recipe):
        entry, name = next(iter(code.items()))
        text = "%s is %r: who loads the model needs this code and --allow_code"
        logging.warning(text, entry, name)
    facts = Facts(
        address=f"hf://{options.push_to or 'OWNER/NAME'}",
        license=options.license,
        step=checkpoint.step if checkpoint else None,
        evaluation=evaluations[-1] if evaluations else {},
        checksum=hashlib.sha256(content).hexdigest(),
    )
    card = make_card(recipe, categories, facts)
    files = model_folder.content(recipe, categories, content, card.encode())
    if code:
        consent.remember(files[model_folder.CONFIG])
    return files
