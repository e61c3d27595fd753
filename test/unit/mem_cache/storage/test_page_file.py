"""One page's file: nothing that is not byte for byte what was written counts as read."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest

from sglang.srt.mem_cache.storage import page_file
from sglang.srt.mem_cache.storage.page_file import (
    HEADER_BYTES,
    Expected,
    PageOwner,
    PageStatus,
    file_name,
    parse_header,
    probe_page,
    read_page,
    verify_file,
    write_page,
)

KEY = "ab" * 32
OWNER = PageOwner(model="org-model", tp_rank=1, tp_size=2)
NAMESPACE = bytes(range(32))
EXPECTED = Expected(key=KEY, owner=OWNER, namespace=NAMESPACE)
PAYLOAD = random.Random(7).randbytes(5000)
TOUCH_NS = 1_700_000_000_000_000_000


def write(path: Path, payload: bytes = PAYLOAD, key: str = KEY) -> bytes:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        views = [memoryview(payload)[:1000], memoryview(payload)[1000:]]
        expected = Expected(key=key, owner=OWNER)
        assert write_page(fd, views, expected, NAMESPACE, TOUCH_NS) == len(payload) + HEADER_BYTES
    finally:
        os.close(fd)
    return path.read_bytes()


def read(path: Path, expected: Expected = EXPECTED, size: int = len(PAYLOAD)) -> PageStatus:
    """Read; OK only if the bytes are right as well."""
    target = bytearray(size)
    views = [memoryview(target)[: size // 3], memoryview(target)[size // 3 :]]
    status = read_page(str(path), views, expected, TOUCH_NS).status
    if status is PageStatus.OK:
        assert target == PAYLOAD
    return status


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / file_name(KEY, OWNER)


def test_what_is_written_is_read(path: Path) -> None:
    data = write(path)
    assert data[HEADER_BYTES:] == PAYLOAD
    assert read(path) is PageStatus.OK
    assert probe_page(str(path), EXPECTED).status is PageStatus.OK
    assert verify_file(path)[0] is PageStatus.OK
    meta = parse_header(data[:HEADER_BYTES])
    assert meta is not None
    assert (meta.key, meta.owner, meta.namespace) == (KEY, OWNER, NAMESPACE)
    assert meta.payload_bytes == len(PAYLOAD)


def test_pages_larger_than_a_piece_and_many_buffers(tmp_path: Path) -> None:
    payload = random.Random(1).randbytes(page_file._PIECE_BYTES * 2 + 12_345)
    path = tmp_path / file_name(KEY, OWNER)
    write(path, payload)
    target = bytearray(len(payload))
    step = 500  # over 1,000 buffers: more than one system call takes
    views = [memoryview(target)[i : i + step] for i in range(0, len(target), step)]
    assert len(views) > page_file._MAX_BUFFERS
    assert read_page(str(path), views, EXPECTED, TOUCH_NS).status is PageStatus.OK
    assert target == payload


def test_a_missing_file(path: Path) -> None:
    assert read(path) is PageStatus.MISSING
    assert probe_page(str(path), EXPECTED).status is PageStatus.MISSING


def test_every_single_bit_flip_in_the_header_is_seen(path: Path) -> None:
    data = bytearray(write(path))
    fd = os.open(path, os.O_RDWR)
    for position in range(HEADER_BYTES):
        for bit in range(8):
            os.pwrite(fd, bytes([data[position] ^ 1 << bit]), position)
            assert probe_page(str(path), EXPECTED).status is PageStatus.DAMAGED, (position, bit)
        os.pwrite(fd, data[position : position + 1], position)
    os.close(fd)
    assert read(path) is PageStatus.OK


def flips(path: Path, data: bytes, count: int, seed: int) -> list[PageStatus]:
    """Status of a read after each of ``count`` random single-bit flips in the payload."""
    rng = random.Random(seed)
    fd = os.open(path, os.O_RDWR)
    found = []
    for _ in range(count):
        position = rng.randrange(HEADER_BYTES, len(data))
        os.pwrite(fd, bytes([data[position] ^ 1 << rng.randrange(8)]), position)
        target = bytearray(len(PAYLOAD))
        found.append(read_page(str(path), [memoryview(target)], EXPECTED, TOUCH_NS).status)
        os.pwrite(fd, data[position : position + 1], position)
    os.close(fd)
    return found


def test_a_thousand_bit_flips_in_the_body_are_seen(path: Path) -> None:
    data = write(path)
    assert set(flips(path, data, 1000, seed=3)) == {PageStatus.DAMAGED}
    assert read(path) is PageStatus.OK


def test_without_the_checksum_flips_would_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_file, "_crc32", lambda data, value: 0)
    data = write(path)
    assert set(flips(path, data, 50, seed=3)) == {PageStatus.OK}


def test_bursts_and_zeroed_blocks_are_seen(path: Path) -> None:
    data = write(path)
    rng = random.Random(11)
    for length in (2, 16, 512, 4096):
        start = rng.randrange(HEADER_BYTES, len(data) - length)
        for block in (bytes(length), rng.randbytes(length)):
            path.write_bytes(data[:start] + block + data[start + length :])
            assert read(path) is PageStatus.DAMAGED


def test_truncation_anywhere_and_tails_are_seen(path: Path) -> None:
    data = write(path)
    for length in [*range(0, len(data), 512), 1, HEADER_BYTES - 1, HEADER_BYTES + 1, len(data) - 1]:
        path.write_bytes(data[:length])
        assert read(path) is PageStatus.DAMAGED, length
        assert probe_page(str(path), EXPECTED).status is PageStatus.DAMAGED, length
    path.write_bytes(data + b"\0")
    assert read(path) is PageStatus.DAMAGED
    assert probe_page(str(path), EXPECTED).status is PageStatus.DAMAGED


def test_swapped_files_are_foreign(tmp_path: Path) -> None:
    paths = []
    for key in (KEY, "cd" * 32):
        paths.append(tmp_path / file_name(key, OWNER))
        write(paths[-1], key=key)
    a, b = (path.read_bytes() for path in paths)
    paths[0].write_bytes(b)
    paths[1].write_bytes(a)
    assert read(paths[0]) is PageStatus.FOREIGN
    assert verify_file(paths[0])[0] is PageStatus.FOREIGN


@pytest.mark.parametrize(
    "expected",
    [
        Expected(key=KEY, owner=OWNER, namespace=bytes(32)),
        Expected(key=KEY, owner=PageOwner(model="org-model", tp_rank=0, tp_size=2)),
        Expected(key=KEY, owner=PageOwner(model="other", tp_rank=1, tp_size=2)),
        Expected(key=f"m:{KEY}", owner=OWNER),
        Expected(key=KEY, owner=OWNER, payload_bytes=len(PAYLOAD) - 1),
    ],
)
def test_another_identity_is_foreign(path: Path, expected: Expected) -> None:
    write(path)
    assert read(path, expected) is PageStatus.FOREIGN
    assert probe_page(str(path), expected).status is PageStatus.FOREIGN


def test_a_page_of_another_size_is_foreign(path: Path) -> None:
    write(path)
    assert read(path, size=len(PAYLOAD) + 1) is PageStatus.FOREIGN
    assert read(path, size=len(PAYLOAD) - 1) is PageStatus.FOREIGN


def test_other_versions_and_wrong_files_are_damage(path: Path, tmp_path: Path) -> None:
    data = write(path)
    future = bytearray(data[: HEADER_BYTES - 4])
    future[8] += 1
    path.write_bytes(
        bytes(future) + page_file._CHECKSUM.pack(page_file.checksum([memoryview(future)]))
    )
    assert read(path) is PageStatus.DAMAGED
    path.unlink()
    os.mkfifo(path)  # must not block
    with pytest.raises(OSError):
        probe_page(str(path), EXPECTED)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        read(path)


def test_both_checksum_implementations_agree() -> None:
    for size in (0, 1, 63, 4096, 100_001):
        data = memoryview(random.Random(size).randbytes(size))
        assert page_file.checksum([data[: size // 2], data[size // 2 :]]) == zlib.crc32(data)


def test_a_header_that_does_not_fit_is_refused() -> None:
    meta = parse_header(bytes(HEADER_BYTES))
    assert meta is None
    with pytest.raises(ValueError, match="32 bytes"):
        page_file.pack_header(_meta(namespace=b"x"))
    with pytest.raises(ValueError, match="does not fit"):
        page_file.pack_header(_meta(model="m" * 500))


def _meta(namespace: bytes = NAMESPACE, model: str = "m") -> page_file.PageMeta:
    return page_file.PageMeta(
        key=KEY,
        owner=PageOwner(model=model),
        namespace=namespace,
        payload_bytes=1,
        payload_checksum=0,
        created_ns=0,
    )
