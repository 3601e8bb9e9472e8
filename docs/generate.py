"""Write the generated parts of these pages from the code: `python docs/generate.py`; `--check` only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import click

import rotation_merge  # noqa: F401  (registers the method)
from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.polish import PolishConfig
from rotation_merge.cli.app import COMMANDS, app
from rotation_merge.config import Config
from rotation_merge.matching.fit_records import FitConfig
from rotation_merge.mergekit_plugin.recipe.delegates import delegates, options
from rotation_merge.mergekit_plugin.recipe.names import BLOCK, DONOR_ONLY, EACH, PLACES, RECIPE
from rotation_merge.run.evaluate import BarrierConfig, EvaluateConfig
from rotation_merge.run.measure import MeasureConfig

FOLDER = Path(__file__).resolve().parent
VERSION = f"mergekit {version('mergekit')}:"
PART = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

MEANINGS = {
    "attention": "Maps inside attention heads. `permutation`: orders of coordinates. `rotation`: the largest compact "
    "group that the layer admits. `invertible`: any invertible map, where the layer admits it.",
    "heads": "Order of attention heads. `permutation`: the joint optimum of the order and the maps inside heads. "
    "`spectral`: by singular values, as TransFusion does (here of all four matrices and biases), for "
    "comparison.",
    "ffn": "Order of FFN neurons and of experts.",
    "rescale": "Rescaling, with a sign where the layer admits it. `sequential`: after the rotation, as in the ICML "
    "2025 paper, instead of jointly.",
    "residual": "Group of the residual stream, one map for the whole model. See [Merge independent "
    "models](merge-independent.md#why-the-residual-stream-matters).",
    "layers": "Layers to match; ranges such as `0-5,11`.",
    "match_on": "What chooses the maps. `activations`: inputs and outputs of both models' linear maps on the same "
    "samples (`data`, `samples`; by default each model writes half of the text), centred and partly "
    "whitened; experts, mixers, latents and scales still by weights. `both`: weights and activations. The"
    " donor's outputs stay the same in any case. Both models need one vocabulary. Default: `weights`; "
    "with `carry: activations`, `both`.",
    "finetuned_from": "The base that the donor was fine-tuned from. It is aligned to the anchor, and the delegate "
    "receives anchor + map(donor - base).",
    "alignment": "A file of transforms, written by `rotation-merge align --alignment` or `rotation-merge fit`, to "
    "apply instead of matching: a path, or `org/repo/file@revision` on the hub. Options of matching "
    "beside it are an error.",
    "delegate": "The merge method that averages. See [Delegates](delegates.md).",
    "unsupported": "`merge`: tensors that cannot be aligned are merged as they are; the report names them.",
    "exclude": "Comma-separated parts of tensor names. These tensors are copied from `base_model`.",
    "untie": "Give a tied output head its own tensor; a residual rotation needs it.",
    "anchor": "`mean`: align all models to their running mean, in the coordinates of `base_model`.",
    "save_alignment": "Store the transforms for `alignment:`. `true`: as `alignment.safetensors` beside the model. "
    "Further donors: `NAME-2`, `NAME-3`.",
    "report": "Also write the report as an HTML page, `report.html`.",
    "statistics": "File written by `rotation-merge measure`. Default: the one beside the model.",
    "data": "Samples: one pool for all models with `ot_fusion` (default: weights alone), each model's own with "
    "`refit`; also for donors that are carried (`carry`, `scale: auto`) or matched on activations (`match_on`).",
    "samples": "Number of samples.",
    "targets": "`own`: each model answers its own samples. `mean`: all models answer all samples.",
    "start": "Weights before solving: the average, the anchor's, or a merge of the task vectors.",
    "spill": "Folder for hidden states, instead of memory.",
    "heads_of": "`each`: also write the merged body under every donor's head.",
    "preset": "Options for near or far models. `auto`: decided by the weights.",
    "prove": "`true`: check that donors moved by alignment files keep their outputs.",
    "shift_head": "`true`: an untied head's rows move by one vector. Logits change, probabilities do not.",
}
"""Longer words than the code's own; a parameter that is not here gets those."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """Bars inside a cell; within `code`, GitHub takes an escaped bar and mkdocs shows the escape, so both get HTML."""
    code = re.sub(r"`([^`]*\|[^`]*)`", lambda found: f"<code>{found[1].replace('|', '&#124;')}</code>", text)
    return code.replace("|", "\\|")


def code(words: str) -> str:
    return f"`{words}`"


def parameters(*places: str) -> str:
    """Our own parameters that stand at some places."""
    rows = []
    for option in options():
        if option.where in places:
            values = option.values
            if "," in values and " or " not in values:
                values = ", ".join(code(word) for word in values.split(", "))
            text = MEANINGS.get(option.name, option.text)
            if option.where == PLACES[EACH]:
                text += " Under the recipe's `parameters`: for every model."
            rows.append((code(option.name), values, code(option.default), text))
    return table(("parameter", "values", "default", "meaning"), rows)


def delegate_table() -> str:
    """Every delegate; the first line says of which mergekit."""
    rows = []
    for d in delegates():
        name = f"[`{d.name}`]({d.url})" if d.url else code(d.name)
        required, optional = (", ".join(map(code, names)) for names in (d.required, d.optional))
        rows.append((name, d.models, d.base, required, optional))
    head = ("delegate", "models", "`base_model`", "must be given", "may be given")
    return f"{VERSION}\n\n{table(head, rows)}"


def shared_names() -> str:
    """Parameters that we and some delegate have both."""
    own = {option.name for option in options()}
    rows = []
    for d in delegates():
        both = sorted({name.rstrip("*") for name in (*d.required, *d.optional)} & own)
        rows += [(code(name), code(d.name)) for name in both]
    names = sorted({name for name, _ in rows})
    shared = [(name, ", ".join(d for other, d in rows if other == name)) for name in names]
    return f"{VERSION}\n\n{table(('parameter', 'also of'), shared)}"


def fit_options() -> str:
    """Fields, defaults and meanings of FitConfig."""
    return config_table(FitConfig)


def config_table(config: type[Config]) -> str:
    """A config's fields, defaults, ranges and meanings."""
    defaults = {field.name: field.default for field in fields(config)}
    rows = [
        (code(name), code(repr(defaults[name])), described.allowed, described.help)
        for name, described in config.options().items()
    ]
    return table(("field", "default", "values", "meaning"), rows)


def python_configs() -> str:
    """The configs of Python's calls."""
    configs = (MeasureConfig, EvaluateConfig, BarrierConfig, RefitConfig, PolishConfig)
    return "\n\n".join(
        f"`{config.__name__}`: {(config.__doc__ or '').strip()}\n\n{config_table(config)}" for config in configs
    )


def commands() -> str:
    """Every command: what it does, its arguments and options."""
    context = click.Context(app)
    parts = []
    for name in COMMANDS:
        command = app.get_command(context, name)
        assert command is not None
        inner = click.Context(command, parent=context, info_name=name)
        help_text = " ".join((command.help or "").split("\n\n")[0].split())
        rest = ["\n" + " ".join(p.split()) for p in (command.help or "").split("\n\n")[1:]]
        usage = " ".join(["rotation-merge", name, *command.collect_usage_pieces(inner)])
        rows = []
        for parameter in command.get_params(inner):
            record = parameter.get_help_record(inner) if isinstance(parameter, click.Option) else None
            if record is not None and "--help" not in parameter.opts:
                rows.append((code(record[0]), record[1]))
        parts += [f"## {name}\n", "```text", usage, "```\n", help_text, *rest, "", table(("option", ""), rows)]
    return "\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "options": lambda: parameters(PLACES[BLOCK]),
    "donor parameters": lambda: parameters(PLACES[DONOR_ONLY], PLACES[EACH]),
    "global parameters": lambda: parameters(PLACES[RECIPE]),
    "shared names": shared_names,
    "delegates": delegate_table,
    "fit options": fit_options,
    "configs": python_configs,
    "commands": commands,
}


def filled(text: str, keep: bool) -> str:
    """A page with its generated parts written anew; `keep` those of another mergekit than the one installed."""

    def part(match: re.Match[str]) -> str:
        if keep and "\nmergekit " in match[0] and f"\n{VERSION}\n" not in match[0]:
            return match[0]
        return f"{match[1]}\n{GENERATED[match[2]]()}\n{match[3]}"

    return PART.sub(part, text)


def stale(keep: bool) -> dict[Path, str]:
    """Pages that differ from what the code says, and what they should be."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
    made = {path: filled(text, keep) for path, text in pages.items() if PART.search(text)}
    return {path: text for path, text in made.items() if text != pages[path]}


def main() -> int:
    found = stale(keep="--check" in sys.argv)
    for path, text in found.items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        print(path.name)
    return 1 if found and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
