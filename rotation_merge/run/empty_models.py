"""transformers' models, created without weights, which some read whenever they run."""

from __future__ import annotations

import copy
from typing import Any

from rotation_merge.architecture.sentence import KEY as MODULES
from rotation_merge.errors import CheckpointError
from rotation_merge.model.forms import restructured
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of, disable_extra_outputs, model_class
from rotation_merge.run.sentence import with_modules


def empty_model(config: Any, untie: bool = False) -> Any:
    """A model of transformers' own class without weights, its buffers as they should be; in evaluation mode.

    No weight is drawn: where tensors hold nothing that takes longer than all the rest.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config_copy = copy.deepcopy(config)
    disable_extra_outputs(config_copy)
    for part in (config_copy, config_copy.get_text_config()):
        part.use_cache = False
        part._attn_implementation = part._experts_implementation = "eager"
        if untie:
            part.tie_word_embeddings = False
    kind = model_class(config_copy.architectures)
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = kind(config_copy)
        if modules := getattr(config_copy, MODULES, None):
            model = with_modules(model, modules)
    model.tie_weights()
    return model.eval()


def streamed_model(view: View, device: str) -> Any:
    """transformers' model in evaluation mode and float32, whose modules read their weights on each run.

    Raises:
        CheckpointError: weights are missing, or the files have them in another form.
    """
    from accelerate import cpu_offload

    model = empty_model(view.transformers_config, view.untie)
    tensors = restructured(view.tensors, view.architecture, architecture_of(model, view.untie))
    if missing := sorted({name for name, _ in model.named_parameters(remove_duplicate=False)} - tensors.keys()):
        problem = f"has no weight {missing[0]} in the form of {type(model).__name__}"
        raise CheckpointError(problem, where=view.name, remedy="download it again, or run it as a whole")
    model.hf_device_map = {"": device}
    return cpu_offload(model, device, state_dict=tensors)
