"""Train the small checkpoints that the demo and the benchmarks measure on.

    python benchmarks/train_checkpoints.py texts
    python benchmarks/train_checkpoints.py vit --seed 0
    python benchmarks/train_checkpoints.py vit --seed 0 --digits 01234
    python benchmarks/train_checkpoints.py llama --seed 0
    python benchmarks/train_checkpoints.py encoder --seed 0
    python benchmarks/train_checkpoints.py classifier --base checkpoints/encoder-0 --domain c10
    python benchmarks/train_checkpoints.py papers --out checkpoints
    python benchmarks/train_checkpoints.py finetune --base checkpoints/llama-0 --domain english --schedule short
    python benchmarks/train_checkpoints.py adapter --base checkpoints/llama-0 --teacher checkpoints/llama-0-english
    python benchmarks/train_checkpoints.py ship checkpoints/llama-0
    python benchmarks/train_checkpoints.py evaluate checkpoints/llama-0

Each training writes a Hugging Face checkpoint in float32 to OUT/NAME. It needs no network: the ViTs see scikit-learn's
digits, the Llamas bytes (token id = byte) of files that come with Python. The files of a domain are sorted by name and
every tenth is held out; `texts` cut the shipped evaluation texts from held-out files of CPython 3.11.7. Another version
of Python has other files, so a checkpoint trained with it may have seen parts of those texts.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kinds
import shipped
import torch
from corpora import documents, excerpt, training_tokens, unseen
from shipped import CHECKPOINTS, NAMES, TEXTS, held_out_images, load, loss
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

import rotation_merge as rm
from rotation_merge.run.sources import self_written

CONTEXT = 128
DIGITS = "0123456789"
SCHEDULES = {"short": (300, 3e-4), "long": (2000, 3e-3)}  # steps, peak learning rate


# ---- Models ----


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer whose token ids are the UTF-8 bytes of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the alphabet of byte-level tokenizers
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def new_vit() -> ViTForImageClassification:
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label={digit: str(digit) for digit in range(10)},
        label2id={str(digit): digit for digit in range(10)},
    )
    return ViTForImageClassification(config)


def new_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


# ---- Training ----


def fit(model: nn.Module, batches: Iterator[dict[str, Tensor]], steps: int, rate: Callable, **adam) -> None:
    """`steps` steps of AdamW, gradients clipped to norm 1; `rate(step)` multiplies the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    start, total = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        loss = model(**next(batches)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 100 == 0 or step == steps:
            print(
                f"step {step}: loss {total / ((step - 1) % 100 + 1):.4f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
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


def known(labels: Tensor, digits: str) -> Tensor:
    """Which examples are of some digits."""
    return torch.isin(labels, torch.tensor([int(digit) for digit in digits]))


def image_batches(generator: torch.Generator, digits: str = DIGITS, size: int = 64) -> Iterator[dict[str, Tensor]]:
    pixels, labels, _, _ = shipped.digits()
    chosen = known(labels, digits)
    pixels, labels = pixels[chosen], labels[chosen]
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


def train_vit(seed: int, steps: int | None, digits: str = DIGITS) -> PreTrainedModel:
    """A ViT that has seen images of some digits only; its head has ten outputs all the same."""
    model = new_vit()
    steps = steps or 60 * math.ceil(int(known(shipped.digits()[1], digits).sum()) / 64)
    batches = image_batches(torch.Generator().manual_seed(seed), digits)
    fit(model, batches, steps, warm_cosine(steps, 100, 0.0), lr=2e-3, weight_decay=0.05, betas=(0.9, 0.99))
    return model


def train_llama(seed: int, steps: int | None) -> PreTrainedModel:
    model = new_llama()
    steps = steps or 2000
    batches = text_batches("python", torch.Generator().manual_seed(seed))
    fit(
        model,
        batches,
        steps,
        warm_cosine(steps, min(100, steps // 10), 0.05),
        lr=2e-3,
        weight_decay=0.1,
        betas=(0.9, 0.95),
    )
    return model


def train_encoder(seed: int, steps: int | None) -> PreTrainedModel:
    """A byte-level BERT that fills in hidden bytes of Python code."""
    model, steps = kinds.encoder(BertForMaskedLM), steps or 400
    batches = kinds.masked(torch.Generator().manual_seed(seed))
    fit(model, batches, steps, warm_cosine(steps, steps // 10, 0.05), lr=2e-3, weight_decay=0.01)
    return model


def train_classifier(base: Path, domain: str, seed: int, steps: int | None) -> PreTrainedModel:
    """An encoder with a head of its own that tells kinds of tokens in one domain."""
    model, steps = kinds.encoder(BertForSequenceClassification), steps or 300
    body = BertForMaskedLM.from_pretrained(base, dtype=torch.float32).bert.state_dict()
    model.bert.load_state_dict(body, strict=False)  # the pooler is new
    batches = kinds.labelled(domain, torch.Generator().manual_seed(seed))
    fit(model, batches, steps, warm_cosine(steps, steps // 10, 0.05), lr=1e-3, weight_decay=0.01)
    return model


def finetune(base: Path, domain: str, schedule: str, seed: int, steps: int | None) -> PreTrainedModel:
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = [weight.detach().clone() for weight in model.parameters()]
    planned, rate = SCHEDULES[schedule]
    steps = steps or planned
    batches = text_batches(domain, torch.Generator().manual_seed(seed))
    warm_up = min(100, steps // 10)
    fit(model, batches, steps, warm_cosine(steps, warm_up, 0.05), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    change = sum((new - old).square().sum().item() for new, old in zip(model.parameters(), before, strict=True))
    print(f"squared change relative to the base: {change / sum(old.square().sum().item() for old in before):.4f}")
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4, weight_decay=0)
    draw = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        picked = torch.randperm(len(ids), generator=draw)[:16]
        given = model(input_ids=ids[picked]).logits.log_softmax(-1)
        loss = (answers[picked].exp() * (answers[picked] - given)).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.half().save_pretrained(out)


# ---- Evaluating and writing ----


def evaluate(model: PreTrainedModel) -> dict[str, float]:
    """Accuracy and loss on test digits, or nats per byte of each shipped text, or accuracy on token kinds by domain."""
    model = model.float().eval()
    if model.config.model_type == "bert":
        domains = kinds.DOMAINS if isinstance(model, BertForSequenceClassification) else ()
        return {domain: kinds.accuracy(model, domain) for domain in domains}
    if model.config.model_type == "vit":
        return rm.evaluate(model, held_out_images())
    return {name: loss(model, name, count=10**6) for name in NAMES}


def save(model: PreTrainedModel, path: Path) -> None:
    """Checkpoint at `path`, whole or not there: a byte tokenizer beside a Llama, a preprocessor beside a ViT."""
    part = path.parent / f".{path.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    if model.config.model_type == "vit":
        (part / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    else:
        (part / "generation_config.json").unlink(missing_ok=True)
        byte_tokenizer().backend_tokenizer.save(str(part / "tokenizer.json"), pretty=False)
        (part / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)


PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "do_rescale": True,
    "rescale_factor": 1 / 16,
    "do_normalize": True,
    "image_mean": [0.5],
    "image_std": [1.0],
    "size": {"height": 8, "width": 8},
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
}


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


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(dest="command", required=True)
    training = argparse.ArgumentParser(add_help=False)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--steps", type=int, help="stop early, for a trial run")
    training.add_argument("--out", type=Path, default=Path("checkpoints"))
    images = commands.add_parser("vit", parents=[training])
    images.add_argument("--digits", default=DIGITS, help="those it learns")
    commands.add_parser("llama", parents=[training])
    commands.add_parser("encoder", parents=[training])
    telling = commands.add_parser("classifier", parents=[training])
    telling.add_argument("--base", type=Path, required=True)
    telling.add_argument("--domain", choices=kinds.DOMAINS, required=True)
    tune = commands.add_parser("finetune", parents=[training])
    tune.add_argument("--base", type=Path, required=True)
    tune.add_argument("--domain", choices=("english", "c", "cpp"), required=True)
    tune.add_argument("--schedule", choices=tuple(SCHEDULES), default="short")
    small = commands.add_parser("adapter", parents=[training])
    small.add_argument("--base", type=Path, required=True)
    small.add_argument("--teacher", type=Path, required=True)
    shipping = commands.add_parser("ship")
    shipping.add_argument("--out", type=Path, default=CHECKPOINTS)
    for command in (shipping, commands.add_parser("evaluate")):
        command.add_argument("checkpoints", type=Path, nargs="+")
    commands.add_parser("texts")
    missing = commands.add_parser("papers", help="what benchmarks/papers needs and OUT lacks")
    missing.add_argument("--out", type=Path, default=Path("checkpoints"))
    return main


PAPERS = {
    **{f"vit-{seed}": f"vit --seed {seed}" for seed in range(2, 6)},
    **{f"llama-{seed}": f"llama --seed {seed}" for seed in (2, 3)},
    **{f"llama-{s}-{of}": f"finetune --seed {s} --domain {of}" for s in (1, 2) for of in ("english", "c")},
    **{f"encoder-{seed}": f"encoder --seed {seed}" for seed in range(3)},
    **{f"encoder-{s}-{of}": f"classifier --seed {s} --domain {of}" for s in range(3) for of in kinds.DOMAINS},
}
"""What benchmarks/papers measures on beside the checkpoints that come with the package: name, and how it is trained."""


def base_of(name: str, out: Path) -> Path:
    """The checkpoint that another is a fine-tune of."""
    base = name.rpartition("-")[0]
    return out / base if (out / base).exists() else CHECKPOINTS / base


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)  # sums, and so the weights, depend on the number of threads
    if args.command == "texts":
        write_texts()
    elif args.command == "papers":
        for name, words in PAPERS.items():
            if not (args.out / name).exists() and not (CHECKPOINTS / name).exists():
                base = ["--base", str(base_of(name, args.out))] if "--domain" in words else []
                _train(parser().parse_args([*words.split(), *base, "--out", str(args.out)]))
    elif args.command in ("ship", "evaluate"):
        for path in args.checkpoints:
            if args.command == "ship":
                ship(path, args.out)
            else:
                print(f"{path.name}: {_line(evaluate(load(path)))}")
    else:
        _train(args)


def _train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    if args.command == "adapter":
        name = f"{args.base.name}-lora-{args.teacher.name.rpartition('-')[2]}"
        return adapter(args.base, args.teacher, args.seed, args.out / name)
    if args.command == "finetune":
        name = f"{args.base.name}-{args.domain}" + ("-long" if args.schedule == "long" else "")
        model = finetune(args.base, args.domain, args.schedule, args.seed, args.steps)
    elif args.command == "encoder":
        name, model = f"encoder-{args.seed}", train_encoder(args.seed, args.steps)
    elif args.command == "classifier":
        name = f"{args.base.name}-{args.domain}"
        model = train_classifier(args.base, args.domain, args.seed, args.steps)
    elif args.command == "vit":
        name = f"vit-{args.seed}" + (f"-digits-{args.digits}" if args.digits != DIGITS else "")
        model = train_vit(args.seed, args.steps, args.digits)
    else:
        name, model = f"llama-{args.seed}", train_llama(args.seed, args.steps)
    save(model, args.out / name)
    print(f"{name}: {_line(evaluate(model))}")


if __name__ == "__main__":
    main()
