"""The low-bit target: what it hands out, that nothing changes it, and what it refuses to load."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, VOCAB, save_tiny_target, tiny_tokenizer
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import LowBitTarget, calibration_ids, load_target, load_tokenizer

Get = Callable[[str], LowBitTarget]
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path, preset: str = "none", calibration: list[Tensor] | None = None) -> LowBitTarget:
    recipe = load_recipe(preset)
    return load_target(str(folder), recipe, dtype=torch.float32, compile_quantizer="off", calibration=calibration)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("two") / "target", num_hidden_layers=2)


@pytest.fixture
def folder(two_layers: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(two_layers, tmp_path / "target")


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def checksum(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_states_are_the_hidden_states_of_transformers(tiny_folder: Path, tiny_target: Get) -> None:
    """Id k is the input of layer k; the last hidden state is taken after the final norm."""
    target, ids = tiny_target("none"), tokens(2, 11)
    model = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True)
    states = target.states(ids, capture=(0, 2, 7, 4))
    assert states.captured.shape == (2, 11, 4, HIDDEN)
    for place, k in enumerate((0, 2, 7, 4)):
        torch.testing.assert_close(states.captured[:, :, place], expected.hidden_states[k])
    torch.testing.assert_close(states.last_hidden, expected.hidden_states[-1])
    torch.testing.assert_close(target.logits(states.last_hidden), expected.logits)


def test_capturing_leaves_no_trace(tiny_target: Get) -> None:
    target = tiny_target("none")
    target.states(tokens(2, 5), capture=(1, 2))
    states = target.states(tokens(2, 5))
    assert states.captured.shape[:3] == (2, 5, 0)
    assert not any(m._forward_pre_hooks for m in target.model.modules())


@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4"])
def test_low_bit_states_are_the_models_own_and_differ_from_high_precision(tiny_target: Get, preset: str) -> None:
    target, ids = tiny_target(preset), tokens(2, 11)
    states = target.states(ids, capture=(3,))
    with torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(target.logits(states.last_hidden), logits)
    exact = tiny_target("none").states(ids, capture=(3,))
    for ours, theirs in [(states.captured, exact.captured), (states.last_hidden, exact.last_hidden)]:
        distance = (ours - theirs).norm() / theirs.norm()
        assert 1e-3 < distance < 1.5


@pytest.mark.parametrize(("preset", "tolerance"), [("none", 1e-5), ("mxfp4", 1e-2)])
def test_padding_on_the_right_does_not_reach_the_tokens_before_it(
    tiny_target: Get, preset: str, tolerance: float
) -> None:
    """Activations are quantized per token; sums in another order may flip a few codes, hence the tolerance."""
    target, ids = tiny_target(preset), tokens(1, 20)
    alone, padded = target.states(ids[:, :9]).last_hidden, target.states(ids).last_hidden[:, :9]
    assert (padded - alone).norm() / alone.norm() < tolerance


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_top_tokens_are_the_greedy_ones_whatever_the_chunk(tiny_target: Get, rows: int) -> None:
    target = tiny_target("none")
    hidden = target.states(tokens(2, 20)).last_hidden.flatten(0, 1)
    assert torch.equal(target.top_tokens(hidden, rows=rows), target.logits(hidden).argmax(-1))


def test_the_target_describes_itself(tiny_target: Get, tiny_folder: Path) -> None:
    target = tiny_target("mxfp4")
    assert (target.hidden_size, target.vocab_size, target.layers) == (HIDDEN, VOCAB, 8)
    assert (target.context_length, target.dtype, target.device.type) == (512, torch.float32, "cpu")
    assert target.name == str(tiny_folder)
    assert target.embedding.weight.shape == target.output_head.weight.shape == (VOCAB, HIDDEN)
    assert not target.model.training


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("fp8-block", "w4a16")])  # groups of 128
def test_training_a_head_on_top_leaves_the_target_as_it_was(two_layers: Path, preset: str) -> None:
    text = [tokens(2, 40, seed=9)] if load_recipe(preset).looks_at_inputs else None
    target = load(two_layers, preset, calibration=text)
    before = checksum(target.model)
    head = nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for seed in range(2):
        states = target.states(tokens(2, 9, seed=seed), capture=(1,))
        logits = target.logits(head(states.last_hidden + states.captured[:, :, 0]))
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens(18, seed=seed)).backward()
        assert head.weight.grad is not None
        assert head.weight.grad.abs().sum() > 0
        optimizer.step()
    assert checksum(target.model) == before
    assert not any(p.requires_grad for p in target.model.parameters())
    assert all(p.grad is None for p in target.model.parameters())


@pytest.mark.parametrize("preset", ["none", "mxfp4", "nvfp4"])
def test_a_gradient_that_runs_through_the_target_leaves_it_as_it_was(two_layers: Path, preset: str) -> None:
    target = load(two_layers, preset)
    before = checksum(target.model)
    embedded = target.embedding(tokens(2, 9)).requires_grad_()
    target.model(inputs_embeds=embedded, use_cache=False).logits.square().sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.isfinite().all()
    assert embedded.grad.abs().sum() > 0
    assert checksum(target.model) == before
    assert all(p.grad is None for p in target.model.parameters())


def test_the_fingerprint_is_that_of_the_weights_and_not_of_the_recipe(two_layers: Path, folder: Path) -> None:
    same = load(two_layers).fingerprint
    assert load(folder).fingerprint == same
    assert {load(folder, preset).fingerprint for preset in ("fp8", "mxfp4", "nvfp4")} == {same}


@pytest.mark.parametrize("name", [WEIGHT, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_the_fingerprint_changes_with_any_weight_tensor(two_layers: Path, folder: Path, name: str) -> None:
    edit_weights(folder, lambda weights: weights[name].mul_(1.01))
    assert load(folder).fingerprint != load(two_layers).fingerprint


def test_the_fingerprint_tells_swapped_tensors_apart(two_layers: Path, folder: Path) -> None:
    def swap(weights: dict[str, Tensor]) -> None:
        first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
        weights[first], weights[second] = weights[second], weights[first]

    edit_weights(folder, swap)
    assert load(folder).fingerprint != load(two_layers).fingerprint


def test_calibration_text_becomes_one_row_of_tokens_per_paragraph() -> None:
    rows = calibration_ids(tiny_tokenizer())
    assert len(rows) >= 5
    assert all(ids.ndim == 2 and ids.shape[0] == 1 and ids.shape[1] > 50 for ids in rows)
    assert all(ids.max() < VOCAB for ids in rows)


def test_own_calibration_text_sets_the_static_scales(two_layers: Path) -> None:
    recipe = load_recipe("nvfp4")
    scales = []
    for ids in (tokens(1, 8), tokens(1, 8, seed=1)):
        target = load_target(str(two_layers), recipe, dtype=torch.float32, compile_quantizer="off", calibration=[ids])
        scales.append(target.decoder.layers[1].mlp.down_proj.input_global_scale.item())
    assert scales[0] != scales[1]


def assert_refused(folder: Path | str, complaint: str, preset: str = "none") -> None:
    with pytest.raises(ValueError, match=r"target|module") as error:
        load(Path(folder), preset)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "is neither a model folder nor a model id")
    assert_refused(tmp_path / "absent", str(tmp_path / "absent"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, "has no config.json")


@pytest.mark.parametrize("content", ["{oops", "[]", '{"model_type": "unheard_of"}'])
def test_a_config_that_says_nothing_useful_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert_refused(folder, str(folder))


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused(folder: Path, kept: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    assert_refused(folder, "damaged or incomplete checkpoint?")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "damaged or incomplete checkpoint?")


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "could not be loaded")


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop(WEIGHT))
    assert_refused(folder, f"is incomplete: 1 weights are missing, e.g. {WEIGHT}")


def test_a_weight_of_another_shape_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({WEIGHT: weights[WEIGHT][:-1].clone()}))
    assert_refused(folder, str(folder))


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "modelopt"])
def test_a_checkpoint_that_is_already_quantized_is_refused(folder: Path, method: str) -> None:
    edit_config(folder, quantization_config={"quant_method": method})
    assert_refused(folder, f"is already quantized ({method})")


@pytest.mark.parametrize("preset", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_refused_by_its_module(folder: Path, preset: str, bad: float) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights[WEIGHT][3, 3] = bad

    edit_weights(folder, spoil)
    assert_refused(folder, "module model.layers.1.mlp.up_proj: the weight holds NaN or infinity", preset)


def test_a_width_that_does_not_divide_is_refused_by_its_module(tmp_path: Path) -> None:
    narrow = save_tiny_target(
        tmp_path / "narrow", num_hidden_layers=1, hidden_size=48, num_attention_heads=3, num_key_value_heads=1
    )
    assert_refused(narrow, "module model.layers.0.self_attn.q_proj: 48 columns do not divide", "mxfp4")


def test_an_architecture_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    """Granite divides its logits by a constant: heads would be trained on others than the engine's."""
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=8.0,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(ValueError, match="changes its logits after the output head"):
        load(tmp_path / "granite")


def test_decoding_a_target_with_layers_that_no_store_fits_is_refused(two_layers: Path) -> None:
    target = load(two_layers)
    target.config.layer_types = ["chunked_attention", "full_attention"]
    target.config.attention_chunk_size = 8
    with pytest.raises(ValueError, match=r"kind chunked_attention .*DynamicSlidingWindowLayer.*StateStore"):
        target.new_cache(4)


def test_compiling_without_a_compiler_is_refused(two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
        load_target(str(two_layers), load_recipe("none"), compile_quantizer="on")


def test_a_tokenizer_that_is_missing_or_cannot_hold_a_conversation_is_refused(folder: Path) -> None:
    assert load_tokenizer(str(folder)).chat_template
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(str(folder))


def test_the_calibration_text_is_part_of_the_recipe_that_it_shaped(two_layers: Path) -> None:
    """Answers are kept under the fingerprint: those of a target calibrated on another text are not its own."""
    one, other = [tokens(2, 40, seed=1)], [tokens(2, 40, seed=2)]
    prints = [load(two_layers, "nvfp4a16-gptq", text).recipe.fingerprint for text in (one, other, one)]
    assert prints[0] == prints[2] != prints[1]
    static = [load(two_layers, "nvfp4", text).recipe.fingerprint for text in (None, one)]
    assert static[0] == load_recipe("nvfp4").fingerprint != static[1]
    assert load(two_layers, "mxfp4", one).recipe == load_recipe("mxfp4"), "nothing of it comes from text"


@pytest.mark.parametrize("preset", ["mxfp4a4-hadamard", "mxfp4a4-wush"])
def test_a_transformed_target_forgets_its_inputs_between_passes(two_layers: Path, preset: str) -> None:
    target = load(two_layers, preset, [tokens(2, 40)])
    ids = tokens(1, 12)
    first = target.states(ids).last_hidden
    assert target.applied.transforms._last is None
    assert torch.equal(target.states(ids).last_hidden, first)


@pytest.mark.parametrize("output", ["fp8-channel", "fp8-block128", "nvfp4"])
def test_a_low_bit_output_head_is_one_for_logits_teachers_and_heads_alike(two_layers: Path, output: str) -> None:
    """Its stored values are unscaled: whoever read them as weights would get other logits."""
    rules = (Rule("lm_head", output, "fp8-token"), *load_recipe("mxfp4").rules)
    target = load_target(str(two_layers), Recipe("r", rules), dtype=torch.float32, compile_quantizer="off")
    hidden = target.states(tokens(1, 7)).last_hidden
    logits = target.logits(hidden)
    assert torch.equal(target.model(input_ids=tokens(1, 7)).logits, logits)
    ids = torch.tensor([5, 3, 300])
    assert torch.equal(target.logits_of(ids)(hidden), logits[..., ids])
    plain = load(two_layers, "mxfp4").output_weight
    error = (target.output_weight - plain).norm() / plain.norm()
    assert 1e-3 < error < 0.2, "the weight it stands for"


def test_logits_of_some_tokens_are_those_among_all(two_layers: Path) -> None:
    target = load(two_layers)
    hidden = target.states(tokens(2, 7)).last_hidden
    ids = torch.tensor([0, 7, 319])
    torch.testing.assert_close(target.logits_of(ids)(hidden), target.logits(hidden)[..., ids])
    assert torch.equal(target.logits_of(torch.arange(VOCAB))(hidden), target.logits(hidden))
    assert target.output_weight is target.output_head.weight


def test_an_output_head_behind_a_transform_serves_heads_too(two_layers: Path) -> None:
    rules = (Rule("lm_head", weights="mxfp4-even", activations="mxfp4-rceil", transform="hadamard"),)
    target = load_target(str(two_layers), Recipe("head", rules), dtype=torch.float32, compile_quantizer="off")
    original = load(two_layers).output_weight
    relative = (target.output_weight - original).norm() / original.norm()
    assert 0.01 < relative < 0.2, "the rounded weight, turned back"
    x, some = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 1, 40])
    assert torch.equal(target.logits_of(some)(x), target.logits(x)[:, some])


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_a_device_that_is_not_here_is_named(two_layers: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=rf"device '{device}' is not here") as error:
        load_target(str(two_layers), load_recipe("none"), device=device)
    assert "\n" not in str(error.value)


def test_calibration_text_ends_where_the_context_does(two_layers: Path, tmp_path: Path) -> None:
    """Positions beyond it were never trained: their inputs are no target's."""
    short = save_tiny_target(tmp_path / "short", num_hidden_layers=2, max_position_embeddings=24)
    text = tokens(2, 40, seed=4)
    cut, whole = (load(short, "nvfp4a16-gptq", [ids]) for ids in (text[:, :24], text))
    long = load(two_layers, "nvfp4a16-gptq", [text])
    name = "model.layers.1.mlp.down_proj.weight"
    same, other = (t.model.get_parameter(name) for t in (whole, long))
    assert torch.equal(cut.model.get_parameter(name), same)
    assert not torch.equal(same, other)
    assert len(load(short, "nvfp4").applied.quantized) == 14, "the shipped page is longer"
