"""What TensorBoard and W&B show of a run, read back with TensorBoard's own reader and from W&B's offline files."""

import errno
import importlib
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxgrpo import trainer, writers
from jaxgrpo.cli import main
from jaxgrpo.config import ConfigError, TrainConfig, resolve
from jaxgrpo.records import read_rows
from jaxgrpo.stopping import Exit
from jaxgrpo.trainer import Run, train
from jaxgrpo.writers import TensorBoard, WeightsAndBiases
from tests.jaxgrpo.toy import Toy

Scalars = dict[str, list[tuple[int, float]]]
"""Steps and values by tag."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(trainer.report, "draw_curve", lambda folder: None)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def _config(out: Path, **options: Any) -> TrainConfig:
    small = {"iterations": 12, "checkpoint_every": 5, "evaluate_every": 4, "evaluate_episodes": 50}
    return resolve({"out": str(out), "compilation_cache": False, **small, **options})


def _train(config: TrainConfig) -> Run:
    return train(config, experiment=Toy(config), quiet=True)


def _train_with_a_fault(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ends without any order while iteration `at` runs: rows past the last checkpoint are written by then."""
    step = Toy.step

    def fails(self: Toy, state: Any, hyperparameters: Any, /) -> Any:
        if int(state.iteration) + 1 == at:
            raise ZeroDivisionError
        return step(self, state, hyperparameters)

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "step", fails)
        with pytest.raises(ZeroDivisionError):
            _train(config)
    assert read_rows(Path(str(config.run.out)) / "metrics.jsonl")[-1]["iteration"] > 5


def _recorded(out: Path) -> Scalars:
    """What the JSON lines say."""
    found: Scalars = {}
    for kind, file in (("train", "metrics.jsonl"), ("held-out", "evaluations.jsonl")):
        for row in read_rows(out / file):
            for name in row.keys() - {"iteration", "return_ci95"}:
                found.setdefault(f"{kind}/{name}", []).append((row["iteration"], row[name]))
    return found


def _on_tensorboard(out: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _offline_records(file: Path) -> Iterator[Any]:
    """The records in a W&B offline file, a log in the format of LevelDB's."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    block_size, begun = 32768, b""
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    place = 7
    while place < len(data):
        if block_size - place % block_size < 7:
            place += block_size - place % block_size
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        begun += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield protocol.Record.FromString(begun)
            begun = b""


def _on_wandb(out: Path) -> list[tuple[Scalars, int]]:
    """What each session's offline run holds, and its exit code."""
    import wandb

    wandb.teardown()  # waits for the process that writes
    sessions = []
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        found: Scalars = {}
        code = None
        for record in _offline_records(file):
            kind = record.WhichOneof("record_type")
            code = record.exit.exit_code if kind == "exit" else code
            for item in record.history.item if kind == "history" else ():
                name = "/".join(item.nested_key) or item.key
                if not name.startswith("_"):
                    found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
        sessions.append((found, code))
    return sessions


def _assert_same(found: Scalars, expected: Scalars) -> None:
    assert found.keys() == expected.keys()
    for tag, rows in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in rows], tag
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in rows], rel=1e-6), tag


def test_tensorboard_shows_what_the_record_says_also_after_a_fault(tmp_path, monkeypatch):
    _train_with_a_fault(_config(tmp_path, tensorboard=True), monkeypatch, at=9)
    before = _on_tensorboard(tmp_path)
    assert before["train/loss"][-1][0] == 7 or before["train/loss"][-1][0] == 8
    _train(_config(tmp_path, tensorboard=True, resume=True))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    _assert_same(_on_tensorboard(tmp_path), _recorded(tmp_path))
    assert [step for step, _ in _on_tensorboard(tmp_path)["train/loss"]] == list(range(1, 13))


def test_a_run_that_begins_again_takes_all_back(tmp_path, monkeypatch):
    """Stopped before its first checkpoint: nothing counts, not even the evaluation before the first iteration."""
    options = {"tensorboard": True, "checkpoint_every": 100}
    _train_with_a_fault(_config(tmp_path, **options), monkeypatch, at=9)
    _train(_config(tmp_path, **options, resume=True))
    _assert_same(_on_tensorboard(tmp_path), _recorded(tmp_path))


def test_wandb_has_what_the_record_says_also_after_a_fault(tmp_path, monkeypatch):
    _train_with_a_fault(_config(tmp_path, wandb=True), monkeypatch, at=9)
    time.sleep(1)  # W&B names the folders of its sessions by the second
    _train(_config(tmp_path, wandb=True, resume=True))
    ids = {path.stem.removeprefix("run-") for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert ids == {(tmp_path / "wandb" / "run-id").read_text().strip()}
    (first, failed), (second, done) = _on_wandb(tmp_path)
    assert (failed, done) == (1, 0)
    # The stopped session's rows are those that the resumed one computes again: together they tell the record.
    joined = {tag: sorted(dict(first.get(tag, []) + rows).items()) for tag, rows in second.items()}
    recorded = _recorded(tmp_path)
    timings = {tag: recorded.pop(tag) for tag in list(recorded) if tag.endswith(("/seconds", "_per_s"))}
    _assert_same({tag: rows for tag, rows in joined.items() if tag not in timings}, recorded)
    assert second["train/loss"][0][0] == 6
    assert first["train/loss"][-1][0] >= 7
    stale = dict(first["train/loss"]).items() & dict(second["train/loss"]).items()
    assert len(stale) >= 2


def test_what_wandb_has_already_is_not_sent_again(tmp_path, monkeypatch):
    """Online, W&B knows the last step of a run that goes on, and refuses earlier ones with a warning each."""
    import wandb

    sent, ended = [], []

    class Online:
        step = 8

        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((step, values))

        def finish(self, exit_code: int) -> None:
            ended.append(exit_code)

    given: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or Online())
    _train_with_a_fault(_config(tmp_path), monkeypatch, at=9)
    _train(_config(tmp_path, wandb=True, resume=True))
    assert given["resume"] == "allow" and given["project"] == "jaxgrpo" and given["name"] == tmp_path.name
    assert ended == [0]
    assert sorted({step for step, _ in sent}) == [8, 9, 10, 11, 12]
    assert {name for _, values in sent for name in values} >= {"train/loss", "held-out/success_rate"}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_done(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", "--out", str(tmp_path / "run"), f"--{name}"]) == Exit.USER_ERROR
    line = f"jaxgrpo: --{name}: the package is missing; install it with: pip install 'jaxgrpo[{name}]'\n"
    assert capsys.readouterr().err == line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["--tensorboard", "--export-episodes 3", "--profile 2"])
def test_files_that_grow_are_for_this_machine(words, capsys):
    assert main(["train", "--out", "gs://bucket/run", *words.split()]) == Exit.USER_ERROR
    line = f"jaxgrpo: {words.split()[0]}: writes into a folder on this machine, and --out is gs://bucket/run; "
    assert capsys.readouterr().err.startswith(line)


def test_wandb_without_an_account_leaves_no_run_behind(tmp_path, monkeypatch):
    import wandb
    from wandb.errors import UsageError

    def refused(**options: Any) -> None:
        raise UsageError("No API key configured. Use `wandb login` to log in.")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", refused)
        with pytest.raises(ConfigError, match=r"--wandb: No API key .* to log in; with WANDB_MODE=offline it needs no"):
            _train(_config(tmp_path, wandb=True))
    assert _train(_config(tmp_path)).exit == Exit.DONE


@pytest.mark.parametrize("kind", [TensorBoard, WeightsAndBiases])
def test_a_view_that_fails_is_given_up_and_not_the_run(kind, tmp_path, monkeypatch, capsys):
    write = kind.write

    def full(self: Any, name: writers.Kind, row: dict[str, Any]) -> None:
        if row["iteration"] == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, row)

    monkeypatch.setattr(kind, "write", full)
    config = _config(tmp_path, tensorboard=kind is TensorBoard, wandb=kind is WeightsAndBiases)
    run = train(config, experiment=Toy(config))
    assert (run.exit, run.iteration) == (Exit.DONE, 12)
    assert (tmp_path / "checkpoints" / "12").is_dir()
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 13))
    said = capsys.readouterr().out
    assert said.count("fails ([Errno 28] No space left on device): the run goes on without it") == 1
    shown = _on_tensorboard(tmp_path) if kind is TensorBoard else _on_wandb(tmp_path)[0][0]
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4, 5]
