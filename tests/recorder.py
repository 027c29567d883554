"""A TCP proxy on loopback that keeps every byte of both directions, and what HTTP says in them."""

import contextlib
import gzip
import socket
import threading
import zlib


class Recorder:
    """Passes connections on to a port of this machine; `sent` and `received` are what went there and came back."""

    def __init__(self, port):
        self._port, self._listening = port, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._streams, self._open = [], []  # pairs of bytearrays, one for each connection
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def sent(self):
        """All streams to the port."""
        return [bytes(up) for up, _ in self._streams]

    @property
    def received(self):
        """All streams from the port."""
        return [bytes(down) for _, down in self._streams]

    def close(self):
        """Take no more connections, and end those that are open."""
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port), 5)
                except OSError:  # as if nobody listened
                    near.close()
                    continue
                far.settimeout(None)
                pair = (bytearray(), bytearray())
                self._streams.append(pair)
                self._open += [near, far]
                for here, there, kept in ((near, far, pair[0]), (far, near, pair[1])):
                    threading.Thread(target=self._pass_on, args=(here, there, kept), daemon=True).start()

    @staticmethod
    def _pass_on(here, there, kept):
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                kept += data
                there.sendall(data)
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_WR)


def bodies_of(stream):
    """Return the bodies of all HTTP/1.1 messages of a stream, put together from chunks and decompressed."""
    found = []
    while stream:
        head, _, stream = stream.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if fields.get(b"transfer-encoding") == b"chunked":
            body, stream = _chunks(stream)
        else:
            size = int(fields.get(b"content-length", b"0"))
            body, stream = stream[:size], stream[size:]
        how = fields.get(b"content-encoding", b"identity")
        unpack = {b"identity": bytes, b"gzip": gzip.decompress, b"deflate": zlib.decompress}
        found.append(unpack[how](body))  # an encoding that we cannot read fails the test
    return found


def _chunks(stream):
    body = b""
    while True:
        size, _, stream = stream.partition(b"\r\n")
        if not (count := int(size.split(b";")[0] or b"0", 16)):
            return body, stream.partition(b"\r\n")[2]
        body, stream = body + stream[:count], stream[count + 2 :]
