"""Running a recipe from Python, as mergekit-yaml would."""

from __future__ import annotations

import yaml
from mergekit import merge
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin import state


def merge_recipe(text: str, out: str, tokenizer: bool = False, seed: int | None = None) -> None:
    """Merge by mergekit's own `run_merge`, quietly.

    Args:
        text: the recipe, YAML.
        out: directory to write.
        tokenizer: copy the base's, as mergekit-yaml does.
        seed: of methods that draw at random.
    """
    if state.switched_off():
        raise RotationMergeError(f"the plugin is switched off ({state.SWITCH}=0)", remedy="unset it")
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    merge.run_merge(
        config, out, MergeOptions(quiet=True, copy_tokenizer=tokenizer, random_seed=seed), config_source=text
    )
