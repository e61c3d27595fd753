"""A model with recurrent states through all tiers: the same tokens, the same bytes.

A prefix comes back only where a state was kept, so what counts is where prompts and prefill chunks
end; lengths around multiples of the chunk are the ones that have gone wrong elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import serve

register_cpu_ci(est_time=40, suite="hicache")

CHUNK = 32
NEW_TOKENS = 12


def prompt(num_tokens: int, first: int = 3) -> list[int]:
    return [3 + (first + 7 * i + i * i // 5) % 190 for i in range(num_tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_next")


def flags(folder: Path, page: int, **options: object) -> list[str | int]:
    more = [
        item for name, value in options.items() for item in (f"--{name.replace('_', '-')}", value)
    ]
    return [
        *("--page-size", page, "--max-total-tokens", 640, "--max-running-requests", 2),
        *("--chunked-prefill-size", CHUNK, "--max-mamba-cache-size", 24),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        "--hicache-storage-backend-extra-config",
        f'{{"file_storage_path": "{folder}", "prefetch_threshold": 1, "max_size": 100000000}}',
        *map(str, more),
    ]


def have_ended(served: ServedScheduler, rids: Sequence[str]) -> bool:
    return all(map(served.finish, rids))


def assert_exact(served: ServedScheduler) -> None:
    """No slot of any pool is anywhere but in the tree or free."""
    served.settle()
    tree = served.tree
    assert tree.prefetch_tokens_occupied == 0 and tree._num_returning_pages == 0


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("page", [1, 16])
def test_every_tier_gives_the_same_tokens(
    page: int, delta: int, model: Path, tmp_path: Path
) -> None:
    tokens = prompt(3 * CHUNK + delta)
    full = (len(tokens) - 1) // page * page
    with ServedScheduler(model, "--disable-radix-cache", "--chunked-prefill-size", CHUNK) as cold:
        expected = cold.answer(tokens, NEW_TOKENS).tokens
    with ServedScheduler(model, *flags(tmp_path, page)) as served:
        assert isinstance(served.tree, HiMambaRadixCache)
        first = served.answer(tokens, NEW_TOKENS)
        assert first.cached_tokens == 0 and first.tokens == expected
        end, state = served.device_state(tokens[:-1])
        assert end == full
        kv = served.device_kv(tokens[:-1])["kv"]

        def again(of: ServedScheduler, tier: str) -> None:
            answer = of.answer(tokens, NEW_TOKENS)
            assert answer.cached_tokens == full, (tier, answer)
            assert answer.sources.get(tier) == full, (tier, answer.sources)
            assert answer.tokens == expected, tier
            found_end, found = of.device_state(tokens[:-1])
            assert found_end == full
            assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True)), tier
            assert torch.equal(of.device_kv(tokens[:-1])["kv"], kv), tier
            assert_exact(of)

        again(served, "device")
        served.evict_device()
        again(served, "host")
        served.evict_device()
        served.flush()
        again(served, "storage")
    assert any(".mamba" in path.name for path in tmp_path.glob("*.bin"))
    with ServedScheduler(model, *flags(tmp_path, page)) as restarted:
        again(restarted, "storage")


@pytest.mark.parametrize("page", [1, 16])
def test_a_next_turn_continues_from_storage(page: int, model: Path, tmp_path: Path) -> None:
    """Prompt, answer and more: what was generated is a prefix as any other."""
    tokens = prompt(50)
    with ServedScheduler(model, *flags(tmp_path, page, mamba_track_interval=16)) as served:
        turn = tokens + served.answer(tokens, 40).tokens + prompt(9, first=77)
        served.settle()
        served.flush()
    with ServedScheduler(model, "--disable-radix-cache") as cold:
        expected = cold.answer(turn, NEW_TOKENS).tokens
    with ServedScheduler(model, *flags(tmp_path, page, mamba_track_interval=16)) as served:
        answer = served.answer(turn, NEW_TOKENS)
        assert answer.tokens == expected
        assert answer.sources.get("storage", 0) >= 64, answer.sources
        assert_exact(served)


def test_prompts_that_part_share_what_they_share(model: Path, tmp_path: Path) -> None:
    page = 4
    shared = prompt(40)
    prompts = [shared + prompt(13, first=1000 * n) for n in range(1, 5)]
    with ServedScheduler(model, "--disable-radix-cache") as cold:
        expected = [cold.answer(tokens, NEW_TOKENS).tokens for tokens in prompts]
    with ServedScheduler(model, *flags(tmp_path, page)) as served:
        for tokens, want in zip(prompts[:3], expected):
            assert served.answer(tokens, NEW_TOKENS).tokens == want
            served.settle()
        served.flush()
        # The second prompt has left a state where it parted from the first.
        answer = served.answer(prompts[3], NEW_TOKENS)
        assert answer.sources.get("storage", 0) >= 40, answer.sources
        assert answer.tokens == expected[3]
        assert_exact(served)


def test_a_storm_of_prompts_leaves_the_pools_exact(model: Path, tmp_path: Path) -> None:
    """Far more than any pool holds, in pairs, some given up on the way."""
    options = {"hicache_ratio": "1.5"}
    with ServedScheduler(model, "--disable-radix-cache") as cold:
        tokens = prompt(45, first=500)
        expected = cold.answer(tokens, NEW_TOKENS).tokens
    with ServedScheduler(model, *flags(tmp_path, 4, **options)) as served:
        assert served.answer(tokens, NEW_TOKENS).tokens == expected
        for number in range(24):
            rids = [
                served.submit(prompt(20 + 7 * (number % 9), first=number), 4),
                served.submit(prompt(90, first=number % 5), 4),
            ]
            if number % 3 == 0:
                served.step(number % 4)
            served.run_until(functools.partial(have_ended, served, rids))
        assert_exact(served)
        assert served.answer(tokens, NEW_TOKENS).tokens == expected
        served.evict_device()
        served.flush()
        assert served.answer(tokens, NEW_TOKENS).tokens == expected
        assert_exact(served)


@pytest.mark.parametrize("page", [1, 16])
def test_a_draft_comes_back_beside_the_states(page: int, model: Path, tmp_path: Path) -> None:
    """Tokens, states and the KV of both models; so the draft is right as often as before."""
    draft = make_tiny_draft(tmp_path / "draft")
    tokens = prompt(2 * CHUNK + 9)
    own = [
        *flags(tmp_path / "l3", page),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", 3, "--speculative-eagle-topk", 2),
        *("--speculative-num-draft-tokens", 6),
    ]
    full = (len(tokens) - 1) // page * page
    with ServedScheduler(model, *own) as served:
        first = served.answer(tokens, NEW_TOKENS)
        end, state = served.device_state(tokens)
        rows = served.device_kv(tokens)
        assert end == full and set(rows) == {"kv", "draft"}

        def again(of: ServedScheduler, tier: str) -> None:
            answer = of.answer(tokens, NEW_TOKENS)
            assert answer.sources.get(tier) == full, (tier, answer.sources)
            assert answer.tokens == first.tokens
            assert answer.spec == first.spec
            found = of.device_state(tokens)[1]
            assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True)), tier
            for name, pool in of.device_kv(tokens).items():
                assert torch.equal(pool, rows[name]), (tier, name)
            assert_exact(of)

        served.evict_device()
        again(served, "host")
        served.evict_device()
        served.flush()
        again(served, "storage")
    with ServedScheduler(model, *own) as restarted:
        again(restarted, "storage")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("damage", [Path.unlink, flip_a_bit, cut_short])
def test_without_its_state_kv_in_storage_is_of_no_use(
    damage: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    tokens = prompt(70)
    with ServedScheduler(model, *flags(tmp_path, 4)) as served:
        expected = served.answer(tokens, NEW_TOKENS).tokens
        served.settle()
        served.flush()
    states = [path for path in tmp_path.glob("*.bin") if ".mamba" in path.name]
    assert states
    for path in states:
        damage(path)
    with ServedScheduler(model, *flags(tmp_path, 4)) as served:
        answer = served.answer(tokens, NEW_TOKENS)
        assert answer.tokens == expected
        assert answer.sources.get("storage", 0) == 0
        assert_exact(served)
        served.flush()
        # What was computed again has healed it.
        assert served.answer(tokens, NEW_TOKENS).sources.get("storage", 0) == 68


@pytest.mark.timeout(240)
def test_two_ranks_store_a_shard_each(model: Path, tmp_path: Path) -> None:
    tokens = prompt(3 * CHUNK + 1)
    body = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    own = [*flags(tmp_path, 16), "--tp", 2, "--device", "cpu", "--random-seed", 1]
    with serve(str(model), *own) as server:
        first = server.generate(input_ids=tokens, sampling_params=body)
        assert first["meta_info"]["cached_tokens"] == 0
        assert server.post("/flush_cache?timeout=30").status_code == 200
        again = server.generate(input_ids=tokens, sampling_params=body)
        assert again["output_ids"] == first["output_ids"]
        assert again["meta_info"]["cached_tokens_details"]["storage"] == 96
    states = [path.name for path in tmp_path.glob("*.bin") if ".mamba" in path.name]
    hashes = [{n.partition(".")[0] for n in states if f"_{rank}_2.bin" in n} for rank in (0, 1)]
    assert hashes[0] and len(hashes[0]) == len(hashes[1])
