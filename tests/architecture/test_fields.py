"""`fields.json`, which says what a field of a config means, entry by entry."""

from __future__ import annotations

import pytest
from tiny_models import Case, further
from variants import FIRST, fields_of

from rotation_merge.architecture.fields import differences, fields


@pytest.mark.parametrize("case", [*FIRST, *further()], ids=lambda case: f"{case.family}-{case.class_name}")
def test_every_field_that_a_class_reads_is_classified(case: Case) -> None:
    assert case.model_class is not None
    lacking = fields_of(case.class_name) - fields().keys()
    assert not lacking, f"say in architecture/fields.json what follows where two models differ in {sorted(lacking)}"


def test_a_difference_is_named_with_both_values() -> None:
    for name in [name for name, field in fields().items() if field.verdict != "harmless"]:
        [difference] = differences({name: 1, "x": 0}, {name: 2, "y": 0})
        assert str(difference) == f"'{name}' is 2, against 1"
        assert difference.field.why
        [nested] = differences({"text_config": {name: None}}, {"text_config": {name: [1]}})
        assert nested.name == f"text_config.{name}"
        assert not list(differences({name: (1, 2)}, {name: [1, 2]}))


@pytest.mark.parametrize("tied", [True, False])
def test_the_note_on_tied_heads_is_true_of_either_anchor(tied: bool) -> None:
    """It says of the anchor's head only what both kinds of anchors are."""
    (difference,) = differences({"tie_word_embeddings": tied}, {"tie_word_embeddings": not tied})
    assert "only where the anchor's is" in difference.field.why
    assert not difference.field.why.endswith("as the anchor does")
