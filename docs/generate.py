"""Write the generated parts of these pages from the code: `python docs/generate.py`; `--check` only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import click

import rotation_merge as rm
from rotation_merge.architecture.registry import shipped
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.architecture.table import sample
from rotation_merge.cli.app import COMMANDS, app
from rotation_merge.cli.inspected import delegates, options
from rotation_merge.mergekit_plugin.keys import BLOCK, DONOR_ONLY, EACH, PLACES, RECIPE
from rotation_merge.symmetry import Space
from rotation_merge.symmetry.admitted import admitted

FOLDER = Path(__file__).resolve().parent
VERSION = f"mergekit {version('mergekit')}:"
CONFIGS = (
    *(rm.AlignConfig, rm.MergeConfig, rm.FitConfig, rm.TransferConfig, rm.MeasureConfig, rm.EvaluateConfig),
    *(rm.BarrierConfig, rm.RefitConfig, rm.PolishConfig, rm.AdapterMergeConfig),
)
SHARED = 3
"""Commands that have an option with the same help before the page says it once for all."""
SAMPLES = re.compile(r"text \(\.txt.*?demo:NAME")
"""What may be named as data, which the page says once."""
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
    """Our own parameters that stand at some places; defaults are bold, or in brackets."""
    rows = []
    for option in options():
        if option["where"] in places:
            rows.append(
                (code(option["name"]) + " †" * (option["where"] == PLACES[EACH]), values(option), option["text"])
            )
    return table(("parameter", "values", "meaning"), rows)


def values(option: dict[str, Any]) -> str:
    """The values of an option and its default."""
    default = str(option["default"])
    if len(option["values"]) > 1:
        return ", ".join(f"**{code(word)}**" if word == default else code(word) for word in option["values"])
    return option["values"][0] + ("" if default == "none" else f" ({code(default)})")


def delegate_table() -> str:
    """Every delegate; the first line says of which mergekit."""
    rows = []
    for d in delegates():
        name = f"[`{d['name']}`]({d['url']})" if d["url"] else code(d["name"])
        parameters = [*(f"**{code(required)}**" for required in d["required"]), *map(code, d["optional"])]
        rows.append((name, d["models"].replace(" or more", "+"), d["base"], ", ".join(parameters)))
    head = ("delegate", "models", "`base_model`", "parameters")
    return f"{VERSION}\n\n{table(head, rows)}"


class Shown(NamedTuple):
    """An option as the page shows it: how it is written, its help, its default."""

    name: str
    text: str
    default: str

    @property
    def flag(self) -> str:
        return self.name.split()[0].strip(",")

    @property
    def matches(self) -> bool:
        """Whether it says what to match."""
        return self.flag.lstrip("-").replace("-", "_") in {*rm.AlignConfig.options(), "untie"}

    def line(self) -> str:
        shown = f"<code>{self.name.replace('|', '&#124;')}</code>" if "|" in self.name else code(self.name)
        return f"- {shown}{self.default}: {self.text}\n"


def command_options(command: click.Command, context: click.Context) -> list[Shown]:
    shown = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and "--help" not in parameter.opts:
            help_text, _, range_text = record[1].partition("  [")
            default = re.search(r"default: ([^;\]]+)", range_text)
            shown.append(
                Shown(
                    re.sub(r" (INTEGER|FLOAT)?( RANGE)?(TEXT)?$", "" if default else " VALUE", record[0]),
                    SAMPLES.sub("[data](#data)", help_text).replace(" to compute on", ""),
                    f" (`{default[1]}`)" if default else " (required)" if "required" in range_text else "",
                )
            )
    return shown


def commands() -> str:
    """Every command: what it does, its arguments and options; what several commands share stands first."""
    context = click.Context(app)
    known: dict[str, list[Shown]] = {}
    headings = {}
    for name in COMMANDS:
        command = app.get_command(context, name)
        assert command is not None
        inner = click.Context(command, parent=context, info_name=name)
        summary = " ".join((command.help or "").split("\n\n")[0].split())
        pieces = [piece for piece in command.collect_usage_pieces(inner) if piece != "[OPTIONS]"]
        headings[name] = f"## {name}\n\n`{' '.join(['rotation-merge', name, *pieces])}`: {summary}\n"
        known[name] = command_options(command, inner)
    counts = Counter((option.name, option.text) for shown in known.values() for option in shown)
    usual = {option[:2]: option for shown in reversed(known.values()) for option in shown}
    shared = [usual[pair] for pair, count in counts.items() if count >= SHARED and not usual[pair].matches]
    matching = dict.fromkeys(code(option.flag) for option in usual.values() if option.matches)
    parts = [
        "## Shared options\n\n" + "".join(option.line() for option in shared),
        f"## Matching options\n\n{', '.join(matching)}: as in a [recipe](recipe.md#what-to-match).\n",
    ]
    for name, shown in known.items():
        parts += [headings[name], options_of(shown, {option[:2]: option for option in shared}, len(known), counts)]
    return "\n".join(parts)


def options_of(
    shown: list[Shown], shared: dict[tuple[str, str], Shown], commands: int, counts: Counter[tuple[str, str]]
) -> str:
    """The options of one command: a line for each that no other has, then those that it shares."""
    lines = [option.line() for option in shown if option[:2] not in shared and not option.matches]
    also = []
    for option in shown:
        if option[:2] in shared and counts[option[:2]] < commands:
            also.append(code(option.flag) + option.default * (option != shared[option[:2]]))
    if any(option.matches for option in shown):
        changed = [option for option in shown if option.flag == "--residual" and "none" not in option.default]
        also.append("[matching options](#matching-options)" + "".join(f" ({code(o.flag)}{o.default})" for o in changed))
    return "".join(lines) + f"- Also {', '.join(also)}.\n" * bool(also)


def python_configs() -> str:
    """The configs of Python's calls: fields and defaults; what only Python has, with its meaning."""
    context = click.Context(app)
    explained = {option["name"] for option in options()}
    for name in COMMANDS:
        command = app.get_command(context, name)
        explained |= {parameter.name for parameter in command.params} if command else set()
    parts = []
    for config in CONFIGS:
        defaults = vars(config())
        fields = ", ".join(f"`{name}={defaults[name]!r}`" for name in config.options())
        lines = [
            f"- `{name}` ({described.allowed}): {described.help}"
            for name, described in config.options().items()
            if name not in explained
        ]
        parts.append("\n".join([f"**{config.__name__}**: {fields}.", *([""] * bool(lines)), *lines]) + "\n")
    return "\n".join(parts)


def families() -> list[ArchitectureSpec]:
    """The shipped families by title."""
    return sorted(shipped().values(), key=lambda spec: spec.title.lower())


SHORT = {
    "a rotation for each RoPE pair": "pairs",
    "a rotation for each RoPE pair, orthogonal maps on the rest": "pairs, rest",
    "orthogonal maps": "orthogonal",
    "signs of RoPE pairs": "signs",
    "signed_permutation": "signed permutation",
    "order of experts": "experts",
    "one vector added to all rows": "router",
    "signs": "latents",
}
"""Words of groups as the table of families writes them."""


def family_groups() -> str:
    """A row for each family: the largest group of its stream, of its queries and keys, and what else is aligned."""
    return table(("Family", "Residual stream", "Queries and keys; more"), [_family(spec) for spec in families()])


def _family(spec: ArchitectureSpec) -> tuple[str, ...]:
    architecture = sample(spec)
    spaces: dict[str, Space] = {}
    for block in architecture.blocks:
        module = f"{block.module} " if len(architecture.layers_key) > 1 else ""
        spaces.update({module + name: space for name, space in block.spaces.items() if not space.head})
    attention = {name: space for name, space in spaces.items() if space.kind == "attention"}
    queries = [admitted(space).groups["qk"][0].words for space in attention.values()]
    words = [word for name in spaces.keys() - attention.keys() for word in admitted(spaces[name]).words.split(", ")]
    also = sorted({SHORT[word] for word in words if word in SHORT})
    also += ["heads fixed"] * any(not space.free_order for space in attention.values())
    streams = {name: groups[-1] for name, groups in architecture.stream_groups.items()}
    return spec.title, _joined(streams), "; ".join(filter(None, (_distinct(queries), ", ".join(also))))


def _distinct(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(SHORT.get(word, word) for word in words if word != "none"))


def _joined(words: dict[str, str]) -> str:
    """One word for all, or each with the name of its stream."""
    if len(set(words.values())) <= 1:
        return _distinct(words.values()) or next(iter(words.values()), "")
    return "; ".join(f"{name}: {SHORT.get(word, word)}" for name, word in words.items())


GENERATED: dict[str, Callable[[], str]] = {
    "options": lambda: parameters(PLACES[BLOCK]),
    "donor parameters": lambda: parameters(PLACES[DONOR_ONLY], PLACES[EACH]),
    "global parameters": lambda: parameters(PLACES[RECIPE]),
    "delegates": delegate_table,
    "configs": python_configs,
    "commands": commands,
    "family groups": family_groups,
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
