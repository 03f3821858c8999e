"""What all commands share: flags, one-sentence errors, the manifest of a run."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
from absl import flags
from ml_collections import config_flags

from specjax import errors
from specjax.report import machine

Main = Callable[[ml_collections.ConfigDict, pathlib.Path, flags.FlagValues], int | None]


def run(
    main: Main,
    argv: Sequence[str] | None = None,
    *,
    define: Callable[[flags.FlagValues], None] | None = None,
) -> None:
    """Parses the flags, runs `main` and exits: 0, or 2 after one sentence on stderr.

    Flags live in a set of their own and are defined here, so that importing a command
    defines nothing and a notebook can run several.

    Args:
        main: ``(config, workdir, flags) -> exit code or None``; it raises `InputError`
            for what its user must change.
        argv: command line with the program first; default: ``sys.argv``.
        define: adds flags of the command's own.
    """
    argv = _without_kernel_file(list(sys.argv if argv is None else argv))
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file(
        "config",
        None,
        "Python file with get_config(); --config.NAME=VALUE changes a setting.",
        lock_config=True,
        flag_values=values,
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "Folder that receives the run's files.", flag_values=values
    )
    if define is not None:
        define(values)
    if any(argument in ("--help", "-h", "-help") for argument in argv[1:]):
        print(sys.modules[main.__module__].__doc__)
        print(values.get_help())
        sys.exit(0)
    # Settings within the config are looked for in sys.argv, whatever is parsed; and the
    # manifest names this command, not the program that runs it.
    own, sys.argv = sys.argv, argv
    try:
        settings = _parse(values, argv, config)
        code = main(settings, _folder(workdir.value), values)
    except errors.InputError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted: what was written stays", file=sys.stderr)
        code = 130
    finally:
        sys.argv = own
    sys.exit(code or 0)


def _parse(
    values: flags.FlagValues,
    argv: list[str],
    config: flags.FlagHolder[ml_collections.ConfigDict],
) -> ml_collections.ConfigDict:
    given = [word for word in argv if re.match(r"--?config(=|$)", word)]
    if not given or given[0].endswith("="):
        raise errors.InputError(
            "--config is missing: name a file, for example --config=configs/demo.py"
        )
    if len(given) > 1:
        raise errors.InputError(f"--config is given {len(given)} times: once will do")
    try:
        rest = values(argv)
        # A file that cannot be read says so when a setting is looked up, not before.
        settings = config.value.lock()
    except (
        flags.Error,
        AttributeError,
        ImportError,
        KeyError,
        OSError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        unknown = _unknown_setting(argv, str(error))
        text = f"the config has no {unknown}" if unknown else _one_line(error)
        raise errors.InputError(f"flags: {text}") from error
    if len(rest) > 1:
        raise errors.InputError(
            f"flags: {rest[1]!r} is not a flag; settings are --config.NAME=VALUE"
        )
    return settings


def _folder(name: str | None) -> pathlib.Path:
    """The run's folder, which need not exist yet."""
    if not name:
        raise errors.InputError(
            "--workdir is missing: name the folder that receives the run's files"
        )
    path = pathlib.Path(name).expanduser().absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise errors.InputError(f"--workdir={name}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise errors.InputError(f"--workdir={name}: {nearest} cannot be written to")
    return path


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).replace("\\'", "'").split())
    # ml_collections tells of its attempts; what the system said is at the end.
    return re.sub(r"Configuration is not available.*\[Errno \d+\]", "--config:", text)


def _unknown_setting(argv: Sequence[str], message: str) -> str | None:
    """The flag that ml_collections means when it says no more than a quoted name."""
    found = re.match(r"[\"'\\]*(\w+)[\"'\\]", message)
    names = (argument.partition("=")[0] for argument in argv)
    return next((n for n in names if found and found[1] in n.split(".")[1:]), None)


def _without_kernel_file(argv: list[str]) -> list[str]:
    """Drops `-f kernel.json`, with which a notebook starts its own process."""
    for at, argument in enumerate(argv):
        if argument == "-f" and "".join(argv[at + 1 : at + 2]).endswith(".json"):
            return argv[:at] + argv[at + 2 :]
        if argument.startswith("--f=") and argument.endswith(".json"):
            return argv[:at] + argv[at + 1 :]
    return argv


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file in one piece: a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)


def manifest(config: ml_collections.ConfigDict, **effective: Any) -> dict[str, Any]:
    """What is needed to run this again: versions, device, revision, settings.

    Args:
        config: the settings as given.
        **effective: what they came to (resolved gamma, draft temperature, dead rows).
    """
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "versions": machine.versions(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu_count": os.cpu_count(),
        },
        "git": _git_revision(),
        "config": config.to_dict(),
        "effective": effective,
    }


def _git_revision() -> dict[str, Any] | None:
    folder = pathlib.Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "clean": not git("status", "-s")}
    except (OSError, subprocess.CalledProcessError):
        return None
