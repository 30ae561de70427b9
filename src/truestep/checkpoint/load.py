"""Loads a committed checkpoint in place, on any mesh: strict, every byte verified before any target changes."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from truestep.checkpoint.catalogue import Catalogue, Committed, read_catalogue, read_manifest
from truestep.checkpoint.codec import dtype_name, metadata_of
from truestep.checkpoint.control import Group
from truestep.checkpoint.manifest import OPTIM, TRAINING, Manifest
from truestep.checkpoint.marks import marks_on, quarantined, standing
from truestep.checkpoint.places import Places
from truestep.checkpoint.plans import PiecePlanner
from truestep.checkpoint.reader import BlockReader
from truestep.checkpoint.sealed import parse_folder
from truestep.errors import CheckpointError, StorageError, UserError
from truestep.numerics.pieces import Piece, find_aliases, pieces_of
from truestep.storage.interface import Store

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # the caller has `fell_back` to tell people


class Mismatch(CheckpointError):
    """The checkpoint is whole, but its names, shapes, dtypes or ties are not those of the tensors to be filled."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the step, the caller's extra state, the commit's key and the run's facts. `fell_back` says in
    sentences which newer checkpoints were passed over and why; `unexpected` names stored tensors that nobody wanted,
    `skipped` wanted ones that were left as they are (weights only). `places`: where there are nearer places than the
    store, the bytes that all ranks read from each."""

    step: int
    extra: dict[str, Any]
    commit: str
    facts: dict[str, Any]
    bytes_read: int
    fell_back: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)


def load(
    store: Store,
    committed: Committed,
    tensors: Mapping[str, torch.Tensor | Piece],
    *,
    strict: bool = True,
    weights_only: bool = False,
    group: Group | None = None,
) -> Loaded:
    """Fill `tensors` (plain, DTensors or pieces, any mesh) from a checkpoint; all ranks of `group` call this together,
    each with what it holds.

    Raises on every rank if on one, and then no tensor has changed: CheckpointError for damage and absence; Mismatch
    for missing names, other shapes or dtypes, and, if strict, for names that no rank wants. Names under "optim." and
    "exact." are state of the training: they are required too, unless weights_only, which loads none of them.
    """
    group = group or Group.of(None, 0, 1, 60.0)
    reader = planner = None
    buffers, problem = [], None
    skipped = sorted(name for name in tensors if weights_only and name.startswith(TRAINING))
    everywhere = group.union("wanted", tensors.keys() - set(skipped))
    if isinstance(store, Places):
        store.begin_load()
    try:
        wanted = pieces_of({name: tensor for name, tensor in tensors.items() if name not in skipped})
        manifest = read_manifest(store, committed)
        where = f"{store.url}/{committed.key}"
        _match(manifest, wanted, where, strict)
        unexpected = _unexpected(manifest, everywhere, where, strict, weights_only)
        reader, planner = BlockReader(store, manifest), _planner(manifest, wanted)
        buffers = reader.fetch(planner.create_local_plan())
    except Exception as error:  # whatever it is, the other ranks must hear of it before it goes on
        problem = error
    if failures := group.agree("load", problem):
        if problem and not isinstance(problem, UserError):
            raise problem
        kind = Mismatch if Mismatch.__name__ in failures else CheckpointError
        other = f"step {committed.step} was not loaded, because of {next(iter(failures.values()))}"
        raise kind(str(problem or other)) from problem
    assert reader and planner
    reader.apply(buffers, planner)
    places = group.total("places", store.bytes_read) if isinstance(store, Places) else {}
    return Loaded(
        committed.step,
        manifest.extra,
        committed.key,
        manifest.facts,
        reader.bytes_read,
        [],
        unexpected,
        skipped,
        places,
    )


def _planner(manifest: Manifest, wanted: dict[str, Piece]) -> PiecePlanner:
    """A planner for the tensors that own their storage; those tied to another are filled along with it."""
    tied = find_aliases(wanted)
    return PiecePlanner({name: piece for name, piece in wanted.items() if name not in tied}, metadata_of(manifest))


def _match(manifest: Manifest, wanted: dict[str, Piece], where: str, strict: bool) -> None:
    """Compare names, shapes, dtypes and ties of what this rank wants."""
    missing = sorted(wanted.keys() - manifest.tensors.keys() - manifest.aliases.keys())
    if missing:
        kind = "optimizer state" if all(name.startswith(OPTIM) for name in missing) else "tensors"
        remedy = "; load weights only if that is meant" if kind == "optimizer state" else ""
        raise Mismatch(f"{where}: {kind} missing in the checkpoint: {_some(missing)}{remedy}")
    for name, piece in wanted.items():
        stored = manifest.tensors[manifest.aliases.get(name, name)]
        have, want = (tuple(stored.shape), stored.dtype), (tuple(piece.shape), dtype_name(piece.dtype))
        if have != want:
            raise Mismatch(
                f"{where}: {name} is saved as {have[1]} {list(have[0])}, but {want[1]} {list(want[0])} is wanted"
            )
        if piece.local.device.type == "meta":
            raise Mismatch(f"{where}: {name} is on the meta device; give it memory before loading into it")
    _match_ties(manifest, wanted, where, strict)


def _unexpected(manifest: Manifest, wanted: set[str], where: str, strict: bool, weights_only: bool) -> list[str]:
    """The stored names that no rank wants, or a Mismatch if strict."""
    unexpected = sorted((manifest.tensors.keys() | manifest.aliases.keys()) - wanted)
    refused = [name for name in unexpected if not (weights_only and name.startswith(TRAINING))]
    if strict and refused:
        raise Mismatch(f"{where}: the checkpoint holds what is not wanted here: {_some(refused)}")
    return unexpected


def _match_ties(manifest: Manifest, wanted: dict[str, Piece], where: str, strict: bool) -> None:
    """Two names over one storage must be one tensor in the checkpoint, and under strict the other way round too."""
    tied = find_aliases(wanted)
    for name, owner in tied.items():
        if manifest.aliases.get(name, name) != manifest.aliases.get(owner, owner):
            raise Mismatch(f"{where}: {name} and {owner} are one tensor here, but two in the checkpoint")
    for name, owner in manifest.aliases.items():
        apart = name in wanted and owner in wanted and tied.get(name, name) != tied.get(owner, owner)
        if strict and apart and wanted[name].local.numel():
            raise Mismatch(f"{where}: {name} and {owner} are one tensor in the checkpoint, but two here; tie them")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_newest(
    store: Store,
    tensors: Mapping[str, torch.Tensor | Piece],
    *,
    quarantine: Collection[str] = (),
    strict: bool = True,
    weights_only: bool = False,
    group: Group | None = None,
    attempt: int = 0,
) -> Loaded | None:
    """Load the newest honoured checkpoint that is whole; None if there is none at all. All ranks call this together.

    A damaged, unreadable or quarantined one, and one without a commit, is passed over with a loud note (a warning, and
    `fell_back`).
    CheckpointError if there are some but none can be loaded: never a silent start from nothing. Mismatch if the newest
    whole one does not fit. `attempt`: the caller's own number, if it has one, so that a listing from before its time is
    not believed.
    """
    group = group or Group.of(None, 0, 1, 60.0)
    found = group.share("catalogue", _candidates(store, quarantine, attempt) if group.rank == 0 else None)
    if "error" in found:
        raise CheckpointError(found["error"])
    notes, uncommitted = found["notes"], found["uncommitted"]
    for note in [*notes, *uncommitted]:
        log.warning(note)
    for step, epoch in found["commits"]:
        committed = Committed(step, epoch)
        try:
            loaded = load(store, committed, tensors, strict=strict, weights_only=weights_only, group=group)
        except Mismatch:
            raise  # an older one is of the same run, and would not fit either
        except (CheckpointError, StorageError) as error:
            notes.append(f"passed over the checkpoint of step {step} ({committed.key}): {error}")
            log.warning(notes[-1])
            continue
        lost = [f"the checkpoint of step {s}, epoch {e}, is listed but gone" for s, e in found["lost"] if s > step]
        for note in lost:
            log.warning(note)
        return replace(loaded, fell_back=[*lost, *uncommitted, *notes])
    if notes or found["lost"]:
        told = "; ".join([*notes, *(f"step {s}, epoch {e}, is listed but gone" for s, e in found["lost"])])
        raise CheckpointError(f"{store.url}: no checkpoint can be loaded: {told}")
    return None


def _candidates(store: Store, quarantine: Collection[str], attempt: int) -> dict[str, Any]:
    """What rank 0 tells the others: the commits to try, newest first; or why there is no telling."""
    try:
        catalogue, quarantine = read_catalogue(store, attempt), set(quarantine)
        passed_over = quarantined(store)
        uncommitted = _uncommitted(store, catalogue)
        marked = {c.key: standing(marks_on(store, c)).quarantined for c in catalogue.commits if c.key in passed_over}
    except (CheckpointError, StorageError) as error:
        return {"error": str(error)}
    commits = [[c.step, c.epoch] for c in reversed(catalogue.commits) if c.key not in quarantine | marked.keys()]
    lost = [[c.step, c.epoch] for c in catalogue.lost if c.key not in quarantine]
    passed = [
        f"passed over {c.key}: it is quarantined" + (f" ({marked[c.key]})" if c.key in marked else "")
        for c in catalogue.commits
        if c.key in quarantine | marked.keys()
    ]
    return {"commits": commits, "lost": lost, "notes": passed, "uncommitted": uncommitted}


def _uncommitted(store: Store, catalogue: Catalogue) -> list[str]:
    """A note for every save that was written after the newest commit and has none of its own. It cannot be told whether
    the save was cut off or somebody took its commit away, so nobody shall be surprised by an older step."""
    newest = max(catalogue.commits, default=Committed(0, 0))
    manifests = (entry.key for entry in store.list("steps") if entry.key.endswith("/manifest.json"))
    written = {save[0] for key in manifests if (save := parse_folder(key.rpartition("/")[0]))}
    late = sorted(each for each in written if each > newest and each not in catalogue.gone)
    void = {entry.key for entry in store.list("commits")} if late else set()
    return [
        f"step {each.step} was written by attempt {each.epoch} without a commit: its save has not ended, or {each.key} "
        "is gone"
        for each in late
        if each.key not in void
    ]
