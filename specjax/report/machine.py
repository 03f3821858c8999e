"""What a run stands on: versions, devices and their memory, and an alarm on a CPU."""

from __future__ import annotations

import dataclasses
import html
import importlib.metadata
import os
import platform
from typing import Any

import jax

# Of which versions are told; those that are not installed are left out.
_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "specjax",
)


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run depends on, where they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a checkout that is not installed has no version of its own
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class Machine:
    """Versions and devices; a notebook shows it, with an alarm where it is a CPU.

    Attributes:
        versions: by package.
        platform: "tpu", "gpu" or "cpu".
        kind: of the first device.
        devices: how many there are.
        memory: bytes of the first device; of a CPU, of the computer. None: not known.
    """

    versions: dict[str, str]
    platform: str
    kind: str
    devices: int
    memory: int | None

    @property
    def alarm(self) -> str:
        """What to shout where no accelerator was found; else empty."""
        if self.platform != "cpu":
            return ""
        return (
            "NO TPU AND NO GPU WAS FOUND: everything below runs on the CPU. In Colab: "
            "Runtime > Change runtime type."
        )

    def __repr__(self) -> str:
        memory = "" if self.memory is None else f", {self.memory / 1e9:.1f} GB each"
        if self.platform == "cpu" and self.memory is not None:
            memory = f", {self.memory / 1e9:.1f} GB of memory"
        lines = [
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"{self.devices} x {self.kind} ({self.platform}){memory}",
        ]
        return "\n".join([self.alarm] * bool(self.alarm) + lines)

    def _repr_html_(self) -> str:
        alarm = (
            '<div style="background:#b3261e;color:#fff;padding:.7em 1em;'
            f'font-weight:bold;border-radius:5px">{html.escape(self.alarm)}</div>'
        )
        text = repr(self).removeprefix(self.alarm).strip()
        about = f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'
        return (alarm if self.alarm else "") + about


def here() -> Machine:
    """The machine that jax runs on."""
    first = jax.devices()[0]
    memory: int | None = None
    if first.platform == "cpu":
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        try:
            told: Any = first.memory_stats() or {}
        except jax.errors.JaxRuntimeError:  # not every device keeps count
            told = {}
        memory = told.get("bytes_limit")
    return Machine(
        versions=versions(),
        platform=first.platform,
        kind=first.device_kind,
        devices=jax.device_count(),
        memory=memory,
    )
