"""Tasks for lm-evaluation-harness out of the held-out texts of `models.py`.

    python benchmarks/real/tasks.py real/tasks
    lm_eval --model hf --model_args pretrained=./merged,dtype=float32 --device cpu --include_path real/tasks \\
        --tasks continue_de,continue_fr,bits_de,bits_fr

`continue_`: multiple choice. A question shows the end of a passage; the four answers are what follows it and what
follows three other passages of the same text, all cut at words. `bits_`: bits a byte of passages. No network is needed:
tasks and data lie in one folder.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import yaml
from models import split

SHOWN, ASKED, QUESTIONS = 300, 80, 60  # characters of a question and of an answer; questions of a task
PAGE, PAGES = 1200, 24  # characters of a passage; passages of a task


def passages(domain: str) -> list[tuple[str, str]]:
    """The end of a passage and what follows, one from each held-out document."""
    draw = random.Random(0)
    pairs = []
    for text in split(domain)[2]:
        words = text.split()
        joined = " ".join(words)
        if len(joined) < 2 * (SHOWN + ASKED):
            continue
        start = draw.randrange(len(joined) - SHOWN - ASKED)
        start = joined.index(" ", start) + 1
        middle = joined.rindex(" ", start, start + SHOWN)
        end = joined.rindex(" ", middle, middle + ASKED)
        pairs.append((joined[start:middle], joined[middle:end]))
    draw.shuffle(pairs)
    return pairs[:QUESTIONS]


def questions(domain: str) -> list[dict[str, object]]:
    draw = random.Random(1)
    pairs = passages(domain)
    answers = [follows for _, follows in pairs]
    asked = []
    for number, (shown, follows) in enumerate(pairs):
        others = draw.sample([answer for place, answer in enumerate(answers) if place != number], 3)
        choices = [*others, follows]
        draw.shuffle(choices)
        asked.append({"question": shown, "choices": choices, "answer": choices.index(follows)})
    return asked


def pages(domain: str) -> list[dict[str, object]]:
    """One passage from each held-out document."""
    draw = random.Random(2)
    texts = [text for text in split(domain)[2] if len(text) > PAGE]
    draw.shuffle(texts)
    return [
        {"page": text[start : start + PAGE]} for text in texts[:PAGES] for start in [draw.randrange(len(text) - PAGE)]
    ]


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
BITS = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
}
KINDS = {"continue": (questions, CHOICE), "bits": (pages, BITS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for kind, (examples, settings) in KINDS.items():
        for domain in ("de", "fr", "c"):
            name = f"{kind}_{domain}"
            lines = [json.dumps(example, ensure_ascii=False) for example in examples(domain)]
            (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(out / f"{name}.jsonl")}}}
            task = {"task": name, **data, "test_split": "test", **settings}
            (out / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False))
            print(f"{name}: {len(lines)} examples")


if __name__ == "__main__":
    main()
