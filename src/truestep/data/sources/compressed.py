"""Reading gzip and zstd as a stream that notices when the file ends too early (zstandard's own reader does not)."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from truestep.errors import DataError

_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
}


def is_compressed(name: str) -> bool:
    return name.endswith(tuple(_DECODERS))


def open_binary(path: Path, name: str) -> BinaryIO:
    """The content of `path`, decompressed if `name` (the file's name where it came from) ends in .gz or .zst."""
    for suffix, decoder in _DECODERS.items():
        if name.endswith(suffix):
            return cast(BinaryIO, io.BufferedReader(_Inflating(open(path, "rb"), name, decoder), 2**20))
    return open(path, "rb")


class _Inflating(io.RawIOBase):
    """Any number of compressed frames one after the other. DataError for damage, and for an end inside a frame."""

    def __init__(self, file: BinaryIO, name: str, decoder: Callable[[], Any]):
        self._file, self._name, self._new_decoder = file, name, decoder
        self._decoder: Any = None  # None between two frames
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            if not self._compressed and not self._refill():
                return 0
            self._ready = memoryview(self._inflate())
        count = min(len(self._ready), len(buffer))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _refill(self) -> bool:
        self._compressed = self._file.read(2**18)
        if not self._compressed and self._decoder is not None:
            raise DataError(f"{self._name} is truncated: it ends inside a compressed frame; fetch it again.")
        return bool(self._compressed)

    def _inflate(self) -> bytes:
        if self._decoder is None:
            self._compressed = self._compressed.lstrip(b"\0")  # padding between frames
            if not self._compressed:
                return b""
            self._decoder = self._new_decoder()
        try:
            data = self._decoder.decompress(self._compressed)
        except (zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{self._name} is damaged: {error}; fetch or compress it again.") from error
        self._compressed = self._decoder.unused_data if self._decoder.eof else b""
        self._decoder = None if self._decoder.eof else self._decoder
        return data

    def close(self) -> None:
        self._file.close()
        super().close()
