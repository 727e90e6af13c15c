"""Reading and writing run configurations.

A YAML file is a saved command line: it is flattened to flags that stand before the real ones, so both meet the same
parser and the same errors, and the command line wins.
"""

import difflib
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro
import yaml

Config = TypeVar("Config")


def parse(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """The configuration that ``arguments`` describe; ``--config FILE`` may stand anywhere among them.

    Raises ``ValueError`` for a bad file; bad flags end the program with tyro's message and exit code 2.
    """
    rest = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    flags: list[str] = []
    while "--config" in rest:
        at = rest.index("--config")
        if at + 1 >= len(rest):
            raise ValueError("--config needs a YAML file")
        flags += yaml_flags(config_class, Path(rest[at + 1]))
        del rest[at : at + 2]
    return tyro.cli(
        config_class,
        args=[*flags, *rest],
        description=f"{config_class.__doc__}\n\n--config FILE reads options from a YAML file; the command line wins.",
    )


def yaml_flags(config_class: type, path: Path) -> list[str]:
    """The flags that a YAML file stands for; ``ValueError`` naming the file and the nearest key for an unknown one."""
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"config file {path} is not YAML: {str(error).splitlines()[0]}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"config file {path} must hold options by name")
    return _flags(config_class, content, path, prefix="")


def _flags(config_class: type, content: dict[str, Any], path: Path, prefix: str) -> list[str]:
    hints = get_type_hints(config_class)
    known = {f.name for f in fields(config_class)}
    flags: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"config file {path}: unknown key {prefix + str(key)!r}; did you mean {prefix + near!r}?")
        flag = f"--{prefix}{name}".replace("_", "-")
        if is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ValueError(f"config file {path}: {prefix + name!r} must hold options by name")
            flags += _flags(hints[name], value, path, prefix=f"{prefix}{name}.")
        elif isinstance(value, bool):
            flags.append(flag if value else f"--{prefix}no-{name}".replace("_", "-"))
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def to_plain(config: Any) -> Any:
    """A configuration as dicts, lists and scalars, for YAML and JSON."""
    if is_dataclass(config):
        return {f.name: to_plain(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, (list, tuple)):
        return [to_plain(v) for v in config]
    return str(config) if isinstance(config, Path) else config


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(to_plain(config), sort_keys=False)


def from_plain(config_class: type[Config], content: dict[str, Any]) -> Config:
    """The inverse of ``to_plain``; unknown keys are a ``TypeError`` (a file of another version)."""
    hints = get_type_hints(config_class)
    return config_class(**{name: _restore(hints[name], value) for name, value in content.items()})


def _restore(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        return from_plain(hint, value)  # type: ignore[arg-type]
    if isinstance(value, list):
        inner = [a for a in (hint.__args__ if hasattr(hint, "__args__") else ()) if a is not Ellipsis]
        if isinstance(hint, types.UnionType):
            return _restore(next(a for a in inner if a is not types.NoneType), value)
        return tuple(_restore(inner[0], v) if inner else v for v in value)
    wants_path = hint is Path or (isinstance(hint, types.UnionType) and Path in hint.__args__)
    return Path(value) if wants_path and value is not None else value
