"""Run a model once over all nodes of a tree while its recurrent modules take one step per level.

Everything in a model but attention and recurrence treats each token alone, and attention takes a mask. Only the modules
that read a recurrent or convolution state must run in an order: parents before children. They are found by watching
which modules ask the cache for states, and wrapped for the pass: the wrapper calls the module once per depth, with the
level's nodes as the rows of a batch of single tokens, and puts the outputs back in the order of the nodes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.recurrent.node_states import NodeStates
from bitdraft.quant.recurrent.state_store import Level, Nodes

# B sequence, N node, R node of one level.


class WatchedCache(SlotCache):
    """A cache that tells which layer is asked for its states."""

    asked: Callable[[int], None] | None = None

    def states_of(self, layer: int) -> NodeStates:
        if self.asked is not None:
            self.asked(layer)
        return super().states_of(layer)


@torch.no_grad()
def modules_with_states(model: nn.Module, cache: WatchedCache, run: Callable[[], object]) -> dict[nn.Module, int]:
    """The innermost modules that ask ``cache`` for states while ``run`` runs, with the number of their layer."""
    running: list[nn.Module] = []
    found: dict[nn.Module, int] = {}
    handles = []

    def leave(module: nn.Module, args: object, out: object) -> None:
        running.pop()

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, args: running.append(module)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    cache.asked = lambda layer: found.__setitem__(running[-1], layer)
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def by_level(modules: Mapping[nn.Module, int], cache: SlotCache) -> Iterator[None]:
    """While this is open, ``modules`` run level by level over the nodes of the pass that ``cache`` has begun."""
    assert cache.nodes is not None
    replaced = {module: vars(module).get("forward") for module in modules}
    for module, layer in modules.items():
        module.forward = _in_levels(module.forward, cache.states_of(layer), cache.nodes)
    try:
        yield
    finally:
        for module, before in replaced.items():
            if before is None:
                del module.forward
            else:
                module.forward = before


def _in_levels(forward: Callable[..., Any], store: NodeStates, nodes: Nodes) -> Callable[..., Any]:
    """``forward`` over tokens ``[B, N, …]`` in any arguments, level by level."""
    shape = nodes.parents.shape

    def run(*args: Any, **options: Any) -> Any:
        out: Any = None
        for level in nodes.levels:
            with store.step(level):
                part = forward(*_of_level(args, level, shape), **_of_level(options, level, shape))
            out = _put_back(out, part, level, shape)
        return out

    return run


def _of_level(value: Any, level: Level, shape: torch.Size) -> Any:
    """``value`` with every tensor ``[B, N, …]`` in it cut down to the level's nodes, ``[R, 1, …]``."""
    if isinstance(value, Tensor) and value.shape[:2] == shape:
        return value[level.rows, level.nodes][:, None]
    if isinstance(value, tuple | list):
        return type(value)(_of_level(part, level, shape) for part in value)
    if isinstance(value, dict):
        return {name: _of_level(part, level, shape) for name, part in value.items()}
    return value


def _put_back(out: Any, part: Any, level: Level, shape: torch.Size) -> Any:
    """``out`` with the level's outputs ``[R, 1, …]`` at their nodes ``[B, N, …]``; a new one where it is ``None``."""
    if isinstance(part, tuple):
        outs = (None,) * len(part) if out is None else out
        return tuple(_put_back(o, p, level, shape) for o, p in zip(outs, part, strict=True))
    if isinstance(part, Tensor):
        out = part.new_empty(*shape, *part.shape[2:]) if out is None else out
        out[level.rows, level.nodes] = part[:, 0]
    return out
