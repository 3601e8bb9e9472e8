"""Whether an adapter was merged into its base rightly, whatever tool did it; if not, what went wrong.

The base with the adapter, opened lazily, is the right answer, tensor by tensor. Where the merged model is another, its
change is compared with what frequent mistakes make of the adapter's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from mergekit.common import ModelPath
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import find, resolve, says_tied, stores_codes
from rotation_merge.diagnose.doctor.case import Cause
from rotation_merge.diagnose.doctor.fitted import SHARE, Fitted, as_matrix, grid_of
from rotation_merge.errors import ArchitectureError, CheckpointError, named
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.adapter_names import named_for
from rotation_merge.model.adapter_parts import AdapterPart, parts_by_name
from rotation_merge.model.adapters import SUFFIX, Adapter
from rotation_merge.model.apply import at_least_float32, with_tied
from rotation_merge.model.codes import codes_in, dequantised
from rotation_merge.model.contents import ADAPTER_CONFIG, Contents
from rotation_merge.model.folder import place_of
from rotation_merge.model.forms import restructured
from rotation_merge.model.gguf import quantised
from rotation_merge.model.low_rank import LowRank, stacks
from rotation_merge.model.open import open_model, parse_reference, read_stored, with_adapter
from rotation_merge.model.tensors import Tensors, are_equal, as_tensors
from rotation_merge.model.view import View
from rotation_merge.workers import Progress

STILL = 0.51
"""Units of rounding that a tensor which the adapter does not change may be off: half of one, by rounding once."""
MOST = 0.8
"""Share of all matrices that differ by changes of full rank where the merge has another base."""
CLEARER = 0.7
"""Share of what the adapter's own change leaves that a mistake's may leave where it is the better explanation."""
SAMPLE = 1 << 12
"""Entries of an expert's change by which it is told from those of other experts."""

RIGHT, OTHER, UNCHANGED, SOME, ELSEWHERE = "", "other change", "unchanged", "some experts", "other tensors"
CODES, BASE, TIED, NAN = "FP8 scales", "other base", "tied head", "NaN"
MERGE = "merge again with peft's merge_and_unload(), once, by the adapter's own adapter_config.json"
CHANGES: dict[str, tuple[str, str]] = {
    "scale": ("is in the model {}", MERGE),
    UNCHANGED: ("is missing (the tensor is the base's)", "merge again: the tool left these modules out"),
    "whole modules": ("replaces whole tensors ('modules_to_save') and is missing", "copy them from the adapter"),
    "transposed": ("is transposed", "merge again, with the 'fan_in_fan_out' of the module's class"),
    "lower rank": ("is cut to {}", "merge again with the ranks of the factors ('rank_pattern')"),
    SOME: ("is missing, and that of other experts is not", "merge again: change all experts"),
    "experts permuted": ("is that of another expert", "merge again: keep the experts' order"),
    "halves swapped": ("has gates and values swapped", "merge again: keep the order of the fused halves"),
    "DoRA magnitude": ("lacks DoRA's magnitudes", MERGE),
    "FP8 codes": ("was added to FP8 codes, not to the numbers that they stand for", "dequantise the base, then merge"),
    OTHER: ("is another in the model{}", "was another adapter merged as well, or another step run? merge again"),
}
TENSORS: dict[str, tuple[float, str, str]] = {
    BASE: (0.98, "differ by changes of full rank: it is not from this base", "compare the two: 'doctor MERGED BASE'"),
    NAN: (1.0, "hold NaN or infinity", "merge again in float32, or bfloat16"),
    CODES: (0.98, "hold FP8 codes without their scales", "dequantise the base, then merge"),
    ELSEWHERE: (0.9, "changed, though the adapter does not name them", "take them from the base, or merge again"),
    "missing tensors": (0.97, "are missing", "copy them from the base, or merge again"),
    "new tensors": (0.6, "are not in the base", "remove them if nothing reads them"),
    "lost tensors": (0.3, "predict further tokens (MTP) and are missing", "copy them, or decode without speculation"),
    TIED: (0.95, "{}", "store both, with 'tie_word_embeddings' as it must be, or merge again"),
}
"""Causes by name: what a change of the adapter is or lacks, and the remedy; what other tensors are, the likelihood, and
the remedy."""


class TensorFinding(NamedTuple):
    """What became of one change of the adapter, or of one other tensor.

    Attributes:
        kind: `RIGHT`, or the name of a cause.
        name: of the tensor, or of the part of it that changes.
        detail: completes the words of the cause.
        note: on this name alone.
        size: of a change in units of the rounding, how far it is off; of another tensor relative to its norm.
        full: whether a matrix is off by a change of full rank; None: it is no matrix.
    """

    kind: str
    name: str
    detail: str = ""
    note: str = ""
    size: float = 0.0
    full: bool | None = None


class Region(NamedTuple):
    """The entries of a stored tensor that one change of the adapter is of.

    Attributes:
        expert: whose factors they are, of a change of all experts.
        cut: gives a view of them in a tensor of that shape.
    """

    name: str
    part: AdapterPart
    expert: int | None
    cut: Callable[[Tensor], Tensor]


class Mistake(NamedTuple):
    """What a mistake makes of a change."""

    kind: str
    change: Tensor
    detail: str = ""


@dataclass(frozen=True, eq=False)
class AdapterMerge:
    """A base, an adapter, and the model that they are said to have become, all under the base's names.

    Attributes:
        adapter: with the names of the base.
        base, expected, model: the base, the base with the adapter, and the merged model, as they are opened.
        architecture: the base's, with a tied head as a tensor of its own.
        before, right, merged: the tensors of these three.
        parts: see `parts_by_name`.
        codes: FP8 codes as the base and the merged model store them; none where they store numbers.
    """

    adapter: Adapter
    base: View
    expected: View
    model: View
    architecture: Architecture
    before: Tensors
    right: Tensors
    merged: Tensors
    parts: Mapping[str, list[tuple[int, AdapterPart]]]
    codes: tuple[Tensors, Tensors]

    @classmethod
    def open(cls, base_name: str, adapter: Adapter, name: str) -> AdapterMerge:
        """Open all three; of tensors, only heads and embeddings are read.

        Raises:
            CheckpointError: one cannot be read, the base lacks what the adapter changes, or shapes differ.
        """
        base = open_model(base_name, unsupported="merge", any_base=True, dequantise=True)
        adapter, model = named_for(adapter, base), _opened(name, base)
        reference = base.reference.model_copy(update={"lora": ModelPath(path=adapter.path)})
        expected, architecture, of_model = with_adapter(base, adapter, reference), _apart(base), _apart(model)
        before, right = (with_tied(architecture, view.tensors) for view in (base, expected))
        merged = restructured(with_tied(of_model, model.tensors), of_model, architecture)
        for tensor, shape in before.shapes.items():
            if merged.shapes.get(tensor, shape) != shape:
                problem = f"'{tensor}' is {list(merged.shapes[tensor])}, in {base.name} {list(shape)}"
                raise CheckpointError(problem, where=name, remedy="name the base that it was made from")
        apart = View(base.name, base.config, architecture, before, base.files, untie=True)
        parts, codes = parts_by_name(apart, adapter, expected.name), (_codes(base_name), _codes(name))
        return cls(adapter, base, expected, model, architecture, before, right, merged, parts, codes)

    def findings(self, progress: Progress | None = None) -> list[TensorFinding]:
        """What became of each change of the adapter, and every other tensor that is not the base's."""
        findings = [*self._absent(), *self._tied()]
        settled = self._copies | {finding.name for finding in findings}
        groups = [(info, info.names) for info in self.architecture.tensors()]
        placed = {name for _, names in groups for name in names}
        groups += [(TensorInfo(name, (name,), ()), (name,)) for name in self.before if name not in placed]
        for number, (info, names) in enumerate(groups):
            if progress is not None:
                progress("comparing", number, len(groups))
            findings += self._of(info, [name for name in names if name in self.merged and name not in settled])
        return findings

    @property
    def changes(self) -> int:
        """The number of changes of the adapter, those of all experts in one tensor counted one by one."""
        return sum(1 for name in self.parts if name not in self._copies for _ in self._regions(name))

    @cached_property
    def _heads(self) -> list[str]:
        return [info.name for info in self.architecture.heads()]

    def is_tied(self, view: View) -> bool:
        """Whether a model's head is its embedding: its config says so, or the base has none and does not say why."""
        untold = not says_tied(self.base.config) and any(head not in self.base.tensors for head in self._heads)
        return says_tied(view.config) or untold

    @cached_property
    def _copies(self) -> set[str]:
        """Heads that are the embedding's tensor everywhere."""
        return {*self._heads} if all(map(self.is_tied, (self.base, self.expected, self.model))) else set()

    def _absent(self) -> Iterator[TensorFinding]:
        """Tensors of the base that the merged model lacks, and the other way round."""
        of_model, unread, spec = _apart(self.model), set(self.base.unread), find(self.base.config)
        spare = tuple(spec.ignored) if spec is not None else ()
        for name in self.before:
            if name not in self.merged and not name.endswith(spare):
                yield TensorFinding("lost tensors" if name in unread else "missing tensors", name)
        if not self.is_tied(self.model) and not any(info.name in self.model.tensors for info in of_model.heads()):
            yield from (TensorFinding("missing tensors", name) for name in self._heads if name in self.merged)
        known = restructured(self.before, self.architecture, of_model)
        further = (name for name in self.model.tensors if name not in known and not name.endswith(spare))
        yield from (TensorFinding("new tensors", name) for name in further)

    def _tied(self) -> Iterator[TensorFinding]:
        """Heads and embeddings that are one tensor in the merged model alone, or in the right one alone."""
        for info in self.architecture.heads():
            head, embedding = info.name, next((name for name in info.tied if name in self.before), "")
            if head not in self.merged or embedding not in self.merged:
                continue
            sources = (self.before, self.right, self.merged)
            was_one, one, are_one = (are_equal(tensors[head], tensors[embedding]) for tensors in sources)
            if one and not are_one:
                yield TensorFinding(TIED, head, f"'{head}' and '{embedding}' are one tensor, but differ in the model")
            elif are_one and not one:
                words = f"'{head}' and '{embedding}' are one tensor in the model, but must differ"
                words += "; the change of one reached both" if was_one else ""
                yield from (TensorFinding(TIED, name, words) for name in (head, embedding))

    def _of(self, info: TensorInfo, names: Sequence[str]) -> list[TensorFinding]:
        """What became of a tensor, or of those of all its experts."""
        findings, samples = list[TensorFinding](), dict[str, tuple[Tensor, Tensor]]()
        for name in names:
            if name not in self.parts and are_equal(self.before[name], self.merged[name]):
                continue
            before = at_least_float32(self.before[name])
            if not self.before.dtypes[name].is_floating_point:
                findings.append(TensorFinding(ELSEWHERE, name))
                continue
            right = at_least_float32(self.right[name]) if name in self.parts else before
            merged = self.merged[name].to(right.dtype, copy=True)
            if not all_finite([merged]):
                findings.append(TensorFinding(NAN, name))
                continue
            for region in self._regions(name):
                fitted = self._fitted(name, *(region.cut(tensor) for tensor in (before, right, merged)))
                finding = self._change(region, name, fitted)
                findings.append(finding)
                if finding.kind == OTHER and stacks(info):
                    step = -(-fitted.change.numel() // SAMPLE)
                    gained = fitted.after - fitted.before
                    samples[region.name] = gained.flatten()[::step], fitted.change.flatten()[::step]
                region.cut(merged).copy_(region.cut(right))
            if (rest := self._still(name, right, merged)) is not None:
                findings.append(rest)
        return _of_experts(findings, samples) if stacks(info) else findings

    def _regions(self, name: str) -> Iterator[Region]:
        """Where the adapter's changes fall in a tensor."""
        for number, part in self.parts.get(name, ()):
            one = part.expert if part.expert is not None and not part.info.stacked else None
            experts: Sequence[int | None] = range(part.experts) if part.experts and not part.info.stacked else [one]
            for expert in experts:
                label = f"{name}[{expert}]" if expert is not None else name
                if part.target is not None:
                    label += f" ({part.change.module.rpartition('.')[2]})"
                of = (number if part.info.stacked else expert) if part.experts else None
                yield Region(label, part, of, partial(_cut, part=part, expert=expert))

    def _fitted(self, name: str, before: Tensor, right: Tensor, merged: Tensor) -> Fitted:
        stored = torch.float8_e4m3fn if name in self.codes[1] else self.merged.dtypes[name]
        grid = grid_of(merged, stored)
        half = torch.finfo(torch.bfloat16).eps  # nobody computes in FP8
        weights = max(torch.finfo(grid).eps, half if name in self.codes[0] else 0.0)
        changes = max(min(weights, half), self._rounding_of_factors)
        change = as_matrix(right) - as_matrix(before)
        return Fitted(as_matrix(before), change, as_matrix(merged), grid, (weights, changes))

    @cached_property
    def _rounding_of_factors(self) -> float:
        dtypes = set(as_tensors(self.adapter.tensors).dtypes.values())
        return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)

    def _still(self, name: str, before: Tensor, merged: Tensor) -> TensorFinding | None:
        """A tensor that should be the base's, and is not."""
        if torch.equal(before.to(self.merged.dtypes[name]).to(before.dtype), merged):
            return None
        fitted = self._fitted(name, before, before, merged)
        codes = name in self.codes[0]
        allowed = STILL * (3 if codes else 1)  # scales and numbers are rounded, too
        if fitted.deviation <= allowed:
            return None
        if codes and replace(fitted, before=as_matrix(self.codes[0][name].float())).deviation <= allowed:
            return TensorFinding(CODES, name)
        size = float(fitted.off.norm() / fitted.before.norm().clamp_min(1e-30))
        note = f" (by {size:.2g} of its norm)"
        return TensorFinding(ELSEWHERE, name, note=note, size=size, full=fitted.is_full if before.ndim > 1 else None)

    def _change(self, region: Region, name: str, fitted: Fitted) -> TensorFinding:
        """What became of one change."""
        label, part, change = region.name, region.part, fitted.change
        if fitted.right:
            return TensorFinding(RIGHT, label, size=fitted.deviation)
        if kind := self._on_codes(name, region, fitted):
            return TensorFinding(kind, label)
        fit, tolerance = fitted.fit(change), SHARE + fitted.spread(change)
        held = fitted.explains(fit) and abs(fit.factor) >= tolerance  # such as a quarter of it
        if not held and (fitted.gained <= 0.25 * fitted.expected or (fitted.coarse and fitted.explains(fit))):
            return TensorFinding("whole modules" if part.change.value else UNCHANGED, label)
        again = fitted.fit(change, fitted.sums)  # beside what one merge made
        if again.rest < CLEARER * fit.rest and fitted.explains(again) and abs(again.factor - 1) <= tolerance:
            return TensorFinding("scale", label, _times(2.0, SHARE, part, self.adapter))
        mistakes = [(fitted.fit(mistake.change), mistake) for mistake in self._mistakes(region, fitted)]
        for best, mistake in sorted(mistakes, key=lambda pair: pair[0].rest)[:1]:
            if best.rest < CLEARER * fit.rest and fitted.explains(best):
                return TensorFinding(mistake.kind, label, mistake.detail)
        if fitted.explains(fit) and abs(fit.factor - 1) > tolerance:
            return TensorFinding("scale", label, _times(fit.factor, tolerance, part, self.adapter))
        if min(change.shape) == 1:
            return TensorFinding(OTHER, label)
        rank = "full rank" if fitted.is_full else f"rank {fitted.rank}"
        words = f": the difference is of {rank}" if fitted.rank else " by little"
        return TensorFinding(OTHER, label, words, full=fitted.is_full)

    def _low_rank(self, region: Region) -> LowRank | None:
        """The factors of one map's change; None where it has none."""
        if not region.part.change.a:
            return None
        low = region.part.factors(self.adapter)
        return low if region.expert is None else low.of_expert(region.expert)

    def _mistakes(self, region: Region, fitted: Fitted) -> Iterator[Mistake]:
        """What mistakes make of a change."""
        change, low = fitted.change, self._low_rank(region)
        turned = low is not None and region.part.flipped
        if change.shape[0] == change.shape[1]:
            yield Mistake("transposed", change.mT)
        if stacks(region.part.info):
            yield from (Mistake("halves swapped", change.roll(change.shape[dim] // 2, dim)) for dim in (0, 1))
        if low is not None and low.magnitude is not None:
            product = low.to(change.dtype).product().flatten(1)
            yield Mistake("DoRA magnitude", product.mT if turned else product)
        elif low is not None and (count := fitted.first_ranks(low, turned)) < low.rank:
            first = replace(low, a=low.a[:count], b=low.b[:, :count]).to(change.dtype).product().flatten(1)
            yield Mistake("lower rank", first.mT if turned else first, f"ranks 1 to {count} of {low.rank}")

    def _on_codes(self, name: str, region: Region, fitted: Fitted) -> str:
        """The kind of a change that was made to FP8 codes, or that codes without scales have; empty: of none."""
        if name not in self.codes[0]:
            return ""
        codes = as_matrix(region.cut(self.codes[0][name].float()))
        scaled = fitted.change * torch.where(codes == 0, 0.0, fitted.before / codes)
        if name in self.codes[1] and replace(fitted, change=scaled).spread(scaled) < 0.2:
            added = fitted.fit(scaled)
            if fitted.explains(added) and abs(added.factor - 1) < 0.1:
                return "FP8 codes"
        return CODES if replace(fitted, before=codes).right else ""


def of_adapter(merge: AdapterMerge, progress: Progress | None = None) -> tuple[list[Cause], dict[str, Any]]:
    """Causes why a merge with an adapter is not right, the likeliest first, and facts for the reader.

    The facts are the number of changes and of right ones, the largest deviation of these in units of the rounding, the
    tensor where that is, and the models whose head is their embedding.

    Raises:
        CheckpointError: a model cannot be read.
    """
    findings = merge.findings(progress)
    right = [finding for finding in findings if finding.kind == RIGHT]
    worst = max(right, key=lambda finding: finding.size, default=TensorFinding(RIGHT, ""))
    tied = [view.name for view in (merge.base, merge.model) if merge.is_tied(view)]
    facts = {"changes": merge.changes, "right": len(right), "deviation": worst.size, "at": worst.name, "tied": tied}
    matrices = sum(len(shape) > 1 for shape in merge.before.shapes.values())
    full = [finding for finding in findings if finding.full]
    others = [finding for finding in full if finding.kind == ELSEWHERE]
    if len(full) > MOST * matrices and others:
        size = median(finding.size for finding in others)
        kept = [finding for finding in findings if finding.kind in ("missing tensors", "new tensors", "lost tensors")]
        findings = [*kept, *(TensorFinding(BASE, finding.name, size=size) for finding in full)]
    groups: dict[tuple[str, str], list[TensorFinding]] = {}
    for finding in findings:
        if finding.kind != RIGHT:
            groups.setdefault((finding.kind, finding.detail), []).append(finding)
    causes = [_cause(merge, kind, detail, group) for (kind, detail), group in groups.items()]
    return sorted(causes, key=lambda cause: -cause.likelihood), facts


def _cause(merge: AdapterMerge, kind: str, detail: str, findings: Sequence[TensorFinding]) -> Cause:
    """The cause that findings of one kind are signs of."""
    names = named(f"'{finding.name}'{finding.note}" for finding in findings)
    if kind in CHANGES:
        words, remedy = CHANGES[kind]
        what = (
            f"{len(findings)} of {merge.changes} changes of the adapter, each of which {words.format(detail)}: {names}"
        )
        return Cause(kind, 0.97, what, merge.model.name, remedy)
    likelihood, words, remedy = TENSORS[kind]
    what = words.format(detail) if kind == TIED else f"{len(findings)} tensors {words}: {names}"
    return Cause(kind, likelihood, what, merge.model.name, remedy)


def _times(factor: float, tolerance: float, part: AdapterPart, adapter: Adapter) -> str:
    """A number of times that a change is held, and what explains it."""
    rank = adapter.shapes[part.change.b][1] // max(part.experts, 1) if part.change.b else 1
    rooted = bool(adapter.config.get("use_rslora"))
    scale, other = ("alpha / sqrt(r)", "alpha / r") if rooted else ("alpha / r", "alpha / sqrt(r) (rsLoRA)")
    divisor, root = ("sqrt(r)", rank**0.5) if rooted else ("r", float(rank))
    reasons = [
        (f"its scale {scale} = {part.scale:.4g} was forgotten", 1 / (part.scale or 1.0)),
        (f"its scale is {scale}, and {other} was taken", rank ** (-0.5 if rooted else 0.5)),
        (f"it was not divided by {divisor} = {root:.4g}", root),
        ("it was merged twice", 2.0),
        ("it was subtracted", -1.0),
    ]
    explained = {reason: value for reason, value in reasons if abs(factor - value) <= tolerance * max(1, abs(value))}
    value = next(iter(explained.values()), factor)
    return f"{value:.{4 if explained else 2}g} times" + (f" ({' or '.join(explained)})" if explained else "")


def _of_experts(findings: list[TensorFinding], samples: Mapping[str, tuple[Tensor, Tensor]]) -> list[TensorFinding]:
    """Findings of all experts together: changes that some lack, and those that others have."""
    kinds, places = {finding.kind for finding in findings}, dict[str, str]()
    for name, (gained, _) in samples.items():
        near = {other: float(torch.cosine_similarity(gained, change, 0)) for other, (_, change) in samples.items()}
        nearest = max(near, key=lambda other: near[other])
        if nearest != name and near[nearest] > 0.9:
            places[name] = nearest
    kind_of = {UNCHANGED: SOME} if RIGHT in kinds else {}
    return [
        TensorFinding("experts permuted", finding.name, note=f" (that of '{places[finding.name]}')")
        if finding.name in places
        else finding._replace(kind=kind_of.get(finding.kind, finding.kind))
        for finding in findings
    ]


def _cut(tensor: Tensor, part: AdapterPart, expert: int | None) -> Tensor:
    """A view of the entries that a change, or that of one expert in one tensor with others, is of."""
    tensor = tensor if part.target is None else tensor.narrow(*part.target)
    return tensor if expert is None else tensor[expert]


def _apart(view: View) -> Architecture:
    """A model's architecture with a tied head as a tensor of its own."""
    if find(view.config) is None:
        return view.architecture
    with suppress(CheckpointError):  # of a model that lacks tensors
        return resolve(dict(view.config), list(view), view.name, keep_unknown=True, untie=True)
    return view.architecture


def _opened(name: str, base: View) -> View:
    """The merged model; with the architecture of its base where it lacks tensors of its own."""
    try:
        view = open_model(name, unsupported="merge", any_base=True, dequantise=True)
    except (CheckpointError, ArchitectureError):
        _, stored, tensors = read_stored(parse_reference(name), MergeOptions())
        config, tensors = dequantised(stored, tensors, name)
        if stores_codes(config):
            raise
        view = View(name, config, _apart(base), tensors)
    note = "" if view.files is None else quantised(view.files.folder)
    if "quantised" in note:
        remedy = "give a GGUF in F16, BF16 or F32, or the folder that it was made of"
        raise CheckpointError(f"its numbers are those of coarse codes ({note})", where=name, remedy=remedy)
    return view


def _codes(name: str) -> Tensors:
    """FP8 codes that a model stores."""
    tensors = read_stored(parse_reference(name), MergeOptions())[2]
    codes = codes_in(tensors)
    return Tensors({code: tensors.shapes[code] for code in codes}, {}, tensors.read)


def opened_adapter(name: str) -> Adapter | None:
    """The adapter in a folder, in the hub's cache, or in a single file; None where the name is of something else.

    Raises:
        CheckpointError: it is damaged, or more than ``W + s B A`` for each map.
    """
    if name.endswith(SUFFIX) and os.path.isfile(name):
        return Adapter.open(name)
    if os.path.isfile(name) or (place := place_of(parse_reference(name).model)) is None or not os.path.isdir(place):
        return None
    contents = Contents(place)
    return Adapter.open(place) if contents.has(ADAPTER_CONFIG) and contents.opened is None else None
