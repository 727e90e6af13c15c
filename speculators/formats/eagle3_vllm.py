"""EAGLE-3 in the layout of vLLM's speculators format (``speculators_model_type: eagle3``).

What is left to a default elsewhere is written down here, because each omission is silent in the engine: the
output head, ``d2t`` and ``t2d`` always; the captured layer ids, and their number inside
``transformer_layer_config`` where it is not three; all norm switches.
"""

from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.eagle3_layer import LayerShape
from bitdraft.speculators.vocab import DraftVocab

MODEL_TYPE = "eagle3"


def is_this_format(config: dict[str, Any]) -> bool:
    return config.get("speculators_model_type") == MODEL_TYPE


def tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, floats in bf16."""
    out = {name: weight.detach().to(torch.bfloat16) for name, weight in head.named_parameters()}
    out["fc.weight"] = head.folded_fc.to(torch.bfloat16)
    out["embed_tokens.weight"] = head.embedding_weight.detach().to(torch.bfloat16)
    if not head.vocab.is_full:
        out["d2t"], out["t2d"] = head.vocab.d2t, head.vocab.t2d
    return out


def config(head: Eagle3Head, target: LowBitTarget, draft_length: int) -> dict[str, Any]:
    """``config.json`` of the checkpoint."""
    shape = head.shape
    layer: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": head.vocab.target_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": shape.rope_parameters,
    }
    if len(head.capture_layers) != 3:
        layer["num_aux_hidden_states"] = len(head.capture_layers)  # vLLM's Llama loader counts here, not in the list
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": len(head.vocab),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.capture_layers),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_length,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": list(target.config.architectures or []), "name_or_path": target.name},
        },
        "transformer_layer_config": layer,
        "bitdraft_head": {"steps": head.config.steps, "step_decay": head.config.step_decay},
    }


def load(config: dict[str, Any], weights: dict[str, Tensor], target: LowBitTarget) -> DraftHead:
    """The head of a checkpoint. Raises ``ValueError`` for switches or tensors that it cannot represent."""
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if config.get(switch):
            raise ValueError(f"config.json sets {switch}, which this version cannot compute")
    layer = config["transformer_layer_config"]
    shape = LayerShape(**{field: layer[field] for field in LayerShape.__dataclass_fields__})
    vocab_size = layer["vocab_size"]
    if (shape.hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the head was trained for a target with hidden size {shape.hidden_size} and vocabulary {vocab_size}, but "
            f"{target.name} has {target.hidden_size} and {target.vocab_size}: give the target that it was trained for"
        )
    d2t = weights.pop("d2t", None)
    mask = weights.pop("t2d", None)
    if d2t is None and config["draft_vocab_size"] != vocab_size:
        raise ValueError("the draft vocabulary is reduced but the map d2t is missing")
    vocab = DraftVocab.full(vocab_size) if d2t is None else DraftVocab.from_d2t(d2t, vocab_size)
    if mask is not None and not torch.equal(mask, vocab.t2d):
        raise ValueError("the maps d2t and t2d do not describe the same tokens")
    weights.pop("embed_tokens.weight", None)  # the target's own
    head = Eagle3Head(
        Eagle3Config(**config.get("bitdraft_head", {})),
        shape,
        config["eagle_aux_hidden_state_layer_ids"],
        vocab,
        target.embedding.weight.detach(),
    )
    weights["capture_scale"] = head.capture_scale  # folded into fc
    head.load_state_dict(weights)
    return head
