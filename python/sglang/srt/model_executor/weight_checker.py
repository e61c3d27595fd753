"""Checks of the weights that trainers ask for: checksums, and comparison with a kept copy.

Owns the copy. Reads and overwrites parameters in place; whoever calls `reset_tensors` tells the
rest of the runner. Scheduler thread only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sglang.srt.distributed.communication import broadcast_bytes
from sglang.srt.distributed.parallel_state import TPGroup
from sglang.srt.layers.tensor_digest import digest_tensors
from sglang.srt.model_loader.weight_fingerprint import persistent_tensors

# Tables that follow from the configuration, wherever a model keeps them.
_DERIVED = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis")
_HASH_DIGITS = 16
# Largest difference, relative to the largest value, that requantising the same weights may make.
_QUANT_TOLERANCE = 0.1


class WeightChecker:
    """Over some models, by the prefix of their names: "" for the target, "draft." for a draft."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._snapshot: dict[str, torch.Tensor] | None = None

    def checksum(self, prefixes: Iterable[str]) -> dict[str, Any]:
        """`checksums` (name -> 16 hex digits) and `per_gpu_checksum` over all of them."""
        tensors = dict(self._tensors(self._chosen(prefixes)))
        digests = digest_tensors(list(tensors.values()))
        sums = {name: digest.hex()[:_HASH_DIGITS] for name, digest in zip(tensors, digests)}
        combined = hashlib.sha256()
        for name, value in sorted(sums.items()):
            combined.update(f"{name}{value}".encode())
        return {"checksums": sums, "per_gpu_checksum": combined.hexdigest()}

    def of_all_ranks(self, prefixes: Iterable[str], tp: TPGroup) -> dict[str, Any]:
        """`ranks` (the checksum of each) and `per_engine_checksum`, the same on all. Collective."""
        prefixes = list(prefixes)
        place = {"tp_rank": tp.rank, "tp_size": tp.size, "rank": tp.rank}
        alone = {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "size": tp.size}
        roles = [prefix.removesuffix(".") or "target" for prefix in prefixes]
        own = self.checksum(prefixes) | {
            "parallelism_info": [{"role": role, **place, **alone} for role in roles]
        }
        data = json.dumps(own).encode()
        ranks = [json.loads(broadcast_bytes(data, rank, tp.cpu_group)) for rank in range(tp.size)]
        combined = "".join(rank["per_gpu_checksum"] for rank in ranks)
        return {
            "ranks": ranks,
            "per_engine_checksum": hashlib.sha256(combined.encode()).hexdigest(),
        }

    def snapshot(self, prefixes: Iterable[str]) -> None:
        """Keep a copy of every tensor in host memory; an earlier one is dropped."""
        self._snapshot = {
            name: tensor.to("cpu", copy=True)
            for name, tensor in self._tensors(self._chosen(prefixes))
        }

    @torch.no_grad()
    def reset_tensors(self, prefixes: Iterable[str]) -> None:
        """Overwrite every tensor of the chosen models with random values, in place.

        What a draft shares with the target is the target's, and stays if that is not chosen.
        """
        chosen = self._chosen(prefixes)
        others = {} if "" in chosen else self._chosen([""])
        kept = {tensor.data_ptr() for _, tensor in self._tensors(others)}
        for _, tensor in self._tensors(chosen):
            if tensor.data_ptr() in kept:
                continue
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.zero_()

    def compare(
        self,
        prefixes: Iterable[str],
        skip: Iterable[str] = (),
        allow_quant_error: bool = False,
    ) -> list[str]:
        """What differs from the snapshot, one line a tensor: name and `max_abs_err`.

        `skip`: names, or parts of names, that may differ. Raises ValueError without a snapshot.
        """
        if self._snapshot is None:
            raise ValueError("there is no snapshot to compare with")
        skip = tuple(skip)
        differences = []
        for name, tensor in self._tensors(self._chosen(prefixes)):
            if any(part in name for part in skip):
                continue
            kept = self._snapshot.get(name)
            if kept is None or kept.shape != tensor.shape:
                differences.append(f"{name}: not in the snapshot in this shape")
                continue
            now = tensor.to("cpu")
            if torch.equal(now.reshape(-1).view(torch.uint8), kept.reshape(-1).view(torch.uint8)):
                continue
            error = (now.double() - kept.double()).abs().max().item()
            largest = kept.double().abs().max().item()
            if not (allow_quant_error and error <= _QUANT_TOLERANCE * largest):
                differences.append(f"{name}: max_abs_err={error:.6g}")
        return differences

    def _chosen(self, prefixes: Iterable[str]) -> dict[str, nn.Module]:
        return {prefix: self._models[prefix] for prefix in prefixes}

    @staticmethod
    def _tensors(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers under every name, tied ones once a model."""
        for prefix, model in models.items():
            seen: set[int] = set()
            for name, tensor in persistent_tensors(model).items():
                is_derived = any(part in name for part in _DERIVED)
                if tensor.is_meta or is_derived or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                yield prefix + name, tensor.detach()
