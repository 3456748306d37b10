"""The log of requests: lines written together, whatever the stream is like."""

import asyncio
import io

from conformal_arbitrage.gateway.server import Lines


class Moody(io.StringIO):
    """A stream that fails as often as it is told to, as a disk that is full for a while does."""

    failures = 0

    def write(self, text):
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_are_written_together_and_soon():
    stream = Moody()
    lines = Lines(stream)

    async def story():
        lines.add("one")
        lines.add("two")
        assert stream.getvalue() == ""
        await asyncio.sleep(0.1)

    asyncio.run(story())
    assert stream.getvalue() == "one\ntwo\n"


def test_a_stream_that_fails_once_is_written_to_again():
    stream = Moody()
    lines = Lines(stream)
    troubles = []

    async def story():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        stream.failures = 1
        lines.add("lost")
        await asyncio.sleep(0.1)
        lines.add("kept")
        await asyncio.sleep(0.1)

    asyncio.run(story())
    assert stream.getvalue() == "kept\n"
    assert troubles == []


def test_a_closed_stream_does_not_stop_the_end():
    stream = Moody()
    lines = Lines(stream)

    async def story():
        lines.add("lost")

    asyncio.run(story())
    stream.close()
    lines.flush()
    lines.flush()
