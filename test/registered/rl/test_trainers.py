"""Each RL trainer's way of pushing weights, from a process of its own, over one server.

The server speculates and keeps KV in three tiers, and backups are queued whenever a trainer
pushes: nothing of the old weights may be found afterwards, and all of it when they come back.
"""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.rl_trainers import NUM_NEW_TOKENS, TRAINERS, run_trainer
from sglang.test.small_server import SmallServer

from .conftest import GREEDY, PAGE, STORED_PROMPT, Models, use_weights

register_cpu_ci(est_time=90, suite="rl")


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_a_trainer_pushes_weights(name: str, server: SmallServer, models: Models) -> None:
    version = f"{name}-1"
    assert server.post("/hicache/storage-backend/clear").status_code == 200
    server.generate(input_ids=STORED_PROMPT, sampling_params=GREEDY)
    assert server.post("/flush_cache?timeout=30").status_code == 200  # everything is stored
    seen = run_trainer(name, server.url, models.folders["new"], version)
    assert [answer["output_ids"] for answer in seen["before"]] == models.expected["old"]
    assert [answer["output_ids"] for answer in seen["after"]] == models.expected["new"]
    for answer in seen["after"]:
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == 0, meta["cached_tokens_details"]
        assert meta["weight_version"] == version
        assert meta["weight_versions"] == [{"version": version, "start": 0, "end": NUM_NEW_TOKENS}]
    use_weights(server, models.folders["old"])
    back = server.generate(input_ids=STORED_PROMPT, sampling_params=GREEDY)
    assert back["meta_info"]["cached_tokens_details"]["storage"] >= 5 * PAGE
