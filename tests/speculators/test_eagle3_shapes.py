"""The head's layer takes its shape from every kind of target, also from one without attention."""

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
    assert layer.finish(x, queries).shape == x.shape


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
