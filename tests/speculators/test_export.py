"""Exports: what engines find in them, and what comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import outputs_at
from published_heads import config_of
from safetensors.torch import load_file

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.decode import generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head, recipe_of_head

H, V, D, INTERMEDIATE, QUERIES, SHARED = 64, 320, 96, 128, 4 * 16, 2 * 16
KINDS = ["eagle3", "eagle3 full", "eagle3 four layers", "medusa", "medusa own"]
every_kind = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[str], DraftHead]


def expected_tensors(kind: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes that vLLM's loaders ask for."""
    bf16 = torch.bfloat16
    if kind.startswith("medusa"):
        heads, blocks = (2, 1) if kind == "medusa own" else (3, 2)
        out = {f"blocks.{i}.layers.{j}.weight": (bf16, (H, H)) for i in range(heads) for j in range(blocks)}
        outputs = [f"lm_heads.{i}.weight" for i in range(heads)] if kind == "medusa own" else ["lm_head.weight"]
        return {**out, **dict.fromkeys(outputs, (bf16, (V, H)))}
    captured, draft = (4 if "four" in kind else 3), (V if "full" in kind else D)
    shapes = {
        "embed_tokens.weight": (V, H),
        "fc.weight": (H, captured * H),
        "layers.0.hidden_norm.weight": (H,),
        "layers.0.input_layernorm.weight": (H,),
        "layers.0.post_attention_layernorm.weight": (H,),
        "layers.0.self_attn.q_proj.weight": (QUERIES, 2 * H),
        "layers.0.self_attn.k_proj.weight": (SHARED, 2 * H),
        "layers.0.self_attn.v_proj.weight": (SHARED, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, QUERIES),
        "layers.0.mlp.gate_proj.weight": (INTERMEDIATE, H),
        "layers.0.mlp.up_proj.weight": (INTERMEDIATE, H),
        "layers.0.mlp.down_proj.weight": (H, INTERMEDIATE),
        "norm.weight": (H,),
        "lm_head.weight": (draft, H),
    }
    maps = {} if draft == V else {"d2t": (torch.int64, (D,)), "t2d": (torch.bool, (V,))}
    return {**{name: (bf16, shape) for name, shape in shapes.items()}, **maps}


@every_kind
def test_the_file_holds_exactly_the_tensors_that_engines_load(exported: Callable[[str], Path], kind: str) -> None:
    weights = load_file(exported(kind) / "model.safetensors")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in weights.items()} == expected_tensors(kind)
    assert {p.name for p in exported(kind).iterdir()} == {"model.safetensors", "config.json", "manifest.json"}


@every_kind
def test_every_trained_weight_is_written_bit_for_bit(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str
) -> None:
    head = make_head(kind)
    export_head(head, rounded, tmp_path / "head", draft_length=2)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    for name, parameter in head.named_parameters():
        if name != "fc.weight":
            assert torch.equal(weights[name], parameter.detach().to(torch.bfloat16)), name
    if isinstance(head, Eagle3Head):
        width = len(head.capture_layers) * H
        with torch.no_grad():  # the columns of whatever the head does to the captured states
            columns = head.fuse(torch.eye(width).view(1, width, len(head.capture_layers), H))[0]
        assert torch.equal(weights["fc.weight"], columns.T.to(torch.bfloat16))
    borrowed = {"embed_tokens.weight": rounded.embedding.weight, "lm_head.weight": rounded.output_head.weight}
    trained = dict(head.named_parameters())
    for name in set(weights) & set(borrowed) - set(trained):
        assert torch.equal(weights[name], borrowed[name].to(torch.bfloat16)), name


def test_the_maps_are_offsets_and_a_mask(make_head: Make, rounded: LowBitTarget, tmp_path: Path) -> None:
    head = make_head("eagle3")
    export_head(head, rounded, tmp_path / "head", draft_length=2)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    draft_ids = torch.arange(D)
    target_ids = draft_ids + weights["d2t"]
    assert torch.equal(target_ids, head.vocab.target_ids)
    assert bool((target_ids[1:] > target_ids[:-1]).all())
    assert torch.equal(weights["t2d"].nonzero().squeeze(1), target_ids)


@every_kind
def test_an_export_read_back_is_the_same_head(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str
) -> None:
    head = make_head(kind)
    export_head(head, rounded, tmp_path / "head", draft_length=2)
    loaded = load_head(tmp_path / "head", rounded)
    assert type(loaded) is type(head)
    assert loaded.kind == head.kind
    assert loaded.capture_layers == head.capture_layers
    assert torch.equal(loaded.vocab.target_ids, head.vocab.target_ids)
    mine, its = dict(head.named_parameters()), dict(loaded.named_parameters())
    assert mine.keys() == its.keys()
    assert [n for n in mine if n != "fc.weight" and not torch.equal(mine[n], its[n])] == []
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    if isinstance(head, Eagle3Head):
        assert isinstance(loaded, Eagle3Head)
        assert loaded.config.steps == head.config.steps
        assert loaded.shape == head.shape

    tokens = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))
    states, rows = rounded.states(tokens, capture=head.capture_layers), torch.tensor([[1, 5, 8]] * 3)
    with torch.no_grad():
        assert torch.equal(outputs_at(head, states, tokens, rows)[:2], outputs_at(loaded, states, tokens, rows)[:2])
    shared: dict[str, Any] = {"plan": DraftPlan(length=2), "max_new_tokens": 10, "end_ids": set(), "batch_size": 3}
    drafted = [generate(rounded, h, tokens.tolist(), **shared)[0] for h in (head, loaded)]
    assert drafted[0] == drafted[1]


def test_a_head_read_for_a_bf16_target_still_rotates_by_exact_angles(
    load_rounded: Callable[[torch.dtype], LowBitTarget], exported: Callable[[str], Path], make_head: Make
) -> None:
    """A rotary frequency in bf16 is off by up to 2^-9: a tenth of a radian here, whole turns in a long context."""
    trained, loaded = make_head("eagle3"), load_head(exported("eagle3"), load_rounded(torch.bfloat16))
    assert isinstance(trained, Eagle3Head)
    assert isinstance(loaded, Eagle3Head)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    u = torch.randn(1, 4, 2 * H, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    positions = torch.tensor([[0, 100, 300, 511]])
    with torch.no_grad():
        mine, its = loaded.layer.queries(u, positions).float(), trained.layer.queries(u.float(), positions)
    error = (mine - its).abs().amax(dim=(1, 3)) / its.abs().amax(dim=(1, 3))
    assert float(error.max()) < 0.02, f"error by position: {error.tolist()}"


def test_eagle3_config_is_what_vllm_reads(exported: Callable[[str], Path], rounded: LowBitTarget) -> None:
    config = config_of(exported("eagle3"))
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == D
    assert config["target_hidden_size"] == H
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
        assert config[switch] is False, "every switch is written: the engine's default may be another"
    speculators = config["speculators_config"]
    assert speculators["algorithm"] == "eagle3"
    assert speculators["default_proposal_method"] == "greedy"
    (method,) = speculators["proposal_methods"]
    assert method["proposal_type"] == "greedy"
    assert method["speculative_tokens"] == 2
    assert speculators["verifier"] == {"architectures": ["LlamaForCausalLM"], "name_or_path": rounded.name}
    layer = config["transformer_layer_config"]
    expected = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": rounded.config.rms_norm_eps,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": dict(rounded.config.rope_parameters),
        "num_aux_hidden_states": 3,
        "layer_types": ["full_attention"],
    }
    assert {key: layer.get(key) for key in expected} == expected


def test_another_number_of_captured_layers_is_written_where_vllm_counts(exported: Callable[[str], Path]) -> None:
    config = config_of(exported("eagle3 four layers"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4, 7]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4


@pytest.mark.parametrize(("kind", "heads", "blocks", "shared"), [("medusa", 3, 2, True), ("medusa own", 2, 1, False)])
def test_medusa_config_is_what_vllm_reads(
    exported: Callable[[str], Path], rounded: LowBitTarget, kind: str, heads: int, blocks: int, shared: bool
) -> None:
    config = config_of(exported(kind))
    expected = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": blocks,
        "medusa_fc_bias": False,
        "original_lm_head": shared,
        "base_model_name_or_path": rounded.name,
    }
    assert {key: config.get(key) for key in expected} == expected


@pytest.mark.parametrize("kind", ["medusa", "medusa own"])
def test_no_medusa_key_is_one_that_vllm_renames(exported: Callable[[str], Path], kind: str) -> None:
    """vLLM's reader turns every key with "num" and "heads" into num_heads, and likewise for layers."""
    keys = list(config_of(exported(kind)))
    assert [k for k in keys if "num" in k and "heads" in k] == ["num_heads"]
    assert [k for k in keys if "num" in k and "layers" in k] == ["num_hidden_layers"]


@every_kind
def test_an_export_says_what_it_was_trained_against(
    exported: Callable[[str], Path], rounded: LowBitTarget, kind: str
) -> None:
    facts = recipe_of_head(exported(kind))
    assert facts["recipe"] == "none"
    assert facts["recipe_fingerprint"] == rounded.recipe.fingerprint
    assert facts["target_fingerprint"] == rounded.fingerprint
