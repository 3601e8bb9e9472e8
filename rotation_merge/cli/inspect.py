"""`rotation-merge inspect`: models, recipes, our files, reports, methods and architectures."""

from __future__ import annotations

import os
from typing import Annotated

from rotation_merge.cli.command import cli_command, refuse_idle
from rotation_merge.cli.paths import INPUT_FILE, MODELS_OR_RECIPE, is_document
from rotation_merge.cli.show import Answer
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import AlignConfig, MatchConfig
from rotation_merge.record import REPORT_FILE

GROUPS, OPENING = AlignConfig(), MatchConfig()


def inspect(
    target: Annotated[str | None, MODELS_OR_RECIPE, "[MODEL | RECIPE | FILE]"] = None,
    *,
    fingerprint: Annotated[bool, "fingerprint of a model, or of the models in a file"] = False,
    report: Annotated[bool, "report of the merge in a folder"] = False,
    draft: Annotated[bool, "draft an architecture file for a model from its names and shapes"] = False,
    methods: Annotated[bool, "merge methods that can be the delegate, and all recipe parameters"] = False,
    architectures: Annotated[bool, "supported architectures and their classes"] = False,
    prove: Annotated[str | None, INPUT_FILE, "try an architecture file on a tiny model"] = None,
    config: Annotated[str | None, INPUT_FILE, "with --prove: keys of the tiny model's config, as JSON"] = None,
    options: AlignConfig = GROUPS,
    opening: Annotated[MatchConfig, ("untie",)] = OPENING,
) -> Answer:
    """Spaces, sizes and groups of a model, what stays unaligned and why, and the memory and disk that aligning needs.

    A model is taken as a donor under these options; a recipe shows each of its donors under its own options. Reads only
    configs and headers. Memory does not include Python and its libraries. For FILE (an alignment, statistics, or a
    merge's rotation_merge.json), shows its content.

    Reports, cards and files identify models by fingerprints. These tell weights apart; they do not protect against
    forgery.
    """
    target = None if target is None else os.fspath(target)
    of_target = {"--fingerprint": fingerprint, "--report": report, "--draft": draft}
    of_none = {"--methods": methods, "--architectures": architectures, "--prove": prove is not None}
    if len(questions := [flag for flag, value in (of_target | of_none).items() if value]) > 1:
        raise RotationMergeError(f"{questions[0]} and {questions[1]} cannot be combined", remedy="use one at a time")
    alone, document = any(of_none.values()), target is not None and is_document(target)
    if alone == (target is not None):
        problem = f"{questions[0]} takes no model" if alone else "no model, recipe or file is given"
        remedy = "leave it out" if alone else "name a model, a recipe or a file, or see --help"
        raise RotationMergeError(problem, where=target, remedy=remedy)
    aligning = (*AlignConfig.options(), "untie")
    refuse_idle(
        (prove is None, ["config"], "{} needs --prove", "leave it out, or add --prove FILE"),
        (bool(questions) or document, aligning, "{} is an option of aligning a model", "leave it out"),
    )
    from rotation_merge.cli import inspected
    from rotation_merge.report.files import is_own_file

    if prove is not None:
        return inspected.proof_of(prove, config)
    if methods or architectures:
        return inspected.all_methods() if methods else inspected.all_architectures()
    assert target is not None
    if fingerprint or draft:
        return inspected.fingerprint_of(target) if fingerprint else inspected.draft_of(target)
    if report or (document and is_own_file(target)):
        return inspected.of_file(target if document else os.path.join(target, REPORT_FILE))
    return inspected.of_aligning(target, options, opening.untie)


command = cli_command(
    "rotation-merge inspect org/model --residual rotation",
    "rotation-merge inspect recipe.yml",
    "rotation-merge inspect ./merged --report",
)(inspect)
