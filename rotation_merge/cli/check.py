"""`rotation-merge check`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rotation_merge.cli.paths import MODELS_OR_RECIPE, read_recipe
from rotation_merge.cli.show import Answer, say, shown


@click.command(epilog="Example: rotation-merge check recipe.yml")
@click.argument("recipe", type=MODELS_OR_RECIPE)
@click.option("--offline", is_flag=True, help="Do not fetch headers of models from the hub.")
@shown
def command(recipe: str, offline: bool) -> Answer:
    """Check RECIPE (a YAML file) before you run it; of the weights, only a few matrices are read.

    Reports every mistake at once, with line, column and remedy: keys, parameters, delegates, models, architectures,
    shapes (from the files' headers), configs against weights, groups, vocabularies. Of models on the hub that are not
    in its cache, it fetches configs and headers with a few small requests (not with --offline), and never weights;
    checks that need weights are skipped. For a recipe without mistakes it names the preset, near or far, that fits the
    models, and the lengths of the changes that the recipe merges.
    """
    from rotation_merge.averaging.task_vectors import RATIO
    from rotation_merge.diagnose.check import lengths_of_changes, needs_of, suggestions
    from rotation_merge.diagnose.sources import HUB_NOTE, absent_models, check_text
    from rotation_merge.report.remote import remote_headers

    text = read_recipe(Path(recipe))
    with remote_headers(absent_models(text), offline) as (remote, refused):
        faults = check_text(text, refused)
        needs = needs_of(recipe, remote) if remote else None
    bad = [fault for fault in faults if fault.error]
    suggested = [] if bad else suggestions(recipe)
    changes = None if bad else lengths_of_changes(recipe)
    licences = {model.name: model.licence for model in remote}
    facts: dict[str, Any] = {"recipe": recipe, "ok": not bad, "faults": [asdict(fault) for fault in faults]}
    facts |= {"presets": [asdict(preset) for preset in suggested]}
    facts |= {"changes": asdict(changes)} if changes is not None else {}
    if needs is not None:
        facts |= {"needs": {**asdict(needs), "shortages": list(needs.shortages())}, "licences": licences}

    def show() -> None:
        for fault in faults:
            say(f"{recipe}:{fault}{'' if fault.error else ' (a note)'}", "red" if fault.error else "yellow")
        if bad:
            say(f"{len(bad)} fault{'s' if len(bad) > 1 else ''}")
            return
        for preset in suggested:
            say(preset.words)
        if needs is not None:
            say(f"{needs.words}; nearness and fingerprints were not checked, they need weights")
            say("licences: " + ", ".join(f"{name} {licence or 'none stated'}" for name, licence in licences.items()))
            for shortage in needs.shortages():
                say(shortage, "yellow")
        if changes is not None:
            say(changes.words, "yellow" if changes.ratio > RATIO else None)
        if any(HUB_NOTE in fault.what for fault in faults):
            say("the recipe is ready to run, if the models that were not checked exist and fit", "yellow")
        else:
            say("the recipe is ready to run", "green")

    return Answer(facts, show, 1 if bad else 0)
