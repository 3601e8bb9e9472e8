"""The commands on real (shipped) and tiny checkpoints: output on a pipe, JSON, exit codes, what is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import CHECKPOINTS, COMMANDS, parsed, run
from cli_support import output_of as output
from plugin_support import make, recipe_for, state, write_recipe
from spoiling import config
from transformers import AutoTokenizer, LlamaForCausalLM

import rotation_merge as rm
from rotation_merge.diagnose import check, sources
from rotation_merge.model.folder import ShardReader

Pair = tuple[Path, Path]
VITS = CHECKPOINTS / "vit-0", CHECKPOINTS / "vit-1"
LLAMAS = CHECKPOINTS / "llama-0-english", CHECKPOINTS / "llama-0-c"
LOADED = "print({'torch', 'mergekit', 'transformers'} & {*sys.modules})"
MAIN = "from rotation_merge.cli import main; main()"
TYPED = {"_ROTATION_MERGE_COMPLETE": "bash_complete", "COMP_WORDS": "x align --heads s", "COMP_CWORD": "3"}


def test_every_command_has_help_with_an_example() -> None:
    for name in COMMANDS:
        assert all(word in output(name, "-v", "--help") for word in ("Example", "--json"))


@pytest.mark.parametrize(
    ("code", "variables", "words"),
    [
        (f"from rotation_merge.cli import app, {', '.join(COMMANDS)}; {LOADED}", {}, "set()\n"),
        (MAIN, {"_ROTATION_MERGE_COMPLETE": "bash_source"}, "complete"),
        (MAIN, TYPED, "plain,spectral\n"),
    ],
)
def test_help_is_quick_and_completion_is_clicks(code: str, variables: dict[str, str], words: str) -> None:
    """Nothing heavy is imported for help; words of options are completed."""
    environment = {"PATH": "/usr/bin:/bin", **variables}
    shell = [sys.executable, "-c", f"import sys; {code}"]
    assert words in subprocess.run(shell, capture_output=True, text=True, env=environment).stdout


TOLD = f"""import rotation_merge
for line in sys.argv[1:]:
    sys.argv = line.split()
    try:
        if sys.argv[0] == "rotation-merge":
            {MAIN}
        from mergekit.scripts import run_yaml
    except SystemExit:
        print({{'torch', 'transformers'}} & {{*sys.modules}})
"""
EARLY = {
    "check half.yml": "not valid YAML",
    "lora a b out --method tis": "did you mean 'ties'?",
    "lora here here out --method ties -p lambad=1": "'ties' has no parameter 'lambad'; did you mean 'lambda'?",
    "lora here here out --weights 1,2,3": "3 weights for 2 adapters; give one weight for each adapter",
    "lora here here out --energy 0.5": "'energy' has no effect with rank not given; choose rank auto",
    "evaluate here --data demo:nothing": "the demo has no data 'nothing'; known: demo:digits, demo:python",
    "lora ./nowhere here out": "./nowhere: there is no LoRA adapter",
    "doctor ./nowhere": "./nowhere: no such file or directory",
    "evaluate ./nowhere --data self": "./nowhere: no such directory",
    "barrier ./nowhere ./nowhere --data self": "./nowhere: no such directory",
    **{
        f"{line} ./gone.txt": "./gone.txt: no such file"
        for line in (
            *("evaluate here --data", "barrier here here --data", "verify here here --data"),
            *("merge here here out --data", "measure here --out made --data", "polish here out --teachers here --data"),
            *("carry here --from here --to here out --data", "align here here out --learn --data"),
            *("carry here --from here --to here out --alignment", "barrier here here --data self --alignment"),
            *("inspect --prove", "inspect --config"),
        )
    },
    "barrier here here --data self --compare x=./gone": "./gone: no such file",
    "carry here --from here --to here full": "full: already exists",
}
"""What commands say of arguments that need no model; `here` is an empty folder."""


@pytest.mark.parametrize(
    "lines",
    [
        {f"rotation-merge {line}": words for line, words in EARLY.items()},
        {"mergekit-yaml half.yml out": "half.yml, line 3, column 1: not valid YAML"},
        {"mergekit-yaml misspelt.yml out": "misspelt.yml, line 2, column 1, base_mdoel: there is no key"},
    ],
)
def test_what_needs_no_model_is_told_before_torch_is_imported(lines: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "half.yml").write_text("merge_method: rotation_merge\nmodels: [\n")
    (tmp_path / "misspelt.yml").write_text("merge_method: rotation_merge\nbase_mdoel: a\n")
    for folder in ("here", "full/of"):
        (tmp_path / folder).mkdir(parents=True)
    program = [sys.executable, "-c", f"import sys\n{TOLD}", *lines]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert [words for words, line in zip(lines.values(), told, strict=True) if words not in line] == []
    assert done.stdout.split() == ["set()"] * len(lines)


def test_python_has_the_answers_of_commands(pair: Pair, tmp_path: Path) -> None:
    """As data, and as the text that a command prints, of paths, too."""
    recipe = write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml")
    calls = {"check": [recipe], "inspect": [pair[0]], "doctor": [pair[0]], "verify": pair, "push": [pair[0], "a/b"]}
    for name, arguments in calls.items():
        function, done = getattr(rm, name), run(name, *arguments, "--json")
        if name == "push":
            with pytest.raises(rm.RotationMergeError, match="no such file"):
                function(*arguments)
            continue
        answer = function(*arguments)
        assert json.loads(answer.text(as_json=True)) == json.loads(done.stdout)
        assert (f"{answer}\n", answer.code) == (run(name, *arguments).stdout, done.exit_code)
    assert {"slerp", "wudi"} <= {entry["name"] for entry in rm.inspect(methods=True).data["delegates"]}
    assert rm.inspect(str(pair[0]), fingerprint=True).data == parsed("inspect", pair[0], "--fingerprint")
    with pytest.raises(rm.RotationMergeError, match="no model, recipe or file is given"):
        rm.inspect()


def test_one_word_is_excluded_as_one(pair: Pair) -> None:
    refitted, anchor = rm.refit(pair, [{"input_ids": torch.arange(40).view(2, 20)}], exclude="mlp"), state(pair[0])
    maps = {name for name in anchor if "proj" in name}
    assert {name for name in maps if torch.equal(refitted[name], anchor[name])} == {n for n in maps if "mlp" in n}


# --- check -----------------------------------------------------------------------------------------------------------

RECIPE = """merge_method: rotation_merge
base_model: ANCHOR
models:
  - model: ANCHOR
    parameters: {weight: 0.5}
  - model: DONOR
    parameters: {weight: 0.5}
parameters:
  # of the merge
  attention: rotatoin
  delegate: linear
  layers: 3-1
  colour: red
dtype: float23
base_modle: x
"""
FAULTS = {
    "15:1: ": "did you mean 'base_model'?",
    "10:3: parameters.attention: ": "did you mean 'rotation'?",
    "12:3: ": "it must be all, or ranges",
    "13:3: ": "there is no parameter 'colour'",
    "14:1: ": "did you mean 'float32'?",
}
"""The first one is printed while mergekit is still being imported."""


def test_all_faults_are_named_at_once_at_their_places(pair: Pair, tmp_path: Path) -> None:
    """Each once, and in JSON by its parts."""
    text = RECIPE.replace("ANCHOR", str(pair[0])).replace("DONOR", str(pair[1]))
    path = write_recipe(text, tmp_path / "recipe.yml")
    *lines, last = output("check", path, code=1).splitlines()
    lines = [line for line in lines if not line.endswith("(a note)")]
    assert last == f"{len(FAULTS)} faults"
    for line, (place, words) in zip(lines, FAULTS.items(), strict=True):
        assert line.startswith(f"{path}:{place}"), line
        assert words in line
    first = next(f for f in json.loads(output("check", path, "--json", code=1))["faults"] if f["error"])
    assert (first["line"], first["column"], first["where"]) == (10, 3, "parameters.attention")
    assert first["remedy"]


def test_models_are_held_against_the_recipe(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are misspelt, groups that the architecture lacks, heads that are not stored."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pair[0], "models/donor-7b")
    bert = make("bert", tmp_path / "bert")
    headless = make("llama", tmp_path / "headless", tie_word_embeddings=True)  # which merges: the head is the embedding
    config(headless, tie_word_embeddings=False)()
    for models, more, code, words in (
        ((pair[0], "models/doner-7b"), {}, 0, ("did you mean 'models/donor-7b'?", "if the models that were not")),
        ((bert, bert), {"residual": "rotation"}, 1, ("the largest it admits is 'residual: permutation'",)),
        ((pair[0], headless), {}, 0, ("1 tensors of LlamaForCausalLM are not stored: lm_head.weight",)),
    ):
        text = output("check", write_recipe(recipe_for("linear", *models, **more), tmp_path / "r.yml"), code=code)
        assert all(word in text for word in words), text


def test_faults_are_found_without_weights(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what says which preset fits, and that a donor is the base, looks at some, where there are no faults."""
    monkeypatch.setattr(ShardReader, "__call__", lambda *_: pytest.fail("a weight was read"))
    output("check", write_recipe(recipe_for("linear", *pair, colour="red"), tmp_path / "recipe.yml"), code=1)
    monkeypatch.setattr(check, "likeness", lambda *_: 1.0)
    monkeypatch.setattr(sources, "equality", lambda *_: "")
    output("check", write_recipe(recipe_for("linear", *pair), tmp_path / "recipe.yml"))


# --- align, verify, barrier, demo ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_output_is_a_normal_checkpoint_that_computes_the_same(tmp_path: Path) -> None:
    out = tmp_path / "aligned"
    output("align", *LLAMAS, out, "--residual", "rotation", "--heads", "permutation", "--dtype", "float64")
    assert {"config.json", "tokenizer.json", "README.md", "rotation_merge.json"} <= {x.name for x in out.iterdir()}
    LlamaForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("ab")["input_ids"] == [97, 98]
    for how in ((), ("--float64",)):
        output("verify", LLAMAS[1], out, *how)
        output("verify", LLAMAS[0], out, *how, code=1)


def test_the_twin_comes_back_to_the_anchor_in_shards(pair: Pair, tmp_path: Path) -> None:
    """Without an output it says only how far apart two models are."""
    facts = parsed("align", *pair, tmp_path / "out", "--heads", "permutation", "--shard-size", "20K")
    assert facts["after"] < 1e-3 < 0.1 < facts["before"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    torch.testing.assert_close(state(tmp_path / "out"), state(pair[0]), rtol=1e-3, atol=1e-3)
    distances = parsed("align", *pair, "--heads", "permutation")
    assert (distances["after"], distances["before"]) == pytest.approx((facts["after"], facts["before"]), abs=1e-6)
    assert {row["space"] for row in distances["spaces"]} == {"attn", "ffn"}
    assert "share their coordinates" in output("align", *LLAMAS)
    assert "'--residual largest' aligns it, too" in output("align", *VITS)


def test_models_that_differ_and_samples_to_compare_on() -> None:
    assert "differ" in output("verify", *VITS, code=1)
    facts = parsed("verify", VITS[0], VITS[0], "--data", "demo:digits", "--float64")
    assert (facts["same"], facts["absolute"]) == (True, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_a_barrier_of_two_models_and_of_a_recipe_on_several_texts(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plot = tmp_path / "b.svg"
    options = ("--data", "demo:digits", "--points", 3, "--limit", 64, "--save", tmp_path, "--plot", plot)
    (facts,) = parsed("barrier", *VITS, *options)
    plain, aligned = facts["curves"]
    assert plain["loss"][::2] == pytest.approx(aligned["loss"][::2], abs=1e-3)
    assert facts["measures"]["plain"]["barrier"] > 1
    assert plot.read_text().startswith("<?xml")
    assert (tmp_path / "barrier.json").exists()
    (tmp_path / "held-out.txt").write_text("def f(x):\n    return x + 1\n" * 40)
    texts = ("--data", tmp_path / "held-out.txt", "--data", "demo:c", "--limit", 4, "--points", 3)
    text = output("barrier", write_recipe(recipe_for("linear", *LLAMAS), tmp_path / "recipe.yml"), *texts)
    assert text.count("Barrier:") == 2
    assert "held-out.txt (next token" in text
    assert "demo:c (next token, 4 examples)" in text


@pytest.mark.slow
def test_the_demo_shows_the_twin_come_back(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (facts,) = parsed("demo", "--only", "twin", "--keep", tmp_path)["results"]
    assert facts["merges"]["plain"] < 0.5
    assert facts["merges"]["whole"] == pytest.approx(facts["parents"][0], abs=0.005)
    assert (tmp_path / "twin" / "whole" / "rotation_merge.json").exists()
