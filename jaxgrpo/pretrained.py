"""What `jaxgrpo export` does: a run's model as files that other programs load."""

import shutil
from pathlib import Path

from jaxgrpo.build import build, restore_params
from jaxgrpo.cli import ExportOptions
from jaxgrpo.config import ConfigError
from jaxgrpo.stopping import Exit


def export_command(options: ExportOptions) -> int:
    """Write the model of a run's last checkpoint, with its tokenizer, to a new folder."""
    if options.run is None or options.to is None:
        raise ConfigError("export: give the folder of a run, and --to with a new folder.")
    folder = Path(options.to).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"--to {options.to}: is there already, and not empty; give a new folder.")
    config, params = restore_params(options.run)
    # Under another name until it is whole, so that nobody loads the half of a model.
    partial = folder.with_name(f"{folder.name}.unfinished")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        build(config).save_pretrained(partial, params, dtype=options.dtype)
        partial.replace(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"--to {options.to}: cannot be written ({error.strerror}).") from None
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"Model and tokenizer as Hugging Face files, {size / 1e6:.1f} MB, in {folder}")
    return Exit.DONE
