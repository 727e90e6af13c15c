"""A rotation of the residual stream, folded into a model's weights; and the way back for whoever reads states.

With an orthogonal ``Q`` every residual vector ``h`` becomes ``h Q``. Layers that read the stream take ``W Q``, those
that write to it take ``Qᵀ W``; an RMS norm without a gain commutes with ``Q``, so gains go into the layers behind
the norms first, the last one into the output head. The logits stay; nothing runs that did not run before; outliers
of single channels are spread over all of them (QuaRot, arXiv:2404.00456; SpinQuant, arXiv:2405.16406).

The trap: hidden states captured from such a model are in the rotated basis, and a head trained in the
other basis accepts next to nothing. So the model carries its ``ResidualBasis``: it turns captured states back, or
turns a head's input weight instead, and ``check_basis`` refuses a pair that does not fit.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.target import TargetStates
from bitdraft.quant.transforms import hadamard

# B sequence, T token, A captured layer, H hidden.

ORIGINAL = "original"
"""Name of the basis of a model that was not rotated."""
_READERS = (("input_layernorm", ("q_proj", "k_proj", "v_proj")), ("post_attention_layernorm", ("gate_proj", "up_proj")))
_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class ResidualBasis:
    """How a rotated model's hidden states relate to the original's."""

    rotation: Tensor  # [H, H] fp64: rotated = original · rotation
    final_gain: Tensor  # [H] fp64: the final norm's gain, which moved into the output head

    @property
    def name(self) -> str:
        """Equal for equal bases: ``rotated-`` and 16 hex digits over the rotation and the gain.

        Both are rounded to 2^-10 first: another machine's factorization may differ in the last bits.
        """
        both = torch.cat([self.rotation.flatten(), self.final_gain]).cpu()
        digest = hashlib.sha256((both * 1024).round().to(torch.int32).numpy().tobytes())
        return f"rotated-{digest.hexdigest()[:16]}"

    def unrotate(self, states: TargetStates) -> TargetStates:
        """The states that the original model has: captured ones turned back, the last with its norm's gain again.

        Computed in fp32, returned in the states' dtype.
        """
        back = self.rotation.T.to(states.last_hidden.device, torch.float32)
        gain = self.final_gain.to(states.last_hidden.device, torch.float32)
        return TargetStates(
            (states.captured.float() @ back).to(states.captured.dtype),
            (states.last_hidden.float() @ back * gain).to(states.last_hidden.dtype),
        )

    def original_embedding(self, weight: Tensor) -> Tensor:
        """The input embedding ``[V, H]`` before the rotation, from the rotated one."""
        return (weight.double() @ self.rotation.T.to(weight.device)).to(weight.dtype)

    def fold_into_reader(self, weight: Tensor) -> Tensor:
        """For a weight ``[M, A · H]`` that reads ``A`` original captured states: its equal that reads rotated ones."""
        turned = weight.double().unflatten(-1, (-1, len(self.rotation))) @ self.rotation.to(weight.device)
        return turned.flatten(-2).to(weight.dtype)


def basis_of(model: nn.Module) -> ResidualBasis | None:
    """The basis of ``model``'s residual stream; ``None`` is the original one."""
    return getattr(model, "residual_basis", None)


def basis_name(model: nn.Module) -> str:
    """What a head that is trained on ``model``'s states as they come should remember."""
    basis = basis_of(model)
    return basis.name if basis else ORIGINAL


def check_basis(head_basis: str, model: nn.Module) -> None:
    """``ValueError`` if a head that reads states in ``head_basis`` would get ``model``'s in another one."""
    if head_basis != basis_name(model):
        raise ValueError(
            f"the head reads hidden states in the basis {head_basis}, but the target's residual stream is in the basis "
            f"{basis_name(model)}: turn the states back (ResidualBasis.unrotate), or train the head on this target"
        )


def random_rotation(size: int, seed: int = 0) -> Tensor:
    """An orthogonal ``[size, size]`` matrix, fp64, that mixes all channels.

    Random signs, then a Hadamard matrix of the largest power of two in ``size``, with a random rotation of what is
    left of it where ``size`` is no power of two.
    """
    power = size & -size
    generator = torch.Generator().manual_seed(seed)
    rest, _ = torch.linalg.qr(torch.randn(size // power, size // power, generator=generator, dtype=torch.float64))
    signs = torch.randint(0, 2, (size, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return signs * torch.kron(rest.contiguous(), hadamard(power))


@torch.no_grad()
def rotate_residual(model: nn.Module, rotation: Tensor) -> ResidualBasis:
    """Rotate ``model``'s residual stream by ``rotation`` ``[H, H]``, in place, and mark it.

    ``model``: a transformers causal LM of Llama's shape (pre-norm blocks with RMS norms and separate projections).
    Tied embeddings are untied, because the output head takes the last gain. Folding is done in fp64 and rounded
    once to each weight's dtype: equal logits up to that rounding. Raises ``ValueError`` for a matrix that is not
    orthogonal, for a model that is rotated already and for another architecture. All but one are found before
    anything is changed; a model whose logits turn out to change has to be loaded again.
    """
    q = rotation.double()
    if not torch.allclose(q @ q.T, torch.eye(len(q), dtype=q.dtype, device=q.device), atol=1e-9):
        raise ValueError("the rotation is not orthogonal")
    if basis_of(model) is not None:
        raise ValueError("the model's residual stream is rotated already")
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    _check_architecture(model, decoder, len(q))
    q = q.to(decoder.norm.weight.device)
    before = _probe(model)
    _untie(model)
    for block in decoder.layers:
        for norm_name, names in _READERS:
            norm = getattr(block, norm_name)
            for linear in _projections(block, names):
                _set(linear.weight, linear.weight.double() * norm.weight.double() @ q)
            norm.weight.fill_(1.0)
        for linear in _projections(block, _WRITERS):
            _set(linear.weight, q.T @ linear.weight.double())
            if linear.bias is not None:
                _set(linear.bias, linear.bias.double() @ q)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    gain = decoder.norm.weight.double().clone()
    _set(embedding.weight, embedding.weight.double() @ q)
    _set(head.weight, head.weight.double() * gain @ q)
    decoder.norm.weight.fill_(1.0)
    # In bf16 rounding alone moves logits by up to a tenth (SmolLM2-135M, meaningless text), in fp32 by 1e-6; a wrong
    # fold moves them by their whole size.
    if (_probe(model) - before).norm() > 0.3 * before.norm():
        raise ValueError(f"{type(model).__name__} cannot be rotated: its logits are no longer the same")
    basis = ResidualBasis(q, gain)
    model.residual_basis = basis  # type: ignore[assignment]
    return basis


def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))


def _projections(block: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    found = [m for n, m in block.named_modules() if n.rpartition(".")[2] in names and isinstance(m, nn.Linear)]
    assert len(found) == len(names)
    return found


def _untie(model: nn.Module) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
        config: Any = model.config
        config.tie_word_embeddings = False


def _check_architecture(model: nn.Module, decoder: Any, size: int) -> None:
    """Refuse what the fold does not know: every parameter that touches the stream must be one of the named ones."""
    known = {name for _, names in _READERS for name in names} | set(_WRITERS)
    inside = {"q_norm", "k_norm"}  # act within a head, behind the projections
    norms = {name for name, _ in _READERS}
    config: Any = model.config
    if config.hidden_size != size:
        raise ValueError(f"a rotation of {size} channels does not fit a hidden size of {config.hidden_size}")
    for number, block in enumerate(decoder.layers):
        owners = {name.rsplit(".", 2)[-2] for name, _ in block.named_parameters()}
        unknown = owners - known - inside - norms
        missing = (known | norms) - owners
        if unknown or missing:
            what = f"has {sorted(unknown)[0]}" if unknown else f"has no {sorted(missing)[0]}"
            raise ValueError(
                f"{type(model).__name__} cannot be rotated: block {number} {what} (known: Llama's pre-norm blocks)"
            )
    for norm in [decoder.norm, *(getattr(b, n) for b in decoder.layers for n in norms)]:
        if not _is_plain_rms_norm(norm):
            raise ValueError(f"{type(model).__name__} cannot be rotated: {type(norm).__name__} is not x / rms · gain")


def _is_plain_rms_norm(norm: nn.Module) -> bool:
    """Whether ``norm`` is ``x / rms(x) · weight``: no mean, no bias, no ``1 + weight``. Tried on large numbers, beside
    which its epsilon is nothing."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    x = torch.linspace(-1e3, 2e3, len(weight), device=weight.device).to(weight.dtype)
    expected = x.float() * x.float().pow(2).mean().rsqrt() * weight.float()
    return torch.allclose(norm(x).float(), expected, rtol=2e-2, atol=2e-2)


def _probe(model: nn.Module) -> Tensor:
    """Logits of a few tokens, fp32: what a fold must not change."""
    embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(8, device=embedding.weight.device)[None] * 7 % embedding.num_embeddings
    return model(input_ids=ids, use_cache=False).logits.float()
