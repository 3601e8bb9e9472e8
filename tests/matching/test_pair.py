"""What pairs of models are refused for and warned of, over all families; every path into matching asks `check_pair`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from bad_checkpoints import READERS
from cli_support import COMMANDS, output_of, run
from plugin_support import error_of_merge, make, merged, mergekit_multi, mergekit_yaml, recipe_for, state, write_state
from spoiling import DONORS, RECIPE
from tiny_models import ALL, Case, planted
from variants import FIRST, ONE

import rotation_merge as rm
from rotation_merge.architecture import resolve
from rotation_merge.architecture.registry import shipped
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import check_pair
from rotation_merge.model.view import described
from rotation_merge.report.integrity import check_folder
from rotation_merge.symmetry.group import Monomials, Rotations

UNKNOWN = "Not aligned, because the architecture does not list them: 1 tensors (surplus.weight)."
STILL: dict[str, Any] = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
SOME = [case for case in ALL if case in FIRST or "tie_word_embeddings" in case.config]
by_case = pytest.mark.parametrize("case", SOME, ids=lambda case: f"{case.family}-{case.name}")


@pytest.mark.slow
@by_case
def test_a_tied_head_forbids_rotations(case: Case) -> None:
    """Stored or not, a head that is the embedding is one parameter: folding cannot serve it as both.

    One that differs, as of a class that ties none whatever the config says, is a tensor of its own.
    """
    model = planted(case)
    head, stream = model.tied or ("", "")
    if stream not in model.rotatable:
        return

    words = rf"'{head}' is tied .*untie: true.*residual: \w*permutation"
    embeddings = model.untied.architecture.named()[head].tied
    for tensors in (model.state, model.untied.state):
        tied = tensors, model.config
        embedding = next(tensors[name] for name in embeddings if name in tensors)
        if not torch.equal(tensors.get(head, embedding), embedding):
            assert stream in rm.Alignment.random(tied, residual=f"{stream}=rotation").folded
            continue
        with pytest.raises(rm.RotationMergeError, match=words):
            rm.Alignment.random(tied, residual=f"{stream}=rotation")
        assert stream not in rm.Alignment.random(tied, residual="largest", **STILL).folded


@pytest.mark.slow
@by_case
def test_what_one_lacks_may_not_stay_behind(case: Case) -> None:
    """Every tensor with an axis in a local space, left out of either model, is refused, or the model is incomplete."""
    model = planted(case)
    infos = [info for info in model.architecture.tensors() if info.optional]
    local = [i for i in infos if any(part.space.kind != "stream" for axis in i.axes for part in axis.parts)]
    for info in local[:3]:
        other = {key: tensor for key, tensor in model.state.items() if key not in info.names}, model.config
        try:
            rm.average([other])
        except rm.RotationMergeError:
            continue  # refused by itself
        for first, second in ((model.pair, other), (other, model.pair)):
            with pytest.raises(rm.RotationMergeError, match=r"is missing, (anchor|donor) has it|is only in one of"):
                rm.align(first, second, heads="permutation", residual="largest")


QUESTIONABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_parameters.rope_theta": ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "rms_norm_eps": ("llama", {"rms_norm_eps": 1e-3}),
    "max_position_embeddings": ("llama", {"max_position_embeddings": 4096}),
    "hidden_act": ("bert", {"hidden_act": "gelu_new"}),
    "tie_word_embeddings": ("t5", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", QUESTIONABLE)
def test_what_makes_a_merge_questionable_is_a_warning(name: str) -> None:
    family, change = QUESTIONABLE[name]
    model = planted(next(case for case in ALL if case.family == family))
    for changes, warned in (({}, False), (change, True)):
        report = rm.align(model.pair, (model.state, {**model.config, **changes}), **STILL).report
        assert any("against" in note and f"'{name}' is " in note for note in report.notes) == warned, report.notes


def test_a_module_that_transformers_read_from_gguf_is_of_floats(tmp_path: Path) -> None:
    """Its config names the file's codes, its weights are none, and it is written without; codes that it kept are
    refused as any others."""
    model = planted(next(case for case in ALL if case.family == "llama"))
    config = {**model.config, "quantization_config": {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf"}}
    donor = model.twin(), config
    moved = rm.align((model.state, config), donor).apply(donor)
    assert all(torch.allclose(moved[name], tensor) for name, tensor in model.state.items())
    moved.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {**model.state, "model.layers.0.mlp.up_proj.weight": torch.zeros(48, 36, dtype=torch.uint8)}
    with pytest.raises(rm.RotationMergeError, match=r"quantised \(uint8"):
        rm.align((kept, config), donor)


def test_residual_by_stream_and_the_largest() -> None:
    """Each stream by its own group, outputs kept."""
    model = planted(next(case for case in ALL if case.class_name == "Qwen2_5_VLForConditionalGeneration"))
    first, second = admitted = model.architecture.stream_groups
    assert [admitted[name][-1] for name in (first, second)] == ["rotation"] * 2
    for asked, wanted in (("largest", "rotation"), (f"{first}=permutation", f"{first}=permutation")):
        report = rm.align(model.pair, model.pair, residual=asked, **STILL).report
        assert yaml.safe_load(report.recipe)["residual"] == wanted
    other = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.state.items()}
    alignment = rm.align((other, model.config), model.pair, residual="largest", heads="permutation")
    assert model.differs(alignment.apply(model.pair).state_dict()) <= 1e-9


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)
def test_the_unknown_may_not_stay_while_the_stream_moves(case: Case) -> None:
    """What an architecture file does not name, which recipes alone admit."""
    model = planted(case)
    size = next(iter(model.architecture.streams.values())).sizes["size"]
    groups, moving = model.architecture.stream_groups.values(), rm.AlignConfig(residual="permutation")
    for shape, refused in (((size, 3), True), ((size + 1,), False)):
        state = {**model.state, "surplus.weight": torch.zeros(shape)}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        architecture = resolve(model.config, list(state), "model", keep_unknown=True)
        one = described("model", model.config, architecture, shapes)
        assert check_pair(one, one, rm.AlignConfig()).notes == (UNKNOWN,)
        if refused and all("permutation" in admitted for admitted in groups):
            with pytest.raises(rm.RotationMergeError, match=r"surplus\.weight.*would not move with"):
                check_pair(one, one, moving)
            assert check_pair(one, one, moving, excluded=lambda name: "surplus" in name).streams


# --- layers that predict further tokens (MTP): they stay while their stream does


@pytest.mark.parametrize("residual", ["none", "permutation"])
@pytest.mark.parametrize(("family", "further"), [("qwen3_5", "mtp.fc.weight"), ("deepseek", "model.layers.2.eh_proj")])
def test_layers_that_predict_further_tokens_stay_while_their_stream_does(
    family: str, further: str, residual: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`align` copies what transformers does not read; where the stream moves, it says that it leaves it out.

    In Python as well; nor need the other model have it. `carry` turns nothing.
    """
    model = planted(next(case for case in ONE if case.family == family))
    whole, moves, twin = {further: torch.eye(4, dtype=torch.float64)}, residual != "none", model.twin(residual=residual)
    donor, base = (twin | whole, model.config), (model.state | whole, model.config)
    alignment = rm.align(model.pair, donor, residual=residual)
    aligned = alignment.apply(donor)
    assert rm.transfer(donor, donor, base, residual=residual).keys() == donor[0].keys()
    assert aligned.keys() == (model.state if moves else donor[0]).keys()
    assert model.differs({name: aligned[name] for name in model.state}) <= 1e-9
    paths = [write_state(x, model.folder, tmp_path / n) for n, x in (("a", model.state), ("b", donor[0]))]
    output = output_of("align", *paths, tmp_path / "out", "--residual", residual, "--no-verify")
    card = (tmp_path / "out" / "README.md").read_text()
    assert state(tmp_path / "out").keys() == aligned.keys()
    words = f"Left out, because the model does not read them: {further}."
    for notes in (alignment.report.notes, aligned.notes, caplog.messages, output, card):
        assert (words in notes) == moves


def test_no_family_lacks_an_entry_for_layers_that_predict_further_tokens() -> None:
    """Those whose classes in transformers ignore such layers on loading have an entry `dropped`, and no others."""
    for spec in shipped().values():
        classes = (getattr(transformers, name, None) for name in spec.classes)
        patterns = {name for cls in classes for name in getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or []}
        assert any("mtp" in name or "layers" in name for name in patterns) == bool(spec.dropped), spec.family


@pytest.mark.parametrize("spec", [spec for spec in shipped().values() if spec.dropped], ids=lambda spec: spec.family)
def test_recipes_average_layers_that_predict_further_tokens_while_streams_stay(
    spec: ArchitectureSpec, tmp_path: Path
) -> None:
    """Where all models have them; else the anchor's stay. Moved streams leave them out, and the report says so."""
    model = planted(next(case for case in ONE if case.family == spec.family))
    further = spec.dropped[0].format(**model.config) + "eh_proj.weight"
    values = {"anchor": 1.0, "donor": 3.0, "lacking": None}
    folders = {
        name: write_state(
            {**model.state, **({} if value is None else {further: torch.full((4, 4), value)})},
            model.folder,
            tmp_path / name,
        )
        for name, value in values.items()
    }
    twin = write_state(
        {**model.twin(residual="permutation"), further: torch.ones(4, 4)}, model.folder, tmp_path / "twin"
    )
    anchor, donor, lacking = folders.values()
    rows: list[tuple[float | None, str, tuple[Path, Path], dict[str, Any]]] = [
        (2.0, "linear", (anchor, donor), STILL),
        (1.0, "linear", (anchor, lacking), STILL),
        (None, "linear", (lacking, donor), STILL),
        (3.0, "task_arithmetic", (anchor, donor), {**STILL, "lambda": 2.0}),
        (1.0, "linear", (anchor, twin), {"residual": "permutation"}),
        (None, "linear", (anchor, donor), {"residual": "rotation", "untie": True}),
    ]
    tried = rows[: {"qwen3_5": None, "deepseek": 3}.get(spec.family, 1)]
    for number, (expected, delegate, models, options) in enumerate(tried):
        recipe = recipe_for(delegate, *models, **options)
        out = tmp_path / str(number)
        result = merged(recipe, out)
        assert result.keys() - {further} == model.state.keys() | (result.keys() & {"lm_head.weight"})
        assert (float(result[further].mean()) if further in result else None) == expected
        notes = json.loads((out / "rotation_merge.json").read_text())["notes"]
        assert (f"Left out, because the model does not read them: {further}." in notes) == (expected is None)
        words = f"Layers that predict further tokens are not merged, but the anchor's: {further}."
        assert (words in notes) == (expected == 1.0 and models[1] != lacking)
        lost = [defect.what for defect in check_folder(str(out), [*map(str, models)]) if defect.kind == "lost tensors"]
        assert [further in what for what in lost] == [True] * (expected is None)
    assert float(rm.average([str(anchor), str(donor)])[further].mean()) == 2
    assert float(rm.average([str(anchor), str(lacking)])[further].mean()) == 1
    assert further not in rm.average([str(lacking), str(anchor)])


def test_carrying_changes_layers_that_predict_further_tokens_while_no_stream_moves() -> None:
    """Else the new base's stay, and a note says so."""
    model, name = planted(next(case for case in ONE if case.family == "qwen3_5")), "mtp.fc.weight"

    def holding(value: float | None, state: dict[str, torch.Tensor], size: int = 4) -> Any:
        layers = {} if value is None else {name: torch.full((size, size), value, dtype=torch.float64)}
        return {**state, **layers}, model.config

    old, tuned, new = (holding(value, model.state) for value in (1.0, 3.0, 10.0))
    moved, lacking = holding(10.0, model.twin(residual="permutation")), holding(None, model.state)
    words = f"Its layers that predict further tokens were not carried: {name}."
    rows: list[tuple[Any, Any, Any, float | None, bool]] = [
        (tuned, old, new, 12, False),
        (lacking, old, new, 10, False),
        (tuned, lacking, new, 10, True),
        (holding(3.0, model.state, 5), old, new, 10, True),
        (tuned, old, lacking, None, True),
        (tuned, old, moved, 10, True),
    ]
    for fine, origin, base, expected, noted in rows:
        carried = rm.transfer(fine, origin, base, residual="permutation")
        assert (float(carried[name].mean()) if name in carried else None) == expected
        assert (words in carried.notes) == noted
    assert float(rm.Delta.between(old, tuned).state_dict()[name].mean()) == 2


def stages(first: dict[str, Any], second: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """What `mergekit-multi` writes in several shards: a stage, and a merge that names it."""
    documents = [{"name": "stage", **first, "dtype": "bfloat16"}, {**second, "dtype": "bfloat16"}]
    done = mergekit_multi(documents, folder, "--out-shard-size", "20000")
    assert done.exit_code == 0, done.output
    assert len(list((folder / "out").glob("*.safetensors"))) > 1
    return state(folder / "out")


def in_shards(tensors: dict[str, torch.Tensor], config: dict[str, Any], where: Path) -> Path:
    """A model in bfloat16 and several files."""
    rm.average([(tensors, config)]).to(torch.bfloat16).save_pretrained(where, max_shard_size="20K")
    assert len(list(where.glob("*.safetensors"))) > 1
    return where


def test_layers_that_predict_further_tokens_in_shards_and_stages(tmp_path: Path) -> None:
    """In bfloat16; doctor finds them missing in a merge whose recipe names parents that have them."""
    model, name = planted(next(case for case in ONE if case.family == "qwen3_5")), "mtp.fc.weight"
    anchor, donor = (
        in_shards({**model.state, name: torch.full((4, 4), value)}, model.config, tmp_path / str(value))
        for value in (1.0, 3.0)
    )
    result = stages(
        recipe_for("linear", anchor, donor, **STILL), recipe_for("linear", anchor, "stage", **STILL), tmp_path
    )
    assert (result[name].dtype, float(result[name].mean())) == (torch.bfloat16, 1.5)
    folded = tmp_path / "folded"
    assert name not in merged(recipe_for("linear", anchor, donor, residual="rotation", untie=True), folded)
    assert f"has {name}, which predict further tokens (MTP)" in output_of("doctor", folded)


def test_a_head_that_differs_in_shards_and_stages(tmp_path: Path) -> None:
    """In bfloat16: refused without `untie`, kept with it."""
    model = planted(next(case for case in ALL if case.family == "llama" and planted(case).tied))
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    anchor = in_shards(model.state, model.config, tmp_path / "anchor")
    values = 2 * model.state[embedding]
    donor = in_shards({**model.state, head: values}, model.config, tmp_path / "donor")
    tied = {**json.loads((donor / "config.json").read_text()), "tie_word_embeddings": True}
    (donor / "config.json").write_text(json.dumps(tied))
    assert "untie: true" in error_of_merge(recipe_for("linear", anchor, donor, **STILL), tmp_path / "refused")
    first, second = (recipe_for("linear", anchor, other, untie=True, **STILL) for other in (donor, "stage"))
    result = stages(first, second, tmp_path)
    exact = values.to(torch.bfloat16).float() * 0.625  # (1 + (1 + 2) / 2) / 2 of the embedding
    torch.testing.assert_close(result[head].float(), exact, atol=0.0, rtol=0.01)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


# --- every path asks


class Asked(rm.RotationMergeError):
    """check_pair was asked."""


CARRY = "carry donor --from donor --to anchor out"
LINES = {
    **{name: line for name, line in READERS.items() if name not in ("evaluate", "measure", "polish", "verify")},
    "merge": "merge anchor donor out --data self --samples 8 --length 8 --batch-size 4 --budget 1m",
    "align --alignment": "align anchor donor --alignment out",
    "inspect RECIPE": "inspect recipe.yml",
    "doctor RECIPE": "doctor recipe.yml",
    "carry": CARRY,
    "carry --alignment": f"{CARRY} --alignment map",
    "carry --carry refit": f"{CARRY} --carry refit --data samples.jsonl --samples 16",
}
"""Commands that match two models."""

OPTION = "delegate: linear"
RECIPES = {
    "recipe": (OPTION, OPTION),
    "recipe, residual": (OPTION, f"{OPTION}\n  residual: permutation"),
    "recipe, mean": (OPTION, f"{OPTION}\n  anchor: mean"),
    "recipe, alignment": (DONORS, "{weight: 0.5, alignment: map}\np"),
    "recipe, finetuned_from": (DONORS, "{weight: 0.5, finetuned_from: donor}\np"),
    "recipe, finetuned_from, alignment": (DONORS, "{weight: 0.5, finetuned_from: donor, alignment: map}\np"),
}
"""What stands in the good recipe in the place of something."""

APART = {"verify", "polish", "evaluate", "measure", "lora", "push", "demo"}
"""Commands that match nothing themselves."""


def test_every_command_is_a_path_or_matches_nothing() -> None:
    assert {line.split()[0] for line in LINES.values()} == COMMANDS.keys() - APART


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Llamas, an alignment file of them, samples, a recipe."""
    folder = tmp_path_factory.mktemp("good")
    anchor, donor = (make("llama", folder / name, seed) for seed, name in enumerate(("anchor", "donor")))
    rm.align(anchor, donor).save(folder / "map")
    rows = [{"input_ids": list(range(i, i + 8))} for i in range(16)]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "recipe.yml").write_text(RECIPE)
    return folder


def asked(path: str) -> Any:
    if path in LINES:
        return run(*LINES[path].split())
    return (
        mergekit_yaml(RECIPE.replace(*RECIPES[path]), Path("out")) if path in RECIPES else rm.align("anchor", "donor")
    )


@pytest.mark.parametrize("path", [*LINES, *RECIPES, "api"])
def test_every_path_into_matching_asks(path: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a `check_pair` that refuses all options, nothing is matched, and its one line is what the user sees.

    Nor with one that lets two models meet, and refuses to match any of their spaces.
    """

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"{path} matches without asking")

    for group in (Monomials, Rotations):
        monkeypatch.setattr(group, "solve", never)
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    matches = "alignment" not in path.replace("align --alignment", "")
    for whatever in (True, False) if matches else (True,):

        def refuse(options: rm.AlignConfig, _: Any, whatever: bool = whatever) -> None:
            if whatever or options != NOTHING:
                raise Asked("refused by the test")

        monkeypatch.setattr(rm.AlignConfig, "check_layers", refuse)
        try:
            result = asked(path)
        except Asked:
            result = None
        assert result is None or (result.exit_code != 0 and "refused by the test" in result.output), result.output
        assert not Path("out").exists()
