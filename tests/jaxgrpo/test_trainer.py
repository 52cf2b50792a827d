import errno
import json
import signal
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxgrpo import trainer
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.config import ConfigError, TrainConfig, resolve
from jaxgrpo.display import Display
from jaxgrpo.records import METRIC_KEYS, TIMING_KEYS, JsonLines, RunFolder, read_rows, without_timings
from jaxgrpo.stopping import SKIPPED_LIMIT, Exit
from jaxgrpo.storage import AnyPath
from jaxgrpo.trainer import Run, train
from tests.jaxgrpo.toy import Toy


def _config(out: AnyPath | str, **options: Any) -> TrainConfig:
    small = {
        "out": str(out),
        "iterations": 12,
        "checkpoint_every": 5,
        "evaluate_every": 4,
        "evaluate_episodes": 50,
        "compilation_cache": False,
    }
    return resolve(small | options)


def _train(config: TrainConfig, **toy: Any) -> Run:
    return train(config, experiment=Toy(config, **toy), quiet=True)


def _record(out: AnyPath) -> dict[str, Any]:
    """All that must not depend on when and how often a run was stopped."""
    folder = RunFolder(out)
    manifest = json.loads(folder.manifest.read_text())
    end = manifest["digests"]["end"]
    checkpoints = Checkpoints(folder.checkpoints, keep=2)
    state = checkpoints.restore(end["iteration"], Toy(_config(out)).init())
    checkpoints.close()
    return {
        "metrics": [json.dumps(without_timings(row)) for row in read_rows(folder.metrics)],
        "evaluations": [json.dumps(without_timings(row)) for row in read_rows(folder.evaluations)],
        "digests": manifest["digests"],
        "state": [
            np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
            for x in jax.tree.leaves(state)
        ],
    }


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes longer than these runs; one is drawn before this fixture begins."""
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    run = _train(_config(out))
    assert (run.exit, run.iteration, run.folder) == (Exit.DONE, 12, out)
    return out


def test_a_run_leaves_its_record(uninterrupted):
    folder = RunFolder(uninterrupted)
    rows = read_rows(folder.metrics)
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    for row in rows:
        keys = list(row)
        assert tuple(keys[-3:]) == TIMING_KEYS
        assert [k for k in keys if k in METRIC_KEYS] == [k for k in METRIC_KEYS if k in keys]
    assert [row["iteration"] for row in read_rows(folder.evaluations)] == [0, 4, 8, 12]
    manifest = json.loads(folder.manifest.read_text())
    assert manifest["schema_version"] == 1
    assert manifest["parameters"] == 64
    assert manifest["digests"]["start"]["params"] != manifest["digests"]["end"]["params"]
    assert [(s["from"], s["to"], s["ended"]) for s in manifest["sessions"]] == [(0, 12, "done")]
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["10", "12"]
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    assert folder.read_config() == _config(uninterrupted)
    assert not list(folder.path.glob(".*"))


def test_metrics_are_those_of_their_own_iteration(uninterrupted):
    """They are fetched one iteration late; an off-by-one would show here."""
    toy = Toy(_config(uninterrupted))
    state = toy.init()
    for row in read_rows(RunFolder(uninterrupted).metrics):
        state, metrics = toy.step(state, None)
        assert np.float32(row["loss"]) == np.float32(metrics["loss"])
        assert int(state.iteration) == row["iteration"]


def test_the_same_seed_gives_the_same_record(uninterrupted, tmp_path):
    _train(_config(tmp_path / "a"))
    assert _record(tmp_path / "a") == _record(uninterrupted)
    _train(_config(tmp_path / "b", seed=1))
    assert _record(tmp_path / "b")["metrics"] != _record(uninterrupted)["metrics"]


@pytest.mark.parametrize(
    ("number", "code", "at"), [(signal.SIGTERM, Exit.PREEMPTED, 7), (signal.SIGINT, Exit.INTERRUPTED, 5)]
)
def test_stopped_by_a_signal_and_resumed_is_as_never_stopped(uninterrupted, tmp_path, number, code, at):
    run = _train(_config(tmp_path), signals={at: number})
    assert (run.exit, run.iteration) == (code, at)
    assert Checkpoints(tmp_path / "checkpoints", keep=2).latest == at
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, at + 1))
    run = _train(_config(tmp_path, resume=True))
    assert (run.exit, run.iteration) == (Exit.DONE, 12)
    assert _record(tmp_path) == _record(uninterrupted)
    assert run.before is not None
    assert without_timings(run.before) == without_timings(read_rows(uninterrupted / "evaluations.jsonl")[0])


def test_a_stop_before_the_first_iteration_can_be_resumed(uninterrupted, tmp_path, monkeypatch):
    evaluate = Toy.evaluate

    def interrupted(self, params, **options):
        signal.raise_signal(signal.SIGINT)
        return evaluate(self, params, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "evaluate", interrupted)
        assert _train(_config(tmp_path)).iteration == 0
    _train(_config(tmp_path, resume=True))
    assert _record(tmp_path) == _record(uninterrupted)


def test_handlers_are_given_back(tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    _train(_config(tmp_path, iterations=1))
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


_KILLED = """
import signal, sys
from pathlib import Path
from tests.jaxgrpo.test_trainer import _config, _train
_train(_config(Path(sys.argv[1])), signals={int(sys.argv[2]): signal.SIGKILL})
"""


@pytest.mark.parametrize("at", [3, 8, 11])
def test_killed_and_resumed_is_as_never_stopped(uninterrupted, tmp_path, at, capsys):
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), str(at)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    config = _config(tmp_path, resume=True)
    run = train(config, experiment=Toy(config))
    said = capsys.readouterr().out
    # Whether the newest checkpoint was whole when its writer was killed is a matter of chance; at 3 there was none.
    again = "The run was stopped before its first checkpoint: starting it again."
    assert again in said if at == 3 else (again in said) != ("Resuming after iteration" in said)
    assert run.iteration == 12
    assert _record(tmp_path) == _record(uninterrupted)
    assert "held-out success before 0." in said
    assert f"Files in {tmp_path}" in said


def test_stopped_by_time_is_evaluated_and_resumed_is_as_never_stopped(uninterrupted, tmp_path, monkeypatch):
    run = _train(_config(tmp_path, max_seconds=1e-9))
    assert (run.exit, run.iteration) == (Exit.DONE, 0)
    step, clock = Toy.step, 0.0

    def now():
        nonlocal clock
        clock += 1e-6
        return clock

    def slow(self, state, hyperparameters, /):
        nonlocal clock
        clock += 0.1
        return step(self, state, hyperparameters)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "time", SimpleNamespace(monotonic=now))
        patch.setattr(Toy, "step", slow)
        run = _train(_config(tmp_path, resume=True, max_seconds=0.25))
    assert (run.exit, run.iteration) == (Exit.DONE, 3)
    assert run.after is not None and run.after["iteration"] == run.iteration
    _train(_config(tmp_path, resume=True))
    assert _record(tmp_path) == _record(uninterrupted)


def test_a_finished_run_resumed_does_nothing_and_can_be_made_longer(uninterrupted, tmp_path):
    short = _config(tmp_path, iterations=6)
    _train(short)
    before = _record(tmp_path)
    assert _train(_config(tmp_path, iterations=6, resume=True)).iteration == 6
    assert _record(tmp_path) == before
    assert _train(_config(tmp_path, resume=True)).iteration == 12
    assert _record(tmp_path) == _record(uninterrupted)


def test_updates_that_stay_not_finite_stop_the_run(tmp_path, capsys):
    config = _config(tmp_path, iterations=SKIPPED_LIMIT + 9, evaluate_every=0, checkpoint_every=100)
    run = train(config, experiment=Toy(config, fails=True))
    assert run.exit == Exit.NON_FINITE
    # One iteration more than the limit was under way when the last of them was seen.
    assert run.iteration == SKIPPED_LIMIT + 1
    assert Checkpoints(tmp_path / "checkpoints", keep=2).latest == run.iteration
    assert read_rows(tmp_path / "metrics.jsonl")[0]["loss"] is None
    assert f"Stopped: {SKIPPED_LIMIT} iterations in a row had no finite gradient" in capsys.readouterr().out


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    append = JsonLines.append

    def full(self, row):
        if row["iteration"] == 8 and "loss" in row:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", full)
        with pytest.raises(ConfigError, match=r"the disk is full; the checkpoint of iteration 5 is whole\. Free some"):
            _train(_config(tmp_path))
    assert _train(_config(tmp_path, resume=True)).iteration == 12


def test_a_full_disk_under_a_checkpoint(tmp_path, monkeypatch):
    def full(self, iteration, state):
        raise ValueError("write failed") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(ConfigError, match=r"the disk is full; no checkpoint was written yet\."):
        _train(_config(tmp_path))


def test_too_little_space_is_seen_before_training(tmp_path, monkeypatch):
    usage = trainer.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(trainer.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"0 MB are free and a checkpoint takes 0 MB; free some space"):
        _train(_config(tmp_path))


def test_metrics_that_were_lost_are_not_papered_over(tmp_path):
    _train(_config(tmp_path, iterations=5))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"metrics.jsonl: does not hold the 5 iterations before the checkpoint"):
        _train(_config(tmp_path, iterations=6, resume=True))


def test_other_errors_are_not_dressed_up(tmp_path, monkeypatch):
    def broken(self, state, hyperparameters, /):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(Toy, "step", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        _train(_config(tmp_path))


_TWICE = """
import signal, time
from jaxgrpo.stopping import StopSignals
with StopSignals(lambda s: print(s.name, flush=True), lambda: print("abort", flush=True)):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    time.sleep(600)
"""


def test_a_second_interrupt_ends_the_process_at_once():
    ended = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (Exit.INTERRUPTED, "SIGINT\nabort\n")


def _shown(terminal: bool, iterations: int) -> str:
    out = StringIO()
    display = Display(console=Console(file=out, force_terminal=terminal, width=100, highlight=False))
    display.start(0, iterations)
    for i in range(1, iterations + 1):
        display.row({"iteration": i, "return_mean": 0.25, "success_rate": 0.5, "tokens_per_s": 12345.6})
    display.stop()
    return out.getvalue()


def test_lines_elsewhere_than_on_a_terminal():
    lines = _shown(False, 150).splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("iteration 1/150  return 0.250  success 0.500  12,346 tokens/s  ETA 0:00:")
    assert lines[-1].startswith("iteration 150/150")


def test_bar_on_a_terminal():
    shown = _shown(True, 30)
    assert "30/30" in shown
    assert "success 0.500" in shown
    assert "12,346 tokens/s" in shown
