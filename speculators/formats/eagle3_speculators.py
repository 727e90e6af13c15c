"""EAGLE-3 in vLLM's speculators layout (``speculators_model_type: eagle3``).

What is left to a default elsewhere is written down here, because each omission is silent in the engine: the output
head always, ``d2t`` and ``t2d`` of a reduced vocabulary, the captured layers and their number, all switches
(``norm_before_residual`` is on where it is not named). The embedding is written too: a draft that runs apart from the
target's first layers has no other.
"""

from typing import Any

from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.formats import eagle3
from bitdraft.speculators.formats.facts import DTYPE, WRITTEN, TargetFacts
from bitdraft.speculators.low_bit import head_quantization_config, low_bit_layers

NAME = "eagle3-speculators"
KIND = "eagle3"
ENGINES = ("vLLM",)
WEIGHTS = "model.safetensors"
MODEL_TYPE = "eagle3"


def is_this_format(config: dict[str, Any], names: set[str]) -> bool:
    del names
    return config.get("speculators_model_type") == MODEL_TYPE


def engines(head: Eagle3Head) -> tuple[str, ...]:
    """All: they compute whatever is written."""
    del head
    return ENGINES


def check(head: Eagle3Head) -> None:
    """Holds whatever an EAGLE-3 head can be."""
    del head


def tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, plain weights in bf16."""
    return {**eagle3.plain_tensors(head), "embed_tokens.weight": head.embedding_weight.detach().to(WRITTEN)}


def shapes(head: Eagle3Head) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors."""
    return {**eagle3.plain_shapes(head), "embed_tokens.weight": (head.vocab.target_size, head.shape.hidden_size)}


def config(head: Eagle3Head, target: TargetFacts, draft_length: int) -> dict[str, Any]:
    """``config.json`` of the checkpoint."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_length,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    described: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": "0.9.0",
        "dtype": DTYPE,
        "draft_vocab_size": len(head.vocab),
        "target_hidden_size": head.shape.target_hidden_size,
        "tie_word_embeddings": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.capture_layers),
        **{name: getattr(head.config, name) for name in eagle3.SWITCHES},
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": list(target.architectures), "name_or_path": target.name},
        },
        "transformer_layer_config": {**eagle3.layer_settings(head), "layer_types": ["full_attention"]},
        "bitdraft_head": eagle3.our_settings(head),
    }
    if low_bit_layers(head):
        described["quantization_config"] = head_quantization_config(head, str)
    return described


def load(config: dict[str, Any], weights: dict[str, Tensor], target: LowBitTarget) -> DraftHead:
    """The head of a checkpoint. Raises ``ValueError`` for settings or tensors that it cannot represent."""
    layer = config["transformer_layer_config"]
    shape = eagle3.read_shape(layer, config.get("target_hidden_size"))
    # vLLM's defaults; published heads leave out what was not yet a choice when they were written.
    switches = {name: bool(config.get(name, name == "norm_before_residual")) for name in eagle3.SWITCHES}
    captured = config.get("eagle_aux_hidden_state_layer_ids") or eagle3.default_ids(target.layers)
    told = {**config, **{n: layer.get(n) for n in ("vocab_size", "num_aux_hidden_states")}}
    if told["vocab_size"] is None:
        raise KeyError("vocab_size")
    return eagle3.build(told, shape, switches, captured, weights, target)
