"""T5Config: published sizes, and Hugging Face configs of both generations."""

import dataclasses
import functools
import json

import jax
import pytest

from specjax import errors
from specjax.models import t5, t5_config
from specjax.models.t5_config import T5Config

# name -> (embedding, encoder, decoder, head), from the published shapes by hand.
PARTS = {
    "t5-small": (16_449_536, 18_881_280, 25_175_808, 0),
    "t5-base": (24_674_304, 84_954_240, 113_275_008, 0),
    "t5-large": (32_899_072, 302_040_576, 402_728_448, 0),
    "t5-3b": (32_899_072, 1_208_010_752, 1_610_688_512, 0),
    "t5-11b": (32_899_072, 4_831_892_480, 6_442_529_792, 0),
    "t5-v1_1-small": (16_449_536, 18_883_264, 25_178_816, 16_449_536),
    "t5-v1_1-base": (24_674_304, 84_954_240, 113_275_008, 24_674_304),
    "t5-v1_1-large": (32_899_072, 308_332_032, 409_019_904, 32_899_072),
    "t5-v1_1-xl": (65_798_144, 1_157_729_280, 1_560_431_616, 65_798_144),
    "t5-v1_1-xxl": (131_596_288, 4_630_714_368, 6_241_425_408, 131_596_288),
}
TOTALS = {
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "byt5-small": 299_637_760,
    "byt5-base": 581_653_248,
    "byt5-large": 1_228_183_552,
    "byt5-xl": 3_737_801_728,
    "byt5-xxl": 12_906_899_328,
    "umt5-small": 306_601_984,
    "umt5-base": 592_043_520,
    # The shape of mT5 large, 256384 rows, and 23 more tables of 32 x 16 in each stack.
    "umt5-large": 1_229_581_312 + 2 * (256_384 - 250_112) * 1024 + 2 * 23 * 32 * 16,
    "umt5-xl": 3_768_356_864,
    "umt5-xxl": 12_972_531_712,
}
TOTALS |= {name: sum(parts) for name, parts in PARTS.items()}
for _name in [name for name in TOTALS if name.startswith("t5-v1_1-")]:
    _size = _name.removeprefix("t5-v1_1-")
    TOTALS[f"flan-t5-{_size}"] = TOTALS[f"t5-{_size}-lm-adapt"] = TOTALS[_name]

V1_1 = T5Config(
    vocab_size=128,
    d_model=32,
    d_kv=8,
    num_heads=6,
    d_ff=48,
    num_encoder_layers=2,
    num_decoder_layers=3,
)
# What every Hugging Face config of this shape holds.
SHAPE = {
    "vocab_size": 128,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
}


@functools.cache
def abstract_t5(config):
    return jax.eval_shape(lambda: t5.T5(config, jax.random.key(0)))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_presets_are_all_published_sizes():
    assert set(T5Config.presets()) == set(TOTALS)


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_parameter_count(name):
    config = T5Config.preset(name)
    assert t5_config.num_parameters(config) == TOTALS[name]
    assert count(abstract_t5(config)) == TOTALS[name]


@pytest.mark.parametrize("name", sorted(PARTS))
def test_parameter_count_of_each_part(name):
    model = abstract_t5(T5Config.preset(name))
    encoder = count(model.encoder) + count(model.encoder_norm)
    decoder = count(model.decoder) + count(model.decoder_norm)
    assert (count(model.embedding), encoder, decoder, count(model.head)) == PARTS[name]


@pytest.mark.parametrize(
    "change",
    [{"gated": False}, {"tied_head": True}, {"bias_per_layer": True}],
    ids=str,
)
def test_parameter_count_of_variants(change):
    config = dataclasses.replace(V1_1, **change)
    assert t5_config.num_parameters(config) == count(abstract_t5(config))
    assert t5_config.num_parameters(config) != t5_config.num_parameters(V1_1)


def test_presets_of_the_families():
    small = T5Config.preset("t5-small")
    assert (small.gated, small.activation) == (False, "relu")
    assert small.tied_head and small.scaled_head
    for name in ("t5-v1_1-small", "flan-t5-xl", "mt5-base", "byt5-xl", "umt5-base"):
        config = T5Config.preset(name)
        assert (config.gated, config.activation) == (True, "gelu_new")
        assert not config.tied_head and not config.scaled_head
        assert config.bias_per_layer == name.startswith("umt5")
    byt5 = T5Config.preset("byt5-small")
    assert (byt5.num_encoder_layers, byt5.num_decoder_layers) == (12, 4)
    assert T5Config.preset("t5-v1_1-small").d_attention == 384


def test_unknown_preset_names_close_ones():
    with pytest.raises(errors.InputError, match="'flan-t5-bass'.*flan-t5-base"):
        T5Config.preset("flan-t5-bass")
    with pytest.raises(errors.InputError, match="zzz.*umt5-xxl"):
        T5Config.preset("zzz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number.*0"),
        ({"d_model": 32.0}, "d_model must be a whole number.*32.0"),
        ({"activation": "silu"}, "activation must be one of relu, gelu_new.*silu"),
        ({"num_buckets": 30}, "num_buckets must be a multiple of 4"),
        ({"max_distance": 16}, "max_distance must exceed"),
        ({"dropout_rate": 1.0}, "dropout_rate must be a number in"),
        ({"eps": 0.0}, "eps must be a positive number"),
        ({"eos_id": 128}, "eos_id must be an id below vocab_size"),
        ({"num_encoder_layers": 0}, "num_encoder_layers must be .* at least 1"),
        ({"encoder_width": 16}, "num_encoder_layers is 2 and encoder_width 16"),
        (
            {"num_encoder_layers": 0, "encoder_width": 0},
            "encoder_width must be a whole number.*0",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_values_are_named(change, message):
    with pytest.raises(errors.InputError, match=message):
        dataclasses.replace(V1_1, **change)


# As transformers 4 wrote it for T5 1.0: nothing about tying, relu implied by age.
OLD_1_0 = SHAPE | {
    "architectures": ["T5WithLMHeadModel"],
    "model_type": "t5",
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "n_positions": 512,
    "output_past": True,
    "relative_attention_num_buckets": 32,
    "layer_norm_epsilon": 1e-06,
    "dropout_rate": 0.1,
    "task_specific_params": {"summarization": {"num_beams": 4}},
}
# As transformers 4 wrote it for FLAN.
OLD_FLAN = SHAPE | {
    "model_type": "t5",
    "feed_forward_proj": "gated-gelu",
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
    "tie_word_embeddings": False,
}
# As transformers 5 writes the same model.
NEW_FLAN = OLD_FLAN | {"tie_word_embeddings": True, "scale_decoder_outputs": False}


def test_reads_configs_of_transformers_4():
    expected = dataclasses.replace(
        V1_1, gated=False, activation="relu", tied_head=True, scaled_head=True
    )
    assert T5Config.from_json(OLD_1_0) == expected
    assert T5Config.from_json(OLD_1_0, has_head=False) == expected
    assert T5Config.from_json(OLD_FLAN) == V1_1
    assert T5Config.from_json(OLD_FLAN, has_head=True) == V1_1
    assert T5Config.from_json(OLD_FLAN | {"model_type": "mt5"}) == V1_1
    umt5 = dataclasses.replace(V1_1, bias_per_layer=True)
    assert T5Config.from_json(OLD_FLAN | {"model_type": "umt5"}) == umt5


def test_reads_configs_of_transformers_5():
    assert T5Config.from_json(NEW_FLAN, has_head=True) == V1_1
    tied_unscaled = dataclasses.replace(V1_1, tied_head=True)
    assert T5Config.from_json(NEW_FLAN, has_head=False) == tied_unscaled
    scaled = NEW_FLAN | {"scale_decoder_outputs": True}
    assert T5Config.from_json(scaled, has_head=False).scaled_head
    # An untied head under the old flag: the scale follows the flag, not the head.
    assert T5Config.from_json(OLD_1_0, has_head=True).scaled_head


def test_mt5_never_scales():
    tied = OLD_FLAN | {"model_type": "mt5", "tie_word_embeddings": True}
    assert not T5Config.from_json(tied, has_head=False).scaled_head
    assert not T5Config.from_json(tied | {"scale_decoder_outputs": True}).scaled_head
    assert T5Config.from_json(tied | {"model_type": "t5"}).scaled_head


def test_absent_fields_have_the_family_s_values():
    fields = {k: v for k, v in OLD_FLAN.items() if k != "num_decoder_layers"}
    config = T5Config.from_json(fields | {"relative_attention_num_buckets": None})
    assert config == dataclasses.replace(V1_1, num_decoder_layers=2)
    assert (config.num_buckets, config.max_distance) == (32, 128)
    buckets = {
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    }
    config = T5Config.from_json(OLD_FLAN | buckets)
    assert (config.num_buckets, config.max_distance) == (8, 20)


@pytest.mark.parametrize(
    ("fields", "gated", "activation"),
    [
        ({"feed_forward_proj": "relu"}, False, "relu"),
        ({"feed_forward_proj": "gated-gelu"}, True, "gelu_new"),
        ({"feed_forward_proj": "gated-relu"}, True, "relu"),
        ({"feed_forward_proj": "gelu_new"}, False, "gelu_new"),
        ({"dense_act_fn": "gelu_new", "is_gated_act": True}, True, "gelu_new"),
        ({"dense_act_fn": "relu", "is_gated_act": False}, False, "relu"),
        ({}, False, "relu"),
        ({"model_type": "mt5"}, True, "gelu_new"),
    ],
)
def test_spellings_of_the_feed_forward(fields, gated, activation):
    config = T5Config.from_json(SHAPE | fields)
    assert (config.gated, config.activation) == (gated, activation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bart"}, "model_type .* 'bart'; supported are t5, mt5, umt5"),
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj .*silu.*gated-gelu"),
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj .*'gelu'"),
        ({"dense_act_fn": "silu", "feed_forward_proj": None}, "dense_act_fn .*silu"),
        ({"dense_act_fn": "relu"}, "dense_act_fn .*contradicts feed_forward_proj"),
        ({"decoder_start_token_id": 2}, "decoder_start_token_id .* is 2"),
        ({"eos_token_id": [1, 2]}, "eos_token_id .* one id"),
        ({"d_kv": None}, "no field 'd_kv'"),
        ({"d_ff": "48"}, "d_ff must be a whole number"),
    ],
)
def test_what_cannot_be_computed_is_refused(change, message):
    with pytest.raises(errors.InputError, match=message):
        T5Config.from_json(OLD_FLAN | change)


def test_untied_config_without_a_stored_head_is_refused():
    with pytest.raises(errors.InputError, match="lm_head.weight"):
        T5Config.from_json(OLD_FLAN, has_head=False)


def test_reads_files(tmp_path):
    with pytest.raises(errors.InputError, match="no T5 config at .*config.json"):
        T5Config.from_json(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OLD_FLAN))
    assert T5Config.from_json(path) == T5Config.from_json(str(tmp_path)) == V1_1
    path.write_text(json.dumps(OLD_FLAN)[:-9])
    with pytest.raises(errors.InputError, match="config.json is not a readable JSON"):
        T5Config.from_json(path)
    path.write_text("[]")
    with pytest.raises(
        errors.InputError, match="config.json must hold one JSON object"
    ):
        T5Config.from_json(path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("per_layer", [True, False])
def test_json_round_trip_of_heads(tied, scaled, per_layer):
    config = dataclasses.replace(
        V1_1, tied_head=tied, scaled_head=scaled, bias_per_layer=per_layer
    )
    fields = json.loads(json.dumps(config.to_json()))
    assert T5Config.from_json(fields) == config
    assert T5Config.from_json(fields, has_head=not tied) == config


def test_json_round_trip_of_every_field():
    config = T5Config(
        vocab_size=99,
        d_model=20,
        d_kv=4,
        num_heads=3,
        d_ff=7,
        num_encoder_layers=0,
        num_decoder_layers=1,
        gated=False,
        activation="relu",
        tied_head=True,
        scaled_head=True,
        num_buckets=8,
        max_distance=20,
        eps=1e-5,
        dropout_rate=0.0,
        pad_id=3,
        eos_id=4,
        encoder_width=24,
    )
    default = dataclasses.asdict(V1_1)
    same = {k for k, v in dataclasses.asdict(config).items() if v == default[k]}
    assert same == {"bias_per_layer"}
    assert T5Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", T5Config.presets())
def test_json_round_trip_of_presets(name):
    config = T5Config.preset(name)
    assert T5Config.from_json(config.to_json()) == config
