"""What a directory with a reward model needs beside its weights: a padding token that `transformers` can tell from the
end of an answer."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from truestep.data.sample_store import SampleStore, Store
from truestep.files import publish, writing

CONFIG = "tokenizer_config.json"
_LOOKED_AT = 4096


def padding_id(tokenizer_dir: Path, eod_id: int, stores: Iterable[Store]) -> int:
    """An id that no answer ends with. `transformers` reads a score before all trailing tokens of the padding id, so one
    that pads and ends an answer as well would be passed over. Special tokens are taken first, the tokenizer's own
    padding token before others."""
    ends = {eod_id}.union(*(_last_ids(store) for store in stores if isinstance(store, SampleStore)))
    config, tokenizer = tokenizer_dir / CONFIG, Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    named = json.loads(config.read_text()).get("pad_token") if config.exists() else None
    own = tokenizer.token_to_id(named["content"] if isinstance(named, dict) else named) if named else None
    special = sorted(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    others = range(tokenizer.get_vocab_size(with_added_tokens=True))
    return next(i for i in [*([] if own is None else [own]), *special, *others] if i not in ends)


def name_padding(directory: Path, pad_id: int) -> None:
    """Let the tokenizer of a model directory pad with the same token as its configuration says."""
    token = Tokenizer.from_file(str(directory / "tokenizer.json")).id_to_token(pad_id)
    file = directory / CONFIG
    body = json.loads(file.read_text()) if file.exists() else {}
    with writing(file):
        publish(file, json.dumps(body | {"pad_token": token, "padding_side": "right"}, indent=2).encode())


def _last_ids(store: SampleStore) -> set[int]:
    """Of some samples, evenly spaced."""
    count = min(store.num_samples, _LOOKED_AT)
    numbers = np.arange(count) * store.num_samples // max(count, 1)
    lasts = store.samples.offsets_at(numbers + 1) - 1
    return set(store.samples.read(lasts, np.ones_like(lasts)).tolist())
