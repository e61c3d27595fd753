"""The `triton` backend for latent attention against the reference in float32.

Without a GPU the kernels run in Triton's interpreter, on tiny shapes; with one (mark `cuda`) on the
published sizes too.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base import RunnerFacts
from sglang.srt.layers.attention.registry import create_attention_backend
from sglang.srt.layers.attention.triton_latent import TritonLatentBackend
from sglang.srt.layers.attention.triton_ops import latent_attention as launcher
from sglang.srt.layers.attention.triton_ops.paged_attention import Workspace
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import load_model
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
VERIFY = ForwardMode.TARGET_VERIFY
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass
class TreeInput:
    """The part of a verify input that attention reads."""

    custom_mask: torch.Tensor | None


@dataclass(frozen=True)
class Shape:
    """Sizes of a case."""

    prefix_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    heads: int = 3
    rank: int = 20
    rope: int = 6
    dtype: torch.dtype = torch.float32
    tree: bool = False
    behind: int = 0  # keys of earlier draft steps that the mask covers beside the new tokens
    mode: ForwardMode = EXTEND


class Case:
    """A batch whose rows lie at random slots of a pool full of NaN."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.shape = shape
        self.seq_lens = [p + n for p, n in zip(shape.prefix_lens, shape.new_lens)]
        num_slots = sum(self.seq_lens) + 8
        slots = list(range(1, num_slots))
        rng.shuffle(slots)
        self.rows = rng.sample(range(len(self.seq_lens) + 2), len(self.seq_lens))
        self.table = ReqToTokenPool(len(self.seq_lens) + 2, max(self.seq_lens) + 3, DEVICE)
        # Cells behind a request's end hold what an earlier request left there.
        self.table.req_to_token.fill_(slots.pop())
        self.pool = self._pool(num_slots, shape.dtype)
        self.reference_pool = self._pool(num_slots, torch.float32)
        new_slots, new_rows = [], []
        for row, seq_len, new in zip(self.rows, self.seq_lens, shape.new_lens):
            own = torch.tensor([slots.pop() for _ in range(seq_len)], dtype=torch.int64)
            self.table.write(row, 0, own)
            latent = torch.randn(seq_len, 1, shape.rank + shape.rope, device=DEVICE)
            latent = latent.to(shape.dtype)
            own = own.to(DEVICE)
            for pool in (self.pool, self.reference_pool):
                pool.set_kv_buffer(self.layer(), own, latent, latent)
            new_slots.append(own[seq_len - new :])
            new_rows.append(latent[seq_len - new :])
        self.new_rows, self.out_cache_loc = torch.cat(new_rows), torch.cat(new_slots)
        width = shape.heads * (shape.rank + shape.rope)
        self.q = torch.randn(sum(shape.new_lens), width, device=DEVICE).to(shape.dtype)
        self.mask = self._tree_mask() if shape.tree else None

    def _pool(self, num_slots: int, dtype: torch.dtype) -> MLATokenToKVPool:
        pool = MLATokenToKVPool(num_slots, 1, dtype, self.shape.rank, self.shape.rope, 1, DEVICE)
        pool.kv_data[:, 1:] = float("nan")
        return pool

    def _tree_mask(self) -> torch.Tensor:
        new, behind = self.shape.new_lens[0], self.shape.behind
        tree = torch.rand(len(self.rows), new, behind + new) < 0.5
        tree[:, :, 0] = True
        tree[:, :, behind:] |= torch.eye(new, dtype=torch.bool)
        return tree.to(DEVICE)

    def layer(self) -> RadixAttention:
        shape = self.shape
        width = shape.rank + shape.rope
        return RadixAttention(shape.heads, width, 0.3, 1, 0, v_head_dim=shape.rank)

    def facts(self, dtype: torch.dtype) -> RunnerFacts:
        return RunnerFacts(
            device=DEVICE,
            dtype=dtype,
            num_heads=self.shape.heads,
            num_kv_heads=1,
            head_dim=self.shape.rank + self.shape.rope,
            v_head_dim=self.shape.rank,
            page_size=1,
            max_context_len=self.table.max_context_len,
            max_running_requests=8,
        )

    def batch(self, pool: MLATokenToKVPool) -> ForwardBatch:
        shape = self.shape

        def ids(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=DEVICE)

        is_extend = shape.mode is not DECODE
        return ForwardBatch(
            forward_mode=shape.mode,
            batch_size=len(self.rows),
            input_ids=ids([0] * len(self.q)),
            positions=ids([0] * len(self.q)),
            req_pool_indices=ids(self.rows),
            seq_lens=ids(self.seq_lens),
            seq_lens_cpu=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            req_to_token_pool=self.table,
            token_to_kv_pool=pool,
            extend_seq_lens=ids(shape.new_lens) if is_extend else None,
            extend_prefix_lens=ids(shape.prefix_lens) if is_extend else None,
            extend_seq_lens_cpu=list(shape.new_lens) if is_extend else None,
            extend_prefix_lens_cpu=list(shape.prefix_lens) if is_extend else None,
            spec_info=TreeInput(self.mask) if shape.tree else None,
        )

    def run(self, name: str, pool: MLATokenToKVPool, dtype: torch.dtype) -> torch.Tensor:
        backend = create_attention_backend(name, self.facts(dtype))
        assert isinstance(backend, TritonLatentBackend) == (name == "triton")
        batch = self.batch(pool)
        backend.init_forward_metadata(batch)
        rows = self.new_rows.to(dtype)
        values = rows[..., : self.shape.rank]
        return backend.forward(self.q.to(dtype), rows, values, self.layer(), batch, False)

    def check(self) -> None:
        got = self.run("triton", self.pool, self.shape.dtype).float()
        expected = self.run("torch_reference", self.reference_pool, torch.float32)
        assert got.shape == expected.shape
        error = (got - expected).norm() / expected.norm()
        assert error < TOLERANCE[self.shape.dtype], error


SMALL = {
    "decode": Shape((4, 0, 40), (1, 1, 1), mode=DECODE),
    "decode_half": Shape((35,), (1,), heads=17, rank=32, rope=8, dtype=torch.float16, mode=DECODE),
    "decode_wide": Shape((33, 70), (1, 1), heads=40, rank=16, rope=16, mode=DECODE),
    "extend": Shape((0, 7, 18), (5, 1, 20)),
    "no_prefix": Shape((0,), (34,), heads=2),
    "verify_chain": Shape((9, 20), (4, 4), mode=VERIFY),
    "tree": Shape((9, 20), (6, 6), tree=True, mode=VERIFY),
    "tree_behind": Shape((9, 31), (3, 3), tree=True, behind=5, mode=VERIFY),
}
LARGE = {
    "decode": Shape((1023, 17, 4000), (1, 1, 1), 16, 512, 64, torch.bfloat16, mode=DECODE),
    "decode_all_heads": Shape((300,) * 5, (1,) * 5, 128, 512, 64, torch.bfloat16, mode=DECODE),
    "extend": Shape((2000, 0, 64), (200, 130, 1), 16, 512, 64, torch.float16),
    "tree": Shape((500, 900), (8, 8), 16, 512, 64, torch.bfloat16, tree=True, mode=VERIFY),
}


@pytest.mark.parametrize("num_shares", [None, 1, 3])
@pytest.mark.parametrize("name", SMALL)
def test_kernel_equals_reference(
    name: str, num_shares: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_shares is not None:
        monkeypatch.setattr(launcher, "_choose_shares", lambda *_: num_shares)
    Case(SMALL[name]).check()


@pytest.mark.cuda
@pytest.mark.parametrize("name", LARGE)
def test_kernel_equals_reference_on_published_sizes(name: str) -> None:
    Case(LARGE[name]).check()


def test_rows_behind_the_batch_get_zeros() -> None:
    """Captured batches are padded: tokens that no request has, and requests of length 0."""
    case = Case(SMALL["extend"])
    batch = case.batch(case.pool)
    assert batch.extend_seq_lens is not None
    extra = 3
    queries = torch.cat((case.q, case.q[:extra])).view(-1, 3, 26)
    inputs = launcher.LatentAttentionInputs(
        queries=queries,
        rows=case.pool.get_key_buffer(0),
        rank=20,
        table=case.table.req_to_token,
        table_rows=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        query_lens=batch.extend_seq_lens,
        tree_mask=None,
        scaling=0.3,
    )
    for num_shares in (1, 2):
        out = launcher.latent_attention(inputs, Workspace(queries.device), num_shares)
        assert not out[-extra:].any() and out[:-extra].isfinite().all()
    batch.seq_lens.zero_()
    assert not launcher.latent_attention(inputs, Workspace(queries.device), 2).any()


def test_what_the_kernel_does_not_do_is_refused() -> None:
    case = Case(SMALL["tree"])
    batch = case.batch(case.pool)

    def inputs(**changes: object) -> launcher.LatentAttentionInputs:
        values: dict[str, object] = {
            "queries": case.q.view(-1, 3, 26),
            "rows": case.pool.get_key_buffer(0),
            "rank": 20,
            "table": case.table.req_to_token,
            "table_rows": batch.req_pool_indices,
            "seq_lens": batch.seq_lens,
            "query_lens": batch.extend_seq_lens,
            "tree_mask": case.mask,
            "scaling": 0.3,
        }
        return launcher.LatentAttentionInputs(**{**values, **changes})  # type: ignore[arg-type]

    assert case.mask is not None
    for changes, message in (
        ({"rank": 26}, "do not fit"),
        ({"rows": case.pool.get_key_buffer(0)[..., :-1]}, "do not fit"),
        ({"tree_mask": case.mask[:1]}, "tree mask"),
        ({"tree_mask": None, "query_lens": None}, "need query_lens"),
        ({"scaling": 0.0}, "positive"),
        (
            {"queries": case.q.view(-1, 3, 26).transpose(0, 1).contiguous().transpose(0, 1)},
            "contig",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            launcher.latent_attention(inputs(**changes), Workspace(case.q.device))


_COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang.srt.layers.attention.triton_ops.latent_attention_kernel import latent_attention_kernel

pointers = dict(
    queries="*bf16", out="*bf16", rows="*bf16", table="*i32", table_rows="*i64", seq_lens="*i64",
    query_lens="*i64", tree_mask="*u8", partial_out="*fp32", partial_lse="*fp32",
    scale_log2="fp32",
)
names = latent_attention_kernel.arg_names
for block_h, one_query in ((16, True), (32, False)):
    sizes = dict(
        NUM_HEADS=block_h, RANK=512, ROPE=64, BLOCK_R=512, BLOCK_P=64, BLOCK_H=block_h, BLOCK_N=32,
        BATCH_BLOCK=8, ONE_QUERY=one_query, TREE=not one_query, SHARED=one_query, PRECISION="tf32",
    )
    signature = {
        name: "constexpr" if name in sizes else pointers.get(name, "i32") for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if pointers.get(name, "").startswith("*") or name in ("query_stride", "row_stride")
    }
    compiled = triton.compile(
        ASTSource(latent_attention_kernel, signature, sizes, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8 if block_h > 16 else 4, "num_stages": 2},
    )
    assert compiled.asm["cubin"][:4] == b"\\x7fELF"
    assert "mma" in compiled.asm["ptx"], "no matrix unit"
    assert compiled.metadata.shared <= 227 * 1024
"""


def test_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = dict(os.environ, PYTHONPATH=str(root / "python"), TRITON_CACHE_DIR=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_model_runs_on_the_kernel(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    config = ModelConfig.from_path(str(folder))
    model = load_model(config, device=DEVICE, show_progress=False)
    prompts = [[(7 * i + 3) % 250 for i in range(11)], [5, 6, 7]]
    outputs = {}
    for backend in ("triton", "torch_reference"):
        runner = MiniRunner(model, page_size=4, backend=backend)
        rows = [runner.new_request() for _ in prompts]
        runner.extend(rows, prompts)
        steps = [runner.decode(rows, [9, 8]).next_token_logits]
        more = runner.extend(rows, [[1, 2], [3]], mode=ForwardMode.DRAFT_EXTEND)
        outputs[backend] = torch.cat([*steps, more.next_token_logits])
    torch.testing.assert_close(outputs["triton"], outputs["torch_reference"], atol=1e-4, rtol=0)
