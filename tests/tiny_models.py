"""Tiny random models of every architecture, with everything random that training would make so.

`tests/architectures/FAMILY.json` says which: `config` is shared by its `cases`, each of which names a transformers
class and what differs. Models are float64 and compute in it throughout (`keep_float64`), so that equal functions can be
told from nearly equal ones.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import shipped, tied_head
from rotation_merge.diagnose.proof import keep_float64

CONFIGS = Path(__file__).parent / "architectures"
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


@dataclass(frozen=True)
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
        found = getattr(transformers, self.class_name)
        found._keep_in_fp32_modules = None  # older releases round such modules to float32 in a float64 model too
        return found


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
LISTED = {(case.family, case.name, case.class_name): case for case in ALL}


@functools.cache
def further() -> list[Case]:
    """A case for each class that a family names and no file has: with the config of the class most like it."""
    found = []
    for family, spec in shipped().items():
        known = [case for case in ALL if case.family == family]
        for name in sorted(set(spec.classes) - {case.class_name for case in known}):
            like = max(known, key=lambda case: SequenceMatcher(None, case.class_name, name).ratio())
            found.append(Case(family, name, name, like.config))
    return found


def make(case: Case, seed: int = 0) -> Any:
    """The model: weights, biases and norm gains all random, gains of either sign.

    A listed one is made once: whoever asks is given a copy, and torch's own draws go on as they do behind the first.
    """
    key = case.family, case.name, case.class_name
    if LISTED.get(key) is not case:
        return _drawn(case, seed)
    model, behind = _first_made(*key, seed)
    torch.set_rng_state(behind)
    return copy.deepcopy(model)


@functools.cache
def _first_made(family: str, name: str, class_name: str, seed: int) -> tuple[Any, Tensor]:
    return _drawn(LISTED[family, name, class_name], seed), torch.get_rng_state()


def _drawn(case: Case, seed: int) -> Any:
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
                buffer.data = buffer.float()  # as a loaded model has it
    model.tie_weights()
    return model


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
    given = {name: torch.tensor(value) for name, value in case.images.items() if name != "pixel_values"}
    pixels = torch.randn(case.images["pixel_values"], generator=generator, dtype=torch.float64)
    return {"input_ids": words, "mm_token_type_ids": (words == image).int(), "pixel_values": pixels, **given}


def outputs(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every floating tensor that the model gives back by default, those of its parts too; caches are for itself."""
    with torch.no_grad(), keep_float64():
        return dict(_floating("", model(**given)))


def _floating(name: str, found: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield name, found
    elif isinstance(found, Mapping | list | tuple):
        inside = found.items() if isinstance(found, Mapping) else enumerate(found)
        for key, value in inside:
            yield from _floating(f"{name}.{key}" if name else str(key), value)


@dataclass(frozen=True)
class Planted:
    """A tiny model as a checkpoint, with what it answers; made once for all tests of a process, never changed.

    Attributes:
        made: the model that was saved; who puts other tensors into it puts its own back.
        loaded: the model that was loaded again; its tensors are those that were last asked for.
        config: as mergekit reads it.
        state: its tensors, as they are named on disk; of an untied one, the head among them.
        folder: where other tensors are put for `differs`.
    """

    case: Case
    made: Any
    loaded: Any
    config: dict[str, Any]
    state: dict[str, Tensor]
    folder: Path
    given: dict[str, Tensor]
    expected: dict[str, Tensor]

    @functools.cached_property
    def architecture(self) -> Architecture:
        return resolve(self.config, list(self.state), self.case.name)

    @property
    def pair(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The model as the package's functions take it."""
        return self.state, self.config

    def twin(self, config: rm.AlignConfig | None = None, seed: int = 5, **options: Any) -> dict[str, Tensor]:
        """Its tensors in other coordinates; see `twin_of`."""
        return twin_of(self.pair, config, seed, **options)

    @functools.cached_property
    def tied(self) -> tuple[str, str] | None:
        """A head that shares the embedding's tensor, and the stream that it reads."""
        return tied_head(self.config, list(self.state), self.case.name)

    @functools.cached_property
    def rotatable(self) -> tuple[str, ...]:
        """Streams that admit rotations once their gains are folded."""
        return tuple(name for name, groups in self.architecture.stream_groups.items() if "rotation" in groups)

    @functools.cached_property
    def _places(self) -> dict[str, Tensor] | None:
        """Where each entry of the loaded model stands among those of the checkpoint, one tensor behind the other: found
        by loading their numbers. None where loading does more than to put entries in their places.
        """
        own = self.loaded.state_dict(keep_vars=True)
        marks, start = {}, 0
        for name, tensor in self.state.items():
            marks[name] = torch.arange(start, start + tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            start += tensor.numel()
        known = {own[name].data_ptr() for name in self.state if name in own}
        if self.state.keys() <= own.keys() and all(tensor.data_ptr() in known for tensor in own.values()):
            return {name: place.long() for name, place in marks.items()}  # the rest is tied to these
        found = reload(self.case, self.folder, marks).state_dict()
        if not all(bool(((x >= 0) & (x < start)).all()) for x in found.values()):
            return None
        flat, places = _flat(self.state), {name: x.long() for name, x in found.items()}
        return places if all(torch.equal(flat[x].to(own[n].dtype), own[n]) for n, x in places.items()) else None

    def holding(self, state: dict[str, Tensor]) -> Any:
        """The model with other tensors, until others are asked for."""
        if state.keys() != self.state.keys() or self._places is None:
            return reload(self.case, self.folder, state)
        flat = _flat({name: state[name] for name in self.state})
        self.loaded.load_state_dict({name: flat[place] for name, place in self._places.items()}, strict=False)
        return self.loaded

    def differs(self, state: dict[str, Tensor]) -> float:
        """Largest difference of the outputs with other tensors from those of the model itself."""
        return difference(outputs(self.holding(state), self.given), self.expected)

    @functools.cached_property
    def untied(self) -> Planted:
        """The same with a head of its own, stored and declared."""
        architecture = resolve(self.config, list(self.state), self.case.name, untie=True)
        state = self.state | {
            t.name: next(self.state[name] for name in t.tied if name in self.state).clone()
            for t in architecture.tensors()
            if t.tied and t.name not in self.state
        }
        if len(state) == len(self.state) and not self.config.get("tie_word_embeddings"):
            return self
        folder = Path(tempfile.mkdtemp(dir=_folder()))
        config = {**json.loads((self.folder / "config.json").read_text()), "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
        loaded, config = reload(self.case, folder, state), self.config | {"tie_word_embeddings": False}
        return replace(self, loaded=loaded, config=config, state=state, folder=folder)


def _flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tiny-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def planted(case: Case) -> Planted:
    """The tiny model of a case."""
    key = case.family, case.name, case.class_name
    _CASES[key] = case
    return _planted(*key)


_CASES: dict[tuple[str, str, str], Case] = {}


@functools.cache
def _planted(family: str, name: str, class_name: str) -> Planted:
    case = _CASES[family, name, class_name]
    model = make(case)
    given = inputs(case, model)
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    config, state = save(model, folder)
    state = {key: tensor.clone() for key, tensor in state.items()}
    loaded = reload(case, folder, state)
    return Planted(case, model, loaded, config, state, folder, given, outputs(loaded, given))


def twin_of(model: Any, config: rm.AlignConfig | None = None, seed: int = 5, **options: Any) -> dict[str, Tensor]:
    """A model's tensors in other coordinates: moved by a random element of every group that the config names."""
    return rm.Alignment.random(model, config, seed=seed, **options).apply(model).state_dict()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two models' outputs; a NaN counts as infinitely far."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().nan_to_num(torch.inf).max()) for name in a)
