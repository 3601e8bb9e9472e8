"""`rotation-merge demo`: recipes on the shipped checkpoints, plainly and aligned, in one table."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import click
import yaml

import rotation_merge as rm
from rotation_merge.cli.command import cli_command
from rotation_merge.cli.paths import NEW_FOLDER
from rotation_merge.cli.show import Answer, Table, note
from rotation_merge.files import TemporaryFolder
from rotation_merge.record import REPORT_FILE

CHECKPOINTS = Path(rm.__file__).parent / "run" / "checkpoints"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"attention": "none", "ffn": "none", "scaling": False},
    "local": {"heads": "permutation"},
    "whole": {"heads": "permutation", "residual": "rotation"},
    "learned": {},
}
"""The ways to merge, with the recipes' parameters: models as they are, heads and neurons aligned, the whole model, and
by an alignment that is learned on the training images."""
ALIGNED = ("plain", "local", "whole")
SCALE, LEARNING_STEPS = 0.75, 500
"""Of the change that is carried over, chosen before measuring; of learning."""


class DemoStage(NamedTuple):
    """One merge of the demo.

    Attributes:
        donor: `twin`: the anchor in other coordinates.
        data: that the merge is judged by; digits by accuracy, texts by their mean loss in nats.
        old: the model whose fine-tune the donor is, where its change is carried to the anchor.
    """

    words: str
    anchor: str
    donor: str
    data: tuple[str, ...]
    ways: tuple[str, ...]
    old: str = ""

    @property
    def measure(self) -> str:
        return "accuracy" if self.data == ("digits",) else "loss (nats)"

    def figure(self, model: str) -> float:
        """The figure that a model is judged by."""
        figure, _, nats = self.measure.partition(" ")
        config = rm.EvaluateConfig(limit=160 if nats else None)
        return fmean(rm.evaluate(model, f"demo:{name}", config)[figure] for name in self.data)


CARRIED = f"English fine-tune carried to Llama 1 (x {SCALE})"
STAGES = {
    "twin": DemoStage("ViT and its rotated twin", "vit-0", "twin", ("digits",), ("plain", "whole")),
    "vits": DemoStage("two ViTs, seeds 0 and 1", "vit-0", "vit-1", ("digits",), tuple(WAYS)),
    "finetunes": DemoStage(
        "two fine-tunes of one Llama", "llama-0-english", "llama-0-c", ("english", "c"), ("plain", "local")
    ),
    "llamas": DemoStage("two Llamas, seeds 0 and 1", "llama-0", "llama-1", ("python",), ALIGNED),
    "transport": DemoStage(CARRIED, "llama-1", "llama-0-english", ("english",), ALIGNED, old="llama-0"),
}


def _merged(stage: DemoStage, place: Path) -> dict[str, Any]:
    """Merge a stage in each of its ways, and measure the results."""
    from rotation_merge.mergekit_plugin.run import merge_recipe
    from rotation_merge.report.files import read_report

    place.mkdir(parents=True, exist_ok=True)
    anchor, donor = str(CHECKPOINTS / stage.anchor), str(CHECKPOINTS / stage.donor)
    if stage.donor == "twin":
        donor = str(place / "twin-of-vit-0")
        rm.Alignment.random(anchor, **WAYS["whole"]).apply(anchor).save_pretrained(donor)
    parents = [stage.figure(parent) for parent in ([anchor] if stage.old else [anchor, donor])]
    merges, before, after = dict[str, float](), 0.0, 0.0
    for way in stage.ways:
        out, text = place / way, _recipe(stage, anchor, donor, way, place)
        out.with_suffix(".yml").write_text(text, encoding="utf-8")
        merge_recipe(text, str(out))
        merges[way] = stage.figure(str(out))
        if way in ("local", "whole"):
            report = read_report(str(out / REPORT_FILE))
            before, after = report.relative_distances(report.donors()[0])
    facts = {"title": stage.words, "measure": stage.measure, "parents": parents, "merges": merges}
    return {**facts, "before": before, "after": after}


def _recipe(stage: DemoStage, anchor: str, donor: str, way: str, place: Path) -> str:
    """The recipe of one way to merge two models."""
    settings: dict[str, dict[str, Any]] = {anchor: {"weight": 0.5}, donor: {"weight": 0.5}}
    if stage.old:
        settings = {donor: {"weight": SCALE, "finetuned_from": str(CHECKPOINTS / stage.old)}}
    if way == "learned":
        from rotation_merge.run.demo import digits

        pixels, labels, _, _ = digits()
        batches = [{"pixel_values": x, "labels": y} for x, y in zip(pixels.split(64), labels.split(64), strict=True)]
        (learned,) = rm.fit(anchor, donor, batches, options=rm.FitConfig(steps=LEARNING_STEPS)).alignments
        settings[donor]["alignment"] = str(place / "learned.safetensors")
        learned.save(settings[donor]["alignment"])
    models = [{"model": model, "parameters": values} for model, values in settings.items()]
    parameters = {"delegate": "task_arithmetic" if stage.old else "linear", **WAYS[way]}
    recipe = {"merge_method": "rotation_merge", "base_model": anchor, "models": models, "parameters": parameters}
    return yaml.safe_dump({**recipe, "dtype": "float32"}, sort_keys=False)


def demo(
    *,
    only: Annotated[tuple[str, ...], click.Choice(list(STAGES)), "run only this stage (may be repeated)"] = (),
    keep: Annotated[str | None, NEW_FOLDER, "keep the merged models and recipes there"] = None,
) -> Answer:
    """Merge the tiny checkpoints that come with the package and print what alignment did.

    Two ViTs on scikit-learn's digits and Llamas on bytes of text, each merged half and half by a recipe of mergekit: as
    they are, with heads and neurons aligned, with the whole model aligned, and with an alignment learned on the
    training images. Takes about two minutes on one core.
    """
    from rotation_merge.workers import on_one_thread  # the models are tiny: threads would only wait for each other

    began, results = time.perf_counter(), list[dict[str, Any]]()
    with TemporaryFolder() as scratch:
        for name in only or tuple(STAGES):
            note(f"{name}: {STAGES[name].words} ...")
            results.append(on_one_thread(True, _merged, STAGES[name], Path(keep or scratch, name)))
    seconds = time.perf_counter() - began
    lines = (
        Table(results),
        f"Merged through mergekit in {seconds:.0f} s. Distances: donor to anchor, relative to the anchor's norm.",
        f"Recipes and merged models: {keep}" if keep else "",
    )
    return Answer({"seconds": seconds, "results": results}, lines)


command = cli_command("rotation-merge demo --only twin")(demo)
