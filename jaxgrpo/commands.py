"""What `jaxgrpo eval`, `jaxgrpo play` and `jaxgrpo plan` do."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from envs_jax.games import TokenizedGame, make_game, tokenize_game
from envs_jax.text.reader import CLOSE, OPEN
from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo import hosts
from jaxgrpo.cli import EvalOptions, PlanOptions, PlayOptions
from jaxgrpo.config import ConfigError, TrainConfig, resolve
from jaxgrpo.evaluation import evaluate_scenarios
from jaxgrpo.stopping import Exit
from jaxgrpo.storage import AnyPath, is_stored, open_path, require_writable, write_whole
from jaxgrpo.trainer import use_compilation_cache
from jaxgrpo.transcripts import open_table

if TYPE_CHECKING:
    from jaxgrpo.plan import Plan


def eval_command(options: EvalOptions) -> int:
    """Play scenarios with a run's or a bare model, and with players that need none; print a table, write JSON."""
    if (options.run is None) == (options.model is None):
        raise ConfigError("eval: give either --run DIR or --model NAME_OR_PATH.")
    written = None if options.json is None else _json_file(options.json)
    if options.export is not None and not Path(options.export).parent.is_dir():
        raise ConfigError(f"--export {options.export}: there is no folder {Path(options.export).parent}.")
    if options.export is not None and hosts.have_joined():
        raise ConfigError(f"--export {options.export}: is for an evaluation in one process; leave it out.")
    use_compilation_cache()
    with contextlib.ExitStack() as opened:
        results = evaluate_scenarios(
            options.run or resolve({"model": options.model, "mesh": options.mesh}),
            options.scenario,
            episodes=options.episodes,
            temperature=options.temperature,
            seed=options.seed,
            mesh=options.mesh,
            export=opened.enter_context(open_table(Path(options.export))) if options.export else None,
        )
    if not hosts.is_first():
        return Exit.DONE
    console = Console(highlight=False)
    for name, players in results["scenarios"].items():
        console.print(_table(name, players))
    console.print(
        f"{options.episodes} episodes each, temperature {options.temperature:g}; ± is a 95 % interval", markup=False
    )
    if written is not None:
        _write_json(written, results, console)
    if options.export is not None:
        console.print(f"Episodes written to {options.export}", markup=False, soft_wrap=True)
    return Exit.DONE


def _json_file(text: str) -> AnyPath:
    """The file to write results to, known to have a place before anything is played."""
    path = open_path(text, option="--json")
    if is_stored(path):
        require_writable(path.parent, option="--json")
    elif not path.parent.is_dir():
        raise ConfigError(f"--json {text}: there is no folder {path.parent}.")
    return path


def _write_json(path: AnyPath, results: Any, console: Console) -> None:
    data = (json.dumps(results, indent=2) + "\n").encode()
    try:
        # Not beside and renamed on this machine: the file may be /dev/stdout.
        write_whole(path, data) if is_stored(path) else path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror}).") from None
    console.print(f"Written to {path}", markup=False, soft_wrap=True)


def _table(scenario: str, players: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=scenario, title_justify="left", title_style="bold")
    table.add_column("player", no_wrap=True, min_width=12)
    for title in ("success", "return", "of optimum", "steps", "unreadable"):
        table.add_column(title, justify="right", no_wrap=True)
    for player, found in players.items():
        half = found["return_ci95"][1] - found["return_mean"]
        table.add_row(
            player,
            f"{found['success_rate']:.3f}",
            f"{found['return_mean']:.3f} ± {half:.3f}",
            f"{found['optimum_share']:.0%}" if "optimum_share" in found else "",
            f"{found['episode_length']:.1f}",
            f"{found['unreadable_rate']:.1%}" if player == "model" else "",
        )
    return table


def play_command(options: PlayOptions) -> int:
    """A person plays a game on the terminal, or a file of replies on standard input does, one reply a line."""
    tokenizer = TextTokenizer.tiny()
    game = tokenize_game(make_game(options.game, style=options.style), tokenizer, reply_limit=1, constrain=False)
    environment, params, actions = game.game.environment, game.game.params, game.game.actions
    start, chance = jax.random.split(jax.random.key(options.seed))
    _, state = environment.reset(start, params)
    shared = len(game.prefix_ids)
    print(f"── read before every turn: {shared} tokens\n{tokenizer.decode(game.prefix_ids)}")
    total, turn, over = 0.0, 0, ""
    while not over:
        turn += 1
        ids, length = game.observation(state)
        print(f"── turn {turn}: {length} tokens, {shared + length} in all\n{_decode(game, ids, length)}", end="")
        reply = _ask(actions)
        if reply is None:
            print(f"\n── left after {turn - 1} turns, return {total:g}")
            return Exit.DONE
        action, tokens = _read(game, reply)
        understood = (
            f"{actions[action]}" if action >= 0 else f"cannot be read: the first action, {actions[0]}, is played"
        )
        print(f"── your reply, {tokens} tokens: {understood}")
        key = jax.random.fold_in(chance, turn)
        _, state, reward, terminated, truncated, _ = environment.step(key, state, max(action, 0), params)
        total += float(reward)
        over = "the game ended" if terminated else "the time is up" if truncated else ""
    print(f"{game.game.text(state)}\n── {over} after {turn} turns, return {total:g}")
    return Exit.DONE


def _decode(game: TokenizedGame, ids: jax.Array, length: jax.Array) -> str:
    return game.tokenizer.decode(np.asarray(ids)[-int(length) :].tolist())


def _ask(actions: Iterable[str]) -> str | None:
    """A reply, a bare action word put into its tags; None at the end of the input."""
    while True:
        try:
            reply = input("\n> ").strip()
        except EOFError:
            return None
        if reply.lower() in actions:
            return f"{OPEN}{reply}{CLOSE}"
        if reply:
            return reply
        print(f"── one of {', '.join(actions)}, or a whole reply.", end="")


def _read(game: TokenizedGame, reply: str) -> tuple[int, int]:
    """The action in a reply as the model's would be read (-1: unreadable), and the reply's number of tokens."""
    ids = game.tokenizer.encode(reply)
    state = game.reader.start
    for token in ids:
        state = game.reader.step(state, token)
    return int(game.reader.action(state)), len(ids)


def plan_command(options: PlanOptions, config: TrainConfig) -> int:
    """Compile a run's step for a slice of a TPU; print what it needs and takes, write JSON; 1 if it does not fit."""
    from jaxgrpo.plan import Assumed, plan
    from jaxgrpo.topologies import Topology

    if options.topology is None:
        raise ConfigError("plan: give --topology, such as v5e:4x4 (16 chips) or the cloud's name v5litepod-16.")
    for name in ("prompt_tokens", "reply_tokens", "steps"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be 0 or more.")
    topology = Topology.find(options.topology)
    written = None if options.json is None else _json_file(options.json)
    # A TPU of this machine, if there is one, is not asked for.
    jax.config.update("jax_platforms", "cpu")
    found = plan(
        config,
        topology,
        parts=("rollout", "update") if options.part == "both" else (options.part,),
        assumed=Assumed(options.tokenizer, options.prompt_tokens, options.reply_tokens, options.steps),
    )
    console = Console(highlight=False)
    for line in plan_text(found):
        console.print(line, markup=False, soft_wrap=True) if isinstance(line, str) else console.print(line)
    if written is not None:
        _write_json(written, found.as_json(), console)
    return Exit.DONE if found.fits else Exit.DOES_NOT_FIT


def plan_text(found: "Plan") -> Iterator[str | Table]:
    """A plan as lines and tables."""
    chip = found.topology.chip
    mesh = ",".join(f"{name}={size}" for name, size in found.mesh.items() if size > 1) or "none"
    yield (
        f"{found.model}, {found.parameters / 1e6:,.1f} million parameters, on {found.topology.name}: "
        f"{found.topology.chips} x {chip.name}, mesh {mesh}"
    )
    yield (
        f"{found.episodes} episodes of {found.steps} steps, replies of {found.reply_tokens} tokens; prompt of "
        f"{found.prompt_tokens} tokens and up to {found.observation_tokens} of the observation (tokenizer: "
        f"{found.tokenizer})"
    )
    yield _memory_table(found)
    if any(part.cost for part in found.parts.values()):
        yield _time_table(found)
    if any(part.cost.collectives for part in found.parts.values() if part.cost):
        yield _network_table(found)
    for name, part in found.parts.items():
        once = [place for place, turns in part.loops.items() if turns == 1]
        if once:
            yield f"{name}: loops of unknown length taken to run once: {len(once)} ({once[0]})"
    if found.seconds is not None:
        yield (
            f"An iteration takes at least {found.seconds:.2f} s: {found.tokens_per_second:,.0f} reply tokens a second "
            f"({found.played_tokens:,} tokens)"
        )
    if found.fits:
        yield f"It fits into {chip.memory / 1e9:.2f} GB a chip"
    else:
        needs = [f"the {name} needs {_gigabytes(part.needed)}" for name, part in found.parts.items() if not part.fits]
        yield f"It does not fit into {chip.memory / 1e9:.2f} GB a chip: {', '.join(needs)}"
        yield f"Try {'; or '.join(found.advice())}."


def _gigabytes(size: float | None) -> str:
    return "more" if size is None else f"{size / 1e9:.2f} GB"


def _memory_table(found: "Plan") -> Table:
    table = _figures("memory of a chip", ["GB"])
    for name, size in found.resident.items():
        table.add_row(name, f"{size / 1e9:.3f}")
    for half, part in found.parts.items():
        table.add_section()
        for name, size in part.memory.items():
            note = " (the above, padded)" if name == "arguments" else ""
            table.add_row(f"{half}: {name}{note}", f"{size / 1e9:.3f}")
        table.add_row(f"{half}: in all", _gigabytes(part.needed).removesuffix(" GB"), style="bold")
    return table


def _time_table(found: "Plan") -> Table:
    table = _figures("work of a chip in an iteration", list(found.parts))
    costs = {name: part.cost for name, part in found.parts.items() if part.cost is not None}

    def row(title: str, text: Callable[[Any, Any], str]) -> None:
        table.add_row(title, *(text(part, costs[name]) if name in costs else "" for name, part in found.parts.items()))

    row("matrix products, TFLOP", lambda _, cost: f"{cost.flops / 1e12:.2f}")
    row("memory traffic, GB", lambda _, cost: f"{cost.bytes / 1e9:,.1f}")
    row("sent to other chips, GB", lambda _, cost: f"{sum(t.bytes for t in cost.collectives) / 1e9:,.2f}")
    row("seconds at least", lambda part, _: f"{part.seconds:.3f} ({part.bound})")
    row("seconds to compile, here", lambda part, _: f"{part.compile_seconds:.0f}")
    return table


def _network_table(found: "Plan") -> Table:
    table = _figures("what a chip sends in an iteration", ["among", "times", "GB", "largest, MB"])
    for half, part in found.parts.items():
        for traffic in part.cost.collectives if part.cost else ():
            table.add_row(
                f"{half}: {traffic.kind}",
                str(traffic.devices),
                f"{traffic.count:,.0f}",
                f"{traffic.bytes / 1e9:,.2f}",
                f"{traffic.largest / 1e6:,.2f}",
            )
        table.add_section()
    return table


def _figures(title: str, columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
