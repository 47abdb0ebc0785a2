"""Held ports are given to nobody else, and yet their user can listen."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from arealite.utils.network import address_toward, hold_port, host_ip, interface_of, port_of


def test_a_held_port_is_usable_by_its_user_only():
    with (
        hold_port() as holder,
        socket.create_server(("127.0.0.1", port_of(holder))) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
    ):
        connection, address = server.accept()
        assert address == client.getsockname()
        connection.close()
    with hold_port() as holder, socket.socket() as stranger:
        refused = stranger.connect_ex(("127.0.0.1", port_of(holder)))
        assert refused != 0


def test_a_held_port_can_not_be_taken_at_another_address_from_a_store_that_listens_at_all():
    with hold_port() as holder, socket.socket() as stranger:
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.2", port_of(holder)))
        store = TCPStore("127.0.0.1", port_of(holder), 1, True, timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_host_ip_is_an_address_of_this_host():
    with socket.create_server((host_ip(), 0)):
        assert ipaddress.ip_address(host_ip()).version == 4


def test_the_address_toward_ourselves_is_of_one_of_our_interfaces():
    for peer in ("127.0.0.1", socket.gethostname(), "192.0.2.1"):
        assert interface_of(address_toward(peer)) is not None
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
