"""Offers vLLM's own NVFP4 emulation on CPUs. ``nvfp4.py`` copies this file into the engine's process; it is not
imported here."""


def register() -> None:
    from vllm.model_executor.kernels import linear  # type: ignore[import-not-found]
    from vllm.model_executor.kernels.linear.nvfp4.emulation import (  # type: ignore[import-not-found]
        EmulationNvFp4LinearKernel,
    )
    from vllm.platforms import PlatformEnum  # type: ignore[import-not-found]

    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [EmulationNvFp4LinearKernel]
