"""Keys and values of what was read already, for generation."""

import torch


class KVCache:
    """Room for S places of `num_layers` layers. A forward pass writes its T places behind the `length` filled ones,
    layer by layer; `advance` then counts them and remembers whose they are (documents, -1 for padding)."""

    def __init__(self, num_layers: int, rows: int, places: int):
        self.length = 0
        self.documents_BS: torch.Tensor | None = None
        self._rows, self._places = rows, places
        self._kv: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers

    def append(self, layer: int, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store T places of one layer; returns all keys and values up to them. Sizes of keys and values may differ."""
        end = self.length + k_BGTK.shape[2]
        pair = self._kv[layer]
        if pair is None:
            k_room, v_room = ((self._rows, y.shape[1], self._places, y.shape[3]) for y in (k_BGTK, v_BGTK))
            pair = self._kv[layer] = (k_BGTK.new_empty(k_room), v_BGTK.new_empty(v_room))
        for kept, new in zip(pair, (k_BGTK, v_BGTK)):
            kept[:, :, self.length : end] = new
        return pair[0][:, :, :end], pair[1][:, :, :end]

    def documents_with(self, documents_BT: torch.Tensor) -> torch.Tensor:
        """The documents of the filled places and then of T new ones."""
        return documents_BT if self.documents_BS is None else torch.cat((self.documents_BS, documents_BT), dim=1)

    def advance(self, tokens_BT: torch.Tensor, documents_BT: torch.Tensor | None) -> None:
        """Count T more places, once all layers have stored theirs."""
        self.documents_BS = self.documents_with(numbered(tokens_BT, documents_BT))
        self.length += tokens_BT.shape[1]


def numbered(tokens_BT: torch.Tensor, documents_BT: torch.Tensor | None) -> torch.Tensor:
    """The document numbers, all 0 where none are given."""
    return torch.zeros_like(tokens_BT, dtype=torch.int32) if documents_BT is None else documents_BT
