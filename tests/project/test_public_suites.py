"""Suites of laws call only what is public, so that they still prove something when the code behind it is rewritten.

Public are the names of `rotation_merge` itself, the command line, recipes that mergekit runs, and the errors that the
docstrings of public calls name. Whatever imports more, or names it in a string, stands in one of the two lists.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOMS = {path.stem for path in (TESTS.parent / "rotation_merge").iterdir() if not path.stem.startswith("__")}
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py"))
PUBLIC = {"errors"}

HELPERS = {
    "carry_support.py": "adapters and bases in other coordinates are made from the labels of an architecture",
    "cli_support.py": "runs the command line in this process: its entry point, its commands and the demo's data",
    "fresh_support.py": "a fresh interpreter in which the plugin is not installed yet",
    "hub_support.py": "publishes a folder as push does",
    "matching_support.py": "layers without a model, for tests of single steps of matching",
    "plugin_support.py": "the names of recipe keys, to tell them from those of mergekit",
    "recipe_models.py": "models for the shipped recipes, by the names in them",
    "renamed_mergekit.py": "a mergekit whose private names differ",
    "search/conftest.py": "short budgets for the search",
    "tiny_models.py": "labels of the tiny models, and float64 throughout their forward pass",
}
"""Shared helpers, each with what it needs of the package."""

UNITS = {
    "architecture/test_architecture_files.py": (
        "architecture model",
        "the schema of architecture files and the errors of its loader",
    ),
    "architecture/test_architectures.py": (
        "architecture diagnose",
        "that a wrong layout is seen: architectures are changed on purpose",
    ),
    "architecture/test_architectures_commands.py": (
        "architecture diagnose",
        "that drafts and proofs cover every shipped file",
    ),
    "architecture/test_fields.py": ("architecture", "the table of what fields of configs mean, entry by entry"),
    "architecture/test_membership.py": ("architecture matching symmetry", "which class belongs to which file"),
    "averaging/test_averaging_parts.py": (
        "averaging matching run",
        "formulas and plans by hand, the divergence from answers, how new adapters begin",
    ),
    "averaging/test_own_methods.py": ("averaging model", "methods that are told about models, tensor by tensor"),
    "averaging/test_refit.py": (
        "architecture averaging model run",
        "the rule in double precision, map by map; merges solve and write in single",
    ),
    "averaging/test_sliced.py": ("averaging", "matrices in slices against whole ones"),
    "averaging/test_softmax.py": ("averaging", "one function, against a hand computation"),
    "averaging/test_task_vector_rules.py": ("averaging", "the rules of task vectors, on matrices"),
    "carrying/test_carry.py": (
        "architecture matching model run",
        "statistics in double precision, one by one; files hold them in single, and merges show their sum",
    ),
    "carrying/test_carry_as_written.py": (
        "carrying matching run",
        "the samples that judged, to judge by them what was written",
    ),
    "carrying/test_carry_parts.py": (
        "architecture averaging carrying matching model run",
        "single parts: ridges and ranks that no option names, the judge, slices",
    ),
    "carrying/test_carry_refit.py": ("run", "how often state is written, so that short work has any to continue"),
    "carrying/test_transport.py": ("carrying model", "the value of a change against what a recipe adds"),
    "cli/test_cli.py": ("cli diagnose model", "what each command declares of itself"),
    "cli/test_config_options.py": ("cli config matching mergekit_plugin", "that options are made from the configs"),
    "cli/test_console.py": ("mergekit_plugin", "one function, on errors that other libraries raise"),
    "cli/test_inputs_stay.py": ("cli config files mergekit_plugin", "which options name files that are written"),
    "diagnose/test_doctor_damage.py": ("diagnose", "causes that doctor names, one by one"),
    "diagnose/test_doctor_methods.py": ("diagnose", "causes that doctor names, one by one"),
    "files/test_durable.py": ("architecture files matching model run", "writes that are cut off at every step"),
    "files/test_going_on.py": ("matching mergekit_plugin run", "the store for interrupted work, part by part"),
    "files/test_scratch.py": ("files", "folders for temporary files"),
    "files/test_unfinished.py": ("files matching run", "the store's parts, torn and foreign ones among them"),
    "linalg/test_assignment.py": ("linalg", "solvers, on matrices that no model gives"),
    "linalg/test_linalg.py": ("linalg", "solvers, on matrices that no model gives"),
    "matching/test_activations.py": ("matching", "activations of other weights than those that are matched"),
    "matching/test_alignment_value.py": ("matching", "files that are read for an architecture of the caller"),
    "matching/test_between.py": ("matching", "what a step of learning holds in memory, and its gradients"),
    "matching/test_devices.py": (
        "architecture linalg matching run search symmetry",
        "that each step stays on its device, with a stand-in of a second one",
    ),
    "matching/test_fit_command.py": ("matching", "in which type parents are held"),
    "matching/test_fit_figures.py": (
        "matching",
        "losses of a fit, what is held out and its path, against a hand computation",
    ),
    "matching/test_gathering.py": ("matching model", "what matching of streams reads, part by part"),
    "matching/test_laws_of_matching.py": (
        "architecture matching model",
        "single lines of matching, each on an input made for it",
    ),
    "matching/test_learned_maps.py": (
        "matching run",
        "the parts of a fit: learned transforms and mixes",
    ),
    "matching/test_matching_attention.py": (
        "architecture matching symmetry",
        "single steps of matching against exhaustive search",
    ),
    "matching/test_matching_ffn.py": (
        "architecture linalg matching model symmetry",
        "single steps of matching against exhaustive search",
    ),
    "matching/test_pair.py": (
        "architecture matching model",
        "that every path asks one function, which is replaced; tensors that only recipes admit",
    ),
    "matching/test_paths.py": (
        "api cli",
        "puts transforms that are drawn in the place of the best ones, which no option does",
    ),
    "matching/test_workers.py": (
        "architecture matching mergekit_plugin workers",
        "how blocks are shared among threads and processes",
    ),
    "mergekit_plugin/test_host.py": ("mergekit_plugin", "private names of mergekit that may differ"),
    "mergekit_plugin/test_output_check.py": ("mergekit_plugin report", "what is checked behind a merge"),
    "mergekit_plugin/test_own_delegates.py": ("averaging mergekit_plugin", "the registry of delegates"),
    "mergekit_plugin/test_plugin_inputs.py": ("model", "files replaced while read"),
    "mergekit_plugin/test_progress.py": ("mergekit_plugin workers", "when lines of progress are printed"),
    "mergekit_plugin/test_recipe_reader.py": ("config mergekit_plugin", "the reader of recipes, value by value"),
    "mergekit_plugin/test_session.py": ("architecture mergekit_plugin model", "what tasks of one merge share"),
    "mergekit_plugin/test_start.py": ("mergekit_plugin", "what happens when an interpreter starts"),
    "model/test_fold.py": ("model", "what is folded into what, dtype by dtype"),
    "model/test_invisible_biases.py": ("architecture model", "biases that softmax ignores, family by family"),
    "model/test_open.py": ("model", "the gate itself: classes of state dicts, shards"),
    "model/test_gguf.py": ("model", "the folder that a file is decoded into, byte by byte"),
    "model/test_hub_files.py": ("model", "one function for names on the hub"),
    "model/test_offline.py": ("model", "one function for names on the hub"),
    "model/test_output_folders.py": ("files model", "writes that are cut off, files of parts, folders that are in use"),
    "project/test_add_architecture.py": ("architecture symmetry", "shows where a contributor adds one"),
    "project/test_add_averaging.py": ("averaging mergekit_plugin", "shows where a contributor adds one"),
    "project/test_docs_commands.py": ("matching", "replaces slow steps of commands that pages show"),
    "project/test_layering.py": ("cli", "rooms and files of the package themselves"),
    "project/test_manners.py": ("cli files mergekit_plugin report run", "names and messages in all of the package"),
    "report/test_memory.py": ("architecture averaging matching report", "memory and spaces, from labels alone"),
    "report/test_integrity.py": ("diagnose report", "each check of a folder alone"),
    "report/test_reports.py": ("record report", "words of reports made by hand"),
    "run/test_arrays.py": ("run", "readers of single kinds of files"),
    "run/test_data.py": ("run", "readers of single kinds of files"),
    "run/test_measure_by_layer.py": (
        "architecture files model run",
        "measuring layer by layer against measuring at once",
    ),
    "run/test_metrics.py": ("run", "figures against a hand computation"),
    "run/test_proof_by_layer.py": ("model run", "a lowered limit on models that are held whole"),
    "run/test_backends.py": ("matching workers", "how blocks are shared in a cluster"),
    "run/test_runner.py": ("architecture model run", "the runner of layers alone"),
    "run/test_sentence.py": ("run", "modules of an encoder against pooling by hand"),
    "run/test_written.py": ("run", "samples that models write, token by token"),
    "search/test_merge_changes.py": ("model run search", "parts of the search alone: its judge and candidates"),
    "search/test_merge_command.py": (
        "files model run search",
        "parts of the search alone: its judge and candidates",
    ),
    "search/test_merge_search.py": (
        "cli report search share",
        "parts of the search alone: its judge and candidates",
    ),
    "search/test_merge_sentence.py": ("search", "parts of the search alone: its candidates"),
    "share/test_attack_names.py": ("cli model record", "rules for names, one by one"),
    "share/test_attack_push.py": ("share", "rules for places of files, one by one"),
    "share/test_published_cards.py": ("model report", "sections of cards, made by hand"),
    "share/test_share.py": ("model share", "names in texts and headers, one by one"),
    "symmetry/test_groups.py": ("symmetry", "groups element by element, those that no shipped model admits, too"),
    "symmetry/test_transforms.py": (
        "architecture matching model run symmetry",
        "transforms by kind and role, against the axes of every shipped family",
    ),
}
"""Tests of single parts, each with the rooms that it reaches and what of them cannot be reached from outside."""


def rooms_of(path: Path) -> set[str]:
    """The rooms of the package that a file imports, or names in strings that may be imported or replaced."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules |= set(re.findall(r"\brotation_merge(?:\.\w+)+", node.value))
    steps = (module.split(".") for module in modules)
    return {step[1] for step in steps if step[0] == "rotation_merge" and len(step) > 1 and step[1] in ROOMS} - PUBLIC


@pytest.mark.parametrize("file", FILES)
def test_suites_call_only_what_is_public(file: str) -> None:
    """No file reaches further than its entry says, and no entry says more than its file still needs."""
    reached = rooms_of(TESTS / file)
    if file == str(Path(__file__).relative_to(TESTS)):
        return
    if file in HELPERS:
        assert reached, f"{file} calls only what is public: take it off the list"
        return
    listed = set(UNITS.get(file, ("", ""))[0].split())
    assert reached <= listed, f"{file} reaches into {sorted(reached - listed)}: call rotation_merge's public names"
    assert listed <= reached, f"{file} no longer reaches into {sorted(listed - reached)}: take them off the list"


def test_lists_name_files_once() -> None:
    names = [*HELPERS, *UNITS]
    assert len(names) == len(set(names))
    assert set(names) <= set(FILES)


def test_imports_inside_functions_and_by_string_count(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    for text in (
        "def f():\n    from rotation_merge.model.fold import Fold",
        "import rotation_merge.model.fold",
        "from rotation_merge import model",
        "patch.setattr('rotation_merge.model.fold.Fold', None)",
    ):
        file.write_text(text)
        assert rooms_of(file) == {"model"}, text
    file.write_text(
        "import rotation_merge as rm\nfrom rotation_merge import align\nfrom rotation_merge.errors import E"
    )
    assert not rooms_of(file)
