"""A change carried between bases of unlike widths and depths does there what it did at home, if they are one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import load as load_model
from plugin_support import make as make_checkpoint
from plugin_support import merged, mergekit_yaml, recipe_for, state, write_recipe, write_state
from safetensors.torch import load_file, save_file
from test_plugin_inputs import with_tokenizer
from tiny_models import ALL, Case, difference, outputs, planted, reload
from torch import Tensor
from widths_support import CASES, doubled, of_sizes, tuned_from, unlike_models, widened

import rotation_merge as rm

IDS = torch.arange(12).view(2, 6)
EVERY = list({case.family: case for case in ALL}.values())


def carried(tuned: Any, old: Any, new: Any, **options: Any) -> tuple[rm.View, float]:
    """What a fine-tune of the old base is at the new one, and how many percent of it had a place; layers stay still."""
    still = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    view = rm.transfer(tuned, old, new, **still, **options)
    (place,) = (note for note in view.notes if "fits the new base" in note)
    return view, float(place.partition("%")[0].split()[-1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_a_change_goes_to_twice_the_sizes_and_back(case: Case, tmp_path: Path) -> None:
    model = planted(case)
    own, tuned = model.state, tuned_from(model.state)
    config, wide = ({**c, "dtype": "float64"} for c in (model.config, doubled(model.config)))
    grown = widened(of_sizes(case, wide, tmp_path / "large"), (own, config))
    large, large_tuned = ((grown.apply((state, config), strict=False).state_dict(), wide) for state in (own, tuned))
    home = outputs(model.holding(tuned), model.given)
    (tmp_path / "config.json").write_text(json.dumps(wide))
    tied = config.get("tie_word_embeddings") or not rm.Alignment.random((own, config), residual="largest").folded
    for residual in ("none",) if tied else ("none", "rotation"):
        down, share = carried(large_tuned, large, (own, config), widths=True, residual=residual)
        assert share > 99.9  # gains of coordinates that hold nothing changed, too
        up, share = carried((tuned, config), (own, config), large, widths=True, residual=residual)
        assert share == 100.0
        assert difference(home, outputs(model.holding(down.state_dict()), model.given)) < 1e-9
        assert difference(home, outputs(reload(case, tmp_path, up.state_dict()), model.given)) < 1e-9


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.family)
def test_a_layer_s_change_goes_to_the_layer_that_it_meets(case: Case, tmp_path: Path) -> None:
    """A base whose first layer is the old one's second: there the change arrives, the second stays as it is."""
    model = planted(case)
    architecture, config, own = model.architecture, model.config, model.state
    tuned, layers = tuned_from(own), []
    new, wanted = dict(own), dict(tuned)
    for module in architecture.layers_key:
        blocks = architecture.layers(module)
        forms = [[(info.key, [own[n].shape for n in info.names if n in own]) for info in b.tensors] for b in blocks]
        met = 1 if len(blocks) > 1 and forms[0] == forms[1] else 0
        layers.append(f"{module}={met}:0" if len(architecture.layers_key) > 1 else f"{met}:0")
        for number, block in enumerate(blocks):
            for info in block.tensors:
                other = blocks[met].tensor(info.key) if number == 0 else None
                for place, name in enumerate(info.names):
                    if name in own and other is not None:
                        new[name], wanted[name] = own[other.names[place]], tuned[other.names[place]]
                    elif name in own:
                        wanted[name] = new[name]
    bases = (tuned, config), (own, config), (new, config)
    found, share = carried(*bases, layers_map=",".join(layers), residual="none")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-9, msg=name)
    assert share > 0
    if rm.Alignment.random((own, config), residual="largest").folded and not config.get("tie_word_embeddings"):
        found, _ = carried(*bases, layers_map=",".join(layers), residual="largest")
        there = outputs(model.holding(wanted), model.given)
        assert difference(there, outputs(model.holding(found.state_dict()), model.given)) < 1e-9
        assert any(not torch.allclose(tensor, wanted[name]) for name, tensor in found.items())


def logits(path: object) -> Tensor:
    with torch.no_grad():
        return load_model(str(path))(IDS).logits  # type: ignore[no-any-return]


def near(path: object, home: Tensor, base: object, within: float = 1e-5) -> bool:
    """Whether a model gives what a fine-tune gave at home, up to rounding of what fine-tuning changed."""
    return float((logits(path) - home).abs().max()) < within * float((logits(base) - home).abs().max())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return unlike_models(tmp_path_factory.mktemp("unlike"))


HOW = ("--widths", "--heads", "permutation", "--residual", "rotation")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fine_tune_of_a_larger_base_returns_to_the_smaller_one(
    models: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    out = tmp_path / "out"
    done = parsed(
        "carry", models["wide-tuned"], out, "--from", models["wide"], "--to", models["small"], *HOW, "--dtype", dtype
    )
    lines = done["written"][0]["lines"]
    assert any("larger than" in line and "left out" in line for line in lines)
    place = next(line for line in lines if "fits the new base" in line)
    assert "100.0%" in place or "99." in place
    assert "model.layers.0" in place
    assert place in (out / "README.md").read_text()
    assert dtype == "bfloat16" or near(out, logits(models["tuned"]), models["small"])


def test_vocabularies_meet_in_the_tokens_that_both_have(models: dict[str, Path], tmp_path: Path) -> None:
    """The larger base has three tokens more, all of them in another order."""
    size = len(state(models["small"])["lm_head.weight"])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    found = {}
    for name in ("wide", "wide-tuned"):
        own = {n: torch.cat([t[order], t[:3]]) if len(t) == size else t for n, t in state(models[name]).items()}
        path = found[name] = write_state(own, models[name], tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "vocab_size": size + 3}))
        with_tokenizer([*(f"w{i}" for i in order.tolist()), "new0", "new1", "new2"], path)
    small = write_state(state(models["small"]), models["small"], tmp_path / "small")
    with_tokenizer([f"w{i}" for i in range(size)], small)
    pair = ("--from", found["wide"], "--to", small)
    done = parsed("carry", found["wide-tuned"], tmp_path / "out", *pair, *HOW)
    assert any(f"share {size} tokens" in line for line in done["written"][0]["lines"])
    assert near(tmp_path / "out", logits(models["tuned"]), small)


def test_what_has_no_place_is_said(models: dict[str, Path], tmp_path: Path) -> None:
    """A fine-tune of an unrelated larger base: part of its change falls on zeros."""
    tuned = write_state(tuned_from(state(models["other"])), models["other"], tmp_path / "tuned")
    pair = ("--from", models["other"], "--to", models["small"], "--widths", "--residual", "none")
    done = parsed("carry", tuned, tmp_path / "out", *pair)
    place = next(line for line in done["written"][0]["lines"] if "fits the new base" in line)
    assert 10 < float(place.split("%")[0]) < 80
    assert logits(tmp_path / "out").isfinite().all()


@pytest.mark.parametrize("way", ["1:0", "auto"])
def test_layers_that_do_nothing_change_nothing(models: dict[str, Path], tmp_path: Path, way: str) -> None:
    """The deeper base is the shallower one; both ways."""
    home = logits(models["tuned"])
    up, down = ("0-1:1-2", "1-2:0-1") if way != "auto" else (way, way)
    for name, tuned, old, new, layers in (
        ("up", "tuned", "small", "deep", up),
        ("down", "deep-tuned", "deep", "small", down),
    ):
        pair = ("--from", models[old], "--to", models[new])
        done = parsed("carry", models[tuned], tmp_path / name, *pair, "--layers-map", layers, "--residual", "rotation")
        lines = " ".join(done["written"][0]["lines"])
        assert ("0:1, 1:2" if name == "up" else "1:0, 2:1") in lines
        assert near(tmp_path / name, home, models[new])


def test_adapters_are_carried_to_a_larger_base(models: dict[str, Path], tmp_path: Path) -> None:
    """Several at once; each stays one of its rank in every module."""
    own = state(models["small"])
    changes = {n: 0.3 * torch.randn(2, *t.shape) for n, t in own.items() if n.endswith("proj.weight")}
    for random in (changes[n] for n in changes if n.endswith("down_proj.weight")):
        random[1][:, 1] = 0  # so that it has rank 1 there
    some = {n: random for n, random in changes.items() if "layers.0" in n}
    adapters = [lora(models["small"], changes, tmp_path / "all"), lora(models["small"], some, tmp_path / "some")]
    pair = ("--from", models["small"], "--to", models["wide"])
    done = parsed("carry", *adapters, tmp_path / "out", *pair, *HOW)
    for adapter, written in zip(adapters, done["written"], strict=True):
        assert any("Rank 2 keeps 100.0%" in line for line in written["lines"])
        out = tmp_path / "out" / adapter.name
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["r"], set(config["rank_pattern"].values())) == (2, {1})
        assert all("down_proj" in name for name in config["rank_pattern"])
        before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, out))
        assert before.keys() == after.keys()
        assert near(f"{models['wide']}+{out}", logits(f"{models['small']}+{adapter}"), models["wide"])


def lora(base: Path, changes: dict[str, Tensor], out: Path) -> Path:
    """An adapter of rank 2 of some weights of a model, its factors drawn."""
    tensors, modules = {}, []
    for name, random in changes.items():
        module = name.removesuffix(".weight")
        tensors[f"base_model.model.{module}.lora_A.weight"] = random[0][:2].contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = random[1][:, :2].contiguous()
        modules.append(module)
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    words = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": modules, "task_type": "CAUSAL_LM"}
    (out / "adapter_config.json").write_text(json.dumps({**words, "base_model_name_or_path": str(base)}))
    return out


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": [(7 * i + j * j) % 40 for j in range(8)]}) for i in range(32)))
    return file


@pytest.mark.parametrize(
    ("old", "new", "flags", "said"),
    [
        ("wide", "small", ("--scale", "auto"), "ecovered lift"),
        ("wide", "small", ("--steps", 1, "--scale", 1), "Distilled for 1 steps"),
        ("wide", "small", ("--carry", "refit", "--scale", 1), "Refitted on"),
    ],
    ids=["auto", "distil", "refit"],
)
def test_samples_say_what_arrives_between_unlike_bases(
    models: dict[str, Path], texts: Path, tmp_path: Path, old: str, new: str, flags: tuple[object, ...], said: str
) -> None:
    tuned = {"wide": "wide-tuned", "small": "tuned"}[old]
    given = ("--widths", "--residual", "none", "--data", texts, "--samples", 32, *flags)
    done = parsed("carry", models[tuned], tmp_path / "out", "--from", models[old], "--to", models[new], *given)
    lines = " ".join(done["written"][0]["lines"])
    assert said in lines
    assert "Loss on the judging samples" in lines
    assert logits(tmp_path / "out").isfinite().all()


def recipe(models: dict[str, Path], old: str, new: str, tuned: str, **given: Any) -> dict[str, Any]:
    """The new base with what a fine-tune changed."""
    own = {k: given.pop(k) for k in ("widths", "layers_map", "carry", "carry_scale", "data", "samples") if k in given}
    parameters = {"weight": 1.0, "finetuned_from": str(models[old]), **own}
    made = recipe_for("task_arithmetic", models[new], models[tuned], **given)
    made["models"] = [{"model": str(models[tuned]), "parameters": parameters}]
    return made


@pytest.mark.parametrize(
    ("old", "new", "tuned", "given"),
    [
        ("wide", "small", "wide-tuned", {"widths": True}),
        ("deep", "small", "deep-tuned", {"layers_map": "1-2:0-1"}),
        ("small", "deep", "tuned", {"layers_map": "auto", "widths": True}),
    ],
    ids=["smaller", "shallower", "deeper"],
)
def test_a_recipe_carries_between_unlike_bases(
    models: dict[str, Path], tmp_path: Path, old: str, new: str, tuned: str, given: dict[str, Any]
) -> None:
    made = recipe(models, old, new, tuned, residual="rotation", heads="permutation", **given)
    merged(made, tmp_path / "out")
    assert near(tmp_path / "out", logits(models["tuned"]), models[new])
    report = (tmp_path / "out" / "rotation_merge.json").read_text()
    assert "fits the new base" in report
    assert f"(carried over from {models[old].name})" in (tmp_path / "out" / "README.md").read_text()
    assert run("check", write_recipe(made, tmp_path / "recipe.yml")).exit_code == 0


def test_samples_scale_what_a_recipe_carries(models: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    given = {"widths": True, "carry_scale": "auto", "data": str(texts), "samples": 32}
    merged(recipe(models, "wide", "small", "wide-tuned", **given), tmp_path / "out")
    assert "ecovered lift" in (tmp_path / "out" / "rotation_merge.json").read_text()


def test_what_a_recipe_cannot_carry_is_one_line(models: dict[str, Path], tmp_path: Path) -> None:
    for given, words in (
        ({}, "widths: true"),
        ({"widths": True, "heads_of": "each"}, "rotation-merge carry"),
        ({"widths": True, "save_alignment": True}, "'save_alignment' needs models of one shape"),
        ({"widths": True, "layers_map": "0:5"}, "has 2"),
        ({"widths": "wide"}, "true"),
    ):
        made = recipe(models, "wide", "small", "wide-tuned", **given)
        refused(made, tmp_path, words)
    made = recipe(models, "wide", "small", "wide-tuned", widths=True)
    looked = run("inspect", write_recipe(made, tmp_path / "recipe.yml"))
    assert looked.exit_code == 2
    assert "'rotation-merge check'" in looked.output
    del made["models"][0]["parameters"]["finetuned_from"]
    refused(made, tmp_path, "finetuned_from")


def refused(made: dict[str, Any], tmp_path: Path, words: str) -> None:
    done = mergekit_yaml(made, tmp_path / "out")
    assert done.exit_code != 0
    assert words in done.output
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_carried_is_one_line(models: dict[str, Path], tmp_path: Path) -> None:
    vit = make_checkpoint("vit", tmp_path / "vit")
    turned = make_checkpoint("llama", tmp_path / "heads", head_dim=4)
    for old, new, flags, words in (
        ("wide", "small", (), "'widths'"),
        ("deep", "small", ("--widths",), "'layers_map'"),
        ("wide", "small", ("--layers-map", "auto"), "'widths'"),
        ("wide", "small", ("--widths", "--alignment", "x.safetensors"), "leave out the alignment file"),
        ("deep", "small", ("--layers-map", "0:0,3:2"), "which has 2"),
        ("deep", "small", ("--layers-map", "1:0,0:1"), "out of order"),
        ("deep", "small", ("--layers-map", "first"), "OLD:NEW"),
        ("deep", "small", ("--layers-map", "vision=0:0"), "the modules are"),
        (vit, "small", ("--widths",), "another architecture"),
        (turned, "small", ("--widths",), "rotary frequencies depend"),
    ):
        base, to = (models.get(str(name), name) for name in (old, new))
        found = run("carry", base, tmp_path / "out", "--from", base, "--to", to, *flags)
        assert found.exit_code == 2, found.output
        assert words in found.output
        assert "Traceback" not in found.output
        assert not (tmp_path / "out").exists()
