"""The identity of a model's weights: a 128-bit digest of their content.

KV is a function of tokens and weights, so this digest is part of every cache key: after an update
old entries can only miss, and the same weights are recognised again after a restart or after
switching back. Owns the digest of each tensor, so that an update that changed few tensors reads
only those. Does not know when weights change: `model_executor` tells. Scheduler thread only.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from sglang.srt.layers.shard_digest import shard_sums
from sglang.srt.layers.tensor_digest import DIGEST_BYTES, digest_tensors
from sglang.srt.layers.weight_slot import iterate_weight_slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One storage: the first of its names in sorted order, and the tensor as it was digested."""

    name: str
    tensor: torch.Tensor
    digest: bytes

    def identity(self) -> bytes:
        """Name, dtype, shape and content in 32 bytes."""
        facts = f"{self.name}\0{self.tensor.dtype}\0{tuple(self.tensor.shape)}\0"
        return hashlib.sha256(facts.encode() + self.digest).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlotSums:
    """This rank's share of a checkpoint tensor's digest."""

    facts: str  # dtype and whole shape
    is_split: bool
    sums: torch.Tensor  # int64 [2]


class WeightsFingerprint:
    """Digest of one rank's parameters and persistent buffers, combined over the ranks.

    Depends on how the ranks share the weights, unless it is `portable`: then it is that of the
    checkpoint tensors in the model's dtype, the same for every number of ranks, and takes several
    times longer.

    Tied tensors (several names of one storage) count once. Tables that follow from the
    configuration, such as the rotary ones, are not persistent and do not count.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, portable: bool = False) -> None:
        """`group`: the host group of the ranks that share the model; None for one rank."""
        self._group = group
        self._portable = portable
        self._sums: dict[str, _SlotSums] = {}  # by checkpoint name
        self._model: nn.Module | None = None
        self._entries: dict[str, _Entry] = {}
        self._name_of: dict[str, str] = {}  # every name -> the name that its storage counts under
        self._digest = ""
        self.num_bytes = 0  # that the last computation read on this rank
        self.seconds = 0.0  # that the last computation took, without the exchange between ranks

    def full(self, model: nn.Module) -> str:
        """Digest every tensor of `model` and remember the model. Collective."""
        self._model = model
        self._entries = {}
        return self._refresh(set())

    def update(self, names: Iterable[str]) -> str:
        """Digest anew the tensors that were written. Collective, whatever `names` holds.

        `names` are those of the module tree (`model.named_parameters()`), any name of a tied
        tensor. Tensors that were added or rebound since are found without being named. Raises
        ValueError for an unknown name, RuntimeError before `full`.
        """
        return self._refresh(set(names))

    def digest(self) -> str:
        """32 hex digits, the same on every rank. RuntimeError before `full`."""
        if not self._digest:
            raise RuntimeError("the weights have not been digested yet")
        return self._digest

    def _refresh(self, changed: set[str]) -> str:
        if self._model is None:
            raise RuntimeError("update() before full()")
        start = time.perf_counter()
        tensors, self._name_of = _unique_tensors(self._model)
        unknown = sorted(changed - self._name_of.keys())
        if unknown:
            raise ValueError(f"no such tensors in the model: {', '.join(unknown)}")
        stale = {self._name_of[name] for name in changed}
        wanted = {
            name: tensor
            for name, tensor in tensors.items()
            if name in stale or not _is_known(self._entries.get(name), tensor)
        }
        digests = dict(zip(wanted, digest_tensors(list(wanted.values()))))
        self._entries = {
            name: _Entry(
                name=name,
                tensor=tensor,
                digest=digests[name] if name in digests else self._entries[name].digest,
            )
            for name, tensor in tensors.items()
        }
        self.num_bytes = sum(tensor.nbytes for tensor in wanted.values())
        self.seconds = time.perf_counter() - start
        if self._portable:
            self._sum_slots(list(wanted.values()))
            self._digest = self._combine_slots()
        else:
            self._digest = self._combine()
        logger.info(
            "weights fingerprint %s: read %d of %d tensors, %.3f GB in %.1f ms (%.1f GB/s)",
            self._digest,
            len(wanted),
            len(tensors),
            self.num_bytes / 1e9,
            self.seconds * 1e3,
            self.num_bytes / 1e9 / max(self.seconds, 1e-9),
        )
        return self._digest

    def _combine(self) -> str:
        own = hashlib.sha256(b"".join(entry.identity() for entry in self._entries.values()))
        mine = own.digest()[:DIGEST_BYTES]
        parts = [mine]
        if self._group is not None:
            tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(gathered, tensor, group=self._group)
            parts = [part.numpy().tobytes() for part in gathered]
        return hashlib.sha256(b"".join(parts)).hexdigest()[: 2 * DIGEST_BYTES]

    def _sum_slots(self, changed: list[torch.Tensor]) -> None:
        """Sum the checkpoint tensors whose place is in one of these parameters."""
        assert self._model is not None
        starts = {tensor.untyped_storage().data_ptr() for tensor in changed}
        slots = dict(iterate_weight_slots(self._model))
        self._sums = {name: sums for name, sums in self._sums.items() if name in slots}
        for name, slot in slots.items():
            target = slot.target
            if target.is_meta:
                continue
            if name not in self._sums or target.untyped_storage().data_ptr() in starts:
                self._sums[name] = _SlotSums(
                    facts=f"{target.dtype}\0{tuple(slot.full_shape)}",
                    is_split=slot.shard_dim is not None,
                    sums=shard_sums(slot),
                )

    def _combine_slots(self) -> str:
        """Digest of all checkpoint tensors; those that are split add up over the ranks."""
        names = sorted(self._sums)
        entries = [self._sums[name] for name in names]
        sums = torch.stack([entry.sums for entry in entries]).cpu()  # [names, 2]
        if self._group is not None:
            is_split = torch.tensor([entry.is_split for entry in entries]).unsqueeze(1)
            added = torch.where(is_split, sums, 0)
            dist.all_reduce(added, group=self._group)
            sums = torch.where(is_split, added, sums)
        digest = hashlib.sha256()
        for name, entry, row in zip(names, entries, sums.tolist()):
            digest.update(f"{name}\0{entry.facts}\0{row[0]}\0{row[1]}\0".encode())
        return digest.hexdigest()[: 2 * DIGEST_BYTES]


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name they have: `state_dict`, ten times faster."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                found[start + name] = tensor
    return found


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies and in which form; equal only for the same elements."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _is_known(entry: _Entry | None, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is, by place and form, the one that `entry` was made from."""
    return entry is not None and place_of(entry.tensor) == place_of(tensor)


def _unique_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name, sorted, each storage once; and every name -> the name it counts under."""
    tensors: dict[str, torch.Tensor] = {}
    name_of: dict[str, str] = {}
    first_at: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(persistent_tensors(model).items()):
        if tensor.is_meta:
            continue  # a draft's parameter that will be replaced by its target's
        # Empty tensors have no place of their own.
        key = place_of(tensor) if tensor.numel() else (name,)
        first = first_at.setdefault(key, name)
        name_of[name] = first
        tensors.setdefault(first, tensor.detach())
    return tensors, name_of
