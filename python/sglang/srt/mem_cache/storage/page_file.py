"""One page in one file: its name, its header, reading it back verified and writing it.

Owns the byte format and the names. Does not decide what is written, kept or removed
(``HiCacheFile`` and ``folder_quota.py``). Pure functions over files: any thread.

Layout of a file, little endian::

    0      header, HEADER_BYTES long: fixed fields, zero padding, CRC-32 of all before it
    512    payload: the page's bytes in the host pool's storage order

The checksums are the CRC-32 of zlib and gzip: any flipped bit, and any burst of up to 32 bits,
changes it for certain, other damage goes unseen once in 2**32. ``isal`` computes it at memory
speed (35 GB/s measured against 2 to 4 of the standard library) and gives the same value, so files
do not depend on which of the two is installed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.mem_cache.page_key import PageHash, make_storage_key, parse_storage_key

try:
    from isal import isal_zlib

    _crc32: Callable[[Any, int], int] = isal_zlib.crc32
    HAS_FAST_CHECKSUM = True
except ImportError:
    _crc32 = zlib.crc32
    HAS_FAST_CHECKSUM = False

HEADER_BYTES = 512
FORMAT_VERSION = 1
_MAGIC = b"HSPAGE\r\n"  # a transfer in text mode would change it
# magic, version, header length, namespace, payload length, payload checksum, created (ns),
# tp rank, tp size, pp rank, pp size (-1: shared by all ranks), key length, model length
_FIXED = struct.Struct("<8sII32sQIQ4iHH")
_CHECKSUM = struct.Struct("<I")
_MAX_BUFFERS = 1000  # of one preadv/pwritev call; Linux takes 1024
# A page goes through the checksum piece by piece. Small ones are still in the core's cache then, 5
# to 20 % faster where nobody else runs; but after each call the thread stands in line for the
# interpreter, and beside a scheduler that decodes few calls count for more.
_PIECE_BYTES = 8 << 20
_MAX_MODEL_BYTES = 128
SHARED_RANK = -1

_FILE_NAME = re.compile(
    r"(?P<hash>[0-9a-f]{64})(?:\.(?P<pool>[a-z]+)(?:_(?P<suffix>[0-9a-f]{16}))?)?_(?P<owner>.+)\.bin",
    re.ASCII,
)
TEMP_PREFIX = ".hicache-"
TEMP_SUFFIX = ".tmp"

Buffers = Sequence[memoryview]  # of bytes, contiguous


class PageStatus(Enum):
    """What became of a look at a page's file."""

    OK = "ok"
    MISSING = "missing"
    DAMAGED = "damaged"  # short, torn, flipped, of an unknown version
    FOREIGN = "foreign"  # whole, but of another key, model, rank, namespace or size


# The next three are tuples, not dataclasses: each of a transfer's pages makes them anew.


class PageOwner(NamedTuple):
    """Whose pages these are. ``SHARED_RANK``: all tensor-parallel ranks share them."""

    model: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def file_suffix(self) -> str:
        """The end of a file name before ``.bin``."""
        text = f"_{self.model}"
        if self.tp_rank != SHARED_RANK:
            text += f"_{self.tp_rank}_{self.tp_size}"
        if self.pp_size > 1:
            text += f"_{self.pp_size}_{self.pp_rank}"
        return text

    @property
    def default_namespace(self) -> bytes:
        """The namespace of pages that are written without one."""
        return hashlib.sha256(b"no namespace given" + self.file_suffix.encode()).digest()


class PageMeta(NamedTuple):
    """Content of a header. ``namespace``: 32 bytes, seed of the hash chain that the page is of."""

    key: str
    owner: PageOwner
    namespace: bytes
    payload_bytes: int
    payload_checksum: int
    created_ns: int


class Expected(NamedTuple):
    """What a header must say to count. None: not compared."""

    key: str
    owner: PageOwner
    namespace: bytes | None = None
    payload_bytes: int | None = None

    def accepts(self, meta: PageMeta) -> bool:
        """Whether the file that has this header is the page that is looked for."""
        return (
            meta.key == self.key
            and meta.owner == self.owner
            and (self.namespace is None or meta.namespace == self.namespace)
            and (self.payload_bytes is None or meta.payload_bytes == self.payload_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """Parts of a file name; ``owner`` as written, with its leading underscore."""

    key: str
    pool: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRead:
    """Outcome of a look; ``inode`` identifies the file (0: none), ``size`` is its length."""

    status: PageStatus
    inode: int = 0
    size: int = 0


def model_part(model_name: str | None) -> str:
    """Return the model's name as it stands in file names: no separators, at most 128 bytes."""
    text = re.sub(r"[/\x00-\x1f\x7f]", "-", model_name or "unnamed")
    data = text.encode("utf-8", "replace")
    if len(data) <= _MAX_MODEL_BYTES:
        return data.decode("utf-8")
    digest = hashlib.sha256(data).hexdigest()[:16]
    head = data[: _MAX_MODEL_BYTES - len(digest) - 1].decode("utf-8", "ignore")
    return f"{head}-{digest}"


def file_name(key: str, owner: PageOwner) -> str:
    """Return the name of the page's file. Raises ValueError when ``key`` is no storage key."""
    pool, page_hash, suffix = parse_storage_key(key)
    middle = "" if pool == "kv" and suffix is None else f".{pool}"
    if suffix is not None:
        middle += f"_{suffix}"
    return f"{page_hash}{middle}{owner.file_suffix}.bin"


def parse_file_name(name: str) -> FileName | None:
    """Read a file name; None when it is not that of a page."""
    match = _FILE_NAME.fullmatch(name)
    if match is None:
        return None
    pool = match["pool"] or "kv"
    try:
        key = make_storage_key(pool, PageHash(match["hash"]), match["suffix"])
    except ValueError:
        return None
    return FileName(key=key, pool=pool, owner=f"_{match['owner']}")


def checksum(buffers: Buffers, value: int = 0) -> int:
    """Return the CRC-32 of the buffers' bytes, one after the other; ``value``: of those before."""
    for buffer in buffers:
        value = _crc32(buffer, value)
    return value


def pack_header(meta: PageMeta) -> bytes:
    """Return the HEADER_BYTES bytes of a header. Raises ValueError when a field does not fit."""
    key, model = meta.key.encode(), meta.owner.model.encode()
    if len(meta.namespace) != 32:
        raise ValueError(f"a namespace digest has 32 bytes, not {len(meta.namespace)}")
    owner = meta.owner
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        meta.namespace,
        meta.payload_bytes,
        meta.payload_checksum,
        meta.created_ns,
        owner.tp_rank,
        owner.tp_size,
        owner.pp_rank,
        owner.pp_size,
        len(key),
        len(model),
    )
    body = fixed + key + model
    room = HEADER_BYTES - _CHECKSUM.size
    if len(body) > room:
        raise ValueError(f"header of {len(body)} bytes does not fit in {room}")
    body = body.ljust(room, b"\0")
    return body + _CHECKSUM.pack(zlib.crc32(body))


def parse_header(data: bytes | bytearray | memoryview) -> PageMeta | None:
    """Read a header; None when it is short, damaged or of another version."""
    if len(data) != HEADER_BYTES:
        return None
    body = bytes(data[: -_CHECKSUM.size])
    if _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] != zlib.crc32(body):
        return None
    fields = _FIXED.unpack_from(body)
    if fields[:3] != (_MAGIC, FORMAT_VERSION, HEADER_BYTES):
        return None
    namespace, payload_bytes, payload_checksum, created_ns = fields[3:7]
    key_len, model_len = fields[11:13]
    texts = body[_FIXED.size : _FIXED.size + key_len + model_len]
    try:
        key, model = texts[:key_len].decode(), texts[key_len:].decode()
    except UnicodeDecodeError:
        return None
    owner = PageOwner(
        model=model, tp_rank=fields[7], tp_size=fields[8], pp_rank=fields[9], pp_size=fields[10]
    )
    return PageMeta(
        key=key,
        owner=owner,
        namespace=namespace,
        payload_bytes=payload_bytes,
        payload_checksum=payload_checksum,
        created_ns=created_ns,
    )


def probe_page(path: str, expected: Expected) -> PageRead:
    """Check presence, header and length, not the payload. Raises OSError other than "missing"."""
    fd = _open_page(path)
    if fd is None:
        return PageRead(status=PageStatus.MISSING)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        meta = parse_header(os.pread(fd, HEADER_BYTES, 0))
    finally:
        os.close(fd)
    if meta is None or info.st_size != HEADER_BYTES + meta.payload_bytes:
        return PageRead(status=PageStatus.DAMAGED, inode=info.st_ino)
    status = PageStatus.OK if expected.accepts(meta) else PageStatus.FOREIGN
    return PageRead(status=status, inode=info.st_ino, size=info.st_size)


def read_page(path: str, buffers: Buffers, expected: Expected, touch_ns: int) -> PageRead:
    """Read a page's payload into ``buffers`` (writable) and verify it.

    ``touch_ns``: the modification time that a page which is whole gets, its recency. The content of
    ``buffers`` is undefined unless the status is OK. Raises OSError other than "missing".
    """
    fd = _open_page(path)
    if fd is None:
        return PageRead(status=PageStatus.MISSING)
    try:
        header = bytearray(HEADER_BYTES)
        # One byte more than there should be: a longer file shows without another system call.
        beyond = memoryview(bytearray(1))
        pieces = list(_pieces([memoryview(header), *buffers, beyond]))
        num_read = value = 0
        for number, piece in enumerate(pieces):
            num_read += _read_fully(fd, piece, num_read)
            is_first, is_last = number == 0, number == len(pieces) - 1
            value = checksum(piece[is_first : len(piece) - is_last], value)
        meta = parse_header(header)
        if meta is None:
            status = PageStatus.DAMAGED
        elif not expected.accepts(meta) or meta.payload_bytes != _num_bytes(buffers):
            status = PageStatus.FOREIGN
        elif num_read != HEADER_BYTES + meta.payload_bytes or value != meta.payload_checksum:
            status = PageStatus.DAMAGED
        else:
            status = PageStatus.OK
            _touch(fd, touch_ns)
        inode = 0 if status is PageStatus.OK else os.fstat(fd).st_ino
        return PageRead(status=status, inode=inode)
    finally:
        os.close(fd)


def write_page(
    fd: int, buffers: Buffers, expected: Expected, namespace: bytes, touch_ns: int
) -> int:
    """Write payload and then header to ``fd``; return the bytes written. Raises OSError."""
    value, offset = 0, HEADER_BYTES
    for piece in _pieces(buffers):
        value = checksum(piece, value)
        offset += _write_fully(fd, piece, offset)
    meta = PageMeta(
        key=expected.key,
        owner=expected.owner,
        namespace=namespace,
        payload_bytes=offset - HEADER_BYTES,
        payload_checksum=value,
        created_ns=time.time_ns(),
    )
    _write_fully(fd, [memoryview(pack_header(meta))], 0)
    os.utime(fd, ns=(touch_ns, touch_ns))
    return offset


def touch_page(path: str, touch_ns: int) -> None:
    """Refresh the recency of a page that is known to be whole."""
    try:
        os.utime(path, ns=(touch_ns, touch_ns))
    except OSError:
        return  # a folder that cannot be written to is still read; its owner evicts


def verify_file(path: Path) -> tuple[PageStatus, PageMeta | None]:
    """Read a page's file, of the size that its header states, and check it against its own name and
    checksums; one of another size is damaged and not read. Raises OSError."""
    with _regular_file(path) as (fd, info):
        meta = parse_header(os.pread(fd, HEADER_BYTES, 0))
        if meta is None or info.st_size != HEADER_BYTES + meta.payload_bytes:
            return PageStatus.DAMAGED, meta
        if _payload_checksum(fd, meta.payload_bytes) != meta.payload_checksum:
            return PageStatus.DAMAGED, meta
    name = parse_file_name(path.name)
    is_named_so = name is not None and name.key == meta.key and name.owner == meta.owner.file_suffix
    return (PageStatus.OK if is_named_so else PageStatus.FOREIGN), meta


def read_meta(path: Path) -> PageMeta | None:
    """Return a file's header; None when it is damaged. Raises OSError."""
    with _regular_file(path) as (fd, _):
        return parse_header(os.pread(fd, HEADER_BYTES, 0))


@contextmanager
def _regular_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a page's file as a server does. Raises OSError for a link, a pipe, a device."""
    fd = _open_page(str(path))
    if fd is None:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield fd, info
    finally:
        os.close(fd)


def _payload_checksum(fd: int, num_bytes: int) -> int:
    piece = memoryview(bytearray(min(num_bytes, _PIECE_BYTES)))
    value = 0
    for start in range(0, num_bytes, _PIECE_BYTES):
        part = piece[: num_bytes - start]
        num_read = _read_fully(fd, [part], HEADER_BYTES + start)
        value = checksum([part[:num_read]], value)
    return value


def _open_page(path: str) -> int | None:
    try:
        # Without O_NONBLOCK a named pipe of that name would stop the thread for good.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None


def _touch(fd: int, touch_ns: int) -> None:
    try:
        os.utime(fd, ns=(touch_ns, touch_ns))
    except OSError:
        return  # see touch_page


def _num_bytes(views: Buffers) -> int:
    return sum([view.nbytes for view in views])


def _pieces(buffers: Buffers) -> Iterator[list[memoryview]]:
    """Cut the buffers into runs of at most ``_PIECE_BYTES`` and ``_MAX_BUFFERS`` buffers."""
    piece: list[memoryview] = []
    room = _PIECE_BYTES
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            part = buffer[start : start + room]
            piece.append(part)
            start += part.nbytes
            room -= part.nbytes
            if room == 0 or len(piece) == _MAX_BUFFERS:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece


def _read_fully(fd: int, views: list[memoryview], offset: int) -> int:
    """Fill the views from ``offset`` on until the file ends; return the bytes read."""
    total = _num_bytes(views)
    done = os.preadv(fd, views, offset)
    while done < total:
        count = os.preadv(fd, _from_offset(views, done), offset + done)
        if count == 0:
            break
        done += count
    return done


def _write_fully(fd: int, views: list[memoryview], offset: int) -> int:
    """Write the views at ``offset``; return their bytes."""
    total = _num_bytes(views)
    done = os.pwritev(fd, views, offset)
    while done < total:
        count = os.pwritev(fd, _from_offset(views, done), offset + done)
        if count == 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += count
    return done


def _from_offset(views: list[memoryview], offset: int) -> list[memoryview]:
    """The views without their first ``offset`` bytes."""
    rest: list[memoryview] = []
    for view in views:
        if offset < view.nbytes:
            rest.append(view[offset:])
        offset = max(offset - view.nbytes, 0)
    return rest
