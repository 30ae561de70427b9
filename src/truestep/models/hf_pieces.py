"""What a rank holds of a model, under the names that Hugging Face gives its tensors."""

from collections.abc import Mapping

import torch

from truestep.models.hf_names import hf_parts
from truestep.numerics.pieces import Piece, pieces_of
from truestep.recipe.model import ModelSection


def hf_pieces(tensors: Mapping[str, torch.Tensor | Piece], section: ModelSection) -> dict[str, Piece]:
    """Our parameters and buffers by their Hugging Face names. One that Hugging Face keeps in several tensors (one for
    each expert) is views of them, of which a rank has only those that its piece reaches into."""
    found: dict[str, Piece] = {}
    for name, piece in pieces_of(tensors).items():
        for theirs, index in hf_parts(name, section):
            part = piece if index is None else _one_of(piece, index)
            if part is not None:
                found[theirs] = part
    return found


def _one_of(piece: Piece, index: int) -> Piece | None:
    """The piece's part of whole[index]."""
    row = index - piece.start[0]
    if not 0 <= row < len(piece.local):
        return None
    return Piece(piece.local[row], piece.shape[1:], piece.start[1:], piece.owned)
