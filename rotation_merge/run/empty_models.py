"""transformers' models, created without weights."""

from __future__ import annotations

import copy
from typing import Any

from rotation_merge.architecture.sentence import KEY as MODULES
from rotation_merge.run.functions import disable_extra_outputs, model_class
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
