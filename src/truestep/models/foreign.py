"""A user's own module by import path, in the shape that the training loop calls.

The module is called with what its `forward` has names for: `input_ids` (or whatever its first argument is called),
`labels` (or `targets`), `position_ids`, `document_ids`. Labels are truestep's: labels[b, t] is the token that follows
input_ids[b, t], -100 is no target. It returns a tensor of logits (B, T, V), or an object with `.logits` or `.loss`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from truestep.errors import ModelError
from truestep.imports import load_object
from truestep.models.roles import infer_roles
from truestep.numerics.batch import IGNORE
from truestep.numerics.head import Logits, OwnLoss
from truestep.numerics.pieces import Piece, piece_of
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ForeignModel(nn.Module):
    """Wraps `module`, whose path in the recipe is section.module.

    Logits are preferred: the recipe's loss is computed from them, so every stage option works. A module that gives only
    `.loss`, the mean over its targets, trains on that. If it gives both, its loss must be the mean cross-entropy of its
    logits (labels shifted once more inside, as `transformers` does, is recognised): anything else would be ignored
    silently and is a ModelError."""

    def __init__(self, module: nn.Module, section: ModelSection):
        super().__init__()
        self.module = module
        self.section = section
        names = {p.name: p for p in inspect.signature(module.forward).parameters.values() if p.kind in _NAMED}
        if not names:
            raise ModelError(f"{section.module} has a forward without named arguments; give it `input_ids`.")
        self._tokens = "input_ids" if "input_ids" in names else next(iter(names))
        self._labels = next((name for name in ("labels", "targets") if name in names), None)
        self._labels_optional = self._labels is not None and names[self._labels].default is not inspect.Parameter.empty
        self._positions = "position_ids" if "position_ids" in names else None
        self._documents = "document_ids" if "document_ids" in names else None
        self._loss_known = False

    @property
    def blocks(self) -> nn.ModuleList:
        """The module's largest list of layers: units of sharding, recomputation and compilation."""
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        size = lambda layers: sum(p.numel() for p in layers.parameters())  # noqa: E731
        return max(lists, key=size, default=nn.ModuleList())

    @property
    def takes_documents(self) -> bool:
        """Whether the module can keep the documents of a row apart (its forward has a `document_ids`)."""
        return self._documents is not None

    def roles(self) -> dict[str, Role]:
        """What each parameter is for, by name."""
        return infer_roles(self, self.section.vocab_size)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        head: Callable[[Any], Any] | None = None,
        labels_BT: torch.Tensor | None = None,
    ) -> Any:
        """head(Logits) or head(OwnLoss); without a head the logits. Evaluation withholds optional labels."""
        if not self.training and self._labels_optional:
            labels_BT = None
        given = {self._tokens: tokens_BT, self._positions: positions_BT, self._documents: documents_BT}
        kept_BT = None if labels_BT is None else _with_a_target(tokens_BT, labels_BT)
        given[self._labels] = kept_BT
        out = self.module(**{name: value for name, value in given.items() if name is not None and value is not None})
        logits_BTV = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
        loss = None if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
        if logits_BTV is not None:
            self._check_shape(logits_BTV, tokens_BT)
            if loss is not None and kept_BT is not None:
                self._check(logits_BTV.detach(), loss.detach(), kept_BT)
            result = Logits(logits_BTV)
            return result.logits() if head is None else head(result)
        if loss is None or labels_BT is None or head is None:
            raise ModelError(self._no_output(out))
        return head(OwnLoss(loss * (labels_BT != IGNORE).sum()))

    def _check_shape(self, logits_BTV: torch.Tensor, tokens_BT: torch.Tensor) -> None:
        shape, vocab_size = tuple(logits_BTV.shape), self.section.vocab_size
        if len(shape) != 3 or shape[:2] != tuple(tokens_BT.shape) or shape[2] < vocab_size:
            raise ModelError(
                f"{self.section.module} returns logits of shape {shape} for tokens of shape {tuple(tokens_BT.shape)}; "
                f"return (rows, tokens, vocabulary), with a vocabulary of at least {vocab_size}."
            )

    def _check(self, logits_BTV: torch.Tensor, loss: torch.Tensor, labels_BT: torch.Tensor) -> None:
        """Once; from then on labels are withheld where they may be, so that no loss is computed for nothing."""
        if self._loss_known:
            return
        self._loss_known = True
        self._labels = None if self._labels_optional else self._labels
        plain = cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE)
        again = cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORE)
        if not any(torch.isclose(loss.float(), mean, rtol=1e-3) for mean in (plain, again)):
            raise ModelError(
                f"{self.section.module} returns a loss of {loss.item():.6g}, which is not the mean cross-entropy of "
                f"its logits ({plain.item():.6g}); return the loss alone to train on it, or the logits alone."
            )

    def _no_output(self, out: Any) -> str:
        path, kind = self.section.module, type(out).__name__
        if getattr(out, "loss", None) is not None:
            return f"{path} returns a loss without logits, which evaluation and generation need; return .logits there."
        return f"{path} returns a {kind}, neither a tensor of logits nor an object with .logits or .loss; change that."


def _with_a_target(tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The labels; if all of them are IGNORE, with one made up, so that a mean over them is not 0 / 0. Its weight in the
    sum is 0, so it passes no gradient."""
    made_up_BT = torch.full_like(labels_BT, IGNORE)
    made_up_BT[:, -1] = tokens_BT[:, -1]
    return torch.where((labels_BT != IGNORE).any(), labels_BT, made_up_BT)


def build_foreign(section: ModelSection, seed: int = 0) -> ForeignModel:
    """The user's module with real memory on the CPU, its own initialisation drawn from `seed`; the generator of the
    caller is left as it was. `options` are its keyword arguments, with `vocab_size` and `max_context` where it has
    parameters of these names."""
    assert section.module is not None
    factory = load_object(section.module, "model")
    known = inspect.signature(factory).parameters
    sizes = {"vocab_size": section.vocab_size, "max_context": section.max_context}
    given = {name: value for name, value in sizes.items() if name in known} | section.options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = factory(**given)
        except TypeError as error:
            raise ModelError(f"model.module {section.module} does not take options {given}: {error}.") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"model.module {section.module} made a {type(module).__name__}, not a torch.nn.Module.")
    return ForeignModel(module, section)


@torch.no_grad()
def init_foreign(model: ForeignModel, seed: int, pieces: Mapping[str, Piece]) -> None:
    """Fill parameters and buffers in place, each rank its part, from a second module initialised by `seed`. `pieces`:
    those of which more is to be known than the module itself tells."""
    source = build_foreign(model.section, seed)
    whole = dict(source.named_parameters()) | dict(source.named_buffers())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        piece = pieces[name] if name in pieces else piece_of(tensor)
        piece.local.copy_(whole[name].detach()[piece.region])
