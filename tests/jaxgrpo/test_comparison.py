"""Comparing variants: which runs are made and resumed, what the table says of them, and that the picture is drawn."""

import signal

import numpy as np
import pytest

from jaxgrpo import comparison, trainer
from jaxgrpo.comparison import Result, draw, interval, markdown, run_all
from jaxgrpo.stopping import Exit
from jaxgrpo.trainer import train
from tests.jaxgrpo.toy import Toy

SMALL = {"iterations": 4, "evaluate_every": 2, "evaluate_episodes": 20, "compilation_cache": False}
VARIANTS = {"alpha 1": {}, "alpha 0": {"alpha": 0.0}}
GAMES = {"frozen-lake": SMALL, "snake-8": {**SMALL, "iterations": 2}}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing every run's own takes longer than the runs."""
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)


def test_every_variant_on_every_game_with_every_seed_once(tmp_path, monkeypatch):
    sessions = []

    def trained(config):
        sessions.append((config.game, config.learn.alpha, config.seed, config.run.resume))
        return train(config, experiment=Toy(config), quiet=True)

    monkeypatch.setattr(comparison, "train", trained)
    results = run_all(VARIANTS, GAMES, [0, 1], tmp_path)
    assert not isinstance(results, Exit)
    assert sessions == [(game, alpha, seed, False) for seed in (0, 1) for game in GAMES for alpha in (1.0, 0.0)]
    assert [r.iterations.tolist() for r in results] == [[0, 2, 4], [0, 2, 4], [0, 2], [0, 2]] * 2
    assert results[0].episodes.tolist() == [0, 1024, 2048]  # 32 groups of 16
    again = run_all(VARIANTS, GAMES, [0, 1], tmp_path)
    assert not isinstance(again, Exit)
    assert [r.final for r in again] == [r.final for r in results]
    assert all(resumed for *_, resumed in sessions[8:])


def test_a_stopped_run_ends_the_comparison_with_its_code(tmp_path, monkeypatch):
    def stopped(config):
        return train(config, experiment=Toy(config, signals={3: signal.SIGTERM}), quiet=True)

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "train", stopped)
        assert run_all(VARIANTS, GAMES, [0], tmp_path) == Exit.PREEMPTED
    monkeypatch.setattr(comparison, "train", lambda config: train(config, experiment=Toy(config), quiet=True))
    finished = run_all(VARIANTS, GAMES, [0], tmp_path)
    assert not isinstance(finished, Exit) and len(finished) == 4


def _results():
    finals = {"a": (1.0, 2.0, 3.0), "b": (1.5, 2.5, 3.2)}
    places = np.array([0, 5, 10]), np.array([0, 20, 40])
    return [
        Result("lake", name, seed, *places, np.array([0.0, final / 2, final]), 10.0 + seed)
        for name, values in finals.items()
        for seed, final in enumerate(values)
    ]


def test_intervals_are_students():
    # R: t.test(c(1, 2, 3))$conf.int is -0.4841377 4.4841377
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.4841377, rel=1e-4))
    assert interval([0.5]) == (0.5, float("inf"))


def test_the_table_compares_seed_by_seed():
    rows = [row.split(" | ") for row in markdown(_results(), first="a").splitlines() if row.startswith("| ")]
    # Differences 0.5, 0.5, 0.2: mean 0.4, half 4.3027 * 0.17321 / sqrt(3).
    assert rows[1] == ["| a", "2.00 ± 2.48", "1.00, 2.00, 3.00", "", "1.50 ± 1.86", "", "10-12 |"]
    assert rows[2][3] == "0.40 ± 0.43"
    assert rows[2][5] == "0.30 ± 0.32"  # three quarters of them, as of the means


def test_the_picture_is_drawn(tmp_path):
    draw(_results(), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
