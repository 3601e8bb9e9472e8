"""Proof of an architecture file: its symmetries hold in the real transformers model, and planted mistakes show.

A tiny model with everything random computes in float64 throughout; random elements of every declared group must leave
its outputs alone, and the file got wrong on purpose must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.architecture.registry import load_file
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.architecture.table import config_of
from rotation_merge.errors import ArchitectureError, CheckpointError, RotationMergeError, short
from rotation_merge.files import TemporaryFolder
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import random_gauge
from rotation_merge.model.open import check_shapes
from rotation_merge.run.proof import random_batch
from rotation_merge.symmetry.transform import STILL

TOLERANCE = 1e-9
"""Largest difference of float64 outputs that rounding explains."""
SHOWS = 1e-6
"""Difference from which a mistake counts as found."""

LOCAL = AlignConfig(heads="permutation")
"""Heads, neurons and experts, all at once."""

ATTENTION, HEADS, NEURONS = "attention alone", "order of heads alone", "neurons and experts alone"
ALONE = {
    ATTENTION: AlignConfig(ffn="none"),
    HEADS: AlignConfig(attention="none", heads="permutation", ffn="none", scaling=False),
    NEURONS: AlignConfig(attention="none"),
}
"""Trials that run one by one if the whole fails."""
LAYOUT, STREAM = "wrong rotary layout", "residual: "

HINTS = {
    ATTENTION: "attention: look at 'norm' of queries and keys, at 'dims' of rotary embedding, at sinks and gates",
    HEADS: "heads: label what has an entry for each head ('head', 'kv_head'), or write \"order\": \"fixed\"",
    NEURONS: "neurons: look at the order of gate and up, at 'gated', 'activation' and \"scale\": \"fixed\"",
    LAYOUT: "with the other rotary layout outputs stay as they are: change 'layout'",
    STREAM: "streams: a tensor that reads or writes a stream is labelled 'fixed'",
    f"{STREAM}rotation": "rotations: a norm's output goes back into the stream, or has readers that its 'reads' lacks",
}
"""What to look at, by the trial that fails."""

_USUAL = {"vocab_size": 50, "pad_token_id": 0, "tie_word_embeddings": False, "num_experts_per_tok": 1}


@dataclass(frozen=True)
class Finding:
    """One trial.

    Attributes:
        what: the group or mistake that was tried.
        difference: of the outputs; None where the mistake was refused before.
        holds: whether it came out as it has to.
    """

    what: str
    difference: float | None
    holds: bool


def prove(path: Path, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Try an architecture file on a tiny model.

    Args:
        config: of the tiny model; by default of usual small sizes and the file's `example`.

    Raises:
        RotationMergeError: the file is at fault, or no model can be made.
    """
    spec = load_file(path)
    with TemporaryFolder() as folder:
        model = _Tiny(spec, {**config_of(spec), **_USUAL, **(config or {})}, Path(folder))
        architecture = model.architecture()
        trials = {f"{STREAM}{group}": AlignConfig(residual=group) for group in architecture.residual_groups[1:]}
        findings = [model.tried(*trial) for trial in {"heads, neurons and experts": LOCAL, **trials}.items()]
        if not all(trial.holds for trial in findings):
            findings += [model.tried(*trial) for trial in ALONE.items()]
        wrong = {mistake: change for mistake, change in MISTAKES.items() if mistake_is_visible(change, architecture)}
        return findings + [model.with_mistake(mistake, change) for mistake, change in wrong.items()]


def hints(findings: Sequence[Finding]) -> list[str]:
    """Hints on a wrong file from the trials that fail."""
    failed = [finding.what for finding in findings if not finding.holds]
    streams = [trial for trial in failed if trial.startswith(STREAM)]
    trials = [trial for trial in ALONE if trial in failed]
    if ATTENTION in trials and LAYOUT in failed:
        trials[trials.index(ATTENTION)] = LAYOUT
    if streams and not {LAYOUT, ATTENTION, NEURONS} & set(trials):
        trials.append(streams[0] if streams == [f"{STREAM}rotation"] else STREAM)
    return [HINTS[trial] for trial in trials]


class _Tiny:
    """A tiny model on disk, its outputs, and the outputs of its twins."""

    def __init__(self, spec: ArchitectureSpec, config: Mapping[str, Any], folder: Path) -> None:
        self.spec, self.folder = spec, folder
        name = next((name for name in spec.classes if hasattr(transformers, name)), None)
        if name is None:
            problem = f"transformers {transformers.__version__} has no class '{spec.classes[0]}'"
            raise ArchitectureError(problem, where=spec.family, remedy="upgrade transformers, or correct 'classes'")
        self.cls = getattr(transformers, name)
        settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        try:
            self._make(settings)
        except Exception as error:  # of configs and, for sizes that a config accepts, of the model, of many classes
            remedy = "give the sizes it needs under 'example', or as --config FILE"
            problem = f"no small {name} can be made ({short(error)})"
            raise ArchitectureError(problem, where=spec.family, remedy=remedy) from error

    def _make(self, settings: Mapping[str, Any]) -> None:
        """Write the model and compute its outputs."""
        torch.manual_seed(0)
        model = self.cls(self.cls.config_class(**settings)).double().eval()
        _randomise(model)
        model.save_pretrained(self.folder)
        self.config = transformers.AutoConfig.from_pretrained(self.folder).to_dict()
        self.state = load_tensors(self.folder / "model.safetensors")
        batch = random_batch(model, torch.Generator().manual_seed(1))
        self.batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        self.expected = self.outputs(self.state)

    def architecture(self, spec: ArchitectureSpec | None = None) -> Architecture:
        """Its labels by the file, or by another one."""
        architecture = resolve(self.config, list(self.state), self.spec.family, spec=spec or self.spec)
        check_shapes(architecture, {name: tuple(x.shape) for name, x in self.state.items()}, self.spec.family)
        return architecture

    def outputs(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of the model with these tensors."""
        save_file(dict(state), self.folder / "model.safetensors", metadata={"format": "pt"})
        model = self.cls.from_pretrained(self.folder, dtype=torch.float64, attn_implementation="eager").eval()
        model.config._experts_implementation = "eager"
        with torch.no_grad(), KeepFloat64():
            outputs = model(**self.batch)
        return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}

    def differs(self, options: AlignConfig, spec: ArchitectureSpec | None = None) -> float:
        """Largest output difference under a random element of the groups; infinite if nothing moved."""
        architecture = self.architecture(spec)
        folded = architecture.folds(dict.fromkeys(architecture.streams, options.residual))
        gauge = random_gauge(architecture, options, torch.Generator().manual_seed(5))
        moved = moved_tensors(architecture, self.state, gauge, folded)
        after = {name: moved[name].contiguous() for name in self.state}
        if all(torch.equal(after[name], self.state[name]) for name in after):
            return torch.inf
        outputs = self.outputs(self.state | after)
        return max(float((outputs[n] - self.expected[n]).abs().nan_to_num(torch.inf).max()) for n in self.expected)

    def tried(self, trial: str, options: AlignConfig) -> Finding:
        difference = self.differs(options)
        return Finding(trial, difference, difference <= TOLERANCE)

    def with_mistake(self, mistake: str, change: Callable[[Any], Any]) -> Finding:
        """Result of a file with a planted mistake: refused, or other outputs."""
        wrong = ArchitectureSpec.model_validate(changed(self.spec.model_dump(), change))
        try:
            difference = self.differs(LOCAL, wrong)
        except (RotationMergeError, CheckpointError):
            return Finding(mistake, None, True)
        return Finding(mistake, difference, difference > SHOWS)


def _randomise(model: Any) -> None:
    """Weights, biases and gains of norms as training would leave them: none at its initial value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5) + float(gain))
    model.tie_weights()


class KeepFloat64(TorchFunctionMode):
    """Keeps float64 where transformers computes norms, softmax and routers in float32 on purpose."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = dict(kwargs or {}), args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            narrows = kwargs.get("dtype") is torch.float32 or any(arg is torch.float32 for arg in args)
            if func is Tensor.float or (func in (Tensor.to, Tensor.type) and narrows):
                return first
            if narrows:
                kwargs.pop("dtype", None)
        if func in (Tensor.__matmul__, Tensor.matmul, torch.matmul):  # of what was counted, in float32, and what stayed
            kind = torch.promote_types(args[0].dtype, args[1].dtype)
            args = tuple(factor.to(kind) for factor in args)
        return func(*args, **kwargs)


# --- mistakes --------------------------------------------------------------------------------------------------------


def wrong_heads(entry: Any) -> Any:
    """Half as many heads, twice as wide."""
    if entry.get("kind") != "attention":
        return entry
    halves = {key: f"({entry[key]}) // 2" for key in ("heads", "kv_heads") if entry[key] is not None}
    return {**entry, **halves, "head_dim": f"({entry['head_dim']}) * 2"}


def wrong_rotary(entry: Any) -> Any:
    """The other layout of RoPE pairs."""
    if (layout := entry.get("layout")) is None:
        return entry
    swapped = {"half": "interleaved", "interleaved": "half"}
    return {**entry, "layout": swapped.get(layout, f"'half' if ({layout}) == 'interleaved' else 'interleaved'")}


def wrong_split(entry: Any) -> Any:
    """The parts of fused tensors the other way round."""
    return {key: value[::-1] if key in ("split", "interleave") and value else value for key, value in entry.items()}


def wrong_halves(entry: Any) -> Any:
    """Use rotary embedding on whole heads although it acts on each half."""
    return {**entry, "parts": 1} if "layout" in entry else entry


MISTAKES = {
    "wrong heads": wrong_heads,
    LAYOUT: wrong_rotary,
    "rotary halves as one": wrong_halves,
    "wrong split": wrong_split,
}
"""Mistakes that a file may contain, by name."""


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A file's content with a mistake in every entry that it concerns."""
    if isinstance(value, dict):
        return change({key: changed(item, change) for key, item in value.items()})
    return [changed(item, change) for item in value] if isinstance(value, list) else value


def mistake_is_visible(change: Callable[[Any], Any], architecture: Architecture) -> bool:
    """Whether this mistake can show in the model."""
    spaces = [s for block in architecture.blocks for s in block.spaces.values() if s.kind == "attention"]
    if change is wrong_split:
        axes = (axis for info in architecture.tensors() for axis in info.axes if len(axis.pieces) > 1)
        fused = [[*map(_acts, axis.parts)] for axis in axes]
        return any(parts != parts[::-1] for parts in fused)
    if change is wrong_rotary:
        return any(s.rotary > 2 and s.norm not in ("layer_head", "affine_head", "shared") for s in spaces)
    return any(change is wrong_heads or space.rotary_parts > 1 for space in spaces)


def _acts(part: Any) -> tuple[str, str]:
    """A key that is equal for parts that move alike.

    Both halves of gated neurons do unless one is rescaled, and so does all that stays.
    """
    if part.space.kind in STILL:
        return "", ""
    alike = part.role in ("in", "gate") and part.space.degree == 0
    return part.space.name, "in" if alike else part.role
