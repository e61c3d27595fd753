"""Rules about the repository's own text that no other tool checks."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from sglang.test.source_trees import syntax_tree

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("python", "test", "scripts", "benchmark")
MAX_LINES = 800
# Folders in which one machine differs from the next. Temporary folders and /dev are the same
# everywhere; a home folder is written with ~.
MACHINE_PATH = re.compile(r"(?<![\w.:/~])/(?:root|home|work|Users|mnt|opt|data)/[\w.]")


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below the given folders of the repository."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "build" not in path.parts)


def text_files() -> list[Path]:
    """Return the files that git tracks or would track, or all sources where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        return python_files(*SOURCE_FOLDERS)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def machine_paths(text: str) -> list[str]:
    """Return the lines of ``text`` that name a folder of one particular machine."""
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line)]


def print_calls(tree: ast.AST) -> list[int]:
    """Return the lines on which ``print`` is called."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def test_every_python_file_parses_and_says_what_it_is() -> None:
    undocumented = []
    for path in python_files(*SOURCE_FOLDERS):
        tree = syntax_tree(path)
        # An empty __init__.py only makes a folder a package.
        if tree.body and ast.get_docstring(tree) is None:
            undocumented.append(relative(path))
    assert not undocumented, f"without module docstring: {undocumented}"


def test_no_file_outgrows_its_purpose() -> None:
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(*SOURCE_FOLDERS)
    }
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}


def test_the_server_logs_and_does_not_print() -> None:
    printing = {}
    for path in python_files("python/sglang/srt"):
        if "print(" not in path.read_text(encoding="utf-8"):
            continue  # a call that the formatter has seen is written like that
        calls = print_calls(syntax_tree(path))
        if calls:
            printing[relative(path)] = calls
    assert not printing, f"print() on lines {printing}"


def test_no_path_of_one_machine() -> None:
    found = {}
    for path in text_files():
        if path == Path(__file__).resolve():
            continue  # its own examples would match
        try:
            lines = machine_paths(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # no text
        if lines:
            found[relative(path)] = lines
    assert not found


def test_readme_names_both_scripts_and_every_document_it_names_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in ("scripts/serve.sh", "scripts/test.sh"):
        assert script in readme
        assert (ROOT / script).stat().st_mode & 0o100, f"{script} cannot be executed"
    named = re.findall(r"\]\(([\w./-]+\.(?:md|sh|py))\)", readme)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("cd /home/someone/project", True),
        ("MODEL=/" + "work/models/x", True),
        ('open("/' + 'root/.cache/file")', True),
        ("~/.cache/hispec", False),
        ("GET /v1/models", False),
        ("a/home/page and http://host/data/x", False),
        ("/tmp/socket and /dev/shm/x", False),
    ],
)
def test_the_path_rule_can_tell(text: str, is_bad: bool) -> None:
    assert bool(machine_paths(text)) is is_bad


def test_the_print_rule_can_tell() -> None:
    assert print_calls(ast.parse("x = 1\nprint(x)\n")) == [2]
    assert print_calls(ast.parse("logger.info('print(x)')\nself.print(1)\n")) == []
