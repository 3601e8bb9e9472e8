"""Train the small checkpoints that the demo and the benchmarks measure on, by their names.

    python benchmarks/train_checkpoints.py train NAME ...     into --out (checkpoints)
    python benchmarks/train_checkpoints.py papers             what benchmarks/papers needs and is not there
    python benchmarks/train_checkpoints.py ship NAME ...      copies in float16 that come with the package
    python benchmarks/train_checkpoints.py evaluate NAME ...
    python benchmarks/train_checkpoints.py texts

    vit-0                           a ViT of seed 0
    llama-0, llama-0-english, llama-0-english-long      a Llama of bytes, its short and its long fine-tune on a domain
    llama-0-lora-english            an adapter of llama-0 that learns what llama-0-english answers
    encoder-0, encoder-0-c10        a BERT of bytes, a classifier of tokens on top of it

Each training writes a Hugging Face checkpoint in float32 to OUT/NAME; a base is sought in OUT, then in the package.
ViTs and Llamas get config, tokenizer and preprocessor of those in the package. It needs no network: the ViTs see
scikit-learn's digits, the Llamas bytes (token id = byte) of files that come with Python.
The files of a domain are sorted by name and every tenth is held out; `texts` cut the shipped evaluation texts from
held-out files of CPython 3.11.7. Another version of Python has other files, so a checkpoint trained with it may have
seen parts of those texts.
"""

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kinds
import torch
import transformers
from corpora import documents, excerpt, training_tokens, unseen
from merging import load, loss
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForSequenceClassification, LlamaForCausalLM, PreTrainedModel

import rotation_merge as rm
from rotation_merge.model.writing import staged
from rotation_merge.run.demo import CHECKPOINTS, NAMES, TEXTS, digits
from rotation_merge.run.sources import self_written

CONTEXT = 128
SCHEDULES: dict[str, tuple[int, float, dict[str, Any]]] = {
    "vit": (1200, 0.0, {"lr": 2e-3, "weight_decay": 0.05, "betas": (0.9, 0.99)}),
    "llama": (2000, 0.05, {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "llama, short": (300, 0.05, {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "llama, long": (2000, 0.05, {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "encoder": (400, 0.05, {"lr": 2e-3, "weight_decay": 0.01}),
    "classifier": (300, 0.05, {"lr": 1e-3, "weight_decay": 0.01}),
}
"""Steps, the share of the learning rate that is left in the end, and AdamW's options."""


# ---- Training ----


def new(like: str) -> PreTrainedModel:
    """A model with random weights and the config of one that comes with the package."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / like)
    return getattr(transformers, config.architectures[0])(config)


def fit(
    model: nn.Module, batches: Iterator[Any], steps: int, rate: Callable, loss_of: Callable | None = None, **adam: Any
) -> None:
    """`steps` steps of AdamW, gradients clipped to norm 1; `rate(step)` multiplies the learning rate.

    Args:
        loss_of: of a model and a batch; None: that which the model gives itself.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, **adam)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    start, total = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        batch = next(batches)
        loss = loss_of(model, batch) if loss_of else model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 100 == 0 or step == steps:
            mean, seconds = total / ((step - 1) % 100 + 1), time.perf_counter() - start
            print(f"step {step}: loss {mean:.4f}, {seconds:.0f} s", flush=True)
            total = 0.0
    model.eval()


def warm_cosine(steps: int, warm_up: int, floor: float) -> Callable[[int], float]:
    """Learning rate factor: linear over `warm_up` steps, then a cosine down to `floor`."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def image_batches(generator: torch.Generator, size: int = 64) -> Iterator[dict[str, Tensor]]:
    pixels, labels, _, _ = digits()
    while True:
        for rows in torch.randperm(len(pixels), generator=generator).split(size):
            yield {"pixel_values": pixels[rows], "labels": labels[rows]}


def text_batches(domain: str, generator: torch.Generator, size: int = 16) -> Iterator[dict[str, Tensor]]:
    tokens = training_tokens(domain)
    print(f"{domain}: {len(tokens)} training bytes", flush=True)
    offsets = torch.arange(CONTEXT)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT + 1, (size, 1), generator=generator)
        ids = tokens[starts + offsets].long()
        yield {"input_ids": ids, "labels": ids}


def classifier(base: Path) -> PreTrainedModel:
    """An encoder with a head of its own that tells kinds of tokens in one domain."""
    model = kinds.encoder(BertForSequenceClassification)
    body = BertForMaskedLM.from_pretrained(base, dtype=torch.float32).bert.state_dict()
    model.bert.load_state_dict(body, strict=False)  # the pooler is new
    return model


def adapter(base: Path, teacher: Path, seed: int, out: Path, rank: int = 2, steps: int = 150) -> None:
    """A LoRA of the base that learns what a fine-tune answers on text that the fine-tune wrote itself; in float16."""
    from peft import LoraConfig, get_peft_model

    tuned = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    ids = self_written(tuned, str(teacher), 256)
    with torch.no_grad():
        answers = torch.cat([tuned(input_ids=part).logits.log_softmax(-1) for part in ids.split(64)])
    torch.manual_seed(seed)
    targets = ["v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    draw = torch.Generator().manual_seed(seed + 1)

    def apart(model: nn.Module, rows: Tensor) -> Tensor:
        given = model(input_ids=ids[rows]).logits.log_softmax(-1)
        return (answers[rows].exp() * (answers[rows] - given)).sum(-1).mean()

    rows = (torch.randperm(len(ids), generator=draw)[:16] for _ in range(steps))
    fit(model, rows, steps, lambda _: 1.0, apart, lr=7e-4, weight_decay=0)
    model.half().save_pretrained(out)


# ---- Evaluating and writing ----


def evaluate(model: PreTrainedModel) -> dict[str, float]:
    """Accuracy and loss on test digits, or nats per byte of each shipped text, or accuracy on token kinds by domain."""
    model = model.float().eval()
    if model.config.model_type == "bert":
        domains = kinds.DOMAINS if isinstance(model, BertForSequenceClassification) else ()
        return {domain: kinds.accuracy(model, domain) for domain in domains}
    if model.config.model_type == "vit":
        return rm.evaluate(model, "demo:digits")
    return {name: loss(model, name, count=None) for name in NAMES}


def save(model: PreTrainedModel, path: Path) -> None:
    """Checkpoint at `path`, whole or not there: a byte tokenizer beside a Llama, a preprocessor beside a ViT."""
    like = CHECKPOINTS / ("vit-0" if model.config.model_type == "vit" else "llama-0")
    with staged(str(path)) as folder:
        model.save_pretrained(folder)
        Path(folder, "generation_config.json").unlink(missing_ok=True)
        for file in (*like.glob("tokenizer*"), *like.glob("preprocessor*")):
            shutil.copy(file, folder)


def ship(source: Path, out: Path) -> None:
    """Copy of a checkpoint rounded to float16, in OUT under the same name."""
    save(load(source).half(), out / source.name)
    print(f"{source.name}: float32 {_line(evaluate(load(source)))}")
    print(f"{source.name}: float16 {_line(evaluate(load(out / source.name)))}")


def write_texts() -> None:
    TEXTS.mkdir(exist_ok=True)
    for domain in NAMES:
        train, held_out = documents(domain)
        (TEXTS / f"{domain}.txt").write_bytes(excerpt(unseen(held_out, train)))
        print(f"{domain}: {sum(map(len, train))} training bytes, {sum(map(len, held_out))} held out")


def _line(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


# ---- Command line ----

PAPERS = [
    *(f"vit-{seed}" for seed in range(2, 6)),
    *(f"llama-{seed}" for seed in (2, 3)),
    *(f"llama-{seed}-{domain}" for seed in (1, 2) for domain in ("english", "c")),
    *(f"encoder-{seed}" for seed in range(3)),
    *(f"encoder-{seed}-{domain}" for seed in range(3) for domain in kinds.DOMAINS),
]
"""What benchmarks/papers measures on beside the checkpoints that come with the package."""


def place(name: str, out: Path) -> Path:
    """Where a checkpoint lies: in a folder, or in the package."""
    return out / name if (out / name).exists() else CHECKPOINTS / name


def train(name: str, out: Path, steps: int | None) -> None:
    """Train a checkpoint as its name says, with the seed in it."""
    kind, number, *rest = name.split("-")
    base, seed = place(f"{kind}-{number}", out), int(number)
    draw, schedule = torch.Generator().manual_seed(seed), kind
    torch.manual_seed(seed)
    if rest[:1] == ["lora"]:
        return adapter(base, place(f"{kind}-{number}-{rest[1]}", out), seed, out / name)
    if kind == "vit":
        model, batches = new("vit-0"), image_batches(draw)
    elif kind == "llama":
        model = load(base) if rest else new("llama-0")
        batches = text_batches(rest[0] if rest else "python", draw)
        schedule = "llama, long" if rest[1:] else "llama, short" if rest else "llama"
    elif rest:
        model, batches, schedule = classifier(base), kinds.labelled(rest[0], draw), "classifier"
    else:
        model, batches = kinds.encoder(BertForMaskedLM), kinds.masked(draw)
    planned, floor, adam = SCHEDULES[schedule]
    steps = steps or planned
    fit(model, batches, steps, warm_cosine(steps, min(100, steps // 10), floor), **adam)
    save(model, out / name)
    print(f"{name}: {_line(evaluate(model))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "papers", "ship", "evaluate", "texts"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="where trained ones lie")
    parser.add_argument("--steps", type=int, help="stop early, for a trial run")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # sums, and so the weights, depend on the number of threads
    if asked.what == "texts":
        write_texts()
    for name in PAPERS if asked.what == "papers" else asked.names:
        if asked.what == "ship":
            ship(asked.out / name, CHECKPOINTS)
        elif asked.what == "evaluate":
            print(f"{name}: {_line(evaluate(load(place(name, asked.out))))}")
        elif asked.what == "train" or not place(name, asked.out).exists():
            train(name, asked.out, asked.steps)


if __name__ == "__main__":
    main()
