"""What an alignment file holds is proven: members of every space of every architecture pass, nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from cli_support import run
from matching_support import save_for
from plugin_support import from_file, make, mergekit_yaml, one_error, recipe_for, twin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge import Alignment
from rotation_merge.architecture.build import build
from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import find
from rotation_merge.matching.alignment import Transforms, load_alignment
from rotation_merge.symmetry import (
    ConvolutionTransform,
    ExpertTransform,
    GroupElement,
    HeadTransform,
    MixerTransform,
    Monomial,
    NeuronTransform,
    Orthogonal,
    Permutation,
    Scaling,
    SpaceTransform,
    StreamTransform,
    TranslationTransform,
)
from rotation_merge.symmetry.admitted import LARGEST, WIDEST, admitted

NAMES = {f"{case.family}-{case.name}": case for case in tiny.ALL}


@cache
def architecture(name: str) -> Architecture:
    case = NAMES[name]
    config = {**case.model_class.config_class(**case.config).to_dict(), "architectures": [case.class_name]}
    spec = find(config)
    assert spec is not None
    return build(spec, config, spec.bases[0], spec.spellings[0])


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def everything(found: Architecture, wanted: Any, seed: int = 0) -> tuple[Transforms, tuple[str, ...]]:
    """A random transform of every space, and the streams to be folded for it."""
    transforms: Transforms = {}
    folded = []
    for name, space in found.spaces().items():
        if space.kind != "stream":
            transforms[name] = admitted(space, wanted).random(gen(seed))
        elif (kind := found.stream_groups[name][-1]) != "none":
            transforms[name] = found.stream_group(name, kind).random(gen(seed))
            folded += [name] if kind == "rotation" else []
    return transforms, tuple(folded)


def first(index: Tensor) -> Tensor:
    """An index that takes its first entry everywhere."""
    return index[..., :1].expand_as(index).clone()


def spoilt(element: GroupElement) -> list[GroupElement]:
    """Elements beside every group, or beside that of any head."""
    found: list[GroupElement] = [Permutation(torch.zeros(element.batch, element.size, dtype=torch.int64))]
    found.append(Scaling(torch.zeros(element.batch, element.size, dtype=torch.float64)))
    found.append(Scaling(torch.full((element.batch, element.size), torch.nan, dtype=torch.float64)))
    found.append(Orthogonal(torch.ones(element.batch, element.size, element.size, dtype=torch.float64)))
    found.append(Orthogonal(torch.zeros(element.batch, element.size, element.size, dtype=torch.float64) + 1e-30))
    return found


def corrupted(transform: SpaceTransform) -> list[SpaceTransform]:
    """The transform with one thing wrong, in every way."""
    match transform:
        case HeadTransform():
            found: list[SpaceTransform] = [
                replace(transform, groups=transform.groups + len(transform.groups)),
                replace(transform, queries=transform.queries + 1),
                replace(transform, groups=torch.cat([transform.groups, transform.groups])),
            ]
            if len(transform.groups) > 1:
                found.append(replace(transform, groups=first(transform.groups)))
            found += [replace(transform, qk=bad) for bad in spoilt(transform.qk)]
            found += [replace(transform, vo=bad) for bad in spoilt(transform.vo)]
            return found + [replace(transform, gains=bad) for bad in spoilt(transform.gains or transform.qk)]
        case NeuronTransform():
            return [replace(transform, element=bad) for bad in neurons(transform.element)] + [
                replace(transform, degree=transform.degree + 1)
            ]
        case ExpertTransform():
            return [replace(transform, neurons=bad) for bad in neurons(transform.neurons)] + [
                replace(transform, order=first(transform.order)),
                replace(transform, order=transform.order + 99999),
            ]
        case StreamTransform(element=Monomial() as element):
            half = replace(element, scaling=Scaling(0.5 * element.scaling.factor))
            return [replace(transform, element=bad) for bad in (*neurons(element), half)]
        case StreamTransform(element=Orthogonal(matrix=matrix)):
            beside = (matrix * 1.01, torch.ones_like(matrix), matrix[:, :-1, :-1])
            return [replace(transform, element=Orthogonal(bad)) for bad in beside]
        case MixerTransform():
            return [
                replace(transform, groups=transform.groups + 99999),
                replace(transform, heads=transform.heads + 1),
                replace(transform, shared=Permutation(first(transform.shared.index))),
                replace(transform, own=Permutation(transform.own.index + 1)),
            ]
        case ConvolutionTransform():
            each = replace(transform.element, permutation=Permutation(transform.element.permutation.index.roll(1, 1)))
            each.permutation.index[0] = transform.element.permutation.index[0]
            return [replace(transform, element=bad) for bad in (*neurons(transform.element), each)]
        case TranslationTransform(vector=vector):
            return [replace(transform, vector=bad) for bad in (vector[:-1], vector / 0, vector.repeat(2))]
    raise AssertionError(transform)


def neurons(element: Monomial) -> list[Monomial]:
    index, factor = element.permutation.index, element.scaling.factor
    orders = [first(index), index + 99999, index[:, :-1]]
    factors = [torch.zeros_like(factor), torch.full_like(factor, torch.nan), factor * 1e9, factor[:, :-1]]
    return [replace(element, permutation=Permutation(bad)) for bad in orders] + [
        replace(element, scaling=Scaling(bad)) for bad in factors
    ]


@pytest.mark.parametrize("name", NAMES)
def test_members_pass(name: str) -> None:
    found = architecture(name)
    for wanted in (LARGEST, WIDEST):
        for space, transform in everything(found, wanted)[0].items():
            described = found.spaces()[space]
            if described.kind != "stream":
                assert admitted(described, WIDEST).refuses(transform) is None
                assert admitted(described, WIDEST).refuses(transform.inverse().compose(transform)) is None


@pytest.mark.parametrize("name", NAMES)
def test_everything_else_is_refused(name: str, tmp_path: Path) -> None:
    """One thing wrong in one space, and the file is refused with the space's name."""
    found = architecture(name)
    transforms, folded = everything(found, WIDEST)
    kinds = {type(transform): space for space, transform in transforms.items()}
    save_for(tmp_path / "whole", Alignment(transforms, folded), found, "a", "b")
    assert load_alignment(tmp_path / "whole", found).alignment.transforms.keys() == transforms.keys()
    for space in kinds.values():
        described = found.spaces()[space]
        for bad in corrupted(transforms[space]):
            if described.kind != "stream":
                assert admitted(described, WIDEST).refuses(bad)
            else:
                assert all(found.stream_group(space, kind).refuses(bad) for kind in found.stream_groups[space])


@pytest.mark.parametrize("name", ["llama-llama", "bert-classifier", "gpt_neox-parallel", "mixtral-mixtral"])
def test_a_turned_stream_under_layer_norm(name: str) -> None:
    found = architecture(name if name in NAMES else next(n for n in NAMES if n.startswith(name.split("-")[0])))
    for stream, groups in found.stream_groups.items():
        if "rotation" in groups:
            size = found.streams[stream].sizes["size"]
            refused = found.stream_group(stream, "rotation").refuses(StreamTransform(Orthogonal.random(1, size, gen())))
            assert (refused is not None) == found.layer_normed(stream)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two models, and the file that aligns the second, its stream too."""
    folder = tmp_path_factory.mktemp("models")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    done = run(
        "align", anchor, donor, "--alignment", folder / "map", "--residual", "rotation", "--heads", "permutation"
    )
    assert done.exit_code == 0, done.output
    return anchor, donor, folder / "map"


UP = "layers.0.ffn|index"
Content = tuple[dict[str, Tensor], dict[str, str]]


def put(name: str, value: Any) -> Callable[[Content], None]:
    return lambda content: content[1].update({name: value if isinstance(value, str) else json.dumps(value)})


def tensor(change: Callable[[Tensor], Tensor], name: str = UP) -> Callable[[Content], None]:
    return lambda content: content[0].update({name: change(content[0][name])})


def forget(content: Content) -> None:
    """A space's transform is gone, from the header too."""
    for name in [name for name in content[0] if name.startswith("layers.0.ffn|")]:
        del content[0][name]
    content[1]["kinds"] = json.dumps({k: v for k, v in json.loads(content[1]["kinds"]).items() if ".0.ffn" not in k})


def forget_quietly(content: Content) -> None:
    del content[0][UP]


def still_and_moving(content: Content) -> None:
    content[1]["still"] = json.dumps([*json.loads(content[1]["still"]), "layers.0.ffn"])


def another_kind(content: Content) -> None:
    kinds = json.loads(content[1]["kinds"])
    kinds["layers.0.ffn"] = "attention"
    content[1]["kinds"] = json.dumps(kinds)


FAULTS: dict[str, tuple[Callable[[Content], None], str]] = {
    "a permutation of zeros": (tensor(torch.zeros_like), "is not a permutation"),
    "an index of 99999": (tensor(lambda x: x + 99999), "is not a permutation"),
    "an index of one more dimension": (tensor(lambda x: x[None]), "neurons"),
    "a shorter index": (tensor(lambda x: x[:, :-1]), "neurons"),
    "a factor of zero": (tensor(torch.zeros_like, "layers.0.ffn|factor"), "a factor is zero"),
    "a factor that is none": (tensor(lambda x: x * torch.nan, "layers.0.ffn|factor"), "a factor is zero"),
    "a map of ones": (tensor(torch.ones_like, "residual|orthogonal:matrix"), "does not belong to the group: rotation"),
    "a map of nothing": (
        tensor(lambda x: x * torch.nan, "residual|orthogonal:matrix"),
        "does not belong to the group: rotation",
    ),
    "a smaller map": (tensor(lambda x: torch.eye(31)[None], "residual|orthogonal:matrix"), "stream of size 32"),
    "nothing folded": (put("folded", []), "folded"),
    "a stream that is none folded": (put("folded", ["residual", "other"]), "folded"),
    "a transform deleted": (forget, "has no entry for space 'layers.0.ffn'"),
    "a tensor deleted": (forget_quietly, "damaged"),
    "still and moving": (still_and_moving, "twice"),
    "another kind": (another_kind, "damaged"),
    "no anchor": (lambda content: content[1].pop("anchor"), "damaged ('anchor' is missing)"),
    "no family": (lambda content: content[1].pop("family"), "damaged"),
    "another anchor": (put("anchor", "0" * 40), "other weights"),
    "another donor": (put("donor", "0" * 40), "other weights"),
    "kinds are junk": (put("kinds", "{"), "damaged"),
    "kinds are a list": (put("kinds", [1]), "damaged"),
    "folded is a number": (put("folded", 3), "damaged"),
    "folded holds numbers": (put("folded", [3]), "damaged"),
    "made is junk": (put("made", "\x00"), "damaged"),
    "brackets without end": (put("made", "[" * 100000), "damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_line(fault: str, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A file with one thing wrong ends a merge in one line, before anything is written; `check` finds it, too."""
    anchor, donor, whole = models
    with safe_open(whole, "pt") as file:
        content = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change, words = FAULTS[fault]
    change(content)
    save_file({name: x.contiguous() for name, x in content[0].items()}, tmp_path / "map", content[1])
    recipe = from_file(recipe_for("linear", anchor, donor), tmp_path / "map")
    done = mergekit_yaml(recipe, tmp_path / "out")
    assert done.exit_code == 2
    line = one_error(done.output)
    assert words in line
    assert str(tmp_path / "map") in line
    assert not (tmp_path / "out").exists()
    if "weights" not in words:
        checked = run("check", tmp_path / "out.yml")
        assert checked.exit_code == 1
        assert words in checked.output
