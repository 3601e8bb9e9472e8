"""Without a hub, names that are not in its cache end in one line at once, on every path; those that are there work."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli_support import run
from hub_support import Hub, at_home
from plugin_support import from_file, make, merged, mergekit_yaml, one_error, recipe_for, state

from rotation_merge.model.hub import no_answer, reachable

GONE = "org/nowhere"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model; another one lies beside it as `donor`."""
    folder = tmp_path_factory.mktemp("model")
    make("llama", folder / "donor", 1)
    return make("llama", folder / "anchor")


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer, and nobody who waits for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone(monkeypatch, SimpleNamespace(url=f"http://127.0.0.1:{port}"), tmp_path / "cache")


def alone(patch: pytest.MonkeyPatch, hub: Any, cache: Path) -> None:
    at_home(hub, cache, patch)
    patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: pytest.fail("it tries again"))


def given(model: Path, **parameters: Any) -> dict[str, Any]:
    recipe: dict[str, Any] = recipe_for("linear", model, model.with_name("donor"))
    recipe["models"][1]["parameters"] = {**recipe["models"][1].get("parameters", {}), **parameters}
    return recipe


RECIPES: dict[str, Any] = {
    "anchor": lambda model: recipe_for("linear", GONE, model),
    "donor": lambda model: recipe_for("linear", model, GONE),
    "donor at a revision": lambda model: recipe_for("linear", model, f"{GONE}@v1"),
    "adapter": lambda model: recipe_for("linear", model, f"{model}+{GONE}"),
    "adapter of a donor": lambda model: recipe_for("linear", model, f"org/tuned+{GONE}"),
    "tuned from": lambda model: given(model, finetuned_from=GONE),
    "tokenizer": lambda model: {**given(model), "tokenizer": {"source": GONE}},
    "tokenizer_source": lambda model: {**given(model), "tokenizer_source": GONE},
    "alignment": lambda model: from_file(given(model), Path(f"{GONE}/a.safetensors@v1")),
    "statistics": lambda model: {
        **given(model, statistics=f"{GONE}/s.safetensors@v1"),
        "parameters": {"delegate": "regmean"},
    },
    "data": lambda model: {
        **given(model),
        "parameters": {"delegate": "refit", "data": f"datasets/{GONE}/t.txt@v1", "samples": 8},
    },
}


@pytest.mark.parametrize("what", RECIPES)
def test_merges(what: str, model: Path, nobody: None, tmp_path: Path) -> None:
    done = mergekit_yaml(RECIPES[what](model), tmp_path / "out")
    assert done.exit_code == 2, done.output
    line = one_error(done.output)
    assert GONE in line
    assert "in the hub's cache, and the hub does not answer; check the connection" in line
    assert not (tmp_path / "out").exists()


COMMANDS: dict[str, Any] = {
    "align without OUT": lambda model, out: ("align", model, GONE),
    "align": lambda model, out: ("align", GONE, model, out),
    "verify": lambda model, out: ("verify", model, GONE),
    "inspect": lambda model, out: ("inspect", GONE),
    "inspect --fingerprint": lambda model, out: ("inspect", GONE, "--fingerprint"),
    "merge": lambda model, out: ("merge", model, GONE, out),
    "align --learn": lambda model, out: ("align", model, GONE, "--learn", "--data", "self", "--alignment", out),
    "barrier": lambda model, out: ("barrier", model, GONE, "--data", "self"),
    "evaluate": lambda model, out: ("evaluate", GONE, "--data", "self"),
    "evaluate --data": lambda model, out: ("evaluate", model, "--data", f"datasets/{GONE}/t.txt"),
    "measure": lambda model, out: ("measure", GONE, "--data", "self", "--out", out),
    "polish": lambda model, out: ("polish", GONE, out, "--teachers", model),
    "polish --teachers": lambda model, out: ("polish", model, out, "--teachers", GONE),
    "carry": lambda model, out: ("carry", GONE, "--from", model, "--to", model.with_name("donor"), out),
    "carry --to": lambda model, out: ("carry", model, "--from", model, "--to", GONE, out),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_commands(what: str, model: Path, nobody: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(*COMMANDS[what](model, out))
    assert done.exit_code == 2, done.output
    line = one_error(done.output)
    assert GONE in line
    assert "the hub does not answer; check the connection" in line
    assert not out.exists()


def test_push(model: Path, nobody: None, tmp_path: Path) -> None:
    """A dry run needs no hub where every revision is given; to send something there must be one."""
    merged(given(model), tmp_path / "out")
    other = ("--as", f"{model.with_name('donor')}=org/b@v1")
    push = ("push", tmp_path / "out", "me/x", *other, "--as")
    assert run(*push, f"{model}=org/a@v1").exit_code == 0
    assert "its revision is unknown (the hub does not answer)" in one_error(run(*push, f"{model}=org/a").output)
    assert "cannot be published: the hub does not answer" in one_error(run(*push, f"{model}=org/a@v1", "--yes").output)


@pytest.mark.slow
def test_what_is_in_the_cache_works(model: Path, hub: Hub, tmp_path: Path) -> None:
    """Merged, compared and inspected with a hub, then without: the same bytes."""
    hub.publish("org/anchor", model)
    hub.commit("models/org/anchor", {"README.md": b"# A model"})  # which nobody downloads
    donor = make("llama", tmp_path / "donor", 1)
    with pytest.MonkeyPatch.context() as patch:
        at_home(hub, tmp_path / "cache", patch)
        first = merged(recipe_for("linear", "org/anchor", donor), tmp_path / "first")
    from mergekit.io.tasks import LoaderCache

    LoaderCache.loaders.clear()
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, SimpleNamespace(url="http://127.0.0.1:9"), tmp_path / "cache")
        second = merged(recipe_for("linear", "org/anchor", donor), tmp_path / "second")
        assert first.keys() == second.keys() == state(model).keys()
        assert all(bool((first[name] == second[name]).all()) for name in first)
        for command in (("inspect", "org/anchor"), ("align", "org/anchor", donor), ("verify", "org/anchor", model)):
            done = run(*command)
            assert done.exit_code == 0, done.output
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


def test_who_wants_no_hub_is_not_asked_for_one(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    at_home(hub, tmp_path, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.asked)
    line = one_error(run("inspect", GONE).output)
    assert "HF_HUB_OFFLINE is set; unset it, or name a folder" in line
    assert hub.asked[before:] == []
