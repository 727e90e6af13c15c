"""A target as a script's options describe it."""

from typing import Any, Literal, Protocol

from bitdraft.data.calibration import CalibrationConfig, calibration_text
from bitdraft.data.demo_target import resolve_target
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.target import CompileChoice, LowBitTarget, load_target, load_tokenizer
from bitdraft.train.environment import chosen_dtype, read_environment


class TargetOptions(Protocol):
    """What a script's options say about how a target is served."""

    @property
    def target_profile(self) -> str: ...
    @property
    def dtype(self) -> Literal["auto", "bfloat16", "float32"]: ...
    @property
    def device(self) -> str: ...
    @property
    def compile_quantizer(self) -> CompileChoice: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def calibration(self) -> CalibrationConfig: ...


def open_target(options: TargetOptions, name: str, quant: str) -> tuple[LowBitTarget, Any]:
    """The target ``name`` served in ``quant``, and its tokenizer. In 16 bit every profile computes alike.

    Raises ``ValueError`` for a target or recipe that cannot be had.
    """
    recipe = load_recipe_for(quant, options.target_profile if quant != "none" else "plain")
    folder = resolve_target(name, read_environment().cache_dir)
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    target = load_target(
        folder,
        recipe,
        dtype=chosen_dtype(options.dtype, options.device),
        device=options.device,
        compile_quantizer=options.compile_quantizer,
        calibration=calibration_text(options.calibration, recipe, tokenizer),
        trust_remote_code=options.trust_remote_code,
    )
    return target, tokenizer
