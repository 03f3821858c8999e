"""The card and the curves that go with an exported model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import warnings

import jax

from experiments import train_log
from specjax import errors
from specjax.models import t5
from specjax.report import card, curves
from specjax.training import optimizer


def write_card(workdir: pathlib.Path, model: t5.T5, step: int) -> None:
    """Writes `README.md` and, where matplotlib is at hand, `curves.svg` to the export.

    Args:
        workdir: of the run; without its `manifest.json` there is no card.
        model: what was exported.
        step: whose weights these are.
    """
    folder = workdir / "export"
    path = workdir / "manifest.json"
    if not path.is_file():
        warnings.warn(f"the export has no card: there is no {path}", stacklevel=2)
        return
    lines = train_log.read_lines(workdir)
    (folder / "curves.svg").unlink(missing_ok=True)
    picture = None
    # Without the extra `plots`, a card without curves.
    with contextlib.suppress(errors.InputError):
        if lines:
            curves.plot(lines, folder / "curves.svg")
            picture = "curves.svg"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    own = optimizer.OptimizerConfig(**manifest["config"]["optimizer"])
    content = card.markdown(
        title=workdir.name,
        shape=dataclasses.asdict(model.config),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model)),
        optimizer=dataclasses.asdict(own),
        manifest=manifest,
        lines=lines,
        step=step,
        picture=picture,
    )
    (folder / "README.md").write_text(content, encoding="utf-8")
