"""The head's layer takes its shape from every kind of target, also from one without attention."""

from dataclasses import replace

import pytest
import torch
from hybrids import HYBRIDS, hybrid_model

from bitdraft.speculators.eagle3_layer import DecoderLayer, LayerShape


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_layer_can_be_built_for_every_target(name: str) -> None:
    shape = LayerShape.of_target(hybrid_model(name).config)
    layer = DecoderLayer(shape)
    x, positions = torch.randn(2, 3, shape.hidden_size), torch.arange(3).expand(2, -1)
    inputs = layer.inputs(x, x)
    queries, (keys, values) = layer.queries(inputs, positions), layer.keys_values(inputs, positions)
    assert queries.shape == (2, shape.num_attention_heads, 3, shape.head_dim)
    assert keys.shape == values.shape == (2, shape.num_key_value_heads, 3, shape.head_dim)
    assert layer.finish(x, queries.transpose(1, 2).flatten(-2)).shape == x.shape


def test_a_target_without_attention_gets_llama_s_choices() -> None:
    shape = LayerShape.of_target(hybrid_model("mamba2").config)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (1, 1, 64)
    assert (shape.intermediate_size, shape.rms_norm_eps) == (192, 1e-5)
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert shape.max_position_embeddings == 32_768


def test_the_rotation_is_that_of_full_attention_and_covers_the_head() -> None:
    gemma, qwen = (LayerShape.of_target(hybrid_model(name).config) for name in ("gemma3", "qwen3_next"))
    assert gemma.rope_parameters["rope_theta"] == 1_000_000.0
    assert "partial_rotary_factor" not in qwen.rope_parameters


def test_a_hidden_size_that_the_heads_do_not_divide_is_a_layer_too() -> None:
    """As GLM-4.5-Air's: 4096 and 96 heads of 128."""
    shape = LayerShape(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    even = DecoderLayer(replace(shape, num_attention_heads=4))
    layer, positions = DecoderLayer(shape), torch.arange(3)[None]
    x = torch.randn(1, 3, 64)
    queries = layer.queries(layer.inputs(x, x), positions)
    assert queries.shape == (1, 6, 3, 16)
    assert layer.finish(x, queries.transpose(1, 2).flatten(-2)).shape == x.shape
    rotated = [one.rotary(x, positions)[0] for one in (layer, even)]
    assert torch.equal(rotated[0], rotated[1]), "the rotation is that of the head size"
