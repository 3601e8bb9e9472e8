"""Models with a LoRA adapter, against what peft makes of them: at full precision; of another base they are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from cli_support import output_of, parsed, run
from plugin_support import (
    error_of_merge,
    files_of,
    load,
    lora,
    make,
    merged,
    rearranged,
    recipe_for,
    state,
    twin,
    write_adapter,
    write_recipe,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import rotation_merge as rm

FIRST = {case.family: case for case in reversed(tiny.ALL)}
"""One model of each family."""
BIASED = next(case for case in tiny.ALL if case.name == "llama, tied, biases")

LINEAR = {"target_modules": "all-linear"}
PATTERNS = {"rank_pattern": {"q_proj": 5, r"layers\.1\.mlp.*": 4}, "alpha_pattern": {"up_proj": 3}}
TURNED = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
WAYS: dict[str, tuple[tiny.Case, dict[str, Any]]] = {
    "plain": (FIRST["llama"], LINEAR),
    "rsLoRA": (FIRST["llama"], {**LINEAR, "use_rslora": True}),
    "patterns": (FIRST["llama"], {**LINEAR, **PATTERNS}),
    "DoRA": (FIRST["llama"], {**LINEAR, "use_dora": True}),
    "embedding": (FIRST["llama"], {"target_modules": ["embed_tokens", "q_proj"]}),
    "whole modules": (FIRST["llama"], {**LINEAR, "modules_to_save": ["lm_head"]}),
    "all biases": (BIASED, {**LINEAR, "bias": "all"}),
    "own biases": (BIASED, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "bias of B": (FIRST["bert"], {"target_modules": ["query", "dense"], "lora_bias": True}),
    "stored as (in, out)": (FIRST["gpt2"], TURNED),
    "DoRA, (in, out)": (FIRST["gpt2"], {**TURNED, "use_dora": True}),
    "convolution": (FIRST["vit"], {"target_modules": ["projection"]}),
    "DoRA, embedding": (FIRST["llama"], {"target_modules": ["embed_tokens"], "use_dora": True}),
    "DoRA, convolution": (FIRST["vit"], {"target_modules": ["projection"], "use_dora": True}),
}
"""Kinds of adapters: a model, and arguments of peft's LoraConfig."""


def stacked(case: tiny.Case) -> list[str]:
    """Parameters of a model's class that hold the matrices of many experts."""
    with torch.device("meta"):
        model = case.model_class(case.model_class.config_class(**case.config))
    return sorted(name for name, parameter in model.named_parameters() if "experts" in name and parameter.ndim == 3)


SPARSE = {case.family: case for case in reversed(tiny.ALL) if any("expert" in k for k in case.config) and stacked(case)}
"""One mixture of experts of each family."""
EXPERTS = {"target_modules": [], "alpha_pattern": {r".*experts\.down_proj": 5}, "use_rslora": True}
"""What peft calls `target_parameters`, in files that store experts apart as in those that stack them."""
WAYS |= {family: (case, {**EXPERTS, "target_parameters": stacked(case)}) for family, case in SPARSE.items()}


def train(folder: Path, base: Any, seed: int = 0, **options: Any) -> Any:
    return lora(folder, base, seed, **{"r": 3, "lora_alpha": 7, **options})


def adapter_for(model: Path, folder: Path, seed: int = 0, **options: Any) -> Path:
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    train(folder, base, seed, **{"target_modules": ["up_proj", "q_proj"], **options})
    return folder


def edit(adapter: Path, **entries: Any) -> None:
    """Other entries of an adapter's config."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def tensors(base: Path, adapter: Path) -> dict[str, Tensor]:
    """Those of a model with its adapter."""
    return rm.average([f"{base}+{adapter}"]).state_dict()


def assert_near(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Products of factors in two orders may differ in the last bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((actual[name] - tensor).abs().max()) <= 1e-6 * float(tensor.abs().max()), name


@pytest.mark.parametrize("way", WAYS)
def test_as_peft_merges_it(way: str, tmp_path: Path) -> None:
    case, options = WAYS[way]
    _, plain = tiny.save(tiny.make(case), tmp_path / "base")
    model = train(tmp_path / "lora", tiny.load(case, tmp_path / "base"), **options)
    model.merge_and_unload().save_pretrained(tmp_path / "whole")
    adapted = tensors(tmp_path / "base", tmp_path / "lora")
    assert_near(adapted, load_file(tmp_path / "whole" / "model.safetensors"))
    changed = [name for name in plain if not torch.equal(plain[name], adapted[name])]
    assert len(changed) >= len(options.get("target_parameters", ["any"])) > 0


def in_one(apart: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Mixtral's tensors with all experts of a layer in one, gates before values."""
    pattern = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d)\.(w\d)\.weight")
    experts = [match for name in apart if (match := pattern.fullmatch(name))]
    fused = {name.replace("block_sparse_moe.", "mlp."): x for name, x in apart.items() if not pattern.fullmatch(name)}
    for layer in sorted({match[1] for match in experts}):
        of_layer = [match for match in experts if match[1] == layer]
        gate, down, up = (torch.stack([apart[m[0]] for m in of_layer if m[3] == map_]) for map_ in ("w1", "w2", "w3"))
        fused |= {f"{layer}.mlp.experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.mlp.experts.down_proj": down}
    return fused


def test_dora_of_one_expert_has_the_norms_of_its_own_rows(tmp_path: Path) -> None:
    """Also where the file has the experts, their gates and their values in one tensor."""
    _, apart = tiny.save(tiny.make(SPARSE["mixtral"]), tmp_path / "apart")
    shutil.copytree(tmp_path / "apart", tmp_path / "fused")
    save_file(in_one(apart), tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    outputs, inputs = apart[name].shape
    a, b, magnitude = torch.randn(2, inputs), torch.randn(outputs, 2), torch.rand(outputs) + 0.5
    parts = {"lora_A.weight": a, "lora_B.weight": b, "lora_magnitude_vector": magnitude}
    stem, config = f"base_model.model.{name.removesuffix('weight')}", {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    adapter = write_adapter(config, {stem + part: x for part, x in parts.items()}, tmp_path / "lora")
    changed = apart[name] + 3 * b @ a
    expected = {**apart, name: magnitude[:, None] * changed / changed.norm(dim=1, keepdim=True)}
    assert_near(tensors(tmp_path / "apart", adapter), expected)
    assert_near(tensors(tmp_path / "fused", adapter), in_one(expected))


GATES, OUT = "experts.gate_up_proj", "experts.down_proj"
SQUARE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gates and values, alone": ("qwen_moe", {}, [GATES]),
    "gates and values, beside outputs": ("qwen_moe", {}, [GATES, OUT]),
    "outputs, alone": ("olmoe", {"intermediate_size": 32}, [OUT]),
    "outputs, beside gates and values": ("olmoe", {"intermediate_size": 32}, [GATES, OUT]),
    "stored [in, out]": ("gpt_oss", {"intermediate_size": 16}, [GATES]),
    "stored [in, out], which is not said": ("llama4", {"intermediate_size": 32}, [OUT]),
    "none, and no gates": ("nemotron_h", {}, ["experts.up_proj", OUT]),
    "both, and no gates": ("nemotron_h", {"moe_intermediate_size": 32}, ["experts.up_proj", OUT]),
}
"""Experts of which some maps have as many outputs as inputs: a family, its sizes, and what the adapter changes."""
BY_VERSION = ("gates and values, alone", "stored [in, out], which is not said", "outputs, alone", "both, and no gates")
"""Those of which sizes do not tell in which order inputs and outputs are stored."""


@pytest.mark.parametrize("which", SQUARE)
def test_square_experts_are_in_the_layout_of_their_version(which: str, tmp_path: Path) -> None:
    """What a version wrote, what sizes or the other pair tell without it, and what neither tells."""
    family, sizes, targets = SQUARE[which]
    case = next(case for case in tiny.ALL if case.family == family and "expert" in str(case.config))
    case, base, lora = replace(case, config={**case.config, **sizes}), tmp_path / "base", tmp_path / "lora"
    tiny.save(tiny.make(case), base)
    counts = (case.config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next(filter(None, counts))
    config = {"target_modules": [], "target_parameters": targets, "use_rslora": True}
    train(lora, tiny.load(case, base), **config).merge_and_unload().save_pretrained(tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert_near(tensors(base, lora), expected)
    if which != "stored [in, out]":
        rearranged(lora, count, "swapped")
        assert_near(tensors(base, lora), expected)
    for version in ("0.19.0", None):
        edit(lora, peft_version=version)
        if which in BY_VERSION or (which == "stored [in, out]" and version):
            with pytest.raises(rm.RotationMergeError, match="which is square, cannot be told; merge it into its base"):
                tensors(base, lora)
        else:
            assert_near(tensors(base, lora), expected)


def test_experts_grouped_in_b_as_its_trainer_packed_them(tmp_path: Path) -> None:
    case, base, lora = SPARSE["qwen_moe"], tmp_path / "base", tmp_path / "lora"
    tiny.save(tiny.make(case), base)
    train(lora, tiny.load(case, base), target_modules=[], target_parameters=[GATES, OUT])
    expected = tensors(base, lora)
    edit(lora, lora_B_layout="rank_major")
    assert_near(tensors(base, lora), expected)
    rearranged(lora, case.config["num_experts"], "grouped")
    assert_near(tensors(base, lora), expected)
    edit(lora, lora_B_layout="by_rank")
    with pytest.raises(rm.RotationMergeError, match="'lora_B_layout' is 'by_rank', which is no known order"):
        tensors(base, lora)


def write_whole_weights(adapter: Path, model: Any, trained: tuple[str, ...], legacy: bool, prefix: str = "") -> None:
    """What trainers in LLaVA's manner write beside an adapter: random values of parameters, all others as they are."""
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight").endswith(trained):
            parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    named = {prefix + name: x.detach() for name, x in model.named_parameters() if "lora_" not in name}
    torch.save(named, adapter / "non_lora_state_dict.bin", _use_new_zipfile_serialization=not legacy)


@pytest.mark.parametrize("legacy", [True, False])
def test_whole_weights_beside_the_factors(legacy: bool, tmp_path: Path) -> None:
    """They are applied; carried with them; named where adapters are merged alone, and where the base lacks them."""
    base, lora, file = (
        make("llama", tmp_path / "base"),
        tmp_path / "lora",
        tmp_path / "lora" / "non_lora_state_dict.bin",
    )
    model = train(lora, transformers.AutoModelForCausalLM.from_pretrained(base), modules_to_save=["lm_head"])
    write_whole_weights(lora, model, ("norm", "v_proj", "q_proj.base_layer"), legacy, "module." if legacy else "")
    model.merge_and_unload().save_pretrained(tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert_near(tensors(base, lora), expected)
    carried = rm.transfer(lora, base, twin(base, tmp_path / "new"), heads="permutation", residual="none")
    assert sum("o_proj" in name for name in carried.tensors) == 0  # it is the base's
    carried.save_pretrained(tmp_path / "carried")
    inputs, new = torch.arange(12)[None], f"{tmp_path / 'new'}+{tmp_path / 'carried'}"
    logits = [rm.average([name]).to_module()(inputs).logits for name in (f"{base}+{lora}", new)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(rm.RotationMergeError, match=r"non_lora_state_dict\.bin beside it holds whole weights"):
        rm.merge_adapters([lora, lora])
    torch.save({"base_model.model.model.mm_projector.0.weight": torch.ones(3, 3)}, file)
    words = (
        r"non_lora_state_dict\.bin beside the adapter changes 'model\.mm_projector\.0\.weight', which the model does"
    )
    with pytest.raises(rm.RotationMergeError, match=words):
        tensors(base, lora)
    file.write_bytes(b"text")
    with pytest.raises(rm.RotationMergeError, match=r"non_lora_state_dict\.bin: cannot be read"):
        tensors(base, lora)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An anchor, a twin of it in other coordinates, and an adapter for the twin."""
    folder = tmp_path_factory.mktemp("models")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    return anchor, donor, adapter_for(donor, folder / "lora")


@pytest.mark.parametrize(("dtype", "of_anchor"), [(None, False), ("float32", True)])
def test_rounded_once(dtype: str | None, of_anchor: bool, tmp_path: Path) -> None:
    """W + s B A of weights in bfloat16 is not rounded to bfloat16 on the way; without 'dtype' the output is."""
    anchor = make("llama", tmp_path / "anchor", dtype="bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(anchor, dtype=torch.bfloat16)
    half.save_pretrained(anchor)
    adapter = adapter_for(anchor, tmp_path / "lora")
    still = {"ffn": "none", "attention": "none", "heads": "none", "scaling": False}
    pair = (anchor, Path(f"{anchor}+{adapter}"))[:: -1 if of_anchor else 1]
    recipe = {**recipe_for("linear", *pair, **still), "dtype": dtype}
    result, factors = merged(recipe, tmp_path / "out"), load_file(adapter / "adapter_model.safetensors")
    for name, stored in state(anchor).items():
        a, b = (factors.pop(f"base_model.model.{name.removesuffix('weight')}lora_{f}.weight", None) for f in "AB")
        if a is None or b is None:
            assert torch.equal(result[name], stored.to(result[name].dtype))
            continue
        expected = stored.double() + 7 / 3 * b.double() @ a.double() / 2
        assert result[name].dtype == (torch.float32 if dtype else torch.bfloat16)
        allowed = (1e-6 if dtype else 2**-7) * float(expected.abs().max())
        assert float((result[name].double() - expected).abs().max()) <= allowed, name
    assert not factors


ON_HEAD: dict[str, dict[str, Any]] = {
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "factors of the head": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA of the head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "factors of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}
"""Adapters with which the head of a tied base is another tensor than its embedding."""
ON_BOTH: dict[str, dict[str, Any]] = {
    "copies of the base's": {},
    "tied, saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied, factors": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
}
"""Adapters with which the two stay one."""


@pytest.mark.parametrize("which", [*ON_HEAD, *ON_BOTH])
def test_a_head_on_a_tied_base(which: str, tmp_path: Path) -> None:
    """What peft computes: an untied donor, which a merge on a tied base takes with 'untie'."""
    base, adapter, inputs = make("qwen2", tmp_path / "base"), tmp_path / "lora", torch.arange(12)[None]
    model = lora(adapter, base, **{**ON_HEAD, **ON_BOTH}[which])
    model.save_pretrained(adapter, save_embedding_layers=True)
    donor, expected = f"{base}+{adapter}", model.eval()(inputs).logits
    torch.testing.assert_close(load(donor)(inputs).logits, expected, atol=1e-4, rtol=1e-4)
    still = {"ffn": "none", "attention": "none", "heads": "none", "scaling": False}
    recipe = recipe_for("linear", base, donor, **still)
    for entry, weight in zip(recipe["models"], (0.0, 1.0), strict=True):
        entry["parameters"]["weight"] = weight
    if which in ON_HEAD:
        assert "set 'untie: true'" in error_of_merge(recipe, tmp_path / "refused")
        assert "set 'untie: true'" in run("check", write_recipe(recipe, tmp_path / "recipe.yml")).output
        recipe["parameters"]["untie"] = True
    merged(recipe, tmp_path / "out")
    torch.testing.assert_close(load(str(tmp_path / "out"))(inputs).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes", "options", "words"),
    [
        (
            "llama",
            {"mlp_bias": True},  # of the two maps into the stream one has a bias; the adapter has one for both
            {"target_modules": ["o_proj", "down_proj"], "lora_bias": True, "init_lora_weights": False},
            r"o_proj\.bias', which the model does not store",
        ),
    ],
)
def test_what_has_no_place_in_the_model_is_refused(
    family: str, sizes: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A bias that the model lacks."""
    base = make(family, tmp_path / "base", **sizes)
    adapter = adapter_for(base, tmp_path / "lora", **options)
    with pytest.raises(rm.RotationMergeError, match=words):
        tensors(base, adapter)


# --- where an adapter may stand --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_take_it_and_none_writes_beside(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    anchor, donor, adapter = models
    both, data, aligned = f"{donor}+{adapter}", tmp_path / "data.jsonl", tmp_path / "aligned"
    data.write_text("".join(json.dumps({"input_ids": [(i * j) % 40 for j in range(8)]}) + "\n" for i in range(1, 9)))
    before = files_of(anchor.parent)
    parsed("check", write_recipe(recipe_for("linear", anchor, Path(both)), tmp_path / "recipe.yml"))
    parsed("align", anchor, both, aligned)
    parsed("verify", both, aligned, "--tolerance", "1e-4")
    parsed("barrier", anchor, both, "--data", data, "--points", 3)
    parsed("measure", both, "--data", data, "--out", tmp_path / "statistics")
    alone, adapted = parsed("evaluate", donor, both, "--data", data)
    assert alone["loss"] != adapted["loss"]
    assert parsed("inspect", both, "--fingerprint") != parsed("inspect", donor, "--fingerprint")
    assert files_of(anchor.parent) == before


@pytest.mark.parametrize(
    ("base", "stated", "note"),
    [("copy", "{donor}", ""), ("donor", "someone/donor", ""), ("anchor", None, "does not say which base")],
)
def test_copies_of_its_base_are_its_base(
    base: str, stated: str | None, note: str, models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """By another path, by another name, and by its name alone where its weights are not here."""
    anchor, donor, adapter = models
    bases = {"anchor": anchor, "donor": donor, "copy": shutil.copytree(donor, tmp_path / "copy")}
    lora = shutil.copytree(adapter, tmp_path / "lora")
    edit(lora, base_model_name_or_path=stated and stated.format(donor=donor))
    recipe = recipe_for("linear", donor, Path(f"{bases[base]}+{lora}"))
    assert note in " ".join(output_of("check", write_recipe(recipe, tmp_path / "recipe.yml")).split())
