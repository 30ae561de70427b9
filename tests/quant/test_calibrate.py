"""Calibration: every map sees what the settled model before it makes of the data, and nothing of padding."""

import torch

from tests import small_post
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.layers import Linear
from truestep.numerics.batch import IGNORE, Batch
from truestep.quant.calibrate import calibrate
from truestep.quant.gptq import Seen
from truestep.recipe.model import ModelSection

ORDER = ["attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down"]


def model() -> Decoder:
    made = build_model(ModelSection(**small_post.MODEL).resolved(64), 64).to_empty(device="cpu")
    init_weights(made, 0)
    assert isinstance(made, Decoder)
    return made


def batches() -> list[Batch]:
    """Rows of three documents, whose last places are padding."""
    made = []
    for seed in range(3):
        tokens_BT = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
        documents_BT = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 10 + [-1] * 2], dtype=torch.int32)
        positions_BT = torch.tensor([[*range(5), *range(4), 0, 0, 0], [*range(10), 0, 0]])
        made.append(Batch(tokens_BT, torch.full_like(tokens_BT, IGNORE), positions_BT, documents_BT))
    return made


def maps_of(decoder: Decoder) -> dict[str, Linear]:
    return {n: m for n, m in decoder.named_modules() if isinstance(m, Linear) and n.startswith("blocks.")}


def carried_out(decoder: Decoder, change: bool) -> dict[str, Seen]:
    """What each map was shown, in order; where asked its weight is halved then."""
    seen: dict[str, Seen] = {}
    maps = maps_of(decoder)

    def settle(name: str, one: Seen) -> None:
        seen[name] = one
        if change:
            maps[name].weight.data.mul_(0.5)

    blocks = [(f"blocks.{name}", block) for name, block in decoder.blocks.named_children()]
    calibrate(decoder, blocks, batches(), maps, True, settle)
    return seen


def inputs_of(decoder: Decoder, name: str) -> torch.Tensor:
    """Of a plain pass of the model as it is: rows of what is no padding."""
    rows = []
    handle = maps_of(decoder)[name].register_forward_pre_hook(lambda module, args: rows.append(args[0]))
    with torch.no_grad():
        for batch in batches():
            decoder(batch.tokens_BT, batch.positions_BT, batch.documents_BT, lambda out: out)
    handle.remove()
    masks = [batch.documents_BT >= 0 for batch in batches()]
    return torch.cat([x[mask] for x, mask in zip(rows, masks)])


def test_maps_are_settled_in_the_order_of_their_calls():
    assert list(carried_out(model(), False)) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in ORDER]


def test_each_map_is_shown_its_inputs_without_padding():
    decoder = model()
    for name, seen in carried_out(decoder, False).items():
        x = inputs_of(decoder, name)
        assert seen.rows == len(x) == 3 * 19
        assert seen.top == float(x.abs().max())
        assert torch.allclose(seen.products_II, x.t() @ x, rtol=1e-5, atol=1e-6 * float(seen.products_II.max()))


def test_each_map_is_shown_what_comes_of_settled_ones_before_it():
    changed = model()
    found = carried_out(changed, True)
    fresh = model()
    for name in found:
        # as it was when its turn came: what shares its input was not settled yet, which makes no difference to it
        x = inputs_of(fresh, name)
        assert torch.allclose(
            found[name].products_II, x.t() @ x, rtol=1e-5, atol=1e-6 * float(found[name].products_II.max())
        ), name
        maps_of(fresh)[name].weight.data.mul_(0.5)
