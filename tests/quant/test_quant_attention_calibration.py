"""What is fitted on calibration text is the best there is, and the text leaves nothing else behind."""

from typing import Any

import pytest
import torch
from tiny import VOCAB, tiny_config
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bitdraft.quant.apply import apply_recipe
from bitdraft.quant.attention.apply import apply_to_attention
from bitdraft.quant.attention.low_bit import LowBitAttention, hidden, scores_of
from bitdraft.quant.attention.rules import AttentionRule
from bitdraft.quant.recipe import Recipe

TEXT = [torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
MX = {"queries": "mxfp4-rceil", "keys": "mxfp4-rceil"}
SCALE = 32**-0.5
Seen = dict[int, list[tuple[Tensor, Tensor, Tensor]]]


def plain_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=2, head_dim=32)).eval()


def attend(model: Any, rule: AttentionRule, calibration: list[Tensor] | None = None) -> list[LowBitAttention]:
    recipe = Recipe("attention", (), attention=rule)
    applied = apply_recipe(model, recipe, compiled=False)
    applied = apply_to_attention(model, recipe, applied, TEXT if calibration is None else calibration)
    assert applied.attention is not None
    return list(applied.attention.values())


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Queries, keys and values by layer and text, in the model without low bit."""
    found: Seen = {0: [], 1: []}

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
        found[module.layer_idx].append((query, key, value))  # type: ignore[index]
        return sdpa_attention_forward(module, query, key, value, *more, **options)

    AttentionInterface.register("noted_here", note)
    AttentionMaskInterface.register("noted_here", sdpa_mask)
    model = plain_model()
    model.set_attn_implementation("noted_here")
    with torch.no_grad():
        for ids in TEXT:
            model(input_ids=ids)
    return found


def probabilities(scores_BNTT: Tensor) -> Tensor:
    return hidden(scores_BNTT, None, slice(0, scores_BNTT.shape[2]), scores_BNTT.shape[2]).softmax(-1)


def divergence(low: LowBitAttention, inputs: list[tuple[Tensor, Tensor, Tensor]], scales_N: Tensor) -> Tensor:
    """``[N]``: Σ KL(p ‖ p̂) over queries, with these factors on the scores."""
    total = torch.zeros(4, dtype=torch.float64)
    for query, key, value in inputs:
        rounded = low.rounded(query, key, value)
        noisy = scores_of(rounded[0], rounded[1], SCALE) * scales_N[:, None, None]
        p, q = (probabilities(s.double()).clamp(min=1e-300) for s in (scores_of(query, key, SCALE), noisy))
        total += (p * (p / q).log()).sum(dim=(0, 2, 3))
    return total


def test_head_scales_leave_the_least_divergence_of_the_softmax(seen: Seen) -> None:
    for number, low in enumerate(attend(plain_model(), AttentionRule(**MX, head_scales="fitted"))):
        assert low.head_scales is not None
        assert low.head_scales.shape == (4,)
        fitted = divergence(low, seen[number], low.head_scales)
        for factor in (0.99, 1.01):
            assert (divergence(low, seen[number], low.head_scales * factor) > fitted).all()
        assert (divergence(low, seen[number], torch.ones(4)) > fitted).all()


def test_the_temperature_leaves_the_least_error_of_the_quantized_probabilities(seen: Seen) -> None:
    rule = AttentionRule(**MX, probabilities="mxfp4-rceil", temperature="fitted")
    for number, low in enumerate(attend(plain_model(), rule)):
        assert low.temperature is not None
        fitted, errors = low.temperature, []
        for factor in (0.96, 1.0, 1.04):
            low.temperature, error = fitted * factor, 0.0
            for query, key, value in seen[number]:
                rounded = low.rounded(query, key, value)
                masked = hidden(low.scores(rounded[0], rounded[1], SCALE), None, slice(0, 24), 24)
                weights, total = low.softmax(masked)
                error += float((weights / total - probabilities(scores_of(query, key, SCALE))).square().sum())
            errors.append(error)
        assert errors[1] == min(errors)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_scores_that_are_wrong_by_a_factor_are_put_right(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys too small by a factor, and nothing else wrong: every correction finds exactly its inverse."""

    def shrunk(self: LowBitAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key * factor if self.keys is not None else key, value

    monkeypatch.setattr(LowBitAttention, "rounded", shrunk)
    for low in attend(plain_model(), AttentionRule(**MX, head_scales="fitted", temperature="fitted")):
        assert low.head_scales is not None and low.temperature is not None
        torch.testing.assert_close(low.head_scales, torch.full((4,), 1 / factor))
        assert low.temperature.item() == pytest.approx(1, abs=1e-3)
    for low in attend(plain_model(), AttentionRule(**MX, temperature="fitted")):
        assert low.temperature is not None
        assert low.temperature.item() == pytest.approx(factor, abs=2e-3)


def test_nvfp4_has_the_scale_of_the_largest_input(seen: Seen) -> None:
    name = "nvfp4-kernel"
    for number, low in enumerate(attend(plain_model(), AttentionRule(queries=name, keys=name, values=name))):
        scales = [low.query_scale, low.key_scale, low.value_scale]
        for kind, scale in enumerate(scales):
            largest = max(float(inputs[kind].abs().max()) for inputs in seen[number])
            assert scale is not None
            assert scale.item() == pytest.approx(448 * 6 / largest, rel=1e-6)
    (low, _) = attend(plain_model(), AttentionRule(keys=name, values="fp8-token"))
    assert low.key_scale is not None
    assert low.query_scale is None
    assert low.value_scale is None


def test_calibration_leaves_the_model_as_it_would_be_without_corrections_of_one() -> None:
    """The fitted model with its corrections taken out is the model that was never fitted."""
    fitted, never = plain_model(), plain_model()
    for low in attend(fitted, AttentionRule(**MX, head_scales="fitted", temperature="fitted")):
        low.head_scales = low.temperature = None
    attend(never, AttentionRule(**MX))
    with torch.no_grad():
        assert torch.equal(fitted(input_ids=TEXT[0]).logits, never(input_ids=TEXT[0]).logits)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="measured on calibration text, and none was given"):
        attend(plain_model(), AttentionRule(**MX, head_scales="fitted"), [])
    with pytest.raises(ValueError, match=r"module model\.layers\.0\.self_attn: no head scale can be fitted"):
        attend(
            plain_model(), AttentionRule(**MX, head_scales="fitted"), [TEXT[0][:, :1]]
        )  # one key: scores do not vary
    model = plain_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.inf
    with pytest.raises(
        ValueError, match=r"module model\.layers\.1\.self_attn: the calibration text makes .* not finite"
    ):
        attend(model, AttentionRule(queries="nvfp4-kernel", keys="nvfp4-kernel"))
