"""A merge pushed to a hub, downloaded and made again by somebody else: the same bytes; nothing else leaves."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import error_of, output_of, parsed, run
from hub_support import Hub
from huggingface_hub import ModelCard, snapshot_download
from plugin_support import from_file, make, merged, recipe_for, state, twin
from safetensors.torch import load_file, save_file

import rotation_merge as rm
from rotation_merge.model.naming import Renaming
from rotation_merge.share.contents import belongs, is_weights
from rotation_merge.share.names import check_no_local_path, completed, targets_of
from rotation_merge.share.push import _stage

REPO = "me/merge"
SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
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


@pytest.fixture
def out(local: Local, tmp_path: Path) -> Path:
    """A copy of the merge, to spoil."""
    return shutil.copytree(local[2], tmp_path / "out")


def load_head(content: bytes) -> dict[str, str]:
    """The entries at the head of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    entries: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return entries


def named(local: Local) -> list[str]:
    """`--as` for both models, the donor's revision left to the hub."""
    anchor, donor, _, revisions = local
    return ["--as", f"{anchor}=org/anchor@{revisions['anchor']}", "--as", f"{donor}=org/donor"]


def published(home: Hub, repo: str, *arguments: object) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a repository after a push, and the metadata of its card."""
    assert parsed("push", *arguments, "--yes")["repository"] == repo
    files = home.files(repo)
    return files, ModelCard(files["README.md"].decode()).data.to_dict()


# --- what is published -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_somebody_else_makes_the_same_bytes(local: Local, home: Hub, tmp_path: Path) -> None:
    """Names of the hub stand in card, recipe and heads of files; large files go by git-lfs."""
    anchor, _, out, revisions = local
    revision = parsed("push", out, REPO, *named(local), "--yes")["revision"]
    files = home.files(REPO)
    first, second = (f"org/{name}@{revisions[name]}" for name in ("anchor", "donor"))
    text = files["README.md"].decode()
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["tags"]) == (["org/anchor", "org/donor"], ["mergekit", "merge", "rotation-merge"])
    assert data["license"] == "other", "one is mit, the other states nothing"
    recipe = yaml.safe_load(files["recipe.yml"])
    assert "\n# merge\n" in text
    assert f"| [org/donor](https://huggingface.co/org/donor) | {revisions['donor']} | not stated | `" in text
    assert yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0]) == recipe
    assert [entry["model"] for entry in recipe["models"]] == [first, second]
    alignment = recipe["models"][1]["parameters"]["alignment"]
    place, _, commit = alignment.removeprefix(f"{REPO}/").partition("@")
    assert commit != "main"
    assert home.at(f"models/{REPO}", commit)[1][place] == files[place]  # type: ignore[index]
    head = load_head(files[place])
    assert [facts[0] for facts in json.loads(head["head"])["models"]] == [first, second]
    assert not any(str(anchor.parent) in entry for entry in head.values())
    assert not [name for name, content in files.items() if str(anchor.parent).encode() in content]
    large = [content for name, content in files.items() if name.endswith(".safetensors")]
    assert {f"PUT blobs/{hashlib.sha256(content).hexdigest()}" for content in large} <= set(home.asked)
    downloaded = Path(snapshot_download(REPO, revision=revision, local_dir=tmp_path / "theirs"))
    merged((downloaded / "recipe.yml").read_text(), tmp_path / "again")
    folders = (out, downloaded, tmp_path / "again")
    weights = [{path.name: path.read_bytes() for path in folder.glob("model*.safetensors")} for folder in folders]
    assert weights[0] == weights[1] == weights[2] != {}
    assert state(downloaded).keys() == state(out).keys()


def test_a_dry_run_shows_a_summary_and_sends_nothing(local: Local, home: Hub, caplog: pytest.LogCaptureFixture) -> None:
    before = len(home.asked)
    for level, words in (("WARNING", ["weights: model"]), ("INFO", ["base_model:", "@main stands for"])):
        caplog.set_level(level, "rotation_merge")
        text = run("push", local[2], "me/new", *named(local), *(["-v"] if level == "INFO" else [])).output
        assert all(part in text for part in (*words, "README.md", "alignment/0-maps.safetensors", "org/anchor@"))
        assert ("Nothing was sent. --yes publishes" in text, "me/new" in home.repos) == (True, False)
    assert not any(line.startswith("POST") for line in home.asked[before:])


STRAY = (
    *("id_rsa", "env.local", "notes.txt", "trainer_state.json", "training_args.bin", "optimizer.pt", "model.py"),
    *("model.safetensors.partial", "out.unfinished/run.txt", "wandb/run.log", "checkpoint-100/optimizer.pt"),
    *("checkpoint-100/model.safetensors", "__pycache__/x.pyc", "runs/events.out", ".env", ".git/config", "data/x.key"),
    "statistics.safetensors",
)


@pytest.mark.slow
def test_only_what_belongs_to_a_merge_or_is_included(local: Local, out: Path, home: Hub) -> None:
    """Links inside the folder are followed; statistics in it need --with-data."""
    usual = {*parsed("push", out, REPO, *named(local))["files"]}
    for place in (*STRAY, "plots/a/b.svg"):
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_bytes(SECRET)
    (out / "loop").symlink_to(out)
    (out / "LICENSE").symlink_to("README.md")
    assert "Left out: " in output_of("push", out, "me/x", *named(local), "--yes")
    assert {*home.files("me/x")} == {*usual, "LICENSE"}
    assert not any(SECRET in content for content in home.files("me/x").values())
    facts = parsed("push", out, "me/x", *named(local), "--include", "notes.txt", "--include", "plots/*")
    assert {*facts["files"]} == {*usual, "LICENSE", "notes.txt", "plots/a/b.svg"}
    hidden = [place for place in STRAY if place.startswith(".")]
    assert {*facts["left_out"]} >= {*STRAY} - {*hidden, "notes.txt"}


def test_weights_under_other_names_that_the_index_names(local: Local, out: Path, home: Hub) -> None:
    """A last file over a shard, whose copy transformers reads; of other such files nothing is published."""
    shard = "model-00001-of-00001.safetensors"
    tensors = load_file((out / "model.safetensors").rename(out / shard))
    name, tensor = tensors.popitem()
    for file in ("zz.safetensors", "other.safetensors"):
        save_file({name: tensor}, out / file, {"format": "pt"})
    places = {**dict.fromkeys(tensors, shard), name: "zz.safetensors"}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    files, left_out = (parsed("push", out, "me/x", *named(local))[key] for key in ("files", "left_out"))
    assert {shard, "model.safetensors.index.json", "zz.safetensors"} <= {*files}
    assert left_out == ["other.safetensors"]


def test_places_of_files_of_a_merge() -> None:
    """Among others: every file that a tokenizer or processor of transformers is saved to."""
    weights = "model-00001-of-00002.safetensors heads/a_b/model.safetensors 2_Dense/model.safetensors"
    small = "data/0-x.jsonl alignment-2.safetensors heads/a/config.json spiece.model 1_Pooling/config.json"
    strange = "optimizer.safetensors heads/config.json heads/a/heads/b/config.json config.json/x x/README.md"
    for places, kind in ((weights, (True, True)), (small, (True, False)), (strange, (False, False))):
        for place in places.split():
            assert (belongs(place), is_weights(place)) == kind, place


# --- refusals --------------------------------------------------------------------------------------------------------


def linked(place: str) -> Callable[[Path], None]:
    """Replace a file of the folder by a link that leads out of it."""

    def spoil(out: Path) -> None:
        target = out.parent / ("secret" if "." in place else "")
        (out.parent / "secret").write_bytes(SECRET)
        (out / place).parent.mkdir(exist_ok=True)
        (out / place).unlink(missing_ok=True)
        (out / place).symlink_to(target)

    return spoil


def edited(place: str, old: str, new: str) -> Callable[[Path], None]:
    def spoil(out: Path) -> None:
        text = (out / place).read_text()
        assert old in text
        (out / place).write_text(text.replace(old, new, 1))

    return spoil


def pickled(out: Path) -> None:
    for path in out.glob("*.safetensors"):
        path.unlink()
    (out / "pytorch_model.bin").write_bytes(SECRET)


def damaged(out: Path) -> None:
    (out / "alignment").mkdir()
    (out / "alignment" / "x.safetensors").write_bytes(SECRET)


LINKS = ("tokenizer.json", "README.md", "recipe.yml", "model-00009-of-00009.safetensors", "notes.txt", "1_Pooling")
REFUSED: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    **{f"a link, {place}": (linked(place), [], f"out of the folder are not published: {place}") for place in LINKS},
    "a link, included": (
        linked("alignment/maps.safetensors"),
        ["--include", "*"],
        "out of the folder are not published",
    ),
    "hidden": (lambda _: None, ["--include", ".env"], "--include .env names no file"),
    "pickles": (pickled, [], "no weights in safetensors"),
    "no safetensors": (damaged, [], "is damaged"),
    "sizes": (edited("config.json", '"vocab_size": ', '"vocab_size": 1'), [], "is damaged: "),
    "metadata": (edited("README.md", "---\n", "---\nmodel-index: [{name: a}]\n"), [], "metadata are refused"),
    "no such repository": (lambda _: None, ["--as", "{anchor}=org/gone"], "org/gone@REVISION"),
    "nonsense": (lambda _: None, ["--as", "nonsense"], "write --as LOCAL=org/name@revision"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_before_anything_is_sent(case: str, local: Local, out: Path, home: Hub) -> None:
    spoil, options, words = REFUSED[case]
    spoil(out)
    options = [option.format(anchor=local[0]) for option in options]
    assert words in error_of("push", out, "me/y", *named(local), *options, "--yes")
    assert "models/me/y" not in home.repos


def test_local_names_are_refused_with_the_remedy(local: Local, out: Path, home: Hub) -> None:
    anchor, donor, *_ = local
    remedy = f"add --as {anchor}=org/name@revision --as {donor}=org/name@revision (not on the hub yet"
    assert remedy in error_of("push", out, REPO, "--yes")
    edited("README.md", "# ", f"See {anchor.parent}/notes\n# ")(out)
    assert f"names '{anchor.parent}/notes'" in error_of("push", out, REPO, *named(local))


def test_samples_that_only_the_report_names_need_a_name_on_the_hub(local: Local, out: Path, home: Hub) -> None:
    """Not even the name of such a file leaves without being told to; with --with-data the file does, models named as
    on the hub, whatever its ending."""
    samples, report = out.parent / "secret-texts", json.loads((out / "rotation_merge.json").read_text())
    samples.write_text(f"text of '{local[0]}'")
    report["data"] = [{"of": "matching the donor", "source": str(samples), "samples": 1}]
    (out / "rotation_merge.json").write_text(json.dumps(report))
    line = error_of("push", out, "me/z", *named(local))
    assert all(words in line for words in (f"--as {samples}=org/name@revision", "--with-data"))
    assert "data/0-secret-texts.txt" in parsed("push", out, "me/z", *named(local), "--with-data")["files"]
    target = f"{samples}=datasets/org/texts/a.txt@main"
    assert "secret-texts" not in json.dumps(parsed("push", out, "me/z", *named(local), "--as", target))


def test_a_failing_upload_is_one_line(local: Local, home: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import _commit_api

    for error in (RuntimeError("Error while uploading 'model.safetensors' to the Hub."), ValueError("LFS: too large")):
        monkeypatch.setattr(_commit_api, "_upload_files", lambda error=error, **_: (_ for _ in ()).throw(error))
        line = error_of("push", local[2], "me/large", *named(local), "--yes")
        assert "me/large: cannot be published (" in line


# --- fine-tunes, adapters --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_polished_adapter_is_published_with_its_base(local: Local, home: Hub, tmp_path: Path) -> None:
    anchor, _, _, revisions = local
    flags = ("--samples", 8, "--steps", 6, "--length", 8, "--learning-rate", 0.01, "--lora", 2)
    far = make("llama", tmp_path / "far", 5)
    assert run("polish", anchor, tmp_path / "out", "--teachers", far, *flags).exit_code == 0
    spelled = f"{anchor.parent}/./{anchor.name}"
    names = ["--as", f"{spelled}=org/anchor@{revisions['anchor']}", "--as", f"{far}=org/far@1"]
    files, data = published(home, "me/polished", tmp_path / "out", "me/polished", *names)
    assert (data["base_model"], data["base_model_relation"], data["license"]) == ("org/anchor", "adapter", "mit")
    assert "**trained**: `org/anchor@" in files["README.md"].decode()
    config = json.loads(files["adapter_config.json"])  # which names base and revision apart
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/anchor", revisions["anchor"])
    assert "adapter_model.safetensors" in files
    assert not any(str(anchor.parent).encode() in content for content in files.values())


# --- statistics, samples ---------------------------------------------------------------------------------------------


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
    for model in (anchor, donor):
        shutil.rmtree(model.name)
    text = files["recipe.yml"].decode()
    statistics = [entry["parameters"]["statistics"].partition("@")[0] for entry in yaml.safe_load(text)["models"]]
    assert statistics == [f"me/regmean/statistics/{n}-statistics.safetensors" for n in (0, 1)]
    merged(text, tmp_path / "again")
    assert Path("again/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


def test_a_recipe_names_statistics_beside_its_models() -> None:
    """However it is written; without such files the text stays."""
    text = "# x\nmodels:\n- model: a\n- {model: b, parameters: {weight: 1}}\n- {parameters: &x {}, model: d}\n"
    text += "- {model: e, parameters: *x}\n"
    models = yaml.safe_load(completed(text, [{"of": f"statistics of {x}", "file": f"/x/{x}"} for x in "abde"]))[
        "models"
    ]
    assert [x["parameters"].pop("statistics") for x in models] == [f"/x/{name}" for name in "abde"]
    assert [x["parameters"] for x in models] == [{}, {"weight": 1}, {}, {}]
    assert completed(text, [{"of": "statistics of a", "source": "self"}]) == text
    with pytest.raises(rm.RotationMergeError, match="no entry that could name its statistics"):
        completed(text, [{"of": "statistics of z", "file": "/x/z"}])


@pytest.mark.slow
def test_statistics_and_samples_travel_or_the_card_says_how_they_are_measured(
    local: Local, home: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever downloads the merge measures them with these commands, and makes the same bytes."""
    folders, revisions, work = local[:2], local[3], tmp_path / "work"
    work.mkdir()
    save_file({"input_ids": torch.arange(80).reshape(10, 8) % 40}, work / "texts.safetensors")
    recipe = recipe_for("linear", *folders)
    recipe["parameters"] = {"delegate": "regmean"}
    for entry, seed in zip(recipe["models"], (3, 4), strict=True):
        entry["parameters"]["statistics"] = str(work / Path(entry["model"]).name / "s.safetensors")
        options = ("--samples", 8, "--seed", seed, "--batch-size", 4, "--out", entry["parameters"]["statistics"])
        assert run("measure", entry["model"], "--data", work / "texts.safetensors", *options).exit_code == 0
    merged(recipe, work / "out")
    arguments = ["push", work / "out", "me/stay", *named(local), "--with-data"]
    facts = parsed(*arguments)
    assert {"data/0-texts.safetensors", "statistics/1-s.safetensors", "statistics/2-s.safetensors"} <= {*facts["files"]}
    assert "statistics: me/stay/statistics/1-s.safetensors@main\n" in facts["recipe"]
    facts = parsed(*arguments, "--as", f"{work / 'texts.safetensors'}=datasets/org/texts/a.safetensors@main")
    assert ("statistics/0-s.safetensors" in facts["files"], str(tmp_path) in facts["card"]) == (True, False)
    assert ModelCard(facts["card"]).data.datasets == ["org/texts"]
    done = run("push", work / "out", "me/stay", *named(local), "--yes")
    assert "statistics that are not published" in done.output
    files = home.files("me/stay")
    assert not [place for place in files if "statistics" in place or place.startswith("data")]
    assert not [place for place, content in files.items() if str(tmp_path).encode() in content]
    statistics = [entry["parameters"]["statistics"] for entry in yaml.safe_load(files["recipe.yml"])["models"]]
    assert statistics == ["0-s.safetensors", "1-s.safetensors"]
    card = files["README.md"].decode()
    commands = [line for line in card.splitlines() if line.startswith("rotation-merge measure")]
    for command, name, seed, file in zip(commands, revisions, (3, 4), statistics, strict=True):
        for words in (f" org/{name}@{revisions[name]} --data texts.safetensors ", f" --seed {seed} ", f" --out {file}"):
            assert words in command
    snapshot_download("me/stay", local_dir=tmp_path / "theirs")
    monkeypatch.chdir(tmp_path / "theirs")
    shutil.copy(work / "texts.safetensors", ".")
    assert [run(*shlex.split(command)[1:]).exit_code for command in commands] == [0, 0]
    merged(Path("recipe.yml").read_text(), tmp_path / "second")
    for path in (work / "out").glob("model*.safetensors"):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


# --- names -----------------------------------------------------------------------------------------------------------


def test_large_statistics_are_copied_in_pieces(tmp_path: Path) -> None:
    """Local names in the head are replaced without the tensors in memory."""
    head = {"format": "rotation_merge.statistics/1", "made": json.dumps({"data": "/home/me/x.txt", "model": "anchor"})}
    save_file({"x": torch.ones(1 << 24)}, tmp_path / "s.safetensors", head)
    tracemalloc.start()
    renaming = Renaming({"/home/me/x.txt": "x.txt", "anchor": "org/a@1"})
    _stage(str(tmp_path / "s.safetensors"), str(tmp_path / "copy.safetensors"), renaming)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    entries = load_head((tmp_path / "copy.safetensors").read_bytes())
    assert json.loads(entries["made"]) == {"data": "x.txt", "model": "org/a@1"}
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
    renamed = {"anchor": "org/x@2", "models": {"org/x@2": {"hub": None}}, "of": "statistics of org/a@1"}
    assert renaming.value(report) == {**renamed, "notes": ["a merge"]}
