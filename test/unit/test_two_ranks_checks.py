"""The checks of the two-rank parts notice what they are there for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sglang.test.probed_server import ProbedServer
from sglang.test.two_ranks import CheckFailed, bytes_by_rank, check_ranks, compare


def answer(ids: list[int], gaps: list[float], logprob: float = -1.0) -> dict[str, Any]:
    tops = [[[logprob, token, None], [logprob - gap, 0, None]] for token, gap in zip(ids, gaps)]
    chosen = [[logprob, token, None] for token in ids]
    return {
        "output_ids": ids,
        "meta_info": {"output_top_logprobs": tops, "output_token_logprobs": chosen},
    }


def test_tokens_may_part_at_a_near_tie_only() -> None:
    wanted = [answer([5, 6, 7], [1.0, 0.0001, 1.0])]
    same = compare("x", wanted, wanted, "float32")
    assert (same["equal_tokens"], same["of"], same["near_ties"]) == (3, 3, 0)
    tied = compare("x", wanted, [answer([5, 9, 9], [1.0, 1.0, 1.0])], "float32")
    assert (tied["equal_tokens"], tied["near_ties"]) == (1, 1)
    with pytest.raises(CheckFailed, match="prompt 0 differs at token 0, 5 and 8"):
        compare("x", wanted, [answer([8, 6, 7], [1.0, 1.0, 1.0])], "float32")
    with pytest.raises(CheckFailed, match="log probabilities"):
        compare("x", wanted, [answer([5, 6, 7], [1.0, 1.0, 1.0], logprob=-1.1)], "float32")


def server(tmp_path: Path, **changes: Any) -> ProbedServer:
    report: dict[str, Any] = {
        "rank": 0,
        "collectives": {"MainThread": [10, "abc"]},
        "replays": {"decode": 3},
        "tree": [[1, 0, [1, 2], [[[4, 5], None, 0, 0]], [0, 1, 1]]],
        "pools": {"error": None},
    }
    other = copy.deepcopy(report) | {"rank": 1} | changes
    return ProbedServer(url="", pid=0, name="two", folder=tmp_path, reports=[report, other])


def test_equal_ranks_pass(tmp_path: Path) -> None:
    assert check_ranks(server(tmp_path)) == {
        "collectives": 10,
        "nodes": 1,
        "replays": {"decode": 3},
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"collectives": {"MainThread": [10, "abd"]}}, "collectives by rank"),
        ({"collectives": {"MainThread": [11, "abc"]}}, "collectives by rank"),
        ({"replays": {"decode": 2}}, "replays by rank"),
        ({"tree": [[1, 0, [1, 2], [[[4, 6], None, 0, 0]], [0, 1, 1]]]}, "caches differ"),
        ({"tree": []}, "another length"),
        ({"pools": {"error": "2 lost"}}, "rank 1: 2 lost"),
    ],
)
def test_what_one_rank_does_alone_is_seen(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckFailed, match=text):
        check_ranks(server(tmp_path, **changes))


def test_a_rank_that_is_not_there_is_seen(tmp_path: Path) -> None:
    alone = server(tmp_path)
    del alone.reports[1]
    with pytest.raises(CheckFailed, match="reports"):
        check_ranks(alone)


def test_files_of_both_ranks_and_both_models_are_counted(tmp_path: Path) -> None:
    for rank in (0, 1):
        for kind in ("", ".draft"):
            name = f"{'0' * 64}{kind}_model_{rank}_2.bin"
            (tmp_path / name).write_bytes(b"x" * (8 if kind else 32))
    assert bytes_by_rank(tmp_path)["target"] == {
        **{"files0": 1, "bytes0": 32},
        **{"files1": 1, "bytes1": 32},
    }
    next(tmp_path.glob("*.draft*_1_2.bin")).unlink()
    with pytest.raises(CheckFailed, match="draft"):
        bytes_by_rank(tmp_path)
