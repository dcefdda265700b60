"""What sequences carry from one call to the next."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class LayerState:
    """The state of one layer for B sequences; all None before the first call."""

    recurrent_state: Tensor | None = None  # [B, HV, K, V] float32 (float64 for float64 models)
    conv_q: Tensor | None = None  # [B, D, W]: the last W inputs of each convolution
    conv_k: Tensor | None = None
    conv_v: Tensor | None = None
    keys: Tensor | None = None  # softmax layers: [B, slots, Hkv, D], rotated
    values: Tensor | None = None
    positions: Tensor | None = None  # softmax layers: [B, slots] int64, -1 where nothing stands
    lengths: Tensor | None = None  # softmax layers: [B] int64, tokens seen by each sequence
    tokens: int = 0  # positions that it has seen, padding included

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: t for name, t in found.items() if isinstance(t, Tensor)}


class Cache:
    """The decoding state of a model or of single layers: constant size, whatever the length.

    Made empty and filled by the first call. Where no gradient is recorded, recurrent and
    convolution states are updated in place, at fixed addresses, as CUDA graphs need. The methods are
    those that ``transformers`` calls while generating.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[LayerState] = []

    def layer(self, index: int) -> LayerState:
        """The state of layer `index`, made if need be."""
        while len(self.layers) <= index:
            self.layers.append(LayerState())
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that a layer has seen, those of padding included."""
        return self.layers[layer_idx].tokens if layer_idx < len(self.layers) else 0

    def select(self, rows: Tensor) -> None:
        """Replaces the sequences by the given ones, in that order; one may come twice."""
        for state in self.layers:
            for name, tensor in state.tensors().items():
                setattr(state, name, tensor.index_select(0, rows.to(tensor.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: :meth:`select`."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """:meth:`select` under transformers' name."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        for state in self.layers:
            for name, tensor in state.tensors().items():
                setattr(state, name, tensor.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forgets everything."""
        self.layers.clear()


def replaced(old: Tensor | None, new: Tensor) -> Tensor:
    """`new` as the next state: in the memory of `old` where no gradient is recorded."""
    new = new.detach()
    if old is None or torch.is_grad_enabled() or old.shape != new.shape or old.dtype != new.dtype:
        return new
    return old.copy_(new)
