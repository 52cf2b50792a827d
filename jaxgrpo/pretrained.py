"""What `jaxgrpo export` does: a run's model as files that other programs load."""

import shutil
from pathlib import Path
from typing import Any

from jaxgrpo.beginning import restore_params
from jaxgrpo.build import Experiment, build
from jaxgrpo.cli import ExportOptions
from jaxgrpo.config import ConfigError
from jaxgrpo.records import RunFolder, require_base
from jaxgrpo.stopping import Exit


def export_command(options: ExportOptions) -> int:
    """Write the model of a run's last checkpoint, with its tokenizer, or its adapters alone to a new folder."""
    if options.run is None or options.to is None:
        raise ConfigError("export: give the folder of a run, and --to with a new folder.")
    folder = Path(options.to).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"--to {options.to}: is there already, and not empty; give a new folder.")
    config, params = restore_params(options.run)
    experiment = build(config)
    require_base(RunFolder.at(options.run, option="export"), experiment.frozen_digest(), option="export")
    # Under another name until it is whole, so that nobody loads the half of a model.
    partial = folder.with_name(f"{folder.name}.unfinished")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        written = _write(options, experiment, params, partial, folder)
        partial.replace(folder)
    except OSError as error:
        raise ConfigError(f"--to {options.to}: cannot be written ({error.strerror}).") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{written}, {size / 1e6:.1f} MB, in {folder}")
    return Exit.DONE


def _write(options: ExportOptions, experiment: Experiment, params: Any, folder: Path, place: Path) -> str:
    """Writes the files and says what they are. `place` is where the folder will stand."""
    if options.format == "hf":
        experiment.save_pretrained(folder, params, dtype=options.dtype)
        return "Model and tokenizer as Hugging Face files"
    with_base = experiment.save_adapters(folder, params, place=place, dtype=options.dtype)
    return f"Adapters as PEFT files{', their base model in base/' if with_base else ''}"
