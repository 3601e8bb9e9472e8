"""`rotation-merge check`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from rotation_merge.cli.command import cli_command
from rotation_merge.cli.paths import MODELS_OR_RECIPE
from rotation_merge.cli.show import Answer, print_ahead
from rotation_merge.mergekit_plugin.document import documents, read_recipe
from rotation_merge.mergekit_plugin.schema import early_faults


def check(
    recipe: Annotated[str, MODELS_OR_RECIPE],
    *,
    offline: Annotated[bool, "do not fetch headers of models from the hub"] = False,
) -> Answer:
    """Check RECIPE (a YAML file) before you run it; of the weights, only a few matrices are read.

    Reports every mistake at once, with line, column and remedy: keys, parameters, delegates, models, architectures,
    shapes (from the files' headers), configs against weights, groups, vocabularies. Of models on the hub that are not
    in its cache, it fetches configs and headers with a few small requests (not with --offline), and never weights;
    checks that need weights are skipped. For a recipe without mistakes it names the preset, near or far, that fits the
    models, and the lengths of the changes that the recipe merges.
    """
    parsed = documents(read_recipe(recipe))
    early = early_faults(parsed)
    printed = early if print_ahead(f"{recipe}:{fault}" for fault in early) else []
    from rotation_merge.diagnose.check import advice, needs_of
    from rotation_merge.diagnose.sources import HUB_NOTE, absent_models, check_documents
    from rotation_merge.report.remote import remote_headers

    with remote_headers(absent_models(parsed), offline) as (remote, refused, cache):
        faults = check_documents(parsed, refused, remote)
        needs = needs_of(recipe, remote, cache) if remote else None
    bad = [fault for fault in faults if fault.error]
    facts: dict[str, Any] = {"recipe": recipe, "ok": not bad, "faults": list(map(asdict, faults)), "presets": []}
    lines = [f"{recipe}:{fault}{'' if fault.error else ' (a note)'}" for fault in faults if fault not in printed]
    if needs is not None:
        facts["needs"] = needs
        facts["licences"] = {name: (info.card_data or {}).get("license") for name, info in remote.items()}
    if bad:
        return Answer(facts, [*lines, f"{len(bad)} fault{'s' if len(bad) > 1 else ''}"], 1)
    presets, changes = advice(recipe)
    facts["presets"], lines = presets, [*lines, *(preset["words"] for preset in presets)]
    if needs is not None:
        licences = (f"{name} {licence or 'none stated'}" for name, licence in facts["licences"].items())
        lines += [f"{needs['words']}; nearness and fingerprints were not checked, they need weights"]
        lines += [f"licences: {', '.join(licences)}", *needs["shortages"]]
    if changes is not None:
        facts["changes"], lines = changes, [*lines, changes["words"]]
    unseen = any(HUB_NOTE in fault.what for fault in faults)
    condition = ", if the models that were not checked exist and fit" if unseen else ""
    return Answer(facts, [*lines, f"the recipe is ready to run{condition}"])


command = cli_command("rotation-merge check recipe.yml")(check)
