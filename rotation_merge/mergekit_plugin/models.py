"""The models of one recipe, opened once each."""

from __future__ import annotations

from collections.abc import Iterable

from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.averaging.average import check_finite
from rotation_merge.matching.pair import as_donor
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.keys import PRESETS
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.labels import watched
from rotation_merge.model.nearness import RELATED, cosine_text, likeness
from rotation_merge.model.open import check_present, open_model
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View


class Models(dict[ModelReference, View]):
    """The models of one recipe by reference, each opened once, when it is asked for."""

    def __init__(self, options: MergeOptions, unsupported: str = "error", untie: bool = False) -> None:
        super().__init__()
        self.options, self.unsupported, self.untie = options, unsupported, untie
        LoaderCache().setup(options=options)

    def __missing__(self, reference: ModelReference) -> View:
        view = open_model(
            reference, untie=self.untie, unsupported=self.unsupported, options=self.options, any_base=True
        )
        self[reference] = view
        return view

    def together(self, anchor: ModelReference, donors: Iterable[ModelReference], averaged: bool = False) -> None:
        """Open an anchor and its donors, and check that these have its architecture and sizes.

        Args:
            averaged: as of `check_pair`.

        Raises:
            CheckpointError, ArchitectureError: name the model and what differs.
        """
        references = [anchor, *(reference for reference in donors if reference != anchor)]
        for reference in references:
            if reference not in self:
                check_present(reference, self.options)
        for reference in references:
            self[reference]
        for reference in references[1:]:
            self[reference] = as_donor(self[anchor], self[reference], averaged)

    def watched(self, reference: ModelReference, run: Run) -> Tensors:
        """A model's tensors; each that is read is looked at once: it has to hold numbers, and counts for the report.

        Raises:
            CheckpointError: a tensor that is read holds NaN or infinity.
        """

        mark, seen = self[reference].mark, set[str]()

        def look(name: str, tensor: Tensor) -> Tensor:
            if name not in seen:
                check_finite(tensor, name, reference)
                seen.add(name)
                if run.watched:
                    mark.add(name, tensor)
            return tensor

        return watched(self[reference], look)


def settle_presets(recipe: Recipe, models: Models, donors: Iterable[ModelReference], run: Run | None = None) -> None:
    """Fill `recipe.relations`, and note the options of each preset."""
    preset = recipe.value("preset")
    if preset is None:
        return
    for donor in donors:
        if donor == recipe.base:
            continue
        preset_name = str(preset)
        words = f"Preset {preset_name}"
        if preset == "auto":
            cosine = likeness(models[recipe.base], models[donor])
            preset_name = "near" if cosine >= RELATED else "far"
            measured = f"mean cosine of its matrices to the base's: {cosine_text(cosine)}"
            words = f"Preset auto: {preset_name} for `{donor}` ({measured})"
        recipe.relations[donor] = preset_name
        options = ", ".join(f"{name}: {value}" for name, value in PRESETS[preset_name].items())
        if run is not None:
            run.note(f"{words}: {options}, unless the recipe says otherwise.")
