"""Tiny checkpoints and a checked merge for mergekit's own tests, which name them but come without them.

`mergekit_tests.py` puts this file where they look for it: tests/common.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from mergekit.config import MergeConfiguration
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from mergekit.merge import MergeOptions, run_merge
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


def _saved(model: PreTrainedModel, path: Path) -> str:
    model.save_pretrained(path)
    return str(path)


def make_picollama(path: Path, vocab_size: int = 64) -> str:
    return _saved(LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SMALL)), path)


def make_picogranite(path: Path, vocab_size: int = 64) -> str:
    return _saved(GraniteForCausalLM(GraniteConfig(vocab_size=vocab_size, **SMALL)), path)


def make_gpt2size(path: Path) -> str:
    return _saved(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=12, n_head=4, n_positions=64)), path)


def make_picoLlaVa(path: Path) -> str:
    vision = CLIPVisionConfig(image_size=32, patch_size=16, **SMALL)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(vocab_size=64, **SMALL), image_token_index=63)
    return _saved(LlavaForConditionalGeneration(config), path)


def run_and_check_merge(
    config: MergeConfiguration,
    check_nan: bool = True,
    check_tensors: bool = True,
    validate: Callable[[str], None] | None = None,
    auto_arch: bool = False,
) -> None:
    """Merge; what was written has a config, its tensors hold no NaN, and `validate` is content."""
    with tempfile.TemporaryDirectory() as folder:
        run_merge(config, out_path=folder, options=MergeOptions())
        assert (Path(folder) / "config.json").exists()
        loader = LazyTensorLoader(ShardedTensorIndex.from_disk(folder), lazy_unpickle=False)
        assert not check_tensors or loader.index.tensor_paths
        for name in loader.index.tensor_paths if check_nan else ():
            assert not loader.get_tensor(name).isnan().any(), name
        if validate:
            validate(folder)
