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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.attention.packed import grouped_attention
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.attention import training_time_test_attention
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState, StartBatches, check_layers, rows_at
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.eagle3_inputs import training_inputs
from bitdraft.speculators.eagle3_layer import DecoderLayer, LayerShape, Norm
from bitdraft.speculators.eagle3_start import capture_scale, least_squares_start
from bitdraft.speculators.low_rank import LowRankOutput
from bitdraft.speculators.products import Linear
from bitdraft.speculators.vocab import DraftVocab

# B sequence, T row (position), S key, N attention head, D head dimension, H hidden, K step.


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The EAGLE-3 head."""

    steps: int = 5
    """Training-time-test steps: how many tokens ahead the head is trained to draft."""
    draft_vocab_size: int | None = None
    """Tokens that the head can propose; by default a sixth of the target's vocabulary, at most 32,000."""
    train_output: bool = False
    """Train the output head too; it starts as the target's rows and, left frozen, overfits less on small data."""
    output_rank: int | None = None
    """Draft with an output head of this rank, the product of two thin matrices: it costs rank / hidden size of the
    whole one, starts as the target's rows cut to that rank, and is always trained. Engines load the product."""
    train_embedding: bool = False
    """Give the head an embedding of its own, which starts as the target's and is trained. With the optimizer's states
    that takes 16 bytes per number: 8 GiB for 128k tokens and hidden size 4096. vLLM loads such heads."""
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
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"eagle3.draft_vocab_size must be at least 1, got {self.draft_vocab_size}")
        if self.output_rank is not None and self.output_rank < 1:
            raise ValueError(f"eagle3.output_rank must be at least 1, got {self.output_rank}")


def default_capture_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice ``2, L // 2, L - 3``; for targets of under seven layers three that are distinct."""
    chosen = {2, layers // 2, layers - 3}
    return tuple(sorted(chosen)) if len(chosen) == 3 and layers >= 7 else tuple(sorted({0, layers // 2, layers - 1}))


class Eagle3Head(DraftHead):
    """State-dict keys are those of vLLM's speculators format: ``fc``, ``layers.0.*``, ``norm``, ``lm_head``; where
    there are such, ``input_norm``, ``fc_norm.{i}`` and ``embed_tokens``; ours alone, ``lm_head.projection``."""

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
        ``[V, H]``, by default a copy of the target's where embeddings are trained, takes its place.

        Raises ``ValueError`` for an embedding of another shape than the vocabulary's and the layer's.
        """
        super().__init__()
        self.config, self.shape, self.vocab = config, shape, vocab
        self.capture_layers = tuple(capture_layers)
        self.target_hidden_size = shape.target_hidden_size
        if own_embedding is None and config.train_embedding:
            own_embedding = borrowed_embedding.clone()
        found = list((borrowed_embedding if own_embedding is None else own_embedding).shape)
        if found != [vocab.target_size, shape.hidden_size]:
            raise ValueError(
                f"the embedding is {found}, but the draft layer reads {[vocab.target_size, shape.hidden_size]}: a head "
                "of another hidden size than the target's needs an embed_tokens.weight of its own in that shape"
            )
        self._borrowed_embedding = borrowed_embedding
        self.embed_tokens: nn.Embedding | None = None
        if own_embedding is not None:
            self.embed_tokens = nn.Embedding.from_pretrained(own_embedding, freeze=not config.train_embedding)
        layers, width, eps = len(self.capture_layers), shape.target_hidden_size, shape.rms_norm_eps
        self.input_norm = Norm(layers * width, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(Norm(width, eps=eps) for _ in range(layers)) if config.fc_norm else None
        self.fc = Linear(layers * width, shape.hidden_size, bias=False)
        self.capture_scale: Tensor  # [A] powers of two that bring each captured layer to about unit size
        self.register_buffer("capture_scale", torch.ones(layers))
        self.layers = nn.ModuleList([DecoderLayer(shape, norm_before_residual=config.norm_before_residual)])
        self.norm = Norm(shape.hidden_size, eps=eps)
        self.lm_head: nn.Linear = (
            nn.Linear(shape.hidden_size, len(vocab), bias=False)
            if config.output_rank is None
            else LowRankOutput(shape.hidden_size, config.output_rank, len(vocab))
        )
        self.lm_head.requires_grad_(config.train_output or config.output_rank is not None)

    @classmethod
    def from_target(cls, config: Eagle3Config, target: LowBitTarget, vocab: DraftVocab) -> "Eagle3Head":
        """Fresh layer; the output head starts as the target's rows of the draft vocabulary, the norm as its
        final norm."""
        layers = config.capture_layers or default_capture_layers(target.layers)
        check_layers(tuple(layers), target)
        shape = LayerShape.of_target(target.config, qk_norm=config.attention == "qwen3")
        head = cls(config, shape, layers, vocab, target.embedding.weight.detach())
        for name, weight in head.named_parameters():
            if weight.ndim == 2 and not name.startswith("embed_tokens."):
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        with torch.no_grad():
            head._even_out(capture_scale(target, tuple(layers)))
            rows = target.output_weight[vocab.target_ids.to(target.device)]
            if isinstance(head.lm_head, LowRankOutput):
                head.lm_head.start_as(rows)
            else:
                head.lm_head.weight.copy_(rows)
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

    @torch.no_grad()
    def unfold(self, target: LowBitTarget) -> None:
        """Take the captured layers' scales out of ``fc`` again, exactly, as a fresh head has them.

        The head computes the same; but with inputs of ten times another size ``fc`` would learn at ten times another
        rate.
        """
        if self.input_norm is None and self.fc_norm is None:
            scale = capture_scale(target, self.capture_layers).to(self.fc.weight)
            self.fc.weight.copy_(self.folded_fc / scale.repeat_interleave(self.target_hidden_size))
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
        """``[D, H]``, or ``[D, r]`` of an output head of rank ``r``, which turns projected states into logits."""
        return self.lm_head.weight

    @property
    def whole_output(self) -> Tensor:
        """``[D, H]``: what engines load."""
        return self.lm_head.product if isinstance(self.lm_head, LowRankOutput) else self.lm_head.weight.detach()

    def multiplied_out(self) -> "Eagle3Head":
        if isinstance(self.lm_head, LowRankOutput):
            self.lm_head, self.config = self.lm_head.multiplied_out(), replace(self.config, output_rank=None)
        return self

    @property
    def embedding_weight(self) -> Tensor:
        return self._borrowed_embedding if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def draft_steps(self) -> int:
        return self.config.steps

    def training_outputs(self, states: TargetStates, tokens: Tensor, documents: Documents) -> Tensor:
        # Only keys and values are needed at every row; queries and the rest of the layer where drafts begin.
        rows, positions = documents.rows, documents.positions
        g = self.fuse(states.captured)  # [N, H]
        inputs = training_inputs(self.layer, self._embedded(tokens[documents.following]))  # row t reads x_{t+1}
        step = inputs.first(g, rows, positions)
        keys, values = [step.key], [step.value]
        g, positions = g.index_select(0, rows), positions[rows]  # [R, …]
        outputs = []
        for k in range(self.config.steps):
            if k > 0:
                step = inputs.later(g, documents.ahead(k), positions + k)  # x_{t+1+k}
                keys.append(step.key)
                values.append(step.value)
            attended = training_time_test_attention(step.q, keys, values, documents)  # [R, heads, D]
            residual = step.normed if self.config.norm_before_residual else g
            normed, g = self._advance(self._finish(residual, attended.flatten(-2)))
            outputs.append(normed)
        read = torch.stack(outputs)  # [K, R, H]
        return self.lm_head.project(read) if isinstance(self.lm_head, LowRankOutput) else read

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        finish = self._compiled_finish if self.compiled else self.layer.finish
        if self.recompute and torch.is_grad_enabled():  # the MLP's are most of a step's activations
            return checkpoint(finish, residual, attended, use_reentrant=False)
        return finish(residual, attended)

    @cached_property
    def _compiled_finish(self) -> Callable[[Tensor, Tensor], Tensor]:
        return torch.compile(self.layer.finish, dynamic=True)  # sizes differ from pack to pack

    def _embedded(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.embedding_weight)

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
        attended = grouped_attention(q, keys, values, mask).transpose(1, 2)  # [B, T, N, D]
        return self.layer.finish(self.layer.residual(g, u), attended.flatten(-2))


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
