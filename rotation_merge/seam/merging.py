"""Running a recipe from Python, as mergekit-yaml would."""

from __future__ import annotations

import yaml
from mergekit import merge
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions


def merge_recipe(text: str, out: str) -> None:
    """Merge by mergekit's own `run_merge`, quietly.

    Args:
        text: the recipe, YAML.
        out: directory to write.
    """
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    merge.run_merge(config, out, MergeOptions(quiet=True, copy_tokenizer=False), config_source=text)
