"""Write the generated parts of these pages from the code: `python docs/generate.py`; `--check` only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import click

import rotation_merge  # noqa: F401  (registers the method)
from rotation_merge.architecture.registry import shipped
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.architecture.table import sample
from rotation_merge.averaging.config import AdapterMergeConfig, RefitConfig
from rotation_merge.averaging.polish import PolishConfig
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.cli.app import COMMANDS, app
from rotation_merge.cli.inspect import delegates, options
from rotation_merge.config import Config
from rotation_merge.matching.options import AlignConfig, FitConfig
from rotation_merge.mergekit_plugin.keys import BLOCK, DONOR_ONLY, EACH, PLACES, RECIPE
from rotation_merge.run.evaluate import BarrierConfig, EvaluateConfig
from rotation_merge.run.measure import MeasureConfig
from rotation_merge.search.config import MergeConfig
from rotation_merge.symmetry import Space
from rotation_merge.symmetry.admitted import admitted

FOLDER = Path(__file__).resolve().parent
VERSION = f"mergekit {version('mergekit')}:"
PART = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
        if option["where"] in places:
            values = ", ".join(map(code, option["values"])) if len(option["values"]) > 1 else option["values"][0]
            text = option["text"]
            if option["where"] == PLACES[EACH]:
                text += " Under the recipe's `parameters`: for every model."
            rows.append((code(option["name"]), values, code(option["default"]), text))
    return table(("parameter", "values", "default", "meaning"), rows)


def delegate_table() -> str:
    """Every delegate; the first line says of which mergekit."""
    rows = []
    for d in delegates():
        name = f"[`{d['name']}`]({d['url']})" if d["url"] else code(d["name"])
        required, optional = (", ".join(map(code, d[key])) for key in ("required", "optional"))
        rows.append((name, d["models"], d["base"], required, optional))
    head = ("delegate", "models", "`base_model`", "must be given", "may be given")
    return f"{VERSION}\n\n{table(head, rows)}"


def fit_options() -> str:
    """Fields, defaults and meanings of FitConfig."""
    return config_table(FitConfig)


def config_table(config: type[Config]) -> str:
    """A config's fields, defaults, ranges and meanings."""
    defaults = vars(config())
    rows = [
        (code(name), code(repr(defaults[name])), described.allowed, described.help)
        for name, described in config.options().items()
    ]
    return table(("field", "default", "values", "meaning"), rows)


def python_configs() -> str:
    """The configs of Python's calls."""
    configs = (
        *(AlignConfig, TransferConfig, MergeConfig),
        *(MeasureConfig, EvaluateConfig, BarrierConfig, RefitConfig, PolishConfig, AdapterMergeConfig),
    )
    parts = []
    for config in configs:
        summary = (config.__doc__ or "").partition("\n")[0]
        parts.append(f"`{config.__name__}`: {summary}\n\n{config_table(config)}")
    return "\n\n".join(parts)


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


def families() -> list[ArchitectureSpec]:
    """The shipped families by title."""
    return sorted(shipped().values(), key=lambda spec: spec.title.lower())


def known_models() -> str:
    """The names under which people know models, and their families."""
    models = [(name, spec.title) for spec in families() for name in spec.models or [spec.title]]
    return table(("Model", "Family"), sorted(models, key=lambda row: row[0].lower()))


def family_groups() -> str:
    """The largest group of each space of every family."""
    head = (
        "Family",
        "Residual stream",
        "Queries and keys",
        "Gains of their norms",
        "Values and outputs",
        "Heads",
        "Others",
    )
    return table(head, [_family(spec) for spec in families()])


def _family(spec: ArchitectureSpec) -> tuple[str, ...]:
    architecture = sample(spec)
    spaces: dict[str, Space] = {}
    for block in architecture.blocks:
        module = f"{block.module} " if len(architecture.layers_key) > 1 else ""
        spaces.update({module + name: space for name, space in block.spaces.items() if not space.head})
    attention = {name: space for name, space in spaces.items() if space.kind == "attention"}
    inside = {name: admitted(space).groups for name, space in attention.items()}
    words = {name: {part: group.words for part, (group, *_) in groups.items()} for name, groups in inside.items()}
    return (
        spec.title,
        _joined({name: groups[-1] for name, groups in architecture.stream_groups.items()}),
        _joined({name: sides["qk"] for name, sides in words.items()}),
        _joined({name: sides["gains"] for name, sides in words.items() if "gains" in sides}),
        _joined({name: sides["vo"] for name, sides in words.items()}),
        _joined({name: "free" if space.free_order else "fixed" for name, space in attention.items()}),
        _joined({name: admitted(space).words for name, space in spaces.items() if name not in attention}),
    )


def _joined(words: dict[str, str]) -> str:
    """One word for all, or each with the name of its space."""
    if len(set(words.values())) <= 1:
        return next(iter(words.values()), "")
    return "; ".join(f"{name}: {word or 'none'}" for name, word in words.items())


def family_limits() -> str:
    """What is not aligned in the families, and why."""
    limited = [spec for spec in families() if spec.limits]
    return "\n".join(f"**{s.title}**\n\n" + "".join(f"- {limit}\n" for limit in s.limits) for s in limited)


def family_classes() -> str:
    """The classes of every family."""
    return "".join(f"- {spec.title}: {', '.join(map(code, spec.classes))}\n" for spec in families())


GENERATED: dict[str, Callable[[], str]] = {
    "options": lambda: parameters(PLACES[BLOCK]),
    "donor parameters": lambda: parameters(PLACES[DONOR_ONLY], PLACES[EACH]),
    "global parameters": lambda: parameters(PLACES[RECIPE]),
    "delegates": delegate_table,
    "fit options": fit_options,
    "configs": python_configs,
    "commands": commands,
    "known models": known_models,
    "family groups": family_groups,
    "family limits": family_limits,
    "family classes": family_classes,
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
