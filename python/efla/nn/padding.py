"""Rows of different lengths in one batch: their valid tokens as packed sequences, and back."""

import torch
from torch import Tensor


class PaddedRows:
    """Where the valid tokens of a padded batch are.

    Every layer handles packed sequences, so none has to know about padding; the result for a row is
    that of its valid tokens alone, wherever they stand.
    """

    def __init__(self, mask: Tensor, batch: int, length: int) -> None:
        """mask ``[B, >= T]``, non-zero at the tokens that count; its last T columns are used.

        Looks at the values, so a GPU is waited for.
        """
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
            raise ValueError(
                f"attention_mask must have shape [B, T] = [{batch}, {length}] (or more columns, for "
                f"tokens in the cache), but has shape {list(mask.shape)}"
            )
        if mask.is_floating_point() or mask.is_complex():
            raise TypeError(f"attention_mask must be bool or integer, not {mask.dtype}")
        self.batch, self.length = batch, length
        valid = mask[:, mask.shape[1] - length :] != 0
        self.positions = valid.flatten().nonzero().squeeze(-1)
        ends = valid.sum(1).cumsum(0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends])

    @property
    def all_valid(self) -> bool:
        return self.positions.numel() == self.batch * self.length

    def pack(self, padded: Tensor) -> Tensor:
        """``[B, T, ...]`` -> ``[1, N, ...]``: the N valid tokens, row after row."""
        return padded.flatten(0, 1).index_select(0, self.positions).unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """``[1, N, ...]`` -> ``[B, T, ...]`` with zeros at the padding."""
        flat = packed.new_zeros(self.batch * self.length, *packed.shape[2:])
        flat = flat.index_copy(0, self.positions, packed.squeeze(0))
        return flat.view(self.batch, self.length, *packed.shape[2:])


def pack_rows(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None, PaddedRows | None]:
    """x ``[B, T, ...]`` with its padding taken out as mask says: the packed tokens, their cu_seqlens
    and the rows that unpack again. All as it was, and no rows, where nothing is padding; where
    cu_seqlens are given the mask is not looked at."""
    if mask is None or cu_seqlens is not None:
        return x, cu_seqlens, None
    rows = PaddedRows(mask, x.shape[0], x.shape[1])
    if rows.all_valid:
        return x, None, None
    return rows.pack(x), rows.cu_seqlens, rows
