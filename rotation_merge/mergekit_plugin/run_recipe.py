"""Running a recipe from Python, as mergekit-yaml would."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import yaml
from mergekit import merge
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin import hooks
from rotation_merge.mergekit_plugin.compile import output_views
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.folder import close_files


def moved_states(recipe: Recipe) -> Iterator[dict[str, Tensor]]:
    """The tensors of each model of a recipe as they are merged, in float32, in memory; the base first.

    Raises:
        RotationMergeError: as the merge does.
    """
    session = Session.of(recipe, MergeOptions(quiet=True), watched=False)
    try:
        views = output_views(session)
        views.prepare()
        for model in views.stored:
            yield views.served(model).to(torch.float32).state_dict()
    finally:
        session.run.end()


def merge_recipe(text: str, out: str, tokenizer: bool = False, seed: int | None = None, device: str = "cpu") -> None:
    """Merge by mergekit's own `run_merge`, quietly, as mergekit-yaml would.

    Args:
        text: the recipe, YAML.
        out: directory to write.
        tokenizer: copy the base's, as mergekit-yaml does.
        seed: of methods that draw at random.
        device: to compute on.

    Raises:
        RotationMergeError: the plugin is switched off, or as of `run`.
    """
    if hooks.switched_off():
        raise RotationMergeError(f"the plugin is switched off ({hooks.SWITCH}=0)", remedy="unset it")
    options = MergeOptions(quiet=True, copy_tokenizer=tokenizer, random_seed=seed, device=device)
    try:
        merge.run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), out, options, config_source=text)
    finally:
        close_files()
