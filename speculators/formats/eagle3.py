"""What the two EAGLE-3 layouts share: tensors under the head's own names, the layer's settings, building a head.

``A`` captured layers, ``H`` hidden size, ``T`` that of the target, ``I`` intermediate size, ``V`` and ``D`` tokens of
the target's and the draft's vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bitdraft.quant.profiles import profile_named
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.eagle3_layer import LayerShape
from bitdraft.speculators.formats.facts import WRITTEN
from bitdraft.speculators.formats.maps import map_tensors, read_vocab
from bitdraft.speculators.low_bit import low_bit_layers, low_bit_tensors, restore_low_bit

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OURS = ("steps",)  # settings of training that no engine reads
_ROTATION = ("rope_parameters", "rope_theta", "rope_scaling")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads")
_COUNTS = (*_NEEDED, "num_key_value_heads", "head_dim")
_ROTATED_PART = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")  # vLLM takes each for the first


def plain_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """All tensors but the embedding: weights in bf16, codes and scales of low-bit layers, maps."""
    low_bit = {f"{name}.weight" for name in low_bit_layers(head)}
    out = {
        name: weight.detach().to(WRITTEN)
        for name, weight in head.named_parameters()
        if name not in low_bit and name != "fc.weight" and not name.startswith(("embed_tokens.", "lm_head."))
    }
    out["lm_head.weight"] = head.whole_output.to(WRITTEN)
    if "fc.weight" not in low_bit:
        out["fc.weight"] = head.folded_fc.to(WRITTEN)
    return {**out, **low_bit_tensors(head), **map_tensors(head.vocab)}


def plain_shapes(head: Eagle3Head) -> dict[str, tuple[int, ...]]:
    """The names and shapes that engines ask for, but for the embedding."""
    shape, captured, drafted = head.shape, len(head.capture_layers), len(head.vocab)
    width, inner, states = shape.hidden_size, shape.intermediate_size, captured * shape.target_hidden_size
    queries, shared = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    products = {
        "self_attn.q_proj": (queries, 2 * width),
        "self_attn.k_proj": (shared, 2 * width),
        "self_attn.v_proj": (shared, 2 * width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (width,))
    if shape.qk_norm:
        norms |= {f"self_attn.{name}": (shape.head_dim,) for name in ("q_norm", "k_norm")}
    out: dict[str, tuple[int, ...]] = {f"layers.0.{n}.weight": s for n, s in {**products, **norms}.items()}
    if shape.attention_bias:  # Qwen3's output projection has none
        biased = ("q_proj", "k_proj", "v_proj") if shape.qk_norm else ("q_proj", "k_proj", "v_proj", "o_proj")
        out |= {f"layers.0.self_attn.{name}.bias": products[f"self_attn.{name}"][:1] for name in biased}
    out |= {"fc.weight": (width, states), "norm.weight": (width,), "lm_head.weight": (drafted, width)}
    if head.config.norm_before_fc:
        out["input_norm.weight"] = (states,)
    if head.config.fc_norm:
        out |= {f"fc_norm.{i}.weight": (shape.target_hidden_size,) for i in range(captured)}
    if not head.vocab.is_full:
        out |= {"d2t": (drafted,), "t2d": (head.vocab.target_size,)}
    for name in low_bit_layers(head):
        del out[f"{name}.weight"]
    return {**out, **{name: tuple(tensor.shape) for name, tensor in low_bit_tensors(head).items()}}


def layer_settings(head: Eagle3Head) -> dict[str, Any]:
    """The draft layer in the words of transformers' configurations, every one that an engine reads."""
    shape = head.shape
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": head.vocab.target_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": shape.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": dict(sorted(shape.rope_parameters.items())),
        # vLLM's Llama loader counts here, or else in eagle_config, but not in the list of ids.
        "num_aux_hidden_states": len(head.capture_layers),
    }


def our_settings(head: Eagle3Head) -> dict[str, Any]:
    """``bitdraft_head``: what no engine reads and training goes on with."""
    return {name: getattr(head.config, name) for name in _OURS}


def read_shape(layer: Mapping[str, Any], target_hidden_size: int | None) -> LayerShape:
    """The draft layer that ``layer`` describes.

    A head size that is left out is ``hidden_size // num_attention_heads``, as in vLLM and SGLang; everything else is
    transformers' default for the kind of layer, as in engines that read ``layer`` with its class. Raises ``ValueError``
    naming the field that cannot be computed, ``KeyError`` for one that has no default.
    """
    kind = layer.get("model_type") or "llama"
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"config.json sets the draft layer's model_type to {kind!r}: only llama and qwen3 are known")
    _check_layer(layer)
    known = {name: layer[name] for name in _NEEDED}
    optional = ({f.name for f in fields(LayerShape)} | set(_ROTATION)) - {"qk_norm", "target_hidden_size"}
    known |= {name: layer[name] for name in sorted(optional) if layer.get(name) is not None}
    heads = known["num_attention_heads"]
    known.setdefault("head_dim", known["hidden_size"] // heads)
    known["hidden_size"] = known["head_dim"] * heads  # transformers asks for a multiple, engines do not
    try:
        full: Any = AutoConfig.for_model(kind, **known)
    except StrictDataclassError as error:
        raise ValueError(f"config.json describes no draft layer: {str(error).splitlines()[-1].strip()}") from error
    rotation = dict(full.rope_parameters)
    if rotation.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json sets partial_rotary_factor, and draft layers rotate whole heads here")
    if (kind_of := rotation.get("rope_type", "default")) not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(f"config.json sets rope_type to {kind_of!r}, which is not known here")
    return LayerShape(
        hidden_size=layer["hidden_size"],
        intermediate_size=full.intermediate_size,
        num_attention_heads=full.num_attention_heads,
        num_key_value_heads=full.num_key_value_heads,
        head_dim=full.head_dim,
        rms_norm_eps=full.rms_norm_eps,
        max_position_embeddings=full.max_position_embeddings,
        rope_parameters=rotation,
        attention_bias=full.attention_bias,
        qk_norm=kind == "qwen3",
        hidden_act=full.hidden_act,
        target_hidden_size=target_hidden_size or layer["hidden_size"],
    )


def _check_layer(layer: Mapping[str, Any]) -> None:
    """``ValueError`` for fields that engines read and this head does not compute."""
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"config.json sets num_hidden_layers to {layer['num_hidden_layers']}: only drafts of one layer are known "
            "(engines do not agree on more)"
        )
    for name in _COUNTS:
        if layer.get(name) is not None and layer[name] < 1:
            raise ValueError(f"config.json sets {name} to {layer[name]}: it must be at least 1")
    neutrals = {"mlp_bias": False, "bias": False, "logit_scale": 1.0, **dict.fromkeys(_ROTATED_PART, 1.0)}
    for name, neutral in neutrals.items():
        if layer.get(name) not in (None, neutral):
            raise ValueError(f"config.json sets {name} to {layer[name]}, which cannot be computed here")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError("config.json asks for sliding_attention in layer_types, which cannot be computed here")


def build(
    config: Mapping[str, Any],
    shape: LayerShape,
    switches: Mapping[str, Any],
    capture_layers: Sequence[int],
    weights: dict[str, Tensor],
    target: LowBitTarget,
) -> Eagle3Head:
    """A head from ``weights`` under its own names; ``config``: the top of config.json, or what has its words.

    Raises ``ValueError`` for a target of another shape, wrong maps, an output head that is missing and low-bit layers
    that do not fit; ``RuntimeError`` as ``load_state_dict`` does.
    """
    tokens = config["vocab_size"]
    if (shape.target_hidden_size, tokens) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the head was trained for a target with hidden size {shape.target_hidden_size} and vocabulary {tokens}, "
            f"but {target.name} has {target.hidden_size} and {target.vocab_size}: give the target that it was trained "
            "for"
        )
    counted = config.get("num_aux_hidden_states")
    if counted not in (None, len(capture_layers)):
        raise ValueError(f"config.json sets num_aux_hidden_states to {counted} but names {len(capture_layers)} layers")
    vocab = read_vocab(weights, config.get("draft_vocab_size") or tokens, tokens)
    if "lm_head.weight" not in weights:
        if not vocab.is_full or config.get("tie_word_embeddings"):
            raise ValueError("lm_head.weight is missing, and the target's output head is not in its place here")
        weights["lm_head.weight"] = target.output_weight.detach()
    own = weights.pop("embed_tokens.weight", None)
    if own is not None and torch.equal(own, target.embedding.weight.detach().to(own.device, own.dtype)):
        own = None  # a copy of the target's
    ours = {name: value for name, value in (config.get("bitdraft_head") or {}).items() if name in _OURS}
    settings = Eagle3Config(attention="qwen3" if shape.qk_norm else "llama", **switches, **ours)
    head = Eagle3Head(settings, shape, capture_layers, vocab, target.embedding.weight.detach(), own)
    if own is not None:
        weights["embed_tokens.weight"] = own
    weights["capture_scale"] = head.capture_scale  # folded into fc
    restore_low_bit(head, config, weights, profile=profile_named(target.recipe.profile))
    head.load_state_dict(weights)
    return head


def default_ids(layers: int) -> tuple[int, ...]:
    """What engines capture of a target with that many layers where a checkpoint names none."""
    return tuple(sorted({2, layers // 2, layers - 3}))
