"""The gate: what a model in memory is taken for, and which of two shards is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plugin_support import reads_of_files, write_state
from safetensors.torch import load_file, save_file
from tiny_models import ALL, Case, difference, load, outputs, planted

import rotation_merge as rm
from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.open import open_model
from rotation_merge.report.integrity import check_folder

CASES = {f"{case.family}/{case.name}": case for case in ALL}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": 50}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 50}
CLASSES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Llama": (LLAMA, ("Model", "ForCausalLM", "ForSequenceClassification")),
    "Bert": ({**SIZES, "vocab_size": 50}, ("Model", "ForMaskedLM", "ForSequenceClassification")),
    "T5": (T5, ("Model", "ForConditionalGeneration", "EncoderModel")),
    "ViT": ({**SIZES, "image_size": 32, "patch_size": 8}, ("Model", "ForImageClassification")),
}


def llama() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "kind"), [(f, kind) for f, (_, kinds) in CLASSES.items() for kind in kinds])
def test_a_state_dict_shows_its_class(family: str, kind: str, tied: bool) -> None:
    config = getattr(transformers, f"{family}Config")(**CLASSES[family][0], tie_word_embeddings=tied)
    model = getattr(transformers, f"{family}{kind}")(config)
    config.architectures = None
    view = open_model((model.state_dict(), config))
    assert view.config["architectures"] == [f"{family}{kind}"]
    assert set(view) == set(model.state_dict())


def with_another_head(case: Case) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The name of a head that transformers ties, tensors with one that differs, and the config, which ties it still."""
    model = planted(case)
    pairs = {**model.module.all_tied_weights_keys}
    head = next(name for name in pairs if name.endswith(("lm_head.weight", "decoder.weight")))
    return head, {**model.state, head: torch.randn_like(model.state[pairs[head]])}, model.config


@pytest.mark.parametrize("name", ["bart/generation", "bert/masked words", "gemma4_vlm/dense", "opt/projected"])
def test_a_head_that_differs_is_untied_in_every_family(name: str, tmp_path: Path) -> None:
    """Other tensors that the same entry of the config ties, such as a bias, are then stored, too."""
    case = CASES[name]
    head, tensors, config = with_another_head(case)
    view = open_model((tensors, config))
    rm.average([(tensors, config)]).save_pretrained(tmp_path / "written")
    again = json.loads((tmp_path / "written" / "config.json").read_text())
    ties = [part["tie_word_embeddings"] for part in (again, again.get("text_config")) if part]
    assert (view.tied_head, head in view, set(ties)) == (None, True, {False})
    assert planted(case).differs(tensors) > 1e-3
    expected = outputs(planted(case).holding(tensors), planted(case).given)
    assert difference(outputs(load(case, tmp_path / "written"), planted(case).given), expected) <= 1e-9
    assert open_model((planted(case).state, config)).tied_head == head


def test_a_stored_head_is_compared_once_while_its_file_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = planted(next(case for case in ALL if case.family == "llama" and planted(case).tied))
    head, _ = model.tied or ("", "")
    embedding = "model.embed_tokens.weight"
    folder = write_state({**model.state, head: 1 * model.state[embedding]}, model.folder, tmp_path / "model")
    reads = reads_of_files(monkeypatch)
    assert [open_model(str(folder)).tied_head for _ in range(3)] == [head] * 3
    assert sorted(name for _, name in reads) == [head, embedding]
    save_file({**model.state, head: 2 * model.state[embedding]}, folder / "model.safetensors", {"format": "pt"})
    assert open_model(str(folder)).tied_head is None


def test_a_head_that_differs_and_reads_scaled_outputs_is_refused() -> None:
    _, tensors, config = with_another_head(CASES["t5/plain"])
    with pytest.raises(CheckpointError, match=r"differs from 'shared.weight'.*scaled outputs; remove it, or divide it"):
        open_model((tensors, config))


def test_tensors_of_no_class_are_said() -> None:
    model = llama()
    model.config.architectures = None
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"missing, the first is 'model.norm.weight'"):
        open_model((state, model.config))


def test_a_tensor_in_two_shards_is_the_last_ones(tmp_path: Path) -> None:
    """transformers reads the last shard's, mergekit the index's: where both are one it is clear which is meant."""
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    index, name = tmp_path / "model.safetensors.index.json", "model.norm.weight"
    content = json.loads(index.read_text())
    first, *_, final = sorted(set(content["weight_map"].values()))
    for shard in {first, final} - {content["weight_map"][name]}:
        tensors = load_file(tmp_path / shard)
        save_file({**tensors, name: torch.full((32,), 7.0)}, tmp_path / shard, {"format": "pt"})
    content["weight_map"][name] = final
    index.write_text(json.dumps(content))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(open_model(tmp_path)[name], loaded.state_dict()[name])


@pytest.mark.parametrize("entry", [{"x": torch.ones(2, 2).to_sparse()}, {1: torch.ones(2)}, {"x": [1.0]}])
def test_entries_of_a_state_dict_that_are_no_tensors_by_name(entry: dict[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"entry '{next(iter(entry))}' is .* in its state dict; give a pair"):
        open_model(({**llama().state_dict(), **entry}, LLAMA))


@pytest.mark.parametrize(
    ("entry", "value"), [("architectures", 1), ("architectures", [1]), ("architectures", "x"), ("text_config", 1)]
)
def test_a_config_whose_entries_are_something_else(entry: str, value: Any, tmp_path: Path) -> None:
    """Refused in a line from files and in memory, and named by the check of a folder."""
    model = llama()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {entry: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, (model.state_dict(), config)):
        with pytest.raises(RotationMergeError, match=entry) as error:
            open_model(given)
        assert "\n" not in str(error.value)
    for more in ({}, {"auto_map": {"AutoModel": "code.Model"}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        lines = [defect.line for defect in check_folder(str(tmp_path))]
        assert entry != "architectures" or any(entry in line for line in lines)
