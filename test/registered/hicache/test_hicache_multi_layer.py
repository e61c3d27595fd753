"""KV of every layer of a draft through all tiers: same bytes, same accept length.

The drafts are right as long as the KV of each layer is, so a layer that is lost shows at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.srt.utils import MultiprocessingSerializer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_mtp_copies
from sglang.test.fakes.tiny_models import BOS_ID
from sglang.test.small_server import serve

register_cpu_ci(est_time=60, suite="hicache")

LAYERS, NEW_TOKENS = 3, 29
# One token of the prompt, then steps of all layers and the target's own token.
FULL_STEPS = (NEW_TOKENS - 1) // (LAYERS + 1)
PROMPT = [BOS_ID] * LAYERS + [3 + (7 * i + i * i // 5) % 190 for i in range(90)]

# (family, page size, layout, io)
CASES = [
    ("deepseek_v3", 1, "layer_first", "kernel"),
    ("deepseek_v3", 16, "page_first", "direct"),
    ("deepseek_v3", 4, "page_first_direct", "direct"),
    ("mimo", 1, "page_first", "kernel"),
    ("mimo", 16, "layer_first", "direct"),
    ("mimo", 4, "page_first_direct", "direct"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    families = ("deepseek_v3", "mimo")
    return {family: make_tiny_mtp_copies(root / family, LAYERS, family) for family in families}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["deepseek_v3"]


def flags_of(
    store: Path, page: int, layout: str, io: str, num_steps: int = LAYERS
) -> list[str | int]:
    return [
        *("--page-size", page, "--max-total-tokens", 320, "--max-running-requests", 2),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-mem-layout", layout, "--hicache-io-backend", io),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        "--hicache-storage-backend-extra-config",
        f'{{"file_storage_path": "{store}", "prefetch_threshold": 1, "max_size": 100000000}}',
        *("--speculative-algorithm", "NEXTN", "--enable-multi-layer-eagle"),
        *("--speculative-num-steps", num_steps),
    ]


def reusable(page: int, num_layers: int = LAYERS) -> int:
    """Tokens of the prompt whose KV is a function of the prompt, in whole pages."""
    return (len(PROMPT) - num_layers) // page * page


def num_steps(answer: Answer) -> int:
    assert answer.spec is not None
    count: int = answer.spec["spec_verify_ct"]
    return count


def again(served: ServedScheduler, tier: str, page: int) -> Answer:
    """The prompt once more, all that can be from the tier named."""
    answer = served.answer(PROMPT, NEW_TOKENS)
    assert answer.sources.get(tier, 0) == reusable(page), (tier, answer.sources)
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_tier_restores_every_layer(
    case: tuple[str, int, str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    family, page, layout, io = case
    folder = folders[family]
    flags = flags_of(tmp_path, page, layout, io)
    with ServedScheduler(folder, "--disable-radix-cache") as served:
        expected = served.answer(PROMPT, NEW_TOKENS).tokens

    def check(served: ServedScheduler, tier: str) -> None:
        answer = again(served, tier, page)
        assert answer.tokens == expected, tier
        assert num_steps(answer) == FULL_STEPS, tier
        found = served.device_kv(PROMPT)
        assert found.keys() == rows.keys() == {"kv", "draft"}
        for name, pool in found.items():
            assert torch.equal(pool, rows[name][:, :, : pool.shape[2]]), (tier, name)
        served.settle()

    with ServedScheduler(folder, *flags) as served:
        first = served.answer(PROMPT, NEW_TOKENS)
        assert first.tokens == expected and num_steps(first) == FULL_STEPS
        rows = served.device_kv(PROMPT)
        assert rows["draft"].shape[1] == LAYERS
        for buffer in rows["draft"]:
            assert all(layer.any() for layer in buffer)
            assert not torch.equal(buffer[0], buffer[1])
        check(served, "device")
        served.evict_device()
        check(served, "host")
        served.evict_device()
        served.flush()
        check(served, "storage")
        state = served.scheduler._tier_state()
        assert state["hicache_draft_synced"] is True
        assert served.ready.resolved_args["num_draft_runners"] == LAYERS
    with ServedScheduler(folder, *flags) as served:
        check(served, "storage")


@pytest.mark.timeout(240)
def test_ranks_restore_every_layer_after_a_restart(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Heads are split over two ranks, each of which stores its part of every layer."""
    flags = [*flags_of(tmp_path, 4, "page_first", "kernel"), "--tp", 2, "--device", "cpu"]
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with ServedScheduler(folders["mimo"], "--disable-radix-cache") as served:
        expected = served.answer(PROMPT, NEW_TOKENS).tokens
    for is_first in (True, False):
        with serve(str(folders["mimo"]), *flags, "--random-seed", 1) as server:
            reply = server.generate(input_ids=PROMPT, sampling_params=params)
            assert reply["output_ids"] == expected
            details = reply["meta_info"]["cached_tokens_details"] or {}
            assert details.get("storage", 0) == (0 if is_first else reusable(4))
            assert reply["meta_info"]["spec_verify_ct"] == FULL_STEPS
            assert server.post("/flush_cache?timeout=30").status_code == 200
            if is_first:
                info = server.get("/server_info").json()
                assert info["num_draft_runners"] == LAYERS
                assert info["enable_multi_layer_eagle"] is True
                assert info["internal_states"][0]["hicache_draft_synced"] is True


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_lost_layer_is_noticed(folder: Path, tmp_path: Path, layer: int) -> None:
    """What the tests above would see if a layer did not travel."""
    with ServedScheduler(folder, *flags_of(tmp_path, 1, "page_first", "kernel")) as served:
        first = served.answer(PROMPT, NEW_TOKENS)
        served.evict_device()
        host = served.tree.cache_controller.mem_pool_host_draft
        assert host is not None and host.layer_num == LAYERS
        host._host_sides[0][layer].zero_()  # type: ignore[attr-defined]
        answer = again(served, "host", 1)
        assert answer.tokens == first.tokens
        assert num_steps(answer) > FULL_STEPS


def pages_in(store: Path) -> dict[str, set[str]]:
    """Page hashes in storage, by pool."""
    found: dict[str, set[str]] = {}
    for path in store.glob("*.bin"):
        pool = "draft" if ".draft" in path.name else "kv"
        found.setdefault(pool, set()).add(path.name[:64])
    return found


def test_pages_hold_every_layer_and_a_missing_one_ends_the_hit(
    folder: Path, tmp_path: Path
) -> None:
    page = 4
    flags = flags_of(tmp_path, page, "page_first", "kernel")
    with ServedScheduler(folder, *flags) as served:
        expected = served.answer(PROMPT, NEW_TOKENS).tokens
        served.settle()
    found = pages_in(tmp_path)
    assert found["draft"] == found["kv"] and len(found["kv"]) >= reusable(page) // page
    config = ModelConfig.from_path(str(folder))
    assert config.mla is not None
    sizes = {path.stat().st_size for path in tmp_path.glob("*.draft*.bin")}
    bytes_a_page = LAYERS * page * config.mla.latent_dim * 4
    assert len(sizes) == 1 and bytes_a_page <= sizes.pop() < bytes_a_page + 1024
    for path in sorted(tmp_path.glob("*.draft*.bin"))[::2]:
        path.unlink()
    with ServedScheduler(folder, *flags) as served:
        answer = served.answer(PROMPT, NEW_TOKENS)
        assert answer.sources.get("storage", 0) < reusable(page)
        assert answer.tokens == expected and num_steps(answer) == FULL_STEPS


def test_another_number_of_layers_shares_nothing(folder: Path, tmp_path: Path) -> None:
    with ServedScheduler(folder, *flags_of(tmp_path, 4, "page_first", "kernel")) as served:
        served.answer(PROMPT, NEW_TOKENS)
        served.settle()
        identity = served.tree.cache_controller._draft_digest()
    fewer = flags_of(tmp_path, 4, "page_first", "kernel", num_steps=2)
    with ServedScheduler(folder, *fewer) as served:
        assert served.tree.cache_controller._draft_digest() != identity
        answer = served.answer(PROMPT, NEW_TOKENS)
        assert answer.cached_tokens == 0
        served.settle()
    with ServedScheduler(folder, *fewer) as served:
        answer = served.answer(PROMPT, NEW_TOKENS)
        assert answer.sources["storage"] == reusable(4, 2)


@pytest.mark.parametrize("load_format", [None, "direct"])
def test_an_update_of_one_layer_is_for_it_alone(
    folder: Path, tmp_path: Path, load_format: str | None
) -> None:
    """Selector `draft`: the layer that the tensor belongs to, whose KV is another's then."""
    name = "model.layers.2.eh_proj.weight"
    weight = load_file(str(folder / "model-mtp.safetensors"))[name].roll(1, dims=0)
    if load_format == "direct":
        name = "draft.1.eh_proj.weight"
    data = MultiprocessingSerializer.serialize([(name, weight)], output_str=True)
    with ServedScheduler(folder, *flags_of(tmp_path, 4, "page_first", "kernel")) as served:
        first = served.answer(PROMPT, NEW_TOKENS)
        served.settle()
        worker = served.scheduler.draft_worker
        assert isinstance(worker, DraftModelWorker)
        before = [runner.weights_fingerprint for runner in worker.draft_runner_list]
        digest = served.tree.cache_controller._draft_digest()
        reply = served.control(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[data], selector="draft", load_format=load_format
            )
        )
        assert reply.success, reply.message
        after = [runner.weights_fingerprint for runner in worker.draft_runner_list]
        assert [a == b for a, b in zip(before, after)] == [True, False, True]
        assert served.tree.cache_controller._draft_digest() != digest
        answer = served.answer(PROMPT, NEW_TOKENS)
        assert answer.cached_tokens == 0 and answer.tokens == first.tokens
        assert num_steps(answer) > FULL_STEPS
