"""Tiny checkpoints that stand in for the models that recipes and docs name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from cli_support import CHECKPOINTS
from plugin_support import DECODER as SMALL
from plugin_support import ENCODER, lora

from rotation_merge.diagnose.sources import references
from rotation_merge.mergekit_plugin.document import documents

DECODER = {**SMALL, "vocab_size": 256}
TEXT = {**ENCODER, "vocab_size": 256, "max_position_embeddings": 64}
PICTURE = {**ENCODER, "image_size": 16, "patch_size": 8}
DIGITS = {**ENCODER, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/": ("LlamaForCausalLM", DECODER),
    "allenai/": ("LlamaForCausalLM", DECODER),
    "org/vit": ("ViTForImageClassification", DIGITS),
    "org/": ("LlamaForCausalLM", DECODER),
    "Qwen/": ("Qwen2ForCausalLM", DECODER),
    "mistralai/": ("MistralForCausalLM", DECODER),
    "HuggingFaceH4/": ("MistralForCausalLM", DECODER),
    "teknium/": ("MistralForCausalLM", DECODER),
    "sentence-transformers/": ("BertModel", TEXT),
    "google/multiberts": ("BertForPreTraining", TEXT),
    "cardiffnlp/twitter-roberta-base-sentiment": ("RobertaForSequenceClassification", {**TEXT, "num_labels": 3}),
    "cardiffnlp/twitter-roberta-base-emotion": ("RobertaForSequenceClassification", {**TEXT, "num_labels": 4}),
    "google/vit": ("ViTForImageClassification", {**PICTURE, "num_labels": 10}),
    "nateraw/": ("ViTForImageClassification", {**PICTURE, "num_labels": 3}),
    "openai/clip": ("CLIPModel", {"text_config": TEXT, "vision_config": PICTURE, "projection_dim": 16}),
    "tanganke/clip-vit": ("CLIPVisionModel", PICTURE),
    "./clip-vit": ("CLIPVisionModel", PICTURE),
    "MergeBench/": ("LlamaForCausalLM", DECODER),
    "patrickjohncyh/": ("CLIPModel", {"text_config": TEXT, "vision_config": PICTURE, "projection_dim": 16}),
}
"""Class and sizes by the beginning of a model's name."""


def stand_in(name: str, folder: Path) -> Path:
    """The tiny checkpoint for a model's name; the same name gives the same one. Adapters have `lora` in theirs."""
    if "+" in name:
        base, adapter = (stand_in(part, folder) for part in name.split("+"))
        return Path(f"{base}+{adapter}")
    out = folder / name.replace("/", "--").strip(".-")
    if not out.exists():
        class_name, sizes = next(value for start, value in FAMILIES.items() if name.startswith(start))
        torch.manual_seed(len(list(folder.iterdir())) if folder.exists() else 0)
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**sizes))
        if "lora" in name:
            lora(out, model, r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"], base_model_name_or_path=None)
            return out
        model.save_pretrained(out)
        if sizes is DIGITS:
            shutil.copy(CHECKPOINTS / "vit-0" / "preprocessor_config.json", out)
        if "vision" not in str(sizes) and "image_size" not in sizes:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(CHECKPOINTS / "llama-0" / file, out / file)
    return out


def names(text: str) -> list[str]:
    """Models that a recipe names."""
    found: list[str] = []
    made: set[str] = set()
    for document in documents(text):
        found += [name for _, name in references(document.value) if name not in made]
        made.add(str(document.value.get("name")))
    return list(dict.fromkeys(found))


def localised(text: str, folder: Path) -> str:
    """The recipe with tiny checkpoints in the place of every model."""

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replace(item) for item in value]
        return str(stand_in(value, folder)) if value in models else value

    models = names(text)
    return yaml.safe_dump_all([replace(document) for document in yaml.safe_load_all(text)], sort_keys=False)
