"""The linear-attention block of one layer: projections, convolution, gated delta rule, output norm.

Heads are split over ranks: a rank has some key heads with the value heads that they serve.

Source: Gated Delta Networks (arXiv 2412.06464, figure 1); the order of rows in the fused
projections is that of the published Qwen3-Next checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sglang.srt.configs.linear_attention_config import LinearAttentionConfig
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.mamba.drafted_inputs import DraftedInputs
from sglang.srt.layers.mamba.layer_states import AcceptedPath, Gates, LayerStates, StateMoves
from sglang.srt.layers.mamba.ops import DeltaInputs, select_linear_attention_ops
from sglang.srt.layers.mamba.step_states import StepStates, TreeStates
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot, new_parameter
from sglang.srt.mem_cache.mamba_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class CausalConv(WeightOwner):
    """Taps of the convolution, [channels, taps]. Each rank holds all of them and uses its own.

    Channels are all queries, all keys, all values, so a rank's lie in three places; the whole is
    small.
    """

    def __init__(self, sizes: LinearAttentionConfig) -> None:
        super().__init__()
        group = get_tp_group()
        self.weight = new_parameter(sizes.get_conv_dim(1), 1, sizes.conv_kernel)
        keys = sizes.num_key_heads * sizes.key_dim
        values = sizes.num_value_heads * sizes.value_dim
        self._parts: list[tuple[int, int]] = []  # (first row, rows) of this rank
        offset = 0
        for size in (keys, keys, values):
            self._parts.append((offset + group.rank * size // group.size, size // group.size))
            offset += size
        self._is_split = group.size > 1

    def taps(self) -> torch.Tensor:
        """[channels of this rank, taps]."""
        weight = self.weight[:, 0]
        if not self._is_split:
            return weight
        return torch.cat([weight.narrow(0, *part) for part in self._parts])

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        return {
            f"{name}.weight": WeightSlot(
                target=self.weight.data, full_shape=tuple(self.weight.shape)
            )
        }


class GatedDeltaNet(WeightOwner):
    """See the module docstring."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        sizes = config.linear_attention
        if sizes is None or config.hidden_act != "silu":
            raise ModelConfigError("linear attention needs its sizes and the activation silu")
        group = get_tp_group()
        self.layer_id = layer_id
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.num_key_heads = sizes.get_num_key_heads(group.size)
        self.num_value_heads = sizes.get_num_value_heads(group.size)
        self._values_a_key = sizes.num_value_heads // sizes.num_key_heads
        self._total_value_heads = sizes.num_value_heads
        # Rows of both, key head by key head: q k v z, and b a, of the values that it serves.
        values = sizes.num_value_heads * sizes.value_dim
        keys = sizes.num_key_heads * sizes.key_dim
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, 2 * keys + 2 * values)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, 2 * sizes.num_value_heads)
        self.conv1d = CausalConv(sizes)
        # Of each value head; exponentials of sums with them would suffer from half types.
        self.A_log = _wide_parameter(self.num_value_heads)
        self.dt_bias = _wide_parameter(self.num_value_heads)
        self._first_head = group.rank * self.num_value_heads
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(values, config.hidden_size)
        self._ops = select_linear_attention_ops(torch.get_default_device())
        self._drafted = DraftedInputs()

    def forward(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """hidden_states [n, hidden] -> [n, hidden]. Collective with more than one rank."""
        step = forward_batch.step_states
        if not isinstance(step, StepStates):
            raise ValueError("the model has not said which states its layers use")
        layer_idx = step.layer_index[self.layer_id]
        states = LayerStates(
            conv=step.pool.conv_state(layer_idx), temporal=step.pool.temporal_state(layer_idx)
        )
        channels, gate = self._project(hidden_states)
        gates = self._project_gates(hidden_states)
        if step.tree is not None:
            out = self._verify(channels, gates, states, step, step.tree)
        elif step.prefill is not None:
            taps = self.conv1d.taps()
            channels = self._ops.conv_prefill(channels, states.conv, taps, step.slots, step.prefill)
            inputs = self._delta_inputs(channels, gates)
            out = self._ops.delta_prefill(inputs, states.temporal, step.slots, step.prefill)
        else:
            out = self._step(channels, gates, states.in_place(step.slots))
        out = self._ops.gated_norm(out, gate, self.norm.weight, self.norm.eps)
        return self.out_proj(out.flatten(-2))

    def _step(self, channels: torch.Tensor, gates: Gates, moves: StateMoves) -> torch.Tensor:
        """One token a request: [b, value_heads, value_dim]."""
        channels = self._ops.conv_step(channels, self.conv1d.taps(), moves.conv)
        return self._ops.delta_step(self._delta_inputs(channels, gates), moves.temporal)

    def _verify(
        self,
        channels: torch.Tensor,
        gates: Gates,
        states: LayerStates,
        step: StepStates,
        tree: TreeStates,
    ) -> torch.Tensor:
        """Node after node, each from its parent's state; [b * nodes, value_heads, value_dim]."""
        self._drafted.keep(channels, gates.a, gates.b)
        num_requests, num_nodes = tree.parents.shape
        # Of every node: row request * nodes + node.
        scratch = states.empty(num_requests * num_nodes)
        first_rows = torch.arange(num_requests, device=channels.device) * num_nodes
        of_nodes = channels.unflatten(0, (num_requests, num_nodes))
        gates_of_nodes = gates.unflatten(num_requests, num_nodes)
        outs: list[torch.Tensor] = []
        for node in range(num_nodes):
            target_rows = first_rows + node
            if node == 0:
                moves = states.to(scratch, step.slots, target_rows)
            else:
                moves = scratch.to(scratch, first_rows + tree.parents[:, node], target_rows)
            outs.append(self._step(of_nodes[:, node], gates_of_nodes.at(node), moves))
        return torch.stack(outs, dim=1).flatten(0, 1)

    def advance(self, pool: MambaPool, layer_idx: int, path: AcceptedPath) -> None:
        """Move states on by the accepted tokens of the verification before this."""
        num_requests, num_nodes = path.nodes.shape[0], path.num_nodes
        channels, a, b = self._drafted.kept(num_requests * num_nodes)
        gates = Gates(a=a, b=b)
        states = LayerStates(
            conv=pool.conv_state(layer_idx), temporal=pool.temporal_state(layer_idx)
        )
        first_rows = torch.arange(num_requests, device=channels.device) * num_nodes
        for depth in range(path.nodes.shape[1]):
            rows = first_rows + path.nodes[:, depth].clamp(min=0)
            # Who accepted less moves a state on that nobody reads.
            slots = torch.where(depth < path.lens, path.slots, path.unused_slot)
            self._step(channels[rows], gates.rows(rows), states.in_place(slots))

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, k and v of all heads side by side [n, channels], z [n, value_heads, value_dim])."""
        keys, values = self.key_dim, self._values_a_key * self.value_dim
        fused = self.in_proj_qkvz(hidden_states).unflatten(-1, (self.num_key_heads, -1))
        q, k, v, z = fused.split([keys, keys, values, values], dim=-1)
        channels = torch.cat((q.flatten(-2), k.flatten(-2), v.flatten(-2)), dim=-1)
        return channels, z.reshape(-1, self.num_value_heads, self.value_dim)

    def _project_gates(self, hidden_states: torch.Tensor) -> Gates:
        fused = self.in_proj_ba(hidden_states).unflatten(-1, (self.num_key_heads, -1))
        b, a = fused.split(self._values_a_key, dim=-1)
        shape = (-1, self.num_value_heads)
        return Gates(a=a.reshape(shape), b=b.reshape(shape))

    def _delta_inputs(self, channels: torch.Tensor, gates: Gates) -> DeltaInputs:
        keys = self.num_key_heads * self.key_dim
        q, k, v = channels.split([keys, keys, channels.shape[-1] - 2 * keys], dim=-1)
        return DeltaInputs(
            query=q.unflatten(-1, (self.num_key_heads, self.key_dim)),
            key=k.unflatten(-1, (self.num_key_heads, self.key_dim)),
            value=v.unflatten(-1, (self.num_value_heads, self.value_dim)),
            a=gates.a,
            b=gates.b,
            log_rate=self.A_log,
            dt_bias=self.dt_bias,
        )

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        return {
            f"{name}.{part}": WeightSlot(
                target=parameter.data,
                full_shape=(self._total_value_heads,),
                shard_dim=0,
                shard_start=self._first_head,
            )
            for part, parameter in (("A_log", self.A_log), ("dt_bias", self.dt_bias))
        }


def _wide_parameter(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=torch.float32), requires_grad=False)
