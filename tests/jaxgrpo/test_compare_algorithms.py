"""What the experiment that compares the algorithms gives each of them."""

import runpy
from pathlib import Path

import pytest

from jaxgrpo.config import resolve

COMPARE = runpy.run_path(str(Path(__file__).parents[2] / "experiments/compare_algorithms.py"))


@pytest.mark.parametrize("variant", COMPARE["VARIANTS"])
@pytest.mark.parametrize("game", COMPARE["BUDGET"])
def test_every_algorithm_plays_as_much_and_is_looked_at_as_often(game, variant):
    budget = COMPARE["BUDGET"][game]
    config = resolve({"game": game, **COMPARE["within"](budget, COMPARE["VARIANTS"][variant])})
    assert config.iterations * config.episodes == budget
    assert config.run.evaluate_every * COMPARE["EVALUATIONS"] == config.iterations
