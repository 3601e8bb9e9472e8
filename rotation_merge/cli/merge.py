"""`rotation-merge merge`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import rotation_merge as rm
from rotation_merge.cli.command import Device, cli_command
from rotation_merge.cli.paths import MODEL, NEW_MERGE, SAMPLES
from rotation_merge.cli.show import Answer, Table, note
from rotation_merge.run.sample_kinds import KINDS
from rotation_merge.search.config import MergeConfig

if TYPE_CHECKING:
    from rotation_merge.search.run import Outcome


@cli_command(
    "rotation-merge merge org/anchor org/donor ./merged",
    "rotation-merge merge org/anchor org/donor ./merged --data samples.txt --budget 30m",
)
def command(
    models: Annotated[tuple[str, ...], MODEL, "A B [C ...]"],
    out: Annotated[str, NEW_MERGE],
    *,
    data: Annotated[
        tuple[str, ...],
        SAMPLES,
        f"samples to merge with and to judge by: {KINDS}; once for all models or once for each. Not given: text that "
        "the models write themselves (self), or images made of noise (synthetic)",
    ] = (),
    config: MergeConfig,
    device: Device = "cpu",
    anyway: Annotated[bool, "write the best merge even if one parent alone is better"] = False,
    force: bool,
) -> Answer:
    """Find the best merge of A, B, ... and write it to OUT with its recipe.

    Tries plain and aligned averages, averages of task vectors (from --base, or a base found from adapters, cards or
    weights), refits and learned alignments, the likeliest first, until the budget is spent. Judges each on held-out
    samples, and by its forgetting of the base. Writes the best one with recipe.yml, from which mergekit-yaml makes the
    same weights. If one parent alone is better than every merge, writes nothing without --anyway, and exits with code
    1; also if the difference is not clear. An interrupted search continues.
    """
    note("loading libraries ...")
    from rotation_merge.api import usable_device

    device, out = usable_device(device), out.rstrip(os.sep) or os.sep  # files beside it begin with its name
    outcome = rm.merge(models, out, data, config, device=device, force=force, anyway=anyway, watch=note)
    return Answer(
        _facts(outcome, out), _lines(outcome, out), 0 if anyway or (outcome.written and outcome.verdict.clear) else 1
    )


def _facts(outcome: Outcome, out: str) -> dict[str, Any]:
    """The outcome as JSON has it: the verdict's facts, models by name, no losses of single samples."""
    facts, verdict = asdict(outcome), outcome.verdict
    for figures in filter(None, [facts["base"], *(trial["figures"] for trial in facts["tried"])]):
        del figures["base_texts"], figures["losses"]
    facts = {**facts.pop("verdict"), **facts, "parents": {each.name: asdict(each) for each in verdict.parents}}
    chosen = {"best_parent": verdict.best_parent.name, "worth_it": verdict.worth_it, "clear": verdict.clear}
    return {**facts, **chosen, "written": out if outcome.written else None}


def _lines(outcome: Outcome, out: str) -> list[str | Table]:
    """The verdict, the scores, and what to do."""
    from rotation_merge.model.naming import shortened
    from rotation_merge.model.verdict import sentences, tables

    verdict, parent = outcome.verdict, outcome.verdict.best_parent
    parents = [each.name for each in verdict.parents]
    first, *details = sentences(verdict)
    lines: list[str | Table] = [first]
    lines += [Table(rows, title) for title, rows in tables(verdict, shortened(parents)).items()]
    lines += [f"not tried: {name} ({why})" for name, why in verdict.left_out.items()] + details
    if not verdict.worth_it and verdict.ensemble is not None and verdict.ensemble.score < parent.score:
        figures = f"{verdict.ensemble.score:.4f}, {parent.score:.4f}"
        lines.append(f"The ensemble is better than each model alone ({figures}). Serve the ensemble, or distil it:")
        lines.append(f"rotation-merge polish {parent.name} OTHER --teachers {' '.join(parents)}")
    if outcome.written:
        return [*lines, f"Written to {out}; mergekit-yaml {out}/recipe.yml OTHER gives the same weights."]
    return [*lines, "Nothing was written; --anyway writes the best merge."]
