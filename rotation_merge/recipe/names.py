"""What a recipe may say to rotation_merge: the names of its parameters, by where they stand."""

from __future__ import annotations

from typing import Any

METHOD = "rotation_merge"
"""The merge method's name."""

OPTIONS: dict[str, str] = {
    "attention": "maps inside attention heads",
    "heads": "order of attention heads",
    "ffn": "order of FFN neurons and of experts",
    "rescale": "positive (where allowed, signed) rescaling; sequential: after the rotation, as the paper does",
    "residual": "group of the residual stream",
    "layers": "all, or ranges such as 0-5,11: match only these layers",
}
"""Options of matching; allowed at every level, with filters and per-layer lists, resolved once a block."""

DONOR: dict[str, str] = {
    "finetuned_from": "the donor is a fine-tune of this model: its task vector is carried over to the anchor",
    "alignment": "file of transforms to apply instead of matching",
}
"""Options that belong to one donor."""

LEGACY = ("int8_mask",)
"""Parameters that mergekit-evolve writes into every recipe although no method reads them any more."""

GLOBAL: dict[str, str] = {
    "delegate": "the mergekit method that does the averaging",
    "unsupported": "error, or merge: merge without alignment what cannot be aligned",
    "exclude": "comma-separated parts of tensor names: such tensors are copied from base_model",
    "untie": "true: give the output its own head where residual rotation needs it",
    "anchor": "base, or mean: align all models to their running mean",
    "report": "true: also write the report as an HTML page",
}
"""Options of the whole merge."""

GLOBAL_CHOICES: dict[str, tuple[Any, ...]] = {
    "unsupported": ("error", "merge"),
    "untie": (False, True),
    "anchor": ("base", "mean"),
    "report": (False, True),
}
