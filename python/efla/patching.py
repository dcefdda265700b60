"""Puts the kernels of this package under the models of an installed flash-linear-attention."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from . import fla_api

# Where fla defines each function; its layers import the names from there.
_HOMES = {
    "chunk_delta_rule": "fla.ops.delta_rule",
    "fused_recurrent_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",
}
_replaced: list[tuple[Any, str, Any]] = []  # (module, name, what stood there)


def patch_fla() -> list[str]:
    """Makes fla's DeltaNet and Gated DeltaNet layers run on this package's kernels.

    Replaces the four delta-rule functions in every fla module that is loaded (fla.layers is loaded
    for it), so models that exist already change too. Calling it again does nothing new;
    :func:`unpatch_fla` undoes it. Results agree to the rounding of the storage type.

    Returns:
        What was replaced, as "module.name".

    Raises:
        ImportError: flash-linear-attention is not installed.
    """
    try:
        for module in (*sorted(set(_HOMES.values())), "fla.layers"):
            importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "efla.patch_fla() needs flash-linear-attention: pip install flash-linear-attention "
            f"({error})"
        ) from error
    ours = {name: getattr(fla_api, name) for name in _HOMES}
    theirs: dict[int, str] = {}
    for name, home in _HOMES.items():
        original = getattr(sys.modules[home], name)
        if original is not ours[name]:
            theirs[id(original)] = name
    changed = []
    for module_name, loaded in sorted(sys.modules.items()):
        if not (module_name == "fla" or module_name.startswith("fla.")) or loaded is None:
            continue
        for attribute, value in list(vars(loaded).items()):
            name_of_ours = theirs.get(id(value))
            if name_of_ours is not None:
                _replaced.append((loaded, attribute, value))
                replacement: Callable[..., Any] = ours[name_of_ours]
                setattr(loaded, attribute, replacement)
                changed.append(f"{module_name}.{attribute}")
    return changed


def unpatch_fla() -> None:
    """Undoes :func:`patch_fla`."""
    while _replaced:
        module, attribute, value = _replaced.pop()
        setattr(module, attribute, value)
