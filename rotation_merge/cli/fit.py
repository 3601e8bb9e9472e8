"""`rotation-merge fit`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import click
import tqdm
from pydantic.dataclasses import dataclass

from rotation_merge.cli.options import (
    config_of,
    config_options,
    device_option,
    matching_options,
    usable_device,
)
from rotation_merge.cli.paths import (
    MODELS_OR_RECIPE,
    NEW_ALIGNMENT,
    SAMPLE_SOURCE,
    WORD,
    hold_outputs,
    is_document,
    writes,
)
from rotation_merge.cli.show import json_option, print_json, say, shown
from rotation_merge.config import Count, Length, option
from rotation_merge.errors import RecipeError
from rotation_merge.files import FILE, Output, Store
from rotation_merge.matching.options import WEIGHTS, AlignConfig, FitConfig, VaryingOptions
from rotation_merge.run.data import KINDS, described, read_samples
from rotation_merge.run.data_checks import check_labels
from rotation_merge.run.functions import load, stored_dtype, to_stored_dtype
from rotation_merge.run.sample_kinds import ReadingConfig


@dataclass(frozen=True)
class FitReadingConfig(ReadingConfig):
    """Options of reading the samples to learn from."""

    limit: Length | None = option(None, "largest number of examples")
    batch_size: Count = option(64, "examples in a batch")


@click.command(
    epilog="""Examples: rotation-merge fit recipe.yml --data samples.txt --alignment learned.safetensors;
    rotation-merge fit org/anchor org/donor --data images/ --alignment learned.safetensors --residual rotation"""
)
@click.argument("models", type=MODELS_OR_RECIPE, nargs=-1, required=True, metavar="RECIPE | ANCHOR DONOR...")
@click.option("--data", type=SAMPLE_SOURCE, required=True, help=f"Samples to learn from, a few hundred: {KINDS}.")
@click.option(
    "--alignment",
    "out",
    type=NEW_ALIGNMENT,
    required=True,
    metavar="FILE",
    help="Where to write the learned transforms.",
)
@config_options(FitConfig)
@config_options(FitReadingConfig)
@device_option("; on a GPU in mixed precision")
@click.option(
    "--devices",
    type=WORD,
    metavar="LIST",
    help="Several devices, as cuda:0,cuda:1: one model on each; mixed models run on the first.",
)
@matching_options
@json_option
@shown
@writes
def command(
    models: tuple[str, ...],
    data: str,
    out: str,
    untie: bool,
    as_json: bool,
    device: str,
    devices: str | None,
    **values: Any,
) -> int:
    """Learn an alignment on data, so that the models between anchor and donor have a low loss.

    Starts from matching on weights, or on samples (--match-on), then lowers the loss of the interpolated models by
    gradient descent. The donor's outputs stay the same. Recipes use the file through 'alignment: FILE' under the donor;
    several donors are fitted jointly, with one file each (FILE-1, FILE-2, ...). An interrupted fit continues.
    """
    names, match, untie = _models_and_options(models, values, untie)
    files = [Output(file, "--alignment", FILE) for file in _alignment_files(out, len(names) - 1)]
    click.get_current_context().with_resource(hold_outputs(files))
    options = config_of(FitConfig, values)
    reading = asdict(config_of(FitReadingConfig, values))
    places = _model_devices(device, devices)
    with Store(out) as work:
        work.begin("fit")
        options = replace(options, state=work.file("state"), half=places[0].startswith("cuda"))
        return _learn(names, match, options, out, data, reading, places, untie, as_json)


def _model_devices(device: str, devices: str | None) -> list[str]:
    """Devices for the models in order: one from --device, or several from --devices."""
    if devices is None:
        return [usable_device(device)]
    if device != "cpu":
        raise click.UsageError("give --device or --devices, not both")
    return [usable_device(name.strip()) for name in devices.split(",")]


def _learn(
    names: list[str],
    match: AlignConfig,
    options: FitConfig,
    out: str,
    data: str,
    reading: dict[str, Any],
    places: list[str],
    untie: bool,
    as_json: bool,
) -> int:
    """Fit, write the alignments and print the result."""
    from rotation_merge.matching.fit import fit
    from rotation_merge.matching.pair import are_here, open_pair

    for donor in (donor for donor in names[1:] if are_here(names[0], donor)):
        pair = open_pair(names[0], donor, match, untie, shapes=False)
        for warning in pair.warnings if not as_json else ():
            say(f"Warning: {warning}", "yellow")
    module = to_stored_dtype(load(names[0]), stored_dtype(names[0])).to(places[0])
    data_set = read_samples(names[0], data, module=module, **reading)
    if options.objective != "distill":
        check_labels(data_set.batches, module, data_set.task, data)
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    with tqdm.tqdm(desc="Learning", total=options.steps, disable=as_json) as bar:

        def watch(done: int, total: int, figures: dict[str, float]) -> None:
            bar.update(done - bar.n)
            bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()})

        result = fit(names[0], names[1:], data_set.batches, match, options, watch, data, untie, module, places)
    files = _alignment_files(out, len(names) - 1)
    result.write(files, {**described(data_set), "seed": options.seed})
    if as_json:
        print_json({"files": files, **result.report.to_dict()})
        return 0
    text = result.report.verdict()
    say(f"{text[:1].upper()}{text[1:]}.")
    for donor, file in zip(names[1:], files, strict=True):
        say(f"Transforms of {donor} written to {file}.", "green")
    return 0


def _models_and_options(
    models: tuple[str, ...], values: dict[str, Any], untie: bool
) -> tuple[list[str], AlignConfig, bool]:
    """Return the anchor and donors, the spaces to match, and whether to untie, from a recipe or the command line."""
    options = config_of(AlignConfig, values)
    if len(models) > 1:
        return list(models), options, untie
    if not is_document(models[0]):
        raise click.UsageError("give a recipe (a YAML file), or an anchor and its donors")
    from rotation_merge.diagnose import donors_of

    pairs = donors_of(models[0])
    if any(isinstance(d.options, VaryingOptions) or d.options != pairs[0].options for d in pairs):
        raise RecipeError(
            "donors or layers have different options", where=models[0], remedy="fit needs the same for all"
        )
    for donor in pairs:
        if donor.origin is not None:
            raise RecipeError(
                f"'finetuned_from' carries {donor.name} over by the map of {donor.origin}",
                where=models[0],
                remedy=f"fit {donor.anchor} and {donor.origin}; the file then serves every fine-tune of it",
            )
    if any(donor.match_on != pairs[0].match_on for donor in pairs):
        raise RecipeError("donors have different 'match_on'", where=models[0], remedy="fit needs the same for all")
    if values["match_on"] == WEIGHTS:
        values["match_on"] = pairs[0].match_on
    return [pairs[0].anchor, *(donor.name for donor in pairs)], pairs[0].options, pairs[0].untie


def _alignment_files(out: str, donors: int) -> list[str]:
    """The file of each donor's transforms."""
    stem, ending = os.path.splitext(out)
    return [out] if donors == 1 else [f"{stem}-{number}{ending}" for number in range(1, donors + 1)]
