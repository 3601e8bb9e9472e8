"""Running a recipe from Python, as mergekit-yaml would."""

from __future__ import annotations

import yaml
from mergekit import merge
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import ReturnTensor
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin import hooks
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.folder import close_files


def merged_state(text: str) -> dict[str, Tensor]:
    """The tensors that a recipe merges, by name, in memory; nothing is written.

    Args:
        text: the recipe, YAML.

    Raises:
        RotationMergeError: as the merge does.
    """
    from rotation_merge.mergekit_plugin.compile import compiled

    session = Session.of(Recipe.read(_configuration(text)), MergeOptions(quiet=True), watched=False)
    try:
        result = compiled(session)
        result.prepare()
        plan, dtype = result.planner(session.options), result.out_dtype
        plan._plan()  # mergekit 0.1.5's own method of a merge in memory fails at its own types
        tasks = [ReturnTensor.model_construct(weight_info=w, tensor_task=t, dtype=dtype) for w, t in plan._tensors]
        return {task.weight_info.name: tensor.clone() for task, tensor in Executor(tasks).run(quiet=True)}
    finally:
        session.run.end()


def _configuration(text: str) -> MergeConfiguration:
    """
    Raises:
        RotationMergeError: the plugin is switched off, or the recipe is at fault.
    """
    if hooks.switched_off():
        raise RotationMergeError(f"the plugin is switched off ({hooks.SWITCH}=0)", remedy="unset it")
    config: MergeConfiguration = MergeConfiguration.model_validate(yaml.safe_load(text))
    return config


def merge_recipe(text: str, out: str, tokenizer: bool = False, seed: int | None = None, device: str = "cpu") -> None:
    """Merge by mergekit's own `run_merge`, quietly.

    Args:
        text: the recipe, YAML.
        out: directory to write.
        tokenizer: copy the base's, as mergekit-yaml does.
        seed: of methods that draw at random.
        device: to compute on.
    """
    options = MergeOptions(quiet=True, copy_tokenizer=tokenizer, random_seed=seed, device=device)
    try:
        merge.run_merge(_configuration(text), out, options, config_source=text)
    finally:
        close_files()
