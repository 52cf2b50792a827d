"""The host loop: runs the compiled step, and sees to metrics, checkpoints, evaluation and a clean stop."""

import contextlib
import dataclasses
import datetime
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxgrpo import hosts, report, transcripts
from jaxgrpo.checkpoints import Checkpoints, bytes_of
from jaxgrpo.config import ConfigError, TrainConfig
from jaxgrpo.display import Display
from jaxgrpo.profiling import CHECKPOINT, EVALUATION, ROLLOUT, UPDATE, Profile
from jaxgrpo.recompilation import CompilationWatch
from jaxgrpo.records import (
    JsonLines,
    KeptRows,
    RunFolder,
    disk_is_full,
    new_manifest,
    ordered_row,
    read_manifest,
    require_base,
    shortest,
    state_digests,
    write_config,
    write_json,
)
from jaxgrpo.stopping import SKIPPED_LIMIT, Exit, StopSignals
from jaxgrpo.storage import AnyPath, is_stored
from jaxgrpo.writers import JsonRows, Kind, Writer, open_views, require_views


@runtime_checkable
class Trainable(Protocol):
    """What the host loop needs of an experiment; `jaxgrpo.build.build` makes one from a configuration."""

    @property
    def hyperparameters(self) -> Any:
        """Traced numbers, given to every step."""

    @property
    def origin(self) -> dict[str, Any] | None:
        """Where the parameters of the state that `init` gave come from, if from another run, for the manifest."""

    def frozen_digest(self) -> str | None:
        """Digest of the parameters that are not trained, for the manifest; None where all are."""

    def init(self) -> Any:
        """The train state before the first iteration, with `params`."""

    def template(self) -> Any:
        """A state whose arrays are like those of `init`, their values without meaning."""

    def step(self, state: Any, hyperparameters: Any, /) -> tuple[Any, dict[str, jax.Array]]:
        """One iteration: the next state (the given one is donated) and its metrics, float32 scalars."""
        ...

    def rollout(self, state: Any, hyperparameters: Any, /) -> Any:
        """The first half of an iteration: its episodes; asked for where they are exported or profiled."""

    def update(self, state: Any, episodes: Any, hyperparameters: Any, /) -> tuple[Any, dict[str, jax.Array]]:
        """The second half: `update(state, rollout(state, hp), hp)` gives what `step(state, hp)` gives."""
        ...

    def transcript(self, episodes: Any, iteration: int, /) -> Iterable[dict[str, Any]]:
        """Episodes as rows of text, made as they are read."""
        ...

    def evaluate(self, params: Any, *, episodes: int, temperature: float) -> Any:
        """An `Outcome` of playing held-out episodes, the same ones at every call."""


@dataclasses.dataclass(frozen=True)
class Run:
    """How a session of training ended."""

    folder: AnyPath
    """Folder of the run."""
    iteration: int
    """Iterations the run has behind it."""
    exit: Exit
    """Why it ended."""
    before: dict[str, Any] | None
    """Evaluation on held-out episodes before the first iteration."""
    after: dict[str, Any] | None
    """Evaluation on the same episodes at the end; None where the session was cut off."""


def train(config: TrainConfig, *, experiment: Trainable | None = None, quiet: bool = False) -> Run:
    """Trains as the configuration says, into its folder, until done or told to stop.

    Args:
        config: the run; with `run.resume` it goes on from the folder's last checkpoint.
        experiment: what `build(config)` gives, where it is at hand; `config` is then its own, `experiment.config`.
        quiet: show nothing.

    Raises:
        ConfigError: the configuration and the folder do not agree, or the disk is full or cannot be written.
    """
    require_views(config)
    folder = RunFolder.of(config)
    is_new = not folder.path.exists()
    hosts.together(lambda: folder.claim(config), first_only=True)
    hosts.require_shared(folder.path)
    if config.run.compilation_cache:
        use_compilation_cache()
    fit = None
    try:
        if experiment is None:
            built = hosts.together(lambda: _build(config))
            assert built is not None
            if built.fit is not None:  # the least that any process has room for
                built = built.with_micro_batch(-hosts.agree(-built.fit.size))
            experiment, config, fit = built, built.config, built.fit
    except BaseException:
        if is_new and hosts.is_first() and not is_stored(folder.path):
            folder.path.rmdir()  # it is empty still: a mistake in the options leaves nothing behind
        raise
    assert experiment is not None
    display = Display(quiet=quiet or not hosts.is_first())
    if fit is not None:
        display.say(
            f"--micro-batch auto: {fit.size} rows, for which learning needs {fit.needed / 1e9:.2f} GB of the "
            f"{fit.allowed / 1e9:.2f} GB that it may take of a device"
        )
    with StopSignals(_announce(display), display.stop) as signals:
        try:
            with contextlib.ExitStack() as opened:
                return _Session(config, folder, experiment, display, signals, opened).run()
        except Exception as error:
            if disk_is_full(error):
                raise ConfigError(_disk_full_line(folder)) from error
            raise


def use_compilation_cache() -> None:
    """Keep every compiled program between processes, in $JAX_COMPILATION_CACHE_DIR or ~/.cache/jaxgrpo."""
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/jaxgrpo"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _build(config: TrainConfig) -> Any:
    from jaxgrpo.build import build

    return build(config)


def _announce(display: Display) -> Any:
    def announce(received: signal.Signals) -> None:
        again = "; again to abort at once" if received == signal.SIGINT else ""
        display.say(f"{received.name}: finishing this iteration, then a checkpoint{again}.")

    return announce


def _disk_full_line(folder: RunFolder) -> str:
    whole = sorted(int(path.name) for path in folder.checkpoints.glob("*") if path.name.isdigit())
    kept = f"the checkpoint of iteration {whole[-1]} is whole" if whole else "no checkpoint was written yet"
    return f"{folder.path}: the disk is full; {kept}. Free some space, then go on with --resume."


class _Session:
    """One process's part of a run: from a fresh start or a checkpoint to the end or a stop."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        experiment: Trainable,
        display: Display,
        signals: StopSignals,
        opened: contextlib.ExitStack,
    ) -> None:
        """Open the run's files, registering with `opened` how to let go of each."""
        self.config, self.folder, self.experiment = config, folder, experiment
        self.display, self.signals, self.opened = display, signals, opened
        opened.callback(display.stop)
        # Of several processes all do the same, but the first alone writes.
        self.records = hosts.is_first()
        # First of all, for Weights & Biases may refuse: the folder then holds no run yet.
        views = hosts.together(lambda: open_views(config, folder, display.say), first_only=True)
        self.views = [opened.enter_context(contextlib.closing(view)) for view in views or ()]
        self.watch = opened.enter_context(contextlib.closing(CompilationWatch(display.say)))
        self.profile = Profile(Path(folder.profile), config.run.profile, display.say, records=self.records)
        opened.callback(self.profile.close)
        self.checkpoints = Checkpoints(folder.checkpoints, keep=config.run.keep)
        opened.callback(self.checkpoints.abandon)
        start = self._agreed(self.checkpoints.latest)
        self.state = experiment.init() if start is None else experiment.template()
        hosts.together(self._require_space)
        if start is None:
            self._begin()
        else:
            self._restore(start)
        self._open_writers()
        # Reads metrics as they become ready, even while the main thread waits in the next step's dispatch.
        self.reader = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="metrics"))
        self.pending: _Pending | None = None
        self.skipped = 0

    # -- Start ------------------------------------------------------------------------------------------------------

    def _agreed(self, number: int | None) -> int | None:
        """The number that the processes have, or else the largest of theirs."""
        return None if (largest := hosts.agree(-1 if number is None else number)) < 0 else largest

    def _require_space(self) -> None:
        if is_stored(self.folder.path):
            return
        needed, free = bytes_of(self.state), shutil.disk_usage(self.folder.path).free
        if free < needed:
            raise ConfigError(
                f"--out {self.folder.path}: {free / 1e6:,.0f} MB are free and a checkpoint takes "
                f"{needed / 1e6:,.0f} MB; free some space or give another folder."
            )

    def _begin(self) -> None:
        if self.config.run.resume:
            self.display.say("The run was stopped before its first checkpoint: starting it again.")
        self.iteration = 0
        self._open_rows(lambda i: False)
        experiment = self.experiment
        self.manifest = new_manifest(self.config, self.state, experiment.origin, experiment.frozen_digest())
        self._record_session()

    def _restore(self, iteration: int) -> None:
        require_base(self.folder, self.experiment.frozen_digest(), option="--out")
        self.state = self.checkpoints.restore(iteration, self.state)
        self.iteration = iteration
        self._open_rows(lambda i: i <= iteration)
        if [row["iteration"] for row in self.metrics.rows] != list(range(1, iteration + 1)):
            raise ConfigError(
                f"{self.folder.metrics}: does not hold the {iteration} iterations before the checkpoint; "
                "put the file back, or start in another folder."
            )
        self.manifest = read_manifest(self.folder.manifest)
        self.manifest["digests"].pop("end", None)
        self._record_session()
        self.display.say(f"Resuming after iteration {iteration}.")

    def _open_rows(self, keep: Callable[[int], bool]) -> None:
        # An evaluation made only because a session ended early is not part of the run as it would have been.
        kept = {self.folder.metrics: keep, self.folder.evaluations: lambda i: keep(i) and self._is_due(i)}
        read = hosts.together(lambda: None if self.records else [KeptRows(*file) for file in kept.items()])
        opened = hosts.together(lambda: [JsonLines(path, keep=keep) for path, keep in kept.items()], first_only=True)
        self.metrics, self.evaluations = (
            self.opened.enter_context(contextlib.closing(file)) for file in opened or read or ()
        )

    def _open_writers(self) -> None:
        """All that takes rows, the record first, and the log of episodes where one is asked for."""
        record = JsonRows({"train": self.metrics, "held-out": self.evaluations})
        self.writers: list[Writer] = [record, *self.views]
        for writer in self.writers:
            writer.begin(self.iteration)
        self.episodes: transcripts.EpisodeLog | None = None
        if is_stored(self.folder.path) or not self.records:
            return  # episodes are exported here alone, see `require_views`
        transcripts.cut(Path(self.folder.episodes), after=self.iteration)
        if self.config.run.export_episodes:
            log = transcripts.EpisodeLog(Path(self.folder.episodes))
            self.episodes = self.opened.enter_context(contextlib.closing(log))

    def _record_session(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        where = {"devices": jax.device_count(), "processes": jax.process_count()}
        self.manifest["sessions"].append({"started": now, **where, "from": self.iteration, "to": None, "ended": None})
        if self.records:
            write_config(self.folder.config, self.config)
            write_json(self.folder.manifest, self.manifest)

    # -- Loop -------------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Train to the end or to a reason to stop, and leave everything in order."""
        self._say_what()
        self._evaluate_if_due()
        self.display.start(self.iteration, self.config.iterations)
        ending = self._iterate()
        self._drain()
        self._checkpoint()
        self.display.stop()
        if ending == Exit.DONE:
            self._evaluate()
            self.evaluations.sync()
        self.checkpoints.wait()
        return self._finish(ending)

    def _iterate(self) -> Exit:
        run = self.config.run
        self.began = self.clock = time.monotonic()
        while self.iteration < self.config.iterations:
            if (reason := self._reason_to_stop()) is not None:
                return reason
            metrics, rows = self._advance(self.iteration + 1)
            # The row of the iteration before is written while the device works on this one.
            self._drain()
            self.iteration += 1
            self.pending = _Pending(self.iteration, self.reader.submit(_fetch, metrics), rows)
            if self.iteration % run.checkpoint_every == 0:
                self._checkpoint()
            self._evaluate_if_due()
        self._drain()
        return self._reason_to_stop() or Exit.DONE

    def _advance(self, number: int) -> tuple[dict[str, jax.Array], Iterable[dict[str, Any]]]:
        """Run iteration `number`: its metrics, and the steps to export.

        Compiled whole, episodes never leave the step. An iteration whose episodes or parts are wanted runs as its two
        halves, so that all others run the very program they would run anyway.
        """
        every, hyperparameters = self.config.run.export_episodes, self.experiment.hyperparameters
        exports, profiled = every > 0 and number % every == 0, self.profile.halves()
        if not exports and not profiled:
            self.state, metrics = self._watched(self.experiment.step, self.state, hyperparameters)
            return metrics, ()
        with self.profile.iteration(number) if profiled else contextlib.nullcontext():
            part = self.profile.timed if profiled else lambda name, call: call()
            episodes = part(ROLLOUT, lambda: self._watched(self.experiment.rollout, self.state, hyperparameters))
            self.state, metrics = part(
                UPDATE, lambda: self._watched(self.experiment.update, self.state, episodes, hyperparameters)
            )
        return metrics, self.experiment.transcript(episodes, number) if exports else ()

    def _watched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.watch(function, *args, when=f" after iteration {self.iteration}", **kwargs)

    def _reason_to_stop(self) -> Exit | None:
        """Why to stop here; what one process has to say, all do."""
        reason = self._agreed(self._own_reason_to_stop())
        return None if reason is None else Exit(reason)

    def _own_reason_to_stop(self) -> Exit | None:
        if self.signals.received is not None:
            return Exit(128 + self.signals.received)
        if self.skipped >= SKIPPED_LIMIT:
            return Exit.NON_FINITE
        limit = self.config.run.max_seconds
        if limit is not None and time.monotonic() - self.began >= limit:
            return Exit.DONE
        return None

    def _drain(self) -> None:
        """Write the row of the iteration whose metrics are still on the device."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        values, ready = pending.values.result()
        seconds, self.clock = ready - self.clock, ready
        row = ordered_row(
            values
            | {
                "iteration": pending.iteration,
                "seconds": round(seconds, 4),
                "episodes_per_s": round(self.config.episodes / seconds, 2),
                "tokens_per_s": round(values["played_tokens"] / seconds, 1),
            }
        )
        if self.episodes is not None:
            self.episodes.extend(pending.rows)
        self._write("train", row)
        self.display.row(row)
        learn = self.config.learn
        all_skipped = values["skipped_updates"] >= learn.passes * learn.minibatches
        self.skipped = self.skipped + 1 if all_skipped else 0

    def _write(self, kind: Kind, row: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(kind, row)

    def _checkpoint(self) -> None:
        """Start a checkpoint of this iteration; all rows up to it are on the disk before it can be whole."""
        self._drain()
        if self.checkpoints.latest == self.iteration:
            return
        with self.profile.part(CHECKPOINT):
            for writer in self.episodes, *self.writers:
                if writer is not None:
                    writer.sync()
            self.checkpoints.save(self.iteration, self.state)
        self.clock = time.monotonic()

    # -- Evaluation -------------------------------------------------------------------------------------------------

    def _is_due(self, iteration: int) -> bool:
        every = self.config.run.evaluate_every
        return iteration in (0, self.config.iterations) or (every > 0 and iteration % every == 0)

    def _evaluate_if_due(self) -> None:
        if self._is_due(self.iteration):
            self._evaluate()

    def _evaluate(self) -> None:
        """Play the held-out episodes, unless a row says what came of them at this iteration."""
        if hosts.agree(self._evaluation(self.iteration) is not None):
            return
        self._drain()
        run, began = self.config.run, time.monotonic()
        with self.profile.part(EVALUATION):
            outcome = self._watched(
                self.experiment.evaluate,
                self.state.params,
                episodes=run.evaluate_episodes,
                temperature=run.evaluate_temperature,
            )
        self.clock = time.monotonic()
        row = {"iteration": self.iteration, **_summary(outcome), "temperature": run.evaluate_temperature}
        self._write("held-out", {**row, "seconds": round(self.clock - began, 4)})
        if self.iteration < self.config.iterations:  # the last lines tell of the last one
            when = "before" if self.iteration == 0 else f"after {self.iteration}"
            self.display.say(
                f"held-out success {when}: {row['success_rate']:.3f}, return {row['return_mean']:.3f} "
                f"({row['episodes']} episodes)"
            )

    def _evaluation(self, iteration: int) -> dict[str, Any] | None:
        return next((row for row in self.evaluations.rows if row["iteration"] == iteration), None)

    # -- End --------------------------------------------------------------------------------------------------------

    def _say_what(self) -> None:
        config, size = self.config, self.manifest["parameters"]
        grouped = f" in {config.play.groups} groups" if config.play.group_size > 1 else ""
        self.display.say(
            f"{config.game} · {config.algorithm} · {config.model} ({size:,} parameters) · "
            f"{config.episodes} episodes{grouped} an iteration · seed {config.seed} · "
            f"{jax.device_count()} {jax.devices()[0].device_kind}"
        )

    def _finish(self, ending: Exit) -> Run:
        self.manifest["digests"]["end"] = state_digests(self.state)
        self.manifest["sessions"][-1] |= {"to": self.iteration, "ended": ending.name.lower().replace("_", "-")}
        if self.records:
            write_json(self.folder.manifest, self.manifest)
            report.draw_curve(self.folder)
        before, after = self._evaluation(0), self._evaluation(self.iteration)
        after = after if self.iteration else None
        for line in self._last_lines(ending, before, after):
            self.display.say(line)
        return Run(self.folder.path, self.iteration, ending, before, after)

    def _last_lines(self, ending: Exit, before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
        path, lines = self.folder.path, []
        if before and after:
            lines.append(
                f"held-out success before {before['success_rate']:.3f} -> after {after['success_rate']:.3f}, "
                f"return {before['return_mean']:.3f} -> {after['return_mean']:.3f} ({after['episodes']} episodes)"
            )
        if ending == Exit.NON_FINITE:
            lines.append(
                f"Stopped: {SKIPPED_LIMIT} iterations in a row had no finite gradient; try a lower --learning-rate."
            )
        elif self.iteration < self.config.iterations:
            lines.append(
                f"Stopped after iteration {self.iteration} of {self.config.iterations}; "
                f"go on with: jaxgrpo train --out {path} --resume"
            )
        run = self.config.run
        more = {"tensorboard/": run.tensorboard, "wandb/": run.wandb, "episodes.jsonl": run.export_episodes > 0}
        files = ["metrics.jsonl", "evaluations.jsonl", "curve.png", "checkpoints/", "manifest.json"]
        lines.append(f"Files in {path}: {', '.join(files + [name for name, is_there in more.items() if is_there])}")
        return lines


@dataclasses.dataclass(frozen=True)
class _Pending:
    """An iteration whose numbers may still be on the device."""

    iteration: int
    values: "Future[tuple[dict[str, float], float]]"
    rows: Iterable[dict[str, Any]]
    """Its steps as text, where they are to be exported."""


def _fetch(metrics: dict[str, jax.Array]) -> tuple[dict[str, float], float]:
    """Metrics as numbers, and the time at which the device had them."""
    jax.block_until_ready(metrics)
    ready = time.monotonic()
    return {name: shortest(value) for name, value in jax.device_get(metrics).items()}, ready


def _summary(outcome: Any) -> dict[str, Any]:
    from jaxgrpo.evaluation import summarise

    return summarise(outcome)
