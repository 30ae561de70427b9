"""Any cut of a tensor into saved boxes gives back any wanted box, reading no block that is not needed."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from truestep.checkpoint.catalogue import Committed
from truestep.checkpoint.codec import metadata_of, plan_from_json
from truestep.checkpoint.plans import StagedPlanner
from truestep.checkpoint.reader import BlockReader
from truestep.checkpoint.writer import BlockWriter, result_from_json, result_to_json
from truestep.storage.objects import ObjectStore

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool]


@st.composite
def _cuts(draw):
    """A shape, and along every dimension the borders of a grid."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    return shape, [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]


def _boxes(borders):
    """The boxes of the grid as (offsets, sizes)."""
    boxes = [((), ())]
    for line in borders:
        steps = list(itertools.pairwise(line))
        boxes = [((*o, start), (*s, stop - start)) for o, s in boxes for start, stop in steps]
    return boxes


def _cut(tensor, offsets, sizes):
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]


def _save(store, tensors, grids, block_bytes):
    """Every box is written by a rank of its own, as a mesh would."""
    committed = Committed(1, 1)
    plans = [[name, *box] for name, borders in grids.items() for box in _boxes(borders)]
    results, metadata = [], None
    everything = SavePlan([])
    for rank, (name, offsets, sizes) in enumerate(plans):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        plan = plan_from_json([[name, "SHARD", list(tensor.shape), dtype, list(offsets), list(sizes)]])
        everything.items.extend(plan.items)
        staged = StagedPlanner({}, {name: _cut(tensor, offsets, sizes).contiguous()})
        written = BlockWriter(store, committed, 1, rank, block_bytes).write_data(plan, staged).wait()
        results.append(result_from_json(result_to_json(written)))
    _, metadata = StagedPlanner({}, {}).create_global_plan([everything])
    writer = BlockWriter(store, committed, 1, 0, block_bytes)
    writer.finish(metadata, results)
    return writer.manifest


class _Into(StagedPlanner):
    """A planner whose targets are plain tensors, by name."""

    def __init__(self, targets):
        self.targets = targets

    def resolve_tensor(self, item):
        return _cut(self.targets[item.dest_index.fqn], item.dest_offsets, item.lengths)

    def commit_tensor(self, item, tensor):
        pass


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(_cuts(), min_size=1, max_size=3),
    wanted=st.data(),
    block_bytes=st.sampled_from([16, 48, 1024]),
    seed=st.integers(0, 99),
)
def test_any_box_from_any_boxes(cuts, wanted, block_bytes, seed):
    made = torch.Generator().manual_seed(seed)
    tensors, grids = {}, {}
    for index, (shape, borders) in enumerate(cuts):
        values = (
            torch.randint(0, 2, shape, generator=made) if index % 5 == 4 else torch.randn(shape, generator=made) * 9
        )
        tensors[f"t{index}"] = values.to(DTYPES[(index + seed) % len(DTYPES)])
        grids[f"t{index}"] = borders
    store = ObjectStore("memory://")
    manifest = _save(store, tensors, grids, block_bytes)
    assert manifest.num_bytes == sum(tensor.nbytes for tensor in tensors.values())

    metadata, items, targets, expected = metadata_of(manifest), [], {}, {}
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        first = [wanted.draw(st.integers(0, size - 1)) for size in tensor.shape]
        sizes = [wanted.draw(st.integers(1, size - o)) for o, size in zip(first, tensor.shape)]
        box = ChunkStorageMetadata(torch.Size(first), torch.Size(sizes))
        items += create_read_items_for_chunk_list(name, entry, [box])
        targets[name] = torch.zeros(sizes, dtype=tensor.dtype)
        expected[name] = _cut(tensor, first, sizes)
    reader = BlockReader(store, manifest)
    reader.read_data(LoadPlan(items), _Into(targets)).wait()
    for name in tensors:
        assert torch.equal(targets[name], expected[name]), name
    most = sum(math.prod(c.sizes) * t.element_size() for n, t in tensors.items() for c in manifest.tensors[n].chunks)
    assert reader.bytes_read <= most
