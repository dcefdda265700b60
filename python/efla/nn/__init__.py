"""Layers: :class:`EFLA` and :class:`GatedEFLA` in the place of fla's DeltaNet and GatedDeltaNet, and
what they are made of. Constructor fields, parameter names and the signature of ``forward`` are fla's.
"""

from .attention import SoftmaxAttention
from .cache import Cache, LayerState
from .delta import EFLA, GatedEFLA
from .layers import RMSNorm, ShortConvolution, SwiGLU
from .padding import PaddedRows

__all__ = [
    "EFLA",
    "Cache",
    "GatedEFLA",
    "LayerState",
    "PaddedRows",
    "RMSNorm",
    "ShortConvolution",
    "SoftmaxAttention",
    "SwiGLU",
]
