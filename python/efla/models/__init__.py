"""EFLA language models for transformers; importing this registers them with its Auto classes.

Needs the extra "transformers" (``pip install efla[transformers]``).
"""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "efla.models needs transformers 5 or newer: pip install 'transformers>=5' "
        f"(or efla[transformers]); {error}"
    ) from error

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"efla.models needs transformers 5 or newer, but {_transformers.__version__} is installed: "
        "pip install 'transformers>=5'"
    )

from .configuration import EflaConfig, GatedEflaConfig
from .modeling import (
    EflaForCausalLM,
    EflaModel,
    GatedEflaForCausalLM,
    GatedEflaModel,
)

_transformers.AutoConfig.register("efla", EflaConfig, exist_ok=True)
_transformers.AutoConfig.register("gated_efla", GatedEflaConfig, exist_ok=True)
_transformers.AutoModel.register(EflaConfig, EflaModel, exist_ok=True)
_transformers.AutoModel.register(GatedEflaConfig, GatedEflaModel, exist_ok=True)
_transformers.AutoModelForCausalLM.register(EflaConfig, EflaForCausalLM, exist_ok=True)
_transformers.AutoModelForCausalLM.register(GatedEflaConfig, GatedEflaForCausalLM, exist_ok=True)

__all__ = [
    "EflaConfig",
    "EflaForCausalLM",
    "EflaModel",
    "GatedEflaConfig",
    "GatedEflaForCausalLM",
    "GatedEflaModel",
]
