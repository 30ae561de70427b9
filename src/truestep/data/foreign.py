"""Token files of others, presented as a TokenStore without copying: Megatron-LM's .bin/.idx pair and numpy's .npy.

Such files carry no checksums. Their fingerprint covers the sizes, the headers and pages sampled evenly over the file,
so it tells one corpus from another but proves no byte; `data build` makes a store that does.
"""

from pathlib import Path

import numpy as np

from truestep.data.blocks import digest, map_file
from truestep.data.store import TokenStore
from truestep.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_START = 34  # magic 9, version 8, type code 1, number of sequences 8, number of document bounds 8
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SAMPLES, _PAGE = 64, 4096


def open_megatron(prefix: str | Path, *, vocab_size: int | None = None, eod_id: int | None = None) -> TokenStore:
    """`prefix`.bin and `prefix`.idx of Megatron-LM's indexed dataset (any integer width). With `vocab_size` every id
    that is read is checked against it."""
    base = Path(prefix)
    index_path, ids_path = base.with_name(base.name + ".idx"), base.with_name(base.name + ".bin")
    index, data = map_file(index_path), map_file(ids_path)
    if index[:9].tobytes() != _MAGIC or len(index) < _START or int(index[9:17].view("<u8")[0]) != 1:
        raise DataError(f"{index_path}: is not an index of a Megatron dataset of version 1; check the path")
    num_sequences, num_bounds = (int(n) for n in index[18:_START].view("<u8"))
    pointers_at = _START + 4 * num_sequences
    bounds_at = pointers_at + 8 * num_sequences
    if len(index) < bounds_at + 8 * num_bounds or num_sequences == 0 or num_bounds < 2:
        raise DataError(
            f"{index_path}: has {len(index)} bytes for {num_sequences} sequences and {num_bounds} document bounds, so "
            "it is truncated or empty; copy it again"
        )
    if int(index[17]) not in _TYPES:
        raise DataError(f"{index_path}: type code {index[17]} is no integer type; tokens must be integers")
    ids_type = np.dtype(_TYPES[int(index[17])])
    lengths = index[_START:pointers_at].view("<i4")
    pointers = index[pointers_at:bounds_at].view("<i8")
    bounds = index[bounds_at : bounds_at + 8 * num_bounds].view("<i8")
    expected = int(pointers[-1]) + int(lengths[-1]) * ids_type.itemsize
    if expected != len(data) or int(bounds[0]) != 0 or int(bounds[-1]) != num_sequences or int(pointers[0]) != 0:
        raise DataError(f"{ids_path}: has {len(data)} bytes where its index says {expected}; copy both files again")
    num_tokens = len(data) // ids_type.itemsize

    def offsets_at(documents: np.ndarray) -> np.ndarray:
        sequences = bounds[documents]
        ends = sequences >= num_sequences
        return np.where(ends, num_tokens, pointers[np.where(ends, 0, sequences)] // ids_type.itemsize)

    fingerprint = _sampled(index, data)
    header = {"vocab_size": vocab_size, "eod_id": eod_id}
    return TokenStore(base, data.view(ids_type), offsets_at, num_bounds - 1, fingerprint, header)


def open_npy(path: str | Path, *, vocab_size: int | None = None, eod_id: int | None = None) -> TokenStore:
    """A .npy file of integers: one dimension is one long document, two are one document a row."""
    file = Path(path)
    raw = map_file(file)
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{file}: is no readable .npy array ({error}); check the path or write it again") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.flags.c_contiguous or not array.size:
        raise DataError(
            f"{file}: holds {array.dtype} of shape {array.shape}; give integers of one or two dimensions in C order"
        )
    tokens = array.shape[-1]

    def offsets_at(documents: np.ndarray) -> np.ndarray:
        return documents.astype(np.int64) * tokens

    ids, header = array.reshape(-1).view(np.ndarray), {"vocab_size": vocab_size, "eod_id": eod_id}
    return TokenStore(file, ids, offsets_at, array.size // tokens, _sampled(raw), header)


def _sampled(*files: np.ndarray) -> str:
    parts: list[bytes] = []
    for data in files:
        parts.append(len(data).to_bytes(8, "little"))
        last = max(0, len(data) - _PAGE)
        parts += [data[at : at + _PAGE].tobytes() for at in sorted({last * i // _SAMPLES for i in range(_SAMPLES + 1)})]
    return digest(b"".join(parts))
