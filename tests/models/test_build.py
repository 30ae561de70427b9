"""Meta build, then each rank's shards from the seed or from files; tied weights stay one; compile and recomputation."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.dist import run_ranks
from tests.models.sections import VOCAB, small
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.hf import load_hf
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model, tensors_of
from truestep.numerics.pieces import Piece, Split, piece_of, place

TIED = small(tie_embeddings=True, hidden_size=20, num_heads=2, intermediate_size=30, num_layers=2)
TOKENS_BT = torch.arange(14).view(2, 7) % VOCAB


def whole(seed: int = 3) -> Decoder:
    model = build_model(TIED, VOCAB).to_empty(device="cpu")
    init_weights(model, seed)
    assert isinstance(model, Decoder)
    return model


def sharded(world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    model = build_model(TIED, VOCAB)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh).to_empty(device="cpu")


def test_first_weights():
    section = small(init_std=0.5, hidden_size=64, num_layers=2)
    model = build_model(section, VOCAB).to_empty(device="cpu")
    init_weights(model, 0)
    weights = dict(model.named_parameters())
    assert abs(weights["blocks.0.attention.q.weight"].std() - 0.5) < 0.03
    for name in ("blocks.1.attention.out.weight", "blocks.1.mlp.down.weight"):
        assert abs(weights[name].std() - 0.25) < 0.015
    assert (weights["norm.weight"] == 1).all()
    biased = build_model(small(family="qwen2"), VOCAB).to_empty(device="cpu")
    init_weights(biased, 0)
    assert (dict(biased.named_parameters())["blocks.0.attention.q.bias"] == 0).all()
    gemma = build_model(small(family="gemma2"), VOCAB).to_empty(device="cpu")
    init_weights(gemma, 0)
    assert (dict(gemma.named_parameters())["norm.weight"] == 0).all()


def _shards_are_slices(rank: int, world: int) -> None:
    model, full = sharded(world), dict(whole().named_parameters())
    init_weights(model, 3)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), full[name]), name
    mesh = init_device_mesh("cpu", (2, world // 2)) if world == 4 else init_device_mesh("cpu", (world, 1))
    for placements in [(Shard(1), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(0), Shard(0))]:
        holder = build_model(TIED, VOCAB).to_empty(device="cpu")
        inner = holder.blocks[0].mlp.down  # 20 x 30: uneven over 3 and 4 ranks
        inner.weight = nn.Parameter(distribute_tensor(torch.zeros(20, 30), mesh, placements, src_data_rank=None))
        init_weights(holder, 3)
        assert torch.equal(inner.weight.full_tensor(), full["blocks.0.mlp.down.weight"]), placements


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_are_slices_of_the_same_numbers(world: int):
    run_ranks(_shards_are_slices, world)


def test_parts_of_every_axis_are_slices_of_the_same_numbers():
    """Splits by hand: rows and columns in units, uneven, sharded once more; a name that this part of a model lacks."""
    full = {name: parameter.detach() for name, parameter in whole().named_parameters()}
    for size, rank, dim in [(3, 0, 0), (3, 2, 0), (2, 1, 1)]:
        pieces = {}
        for name, tensor in full.items():
            if tensor.dim() <= dim:
                pieces[name] = piece_of(torch.full_like(tensor, 7.0))
                continue
            first, stop = (split := Split("tp", dim)).span(tensor.shape[dim], size, rank)
            part = torch.full_like(tensor.narrow(dim, first, stop - first), 7.0)
            lower = Piece(
                part[1:], tuple(part.shape), (min(1, len(part)), 0)[: part.dim()]
            )  # what FSDP2 left of it on this rank
            pieces[name] = place(lower, split, size, rank, tuple(tensor.shape))
        part_of_model = Decoder(small(num_layers=2, tie_embeddings=True, hidden_size=20, num_heads=2))
        init_weights(part_of_model, 3, pieces)
        for name, piece in pieces.items():
            assert torch.equal(piece.local, full[name][piece.region]), name


def test_experts_in_one_tensor_begin_like_matrices():
    model = build_model(small(init_std=0.5, num_layers=2), VOCAB)
    shapes = {"blocks.0.mlp.experts.up": (4, 60, 50), "blocks.0.mlp.experts.down": (4, 50, 60)}
    pieces = {name: piece_of(torch.zeros(shape)) for name, shape in shapes.items()}
    init_weights(model, 0, pieces)
    for name, std in zip(shapes, (0.5, 0.25)):
        assert abs(pieces[name].local.std() - std) < 0.01
        halves = [Piece(torch.zeros(2, *shapes[name][1:]), shapes[name], (start, 0, 0)) for start in (0, 2)]
        for half in halves:
            init_weights(model, 0, {name: half})
        assert torch.equal(torch.cat([half.local for half in halves]), pieces[name].local)


def test_c29_tied_weights_stay_one():
    """Meta build, materialise: one parameter, whose gradient is that of both uses."""
    model = whole()
    assert [name for name in dict(model.named_parameters(remove_duplicate=False)) if "head" in name] == []
    weight = model.embed.weight
    assert model(TOKENS_BT, head=lambda out: out.weight_VD) is weight
    model(TOKENS_BT).logsumexp(-1).sum().backward()
    both = weight.grad.clone()
    parts = torch.zeros_like(both)
    for detach in ("embed", "head"):
        weight.grad = None
        handle = model.embed.register_forward_hook(lambda *a: a[2].detach() if detach == "embed" else None)  # noqa: B023
        model(TOKENS_BT, head=lambda out: _logits(out, detach == "head")).logsumexp(-1).sum().backward()  # noqa: B023
        handle.remove()
        parts += weight.grad if weight.grad is not None else 0
    torch.testing.assert_close(both, parts)


def _logits(out, detach: bool) -> torch.Tensor:
    return out.hidden_BTD @ (out.weight_VD.detach() if detach else out.weight_VD).T


def _fsdp_step(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    model = sharded(world)
    init_weights(model, 3)
    rate = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS_BT[rank : rank + 1], head=lambda out: out.logits().logsumexp(-1).sum()).backward()
    rate.step()
    save_hf(Path(folder) / "model", tensors_of(model), TIED, shard_bytes=4000)
    again = sharded(world)
    load_hf(Path(folder) / "model", dict(again.named_parameters()))
    for (name, a), b in zip(model.named_parameters(), again.named_parameters()):
        assert torch.equal(a.to_local(), b[1].to_local()), name
    return [p.full_tensor().detach() for p in model.parameters()]


def test_c29_tied_weights_stay_one_under_fsdp(tmp_path: Path):
    """Two ranks, one step, saved by both and read back in slices: equal to one process on both rows."""
    found = run_ranks(_fsdp_step, 2, str(tmp_path))[0]
    model = whole()
    rate = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(TOKENS_BT, head=lambda out: out.logits().logsumexp(-1).sum()) / 2).backward()
    rate.step()
    for (name, wanted), got in zip(model.named_parameters(), found):
        torch.testing.assert_close(got, wanted.detach(), msg=name, atol=1e-6, rtol=1e-5)
    loaded = load_model(tmp_path / "model")
    assert torch.equal(loaded(TOKENS_BT, head=lambda out: out.weight_VD), loaded.embed.weight)
    assert all(torch.equal(p, got) for p, got in zip(loaded.parameters(), found))
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1


def _rope_under_bf16(rank: int, world: int) -> torch.Tensor:
    mesh, policy = init_device_mesh("cpu", (world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = build_model(TIED, VOCAB)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy).to_empty(device="cpu")
    init_weights(model, 3)
    seen = []
    block = model.blocks[1]
    inner = block.attention.forward
    block.attention.forward = lambda x, given: seen.append((x.dtype, given.rope.cos)) or inner(x, given)
    positions_BT = torch.tensor([[256, 257, 15_962]])
    model(TOKENS_BT[:1, :3], positions_BT, torch.tensor([[0, 0, 1]]))
    assert seen[0][0] == torch.bfloat16
    return seen[0][1]


def test_c26_fsdp_does_not_cast_rotary_tables():
    cos = run_ranks(_rope_under_bf16, 2)[0]
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos[0, 1:, 0, 0], torch.tensor([0.819306, -0.908016]), atol=1e-6, rtol=0)


def test_recomputed_blocks_give_the_same_gradient():
    plain, again = whole(), whole()
    for block in again.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    documents_BT = torch.tensor([[0] * 3 + [1] * 4, [0] * 7])
    for model in (plain, again):
        model(TOKENS_BT, None, documents_BT).logsumexp(-1).sum().backward()
    for a, b in zip(plain.parameters(), again.parameters()):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradient():
    plain, compiled = whole(), whole()
    for block in compiled.blocks:
        block.compile(fullgraph=True)
    documents_BT = torch.tensor([[0] * 3 + [1] * 4, [0] * 7])
    for model in (plain, compiled):
        model(TOKENS_BT, None, documents_BT).logsumexp(-1).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
