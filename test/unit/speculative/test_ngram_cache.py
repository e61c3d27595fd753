"""The n-gram trie against one that stores every run of tokens, and its bounds."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import numpy as np
import pytest

from sglang.srt.speculative.ngram_cache import (
    MatchType,
    NgramCache,
    NgramDrafts,
    NgramOptions,
    read_corpus,
)


class FullTrie:
    """Every run of up to `depth` tokens as nested dicts: [freq, {token: child, latest last}]."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.root: list = [0, {}]
        self.sequences: dict[str, list[int]] = {}

    def append(self, rid: str, token: int) -> None:
        tokens = self.sequences.setdefault(rid, [])
        tokens.append(token)
        for length in range(min(len(tokens), self.options.max_trie_depth), 0, -1):
            node = self.find(tokens[-length:-1])
            child = node[1].pop(token, [0, {}])
            node[1][token] = child
            child[0] += 1

    def find(self, run: Sequence[int]) -> list:
        node = self.root
        for token in run:
            node = node[1][token]
        return node

    def draft(self, rid: str) -> dict[tuple[int, ...], int]:
        """Paths of the tree (without the root) in order of discovery."""
        tokens, options = self.sequences[rid], self.options
        paths: dict[tuple[int, ...], int] = {}
        for length in range(min(len(tokens), options.max_trie_depth), 0, -1):
            match = self.find(tokens[-length:])
            for path in self.walk(match, length):
                if len(paths) == options.num_draft_tokens - 1:
                    break
                paths.setdefault(path, len(paths))
        return paths

    def walk(self, match: list, length: int):
        low, high = self.options.min_bfs_breadth, self.options.max_bfs_breadth
        depth = self.options.max_trie_depth
        if self.options.match_type is MatchType.BFS:
            scale = (high - low) / depth
            level: list[tuple[tuple[int, ...], list]] = [((), match)]
            breadth = low + (depth - length) * scale
            while level:
                below = []
                for path, node in level:
                    latest = list(reversed(node[1].items()))[: max(1, int(breadth))]
                    for token, child in latest:
                        yield (*path, token)
                        below.append(((*path, token), child))
                level, breadth = below, breadth - scale
            return
        heap: list = [(-1.0, 0, (), match)]
        number = 0
        while heap:
            negative, _, path, node = heapq.heappop(heap)
            if path:
                yield path
            top = sorted(reversed(node[1].items()), key=lambda item: -item[1][0])[:high]
            total = sum(child[0] for _, child in top)
            for token, child in top:
                number += 1
                heapq.heappush(heap, (negative * child[0] / total, number, (*path, token), child))


def paths_of(drafts: NgramDrafts, row: int) -> dict[tuple[int, ...], int]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(drafts.num_found[row])):
        parent = int(drafts.parents[row, node])
        assert 0 <= parent < node
        found.append((*found[parent], int(drafts.token_ids[row, node])))
    return {path: index for index, path in enumerate(found[1:])}


def random_text(generator: random.Random, length: int) -> list[int]:
    """Tokens of a few kinds, with repeated pieces and runs of one token."""
    text: list[int] = []
    while len(text) < length:
        kind = generator.random()
        if kind < 0.3 and len(text) > 3:
            start = generator.randrange(len(text))
            text += text[start : start + generator.randrange(1, 12)]
        elif kind < 0.4:
            text += [generator.randrange(4)] * generator.randrange(1, 6)
        else:
            text += [generator.randrange(8) for _ in range(generator.randrange(1, 6))]
    return text[:length]


@pytest.mark.parametrize("match_type", list(MatchType))
@pytest.mark.parametrize("seed", range(6))
def test_drafts_equal_those_of_a_trie_of_all_runs(match_type: MatchType, seed: int) -> None:
    generator = random.Random(seed)
    options = NgramOptions(
        num_draft_tokens=generator.choice([4, 8, 12]),
        max_trie_depth=generator.choice([2, 3, 5, 9]),
        min_bfs_breadth=generator.choice([1, 2]),
        max_bfs_breadth=generator.choice([2, 4, 10]),
        match_type=match_type,
    )
    cache, reference = NgramCache(options), FullTrie(options)
    texts = {f"r{i}": random_text(generator, 120) for i in range(4)}
    places = dict.fromkeys(texts, 0)
    while places:
        rid = generator.choice(list(places))
        step = texts[rid][places[rid] : places[rid] + generator.randrange(1, 5)]
        if rid in cache:
            cache.extend(rid, step)
        else:
            cache.start(rid, step)
        for token in step:
            reference.append(rid, token)
        places[rid] += len(step)
        assert paths_of(cache.draft([rid]), 0) == reference.draft(rid)
        if places[rid] >= len(texts[rid]):
            cache.finish(rid)
            del places[rid]
    check_structure(cache)


def check_structure(cache: NgramCache) -> None:
    """Counts, leaf list and pointers of the trie agree with a walk over it."""
    nodes, num_nodes, stack, leaves = cache._nodes, 0, [0], set()
    pointers: dict[int, int] = {}
    while stack:
        node = stack.pop()
        for token, child in (nodes.children[node] or {}).items():
            assert nodes.parent[child] == node and nodes.token[child] == token
            assert nodes.depth[child] == nodes.depth[node] + 1 <= cache._depth
            num_nodes += 1
            stack.append(child)
        if node and not nodes.children[node]:
            leaves.add(node)
        number = nodes.sequence[node]
        if number >= 0:
            assert nodes.children[node] is None
            pointers[number] = pointers.get(number, 0) + 1
    assert num_nodes == cache.num_nodes
    listed, at = [], nodes.newer[0]
    while at:
        listed.append(at)
        assert nodes.older[nodes.newer[at]] == at
        at = nodes.newer[at]
    assert len(listed) == len(leaves) and set(listed) == leaves
    for number, sequence in cache._sequences.items():
        assert sequence.num_leaves == pointers.pop(number, 0)
        assert sequence.is_live or sequence.num_leaves > 0
    assert not pointers
    finished = [s for s in cache._sequences.values() if not s.is_live]
    assert sum(len(s.tokens) for s in finished) == cache.num_retained_tokens


@pytest.mark.parametrize("capacity", [1, 7, 60])
def test_nodes_and_retained_tokens_stay_below_the_capacity(capacity: int) -> None:
    generator = random.Random(capacity)
    cache = NgramCache(NgramOptions(max_trie_depth=6, capacity=capacity))
    for number in range(40):
        rid = str(number)
        text = random_text(generator, 50)
        cache.start(rid, text[:10])
        for start in range(10, 50, 4):
            cache.extend(rid, text[start : start + 4])
            drafts = cache.draft([rid])
            assert drafts.token_ids[0, 0] == text[: start + 4][-1]
            paths_of(drafts, 0)
            assert cache.num_nodes <= capacity
        if generator.random() < 0.7:
            cache.finish(rid)
        assert cache.num_retained_tokens <= capacity
        check_structure(cache)


def test_the_least_recently_used_run_goes_first() -> None:
    cache = NgramCache(NgramOptions(num_draft_tokens=3, max_trie_depth=3, capacity=10))
    cache.start("a", [1, 2, 3])
    cache.start("b", [4, 5, 6])
    cache.start("c", [7, 8, 9])  # nine leaves
    cache.start("old", [1])
    assert paths_of(cache.draft(["old"]), 0) == {(2,): 0, (2, 3): 1}
    cache.finish("old")
    # Ten nodes now, since "1" has become one with a child: two more push out the oldest two.
    cache.start("d", [10, 11])
    assert cache.num_nodes == 10
    cache.start("new", [2])
    assert paths_of(cache.draft(["new"]), 0) == {}
    # Which took the node of "4" in turn.
    cache.start("new b", [5])
    assert paths_of(cache.draft(["new b"]), 0) == {(6,): 0}


def test_missing_nodes_hang_on_the_root() -> None:
    cache = NgramCache(NgramOptions(num_draft_tokens=5))
    cache.start("a", [3, 4, 5])
    cache.start("b", [9, 4])
    drafts = cache.draft(["b", "a"])
    np.testing.assert_array_equal(drafts.token_ids, [[4, 5, 0, 0, 0], [5, 0, 0, 0, 0]])
    np.testing.assert_array_equal(drafts.parents, [[-1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(drafts.num_found, [2, 1])


def test_the_latest_continuation_comes_first_and_the_longest_match_before_it() -> None:
    options = NgramOptions(num_draft_tokens=4, min_bfs_breadth=2)
    cache = NgramCache(options)
    cache.start("a", [1, 2, 3])
    cache.start("b", [9, 2, 4])
    cache.start("c", [2])
    assert list(paths_of(cache.draft(["c"]), 0)) == [(4,), (3,)]
    cache.start("d", [1, 2])
    assert list(paths_of(cache.draft(["d"]), 0)) == [(3,), (4,)]


def test_the_most_frequent_continuation_comes_first_by_probability() -> None:
    cache = NgramCache(NgramOptions(num_draft_tokens=3, match_type=MatchType.PROB))
    for number, token in enumerate([5, 5, 6]):
        cache.start(str(number), [1, token])
    cache.start("x", [1])
    assert list(paths_of(cache.draft(["x"]), 0)) == [(5,), (6,)]


def test_clearing_forgets_runs_and_keeps_sequences() -> None:
    cache = NgramCache(NgramOptions())
    cache.start("a", [1, 2, 1, 2, 1])
    cache.clear()
    assert cache.draft(["a"]).num_found[0] == 1
    cache.extend("a", [2, 1])
    assert paths_of(cache.draft(["a"]), 0) == {(2,): 0, (2, 1): 1}
    check_structure(cache)


def test_misuse_is_refused() -> None:
    cache = NgramCache(NgramOptions())
    with pytest.raises(ValueError, match="without a token"):
        cache.start("a", [])
    cache.start("a", [1])
    with pytest.raises(ValueError, match="already"):
        cache.start("a", [1])
    with pytest.raises(KeyError):
        cache.extend("b", [1])
    with pytest.raises(ValueError, match="no range"):
        NgramOptions(min_bfs_breadth=3, max_bfs_breadth=2)


@pytest.mark.parametrize("match_type", list(MatchType))
@pytest.mark.parametrize("seed", range(3))
def test_a_corpus_is_read_as_a_trie_of_all_runs(match_type: MatchType, seed: int) -> None:
    generator = random.Random(seed)
    options = NgramOptions(num_draft_tokens=8, max_trie_depth=5, match_type=match_type)
    corpus, reference = NgramCache(options), FullTrie(options)
    for number in range(5):
        text = random_text(generator, 60)
        corpus.add(text)
        for token in text:
            reference.append(str(number), token)
    cache = NgramCache(options, corpus)
    for number in range(20):
        # A single token has no match of its own; longer ones would.
        query = [generator.randrange(8)]
        cache.start(f"q{number}", query)
        cache.clear()
        reference.sequences["query"] = query
        assert paths_of(cache.draft([f"q{number}"]), 0) == reference.draft("query")
    tail = text[-9:]
    tree_cache = NgramCache(options, corpus)
    tree_cache.start("q", tail)
    found = paths_of(tree_cache.draft(["q"]), 0)
    assert found and len(found) <= 7


def test_the_corpus_fills_what_own_matches_leave(tmp_path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("1 2 3 4\n\n1 2 7\n")
    options = NgramOptions(num_draft_tokens=5, min_bfs_breadth=2)
    cache = NgramCache(options, read_corpus(path, options))
    cache.start("a", [2, 9])
    cache.start("b", [1, 2])
    assert list(paths_of(cache.draft(["b"]), 0)) == [(9,), (7,), (3,), (3, 4)]


def test_a_corpus_of_text_is_encoded_and_bad_lines_are_named(tmp_path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("abab\n")
    options = NgramOptions()
    corpus = read_corpus(path, options, encode=lambda text: [ord(c) for c in text])
    cache = NgramCache(options, corpus)
    cache.start("q", [97])
    assert list(paths_of(cache.draft(["q"]), 0)) == [(98,), (98, 97), (98, 97, 98)]
    with pytest.raises(ValueError, match="line 1"):
        read_corpus(path, options)
