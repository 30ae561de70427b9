"""The wire: who does not know the token is turned away, and no line is forged, repeated or left out."""

import json
import socket
import threading
import time

import pytest

from truestep.elastic.wire import Wire, WireError, address, read_token
from truestep.errors import UserError

TOKEN = b"0123456789abcdef"


def pair(token=TOKEN, other=TOKEN):
    """Both ends, the server first; a WireError in place of an end that failed."""
    door = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(door.getsockname())
    server, _ = door.accept()
    door.close()
    ends: dict[bool, Wire | WireError] = {}

    def prove(line, known, is_server):
        try:
            ends[is_server] = Wire(line, known, server=is_server)
        except WireError as error:
            ends[is_server] = error

    other_side = threading.Thread(target=prove, args=(client, other, False))
    other_side.start()
    prove(server, token, True)
    other_side.join()
    return ends[True], ends[False]


def heard(wire, number=1):
    found, deadline = [], time.monotonic() + 5
    while len(found) < number and not wire.broken and time.monotonic() < deadline:
        found += wire.received()
        time.sleep(0.005)
    return found + wire.received()


def test_both_sides_hear_each_other_in_order():
    server, client = pair()
    for number in range(50):
        client.send({"number": number})
        server.send({"number": -number})
    assert heard(server, 50) == [{"number": number} for number in range(50)]
    assert heard(client, 50) == [{"number": -number} for number in range(50)]
    client.close()
    server.close()


def test_another_token_is_refused_on_both_sides():
    server, client = pair(other=b"another token 12")
    assert isinstance(server, WireError) and isinstance(client, WireError)
    assert "its proof is wrong" in str(server)


def test_a_server_that_does_not_know_the_token_is_refused_too():
    door = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(door.getsockname())
    server, _ = door.accept()

    def pretend():
        server.sendall(b"a" * 64 + b"\n")
        server.recv(200)
        server.sendall(b"b" * 64 + b"\n")

    threading.Thread(target=pretend).start()
    with pytest.raises(WireError, match="its proof is wrong"):
        Wire(client, TOKEN, server=False)


def raw_line(wire, text, direction=b"C", number=0):
    return wire._seal(direction, number, text) + b" " + text + b"\n"


@pytest.mark.parametrize("forgery", ["changed", "again", "skipped", "reflected", "unsealed"])
def test_a_forged_line_breaks_the_connection(forgery):
    server, client = pair()
    text = json.dumps({"do": "start"}).encode()
    lines = {
        "changed": raw_line(client, text).replace(b"start", b"stop!"),
        "again": raw_line(client, text) * 2,
        "skipped": raw_line(client, text, number=1),
        "reflected": raw_line(client, text, direction=b"S"),
        "unsealed": text + b"\n",
    }
    client._line.sendall(lines[forgery])
    found = heard(server, 2)
    assert server.broken == "sent a line with a wrong seal"
    assert found == ([{"do": "start"}] if forgery == "again" else [])
    client.close()


def test_the_last_word_is_heard(monkeypatch):
    server, client = pair()
    read = threading.Event()
    monkeypatch.setattr(client, "_break", lambda why: read.wait(5))  # it is slow to hang up
    for number in range(20):
        client.send({"number": number})  # unread when the server closes, as beats are
    server.send({"do": "bye"})
    closing = threading.Thread(target=server.finish)
    closing.start()
    assert heard(client) == [{"do": "bye"}]
    assert closing.is_alive()  # it waits for the other side to hang up, so that nothing is cut off
    read.set()
    client.close()
    closing.join(timeout=5)
    assert not closing.is_alive()


def test_a_token_must_be_there_and_long(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read .*openssl rand"):
        read_token(tmp_path / "none")
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(UserError, match="has 6 characters, fewer than 16"):
        read_token(tmp_path / "short")


@pytest.mark.parametrize("text", ["", "host", "host:", ":x", "host:99999"])
def test_an_address_is_host_and_port(text):
    with pytest.raises(UserError, match="is not host:port"):
        address(text)
    assert address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert address("[::1]:80") == ("::1", 80)
