"""Causes found by comparing two parents: sizes, vocabularies, configs, tied heads, coordinates, training."""

from __future__ import annotations

from collections.abc import Iterator

from rotation_merge.architecture.fields import differences
from rotation_merge.diagnose.doctor.case import Case, Cause, is_small
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import are_here, open_pair
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.model.nearness import RELATED, cosine_text, likeness
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import moved_tokens
from rotation_merge.record import RELATED as NEAR
from rotation_merge.run.proof import LARGEST
from rotation_merge.workers import Progress

POSITIONS = "the merge uses the anchor's positions"
"""Consequence, in `architecture/fields.json`, of entries that place tokens."""

ONE = 0.1
"""Share of the distance that may be left where two models are one in two coordinate systems."""

STILL_FAR = 0.4
"""Relative distance that is left between aligned models trained from one base at most."""

LEARN = "learn an alignment on samples ('rotation-merge align --learn', or 'merge --data')"
APART = f"do not average the two, or {LEARN}"

EVERYTHING = AlignConfig(heads="permutation", residual="largest")


def of_pairs(case: Case, progress: Progress | None) -> Iterator[Cause]:
    """Causes from comparing the first parent with each other one."""
    if case.method == "passthrough" and case.recipe.get("slices"):
        yield Cause(
            *("stacked layers", 0.6, "layers of models are stacked, not averaged"),
            case.name,
            "a stacked model needs training before it is of use; average models of one size instead",
        )
    for name in case.parents[1:]:
        if (misfit := _shape_mismatch(case, name)) is not None:
            yield misfit
            continue
        anchor, donor = case.models[case.parents[0]], case.models[name]
        yield from _vocabulary(case, anchor, donor)
        yield from _config(anchor, donor)
        yield from _tied(anchor, donor)
        yield from _coordinates(case, anchor, donor, progress)


def _shape_mismatch(case: Case, name: str) -> Cause | None:
    """The two cannot be averaged at all."""
    known = case.donors.get(name)
    try:
        if known is not None and are_here(known.anchor, known.matched):
            open_pair(known.anchor, known.matched, known.options, known.untie, excluded=known.excluded, shapes=False)
        if are_here(case.parents[0], name):
            excluded = known.excluded if known is not None else lambda _: False
            open_pair(case.parents[0], name, NOTHING, excluded=excluded, shapes=False)
    except RotationMergeError as error:
        return Cause("do not fit", 0.98, error.what, error.where or name, error.remedy or "merge models that fit")
    return None


def _vocabulary(case: Case, anchor: View, donor: View) -> Iterator[Cause]:
    if case.tokenizer:
        return
    remedy = "add 'tokenizer: {source: base}' to the recipe"
    moved, whole = moved_tokens(anchor, donor)
    if moved:
        yield Cause(
            "tokenizer order",
            min(0.95, 0.6 + 0.35 * moved / whole),
            f"{moved} of {whole} tokens have other ids than in {anchor.reference}: rows of different words were "
            "averaged",
            str(donor.reference),
            remedy,
        )
    end = [model.config.get("eos_token_id") for model in (anchor, donor)]
    if None not in end and end[0] != end[1]:
        yield Cause(
            *("end of text", 0.3, f"eos_token_id is {end[1]}, in {anchor.reference} {end[0]}: text may not end"),
            str(donor.reference),
            "set eos_token_id in the merge's generation_config.json to both",
        )


def _config(anchor: View, donor: View) -> Iterator[Cause]:
    for difference in differences(anchor.config, donor.config):
        if difference.name.endswith("eos_token_id"):
            continue  # see `_vocabulary`
        if difference.name.endswith("max_position_embeddings"):
            name, likelihood = "context length", 0.3
            remedy = "use the base of the shorter context, or test the merge on long inputs"
        elif difference.field.why == POSITIONS:
            name, likelihood = "RoPE base", 0.7
            remedy = "merge models of one RoPE base and scaling, or copy attention from the base (exclude: self_attn)"
        else:
            name, likelihood = "config", 0.4
            remedy = "merge models that agree in it, or take the one with more weight as the base"
        yield Cause(name, likelihood, f"{difference}: {difference.field.why}", str(donor.reference), remedy)


def _tied(anchor: View, donor: View) -> Iterator[Cause]:
    heads = [model.tied_head for model in (anchor, donor)]
    if (heads[0] is None) == (heads[1] is None):
        return
    tied, untied = (anchor, donor) if heads[0] else (donor, anchor)
    yield Cause(
        *("tied head", 0.8, f"its output head is tied to the embedding, but that of {untied.reference} is not"),
        str(tied.reference),
        "set 'untie: true' in a rotation_merge recipe, or untie the head first",
    )


def _coordinates(case: Case, anchor: View, donor: View, progress: Progress | None) -> Iterator[Cause]:
    """Whether the two share their coordinates; where not, whether an alignment brings them together."""
    name, known = str(donor.reference), case.donors.get(str(donor.reference))
    cosine = likeness(anchor, donor)
    if cosine >= RELATED or (known is not None and (known.file or known.origin)):
        return
    words = (
        f"its weights have little in common with those of {anchor.reference} (mean cosine {cosine_text(cosine)}; "
        "fine-tunes of one base: above 0.9)"
    )
    tried = [known.options] if known is not None and known.options != NOTHING else []
    for options in (*tried, EVERYTHING):
        try:
            pair = open_pair(str(anchor.reference), name, options, known.untie if known is not None else False)
            if not is_small(case.parents[0]):
                words += f"; alignment was not tried, they have more than {LARGEST:,} weights"
                break
            report = case.match(pair, progress).known_report
        except RotationMergeError as error:
            words += f"; it cannot be aligned ({error})"
            break
        before, after = report.relative_distances(name)
        moved = f"from {before:.2f} to {after:.2f}"
        if after > NEAR * before:
            words += f"; alignment (residual: {pair.options.residual}) hardly helps: the distance goes {moved}"
            continue
        if options not in tried:
            remedy = f"use 'merge_method: {METHOD}' with 'preset: far', which lowers the distance {moved}"
            yield Cause(
                "other coordinates", 0.92 if after <= ONE * before else 0.88, words, name, remedy + _more(after)
            )
        elif after > STILL_FAR:
            words += f"; alignment lowers the distance {moved} only"
            yield Cause("separate training", 0.4, words, name, APART)
        return
    yield Cause("separate training", 0.85, words, name, APART)


def _more(after: float) -> str:
    """The remedy for differences that remain after alignment."""
    return f"; if that is not enough, {LEARN}" if after > ONE else ""
