"""The command line, a thin skin on the Python face: a user's mistake is one line on standard error and exit code 2."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxgrpo import config as options
from jaxgrpo import hosts
from jaxgrpo.config import ConfigError, LearnConfig, OptimizerConfig, PlayConfig, RunConfig, TrainConfig, nearest
from jaxgrpo.hosts import LaunchOptions
from jaxgrpo.stopping import Exit

# Sections whose options the help page shows without the section's name.
_UNQUALIFIED = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class _OptionsOfARun(TrainConfig):
    play: Annotated[PlayConfig, _UNQUALIFIED] = PlayConfig()
    learn: Annotated[LearnConfig, _UNQUALIFIED] = LearnConfig()
    optimizer: Annotated[OptimizerConfig, _UNQUALIFIED] = OptimizerConfig()
    run: Annotated[RunConfig, _UNQUALIFIED] = RunConfig()
    config: str | None = None
    """A TOML file of options, flat or in the sections play, learn, lora, optimizer and run."""

    def __post_init__(self) -> None:
        """Nothing: values are judged when all sources are together."""


@dataclasses.dataclass(frozen=True)
class TrainOptions(_OptionsOfARun):
    """Train a language agent: `jaxgrpo train` alone trains the small built-in model on Frozen Lake in minutes.

    An option is taken from the command line, else from the --config file, else from the preset. A run that is resumed
    keeps its options, so --out and --resume are enough.
    """

    launch: Annotated[LaunchOptions, _UNQUALIFIED] = LaunchOptions()


@dataclasses.dataclass(frozen=True)
class PlanOptions(_OptionsOfARun):
    """Compile a run's step for a TPU that is not here: memory by part, FLOPs, bytes, collectives, time at best.

    Takes the options of `jaxgrpo train` and needs neither weights nor a TPU, but the extra `tpu`. Exit code 1: the step
    does not fit.
    """

    topology: str | None = None
    """Slice to plan for: v5e:4x4, v6e:2x4, v5p:2x2x1, or the cloud's name: v5litepod-16, v6e-8, v5p-8."""
    part: Literal["both", "rollout", "update"] = "both"
    """What to compile; the rollout alone, as in an evaluation, without any state of learning."""
    tokenizer: str | None = None
    """Tokenizer of a model that is not here: a folder with tokenizer.json, a .gguf file or Qwen's qwen.tiktoken."""
    prompt_tokens: int = 0
    """Tokens of the prompt that all steps share; 0: the game's own."""
    reply_tokens: int = 0
    """Tokens of a reply; 0: --reply-limit, the most."""
    steps: int = 0
    """Steps of an episode; 0: the game's limit."""
    json: str | None = None
    """Write all figures to this file too, here or gs://BUCKET/FILE."""


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Play scenarios with a model, and beside it with players that need none: random, greedy, optimal where known."""

    run: str | None = None
    """Folder of a run, here or gs://BUCKET/FOLDER: its model as of the last checkpoint, its wording and replies."""
    model: str | None = None
    """A model as in `jaxgrpo train --model`, without any training."""
    scenario: tuple[str, ...] = ()
    """Scenarios to play, one or more; by default the run's own game."""
    episodes: int = 50
    """Episodes of each scenario."""
    temperature: float = 0.5
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of the games and of sampling."""
    json: str | None = None
    """Write the results to this file too, here or gs://BUCKET/FILE."""
    export: str | None = None
    """Write the model's steps to this file: prompt, reply, reward, ...; .jsonl or .parquet."""
    mesh: str = "auto"
    """Devices that the model is divided among, as in `jaxgrpo train --mesh`."""
    launch: Annotated[LaunchOptions, _UNQUALIFIED] = LaunchOptions()


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run's last checkpoint, with its tokenizer, as files that other programs load."""

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a run."""
    format: Literal["hf", "peft"] = "hf"
    """Kind of files; hf: a folder of Hugging Face files, for transformers and `jaxgrpo train --model` (adapters are
    merged into it); peft: the adapters of a run with --lora.rank, for PEFT."""
    to: str | None = None
    """New folder for the files."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights; bfloat16 rounds them and takes half the space."""


@dataclasses.dataclass(frozen=True)
class PlayOptions:
    """Play a game yourself, seeing exactly the text that the model sees, with its number of tokens."""

    game: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GAME")] = "frozen-lake"
    """Game or scenario."""
    seed: int = 0
    """Seed of the game."""
    style: Literal["short", "full"] = "short"
    """Wording of the observation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (see `Exit`).

    Args:
        argv: words after the program's name; by default those of this process.
    """
    command, *words = (list(sys.argv[1:]) if argv is None else list(argv)) or ["--help"]
    # Orbax (through absl) and gcsfs log a traceback for every error, a full disk say, before they raise it to us.
    for name in ("absl", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if command in ("-h", "--help"):
            print(_overview(), end="")
            return Exit.DONE
        if command == "--version":
            from importlib.metadata import version

            print(f"jaxgrpo {version('jaxgrpo')}")
            return Exit.DONE
        if command not in _COMMANDS:
            names = ", ".join(_COMMANDS)
            raise ConfigError(f"unknown command {command!r}; there are {names}.{nearest(command, _COMMANDS)}")
        return _COMMANDS[command][0](words)
    except ValueError as error:
        if not _is_users(error):
            raise
        print(f"jaxgrpo: {' '.join(str(error).split())}", file=sys.stderr)
        return _ended(Exit.USER_ERROR)
    except KeyboardInterrupt:
        # Before training watches for signals, or in another command.
        print("jaxgrpo: interrupted", file=sys.stderr)
        return _ended(Exit.INTERRUPTED)
    except hosts.PEER_FAILURES as error:
        if not hosts.tells_of_peers(error):
            raise
        print(f"jaxgrpo: {hosts.lost_line(error)}", file=sys.stderr)
        return _ended(Exit.PEER_LOST)


def _ended(code: int) -> int:
    """The exit code; of several processes, one that fails does not wait for the others to end as well."""
    return hosts.leave(code) if hosts.have_joined() else code


def _is_users(error: ValueError) -> bool:
    """Mistakes of the user are raised as subclasses of ValueError of our own; any other ValueError is our fault."""
    return type(error).__module__.split(".")[0] in ("jaxgrpo", "envs_jax")


def _train(words: list[str]) -> int:
    given = read_options(TrainOptions, words)
    if given is None:
        given = read_options(TrainOptions, [word for word in words if word not in ("-h", "--help")]) or {}
        toml = given.get("config")
        shown = dataclasses.fields(TrainConfig)
        config = train_config(given)
        return _help("train", TrainOptions(**{f.name: getattr(config, f.name) for f in shown}, config=toml))
    if (code := _joined("train", words, given)) is not None:
        return code
    config = train_config(given)
    from jaxgrpo.trainer import train

    return train(config).exit


def _joined(command: str, words: list[str], given: dict[str, Any]) -> int | None:
    """Takes the launch options out, and makes this process one of its cluster's; or, as its parent, the exit code."""
    launch = LaunchOptions(**{f.name: given.pop(f.name) for f in dataclasses.fields(LaunchOptions) if f.name in given})
    cluster = hosts.find_cluster(launch)
    if cluster is None:
        return None
    if not hosts.is_supervised():
        return hosts.supervise([command, *words])
    hosts.join(cluster)
    return None


def _plan(words: list[str]) -> int:
    given = read_options(PlanOptions, words)
    if given is None:
        given = read_options(PlanOptions, [word for word in words if word not in ("-h", "--help")]) or {}
        own, config = _of_plan(given)
        shown = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
        return _help("plan", PlanOptions(**shown, **own, config=given.get("config")))
    own, config = _of_plan(given)
    from jaxgrpo.commands import plan_command

    return plan_command(dataclasses.replace(PlanOptions(), **own), config)


def _of_plan(given: Mapping[str, Any]) -> tuple[dict[str, Any], TrainConfig]:
    """What is asked of a plan, and the run that is planned."""
    names = {field.name for field in dataclasses.fields(PlanOptions)} - {
        field.name for field in dataclasses.fields(_OptionsOfARun)
    }
    own = {name: value for name, value in given.items() if name in names}
    return own, train_config({name: value for name, value in given.items() if name not in names})


def train_config(given: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run from the options given on the command line, `config` (a TOML file) among them.

    Raises:
        ConfigError: an unknown option, or a value that is not allowed.
    """
    given = dict(given)
    toml = Path(given.pop("config")) if given.get("config") else None
    chosen = {**(options.read_toml(toml) if toml else {}), **given}
    if not chosen.get("resume"):
        return options.resolve(given, toml=toml)
    from jaxgrpo.records import RunFolder

    named = {name: chosen[name] for name in ("game", "model", "seed", "out") if name in chosen}
    folder = RunFolder.of(options.with_options(TrainConfig(), named))
    stored = None
    if folder.config.exists():
        # How long a session lasts and what of it is profiled is its own affair; everything else goes on as it was.
        stored = options.with_options(folder.read_config(), {"max_seconds": None, "profile": 0})
    return options.resolve({**given, "out": str(folder.path)}, toml=toml, resumed=stored)


def _eval(words: list[str]) -> int:
    given = read_options(EvalOptions, words)
    if given is None:
        return _help("eval", EvalOptions())
    if (code := _joined("eval", words, given)) is not None:
        return code
    chosen = dataclasses.replace(EvalOptions(), **given)
    from jaxgrpo.commands import eval_command

    return eval_command(chosen)


def _export(words: list[str]) -> int:
    given = _read_with_positional(ExportOptions, "run", words)
    if given is None:
        return _help("export", ExportOptions())
    chosen = dataclasses.replace(ExportOptions(), **given)
    from jaxgrpo.pretrained import export_command

    return export_command(chosen)


def _play(words: list[str]) -> int:
    given = _read_with_positional(PlayOptions, "game", words)
    if given is None:
        return _help("play", PlayOptions())
    chosen = dataclasses.replace(PlayOptions(), **given)
    from jaxgrpo.commands import play_command

    return play_command(chosen)


def _read_with_positional(kind: type, name: str, words: list[str]) -> dict[str, Any] | None:
    """As `read_options`; a first word that is no option is the value of option `name`."""
    first, rest = ([], words) if not words or words[0].startswith("-") else (words[:1], words[1:])
    given = read_options(kind, rest)
    return given if given is None or not first else {**given, name: first[0]}


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train a language agent; with no options, the embedded default"),
    "eval": (_eval, "play scenarios with a model and with players that need none"),
    "play": (_play, "play a game yourself, seeing what the model sees"),
    "plan": (_plan, "compile a run for a TPU that is not here: does it fit, how fast is it at best"),
    "export": (_export, "write a run's model as files that other programs load"),
}

_ABSENT = ("\0",)


def read_options(kind: type, words: Sequence[str]) -> dict[str, Any] | None:
    """The options among `words` by flat name, of the types that dataclass `kind` declares; None where help is asked.

    Only what is given is returned: the defaults depend on it. So tyro splits the words here, and shows the help.

    Raises:
        ConfigError: an unknown option (the nearest is named), a missing or a wrong value.
    """
    if {"-h", "--help"} & set(words):
        return None
    kinds = options.field_types(kind)
    flags = {name for name, type_ in kinds.items() if type_ is bool}
    # A section's name in that of an option (--lora.rank) is none that a field can have.
    fields = [
        (_attribute(name), Annotated[tuple[str, ...], tyro.conf.arg(name=name)], _ABSENT)
        for name in kinds
        if name not in flags
    ]
    fields += [(switch, bool, False) for name in sorted(flags) for switch in (name, f"no_{name}")]
    given, unknown = tyro.cli(
        dataclasses.make_dataclass("Given", fields),
        args=_gather(words, {name for name, type_ in kinds.items() if type_ == tuple[str, ...]}),
        return_unknown_args=True,
        add_help=False,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if unknown:
        raise ConfigError(_unknown(unknown[0], [*kinds, *(f"no_{name}" for name in flags)]))
    values = {name: getattr(given, _attribute(name)) for name in kinds if name not in flags}
    values = {name: texts for name, texts in values.items() if texts != _ABSENT}
    several = {name: values.pop(name) for name in list(values) if kinds[name] == tuple[str, ...]}
    for name, texts in {**values, **several}.items():
        if not texts or (len(texts) > 1 and name in values):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{' '.join([option, *texts])}: needs {'a' if not texts else 'one'} value.")
    switched = {name: getattr(given, name) for name in flags if getattr(given, name) or getattr(given, f"no_{name}")}
    return {**options.from_text(kind, {name: texts[0] for name, texts in values.items()}), **several, **switched}


def _attribute(option: str) -> str:
    return option.replace(".", "__")


def _gather(words: Sequence[str], several: set[str]) -> list[str]:
    """The words, with the values of an option that takes several put together, and the last of any other kept."""
    given: dict[str, list[str]] = {"": []}
    values = given[""]
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        option, equals, value = word.partition("=")
        values = given.setdefault(option, [])
        if option.lstrip("-").replace("-", "_") not in several:
            values.clear()
        values += [value] if equals else []
    return [word for option, values in given.items() for word in ([option] if option else []) + values]


def _unknown(word: str, known: list[str]) -> str:
    if not word.startswith("-"):
        return f"unexpected {word!r}: options begin with --."
    option = word.split("=")[0]
    return f"unknown option {option}.{nearest(option.lstrip('-').replace('-', '_'), known, option=True)}"


def _help(command: str, defaults: Any) -> int:
    """The help page of a command, with the values that apply as defaults."""
    try:
        tyro.cli(
            type(defaults),
            prog=f"jaxgrpo {command}",
            args=["--help"],
            default=defaults,
        )
    except SystemExit:
        print(_exit_codes() if command in ("train", "plan") else "", end="")
    return Exit.DONE


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in _COMMANDS.items())
    return (
        "usage: jaxgrpo COMMAND [OPTIONS]\n\nReinforcement learning of language agents, compiled whole.\n\n"
        f"commands:\n{commands}\n\n"
        "Options of a command: jaxgrpo COMMAND --help. A first run, about a minute on two cores: jaxgrpo train\n\n"
        f"{_exit_codes()}"
    )


def _exit_codes() -> str:
    return "exit codes:\n" + "".join(f"  {int(code):3}  {code.meaning}\n" for code in Exit)
