"""Settings under which every test runs: CPU, strict types and ranks, checked shapes."""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Iterator

import pytest

# Before jax is imported. Child processes of the tests inherit these.
_CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
from jaxtyping import install_import_hook

from tests import shapes

# float32 that silently becomes float64, or [B] that is silently spread over [B, B],
# must fail.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# What runs on one runs on the first; meshes take all. Child processes have one.
jax.config.update("jax_num_cpu_devices", 8)

# Before specjax is imported.
install_import_hook("specjax", f"{shapes.__name__}.{shapes.check.__name__}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the parity tests where torch or transformers is absent."""
    missing = [n for n in ("torch", "transformers") if not importlib.util.find_spec(n)]
    if missing:
        reason = f"needs {' and '.join(missing)}: install the extra `peers`"
        for item in items:
            if item.get_closest_marker("parity"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def memory_maps() -> Iterator[None]:
    """Forgets compiled programs before their memory maps run out.

    Each program holds some; a Linux process that has used up its 65,530 dies without a
    word, and a worker compiles thousands of programs.
    """
    yield
    try:
        maps = pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
        most = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:  # no Linux
        return
    if maps > most // 3:
        jax.clear_caches()


@pytest.fixture
def key() -> jax.Array:
    """A fixed key; fold in or split it for more."""
    return jax.random.key(20)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Optax raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield
