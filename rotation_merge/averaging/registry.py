"""The merge methods of our own: a new one is a file beside this one, and a line here."""

from __future__ import annotations

from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec

from rotation_merge.averaging.config import CalibrationConfig, RefitConfig
from rotation_merge.averaging.fisher import Fisher
from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.ot_fusion import OtFusion
from rotation_merge.averaging.parameters import WEIGHT, parameter
from rotation_merge.averaging.regmean import RegMean
from rotation_merge.averaging.svc import Calibrated
from rotation_merge.averaging.task_vectors import TaskVectorMethod
from rotation_merge.averaging.tsv import Iso, Tsv
from rotation_merge.averaging.wudi import Wudi

SOLVING = {field: RefitConfig.options()[field] for field in ("ridge", "lambda_")}
"""Fields that are parameters of the delegate; the others name its inputs and are parameters of the recipe."""


class RefitMethod(OwnMethod):
    """Runs the models on samples and solves the merge's linear maps for the same outputs (`averaging.refit`).

    Its result is a whole model, which a merge then passes through.
    """

    on_samples = True
    whole_models = True
    no_changes = "needs whole models, but 'finetuned_from' gives a task vector"
    spec = MergeMethodSpec(
        name="refit",
        pretty_name="Refit",
        parameters=(WEIGHT, *(parameter(o.key, o.default, o.text, o.type) for o in SOLVING.values())),
        contract=InputContract(base=BasePolicy.OPTIONAL),
    )


METHODS: tuple[OwnMethod, ...] = (
    RegMean(),
    Fisher(),
    Wudi(),
    Tsv(),
    Iso(),
    OtFusion(),
    RefitMethod(),
)

TASK_VECTORS = {method.spec.name: method for method in METHODS if isinstance(method, TaskVectorMethod)}
"""By name those that merge the changes of single maps, and so those of adapters, too."""

STARTS: dict[str, OwnMethod] = {
    **TASK_VECTORS,
    "calibrated_tsv": Calibrated(TASK_VECTORS["tsv"], CalibrationConfig.alpha),
}
"""By name those of which a refit may start from the merge."""
