"""Names from outside on the terminal and in cards: nothing steers the one, nothing breaks the Markdown of the other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from cli_support import run
from plugin_support import make, merged, mergekit_yaml, recipe_for, state, write_recipe, write_state

from rotation_merge import RotationMergeError
from rotation_merge.errors import printable
from rotation_merge.model.card import updated_card
from rotation_merge.model.markdown import code, plain, prose
from rotation_merge.record import MergeReport

STEER = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj"
TRAPS = {
    "tag": "<script>alert(1)</script>",
    "cell": "a|b",
    "backtick": "a`b",
    "fence": "a```b",
    "link": "![x](http://x.org/x.png)",
    "entity": "a&lt;b",
    "lines": "a\n\n# b",
    "bold": "**a**",
    "backslash": "a\\|b",
    "steer": STEER,
}


def steers(text: str) -> bool:
    return any(not (char.isprintable() or char in "\n\t") for char in text)


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models in folders whose names steer a terminal, with a tensor and a config entry that do."""
    folder = tmp_path_factory.mktemp("evil")
    pair = []
    for seed, name in enumerate(("a", "b")):
        model = make("llama", folder / f"{name}{seed}", seed)
        where = write_state(
            {**state(model), f"x{STEER}": state(model)["model.norm.weight"]}, model, folder / f"{name}{STEER}"
        )
        (where / "README.md").write_text(f"---\nlicense: {json.dumps(f'mit|{STEER}<script>')}\n---\n")
        pair.append(where)
    return pair[0], pair[1]


def commands(evil: tuple[Path, Path], folder: Path) -> list[tuple[object, ...]]:
    a, b = evil
    return [
        ("check", write_recipe(recipe_for("linear", a, b), folder / "r.yml")),
        ("check", write_recipe(recipe_for("linear", a, Path(f"{b}-gone")), folder / "gone.yml")),
        ("check", write_recipe({**recipe_for("linear", a, b), f"x{STEER}": 1}, folder / "key.yml")),
        ("inspect", a),
        ("inspect", folder / "r.yml"),
        ("align", a, b),
        ("align", a, b, folder / "out"),
        ("verify", a, b),
        ("doctor", b),
        ("inspect", "--report", b),
        ("inspect", b, "--fingerprint"),
        ("push", b, "me/x"),
        ("align", a, f"{b}-gone"),
    ]


@pytest.mark.parametrize("number", range(13))
def test_no_command_lets_a_name_steer_the_terminal(
    number: int, evil: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = commands(evil, tmp_path)[number]
    done = run(*command)
    assert not steers(done.output), (command[0], done.output)


def test_mergekits_commands(evil: tuple[Path, Path], tmp_path: Path) -> None:
    done = mergekit_yaml(recipe_for("linear", *evil, unsupported="merge"), tmp_path / "out")
    assert done.exit_code == 0, done.output
    ours = [line for line in done.output.splitlines() if "rotation_merge" in line or line.startswith("  ")]
    assert not any(map(steers, ours))
    card = (tmp_path / "out" / "README.md").read_text()
    assert not steers(card.partition("```yaml")[0])
    done = mergekit_yaml(recipe_for("linear", evil[0], Path(f"{evil[1]}-gone")), tmp_path / "other")
    assert (done.exit_code, steers(done.output)) == (2, False)


def test_errors_are_printable() -> None:
    error = RotationMergeError(f"a {STEER}", where=STEER, remedy=STEER)
    assert str(error).isprintable()
    assert error.what == f"a {STEER}", "as data it stays what it is"
    assert printable("ä 文 \t\n") == "ä 文 \t\n"
    assert printable("\udc80") == "\\udc80"


def rendered_cells(line: str) -> list[str]:
    """A table's row as GitHub cuts it."""
    return re.split(r"(?<!\\)\|", line.strip().strip("|"))


@pytest.mark.parametrize("trap", TRAPS)
def test_no_name_breaks_a_card(trap: str) -> None:
    name = TRAPS[trap]
    report = MergeReport(
        *(name, "linear", "", [], {}, [f"`{name}` was left, {name}: of tensor `{name}`."], 1.0),
        versions={"torch": name},
        fingerprints={name: name},
        files={name: name},
        models={
            name: {"hub": name, "revision": name, "license": name, "adapter": {"name": f"+{name}", "license": name}}
        },
        data=[{"of": f"statistics of {name}", "samples": 1, "source": name}],
    )
    card = updated_card("# x\n", report, "org/x", {"architectures": [name]})
    assert not steers(card)
    body = card.partition("\n---\n")[2]
    assert yaml.safe_load(card[4:].partition("\n---\n")[0])["license"] == name
    rows = [line for line in body.splitlines() if line.startswith("|")]
    widths = {len(rendered_cells(row)) for row in rows}
    assert widths <= {3, 4}, rows
    outside = re.sub(r"`[^`\n]*`", "", body.replace("<!--", "").replace("</code>", "").replace("<code>", ""))
    assert "<" not in outside.replace("```", ""), outside
    assert not re.search(r"(?<!\\)\]\(http://x", outside)
    assert "\n# b" not in body


def test_names_are_shown_as_they_are() -> None:
    assert plain("org/a_b-1.5") == "org/a_b-1.5"
    assert code("org/a_b") == "`org/a_b`"
    assert code("a`b") == "<code>a&#96;b</code>"
    assert code("a|<b>") == "<code>a&#124;&#60;b&#62;</code>"
    assert prose("`a<b` and a<b, not <i> but `<i>`", ["a<b"]) == "`a<b` and a&lt;b, not &lt;i> but `<i>`"


@pytest.mark.slow
def test_a_recipe_does_not_end_its_own_block(tmp_path: Path) -> None:
    models = [make("llama", tmp_path / name, seed) for seed, name in enumerate("ab")]
    recipe = recipe_for("linear", *models)
    evil = f"{yaml.safe_dump(recipe)}chat_template: |\n  {{{{ messages }}}} and more of it\n  ```\n  <script>\n"
    merged(evil, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    block = card.partition("\n````yaml\n")[2].partition("\n````\n")[0]
    assert yaml.safe_load(block)["chat_template"] == yaml.safe_load(evil)["chat_template"]
