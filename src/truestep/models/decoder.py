"""One decoder-only transformer for every family: the section's options choose norms, attention and MLP.

Shapes: B rows, T tokens, D hidden_size, V vocab_size, H query heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from truestep.models.attention import mask
from truestep.models.block import Block
from truestep.models.cache import KVCache
from truestep.models.context import Rule, rule_of
from truestep.models.layers import LayerInput, Linear, Parted, RMSNorm, Table
from truestep.models.moe import MoE
from truestep.models.roles import SCORE, infer_roles
from truestep.models.rope import Rope
from truestep.models.router import Router, end_step, take_counts
from truestep.models.sites import of_map, of_table, sites_of_blocks
from truestep.numerics.axis import Axes
from truestep.numerics.head import HeadInput, Scores
from truestep.numerics.low_rank import Site
from truestep.numerics.pieces import Split, span
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection


class Blocks(nn.Module):
    """Blocks by their number in the whole model, which is also their name, whatever part of the model this is."""

    def __init__(self, blocks: Mapping[int, Block]):
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._modules.values())  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, number: int) -> Block:
        block = self._modules[str(number)]
        assert isinstance(block, Block)
        return block


class Decoder(nn.Module):
    """`section` is resolved (every option filled in). `blocks` are the units of sharding, recomputation, compilation.

    A tied head has no parameter of its own: it is the embedding's weight, one Parameter under one name. A reward model
    (`section.scores`) has a score head instead, the same on every rank.

    A part of a model (`keep`) has some of the blocks; the first part alone embeds tokens, the last alone has the norm
    and the head. The tied table of a last part that is not the first as well is its own tensor, `head_mirror`: whoever
    cuts a model up keeps it equal to the table of the first part. `second_use`: what a tied table goes through before
    it serves as the head, for whoever keeps the gradients of the two uses apart.
    """

    embed: Table | None
    norm: RMSNorm | None
    backward_twice = False
    second_use: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, section: ModelSection):
        super().__init__()
        self.section = section
        self.embed = Table(section.vocab_size, section.hidden_size)
        self.blocks = Blocks({layer: Block(section, layer) for layer in range(section.num_layers)})
        self.norm = RMSNorm(section.hidden_size, section.norm_eps, bool(section.norm_offset))
        if section.scores:
            self.score = Linear(section.hidden_size, 1, bias=False)
        elif not section.tie_embeddings:
            self.head = Linear(section.hidden_size, section.vocab_size, bias=False)
        turned = section.head_dim if section.mla is None else section.mla.rope_dim
        rope = Rope(turned, section.rope_theta, section.rope_scaling)
        # gemma3: layers with a window have a rotary base of their own, which is never scaled
        local = (
            Rope(section.head_dim, section.rope_local_theta or 10000.0, None) if section.family == "gemma3" else rope
        )
        windows = [section.window_of(layer) for layer in range(section.num_layers)]
        self._ropes = {window: rope if window is None else local for window in windows}
        self.axes = Axes()

    def place(self, axes: Axes) -> None:
        """Split the work over axes. Parameters keep their whole shapes: whoever calls this cuts them by `splits`."""
        self.axes = axes
        for module in self.modules():
            if isinstance(module, Parted):
                module.place(axes)

    def splits(self) -> dict[str, Split]:
        """How axes split the parameters, by name. The vocabulary is cut as evenly as it goes, never padded."""
        table = {name: Split("tp", 0) for name in ("embed.weight", "head.weight", "head_mirror")}
        for prefix, module in self.named_modules():
            if isinstance(module, Parted):
                table |= {f"{prefix}.{name}": split for name, split in module.splits().items()}
        table |= {name: split for site in self.sites() for name, split in site.splits(table.get(site.weight)).items()}
        return {name: table[name] for name, _ in self.named_parameters() if name in table}

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Become the part of the model with these blocks. Call on the meta device, before parameters are cut."""
        self.blocks = Blocks({layer: self.blocks[layer] for layer in layers})
        if last and not first and self.section.tie_embeddings:
            assert self.embed is not None
            self.head_mirror = nn.Parameter(torch.empty_like(self.embed.weight), self.embed.weight.requires_grad)
        if not first:
            self.embed = None
        if not last:
            self.norm = None
            if self.section.scores:
                del self.score
            elif not self.section.tie_embeddings:
                del self.head

    def forward(
        self,
        x: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        head: Callable[[Any], Any] | None = None,
        labels_BT: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """head(HeadInput), of a reward model head(Scores), or without a head logits_BTV; of a part that is not the last
        one its hidden states.

        `x` is tokens_BT, or what the part before gave. Without positions they count from 0 (behind the cache); without
        documents every row is one. Labels are for modules with a loss of their own; this one reads none."""
        x_BTD = x if self.embed is None else self._embed(x)
        length = x_BTD.shape[1] * self.axes.tp.size
        given = self._layer_inputs(x_BTD, length, positions_BT, documents_BT, cache)
        for block in self.blocks:
            x_BTD = block(x_BTD, given[block.window])
        if cache is not None:
            cache.advance(x, documents_BT)
        if self.norm is None:
            return x_BTD
        if self.section.scores:
            out = self._scores(self.norm(x_BTD))
            return out.logits() if head is None else head(out)
        first_row, _ = span(self.section.vocab_size, self.axes.tp.size, self.axes.tp.rank)
        hidden_BTD = self.axes.tp.gather(self.norm(x_BTD), 1)
        softcap, vocab_size = self.section.logit_softcap, self.section.vocab_size
        vocab = self.axes.tp, first_row, vocab_size
        out = HeadInput(hidden_BTD, self._table(), softcap, *vocab, self.backward_twice, self.axes.cp)
        return out.logits() if head is None else head(out)

    def _scores(self, hidden_BTD: torch.Tensor) -> Scores:
        """From this rank's part of the sequence. Products in fp32 at least: there are few of them."""
        tp, wide = self.axes.tp, torch.promote_types(hidden_BTD.dtype, torch.float32)
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            own_BT = (hidden_BTD.to(wide) @ self.score.weight.to(wide).T)[..., 0]
        return Scores(tp.collect(own_BT, 1, [own_BT.shape[1]] * tp.size))

    def _embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Hidden states of this rank's part of the sequence."""
        assert self.embed is not None
        tp, device = self.axes.tp, tokens_BT.device.type
        x_BTD = self.embed.rows_of(tokens_BT, tp)
        if torch.is_autocast_enabled(device):  # the residual stream is what FSDP2's mixed precision makes it
            x_BTD = x_BTD.to(torch.get_autocast_dtype(device))
        x_BTD = tp.scatter_sum(x_BTD, 1)
        if self.section.embed_scale:
            x_BTD = x_BTD * torch.tensor(self.section.hidden_size**0.5, dtype=x_BTD.dtype)
        return x_BTD

    def _table(self) -> torch.Tensor:
        """This rank's rows of the output matrix."""
        if not self.section.tie_embeddings:
            return self.head.whole()
        if self.embed is None:
            return self.head_mirror
        return self.embed.whole() if self.second_use is None else self.second_use(self.embed.weight)

    def roles(self) -> dict[str, Role]:
        """What each parameter is for, by name."""
        found = infer_roles(self, self.section.vocab_size)
        return found | ({SCORE: Role.HEAD} if SCORE in found else {})

    def sites(self) -> list[Site]:
        """Weights of this part of the model that can have adapters. A tied table is one, of the group embeddings."""
        found = [] if self.embed is None else [of_table("embed", self.embed)]
        found += sites_of_blocks(dict(self.blocks.named_children()))
        has_head = self.norm is not None and not self.section.tie_embeddings and not self.section.scores
        return [*found, of_map("head", self.head, "head")] if has_head else found

    def moes(self) -> dict[int, MoE]:
        """Blocks with experts, by their number in the whole model; `dispatch` is their seam of expert parallelism."""
        found = {int(number): block.mlp for number, block in self.blocks.named_children()}
        return {number: mlp for number, mlp in found.items() if isinstance(mlp, MoE)}

    def begin_step(self, tokens: int, scale: float = 1.0) -> None:
        """A step of training begins. `tokens`: those of its global batch that are no padding; `scale`: what gradients
        are multiplied by. Without it (in evaluation, say) routers count nothing and have no losses."""
        for router in self._routers().values():
            router.begin(tokens, scale)

    @property
    def wants_pre_pass(self) -> bool:
        """Whether after begin_step all microbatches are to go through once without gradient, then to `end_pre_pass`."""
        moe = self.section.moe
        return moe is not None and moe.balance == "aux" and moe.counts == "pre-pass"

    def end_pre_pass(self, sum_over: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Balance losses go by what was counted since begin_step. For `sum_over` see `end_step`."""
        if routers := list(self._routers().values()):
            take_counts(routers, sum_over)

    def end_step(self, sum_over: Callable[[torch.Tensor], torch.Tensor], update: bool = True) -> dict[str, float]:
        """The step is over: loads and biases of routers are updated (unless its update was skipped). Metrics of this
        part of the model for the run log. `sum_over` gives the sum over the ranks that saw other tokens."""
        return end_step(self._routers(), sum_over, update)

    def _routers(self) -> dict[int, Router]:
        return {number: moe.router for number, moe in self.moes().items()}

    def _layer_inputs(
        self,
        x_BTD: torch.Tensor,
        length: int,
        positions_BT: torch.Tensor | None,
        documents_BT: torch.Tensor | None,
        cache: KVCache | None,
    ) -> dict[int | None, LayerInput]:
        """Rotary tables and mask of the layers with each window (None: full attention), made once for all of them."""
        start, dtype = (0 if cache is None else cache.length), x_BTD.dtype
        own = self.axes.columns(length * self.axes.cp.size)
        if positions_BT is None:
            places = [torch.arange(start + p.start, start + p.stop, device=x_BTD.device) for p in own]
            positions_BT = torch.cat(places)[None]
        tables = {rope: rope.tables(positions_BT, dtype) for rope in set(self._ropes.values())}
        real_BT = None
        if documents_BT is not None:
            own_BT = torch.cat([documents_BT[:, p.start : p.stop] for p in own], dim=1)
            real_BT = self.axes.tp.part(own_BT, 1) >= 0
        rule = self._rule(x_BTD, length, documents_BT, cache)
        return {window: LayerInput(tables[rope], rule(window), cache, real_BT) for window, rope in self._ropes.items()}

    def _rule(
        self, x_BTD: torch.Tensor, length: int, documents_BT: torch.Tensor | None, cache: KVCache | None
    ) -> Callable[[int | None], Rule]:
        """Who sees whom in layers with a window."""
        softcap, head_dim, dtype = self.section.attention_softcap is not None, self.section.head_dim, x_BTD.dtype
        options = {"softcap": softcap, "head_dim": head_dim, "dtype": dtype}
        if cache is None:
            length *= self.axes.cp.size
            return lambda window: rule_of(self.axes, documents_BT, length, window, device=x_BTD.device, **options)
        assert self.axes.cp.size == 1, "a cache holds whole rows"
        queries_BT = documents_BT
        if queries_BT is None:
            queries_BT = torch.zeros(x_BTD.shape[0], length, dtype=torch.int32, device=x_BTD.device)
        keys_BS = cache.documents_with(queries_BT)
        return lambda window: mask(queries_BT, keys_BS, window, cached=True, **options)
