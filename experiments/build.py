"""From settings to objects: the only tables that turn names into things."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh

from experiments import build_drafter, build_mesh, build_widen
from specjax import errors, sharding, zoo
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.drafters.base import Drafter
from specjax.drafters.model import ModelDrafter
from specjax.models import shared_encoder, t5, t5_weights
from specjax.pair import dead_from
from specjax.sampling import Sampling, check_sampling
from specjax.verify import (
    Verifier,
    best_path_verify,
    block_verify,
    coupled_verify,
    exact_match_verify,
    kseq_verify,
    lenient,
    recursive_distinct_verify,
    recursive_verify,
    token_verify,
    traversal_verify,
    typical,
)

# Rules with settings of their own: what makes one, and its settings unless told.
TUNED: Mapping[str, tuple[Callable[..., Verifier], dict[str, float]]] = {
    "lenient": (lenient, {"lenience": 0.5}),
    "typical": (typical, {"epsilon": 0.3, "delta": 0.09}),
}
VERIFIERS: Mapping[str, Verifier] = {
    "token": token_verify,
    "block": block_verify,
    "exact_match": exact_match_verify,
    "coupled": coupled_verify,
    "recursive": recursive_verify,
    "recursive_distinct": recursive_distinct_verify,
    "kseq": kseq_verify,
    "best_path": best_path_verify,
    "traversal": traversal_verify,
    **{name: make(**settings) for name, (make, settings) in TUNED.items()},
}
_GAMMA = 7  # of a chain, where none is set
DTYPES: Mapping[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

Entry = TypeVar("Entry")


def named(table: Mapping[str, Entry], name: str, setting: str) -> Entry:
    """The entry of a table.

    Raises:
        InputError: no such entry; the message names the setting and the known names.
    """
    if name not in table:
        raise errors.InputError(
            f"config.{setting} is {name!r}: it must be one of {', '.join(table)}"
        )
    return table[name]


def names(
    config: ml_collections.ConfigDict, setting: str, known: Iterable[str]
) -> list[str]:
    """The names that a setting lists, one or more; a string may hold several.

    Args:
        config: the settings.
        setting: of them.
        known: which names there are.

    Raises:
        InputError: it lists none, or one that is not known.
    """
    given, known = config[setting], tuple(known)
    entries = [given] if isinstance(given, str) else given
    wanted = f"it takes some of {', '.join(known)}"
    if not isinstance(entries, list | tuple) or not entries:
        raise errors.InputError(f"config.{setting} is {given!r}: {wanted}")
    found = []
    for entry in entries:
        for name in entry.split(",") if isinstance(entry, str) else [entry]:
            name = name.strip() if isinstance(name, str) else name
            if name not in known:
                raise errors.InputError(f"config.{setting} has {name!r}: {wanted}")
            found.append(name)
    return found


def all_or_names(
    config: ml_collections.ConfigDict, setting: str, known: Iterable[str]
) -> list[str]:
    """The names that a setting lists, or all of them where it is "all".

    Args:
        config: the settings.
        setting: of them.
        known: which names there are.

    Raises:
        InputError: as of `names`.
    """
    return list(known) if config[setting] == "all" else names(config, setting, known)


def check_settings(
    config: ml_collections.ConfigDict,
    known: ml_collections.ConfigDict,
    path: str = "",
    tables: Iterable[str] = (),
) -> None:
    """Refuses a config of another command, and a setting that no command reads.

    Args:
        config: the settings.
        known: a config of this command that has all of its settings.
        path: of `config` within the whole.
        tables: settings that hold entries by names of the user's own.

    Raises:
        InputError: naming the first setting that is missing or not known.
    """
    with known.unlocked():
        for name in tables:  # as many entries as the config has
            known[name] = config.get(name, {})
    for name in known:
        if name not in config:
            raise errors.InputError(
                f"--config has no setting {path}{name}: this command needs it"
            )
        if isinstance(known[name], ml_collections.ConfigDict):
            if not isinstance(config[name], ml_collections.ConfigDict):
                raise errors.InputError(f"config.{path}{name} must be a ConfigDict")
            check_settings(config[name], known[name], f"{path}{name}.")
    for name in config:
        if name not in known:
            raise errors.InputError(
                f"--config has a setting {path}{name} that this command does not know"
            )


@dataclasses.dataclass(frozen=True)
class Target:
    """A target, loaded and checked.

    Attributes:
        model: at the cost that ``config.target.widen`` asks for.
        tokenizer: its tokenizer.
        num_tokens: ids with a meaning; the rows past them are dead. None: none are.
        folder: that it was read from.
        width: of the model there, before it was widened.
    """

    model: t5.T5
    tokenizer: tokenizers.Tokenizer
    num_tokens: int | None
    folder: pathlib.Path
    width: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """What a decode needs, loaded and checked.

    Attributes:
        target: the target model.
        drafter: proposes tokens.
        draft_model: the drafter's own model, if it has one; with the target where it
            shares the target's encoder.
        tokenizer: that of both models.
        num_tokens: ids with a meaning; the rows past them are dead. None: none are.
    """

    target: t5.T5
    drafter: Drafter
    draft_model: t5.T5 | shared_encoder.SharedEncoderDraft | None
    tokenizer: tokenizers.Tokenizer
    num_tokens: int | None

    @property
    def drafting_model(self) -> t5.T5:
        """The model that a drafter of `build_drafter.MODELS` drafts with."""
        assert isinstance(self.drafter, ModelDrafter)  # callers have checked the name
        model: t5.T5 = self.drafter.model
        return model


def checkpoint_folder(name: str, setting: str) -> pathlib.Path:
    """The folder behind a checkpoint setting; "zoo/..." ships with specjax.

    Raises:
        InputError: empty, or no such folder.
    """
    if not name:
        raise errors.InputError(f"config.{setting} is empty: name a model's folder")
    try:
        path = zoo.locate(name).expanduser().absolute()
    except errors.InputError as error:
        raise errors.InputError(f"config.{setting} is {name!r}: {error}") from error
    if not path.is_dir():
        raise errors.InputError(f"config.{setting} is {name!r}: no such folder")
    return path


def fingerprints(config: ml_collections.ConfigDict) -> dict[str, str]:
    """The fingerprint of each checkpoint and file that `build_pair` reads, by role."""
    kind = named(build_drafter.DRAFTERS, config.drafter, "drafter")
    roles = ["target"] + ["draft"] * kind.has_folder(config)
    found = {
        role: t5_weights.fingerprint(
            checkpoint_folder(config[role].checkpoint, f"{role}.checkpoint")
        )
        for role in roles
    }
    own = config.draft.get(config.drafter) or {}
    if own.get("checkpoint"):  # of the drafter's own draft
        setting = f"draft.{config.drafter}.checkpoint"
        found["inner"] = t5_weights.fingerprint(
            checkpoint_folder(own["checkpoint"], setting)
        )
    for name in ("texts", "tokens"):  # what a head was cut by
        if own.get(name):
            content = pathlib.Path(own[name]).expanduser().read_bytes()
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def load_target(config: ml_collections.ConfigDict, mesh: Mesh | None = None) -> Target:
    """Loads the target and its tokenizer.

    Args:
        config: the settings.
        mesh: that it goes to; None: to one device.

    Raises:
        InputError: the folder is wrong or damaged, or cannot be widened as set.
    """
    dtype = named(DTYPES, config.dtype, "dtype")
    folder = checkpoint_folder(config.target.checkpoint, "target.checkpoint")
    tokenizer = tokenizers.load_tokenizer(folder)
    loaded = build_mesh.load(folder, dtype, mesh, "target")
    model = build_widen.widen_target(config, loaded)
    if mesh is not None:  # what is new of a widened one too
        model = sharding.place(model, mesh)
    num_tokens = dead_from(tokenizer, model)
    return Target(model, tokenizer, num_tokens, folder, loaded.config.d_model)


def build_pair(
    config: ml_collections.ConfigDict,
    target: Target | None = None,
    mesh: Mesh | None = None,
) -> Pair:
    """Loads target, drafter and tokenizer.

    Args:
        config: the settings.
        target: as `load_target` gave it for the same settings; None: loads it.
        mesh: that they go to; None: to one device.

    Raises:
        InputError: a name or a folder is wrong, a checkpoint is damaged, the draft has
            another tokenizer than the target, reads an encoder of another width, or was
            made for another target; a model cannot be widened as set.
    """
    kind = named(build_drafter.DRAFTERS, config.drafter, "drafter")
    dtype = named(DTYPES, config.dtype, "dtype")
    split = build_mesh.splits_draft(config, mesh)
    checkpoint_folder(config.target.checkpoint, "target.checkpoint")  # named first
    draft_folder = draft_model = draft_tokenizer = None
    if kind.has_folder(config):
        draft_folder = checkpoint_folder(config.draft.checkpoint, "draft.checkpoint")
    if kind.reads == "model":
        assert draft_folder is not None
        draft_tokenizer = tokenizers.load_tokenizer(draft_folder)
        draft_model = build_mesh.load(draft_folder, dtype, mesh, "draft", split)
        dead_from(draft_tokenizer, draft_model, "draft")
    target = target or load_target(config, mesh)
    if draft_model is not None and draft_tokenizer is not None:
        tokenizers.check_same_tokenizer(target.tokenizer, draft_tokenizer)
        draft_model.check_encoder_width(target.width)
    draft_model = build_widen.widen_draft(config, target.model, draft_model)
    parts = build_drafter.Parts(
        config=config,
        target=target.model,
        fingerprint=t5_weights.fingerprint(target.folder)
        if kind.reads == "drafter"
        else "",
        folder=draft_folder,
        model=draft_model,
        num_tokens=target.num_tokens,
    )
    drafter = build_drafter.make(config.drafter, parts)
    if mesh is not None:  # also what is no model
        drafter = sharding.place(drafter, mesh, build_mesh.layout(split))
    # With a head of its own, where the kind has cut it.
    drafts_with = draft_model and getattr(drafter, "model", None)
    return Pair(
        target=target.model,
        drafter=drafter,
        draft_model=drafts_with and shared_encoder.whole(drafts_with, target.model),
        tokenizer=target.tokenizer,
        num_tokens=target.num_tokens,
    )


def verifier_settings(config: ml_collections.ConfigDict) -> dict[str, float]:
    """What the rule of `config.verifier` is set to, by name; most have no settings.

    Raises:
        InputError: no such rule, or settings of another one.
    """
    named(VERIFIERS, config.verifier, "verifier")
    settings: dict[str, float] = {}
    for name, (_, usual) in TUNED.items():
        given = {key: own for key, own in config[name].items() if own is not None}
        if name == config.verifier:
            settings = usual | given
        elif given:
            raise errors.InputError(
                f"config.{name} is set and config.verifier is {config.verifier!r}, "
                "which does not read it: leave it out"
            )
    return settings


def build_verifier(config: ml_collections.ConfigDict) -> Verifier:
    """The rule that decides which drafted tokens stand.

    Raises:
        InputError: as `verifier_settings`, or settings that mean nothing.
    """
    settings = verifier_settings(config)
    if config.verifier not in TUNED:
        return VERIFIERS[config.verifier]
    try:
        return TUNED[config.verifier][0](**settings)
    except errors.InputError as error:
        raise errors.InputError(f"config.{config.verifier}: {error}") from error


def build_sampling(
    settings: ml_collections.ConfigDict, setting: str, num_tokens: int | None
) -> Sampling:
    """The sampling of a sampled run.

    Raises:
        InputError: a number means nothing.
    """
    sampling = Sampling(
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        num_tokens=num_tokens,
    )
    check_sampling(sampling, f"config.{setting}")
    return sampling


def build_draft_sampling(
    config: ml_collections.ConfigDict, num_tokens: int | None
) -> Sampling | None:
    """The draft's sampling where it differs from the target's, else None.

    What the draft leaves out it takes from the target.

    Raises:
        InputError: a number means nothing, or the drafter draws nothing.
    """
    own = config.draft_sampling
    if all(own[name] is None for name in own):
        return None
    if not named(build_drafter.DRAFTERS, config.drafter, "drafter").samples:
        raise errors.InputError(
            f"config.draft_sampling is set and the drafter {config.drafter!r} draws "
            "nothing: leave it out"
        )
    merged = {
        name: config.sampling[name] if own[name] is None else own[name] for name in own
    }
    return build_sampling(
        ml_collections.ConfigDict(merged), "draft_sampling", num_tokens
    )


def parse_gamma(value: Any, depth: int | None = None) -> int | None:
    """A whole number >= 1, or None for "auto"; a tree's is its depth.

    Args:
        value: as set; None: not set.
        depth: of the tree that is drafted; None: a chain is.

    Raises:
        InputError: anything else, or another number than the tree's depth.
    """
    if depth is not None:
        if value not in (None, depth):
            raise errors.InputError(
                f"config.gamma is {value!r} and config.tree is {depth} deep: a tree's "
                "gamma is its depth; leave config.gamma out"
            )
        return depth
    if value is None:
        return _GAMMA
    if value == "auto":
        return None
    if not errors.is_whole(value) or value < 1:
        raise errors.InputError(
            f"config.gamma is {value!r}: it must be a whole number of drafted tokens, "
            "at least 1, or auto (which may decide for plain decoding)"
        )
    return value


def positive(config: ml_collections.ConfigDict, *names: str, path: str = "") -> None:
    """Refuses settings that must be whole numbers above 0.

    Args:
        config: the settings.
        *names: those to look at.
        path: of `config` within the whole.

    Raises:
        InputError: naming the first that is not.
    """
    for name in names:
        if config[name] < 1:
            raise errors.InputError(
                f"config.{path}{name} is {config[name]}: at least 1"
            )


def check_max_length(config: ml_collections.ConfigDict) -> None:
    """Refuses a decoder length that leaves no room for a token.

    Raises:
        InputError: it is below 2.
    """
    if config.max_length < 2:
        raise errors.InputError(
            f"config.max_length is {config.max_length}: at least 2, the start token "
            "and one more"
        )


def check_limit(config: ml_collections.ConfigDict) -> None:
    """Refuses a number of lines below 0.

    Raises:
        InputError: it is negative.
    """
    if config.limit < 0:
        raise errors.InputError(f"config.limit is {config.limit}: at least 0 (all)")


def buckets(config: ml_collections.ConfigDict, path: str = "") -> tuple[int, ...]:
    """The source lengths that are padded to.

    Args:
        config: the settings.
        path: of `config` within the whole.

    Raises:
        InputError: they are no increasing whole numbers.
    """
    if not all(isinstance(bucket, int) for bucket in config.buckets):
        raise errors.InputError(
            f"config.{path}buckets is {tuple(config.buckets)}: increasing whole "
            "numbers, for example 32,64"
        )
    return batches.check_buckets(config.buckets)


def row_keys(seed: int, rows: int) -> jax.Array:
    """One key per input row, the same for a row whatever batch it lands in.

    Raises:
        InputError: a seed that is negative, or of more bits than a key keeps.
    """
    if not 0 <= seed < 2**32:
        raise errors.InputError(f"config.seed is {seed}: a whole number in 0..2**32-1")
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
