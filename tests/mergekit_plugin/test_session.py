"""One merge of many: everything is read once, nothing is left behind; stages, progress, and the final check."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import yaml
from cli_support import run as command
from faults_support import END, read, whole
from interrupted_support import forked
from mergekit import card, merge
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from plugin_support import (
    from_file,
    lora,
    make,
    mergekit_multi,
    one_error,
    recipe_for,
    relative_distances,
    state,
    write_recipe,
    write_state,
)
from safetensors.torch import load_file, save_file
from test_integrity import TWICE, overlaid, quantised
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import rotation_merge as rm
from rotation_merge.architecture import build, registry
from rotation_merge.diagnose.doctor import Cause, diagnose, open_case
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.run import merge_recipe, say_defects
from rotation_merge.model import contents
from rotation_merge.report.integrity import check_folder
from rotation_merge.report.integrity.mending import mend
from rotation_merge.workers import listening

Pair = tuple[Path, Path]


def run(recipe: dict[str, Any], out: Path) -> None:
    LoaderCache.loaders.clear()
    contents._header.cache_clear()
    registry._laid.clear()
    merge.run_merge(MergeConfiguration.model_validate(recipe), str(out), MergeOptions(quiet=True, copy_tokenizer=False))


@pytest.mark.parametrize(("options", "layouts"), [({}, 1), ({"residual": "rotation"}, 2)], ids=str)
def test_a_merge_of_two_models_does_everything_once(
    options: dict[str, str], layouts: int, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third header is that of what was written, which is looked at in the end."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, staticmethod(counting) if isinstance(owner, type) else counting)

    for owner, name in ((contents.Header, "of"), (registry, "lay_out"), (build, "_module_blocks"), (Recipe, "read")):
        count(owner, name)
    run(recipe_for("linear", *pair, **options), tmp_path / "out")
    assert (counts["of"], counts["read"]) == (3, 1)
    assert max(counts["lay_out"], counts["_module_blocks"]) <= layouts


def test_a_merge_leaves_nothing_behind(pair: Pair, tmp_path: Path) -> None:
    """Nor does one that fails: mergekit's cache of loaders is the process's, and others read untouched weights."""
    before = {module: dict(vars(module)) for module in (card, merge)}
    run(recipe_for("linear", *pair, residual="permutation"), tmp_path / "ours")
    spoilt = write_state({"x": torch.ones(2)}, pair[0], tmp_path / "spoilt")
    with pytest.raises(Exception, match="missing"):
        run(recipe_for("linear", pair[0], spoilt), tmp_path / "none")
    assert not LoaderCache.loaders
    run({**recipe_for("linear", *pair), "merge_method": "linear", "parameters": {}}, tmp_path / "stock")
    plain, parents = state(tmp_path / "stock"), [state(path) for path in pair]
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, (parents[0][name] + parents[1][name]) / 2, rtol=1e-5, atol=1e-6)
    assert all(vars(module) == functions for module, functions in before.items())
    recipe = write_recipe(recipe_for("ties", *pair), tmp_path / "recipe.yml")
    LoaderCache.loaders.clear()
    for name in ("check", "inspect"):
        assert command(name, recipe).exit_code == 0
        assert not LoaderCache.loaders


def test_a_tensor_whose_mark_is_taken_elsewhere_is_new_to_the_merge(pair: Pair, tmp_path: Path) -> None:
    """Who loads it for the merge looks whether it holds numbers, whoever has read it for something else."""
    donor, file = Path(shutil.copytree(pair[1], tmp_path / "donor")), tmp_path / "alignment"
    spoilt = {**load_file(donor / "model.safetensors"), "model.norm.weight": torch.full((32,), torch.nan)}
    save_file(spoilt, donor / "model.safetensors", {"format": "pt"})
    rm.align(str(pair[0]), str(donor)).save(file)
    with pytest.raises(rm.RotationMergeError, match="NaN"):
        run(from_file(recipe_for("linear", pair[0], donor), file), tmp_path / "out")


@pytest.mark.parametrize("seed", range(6))
def test_config_and_small_files_are_the_anchors_whatever_the_order_of_a_set(
    seed: int, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mergekit takes them from the first of a set of models, whose order Python draws anew in every process."""
    anchor, donor = (Path(shutil.copytree(path, tmp_path / name)) for path, name in zip(pair, "ab", strict=True))
    for number, folder in enumerate((anchor, donor)):
        (folder / "generation_config.json").write_text(json.dumps({"note": number}))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": number}))
    monkeypatch.setattr(ModelReference, "__hash__", lambda self: zlib.crc32(f"{seed} {self}".encode()))
    out = tmp_path / "out"
    run(recipe_for("linear", anchor, donor), out)
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 0
    assert json.loads((out / "generation_config.json").read_text())["note"] == 0


# --- stages ----------------------------------------------------------------------------------------------------------


def test_a_stage_as_origin_of_a_fine_tune(pair: Pair, tmp_path: Path) -> None:
    """finetuned_from names a stage; mergekit-multi turns that word into a mapping, which we turn back."""
    anchor, donor = pair
    generator = torch.Generator().manual_seed(0)
    tuned = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in state(donor).items()}
    models = [{"model": str(donor), "parameters": {"weight": 1.0}}]
    stage = {"name": "stage", "merge_method": "linear", "models": models, "dtype": "float32"}
    final = recipe_for("task_arithmetic", anchor, write_state(tuned, anchor, tmp_path / "fine"))
    final["models"][1]["parameters"] = {"weight": 1.0, "finetuned_from": "stage"}
    result = mergekit_multi([stage, final], tmp_path)
    assert result.exit_code == 0, result.output
    assert 1e-4 < max(relative_distances(state(tmp_path / "out"), state(anchor)).values()) < 0.2


def test_a_misspelt_word_in_a_stage(pair: Pair, tmp_path: Path) -> None:
    first = {"name": "first", **recipe_for("slerp", *pair, t=0.5)}
    result = mergekit_multi([first, recipe_for("linear", pair[0], Path("first"), hedas="permutation")], tmp_path)
    assert result.exit_code == 2
    assert "'heads'" in one_error(result.output)
    assert not (tmp_path / "stages" / "first").exists()


def test_commands_in_processes_of_their_own(pair: Pair, tmp_path: Path) -> None:
    """Relative paths, about which mergekit's card would ask the hub, without a network."""
    for name, model in zip(("anchor", "donor"), pair, strict=True):
        (tmp_path / name).symlink_to(model)
    text = yaml.safe_dump(
        {"name": "first", **recipe_for("slerp", Path("anchor"), Path("donor"), t=0.5)}, sort_keys=False
    )
    write_recipe(text, tmp_path / "stages.yml")
    line = ("mergekit-multi", "stages.yml", "--intermediate-dir", "stages", "--quiet")
    result = forked(*line, prepare=lambda: os.chdir(tmp_path))
    assert result.returncode == 0, result.stderr
    assert max(relative_distances(state(tmp_path / "stages" / "first"), state(pair[0])).values()) <= 1e-5
    assert "### Alignment" in (tmp_path / "stages" / "first" / "README.md").read_text()


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    recipe = recipe_for("linear", make("llama", folder / "anchor"), make("llama", folder / "donor", seed=1))
    recipe["parameters"] = {"delegate": "refit", "samples": 20, "attention": "none", "ffn": "none", "scaling": False}
    return yaml.safe_dump(recipe)


@pytest.mark.slow
def test_a_refit_tells_how_far_it_is_from_the_first_sample_on(refit: str, tmp_path: Path) -> None:
    steps: list[tuple[str, float, float]] = []
    with listening(lambda *step: steps.append(step)):
        merge_recipe(refit, str(tmp_path / "out"))
    assert all(0 <= done <= total for _, done, total in steps)
    assert sum(label == "writing samples, tokens" for label, _, _ in steps) > 20
    solved = [done for label, done, _ in steps if label == "refitting"]
    assert solved == sorted(solved)
    assert {0, 1, 2} <= set(solved)
    saved = [(done, total) for label, done, total in steps if label == "writing tensors"]
    assert [done for done, _ in saved] == list(range(1, len(saved) + 1))
    assert saved[-1][0] == saved[-1][1]


@pytest.mark.parametrize("tick", [1, 60])
def test_who_listens_may_end_the_work(tick: int, refit: str, tmp_path: Path) -> None:
    """Nothing is left behind, whenever that is."""
    count = itertools.count(1)

    def ending(*_: object) -> None:
        if next(count) >= tick:
            raise rm.RotationMergeError("it is time")

    with listening(ending), pytest.raises(rm.RotationMergeError, match="it is time"):
        merge_recipe(refit, str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


# --- the final check -------------------------------------------------------------------------------------------------


@pytest.fixture
def parents(tmp_path: Path) -> Pair:
    """A base and a fine-tune of it, with everything that belongs beside weights."""
    base = whole("llama", tmp_path / "base")
    tuned = Path(shutil.copytree(base, tmp_path / "tuned", ignore=shutil.ignore_patterns("model*")))
    rewrite(tuned, {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in state(base).items()})
    return base, tuned


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**read(file), **changes}))


def checked(parents: Pair, out: Path, **keys: Any) -> str:
    """Merges, and gives the notes of the report."""
    merge_recipe(yaml.safe_dump({**recipe_for("linear", *parents), **keys}), str(out), tokenizer=True)
    return "\n".join(read(out / "rotation_merge.json")["notes"])


def test_a_union_of_vocabularies_is_whole(parents: Pair, tmp_path: Path) -> None:
    """Of unlike RoPE and context lengths; small files come along that mergekit leaves behind."""
    base, tuned = parents
    (base / "processor_config.json").write_text("{}")
    vocabulary, tensors, rows = read(tuned / "tokenizer.json"), state(tuned), read(tuned / "config.json")["vocab_size"]
    vocabulary["model"]["vocab"] |= {"<tool>": rows, "<think>": rows + 1}
    (tuned / "tokenizer.json").write_text(json.dumps(vocabulary))
    wider = {n: torch.cat([t, torch.ones(2, t.shape[1])]) for n, t in tensors.items() if t.shape[0] == rows}
    rewrite(tuned, {**tensors, **wider})
    rope = {**read(tuned / "config.json")["rope_parameters"], "rope_theta": 500000.0}
    edit(tuned / "config.json", vocab_size=rows + 2, rope_parameters=rope, max_position_embeddings=4096)
    notes = checked(parents, out := tmp_path / "out", tokenizer={"source": "union"})
    for words in ("'max_position_embeddings' is 4096", "rope_theta", "uses the anchor's positions", "processor_config"):
        assert words in notes, words
        assert words in (out / "README.md").read_text()
    model, tokenizer = LlamaForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.max_position_embeddings == read(base / "config.json")["max_position_embeddings"]
    row = model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("<tool>")]
    torch.testing.assert_close(row, torch.ones_like(row))
    assert (out / "processor_config.json").exists()
    assert check_folder(str(out), list(map(str, parents))) == []


def test_what_a_parent_has_wrong_is_said(parents: Pair, tmp_path: Path) -> None:
    edit(parents[0] / "generation_config.json", eos_token_id=128009)
    notes = checked(parents, tmp_path / "out")
    assert "special id beyond the vocabulary" in notes
    assert "as in a parent" in notes


LEGACY = ("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
"""Files of a tokenizer that transformers 5 reads and does not write."""


@pytest.fixture
def chat(parents: Pair) -> Pair:
    """A base that ends text with `</s>`, and a chat model that ends turns with two more tokens."""
    base, tuned = parents
    (base / "chat_template.jinja").unlink()
    edit(base / "tokenizer_config.json", eos_token="</s>")
    edit(base / "config.json", bos_token_id=0, eos_token_id=1)
    for folder, ends in ((base, 1), (tuned, [4, 3])):
        edit(folder / "generation_config.json", eos_token_id=ends)
        for name in LEGACY:
            (folder / name).write_text("{}")
    return base, tuned


def of_other_order(folder: Path) -> None:
    """Let the tokens of a model stand at other ids, in its config, too."""
    content = read(folder / "tokenizer.json")
    last = len(content["model"]["vocab"]) - 1
    content["model"]["vocab"] = {word: last - number for word, number in content["model"]["vocab"].items()}
    edit(folder / "tokenizer.json", **content)
    edit(folder / "config.json", bos_token_id=last, eos_token_id=last - 4)
    edit(folder / "generation_config.json", bos_token_id=last, pad_token_id=last - 2, eos_token_id=[last - 4, last - 3])


@pytest.mark.parametrize(
    ("source", "template", "reordered"),
    [
        (None, None, False),
        ("base", None, False),
        ("union", None, True),
        ("tuned", None, False),
        ("tuned", None, True),
        ("base", "auto", False),
        (None, "chatml", False),
    ],
)
def test_template_and_ends_of_turns_go_together(
    source: str | None, template: str | None, reordered: bool, chat: Pair, tmp_path: Path
) -> None:
    """In the configs and the tokenizer, beside the base's; the files of an unchanged tokenizer stay as they are."""
    base, tuned = chat
    if reordered:
        of_other_order(tuned)
    keys = {"chat_template": template} if template else {}
    if source:
        keys["tokenizer"] = {"source": str(tuned) if source == "tuned" else source}
    notes, out = checked(chat, tmp_path / "out", **keys), tmp_path / "out"
    assert "Check of the output" not in notes
    tokenizer = AutoTokenizer.from_pretrained(out)
    names = ["</s>", END] if template == "chatml" else ["</s>", END, "<|im_start|>"]
    assert tokenizer.eos_token == ("</s>" if template == "chatml" else END)
    expected = sorted(map(tokenizer.convert_tokens_to_ids, names))
    for file in ("config.json", "generation_config.json"):
        assert read(out / file)["eos_token_id"] == expected
        assert read(out / file)["bos_token_id"] == tokenizer.convert_tokens_to_ids("<s>")
    origin = tuned if source == "tuned" else base
    files = ("tokenizer.json", *LEGACY) if tokenizer.eos_token == origin else ("tokenizer.json", "tokenizer.model")
    assert all((out / name).read_bytes() == (origin / name).read_bytes() for name in files)
    assert all((out / name).exists() for name in LEGACY)


def test_stock_merges_are_told_what_they_lack(
    chat: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROTATION_MERGE_CHECK", "1")
    base, tuned = chat
    recipe = {"merge_method": "linear", "base_model": str(base), "tokenizer": {"source": str(tuned)}}
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in chat]
    with caplog.at_level(logging.INFO):
        merge_recipe(yaml.safe_dump({**recipe, "models": models}), str(out := tmp_path / "out"))
    for words in ("end of text: ", f"turns end with '{END}' (4), '<|im_start|>' (3)", "incomplete tokenizer: "):
        assert words in caplog.text, words
    assert not (out / "tokenizer.model").exists()
    assert {line.partition(":")[0] for line in mend(str(out), list(map(str, chat)))} == {
        *LEGACY,
        *("config.json", "generation_config.json"),
    }
    assert check_folder(str(out), list(map(str, chat))) == []


@pytest.mark.parametrize("asked", [True, False])
def test_other_methods_are_checked_where_the_environment_asks(
    asked: bool, parents: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROTATION_MERGE_CHECK", str(int(asked)))
    for parent in parents:  # without base_model, mergekit takes the config of either
        edit(parent / "config.json", bos_token_id=151999)
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in parents]
    with caplog.at_level(logging.INFO):
        merge_recipe(yaml.safe_dump({"merge_method": "linear", "models": models}), str(tmp_path / "out"))
    assert ("special id beyond the vocabulary" in caplog.text) == asked


def test_what_other_methods_merge_otherwise_is_said(
    parents: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora(tmp_path / "lora", base := parents[0])
    torch.save({"model.norm.weight": state(base)["model.norm.weight"]}, tmp_path / "lora" / "non_lora_state_dict.bin")
    models = [{"model": f"{parents[0]}+{tmp_path / 'lora'}", "parameters": {"weight": 1}}]
    models.append({"model": str(shutil.copytree(base, tmp_path / "copy")), "parameters": {"weight": 1}})
    recipe = {"merge_method": "linear", "models": models, "base_model": str(base)}
    with caplog.at_level(logging.INFO):
        say_defects(MergeConfiguration.model_validate(recipe), str(base), MergeOptions())
    assert f"{tmp_path / 'lora'} has non_lora_state_dict.bin beside it: peft merges it otherwise" in caplog.text
    assert f"{tmp_path / 'copy'} equals the base ({base}): it brings nothing" in caplog.text


def said_of_stock(models: Sequence[Path], out: Path, caplog: pytest.LogCaptureFixture, **keys: Any) -> str:
    """What is said of a merge by one of mergekit's own methods."""
    parts = [{"model": str(path), "parameters": {"weight": 0.5}} for path in models]
    text = yaml.safe_dump({"merge_method": "linear", "models": parts, **keys})
    with caplog.at_level(logging.INFO):
        merge_recipe(text, str(out))
    return caplog.text


def causes(out: Path, *parents: Path) -> list[Cause]:
    """Of a merge with its recipe, and of the recipe alone."""
    listed = [diagnose(open_case(str(patient))) for patient in (out / "mergekit_config.yml", out)]
    (out / "mergekit_config.yml").unlink()
    return [*(causes[0] for causes in listed if causes), *diagnose(open_case(str(out), list(map(str, parents))))[:1]]


@pytest.mark.parametrize(("method", "count", "keys"), [("fp8", 2, {"dtype": "bfloat16"}), ("bitsandbytes", 1, {})])
def test_averaged_codes_are_no_model(
    method: str,
    count: int,
    keys: dict[str, str],
    parents: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They stay so where the config no longer tells of them, and no correction makes one of them."""
    monkeypatch.setenv("ROTATION_MERGE_CHECK", "1")
    models = [quantised(parent, method, tmp_path / f"{parent.name}-codes") for parent in parents[:count]]
    text = said_of_stock(models, out := tmp_path / "out", caplog, **keys)
    assert "dequantise them and merge again" in text
    assert "complete" not in text
    mend(str(out), list(map(str, models)))
    assert "quantization_config" in read(out / "config.json")
    edit(out / "config.json", quantization_config=None)
    assert [cause.name for cause in causes(out, *models)] == 3 * ["quantised parents"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(1e3, "float16 ends at 65504, which sums in the merge exceed"), (float("nan"), "tuned holds it")],
)
def test_values_are_looked_at(
    value: float,
    words: str,
    parents: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And doctor says where NaN comes from."""
    monkeypatch.setenv("ROTATION_MERGE_CHECK", "1")
    base, tuned = parents
    rewrite(tuned, {name: tensor + value * torch.randn_like(tensor) for name, tensor in state(base).items()})
    keys = {
        "merge_method": "ties",
        "base_model": str(base),
        "dtype": "float16",
        "parameters": {"rescale": True, "density": 0.5},
    }
    text = said_of_stock([tuned], out := tmp_path / "out", caplog, **keys)
    assert "values that are NaN or infinite" in text
    assert "complete" not in text
    (cause,) = (cause for cause in diagnose(open_case(str(out))) if cause.name == "NaN")
    assert words in cause.remedy


def test_weights_that_add_up_to_nothing_are_the_cause_of_nan(parents: Pair, tmp_path: Path) -> None:
    """Where no parent holds it."""
    damaged = {name: torch.full_like(tensor, torch.nan) for name, tensor in state(parents[0]).items()}
    out = write_state(damaged, parents[0], tmp_path / "out")
    models = [{"model": str(path), "parameters": {"weight": w}} for path, w in zip(parents, (1, -1), strict=True)]
    text = yaml.safe_dump({"merge_method": "linear", "models": models, "dtype": "float16"})
    (out / "mergekit_config.yml").write_text(text)
    (cause,) = (cause for cause in diagnose(open_case(str(out))) if cause.name == "NaN")
    assert "add up to 0" in cause.remedy
    assert cause.remedy.endswith(", and merge again")


def test_a_parent_with_two_copies_of_a_tensor(
    parents: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """mergekit's own methods read the wrong one; ours do not."""
    monkeypatch.setenv("ROTATION_MERGE_CHECK", "1")
    overlaid(parents[0])
    text = said_of_stock(parents, tmp_path / "out", caplog, dtype="float32")
    assert f"tensor '{TWICE}' is in" in text
    assert [cause.name for cause in causes(tmp_path / "out", *parents)] == 3 * ["tensor twice"]
    ours, stock = tmp_path / "ours", state(tmp_path / "out")[TWICE]
    recipe = recipe_for("linear", *parents, attention="none", ffn="none", scaling=False)
    merge_recipe(yaml.safe_dump(recipe), str(ours))
    loaded = [LlamaForCausalLM.from_pretrained(parent).state_dict()[TWICE] for parent in parents]
    torch.testing.assert_close(state(ours)[TWICE], sum(loaded) / 2)
    assert not torch.allclose(state(ours)[TWICE], stock)
    assert "is in" not in "\n".join(read(ours / "rotation_merge.json")["notes"])


HEADS = {"gemma": "does not merge heads of this class", "nemotron": "leaves it out of the merge of heads", "llama": ""}
"""Families of whose heads mergekit knows nothing, not that they may be tied, and everything; what is said of them."""
ALIKE, UNTIED, DIFFERS = "stored, the embedding", "untied", "differs under a config that ties it"


def with_head(family: str, head: str, folder: Path, seed: int) -> Path:
    """A tiny model with a head of this kind; `tied`: it stores none."""
    case = next(case for case in tiny_models.ALL if case.family == family)
    torch.manual_seed(seed)
    config = case.model_class.config_class(**{**case.config, "tie_word_embeddings": head != UNTIED})
    (model := case.model_class(config)).save_pretrained(folder)
    if head in (ALIKE, DIFFERS):
        embedding = model.get_input_embeddings().weight.detach().clone()
        rewrite(folder, state(folder) | {"lm_head.weight": embedding + 0.1 * (head == DIFFERS)})
    return folder


@pytest.mark.parametrize(
    ("family", "heads", "lost"),
    [
        ("gemma", ("tied", DIFFERS), 1),
        ("gemma", (ALIKE, UNTIED), 1),
        ("gemma", (DIFFERS, "tied"), 0),
        ("gemma", (ALIKE, "tied"), None),
        ("nemotron", ("tied", UNTIED), 0),
        ("nemotron", (DIFFERS, "tied"), 1),
        ("nemotron", (ALIKE, DIFFERS), None),
        ("nemotron", ("tied", "tied"), None),
        ("llama", ("tied", DIFFERS), None),
        ("llama", (UNTIED, "tied"), None),
    ],
)
def test_heads_that_other_methods_lose(
    family: str,
    heads: tuple[str, str],
    lost: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are said where, and only where, the result's head is not the average of those that the models have."""

    def head_of(folder: Path) -> torch.Tensor:
        weight: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder).get_output_embeddings().weight.detach()
        return weight

    monkeypatch.setenv("ROTATION_MERGE_CHECK", "1")
    models = [with_head(family, head, tmp_path / str(number), number) for number, head in enumerate(heads)]
    expected, out = sum(map(head_of, models)) / 2, tmp_path / "out"
    text = said_of_stock(models, out, caplog, base_model=str(models[0]))
    checked = command("check", out / "mergekit_config.yml")
    assert torch.allclose(head_of(out), expected, atol=1e-6) == (lost is None)
    assert checked.exit_code == (lost is not None)
    for said in (text, checked.output):
        assert ("with 'delegate: linear' and 'untie: true'" in said) == (lost is not None)
        assert lost is None or (f"{models[lost]}: its head" in said and HEADS[family] in said)
    if heads == ("tied", DIFFERS) and lost is not None:
        recipe = recipe_for("linear", *models, attention="none", ffn="none", scaling=False, untie=True)
        merge_recipe(yaml.safe_dump(recipe), str(ours := tmp_path / "ours"))
        torch.testing.assert_close(head_of(ours), expected)
