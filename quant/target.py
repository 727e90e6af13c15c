"""A frozen language model as it is served: loaded by transformers, computed in low bit.

Captured layers are numbered as vLLM numbers them: id ``k`` is the residual stream after ``k`` decoder
layers, the *input* of layer ``k``, which transformers calls ``hidden_states[k]``. The last hidden state is
taken after the final norm; logits come from it through the model's own output head, only where asked.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoTokenizer

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.attention.apply import apply_to_attention
from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.checkpoints.attach import attach
from bitdraft.quant.checkpoints.cache_scales import stored_rounding
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.loading import first_line, load_model, placed, placed_text, read_config, stored_checkpoint
from bitdraft.quant.profiles import profile_named
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.transforms import TransformedInput

CompileChoice = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class TargetStates:
    """What a head sees of the target."""

    captured: Tensor  # [B, T, A, H] residual streams at the capture ids, in the target's dtype
    last_hidden: Tensor  # [B, T, H] after the final norm


class LowBitTarget:
    """A frozen causal LM with a recipe applied in place. Never trained, never changed."""

    def __init__(self, model: nn.Module, recipe: Recipe, applied: Applied, *, name: str, fingerprint: str) -> None:
        self.model, self.recipe, self.applied = model, recipe, applied
        self.name = name
        self.fingerprint = fingerprint
        self.config: Any = model.config
        self.decoder: Any = model.get_decoder()  # type: ignore[operator]

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()  # type: ignore[operator]

    @property
    def output_head(self) -> Any:
        """An ``nn.Linear``, or what a recipe put in its place: a ``LowBitLinear``, also behind a transform."""
        return self.model.get_output_embeddings()  # type: ignore[operator]

    @property
    def output_weight(self) -> Tensor:
        """``[V, H]`` in the target's dtype: what the output head stands for, also where a recipe quantized it."""
        head = self.output_head
        weight: Tensor = head.dequantized() if isinstance(head, LowBitLinear | TransformedInput) else head.weight
        return weight.to(self.dtype)

    @property
    def final_norm(self) -> nn.Module:
        return self.decoder.norm

    def new_cache(self, slots: int) -> SlotCache:
        """An empty cache for sequences of up to ``slots`` tokens; ``ValueError`` if an attention kind has none."""
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        if getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True):
            kinds.add("sliding_attention")
        if kinds != {"full_attention"}:
            raise ValueError(
                f"{self.name} has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}, "
                "for which decoding has no cache yet (quant/attention/kv_cache.py): use a full-attention target"
            )
        return SlotCache(self.layers, slots, self.applied.cache)

    @torch.no_grad()
    def states(
        self,
        input_ids: Tensor,
        *,
        capture: Sequence[int] = (),
        cache: SlotCache | None = None,
        lengths: Tensor | None = None,
    ) -> TargetStates:
        """Run the decoder.

        ``input_ids``: ``[B, T]``, padded on the right (a causal model's real tokens never see the padding).
        With ``cache``, ``lengths`` ``[B]`` tells how many tokens each row already has; the new ones follow.
        """
        streams: dict[int, Tensor] = {}
        handles = [self.decoder.layers[k].register_forward_pre_hook(_keep(streams, k)) for k in capture]
        try:
            if cache is None:
                out = self.decoder(input_ids=input_ids, use_cache=False)
            else:
                assert lengths is not None
                positions, mask = cache.begin(lengths, input_ids.shape[1])
                out = self.decoder(
                    input_ids=input_ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True
                )
        finally:
            for handle in handles:
                handle.remove()
            self.applied.forget()
        last = out.last_hidden_state
        captured = (
            torch.stack([streams[k] for k in capture], dim=2) if capture else last.new_empty(*last.shape[:2], 0, 0)
        )
        return TargetStates(captured, last)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """``[..., H]`` → ``[..., V]`` in the target's dtype, with the architecture's own soft cap or scale."""
        return self.finish_logits(self.output_head(last_hidden))

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """A function from hidden states ``[..., H]`` to the logits ``[..., D]`` of ``token_ids`` ``[D]`` alone."""
        ids, head = token_ids.to(self.device), self.output_head
        if len(ids) == self.vocab_size and torch.equal(ids, torch.arange(len(ids), device=ids.device)):
            return self.logits
        if isinstance(head, LowBitLinear | TransformedInput):  # its blocks may span rows
            return lambda last_hidden: self.logits(last_hidden)[..., ids]
        rows = head.weight[ids]
        bias = None if head.bias is None else head.bias[ids]
        return lambda last_hidden: self.finish_logits(linear(last_hidden, rows, bias))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the architecture does to the output head's product before it is called logits."""
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def top_tokens(self, last_hidden: Tensor, rows: int = 512) -> Tensor:
        """Greedy next tokens ``[N]`` for hidden states ``[N, H]``; never more than ``rows × V`` logits at once."""
        return torch.cat([self.logits(part).argmax(-1) for part in last_hidden.split(rows)])


def _keep(streams: dict[int, Tensor], k: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        streams[k] = args[0]

    return hook


def can_compile() -> bool:
    """Whether ``torch.compile`` has a C++ compiler to work with on CPU."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def load_tokenizer(target: str, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer; ``ValueError`` where it is missing or has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer could be loaded for target {target!r}: {first_line(error)}") from error
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of target {target!r} has no chat template, which conversations need")
    return tokenizer


def load_target(
    target: str,
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    compile_quantizer: CompileChoice = "auto",
    calibration: Sequence[Tensor] | None = None,
    trust_remote_code: bool = False,
) -> LowBitTarget:
    """Load a model folder or hub id, freeze it and apply ``recipe``.

    Recipes with static activation scales and those that look at inputs are calibrated on ``calibration`` (token ids
    ``[B, T]`` each, without padding), which becomes part of the target's recipe; static scales by default on the text
    that ships with Bitdraft. The recipe ``AUTO`` takes a quantized checkpoint as it is: its
    codes are decoded, and the target's recipe says what was found. Raises ``ValueError`` in one sentence for a
    target that is missing, damaged or incomplete, that is already quantized under another recipe, or not under
    ``AUTO``.
    """
    if compile_quantizer == "on" and not can_compile():
        raise ValueError("--compile-quantizer on needs a C++ compiler (g++ or clang++) on the PATH")
    compiled = compile_quantizer == "on" or (compile_quantizer == "auto" and can_compile())
    config = read_config(target, trust_remote_code)
    stored = stored_checkpoint(target, config, recipe, dtype)
    model = placed(load_model(target, config, dtype, trust_remote_code, stored), device)
    if stored is not None:
        scales = {name: layer.weight.outer for name, layer in stored.layers.items() if layer.weight.outer is not None}
        scales |= {f"{n}.input": x.input_scale for n, x in stored.layers.items() if x.input_scale is not None}
        cache = None
        if stored.has_fp8_cache or recipe.kv is not None:
            cache = stored_rounding(model, stored.cache_tensors)
            scales |= stored.cache_tensors
        fingerprint = fingerprint_of(model, scales)
        applied, found = attach(model, stored, compiled=compiled, profile=profile_named(recipe.profile))
        recipe = replace(found, name=recipe.name, kv=None if cache is None else cache.rule)
        applied = apply_to_attention(model, recipe, applied, stored=cache)
    else:
        fingerprint = fingerprint_of(model)
        if calibration is not None and (recipe.has_static_inputs or recipe.looks_at_inputs):
            recipe = replace(recipe, calibrated_on=_digest(calibration))
        elif recipe.has_static_inputs and not recipe.looks_at_inputs:  # a page is too little for those
            calibration = calibration_ids(load_tokenizer(target, trust_remote_code=trust_remote_code))
        moved = placed_text(model, calibration or ())
        applied = apply_recipe(model, recipe, compiled=compiled, calibration=moved)
        applied = apply_to_attention(model, recipe, applied, moved)
    wrapped = LowBitTarget(model, recipe, applied, name=target, fingerprint=fingerprint)
    _compute_exactly(wrapped)
    _check_logits(wrapped)
    return wrapped


def _compute_exactly(target: LowBitTarget) -> None:
    """Products in the engines' exact order where the recipe asks for it; calibration has gone the fast way."""
    for layer in target.model.modules():
        if isinstance(layer, LowBitLinear):
            layer.exact_product = target.recipe.exact_product


def _digest(calibration: Sequence[Tensor]) -> str:
    """16 hex digits over the token ids, in order."""
    digest = hashlib.sha256()
    for ids in calibration:
        digest.update(f"{tuple(ids.shape)}".encode() + ids.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()[:16]


def calibration_ids(tokenizer: Any) -> list[Tensor]:
    """The shipped calibration text, one ``[1, T]`` tensor of token ids per paragraph."""
    text = resources.files("bitdraft.quant").joinpath("calibration.txt").read_text(encoding="utf-8")
    paragraphs = [p for p in text.split("\n\n") if p.strip()]
    return [torch.tensor([tokenizer(p, add_special_tokens=False)["input_ids"]]) for p in paragraphs]


_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def fingerprint_of(model: nn.Module, scales: Mapping[str, Tensor] | None = None) -> str:
    """16 hex digits over the architecture and a sample of every weight: equal for equal models anywhere.

    ``scales``: what the weights of a quantized checkpoint are still to be multiplied by, and the scales of its inputs.
    Samples (64 values per tensor) instead of all bytes, so that an 8B model costs a moment.
    """
    config: Any = model.config
    described = {k: v for k, v in config.to_dict().items() if k not in _NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, weight in [*sorted(model.named_parameters()), *sorted((scales or {}).items())]:
        flat = weight.detach().reshape(-1)
        # Steps of a large prime wander over all rows and columns.
        index = torch.arange(64, device=flat.device) * 1_000_003 % flat.numel()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(flat[index].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def _check_logits(target: LowBitTarget) -> None:
    """Refuse an architecture whose logits are not what ``LowBitTarget.logits`` computes."""
    ids = torch.arange(8, device=target.device)[None] % target.vocab_size
    expected = target.model(input_ids=ids, use_cache=False).logits
    computed = target.logits(target.states(ids).last_hidden)
    if not torch.isfinite(expected).all():
        raise ValueError(f"{target.name} computes NaN or infinity: a damaged checkpoint, or a recipe it cannot bear")
    if not torch.allclose(expected.float(), computed.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{target.name}: {type(target.model).__name__} changes its logits after the output head in a way "
            "that is not known here (quant/target.py, finish_logits)"
        )
