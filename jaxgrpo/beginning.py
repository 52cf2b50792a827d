"""Where a run's first parameters come from: a model that a name finds, or the last checkpoint of another run."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.config import ConfigError, LoRAConfig, TrainConfig, with_options
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import LoRA, parse_targets
from jaxgrpo.model.packed import PACKED, stored_as
from jaxgrpo.model.placement import file_shardings, make_placed, placed
from jaxgrpo.model.sharding import check_fits, make_mesh
from jaxgrpo.model.trained import (
    base_types,
    cast_base,
    initial_adapters,
    join,
    merge_adapters,
    parse_layers,
    restack,
    split_trained,
)
from jaxgrpo.model.transformer import Stack, Transformer
from jaxgrpo.records import RunFolder, digest, read_manifest, require_base
from jaxgrpo.storage import AnyPath

WEIGHTS, RUN, CRITIC = 0, 1, 3
"""Folded into the seed's key; held-out episodes have a number of their own in `evaluation`."""


def key_for(seed: int, purpose: int) -> jax.Array:
    """The key of a run's seed for one of the purposes above."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def restore_params(folder: AnyPath | str, mesh: str = "auto") -> tuple[TrainConfig, Any]:
    """A run's configuration, as for going on with it, and its trained parameters as of the last checkpoint.

    Args:
        folder: of the run.
        mesh: the one to be used now, whatever the run was made on.

    Raises:
        ConfigError: the folder holds no run, or a run without a checkpoint.
    """
    run, config, iteration = _last_checkpoint(str(folder), option="--run")
    config = with_options(config, {"mesh": mesh})
    return config, _trained_at(run, iteration, NamedModel.find(config))


def _last_checkpoint(text: str, *, option: str) -> tuple[RunFolder, TrainConfig, int]:
    """The run in a folder that an option names, its configuration as resumed, and its last checkpoint's iteration."""
    run = RunFolder.at(text, option=option)
    if not run.config.exists():
        raise ConfigError(f"{option} {text}: holds no run; give a folder that `jaxgrpo train` made.")
    config = with_options(run.read_config(), {"out": text, "resume": True})
    with contextlib.closing(Checkpoints(run.checkpoints, keep=None)) as checkpoints:
        latest = checkpoints.latest
    if latest is None:
        raise ConfigError(f"{option} {text}: holds no checkpoint yet; let the run reach its first one.")
    return run, config, latest


def _trained_at(run: RunFolder, iteration: int, model: "NamedModel") -> Any:
    """The trained parameters, and nothing else, of a checkpoint made with the model."""
    with contextlib.closing(Checkpoints(run.checkpoints, keep=None)) as checkpoints:
        return checkpoints.restore_params(iteration, model.abstract_trained())


def _whole_at(run: RunFolder, config: TrainConfig, iteration: int) -> Any:
    """All parameters of a run at a checkpoint, layers in one stack: what it trained, and the rest as it began."""
    beginning = Beginning(config)
    require_base(run, beginning.frozen_digest, option="--init-from")
    trained = _trained_at(run, iteration, beginning.model)
    return trained if beginning.model.all_trained else beginning.model.unite(trained, beginning.frozen())


class Beginning:
    """The parameters before a run's first iteration.

    The frozen ones are read once and kept, as nothing changes them; the trained ones are read anew every time, for who
    asks for them may give them away.
    """

    def __init__(
        self, config: TrainConfig, devices: Sequence[Any] | None = None, model: "NamedModel | None" = None
    ) -> None:
        """Finds the model and, with `init_from`, the checkpoint; no parameter is read yet.

        Args:
            config: of the run.
            devices: that parameters are divided among; None is all that there are.
            model: the model, where it is found already, for devices of its own.

        Raises:
            ConfigError: options that do not go together, or no such checkpoint.
            WeightsError: the model is absent, damaged or unknown.
            UnsupportedModelError: the model has a feature that is not computed here.
        """
        self.model = NamedModel.find(config, devices) if model is None else model
        self.start = _Start.find(config)
        self._config = config
        self._frozen: Any = nnx.State({}) if self.model.all_trained else None

    def trained(self) -> Any:
        """The parameters that are trained."""
        if self.start is None and self.model.config.lora is not None:
            return self.model.adapters(self._config.seed)  # not read from anywhere
        return self._read()

    def frozen(self) -> Any:
        """The parameters that are not; an empty `nnx.State` where all are trained."""
        if self._frozen is None:
            self._read()
        return self._frozen

    @functools.cached_property
    def frozen_digest(self) -> str | None:
        """A digest of the frozen parameters, in whatever type they are kept; None where all are trained."""
        if self.model.all_trained:
            return None

        def of_rounded(tree: Any) -> jax.Array:
            return digest(jax.tree.map(lambda x: stored_as(x, PACKED), tree))

        return f"{int(jax.jit(of_rounded)(self.frozen())):08x}"

    def _read(self) -> Any:
        model, seed = self.model, self._config.seed
        trained, frozen = model.own(seed) if self.start is None else self.start.parts(self._config, model)
        if self._frozen is None:
            self._frozen = frozen
        return trained


@dataclasses.dataclass
class _Start:
    """The checkpoint of another run from which a run takes its starting parameters."""

    run: str
    iteration: int
    digest: str | None = None
    """Of the parameters, once they were read here or in an earlier session."""

    @classmethod
    def find(cls, config: TrainConfig) -> "_Start | None":
        """The last checkpoint of `init_from`; of a resumed run the one it was begun with, not looked for until needed.

        Raises:
            ConfigError: no run is there, no checkpoint, or it is another model's.
        """
        if config.init_from is None:
            return None
        if config.run.resume and (begun := RunFolder.of(config).manifest).exists():
            origin = read_manifest(begun)["init_from"]
            return cls(origin["run"], origin["iteration"], origin["digest"])
        _, stored, iteration = _last_checkpoint(config.init_from, option="--init-from")
        if Path(stored.model).name != Path(config.model).name:
            raise ConfigError(
                f"--init-from {config.init_from}: is a run of --model {stored.model}, and this one is of "
                f"--model {config.model}; give the same model."
            )
        if config.lora.rank and stored.lora.rank and _adapters_of(config) != _adapters_of(stored):
            raise ConfigError(
                f"--init-from {config.init_from}: has adapters of {_adapters_of(stored)}, and this run "
                f"{_adapters_of(config)}; give the same, or --lora.rank 0 to go on from the merged model."
            )
        return cls(config.init_from, iteration)

    def parts(self, config: TrainConfig, model: "NamedModel") -> tuple[Any, Any]:
        """Trained and frozen parameters of the run that starts here, the same at every call and in every session.

        From one run with adapters to another these go on, on the base they were trained on. Else all parameters of the
        checkpoint, its adapters merged, are divided as this run does.

        Args:
            config: of the run that starts here.
            model: of that run.

        Raises:
            ConfigError: the checkpoint is gone, is another one now, or is another model's.
        """
        run, stored, latest = _last_checkpoint(self.run, option="--init-from")
        if not (run.checkpoints / str(self.iteration)).exists():
            raise ConfigError(
                f"--init-from {self.run}: this run began with its checkpoint {self.iteration}, which is gone (the last "
                f"one is {latest}); put it back, or start in another folder."
            )
        own = {"model": config.model, "base_dtype": config.learn.base_dtype, "mesh": config.run.mesh}
        stored = with_options(stored, own)
        if not (model.config.lora and stored.lora.rank):
            whole = _whole_at(run, stored, self.iteration)
            self._recognise(whole)
            return model.divide(whole, config.seed)
        base = Beginning(stored)
        require_base(run, base.frozen_digest, option="--init-from")
        adapters = _trained_at(run, self.iteration, model)
        self._recognise(adapters)
        return adapters, base.frozen()

    def _recognise(self, params: Any) -> None:
        """See that the parameters are those this run began with, once it has."""
        found = f"{int(digest(params)):08x}"
        if self.digest not in (None, found):
            raise ConfigError(
                f"--init-from {self.run}: its checkpoint {self.iteration} has other parameters than this run began "
                f"with (digest {found}, not {self.digest}); put it back, or start in another folder."
            )
        self.digest = found

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return dataclasses.asdict(self)


def _adapters_of(config: TrainConfig) -> str:
    """The options that adapters must share to stand for one another, as a user writes them."""
    lora = _lora(config.lora)
    assert lora is not None
    targets = "all-linear" if lora.targets == LoRA.targets else ",".join(lora.targets)
    return (
        f"--lora.rank {lora.rank} --lora.alpha {lora.alpha:g} --lora.targets {targets} "
        f"--train-layers {config.learn.train_layers}"
    )


def _lora(options: LoRAConfig) -> LoRA | None:
    """The adapters that options ask for, if any."""
    try:
        targets = parse_targets(options.targets)
    except ValueError as error:
        raise ConfigError(f"--lora.targets {options.targets}: {error}.") from None
    return LoRA(options.rank, options.alpha, targets) if options.rank else None


def find_tokenizer(name: str, path: Path) -> TextTokenizer:
    """The tokenizer of a model's files; `name` is what the user called it."""
    if name == "tiny":
        return TextTokenizer.tiny()
    if path.suffix == ".gguf":
        return TextTokenizer.from_gguf(path)
    return TextTokenizer.from_pretrained(path)


@dataclasses.dataclass(frozen=True, eq=False)
class NamedModel:
    """A model as a name finds it: its configuration and tokenizer, its weights not read yet."""

    path: Path
    config: ModelConfig
    tokenizer: TextTokenizer
    stacks: tuple[Stack, ...]
    base_dtype: str
    """Of the base under adapters; on a CPU bfloat16 is packed."""
    mesh: Mesh | None
    """Of the devices that parameters are divided among; None is a single device."""

    @classmethod
    def find(cls, options: TrainConfig, devices: Sequence[Any] | None = None) -> "NamedModel":
        """The model that a configuration names, for the devices given or, without, all that there are."""
        path = weights.resolve_model(options.model)
        config = weights.read_config(path, compute_dtype=_default_dtype())
        devices = jax.devices() if devices is None else devices
        return cls.of(options, path, config, find_tokenizer(options.model, path), devices)

    @classmethod
    def of(
        cls,
        options: TrainConfig,
        path: Path,
        config: ModelConfig,
        tokenizer: TextTokenizer,
        devices: Sequence[Any],
    ) -> "NamedModel":
        """A model of these files, divided into what is trained and what is not, and among devices, as options say."""
        name, train_layers = options.model, options.learn.train_layers
        if tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"--model {name}: the tokenizer has {tokenizer.vocab_size} ids and the model only "
                f"{config.vocab_size}; they do not belong together."
            )
        try:
            stacks = parse_layers(train_layers, config.layers)
        except ValueError as error:
            raise ConfigError(f"--train-layers {train_layers}: {error}.") from None
        # The type of products is the backend's own, see `_default_dtype`.
        base_dtype = config.compute_dtype if options.learn.base_dtype == "auto" else options.learn.base_dtype
        try:
            mesh = make_mesh(options.run.mesh, devices)
            check_fits(mesh, config)
        except ValueError as error:
            raise ConfigError(f"--mesh {options.run.mesh}: {error}.") from None
        on_tpus = devices[0].platform == "tpu"
        config = dataclasses.replace(config, lora=_lora(options.lora), scan_decode=on_tpus)
        return cls(path, config, tokenizer, stacks, base_dtype, mesh)

    @property
    def all_trained(self) -> bool:
        """Whether nothing is frozen."""
        return self.config.lora is None and all(stack.trained for stack in self.stacks)

    @property
    def _bare(self) -> ModelConfig:
        """The configuration without adapters."""
        return dataclasses.replace(self.config, lora=None)

    @property
    def _types(self) -> Any:
        """Of the model's own parameters: all float32 where they are trained, else those of a base."""
        if self.config.lora is None:
            return jnp.float32
        # Where products are in float32, as on CPUs, see `_default_dtype`.
        packs = self.base_dtype == "bfloat16" and self.config.compute_dtype == "float32"
        return base_types(self.config, PACKED if packs else self.base_dtype)

    def abstract_trained(self) -> Any:
        """Shapes, types and places of the parameters that are trained."""
        whole = nnx.split(Transformer.abstract(self.config, self.stacks))[1]
        return placed(self.mesh, split_trained(whole, self.stacks)[0])

    def abstract_frozen(self) -> Any:
        """Shapes, types and places of the parameters that are not."""
        frozen = split_trained(nnx.split(Transformer.abstract(self.config, self.stacks))[1], self.stacks)[1]
        if self.config.lora is not None:
            frozen = jax.eval_shape(functools.partial(cast_base, types=self._types), frozen)
        return placed(self.mesh, frozen)

    def adapters(self, seed: int) -> Any:
        """Adapters before any training."""
        return make_placed(self.mesh, functools.partial(initial_adapters, self.config, self.stacks))(
            key_for(seed, WEIGHTS)
        )

    def divide(self, whole: Any, seed: int) -> tuple[Any, Any]:
        """Trained and frozen parameters out of all, whose layers are in one stack; adapters are drawn from the seed."""
        if len(self.stacks) > 1:
            whole = restack(nnx.merge(nnx.split(Transformer.abstract(self._bare))[0], whole), self.stacks)
        if self.config.lora is not None:
            return self.adapters(seed), cast_base(whole, self._types)
        return split_trained(whole, self.stacks)

    def unite(self, trained: Any, frozen: Any) -> Any:
        """All parameters out of the two parts, their layers in one stack; adapters are merged."""
        model = nnx.merge(nnx.split(Transformer.abstract(self.config, self.stacks))[0], join(trained, frozen))
        return restack(model, (Stack(self.config.layers),)) if self.config.lora is None else merge_adapters(model)

    def own(self, seed: int) -> tuple[Any, Any]:
        """Trained and frozen parameters of the model's files or, where it has none, drawn from the seed.

        Those in files are read as they are divided, without a copy.
        """
        if self.path.suffix == ".json":
            draw = make_placed(self.mesh, functools.partial(weights.init, self._bare))
            return self.divide(draw(key_for(seed, WEIGHTS)), seed)
        loaded = weights.load(
            self.path,
            compute_dtype=self.config.compute_dtype,
            shardings=file_shardings(self.mesh, self._bare),
            dtype=self._types,
            stacks=self.stacks,
        )[1]
        if self.config.lora is not None:
            return self.adapters(seed), loaded
        return split_trained(loaded, self.stacks)


def _default_dtype() -> str:
    """Full precision on the CPU, where it is as fast; bfloat16 on accelerators."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
