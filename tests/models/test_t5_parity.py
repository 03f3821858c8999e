"""The T5 family against `transformers`: same weights, same numbers, both ways."""

import dataclasses
import importlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import t5, t5_weights
from specjax.models.t5_config import T5Config

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
SHAPE = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 3,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
}
GATED = SHAPE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@dataclasses.dataclass(frozen=True)
class Family:
    """How `transformers` makes a checkpoint of one family."""

    name: str
    fields: dict
    model_type: str = "T5"
    separate_head: bool = True


FAMILIES = [
    Family("t5", SHAPE | {"feed_forward_proj": "relu"}, separate_head=False),
    Family("t5_v1_1", GATED),
    Family("mt5", GATED | {"vocab_size": 80}, "MT5"),
    Family("byt5", GATED | {"num_layers": 3, "num_decoder_layers": 1}),
    Family("umt5", GATED, "UMT5"),
    Family(
        "tied_gated", GATED | {"tie_word_embeddings": True}, "T5", separate_head=False
    ),
    # What 5.x makes of "untied" when nobody adds a head: tied, and not scaled.
    Family("tied_unscaled", GATED, separate_head=False),
    Family(
        "few_buckets",
        GATED
        | {
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "layer_norm_epsilon": 1e-2,
        },
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}


def torch_and_transformers():
    # No look-ups of models or news by the library.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def random_state(model, seed):
    """Weights large enough that norms, biases, scaling and activation all show."""
    torch, _ = torch_and_transformers()
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        noise = rng.normal(size=tuple(parameter.shape))
        if name.endswith("norm.weight"):
            noise = 1 + 0.3 * noise
        elif "relative_attention_bias" not in name and "shared" not in name:
            noise *= parameter.shape[1] ** -0.5
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(noise))


def make_checkpoint(directory, family):
    """A checkpoint that `transformers` wrote; a separate head is added to the file."""
    _, transformers = torch_and_transformers()
    from safetensors.numpy import load_file, save_file

    config = getattr(transformers, f"{family.model_type}Config")(**family.fields)
    kind = getattr(transformers, f"{family.model_type}ForConditionalGeneration")
    model = kind(config)
    random_state(model, seed=len(family.name))
    model.save_pretrained(directory)
    if family.separate_head:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        noise = np.random.default_rng(9).normal(size=tensors["shared.weight"].shape)
        tensors["lm_head.weight"] = (noise * 32**-0.5).astype(np.float32)
        save_file(tensors, path, metadata={"format": "pt"})
    return directory


def load_peer(directory):
    """The directory as `transformers` loads it, which must find every tensor."""
    torch, transformers = torch_and_transformers()
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    return model.eval()


def inputs(vocab_size):
    """Two sources of unequal length, 70 and 41 tokens, and 40 target tokens."""
    rng = np.random.default_rng(3)
    source = rng.integers(0, vocab_size, (2, 70), np.int32)
    mask = np.arange(70)[None] < np.array([70, 41])[:, None]
    return source, mask, rng.integers(0, vocab_size, (2, 40), np.int32)


def run_peer(model):
    torch, _ = torch_and_transformers()
    source, mask, target = inputs(model.config.vocab_size)
    with torch.no_grad():
        output = model(
            input_ids=torch.from_numpy(source).long(),
            attention_mask=torch.from_numpy(mask).long(),
            decoder_input_ids=torch.from_numpy(target).long(),
        )
    return output.encoder_last_hidden_state.numpy(), output.logits.numpy()


@jax.jit
def _run(model, source, mask, target):
    encoded = model.encode(source, mask)
    return encoded.hidden, model.decode(target, None, encoded)[0].logits


def run_ours(model):
    return [np.asarray(x) for x in _run(model, *inputs(model.config.vocab_size))]


def differences(ours, peer):
    """Greatest difference of encoder output (real tokens) and of logits."""
    mask = inputs(ours[1].shape[-1])[1]
    hidden, logits = (np.abs(a - b) for a, b in zip(ours, peer, strict=True))
    return float(hidden[mask].max()), float(logits.max())


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint, what `transformers` computes from it, and ours."""

    family: Family
    directory: object
    expected: tuple
    model: t5.T5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One checkpoint per family, made when first asked for."""
    made = {}

    def get(name):
        if name not in made:
            family = BY_NAME[name]
            directory = make_checkpoint(tmp_path_factory.mktemp(name), family)
            expected = run_peer(load_peer(directory))
            model = t5_weights.load_t5(directory)
            made[name] = Checkpoint(family, directory, expected, model)
        return made[name]

    return get


@pytest.mark.parametrize("name", BY_NAME)
def test_same_numbers(checkpoint, name):
    case = checkpoint(name)
    config = case.model.config
    assert config.tied_head != case.family.separate_head
    assert config.scaled_head == (name in ("t5", "tied_gated"))
    assert config.bias_per_layer == (name == "umt5")
    hidden, logits = differences(run_ours(case.model), case.expected)
    assert hidden < TOLERANCE and logits < TOLERANCE
    assert np.abs(case.expected[1]).max() > 1


def _other_scale(model):
    model.config = dataclasses.replace(
        model.config, scaled_head=not model.config.scaled_head
    )


def _other_activation(model):
    for block in [*model.encoder, *model.decoder]:
        kind = "relu" if model.config.gated else "gelu_new"
        block.feed_forward.activation = kind


def _other_bias_sharing(model):
    for stack in (model.encoder, model.decoder):
        shared = stack[0].attention.bias[...]
        for block in stack[1:]:
            # Per-layer tables become one shared table, and the reverse.
            table = nnx.Param(jnp.zeros_like(shared))
            own = None if model.config.bias_per_layer else nnx.data(table)
            block.attention.bias = own


def _swapped_gates(model):
    for block in [*model.encoder, *model.decoder]:
        block.feed_forward.wi[...] = block.feed_forward.wi[...][::-1]


def _transposed_cross(model):
    for block in model.decoder:
        block.cross.kv[...] = block.cross.kv[...][::-1]


def _other_eps(model):
    model.encoder_norm.eps = 1e-6 if model.encoder_norm.eps > 1e-6 else 1e-2


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("t5", _other_scale),
        ("t5", _other_activation),
        ("t5", _other_bias_sharing),
        ("t5_v1_1", _other_scale),
        ("t5_v1_1", _other_activation),
        ("t5_v1_1", _swapped_gates),
        ("t5_v1_1", _transposed_cross),
        ("umt5", _other_bias_sharing),
        ("few_buckets", _other_eps),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_wrong_twin_fails_the_same_comparison(checkpoint, name, break_it):
    case = checkpoint(name)
    twin = t5_weights.load_t5(case.directory)
    break_it(twin)
    assert max(differences(run_ours(twin), case.expected)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", BY_NAME)
def test_transformers_reads_what_we_write(checkpoint, name, tmp_path):
    case = checkpoint(name)
    t5_weights.save_t5(case.model, tmp_path)
    written = run_peer(load_peer(tmp_path))
    # The same library on the same weights: no rounding is allowed for.
    for mine, theirs in zip(written, case.expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_reads_narrow_and_sharded_files(
    checkpoint, dtype, max_shard_bytes, tmp_path
):
    model = checkpoint("umt5").model
    t5_weights.save_t5(model, tmp_path, dtype=dtype, max_shard_bytes=max_shard_bytes)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (max_shard_bytes < 10**9)
    expected = run_peer(load_peer(tmp_path))
    ours = run_ours(t5_weights.load_t5(tmp_path))
    assert max(differences(ours, expected)) < TOLERANCE
    # Rounding the weights is visible, so narrow types really were written.
    assert max(differences(ours, checkpoint("umt5").expected)) > 10 * TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_we_read_shards_that_transformers_writes(checkpoint, dtype, tmp_path):
    torch, _ = torch_and_transformers()
    case = checkpoint("t5")
    peer = load_peer(case.directory).to(getattr(torch, dtype))
    peer.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = run_peer(load_peer(tmp_path))
    ours = run_ours(t5_weights.load_t5(tmp_path))
    assert max(differences(ours, expected)) < TOLERANCE


def test_transformers_generates_from_what_we_write(checkpoint, tmp_path):
    """The start token and EOS arrive too: greedy tokens are equal."""
    torch, _ = torch_and_transformers()
    model = checkpoint("t5").model
    t5_weights.save_t5(model, tmp_path)
    source, mask, _ = inputs(64)
    theirs = load_peer(tmp_path).generate(
        torch.from_numpy(source).long(),
        attention_mask=torch.from_numpy(mask).long(),
        max_new_tokens=6,
        do_sample=False,
    )

    @jax.jit
    def step(model, token, cache, encoded):
        output, cache = model.decode(token, cache, encoded)
        return jnp.argmax(output.logits, -1).astype(jnp.int32), cache

    encoded = jax.jit(t5.T5.encode)(model, source, mask)
    cache = model.init_cache(2, 8)
    tokens = [jnp.zeros((2, 1), jnp.int32)]
    for _ in range(6):
        token, cache = step(model, tokens[-1], cache, encoded)
        tokens.append(token)
    ours = np.asarray(jnp.concatenate(tokens, axis=1))
    ended = np.cumsum(ours == 1, axis=1) - (ours == 1) > 0
    expected = np.where(ended, 0, ours)[:, : theirs.shape[1]]
    np.testing.assert_array_equal(theirs.numpy(), expected)


@pytest.mark.parametrize("name", BY_NAME)
def test_configs_read_back_equal_from_transformers(checkpoint, name, tmp_path):
    _, transformers = torch_and_transformers()
    config = checkpoint(name).model.config
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    peer = transformers.AutoConfig.from_pretrained(tmp_path)
    fields = json.loads(peer.to_json_string(use_diff=False))
    assert T5Config.from_json(fields, has_head=not config.tied_head) == config


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_buckets(bidirectional, num_buckets, max_distance):
    torch, _ = torch_and_transformers()
    module = importlib.import_module("transformers.models.t5.modeling_t5")
    offsets = np.arange(-600, 601)
    expected = module.T5Attention._relative_position_bucket(
        torch.from_numpy(offsets),
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    ours = t5.relative_position_bucket(
        offsets,
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    np.testing.assert_array_equal(ours, expected.numpy())
