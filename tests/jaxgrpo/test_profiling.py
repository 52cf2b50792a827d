"""The profile of a run: files that JAX's own reader opens, parts that add up, and a run that is as without it."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxgrpo import trainer
from jaxgrpo.config import TrainConfig, resolve
from jaxgrpo.profiling import table
from jaxgrpo.records import read_rows, without_timings
from jaxgrpo.trainer import train
from tests.jaxgrpo.experiments import small
from tests.jaxgrpo.toy import Toy


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)


def _config(out: Path, **options: Any) -> TrainConfig:
    given = {"out": str(out), "iterations": 8, "checkpoint_every": 3, "evaluate_every": 4, "evaluate_episodes": 9}
    return resolve(given | {"compilation_cache": False} | options)


def _train(config: TrainConfig) -> None:
    train(config, experiment=Toy(config))


def _traced(folder: Path) -> list[int]:
    """Numbers of the iterations in a trace."""
    [file] = folder.glob("plugins/profile/*/*.xplane.pb")
    profile = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())
    events = [event for plane in profile.planes for line in plane.lines for event in line.events]
    return [dict(event.stats)["step_num"] for event in events if event.name == "iteration"]  # pyright: ignore


def test_a_profile_of_the_third_iteration_and_the_next(tmp_path, capsys):
    _train(_config(tmp_path / "a", profile=2))
    said = capsys.readouterr().out.splitlines()
    assert _traced(tmp_path / "a" / "profile") == [3, 4]
    parts = json.loads((tmp_path / "a" / "profile" / "parts.json").read_text())
    assert parts["iterations"] == [3, 4]
    counts = {part: len(times) for part, times in parts["seconds"].items()}
    assert counts == {"rollout": 2, "update": 2, "evaluation": 3, "checkpoint": 3}
    begin = said.index(f"Profile of iterations 3 to 4, trace in {tmp_path / 'a' / 'profile'}:")
    assert [line.split()[0] for line in said[begin + 1 : begin + 4]] == ["part", "rollout", "update"]
    _train(_config(tmp_path / "b"))
    assert not (tmp_path / "b" / "profile").exists()
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        one, other = ([without_timings(row) for row in read_rows(tmp_path / name / file)] for name in "ab")
        assert one == other


def test_a_resumed_session_has_a_profile_only_where_it_is_asked_for(tmp_path):
    _train(_config(tmp_path, iterations=4))
    _train(_config(tmp_path, iterations=8, resume=True, profile=9))
    assert _traced(tmp_path / "profile") == [7, 8]
    assert json.loads((tmp_path / "profile" / "parts.json").read_text())["iterations"] == [7, 8]


def test_a_session_too_short_for_a_profile_says_so(tmp_path, capsys):
    _train(_config(tmp_path, iterations=2, profile=3))
    assert "--profile 3: the session ended before its third iteration; nothing is profiled." in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_the_table_leaves_out_what_compiled():
    seconds = {"rollout": [3.0, 1.0], "update": [5.0, 7.0], "evaluation": [90.0, 0.5, 0.25], "checkpoint": [8.0]}
    assert table(seconds) == [
        "  part          seconds  share",
        "  rollout         2.000    25%",
        "  update          6.000    75%",
        "  evaluation      0.375",
    ]


def test_the_parts_of_a_step_are_named_in_its_program():
    experiment = small()
    state = jax.eval_shape(experiment.init)
    program = (
        jax.jit(experiment.train_step)
        .lower(state, experiment.fixed, experiment.hyperparameters)
        .as_text(debug_info=True)
    )
    for path in ("play/prefix", "targets", "rows", "gradient", "gradient/jvp(prefix)", "optimiser"):
        assert re.search(rf'[/"]{re.escape(path)}/', program), path
