"""Generation with a key/value cache: prompts of unlike lengths together, the same completions as one by one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from truestep.errors import ModelError
from truestep.models.cache import KVCache
from truestep.models.decoder import Decoder
from truestep.numerics.counter import key_of, uniform


class Codec(Protocol):
    """What generation needs of a tokenizer."""

    eod_id: int

    def encode(self, text: str) -> Any: ...
    def decode(self, ids: Any) -> str: ...


def generate(
    model: torch.nn.Module,
    tokenizer: Codec,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
) -> list[str]:
    """Completions of the prompts, without the prompts, up to the end of the document, another stop id, or
    `max_new_tokens`.

    Temperature 0 is greedy. A completion depends on (seed, its place in `prompts`, its own tokens) only. A prompt
    without tokens starts from the end-of-document token, which stands before every document."""
    ids = [[int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eod_id] for prompt in prompts]
    new = generate_ids(model, ids, max_new_tokens, {tokenizer.eod_id, *stop_ids}, temperature, top_p, seed)
    return [tokenizer.decode(row) for row in new]


def generate_ids(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """New ids for each prompt (at least one id each), the stop id not among them.

    Prompts are padded on the left; pads belong to no document and real tokens count from position 0. The module's
    training flags are left as they were. A module of the user's own has no cache and is run anew for every token."""
    out: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_new_tokens < 1:
        return out
    stop_ids, open_rows = frozenset(stop_ids), set(range(len(prompts)))
    for chosen in _choices(model, prompts, max_new_tokens, temperature, top_p, seed):
        for row, token in enumerate(chosen):
            if row in open_rows and token in stop_ids:
                open_rows.discard(row)
            elif row in open_rows:
                out[row].append(token)
        if not open_rows:
            break
    return out


def stream_ids(
    model: torch.nn.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """The ids that `generate_ids` gives for one prompt, each as soon as it is chosen."""
    stop_ids = frozenset(stop_ids)
    for (token,) in _choices(model, [prompt], max_new_tokens, temperature, top_p, seed):
        if token in stop_ids:
            return
        yield token


def _check_length(model: Decoder, longest: int, max_new_tokens: int) -> None:
    room = model.section.max_context
    if longest + max_new_tokens > room:
        raise ModelError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of {room}; "
            f"shorten the prompt or ask for at most {max(room - longest, 0)} new tokens."
        )


@torch.no_grad()
def _choices(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Iterator[list[int]]:
    """The next id of every row, `max_new_tokens` times: rows that came to their end go on."""
    if isinstance(model, Decoder):
        _check_length(model, max(map(len, prompts)), max_new_tokens)
    device = next(model.parameters()).device
    rows, longest = len(prompts), max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    pads_B1 = torch.tensor([[longest - len(p)] for p in prompts], device=device)
    positions_BT = torch.arange(longest, device=device) - pads_B1
    cache = KVCache(len(model.blocks), rows, longest + max_new_tokens - 1) if isinstance(model, Decoder) else None
    keys = [key_of(seed, f"sample:{row}") for row in range(rows)]
    with _evaluating(model):
        for step in range(max_new_tokens):
            logits_BV = _last_logits(model, tokens_BT, positions_BT, cache)
            draws = [float(uniform(key, step, 1)) for key in keys] if temperature > 0 else []
            chosen_B = choose(logits_BV, temperature, top_p, torch.tensor(draws, dtype=torch.float64, device=device))
            yield chosen_B.tolist()
            ahead_B1 = positions_BT[:, -1:] + 1
            if cache is None:
                tokens_BT = torch.cat((tokens_BT, chosen_B[:, None]), dim=1)
                positions_BT = torch.cat((positions_BT, ahead_B1), dim=1)
            else:
                tokens_BT, positions_BT = chosen_B[:, None], ahead_B1


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Training flags as in evaluation, and back."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def _last_logits(
    model: torch.nn.Module, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, cache: KVCache | None
) -> torch.Tensor:
    """Logits of the last place of every row, (B, V), float32 or float64."""
    if cache is None:
        # a module of the user's own need not know pads: each row goes through it alone, without them
        rows = [tokens_BT[row : row + 1, positions_BT[row] >= 0] for row in range(len(tokens_BT))]
        return torch.cat([model(row)[:, -1] for row in rows])
    documents_BT = torch.where(positions_BT < 0, -1, 0).int()
    return model(
        tokens_BT,
        positions_BT.clamp(min=0),
        documents_BT,
        lambda out: type(out)(out.hidden_BTD[:, -1:], out.weight_VD, out.softcap).logits()[:, 0],
        cache=cache,
    )


def choose(logits_BV: torch.Tensor, temperature: float, top_p: float, draws_B: torch.Tensor) -> torch.Tensor:
    """One id a row: the largest logit at temperature 0, else the id that the draw in (0, 1) meets when the chances are
    laid end to end, likeliest first, of the smallest set that holds `top_p` (nucleus sampling, arXiv 1904.09751)."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    chances_BV, order_BV = (logits_BV.double() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    upto_BV = chances_BV.cumsum(-1)
    kept_BV = (upto_BV - chances_BV < top_p).double()  # the likeliest id always stays
    upto_BV = (chances_BV * kept_BV).cumsum(-1)
    place_B1 = torch.searchsorted(upto_BV, draws_B[:, None] * upto_BV[:, -1:])
    last_B1 = kept_BV.sum(-1, keepdim=True).long() - 1
    return order_BV.gather(-1, torch.minimum(place_B1, last_B1))[:, 0]
