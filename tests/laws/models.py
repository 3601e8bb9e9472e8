"""Tiny random models of every architecture, with everything random that training would make so.

`tests/architectures/FAMILY.json` says which: `config` is shared by its `cases`, each of which names a transformers
class and what differs. Models are float64 and compute in it throughout (`keep_float64`), so that equal functions can be
told from nearly equal ones. Nothing here imports an internal module of the package.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

CONFIGS = Path(__file__).parents[1] / "architectures"
SINCE = {
    "bert-CamembertForMultipleChoice": "5.18",
    "bert-XLMRobertaForMultipleChoice": "5.18",
    "deberta_v2-new head": "5.20.2",
    "siglip-text, bare": "5.6",
}
"""Cases that older releases of transformers cannot build, save or load themselves."""
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True, eq=False)
class Case:
    """One tiny model: its family, its transformers class, its config.

    Attributes:
        images: of one that sees and writes: shapes of pixels, and values of what goes with them.
        image_tokens: how many of each example's tokens stand for its image.
    """

    family: str
    name: str
    class_name: str
    config: dict[str, Any]
    images: dict[str, Any] = field(default_factory=dict)
    image_tokens: int = 0

    @property
    def model_class(self) -> Any:
        """The test is skipped where the installed transformers has no such class, or a broken one."""
        since = SINCE.get(f"{self.family}-{self.name}", "0")
        if not hasattr(transformers, self.class_name) or Version(transformers.__version__) < Version(since):
            pytest.skip(f"{self.class_name} ({self.name}) needs a newer transformers than {transformers.__version__}")
        model_class = getattr(transformers, self.class_name)
        model_class._keep_in_fp32_modules = None  # older releases round such modules in a float64 model too
        return model_class


def cases(path: Path) -> list[Case]:
    """The cases of one file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [
        Case(
            *(path.stem, name, case["class"], {**content.get("config", {}), **case.get("config", {})}),
            images=case.get("images", {}),
            image_tokens=case.get("image_tokens", 0),
        )
        for name, case in content["cases"].items()
    ]


ALL = [case for path in sorted(CONFIGS.glob("*.json")) for case in cases(path)]


def make(case: Case, seed: int = 0) -> Any:
    """The model: weights, biases and norm gains all random, gains of either sign.

    A listed one is made once: whoever asks is given a copy, and torch's own draws go on as they do behind the first.
    """
    model, behind = (_kept if case in ALL else _drawn)(case, seed)
    torch.set_rng_state(behind)
    return copy.deepcopy(model)


def _drawn(case: Case, seed: int) -> tuple[Any, Tensor]:
    torch.manual_seed(seed)
    signs = torch.Generator().manual_seed(seed)
    config = case.model_class.config_class(**case.config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = case.model_class(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5) + float(gain))
            if gain:
                parameter.mul_(torch.rand(parameter.shape, generator=signs).lt(0.5) * 2 - 1)
        for name, buffer in model.named_buffers():
            if name.endswith(("bias", "std_scale")) and buffer.is_floating_point():
                buffer.copy_(torch.randn_like(buffer))
            if name.endswith(("put_min", "put_max")):
                buffer.fill_(-1.5 if name.endswith("min") else 2.0)  # clips some, and not evenly
            if name.endswith("inv_freq"):
                buffer.data = torch.empty_like(buffer, dtype=torch.float32).copy_(buffer)  # within `keep_float64`, too
    model.tie_weights()
    return model, torch.get_rng_state()


_kept = functools.cache(_drawn)


def save(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a checkpoint; give its config, as mergekit reads it, and its tensors, as they are named on disk."""
    model.save_pretrained(folder)
    return transformers.AutoConfig.from_pretrained(folder).to_dict(), load_file(folder / "model.safetensors")


def reload(case: Case, folder: Path, state: dict[str, Tensor]) -> Any:
    """The model in `folder` with other tensors."""
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return load(case, folder)


def load(case: Case, folder: Path) -> Any:
    """The model in `folder`, which must be complete, in float64."""
    model, info = case.model_class.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    model.config._experts_implementation = "eager"
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    return model.eval()


def inputs(case: Case, model: Any, seed: int = 1) -> dict[str, Tensor]:
    """Two random examples of whatever the model takes."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    text, vision = (getattr(config, name, config) for name in ("text_config", "vision_config"))
    result: dict[str, Tensor] = {}
    if case.images:
        return _words_and_images(case, config, generator)
    if case.class_name.endswith("MultipleChoice"):
        return {"input_ids": torch.randint(3, text.vocab_size, (2, 3, 7), generator=generator)}
    if model.main_input_name == "pixel_values" or hasattr(config, "vision_config"):
        shape = (2, vision.num_channels, vision.image_size, vision.image_size)
        result["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if model.main_input_name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        result["input_features"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if model.main_input_name == "input_ids":
        result["input_ids"] = torch.randint(3, text.vocab_size, (2, 7), generator=generator)
        if case.class_name.endswith("ForSequenceClassification"):
            result["input_ids"][:, -1] = config.eos_token_id if config.is_encoder_decoder else 3
    wants_decoder = config.is_encoder_decoder and not case.class_name.endswith(("Classification", "EncoderModel"))
    if wants_decoder and not case.class_name.endswith("Answering"):
        result["decoder_input_ids"] = torch.randint(3, config.vocab_size, (2, 5), generator=generator)
    return result


def _words_and_images(case: Case, config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Two random examples of words around an image each."""
    image = next(getattr(config, key) for key in ("image_token_id", "image_token_index") if hasattr(config, key))
    words = torch.randint(3, 50, (2, case.image_tokens + 7), generator=generator)
    words[:, 2 : 2 + case.image_tokens] = image
    sizes = {name: torch.tensor(value) for name, value in case.images.items() if name != "pixel_values"}
    pixels = torch.randn(case.images["pixel_values"], generator=generator, dtype=torch.float64)
    return {"input_ids": words, "mm_token_type_ids": (words == image).int(), "pixel_values": pixels, **sizes}


def outputs(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every floating tensor that the model gives back by default, those of its parts too; caches are for itself."""
    with torch.no_grad(), keep_float64():
        return dict(floating("", model(**batch)))


def floating(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            yield from floating(f"{name}.{key}" if name else str(key), part)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two models' outputs; a NaN counts as infinitely far."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().nan_to_num(torch.inf).max()) for name in a)


class keep_float64(TorchFunctionMode):
    """Keeps float64 where transformers computes norms, softmax and routers in float32 on purpose."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = dict(kwargs or {}), args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            narrows = torch.float32 in (kwargs.get("dtype"), *(arg for arg in args if isinstance(arg, torch.dtype)))
            if func is Tensor.float or (func in (Tensor.to, Tensor.type) and narrows):
                return first
            if narrows and "softmax" in func.__name__:
                del kwargs["dtype"]
        if func in (Tensor.__matmul__, Tensor.matmul, torch.matmul):  # of what was counted, in float32, and what stayed
            kind = torch.promote_types(args[0].dtype, args[1].dtype)
            args = tuple(factor.to(kind) for factor in args)
        return func(*args, **kwargs)
