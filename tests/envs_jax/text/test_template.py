import pytest

from envs_jax.text.template import Slot, Template

TEMPLATE = Template(("At ", Slot("x", ("0", "1", "2")), Slot("more", ("", " and more")), "."))


def test_text_chooses_one_alternative_for_each_slot():
    assert TEMPLATE.text([2, 0]) == "At 2."
    assert TEMPLATE.text([0, 1]) == "At 0 and more."
    assert [slot.name for slot in TEMPLATE.slots] == ["x", "more"]


def test_examples_show_every_alternative():
    assert TEMPLATE.examples() == ["At 0.", "At 1 and more.", "At 2."]
    assert Template(("static",)).examples() == ["static"]


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="1 values for a template with 2 slots"):
        TEMPLATE.text([0])
    with pytest.raises(ValueError, match=r"slot 'x': value 3 is not in 0\.\.2"):
        TEMPLATE.text([3, 0])
    with pytest.raises(ValueError, match="slot 'x': value -1"):
        TEMPLATE.text([-1, 0])
    with pytest.raises(ValueError, match="slot 'empty' has no alternatives"):
        Slot("empty", ())
