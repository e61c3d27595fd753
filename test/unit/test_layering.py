"""The import rules of the package: layers, cycles, light front processes, no stray torch.cuda.

Every import counts: at module level, inside functions, and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang.test.source_trees import syntax_tree

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "sglang"

# First match wins. A module may import its own layer and smaller numbers; F sees 0 and 1, T sees
# 0, 1 and F. Children are reached by name, not by import.
LAYERS: tuple[tuple[str, str], ...] = (
    ("sglang.srt.constants", "0"),
    ("sglang.srt.environ", "0"),
    ("sglang.srt.cache_folder", "0"),
    ("sglang.srt.utils*", "0"),
    ("sglang.srt.platforms*", "0"),
    ("sglang.srt.patch_torch", "0"),
    ("sglang.version", "0"),
    ("sglang.srt.server_args*", "1"),
    ("sglang.srt.configs*", "1"),
    ("sglang.srt.sampling.sampling_params", "1"),
    ("sglang.srt.managers.io_struct", "1"),
    ("sglang.srt.managers.ipc", "1"),
    ("sglang.srt.weight_sync*", "1"),
    ("sglang.srt.observability*", "1"),
    ("sglang.srt.distributed*", "2"),
    ("sglang.srt.mem_cache*", "3"),
    ("sglang.srt.managers.cache_controller", "3"),
    ("sglang.srt.managers.schedule_batch", "4"),
    ("sglang.srt.managers.finish_check", "4"),
    ("sglang.srt.constrained*", "4"),
    ("sglang.srt.model_executor.forward_batch_info", "4"),
    ("sglang.srt.model_executor.forward_context", "4"),
    ("sglang.srt.speculative.spec_info", "4"),
    ("sglang.srt.speculative.eagle_info", "4"),
    ("sglang.srt.speculative.spec_counters", "4"),
    ("sglang.srt.sampling*", "4"),
    ("sglang.srt.layers*", "5"),
    ("sglang.srt.models*", "6"),
    ("sglang.srt.model_loader*", "6"),
    ("sglang.srt.model_executor*", "7"),
    ("sglang.srt.managers.tp_worker", "7"),
    ("sglang.srt.speculative*", "8"),
    ("sglang.srt.managers.tokenizer_*", "F"),
    ("sglang.srt.managers.detokenizer_manager", "F"),
    ("sglang.srt.managers.request_errors", "F"),
    ("sglang.srt.managers.request_logger", "F"),
    ("sglang.srt.managers.request_normalizer", "F"),
    ("sglang.srt.managers.request_state", "F"),
    ("sglang.srt.managers.client_watch", "F"),
    ("sglang.srt.managers.prefix_warm_up", "F"),
    ("sglang.srt.managers.health", "F"),
    ("sglang.srt.entrypoints.openai*", "F"),
    ("sglang.srt.managers", "0"),  # the package itself, which is empty
    ("sglang.srt.managers.*", "9"),
    ("sglang.srt.entrypoints*", "T"),
    ("sglang.srt", "0"),
    ("sglang.test*", "test"),
    ("sglang*", "T"),
)

# Imports of our own modules inside functions: what is loaded late on purpose, and why it is needed
# is written at the place.
LATE_IMPORTS = {
    ("sglang", "sglang.srt.entrypoints.engine"),
    ("sglang", "sglang.srt.server_args"),
    ("sglang.cli", "sglang.launch_server"),
    ("sglang.launch_server", "sglang.srt.entrypoints.http_server"),
    ("sglang.srt.platforms", "sglang.srt.platforms.cpu"),
    ("sglang.srt.platforms", "sglang.srt.platforms.cuda"),
    ("sglang.srt.constrained.base_grammar_backend", "sglang.srt.constrained.llguidance_backend"),
}

# Where `torch.cuda` may be written.
CUDA_PLACES = ("srt/platforms/", "triton_ops/", "graph_capture.py", "test/")

FRONT_MODULES = (
    "sglang",
    "sglang.cli",
    "sglang.launch_server",
    "sglang.srt.utils",
    "sglang.srt.platforms",
    "sglang.srt.server_args",
    "sglang.srt.managers.ipc",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.entrypoints.launch",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
)


_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


def _imports(node: ast.AST, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, is inside a function) of every import. Expressions hold none and are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, is_late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports are not used"
            yield from ((f"{child.module}.{alias.name}", is_late) for alias in child.names)
        elif isinstance(child, _BLOCKS):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, is_late or is_function)


def test_imports_are_found_wherever_they_are() -> None:
    text = """
import a
if x:
    from b import c
else:
    try:
        import d
    except E:
        import e
    finally:
        with f: import g
async def h():
    for i in j:
        match k:
            case 1: import l
    class M:
        while n: import o
"""
    found = dict(_imports(ast.parse(text)))
    assert found == {
        **dict.fromkeys(("a", "b.c", "d", "e", "g"), False),
        **dict.fromkeys(("l", "o"), True),
    }


@functools.cache
def _modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def _resolve(name: str, modules: dict[str, Path]) -> str | None:
    """The module behind `import name` or `from module import name`."""
    if name in modules:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in modules else None


@functools.cache
def _edges() -> list[tuple[str, str, bool]]:
    modules = _modules()
    edges = []
    for name, path in modules.items():
        for imported, is_late in _imports(syntax_tree(path)):
            target = _resolve(imported, modules)
            if target is not None and target != name:
                edges.append((name, target, is_late))
    return edges


@functools.cache
def _layer(module: str) -> str:
    for pattern, layer in LAYERS:
        if fnmatch.fnmatchcase(module, pattern):
            return layer
    raise AssertionError(f"{module} has no layer: add it to the table")


def _may_import(layer: str, other: str) -> bool:
    if layer == "test":
        return True
    if layer == "T":
        return other in ("0", "1", "F", "T")
    if layer == "F":
        return other in ("0", "1", "F")
    return other.isdigit() and int(other) <= int(layer)


def _cycles(edges: list[tuple[str, str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan, 1972)."""
    graph: dict[str, list[str]] = {}
    for source, target in edges:
        graph.setdefault(source, []).append(target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, []):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(group)

    for node in list(graph):
        if node not in index:
            visit(node)
    return groups


def test_modules_import_only_their_own_layer_and_lower_ones() -> None:
    bad = [
        f"{source} ({_layer(source)}) -> {target} ({_layer(target)})"
        for source, target, _ in _edges()
        if not _may_import(_layer(source), _layer(target))
    ]
    assert bad == []


def test_there_are_no_import_cycles() -> None:
    # A package that re-exports its modules is no partner in a cycle with them.
    edges = [
        (source, target)
        for source, target, _ in _edges()
        if not source.startswith(target + ".") and (source, target) not in LATE_IMPORTS
    ]
    assert _cycles(edges) == []


def test_the_cycle_finder_finds_cycles() -> None:
    assert _cycles([("a", "b"), ("b", "c")]) == []
    assert sorted(_cycles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])[0]) == ["a", "b", "c"]


def test_late_imports_of_own_modules_are_listed() -> None:
    late = {
        (source, target)
        for source, target, is_late in _edges()
        if is_late and _layer(source) != "test"
    }
    assert late - LATE_IMPORTS == set()


def test_torch_cuda_is_used_only_by_the_platform_and_kernels() -> None:
    bad = []
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE).as_posix()
        if any(place in relative for place in CUDA_PLACES):
            continue
        if "cuda" not in path.read_text():
            continue
        for node in ast.walk(syntax_tree(path)):
            is_attribute = (
                isinstance(node, ast.Attribute)
                and node.attr == "cuda"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            )
            is_import = isinstance(node, ast.Import) and any(
                alias.name.startswith("torch.cuda") for alias in node.names
            )
            is_from = isinstance(node, ast.ImportFrom) and (
                (node.module or "").startswith("torch.cuda")
                or (node.module == "torch" and any(a.name == "cuda" for a in node.names))
            )
            if is_attribute or is_import or is_from:
                bad.append(f"{relative}:{getattr(node, 'lineno', 0)}")
    assert bad == []


def test_front_processes_do_not_load_torch_or_transformers() -> None:
    # In one process, lightest first: what one loads would still be there after the others.
    code = (
        "import importlib, sys\n"
        f"for name in {FRONT_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'scipy', 'pandas'} & sys.modules.keys()\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} loads {sorted(heavy)}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_scheduler_process_does_not_load_transformers() -> None:
    code = (
        "import sys, sglang.srt.managers.scheduler_process\n"
        "sys.exit(' '.join(m for m in ('transformers', 'fastapi') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_modules_begin_with_a_docstring_and_postponed_annotations() -> None:
    bad = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if not text.strip():
            continue  # an empty package file
        tree = syntax_tree(path)
        has_future = "from __future__ import annotations" in text
        if ast.get_docstring(tree) is None or not (has_future or len(tree.body) <= 2):
            bad.append(path.relative_to(PACKAGE).as_posix())
    assert bad == []
