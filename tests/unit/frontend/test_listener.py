"""The HTTP listener gets TCP_NODELAY as soon as it exists, and its connections inherit it."""

from __future__ import annotations

import socket

from trtx.frontend.listener import NodelayListener, listening_on


def nodelay(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def test_connections_accepted_after_the_listener_was_found_have_nodelay() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        waiter = NodelayListener(port)
        waiter.start()
        assert not waiter.found.wait(0.05), "a socket that is bound and does not listen is no listener"
        reserved.listen()
        assert waiter.found.wait(5)
        with socket.create_connection(("127.0.0.1", port)), reserved.accept()[0] as accepted:
            assert nodelay(accepted)


def test_the_socket_that_was_found_is_left_open_for_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = listening_on(port)
        assert found is not None
        found.detach()
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as accepted:
            accepted.sendall(b"x")


def test_a_port_nobody_listens_on_is_not_found() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert listening_on(unused.getsockname()[1]) is None
