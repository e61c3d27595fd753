"""Names shared by the memory saver, the trainers and the weight updater.

Pure constants: no behaviour, no imports from the project.
"""

from __future__ import annotations

# Tags of `release_memory_occupation` / `resume_memory_occupation`.
GPU_MEMORY_TYPE_WEIGHTS = "weights"
GPU_MEMORY_TYPE_KV_CACHE = "kv_cache"
GPU_MEMORY_TYPE_CUDA_GRAPH = "cuda_graph"
GPU_MEMORY_ALL_TYPES: list[str] = [
    GPU_MEMORY_TYPE_WEIGHTS,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_CUDA_GRAPH,
]

# Request ids with this prefix belong to health probes: not counted, not logged, dropped when busy.
HEALTH_CHECK_RID_PREFIX = "HEALTH_CHECK"
