"""Causes found by comparing two parents: sizes, vocabularies, configs, tied heads, coordinates, training."""

from __future__ import annotations

from collections.abc import Iterator

from rotation_merge.architecture.fields import differences
from rotation_merge.diagnose.doctor.case import Case, Cause, is_small
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.aligned_output import match_pair
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import are_here, open_pair
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.model.chat import ends_of_text, ids_in
from rotation_merge.model.contents import Contents
from rotation_merge.model.nearness import RELATED, cosine_text, equality, likeness
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import moved_tokens
from rotation_merge.record import RELATED as NEAR
from rotation_merge.run.proof import LARGEST
from rotation_merge.workers import Progress

POSITIONS = "the merge uses the anchor's positions"
"""Consequence, in `architecture/fields.json`, of entries that place tokens."""

ONE = 0.1
"""Relative distance that may be left where two models are one in two coordinate systems."""
STILL_FAR = 0.4
"""Relative distance that is left between aligned models trained from one base at most."""

LEARN = "learn an alignment on samples ('rotation-merge align --learn', or 'merge --data')"
EVERYTHING = AlignConfig(heads="permutation", residual="largest")


def of_pairs(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Causes from comparing the first parent with each other one."""
    if case.method == "passthrough" and case.recipe.get("slices"):
        remedy = "a stacked model needs training before it is of use; average models of one size instead"
        yield Cause("stacked layers", 0.6, "layers of models are stacked, not averaged", case.name, remedy)
    for name in case.parents[1:]:
        try:
            _check_fit(case, name)
        except RotationMergeError as error:
            yield Cause("do not fit", 0.98, error.what, error.where or name, error.remedy or "merge models that fit")
            continue
        anchor, donor = case.models[case.parents[0]], case.models[name]
        if not (case.recipe.get("tokenizer") or case.recipe.get("tokenizer_source")):
            yield from _vocabulary(case, anchor, donor)
        yield from _config(anchor, donor)
        if remark := equality(anchor, donor):
            yield Cause("equal models", 0.7, f"it {remark}", name, "name its adapter, or leave it out")
        yield from _coordinates(case, anchor, donor, progress)


def _check_fit(case: Case, name: str) -> None:
    """Raise an error where two models cannot be averaged at all."""
    known = case.donors.get(name)
    excluded = known.session.recipe.excluded if known is not None else lambda _: False
    if known is not None:
        known.pair  # noqa: B018  (it is checked)
    if are_here(case.parents[0], name):
        open_pair(case.parents[0], name, NOTHING, excluded=excluded, words=False)


def _vocabulary(case: Case, anchor: View, donor: View) -> Iterator[Cause]:
    (moved, whole), name = moved_tokens(anchor, donor), str(donor.reference)
    if moved:
        problem = f"{moved} of {whole} tokens have other ids than in {anchor.reference}: rows of different words meet"
        remedy = "add 'tokenizer: {source: base}' to the recipe"
        yield Cause("tokenizer order", min(0.95, 0.6 + 0.35 * moved / whole), problem, name, remedy)
    first, second = (set(ids_in(model.config.get("eos_token_id"))) for model in (anchor, donor))
    merged = set() if case.merged is None else ends_of_text(Contents(case.merged))
    if first and second and first != second and not first | second <= merged:
        ids = (", ".join(map(str, sorted(ids))) for ids in (second, first))
        problem = f"eos_token_id is {next(ids)}, in {anchor.reference} {next(ids)}: text may not end"
        remedy = "set eos_token_id in the merge's generation_config.json to both"
        yield Cause("end of text", 0.3, problem, name, remedy)


def _config(anchor: View, donor: View) -> Iterator[Cause]:
    """Entries of the configs that change outputs, and heads of which only one is tied."""
    for difference in differences(anchor.config, donor.config):
        if difference.name.endswith("eos_token_id"):
            continue  # see `_vocabulary`
        name, likelihood, remedy = "config", 0.4, "merge models that agree in it, or take the heavier one as the base"
        if difference.name.endswith("max_position_embeddings"):
            name, likelihood = "context length", 0.3
            remedy = "use the base of the shorter context, or test the merge on long inputs"
        elif difference.field.why == POSITIONS:
            name, likelihood = "RoPE base", 0.7
            remedy = "merge models of one RoPE base and scaling, or copy attention from the base (exclude: self_attn)"
        yield Cause(name, likelihood, f"{difference}: {difference.field.why}", str(donor.reference), remedy)
    if bool(anchor.tied_head) != bool(donor.tied_head):
        tied, untied = (anchor, donor) if anchor.tied_head else (donor, anchor)
        problem = f"its output head is tied to the embedding, but that of {untied.reference} is not"
        remedy = "set 'untie: true' in a rotation_merge recipe, or untie the head first"
        yield Cause("tied head", 0.8, problem, str(tied.reference), remedy)


def _coordinates(case: Case, anchor: View, donor: View, progress: Progress | None) -> Iterator[Cause]:
    """Whether the two share their coordinates; where not, whether an alignment brings them together."""
    name, cosine = str(donor.reference), likeness(anchor, donor)
    known = case.donors.get(name)
    if not cosine < RELATED or (known is not None and (known.value("alignment") or known.origin)):
        return
    problem = (
        f"its weights have little in common with those of {anchor.reference} (mean cosine {cosine_text(cosine)}; "
        "fine-tunes of one base: above 0.9)"
    )
    stated = known.options if known is not None and known.options != NOTHING else None
    for options in filter(None, (stated, EVERYTHING)):
        try:
            before, after = _distances(case, name, options, progress)
        except RotationMergeError as error:
            problem += f"; it was not aligned ({error})"
            break
        moved = f"the distance from {before:.2f} to {after:.2f}"
        if after > NEAR * before:
            problem += f"; alignment (residual: {options.residual}) hardly helps: it changes {moved}"
        elif options is not stated:
            remedy = f"use 'merge_method: {METHOD}' with 'preset: far', which lowers {moved}"
            remedy += f"; if that is not enough, {LEARN}" if after > ONE else ""
            yield Cause("other coordinates", 0.92 if after <= ONE * before else 0.88, problem, name, remedy)
            return
        else:
            if after > STILL_FAR:
                yield Cause("separate training", 0.4, f"{problem}; alignment lowers {moved} only", name, LEARN)
            return
    yield Cause("separate training", 0.85, problem, name, f"do not average the two, or {LEARN}")


def _distances(case: Case, name: str, options: AlignConfig, progress: Progress | None) -> tuple[float, float]:
    """Relative distances of a parent to the first one, before and after alignment.

    Raises:
        RotationMergeError: they cannot be aligned, or are too large to be.
    """
    known = case.donors.get(name)
    pair = open_pair(case.parents[0], name, options, known is not None and known.session.models.untie)
    if not is_small(case.parents[0]):
        raise RotationMergeError(f"they have more than {LARGEST:,} weights")
    return match_pair(pair, progress).known_report.relative_distances(name)
