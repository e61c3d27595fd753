"""Replace weights of running models: from files, from a trainer's tensors, from its broadcasts.

Owns the order of one update (read, check, agree over the ranks, write in place, digest), the
trainers' groups, the session, and the knowledge whether the weights are mixed. A call is all or
nothing as far as it can be: nothing is written before every rank has read and checked everything.
Does not own requests and caches: the scheduler makes sure that no step is running and flushes.
Called on the scheduler thread; methods marked collective are called on all ranks of the model.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from sglang.srt.distributed.communication import all_reduce_min
from sglang.srt.distributed.parallel_state import TPGroup
from sglang.srt.layers.weight_slot import iterate_weight_slots
from sglang.srt.mem_cache.page_key import kv_namespace
from sglang.srt.model_executor.custom_weight_loader import (
    CustomLoader,
    import_custom_loader,
    resolve_custom_loader,
    run_custom_loader,
)
from sglang.srt.model_executor.decode_runner import DecodeRunner
from sglang.srt.model_executor.rank_agreement import RankAgreement
from sglang.srt.model_executor.weight_checker import WeightChecker
from sglang.srt.model_executor.weight_groups import UpdateTimeouts, WeightGroups
from sglang.srt.model_executor.weight_ipc import own_address, receive_over_ipc
from sglang.srt.model_executor.weight_names import (
    ALL,
    DRAFT,
    SELECTORS,
    TARGET,
    CheckpointNames,
    ModelNames,
    ParameterNames,
    assign,
    check_named_tensors,
    check_no_name_twice,
    declared_tensors,
    first_names,
    pairs_of,
    with_likely_sizes,
)
from sglang.srt.model_executor.weight_receive import TensorSpec
from sglang.srt.model_loader.loader import fill_with_dummy_weights
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint, persistent_tensors
from sglang.srt.model_loader.weight_utils import Checkpoint, open_checkpoint
from sglang.srt.models.base import LanguageModel
from sglang.srt.platforms import current_platform
from sglang.srt.utils.attempt import AttemptState
from sglang.srt.utils.serialization import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import (
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    LocalSerializedTensor,
)

logger = logging.getLogger(__name__)

NamedTensors = list[tuple[str, torch.Tensor]]


class UpdatableRunner(Protocol):
    """What a model runner offers to updates."""

    @property
    def model(self) -> LanguageModel: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tp(self) -> TPGroup: ...

    @property
    def fingerprint(self) -> WeightsFingerprint: ...

    @property
    def decode_runner(self) -> DecodeRunner | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateResult:
    """The outcome of a call, the same on every rank but for `changed`."""

    success: bool
    message: str
    # The models now hold tensors of two versions; until a complete update nothing should be served.
    weights_mixed: bool = False
    mixed_tensors: str = ""  # which
    # "target", "draft" or "draft.<i>" -> parameters that were written, shared ones included. Their
    # fingerprints are up to date. Not empty after a failure: a rollback or a partial write.
    changed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    checksum: Mapping[str, Any] | None = None  # of the weights checker


@dataclass(slots=True)
class _Role:
    """One model: its name here, its runner, and the tensors that are still of an older version."""

    name: str
    runner: UpdatableRunner
    outdated: set[str] = field(default_factory=set)  # checkpoint names; empty: not mixed


class _Written(NamedTuple):
    """What a write has done to one model."""

    names: set[str]  # of the checkpoint's tensors
    storages: set[int]


@dataclass(frozen=True, slots=True)
class _Write:
    """Work that remains once everything is checked."""

    role: _Role
    names: Collection[str]  # of the tensors
    run: Callable[[], _Written]


class WeightUpdater:
    """See the module docstring."""

    def __init__(
        self,
        target: UpdatableRunner,
        drafts: Sequence[UpdatableRunner] = (),
        *,
        model_path: str,
        load_format: str = "auto",
        custom_weight_loaders: Sequence[str] = (),
        timeouts: UpdateTimeouts | None = None,
    ) -> None:
        """`model_path` and `load_format`: where the target's weights come from at start.

        Raises ValueError for a custom loader that cannot be imported.
        """
        self.model_path = model_path
        self.load_format = load_format
        self._tp = target.tp
        self._ranks = RankAgreement(target.tp)
        self._device = target.device
        self._timeouts = timeouts or UpdateTimeouts()
        names = [DRAFT] if len(drafts) == 1 else [f"{DRAFT}.{i}" for i in range(len(drafts))]
        self._target = _Role(TARGET, target)
        self._drafts = [_Role(name, runner) for name, runner in zip(names, drafts)]
        self._roles = [self._target, *self._drafts]
        self._custom_loaders = tuple(custom_weight_loaders)
        for loader in self._custom_loaders:
            import_custom_loader(loader)
        self._groups = WeightGroups(self._tp.rank, self._device, self._timeouts)
        # Groups that are being joined, and who wants to know; the same on all ranks.
        self._joining: dict[str, Callable[[WeightUpdateResult], None]] = {}
        self._checker = WeightChecker({_prefix(role): role.runner.model for role in self._roles})
        self._session: str | None = None  # selector of the open session
        self._written_in_session: dict[str, set[str]] = {}  # by role; checkpoint names
        self._files_are_current = True  # no tensors came since the files of `model_path` were read

    @property
    def weights_mixed(self) -> bool:
        """Whether an update failed after it had begun to write, and no complete one followed."""
        return any(role.outdated for role in self._roles)

    def describe_mixed(self) -> str:
        """Which models lack which tensors since an update that was not complete; "": none."""
        parts = []
        for role in self._roles:
            if role.outdated:
                num_all = len(role.runner.model.weight_table())
                parts.append(
                    f"the {role.name} lacks {len(role.outdated)} of {num_all} tensors "
                    f"({first_names(sorted(role.outdated))})"
                )
        return "; ".join(parts)

    def kv_fingerprint(self) -> str:
        """Identity of what cached KV is a function of, beside the tokens: all models' weights."""
        drafts = [role.runner.fingerprint.digest() for role in self._drafts]
        return kv_namespace(self._target.runner.fingerprint.digest(), drafts)

    def wait_for_all_ranks(self) -> None:
        """Return when every rank is here. Collective."""
        self._ranks.wait_for_all()

    def agree(self, action: Callable[[], object]) -> str | None:
        """Run `action` on every rank; None, or the error of the first that had one. Collective."""
        return self._ranks.attempt(action)

    def weights_lost(self, is_kept: Callable[[LanguageModel], bool]) -> None:
        """The memory of the weights came back empty: all are mixed until sent anew. Collective.

        `is_kept`: whether a model's own content was restored.
        """
        for role in self._roles:
            if not is_kept(role.runner.model):
                role.outdated = set(role.runner.model.weight_table())
                self._files_are_current = False
        self._refresh(None)

    # -- sessions and groups ----------------------------------------------------------------------

    def begin(self, selector: str = ALL) -> WeightUpdateResult:
        """Open a session: the calls until `end` are one update. Collective."""
        if self._session is not None:
            return self._failure("begin_weight_update() was called already, end it first")
        if selector not in SELECTORS:
            return self._failure(f"selector must be one of {', '.join(SELECTORS)}")
        self._session = selector
        self._written_in_session = {}
        self._ranks.wait_for_all()
        return self._success("Success")

    def end(self) -> WeightUpdateResult:
        """Close the session. Collective."""
        if self._session is None:
            return self._failure("end_weight_update() needs begin_weight_update() first")
        self._session = None
        self._written_in_session = {}
        self._ranks.wait_for_all()
        mixed = self.describe_mixed()
        return self._success(f"Success, but for what failed: {mixed}." if mixed else "Success")

    def init_group(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        *,
        on_end: Callable[[WeightUpdateResult], None],
    ) -> None:
        """Begin to join a trainer's group; `poll_groups` goes on. Collective.

        `on_end` is called once: with a refusal before this returns, else when the group is open or
        cannot be.
        """
        if group_name in self._joining:
            on_end(self._failure(f"Group {group_name} is being opened already."))
            return
        place = (master_address, master_port, rank_offset, world_size, group_name, backend)
        self._joining[group_name] = on_end
        error = self._ranks.attempt(lambda: self._groups.start_joining(*place))
        if error is not None:
            self._end_joining(group_name, error)

    def poll_groups(self) -> None:
        """End the joins that all ranks have finished, or one could not. Collective, once a loop."""
        if not self._joining:
            return
        states = list(self._groups.join_states.items())
        least = all_reduce_min(torch.tensor([state for _, state in states]), self._tp.cpu_group)
        for (name, _), state in zip(states, least.tolist()):
            if state != AttemptState.PENDING:
                attempt = functools.partial(self._groups.finish_joining, name)
                error = self._ranks.attempt(attempt)
                if state == AttemptState.FAILED and error is None:
                    # It ended on the rank that was late, but nobody waits for the others any more.
                    error = "the time is up"
                self._end_joining(name, error)

    def _end_joining(self, group_name: str, error: str | None) -> None:
        if error is None:
            result = self._success("Succeeded to initialize custom process group.")
        else:
            self._groups.stop_joining(group_name)  # another rank may have joined
            result = self._failure(_sentence(f"Failed to initialize custom process group: {error}"))
        self._joining.pop(group_name)(result)

    def destroy_group(self, group_name: str) -> WeightUpdateResult:
        """Leave a trainer's group, or stop joining it. Collective."""
        if group_name in self._joining:
            self._end_joining(group_name, "it was destroyed before all members were there")
            return self._success("Succeeded to destroy custom process group.")
        error = self._ranks.attempt(lambda: self._groups.leave(group_name))
        if error is not None:
            return self._failure(error)
        return self._success("Succeeded to destroy custom process group.")

    # -- updates ----------------------------------------------------------------------------------

    def update_from_tensor(
        self,
        serialized_named_tensors: Sequence[str | bytes],
        load_format: str | None = None,
        selector: str = ALL,
    ) -> WeightUpdateResult:
        """Load what `MultiprocessingSerializer` wrote; this rank reads its own entry. Collective.

        `load_format`: None (checkpoint names), "direct" (own parameters), "flattened_bucket", or
        the dotted name of a custom loader.
        """

        def prepare() -> list[_Write]:
            if self._tp.rank >= len(serialized_named_tensors):
                raise ValueError(
                    f"{len(serialized_named_tensors)} serialized entries came, "
                    f"there is none for rank {self._tp.rank}"
                )
            data = MultiprocessingSerializer.deserialize(serialized_named_tensors[self._tp.rank])
            named = self._unpack(data, load_format)
            if load_format in (None, "flattened_bucket"):
                return self._plan(named, selector, CheckpointNames)
            if load_format == "direct":
                return self._plan(named, selector, ParameterNames)
            return self._plan_custom(load_format, named, selector)

        return self._update(prepare, "Failed to update weights from tensor: {}", "Success")

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        selector: str = ALL,
    ) -> WeightUpdateResult:
        """Receive full tensors under checkpoint names from rank 0 of a group. Collective.

        `load_format`: None (one broadcast a tensor) or "flattened_bucket" (one for all). A failure
        to receive closes the group: the trainer must not be left waiting in its broadcasts.
        """
        received: NamedTensors = []
        error = self._receive_or_close(received, names, dtypes, shapes, group_name, load_format)
        if error is not None:
            return self._refused(error)
        return self._update(
            lambda: self._plan(received, selector, CheckpointNames),
            "Failed to update parameter online: {}",
            "Succeeded to update parameter online.",
        )

    def discard_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> str | None:
        """Take what `update_from_distributed` would receive, and forget it. Collective.

        The error where that failed and the group was closed.
        """
        return self._receive_or_close([], names, dtypes, shapes, group_name, load_format)

    def update_from_disk(
        self, model_path: str, load_format: str | None = None
    ) -> WeightUpdateResult:
        """Load a complete checkpoint; a draft takes what is its own of it. Collective.

        A checkpoint that does not fit is refused untouched; files that turn out damaged half-way
        are followed by the old files again.
        """
        load_format = load_format or "auto"
        writes: list[_Write] = []
        opened: list[Checkpoint] = []
        error = self._ranks.attempt(lambda: opened.append(open_checkpoint(model_path, load_format)))
        if error is not None:
            return self._failure(f"Failed to get weights iterator: {error}")
        error = self._ranks.attempt(lambda: writes.extend(self._plan_files(opened[0])))
        if error is not None:
            return self._failure(
                f"Failed to update weights: {error}\nRolling back to original weights."
            )
        were_current = self._files_are_current
        result = self._update(
            lambda: writes,
            "Failed to update weights: {}\nRolling back to original weights.",
            "Succeeded to update model weights.",
        )
        if not result.success:
            return self._roll_back(result, were_current) if result.changed else result
        self.model_path, self.load_format = model_path, load_format
        self._files_are_current = True
        return result

    def update_from_ipc(self, zmq_handles: Mapping[str, str]) -> WeightUpdateResult:
        """Load what a checkpoint engine on this host sends each rank over zmq. Collective.

        Written as it comes, so a failure after the first bucket leaves the weights mixed.
        """
        addresses: list[str] = []
        error = self._ranks.attempt(
            lambda: addresses.append(own_address(zmq_handles, self._device, self._tp.rank))
        )
        if error is not None:
            return self._failure(f"Failed to update weights: {error}")
        done: list[tuple[_Role, _Written]] = []
        is_touched = False

        def load(named: NamedTensors) -> None:
            nonlocal is_touched
            for write in self._plan(named, ALL, CheckpointNames):
                is_touched = True
                done.append((write.role, write.run()))
            current_platform().synchronize()

        error = self._ranks.attempt(
            lambda: receive_over_ipc(addresses[0], self._device, load, self._timeouts.receive_s)
        )
        if error is None:
            self._files_are_current = False
            changed = self._refresh(self._note_written(done))
            return self._success("Succeeded to update model weights.", changed)
        # One rank may have written what another has not.
        if not self._ranks.is_anywhere(is_touched):
            return self._failure(f"Failed to update weights: {error}")
        return self._broken_off(f"Failed to update weights: {error}", self._roles)

    # -- reading ----------------------------------------------------------------------------------

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any] | None:
        """First rows of a tensor of the target as nested lists of floats; None: no such tensor.

        `name`: of the checkpoint or of a parameter. Tensors split by columns come whole, others as
        rank 0 has them. Collective.
        """
        model = self._target.runner.model
        slot = dict(iterate_weight_slots(model)).get(name)
        if slot is None or slot.shard_dim != 1 or self._tp.cpu_group is None:
            return model.get_weights_by_name(name, truncate_size)
        part = slot.view()[:truncate_size].float().cpu().contiguous()
        parts = [torch.empty_like(part) for _ in range(self._tp.size)]
        torch.distributed.all_gather(parts, part, group=self._tp.cpu_group)
        rows: list[Any] = torch.cat(parts, dim=1).tolist()
        return rows

    def check_weights(
        self,
        action: str = "checksum",
        *,
        allow_quant_error: bool = False,
        skip_tensor_list: Sequence[str] | None = None,
        selector: str = ALL,
    ) -> WeightUpdateResult:
        """The weights checker: checksum, snapshot, reset_tensors or compare. Collective.

        After reset_tensors the weights are mixed until all have been sent.
        """
        if selector not in SELECTORS:
            return self._failure(f"selector must be one of {', '.join(SELECTORS)}")
        chosen = [role for role in self._roles if _is_selected(role, selector)]
        if action == "checksum":
            return self._success(
                "Success", checksum=self._checker.of_all_ranks(map(_prefix, chosen), self._tp)
            )
        if action == "snapshot":
            error = self._ranks.attempt(lambda: self._checker.snapshot(map(_prefix, chosen)))
            return self._success("Success") if error is None else self._failure(error)
        if action == "reset_tensors":
            return self._reset_tensors(chosen)
        if action != "compare":
            return self._failure(f"Unsupported action {action!r} of the weights checker")

        def compare() -> None:
            prefixes, skip = map(_prefix, chosen), skip_tensor_list or ()
            differences = self._checker.compare(prefixes, skip, allow_quant_error)
            if differences:
                raise ValueError(f"{len(differences)} tensors differ: {'; '.join(differences)}")

        error = self._ranks.attempt(compare)
        return self._success("Success") if error is None else self._failure(error)

    def _reset_tensors(self, chosen: Sequence[_Role]) -> WeightUpdateResult:
        error = self._ranks.attempt(lambda: self._checker.reset_tensors(map(_prefix, chosen)))
        for role in chosen:
            role.outdated = set(role.runner.model.weight_table())
        self._files_are_current = False
        changed = self._refresh(None)
        return self._success("Success", changed) if error is None else self._failure(error, changed)

    # -- one update -------------------------------------------------------------------------------

    def _update(
        self, prepare: Callable[[], list[_Write]], failure: str, success: str
    ) -> WeightUpdateResult:
        """Prepare on all ranks, then write on all ranks, then digest what was written."""
        writes: list[_Write] = []
        error = self._ranks.attempt(lambda: writes.extend(prepare()))
        names = json.dumps([(each.role.name, sorted(each.names)) for each in writes])
        if error is None and not self._ranks.is_alike(names):
            error = "the ranks were sent tensors of different names"
        if error is not None:
            return self._refused(failure.format(error))
        done: list[tuple[_Role, _Written]] = []

        def write() -> None:
            done.extend((each.role, each.run()) for each in writes)

        error = self._ranks.attempt(write)
        if error is not None:
            return self._broken_off(failure.format(error), [each.role for each in writes])
        storages = self._note_written(done)
        self._files_are_current = self._files_are_current and not storages
        # The device still copies while the digests are prepared.
        changed = self._refresh(storages)
        # Senders reuse their buffers as soon as they have the reply.
        current_platform().synchronize()
        return self._success(success, changed)

    def _note_written(self, done: Sequence[tuple[_Role, _Written]]) -> set[int]:
        """Remember what all ranks have written; the storages of it."""
        storages: set[int] = set()
        for role, written in done:
            role.outdated -= written.names
            if self._session is not None:
                self._written_in_session.setdefault(role.name, set()).update(written.names)
            storages |= written.storages
        return storages

    def _refused(self, message: str) -> WeightUpdateResult:
        """A call that wrote nothing failed; in a session, earlier calls have written."""
        for role in self._roles:
            written = self._written_in_session.get(role.name)
            if written is not None:
                role.outdated = set(role.runner.model.weight_table()) - written
        return self._failure(message)

    def _broken_off(self, message: str, roles: Sequence[_Role]) -> WeightUpdateResult:
        """Writing to `roles` failed on some rank, somewhere: their digests tell what it did.

        Of a model that is not what it was, any tensor may be of either version. Collective.
        """
        changed = self._refresh(None)
        if not changed:
            return self._refused(f"{_sentence(message)} The weights are as before.")
        for role in roles:
            if role.name in changed:
                role.outdated = set(role.runner.model.weight_table())
        self._files_are_current = False
        return self._failure(
            f"{_sentence(message)} The weights are partially updated, discard the whole weights.",
            changed,
        )

    def _plan(
        self,
        named: NamedTensors,
        selector: str,
        names_of: Callable[[LanguageModel], ModelNames],
    ) -> list[_Write]:
        """Check everything; the writes that remain to be done."""
        check_no_name_twice(named)
        names = [names_of(role.runner.model) for role in self._roles]
        if names_of is ParameterNames and len(self._drafts) > 1:
            # Drafts of several layers are models of one kind, whose parameters are called alike.
            names[1:] = [ParameterNames(r.runner.model, f"{r.name}.") for r in self._drafts]
        parts = assign(named, selector, names[0], names[1:])
        writes: list[_Write] = []
        for role, space, part in zip(self._roles, names, parts):
            if part:
                space.check(part)
                run = functools.partial(self._write, space, part)
                writes.append(_Write(role, [name for name, _ in part], run))
        return writes

    @staticmethod
    def _write(names: ModelNames, named: NamedTensors) -> _Written:
        written = names.write(named)
        storages = {_storage(names.target_of(name)) for name in written}
        return _Written(names.in_checkpoint(written), storages)

    def _plan_custom(self, loader_name: str, named: NamedTensors, selector: str) -> list[_Write]:
        loader = resolve_custom_loader(loader_name, self._custom_loaders)
        if selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}")
        if selector == DRAFT and len(self._drafts) > 1:
            raise ValueError(
                f"the loader writes to one model, the draft has {len(self._drafts)}: send the "
                "tensors under their names in the files"
            )
        # The function knows one kind of model; the draft is asked for by name.
        roles = self._drafts if selector == DRAFT else [self._target]
        names = [name for name, _ in named]
        return [
            _Write(role, names, functools.partial(self._run_custom, loader, role, named))
            for role in roles
        ]

    @staticmethod
    def _run_custom(loader: CustomLoader, role: _Role, named: NamedTensors) -> _Written:
        model = role.runner.model
        run_custom_loader(loader, model, named)
        # The names are the loader's business: of the checkpoint, or of parameters.
        names = {name for name, _ in named}
        spaces = (CheckpointNames(model), ParameterNames(model))
        written = set[str]().union(*(space.in_checkpoint(names) for space in spaces))
        return _Written(written, {_storage(each) for each in persistent_tensors(model).values()})

    def _unpack(self, data: Any, load_format: str | None) -> NamedTensors:
        """Named tensors of a deserialised payload."""
        if load_format == "flattened_bucket":
            if not isinstance(data, dict) or not {"flattened_tensor", "metadata"} <= data.keys():
                raise ValueError("a bucket must be a dict of flattened_tensor and metadata")
            metadata = data["metadata"]
            if not all(isinstance(meta, FlattenedTensorMetadata) for meta in metadata):
                raise ValueError("the metadata of a bucket must be FlattenedTensorMetadata")
            bucket = FlattenedTensorBucket(
                flattened_tensor=data["flattened_tensor"], metadata=metadata
            )
            return bucket.reconstruct_tensors()
        named = [
            (name, value.get(self._tp.rank) if isinstance(value, LocalSerializedTensor) else value)
            for name, value in pairs_of(data)
        ]
        return check_named_tensors(named)

    def _receive_or_close(self, received: NamedTensors, *what: Any) -> str | None:
        """Add to `received`; None, or the error, the group being closed on all ranks. Collective.

        `what`: the arguments of `_receive`.
        """
        group_name = what[3]
        was_open = group_name in self._groups
        error = self._ranks.attempt(lambda: received.extend(self._receive(*what)))
        if error is None:
            return None
        self._groups.abandon(group_name)
        closed = f"; group {group_name} was closed, open it again" if was_open else ""
        return _sentence(f"Failed to receive weights: {error.removesuffix('.')}{closed}")

    def _receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None,
    ) -> NamedTensors:
        specs = declared_tensors(names, dtypes, shapes)
        if load_format not in (None, "flattened_bucket"):
            raise ValueError(f"Unknown load_format={load_format}")
        if not specs:
            self._groups.device_of(group_name)
            return []  # a trainer has nothing to broadcast then
        if self._groups.device_of(group_name).type == "cpu":
            models = [CheckpointNames(role.runner.model) for role in self._roles]
            specs = with_likely_sizes(specs, models)
        if load_format is None:
            return list(zip(names, self._groups.receive(group_name, specs)))
        types = [spec.dtype for spec in specs]
        bucket = FlattenedTensorBucket.empty(names, types, shapes, torch.device("meta"))
        num_bytes = tuple(bucket.get_flattened_tensor().shape)
        likely = sum(spec.likely_bytes for spec in specs)
        whole = TensorSpec("the bucket", torch.uint8, num_bytes, likely)
        [flat] = self._groups.receive(group_name, [whole])
        return FlattenedTensorBucket(
            flattened_tensor=flat, metadata=bucket.get_metadata()
        ).reconstruct_tensors()

    # -- files ------------------------------------------------------------------------------------

    def _plan_files(self, checkpoint: Checkpoint) -> list[_Write]:
        """Raise WeightLoadError unless the target finds all its tensors, and no foreign ones."""
        names = [CheckpointNames(role.runner.model) for role in self._roles]
        parts = assign(list(checkpoint.tensor_infos()), ALL, names[0], names[1:])
        source = f"the checkpoint {checkpoint.path}"
        writes = []
        for role, space, part in zip(self._roles, names, parts):
            if not part and role is not self._target:
                continue
            space.problems(part, complete=role is self._target).raise_if_any(source)
            wanted = frozenset(name for name, _ in part)
            load = functools.partial(self._load_files, space, checkpoint, wanted)
            writes.append(_Write(role, wanted, load))
        return writes

    @staticmethod
    def _load_files(
        names: CheckpointNames, checkpoint: Checkpoint, wanted: frozenset[str]
    ) -> _Written:
        written = names.write(checkpoint.tensors(wanted.__contains__))
        return _Written(written, {_storage(names.target_of(name)) for name in written})

    def _roll_back(self, failed: WeightUpdateResult, were_current: bool) -> WeightUpdateResult:
        """Load the old files again after writing failed half-way."""
        error = self._ranks.attempt(self._load_old_files)
        changed = {**failed.changed, **self._refresh(None)}
        if error is not None:
            for role in self._roles:
                role.outdated = set(role.runner.model.weight_table())
            return self._failure(f"{failed.message} The old files failed, too: {error}", changed)
        self._files_are_current = True
        lost = "" if were_current else " Tensors received after those files are lost."
        return self._failure(f"{failed.message} Restored from {self.model_path}.{lost}", changed)

    def _load_old_files(self) -> None:
        if self.load_format == "dummy":
            fill_with_dummy_weights(self._target.runner.model)
            self._target.outdated.clear()
        else:
            old_files = open_checkpoint(self.model_path, self.load_format)
            self._note_written([(each.role, each.run()) for each in self._plan_files(old_files)])
        current_platform().synchronize()

    # -- digests, results -------------------------------------------------------------------------

    def _refresh(self, storages: set[int] | None) -> dict[str, frozenset[str]]:
        """Bring digests and decode shortcuts up to date; what changed, by role. Collective.

        `storages` None: anything may have been written, which the digests of the models tell.
        """
        changed: dict[str, frozenset[str]] = {}
        for role in self._roles:
            runner = role.runner
            tensors = persistent_tensors(runner.model)
            names = frozenset(
                name
                for name, tensor in tensors.items()
                if not tensor.is_meta and (storages is None or _storage(tensor) in storages)
            )
            before = runner.fingerprint.digest()
            is_other = runner.fingerprint.update(names) != before
            if names and (is_other or storages is not None):
                changed[role.name] = names
                if runner.decode_runner is not None:
                    runner.decode_runner.weights_changed()
        return changed

    def _success(
        self,
        message: str,
        changed: Mapping[str, frozenset[str]] | None = None,
        checksum: Mapping[str, Any] | None = None,
    ) -> WeightUpdateResult:
        return WeightUpdateResult(
            success=True,
            message=message,
            weights_mixed=self.weights_mixed,
            mixed_tensors=self.describe_mixed(),
            changed=changed or {},
            checksum=checksum,
        )

    def _failure(
        self, message: str, changed: Mapping[str, frozenset[str]] | None = None
    ) -> WeightUpdateResult:
        return WeightUpdateResult(
            success=False,
            message=message,
            weights_mixed=self.weights_mixed,
            mixed_tensors=self.describe_mixed(),
            changed=changed or {},
        )


def _sentence(text: str) -> str:
    return f"{text.rstrip('.')}."


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _prefix(role: _Role) -> str:
    """Of the names of a model's tensors, where those of all are told apart."""
    return "" if role.name == TARGET else f"{role.name}."


def _is_selected(role: _Role, selector: str) -> bool:
    return selector == ALL or (role.name == TARGET) == (selector == TARGET)
