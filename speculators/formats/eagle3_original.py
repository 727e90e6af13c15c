"""EAGLE-3 in the layout of its authors: a Llama configuration and ``midlayer.*``, for SGLang, vLLM and TensorRT-LLM.

One folder for three engines that read it differently, so it holds only heads that all of them compute alike; ``check``
names the other layout for the rest. Read in SGLang 0.5.23 (``llama_eagle3.py``, ``set_eagle3_layers_to_capture``),
vLLM 0.32 (``llama_eagle3.py``) and TensorRT-LLM (``_torch/models/modeling_speculative.py``):

* Captured layers: the ids here are vLLM's, which it reads at the top. SGLang reads the nested list and adds one to
  each (it names the layer whose *output* is taken), so the same layers stand there as ``id - 1``. TensorRT-LLM reads
  neither: its option ``eagle3_layers_to_capture`` wants ``id - 1`` too.
* Rotation: ``rope_parameters`` for those that are on transformers 5, ``rope_theta`` and ``rope_scaling`` for the rest.
* ``norm_before_fc``: vLLM and SGLang look into ``eagle_config`` and then at the top, TensorRT-LLM into ``eagle_config``
  alone. It has a word of its own for ``norm_output``, too.
* Low bit: TensorRT-LLM fails on configurations without activations (``nvfp4a16``), and some versions quantize ``fc``
  as well. Such heads are for the other two.
"""

from typing import Any

from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.formats import eagle3
from bitdraft.speculators.formats.facts import DTYPE, TargetFacts
from bitdraft.speculators.formats.names import renamed
from bitdraft.speculators.low_bit import head_quantization_config, low_bit_layers

NAME = "eagle3-original"
KIND = "eagle3"
ENGINES = ("SGLang", "vLLM", "TensorRT-LLM")
WEIGHTS = "model.safetensors"
_OTHER = "use the format eagle3-speculators (vLLM)"
_OLD_NAMES = {f"aux_norm_{place}.": f"fc_norm.{i}." for i, place in enumerate(("low", "mid", "high"))}  # SGLang's
_QWEN3_HEAD_DIM = 128  # transformers' default, which does not go by the hidden size


def is_this_format(config: dict[str, Any], names: set[str]) -> bool:
    layer = any(name.startswith(("midlayer.", "layers.0.")) for name in names)
    return "speculators_model_type" not in config and layer and "fc.weight" in names


def engines(head: Eagle3Head) -> tuple[str, ...]:
    """Those of ``ENGINES`` that compute ``head``, which ``check`` lets through."""
    return tuple(name for name in ENGINES if name != "TensorRT-LLM" or not low_bit_layers(head))


def check(head: Eagle3Head) -> None:
    """``ValueError`` for a head that one of the engines would compute otherwise, without a word."""
    for holds, what in (
        (head.config.norm_before_residual, "norm_before_residual, which SGLang and TensorRT-LLM do not compute"),
        (
            head.shape.qk_norm,
            "norms of queries and keys (attention qwen3), which SGLang and TensorRT-LLM do not read in this layout",
        ),
        (head.shape.attention_bias, "attention biases, which SGLang leaves out"),
        (
            head.config.norm_before_fc and head.config.fc_norm,
            "norm_before_fc and fc_norm at once, of which TensorRT-LLM computes one",
        ),
        (
            head.embed_tokens is not None or head.shape.target_hidden_size != head.shape.hidden_size,
            "an embedding of its own, for which SGLang and TensorRT-LLM put the target's",
        ),
        (
            any(layer.formats.weights.startswith("mxfp4") for layer in low_bit_layers(head).values()),
            "weights in MXFP4, for which SGLang has no dense kernel",
        ),
        (
            head.shape.hidden_size % head.shape.num_attention_heads != 0,
            "a hidden size that is no multiple of its attention heads, for which transformers makes no Llama "
            "configuration",
        ),
        ("fc" in low_bit_layers(head), "fc in low bit, which SGLang reads as a plain layer"),
        (
            len(head.capture_layers) < 2,
            "one captured layer, behind which SGLang and TensorRT-LLM skip fc: it is as wide as what they draft from",
        ),
        (
            0 in head.capture_layers,
            "the input of layer 0 among the captured layers, which SGLang and TensorRT-LLM cannot capture (they name "
            "the layer before)",
        ),
    ):
        if holds:
            raise ValueError(f"the head has {what}: {_OTHER}")


def _outside(name: str) -> str:
    """From the head's own name of a tensor or layer to the layout's."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _own(name: str) -> str:
    """From the layout's name of a tensor, in any spelling, to the head's own."""
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return next((new + name.removeprefix(old) for old, new in _OLD_NAMES.items() if name.startswith(old)), name)


def tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, plain weights in bf16; the embedding is the target's."""
    return {_outside(name): tensor for name, tensor in eagle3.plain_tensors(head).items()}


def shapes(head: Eagle3Head) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors."""
    return {_outside(name): shape for name, shape in eagle3.plain_shapes(head).items()}


def config(head: Eagle3Head, target: TargetFacts, draft_length: int) -> dict[str, Any]:
    """``config.json`` of the checkpoint."""
    del target, draft_length  # flags of every engine
    rotation = dict(sorted(head.shape.rope_parameters.items()))
    scaling = {name: value for name, value in rotation.items() if name != "rope_theta"}
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **eagle3.layer_settings(head),
        "rope_theta": rotation.get("rope_theta", 10_000.0),
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "bias": False,
        "dtype": DTYPE,
        "torch_dtype": DTYPE,
        "draft_vocab_size": len(head.vocab),
        "target_hidden_size": head.shape.target_hidden_size,
        **{name: getattr(head.config, name) for name in eagle3.SWITCHES},
        "eagle_aux_hidden_state_layer_ids": list(head.capture_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in head.capture_layers],
            "norm_before_fc": head.config.norm_before_fc,
            "return_hidden_post_norm": head.config.norm_output,
            "eh_proj_before_attn": False,
        },
        "bitdraft_head": eagle3.our_settings(head),
    }
    if low_bit_layers(head):
        described["quantization_config"] = head_quantization_config(head, _outside)
    return described


def load(config: dict[str, Any], weights: dict[str, Tensor], target: LowBitTarget) -> DraftHead:
    """The head of a checkpoint, with ``midlayer.*`` or ``layers.0.*``, of Llama's layer or, as vLLM has it, Qwen3's.

    Where only ``eagle_config`` names captured layers they are SGLang's, whose authors write it. Raises ``ValueError``
    for settings or tensors that it cannot represent.
    """
    nested = config.get("eagle_config") or {}
    for name, computed in (("use_aux_hidden_state", True), ("eh_proj_before_attn", False)):
        if nested.get(name, computed) != computed:
            raise ValueError(f"config.json sets eagle_config.{name} to {nested[name]}, which cannot be computed here")
    if config.get("tie_word_embeddings") and "lm_head.weight" in weights:
        raise ValueError(
            "config.json sets tie_word_embeddings although lm_head.weight is stored: vLLM drafts with the latter and "
            "SGLang with the embedding, so set it to false or remove the tensor"
        )
    switches = {name: bool(config.get(name)) for name in eagle3.SWITCHES}
    switches["fc_norm"] |= bool(config.get("use_aux_norm"))  # SGLang's older word
    if switches["norm_before_fc"] and not nested.get("norm_before_fc", True):
        raise ValueError(
            f"config.json sets norm_before_fc to {config['norm_before_fc']} but eagle_config.norm_before_fc, which "
            f"engines read first, to {nested['norm_before_fc']}: set both alike"
        )
    switches["norm_before_fc"] = bool(nested.get("norm_before_fc", switches["norm_before_fc"]))
    switches["norm_output"] |= bool(nested.get("return_hidden_post_norm"))
    captured = config.get("eagle_aux_hidden_state_layer_ids") or [
        k + 1 for k in nested.get("eagle_aux_hidden_state_layer_ids") or ()
    ]
    shape = eagle3.read_shape(_layer(config), config.get("target_hidden_size"))
    own, layers = renamed(weights, _own), captured or eagle3.default_ids(target.layers)
    return eagle3.build(config, shape, switches, layers, own, target)


def _layer(config: dict[str, Any]) -> dict[str, Any]:
    """The draft layer's configuration. Its class goes by ``architectures``, as engines choose it, what is left out by
    ``model_type``."""
    if config.get("model_type") != "qwen3":
        return {**config, "model_type": "llama"}
    as_llama = any("Llama" in name for name in config.get("architectures") or ())
    return {"head_dim": _QWEN3_HEAD_DIM, **config, "model_type": "llama" if as_llama else "qwen3"}
