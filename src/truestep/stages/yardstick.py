"""What general compressors make of the held-out text: something that bits per byte can be held against."""

import gzip
import lzma

import numpy as np

from truestep.data.store import TokenStore
from truestep.data.tokenizer import Tokenizer


def yardstick(store: TokenStore, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9e` on all documents of a store, one after the other."""
    text = store_text(store, tokenizer)
    sizes = {"gzip -9": len(gzip.compress(text, 9)), "xz -9e": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))}
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def store_text(store: TokenStore, tokenizer: Tokenizer) -> bytes:
    """The text of a store, decoded document by document without the ends of documents."""
    ids = (store.document(index) for index in range(store.num_documents))
    return b"".join(tokenizer.decode(np.asarray(i)[np.asarray(i) != tokenizer.eod_id]).encode() for i in ids)
