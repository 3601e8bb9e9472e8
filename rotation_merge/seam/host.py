"""Whether the mergekit that is installed is one that we can work in; if not, one line says so."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rotation_merge.errors import RotationMergeError
from rotation_merge.seam import hooks

OLDEST = NEWEST = "0.1.5"
"""The mergekit releases that the tests run with. An older one lacks what the planner is built on; a newer one may
work, and says in one line where it does not."""


class MergekitError(RotationMergeError):
    """The mergekit that is installed is not one that we can work in."""


def supported() -> str:
    """The releases that are known to work, in words."""
    return f"mergekit {OLDEST}" if OLDEST == NEWEST else f"mergekit {OLDEST} to {NEWEST}"


def check_host() -> None:
    """
    Raises:
        MergekitError: something of mergekit's that we build on is not there.
    """
    for name, error in hooks.failed.items():
        raise unfit(f"{name}: {error}") from error


def unfit(why: str) -> MergekitError:
    """The error for a mergekit that lacks something, which `why` names."""
    try:
        installed = version("mergekit")
    except PackageNotFoundError:
        installed = "of an unknown version"
    return MergekitError(
        f"mergekit {installed} is installed, which rotation_merge does not fit into ({' '.join(why.split())})",
        remedy=f"{supported()} is supported: pip install 'mergekit=={NEWEST}', or a newer rotation-merge",
    )


def lacks(error: Exception) -> bool:
    """Whether an error says that mergekit has no such module, or no such name in one of its modules or classes."""
    if isinstance(error, ImportError):
        return str(error.name).partition(".")[0] == "mergekit"
    if not isinstance(error, AttributeError):
        return False
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    place = getattr(error.obj, "__name__", "") if str(owner.__name__) == "module" else owner.__module__
    return str(place).partition(".")[0] == "mergekit"
