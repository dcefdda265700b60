"""EFLA, exact-flow linear attention: operators, layers and models for PyTorch.

Shapes: q, k ``[B, T, H, K]``; v, o ``[B, T, HV, V]``; beta, log_decay ``[B, T, HV]``; states
``[N, HV, K, V]`` float32 (float64 for float64 inputs). K and V are at most 512. HV is a multiple of
H, and value head i reads key head ``i // (HV // H)``. q, k, v are float32, float64, bfloat16 or
float16 (on the CPU float16 runs through float32 copies: no faster than float32). Any strides are
accepted. Values are not looked at: the exact rules need beta >= 0, and log_decay must be <= 0; what
comes out otherwise may overflow. Gradients are first derivatives in reverse mode only. Bad arguments
raise RuntimeError naming the argument and its shape. The same operators are registered as
``torch.ops.efla.NAME``, where an output that was not asked for is a tensor of shape ``[0]`` instead
of None.

Rules: "linear" (Mamba-2, linear attention), "euler" (DeltaNet, with log_decay Gated DeltaNet), "rk2",
"rk4" (no log_decay), "exact" (EFLA, with log_decay its gated form), "exact_log" (gated EFLA with the
decay read as a logarithm).

Functions stand here, layers in :mod:`efla.nn`, models for transformers in :mod:`efla.models` (which
imports transformers; the names below load it on first use).
"""

from typing import TYPE_CHECKING, Any

from ._library import load_library

library_path = load_library()

from . import nn  # noqa: E402  what follows needs the operators
from .fla_api import (  # noqa: E402
    chunk_delta_rule,
    chunk_gated_delta_rule,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from .operators import (  # noqa: E402
    RULES,
    Rule,
    check_errors,
    chunk,
    recurrent,
    rms_norm,
    set_debug,
    short_conv,
    step_,
    swiglu,
)
from .patching import patch_fla, unpatch_fla  # noqa: E402

if TYPE_CHECKING:
    from .models import EflaConfig as EflaConfig
    from .models import EflaForCausalLM as EflaForCausalLM
    from .models import GatedEflaConfig as GatedEflaConfig

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Rule",
    "check_errors",
    "chunk",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "library_path",
    "nn",
    "patch_fla",
    "recurrent",
    "rms_norm",
    "set_debug",
    "short_conv",
    "step_",
    "swiglu",
    "unpatch_fla",
]

_OF_TRANSFORMERS = ("EflaConfig", "EflaForCausalLM", "GatedEflaConfig")


def __getattr__(name: str) -> Any:
    if name in _OF_TRANSFORMERS:
        from . import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
