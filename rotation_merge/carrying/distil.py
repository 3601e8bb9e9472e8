r"""Distillation of a carried change: a few training steps from the refit towards the fine-tune's outputs.

The target adds a share of what the new base knows beyond the old one to the fine-tune's own logits, ``tuned + share *
(new - old)``: the whole, or the half, the mean of that and the fine-tune's own. The target with the lower loss on
samples held out is taken; on text that the fine-tune wrote itself that is the half. Text of the new base, if given,
is learned as well with the unchanged base's outputs, so that it forgets less. All weights are trained, or the factors
of an adapter alone.

Source: this project's study (benchmarks/carry_bases.py); distillation after Hinton, Vinyals and Dean (2015).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store, TemporaryFolder
from rotation_merge.matching.objective import Answered, is_distribution, main_output, write_answers
from rotation_merge.model.adapters import Adapter
from rotation_merge.run.batches import Batch, inputs_for
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import score

SHARES = (1.0, 0.5)
"""Shares of the new base's logits beyond the old base's that a target may have."""

AT_A_STEP = 4
"""Batches of a step."""

OF_BASE = "answers of the new base"
"""Name under which these are kept."""


@dataclass(frozen=True)
class TransferTarget:
    """A model whose outputs are the fine-tune's plus a share of the difference of the bases."""

    tuned: Any
    new: Any
    old: Any
    share: float

    @property
    def config(self) -> Any:
        return self.new.config

    def __call__(self, **batch: Tensor) -> Any:
        outputs = [model(**inputs_for(model, batch)) for model in (self.tuned, self.new, self.old)]
        tuned, new, old = (main_output(output).float() for output in outputs)
        total = tuned + self.share * (new - old)
        return SimpleNamespace(**{"logits" if is_distribution(outputs[0]) else "last_hidden_state": total})


def answered_by_target(
    models: Mapping[str, Callable[[], Any]],
    choice: Data,
    samples: Sequence[Batch],
    base_texts: Sequence[Batch],
    work: Store,
) -> tuple[float, list[Answered]]:
    """The better target's answers to samples, and the new base's own to its texts.

    Args:
        models: give `new`, `old` and `tuned` when they are needed.
        choice: samples with labels, that choose the target.
        work: folder of answers, which an interrupted run continues from.

    Returns:
        The target's share of the new base's logits, and the answers; those to the texts only where there are any.
    """
    share, answers, of_base = work.get("share"), work.get("answers", mapped=True), work.get(OF_BASE, mapped=True)
    if share is None or answers is None:
        loaded = {name: give() for name, give in models.items()}
        targets = [TransferTarget(**loaded, share=share) for share in SHARES]
        target = min(targets, key=lambda target: score(target, choice).loss)
        share, answers = target.share, write_answers(target, samples, work, "answers")
        work.put("share", share)
        del target, targets, loaded
    if base_texts and of_base is None:
        of_base = write_answers(models["new"](), base_texts, work, OF_BASE)
    return share, [answers, *([of_base] if base_texts else [])]


def adapter_in_training(model: Any, written: Adapter) -> Any:
    """A model with an adapter; only its factors are trained, at the rank-stabilised scale.

    Raises:
        RotationMergeError: peft is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise RotationMergeError("distilling an adapter needs peft", remedy="pip install peft") from error
    tensors = dict(written.tensors)
    for change in (change for change in written.changes.values() if change.b):
        for name in tensors.keys() & {change.b, change.bias}:
            tensors[name] = tensors[name] / written.shapes[change.a][0] ** 0.5
    with TemporaryFolder() as folder:
        Adapter({**written.config, "use_rslora": True}, tensors).write(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, on what transformers calls by another name now
            student = PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
    for layer in student.modules():  # an adapter has a `lora_bias` for all of its modules or for none
        for name, has_bias in getattr(layer, "lora_bias", {}).items():
            if has_bias and getattr(layer.get_base_layer(), "bias", None) is None:  # nor could it be merged or stored
                layer.lora_bias[name] = False
                layer.lora_B[name].bias = None
    return student
