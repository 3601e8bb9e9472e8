"""Bad values of what merges, refits, polishes, carries and searches: recipes' delegates, and lines of commands."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import torch
from bad_checkpoints import BLOOM, FLOATS, LLAMA
from spoiling import (
    BOTH,
    DONORS,
    WEIGHTS,
    Row,
    Step,
    adapter,
    another,
    both,
    bytes_of,
    call,
    config,
    edit,
    model,
    models,
    put,
    python,
    step,
    tensors,
    tokenizer,
)

import rotation_merge as rm

HALF = "{weight: 0.5}"
STATISTICS = "statistics.safetensors"
MERGE: dict[str, Any] = {"recipe": ("merge",)}
"""Of faults that `check`, which reads no weights and runs nothing, does not find."""


def delegated(delegate: str, donor: str, *words: str, spoil: Step = lambda: None, **more: Any) -> Row:
    """A recipe with another delegate and its options, and with other parameters of the donor."""
    parameters = both(edit("delegate: linear", f"delegate: {delegate}"), edit(DONORS, f"{donor}\np"))
    return Row(f"delegate: {delegate}; donor: {donor}", words, both(spoil, parameters), **{"recipe": BOTH, **more})


def sliced(parameters: str, *words: str, **more: Any) -> Row:
    pairs = "[{model: anchor, layer_range: [0, 1]}, {model: donor, layer_range: [1, 2]}]"
    return models(f"slices: [{{sources: {pairs}}}]\nparameters: {{{parameters}, weight: 0.5}}", *words, **more)


def alone(weight: str, parameters: str, *words: str, **more: Any) -> Row:
    """A recipe of the anchor alone."""
    return models(
        f"models: [{{model: anchor, parameters: {{weight: {weight}}}}}]\nparameters: {{{parameters}}}", *words, **more
    )


@step
def measured() -> None:
    """Statistics beside anchor and donor."""
    for folder in ("anchor", "donor"):
        rm.measure(folder, "samples.jsonl").save(f"{folder}/{STATISTICS}")


def no_numbers(content: bytes) -> bytes:
    """Tensors of NaN behind the same header."""
    start = 8 + int.from_bytes(content[:8], "little")
    return content[:start] + b"\xff" * (len(content) - start)


def of_statistics(delegate: str, place: str, *words: str, spoil: Step = lambda: None) -> Row:
    return delegated(delegate, f"{{weight: 0.5, statistics: {place}}}", *words, spoil=both(measured(), spoil), **MERGE)


NAN = tensors(lambda stored: stored[FLOATS].fill_(torch.nan))
SHORT = put("short.jsonl", '{"input_ids": [3, 4, 5, 6]}\n')
LATE = both(
    tensors(lambda stored: stored["model.embed_tokens.weight"][39].fill_(torch.nan)),
    put("late.jsonl", '{"input_ids": [3, 4, 5, 6]}\n' * 17 + '{"input_ids": [3, 39, 5, 6]}\n'),
)
UNKNOWN = both(*(put(f"{name}/config.json", BLOOM) for name in ("anchor", "donor")))
ELSEWHERE = "under the recipe's 'parameters'"
DONOR_STATISTICS = f"donor/{STATISTICS}"
DELEGATES = [
    sliced("delegate: ot_fusion, data: self", "slices pair layers differently"),
    delegated("ot_fusion", "{weight: 0.5, finetuned_from: anchor}", "a task vector is already in the anchor's"),
    delegated("ot_fusion", "{weight: 0.5, data: self}", "their own 'data'"),
    delegated("ot_fusion", "{weight: -0.5}", "the weights of the models sum to zero", **MERGE),
    alone("0.0", "delegate: regmean", "all weights of tensor", "are zero", **MERGE),
    delegated("wudi", "{weight: -0.5}", "donor: its weight is -0.5", "delegate wudi takes none below 0", **MERGE),
    delegated("refit\n  data: synthetic", HALF, "does not take images", **MERGE),
    delegated("refit\n  data: demo:python\n  targets: own", HALF, "'targets: own' needs different samples for each"),
    delegated("refit\n  ridge: 0.0\n  samples: 1\n  data: short.jsonl", HALF, "do not determine", spoil=SHORT, **MERGE),
    delegated("refit", "{weight: 0.5, finetuned_from: anchor}", "needs whole models"),
    sliced("delegate: refit", "refit runs whole models"),
    alone("0.0", "delegate: refit", "weights are shares", **MERGE),
    alone("1.0", "delegate: refit, start: wudi", "'start: wudi' merges task vectors", **MERGE),
    delegated("regmean", "{weight: -0.5}", "donor: its weight is -0.5", spoil=measured(), **MERGE),
    of_statistics("regmean", f"anchor/{STATISTICS}", "was measured on other weights"),
    of_statistics("regmean", "none.safetensors", "there are no statistics at 'none.safetensors'"),
    of_statistics("regmean", f"donor/{WEIGHTS}", "is not a statistics file"),
    of_statistics(
        "regmean", DONOR_STATISTICS, "cannot be read", spoil=bytes_of(DONOR_STATISTICS, lambda x: x[: len(x) // 2])
    ),
    of_statistics("regmean\n  shrink: 0.8", DONOR_STATISTICS, "NaN", spoil=bytes_of(DONOR_STATISTICS, no_numbers)),
    of_statistics("fisher\n  attention: none", DONOR_STATISTICS, "needs fisher"),
    delegated("regmean", "{weight: 0.5, finetuned_from: donor, carry: refit}", "needs statistics of"),
    delegated("regmean", HALF, "rotation-merge measure anchor --data DATA"),
    delegated("fisher\n  attention: none", HALF, "rotation-merge measure anchor --data DATA --kinds fisher"),
    *(
        delegated(f"{name}\n  unsupported: merge", HALF, f"delegate {name} does not know this", spoil=UNKNOWN, **MERGE)
        for name in ("regmean", "ot_fusion", "refit")
    ),
    delegated("wudi\n  lengths: evn", HALF, "'lengths' is 'evn'", "auto, keep"),
    delegated("wudi\n  ridge: -1", HALF, "'ridge' is -1"),
    delegated("iso", "{weight: 1.0, lambda: 0.5}", "'lambda' has no effect with delegate iso here", ELSEWHERE),
    delegated("ties\n  density: 0.5", "{weight: 1.0, lambda: 0.5}", "'lambda' has no effect with delegate ties here"),
    alone("1.0", "delegate: tsv", "delegate tsv"),
    delegated("tsv\n  ffn: none", HALF, FLOATS, "NaN", spoil=NAN, **MERGE),
]

WORDS = [f"w{number}" for number in range(38)]
OTHER_IDS = both(tokenizer("anchor", "a", "b", *WORDS), tokenizer("donor", "b", "a", *WORDS))
OTHER_TOKENS = "donor: its tokens are not those of anchor"
CLASSES = "BertForSequenceClassification"
POLISH = [
    call("polish anchor out --teachers donor --seed 1", OTHER_TOKENS, spoil=OTHER_IDS),
    python("teacher of other ids", lambda: rm.polish("anchor", ["donor"]), OTHER_TOKENS, spoil=OTHER_IDS),
    call("polish anchor out --teachers donor --samples 2 --data self self", "give --data once"),
    call("polish anchor out --teachers donor --data short.jsonl", "too few to hold one out", spoil=SHORT),
    call(
        "polish anchor out --teachers anchor donor --samples 4",
        "no tokenizer says which of its tokens",
        spoil=another(LLAMA, vocab_size=50),
    ),
    call("polish anchor out --teachers donor --samples 4 --learning-rate 1e30 --length 8", "training gives NaN"),
    call(
        "polish anchor out --teachers donor --data samples.jsonl --samples 8",
        "answers have shape [2, 5]",
        spoil=both(another(CLASSES, "anchor", num_labels=2), another(CLASSES, num_labels=5)),
    ),
]
ANSWERS = [
    *(
        call(line, "answers with NaN", spoil=NAN)
        for line in (
            "measure donor --data samples.jsonl --out out",
            "polish donor out --teachers anchor",
            "polish anchor out --teachers donor --data samples.jsonl",
            "polish anchor out --teachers donor",
        )
    ),
    *(call(f"measure donor --data late.jsonl --kinds {kind}", "NaN", spoil=LATE) for kind in ("gram", "fisher")),
]

TUNED = "{weight: 1.0, finetuned_from: anchor"
LORA = both(adapter("lora", "anchor"), tokenizer("lora", "AB", "new"))
ADDED = both(LORA, tokenizer("anchor", "AB"), tokenizer("donor", "AB", "new"))
NEW_TOKEN = "has 1 token", "(`new`)"
WIDER = another(LLAMA, intermediate_size=64)
NO_PLACE = "its change has no place; add 'untie'"
OWN_HEAD = both(another(LLAMA, "anchor", tie_word_embeddings=True), config(tie_word_embeddings=True))
TIED = partial(model, LLAMA, "tied", 2, tie_word_embeddings=True)
VITS = partial(shutil.copytree, "vit", "vit2")
CARRY = [
    *(
        call(f"carry donor --from anchor --to anchor out {options}", words)
        for options, words in {
            "--carry refit --steps 5": "carry by distil",
            "--data text.txt": "--scale auto",
            "--scale much": "auto, a number",
            "--scale nan": "auto, a number",
            "--carry refit --data nowhere.txt": "nowhere.txt",
            "--carry refit --match-on both --alignment file": "--match-on has no effect",
            "--heads permutation --alignment file": "--heads has no effect",
        }.items()
    ),
    *(
        call(f"carry donor --from anchor --to tied out --residual none --force{options}", NO_PLACE, spoil=TIED)
        for options in ("", " --scale auto", " --carry refit")
    ),
    *(
        call(f"carry donor --from anchor --to anchor out --residual none{options}", NO_PLACE, spoil=OWN_HEAD)
        for options in ("", " --carry refit")
    ),
    python("a head apart", lambda: rm.transfer("donor", "anchor", "anchor", residual="none"), NO_PLACE, spoil=OWN_HEAD),
    *(
        call(f"carry donor --from anchor --to anchor out{options}", "not a fine-tune", spoil=OTHER_IDS)
        for options in ("", " --lora 2")
    ),
    delegated("task_arithmetic", f"{TUNED}, carry: weights}}", "ids than in", "not a fine-tune", spoil=OTHER_IDS),
    call("carry vit --from vit --to vit2 out --carry refit --data synthetic", "carry by weights alone", spoil=VITS),
    delegated("task_arithmetic", f"{TUNED}, carry: refit, steps: 4}}", "carrying by refit takes no steps"),
    delegated("task_arithmetic", "{weight: 1.0, carry: refit}", "finetuned_from"),
    python("steps of a refit", lambda: rm.transfer("donor", "anchor", "anchor", method="refit", steps=4), "no steps"),
    call("carry lora --from anchor --to anchor out", *NEW_TOKEN, "remove the tokens that it added", spoil=ADDED),
    delegated("task_arithmetic", f"{TUNED}}}", *NEW_TOKEN, spoil=ADDED),
    Row("change of other ids", ("not a fine-tune",), OTHER_IDS, python=lambda: rm.Delta.between("anchor", "donor")),
    Row("change with tokens more", NEW_TOKEN, ADDED, python=lambda: rm.Delta.between("anchor", "donor")),
    Row("transfer with tokens more", NEW_TOKEN, ADDED, python=lambda: rm.transfer("donor", "anchor", "anchor")),
    Row("change of another width", ("donor", "gate_proj"), WIDER, python=lambda: rm.Delta.between("anchor", "donor")),
]

LORAS = both(adapter("lora", "anchor"), adapter("other", "org/base"), adapter("third", "org/base"))
SEARCH = [
    call("merge anchor out", "name two or more"),
    call("merge file anchor donor", "already exists"),
    call("merge anchor donor out --budget soon", "a time such as 90s, 10m or 2h"),
    call("merge anchor donor out --data text.txt --data demo:python --data demo:c", "3 data for 2 models"),
    call("merge anchor donor out --data self --data text.txt", "'self' stands beside other data"),
    call("merge anchor vit out", "architecture is"),
    call("merge anchor donor file --force", "is a file"),
    call("merge anchor donor /proc/nothing/out", "cannot be written"),
    call("merge anchor donor anchor --force", "is one of the inputs"),
    call("merge anchor anchor/ out", "is named twice"),
    call(
        "merge vit vit2 out --data text.txt",
        "ViTForImageClassification takes pixel_values",
        spoil=VITS,
    ),
    call("merge anchor donor out --dtype float31", "did you mean 'float32'"),
    call("merge anchor donor out --base third", "is not the base of", spoil=partial(model, LLAMA, "third", 2)),
    call("merge anchor donor out --base nowhere", "no such directory"),
    call("merge anchor donor out --base vit", "architecture is"),
    call(
        "merge anchor donor out",
        "attention_multiplier",
        spoil=another("GraniteForCausalLM", num_key_value_heads=2, attention_multiplier=0.5),
    ),
    call("merge donor anchor out", "donor: ", "NaN", spoil=NAN),
    call(
        "merge anchor donor out --data self",
        "merge them by a recipe with 'tokenizer: {source: base}'",
        spoil=OTHER_IDS,
    ),
    call("merge anchor+lora donor+lora out", "is an adapter of anchor, not of", spoil=LORAS),
    call(
        "merge other third out",
        "is an adapter of org/base, which is not on this machine; name its folder as",
        spoil=LORAS,
    ),
]

METHODS = [*DELEGATES, *POLISH, *ANSWERS, *CARRY, *SEARCH]
