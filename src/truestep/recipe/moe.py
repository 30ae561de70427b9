"""[model.moe]: blocks whose MLP is a choice among many experts."""

from typing import Literal

from truestep.recipe.section import Section, field


class Moe(Section):
    """Experts instead of the gated MLP (arXiv 2401.06066), no token dropped. For each token a router scores every
    expert, the best `top_k` work, and their outputs are summed with the router's weights."""

    num_experts: int = field(help="routed experts of a block", gt=1)
    top_k: int = field(help="experts that each token goes to", gt=0)
    expert_size: int = field(0, help="width of one expert's gated MLP; 0 means intermediate_size", ge=0)
    shared_size: int = field(
        0, help="width of the gated MLP that every token goes through besides, all shared experts together", ge=0
    )
    dense_layers: int = field(0, help="the first n blocks keep the dense MLP", ge=0)
    every: int = field(1, help="of the others, only every n-th block of the model (the n-th first) has experts", gt=0)
    scoring: Literal["softmax", "sigmoid"] | None = field(
        None, help="scores of the experts from the router's logits; by default sigmoid for deepseek_v3, else softmax"
    )
    normalise: bool = field(
        True,
        help="divide a token's weights by their sum: with softmax that equals a softmax over the chosen experts only "
        "(after selection); false: over all experts (before selection). Needs top_k of 2 or more",
    )
    scale: float = field(1.0, help="factor on the weights (DeepSeek-V3's routed_scaling_factor)", gt=0)
    groups: int = field(1, help="experts are in this many equal groups, and a token uses top_groups of them", gt=0)
    top_groups: int = field(1, help="groups with the largest sum of their two best scores", gt=0)
    balance: Literal["none", "aux", "bias"] | None = field(
        None,
        help="aux: the loss num_experts sum(f p), f the share of choices and p the mean probability of an expert over "
        "the global batch (arXiv 2101.03961); bias: an offset of each score, for the choice only, steered by the "
        "counts, without a loss (arXiv 2408.15664). By default bias for deepseek_v3, else aux",
    )
    balance_coefficient: float = field(0.01, help="factor of the balance loss of each block", gt=0)
    counts: Literal["previous", "pre-pass"] = field(
        "previous", help="f of the balance loss: of the step before, or of this one by a forward pass that only counts"
    )
    bias_rate: float = field(1e-3, help="what the offset moves in a step", gt=0)
    z_loss: float = field(0.0, help="factor of the mean of logsumexp(router logits)^2 (arXiv 2202.08906)", ge=0)

    def in_layer(self, layer: int) -> bool:
        """Whether block `layer` (0-based) has experts."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0
