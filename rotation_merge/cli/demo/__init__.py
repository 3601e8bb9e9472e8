"""`rotation-merge demo`: the shipped checkpoints merged through mergekit, plainly and aligned, in one table."""

from __future__ import annotations

import time
from pathlib import Path

import click

from rotation_merge.cli.paths import NEW_FOLDER, hold_outputs, outputs_of

STAGES = {
    "twin": "a ViT and the same ViT in other coordinates",
    "vits": "two ViTs trained from different seeds",
    "finetunes": "two fine-tunes of one Llama",
    "llamas": "two Llamas trained from different seeds",
    "transport": "a fine-tune carried to another Llama",
    "adapter": "a LoRA carried to another Llama",
}


@click.command(epilog="Example: rotation-merge demo --only twin")
@click.option("--only", type=click.Choice(list(STAGES)), multiple=True, help="Run only this stage (may be repeated).")
@click.option("--keep", type=NEW_FOLDER, metavar="DIR", help="Keep the merged models and recipes there.")
@click.option("--json", "as_json", is_flag=True, help="Print machine-readable JSON.")
def command(only: tuple[str, ...], keep: str | None, as_json: bool) -> None:
    """Merge the tiny checkpoints that come with the package and print what alignment did.

    Two ViTs on scikit-learn's digits and Llamas on bytes of text, each merged half and half by mergekit: as they are,
    with heads and neurons aligned, with the whole model aligned, and with an alignment learned on the training images.
    Takes about two minutes on one core.
    """
    from rotation_merge.cli.show import shown

    shown(_run)(only=only or tuple(STAGES), keep=keep, as_json=as_json)


def _run(only: tuple[str, ...], keep: str | None, as_json: bool) -> int:
    from dataclasses import asdict

    import torch

    from rotation_merge.cli.demo import stages
    from rotation_merge.cli.show import note, print_json, say, table
    from rotation_merge.files import TemporaryFolder

    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    began = time.perf_counter()
    with hold_outputs(outputs_of(click.get_current_context())), TemporaryFolder() as scratch:
        place = Path(keep or scratch)
        place.mkdir(parents=True, exist_ok=True)
        results = []
        for name in only:
            note(f"{name}: {STAGES[name]} ...")
            results.append(getattr(stages, name)(place))
    seconds = time.perf_counter() - began
    if as_json:
        print_json({"seconds": seconds, "results": [asdict(result) for result in results]})
        return 0
    headers = (
        "merge",
        "measure",
        "parents",
        "plain",
        "heads, neurons",
        "whole model",
        "learned",
        "distance",
        "aligned",
    )
    table("", headers, [result.row() for result in results], numbers=(2, 3, 4, 5, 6, 7, 8))
    say(f"Merged through mergekit in {seconds:.0f} s. Distances: donor to anchor, relative to the anchor's norm.")
    if keep is not None:
        say(f"Recipes and merged models: {keep}")
    return 0
