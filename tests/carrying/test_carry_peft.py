"""Adapters carried, as peft itself runs them: forms of LoRA, whole modules, biases; what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import other_coordinates
from cli_support import parsed, run
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import ALL, Case, make, outputs, save
from tiny_models import inputs as given_inputs
from torch import Tensor

import rotation_merge as rm
from rotation_merge import AlignConfig, Alignment
from rotation_merge.errors import AlignmentError, CheckpointError

ROTATION = AlignConfig(heads="permutation", residual="rotation")
PERMUTATION = AlignConfig(heads="permutation", residual="permutation")


class Home:
    """An old base, a new one that computes the same in other coordinates, and adapters of the old one, run by peft."""

    def __init__(self, family: str, name: str, where: Path) -> None:
        self.case: Case = next(c for c in ALL if (c.family, c.name) == (family, name))
        self.where = where
        model = make(self.case)
        self.given = given_inputs(self.case, model)
        self.config, self.state = save(model, where / "old")

    def new(self, options: AlignConfig) -> tuple[dict[str, Tensor], Alignment]:
        state, alignment = other_coordinates((self.state, self.config), options)
        folder = self.where / "new"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((self.where / "old" / "config.json").read_text())
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return state, alignment

    def base(self, name: str) -> Any:
        loaded = self.case.model_class.from_pretrained(
            self.where / name, dtype=torch.float64, attn_implementation="eager"
        )
        loaded.config._experts_implementation = "eager"
        return loaded.eval()

    def adapter(self, **config: Any) -> Tensor:
        """Write an adapter with everything trainable made random; what the old base computes with it."""
        torch.manual_seed(0)
        wanted = LoraConfig(**{"r": 2, "lora_alpha": 3, **config})
        model = get_peft_model(self.base("old"), wanted, autocast_adapter_dtype=False)
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
        model.save_pretrained(self.where / "adapter", save_embedding_layers=False)
        return self.logits(model)

    def carried(self, work: str, options: AlignConfig, **others: Any) -> tuple[Any, Tensor]:
        """What was made for the old base as an adapter of the new one, and what that computes with it."""
        state, alignment = self.new(options)
        given: Any = self.where / work
        if work != "adapter":
            given = load_file(given / "model.safetensors"), self.config
        config = rm.TransferConfig(alignment=alignment, **others)
        result = rm.transfer(given, self.where / "old", (state, self.config), config)
        shutil.rmtree(self.where / "carried", ignore_errors=True)
        result.save_pretrained(str(self.where / "carried"))
        model = PeftModel.from_pretrained(self.base("new"), self.where / "carried", autocast_adapter_dtype=False)
        return result, self.logits(model)

    def logits(self, model: Any) -> Tensor:
        return outputs(model.eval(), self.given)["logits"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home("llama", "llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home("gpt2", "untied", tmp_path_factory.mktemp("gpt2"))


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

FORMS: dict[str, tuple[str, AlignConfig, dict[str, Any]]] = {
    "lora": ("llama", ROTATION, {"target_modules": LINEAR}),
    "rank-stabilised, ranks of their own": (
        "llama",
        ROTATION,
        {"target_modules": LINEAR, "use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"up_proj": 7}},
    ),
    "embedding and head": ("llama", ROTATION, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "whole modules": ("llama", ROTATION, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "down_proj"]}),
    "whole norms": (
        "llama",
        PERMUTATION,
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm", "embed_tokens"]},
    ),
    "shifts left over": ("gpt2", ROTATION, {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "a bias already": (
        "gpt2",
        ROTATION,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "lora_bias": True},
    ),
    "trained biases": (
        "gpt2",
        ROTATION,
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only"},
    ),
    "all biases": ("gpt2", PERMUTATION, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
}


def test_a_module_of_peft_is_no_model_by_itself(llama: Home) -> None:
    module = get_peft_model(llama.base("old"), LoraConfig(r=2))
    with pytest.raises(CheckpointError, match=r"an adapter beside its weights; give model.merge_and_unload\(\), or"):
        rm.align(llama.where / "old", module)
    assert rm.align(llama.where / "old", module.merge_and_unload()).report is not None


def test_an_adapter_is_written_whole_or_not_at_all(llama: Home) -> None:
    llama.adapter(target_modules=["q_proj"])
    result, _ = llama.carried("adapter", ROTATION)
    place = llama.where / "unwritten"
    with pytest.raises(TypeError):
        replace(result, config={"r": object()}).save_pretrained(place)
    assert not place.exists()
    assert not list(llama.where.glob(".unwritten*"))


@pytest.mark.parametrize("form", FORMS)
def test_peft_runs_the_carried_adapter(form: str, request: pytest.FixtureRequest) -> None:
    family, options, config = FORMS[form]
    home = request.getfixturevalue(family)
    expected = home.adapter(**config)
    assert float((home.logits(home.base("old")) - expected).abs().max()) > 1e-2
    result, found = home.carried("adapter", options)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
    assert {x.dtype for x in result.tensors.values()} == {torch.float64}


REFUSED: dict[str, tuple[str, AlignConfig, dict[str, Any], str]] = {
    "dora": ("llama", PERMUTATION, {"target_modules": ["v_proj"], "use_dora": True}, "is a DoRA.*merge the adapter"),
    "norms under rotations": (
        "llama",
        ROTATION,
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        r"'model.*norm.weight' cannot be carried with a rotated stream",
    ),
    "constants beside embeddings": (
        "gpt2",
        ROTATION,
        {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True},
        "adds a constant",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_cannot_express_it_are_refused(form: str, request: pytest.FixtureRequest) -> None:
    family, options, config, words = REFUSED[form]
    home = request.getfixturevalue(family)
    home.adapter(**config)
    with pytest.raises(AlignmentError, match=words):
        home.carried("adapter", options)


@pytest.mark.slow
def test_scale(llama: Home) -> None:
    llama.adapter(target_modules=["q_proj", "down_proj"])
    once, twice = (llama.carried("adapter", ROTATION, scale=scale)[0].tensors for scale in (1.0, 2.0))
    key = next(key for key in once if "lora_B" in key)
    torch.testing.assert_close(twice[key], 2 * once[key])


def test_a_gain_of_zero_is_refused(llama: Home) -> None:
    llama.adapter(target_modules=["q_proj"])
    state, alignment = llama.new(ROTATION)
    state["model.layers.0.input_layernorm.weight"][3] = 0
    work, old, new = llama.where / "adapter", llama.where / "old", (state, llama.config)
    with pytest.raises(AlignmentError, match=r"entry 3 of the gain.*near zero"):
        rm.transfer(work, old, new, rm.TransferConfig(alignment=alignment))


class TestBadInput:
    @pytest.fixture(scope="class")
    def folder(self, llama: Home) -> Path:
        llama.adapter(target_modules=["q_proj"])
        llama.new(ROTATION)
        return llama.where

    def refused(
        self, where: Path, out: Path, adapter: Path | None = None, old: object = None, new: object = None
    ) -> str:
        done = run(
            "carry", adapter or where / "adapter", "--from", old or where / "old", "--to", new or where / "new", out
        )
        assert done.exit_code == 2, done.output
        assert len(done.output.strip().splitlines()) == 1, done.output
        assert not out.exists()
        return done.output

    def changed(self, folder: Path, to: Path, tensors: Any = None, **config: Any) -> Path:
        to.mkdir()
        old = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        (to / "adapter_config.json").write_text(json.dumps({**old, **config}))
        stored = load_file(folder / "adapter" / "adapter_model.safetensors")
        save_file(tensors(stored) if tensors else stored, to / "adapter_model.safetensors")
        return to

    def test_nothing_there(self, folder: Path, tmp_path: Path):
        (tmp_path / "empty").mkdir()
        assert "config.json is missing" in self.refused(folder, tmp_path / "out", tmp_path / "empty")

    def test_missing_base(self, folder: Path, tmp_path: Path):
        assert "no such directory" in self.refused(folder, tmp_path / "out", old=tmp_path / "nothing")

    def test_other_kinds(self, folder: Path, tmp_path: Path):
        other = self.changed(folder, tmp_path / "ia3", peft_type="IA3")
        assert "not a LoRA" in self.refused(folder, tmp_path / "out", other)

    def test_ranks_that_disagree(self, folder: Path, tmp_path: Path):
        def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: x[:1].contiguous() if "lora_A" in k else x for k, x in tensors.items()}

        other = self.changed(folder, tmp_path / "ranks", cut)
        assert "the factors of" in self.refused(folder, tmp_path / "out", other)

    @pytest.mark.slow
    def test_another_base(self, folder: Path, tmp_path: Path):
        def wider(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: torch.cat([x, x], 1) if "lora_A" in k else x for k, x in tensors.items()}

        other = self.changed(folder, tmp_path / "wide", wider)
        assert "[48, 64] for 'model.layers.0" in self.refused(folder, tmp_path / "out", other)

    @pytest.mark.slow
    def test_numbers_that_are_none(self, folder: Path, tmp_path: Path):
        def spoilt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: x / 0 if "layers.1" in k else x for k, x in tensors.items()}

        other = self.changed(folder, tmp_path / "spoilt", spoilt)
        assert "holds NaN or infinity" in self.refused(folder, tmp_path / "out", other)

    @pytest.mark.slow
    def test_modules_that_are_not_there(self, folder: Path, tmp_path: Path):
        def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k.replace("q_proj", "query"): x for k, x in tensors.items()}

        other = self.changed(folder, tmp_path / "names", renamed)
        assert "which the model does not store" in self.refused(folder, tmp_path / "out", other)

    def test_quantised_base(self, folder: Path, tmp_path: Path):
        base = tmp_path / "int4"
        base.mkdir()
        config = json.loads((folder / "new" / "config.json").read_text())
        quantised = {**config, "quantization_config": {"quant_method": "gptq"}}
        (base / "config.json").write_text(json.dumps(quantised))
        (base / "model.safetensors").write_bytes((folder / "new" / "model.safetensors").read_bytes())
        assert "gptq" in self.refused(folder, tmp_path / "out", new=base)


@pytest.mark.slow
def test_command(llama: Home, tmp_path: Path) -> None:
    """Each adapter exactly and in its own ranks; without and with a file of maps."""
    first, second = llama.where / "adapter", tmp_path / "second"
    ranks = {"r": 3, "rank_pattern": {"layers.0.mlp.up_proj": 1}}
    home = {second: llama.adapter(target_modules=["up_proj", "v_proj"], **ranks)}
    shutil.copytree(first, second)
    (second / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    home[first] = llama.adapter(target_modules=["q_proj", "down_proj"])
    llama.new(ROTATION)
    bases = ("--from", llama.where / "old", "--to", llama.where / "new")
    for path, expected in home.items():
        there = tmp_path / "both" / path.name
        done = run("carry", path, *bases, there, "--heads", "permutation")
        assert done.exit_code == 0, done.output
        before, after = (load_file(folder / "adapter_model.safetensors") for folder in (path, there))
        assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
        found = llama.logits(PeftModel.from_pretrained(llama.base("new"), there, autocast_adapter_dtype=False))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    card = (tmp_path / "both" / "second" / "README.md").read_text()
    assert "\nbase_model_relation: adapter\n" in card
    assert f"carried to `{llama.where / 'new'}`" in card
    assert "nothing beside peft" in card
    assert "\nlicense: other\n" in card, "the base states none"
    assert f"| {second} |  | cc-by-nc-4.0 |" in card
    config = json.loads((tmp_path / "both" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama.where / "new")
    maps = tmp_path / "maps.safetensors"
    aligned = run(
        *("align", llama.where / "new", llama.where / "old", "--alignment", maps),
        *("--heads", "permutation", "--residual", "rotation"),
    )
    assert aligned.exit_code == 0, aligned.output
    done = run("carry", first, *bases, tmp_path / "half", "--alignment", maps, "--scale", 0.5, "--lora", 7)
    assert done.exit_code == 0, done.output
    assert "multiplied by 0.5" in (tmp_path / "half" / "README.md").read_text()
    assert "keeps its rank 2" in done.output
    done = run("carry", first, *bases, tmp_path / "one", "--alignment", maps)
    assert done.exit_code == 0, done.output
    one, two = (load_file(tmp_path / p / "adapter_model.safetensors") for p in ("one", "both/adapter"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_an_adapter_of_another_base(llama: Home, tmp_path: Path) -> None:
    """Told by the weights of the base that its config names, or by its name where that is not here; of one that was
    carried before, by the weights of the base it was carried to."""
    llama.adapter(target_modules=["q_proj"])
    llama.new(ROTATION)
    adapter, old, new, gone = (llama.where / "adapter", llama.where / "old", llama.where / "new", tmp_path / "gone")
    moved, named, alike = tmp_path / "moved", tmp_path / "another", tmp_path / "alike" / "new"
    shutil.copytree(new, moved)
    shutil.copytree(old, named)
    shutil.copytree(old, alike)
    shutil.copytree(adapter, gone)
    config = json.loads((gone / "adapter_config.json").read_text())
    (gone / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "no/such/old"}))
    groups = ("--heads", "permutation")

    def refused(work: Path, home: Path, to: Path, out: str) -> str:
        done = run("carry", work, "--from", home, "--to", to, tmp_path / out, *groups)
        assert done.exit_code == (2 if "Error" in done.output else 0), done.output
        return done.output if done.exit_code else ""

    assert not refused(adapter, old, new, "there")
    assert not refused(adapter, named, new, "a"), "the same weights by another name"
    assert "is an adapter of" in refused(adapter, new, old, "b")
    assert not refused(gone, old, new, "c"), "nothing but the name to go by"
    assert "is an adapter of no/such/old" in refused(gone, named, new, "d")
    assert not refused(tmp_path / "there", moved, old, "back")
    assert "whose weights were not those of" in refused(tmp_path / "there", alike, new, "e")


class TestWholeFineTunes:
    def tuned(self, home: Home, norms: bool = True) -> Tensor:
        """Write a fine-tune of the old base; what it computes."""
        generator = torch.Generator().manual_seed(3)
        state = {
            name: x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype) if norms or x.ndim > 1 else x
            for name, x in home.state.items()
        }
        folder = home.where / "tuned"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((home.where / "old" / "config.json").read_text())
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return home.logits(home.base("tuned"))

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [ROTATION, PERMUTATION], ids=["rotation", "permutation"])
    def test_at_full_rank_an_adapter_says_it_all(self, llama: Home, options: AlignConfig, tmp_path: Path) -> None:
        """Changed norms go into what reads them where the stream is turned, else into modules_to_save."""
        expected = self.tuned(llama)
        _, found = llama.carried("tuned", options, rank=64)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        kept = {rank: self.kept(llama, tmp_path, rank, "--residual", options.residual) for rank in (64, 4)}
        assert kept[64] == 100.0
        assert 10 < kept[4] < 90

    def kept(self, home: Home, out: Path, rank: int, *flags: object) -> float:
        """How many percent of a change an adapter keeps."""
        tuned, old, new = (home.where / name for name in ("tuned", "old", "new"))
        flags = ("--heads", "permutation", "--lora", rank, *flags)
        (done,) = parsed("carry", tuned, "--from", old, "--to", new, out / str(rank), *flags)["written"]
        (words,) = (line for line in done["lines"] if f"Rank {rank} keeps" in line)
        return float(words.partition("keeps ")[2].partition("%")[0])

    @pytest.mark.slow
    def test_biases_and_what_has_no_place(self, gpt2: Home, tmp_path: Path) -> None:
        """Beside biases peft has no place for embeddings: their change is counted as lost."""
        self.tuned(gpt2)
        written, _ = gpt2.carried("tuned", ROTATION, rank=96)
        state = load_file(gpt2.where / "new" / "model.safetensors")
        changed = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in written.tensors}
        lost = {name for name in state if name.rpartition(".")[0] not in changed and state[name].ndim > 1}
        assert lost
        assert all("wte" in key or "wpe" in key or "lm_head" in key for key in lost), lost
        assert self.kept(gpt2, tmp_path, 96, "--residual", "rotation") < 99

    @pytest.mark.slow
    def test_commands(self, llama: Home, tmp_path: Path) -> None:
        expected = self.tuned(llama)
        llama.new(ROTATION)
        bases = ("--from", llama.where / "old", "--to", llama.where / "new", "--heads", "permutation")
        done = run("carry", llama.where / "tuned", *bases, tmp_path / "whole")
        assert done.exit_code == 0, done.output
        assert "Alignment of" in done.output
        assert "base_model_relation: finetune" in (tmp_path / "whole" / "README.md").read_text()
        found = llama.case.model_class.from_pretrained(
            tmp_path / "whole", dtype=torch.float64, attn_implementation="eager"
        )
        torch.testing.assert_close(llama.logits(found), expected, atol=1e-2, rtol=1e-2)  # maps are stored in single
        done = run("carry", llama.where / "tuned", *bases, tmp_path / "lora", "--lora", 4)
        assert done.exit_code == 0, done.output
        assert "keeps" in done.output
        assert (tmp_path / "lora" / "adapter_model.safetensors").exists()

    @pytest.mark.slow
    def test_an_embedding_that_is_the_head_stays_the_new_bases(self, tmp_path: Path) -> None:
        """peft would change one of the two; the adapter is one that our own commands take."""
        tied = Home("llama", "llama, tied, biases", tmp_path)
        self.tuned(tied, norms=False)
        tied.new(PERMUTATION)
        bases = (
            "--from",
            tmp_path / "old",
            "--to",
            tmp_path / "new",
            "--heads",
            "permutation",
            "--residual",
            "permutation",
        )
        done = run("carry", tmp_path / "tuned", *bases, tmp_path / "lora", "--lora", 64)
        assert done.exit_code == 0, done.output
        assert "`lm_head.weight` is tied to it" in (tmp_path / "lora" / "README.md").read_text()
        done = run("verify", f"{tmp_path / 'new'}+{tmp_path / 'lora'}", tmp_path / "new")
        assert "differ" in done.output, done.output


def test_errors_are_of_our_own() -> None:
    assert issubclass(CheckpointError, rm.RotationMergeError)
