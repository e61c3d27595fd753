"""Drafts without a model: a trie of what was generated lately, looked up by the last tokens.

`NgramCache` owns the trie and the tokens of every request that it knows. Pure Python on the host;
the NGRAM worker calls it on the scheduler thread. Ranks that make the same calls hold the same
trie and propose the same drafts.

The trie holds every run of up to `max_trie_depth` tokens of every sequence, how often it came
(`freq`), and for each run what followed, latest last. Two things make a step cheap:

* A sequence remembers the node of each of its suffixes. A new token moves each of these nodes one
  edge down, which at once inserts all new runs and finds all matches.
* A run that came once is a leaf, which points into the tokens of the sequence where it came: what
  follows is read there. It gets children of its own when it comes again. So novel text costs a
  few nodes a token, not one for each length.

The least recently used leaf goes first when there are too many nodes, or too many tokens that only
leaves still refer to.

Nodes are numbers, their fields columns of integers: millions of objects would stop the server
whenever the garbage collector walks over them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, islice
from operator import itemgetter
from pathlib import Path

import numpy as np

NO_NODE = -1
# Hangs, as often as necessary, on the root of a tree that has too few nodes.
PADDING_TOKEN = 0
# Continuations of a node among which PROB looks for the most frequent: the latest so many. Common
# tokens have thousands, and the frequent ones are always among the late ones.
MAX_FAN_OUT = 256


class MatchType(Enum):
    """Which continuations come first."""

    BFS = "BFS"  # level by level, the latest first
    PROB = "PROB"  # by their share of all continuations, multiplied along the path


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions:
    """Sizes of the trie and of the drafts. Raises ValueError for impossible ones."""

    num_draft_tokens: int = 12  # nodes of a draft tree, the root included
    max_trie_depth: int = 18  # longest run, tokens
    min_bfs_breadth: int = 1  # children of a node after the longest match
    max_bfs_breadth: int = 10  # children of a node after the shortest match
    match_type: MatchType = MatchType.BFS
    capacity: int = 10_000_000  # nodes, and likewise retained tokens

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 2 or self.max_trie_depth < 2 or self.capacity < 1:
            raise ValueError("an n-gram trie needs 2 draft tokens, depth 2 and capacity 1 at least")
        if not 1 <= self.min_bfs_breadth <= self.max_bfs_breadth:
            raise ValueError(
                f"breadth {self.min_bfs_breadth} to {self.max_bfs_breadth} is no range above 0"
            )


@dataclass(frozen=True, slots=True)
class NgramDrafts:
    """Draft trees of a batch; node 0 is the last known token. Parents precede children."""

    token_ids: np.ndarray  # int64 [b, w]
    parents: np.ndarray  # int64 [b, w]; NO_NODE for the root
    num_found: np.ndarray  # int64 [b]: nodes before the padding, the root included


# The id of texts while they are added; requests have longer ones.
_ADDED = ""


class _Sequence:
    """Tokens of one request, and where its suffixes are in the trie.

    `active[d - 1]` refers to the node of the last d tokens; NO_NODE where their run came only here
    (a leaf that points to this place, or none).
    """

    __slots__ = ("active", "is_live", "num_leaves", "number", "tokens")

    def __init__(self, number: int, depth: int) -> None:
        self.number = number
        self.tokens = array("i")
        self.active = [NO_NODE] * (depth - 1)
        self.num_leaves = 0  # leaves that point here
        self.is_live = True


class _Nodes:
    """The columns of the trie, and the list of its childless nodes in order of use.

    Node 0 is the root, and in the list stands for both ends: `newer[0]` is the oldest. A node
    whose `children` is None is a leaf; what follows its run is `tokens[pos:]` of its sequence
    (NO_NODE at the greatest depth, where nothing follows).
    """

    def __init__(self) -> None:
        self.token = array("i")
        self.freq = array("i")
        self.parent = array("i")
        self.depth = array("i")
        self.sequence = array("q")
        self.pos = array("i")
        self.older = array("i")
        self.newer = array("i")
        # Times the number was given away: tells whether a reference is to the present owner.
        self.version = array("i")
        self.children: list[dict[int, int] | None] = []  # token -> node, the latest last
        self._free: list[int] = []
        self.count = -1  # without the root
        root = self.add(NO_NODE, NO_NODE, 0, NO_NODE, 0)
        self.children[root] = {}

    def add(self, parent: int, token: int, depth: int, sequence: int, pos: int) -> int:
        """A new leaf, not in the list yet."""
        self.count += 1
        if not self._free:
            node = len(self.token)
            for column in (self.freq, self.older, self.newer, self.version):
                column.append(0)
            self.freq[node] = 1
            self.token.append(token)
            self.parent.append(parent)
            self.depth.append(depth)
            self.sequence.append(sequence)
            self.pos.append(pos)
            self.children.append(None)
            return node
        node = self._free.pop()
        self.token[node] = token
        self.freq[node] = 1
        self.parent[node] = parent
        self.depth[node] = depth
        self.sequence[node] = sequence
        self.pos[node] = pos
        return node

    def free(self, node: int) -> None:
        """Give back a node that is in no list and no parent's children."""
        self.version[node] += 1
        self.children[node] = None
        self._free.append(node)
        self.count -= 1

    def reference(self, node: int) -> int:
        """What stays invalid once the node is freed. See `resolve`."""
        return node | self.version[node] << 32

    def resolve(self, reference: int) -> int:
        """The node of a `reference`; NO_NODE for NO_NODE and for a node that is gone."""
        if reference < 0:
            return NO_NODE
        node = reference & 0xFFFFFFFF
        return node if self.version[node] == reference >> 32 else NO_NODE

    def link(self, node: int, after: int) -> None:
        """Put a node in the list behind `after`; 0: as the oldest, `older[0]`: as the newest."""
        before = self.newer[after]
        self.older[node] = after
        self.newer[node] = before
        self.newer[after] = node
        self.older[before] = node

    def unlink(self, node: int) -> None:
        older, newer = self.older[node], self.newer[node]
        self.newer[older] = newer
        self.older[newer] = older

    def touch(self, node: int) -> None:
        """Make a node of the list its newest."""
        self.unlink(node)
        self.link(node, self.older[0])


class NgramCache:
    """The trie, its sequences and the search. See the module docstring. One thread."""

    def __init__(self, options: NgramOptions, corpus: NgramCache | None = None) -> None:
        """`corpus`: a trie that is only read, and fills what this one leaves of a draft tree."""
        self._options = options
        self._corpus = corpus
        self._depth = options.max_trie_depth
        self._live: dict[str, _Sequence] = {}
        self._numbers = count()
        self._init_trie()

    def _init_trie(self) -> None:
        self._nodes = _Nodes()
        # By number: live ones, and those that leaves point to.
        self._sequences: dict[int, _Sequence] = {}
        self.num_retained_tokens = 0  # of sequences that are not live

    @property
    def num_nodes(self) -> int:
        return self._nodes.count

    # -- sequences ------------------------------------------------------------------------------

    def start(self, rid: str, tokens: Sequence[int]) -> None:
        """Begin the sequence `rid` with its last tokens (the trie's depth of them is usual).

        Raises ValueError where `rid` is known, or without a token.
        """
        if rid in self._live:
            raise ValueError(f"sequence {rid!r} has been started already")
        if not tokens:
            raise ValueError(f"sequence {rid!r} starts without a token")
        sequence = _Sequence(next(self._numbers), self._depth)
        self._live[rid] = self._sequences[sequence.number] = sequence
        self.extend(rid, tokens)

    def extend(self, rid: str, tokens: Iterable[int]) -> None:
        """Append tokens to the sequence `rid`. Raises KeyError for an unknown one."""
        sequence = self._live[rid]
        for token in tokens:
            self._append(sequence, token)
        self._evict()

    def finish(self, rid: str) -> None:
        """End the sequence `rid`; its runs stay. An unknown one is no error."""
        sequence = self._live.pop(rid, None)
        if sequence is None:
            return
        sequence.is_live = False
        if sequence.num_leaves:
            self.num_retained_tokens += len(sequence.tokens)
            self._evict()
        else:
            del self._sequences[sequence.number]

    def add(self, tokens: Sequence[int]) -> None:
        """Insert a whole text, which is no request. Raises ValueError for an empty one."""
        self.start(_ADDED, tokens)
        self.finish(_ADDED)

    def clear(self) -> None:
        """Forget all runs. Live sequences go on, as if they started with their last token."""
        live, self._live = self._live, {}
        self._init_trie()
        for rid, old in live.items():
            self.start(rid, old.tokens[-1:])

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    # -- insertion ------------------------------------------------------------------------------

    def _append(self, sequence: _Sequence, token: int) -> None:
        sequence.tokens.append(token)
        nodes = self._nodes
        active = [NO_NODE] * (self._depth - 1)
        # Longest first: the oldest start is the first to be evicted.
        for depth in range(self._depth - 1, 0, -1):
            node = nodes.resolve(sequence.active[depth - 1])
            if node == NO_NODE:
                continue
            child = self._visit(node, token, sequence)
            if child != NO_NODE:
                active[depth] = nodes.reference(child)
        child = self._visit(0, token, sequence)
        if child != NO_NODE:
            active[0] = nodes.reference(child)
        sequence.active = active

    def _visit(self, node: int, token: int, sequence: _Sequence) -> int:
        """`token` has followed `node`'s run in `sequence`. The child; NO_NODE for a leaf."""
        nodes = self._nodes
        siblings = nodes.children[node]
        assert siblings is not None  # the run of a node in `active` has come twice
        child = siblings.pop(token, NO_NODE)
        if child == NO_NODE:
            self._add_leaf(node, siblings, token, sequence, len(sequence.tokens))
            return NO_NODE
        siblings[token] = child
        nodes.freq[child] += 1
        children = nodes.children[child]
        if children is None:
            if nodes.sequence[child] == NO_NODE:
                nodes.touch(child)
                return NO_NODE
            self._open(child)
        elif not children:
            nodes.touch(child)
        return child

    def _add_leaf(
        self, parent: int, siblings: dict[int, int], token: int, sequence: _Sequence, pos: int
    ) -> None:
        nodes = self._nodes
        if not siblings and parent:
            nodes.unlink(parent)
        depth = nodes.depth[parent] + 1
        if depth == self._depth:
            leaf = nodes.add(parent, token, depth, NO_NODE, 0)
        else:
            leaf = nodes.add(parent, token, depth, sequence.number, pos)
            sequence.num_leaves += 1
        siblings[token] = leaf
        nodes.link(leaf, nodes.older[0])

    def _open(self, leaf: int) -> None:
        """The leaf's run has come again: what followed the first time becomes a child."""
        nodes = self._nodes
        first, pos = self._sequences[nodes.sequence[leaf]], nodes.pos[leaf]
        nodes.sequence[leaf] = NO_NODE
        children = nodes.children[leaf] = {}
        if pos < len(first.tokens):
            self._add_leaf(leaf, children, first.tokens[pos], first, pos + 1)
        else:
            nodes.touch(leaf)
            if first.is_live:
                # The first one ends here and will go on.
                first.active[nodes.depth[leaf] - 1] = nodes.reference(leaf)
        self._unpoint(first)

    # -- eviction -------------------------------------------------------------------------------

    def _evict(self) -> None:
        nodes, capacity = self._nodes, self._options.capacity
        while nodes.count > capacity or self.num_retained_tokens > capacity:
            leaf = nodes.newer[0]
            nodes.unlink(leaf)
            parent = nodes.parent[leaf]
            siblings = nodes.children[parent]
            assert siblings is not None
            del siblings[nodes.token[leaf]]
            if nodes.sequence[leaf] != NO_NODE:
                self._unpoint(self._sequences[nodes.sequence[leaf]])
            nodes.free(leaf)
            if not siblings and parent:
                # About as old as the child, and alone now.
                nodes.link(parent, 0)

    def _unpoint(self, sequence: _Sequence) -> None:
        sequence.num_leaves -= 1
        if sequence.num_leaves == 0 and not sequence.is_live:
            self.num_retained_tokens -= len(sequence.tokens)
            del self._sequences[sequence.number]

    # -- search ---------------------------------------------------------------------------------

    def draft(self, rids: Sequence[str]) -> NgramDrafts:
        """Trees of continuations of these sequences, padded to w nodes. Raises KeyError."""
        w = self._options.num_draft_tokens
        token_ids = np.full((len(rids), w), PADDING_TOKEN, dtype=np.int64)
        parents = np.zeros((len(rids), w), dtype=np.int64)
        num_found = np.empty(len(rids), dtype=np.int64)
        for row, rid in enumerate(rids):
            sequence = self._live[rid]
            tree = _Tree(sequence.tokens[-1], w)
            self._grow_active(tree, sequence)
            if self._corpus is not None and tree.num_left:
                self._corpus._grow_tail(tree, sequence.tokens[-self._corpus._depth :])
            found = len(tree.token_ids)
            token_ids[row, :found] = tree.token_ids
            parents[row, :found] = tree.parents
            num_found[row] = found
        return NgramDrafts(token_ids, parents, num_found)

    def _grow_active(self, tree: _Tree, sequence: _Sequence) -> None:
        """All matches of a sequence's end, the longest first, until the tree is full."""
        for reference in reversed(sequence.active):
            match = self._nodes.resolve(reference)
            if match != NO_NODE and self._nodes.children[match]:
                self._grow(tree, match, self._nodes.depth[match])
                if tree.num_left == 0:
                    return

    def _grow_tail(self, tree: _Tree, tail: Sequence[int]) -> None:
        """The same for the end of a text that is not in this trie: each suffix is looked up."""
        for length in range(min(len(tail), self._depth - 1), 0, -1):
            place: _Place = 0
            for token in tail[-length:]:
                following = self._follow(place, token)
                if following is None:
                    break
                place = following
            else:
                self._grow(tree, place, length)
                if tree.num_left == 0:
                    return

    def _follow(self, place: _Place, token: int) -> _Place | None:
        if isinstance(place, int):
            children = self._nodes.children[place]
            if children is not None:
                return children.get(token)
            place = self._within_leaf(place)
        tokens, pos, end = place
        return (tokens, pos + 1, end) if pos < end and tokens[pos] == token else None

    def _grow(self, tree: _Tree, match: _Place, length: int) -> None:
        """Add what followed a match of `length` tokens, until the tree is full."""
        if self._options.match_type is MatchType.BFS:
            self._grow_bfs(tree, match, length)
        else:
            self._grow_prob(tree, match)

    def _grow_bfs(self, tree: _Tree, match: _Place, length: int) -> None:
        """Level by level; fewer children a node the longer the match, and the deeper it is."""
        options = self._options
        scale = (options.max_bfs_breadth - options.min_bfs_breadth) / self._depth
        breadth = options.min_bfs_breadth + (self._depth - length) * scale
        queue: list[tuple[_Place, int, float]] = [(match, 0, breadth)]
        for place, parent, breadth in queue:
            limit = int(breadth) if breadth > 1 else 1
            for token, next_place in self._next_places(place, limit):
                node = tree.add(parent, token)
                if tree.num_left == 0:
                    return
                queue.append((next_place, node, breadth - scale))

    def _grow_prob(self, tree: _Tree, match: _Place) -> None:
        """The most likely first; of equally likely ones the first found."""
        numbers = count()
        # -probability, number, parent, token
        heap: list[tuple[float, int, int, int, _Place]] = []
        place, parent, prob = match, 0, 1.0
        while True:
            top = self._most_frequent(place)
            total = sum(freq for freq, _, _ in top)
            for freq, token, next_place in top:
                entry = (-prob * freq / total, next(numbers), parent, token, next_place)
                heapq.heappush(heap, entry)
            if not heap:
                return
            negative, _, above, token, place = heapq.heappop(heap)
            parent, prob = tree.add(above, token), -negative
            if tree.num_left == 0:
                return

    def _most_frequent(self, place: _Place) -> list[tuple[int, int, _Place]]:
        """(frequency, token, place) of what followed most often, of equal ones the latest first."""
        freqs = self._nodes.freq
        found = [
            (freqs[next_place] if isinstance(next_place, int) else 1, token, next_place)
            for token, next_place in self._next_places(place, MAX_FAN_OUT)
        ]
        if len(found) > 1:
            found.sort(key=itemgetter(0), reverse=True)
        return found[: self._options.max_bfs_breadth]

    def _next_places(self, place: _Place, limit: int) -> Iterable[tuple[int, _Place]]:
        """(token, place) of what followed, the latest first, `limit` of them at most."""
        if isinstance(place, int):
            children = self._nodes.children[place]
            if children is not None:
                return islice(reversed(children.items()), limit)
            place = self._within_leaf(place)
        tokens, pos, end = place
        return ((tokens[pos], (tokens, pos + 1, end)),) if pos < end else ()

    def _within_leaf(self, leaf: int) -> tuple[array, int, int]:
        """What followed the run of a leaf, up to the trie's depth: a _Place."""
        nodes = self._nodes
        number, pos = nodes.sequence[leaf], nodes.pos[leaf]
        if number == NO_NODE:
            return _NOTHING
        tokens = self._sequences[number].tokens
        return tokens, pos, min(len(tokens), pos + self._depth - nodes.depth[leaf])


# Where a draft tree may go on: a node, or (tokens, position, end) within a leaf.
_Place = int | tuple[array, int, int]
_NOTHING: tuple[array, int, int] = (array("i"), 0, 0)


class _Tree:
    """A draft tree under construction; equal paths are one."""

    __slots__ = ("_children", "num_left", "parents", "token_ids")

    def __init__(self, root_token: int, num_draft_tokens: int) -> None:
        self.token_ids = [root_token]
        self.parents = [NO_NODE]
        self.num_left = num_draft_tokens - 1
        self._children: list[dict[int, int]] = [{}]  # of each node: token -> node

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` with this token, made where missing (`num_left` is above 0)."""
        siblings = self._children[parent]
        node = siblings.get(token)
        if node is None:
            node = siblings[token] = len(self.token_ids)
            self.token_ids.append(token)
            self.parents.append(parent)
            self._children.append({})
            self.num_left -= 1
        return node


def read_corpus(
    path: str | Path, options: NgramOptions, encode: Callable[[str], list[int]] | None = None
) -> NgramCache:
    """A trie of the texts in a UTF-8 file, one a line, for `NgramCache(corpus=...)`.

    Lines are text for `encode`, or without it token ids with blanks between. `options.capacity` is
    the corpus's own. Raises OSError, and ValueError naming the line for what is no token id.
    """
    cache = NgramCache(options)
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                tokens = encode(line.rstrip("\n")) if encode else [int(w) for w in line.split()]
                if tokens:
                    cache.add(tokens)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return cache
