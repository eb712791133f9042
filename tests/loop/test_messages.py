"""Messages over a connection."""

import socket

import pytest

from mpjax.loop.messages import Connection


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Connection(socket.create_connection(server.getsockname()))
        other = server.accept()[0]
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_in_order_until_the_other_end_is_gone(ends):
    line, other = ends
    other.sendall(b'{"kind": "a", "value": [1, "\xc3\xa9"]}\n{"kind":')
    other.sendall(b' "b"}\n{"kind": "cut sho')
    other.close()
    assert list(line.messages()) == [{"kind": "a", "value": [1, "é"]}, {"kind": "b"}]


def test_what_is_sent_is_one_line(ends):
    line, other = ends
    assert line.send({"text": "two\nlines"})
    assert other.recv(100) == b'{"text": "two\\nlines"}\n'


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\xfe\n"])
def test_whoever_talks_otherwise_is_no_process_of_the_run(ends, said):
    line, other = ends
    other.sendall(said)
    assert line.receive() is None


def test_silence_is_waited_for_only_so_long(ends):
    assert ends[0].receive(0.05) is None


def test_sending_to_nobody_is_told(ends):
    line, other = ends
    other.close()
    assert not all(line.send({"text": "x" * 10_000}) for _ in range(100))
