"""A server on loopback that sends exact bytes, broken ones too: `async with Sockets(reply) as server`."""

import asyncio
import contextlib
import json
import socket
import struct


class Sockets:
    """Reads each request and lets `await reply(peer, body, number)` write what it likes; keep-alive unless closed."""

    def __init__(self, reply):
        self.reply = reply
        self.requests = 0
        self.heads = []
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _handle(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(size))
                self.heads.append(head.decode())
                self.requests += 1
                await self.reply(Peer(reader, writer), body, self.requests - 1)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class Peer:
    """The other end of one request."""

    def __init__(self, reader, writer):
        self._reader = reader
        self._writer = writer

    async def send(self, body, *, status="200 OK", headers=(), length=None):
        """A reply; a `length` of one's own says more, or less, than there is."""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
        await self.write("\r\n".join(lines).encode() + body)

    async def write(self, data):
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self):
        """Say nothing until the client has gone."""
        while await self._reader.read(2**16):
            pass
        raise ConnectionError

    async def drip(self, body, *, every):
        """A byte at a time, until the client has gone."""
        await self.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for byte in body:
            await self.write(bytes([byte]))
            await asyncio.sleep(every)

    def close(self):
        self._writer.close()

    def reset(self):
        """Cut the connection so that the client is told of it."""
        on = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, on)
        self._writer.transport.abort()
