"""Capacity on paper: what each tier of the cache must carry for a number of replicas.

Owns: the formulas of docs/scaling.md and the figures that go into them. Does not own: pictures
(`benchmark/plot_scaling.py`). Pure arithmetic, no measurement.

Everything follows from figures of a replica: `prefill_rate` P in tokens a second, `kv_bytes` b of
a token, and `read_bandwidth`, the bytes a second of its decode steps. A step reads the weights and
the KV of all requests of the batch, so the answered tokens a second D follow from how long those
are.
Restoring a token takes b/B seconds of a tier with bandwidth B, computing it 1/P: a tier answers
sooner than the GPU where B > P·b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GB = 1e9
_ROUNDS = 200  # of the fixed point; it is reached after some ten


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """One replica: a model on the GPUs that it needs. Bytes, seconds, tokens."""

    name: str
    num_gpus: int
    weight_bytes: float
    kv_bytes: float
    prefill_rate: float
    read_bandwidth: float  # of a GPU, in decode steps
    decode_batch: int = 64

    def decode_step_bytes(self, work: Workload) -> float:
        """What a GPU reads in a decode step: its part of the weights, and of the KV of requests
        that are half answered on average."""
        context = work.prompt_len + work.output_len / 2
        return (self.weight_bytes + self.decode_batch * context * self.kv_bytes) / self.num_gpus

    def decode_rate(self, work: Workload) -> float:
        """D: answered tokens a second of a full batch."""
        return self.decode_batch * self.read_bandwidth / self.decode_step_bytes(work)

    @property
    def break_even_bandwidth(self) -> float:
        """Bytes a second from which restoring is faster than computing: P·b."""
        return self.prefill_rate * self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a GPU has to itself: its memory and its share of the host."""

    device_bytes: float = 141 * GB
    device_share: float = 0.88  # of memory that weights and KV may take
    host_bytes: float = 230 * GB  # of a host with 2 TB and eight GPUs
    host_bandwidth: float = 53.4 * GB  # docs/performance.md, load by the copy engines
    network_bandwidth: float = 50 * GB / 8  # 400 Gbit/s, shared by eight GPUs
    storage_efficiency: float = 0.78  # docs/performance.md, file backend beside plain reads

    @property
    def storage_bandwidth(self) -> float:
        return self.network_bandwidth * self.storage_efficiency


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of a kind. `reusable`: share of a prompt that somebody has asked before."""

    prompt_len: int = 4096
    output_len: int = 256
    reusable: float = 0.85
    mean_gap_s: float = 120.0  # between a prompt and the next that repeats it, exponential
    utilization: float = 0.7
    affinity: float = 1.0  # of the router: 1 always to the same replica, 0 to any
    storage_retention_s: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the tiers of `num_replicas` replicas carry. Rates are totals unless a name says not."""

    num_replicas: int
    shares: dict[str, float]  # of prompt tokens, by tier
    gain: float  # requests a second ÷ those without any cache
    requests_per_s: float
    device_retention_s: float
    host_retention_s: float
    host_bandwidth_per_gpu: float
    storage_read: float
    storage_write: float
    storage_bytes: float

    @property
    def hit_rate(self) -> float:
        return sum(self.shares.values())


# Llama-3.1-8B on one H200, measured with an earlier version (docs/performance.md has what it is
# since): 8,192 tokens in 216 ms; 10,469 tokens a second at batch 64 with 512 tokens in, which is
# 163.6 steps of 20.5 GB. Longer contexts are taken to be read as fast.
_READ_BANDWIDTH = 10_469 / 64 * 20.5 * GB
SPEC_8B = ReplicaSpec(
    name="8B, 1 GPU",
    num_gpus=1,
    weight_bytes=16.06 * GB,
    kv_bytes=2 * 32 * 8 * 128 * 2,
    prefill_rate=38_000,
    read_bandwidth=_READ_BANDWIDTH,
)
# Llama-3.1-70B on four: not measured. Products scale with the parameters (70.6 to 8.03 thousand
# million), and four GPUs are taken to do the work of 0.8 × 4, in decode as well.
SPEC_70B = ReplicaSpec(
    name="70B, 4 GPUs",
    num_gpus=4,
    weight_bytes=141 * GB,
    kv_bytes=2 * 80 * 8 * 128 * 2,
    prefill_rate=38_000 * (8.03 / 70.6) * 4 * 0.8,
    read_bandwidth=_READ_BANDWIDTH * 0.8,
)
SPECS = (SPEC_8B, SPEC_70B)
REPLICA_COUNTS = (1, 8, 64, 1024)


def device_tokens(spec: ReplicaSpec, hardware: Hardware) -> float:
    """Tokens that the device pools of a replica hold."""
    room = spec.num_gpus * hardware.device_bytes * hardware.device_share - spec.weight_bytes
    return room / spec.kv_bytes


def host_tokens(spec: ReplicaSpec, hardware: Hardware) -> float:
    return spec.num_gpus * hardware.host_bytes / spec.kv_bytes


def restore_seconds(spec: ReplicaSpec, bandwidth_per_gpu: float, num_tokens: float) -> float:
    """Time to bring KV back; every GPU of the replica brings its share."""
    return num_tokens * spec.kv_bytes / (spec.num_gpus * bandwidth_per_gpu)


def compute_seconds(spec: ReplicaSpec, num_tokens: float) -> float:
    return num_tokens / spec.prefill_rate


def shortest_worth(spec: ReplicaSpec, bandwidth_per_gpu: float, latency_s: float) -> float:
    """Tokens from which a hit answers sooner than computing, for a tier that takes `latency_s`
    before its first byte; infinite where its bandwidth is below break-even."""
    saved = compute_seconds(spec, 1) - restore_seconds(spec, bandwidth_per_gpu, 1)
    return latency_s / saved if saved > 0 else math.inf


def break_even_hit_rate(spec: ReplicaSpec, work: Workload, cost: float) -> float:
    """The share of prompt tokens that a tier must add to pay for itself.

    `cost` is the tier's price as a share of the replica's. A request takes T = n/P + o/D seconds
    of the GPU, hits take off h·n/P, so requests a second rise by T/(T − h·n/P); worth the price
    where that exceeds 1 + cost.
    """
    prompt_s = compute_seconds(spec, work.prompt_len)
    total_s = prompt_s + work.output_len / spec.decode_rate(work)
    return cost / (1 + cost) * total_s / prompt_s


def remembers_s(capacity: float, rate: float, work: Workload) -> float:
    """How long ago a conversation may have been here for the last time to be still there.

    Least recently used goes first, and each takes the room of a prompt and its answer. Of the
    rate × gap conversations that go on, rate × gap × (1 − exp(−t/gap)) came by within t; the t for
    which these fill the tier (Che's approximation of LRU). Infinite where all of them fit.
    """
    room = capacity / (work.prompt_len + work.output_len)
    share = room / (rate * work.mean_gap_s)
    return math.inf if share >= 1 else -work.mean_gap_s * math.log1p(-share)


def estimate(spec: ReplicaSpec, num_replicas: int, hardware: Hardware, work: Workload) -> Load:
    """The steady state: hit shares decide the rate, the rate how long a tier remembers.

    A prompt is continued after an exponential gap; it is a hit of the nearest tier that still
    remembers it. Device and host only count for requests that come back to the same replica. The
    host tier has a copy of all that is on the device (`write_through`). What the network cannot
    bring is computed.
    """
    stays = work.affinity + (1 - work.affinity) / num_replicas

    def continued_within(seconds: float) -> float:
        return 1 - math.exp(-seconds / work.mean_gap_s)

    def gpu_seconds(hit_rate: float) -> float:
        prompt_s = compute_seconds(spec, work.prompt_len * (1 - hit_rate))
        return prompt_s + work.output_len / spec.decode_rate(work)

    shares = {"device": 0.0, "host": 0.0, "storage": 0.0}
    rate = new_tokens = device_s = host_s = 0.0
    for _ in range(_ROUNDS):
        hit_rate = sum(shares.values())
        rate = work.utilization / gpu_seconds(hit_rate)
        new_tokens = rate * (work.prompt_len * (1 - hit_rate) + work.output_len)
        here = replace(work, mean_gap_s=work.mean_gap_s / stays)
        device_s = remembers_s(device_tokens(spec, hardware), rate, here)
        host_s = max(device_s, remembers_s(host_tokens(spec, hardware), rate, here))
        on_device = work.reusable * stays * continued_within(device_s)
        on_host = work.reusable * stays * continued_within(host_s) - on_device
        stored = work.reusable * continued_within(work.storage_retention_s)
        read_limit = spec.num_gpus * hardware.storage_bandwidth
        can_read = read_limit / (rate * work.prompt_len * spec.kv_bytes)
        wanted = {
            "device": on_device,
            "host": on_host,
            "storage": min(can_read, max(0.0, stored - on_device - on_host)),
        }
        shares = {tier: (shares[tier] + wanted[tier]) / 2 for tier in shares}
    read = rate * work.prompt_len * spec.kv_bytes
    return Load(
        num_replicas=num_replicas,
        shares=shares,
        gain=gpu_seconds(0) / gpu_seconds(sum(shares.values())),
        requests_per_s=num_replicas * rate,
        device_retention_s=device_s,
        host_retention_s=host_s,
        host_bandwidth_per_gpu=read * (shares["host"] + shares["storage"]) / spec.num_gpus,
        storage_read=num_replicas * read * shares["storage"],
        storage_write=num_replicas * new_tokens * spec.kv_bytes,
        storage_bytes=num_replicas * new_tokens * spec.kv_bytes * work.storage_retention_s,
    )


def replicas_carried(load: Load, storage_bandwidth: float) -> float:
    """How many such replicas a storage service of a bandwidth serves, reads and writes."""
    return load.num_replicas * storage_bandwidth / (load.storage_read + load.storage_write)


def without_storage(work: Workload) -> Workload:
    """The same load where nothing is shared: hits are those of each replica's own tiers."""
    return replace(work, storage_retention_s=0.0)
