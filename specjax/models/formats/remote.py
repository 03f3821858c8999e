"""Checkpoints under a URL, copied to a folder by whatever `fsspec` speaks."""

from __future__ import annotations

import fnmatch
import pathlib
from collections.abc import Callable

from specjax.errors import InputError

# What is copied: settings and tokenizer, and the weights of the first format that is
# there, in the order in which `find` looks for them.
_BESIDE = ("config.json", "tokenizer_config.json", "spiece.model")
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
    ("flax_model.msgpack", "flax_model.msgpack.index.json", "flax_model-*.msgpack"),
    ("checkpoint", "target.*/*"),
    ("0/*",),
)


def is_remote(name: str) -> bool:
    """Whether a checkpoint's name is a URL, such as ``gs://bucket/folder``."""
    return "://" in name


def fetch(
    url: str,
    folder: pathlib.Path,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Copies a checkpoint's files; those that are there in full are kept.

    Args:
        url: of the checkpoint's folder.
        folder: made if it is absent.
        advance: told after each file how many bytes of how many are there.

    Raises:
        InputError: `fsspec`, or what it needs for this kind of URL, is not installed;
            the folder cannot be read or has no checkpoint; a file came short.
    """
    try:
        import fsspec
    except ImportError as error:
        raise InputError(
            f"{url} is read with the package fsspec, which is not installed: install "
            "specjax with the extra remote"
        ) from error
    try:
        store, root = fsspec.core.url_to_fs(url)
        root = str(root).rstrip("/")
        sizes = {
            path.removeprefix(f"{root}/"): int(entry["size"])
            for path, entry in store.find(root, detail=True).items()
        }
        wanted = {name: sizes[name] for name in _wanted(list(sizes))}
        if not wanted:
            raise InputError(f"{url} holds no checkpoint that is known.")
        done = 0
        for name, size in wanted.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f"{path.name}.partial")
                store.get_file(f"{root}/{name}", str(partial))
                if partial.stat().st_size != size:
                    raise InputError(f"{url}/{name} came short: run it again.")
                partial.replace(path)
            done += size
            advance(done, sum(wanted.values()))
    except InputError:
        raise
    # What a store may raise is written nowhere.
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{url} cannot be read: {first}") from error


def _wanted(names: list[str]) -> list[str]:
    for patterns in _WEIGHTS:
        weights = [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns)]
        if weights:
            return [name for name in _BESIDE if name in names] + sorted(weights)
    return []
