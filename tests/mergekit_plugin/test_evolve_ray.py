"""mergekit-evolve itself, with a local task: recipes and merges in its Ray workers, on tiny checkpoints.

Collected where the extra `evolve` is installed (`conftest.py`): `pip install -e '.[evolve]'`, which CI does not do.
Takes minutes on two cores. What stands between mergekit 0.1.5 and a machine without a GPU is worked around in
`evolve_driver.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS, TEXTS, run
from plugin_support import merged, relative_distances, state, twin
from recipe_models import stand_in
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "evolve.md"
RECIPE = TESTS.parent / "recipes" / "evolve-after-align.yml"
SMALL = ["--num-gpus", "1", "--no-merge-cuda", "--max-fevals", "3", "--force-population-size", "3"]
"""For the workers of `evolve_driver.py`; one generation of three candidates, sometimes one more."""

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the page's task and 64 questions: which of four pieces of text goes on from here?"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "my_local_task.yaml").write_text(shown("tasks/my_local_task.yaml"), encoding="utf-8")
    (tmp_path / "tasks" / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions()))
    return tmp_path


def shown(title: str) -> str:
    """A block of the page by its title."""
    found = re.search(rf'^```yaml title="{title}"\n(.*?)^```$', PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name} shows no {title}"
    return found[1]


def questions(count: int = 64) -> Iterator[dict[str, object]]:
    text = (TEXTS / "english.txt").read_bytes().decode("ascii", "ignore")
    pieces = [text[i * 80 : i * 80 + 80] for i in range(count)]
    for i, piece in enumerate(pieces):
        choices = [pieces[(i + 7 * k) % count][64:] for k in range(4)]
        place = i % 4
        choices[0], choices[place] = choices[place], choices[0]
        yield {"text": piece[:64], "choices": choices, "answer": place}


def accuracy(model: Path) -> float:
    """What lm_eval is expected to find, without lm_eval."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "llama-0")
    right = []
    for question in questions():
        ids = torch.tensor([tokenizer(f"{question['text']}{choice}").input_ids for choice in question["choices"]])
        assert ids.shape == (4, 80)
        with torch.no_grad():
            logs = network(ids).logits.float().log_softmax(-1)
        scores = logs[:, 63:-1].gather(-1, ids[:, 64:, None]).sum((1, 2))
        right.append(int(scores.argmax()) == question["answer"])
    return sum(right) / len(right)


def evolve(*arguments: object) -> str:
    """mergekit-evolve in the current folder; its output."""
    short = tempfile.mkdtemp(prefix="ray")  # Ray's sockets need a short path
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "HF_HOME": str(Path.cwd() / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": short,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(TESTS / "evolve_driver.py"), *map(str, arguments), *SMALL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    finally:
        shutil.rmtree(short, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OPTIMIZATION COMPLETE" in done.stdout
    return done.stdout


def scores() -> list[tuple[float, float]]:
    """The lowest and the highest score of each generation, from the log that CMA-ES keeps."""
    (log,) = Path("outcmaes").glob("*fit.dat")
    rows = [line.split() for line in log.read_text().splitlines() if not line.startswith("%")]
    assert rows
    return [(-float(row[7]), -float(row[5])) for row in rows]


@pytest.mark.parametrize("strategy", ["pool", "buffered", "serial"])
def test_workers_merge_aligned_models(folder: Path, strategy: str):
    """The donor is the anchor, rotated and permuted: what workers merge must be as good as the anchor."""
    anchor = CHECKPOINTS / "llama-0-english"
    donor = twin(anchor, folder / "donor", heads="none")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(anchor / file, donor / file)
    genome = shown("search.yml").replace("org/anchor", str(anchor)).replace("org/donor", str(donor))
    Path("search.yml").write_text(genome, encoding="utf-8")
    checked = run("check", "search.yml")
    assert checked.exit_code == 0, checked.output

    output = evolve("search.yml", "--storage-path", "search", "--task-search-path", "tasks", "--strategy", strategy)

    found = yaml.safe_load(Path("search/best_config.yaml").read_text())
    assert found["merge_method"] == "rotation_merge"
    assert (folder / "search/final_model/rotation_merge.json").exists()
    assert max(relative_distances(state(folder / "search/final_model"), state(anchor)).values()) <= 0.02  # bfloat16
    halves = [{"model": str(model), "parameters": {"weight": 0.5}} for model in (anchor, donor)]
    merged({"merge_method": "linear", "models": halves, "dtype": "bfloat16"}, folder / "plain")
    aim, plain = accuracy(anchor), accuracy(folder / "plain")
    assert plain <= aim - 0.2, "without alignment the merge must fail, or this test shows nothing"
    for lowest, highest in scores():
        assert aim - 0.08 <= lowest <= highest <= aim + 0.08
    assert f"Best cost: {-max(high for _, high in scores()):.4f}" in output


def test_the_recipe_is_searched_as_its_comment_says(folder: Path):
    """Both commands of the comment, on tiny checkpoints of the same architecture."""
    text = RECIPE.read_text(encoding="utf-8")
    models = folder / "models"
    align, search = (shlex.split(line) for line in re.findall(r"^#     (\S.+)$", text, re.MULTILINE))
    for name in re.findall(r"Qwen/\S+", " ".join(align)):
        tiny = stand_in(name, models)
        settings = json.loads((tiny / "tokenizer_config.json").read_text())
        settings["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        (tiny / "tokenizer_config.json").write_text(json.dumps(settings))
        text, align = text.replace(name, str(tiny)), [word.replace(name, str(tiny)) for word in align]
    Path("recipes").mkdir()
    Path("recipes", RECIPE.name).write_text(text, encoding="utf-8")
    assert (align[0], search[0]) == ("rotation-merge", "mergekit-evolve")
    aligned = run(*align[1:])
    assert aligned.exit_code == 0, aligned.output

    evolve(*search[1:])

    found = yaml.safe_load(Path("search/best_config.yaml").read_text())
    weights = [source["parameters"]["weight"] for source in found["slices"][0]["sources"]]
    assert found["merge_method"] == "linear"
    assert len(weights) == 2
    tensors = state(folder / "search/final_model")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: tuple(t.shape) for name, t in state(folder / "aligned-coder").items()
    }
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
