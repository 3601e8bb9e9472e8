"""Adapters merged into one: what merging the full changes gives, in peft's and kohya's formats, or one line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup
from plugin_support import make, one_error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rotation_merge as rm
from rotation_merge import RotationMergeError, merge_adapters

MAPS = {"q_proj": (12, 10), "up_proj": (16, 10), "down_proj": (10, 16)}
BASE = "org/base"


def write_peft(
    folder: Path, seed: int, rank: int = 2, scale: float = 1.0, maps: tuple[str, ...] = tuple(MAPS), **settings: Any
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    ranks = settings.get("rank_pattern", {})
    tensors = {}
    for name in maps:
        outputs, inputs = MAPS[name]
        own = ranks.get(name, rank)
        for part, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            key = f"base_model.model.layers.0.{name}.lora_{part}.weight"
            tensors[key] = scale * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": BASE, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def of(path: Path | str) -> dict[str, Tensor]:
    """The changes of an adapter by its modules, each as a matrix: scale B A."""
    folder = Path(path).is_dir()
    tensors = load_file(Path(path) / "adapter_model.safetensors" if folder else path)
    config = json.loads((Path(path) / "adapter_config.json").read_text()) if folder else {}
    found = {}
    for key in tensors:
        form = next((pair for pair in FORMS if f".{pair[0]}" in key), None)
        if form is None:
            continue
        module = key.partition(f".{form[0]}")[0]
        a, b = tensors[key].double(), tensors[key.replace(form[0], form[1])].double()
        rank = len(a)
        alpha = tensors.get(f"{module}.alpha", torch.tensor(config.get("lora_alpha", rank)))
        alpha = next(
            (v for p, v in config.get("alpha_pattern", {}).items() if re.fullmatch(rf"(.*\.)?{p}", module)),
            float(alpha),
        )
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        found[module.removeprefix("base_model.model.")] = scale * b.flatten(1) @ a.flatten(1)
    assert found
    return found


FORMS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"), ("lora_down", "lora_up"))


def changes(merged: Any, folder: Path) -> dict[str, Tensor]:
    """The changes of a merge of adapters, as it is written."""
    merged.save(str(folder))
    return of(folder)


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Adapters of mixed ranks and scalings, one of which leaves a map as it is."""
    patterns = {"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"up_proj": 5}}
    return [
        str(write_peft(tmp_path / "one", 0)),
        str(write_peft(tmp_path / "two", 1, 3, use_rslora=True, **patterns)),
        str(write_peft(tmp_path / "three", 2, 2, maps=("q_proj", "down_proj"))),
    ]


def test_linear_loses_nothing(three: list[str], tmp_path: Path) -> None:
    """With the ranks together: base + OUT is base + the weighted mean of the changes."""
    merge_adapters(three, weights=[1, 2, 1]).save(str(tmp_path / "out"))
    parts, merged = [of(path) for path in three], of(tmp_path / "out")
    for module in merged:
        mean = sum(
            weight / 4 * part.get(module, torch.zeros(())) for weight, part in zip((1, 2, 1), parts, strict=True)
        )
        torch.testing.assert_close(merged[module], mean, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("wudi", {}),
        ("wudi", {"sides": "both"}),
        ("tsv", {}),
        ("tsv", {"lambda": 1.4}),
        ("iso", {}),
    ],
)
def test_it_is_the_merge_of_the_models(name: str, settings: dict[str, Any], three: list[str], tmp_path: Path) -> None:
    """As `rotation_merge.average` gives it, of models that the adapters were added to."""
    sizes = {
        "hidden_size": 10,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    config = LlamaConfig(vocab_size=8, num_hidden_layers=1, architectures=["LlamaForCausalLM"], **sizes)
    base = {n: torch.zeros_like(x).double() for n, x in LlamaForCausalLM(config).state_dict().items()}
    names = {
        module: next(n for n in base if n.endswith(f"{module.rpartition('.')[2]}.weight")) for module in of(three[0])
    }
    models = [{**base, **{names[module]: change for module, change in of(path).items()}} for path in three]
    parameters = {f"{key}_" if key == "lambda" else key: value for key, value in settings.items()}
    wanted = rm.average([(state, config) for state in (base, *models)], name, **parameters)
    for module, found in changes(merge_adapters(three, name, parameters=settings), tmp_path / "out").items():
        expected = wanted[names[module]]
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.norm()), rtol=1e-4)


def test_iso_gives_one_value_to_all_directions_that_the_adapters_span(three: list[str], tmp_path: Path) -> None:
    for merged in changes(merge_adapters(three, "iso"), tmp_path / "out").values():
        values = torch.linalg.svdvals(merged)
        values = values[values > 1e-5]
        torch.testing.assert_close(values, values.mean().expand_as(values), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("ties", {"density": 0.5}), ("task_arithmetic", {"lambda": 0.7}), ("dare_ties", {"density": 0.6}), ("della", {})],
)
def test_mergekits_methods_as_for_full_models(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """At a rank that holds any matrix of the size."""
    paths = [str(write_peft(tmp_path / str(seed), seed, rank=6)) for seed in range(2)]
    found = changes(merge_adapters(paths, name, parameters=settings, seed=3), tmp_path / "out")
    parts, method = [of(path) for path in paths], registry.get(name)
    defaults = {spec.name: spec.default for spec in method.spec.parameters if spec.name != "weight"}
    values = {**defaults, **settings}
    torch.manual_seed(3)
    for module in sorted(found):
        group = TensorGroup.from_tensors(
            [torch.zeros_like(parts[0][module]), *(p[module] for p in parts)], base_index=0
        )
        ids = [entry.id for entry in group.non_base]
        each = {k: dict.fromkeys(ids, values[k]) for k in ("density", "gamma", "epsilon") if k in values}
        expected = method.merge_group(group, **{**values, **each, "weight": dict.fromkeys(ids, 1.0)})
        torch.testing.assert_close(found[module], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "settings"), [("ties", {"density": 0.5}), ("task_arithmetic", {}), ("wudi", {})])
def test_changes_of_embeddings(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Single entries are those of the whole change; a method for linear maps takes the mean, long ones shortened."""
    for seed, folder in enumerate(("one", "two")):
        write_peft(tmp_path / folder, seed, rank=6, scale=1 + 3 * seed, maps=("q_proj",))
        file = tmp_path / folder / "adapter_model.safetensors"
        as_embedding = {
            k.replace(".lora_", ".lora_embedding_").removesuffix(".weight"): v for k, v in load_file(file).items()
        }
        save_file(as_embedding, file)
    paths = [str(tmp_path / folder) for folder in ("one", "two")]
    (merged,) = changes(merge_adapters(paths, name, parameters=settings), tmp_path / "out").values()
    full = [next(iter(of(path).values())) for path in paths]
    if name == "wudi":
        expected = (full[0] + full[1] / 2) / 2
    else:
        method = registry.get(name)
        defaults = {spec.name: spec.default for spec in method.spec.parameters if spec.name != "weight"}
        values = {**defaults, **settings}
        group = TensorGroup.from_tensors([torch.zeros_like(full[0]), *full], base_index=0)
        ids = [entry.id for entry in group.non_base]
        each = {k: dict.fromkeys(ids, values[k]) for k in ("density",)}
        expected = method.merge_group(group, **{**values, **each, "weight": dict.fromkeys(ids, 1.0)})
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


def test_what_survives_is_told(tmp_path: Path) -> None:
    """Of changes that share no direction all in their sum, half in their mean, the longer at half the rank."""
    for index, name in enumerate(("one", "two")):
        a, b = torch.zeros(1, 6), torch.zeros(5, 1)
        a[0, index], b[index, 0] = 1.0 + index, 1.0
        (tmp_path / name).mkdir()
        save_file(
            {"base_model.model.m.lora_A.weight": a, "base_model.model.m.lora_B.weight": b},
            tmp_path / name / "adapter_model.safetensors",
        )
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": BASE}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    paths = [str(tmp_path / name) for name in ("one", "two")]
    assert merge_adapters(paths, "task_arithmetic").shares() == pytest.approx([1, 1], abs=1e-6)
    assert merge_adapters(paths).shares() == pytest.approx([0.5, 0.5], abs=1e-6)
    cut = merge_adapters(paths, "task_arithmetic", rank=1)
    assert cut.shares() == pytest.approx([0, 1], abs=1e-6)
    assert cut.energy == pytest.approx(0.8, abs=1e-6)
    assert merge_adapters(paths, "task_arithmetic", rank="auto", energy=0.8).maps["m"].rank == 1
    assert merge_adapters(paths, "task_arithmetic", rank="auto", energy=0.81).maps["m"].rank == 2


def test_peft_reads_it_and_its_own_merges_agree(tmp_path: Path) -> None:
    """Concatenation and a decomposition at full rank are the weighted sum, which is task_arithmetic."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = make("llama", tmp_path / "base")
    inputs = torch.arange(12)[None]
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2 + seed, target_modules=["q_proj", "down_proj"]))
        for key, value in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.1)
        model.save_pretrained(tmp_path / name)
    merged = merge_adapters([str(tmp_path / "one"), str(tmp_path / "two")], "task_arithmetic", weights=[0.5, 2])
    merged.save(str(tmp_path / "out"))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one", "one")
    model.load_adapter(tmp_path / "two", "two")
    model.load_adapter(tmp_path / "out", "out")
    model.add_weighted_adapter(["one", "two"], [0.5, 2.0], "both", combination_type="cat")
    outputs = []
    for name in ("out", "both"):
        model.set_adapter(name)
        with torch.no_grad():
            outputs.append(model(inputs).logits)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-4)


def write_kohya(path: Path, seed: int, rank: int, alpha: float | None, form: Mapping[str, str]) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"lora_unet_attn_to_q.{form['a']}": torch.randn(rank, 8, generator=generator),
        f"lora_unet_attn_to_q.{form['b']}": torch.randn(6, rank, generator=generator),
        f"lora_unet_conv.{form['a']}": torch.randn(rank, 4, 3, 3, generator=generator),
        f"lora_unet_conv.{form['b']}": torch.randn(5, rank, 1, 1, generator=generator),
    }
    if alpha is not None:
        tensors |= {f"lora_unet_{name}.alpha": torch.tensor(alpha) for name in ("attn_to_q", "conv")}
    save_file(tensors, path)
    return path


KOHYA = {"a": "lora_down.weight", "b": "lora_up.weight"}
DIFFUSERS = {"a": "lora_A.weight", "b": "lora_B.weight"}


@pytest.mark.parametrize(("form", "alpha"), [(KOHYA, 3.0), (KOHYA, None), (DIFFUSERS, None)])
def test_single_files_keep_their_names(form: dict[str, str], alpha: float | None, tmp_path: Path) -> None:
    paths = [str(write_kohya(tmp_path / f"{seed}.safetensors", seed, 2 + seed, alpha, form)) for seed in range(2)]
    out = tmp_path / "out.safetensors"
    done = run("lora", *paths, out)
    assert done.exit_code == 0, done.output
    stored = load_file(out)
    assert {key.removesuffix(".alpha") for key in stored} >= {f"lora_unet_conv.{leaf}" for leaf in form.values()}
    assert stored[f"lora_unet_conv.{form['a']}"].shape == (5, 4, 3, 3)
    parts, merged = [of(path) for path in paths], of(out)
    for module in merged:
        torch.testing.assert_close(merged[module], (parts[0][module] + parts[1][module]) / 2, atol=1e-5, rtol=1e-5)


def test_a_large_rank_is_its_alpha_in_bfloat16_too(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{rank}.safetensors") for rank in (128, 129)]
    for path, rank in zip(paths, (128, 129), strict=True):
        a, b = (torch.randn(shape).bfloat16() for shape in ((rank, 260), (260, rank)))
        save_file({"m.lora_down.weight": a, "m.lora_up.weight": b, "m.alpha": torch.tensor(float(rank))}, path)
    merge_adapters(paths).save(str(tmp_path / "out.safetensors"))
    stored = load_file(tmp_path / "out.safetensors")
    assert float(stored["m.alpha"]) == len(stored["m.lora_down.weight"]) == 257


def test_a_file_of_diffusers_has_one_rank(tmp_path: Path) -> None:
    """Its loader takes the rank of the first map for every alpha, so that maps of other ranks would be scaled."""
    both = write_kohya(tmp_path / "both.safetensors", 0, 2, None, DIFFUSERS)
    alone = load_file(write_kohya(tmp_path / "alone.safetensors", 1, 3, None, DIFFUSERS))
    save_file({key: x for key, x in alone.items() if "conv" in key}, tmp_path / "alone.safetensors")
    paths = [str(both), str(tmp_path / "alone.safetensors")]
    merged = merge_adapters(paths, "task_arithmetic")
    assert [merged.maps[f"lora_unet_{name}"].rank for name in ("attn_to_q", "conv")] == [2, 5]
    found, parts = changes(merged, tmp_path / "out.safetensors"), [of(path) for path in paths]
    assert {len(x) for key, x in load_file(tmp_path / "out.safetensors").items() if "lora_A" in key} == {5}
    for module, change in found.items():
        torch.testing.assert_close(change, sum(part[module] for part in parts if module in part), atol=1e-5, rtol=1e-5)


def test_scales_in_the_header_of_a_file_of_diffusers_count(tmp_path: Path) -> None:
    config = {"r": 2, "lora_alpha": 8, "alpha_pattern": {"attn.to_k": 3}, "use_rslora": False}
    modules = {"transformer.0.attn.to_q": 4.0, "transformer.0.attn.to_k": 1.5, "text_encoder.0.q_proj": 1.0}
    paths = [str(tmp_path / f"{seed}.safetensors") for seed in range(2)]
    for seed, path in enumerate(paths):
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for module in modules:
            tensors[f"{module}.lora_A.weight"] = torch.randn(2, 6, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(5, 2, generator=generator)
        stored = json.dumps({f"transformer.{key}": value for key, value in config.items()})
        save_file(tensors, path, {"format": "pt", "lora_adapter_metadata": stored})
    found = changes(merge_adapters(paths, "task_arithmetic"), tmp_path / "out.safetensors")
    parts = [of(path) for path in paths]
    for module, scale in modules.items():
        torch.testing.assert_close(found[module], scale * sum(p[module] for p in parts), atol=1e-5, rtol=1e-5)


def test_the_base_weight_that_peft_stores_beside_factors_of_an_embedding(tmp_path: Path) -> None:
    """It is no change: equal ones are written again, others belong to other bases."""
    module = "base_model.model.embed_tokens"
    weight, factors = torch.randn(12, 10), {"A": (2, 12), "B": (10, 2)}
    for seed, values in enumerate((weight, weight, None, weight + 1)):
        file = write_peft(tmp_path / str(seed), seed) / "adapter_model.safetensors"
        stored = {f"{module}.lora_embedding_{part}": torch.randn(shape) for part, shape in factors.items()}
        stored |= {} if values is None else {f"{module}.base_layer.weight": values}
        save_file({**load_file(file), **stored}, file)
    paths = [str(tmp_path / str(seed)) for seed in range(4)]
    merge_adapters(paths[:3]).save(str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert torch.equal(written[f"{module}.base_layer.weight"], weight)
    assert all(f"{module}.lora_embedding_{part}" in written for part in factors)
    with pytest.raises(RotationMergeError, match="holds another"):
        merge_adapters(paths)


def test_the_command(three: list[str], tmp_path: Path) -> None:
    done = run("lora", *three, tmp_path / "out", "--method", "ties", "-p", "density=0.4", "--rank", "3", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert list(told["shares"]) == three
    assert {found["rank"] for found in told["maps"].values()} == {3}
    assert all(0 < found["energy"] < 1 for found in told["maps"].values())
    again = run("lora", *three, tmp_path / "out")
    assert "is already there" in one_error(again.output) or "--force" in one_error(again.output)
    done = run("lora", *three, tmp_path / "out", "--force", "--rank", "auto", "--weights", "1,1,2")
    assert done.exit_code == 0, done.output
    assert "How much of each adapter the merge keeps" in done.output
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE
    assert config["lora_alpha"] == config["r"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weights": ["much", 1, 1]}, "'weights' are .*one number for each adapter"),
        ({"weights": 1}, "'weights' are 1"),
        ({"method": None}, "not merged by 'None'"),
        ({"energy": 0.5}, "'energy' has no effect"),
        ({"rank": 2, "energy": 0.5}, "'energy' has no effect"),
        ({"method": "dare_ties", "parameters": {"density": -1}}, "'density' is -1.* from 0 to 1"),
        ({"method": "ties", "parameters": {"density": 2}}, "'density' is 2.* from 0 to 1"),
        ({"method": "ties", "parameters": {"lambda": float("inf")}}, "finite"),
        ({"method": "task_arithmetic", "parameters": {"lambda": 1e300}}, "exceeds the range of float32"),
    ],
)
def test_values_that_mean_nothing_are_one_line(arguments: dict[str, Any], words: str, three: list[str]) -> None:
    with pytest.raises(RotationMergeError, match=words) as error:
        merge_adapters(three, **arguments)
    assert "\n" not in str(error.value)


def test_adapters_are_named_in_every_way(three: list[str], tmp_path: Path) -> None:
    merge_adapters(map(Path, three)).save(tmp_path / "out")
    assert of(tmp_path / "out").keys() == changes(merge_adapters(three), tmp_path / "again").keys()
    for adapters, words in ((three[0], "one str stands where adapters belong"), ([three[0], None], "of type NoneType")):
        with pytest.raises(RotationMergeError, match=words):
            merge_adapters(adapters)  # type: ignore[arg-type]


def test_one_folder_by_two_names_is_one_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    names = (f"{tmp_path}/base", f"{tmp_path}/base/", "./base", None)
    paths = [str(write_peft(tmp_path / str(i), i, base_model_name_or_path=name)) for i, name in enumerate(names)]
    assert len(merge_adapters(paths[:3]).maps) == len(MAPS)
    with pytest.raises(RotationMergeError, match="is an adapter of an unnamed base"):
        merge_adapters(paths)


def test_bad_input_gets_one_line(three: list[str], tmp_path: Path) -> None:
    write_peft(tmp_path / "foreign", 5, base_model_name_or_path="org/other")
    write_peft(tmp_path / "dora", 6, use_dora=True)
    keys = load_file(tmp_path / "dora" / "adapter_model.safetensors")
    magnitude = {
        key.replace("lora_A", "lora_magnitude_vector"): torch.ones(16) for key in keys if "up_proj.lora_A" in key
    }
    save_file({**keys, **magnitude}, tmp_path / "dora" / "adapter_model.safetensors")
    write_peft(tmp_path / "nan", 7, scale=float("nan"))
    wide = {"base_model.model.layers.0.up_proj.lora_A.weight": torch.ones(1, 10)}
    wide["base_model.model.layers.0.up_proj.lora_B.weight"] = torch.ones(8, 1)
    write_peft(tmp_path / "wide", 12)
    save_file(wide, tmp_path / "wide" / "adapter_model.safetensors")
    other = {"base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(1, 4)}
    other["base_model.model.layers.0.q_proj.lora_B.weight"] = torch.ones(4, 1)
    write_peft(tmp_path / "shape", 8)
    save_file(other, tmp_path / "shape" / "adapter_model.safetensors")
    kohya = write_kohya(tmp_path / "k.safetensors", 0, 2, None, KOHYA)
    loha = tmp_path / "loha.safetensors"
    save_file({"m.hada_w1_a": torch.ones(2, 2)}, loha)
    spoilt = {}
    for name, tensors in {
        "kernel": {"m.lora_up.weight": torch.ones(5, 2, 3, 3)},
        "vector": {"m.alpha": torch.ones(2)},
        "alpha": {"m.alpha": torch.tensor(float("nan"))},
        "empty": {"m.lora_down.weight": torch.ones(0, 4, 3, 3), "m.lora_up.weight": torch.ones(5, 0, 1, 1)},
    }.items():
        plain = {"m.lora_down.weight": torch.ones(2, 4, 3, 3), "m.lora_up.weight": torch.ones(5, 2, 1, 1)}
        spoilt[name] = tmp_path / f"{name}.safetensors"
        save_file({**plain, **tensors}, spoilt[name])
    header = {"m.lora_A.weight": torch.ones(1, 2), "m.lora_B.weight": torch.ones(2, 1)}
    save_file(header, tmp_path / "header.safetensors", {"lora_adapter_metadata": "["})
    write_peft(tmp_path / "infinite", 9, lora_alpha=float("inf"))
    write_peft(tmp_path / "no magnitudes", 10, use_dora=True)
    write_peft(tmp_path / "short", 11, maps=("q_proj",))
    pair = {"m.lora_down.weight": torch.ones(2, 4), "m.lora_up.weight": torch.ones(5, 2)}
    save_file(pair, tmp_path / "pair.safetensors")
    save_file({**pair, "n.lora_up.weight": torch.ones(5, 2)}, tmp_path / "half.safetensors")
    first, out = three[0], tmp_path / "out"
    for arguments, named in [
        ([first, out], "two adapters"),
        ([first, tmp_path / "foreign", out], "is an adapter of org/other"),
        ([first, tmp_path / "dora", out], "DoRA"),
        ([first, tmp_path / "nan", out], "NaN"),
        ([first, tmp_path / "shape", out], "of shape"),
        ([first, kohya, out], "format of kohya"),
        ([first, loha, out], "hada_w1_a"),
        ([first, tmp_path / "nothing", out], "no LoRA adapter"),
        ([first, spoilt["kernel"], out], "factors of 'm' are [2, 4, 3, 3] and [5, 2, 3, 3]"),
        ([first, spoilt["vector"], out], "gives no number for 'm'"),
        ([first, spoilt["empty"], out], "factors of 'm' are [0, 4, 3, 3]"),
        ([first, spoilt["alpha"], out], "'m.alpha' holds NaN"),
        ([first, tmp_path / "header.safetensors", out], "'lora_adapter_metadata' in its header"),
        ([first, tmp_path / "infinite", out], "lora_alpha of 'layers.0"),
        ([first, tmp_path / "no magnitudes", out], "DoRA"),
        ([tmp_path / "pair.safetensors", tmp_path / "half.safetensors", out], "'n' has one factor"),
        ([tmp_path / "short", first, tmp_path / "wide", out], "'layers.0.up_proj' of shape [8, 10]"),
        ([*three, out, "--rank", "99"], "'rank' is 99"),
        ([*three, out, "--rank", "-1"], "'--rank' is -1"),
        ([*three, out, "--rank", "all"], "'--rank' is 'all'"),
        ([*three, out, "--method", "tis"], "'ties'"),
        ([*three, out, "-p", "density=1"], "no parameter 'density'"),
        ([*three, out, "--method", "wudi", "-p", "ridge=much"], "must be a number"),
        ([*three, out, "--method", "wudi", "-p", "sides=three"], "sides"),
        ([*three, out, "-p", "density"], "NAME=VALUE"),
        ([*three, out, "--weights", "1,2"], "2 weights for 3"),
        ([*three, out, "--weights", "1,0,1"], "positive"),
        ([*three, out, "--weights", "a"], "--weights"),
        ([*three, out, "--energy", "2"], "energy"),
        ([*three, out, "--energy", "0.5"], "'energy' has no effect"),
        ([*three, tmp_path / "out.safetensors"], "a folder"),
    ]:
        done = run("lora", *arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert named in one_error(done.output), (named, done.output)
        assert not out.exists()
        assert not (tmp_path / "out.safetensors").exists()
    assert run("lora", first, tmp_path / "foreign", out, "--force").exit_code == 0
    with pytest.raises(RotationMergeError, match="two adapters"):
        merge_adapters([first])
    before = (Path(first) / "adapter_model.safetensors").read_bytes()
    with pytest.raises(RotationMergeError, match="is one of the inputs"):
        merge_adapters(three).save(f"{first}/")
    assert (Path(first) / "adapter_model.safetensors").read_bytes() == before


def test_paths_are_taken_and_no_model_is_written_over(tmp_path: Path) -> None:
    """A folder that holds a model would count as an adapter afterwards, and be of no use as either."""
    paths = [write_peft(tmp_path / str(seed), seed) for seed in range(2)]
    merged = merge_adapters(paths)
    merged.save(tmp_path / "out")
    merged.save(tmp_path / "out", force=True)
    assert of(tmp_path / "out").keys() == of(paths[0]).keys()
    assert len(repr(merged)) < 1000
    model = make("llama", tmp_path / "model")
    before = sorted(model.iterdir())
    with pytest.raises(RotationMergeError, match="model: already exists"):
        merged.save(model)
    assert sorted(model.iterdir()) == before
    for given, words in ((paths[0], "one PosixPath stands where"), ([paths[0], 3], "one adapter is of type int")):
        with pytest.raises(RotationMergeError, match=words):
            merge_adapters(given)
    with pytest.raises(RotationMergeError, match="'weights' are 'ab'; give one number for each adapter"):
        merge_adapters(paths, weights="ab")
