"""EAGLE-3: one decoder layer over the target's fused hidden states and its own feedback.

Li et al. 2025 (arXiv:2503.01840). The states of three target layers are fused, ``g⁰ = W_fc [h_low; h_mid;
h_high]``. One step reads the embedding of the next token and the state, ``u = [RMS(e); RMS(g)]``, and gives ``r
= g + Attn(u)``, ``g' = r + MLP(RMS(r))`` and logits ``W_head RMS(g')``; ``g'`` (not normed) is the next step's
state.

Published heads differ from that in switches, which have the names that vLLM 0.32 gives them (``llama_eagle3.py``
defines what each does): ``norm_before_residual`` puts ``RMS(g)`` in the place of ``g`` in ``r``; ``norm_before_fc`` and
``fc_norm`` norm what ``W_fc`` reads, at once or layer by layer; ``norm_output`` makes ``RMS(g')`` the next state.
EAGLE-3.1 is the last two.

Training-time test: step ``k`` at row ``t`` sees the step-0 keys of rows ``≤ t`` and the keys of steps ``1 … k``
at its own row only, at position ``t + k``: exactly what drafting ``k`` tokens after row ``t`` sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.attention.packed import grouped_attention
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.attention import training_time_test_attention
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState, StartBatches, check_layers, rows_at
from bitdraft.speculators.eagle3_layer import DecoderLayer, LayerShape, Norm
from bitdraft.speculators.eagle3_start import least_squares_start
from bitdraft.speculators.vocab import DraftVocab

# B sequence, T row (position), S key, N attention head, D head dimension, H hidden, K step.


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The EAGLE-3 head."""

    steps: int = 5
    """Training-time-test steps: how many tokens ahead the head is trained to draft."""
    step_decay: float = 0.8
    """Weight of each step's loss relative to the step before (weights are normalised to sum to 1)."""
    draft_vocab_size: int | None = None
    """Tokens that the head can propose; by default a sixth of the target's vocabulary, at most 32,000."""
    train_output: bool = False
    """Train the output head too; it starts as the target's rows and, left frozen, overfits less on small data."""
    start: Literal["least-squares", "random"] = "least-squares"
    """Begin with a closed-form fit on the training data's states, or with random weights."""
    capture_layers: tuple[int, ...] | None = None
    """Target layers whose inputs are fused (vLLM's ids); by default 2, the middle one and the third from the end."""
    attention: Literal["llama", "qwen3"] = "llama"
    """The layer's attention; `qwen3` also norms queries and keys head by head. vLLM loads both, SGLang `llama` only."""
    norm_before_residual: bool = False
    """Add the layer's outputs to the normed state, not to the raw one. vLLM loads both, SGLang only heads without."""
    norm_before_fc: bool = False
    """Norm the captured states of all layers, as one long vector, before they are fused; fc-norm does it finer."""
    fc_norm: bool = False
    """Norm the captured state of each layer before they are fused; with norm-output this is EAGLE-3.1."""
    norm_output: bool = False
    """Hand the normed state, which the output head reads too, on to the next drafted token instead of the raw one."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"eagle3.steps must be at least 1, got {self.steps}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"eagle3.step_decay must lie in (0, 1], got {self.step_decay}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"eagle3.draft_vocab_size must be at least 1, got {self.draft_vocab_size}")


def default_capture_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice ``2, L // 2, L - 3``; for targets of under seven layers three that are distinct."""
    chosen = {2, layers // 2, layers - 3}
    return tuple(sorted(chosen)) if len(chosen) == 3 and layers >= 7 else tuple(sorted({0, layers // 2, layers - 1}))


class Eagle3Head(DraftHead):
    """State-dict keys are those of vLLM's speculators format: ``fc``, ``layers.0.*``, ``norm``, ``lm_head``; where
    there are such, ``input_norm``, ``fc_norm.{i}`` and ``embed_tokens``."""

    kind: ClassVar[str] = "eagle3"

    def __init__(
        self,
        config: Eagle3Config,
        shape: LayerShape,
        capture_layers: Sequence[int],
        vocab: DraftVocab,
        borrowed_embedding: Tensor,
        own_embedding: Tensor | None = None,
    ) -> None:
        """``borrowed_embedding``: the target's input embedding ``[V, H]``, read and never trained; ``own_embedding``
        ``[V, H]`` takes its place and is trained only if the caller asks its parameter to be.

        Raises ``ValueError`` for an embedding of another shape than the vocabulary's and the layer's.
        """
        super().__init__()
        self.config, self.shape, self.vocab = config, shape, vocab
        self.capture_layers = tuple(capture_layers)
        self.target_hidden_size = shape.target_hidden_size
        found = list((borrowed_embedding if own_embedding is None else own_embedding).shape)
        if found != [vocab.target_size, shape.hidden_size]:
            raise ValueError(
                f"the embedding is {found}, but the draft layer reads {[vocab.target_size, shape.hidden_size]}: a head "
                "of another hidden size than the target's needs an embed_tokens.weight of its own in that shape"
            )
        self._borrowed_embedding = borrowed_embedding
        self.embed_tokens = None if own_embedding is None else nn.Embedding.from_pretrained(own_embedding)
        layers, width, eps = len(self.capture_layers), shape.target_hidden_size, shape.rms_norm_eps
        self.input_norm = Norm(layers * width, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(Norm(width, eps=eps) for _ in range(layers)) if config.fc_norm else None
        self.fc = nn.Linear(layers * width, shape.hidden_size, bias=False)
        self.capture_scale: Tensor  # [A] powers of two that bring each captured layer to about unit size
        self.register_buffer("capture_scale", torch.ones(layers))
        self.layers = nn.ModuleList([DecoderLayer(shape, norm_before_residual=config.norm_before_residual)])
        self.norm = Norm(shape.hidden_size, eps=eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(vocab), bias=False)
        self.lm_head.requires_grad_(config.train_output)

    @classmethod
    def from_target(cls, config: Eagle3Config, target: LowBitTarget, vocab: DraftVocab) -> "Eagle3Head":
        """Fresh layer; the output head starts as the target's rows of the draft vocabulary, the norm as its
        final norm."""
        layers = config.capture_layers or default_capture_layers(target.layers)
        check_layers(tuple(layers), target)
        shape = LayerShape.of_target(target.config, qk_norm=config.attention == "qwen3")
        head = cls(config, shape, layers, vocab, target.embedding.weight.detach())
        for weight in head.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        with torch.no_grad():
            head._even_out(_capture_scale(target, tuple(layers)))
            head.lm_head.weight.copy_(target.output_weight[vocab.target_ids.to(target.device)])
            # What the norm multiplies by, which some architectures store as the difference from 1.
            head.norm.weight.copy_(target.final_norm(target.output_weight.new_full((target.hidden_size,), 64.0)))
        return head

    def _even_out(self, scale: Tensor) -> None:
        """Let ``scale`` ``[A]`` bring every captured layer to unit size before ``fc``, if no norm of its own does."""
        if self.input_norm is not None:  # which divides by the size of all of them together
            weight = scale * scale.pow(-2).mean().sqrt()
            self.input_norm.weight.copy_(weight.repeat_interleave(self.target_hidden_size))
        elif self.fc_norm is None:
            self.capture_scale.copy_(scale)

    def start_from(self, batches: StartBatches) -> None:
        if self.config.start == "least-squares":
            least_squares_start(
                self.fc, self.layer, self.norm, self.shape, self.fc_inputs, self.embedding_weight, batches
            )

    @property
    def layer(self) -> "DecoderLayer":
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight

    @property
    def embedding_weight(self) -> Tensor:
        return self._borrowed_embedding if self.embed_tokens is None else self.embed_tokens.weight

    def training_outputs(self, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
        # Only keys and values are needed at every row; queries and the rest of the layer where drafts begin.
        length = tokens.shape[1]
        fused = self.fuse(states.captured)  # [B, T, H]
        following = embedding(pad(tokens[:, 1:], (0, 1)), self.embedding_weight)  # row t reads x_{t+1}
        u = self.layer.inputs(following, fused)  # [B, T, 2H]
        key, value = self.layer.keys_values(u, torch.arange(length, device=tokens.device).expand_as(tokens))
        keys, values = [key], [value]
        g, u = rows_at(fused, rows), rows_at(u, rows)  # [B, R, …]
        outputs = []
        for k in range(self.config.steps):
            if k > 0:
                ahead = rows_at(tokens, (rows + 1 + k).clamp(max=length - 1))  # x_{t+1+k}
                u = self.layer.inputs(embedding(ahead, self.embedding_weight), g)
                key, value = self.layer.keys_values(u, rows + k)
                keys.append(key)
                values.append(value)
            q = self.layer.queries(u, rows + k)
            attended = training_time_test_attention(q, keys, values, rows)
            normed, g = self._advance(self.layer.finish(self.layer.residual(g, u), attended))
            outputs.append(normed)
        return torch.stack(outputs)

    def _advance(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """What the output head reads of the state behind a step, and what the next step does, both ``[B, T, H]``."""
        normed = self.norm(g)
        return normed, normed if self.config.norm_output else g

    def fuse(self, captured: Tensor) -> Tensor:
        """``[B, T, A, H]`` → ``[B, T, H]``, the first step's state; H of the target and of the head."""
        return self.fc(self.fc_inputs(captured))

    def fc_inputs(self, captured: Tensor) -> Tensor:
        """``[…, A, H]`` → ``[…, A·H]``, scaled or normed."""
        dtype = self.fc.weight.dtype
        x = (captured.to(dtype) * self.capture_scale.to(dtype)[:, None]).flatten(-2)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            parts = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return x

    @property
    def folded_fc(self) -> Tensor:
        """``fc``'s weight with the capture scales multiplied in, exactly: what engines load."""
        return self.fc.weight.detach() * self.capture_scale.repeat_interleave(self.target_hidden_size)

    def new_state(self, slots: int, cache: SlotCache) -> "Eagle3State":
        del cache
        return Eagle3State(SlotCache(1, slots))

    def first(self, context: DraftContext, state: DraftState) -> Tensor:
        assert isinstance(state, Eagle3State)
        positions, mask = state.cache.begin(context.start, context.next_tokens.shape[1])
        g = self._step(state, context.next_tokens, self.fuse(context.captured), positions, mask)
        normed, state.g = self._advance(rows_at(g, context.newest)[:, None])  # [B, 1, H]
        state.lengths, state.depth = context.lengths, 0
        state.lineage = state.g.new_zeros(len(g), 1, 0, dtype=torch.bool)
        return self.lm_head(normed)[:, 0]

    def following(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, Eagle3State)
        assert state.g is not None and state.lengths is not None and state.lineage is not None
        batch, width = tokens.shape
        itself = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        state.lineage = torch.cat([rows_at(state.lineage, parents), itself], dim=-1)  # [B, W, M]
        mask = state.cache.begin_level(state.lengths, state.lineage)
        positions = (state.lengths + state.depth)[:, None].expand_as(tokens)
        normed, state.g = self._advance(self._step(state, tokens, rows_at(state.g, parents), positions, mask))
        state.depth += 1
        return self.lm_head(normed)

    def _step(self, state: "Eagle3State", tokens: Tensor, g: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the layer over ``T`` rows at ``positions`` ``[B, T]``, in the pass that the cache has begun."""
        u = self.layer.inputs(embedding(tokens, self.embedding_weight), g)
        keys, values = state.cache.layers[0].update(*self.layer.keys_values(u, positions))
        q = self.layer.queries(u, positions)
        return self.layer.finish(self.layer.residual(g, u), grouped_attention(q, keys, values, mask))


class Eagle3State(DraftState):
    """Keys and values of the draft layer, and where one pass's drafting stands."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.g: Tensor | None = None  # [B, W, H] states of the nodes drafted last
        self.lengths: Tensor | None = None  # [B] rows before the drafts
        self.lineage: Tensor | None = None  # [B, W, M] which of the M drafts each of those nodes descends from
        self.depth = 0

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)


def _capture_scale(target: LowBitTarget, layers: tuple[int, ...]) -> Tensor:
    """``2^-round(log2 rms)`` of each captured layer, from seeded random tokens behind the outsized first ones.

    Residual streams differ tenfold in size between layers and models. Without this the fused state drowns what the
    draft layer adds to it, and the head hardly learns.
    """
    ids = torch.randint(0, target.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    captured = target.states(ids.to(target.device), capture=layers).captured[0, 8:].float()  # [T, A, H]
    size = captured.pow(2).mean(-1).sqrt().median(dim=0).values  # [A]
    return torch.exp2(-size.clamp(min=1e-6).log2().round())
