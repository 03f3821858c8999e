"""Who may import whom, what `import specjax` loads, and how long files may be."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What each module of specjax may import of specjax. A package stands for all its
# modules; `models.base` is named apart from the rest of `models`.
BASE = ("errors", "types", "trees", "rows")
ARRAYS = (*BASE, "controls", "sampling")
DRAFTING = (*ARRAYS, "models.base", "drafters")
DECODING = (*DRAFTING, "verify", "checks", "decode_state", "commit", "decoding")
THEORY = ("theory", "theory_laws", "theory_blocks")
METRICS = (*DECODING, *THEORY, "metrics")
ALLOWED = {
    "errors": (),
    "types": ("errors",),
    "trees": ("errors",),
    "rows": (),
    "controls": BASE,
    "sampling": (*BASE, "controls"),
    "tree_picker": (*BASE, "decode_state"),
    "verify": (*ARRAYS, "verify"),
    "theory": (),
    "theory_laws": ("theory",),
    "theory_blocks": ("theory",),
    "roofline": ("errors", "models.t5_config"),
    "models": (*BASE, "models"),
    # Orbax is spoken to in one place.
    "models.formats.orbax_folder": (*BASE, "models", "checkpoints"),
    "drafters": DRAFTING,
    # Those that are made of a T5's layers.
    **{
        f"drafters.{name}": (*DRAFTING, "models")
        for name in (
            "early_exit",
            "medusa",
            "eagle",
            "parallel",
            "quantized",
            "trimmed",
        )
    },
    # It verifies within a block.
    "drafters.cascade": (*DRAFTING, "verify"),
    "checks": (*DRAFTING, "verify"),
    "decode_state": DRAFTING,
    "commit": (*DRAFTING, "verify", "decode_state"),
    "decoding": DECODING,
    "beam": (*ARRAYS, "models.base", "checks"),
    "proof": (*DECODING, "proof"),
    "metrics": METRICS,
    "report": (*METRICS, "roofline", "memory_plan", "report"),
    "training": (*DECODING, "models", "roofline", "training"),
    "data": ("errors", "data"),
    "checkpoints": ("errors",),
    "sharding": ("errors",),
    "memory_plan": ("errors", "models.t5", "models.t5_config", "roofline", "sharding"),
    "zoo": ("errors",),
    # The outer edge: conveniences that join everything. Nothing may import them.
    "": (*METRICS, "beam", "models", "data", "pair", "generation"),
    "streaming": (*DECODING, "data.tokenizer"),
    "pair_rows": (*DECODING, "data"),
    "generation": (*METRICS, "beam", "data", "pair_rows"),
    "pair": (
        *METRICS,
        *("beam", "models", "data", "zoo", "streaming", "pair_rows", "generation"),
    ),
}
# Configs and commands stop at the door; `data` knows numpy alone.
FORBIDDEN = ("absl", "ml_collections", "experiments", "configs", "tests")
NUMPY_ONLY = ("data", *THEORY, "roofline")

# What `import specjax` must not load, beyond what jax and flax load themselves.
HEAVY = (
    "absl ml_collections matplotlib optax orbax rich safetensors sentencepiece torch "
    "transformers"
).split()


def module_name(path: pathlib.Path) -> str:
    """`specjax/models/t5.py` -> `models.t5`; `specjax/__init__.py` -> ``."""
    parts = path.relative_to(ROOT / "specjax").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {
    module_name(path): path.read_text()
    for path in sorted((ROOT / "specjax").rglob("*.py"))
}


def covers(names: tuple[str, ...], module: str) -> bool:
    """Whether `module`, or a package that holds it, is among `names`."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def imports(source: str) -> Iterator[str]:
    """Every dotted name that a source imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """What `module` of specjax imports against the rules."""
    rules = [name for name in ALLOWED if name and covers((name,), module)]
    if module and not rules:
        return [f"{module} is not in the import table"]
    allowed = ALLOWED[max(rules, key=len, default="")]
    found = []
    for name in imports(source):
        first, _, inner = name.partition(".")
        if name.startswith("."):
            found.append(f"{module} imports {name}: imports are absolute")
        elif first in FORBIDDEN:
            found.append(f"{module} imports {name}: the library knows no {first}")
        elif first in ("jax", "flax") and covers(NUMPY_ONLY, module):
            found.append(f"{module} imports {name}: it knows numpy alone")
        elif first == "specjax":
            # `specjax.models.t5.T5` names the module `models.t5`.
            while inner and inner not in SOURCES:
                inner = inner.rpartition(".")[0]
            package = module in SOURCES and inner == module
            if not inner:
                found.append(f"{module} imports {name}: the package's own public face")
            elif not package and not covers(allowed, inner):
                found.append(f"{module} imports {inner}: not among {allowed}")
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_imports_run_one_way(module: str) -> None:
    assert violations(module, SOURCES[module]) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("verify", "from specjax import decoding"),
        ("decoding", "from specjax.models import t5"),
        ("drafters.model", "import specjax.models.t5"),
        ("drafters.model", "def f():\n    from specjax.models.t5 import T5"),
        ("sampling", "from specjax import Sampling"),
        ("models.t5", "from .base import Cache"),
        ("training.step", "from ml_collections import ConfigDict"),
        ("report", "from experiments import build"),
        ("data.tokenizer", "import jax.numpy as jnp"),
        ("unheard_of", "import math"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1
    assert violations("decoding", "from specjax.models.base import Cache") == []


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for folder in ("specjax", "experiments")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines >= 500} == {}


PROBE = """
import json, sys, time
import flax.nnx, jax, jaxtyping, numpy
before, start = set(sys.modules), time.process_time()
import specjax
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_import_is_light() -> None:
    seconds = []
    for _ in range(3):  # Processor time; a busy machine stretches even that a little.
        run = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        elapsed, loaded = json.loads(run.stdout)
        assert [name for name in loaded if covers(tuple(HEAVY), name)] == []
        seconds.append(elapsed)
        if elapsed < 1.5:
            return
    pytest.fail(f"`import specjax` took {min(seconds):.1f} s beyond jax and flax")


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
    folders = ("specjax", "experiments", "configs", "tests", "colab", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    texts = {".py", ".md", ".toml", ".txt", ".ipynb", ".json", ""}
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in paths
        if path.is_file() and path.suffix in texts
        if (match := pattern.search(path.read_text()))
    }
    assert found == {}
