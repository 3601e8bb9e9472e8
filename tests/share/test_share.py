"""A merge pushed to a hub, downloaded by somebody else and made again: the same bytes."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import parsed, run
from hub_support import Hub
from huggingface_hub import ModelCard, snapshot_download
from plugin_support import from_file, make, merged, one_error, recipe_for, state, twin
from safetensors.torch import load_file, save_file

import rotation_merge as rm
from rotation_merge.model.naming import Renaming
from rotation_merge.share.names import check_no_local_path, completed, targets_of
from rotation_merge.share.push import _stage

REPO = "me/merge"
Local = tuple[Path, Path, Path, dict[str, str]]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Local:
    """Two models of the hub as folders here, a merge of them by an alignment file, and their revisions."""
    folder = tmp_path_factory.mktemp("local")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor", seed=4, residual="none")
    (anchor / "README.md").write_text("---\nlicense: mit\n---\n# Anchor\n")
    revisions = {name: hub.publish(f"org/{name}", folder / name) for name in ("anchor", "donor")}
    maps = folder / "elsewhere" / "maps.safetensors"
    assert run("align", anchor, donor, "--alignment", maps, "--heads", "permutation").exit_code == 0
    merged(from_file(recipe_for("linear", anchor, donor), maps), folder / "out")
    return anchor, donor, folder / "out", revisions


def load_head(content: bytes) -> dict[str, str]:
    """The entries at the head of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    entries: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return entries


def texts_of(value: Any) -> Iterator[str]:
    """Every text in JSON that is no key."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_of(item)


def named(local: Local) -> list[str]:
    """`--as` for both models, the donor's revision left to the hub."""
    anchor, donor, _, revisions = local
    return ["--as", f"{anchor}=org/anchor@{revisions['anchor']}", "--as", f"{donor}=org/donor"]


def published(home: Hub, repo: str, *arguments: object) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a repository after a push, and the metadata of its card."""
    assert parsed("push", *arguments, "--yes")["repository"] == repo
    files = home.files(repo)
    return files, ModelCard(files["README.md"].decode()).data.to_dict()


@pytest.fixture
def pushed(local: Local, home: Hub) -> str:
    """The merge on the hub; its revision."""
    revision: str = parsed("push", local[2], REPO, *named(local), "--yes")["revision"]
    return revision


@pytest.mark.slow
def test_somebody_else_makes_the_same_bytes(local: Local, home: Hub, pushed: str, tmp_path: Path) -> None:
    theirs = Path(snapshot_download(REPO, revision=pushed, local_dir=tmp_path / "theirs"))
    again = merged((theirs / "recipe.yml").read_text(), tmp_path / "again")
    assert again.keys() == state(local[2]).keys()
    folders = (local[2], theirs, tmp_path / "again")
    weights = [{path.name: path.read_bytes() for path in folder.glob("model*.safetensors")} for folder in folders]
    assert weights[0]
    assert weights[0] == weights[1] == weights[2]
    assert parsed("verify", theirs, tmp_path / "again")["same"]


@pytest.mark.slow
def test_what_is_published(local: Local, home: Hub, pushed: str) -> None:
    anchor, _, _, revisions = local
    files = home.files(REPO)
    text = files["README.md"].decode()
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["tags"]) == (["org/anchor", "org/donor"], ["mergekit", "merge", "rotation-merge"])
    assert data["license"] == "other", "one is mit, the other states nothing"
    recipe = yaml.safe_load(files["recipe.yml"])
    first, second = (f"org/{name}@{revisions[name]}" for name in ("anchor", "donor"))
    for words in ("\n# merge\n", f" using {first} as a base.", f"* {second}\n"):
        assert words in text
    assert yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0]) == recipe
    assert [entry["model"] for entry in recipe["models"]] == [first, second]
    alignment = recipe["models"][1]["parameters"]["alignment"]
    place, _, commit = alignment.removeprefix(f"{REPO}/").partition("@")
    assert home.at(f"models/{REPO}", commit)[1][place] == files[place]  # type: ignore[index]
    for name, content in files.items():
        assert str(anchor.parent).encode() not in content, name


@pytest.mark.slow
def test_weights_go_the_way_of_large_files(local: Local, home: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is one line."""
    from huggingface_hub import _commit_api

    out, before = ["push", local[2], "me/large", *named(local), "--yes"], len(home.asked)
    home.blobs.clear()
    assert run(*out).exit_code == 0
    large = [content for place, content in home.files("me/large").items() if place.endswith(".safetensors")]
    assert len(large) > 1
    assert {f"PUT blobs/{hashlib.sha256(content).hexdigest()}" for content in large} <= set(home.asked[before:])
    for error in (RuntimeError("Error while uploading 'model.safetensors' to the Hub."), ValueError("LFS: too large")):
        monkeypatch.setattr(_commit_api, "_upload_files", lambda error=error, **_: (_ for _ in ()).throw(error))
        assert "me/large: cannot be published (" in one_error(run(*out).output)


def test_a_dry_run_shows_a_summary_and_sends_nothing(local: Local, home: Hub, caplog: pytest.LogCaptureFixture) -> None:
    before = len(home.asked)
    said = run("push", local[2], "me/other", *named(local)).output
    for words in ("README.md", "alignment/0-maps.safetensors", "org/anchor@", "--yes publishes"):
        assert words in said
    assert len(said.splitlines()) < 8
    assert not any(line.startswith("POST") for line in home.asked[before:])
    assert "models/me/other" not in home.repos
    caplog.set_level("INFO", "rotation_merge")
    said = run("push", local[2], "me/other", *named(local), "-v").output
    for words in ("README.md", "base_model:", "org/anchor@", "@main stands for", "--yes publishes"):
        assert words in said


def test_local_names_are_refused_with_the_remedy(local: Local, home: Hub) -> None:
    anchor, donor, out, _ = local

    def said(*arguments: object) -> str:
        return one_error(run("push", out, REPO, *arguments).output)

    remedy = f"add --as {anchor}=org/name@revision --as {donor}=org/name@revision (not on the hub yet"
    assert remedy in said("--yes")
    assert "--as" in said("--as", "nonsense")
    assert "org/gone@REVISION" in said("--as", f"{anchor}=org/gone", "--as", f"{donor}=org/donor")
    card = out / "README.md"
    kept = card.read_text()
    try:
        card.write_text(f"{kept}\nSee {anchor.parent}/notes.\n")
        assert f"{anchor.parent}/notes" in said(*named(local))
    finally:
        card.write_text(kept)


@pytest.mark.slow
def test_an_aligned_donor_is_published_as_a_fine_tune(local: Local, home: Hub, tmp_path: Path) -> None:
    assert run("align", *local[:2], tmp_path / "aligned", "--no-verify").exit_code == 0
    (tmp_path / "aligned" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(local[0])}))
    files, found = published(home, "me/aligned", tmp_path / "aligned", "me/aligned", *named(local))
    assert (found["base_model"], found["base_model_relation"]) == ("org/donor", "finetune")
    assert "recipe.yml" not in files
    config = json.loads(files["adapter_config.json"])
    assert config == {"base_model_name_or_path": "org/anchor", "revision": local[3]["anchor"]}
    snapshot_download("me/aligned", local_dir=tmp_path / "theirs")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_what_was_polished_is_published_with_its_base(lora: bool, local: Local, home: Hub, tmp_path: Path) -> None:
    anchor, donor, _, revisions = local
    flags = ("--samples", 8, "--steps", 6, "--length", 8, "--learning-rate", 0.01, *(("--lora", 2) if lora else ()))
    far = make("llama", tmp_path / "far", 5)
    assert run("polish", anchor, tmp_path / "out", "--teachers", far, *flags).exit_code == 0
    again = run("polish", anchor, tmp_path / "out", "--teachers", donor, *flags)
    assert "already exists" in one_error(again.output)
    spelled = f"{anchor.parent}/./{anchor.name}"
    names = ["--as", f"{spelled}=org/anchor@{revisions['anchor']}", "--as", f"{far}=org/far@1"]
    files, found = published(home, "me/polished", tmp_path / "out", "me/polished", *names)
    assert (found["base_model"], found["base_model_relation"]) == ("org/anchor", "adapter" if lora else "finetune")
    assert found["license"] == "mit"
    assert "**trained**: `org/anchor@" in files["README.md"].decode()
    if lora:
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/anchor"
    assert ("model.safetensors" in files) != lora
    assert not any(str(anchor.parent).encode() in content for content in files.values())
    snapshot_download("me/polished", local_dir=tmp_path / "theirs")
    assert run("inspect", tmp_path / "theirs", "--report").exit_code == 0


@pytest.mark.slow
def test_statistics_beside_a_model_travel(
    local: Local, home: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe does not name them; the published one does, and makes the same bytes where they lie beside nothing."""
    anchor, donor, _, revisions = local
    monkeypatch.chdir(tmp_path)
    for model in (anchor, donor):
        shutil.copytree(model, model.name)
        assert run("measure", model.name, "--data", "self", "--length", "8", "--samples", "8").exit_code == 0
    recipe = "merge_method: rotation_merge\nbase_model: anchor\nmodels: [{model: anchor}, {model: donor}]\n"
    merged(f"{recipe}parameters: {{delegate: regmean, weight: 0.5}}\ndtype: float32\n", tmp_path / "out")
    names = [x for n in ("anchor", "donor") for x in ("--as", f"./{n}=org/{n}@{revisions[n]}")]
    files, _ = published(home, "me/regmean", "out", "me/regmean", *names, "--with-data")
    for model in ("anchor", "donor"):
        shutil.rmtree(model)
    text = files["recipe.yml"].decode()
    own = [entry["parameters"]["statistics"].partition("@")[0] for entry in yaml.safe_load(text)["models"]]
    assert own == [f"me/regmean/statistics/{n}-statistics.safetensors" for n in (0, 1)]
    merged(text, tmp_path / "again")
    assert Path("again/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


def test_a_recipe_names_what_lay_beside_its_models() -> None:
    """However it is written; without such files the text stays."""
    text = """# kept
models:
- model: a
- {model: b, parameters: {weight: 1}}
- model: d
  parameters:
- parameters: &x {}
  model: e
- {model: f, parameters: *x}
"""
    used = [{"of": f"statistics of {name}", "file": f"/x/{name}"} for name in "abdef"]
    models = yaml.safe_load(completed(text, used))["models"]
    assert [x["parameters"].pop("statistics") for x in models] == [f"/x/{name}" for name in "abdef"]
    assert [x["parameters"] for x in models] == [{}, {"weight": 1}, {}, {}, {}]
    assert completed(text, [{"of": "statistics of a", "source": "self"}]) == text
    with pytest.raises(rm.RotationMergeError, match="no entry that could name its statistics"):
        completed(text, [{"of": "statistics of z", "file": "/x/z"}])


@pytest.mark.slow
def test_samples_travel_where_that_is_said(local: Local, home: Hub, tmp_path: Path) -> None:
    from cli_support import CHECKPOINTS

    model, text = CHECKPOINTS / "llama-0", tmp_path / "code.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 20)
    options = ("--data", text, "--length", "8", "--samples", "8", "--out", tmp_path / "s.safetensors")
    assert run("measure", model, *options).exit_code == 0
    recipe = recipe_for("linear", model)
    recipe["parameters"] = {"delegate": "regmean", "statistics": str(tmp_path / "s.safetensors")}
    merged(recipe, tmp_path / "out")
    arguments = ["push", tmp_path / "out", "me/regmean", "--as", f"{model}=org/donor@1"]
    found = parsed(*arguments, "--with-data")
    assert {"data/0-code.txt", "statistics/1-s.safetensors"} <= {*found["files"]}
    statistics = yaml.safe_load(found["recipe"])["parameters"]["statistics"]
    assert statistics.startswith("me/regmean/statistics/")
    found = parsed(*arguments, "--as", f"{text}=datasets/org/code/code.txt@main", "--with-data")
    assert "statistics/0-s.safetensors" in found["files"]
    assert ModelCard(found["card"]).data.datasets == ["org/code"]
    assert str(tmp_path) not in found["card"]


@pytest.mark.slow
def test_statistics_stay_here_and_the_card_says_how_they_are_measured(
    local: Local, home: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever downloads the merge measures them with these commands, and makes the same bytes."""
    folders, revisions, work = local[:2], local[3], tmp_path / "work"
    work.mkdir()
    samples = {"input_ids": torch.arange(80).reshape(10, 8) % 40}
    save_file(samples, work / "texts.safetensors")
    recipe = recipe_for("linear", *folders)
    recipe["parameters"] = {"delegate": "regmean"}
    for entry, seed in zip(recipe["models"], (3, 4), strict=True):
        file = work / Path(entry["model"]).name / "s.safetensors"
        entry["parameters"]["statistics"] = str(file)
        options = ("--samples", 8, "--seed", seed, "--batch-size", 4, "--out", file)
        done = run("measure", entry["model"], "--data", work / "texts.safetensors", *options)
        assert done.exit_code == 0, done.output
    merged(recipe, work / "out")
    done = run("push", work / "out", "me/stay", *named(local), "--yes")
    assert done.exit_code == 0, done.output
    assert "statistics that are not published" in done.output
    files = home.files("me/stay")
    assert not [place for place in files if "statistics" in place or place.startswith("data")]
    assert not [place for place, content in files.items() if str(tmp_path).encode() in content]
    snapshot_download("me/stay", local_dir=tmp_path / "theirs")
    recipe_of_theirs = yaml.safe_load(files["recipe.yml"])
    statistics = [entry["parameters"]["statistics"] for entry in recipe_of_theirs["models"]]
    assert statistics == ["0-s.safetensors", "1-s.safetensors"]
    card = files["README.md"].decode()
    commands = [line for line in card.splitlines() if line.startswith("rotation-merge measure")]
    for command, name, seed, file in zip(commands, revisions, (3, 4), statistics, strict=True):
        assert f" org/{name}@{revisions[name]} --data texts.safetensors " in command
        assert f" --seed {seed} " in command
        assert command.endswith(f" --out {file}")
    assert "not published" in card
    monkeypatch.chdir(tmp_path / "theirs")
    shutil.copy(work / "texts.safetensors", ".")
    for command in commands:
        done = run(*shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
    merged(Path("recipe.yml").read_text(), tmp_path / "second")
    for path in (work / "out").glob("model*.safetensors"):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_statistics_in_the_folder_itself_are_published_only_where_asked(local: Local, home: Hub) -> None:
    path = local[2] / "statistics.safetensors"
    path.write_bytes(b"x")
    try:
        found = parsed("push", local[2], REPO, *named(local))
        assert path.name not in found["files"]
        assert found["left_out"] == [path.name]
        assert "--with-data" in run("push", local[2], REPO, *named(local)).output
    finally:
        path.unlink()


@pytest.mark.slow
def test_models_in_the_head_of_an_alignment_have_their_names_of_the_hub(
    local: Local, home: Hub, pushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every entry, and also where the models are called as words are."""
    revisions = local[3]
    (content,) = (content for place, content in home.files(REPO).items() if place.startswith("alignment/"))
    head = load_head(content)
    models = [f"org/{name}@{revisions[name]}" for name in ("anchor", "donor")]
    assert [facts[0] for facts in json.loads(head["head"])["models"]] == models
    assert not any(str(local[0].parent) in entry for entry in head.values())
    monkeypatch.chdir(local[0].parent)
    assert run("align", "anchor", "donor", "--alignment", tmp_path / "near.safetensors").exit_code == 0
    renaming = Renaming({"anchor": "org/a@1", "donor": "org/b@2"})
    _stage(str(tmp_path / "near.safetensors"), str(tmp_path / "copy.safetensors"), renaming)
    head = load_head((tmp_path / "copy.safetensors").read_bytes())
    assert [facts[0] for facts in json.loads(head["head"])["models"]] == ["org/a@1", "org/b@2"]
    assert not {"anchor", "donor"} & set(texts_of(json.loads(head["head"])))
    assert rm.Alignment.load(tmp_path / "copy.safetensors").transforms


def test_large_statistics_are_copied_in_pieces(tmp_path: Path) -> None:
    """Local names in the head are replaced without the tensors in memory."""
    head = {"format": "rotation_merge.statistics/1", "made": json.dumps({"data": "/home/me/x.txt"})}
    save_file({"x": torch.ones(1 << 24)}, tmp_path / "s.safetensors", head)
    tracemalloc.start()
    _stage(str(tmp_path / "s.safetensors"), str(tmp_path / "copy.safetensors"), Renaming({"/home/me/x.txt": "x.txt"}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    assert json.loads(load_head((tmp_path / "copy.safetensors").read_bytes())["made"]) == {"data": "x.txt"}
    assert bool((load_file(tmp_path / "copy.safetensors")["x"] == 1).all())


def test_names_are_replaced_whole() -> None:
    renaming = Renaming({"/a/b": "org/b@1", "/a/b/maps": "me/x/maps@2", "org/c": "org/c@3", "same": "same"})
    text = "/a/b, '/a/b/maps' /a/b. /a/bc /a/b/other x/a/b org/c org/c@9 org/c/d"
    assert renaming.text(text) == "org/b@1, 'me/x/maps@2' org/b@1. /a/bc /a/b/other x/a/b org/c@3 org/c@9 org/c/d"
    assert renaming.value({"/a/b": ["/a/b", 1, None]}) == {"org/b@1": ["org/b@1", 1, None]}
    for text in ("see /a/other/x", json.dumps({"recipe": 'data: "/a/other/x"'})):
        with pytest.raises(rm.RotationMergeError, match="names '/a/other/x', a path on this machine"):
            check_no_local_path("README.md", text, ["/a/b"])
    check_no_local_path("README.md", "see http://x.org/a/b, a/b", ["/a/b"])
    assert targets_of(["./x=y=org/a@b"], []) == {"./x=y": "org/a@b"}


def test_folders_may_be_called_as_words_are() -> None:
    renaming = Renaming({"a": "org/a@1", "anchor": "org/x@2"})
    text = (
        "a: 1\nmodel: a  # a word\nx: [{model: a, b: anchor}]\n* anchor\nThis is a merge of `a` and an anchor.\n| a |"
    )
    after = (
        "a: 1\nmodel: org/a@1  # a word\nx: [{model: org/a@1, b: org/x@2}]\n* org/x@2\nThis is a merge of `org/a@1` and"
    )
    assert renaming.text(text) == f"{after} an anchor.\n| org/a@1 |"
    report = {"anchor": "anchor", "models": {"anchor": {"hub": None}}, "of": "statistics of a", "notes": ["a merge"]}
    found = {"anchor": "org/x@2", "models": {"org/x@2": {"hub": None}}, "of": "statistics of org/a@1"}
    assert renaming.value(report) == {**found, "notes": ["a merge"]}


def test_what_is_not_whole_is_not_pushed(local: Local, home: Hub, tmp_path: Path) -> None:
    """Headers and small files decide, before anything is sent; so does the card's YAML, by the hub's own class."""
    out = shutil.copytree(local[2], tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))
    assert "wrong shape" in run("push", out, REPO, *named(local)).output
    (out / "config.json").write_text(json.dumps(config))
    card = (out / "README.md").read_text()
    (out / "README.md").write_text(card.replace("---\n", "---\nmodel-index: [{name: a}]\n", 1))
    assert "metadata" in run("push", out, REPO, *named(local)).output
    (out / "README.md").write_text(card)
    assert run("push", out, REPO, *named(local)).exit_code == 0
