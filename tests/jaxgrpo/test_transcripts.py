"""Exported episodes: against the episodes played, the games and their text on the host, and other readers."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxgrpo import trainer
from jaxgrpo.config import ConfigError, TrainConfig, resolve
from jaxgrpo.records import read_rows
from jaxgrpo.rollout import Keys
from jaxgrpo.train_step import play_key
from jaxgrpo.trainer import train
from jaxgrpo.transcripts import cut, open_table
from tests.jaxgrpo.experiments import compiled, small
from tests.jaxgrpo.toy import Toy

FREE = {"game": "frozen-lake-slippery", "constrain": False, "reply_limit": 3, "shots": 1}


@pytest.fixture(scope="module")
def played():
    """Episodes of free replies, most of them unreadable, and their rows."""
    experiment = small(**FREE)
    state = experiment.init()
    episodes = compiled(experiment, "rollout")(state, experiment.fixed, experiment.hyperparameters)
    return experiment, state, episodes, list(experiment.transcript(episodes, 7))


def test_rows_are_the_steps_that_were_played(played):
    experiment, _, episodes, rows = played
    advantages = experiment.train_step.algorithm.advantages(episodes, experiment.hyperparameters)
    episodes, returns = jax.device_get((episodes, episodes.returns))
    places = [(row["group"], row["sample"], row["step"]) for row in rows]
    assert places == [tuple(place) for place in np.argwhere(episodes.alive).tolist()]
    reply = episodes.reply
    for at, row in zip(places, rows, strict=True):
        length = int(reply.length[at])
        assert row["iteration"] == 7 and row["game"] == "frozen-lake-slippery"
        assert row["reply_ids"] == reply.ids[at][:length].tolist()
        assert row["sampled"] == reply.sampled[at][:length].tolist()
        np.testing.assert_array_equal(np.float32(row["log_probs"]), reply.log_prob[at][:length])
        assert np.float32(row["reward"]) == episodes.reward[at]
        assert np.float32(row["return"]) == returns[at[:2]]
        assert row["advantage"] == pytest.approx(float(advantages[at]), abs=1e-6)
        assert row["stop"] == ("closed", "ended", "cut")[reply.stop[at]]
        assert (row["readable"], row["success"]) == (reply.readable[at], episodes.success[at[:2]])
        assert (row["terminated"], row["truncated"]) == (episodes.terminated[at], episodes.truncated[at])


def test_prompts_are_the_games_text_and_the_models_ids(played):
    """Each prompt is what the host renders of the game played again, and its tokens are those the model was given."""
    experiment, state, episodes, rows = played
    episodes = jax.device_get(episodes)
    game, tokenizer = experiment.game, experiment.game.tokenizer
    keys = Keys.make(play_key(state), *episodes.success.shape)
    fold = jax.random.fold_in
    for row in rows:
        at, group = (row["group"], row["sample"], row["step"]), row["group"]
        if row["step"] == 0:
            _, now = game.game.environment.reset(fold(fold(keys.groups[group], 0), 0), game.game.params)
        assert row["prompt"] == game.full_text(now)
        observation = episodes.observation[at][-episodes.observation_length[at] :]
        assert tokenizer.encode(row["prompt"]) == [*game.prefix_ids.tolist(), *observation.tolist()]
        assert row["reply"] == tokenizer.decode(row["reply_ids"])
        luck = fold(fold(keys.groups[group], 1), row["step"])
        action = game.game.actions.index(row["action"])
        _, now, reward, *_ = game.game.environment.step(luck, now, action, game.game.params)
        penalty = 0 if row["readable"] else float(experiment.hyperparameters.unreadable_penalty)
        assert row["reward"] == pytest.approx(float(reward) - penalty)


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.parquet"])
def test_other_programs_read_the_files(played, name, tmp_path):
    import pyarrow.json
    import pyarrow.parquet

    rows = played[-1]
    with open_table(tmp_path / name) as table:
        table.extend(iter(rows[:5]))
        table.extend(rows[5:])
    read = pyarrow.parquet.read_table if name.endswith("parquet") else pyarrow.json.read_json
    found = read(tmp_path / name).to_pylist()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(found) == len(rows)
    for row, expected in zip(found, rows, strict=True):
        assert row.keys() == expected.keys()
        numbers = {"log_probs", "reward", "return", "advantage"}
        assert {k: v for k, v in row.items() if k not in numbers} == {
            k: v for k, v in expected.items() if k not in numbers
        }
        for column in numbers:
            np.testing.assert_array_equal(np.float32(row[column]), np.float32(expected[column]))


def test_a_file_that_fails_leaves_what_was_there(played, tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), open_table(path) as table:
        table.extend(played[-1])
        raise ZeroDivisionError
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]
    _refused(tmp_path / "x.csv", r"the name must end in \.jsonl or \.parquet\.")
    _refused(tmp_path / "none" / "x.jsonl", r"cannot be written \(No such file or directory\)\.")


def _refused(path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"--export {path}: {line}"), open_table(path):
        pass


def test_without_pyarrow_parquet_is_refused_and_the_extra_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    _refused(
        tmp_path / "x.parquet",
        r"the package pyarrow is missing; .* 'jaxgrpo\[export\]', or give a name that ends in \.jsonl\.",
    )


def test_cutting_an_episode_log(tmp_path):
    path = tmp_path / "episodes.jsonl"
    cut(path, after=3)
    assert not path.exists()
    lines = [json.dumps({"iteration": i, "reply": "é\u2028"}, ensure_ascii=False) + "\n" for i in (2, 2, 4, 6, 6)]
    for after, kept in ((6, 5), (5, 3), (4, 3), (3, 2), (0, 0)):
        path.write_text("".join(lines) + '{"iteration": 6, "rep', encoding="utf-8")
        cut(path, after=after)
        assert path.read_text(encoding="utf-8") == "".join(lines[:kept])


def _config(out: Path, **options: Any) -> TrainConfig:
    given = {"out": str(out), "iterations": 12, "checkpoint_every": 5, "evaluate_episodes": 9, "export_episodes": 2}
    return resolve(given | {"compilation_cache": False} | options)


def _train(config: TrainConfig) -> None:
    train(config, experiment=Toy(config), quiet=True)


def test_a_run_that_was_cut_off_exports_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)
    _train(_config(tmp_path / "whole"))
    whole = (tmp_path / "whole" / "episodes.jsonl").read_bytes()
    assert [row["iteration"] for row in map(json.loads, whole.splitlines())][::8] == [2, 4, 6, 8, 10, 12]
    update = Toy.update

    def fails(self: Toy, state: Any, *rest: Any) -> Any:
        if int(state.iteration) + 1 == 10:
            raise ZeroDivisionError
        return update(self, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "update", fails)
        with pytest.raises(ZeroDivisionError):
            _train(_config(tmp_path / "cut"))
    stale = (tmp_path / "cut" / "episodes.jsonl").read_bytes()
    assert json.loads(stale.splitlines()[-1])["iteration"] == 8
    _train(_config(tmp_path / "cut", resume=True))
    assert (tmp_path / "cut" / "episodes.jsonl").read_bytes() == whole
    # Neither export nor a fault changes the run itself.
    _train(_config(tmp_path / "plain", export_episodes=0))
    assert not (tmp_path / "plain" / "episodes.jsonl").exists()
    losses = [[row["loss"] for row in read_rows(tmp_path / name / "metrics.jsonl")] for name in ("cut", "plain")]
    assert losses[0] == losses[1]
