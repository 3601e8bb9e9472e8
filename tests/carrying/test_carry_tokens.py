"""Tokens and the chat template that a fine-tune added come along with their rows, or are named as lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import other_coordinates
from cli_support import run
from plugin_support import build, mergekit_yaml, recipe_for, state
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import rotation_merge as rm

SIZE = 60
ADDED = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|> {{ message['content'] }} <|im_end|>{% endfor %}"
TURNED = rm.AlignConfig(residual="rotation", attention="rotation", heads="permutation", ffn="permutation")


def words_of(tokens: list[str], where: Path, added: list[str] = (), **special: Any) -> None:
    """A tokenizer that knows these words."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(tokens)}, unk_token=tokens[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=tokens[0])
    tokenizer.add_tokens([AddedToken(token, special=True) for token in added])
    for name, value in special.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(where)


def write(state: dict[str, Tensor], where: Path, size: int = SIZE) -> Path:
    model = build("llama", vocab_size=size)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    model.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two bases that are one in two coordinates, the second also with another vocabulary, and a chat fine-tune of the
    first: every tensor changed, two tokens more, and five rows that no token has."""
    folder = tmp_path_factory.mktemp("chat")
    draw = torch.Generator().manual_seed(0)
    old = build("llama", vocab_size=SIZE)
    before = {name: tensor.double() for name, tensor in old.state_dict().items()}
    after, _ = other_coordinates(old.double(), TURNED)
    changed = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        for name, tensor in before.items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = 0.3 * torch.randn(len(ADDED) + 5, before[name].shape[1], generator=draw, dtype=torch.float64)
        changed[name] = torch.cat([changed[name], rows])
    order = torch.randperm(SIZE, generator=draw)
    other = {**after}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = torch.randn(3, before[name].shape[1], generator=draw, dtype=torch.float64)
        other[name] = torch.cat([after[name][order], extra])
    paths = {
        "old": write(before, folder / "old"),
        "new": write(after, folder / "new"),
        "other": write(other, folder / "other", SIZE + 3),
        "tuned": write(changed, folder / "tuned", SIZE + 7),
    }
    tokens = [f"w{i}" for i in range(SIZE)]
    for name in ("old", "new"):
        words_of(tokens, folder / name)
    words_of([*(tokens[i] for i in order), "n0", "n1", "n2"], folder / "other")
    words_of(tokens, folder / "tuned", ADDED, chat_template=TEMPLATE, eos_token=ADDED[1])
    end = {"eos_token_id": SIZE + 1}
    (folder / "tuned" / "generation_config.json").write_text(json.dumps(end))
    return paths


CHAT = [{"role": "user", "content": "w3 w5 w8 w13"}, {"role": "assistant", "content": "w21 w34"}]


@torch.no_grad()
def answers(model: Path, tokens: list[str]) -> tuple[Tensor, list[str]]:
    """Logits of the tokens that are named, after the chat, and what the chat is split into."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), return_tensors="pt").input_ids
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=ids).logits[0]
    return logits[:, tokenizer.convert_tokens_to_ids(tokens)], tokenizer.convert_ids_to_tokens(ids[0])


ALL = [*(f"w{i}" for i in range(SIZE)), *ADDED]


def pair(home: dict[str, Path], new: str = "new") -> tuple[object, ...]:
    return ("--from", home["old"], "--to", home[new], "--heads", "permutation", "--residual", "rotation")


@pytest.mark.slow
@pytest.mark.parametrize("new", ["new", "other"])
def test_a_chat_model_answers_as_at_home(new: str, home: dict[str, Path], tmp_path: Path) -> None:
    done = run("carry", home["tuned"], *pair(home, new), tmp_path / "out")
    assert done.exit_code == 0, done.output
    (expected, pieces), (logits, carried) = (answers(path, ALL) for path in (home["tuned"], tmp_path / "out"))
    assert pieces == carried
    assert ADDED[0] in pieces
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == len(state(tmp_path / "out")["lm_head.weight"])
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(ADDED[1])
    assert tokenizer.eos_token == ADDED[1]
    assert "were moved with their rows: `<|im_end|>`, `<|im_start|>`" in done.output
    assert "chat template was copied" in done.output
    assert ("5 rows" in done.output) == (new == "other")


@pytest.mark.slow
def test_what_the_tokens_mean_to_the_new_base_is_kept(home: dict[str, Path], tmp_path: Path) -> None:
    """Rows of tokens that the old base lacks stay the new base's."""
    done = run("carry", home["tuned"], *pair(home, "other"), tmp_path / "out", "--residual", "permutation", "--force")
    assert done.exit_code == 0, done.output
    before, after = state(home["other"]), state(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(after[name]) == SIZE + 3 + len(ADDED)
        torch.testing.assert_close(after[name][SIZE : SIZE + 3], before[name][SIZE:])


@pytest.mark.slow
@pytest.mark.parametrize("new", ["new", "other"])
def test_an_adapter_brings_its_whole_embedding(new: str, home: dict[str, Path], tmp_path: Path) -> None:
    """As trl writes it: low-rank changes, the resized embedding and head whole, the tokenizer beside."""
    adapter(home, tmp_path / "adapter", rows=True)
    done = run("carry", tmp_path / "adapter", *pair(home, new), tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "were moved with their rows" in done.output
    for name, base in (("adapter", "old"), ("out", new)):
        peft_merged(home[base], tmp_path / name, tmp_path / f"{name}-merged")
    (expected, pieces), (logits, carried) = (answers(tmp_path / f"{name}-merged", ALL) for name in ("adapter", "out"))
    assert pieces == carried
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
def test_an_adapter_without_rows_names_what_is_lost(home: dict[str, Path], tmp_path: Path) -> None:
    adapter(home, tmp_path / "adapter", rows=False)
    done = run("carry", tmp_path / "adapter", *pair(home, "other"), tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "Not carried of what it added" in done.output
    assert all(f"`{token}`" in done.output for token in ADDED)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert not set(ADDED) & set(tokenizer.get_vocab())


@pytest.mark.slow
def test_a_new_adapter_names_what_is_lost(home: dict[str, Path], tmp_path: Path) -> None:
    done = run("carry", home["tuned"], *pair(home), tmp_path / "out", "--lora", 4)
    assert done.exit_code == 0, done.output
    assert done.output.index("Not carried of what it added to its base") > done.output.index("Rank 4")
    facts = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any("Not carried" in note and ADDED[0] in note for note in facts["notes"])


@pytest.mark.slow
def test_a_merge_names_what_is_lost(home: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_for("task_arithmetic", home["new"], home["tuned"])
    recipe["models"] = recipe["models"][1:]
    recipe["models"][0]["parameters"] = {"weight": 1.0, "finetuned_from": str(home["old"])}
    recipe["parameters"] = {**recipe.get("parameters", {}), "residual": "rotation", "heads": "permutation"}
    done = mergekit_yaml(recipe, tmp_path / "out")
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any("Not carried" in note and ADDED[0] in note and "template" in note for note in facts["notes"])
    assert len(state(tmp_path / "out")["lm_head.weight"]) == SIZE


@pytest.mark.slow
def test_python_brings_them_along(home: dict[str, Path], tmp_path: Path) -> None:
    paths = {name: str(path) for name, path in home.items()}
    view = rm.transfer(paths["tuned"], paths["old"], paths["new"], residual="rotation", heads="permutation")
    view.save_pretrained(tmp_path / "out")
    (expected, _), (logits, _) = (answers(path, ALL) for path in (home["tuned"], tmp_path / "out"))
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (("--carry", "refit"), True),
        (("--scale", "auto"), True),
        (("--steps", 2), True),
        (("--steps", 2, "--lora", 4), False),
    ],
)
def test_samples_may_hold_added_tokens(
    options: tuple[object, ...], rows: bool, home: dict[str, Path], tmp_path: Path
) -> None:
    """Of a model that is written; where an adapter is, samples of the old tokens judge."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZE + (len(ADDED) if rows else 0), (32, 12), generator=draw)
    ids[:, 3] = SIZE if rows else 3
    lines = [json.dumps({"input_ids": row}) for row in ids.tolist()]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    data = ("--data", tmp_path / "chat.jsonl", "--samples", 32)
    done = run("carry", home["tuned"], *pair(home), tmp_path / "out", *data, *options)
    assert done.exit_code == 0, done.output
    assert "Recovered lift" in done.output or "recovered lift" in done.output
    if rows:
        (expected, pieces), (logits, carried) = (answers(path, ALL) for path in (home["tuned"], tmp_path / "out"))
        assert pieces == carried
        assert logits.shape == expected.shape
    else:
        assert "Not carried of what it added" in done.output


def adapter(home: dict[str, Path], where: Path, rows: bool) -> None:
    """A LoRA of the old base, its tokenizer beside it, with or without the embedding and head it was trained with."""
    draw = torch.Generator().manual_seed(2)
    tensors, tuned = {}, state(home["tuned"])
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        gives, reads = tuned[f"model.layers.{layer}.mlp.down_proj.weight"].shape
        tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(2, reads, generator=draw)
        tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(gives, 2, generator=draw)
    if rows:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[f"base_model.model.{name}"] = tuned[name].clone()
    where.mkdir()
    save_file(tensors, where / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"], "task_type": "CAUSAL_LM"}
    saved = {"modules_to_save": ["embed_tokens", "lm_head"] if rows else None}
    content = {**config, **saved, "base_model_name_or_path": str(home["old"])}
    (where / "adapter_config.json").write_text(json.dumps(content))
    words_of([f"w{i}" for i in range(SIZE)], where, ADDED, chat_template=TEMPLATE, eos_token=ADDED[1])


def peft_merged(base: Path, adapter: Path, out: Path) -> None:
    """What peft makes of a base with as many rows as the adapter holds."""
    from peft import PeftModel

    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    model.resize_token_embeddings(len(tensors["base_model.model.lm_head.weight"]))
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(out)
