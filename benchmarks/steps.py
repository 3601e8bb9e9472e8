"""Each step of matching heads and neurons on trained weights: squared distance left over the anchor's squared norm.

    python benchmarks/steps.py

The checkpoints of seeds 0 and 1 that come with the package; sums over all layers.
"""

from __future__ import annotations

from record import Table
from residual import Model, open_model, quiet

from rotation_merge.matching.match import match_model
from rotation_merge.matching.options import AlignConfig
from rotation_merge.run.demo import CHECKPOINTS

CASES: dict[str, AlignConfig | None] = {
    "none": None,
    "rotation, no rescaling": AlignConfig(scaling=False),
    "the paper's sequence": AlignConfig(scaling="sequential"),
    "joint scale": AlignConfig(),
    "spectral pairing, in-head permutations (TransFusion)": AlignConfig(heads="spectral", scaling=False),
    "joint head order": AlignConfig(heads="permutation"),
    "joint head order, invertible": AlignConfig(heads="permutation", attention="invertible"),
}
KINDS = {"ViT": "vit", "Llama": "llama"}


def left(pair: tuple[Model, Model], options: AlignConfig | None) -> dict[str, float]:
    """By kind of space."""
    anchor, donor = pair
    alignment = match_model(anchor.architecture, anchor.state, donor.state, options or AlignConfig())
    found: dict[str, list[tuple[float, float]]] = {}
    for match in (match for _, matches in alignment.records for match in matches):
        found.setdefault(match.kind, []).append((match.after if options else match.before, match.anchor))
    return {kind: sum(x for x, _ in values) / sum(x for _, x in values) for kind, values in found.items()}


def main() -> None:
    quiet()
    pairs = {
        words: (open_model(CHECKPOINTS, f"{kind}-0"), open_model(CHECKPOINTS, f"{kind}-1"))
        for words, kind in KINDS.items()
    }
    table = Table("matching-steps")
    for case, options in CASES.items():
        found = {words: left(pair, options) for words, pair in pairs.items()}
        cells = {
            f"{words} {title}": f"{found[words][space]:.4f}"
            for title, space in (("attention", "attention"), ("FFN", "ffn"))
            for words in KINDS
        }
        table.add({"case": case, **cells})


if __name__ == "__main__":
    main()
