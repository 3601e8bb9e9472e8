"""Tiny checkpoints, twins of them, and mergekit's own commands run on them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import rotation_merge as rm
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.keys import OPTIONS

DECODER = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
"""Few positions, as models write texts of their own up to those."""
ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**ENCODER, "vocab_size": 40, "max_position_embeddings": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**DECODER, "head_dim": 12}),
    "bert": ("BertForSequenceClassification", TEXT),
    "roberta": ("RobertaForSequenceClassification", TEXT),
    "vit": ("ViTForImageClassification", {**ENCODER, "image_size": 16, "patch_size": 8, "num_labels": 3}),
}

EVERYTHING = {"attention": "rotation", "heads": "permutation", "ffn": "permutation", "scaling": True}


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with random weights, norms and biases included."""
    name, sizes = FAMILIES[family]
    model_class = getattr(transformers, name)
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(model_class.config_class(**{**sizes, **changes}))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    return model


def save(model: PreTrainedModel, where: Path, **options: Any) -> Path:
    model.save_pretrained(where, **options)
    return where


def make(family: str, where: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny checkpoint."""
    return save(build(family, seed, **changes), where)


def state(where: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(where.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def write_state(tensors: dict[str, torch.Tensor], like: Path, where: Path) -> Path:
    """A checkpoint with the config of another and these tensors."""
    where.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        if (like / name).exists():
            (where / name).write_text((like / name).read_text())
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    return where


def twin(anchor: Path, where: Path, seed: int = 1, **options: Any) -> Path:
    """The anchor moved by a random element of every group that the options name (default: all local ones)."""
    moved = rm.Alignment.random(str(anchor), rm.AlignConfig(**(options or EVERYTHING)), seed=seed).apply(str(anchor))
    return write_state(moved.state_dict(), anchor, where)


def write_adapter(config: dict[str, Any], factors: dict[str, torch.Tensor], where: Path) -> Path:
    """An adapter's two files, as peft writes them."""
    where.mkdir(parents=True)
    (where / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in factors.items()}, where / "adapter_model.safetensors")
    return where


def rearranged(adapter: Path, experts: int, how: str) -> None:
    """An adapter of all experts as another trainer writes it.

    Args:
        how: `swapped`, as peft before 0.19 takes inputs and outputs; `grouped`, B packed by expert.
    """
    path, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    stored = load_file(path)
    for name in (name for name in stored if ".experts." in name and "lora_A" in name):
        other = name.replace("lora_A", "lora_B")
        a, b = stored[name].unflatten(0, (experts, -1)), stored[other].unflatten(1, (-1, experts))
        if how == "grouped":
            stored[other] = b.mT.flatten(1)
        else:
            stored[name], stored[other] = b.permute(2, 1, 0).flatten(0, 1), a.permute(2, 1, 0).flatten(1)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path)
    entry = {"lora_B_layout": "grouped_by_expert"} if how == "grouped" else {"peft_version": "0.18.1"}
    config.write_text(json.dumps({**json.loads(config.read_text()), **entry}))


def lora(where: Path, base: Any, seed: int = 0, spread: float = 0.3, **options: Any) -> Any:
    """A LoRA of random factors on a module or a checkpoint, written as peft writes it; gives peft's model."""
    from peft import LoraConfig, get_peft_model

    module = AutoModelForCausalLM.from_pretrained(base) if isinstance(base, Path) else base
    if "base_model_name_or_path" in options:
        vars(module)["name_or_path"] = options.pop("base_model_name_or_path")
    torch.manual_seed(seed)
    model = get_peft_model(module, LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                drawn = (
                    torch.rand_like(parameter) + 0.5 if "magnitude" in name else spread * torch.randn_like(parameter)
                )
                parameter.copy_(drawn)
    model.save_pretrained(where, save_embedding_layers=False)
    return model


def relative_distances(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    assert set(a) == set(b)
    return {name: float((a[name].double() - b[name].double()).norm() / b[name].double().norm()) for name in b}


def recipe_for(delegate: str, anchor: Path | str, /, *donors: Path | str, **parameters: Any) -> dict[str, Any]:
    """A recipe that merges the anchor and donors with every local group; `weight` is an even share where wanted."""
    takes_weight = "weight" in [parameter.name for parameter in delegates.get(delegate).spec.parameters]
    return {
        "merge_method": "rotation_merge",
        "base_model": str(anchor),
        "models": [
            {"model": str(path), **({"parameters": {"weight": 1 / (1 + len(donors))}} if takes_weight else {})}
            for path in (anchor, *donors)
        ],
        "parameters": {"delegate": delegate, **EVERYTHING, **parameters},
        "dtype": "float32",
    }


def from_file(recipe: dict[str, Any], file: Path) -> dict[str, Any]:
    """The recipe with a file in place of matching its last model; options of matching would do nothing beside it."""
    again: dict[str, Any] = copy.deepcopy(recipe)
    again["models"][-1].setdefault("parameters", {})["alignment"] = str(file)
    again["parameters"] = {n: v for n, v in recipe["parameters"].items() if n not in (*OPTIONS, "save_alignment")}
    return again


def write_recipe(recipe: Any, where: Path) -> Path:
    where.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False))
    return where


def mergekit_yaml(recipe: Any, out: Path, *flags: str) -> Result:
    """mergekit-yaml in this process."""
    from mergekit.io.tasks import LoaderCache
    from mergekit.scripts.run_yaml import main

    LoaderCache.loaders.clear()
    path = out.parent / f"{out.name}.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    return CliRunner().invoke(main, [str(write_recipe(recipe, path)), str(out), "--quiet", *flags])


def mergekit_multi(documents: list[dict[str, Any]], folder: Path, *flags: str) -> Result:
    """mergekit-multi in this process: stages in FOLDER/stages, the last merge in FOLDER/out."""
    from mergekit.io.tasks import LoaderCache
    from mergekit.scripts.multimerge import main

    LoaderCache.loaders.clear()
    path = folder / "stages.yml"
    path.write_text("\n---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents))
    arguments = [path, "--intermediate-dir", folder / "stages", "--out-path", folder / "out", "--quiet", *flags]
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def merged(recipe: Any, out: Path, *flags: str) -> dict[str, torch.Tensor]:
    """The tensors of a merge that must succeed."""
    result = mergekit_yaml(recipe, out, *flags)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return state(out)


def reads_of_files(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """From now on, the folder and the name of each tensor that is read from a file, in order."""
    from rotation_merge.model.folder import ShardReader

    reads: list[tuple[str, str]] = []
    real = ShardReader.__call__

    def counting(self: ShardReader, name: str) -> torch.Tensor:
        reads.append((self.folder, name))
        return real(self, name)

    monkeypatch.setattr(ShardReader, "__call__", counting)
    return reads


def one_error(text: str) -> str:
    """The one line of an output that reports an error; fails where there are more or a traceback."""
    assert "Traceback" not in text, text
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, text
    return errors[0]


def error_of_merge(recipe: Any, out: Path, *flags: str) -> str:
    """The one line of a merge that ends with an error and writes nothing."""
    done = mergekit_yaml(recipe, out, *flags)
    assert done.exit_code == 2, done.output
    assert not out.exists()
    return one_error(done.output)


def load(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """The module at a path: a folder, a GGUF file, or `base+adapter`; complete, in evaluation mode."""
    module = rm.average([path]).to(dtype).to_module()
    module.set_attn_implementation("eager")
    return module.requires_grad_(False)


def files_of(folder: Path) -> dict[str, bytes]:
    """What every file in a folder holds, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_tokenizer(words: list[str], where: Path) -> None:
    """A tokenizer that knows these words, in a model's folder."""
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0]).save_pretrained(where)
