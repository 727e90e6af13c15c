"""EAGLE-3 heads with the switches of published ones: what is trained and what drafts is what the engine computes.

The oracle is vLLM 0.32's ``llama_eagle3.py`` and ``qwen3_eagle3.py`` written out by hand, one token at a time: rows of
the prompt first, then the drafts, each of which reads the state that the one before left behind.
"""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import pytest
import torch
from packs import outputs_at, packed_states
from torch import Tensor
from torch.nn.functional import linear
from transformers import LlamaConfig

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.eagle3_layer import LayerShape
from bitdraft.speculators.vocab import DraftVocab

# A captured layer, H hidden, D head dimension, T row, K step.
STEPS, V, LENGTH, THETA, EPS = 3, 40, 9, 500.0, 1e-3  # an epsilon that shows
DRAFT_IDS = torch.arange(1, V, 2)
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Variant:
    """What a head differs in from the plain one."""

    switches: frozenset[str] = frozenset()
    shape: dict[str, Any] = field(default_factory=dict)
    layers: int = 3
    own_embedding: bool = False

    def __str__(self) -> str:
        words = [*sorted(self.switches), *self.shape, f"{self.layers} layers" if self.layers != 3 else ""]
        return ", ".join(word for word in [*words, "own embedding" if self.own_embedding else ""] if word) or "plain"

    def head(self) -> Eagle3Head:
        """A head with random weights, norms among them, and scales of the captured layers."""
        settings: dict[str, Any] = {"hidden_size": 32, **self.shape}
        shape = LayerShape(
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            rms_norm_eps=EPS,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            **settings,
        )
        torch.manual_seed(7)
        on: dict[str, Any] = dict.fromkeys(self.switches, True)
        head = Eagle3Head(
            Eagle3Config(steps=STEPS, train_output=True, **on),
            shape,
            range(self.layers),
            DraftVocab(DRAFT_IDS, V),
            torch.randn(V, shape.target_hidden_size),
            torch.randn(V, shape.hidden_size) if self.own_embedding else None,
        )
        for weight in head.parameters():
            if weight.ndim == 1:
                torch.nn.init.uniform_(weight, 0.5, 1.5)  # gains, and biases that are anything but small
            else:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
        if not self.switches & {"norm_before_fc", "fc_norm"}:
            head.capture_scale.copy_(torch.tensor([0.5, 4.0, 0.25, 2.0])[: self.layers])
        return head


QWEN3, BIASED = {"qk_norm": True}, {"attention_bias": True}
NARROW: dict[str, Any] = {"hidden_size": 24, "target_hidden_size": 32}
ALL = frozenset(SWITCHES)
VARIANTS = [
    *(
        Variant(frozenset(name for name, on in zip(SWITCHES, chosen, strict=True) if on), shape)
        for chosen in product([False, True], repeat=len(SWITCHES))
        for shape in ({}, QWEN3)
    ),
    Variant(shape=BIASED),
    Variant(shape=QWEN3 | BIASED),
    Variant(shape=NARROW, own_embedding=True),
    Variant(own_embedding=True),
    Variant(layers=1),
    Variant(layers=4),
    Variant(ALL, BIASED | NARROW, layers=4, own_embedding=True),
    Variant(ALL, QWEN3 | BIASED | NARROW, layers=2, own_embedding=True),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def weights_for_engines(head: Eagle3Head) -> dict[str, Tensor]:
    """The tensors of a checkpoint, in fp64."""
    state = {**head.state_dict(), "fc.weight": head.folded_fc, "embed_tokens.weight": head.embedding_weight}
    del state["capture_scale"]
    return {name: weight.detach().double() for name, weight in state.items()}


class Engine:
    """The engine's arithmetic for one sequence."""

    def __init__(self, variant: Variant, weights: dict[str, Tensor]) -> None:
        self.variant, self.w = variant, weights
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + EPS).sqrt() * self.w[f"{name}.weight"]

    def project(self, name: str, x: Tensor) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        bias = self.w.get(f"{name}.bias")
        return y if bias is None else y + bias

    def combine_hidden_states(self, captured: Tensor) -> Tensor:
        """``[A, H]`` → ``[H]``."""
        hidden = captured.double().flatten()
        if "norm_before_fc" in self.variant.switches:
            hidden = self.norm("input_norm", hidden)
        if "fc_norm" in self.variant.switches:
            chunks = hidden.chunk(self.variant.layers)
            hidden = torch.cat([self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)])
        return self.project("fc", hidden)

    def rotate(self, head: Tensor, position: int) -> Tensor:
        half = len(head) // 2
        angle = position * THETA ** (-torch.arange(half).double() / half)
        low, high = head[:half], head[half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])

    def heads(self, name: str, x: Tensor, norm: str, position: int) -> list[Tensor]:
        heads = list(self.project(name, x).split(12))
        if "qk_norm" in self.variant.shape:
            heads = [self.norm(norm, head) for head in heads]
        return [self.rotate(head, position) for head in heads]

    def attention(self, x: Tensor, position: int) -> Tensor:
        at = "layers.0.self_attn"
        queries = self.heads(f"{at}.q_proj", x, f"{at}.q_norm", position)
        self.keys.append(torch.stack(self.heads(f"{at}.k_proj", x, f"{at}.k_norm", position)))
        self.values.append(self.project(f"{at}.v_proj", x).view(-1, 12))
        out = []
        for n, query in enumerate(queries):
            scores = torch.stack([query @ key[n // 2] / math.sqrt(12) for key in self.keys]).softmax(0)
            out.append(sum((p * value[n // 2] for p, value in zip(scores, self.values, strict=True)), torch.zeros(12)))
        return self.project(f"{at}.o_proj", torch.cat(out))

    def forward(self, token: int, position: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The model's two outputs: what the logits are of, and what the next draft step is given."""
        embeds = self.norm("layers.0.input_layernorm", self.w["embed_tokens.weight"][token])
        residual = hidden
        hidden = self.norm("layers.0.hidden_norm", hidden)
        if "norm_before_residual" in self.variant.switches:
            residual = hidden
        residual = residual + self.attention(torch.cat([embeds, hidden]), position)
        x = self.norm("layers.0.post_attention_layernorm", residual)
        gate, up = self.project("layers.0.mlp.gate_proj", x), self.project("layers.0.mlp.up_proj", x)
        prenorm = residual + self.project("layers.0.mlp.down_proj", gate / (1 + (-gate).exp()) * up)
        normed = self.norm("norm", prenorm)
        return normed, normed if "norm_output" in self.variant.switches else prenorm

    def draft(self, captured: Tensor, tokens: list[int], row: int) -> Tensor:
        """Logits ``[K, D]`` behind ``row``, told which tokens follow."""
        logits, aux = [], torch.empty(0)
        for t in range(row + STEPS):
            hidden = self.combine_hidden_states(captured[t]) if t <= row else aux
            out, aux = self.forward(tokens[t + 1], t, hidden)
            if t >= row:
                logits.append(self.w["lm_head.weight"] @ out)
        return torch.stack(logits)


def given(head: Eagle3Head) -> tuple[TargetStates, Tensor]:
    """Random states ``[2, T, A, H]`` of very unequal size and tokens ``[2, T]``."""
    generator = torch.Generator().manual_seed(2)
    size = torch.tensor([2.0, 0.25, 4.0, 0.5])[: len(head.capture_layers), None]
    captured = size * torch.randn(2, LENGTH, len(size), head.target_hidden_size, generator=generator)
    return TargetStates(captured, captured[:, :, -1]), torch.randint(V, (2, LENGTH), generator=generator)


@every_variant
def test_training_and_drafting_are_the_engine_s_computation(variant: Variant) -> None:
    """Two sequences of different lengths; in drafting the first rows come in a pass of their own."""
    head, rows = variant.head(), torch.tensor([[5], [3]])
    states, tokens = given(head)
    expected = torch.stack(
        [
            Engine(variant, weights_for_engines(head)).draft(states.captured[b], tokens[b].tolist(), int(rows[b]))
            for b in range(2)
        ],
        dim=1,
    ).float()  # [K, B, D]
    with torch.no_grad():
        trained = linear(outputs_at(head, states, tokens, rows), head.output_weight)[:, :, 0]
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-5)

        state = head.new_state(32, SlotCache(1, 32))
        for start, newest in (
            (torch.tensor([0, 0]), torch.tensor([1, 0])),
            (torch.tensor([2, 1]), torch.tensor([3, 2])),
        ):
            at = start[:, None] + torch.arange(4)
            pick = torch.arange(2)[:, None]
            context = DraftContext(
                states.captured[pick, at], states.last_hidden[pick, at], tokens[pick, at + 1], start, newest
            )
            drafted = [head.first(context, state)]
        for k in range(1, STEPS):
            told = tokens.gather(1, rows + 1 + k)
            drafted.append(head.following(state, told, torch.zeros_like(told))[:, 0])
        torch.testing.assert_close(torch.stack(drafted), expected, rtol=1e-5, atol=1e-5)


@every_variant
def test_every_weight_of_a_variant_is_in_the_checkpoint_and_learns(variant: Variant) -> None:
    head = variant.head()
    at = "layers.0"
    expected = {
        *(f"{at}.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{at}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{at}.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *("fc.weight", "norm.weight", "lm_head.weight"),
    }
    if "qk_norm" in variant.shape:
        expected |= {f"{at}.self_attn.{name}_norm.weight" for name in "qk"}
    if "attention_bias" in variant.shape:  # vLLM's Qwen3 layer has none behind its attention
        expected |= {f"{at}.self_attn.{name}_proj.bias" for name in ("qkv" if "qk_norm" in variant.shape else "qkvo")}
    if "norm_before_fc" in variant.switches:
        expected.add("input_norm.weight")
    if "fc_norm" in variant.switches:
        expected |= {f"fc_norm.{i}.weight" for i in range(variant.layers)}
    frozen = {"embed_tokens.weight"} if variant.own_embedding else set()
    assert set(head.state_dict()) == expected | frozen | {"capture_scale"}
    states, tokens = given(head)
    outputs = outputs_at(head, states, tokens, torch.tensor([[2, 4], [3, 5]]))
    linear(outputs, head.output_weight).square().sum().backward()
    moved = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == expected


def test_an_embedding_of_its_own_is_trained_where_that_is_asked_for() -> None:
    head = Variant(own_embedding=True).head()
    assert head.embed_tokens is not None
    head.embed_tokens.requires_grad_(True)
    states, tokens = given(head)
    outputs_at(head, states, tokens, torch.tensor([[2, 4], [3, 5]])).sum().backward()
    assert head.embed_tokens.weight.grad is not None and head.embed_tokens.weight.grad.any()


@pytest.mark.parametrize("own", [None, (V, 32), (V - 1, 24)], ids=["none", "another width", "another vocabulary"])
def test_a_head_of_another_width_needs_an_embedding_in_its_own(own: tuple[int, int] | None) -> None:
    whole = Variant(shape=NARROW, own_embedding=True).head()
    with pytest.raises(ValueError, match=r"reads \[40, 24\].*needs an embed_tokens\.weight of its own"):
        Eagle3Head(whole.config, whole.shape, (0, 1, 2), whole.vocab, torch.empty(V, 32), own and torch.empty(*own))


def test_a_head_of_another_width_does_not_start_from_least_squares() -> None:
    head = Variant(shape=NARROW, own_embedding=True).head()
    states, tokens = given(head)
    with pytest.raises(ValueError, match=r"hidden size of 24 is not the target's 32: set eagle3\.start to random"):
        head.start_from([(packed_states(states), tokens.flatten(), torch.ones(tokens.numel(), dtype=torch.bool))])


def test_an_activation_that_no_engine_runs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_act is 'gelu'.*silu"):
        Variant(shape={"hidden_act": "gelu"}).head()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_fresh_head_has_the_attention_that_was_asked_for_and_no_biases(
    target: LowBitTarget, model_type: Literal["llama", "qwen3"]
) -> None:
    assert not LayerShape.of_target(LlamaConfig(attention_bias=True)).attention_bias
    assert not Eagle3Head.from_target(Eagle3Config(), target, DraftVocab.full(target.vocab_size)).shape.qk_norm
    config = Eagle3Config(attention=model_type)
    head = Eagle3Head.from_target(config, target, DraftVocab.full(target.vocab_size))
    named = {name for name, _ in head.named_parameters()}
    assert ("layers.0.self_attn.q_norm.weight" in named) == (model_type == "qwen3")
    assert not [name for name in named if "bias" in name]


@pytest.mark.parametrize("switch", [None, "norm_before_fc", "fc_norm"])
def test_a_fresh_head_reads_every_captured_layer_at_about_the_same_size(
    target: LowBitTarget, switch: str | None
) -> None:
    on: dict[str, Any] = {switch: True} if switch else {}
    config = Eagle3Config(capture_layers=(0, 4, 7), **on)
    head = Eagle3Head.from_target(config, target, DraftVocab.full(target.vocab_size))
    tokens = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(3))
    captured = target.states(tokens, capture=head.capture_layers).captured
    with torch.no_grad():
        size = head.fc_inputs(captured).unflatten(-1, (3, -1)).square().mean((0, 1, 3)).sqrt()
    assert captured.square().mean((0, 1, 3)).sqrt().max() > 4 * captured.square().mean((0, 1, 3)).sqrt().min()
    assert size.min() > 0.6 and size.max() < 1.6
    assert (head.capture_scale == 1).all() == (switch is not None)
