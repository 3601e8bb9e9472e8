"""The registry of architectures, and the choice of one for a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rotation_merge.architecture.build import lay_out, variables, with_checkpoint_names
from rotation_merge.architecture.expression import evaluate
from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.architecture.schema import ArchitectureSpec, explain
from rotation_merge.architecture.sentence import KEY as SENTENCE
from rotation_merge.architecture.sentence import with_modules
from rotation_merge.errors import ArchitectureError, CheckpointError, nearest

DATA = Path(__file__).parent / "data"

DEQUANTISE = "CLASS.from_pretrained(PATH, dtype='bfloat16'), .dequantize() for integers, .save_pretrained(OUT)"
"""How transformers writes a quantised model in full precision."""

FOLDERS = "ROTATION_MERGE_ARCHITECTURES"
"""Environment variable that names folders with architecture files of one's own."""

OWN = ("family", "title", "models", "extends", "classes", "bare", "model_types", "limits")
"""Entries that a file does not take over from the family it extends."""


def load_file(path: Path) -> ArchitectureSpec:
    """Read and check one architecture file.

    Raises:
        ArchitectureError: names the file, the entry and the allowed values.
    """
    try:
        return ArchitectureSpec.model_validate(_read(path))
    except ValidationError as error:
        entry, problem, remedy = explain(error)
        raise ArchitectureError(f"entry '{entry}': {problem}", where=str(path), remedy=remedy) from error


def _read(path: Path) -> dict[str, Any]:
    """The file's object, merged over the object of the family it extends."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ArchitectureError(
            f"cannot be read ({error})", where=str(path), remedy="it must be one JSON object"
        ) from error
    if not isinstance(content, dict):
        raise ArchitectureError("is not one JSON object", where=str(path), remedy="see docs/add-architecture.md")
    if (parent := content.get("extends")) is not None:
        inherited = {key: value for key, value in _parent(path, "extends", parent).items() if key not in OWN}
        content = overlay(inherited, content)
    modules = content.get("modules")
    if isinstance(modules, dict):
        content = {**content, "modules": {name: _module(path, name, module) for name, module in modules.items()}}
    return content


def _parent(path: Path, entry: str, family: Any) -> dict[str, Any]:
    """The file's object of a family that another file's entry names."""
    source = DATA / f"{family}.json"
    if not source.is_file():
        remedy = nearest(str(family), [file.stem for file in DATA.glob("*.json")])
        raise ArchitectureError(f"entry '{entry}': there is no family '{family}'", where=str(path), remedy=remedy)
    return _read(source)


def _module(path: Path, name: str, module: Any) -> Any:
    """A module laid over another family's, `FAMILY.MODULE`, together with its variables."""
    if not isinstance(module, dict) or "extends" not in module:
        return module
    entry = f"modules.{name}.extends"
    family, _, part = str(module["extends"]).partition(".")
    parent = _parent(path, entry, family)
    if part not in parent["modules"]:
        remedy = nearest(part, parent["modules"])
        raise ArchitectureError(f"entry '{entry}': {family} has no module '{part}'", where=str(path), remedy=remedy)
    below = overlay({"variables": parent.get("variables", {})}, parent["modules"][part])
    return overlay(below, {key: value for key, value in module.items() if key != "extends"})


def overlay(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Objects merged entry by entry; null removes an entry, anything else replaces it."""
    result = dict(below)
    for key, value in above.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = overlay(result[key], value)
        else:
            result[key] = value
    return result


@cache
def shipped() -> dict[str, ArchitectureSpec]:
    """The families that come with the package, by name."""
    return {spec.family: spec for spec in map(load_file, sorted(DATA.glob("*.json")))}


def families() -> dict[str, ArchitectureSpec]:
    """Every known family: the shipped ones, and those in the folders that FOLDERS names."""
    return {**shipped(), **_found(os.environ.get(FOLDERS, ""))}


@cache
def _found(folders: str) -> dict[str, ArchitectureSpec]:
    paths = [path for folder in folders.split(os.pathsep) if folder for path in sorted(Path(folder).glob("*.json"))]
    return {spec.family: spec for spec in map(load_file, paths)}


Spelled = list[Callable[[], Architecture]]
"""A model as each kind of checkpoint names its tensors."""

_MOST_LAID = 4
_laid: dict[tuple[int, str], tuple[ArchitectureSpec, Spelled]] = {}
"""Results of `lay_out` by the identity of a file (which is kept alive) and the config."""


def find(config: Mapping[str, Any]) -> ArchitectureSpec | None:
    """The family of a model with this config, or None; with the dense modules of a sentence-transformers folder."""
    spec = _family(config)
    return with_modules(spec, config) if spec is not None and config.get(SENTENCE) else spec


def _family(config: Mapping[str, Any]) -> ArchitectureSpec | None:
    classes = set(config.get("architectures") or [])
    model_type = config.get("model_type")
    specs = families().values()
    known = [spec for spec in specs if spec.when is None or evaluate(spec.when, variables(spec, config))]
    fits = [spec for spec in known if classes & set(spec.classes)]
    if fits:
        return next((spec for spec in fits if model_type in spec.model_types), fits[0])
    if classes:
        return None
    return next((spec for spec in known if model_type in spec.model_types), None)


def resolve(
    config: Mapping[str, Any],
    names: Collection[str],
    model: str,
    keep_unknown: bool = False,
    untie: bool = False,
    spec: ArchitectureSpec | None = None,
) -> Architecture:
    """The architecture of one checkpoint.

    Args:
        config: its config.json as a dictionary.
        names: the tensors it holds.
        model: name for errors.
        keep_unknown: take tensors that the architecture does not know along unaligned instead of refusing them.
        untie: give heads that are tied to an embedding a tensor of their own.
        spec: the file that describes it; None: that of its family.

    Raises:
        ArchitectureError: the architecture is not supported.
        CheckpointError: tensors are missing, or are there that the architecture does not know.
    """
    spec = spec or find(config)
    if spec is None:
        classes = ", ".join(config.get("architectures") or []) or f"model_type {config.get('model_type')}"
        raise ArchitectureError(
            f"architecture {classes} is not supported",
            where=model,
            remedy="see 'rotation-merge inspect --architectures', add a data file (docs/add-architecture.md), "
            "or set 'unsupported: merge' under parameters to merge it without alignment",
        )
    if settings := stores_codes(config):
        kind = settings.get("quant_method") if isinstance(settings, Mapping) else None
        raise CheckpointError(
            f"its weights are quantised ({kind or 'quantization_config'}), so they cannot be averaged",
            where=model,
            remedy=f"name the model in full precision, or write one: {DEQUANTISE}",
        )
    present = set(names)
    untie = untie and bool(evaluate(spec.tied_when, variables(spec, config)))
    try:
        spelled = _laid_out(spec, config, len(present))
    except CheckpointError as error:
        raise CheckpointError(error.what, where=model, remedy=error.remedy) from error
    present = present.difference(_dropped(spec, config, spelled, present))
    architecture, missing, unknown = _best_spelling(spec, spelled, present, untie)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of a {spec.family} model are missing, the first is '{missing[0]}'",
            where=model,
            remedy="the checkpoint is incomplete, or its config.json belongs to another model",
        )
    if unknown and not keep_unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of the {spec.family} architecture, the first is '{unknown[0]}'",
            where=model,
            remedy="set 'unsupported: merge' under parameters to merge them without alignment",
        )
    return _with_unaligned(architecture, unknown) if unknown else architecture


def stores_codes(config: Mapping[str, Any]) -> Any:
    """Return the config's quantization settings, or None.

    A model read from a GGUF file has floating weights, so its settings are ignored.
    """
    settings = config.get("quantization_config")
    return None if isinstance(settings, Mapping) and settings.get("quant_method") == "gguf" else settings


def _laid_out(spec: ArchitectureSpec, config: Mapping[str, Any], tensors: int | None = None) -> Spelled:
    """`lay_out` in each spelling, made when it is asked for, cached for all models of one config."""
    described = {key: value for key, value in config.items() if key != "_name_or_path"}
    key = id(spec), json.dumps(described, sort_keys=True, default=repr)
    if key not in _laid:
        if len(_laid) >= _MOST_LAID:
            _laid.clear()
        layout, kinds = lay_out(spec, config, tensors), itertools.product(spec.bases, spec.spellings)
        _laid[key] = spec, [cache(partial(with_checkpoint_names, layout, *kind)) for kind in kinds]
    return _laid[key][1]


def _best_spelling(
    spec: ArchitectureSpec, spelled: Spelled, present: set[str], untie: bool
) -> tuple[Architecture, list[str], list[str]]:
    """The model under the best naming for a checkpoint, with its missing and unknown tensors.

    The first naming without either, else the one with the fewest missing, then the fewest unknown.
    """
    candidates = []
    for candidate in (_present_only(named(), present, untie) for named in spelled):
        unknown = sorted(n for n in present - candidate.named().keys() if not n.endswith(tuple(spec.ignored)))
        candidates.append((candidate, _missing(candidate, present), unknown))
        if not any(candidates[-1][1:]):
            break
    return min(candidates, key=lambda entry: (len(entry[1]), len(entry[2])))


@dataclass(frozen=True)
class PossibleTensor:
    """A tensor that a model of some config may have, with its place and the spelling of its block."""

    module: str
    place: str
    index: int | None
    info: TensorInfo
    base: str
    spelling: tuple[tuple[str, str], ...]

    def in_block(self, block: Block) -> bool:
        return (block.module, block.place, block.index) == (self.module, self.place, self.index)


def every_name(config: Mapping[str, Any]) -> dict[str, PossibleTensor]:
    """All names that tensors of a model with this config may go by: every spelling, every optional and tied tensor."""
    spec = find(config)
    if spec is None:
        return {}
    spots: dict[str, PossibleTensor] = {}
    for known in (named() for named in _laid_out(spec, config)):
        for block in known.blocks:
            for info in block.tensors:
                spot = PossibleTensor(block.module, block.place, block.index, info, known.base, known.spelling)
                for name in info.names:
                    spots.setdefault(name, spot)
    return spots


def unread(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Stored weights that a model of this config does not load: layers that predict tokens further ahead (MTP)."""
    spec = find(config)
    return [] if spec is None else sorted(_dropped(spec, config, _laid_out(spec, config), names))


def _dropped(spec: ArchitectureSpec, config: Mapping[str, Any], spelled: Spelled, names: Collection[str]) -> set[str]:
    """Tensors that hold weights which the model does not read."""
    inside = [begin.replace("{base}", base) for b in spelled[0]().blocks for begin in b.dropped for base in spec.bases]
    begins = (*(begin.format(**config) for begin in spec.dropped), *inside)
    return {name for name in names if name.startswith(begins)} if begins else set()


def says_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config says that the head is the embedding's tensor."""
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
    return bool(config.get("tie_word_embeddings", nested))


def tied_head(
    config: Mapping[str, Any], names: Collection[str], model: str, known: Architecture | None = None
) -> tuple[str, str] | None:
    """The head that shares an embedding's tensor after loading, and its stream (if it reads one); None without one.

    The config decides where it says so, whatever is stored beside it; else a head that is not stored is tied.

    Args:
        known: the architecture as it was resolved for these names, which may spare resolving it again.
    """
    if find(config) is None:
        return None
    says = says_tied(config)
    if not says and known is not None and any(info.tied and info.name in names for info in known.tensors()):
        return None
    for info in resolve(config, names, model, keep_unknown=True, untie=True).heads():
        if says or info.name not in names:
            reads = [part.space.name for axis in info.axes for part in axis.parts if part.role == "read"]
            return info.name, next(iter(reads), "")
    return None


def _with_unaligned(architecture: Architecture, names: Collection[str]) -> Architecture:
    """The architecture with a block of tensors that have no spaces."""
    module = next(iter(architecture.layers_key), "default")
    extra = tuple(TensorInfo(name, (name,), ()) for name in names)
    return replace(architecture, blocks=(*architecture.blocks, Block("unknown", module, None, "after", extra)))


def _missing(architecture: Architecture, present: set[str]) -> list[str]:
    needed = (t for t in architecture.tensors() if not t.optional and not present.intersection(t.tied))
    return [name for tensor in needed for name in tensor.names if name not in present]


def _present_only(architecture: Architecture, present: set[str], untie: bool) -> Architecture:
    """The architecture without the optional tensors that the checkpoint lacks, or has in another form."""

    def there(tensor: TensorInfo) -> bool:
        names = (*tensor.names, *tensor.tied) if untie else tensor.names
        return bool(present.intersection(names)) or not (tensor.optional or tensor.unless in present)

    blocks = []
    for block in architecture.blocks:
        present_tensors = tuple(filter(there, block.tensors))
        used = {space.name for tensor in present_tensors for space in tensor.spaces()}
        spaces = {local: space for local, space in block.spaces.items() if space.name in used}
        blocks.append(replace(block, tensors=present_tensors, spaces=spaces))
    return replace(architecture, blocks=tuple(block for block in blocks if block.tensors))


_LAYER = re.compile(r"^(?P<stack>(?:[^.]+\.)*?[^.\d][^.]*)\.(?P<index>\d+)\.")


def unaligned(names: Collection[str], config: Mapping[str, Any] | None = None) -> Architecture:
    """An architecture without spaces, for plain merging of unknown checkpoints.

    Tensors whose names share a layer number (`model.layers.3.`) form a block; each other one is a block of the first
    layers' module. The config key of the number of layers is the one that names layers and holds that number.
    """
    matches = {name: _LAYER.match(name) for name in names}
    stacks = dict.fromkeys(match["stack"] for match in matches.values() if match)
    module = {stack: "default" if len(stacks) == 1 else stack for stack in stacks}
    blocks: dict[str, Block] = {}
    for name, match in matches.items():
        place = f"{match['stack']}.{match['index']}" if match else name
        block = blocks.get(place) or Block(
            place,
            module[match["stack"]] if match else next(iter(module.values()), "default"),
            int(match["index"]) if match else None,
            "layer" if match else "before",
            (),
        )
        blocks[place] = replace(block, tensors=(*block.tensors, TensorInfo(name, (name,), ())))
    ordered = sorted(blocks.values(), key=lambda b: (b.module, -1 if b.index is None else b.index, b.name))
    keys = {name: _layers_key(config, ordered, name) for name in module.values()}
    return Architecture("unknown", {}, {}, tuple(ordered), keys or {"default": "num_hidden_layers"})


def _layers_key(config: Mapping[str, Any] | None, blocks: Collection[Block], module: str) -> str:
    count = 1 + max(block.index for block in blocks if block.module == module and block.index is not None)
    fits = [key for key, value in (config or {}).items() if "layer" in key and type(value) is int and value == count]
    return fits[0] if fits and "num_hidden_layers" not in fits else "num_hidden_layers"
