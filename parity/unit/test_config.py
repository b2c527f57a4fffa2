"""config.json at the door: every fact is read, every bad key is one clear line that names it."""

import dataclasses
import json
from pathlib import Path

import pytest

from parity.unit.worlds import config_dict
from reference.config import FIXED, POSITIVE_FLOATS, POSITIVE_INTS, InputError, ModelConfig

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
GONE = object()


def read(**changes):
    """The config of a small world with some top-level keys changed or GONE."""
    values = config_dict() | {k: v for k, v in changes.items() if v is not GONE}
    for key in (k for k, v in changes.items() if v is GONE):
        del values[key]
    return ModelConfig.from_dict(values)


def message_of(**changes):
    with pytest.raises(InputError) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is read ----


def test_the_bundled_config_is_read_as_it_stands():
    values = json.loads((TINY / "config.json").read_text())
    config = ModelConfig.from_dir(TINY)
    for field in dataclasses.fields(config):
        if field.name in values and field.name != "compress_ratios":
            assert getattr(config, field.name) == values[field.name], field.name
    assert (config.rope_factor, config.rope_original_max, config.rope_beta_fast, config.rope_beta_slow) == (16, 65536, 32, 1)
    assert config.unknown_keys == ()
    assert [config.kind(n) for n in range(8)] == ["window", "window", "csa", "hca", "csa", "hca", "csa", "hca"]
    assert [config.is_hash(n) for n in range(3)] == [True, True, False]
    assert (ModelConfig.overlap(4), ModelConfig.overlap(128)) == (2, 1)


def test_ratios_beyond_the_layers_belong_to_mtp():
    assert read(compress_ratios=[0, 4, 128, 4, 0]).compress_ratios == (0, 4, 128, 4)


def test_unknown_keys_are_listed():
    assert read(rope_thetta=3, zebra=[1]).unknown_keys == ("rope_thetta", "zebra")


def test_keys_without_effect_are_known():
    assert read(torch_dtype="bfloat16", bos_token_id=0, transformers_version="5").unknown_keys == ()


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().head_dim = 3


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_every_scoring_function_is_accepted(scoring):
    assert read(scoring_func=scoring).scoring_func == scoring


@pytest.mark.parametrize(
    "changes", [{"hc_mult": 1}, {"sliding_window": 1}, {"num_hash_layers": 0}, {"hidden_size": 160}, {"hc_sinkhorn_iters": 1}]
)
def test_sizes_are_free(changes):
    config = read(**changes)
    assert {key: getattr(config, key) for key in changes} == changes


def test_optional_keys_may_be_absent():
    optional = {key: GONE for key, _, required in FIXED if not required and key in config_dict()}
    assert optional
    read(**optional)


# ---- what is refused ----

REQUIRED = [*POSITIVE_INTS, *POSITIVE_FLOATS, *(key for key, _, required in FIXED if required)]
REQUIRED += ["num_hash_layers", "scoring_func", "rope_scaling", "compress_ratios", "quantization_config"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    assert f"{key}: missing" in message_of(**{key: GONE})


def test_a_misspelt_key_gets_its_nearest_match():
    assert "is it 'heads_dim'?" in message_of(head_dim=GONE, heads_dim=96)


@pytest.mark.parametrize("value", [0, -1, 1.5, "96", None, True, [96], float("nan"), float("inf"), 2**60, {}])
@pytest.mark.parametrize("key", ["head_dim", "hc_mult", "max_position_embeddings"])
def test_a_size_is_a_positive_integer(key, value):
    assert f"{key}: expected an integer >= 1, got" in message_of(**{key: value})


@pytest.mark.parametrize("value", [0, -1.0, "1", None, True, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["hc_eps", "swiglu_limit", "rope_theta"])
def test_a_number_is_positive_and_finite(key, value):
    assert f"{key}: expected a number" in message_of(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 2),
        ("num_key_value_heads", True),
        ("n_shared_experts", 0),
        ("attention_bias", True),
        ("attention_bias", 0),
        ("tie_word_embeddings", True),
        ("norm_topk_prob", False),
        ("topk_method", "greedy"),
        ("expert_dtype", "fp8"),
        ("scoring_func", "tanh"),
        ("scoring_func", ["sigmoid"]),
        ("scoring_func", None),
    ],
)
def test_an_unsupported_value_names_key_value_and_what_is_supported(key, value):
    message = message_of(**{key: value})
    assert f"{key}: unsupported value {value!r}; supported:" in message


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ([0, 4, 128], "at least num_hidden_layers = 4, got 3 entries"),
        ("0,4", "expected a list"),
        (None, "expected a list"),
        ([0, 4, 8, 4], "compress_ratios[2]: unsupported value 8"),
        ([0, 4, True, 4], "compress_ratios[2]: unsupported value True"),
        ([0, 4, None, 4], "compress_ratios[2]: unsupported value None"),
        ([0, 4, [4], 4], "compress_ratios[2]: unsupported value [4]"),
        ([0, 4, -128, 4], "compress_ratios[2]: unsupported value -128"),
    ],
)
def test_ratios_are_known_ones(ratios, message):
    assert message in message_of(compress_ratios=ratios)


def scaling(**changes):
    values = config_dict()["rope_scaling"] | changes
    return {"rope_scaling": {k: v for k, v in values.items() if v is not GONE}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": None}, "rope_scaling: expected an object"),
        ({"rope_scaling": []}, "rope_scaling: expected an object"),
        (scaling(type="linear"), "rope_scaling.type: unsupported value 'linear'"),
        (scaling(type=GONE), "rope_scaling.type: unsupported value None"),
        (scaling(factor=GONE), "rope_scaling.factor: missing"),
        (scaling(beta_fast="32"), "rope_scaling.beta_fast: expected a number"),
        (scaling(original_max_position_embeddings=0.5), "rope_scaling.original_max_position_embeddings: expected an integer"),
    ],
)
def test_rope_scaling_is_yarn_and_complete(changes, message):
    assert message in message_of(**changes)


def test_yarn_may_be_named_the_other_way():
    read(**scaling(type=GONE, rope_type="yarn"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quant_method", "awq", "unsupported value 'awq'"),
        ("fmt", "e5m2", "unsupported value 'e5m2'"),
        ("scale_fmt", None, "unsupported value None"),
        ("weight_block_size", [64, 64], "unsupported value [64, 64]"),
        ("activation_scheme", "static", "unsupported value 'static'"),
        ("fmt", GONE, "missing"),
    ],
)
def test_the_weight_format_is_the_published_one(key, value, message):
    values = {k: v for k, v in (config_dict()["quantization_config"] | {key: value}).items() if v is not GONE}
    assert f"quantization_config.{key}: {message}" in message_of(quantization_config=values)


def test_a_quantization_that_is_no_object_is_refused():
    assert "quantization_config: expected an object" in message_of(quantization_config="fp8")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"qk_rope_head_dim": 31, "head_dim": 95}, "qk_rope_head_dim"),
        ({"head_dim": 64}, "head_dim"),
        ({"head_dim": 32}, "head_dim"),
        ({"index_head_dim": 48}, "index_head_dim"),
        ({"index_head_dim": 16}, "index_head_dim"),
        ({"o_groups": 3}, "o_groups"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size"),
    ],
)
def test_sizes_fit_each_other(changes, key):
    assert f": {key}: " in message_of(**changes)


# ---- the file ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "broken JSON"),
        (b"{", "broken JSON"),
        (b'{"a": 1', "broken JSON"),
        (b"\xff\xfe", "broken JSON"),
        (b"[" * 100000, "broken JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"7", "expected a JSON object, got int"),
        (b"{}", "model_type: missing"),
    ],
)
def test_a_broken_file_is_one_line_with_its_path(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="not a checkpoint directory"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        ModelConfig.from_dir(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="no such directory"):
        ModelConfig.from_dir(tmp_path / "file")
