"""docs/add-architecture.md, followed to the letter with a made-up architecture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import models
import pytest
import test_architectures as contract
import test_laws
import transformers
from measure import residual_groups
from subjects import Pair, subject_of
from tiny_models import Case, cases
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from rotation_merge.architecture import find
from rotation_merge.architecture.registry import FOLDERS

DOCS = Path(__file__).parents[2] / "docs"
ADDING = (DOCS / "add-architecture.md").read_text(encoding="utf-8")
ARCHITECTURE, CONFIG = re.findall(r"```json\n(.*?)```", ADDING, flags=re.DOTALL)


class QuokkaConfig(transformers.PretrainedConfig):
    model_type = "quokka"

    def __init__(self, **sizes: Any) -> None:
        for name in ("vocab_size", "context", "width", "inner", "depth", "heads", "groups"):
            setattr(self, name, sizes.pop(name, 4))
        super().__init__(**{**sizes, "tie_word_embeddings": False})


class Layer(nn.Module):
    def __init__(self, c: QuokkaConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.size = c.heads, c.groups, c.width // c.heads
        self.norm1, self.norm2 = nn.RMSNorm(c.width, eps=1e-6), nn.RMSNorm(c.width, eps=1e-6)
        self.query = nn.Linear(c.width, c.width, bias=False)
        self.keyvalue = nn.Linear(c.width, 2 * c.groups * self.size, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)
        self.up, self.down = nn.Linear(c.width, c.inner), nn.Linear(c.inner, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm1(x)
        query = self.query(read).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        pair = self.keyvalue(read).unflatten(-1, (2, self.groups, self.size)).permute(2, 0, 3, 1, 4)
        key, value = pair.repeat_interleave(self.heads // self.groups, dim=2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class QuokkaForCausalLM(transformers.PreTrainedModel):
    config_class: ClassVar[Any] = QuokkaConfig

    def __init__(self, config: QuokkaConfig) -> None:
        super().__init__(config)
        words, places = (nn.Embedding(size, config.width) for size in (config.vocab_size, config.context))
        blocks, last = nn.ModuleList(Layer(config) for _ in range(config.depth)), nn.RMSNorm(config.width, eps=1e-6)
        self.body = nn.ModuleDict({"words": words, "places": places, "blocks": blocks, "last": last})
        self.out = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        x = self.body["words"](input_ids) + self.body["places"].weight[: input_ids.shape[1]]
        for block in self.body["blocks"]:
            x = block(x)
        return CausalLMOutput(logits=self.out(self.body["last"](x)))


@pytest.fixture(params=["grouped", "ungrouped"])
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The page's two files in place, and the class where the suite looks for it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "quokka.json").write_text(ARCHITECTURE, encoding="utf-8")
    (tmp_path / "quokka.json").write_text(CONFIG, encoding="utf-8")
    monkeypatch.setenv(FOLDERS, str(tmp_path / "mine"))
    monkeypatch.setattr(models.transformers, "QuokkaForCausalLM", QuokkaForCausalLM, raising=False)
    transformers.AutoConfig.register("quokka", QuokkaConfig, exist_ok=True)
    found = {case.name: case for case in cases(tmp_path / "quokka.json")}
    assert set(found) == {"grouped", "ungrouped"}
    return found[request.param]


def test_quokka_is_known_only_once_it_is_added(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"architectures": ["QuokkaForCausalLM"], "model_type": "quokka"}
    assert getattr(find(config), "family", None) == "quokka"
    monkeypatch.delenv(FOLDERS)
    assert find(config) is None


def test_quokka_passes_the_contract(case: Case) -> None:
    contract.test_every_tensor_is_covered_and_every_axis_labelled(case)
    subject = subject_of(case)
    for residual in ("", *residual_groups(subject)):
        assert test_laws.function(subject, Pair(case.name, "function", residual, 1e-9, 12, "")) <= 1e-9
        assert test_laws.planted(subject, Pair(case.name, "planted", residual, 1e-5, 0, "")) <= 1e-5


def test_quokka_got_wrong_is_found_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    contract.test_a_wrong_file_is_found_out(case, monkeypatch)


def test_the_page_names_every_word_and_role() -> None:
    from rotation_merge.architecture.schema import OUTSIDE
    from rotation_merge.symmetry import ROLES

    for word in (*OUTSIDE, *(role for roles in ROLES.values() for role in roles)):
        assert f"`{word}`" in ADDING, word
