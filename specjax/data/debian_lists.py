"""Debian's lists of package descriptions, downloaded and unpacked with apt."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence

from specjax import errors
from specjax.data import debian


def fetch_lists(
    folder: str | pathlib.Path, languages: Sequence[str] = ("en", "de")
) -> dict[str, tuple[pathlib.Path, ...]]:
    """Downloads the description lists of this machine's package sources.

    The system's own lists and caches are not touched, and root is not needed. A folder
    that holds lists in all languages is used as it is, without apt or network.

    Args:
        folder: where to put the lists (about 15 MB).
        languages: language codes.

    Returns:
        For each language its list files (packed), sorted by name.

    Raises:
        InputError: apt is not there, the download failed, or a language has no list.
    """
    folder = pathlib.Path(folder).absolute()
    found = _find_lists(folder, languages)
    if not all(found.values()):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".apt-", dir=folder) as scratch:
            _update_lists(pathlib.Path(scratch), languages)
            # Only a whole download counts: a killed one leaves the folder as it was.
            for paths in _find_lists(pathlib.Path(scratch), languages).values():
                for path in paths:
                    path.replace(folder / path.name)
        found = _find_lists(folder, languages)
    for language, paths in found.items():
        if not paths:
            raise errors.InputError(
                f"apt brought no Translation-{language} list into {folder}: the package"
                " sources of this machine offer none in that language"
            )
    return found


def _find_lists(
    folder: pathlib.Path, languages: Sequence[str]
) -> dict[str, tuple[pathlib.Path, ...]]:
    # Packed lists end in .lz4, .xz or the like.
    return {
        language: tuple(
            sorted(
                path
                for path in folder.glob(f"*_i18n_Translation-{language}*")
                if re.fullmatch(rf".*Translation-{language}(\.[a-z0-9]+)?", path.name)
            )
        )
        for language in languages
    }


def _update_lists(folder: pathlib.Path, languages: Sequence[str]) -> None:
    """Runs `apt-get update` with every path that it writes inside the folder."""
    if shutil.which("apt-get") is None:
        raise errors.InputError(
            "apt-get was not found: the Debian corpus needs a Debian or Ubuntu machine,"
            f" or its files *_i18n_Translation-xx copied into {folder.parent}"
        )
    (folder / "partial").mkdir()
    cache = folder / "cache"
    (cache / "archives" / "partial").mkdir(parents=True)
    # Hooks that run after an update act on the system; only a file can clear them.
    hooks = cache / "apt.conf"
    hooks.write_text(
        "".join(
            f"#clear APT::Update::{name};\n"
            for name in ("Pre-Invoke", "Post-Invoke", "Post-Invoke-Success")
        ),
        encoding="utf-8",
    )
    settings = {
        "Dir::State::Lists": folder,
        "Dir::Cache": cache,
        "Acquire::Languages": ",".join(languages),
        "Acquire::IndexTargets::deb::Packages::DefaultEnabled": "false",
        "Acquire::IndexTargets::deb-src::Sources::DefaultEnabled": "false",
    }
    if os.geteuid() == 0:
        # apt's own user may not enter the folder.
        settings["APT::Sandbox::User"] = "root"
    options = [f"-o{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        ["apt-get", f"-c={hooks}", *options, "update"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    # apt ends with 0 where a source could not be reached, and says so in a warning.
    messages = [
        line
        for line in (done.stderr + done.stdout).splitlines()
        if line.startswith(("E:", "Err:")) or "Failed to fetch" in line
    ]
    if done.returncode != 0 or messages:
        reason = messages[0] if messages else f"exit code {done.returncode}"
        raise errors.InputError(f"apt-get update failed: {reason}")


def read_lists(paths: Iterable[pathlib.Path]) -> list[debian.Description]:
    """Unpacks and parses list files.

    Args:
        paths: list files as `fetch_lists` returns them.

    Returns:
        The descriptions in the order of the files; of equal md5 only the first.

    Raises:
        InputError: a file cannot be unpacked or parsed.
    """
    records: dict[str, debian.Description] = {}
    for path in paths:
        try:
            text = _unpack(path).decode("utf-8")
            parsed = debian.parse_descriptions(text)
        except (UnicodeDecodeError, errors.InputError) as error:
            raise errors.InputError(f"{path} cannot be read: {error}") from error
        for record in parsed:
            records.setdefault(record.md5, record)
    return list(records.values())


def _unpack(path: pathlib.Path) -> bytes:
    if re.fullmatch(r".*Translation-\w+", path.name):
        return path.read_bytes()
    helper = shutil.which("apt-helper") or "/usr/lib/apt/apt-helper"
    try:
        done = subprocess.run(
            [helper, "cat-file", str(path)], capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise errors.InputError(
            "apt-helper, which unpacks it, was not found; it is part of apt"
        ) from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise errors.InputError(f"apt-helper says {message!r}")
    return done.stdout
