"""Names of the hub: files of repositories at their revisions, and names that end in one line where no hub answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS, error_of, output_of, parsed, run
from hub_support import Hub, at_home
from plugin_support import (
    error_of_merge,
    from_file,
    make,
    merged,
    mergekit_yaml,
    one_error,
    recipe_for,
    state,
    twin,
    write_recipe,
)

from rotation_merge.model.hub import HubFile, no_answer, reachable

GONE = "org/nowhere"
SILENT = "the hub does not answer; check the connection"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """Two models, and the transforms that bring the second to the first."""
    folder = tmp_path_factory.mktemp("pair")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    output_of("align", anchor, donor, "--alignment", folder / "map", "--heads", "permutation")
    return anchor, donor, (folder / "map").read_bytes()


def alone(patch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    at_home(SimpleNamespace(url=url), cache, patch)  # type: ignore[arg-type]
    patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: pytest.fail("it tries again"))


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer, and nobody who waits for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone(monkeypatch, f"http://127.0.0.1:{port}", tmp_path / "cache")


# --- files of the hub ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_alignment_of_the_hub_at_its_revision(home: Hub, pair: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    """A pinned file is downloaded once, by the merge, not by `check`."""
    anchor, donor, content = pair
    first = home.commit("models/org/maps", {"sub/a.safetensors": content})
    home.commit("models/org/maps", {"sub/a.safetensors": b"something else"})
    (tmp_path / "kept.safetensors").write_bytes(content)
    plain, name = recipe_for("linear", anchor, donor), f"org/maps/sub/a.safetensors@{first}"
    recipe, asked = from_file(plain, Path(name)), len(home.asked)
    path = write_recipe(recipe, tmp_path / "r.yml")
    faults = [(f["error"], f["where"]) for f in parsed("check", path)["faults"] if "no tokenizer" not in f["what"]]
    assert (faults, len(home.asked)) == ([(False, "models[1].parameters.alignment")], asked)
    tensors, local = merged(recipe, tmp_path / "out"), from_file(plain, tmp_path / "kept.safetensors")
    assert all(torch.equal(tensors[n], x) for n, x in merged(local, tmp_path / "local").items())
    assert json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["files"] == {str(donor): name}
    asked = len(home.asked)
    assert [f for f in parsed("check", path)["faults"] if "no tokenizer" not in f["what"]] == []
    merged(recipe, tmp_path / "again")
    assert len(home.asked) == asked
    latest = from_file(plain, Path("org/maps/sub/a.safetensors"))
    assert "cannot be read" in error_of_merge(latest, tmp_path / "other")


@pytest.mark.parametrize("name", ["org/gone/a.safetensors", "org/maps/gone.safetensors", "org/maps/x@0000", "./x/y/z"])
def test_files_that_are_nowhere_are_one_line(
    name: str, home: Hub, pair: tuple[Path, Path, bytes], tmp_path: Path
) -> None:
    home.commit("models/org/maps", {"sub/a.safetensors": b""})
    assert name.removeprefix("./") in error_of_merge(
        from_file(recipe_for("linear", *pair[:2]), Path(name)), tmp_path / "out"
    )


def test_statistics_and_data_of_the_hub(home: Hub, tmp_path: Path) -> None:
    model, text = CHECKPOINTS / "llama-0", b"def f(x):\n    return x + 1\n" * 20
    source = f"datasets/org/text/code.txt@{home.commit('datasets/org/text', {'code.txt': text})}"
    output_of("measure", model, "--data", source, "--length", "8", "--samples", "8", "--out", tmp_path / "s")
    home.commit("models/org/stats", {"s.safetensors": (tmp_path / "s").read_bytes()})
    recipe = recipe_for("linear", model)
    recipe["parameters"] = {"delegate": "regmean", "statistics": "org/stats/s.safetensors", "exclude": "embed"}
    merged(recipe, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert report["data"] == [{"of": f"statistics of {model}", "source": source, "samples": 8}]


def test_words_that_name_a_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is here comes first, but for a revision."""
    assert HubFile.of("org/a/b.safetensors") == HubFile("model", "org/a", "b.safetensors", None)
    assert HubFile.of("datasets/org/a/b/c.txt@v1.0") == HubFile("dataset", "org/a", "b/c.txt", "v1.0")
    for text in ("org/a", "a.safetensors", "./org/a/b", "/org/a/b", "~/a/b/c", "org/../b/c", "org/a/../c"):
        assert HubFile.of(text) is None, text
    (tmp_path / "maps").mkdir()
    monkeypatch.chdir(tmp_path)
    assert HubFile.of("maps/a/b.safetensors") is None
    assert HubFile.of("maps/a/b.safetensors@main") is not None


# --- without a hub ---------------------------------------------------------------------------------------------------


Change = Callable[[dict[str, Any]], object]


def of_donor(**parameters: Any) -> Change:
    return lambda recipe: recipe["models"][1].setdefault("parameters", {}).update(parameters)


def named(number: int, name: str) -> Change:
    return lambda recipe: recipe["models"][number].update(model=name)


RECIPES: dict[str, Change] = {
    "anchor": lambda recipe: (recipe.update(base_model=GONE), named(0, GONE)(recipe)),
    "donor": named(1, GONE),
    "donor at a revision": named(1, f"{GONE}@v1"),
    "adapter": named(1, f"org/tuned+{GONE}"),
    "tuned from": of_donor(finetuned_from=GONE),
    "tokenizer": lambda recipe: recipe.update(tokenizer={"source": GONE}),
    "tokenizer_source": lambda recipe: recipe.update(tokenizer_source=GONE),
    "alignment": of_donor(alignment=f"{GONE}/a.safetensors@v1"),
    "statistics": lambda recipe: recipe.update(
        parameters={"delegate": "regmean", "statistics": f"{GONE}/s.safetensors@v1"}
    ),
    "data": lambda recipe: recipe.update(
        parameters={"delegate": "refit", "data": f"datasets/{GONE}/t.txt@v1", "samples": 8}
    ),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_merges(kind: str, pair: tuple[Path, Path, bytes], nobody: None, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair[:2])
    if kind == "alignment":
        recipe = from_file(recipe, Path("maps"))
    RECIPES[kind](recipe)
    said_gone(mergekit_yaml(recipe, tmp_path / "out"), tmp_path / "out")


def said_gone(done: Any, out: Path) -> None:
    """One line names what is gone, and that nobody answers; nothing is written."""
    assert done.exit_code == 2, done.output
    line = one_error(done.output)
    assert GONE in line
    assert SILENT in line
    assert not out.exists()


COMMANDS = (
    *("align A G", "align G A O", "align A G --learn --data self --alignment O", "merge A G O", "verify A G"),
    *("inspect G", "inspect G --fingerprint", "barrier A G --data self", "measure G --data self --out O"),
    *("evaluate G --data self", f"evaluate A --data datasets/{GONE}/t.txt"),
    *("polish G O --teachers A", "polish A O --teachers G"),
    *("carry G --from A --to B O", "carry A --from A --to G O"),
)
"""A and B are models that are here, G is gone, O is what would be written."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, pair: tuple[Path, Path, bytes], nobody: None, tmp_path: Path) -> None:
    places = {"A": pair[0], "B": pair[1], "G": GONE, "O": tmp_path / "out"}
    said_gone(run(*(places.get(word, word) for word in command.split())), tmp_path / "out")


def test_push(pair: tuple[Path, Path, bytes], nobody: None, tmp_path: Path) -> None:
    """A dry run needs no hub where every revision is given; to send something there must be one."""
    anchor, donor, _ = pair
    merged(recipe_for("linear", anchor, donor), tmp_path / "out")
    push = ("push", tmp_path / "out", "me/x", "--as", f"{donor}=org/b@v1", "--as")
    assert run(*push, f"{anchor}=org/a@v1").exit_code == 0
    assert "its revision is unknown (the hub does not answer)" in error_of(*push, f"{anchor}=org/a")
    sent = run(*push, f"{anchor}=org/a@v1", "--yes")
    assert "the hub does not answer" in one_error(sent.output)


@pytest.mark.slow
def test_what_is_in_the_cache_works(pair: tuple[Path, Path, bytes], hub: Hub, tmp_path: Path) -> None:
    """Merged, compared and inspected with a hub, then without: the same bytes."""
    from mergekit.io.tasks import LoaderCache

    model, donor = pair[0], make("llama", tmp_path / "donor", 1)
    hub.publish("org/anchor", model)
    hub.commit("models/org/anchor", {"README.md": b"# A model"})  # which nobody downloads
    recipe = recipe_for("linear", "org/anchor", donor)
    with pytest.MonkeyPatch.context() as patch:
        at_home(hub, tmp_path / "cache", patch)
        first = merged(recipe, tmp_path / "first")
    LoaderCache.loaders.clear()
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, "http://127.0.0.1:9", tmp_path / "cache")
        second = merged(recipe, tmp_path / "second")
        assert first.keys() == second.keys() == state(model).keys()
        assert all(bool((first[name] == second[name]).all()) for name in first)
        for command in (("inspect", "org/anchor"), ("align", "org/anchor", donor), ("verify", "org/anchor", model)):
            assert run(*command).exit_code == 0, command
    assert json.loads((tmp_path / "second" / "rotation_merge.json").read_text())["anchor"] == "org/anchor"
    assert yaml.safe_load((tmp_path / "second" / "mergekit_config.yml").read_text())["base_model"] == "org/anchor"


def test_a_hub_that_answers_again(hub: Hub, nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    assert not reachable()
    assert constants.HF_HUB_OFFLINE
    assert no_answer()[0] == "the hub does not answer"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert reachable()
    assert not constants.HF_HUB_OFFLINE


def test_who_wants_no_hub_is_not_asked_for_one(home: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(home.asked)
    assert "HF_HUB_OFFLINE is set; unset it, or name a folder" in error_of("inspect", GONE)
    assert home.asked[asked:] == []
