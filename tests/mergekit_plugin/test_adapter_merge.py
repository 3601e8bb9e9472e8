"""Adapters merged into one: what merging the full changes gives, in peft's and kohya's formats, or one line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import error_of, output_of, run
from hub_support import Hub
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
from plugin_support import lora, make, write_adapter
from residual_support import case
from safetensors.torch import load_file, save_file
from tiny_models import make as make_case
from tiny_models import save as save_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import rotation_merge as rm
from rotation_merge import RotationMergeError, merge_adapters
from rotation_merge.averaging.config import ADAPTER_METHODS, ADAPTER_PARAMETERS, CALIBRATED, CalibrationConfig
from rotation_merge.averaging.registry import TASK_VECTORS

MAPS = {"q_proj": (12, 10), "up_proj": (16, 10), "down_proj": (10, 16)}
BASE, WEIGHTS = "org/base", "adapter_model.safetensors"
KOHYA, DIFFUSERS = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight")
FORMS = (DIFFUSERS, ("lora_embedding_A", "lora_embedding_B"), KOHYA)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
Tensors = dict[str, Tensor]


def test_all_methods_on_task_vectors_merge_adapters() -> None:
    """Their names and parameters are written out, so that a misspelt one is told before mergekit is imported."""
    stock = [m for m in registry.registered_methods() if isinstance(m, GeneralizedTaskArithmeticMerge)]
    methods = {m.spec.name: m.spec for m in [*sorted(stock, key=lambda m: m.spec.name), *TASK_VECTORS.values()]}
    assert ("linear", *methods) == ADAPTER_METHODS
    for name, spec in methods.items():
        calibration = set(CalibrationConfig.options()) if name in CALIBRATED else set()
        parameters = {parameter.name for parameter in spec.parameters} | calibration
        assert {"weight", *ADAPTER_PARAMETERS[name]} == parameters


def write_peft(
    folder: Path,
    seed: int = 0,
    rank: int = 2,
    scale: float = 1.0,
    maps: tuple[str, ...] = tuple(MAPS),
    more: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> str:
    """An adapter's folder; `more`: tensors beside those of its maps, or in their place."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name in maps:
        (outputs, inputs), width = MAPS[name], settings.get("rank_pattern", {}).get(name, rank)
        for part, shape in (("A", (width, inputs)), ("B", (outputs, width))):
            key = f"base_model.model.layers.0.{name}.lora_{part}.weight"
            tensors[key] = scale * torch.randn(shape, generator=generator)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": BASE, **settings}
    return str(write_adapter(config, {**tensors, **(more or {})}, folder))


def pair(module: str, outputs: int, inputs: int, form: tuple[str, str] = DIFFUSERS, rank: int = 1) -> Tensors:
    """A change of ones."""
    return {f"{module}.{form[0]}": torch.ones(rank, inputs), f"{module}.{form[1]}": torch.ones(outputs, rank)}


def of(path: Path | str) -> Tensors:
    """The changes of an adapter by its modules, each as a matrix: scale B A."""
    folder, changes = Path(path).is_dir(), {}
    tensors = load_file(Path(path) / WEIGHTS if folder else path)
    config = json.loads((Path(path) / "adapter_config.json").read_text()) if folder else {}
    for key, (first, second) in ((key, form) for key in tensors for form in FORMS if key.endswith(f".{form[0]}")):
        module = key.removesuffix(f".{first}")
        a, b = tensors[key].double(), tensors[f"{module}.{second}"].double()
        alpha = float(tensors.get(f"{module}.alpha", torch.tensor(config.get("lora_alpha", len(a)))))
        patterns = config.get("alpha_pattern", {}).items()
        alpha = next((value for part, value in patterns if re.fullmatch(rf"(.*\.)?{part}", module)), alpha)
        scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        changes[module.removeprefix("base_model.model.")] = scale * b.flatten(1) @ a.flatten(1)
    assert changes
    return changes


def changes(merged: Any, place: Path) -> Tensors:
    """The changes of a merge of adapters, as it is written."""
    merged.save(str(place))
    return of(place)


def head(seed: int, rank: int) -> Tensors:
    """A change of a map onto a vocabulary of 24 tokens."""
    draw, name = torch.Generator().manual_seed(seed), "base_model.model.lm_head.lora_{}.weight"
    shapes = {"A": (rank, 10), "B": (24, rank)}
    return {name.format(part): torch.randn(shape, generator=draw) for part, shape in shapes.items()}


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Adapters of mixed ranks and scalings, two with a head; one leaves a map as it is."""
    patterns = {"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"up_proj": 5}}
    return [
        write_peft(tmp_path / "one", 0, more=head(0, 2)),
        write_peft(tmp_path / "two", 1, 3, use_rslora=True, more=head(1, 3), **patterns),
        write_peft(tmp_path / "three", 2, 2, maps=("q_proj", "down_proj")),
    ]


# --- what is merged --------------------------------------------------------------------------------------------------


def test_linear_loses_nothing(three: list[str], tmp_path: Path) -> None:
    parts, weights = [of(path) for path in three], (1, 2, 1)
    for module, merged in changes(merge_adapters(three, weights=weights), tmp_path / "out").items():
        terms = (w / 4 * part.get(module, torch.zeros(())) for w, part in zip(weights, parts, strict=True))
        torch.testing.assert_close(merged, sum(terms), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("wudi", {}), ("tsv", {}), ("tsv", {"lambda": 1.4}), ("iso", {})],
)
def test_it_is_the_merge_of_the_models(name: str, settings: dict[str, Any], three: list[str], tmp_path: Path) -> None:
    """As `rotation_merge.average` gives it, of models that the adapters were added to: heads by `wudi`."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6}
    sizes = {"vocab_size": 24, "hidden_size": 10, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    base = {n: torch.zeros_like(x).double() for n, x in LlamaForCausalLM(config).state_dict().items()}
    ends = {module: f"{module.rpartition('.')[2]}.weight" for module in of(three[0])}
    names = {module: next(n for n in base if n.endswith(end)) for module, end in ends.items()}
    models = [{**base, **{names[module]: change for module, change in of(path).items()}} for path in three]
    parameters = {f"{key}_" if key == "lambda" else key: value for key, value in settings.items()}
    averaged = rm.average([(state, config) for state in (base, *models)], name, **parameters)
    for module, merged in changes(merge_adapters(three, name, parameters=settings), tmp_path / "out").items():
        expected = averaged[names[module]]
        torch.testing.assert_close(merged, expected, atol=1e-5 * float(expected.norm()), rtol=1e-4)


def by_mergekit(name: str, settings: dict[str, Any], full: list[Tensor]) -> Tensor:
    """What a method of mergekit's makes of whole changes."""
    method, group = registry.get(name), TensorGroup.from_tensors([torch.zeros_like(full[0]), *full], base_index=0)
    defaults = {spec.name: spec.default for spec in method.spec.parameters if spec.name != "weight"}
    values, ids = {**defaults, **settings}, [entry.id for entry in group.non_base]
    each = {k: dict.fromkeys(ids, values[k]) for k in ("density", "gamma", "epsilon") if k in values}
    return method.merge_group(group, **{**values, **each, "weight": dict.fromkeys(ids, 1.0)})


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("ties", {"density": 0.5}), ("task_arithmetic", {"lambda": 0.7}), ("dare_ties", {"density": 0.6}), ("della", {})],
)
def test_mergekits_methods_as_for_full_models(
    name: str, settings: dict[str, Any], embedding: bool, tmp_path: Path
) -> None:
    """At a rank that holds any matrix of the size; of an embedding single entries are those of the whole change."""
    paths = [write_peft(tmp_path / str(seed), seed, rank=6, maps=("q_proj",)) for seed in range(2)]
    for path in (Path(path) / WEIGHTS for path in paths if embedding):
        stored = load_file(path).items()
        save_file({key.replace(".lora_", ".lora_embedding_").removesuffix(".weight"): x for key, x in stored}, path)
    (merged,) = changes(merge_adapters(paths, name, parameters=settings, seed=3), tmp_path / "out").values()
    full = [next(iter(of(path).values())) for path in paths]
    torch.manual_seed(3)
    torch.testing.assert_close(merged, by_mergekit(name, settings, full), **CLOSE)


def test_a_method_for_linear_maps_takes_the_mean_of_embeddings_long_ones_shortened(tmp_path: Path) -> None:
    names = {f"base_model.model.embed_tokens.lora_embedding_{x}": s for x, s in (("A", (6, 10)), ("B", (12, 6)))}
    parts = [{name: (1 + 3 * n) * torch.randn(shape) for name, shape in names.items()} for n in range(2)]
    paths = [write_peft(tmp_path / str(number), rank=6, maps=(), more=part) for number, part in enumerate(parts)]
    (merged,) = changes(merge_adapters(paths, "wudi"), tmp_path / "out").values()
    full = [next(iter(of(path).values())) for path in paths]
    torch.testing.assert_close(merged, (full[0] + full[1] / 2) / 2, **CLOSE)


@pytest.mark.parametrize("name", ["wudi", "tsv", "iso"])
def test_convolutions_get_the_mean_as_in_recipes(name: str, tmp_path: Path) -> None:
    """Of lengths that differ by less than a factor of two."""
    config = ViTConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8)
    config.patch_size, config.architectures = 4, ["ViTModel"]
    base = {key: torch.zeros_like(x).double() for key, x in ViTModel(config).state_dict().items()}
    module = "embeddings.patch_embeddings.projection"
    weight, paths, models = base[f"{module}.weight"], list[str](), [base]
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        a, b = torch.randn(2, *weight.shape[1:], generator=draw), torch.randn(8, 2, 1, 1, generator=draw)
        factors = {f"base_model.model.{module}.lora_{x}.weight": part for x, part in (("A", a), ("B", b))}
        paths.append(write_peft(tmp_path / str(seed), maps=(), more=factors))
        models.append({**base, f"{module}.weight": (2 * b.flatten(1) @ a.flatten(1)).reshape(weight.shape).double()})
    expected = rm.average([(state, config) for state in models], name)[f"{module}.weight"]
    (merged,) = changes(merge_adapters(paths, name), tmp_path / "out").values()
    torch.testing.assert_close(merged, expected.flatten(1), **CLOSE)
    torch.testing.assert_close(merged, sum(of(path)[module] for path in paths) / 2, **CLOSE)


def test_what_survives_is_told(tmp_path: Path) -> None:
    """Of changes that share no direction all in their sum, half in their mean, the longer at half the rank."""
    paths = []
    for index in range(2):
        change = {key: torch.zeros_like(x) for key, x in pair("base_model.model.m", 5, 6).items()}
        for key, value in zip(change, (1.0 + index, 1.0), strict=True):
            change[key].view(-1)[index] = value
        paths.append(write_peft(tmp_path / str(index), maps=(), more=change, r=1, lora_alpha=1))
    assert merge_adapters(paths, "task_arithmetic").shares() == pytest.approx([1, 1], abs=1e-6)
    assert merge_adapters(paths).shares() == pytest.approx([0.5, 0.5], abs=1e-6)
    cut = merge_adapters(paths, "task_arithmetic", rank=1)
    assert cut.shares() == pytest.approx([0, 1], abs=1e-6)
    assert cut.energy == pytest.approx(0.8, abs=1e-6)
    for energy, rank in ((0.8, 1), (0.81, 2)):
        assert merge_adapters(paths, "task_arithmetic", rank="auto", energy=energy).maps["m"].rank == rank


def test_peft_reads_it_and_its_own_merges_agree(tmp_path: Path) -> None:
    """Concatenation and a decomposition at full rank are the weighted sum, which is task_arithmetic."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base, inputs, outputs = make("llama", tmp_path / "base"), torch.arange(12)[None], []
    for seed, name in enumerate(("one", "two")):
        lora(tmp_path / name, base, seed, spread=0.1, r=2 + seed)
    merge_adapters([tmp_path / "one", tmp_path / "two"], "task_arithmetic", weights=[0.5, 2]).save(tmp_path / "out")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one", "one")
    for name in ("two", "out"):
        model.load_adapter(tmp_path / name, name)
    model.add_weighted_adapter(["one", "two"], [0.5, 2.0], "both", combination_type="cat")
    for name in ("out", "both"):
        model.set_adapter(name)
        with torch.no_grad():
            outputs.append(model(inputs).logits)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-4)


def renamed(folder: str, before: str, after: str, out: Path) -> str:
    """An adapter whose modules are called otherwise."""
    tensors = {key.replace(before, after): x for key, x in load_file(Path(folder) / WEIGHTS).items()}
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    return str(write_adapter(config, tensors, out))


@pytest.mark.parametrize("wrapper", ["model.", "backbone.", "language_model.model.", "_orig_mod.", "_orig_mod.model."])
@pytest.mark.parametrize("first", [True, False])
def test_one_module_by_two_names_is_merged_once(wrapper: str, first: bool, tmp_path: Path) -> None:
    """Under the name of the first adapter, but never that of torch.compile."""
    paths = [write_peft(tmp_path / str(seed), seed) for seed in range(2)]
    paths[not first] = renamed(paths[not first], "model.layers", f"model.{wrapper}layers", tmp_path / "renamed")
    parts = [of(path) for path in paths]
    result = merge_adapters(paths)
    assert [line.partition("; ")[0].split()[3] for line in result.notes] == [f"{len(MAPS)}"]
    merged = changes(result, tmp_path / "out")
    assert len(merged) == len(MAPS)
    for module, change in merged.items():
        assert "_orig_mod" not in module
        if "_orig_mod" not in wrapper:
            assert module.startswith("layers") is not first
        terms = [next(x for name, x in part.items() if name.endswith(module.partition("layers")[2])) for part in parts]
        torch.testing.assert_close(change, sum(terms) / 2, **CLOSE)


def test_the_base_names_a_module_where_it_is_there(tmp_path: Path) -> None:
    base = make("llama", tmp_path / "base")
    for seed, name in enumerate(("one", "two")):
        lora(tmp_path / name, base, seed)
    other = renamed(str(tmp_path / "one"), "model.model.layers", "model.backbone.layers", tmp_path / "renamed")
    merged = merge_adapters([other, tmp_path / "two"], "task_arithmetic")
    assert merged.adapter.tensors.keys() == load_file(tmp_path / "two" / WEIGHTS).keys()
    assert merged.shares() == pytest.approx([1, 1], abs=0.5)


def test_a_base_in_the_cache_of_the_hub_names_a_module(home: Hub, tmp_path: Path) -> None:
    """Nothing is asked of the hub."""
    from huggingface_hub import snapshot_download

    base = make("llama", tmp_path / "base")
    home.publish("org/cached", base)
    snapshot_download("org/cached")
    for seed, name in enumerate(("one", "two")):
        lora(tmp_path / name, base, seed, base_model_name_or_path="org/cached")
    other = renamed(str(tmp_path / "one"), "model.model.layers", "model.backbone.layers", tmp_path / "renamed")
    asked = len(home.asked)
    merged = merge_adapters([other, tmp_path / "two"], "task_arithmetic")
    assert merged.adapter.tensors.keys() == load_file(tmp_path / "two" / WEIGHTS).keys()
    assert (len(home.asked), [*merged.notes]) == (asked, [])


def test_modules_are_called_as_in_the_class_not_as_in_files(tmp_path: Path) -> None:
    """peft loads the former; LLaVA's files have `language_model.model` where its class has `model.language_model`."""
    save_model(make_case(case("llava", "llama")), tmp_path / "base")
    key = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {key.format("A"): torch.ones(2, 32), key.format("B"): torch.ones(32, 2)}
    settings = {"maps": (), "base_model_name_or_path": str(tmp_path / "base")}
    one = write_peft(tmp_path / "one", more=factors, **settings)
    two = renamed(one, "model.language_model.layers", "language_model.model.layers", tmp_path / "two")
    assert merge_adapters([two, one]).adapter.tensors.keys() == factors.keys()


def test_names_that_may_be_one_module_are_refused_and_parts_of_a_model_are_not(tmp_path: Path) -> None:
    paths = [write_peft(tmp_path / str(seed), seed) for seed in range(2)]
    unsure = renamed(paths[1], "model.layers", "model.wrapped.layers", tmp_path / "unsure")
    with pytest.raises(
        RotationMergeError, match=r"names 'wrapped\.layers.*', which may be 'layers.*'; name one module alike"
    ):
        merge_adapters([paths[0], unsure])
    tower = renamed(paths[1], "model.layers", "model.vision_tower.layers", tmp_path / "tower")
    assert len(merge_adapters([paths[0], tower]).maps) == 2 * len(MAPS)


# --- formats of single files -----------------------------------------------------------------------------------------

SHAPES = {"attn_to_q": ((8,), (6,), ()), "conv": ((4, 3, 3), (5,), (1, 1))}


def write_kohya(path: Path, seed: int, rank: int, alpha: float | None, form: tuple[str, str]) -> str:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (inputs, outputs, kernel) in SHAPES.items():
        for leaf, shape in zip(form, ((rank, *inputs), (*outputs, rank, *kernel)), strict=True):
            tensors[f"lora_unet_{name}.{leaf}"] = torch.randn(shape, generator=generator)
        tensors |= {} if alpha is None else {f"lora_unet_{name}.alpha": torch.tensor(alpha)}
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize(("form", "alpha"), [(KOHYA, 3.0), (KOHYA, None), (DIFFUSERS, None)])
def test_single_files_keep_their_names(form: tuple[str, str], alpha: float | None, tmp_path: Path) -> None:
    paths = [write_kohya(tmp_path / f"{seed}.safetensors", seed, 2 + seed, alpha, form) for seed in range(2)]
    out = tmp_path / "out.safetensors"
    assert run("lora", *paths, out).exit_code == 0
    stored, parts = load_file(out), [of(path) for path in paths]
    assert {key.removesuffix(".alpha") for key in stored} >= {f"lora_unet_conv.{leaf}" for leaf in form}
    assert stored[f"lora_unet_conv.{form[0]}"].shape == (5, 4, 3, 3)
    for module, merged in of(out).items():
        torch.testing.assert_close(merged, (parts[0][module] + parts[1][module]) / 2, **CLOSE)


def test_a_large_rank_is_its_alpha_in_bfloat16_too(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.safetensors" for rank in (128, 129)]
    for path, rank in zip(paths, (128, 129), strict=True):
        factors = {name: torch.randn_like(x).bfloat16() for name, x in pair("m", 260, 260, KOHYA, rank).items()}
        save_file({**factors, "m.alpha": torch.tensor(float(rank))}, path)
    merge_adapters(paths).save(str(tmp_path / "out.safetensors"))
    stored = load_file(tmp_path / "out.safetensors")
    assert float(stored["m.alpha"]) == len(stored["m.lora_down.weight"]) == 257


def test_a_file_of_diffusers_has_one_rank(tmp_path: Path) -> None:
    """Its loader takes the rank of the first map for every alpha, so that maps of other ranks would be scaled."""
    both, alone = (write_kohya(tmp_path / f"{n}.safetensors", n, 2 + n, None, DIFFUSERS) for n in range(2))
    save_file({key: x for key, x in load_file(alone).items() if "conv" in key}, alone)
    merged, parts = merge_adapters([both, alone], "task_arithmetic"), [of(path) for path in (both, alone)]
    assert [merged.maps[f"lora_unet_{name}"].rank for name in SHAPES] == [2, 5]
    written = changes(merged, tmp_path / "out.safetensors")
    assert {len(x) for key, x in load_file(tmp_path / "out.safetensors").items() if "lora_A" in key} == {5}
    for module, change in written.items():
        torch.testing.assert_close(change, sum(part[module] for part in parts if module in part), **CLOSE)


def test_scales_in_the_header_of_a_file_of_diffusers_count(tmp_path: Path) -> None:
    config = {"r": 2, "lora_alpha": 8, "alpha_pattern": {"attn.to_k": 3}, "use_rslora": False}
    header = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    modules = {"transformer.0.attn.to_q": 4.0, "transformer.0.attn.to_k": 1.5, "text_encoder.0.q_proj": 1.0}
    tensors = {name: x for module in modules for name, x in pair(module, 5, 6, rank=2).items()}
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        save_file(tensors, path, {"format": "pt", "lora_adapter_metadata": header})
    merged = changes(merge_adapters(paths, "task_arithmetic"), tmp_path / "out.safetensors")
    for module, scale in modules.items():
        torch.testing.assert_close(merged[module], 2 * scale * of(paths[0])[module], **CLOSE)


def test_the_base_weight_that_peft_stores_beside_factors_of_an_embedding(tmp_path: Path) -> None:
    """It is no change: equal ones are written again, others belong to other bases."""
    module, weight, paths = "base_model.model.embed_tokens", torch.randn(12, 10), []
    names = {f"{module}.lora_embedding_A": (2, 12), f"{module}.lora_embedding_B": (10, 2)}
    for seed, values in enumerate((weight, weight, None, weight + 1)):
        more = {name: torch.randn(shape) for name, shape in names.items()}
        more |= {} if values is None else {f"{module}.base_layer.weight": values}
        paths.append(write_peft(tmp_path / str(seed), seed, more=more))
    merge_adapters(paths[:3]).save(str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(written[f"{module}.base_layer.weight"], weight)
    assert written.keys() >= names.keys()
    with pytest.raises(RotationMergeError, match="holds another"):
        merge_adapters(paths)


# --- the call and the command ----------------------------------------------------------------------------------------


def test_the_command(three: list[str], tmp_path: Path) -> None:
    output = output_of(
        "lora", *three, tmp_path / "out", "--method", "ties", "-p", "density=0.4", "--rank", "3", "--json"
    )
    facts = json.loads(output)
    assert list(facts["shares"]) == three
    assert all(fact["rank"] == 3 and 0 < fact["energy"] < 1 for fact in facts["maps"].values())
    assert "already exists" in error_of("lora", *three, tmp_path / "out")
    output_of("lora", *three, tmp_path / "out", "--force", "--rank", "auto", "--weights", "1,1,2")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["lora_alpha"]) == (BASE, config["r"])


def test_one_folder_by_two_names_is_one_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    names = (f"{tmp_path}/base", f"{tmp_path}/base/", "./base", None)
    paths = [write_peft(tmp_path / str(i), i, base_model_name_or_path=name) for i, name in enumerate(names)]
    assert len(merge_adapters(paths[:3]).maps) == len(MAPS)
    with pytest.raises(RotationMergeError, match="is an adapter of an unnamed base"):
        merge_adapters(paths)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weights": 1}, "'weights' are 1"),
        ({"method": None}, "not merged by 'None'"),
        ({"rank": 2, "energy": 0.5}, "'energy' has no effect"),
        ({"method": "dare_ties", "parameters": {"density": -1}}, "'density' is -1.* from 0 to 1"),
        ({"method": "ties", "parameters": {"lambda": float("inf")}}, "finite"),
        ({"method": "task_arithmetic", "parameters": {"lambda": 1e300}}, "exceeds the range of float32"),
        ({"adapters": Path("folder")}, "one PosixPath stands where adapters belong"),
        ({"adapters": ["folder", None]}, "of type NoneType"),
    ],
)
def test_values_that_mean_nothing_are_one_line(arguments: dict[str, Any], words: str, three: list[str]) -> None:
    with pytest.raises(RotationMergeError, match=words) as error:
        merge_adapters(**{"adapters": three, **arguments})
    assert "\n" not in str(error.value)


MODULE = "base_model.model.layers.0"
MAGNITUDE = {f"{MODULE}.up_proj.lora_magnitude_vector.weight": torch.ones(16)}
CONV = {"m.lora_down.weight": torch.ones(2, 4, 3, 3), "m.lora_up.weight": torch.ones(5, 2, 1, 1)}
FOLDERS: dict[str, dict[str, Any]] = {
    "foreign": {"base_model_name_or_path": "org/other"},
    "dora": {"use_dora": True, "more": MAGNITUDE},
    "no_magnitudes": {"use_dora": True},
    "nan": {"scale": float("nan")},
    "infinite": {"lora_alpha": float("inf")},
    "wide": {"maps": (), "more": pair(f"{MODULE}.up_proj", 8, 10)},
    "shape": {"maps": (), "more": pair(f"{MODULE}.q_proj", 4, 4)},
    "short": {"maps": ("q_proj",)},
}
FILES: dict[str, Tensors] = {
    "loha": {"m.hada_w1_a": torch.ones(2, 2)},
    "kernel": {**CONV, "m.lora_up.weight": torch.ones(5, 2, 3, 3)},
    "vector": {**CONV, "m.alpha": torch.ones(2)},
    "alpha": {**CONV, "m.alpha": torch.tensor(float("nan"))},
    "empty": {"m.lora_down.weight": torch.ones(0, 4, 3, 3), "m.lora_up.weight": torch.ones(5, 0, 1, 1)},
    "header": pair("m", 2, 2),
    "pair": pair("m", 5, 4, KOHYA),
    "half": {**pair("m", 5, 4, KOHYA), "n.lora_up.weight": torch.ones(5, 2)},
}
BAD: list[tuple[str, str]] = [
    ("one", "two adapters"),
    ("one foreign", "is an adapter of org/other"),
    ("one dora", "DoRA"),
    ("one no_magnitudes", "DoRA"),
    ("one nan", "NaN"),
    ("one infinite", "lora_alpha of 'layers.0"),
    ("one shape", "of shape"),
    ("short one wide", "'layers.0.up_proj' of shape [8, 10]"),
    ("one nothing", "no LoRA adapter"),
    ("one kohya.safetensors", "format of kohya"),
    ("one loha.safetensors", "hada_w1_a"),
    ("one kernel.safetensors", "factors of 'm' are [2, 4, 3, 3] and [5, 2, 3, 3]"),
    ("one vector.safetensors", "gives no number for 'm'"),
    ("one empty.safetensors", "factors of 'm' are [0, 4, 3, 3]"),
    ("one alpha.safetensors", "'m.alpha' holds NaN"),
    ("one header.safetensors", "'lora_adapter_metadata' in its header"),
    ("pair.safetensors half.safetensors", "'n' has one factor"),
    ("one two three --rank 99", "'rank' is 99"),
    ("one two three --rank -1", "'--rank' is -1"),
    ("one two three --rank all", "'--rank' is 'all'"),
    ("one two three --method tis", "'ties'"),
    ("one two three -p density=1", "no parameter 'density'"),
    ("one two three --method wudi -p ridge=much", "must be a number"),
    ("one two three --method wudi -p others=three", "others"),
    ("one two three -p density", "NAME=VALUE"),
    ("one two three --weights 1,2", "2 weights for 3"),
    ("one two three --weights 1,0,1", "positive"),
    ("one two three --weights a", "--weights is 'a'"),
    ("one two three --energy 2", "energy"),
    ("one two three --energy 0.5", "'energy' has no effect"),
    ("one two three out.safetensors", "a folder"),
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of all kinds that cannot be merged, and three that can."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        write_peft(folder / name, seed)
    for name, settings in FOLDERS.items():
        write_peft(folder / name, 5, **settings)
    for name, tensors in FILES.items():
        save_file(tensors, folder / f"{name}.safetensors", {"lora_adapter_metadata": "["} if name == "header" else None)
    write_kohya(folder / "kohya.safetensors", 0, 2, None, KOHYA)
    return folder


@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_input_gets_one_line(line: str, words: str, shelf: Path) -> None:
    names, _, options = line.partition(" -")
    adapters = [shelf / name for name in names.split() if name != "out.safetensors"]
    out = shelf / ("out.safetensors" if "out.safetensors" in names else "out")
    assert words in error_of("lora", *adapters, out, *(f"-{options}".split() if options else []))
    assert not out.exists()
    if names == "one foreign":
        assert run("lora", *adapters, shelf / "forced", "--force").exit_code == 0
