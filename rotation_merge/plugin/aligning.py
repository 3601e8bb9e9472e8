"""A donor aligned outside a merge: opening two checkpoints, writing the aligned one as a normal checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import yaml
from mergekit.common import ModelReference, dtype_from_name, parse_kmb
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architectures import Architecture, resolve
from rotation_merge.errors import CheckpointError, RotationMergeError, nearest
from rotation_merge.matching.file import check_fingerprints, load_alignment, save_alignment
from rotation_merge.matching.fingerprint import Fingerprint, Watched
from rotation_merge.matching.model import Alignment, Progress, aligned_tensors, match_model
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sources import OnDevice
from rotation_merge.matching.state import TensorSource
from rotation_merge.plugin.checking.sources import in_cache, is_hub_name
from rotation_merge.plugin.models import Model, Models
from rotation_merge.plugin.output import staged
from rotation_merge.report.card import fingerprints
from rotation_merge.report.record import MergeReport, versions
from rotation_merge.report.run import Run

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

OWN = ("config.json", "rotation_merge.json")


class WithTied:
    """A source that also gives a tied tensor under the name of its own."""

    def __init__(self, source: TensorSource, architecture: Architecture) -> None:
        self.source = source
        self.tied = {name: info.tied for info in architecture.tensors() for name in info.names if info.tied}

    def __contains__(self, name: object) -> bool:
        return self._stored(str(name)) in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[self._stored(name)]

    def _stored(self, name: str) -> str:
        if name in self.source:
            return name
        return next((other for other in self.tied.get(name, ()) if other in self.source), name)


@dataclass(frozen=True)
class Pair:
    """Two checkpoints of one architecture, opened lazily.

    Attributes:
        device: where their tensors are put as they are read.
        marks: what is known of their fingerprints; every tensor read leaves its mark.
    """

    anchor: Model
    donor: Model
    architecture: Architecture
    device: str = "cpu"
    marks: tuple[Fingerprint, Fingerprint] = field(default_factory=lambda: (Fingerprint(), Fingerprint()))

    @property
    def sources(self) -> tuple[TensorSource, TensorSource]:
        return self._source(self.anchor, self.marks[0]), self._source(self.donor, self.marks[1])

    def _source(self, model: Model, mark: Fingerprint) -> TensorSource:
        source = WithTied(Watched(model, mark), self.architecture)
        return source if self.device == "cpu" else OnDevice(source, torch.device(self.device))

    def fingerprints(self) -> tuple[str, str]:
        """Of anchor and donor; only what has not been read yet is read."""
        for model, mark in zip((self.anchor, self.donor), self.marks, strict=True):
            mark.complete(model.architecture.named(), model)
        return self.marks[0].hexdigest(self.anchor.config), self.marks[1].hexdigest(self.donor.config)

    def report(self, run: Run, recipe: str = "") -> MergeReport:
        """The report on what was done to the donor."""
        names = str(self.anchor.reference), str(self.donor.reference)
        marks = dict(zip(names, self.fingerprints(), strict=True))
        return MergeReport.of(run, self.anchor.reference, "none", recipe, marks)


def open_pair(anchor: str, donor: str, untie: bool = False, device: str = "cpu") -> Pair:
    """Two checkpoints, checked to be of one architecture and size.

    Raises:
        RotationMergeError: one is missing, damaged or not supported, or they do not fit together.
    """
    models = Models(MergeOptions())
    first, second = _reference(anchor), _reference(donor)
    models.check(first, [second])
    a, d = models[first], models[second]
    architecture = a.architecture if not untie else resolve(a.config, a.names, anchor, untie=True)
    counts = [{m: len(x.architecture.layers(m)) for m in x.architecture.layers_key} for x in (a, d)]
    if counts[0] != counts[1]:
        mine, its = (", ".join(map(str, count.values())) for count in counts)
        raise CheckpointError(
            f"has {its} layers, {anchor} has {mine}",
            where=donor,
            remedy="pick layers of either with 'slices' in a recipe",
        )
    for info in architecture.tensors():
        ours, theirs = a.shapes.get(info.name), d.shapes.get(info.name)
        if ours is not None and theirs is not None and ours != theirs:
            raise CheckpointError(
                f"tensor '{info.name}' is {list(theirs)}, in {anchor} it is {list(ours)}",
                where=donor,
                remedy="other vocabularies or heads need a merge recipe, with 'tokenizer' or 'exclude'",
            )
    return Pair(a, d, architecture, device)


def check_models(anchor: str, *others: str) -> None:
    """All are there, whole, and of the anchor's architecture and sizes; their vocabularies may differ.

    Models of the hub that have not been downloaded are left out.

    Raises:
        RotationMergeError: names the model and what is wrong with it.
    """
    references = [_reference(name) for name in others]
    here = [r for r in references if not is_hub_name(r.model.path) or os.path.exists(r.model.path) or in_cache(r)]
    Models(MergeOptions()).check(_reference(anchor), here)


def _reference(path: str) -> ModelReference:
    try:
        return ModelReference.parse(path)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"'{path}' names no model ({error})", remedy="write a directory, or org/name") from error


def match_pair(pair: Pair, options: MatchOptions, progress: Progress | None = None) -> tuple[Alignment, MergeReport]:
    """The best alignment of the donor to the anchor, and the report on it."""
    anchor, donor = pair.sources
    run = Run()
    alignment = match_model(pair.architecture, anchor, donor, options, progress)
    run.aligned(str(pair.donor.reference), alignment)
    recipe = yaml.safe_dump(asdict(options), sort_keys=False)
    return alignment, pair.report(run, recipe)


def empty_report(pair: Pair) -> MergeReport:
    """A report of nothing, where nothing was matched."""
    return pair.report(Run())


def write_aligned(
    pair: Pair,
    alignment: Alignment,
    report: MergeReport,
    out: str,
    shard_size: int = 5_000_000_000,
    dtype: str | None = None,
    untie: bool = False,
    progress: Progress | None = None,
) -> None:
    """The aligned donor as a normal checkpoint: weights, config, tokenizer, card and report, whole or not at all."""
    wanted = dtype_from_name(dtype)
    with staged(out) as staging:
        os.makedirs(staging, exist_ok=True)
        writer = TensorWriter(staging, max_shard_size=shard_size)
        total = sum(len(info.names) for info in pair.architecture.tensors())
        written: set[str] = set()
        for name, tensor in aligned_tensors(pair.architecture, pair.sources[1], alignment):
            if progress is not None:
                progress("writing", len(written), total)
            writer.save_tensor(name, _stored(tensor, wanted), clone=True)
            written.add(name)
        for name in pair.donor.names:
            if name not in written:
                writer.save_tensor(name, _stored(pair.donor[name], wanted), clone=True)
        writer.finalize()
        report.write(os.path.join(staging, "rotation_merge.json"))
        _write_beside(pair, report, staging, dtype, untie)


def parse_size(text: str) -> int:
    """A file size such as 500M or 5B.

    Raises:
        RotationMergeError: it is none.
    """
    try:
        size = parse_kmb(text)
    except (ValueError, IndexError) as error:
        raise RotationMergeError(f"'{text}' is no size", remedy="write bytes, or 500M, or 5B") from error
    if size <= 0:
        raise RotationMergeError(f"'{text}' is no size", remedy="it must be positive")
    return size


def check_dtype(name: str | None) -> None:
    """Refuse a dtype that weights cannot be stored in.

    Raises:
        RotationMergeError: names the nearest known one.
    """
    known = ("bfloat16", "float16", "float32", "float64")
    if name is not None and name not in known:
        raise RotationMergeError(f"there is no dtype '{name}'", remedy=nearest(name, known))


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _write_beside(pair: Pair, report: MergeReport, out: str, dtype: str | None, untie: bool) -> None:
    source = pair.donor.loader.index.base_path
    for name in sorted(os.listdir(source)):
        path = os.path.join(source, name)
        if os.path.isfile(path) and name.endswith(KEPT) and name not in OWN and not name.endswith(".index.json"):
            shutil.copyfile(path, os.path.join(out, name))
    with open(os.path.join(out, "README.md"), "w", encoding="utf-8") as file:
        file.write(card(pair, report, os.path.basename(out)))
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    if untie:
        config["tie_word_embeddings"] = False
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def card(pair: Pair, report: MergeReport, name: str) -> str:
    """A model card for an aligned donor."""
    donor, anchor = str(pair.donor.reference), str(pair.anchor.reference)
    before, after = report.relative_distances(donor)
    return (
        "---\nlibrary_name: transformers\ntags:\n- rotation_merge\n- re-basin\n- mergekit\n---\n"
        f"# {name}\n\n"
        f"This is `{donor}` in the coordinates of `{anchor}`. It computes what `{donor}` computes, up to rounding; its "
        "weights were moved by symmetries of the architecture as near as possible to the anchor's, by rotation_merge "
        f"{versions().get('rotation-merge', '')}.\n\n"
        f"Relative distance to the anchor over the matched tensors: {before:.4g} before, {after:.4g} after. "
        f"{report.verdict(donor)[:1].upper()}{report.verdict(donor)[1:]}.\n\n"
        f"Options:\n\n```yaml\n{report.recipe}```\n"
        + "\n".join(fingerprints(report))
        + "\n\nPer space: `rotation_merge.json`.\n"
    )


def read_alignment(pair: Pair, path: str) -> Alignment:
    """An alignment file made for this very pair.

    Raises:
        AlignmentError: it cannot be read, or was made for other weights.
    """
    file = load_alignment(path, pair.architecture)
    anchor, donor = pair.fingerprints()
    check_fingerprints(file, path, anchor, donor, (str(pair.anchor.reference), str(pair.donor.reference)))
    return file.alignment


def write_alignment(pair: Pair, alignment: Alignment, path: str, made: Mapping[str, Any], half: bool = False) -> None:
    """All transforms in one file, with the fingerprints of both models."""
    anchor, donor = pair.fingerprints()
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    dtype = torch.float16 if half else torch.float32
    save_alignment(path, alignment, pair.architecture, anchor, donor, {**made, **versions()}, dtype)
