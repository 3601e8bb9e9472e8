"""Adapters carried to another base: in every family, in every form of LoRA as peft runs it, between files of other
forms; whole fine-tunes as adapters; what is refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import carry, other_coordinates
from cli_support import error_of, output_of, parsed, run
from peft import LoraConfig, PeftModel, get_peft_model
from plugin_support import load as read
from plugin_support import rearranged, state, write_adapter, write_state
from residual_support import case
from safetensors.torch import load_file
from tiny_models import difference, inputs, load, make, outputs, save
from torch import Tensor

import rotation_merge as rm
from rotation_merge import AlignConfig, Alignment
from rotation_merge.errors import AlignmentError, CheckpointError

ROTATION = AlignConfig(heads="permutation", residual="rotation")
PERMUTATION = AlignConfig(heads="permutation", residual="permutation")
MATCHED = ("--heads", "permutation", "--residual", "rotation")
WEIGHTS = "adapter_model.safetensors"
State = dict[str, Tensor]


# --- forms of LoRA, run by peft ---------------------------------------------------------------------------------------


class Home:
    """An old base, a new one that computes the same in other coordinates, and adapters of the old one, run by peft."""

    def __init__(self, family: str, name: str, where: Path, options: AlignConfig = ROTATION) -> None:
        self.case, self.where = case(family, name), where
        model = make(self.case)
        self.batch = inputs(self.case, model)
        self.config, self.new = save(model, where / "new")
        self.state, self.alignment = other_coordinates((self.new, self.config), options)
        write_state(self.state, where / "new", where / "old")

    @property
    def bases(self) -> tuple[object, ...]:
        """Both, as options of the command."""
        return "--from", self.where / "old", "--to", self.where / "new"

    def base(self, name: str) -> Any:
        return load(self.case, self.where / name)

    def adapter(self, **config: Any) -> Tensor:
        """Write an adapter with everything trainable made random; what the old base computes with it."""
        torch.manual_seed(0)
        lora = LoraConfig(**{"r": 2, "lora_alpha": 3, **config})
        model = get_peft_model(self.base("old"), lora, autocast_adapter_dtype=False)
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
        model.save_pretrained(self.where / "adapter", save_embedding_layers=False)
        return self.differing(model)

    def carried(self, work: Any, **others: Any) -> tuple[Any, Tensor]:
        """What was made for the old base as an adapter of the new one, and what that computes with it."""
        config = rm.TransferConfig(alignment=self.alignment, **others)
        result = rm.transfer(work, self.where / "old", (self.new, self.config), config)
        shutil.rmtree(self.where / "carried", ignore_errors=True)
        result.save_pretrained(str(self.where / "carried"))
        return result, self.with_adapter("new", self.where / "carried")

    def with_adapter(self, base: str, adapter: Path) -> Tensor:
        """What a base computes with an adapter that peft reads."""
        return self.logits(PeftModel.from_pretrained(self.base(base), adapter, autocast_adapter_dtype=False))

    def as_read(self, base: str = "old", adapter: str = "adapter") -> Tensor:
        """What a base computes with the adapter that we read with it."""
        model = read(f"{self.where / base}+{self.where / adapter}", torch.float64)
        model.config._experts_implementation = "eager"
        return self.logits(model)

    def logits(self, model: Any) -> Tensor:
        return outputs(model.eval(), self.batch)["logits"]

    def differing(self, model: Any) -> Tensor:
        """What a model computes, which is not what the old base does."""
        logits = self.logits(model)
        assert float((self.logits(self.base("old")) - logits).abs().max()) > 1e-2
        return logits


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Home]:
    """The home of a family and options, made once."""
    names = {"llama": "llama", "gpt2": "untied", "vit": "classifier", "llama4": "plain", "gpt_neox": "parallel"}

    @functools.cache
    def home(family: str, options: AlignConfig) -> Home:
        return Home(family, names[family], tmp_path_factory.mktemp(family), options)

    return home


@pytest.fixture
def llama(homes: Callable[..., Home]) -> Home:
    return homes("llama", ROTATION)


def on(*modules: str, **config: Any) -> dict[str, Any]:
    return {"target_modules": [*modules], **config}


def conv1d(*modules: str, **config: Any) -> dict[str, Any]:
    return on(*modules, fan_in_fan_out=True, **config)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_ITS_OWN = {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"up_proj": 7}}
NORMS = {"modules_to_save": ["input_layernorm", "norm", "embed_tokens"]}
FORMS: dict[str, tuple[str, AlignConfig, dict[str, Any]]] = {
    "rank-stabilised, ranks of their own": ("llama", ROTATION, on(*LINEAR, **OF_ITS_OWN)),
    "embedding and head": ("llama", ROTATION, on("embed_tokens", "lm_head", "v_proj")),
    "whole modules": ("llama", ROTATION, on("q_proj", modules_to_save=["lm_head", "down_proj"])),
    "whole norms": ("llama", PERMUTATION, on("q_proj", **NORMS)),
    "shifts left over": ("gpt2", ROTATION, conv1d("c_attn", "c_fc", "c_proj")),
    "a bias already": ("gpt2", ROTATION, conv1d("c_attn", "c_proj", lora_bias=True)),
    "trained biases": ("gpt2", ROTATION, conv1d("c_attn", "c_fc", bias="lora_only")),
    "convolutions": ("vit", ROTATION, on("projection", "dense")),
    "experts (in, out) that do not say so": ("llama4", AlignConfig(), on(target_parameters=["experts.down_proj"])),
    "shifts beside embeddings": ("gpt2", ROTATION, conv1d("c_attn", "wte")),
    "shifts beside maps without biases": ("gpt_neox", ROTATION, on("query_key_value", "dense", "embed_out")),
    "all biases": ("gpt2", PERMUTATION, conv1d("c_attn", bias="all")),
}


@pytest.mark.parametrize("form", FORMS)
def test_peft_runs_the_carried_adapter(form: str, homes: Callable[..., Home]) -> None:
    family, options, config = FORMS[form]
    home = homes(family, options)
    expected = home.adapter(**config)
    result, logits = home.carried(home.where / "adapter")
    torch.testing.assert_close(logits, expected, atol=1e-8, rtol=1e-8)
    assert {x.dtype for x in result.tensors.values()} == {torch.float64}


REFUSED: dict[str, tuple[str, AlignConfig, dict[str, Any], str]] = {
    "dora": ("llama", PERMUTATION, on("v_proj", use_dora=True), "it is a DoRA; merge the adapter"),
    "norms under rotations": (
        *("llama", ROTATION, on("q_proj", modules_to_save=["norm"])),
        r"'model.*norm.weight' cannot be carried in an adapter: it belongs to a rotated stream",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_cannot_express_it_are_refused(form: str, homes: Callable[..., Home]) -> None:
    family, options, config, words = REFUSED[form]
    home = homes(family, options)
    home.adapter(**config)
    with pytest.raises(AlignmentError, match=words):
        home.carried(home.where / "adapter")


def test_values(llama: Home) -> None:
    """A module of peft is no model; a scale multiplies; a gain of zero is refused; written whole or not at all."""
    module, old, adapter = (
        get_peft_model(llama.base("old"), LoraConfig(r=2)),
        llama.where / "old",
        llama.where / "adapter",
    )
    with pytest.raises(CheckpointError, match=r"an adapter beside its weights; give model.merge_and_unload\(\), or"):
        rm.align(old, module)
    llama.adapter(target_modules=["q_proj"])
    once, twice = (llama.carried(adapter, scale=scale)[0] for scale in (1.0, 2.0))
    key = next(key for key in once.tensors if "lora_B" in key)
    torch.testing.assert_close(twice.tensors[key], 2 * once.tensors[key])
    with pytest.raises(TypeError):
        replace(once, config={"r": object()}).save_pretrained(llama.where / "unwritten")
    assert not [*llama.where.glob("unwritten*"), *llama.where.glob(".unwritten*")]
    replace(once, tensors={name: x / 0 for name, x in once.tensors.items()}).save_pretrained(llama.where / "spoilt")
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        rm.transfer(llama.where / "spoilt", old, old)
    name = "model.layers.0.input_layernorm.weight"
    flat = {**llama.new, name: llama.new[name].index_fill(0, torch.tensor(3), 0)}, llama.config
    with pytest.raises(AlignmentError, match=r"entry 3 of the gain.*near zero"):
        rm.transfer(adapter, old, flat, alignment=llama.alignment)


@pytest.mark.slow
def test_command(llama: Home, tmp_path: Path) -> None:
    """Exactly and in the adapter's own ranks; without and with a file of maps; report and card name what it is of, so
    that it is carried on from that base alone, whatever it is called."""
    work, out, maps = llama.where / "adapter", tmp_path / "out", tmp_path / "maps.safetensors"
    expected = llama.adapter(target_modules=["up_proj", "v_proj"], r=3, rank_pattern={"layers.0.mlp.up_proj": 1})
    (work / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    carry(work, *llama.bases, out, "--heads", "permutation")
    before, after = (load_file(folder / WEIGHTS) for folder in (work, out))
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
    torch.testing.assert_close(llama.with_adapter("new", out), expected, atol=1e-5, rtol=1e-5)
    lines = ("base_model_relation: adapter", f"| {work} |  | cc-by-nc-4.0 |", "license: other")  # the base has none
    card = (out / "README.md").read_text()
    assert all(line in card for line in (*lines, f"carried to `{llama.where / 'new'}`", "nothing beside peft"))
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama.where / "new")
    output_of("align", llama.where / "new", llama.where / "old", "--alignment", maps, *MATCHED)
    output = carry(work, *llama.bases, tmp_path / "half", "--alignment", maps, "--scale", 0.5, "--lora", 7)
    assert "multiplied by 0.5" in (tmp_path / "half" / "README.md").read_text()
    assert "keeps its rank 3" in output
    carry(work, *llama.bases, tmp_path / "one", "--alignment", maps)
    torch.testing.assert_close(load_file(tmp_path / "one" / WEIGHTS), after, atol=1e-4, rtol=1e-3)
    (work / "README.md").unlink()
    copy, alike = tmp_path / "copy", tmp_path / "alike" / "new"
    shutil.copytree(llama.where / "new", copy)
    shutil.copytree(llama.where / "old", alike)
    carry(out, "--from", copy, "--to", llama.where / "old", tmp_path / "back", "--heads", "permutation")
    line = error_of("carry", out, "--from", alike, "--to", llama.where / "new", tmp_path / "refused")
    assert "whose weights were not those of" in line


# --- bases whose files have the same weights in other forms -----------------------------------------------------------

STACKED = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.fixture(scope="module", params=["apart", "stacked"])
def mixtral(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A mixture of experts whose file has them in one form, and the new base with the other one."""
    home = Home("mixtral", "untied", tmp_path_factory.mktemp(request.param))
    stacked = "new" if request.param == "apart" else "old"
    home.base(stacked).save_pretrained(home.where / stacked, save_original_format=False)
    names = {name: set(load_file(home.where / name / "model.safetensors")) for name in ("old", "new")}
    assert [name for name in names if any("experts.gate_up_proj" in key for key in names[name])] == [stacked]
    return home


def random_adapter(home: Home, modules: tuple[str, ...], ranks: dict[str, int], alpha: int) -> State:
    """An adapter of modules as files name them, written; the state of the old base with its change."""
    draw, tensors, changed = torch.Generator().manual_seed(0), State(), dict(home.state)
    for name in sorted(name for name in home.state if name.removesuffix(".weight").endswith(modules)):
        (gives, reads), module = home.state[name].shape, name.removesuffix(".weight")
        rank = next((rank for part, rank in ranks.items() if part in name), 2)
        a, b = (0.3 * torch.randn(shape, generator=draw).double() for shape in ((rank, reads), (gives, rank)))
        tensors |= {f"base_model.model.{module}.lora_{x}.weight": factor for x, factor in (("A", a), ("B", b))}
        changed[name] = home.state[name] + alpha / rank * b @ a
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": [m.strip(".") for m in modules]}
    shutil.rmtree(home.where / "adapter", ignore_errors=True)
    write_adapter({**config, "rank_pattern": ranks, "base_model_name_or_path": "old"}, tensors, home.where / "adapter")
    return changed


def adapted(folder: Path) -> set[str]:
    """Names of the modules that an adapter changes."""
    return {name.partition(".lora_")[0] for name in load_file(folder / WEIGHTS)}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["apart", "stacked"])
def test_experts_in_either_form(mixtral: Home, form: str, tmp_path: Path) -> None:
    """Whichever form the bases and the adapter have: the carried one computes what it computed at home, and so does the
    adapter that is read with its base."""
    if form == "stacked":
        expected = mixtral.adapter(**STACKED)
    else:
        random_adapter(mixtral, (".q_proj", ".w1", ".w2", ".w3"), {}, 3)
        expected = mixtral.with_adapter("old", mixtral.where / "adapter")
    torch.testing.assert_close(mixtral.as_read(), expected, atol=1e-9, rtol=1e-9)
    carry(mixtral.where / "adapter", *mixtral.bases, tmp_path / "out", *MATCHED)
    assert adapted(tmp_path / "out") == adapted(mixtral.where / "adapter")
    torch.testing.assert_close(mixtral.with_adapter("new", tmp_path / "out"), expected, atol=1e-5, rtol=1e-5)


def test_experts_with_biases_beside_their_factors(tmp_path: Path) -> None:
    """`lora_bias` on experts that are stored apart: where nothing is moved, nothing changes."""
    home = Home("mixtral", "untied", tmp_path)
    random_adapter(home, (".q_proj", ".w1", ".w2", ".w3"), {}, 3)
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    tensors |= {key.replace("weight", "bias"): x[:, 0] for key, x in tensors.items() if "lora_B" in key}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    biased = write_adapter({**config, "lora_bias": True}, tensors, tmp_path / "biased")
    carried = rm.transfer(biased, tmp_path / "old", tmp_path / "old", alignment=Alignment({}))
    torch.testing.assert_close(dict(carried.tensors), tensors)


@pytest.mark.parametrize("how", ["swapped", "grouped"])
def test_experts_as_other_trainers_write_them(how: str, tmp_path: Path) -> None:
    """Written as the installed peft reads them."""
    home = Home("olmoe", "grouped", tmp_path)
    expected = home.adapter(**STACKED)
    rearranged(tmp_path / "adapter", home.config["num_experts"], how)
    torch.testing.assert_close(home.carried(tmp_path / "adapter")[1], expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(home.as_read("new", "carried"), expected, atol=1e-8, rtol=1e-8)


@pytest.mark.slow
def test_one_piece_at_home_three_at_the_new_base(tmp_path: Path) -> None:
    """An adapter of NomicBERT's first code (Wqkv) for a base saved by transformers: every piece gets a copy of A."""
    home = Home("nomic_bert", "words", tmp_path, PERMUTATION)
    changed = random_adapter(home, ("Wqkv", "fc11", "out_proj"), {"Wqkv": 3}, 4)
    write_state(changed, tmp_path / "old", tmp_path / "changed")
    expected = home.differing(home.base("changed"))
    home.base("new").save_pretrained(tmp_path / "new", save_original_format=False)
    carry(tmp_path / "adapter", *home.bases, tmp_path / "out", "--heads", "permutation")
    assert not any("Wqkv" in name for name in adapted(tmp_path / "out"))
    torch.testing.assert_close(home.with_adapter("new", tmp_path / "out"), expected, atol=1e-5, rtol=1e-5)


def test_models_of_other_names(tmp_path: Path) -> None:
    """DINOv2's attention is called otherwise in files of before and of today."""
    model = make(case("dinov2", "registers"))
    model.save_pretrained(tmp_path / "old")
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "tuned")
    model.save_pretrained(tmp_path / "wanted", save_original_format=False)
    carry(tmp_path / "tuned", tmp_path / "out", "--from", tmp_path / "old", "--to", tmp_path / "new", "--force")
    result, expected = state(tmp_path / "out"), state(tmp_path / "wanted")
    assert expected.keys() != state(tmp_path / "tuned").keys()
    torch.testing.assert_close(result, expected)


# --- whole fine-tunes as adapters -------------------------------------------------------------------------------------


def tuned(home: Home, norms: bool = True) -> tuple[tuple[State, Any], Tensor]:
    """A fine-tune of the old base, written and in memory; what it computes."""
    draw = torch.Generator().manual_seed(3)
    noise = {name: 0.1 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for name, x in home.state.items()}
    changed = {n: x + noise[n] if norms or x.ndim > 1 else x for n, x in home.state.items()}
    write_state(changed, home.where / "old", home.where / "tuned")
    return (changed, home.config), home.logits(home.base("tuned"))


def share_in(home: Home, out: Path, rank: int, residual: str) -> float:
    """How many percent of a change an adapter holds."""
    flags = ("--heads", "permutation", "--lora", rank, "--residual", residual)
    (written,) = parsed("carry", home.where / "tuned", *home.bases, out / str(rank), *flags)["written"]
    (words,) = (line for line in written["lines"] if f"Rank {rank} keeps" in line)
    return float(words.partition("keeps ")[2].partition("%")[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [ROTATION, PERMUTATION], ids=["rotation", "permutation"])
def test_at_full_rank_an_adapter_says_it_all(options: AlignConfig, homes: Callable[..., Home], tmp_path: Path) -> None:
    """Changed norms go into what reads them where the stream is turned, else into modules_to_save. Without a rank a
    model stays a model."""
    home = homes("llama", options)
    work, expected = tuned(home)
    torch.testing.assert_close(home.carried(work, rank=64)[1], expected, atol=1e-4, rtol=1e-4)
    assert share_in(home, tmp_path, 64, options.residual) == 100.0
    assert 10 < share_in(home, tmp_path, 4, options.residual) < 90
    if options is ROTATION:
        out = tmp_path / "out"
        assert "Alignment of" in carry(home.where / "tuned", *home.bases, out, "--heads", "permutation")
        assert "base_model_relation: finetune" in (out / "README.md").read_text()
        logits = home.logits(read(str(out), torch.float64))
        torch.testing.assert_close(logits, expected, atol=1e-2, rtol=1e-2)  # maps are stored in single


MAMBA = [("falcon_h1", "plain"), ("mamba", "plain")]
OF_EVERY_KIND = [
    *[("llama", "qwen2, untied"), ("qwen3_5", "untied"), ("gpt_neox", "parallel"), ("bart", "generation"), *MAMBA],
    *(
        pytest.param(*names, marks=pytest.mark.slow)
        for names in [
            *[("mamba2", "groups"), ("granitemoehybrid", "experts"), ("nemotron_h", "dense"), ("lfm2", "dense")],
            *[("olmoe", "grouped"), ("qwen3_next", "moe"), ("deepseek", "v3"), ("llama4", "normalised")],
            *[("gemma4", "dense"), ("siglip", "both"), ("whisper", "generation"), ("deberta_v2", "v3, shared keys")],
            *[("t5", "plain"), ("mpnet", "masked words"), ("clip", "both"), ("gemma", "tied"), ("gpt2", "untied")],
        ]
    ),
]


@pytest.mark.parametrize(("family", "name"), OF_EVERY_KIND)
def test_an_adapter_loads_in_peft_and_says_what_it_lacks(family: str, name: str, tmp_path: Path) -> None:
    """Everything of a fine-tune changes: peft runs the adapter as it merges it and as we read it with its base. At full
    rank the tensors that stay the base's have all the share that the rank does not keep, and are named."""
    qwen = case("llama", "qwen2")
    chosen = (
        replace(qwen, config={**qwen.config, "tie_word_embeddings": False})
        if "untied" in name and family == "llama"
        else case(family, name)
    )
    model, draw = make(chosen), torch.Generator().manual_seed(3)
    _, before = save(model, tmp_path / "base")
    noise = {key: 0.1 * torch.randn(x.shape, generator=draw, dtype=x.dtype) for key, x in before.items()}
    write_state({key: x + noise[key] for key, x in before.items()}, tmp_path / "base", tmp_path / "tuned")
    written = rm.transfer(tmp_path / "tuned", tmp_path / "base", tmp_path / "base", rank=1000)
    written.save_pretrained(tmp_path / "lora")

    loaded = PeftModel.from_pretrained(load(chosen, tmp_path / "base"), tmp_path / "lora", autocast_adapter_dtype=False)
    batch = inputs(chosen, model)
    run = outputs(loaded.eval(), batch)
    merged = outputs(loaded.merge_and_unload(), batch)
    rm.average([f"{tmp_path / 'base'}+{tmp_path / 'lora'}"]).to(torch.float64).save_pretrained(tmp_path / "ours")
    assert difference(run, merged) < 1e-9
    assert difference(outputs(load(chosen, tmp_path / "ours"), batch), merged) < 1e-9

    after = state(tmp_path / "ours")
    lost = {key: noise[key] for key, x in before.items() if torch.equal(after[key].to(x), x)}
    share = float(sum(x.square().sum() for x in lost.values()) / sum(x.square().sum() for x in noise.values()))
    (kept,) = (line for line in written.notes if "Rank 1000 keeps" in line)
    assert f"keeps {1 - share:.1%} of the change" in kept
    said = [line for line in written.notes if "no place in the adapter" in line]
    assert bool(said) == bool(lost)
    if lost:
        assert said[0].startswith(f"{share:.1%} of the change")
        assert any(f"`{key}`" in said[0] for key in lost)


@pytest.mark.slow
def test_an_embedding_that_is_the_head_stays_the_new_bases(tmp_path: Path) -> None:
    """peft would change one of the two; the adapter is one that our own commands take."""
    tied = Home("llama", "llama, tied, biases", tmp_path, PERMUTATION)
    tuned(tied, norms=False)
    options = ("--heads", "permutation", "--residual", "permutation", "--lora", 64)
    carry(tmp_path / "tuned", *tied.bases, tmp_path / "lora", *options)
    assert "`lm_head.weight` is tied to it" in (tmp_path / "lora" / "README.md").read_text()
    done = run("verify", f"{tmp_path / 'new'}+{tmp_path / 'lora'}", tmp_path / "new")
    assert "differ" in done.output, done.output
