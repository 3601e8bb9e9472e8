"""Models of sentence-transformers as functions: tokens in, embeddings out, or of pairs their cosine."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rotation_merge.architecture.sentence import KEY, dense, modes
from rotation_merge.errors import CheckpointError, short


def with_modules(
    model: nn.Module,
    modules: list[dict[str, Any]],
    tensors: Mapping[str, Tensor] | None = None,
    label: str | None = None,
) -> Any:
    """A transformer with its sentence-transformers modules, whose `forward` gives embeddings.

    Tokens (n, length) become `text_embeds` (n, size); pairs of texts (n, 2, length) the cosine of their embeddings as
    `logits` (n, 1). Dense modules are submodules under their folders' names, so that the state dict names them as
    `model.sentence` does.

    Args:
        tensors: of the dense modules; None: of a model without weights.

    Raises:
        CheckpointError: an activation or a shape that does not fit.
    """
    like = next(model.parameters())
    for module in dense(modules):
        path, activation = module["path"], getattr(nn, module["activation"], None)
        if activation is None:
            problem = f"the activation {module['activation']} of its module {path} is not known"
            raise CheckpointError(problem, where=label, remedy="use one of torch.nn")
        linear = nn.Linear(module["in"], module["out"], bias=module["bias"])
        dense_map = nn.Sequential(OrderedDict({"linear": linear, "activation": activation()}))
        model.add_module(path, dense_map)
        if tensors is None:
            continue
        try:
            names = {name.removeprefix(f"{path}."): name for name in tensors if name.startswith(f"{path}.")}
            dense_map.to(like).load_state_dict({name: tensors[full] for name, full in names.items()})
        except RuntimeError as error:
            problem = f"its module {path} is not as its config says ({short(error)})"
            raise CheckpointError(problem, where=label, remedy="download it again") from error
    setattr(cast(Any, model).config, KEY, modules)
    model.__class__ = _embedding_class(cast(Any, type(model)))
    return model


@functools.cache
def _embedding_class(kind: type) -> type:
    return type(kind.__name__, (kind,), {"forward": _forward, "sentence_encoder": kind})


def is_sentence_model(model: Any) -> bool:
    return type(model).__dict__.get("forward") is _forward


def _forward(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **extra: Any) -> ModelOutput:
    shape, modules = input_ids.shape, getattr(self.config, KEY)
    ids = input_ids.reshape(-1, shape[-1])
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.reshape(-1, shape[-1])
    states = self.sentence_encoder.forward(self, input_ids=ids, attention_mask=mask).last_hidden_state
    embeddings = torch.cat([_pooled(states, mask, mode) for mode in modes(modules)], -1)
    for module in modules:
        if module["type"] == "Dense":
            embeddings = self.get_submodule(module["path"])(embeddings)
        elif module["type"] == "Normalize":
            embeddings = nn.functional.normalize(embeddings, p=2, dim=-1)
    if len(shape) == 2:
        return ModelOutput(text_embeds=embeddings)
    first, second = embeddings.reshape(*shape[:2], -1).unbind(1)
    return ModelOutput(logits=nn.functional.cosine_similarity(first, second, dim=-1)[:, None])


def _pooled(states: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One vector a text.

    Args:
        states: (n, length, size); mask: (n, length), 1 for tokens.
    """
    rows, wide = torch.arange(len(states)), mask[..., None].to(states.dtype)
    if mode == "cls":
        return states[rows, mask.argmax(1)]
    if mode == "lasttoken":
        return states[rows, mask.shape[1] - 1 - mask.flip(1).argmax(1)]
    if mode == "max":
        return states.masked_fill(wide == 0, -1e9).amax(1)
    if mode == "weightedmean":
        wide = wide * torch.arange(1, mask.shape[1] + 1, dtype=states.dtype, device=states.device)[:, None]
    count = wide.sum(1).clamp(min=1e-9)
    return (states * wide).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)
