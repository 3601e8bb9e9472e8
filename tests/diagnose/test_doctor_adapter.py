"""`rotation-merge doctor BASE ADAPTER MERGED`: right merges by peft or by hand give no cause, wrong ones theirs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from cli_support import error_of, output_of, run
from hub_support import Hub
from huggingface_hub import snapshot_download
from peft import PeftModel
from plugin_support import lora, make, state, write_adapter, write_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

import rotation_merge as rm

State = dict[str, Tensor]
LAYER = "model.layers.0"
Q, K, O, UP, DOWN = (  # noqa: E741
    f"{LAYER}.{name}.weight"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
)
NORM, HEAD, EMBEDDING = f"{LAYER}.input_layernorm.weight", "lm_head.weight", "model.embed_tokens.weight"
LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}
FIRST = {case.family: case for case in reversed(tiny.ALL)}
SPARSE = next(case for case in tiny.ALL if case.family == "qwen_moe" and "expert" in str(case.config))


def causes(base: Path | str, adapter: Path | str, merged: Path) -> dict[str, dict[str, Any]]:
    """What is found, by name; JSON, words and exit code agree."""
    done = run("doctor", base, adapter, merged, "--json")
    assert done.exit_code in (0, 1), done.output
    answer = json.loads(done.stdout)
    listed = answer["causes"]
    assert done.exit_code == int(any(cause["likelihood"] >= 0.5 for cause in listed))
    assert bool(listed) or answer["right"] == answer["changes"] > 0
    return {cause["name"]: cause for cause in listed}


def changes_of(adapter: Path) -> State:
    """The change B A of each weight, without its scale."""
    factors = load_file(adapter / "adapter_model.safetensors")
    pairs = {name: name.replace("lora_A", "lora_B") for name in factors if "lora_A" in name}
    names = {a: a.removeprefix("base_model.model.").replace("lora_A.", "") for a in pairs}
    return {names[a]: factors[b] @ factors[a] for a, b in pairs.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, State]:
    """A base, an adapter of it with scale 1.5 and rank 4, and what each change of it is at scale 1."""
    folder = tmp_path_factory.mktemp("llama")
    base = make("llama", folder / "base")
    lora(folder / "lora", base, **LORA)
    return base, folder / "lora", changes_of(folder / "lora")


def merged_by_hand(tensors: State, changes: State, factor: float = 1.5) -> State:
    return {name: x + factor * changes[name] if name in changes else x for name, x in tensors.items()}


def without(tensors: State, *ends: str) -> State:
    return {name: x for name, x in tensors.items() if not name.endswith(ends)}


def lower_rank(adapter: Path) -> State:
    factors = load_file(adapter / "adapter_model.safetensors")
    a = {name: x[:2] if "lora_A" in name else x[:, :2] for name, x in factors.items()}
    return {
        name.removeprefix("base_model.model.").replace("lora_A.", ""): a[name.replace("lora_A", "lora_B")] @ x
        for name, x in a.items()
        if "lora_A" in name
    }


MISTAKES: dict[str, tuple[Callable[[State, State, Path], State], dict[str, str]]] = {
    "right": (lambda base, change, _: merged_by_hand(base, change), {}),
    "right, in bfloat16": (
        lambda base, change, _: {name: x.bfloat16() for name, x in merged_by_hand(base, change).items()},
        {},
    ),
    "right, computed in bfloat16, stored in float32": (
        lambda base, change, _: {
            name: (x.bfloat16() + (1.5 * change[name]).bfloat16() if name in change else x.bfloat16()).float()
            for name, x in base.items()
        },
        {},
    ),
    "right, in float16": (
        lambda base, change, _: {name: x.half() for name, x in merged_by_hand(base, change).items()},
        {},
    ),
    "scale forgotten": (
        lambda base, change, _: merged_by_hand(base, change, 1.0),
        {"scale": "8 of 8 changes of the adapter, each of which is in the model 0.6667 times (its scale alpha / r ="},
    ),
    "rsLoRA's scale": (
        lambda base, change, _: merged_by_hand(base, change, 3.0),
        {"scale": "2 times (its scale is alpha / r, and alpha / sqrt(r) (rsLoRA) was taken or it was merged twice)"},
    ),
    "not divided by the rank": (
        lambda base, change, _: merged_by_hand(base, change, 6.0),
        {"scale": "divided by r = 4"},
    ),
    "subtracted": (lambda base, change, _: merged_by_hand(base, change, -1.5), {"scale": "it was subtracted"}),
    "half": (lambda base, change, _: merged_by_hand(base, change, 0.75), {"scale": "is in the model 0.5 times: "}),
    **{
        f"a {part}th": (
            lambda base, change, _, part=part: merged_by_hand(base, change, 1.5 / part),
            {"scale": f"8 of 8 changes of the adapter, each of which is in the model {1 / part:.2g} times: "},
        )
        for part in (4, 20)
    },
    "missing": (
        lambda base, change, _: merged_by_hand(base, without(change, "0.self_attn.q_proj.weight")),
        {"unchanged": f"1 of 8 changes of the adapter, each of which is missing (the tensor is the base's): '{Q}'"},
    ),
    "not merged": (lambda base, _, __: base, {"unchanged": "8 of 8"}),
    "transposed": (
        lambda base, change, _: merged_by_hand(base, {n: x.mT if n in (Q, O) else x for n, x in change.items()}),
        {"transposed": f"2 of 8 changes of the adapter, each of which is transposed: '{Q}', '{O}'"},
    ),
    "lower rank": (
        lambda base, _, adapter: merged_by_hand(base, lower_rank(adapter)),
        {"lower rank": "8 of 8 changes of the adapter, each of which is cut to ranks 1 to 2 of 4"},
    ),
    "another adapter as well": (
        lambda base, change, _: merged_by_hand(
            merged_by_hand(base, change), {Q: torch.ones(32, 1) @ torch.rand(1, 32)}
        ),
        {"other change": "each of which is another in the model: the difference is of rank 1: "},
    ),
    "a norm": (
        lambda base, change, _: {**merged_by_hand(base, change), NORM: 1.1 * base[NORM]},
        {"other tensors": f"1 tensors changed, though the adapter does not name them: '{NORM}' (by 0.1 of its norm)"},
    ),
    "one entry": (
        lambda base, change, _: {**merged_by_hand(base, change), K: base[K] + 1e-3 * torch.eye(16, 32)[:1]},
        {"other tensors": K},
    ),
    "NaN": (
        lambda base, change, _: {**merged_by_hand(base, change), Q: torch.nan * base[Q], NORM: torch.inf * base[NORM]},
        {"NaN": f"2 tensors hold NaN or infinity: '{Q}', '{NORM}'"},
    ),
    "another base": (
        lambda base, change, _: {n: x + 0.1 * torch.randn_like(x) for n, x in merged_by_hand(base, change).items()},
        {"other base": "tensors differ by changes of full rank: it is not from this base"},
    ),
    "tensors lost and added": (
        lambda base, change, _: {**without(merged_by_hand(base, change), NORM, K), "extra.weight": torch.ones(2, 2)},
        {"missing tensors": f"2 tensors are missing: '{NORM}', '{K}'", "new tensors": "extra.weight"},
    ),
}
"""What the merged model's tensors are, of those of the base, the adapter's changes, and the adapter; the causes."""


@pytest.mark.parametrize("which", MISTAKES)
def test_mistakes(which: str, llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    torch.manual_seed(0)
    (base, adapter, change), (spoil, expected) = llama, MISTAKES[which]
    found = causes(base, adapter, write_state(spoil(state(base), change, adapter), base, tmp_path / "merged"))
    assert set(found) == set(expected), found
    for name, words in expected.items():
        assert words in found[name]["what"], found


def test_bfloat16_hides_no_mistake(tmp_path: Path) -> None:
    """Also of changes that are smaller than half of the rounding of the weights."""
    torch.manual_seed(0)
    wide = make("llama", tmp_path / "wide", hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    base = write_state({name: x.bfloat16() for name, x in state(wide).items()}, wide, tmp_path / "base")
    adapter = tmp_path / "lora"
    lora(adapter, wide, spread=0.012, **LORA)
    change, plain = changes_of(adapter), {name: x.float() for name, x in state(base).items()}
    assert 1.5 * change[Q].norm() < 0.5 * 2**-8 * plain[Q].norm()
    right = merged_by_hand(plain, change)
    other = {name: 3e-3 * torch.randn(len(x), 2) @ torch.randn(2, x.shape[1]) for name, x in change.items()}
    merges: dict[str, tuple[State, set[str]]] = {
        "right": (right, set()),
        "not merged": (plain, {"unchanged"}),
        "scale forgotten": (merged_by_hand(plain, change, 1.0), {"scale"}),
        "merged twice": (merged_by_hand(plain, change, 3.0), {"scale"}),
        "merged twice, rounded between": (
            merged_by_hand({n: x.bfloat16().float() for n, x in right.items()}, change),
            {"scale"},
        ),
        "transposed": (
            merged_by_hand(plain, {n: x.mT if n in (Q, O) else 0.0 * x for n, x in change.items()}),
            {"transposed", "unchanged"},
        ),
        "lower rank": (merged_by_hand(plain, lower_rank(adapter)), {"lower rank"}),
        "another as well": (merged_by_hand(right, other, 1.0), {"other change"}),
    }
    for name, (tensors, expected) in merges.items():
        merged = write_state({n: x.bfloat16() for n, x in tensors.items()}, base, tmp_path / name)
        found = causes(base, adapter, merged)
        assert set(found) == expected, name
        assert ("twice" in name) == ("it was merged twice" in str(found))
        assert ("forgotten" in name) == ("its scale alpha / r = 1.5 was forgotten" in str(found))


WAYS: dict[str, tuple[tiny.Case, dict[str, Any]]] = {
    "rsLoRA": (FIRST["llama"], {"target_modules": "all-linear", "use_rslora": True}),
    "DoRA": (FIRST["llama"], {"target_modules": "all-linear", "use_dora": True}),
    "ranks of their own": (FIRST["llama"], {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"down_proj": 3}}),
    "whole head": (FIRST["llama"], {"modules_to_save": ["lm_head"]}),
    "stored as (in, out)": (FIRST["gpt2"], {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts in one": (
        SPARSE,
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "recurrent and attention": (FIRST["falcon_h1"], {"target_modules": ["in_proj", "q_proj"]}),
    "convolution": (FIRST["vit"], {"target_modules": ["projection"]}),
}


@pytest.mark.parametrize("way", WAYS)
def test_as_peft_merges_it(way: str, tmp_path: Path) -> None:
    """Right as it is, and in bfloat16; what is left of the base is named."""
    case, options = WAYS[way]
    base, adapter = tmp_path / "base", tmp_path / "lora"
    tiny.save(tiny.make(case), base)
    lora(adapter, tiny.load(case, base), **options).merge_and_unload().save_pretrained(tmp_path / "merged")
    assert not causes(base, adapter, tmp_path / "merged")
    tensors = {name: x.bfloat16() for name, x in state(tmp_path / "merged").items()}
    assert not causes(base, adapter, write_state(tensors, base, tmp_path / "half"))
    expected = {"whole modules"} | {"unchanged"} if "modules_to_save" in options else {"unchanged"}
    assert set(causes(base, adapter, base)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FIRST.keys() - {"gemma4_vlm"}))  # whose maps peft does not take
def test_every_family(family: str, tmp_path: Path) -> None:
    """peft's merge of an adapter of all layers is right, also in bfloat16; of the base all changes are missing."""
    case, base = FIRST[family], tmp_path / "base"
    tiny.save(tiny.make(case), base)
    module = tiny.load(case, base)
    linear = {name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear | Conv1D)}
    names = {name.rpartition(".")[2] for name in linear if re.search(r"\.\d+\.", name)} - {"out_proj", "linear"}
    options = {
        "target_modules": sorted(name for name in names if not name.isdigit()),
        "fan_in_fan_out": family == "gpt2",
    }
    lora(tmp_path / "lora", module, **options).merge_and_unload().save_pretrained(tmp_path / "merged")
    assert not causes(base, tmp_path / "lora", tmp_path / "merged")
    halves = {name: x.bfloat16() if x.is_floating_point() else x for name, x in state(tmp_path / "merged").items()}
    assert not causes(base, tmp_path / "lora", write_state(halves, base, tmp_path / "half"))
    assert set(causes(base, tmp_path / "lora", base)) == {"unchanged"}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_as_peft_merges_it_in_bfloat16(stored: torch.dtype, llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    """Base, change and sum are each rounded to it; also where the changes are as small as that."""
    source, adapter, _ = llama
    base = write_state({name: x.to(stored) for name, x in state(source).items()}, source, tmp_path / "base")
    edited(base, dtype=str(stored).removeprefix("torch."))
    small = shutil.copytree(adapter, tmp_path / "small")
    factors = load_file(small / "adapter_model.safetensors")
    save_file({n: x / 1000 if "lora_B" in n else x for n, x in factors.items()}, small / "adapter_model.safetensors")
    for lora_folder in (adapter, small):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        whole = PeftModel.from_pretrained(model, lora_folder).merge_and_unload()
        whole.save_pretrained(tmp_path / "merged" / lora_folder.name)
        assert not causes(base, lora_folder, tmp_path / "merged" / lora_folder.name)


def test_a_class_that_no_file_describes(tmp_path: Path) -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=40)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "base")
    model = lora(tmp_path / "lora", tmp_path / "base", target_modules=["query_key_value"])
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert not causes(tmp_path / "base", tmp_path / "lora", tmp_path / "merged")
    assert set(causes(tmp_path / "base", tmp_path / "lora", tmp_path / "base")) == {"unchanged"}


def test_models_in_gguf(tmp_path: Path) -> None:
    """Numbers are compared; codes coarser than the change are refused in a line."""
    stored = Path(__file__).parents[1] / "model" / "gguf"
    file = stored / "llama.gguf"
    rm.average([file]).save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora", tmp_path / "base", target_modules=["q_proj"])
    assert set(causes(tmp_path / "base", tmp_path / "lora", file)) == {"unchanged"}
    change = changes_of(tmp_path / "lora")
    before = merged_by_hand(state(tmp_path / "base"), change, -8 / 2)
    assert not causes(write_state(before, tmp_path / "base", tmp_path / "before"), tmp_path / "lora", file)
    rm.average([f"{file}+{tmp_path / 'lora'}"]).save_pretrained(tmp_path / "merged")
    assert not causes(file, tmp_path / "lora", tmp_path / "merged")
    words = "its numbers are those of coarse codes"
    assert words in error_of("doctor", tmp_path / "base", tmp_path / "lora", stored / "llama-q8_0.gguf")


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, State, State]:
    """A mixture with experts apart in its file, an adapter of them all, the right merge, experts apart and in one."""
    folder = tmp_path_factory.mktemp("experts")
    case = replace(FIRST["mixtral"], config={**FIRST["mixtral"].config, "intermediate_size": 32, "hidden_size": 32})
    tiny.save(tiny.make(case), folder / "base")
    options = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 3}
    model = lora(folder / "lora", tiny.load(case, folder / "base"), **options)
    whole = model.merge_and_unload()
    whole.save_pretrained(folder / "merged")
    fused = {name: x.detach().clone() for name, x in whole.state_dict().items()}
    return folder / "base", folder / "lora", state(folder / "merged"), fused


def in_order(tensors: State, order: list[int], base: State) -> State:
    """The same with other experts' changes; -1: with none."""
    expert = re.compile(r"(.*experts\.)(\d+)(\..*)")
    moved = dict(tensors)
    for name in tensors:
        if (match := expert.fullmatch(name)) is not None:
            source = order[int(match[2])]
            other = f"{match[1]}{source}{match[3]}"
            moved[name] = base[name] + (tensors[other] - base[other] if source >= 0 else 0)
    return moved


def plain_in_one(plain: State, fused: State) -> State:
    """The base's tensors under the names of experts in one."""
    stored = dict(plain)
    for name in (name for name in fused if "experts" in name):
        stem, count = name.replace("mlp.", "block_sparse_moe.").rpartition(".")[0], len(fused[name])
        keys = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
        maps = [torch.stack([plain[f"{stem}.{i}.{key}.weight"] for i in range(count)]) for key in keys]
        stored[name] = torch.cat(maps, 1)
    return {
        name: stored[name] if name in stored else plain[name.replace("mlp.gate", "block_sparse_moe.gate")]
        for name in fused
    }


def test_experts_apart_and_in_one(experts: tuple[Path, Path, State, State], tmp_path: Path) -> None:
    base, adapter, apart, fused = experts
    assert apart.keys() != fused.keys()
    assert not causes(base, adapter, write_state(apart, base, tmp_path / "apart"))
    assert not causes(base, adapter, write_state(fused, base, tmp_path / "fused"))
    plain, count = state(base), 1 + max(int(n) for n in re.findall(r"experts\.(\d+)", " ".join(apart)))
    turned = write_state(in_order(apart, [1, 0, *range(2, count)], plain), base, tmp_path / "turned")
    found = causes(base, adapter, turned)
    assert set(found) == {"experts permuted"}
    assert (
        "experts.0.w1.weight' (that of 'model.layers.0.block_sparse_moe.experts.1.w1.weight')"
        in found["experts permuted"]["what"]
    )
    some = write_state(in_order(apart, [-1, *range(1, count)], plain), base, tmp_path / "some")
    assert set(causes(base, adapter, some)) == {"some experts"}
    whole = plain_in_one(plain, fused)
    swapped = {
        name: whole[name] + (x - whole[name]).roll(x.shape[1] // 2, 1) if name.endswith("gate_up_proj") else x
        for name, x in fused.items()
    }
    write_state(swapped, base, tmp_path / "swapped")
    assert set(causes(base, adapter, tmp_path / "swapped")) == {"other change"}
    stored = write_state(whole, base, tmp_path / "whole")
    assert set(causes(stored, adapter, tmp_path / "swapped")) == {"halves swapped"}
    assert not causes(stored, adapter, tmp_path / "apart")


# --- heads and embeddings --------------------------------------------------------------------------------------------

ON_TIED: dict[str, dict[str, Any]] = {
    "layers alone": {},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "embedding, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "factors of the head": {"target_modules": ["q_proj", "lm_head"]},
    "factors of both": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("way", ON_TIED)
def test_tied_heads(way: str, tmp_path: Path) -> None:
    """The change of one of the two reaches one, or both, as the adapter says; a tie that is lost is named."""
    base, adapter = make("qwen2", tmp_path / "base"), tmp_path / "lora"
    lora(adapter, base, **ON_TIED[way])
    right = rm.average([f"{base}+{adapter}"])
    right.save_pretrained(tmp_path / "right")
    assert not causes(base, adapter, tmp_path / "right")
    named = f"The head is tied to the embedding in {base}"
    assert named in output_of("doctor", base, adapter, tmp_path / "right")
    tensors, config = state(tmp_path / "right"), {"tie_word_embeddings": HEAD not in state(tmp_path / "right")}
    expected = [] if config["tie_word_embeddings"] else ["tied head"]
    tied = write_state(without(tensors, HEAD), base, tmp_path / "tied")
    assert list(causes(base, adapter, tied)) == expected
    changed = {**tensors, HEAD: tensors[EMBEDDING] + 1.0}
    untied = write_state(changed, base, tmp_path / "untied")
    edited(untied, tie_word_embeddings=False)
    assert ("tied head" in causes(base, adapter, untied)) == config["tie_word_embeddings"]
    lost = write_state(without(tensors, HEAD), base, tmp_path / "lost")
    edited(lost, tie_word_embeddings=False)
    assert HEAD in causes(base, adapter, lost)["missing tensors"]["what"]


def test_whole_modules(llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    base, adapter = llama[0], tmp_path / "lora"
    lora(adapter, base, modules_to_save=["lm_head"]).merge_and_unload().save_pretrained(tmp_path / "right")
    tensors = {**state(tmp_path / "right"), HEAD: state(base)[HEAD]}
    found = causes(base, adapter, write_state(tensors, base, tmp_path / "merged"))
    assert set(found) == {"whole modules"}
    assert HEAD in found["whole modules"]["what"]


# --- other forms of models and adapters ------------------------------------------------------------------------------


def edited(model: Path, **entries: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def in_fp8(tensors: State, like: Path, where: Path) -> Path:
    """A checkpoint with the matrices of layers in codes, a scale for each block of 16 x 16."""
    codes = dict(tensors)
    for name, x in tensors.items():
        if "_proj" in name:
            rows, columns = (-(-n // 16) for n in x.shape)
            scale = 0.01 * (1 + torch.rand(rows, columns))
            spread = scale.repeat_interleave(16, 0)[: len(x)].repeat_interleave(16, 1)[:, : x.shape[1]]
            codes |= {name: (x.float() / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    out = write_state(codes, like, where)
    edited(out, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    return out


def numbers(model: Path) -> tuple[State, State]:
    """The numbers of such a checkpoint, and its codes as numbers."""
    stored, plain, raw = state(model), State(), State()
    for name, x in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if not name.endswith("_scale_inv"):
            raw[name] = plain[name] = x.float()
        if scale is not None:
            spread = scale.repeat_interleave(16, 0)[: len(x)].repeat_interleave(16, 1)[:, : x.shape[1]]
            plain[name] = x.float() * spread
    return plain, raw


def test_a_base_in_fp8(llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    """The merge is compared with the numbers that codes stand for; it may be in codes again."""
    torch.manual_seed(0)
    (source, adapter, change), base = llama, tmp_path / "base"
    in_fp8({name: x.bfloat16() for name, x in state(source).items()}, source, base)
    plain, raw = numbers(base)
    right = merged_by_hand(plain, change)
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=[16, 16])
    options = {"quantization_config": config, "dtype": torch.bfloat16}
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, **options)
    whole = PeftModel.from_pretrained(whole, adapter).merge_and_unload()
    half = {name: x.contiguous() for name, x in whole.state_dict().items()}
    assert half[Q].dtype == torch.bfloat16
    assert not causes(base, adapter, write_state(half, source, tmp_path / "half"))
    assert not causes(base, adapter, in_fp8(right, source, tmp_path / "codes"))
    unscaled = {name: x.bfloat16() for name, x in merged_by_hand(raw, change).items()}
    found = causes(base, adapter, write_state(unscaled, source, tmp_path / "unscaled"))
    assert set(found) == {"FP8 scales"}
    assert run("doctor", base, adapter, tmp_path / "unscaled").output.splitlines()[-1].startswith("0 of 8 changes of")
    assert found["FP8 scales"]["what"].startswith("14 tensors hold FP8 codes without their scales")
    added = {**state(base), **{n: (raw[n] + 100 * x).to(torch.float8_e4m3fn) for n, x in change.items()}}
    large = shutil.copytree(adapter, tmp_path / "large")
    factors = load_file(large / "adapter_model.safetensors")
    save_file(
        {n: 100 / 1.5 * x if "lora_B" in n else x for n, x in factors.items()}, large / "adapter_model.safetensors"
    )
    on_codes = write_state(added, source, tmp_path / "added")
    edited(on_codes, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    found = causes(base, large, on_codes)
    assert set(found) == {"FP8 codes"}, str(found)
    assert set(causes(base, adapter, base)) == {"unchanged"}


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """A merge without them is otherwise right; that they are lost is possible, not likely, to spoil it."""
    case = FIRST["glm4_moe"]
    _, tensors = tiny.save(tiny.make(case), tmp_path / "plain")
    further = f"model.layers.{case.config['num_hidden_layers']}.eh_proj.weight"
    base = write_state({**state(tmp_path / "plain"), further: torch.ones(4, 4)}, tmp_path / "plain", tmp_path / "base")
    model = lora(tmp_path / "lora", tiny.load(case, tmp_path / "plain"), target_modules=["o_proj"])
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert causes(base, tmp_path / "lora", tmp_path / "merged")["lost tensors"]["word"] == "possible"
    assert tensors


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_single_files(form: str, llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    base, adapter, change = llama
    stored, tensors = load_file(adapter / "adapter_model.safetensors"), State()
    for name, x in stored.items():
        module, factor = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", name).groups()
        if form == "kohya":
            flat = f"lora_te_{module.replace('.', '_')}"
            tensors |= {
                f"{flat}.lora_{'down' if factor == 'A' else 'up'}.weight": x,
                f"{flat}.alpha": torch.tensor(6.0),
            }
        else:
            tensors[f"text_encoder.{module}.lora_{factor}.weight"] = x
    save_file(tensors, tmp_path / "lora.safetensors")
    merged = write_state(
        merged_by_hand(state(base), change, 1.5 if form == "kohya" else 1.0), base, tmp_path / "merged"
    )
    assert not causes(base, tmp_path / "lora.safetensors", merged)


def test_a_base_with_another_adapter_and_shards(llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    base, adapter, change = llama
    lora(tmp_path / "first", base, seed=5)
    first = rm.average([f"{base}+{tmp_path / 'first'}"])
    right = merged_by_hand(first.state_dict(), change)
    rm.average([(right, json.loads((base / "config.json").read_text()))]).save_pretrained(tmp_path / "merged", "20k")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    assert not causes(f"{base}+{tmp_path / 'first'}", adapter, tmp_path / "merged")
    answer = rm.doctor(base, [adapter, tmp_path / "merged"])
    assert answer.code == 1
    assert {cause["name"] for cause in answer.data["causes"]} == {"other change"}


def test_names_of_the_hub(home: Hub, llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    """An adapter that is in the cache, and a base that is fetched."""
    base, adapter, change = llama
    merged = write_state(merged_by_hand(state(base), change), base, tmp_path / "merged")
    home.publish("org/base", base)
    home.publish("org/lora", adapter)
    assert "org/base: no such file or directory" in error_of("doctor", "org/base", "org/lora", merged)
    snapshot_download("org/lora")
    assert not causes("org/base", "org/lora", merged)


def test_bad_input(llama: tuple[Path, Path, State], tmp_path: Path) -> None:
    """One line each."""
    base, adapter, _ = llama
    small = make("llama", tmp_path / "small", intermediate_size=32)
    lacks = write_adapter(
        {"peft_type": "LORA", "r": 1, "lora_alpha": 1},
        {f"base_model.model.x.lora_{f}.weight": torch.ones(1, 1) for f in "AB"},
        tmp_path / "lacks",
    )
    assert "changes 'x.weight', which the model does not store" in error_of("doctor", base, lacks, base)
    assert "the model has [32, 32]" in error_of("doctor", small, adapter, small)
    assert "is an adapter, not a model" in error_of("doctor", base, adapter, adapter)
    assert "'model.layers.0.mlp.down_proj.weight' is [32, 32], in" in error_of("doctor", base, adapter, small)
    for options in ((), (base, base), (base, "--mend")):
        assert "write 'doctor BASE ADAPTER MERGED'" in error_of("doctor", base, adapter, *options)
    assert "no such directory" in error_of("doctor", base, adapter, tmp_path / "nowhere")
    words = " ".join(output_of("doctor", base, adapter, f"{base}+{adapter}").split())
    assert "8 of 8 changes of" in words
    assert "units of rounding off" in words
