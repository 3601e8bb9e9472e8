"""What transformers fills into a config, read off the source of its class without importing it.

Importing transformers takes longer than everything that looking at a model needs otherwise. Where the source does not
plainly say what becomes of an entry, nothing is guessed.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

from rotation_merge.checkpoints.plain_python import Nested, Refused, Scope, Unclear, set_in

_BASES = ("PreTrainedConfig", "PretrainedConfig")
_MIXIN = "BackboneConfigMixin"

_PARTS = re.compile(r"_(text|vision)(_model)?$")
"""Ends of the kinds whose classes lie beside the class of the whole."""

_KINDS = {"NoneType": "None"}
"""Types that annotations write otherwise."""


@dataclass(frozen=True)
class _Part:
    """A config in a config.

    Attributes:
        own: the name of its class in the same file; None: that of its kind, or else of the kind `usual`.
        optional: whether there may be none.
    """

    own: str | None
    usual: str | None = None
    optional: bool = False


@dataclass
class _Class:
    """A config class as its source says it.

    Attributes:
        kinds, values: annotation and default of each entry.
        constants: what it has beside its entries.
        parts: configs in it.
        methods: its functions, by name; those of a mixin, too.
        unclear: entries that functions set which others may call, or whose defaults are not plain.
        aliases: other names of entries, and the entries.
        file: where it stands.
    """

    file: str
    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, _Part] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)


def with_defaults(
    raw: Mapping[str, Any], names: Collection[str], within: Mapping[str, Collection[str]] | None = None
) -> dict[str, Any] | None:
    """A config.json with the defaults of its class; None where `names` might be others in transformers' hands.

    Args:
        names: the entries that matter; all others need not be as transformers has them.
        within: those that matter in the configs within.
    """
    found = _class_of(str(raw.get("model_type"))) if "auto_map" not in raw else None
    try:
        return None if found is None else _made(found, raw, frozenset(names), within or {})
    except Refused:
        return None


def _made(
    found: _Class, raw: Mapping[str, Any], names: frozenset[str], within: Mapping[str, Collection[str]]
) -> dict[str, Any]:
    """The config that a class makes of one.

    Raises:
        Refused: it makes none, or what becomes of `names` is not clear.
    """
    doubled = set(found.aliases) & set(found.values)  # whose defaults are those of other entries
    _clear(not set(found.aliases) & set(raw) and {found.aliases[name] for name in doubled} <= set(raw))
    _clear(_plain_rope(raw, found, names))
    _clear(all(_fits(raw[name], kind) for name, kind in found.kinds.items() if name in raw))
    raw = copy.deepcopy(dict(raw))
    fields = set(found.kinds) | _of_base()
    values = {name: value for name, value in found.values.items() if name not in doubled}
    entries = {**found.constants, **copy.deepcopy(values), **{n: v for n, v in raw.items() if n in fields}}
    scope = Scope(entries, {n: v for n, v in raw.items() if n not in fields}, found.aliases, found.methods)
    scope.unknown = lambda name: _of_all(name, True)
    scope.unclear |= found.unclear - set(raw)
    scope.settle = lambda: _settle(scope, found, within)
    _run(scope, found)
    config = {n: value for n, value in scope.entries.items() if n in raw or n not in found.constants}
    unclear = scope.unclear | {name for method in _others(found) for name in set_in(method)}
    tables = {name for name in names if isinstance(config.get(name), Mapping)} - {ROPE, LAYERS, *found.parts}
    changed = {name for name in names - {ROPE, LAYERS} if _of_all(name, name not in config)}
    _clear(not names & (unclear | tables | changed))
    return config


def _clear(condition: bool) -> None:
    if not condition:
        raise Refused


def _run(scope: Scope, found: _Class) -> None:
    """What a class does once entries are set, and what it checks after."""
    if "__post_init__" in found.methods:
        scope.run(found.methods["__post_init__"])
    else:
        scope.settle()
    for name, method in found.methods.items():
        if name.startswith("validate_") and name != "validate_rope":
            scope.run(method)
    if "validate_layer_type" not in found.methods:
        _check_layers(scope)


def _check_layers(scope: Scope) -> None:
    """What all config classes check of kinds of layers: that there are such, one for each layer."""
    own = {name: scope.entries.get(scope.aliases.get(name, name)) for name in ("num_hidden_layers", *LAYER_KINDS)}
    count = own["num_hidden_layers"]
    for entry, table in LAYER_KINDS.items():
        kinds = own[entry]
        _clear(kinds is None or (isinstance(kinds, list) and count in (None, len(kinds))))
        _clear(kinds is None or not _table(table) or all(f'"{word}"' in _table(table) for word in kinds))


def _settle(scope: Scope, found: _Class, within: Mapping[str, Collection[str]]) -> None:
    """What all config classes do: make the configs within, and entries of what else is given."""
    for name, part in found.parts.items():
        _clear(name not in scope.unclear)
        own = scope.entries.get(name)
        if own is None and part.optional:
            continue
        _clear(isinstance(own, dict))
        if isinstance(own, dict) and not isinstance(own, Nested):
            kind = str(own.get("model_type", part.usual))
            inner = _named(found.file, part.own) if part.own is not None else _class_of(kind)
            _clear(inner is not None)
            scope.entries[name] = Nested(_made(inner or found, own, frozenset(within.get(name, ())), {}))
    layers = scope.given.pop(LAYERS, None)
    scope.entries.update(scope.given)
    if layers is not None:
        scope.entries[LAYERS] = _by_layer(layers, scope.entries)
    kinds = scope.entries.get(scope.aliases.get("layer_types", "layer_types")) or []
    _clear(not any(f'"{word}": ' in _table("_LEGACY_LAYER_TYPE_REMAP") for word in kinds))


LAYER_KINDS = {"layer_types": "ALLOWED_ATTN_LAYER_TYPES", "mlp_layer_types": "ALLOWED_MLP_LAYER_TYPES"}
"""Entries that list kinds of layers, and transformers' tables of those there are."""
ROPE, LAYERS = "rope_parameters", "per_layer_config"
_ROPE_WORDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def _by_layer(layers: Any, entries: Mapping[str, Any]) -> dict[str, Any]:
    """What single layers have otherwise than all, as transformers writes it.

    Raises:
        Refused: it is not that.
    """
    _clear(isinstance(layers, dict) and f'kwargs.pop("{LAYERS}"' in _base())
    count = entries.get("num_hidden_layers")
    found = {int(i): own for i, own in layers.items()}
    _clear(isinstance(count, int) and all(isinstance(own, dict) and 0 <= i < count for i, own in found.items()))
    words = {name for own in found.values() for name in own}
    _clear(words <= set(entries) and not words & {"skip", "sliding_window", "attention_chunk_size"})
    _clear(None in (entries.get("sliding_window"), entries.get("attention_chunk_size")))
    kept = {i: {n: v for n, v in own.items() if v != entries[n]} for i, own in found.items()}
    digits = len(str(max((i for i, own in kept.items() if own), default=0)))
    return {str(i).zfill(digits): own for i, own in kept.items() if own}


def _plain_rope(raw: Mapping[str, Any], found: _Class, names: Collection[str]) -> bool:
    """Whether the table of rotary positions, as far as it matters, is that of config.json."""
    if ROPE not in names and "validate_rope" not in found.methods:
        return True
    table = raw.get(ROPE) or {}
    known = _ROPE_WORDS | set(found.constants.get("ignore_keys_at_rope_validation") or ())
    plain = isinstance(table, Mapping) and set(table) <= known and not raw.get("rope_scaling")
    usual = plain and {table.get(word, "default") for word in ("rope_type", "type")} == {"default"}
    own = "convert_rope_params_to_dict" in found.methods
    return usual and (ROPE not in names or not own or "partial_rotary_factor" in table)


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value is of an annotated type, as far as the annotation says it plainly."""
    kind = type(value).__name__
    return _KINDS.get(kind, kind) in re.findall(r"[\w']+", annotation) or f"'{value}'" in annotation


def _folder() -> str:
    found = find_spec("transformers")
    return os.path.dirname(found.origin) if found is not None and found.origin else ""


@cache
def _whole_base() -> str:
    with open(os.path.join(_folder(), "configuration_utils.py"), encoding="utf-8") as file:
        return file.read()


@cache
def _base() -> str:
    """The source of the class that all configs extend."""
    return re.split(r"^class Pre[tT]rainedConfig", _whole_base(), maxsplit=1, flags=re.MULTILINE)[-1]


@cache
def _table(name: str) -> str:
    """The source of a table beside that class; nothing where there is none."""
    found = re.search(rf"^{name} = [({{].*?^[)}}]", _whole_base(), re.MULTILINE | re.DOTALL)
    return found[0] if found is not None else ""


@cache
def _of_base() -> frozenset[str]:
    """Entries that all configs have."""
    return _set_by_base(r"^    (\w+): (?!ClassVar)")


def _of_all(name: str, absent: bool) -> bool:
    """Whether the class that all configs extend sets an entry, or has it where a config does not."""
    return name in _set_by_base(r"\bself\.(\w+) = ") or (absent and name in _set_by_base(r"^    (\w+): "))


@cache
def _set_by_base(words: str) -> frozenset[str]:
    """What stands in that class in place of the group."""
    return frozenset(re.findall(words, _base(), re.MULTILINE))


@cache
def _parsed(file: str) -> list[ast.ClassDef]:
    """The classes of a file in transformers' folder; none where there is no such file."""
    path = os.path.join(_folder(), file)
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as source:
        return [node for node in ast.parse(source.read()).body if isinstance(node, ast.ClassDef)]


@cache
def _class_of(model_type: str) -> _Class | None:
    """The class of a kind of model, where it lies in the folder of that name and extends nothing but the base."""
    stem = _PARTS.sub("", model_type.replace("-", "_"))
    if not stem.isidentifier():
        return None
    file = os.path.join("models", stem, f"configuration_{stem}.py")
    return next((_read(node, file) for node in _parsed(file) if _model_type(node) == model_type), None)


@cache
def _named(file: str, name: str) -> _Class | None:
    return next((_read(node, file) for node in _parsed(file) if node.name == name), None)


def _model_type(node: ast.ClassDef) -> str | None:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="model_type")], value=ast.Constant(value=str(found))):
                return found
    return None


def _read(node: ast.ClassDef, file: str) -> _Class | None:
    bases = [ast.unparse(base) for base in node.bases]
    if bases[-1:] not in [[base] for base in _BASES] or bases[:-1] not in ([], [_MIXIN]):
        return None
    found = _Class(file)
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                _entry(found, name, statement)
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as names):
                found.aliases.update(ast.literal_eval(names))
            case ast.Assign(targets=[ast.Name(id="sub_configs_defaults")], value=ast.Dict(keys=keys, values=values)):
                named = {ast.literal_eval(key): value for key, value in zip(keys, values, strict=True) if key}
                found.parts.update({name: _part(value) for name, value in named.items()})
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() | ast.Set() as value):
                found.constants[name] = ast.literal_eval(value)
    mixed = [m for m in _parsed("backbone_utils.py") if m.name == _MIXIN] if _MIXIN in bases else []
    for part in (*mixed, node):
        found.methods.update({f.name: f for f in part.body if isinstance(f, ast.FunctionDef)})
    return found if found.kinds else None


def _part(value: ast.expr) -> _Part:
    """A config in a config, as a class declares it: its class, or `SubConfigSpec(config_class=..., model_type=...)`."""
    if not isinstance(value, ast.Call):
        return _Part(ast.unparse(value))
    said = {word.arg: word.value for word in value.keywords}
    own = ast.unparse(said["config_class"]) if "config_class" in said else "AutoConfig"
    usual = ast.literal_eval(said["model_type"]) if "model_type" in said else None
    optional = "optional" in said and bool(ast.literal_eval(said["optional"]))
    return _Part(None if own == "AutoConfig" else own, usual, optional)


def _others(found: _Class) -> Iterator[ast.FunctionDef]:
    """Functions of a class that others call when it suits them."""
    for name, method in found.methods.items():
        if not name.startswith(("validate_", "__post_init__", "convert_rope_params_to_dict")):
            yield method


def _entry(found: _Class, name: str, statement: ast.AnnAssign) -> None:
    found.kinds[name] = ast.unparse(statement.annotation)
    try:
        found.values[name] = Scope({}).value(statement.value) if statement.value is not None else None
    except Unclear:
        found.unclear.add(name)
