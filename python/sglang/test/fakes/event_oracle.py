"""A subscriber inside the process: what its events say of a tree, compared with the tree."""

from __future__ import annotations

import msgspec

from sglang.srt.mem_cache.component_tree import ComponentTree
from sglang.srt.mem_cache.events import (
    AllBlocksCleared,
    BlockStored,
    KVEvent,
    KVEventBatch,
    StorageMedium,
    block_hash,
)


class EventOracle:
    """Fed by ``follow`` with all events of one tree since it was made."""

    def __init__(self, tree: ComponentTree) -> None:
        self._tree = tree
        self.held: dict[StorageMedium, set[int]] = {medium: set() for medium in StorageMedium}
        self._blocks: dict[int, BlockStored] = {}
        # What subscribers know a block by -> its hash; since the last clearing.
        self._names: dict[tuple[int | None, tuple[int, ...], str | None], int] = {}

    def follow(self) -> None:
        """Take in what is new, through the bytes that a subscriber gets, and compare."""
        batch = KVEventBatch(0.0, self._tree.take_events(), 0)
        for event in msgspec.msgpack.decode(
            msgspec.msgpack.encode(batch), type=KVEventBatch
        ).events:
            self._apply(event)
        self.check()

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            for held in self.held.values():
                held.clear()
            self._names.clear()
        elif isinstance(event, BlockStored):
            (block,) = event.block_hashes
            assert block not in self.held[event.medium], "a block came twice"
            before = event.parent_block_hash
            assert before is None or before in self._blocks, "a parent that was never told of"
            self.held[event.medium].add(block)
            name = (before, tuple(event.token_ids), event.cache_salt)
            assert self._names.setdefault(name, block) == block, "one block under two hashes"
            self._blocks[block] = event
        else:
            gone = set(event.block_hashes)
            assert gone <= self.held[event.medium], "a block left that had not come"
            self.held[event.medium] -= gone

    def check(self) -> None:
        """Assert that the events told exactly what a request of now could find."""
        tree, on_device, on_host, maybe_on_host = self._tree, set(), set(), set()
        for node in tree.iter_nodes():
            if node.key.weights_fingerprint != tree.weights_fingerprint:
                continue
            hashes = [block_hash(page_hash) for page_hash in tree.event_hashes(node)]
            if not node.evicted:
                on_device.update(hashes)
            if node.backuped:
                maybe_on_host.update(hashes)
                if node.write_through_pending_id is None:
                    on_host.update(hashes)
            tokens = node.key.token_ids.tolist()
            for index, block in enumerate(hashes):
                start = index * tree.page_size
                if block in self._blocks:
                    expected = tokens[start : start + tree.page_size]
                    assert self._blocks[block].token_ids == expected
        assert self.held[StorageMedium.GPU] == on_device
        # A copy under way may be there already, of earlier, or be told of when it ends.
        assert on_host <= self.held[StorageMedium.CPU] <= maybe_on_host
