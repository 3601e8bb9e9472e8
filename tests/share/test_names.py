"""Names from outside on the terminal and in cards: nothing steers the one, nothing breaks the Markdown of the other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from cli_support import run
from plugin_support import make, mergekit_yaml, recipe_for, state, write_recipe, write_state

from rotation_merge import RotationMergeError
from rotation_merge.errors import printable
from rotation_merge.model.card import updated_card
from rotation_merge.model.markdown import code, plain, prose
from rotation_merge.record import MergeReport

STEER = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj"
TRAPS = (
    *("<script>alert(1)</script>", "a|b", "a`b", "a```b", "![x](http://x.org/x.png)", "a&lt;b", "a\n\n# b", "**a**"),
    *("a\\|b", STEER),
)


def steers(text: str) -> bool:
    return any(not (char.isprintable() or char in "\n\t") for char in text)


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models in folders whose names steer a terminal, with a tensor and a config entry that do."""
    folder, pair = tmp_path_factory.mktemp("evil"), list[Path]()
    for seed, name in enumerate(("a", "b")):
        model = make("llama", folder / f"{name}{seed}", seed)
        tensors = {**state(model), f"x{STEER}": state(model)["model.norm.weight"]}
        pair.append(write_state(tensors, model, folder / f"{name}{STEER}"))
        (pair[-1] / "README.md").write_text(f"---\nlicense: {json.dumps(f'mit|{STEER}<script>')}\n---\n")
    return pair[0], pair[1]


COMMANDS = (
    *("check r.yml", "check gone.yml", "check key.yml", "inspect A", "inspect r.yml", "align A B", "align A B out"),
    *("verify A B", "doctor B", "inspect --report B", "inspect B --fingerprint", "push B me/x", "align A B-gone"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_lets_a_name_steer_the_terminal(command: str, evil: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = evil
    recipes = {"r": recipe_for("linear", a, b), "gone": recipe_for("linear", a, Path(f"{b}-gone"))}
    recipes["key"] = {**recipes["r"], f"x{STEER}": 1}
    files = {f"{name}.yml": write_recipe(recipe, tmp_path / f"{name}.yml") for name, recipe in recipes.items()}
    places = {**files, "A": a, "B": b, "B-gone": f"{b}-gone", "out": tmp_path / "out"}
    words = [places.get(word, word) for word in command.split()]
    done = run(*words)
    assert not steers(done.output), done.output


def test_mergekits_commands(evil: tuple[Path, Path], tmp_path: Path) -> None:
    done = mergekit_yaml(recipe_for("linear", *evil, unsupported="merge"), tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert not steers(
        "".join(line for line in done.output.splitlines() if "rotation_merge" in line or line[:2] == "  ")
    )
    assert not steers((tmp_path / "out" / "README.md").read_text().partition("```yaml")[0])
    done = mergekit_yaml(recipe_for("linear", evil[0], Path(f"{evil[1]}-gone")), tmp_path / "gone")
    assert (done.exit_code, steers(done.output)) == (2, False)


def test_errors_are_printable() -> None:
    error = RotationMergeError(f"a {STEER}", where=STEER, remedy=STEER)
    assert str(error).isprintable()
    assert error.what == f"a {STEER}", "as data it stays what it is"
    assert printable("ä 文 \t\n\udc80") == "ä 文 \t\n\\udc80"


@pytest.mark.parametrize("name", TRAPS)
def test_no_name_breaks_a_card(name: str) -> None:
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
    assert {len(re.split(r"(?<!\\)\|", row.strip().strip("|"))) for row in rows} <= {3, 4}, rows
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
