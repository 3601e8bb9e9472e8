"""Checks that the installed mergekit has everything that this package uses."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from pkgutil import resolve_name

from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin import failed

OLDEST = NEWEST = "0.1.5"
"""The mergekit releases that the tests run with. Older ones lack interfaces of the planner; newer ones may work, and
otherwise end with one line."""
SUPPORTED = " to ".join(dict.fromkeys((OLDEST, NEWEST)))

BUILT_ON: dict[str, tuple[str, ...]] = {
    "mergekit.common:ModelReference": ("config",),
    "mergekit.merge": ("run_merge", "_set_chat_template", "MultiGPUExecutor", "get_architecture_info"),
    "mergekit.parameter_resolver": ("resolve_parameters",),
    "mergekit.config:MergeConfiguration": ("referenced_models", "to_yaml"),
    "mergekit.config:ConfigReader": ("parameter_sources", "for_out_slice", "with_t"),
    "mergekit.architecture.base:ModuleArchitecture": (
        *("pre_weights", "layer_weights", "post_weights", "num_layers_config_key"),
    ),
    "mergekit.io.tasks:LoaderCache": ("loaders",),
    "mergekit.merge_methods.registry": ("_METHODS",),
    "mergekit.merge_methods.base:MergeMethod": ("validate_inputs", "_execute", "_execute_resolved"),
}
"""Names of mergekit that are called, replaced or overridden. A name that is missing here would not be an error where we
override it: the merge would be mergekit's own, unaligned."""


def check_host() -> None:
    """Refuse a mergekit that lacks something that we build on."""
    for name, error in failed.items():
        raise unfit(f"{name}: {error}") from error
    _check_names()


@cache
def _check_names() -> None:
    for place, names in BUILT_ON.items():
        try:
            namespace = resolve_name(place)
        except (ImportError, AttributeError) as error:
            raise unfit(str(error)) from error
        fields = {**getattr(namespace, "__annotations__", {}), **getattr(namespace, "model_fields", {})}
        for name in names:
            if not hasattr(namespace, name) and name not in fields:
                raise unfit(f"{place.replace(':', '.')} has no '{name}'")


def unfit(why: str) -> RotationMergeError:
    """The error for a mergekit that lacks something, which `why` names."""
    problem = f"mergekit {version('mergekit')} is installed, which is not supported ({' '.join(why.split())})"
    remedy = f"mergekit {SUPPORTED} is supported: pip install 'mergekit=={NEWEST}', or a newer rotation-merge"
    return RotationMergeError(problem, remedy=remedy)
