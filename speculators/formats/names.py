"""Tensors of a file under the names that a head gives them."""

from collections.abc import Callable, Mapping

from torch import Tensor


def renamed(weights: Mapping[str, Tensor], own_name: Callable[[str], str]) -> dict[str, Tensor]:
    """``weights`` under their own names; ``ValueError`` where two of them are spellings of one."""
    spelled: dict[str, str] = {}  # own name → the file's
    for name in weights:
        own = own_name(name)
        if own in spelled:
            raise ValueError(
                f"{spelled[own]} and {name} are two spellings of one tensor: leave one of them in the file"
            )
        spelled[own] = name
    return {own: weights[name] for own, name in spelled.items()}
