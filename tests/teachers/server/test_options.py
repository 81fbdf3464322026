"""Addresses and tokens of a server, before any model is loaded."""

import ipaddress
import socket

import pytest

from opd.errors import UserError
from opd.teachers.server.options import (
    bind,
    listen,
    parse_active_experts,
    parse_adapters,
    parse_quantization,
    server_token,
)


def test_two_that_bind_before_either_listens():
    """Linux lets them: whoever listens second must hear of it."""
    first = bind("127.0.0.1", 0, has_token=False)
    second = bind("127.0.0.1", first.getsockname()[1], has_token=False)
    listen(first)
    with pytest.raises(UserError, match=r"--port: 127\.0\.0\.1:\d+ cannot be served"):
        listen(second)
    first.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_loopback_needs_no_token(host):
    if host == "::1" and not ipv6():
        pytest.skip("this machine has no IPv6")
    with bind(host, 0, has_token=False) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_other_addresses_need_one(host):
    with pytest.raises(UserError, match="can be reached from other machines: give --token-file"):
        bind(host, 0, has_token=False)
    bind(host, 0, has_token=True).close()


def ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_the_token_is_the_file_without_its_whitespace(tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text("\n  s3cret \n")
    path.chmod(0o600)
    assert server_token(str(path)) == "s3cret"
    assert capsys.readouterr().err == ""
    path.chmod(0o640)
    assert server_token(str(path)) == "s3cret"
    warning = capsys.readouterr().err
    assert warning == f"warning: --token-file: others may read {path}; chmod 600 it\n"
    assert server_token(None) is None


def test_active_experts():
    assert parse_active_experts(["default.weak_reference=1", "half=4"]) == {"default.weak_reference": 1, "half": 4}
    assert parse_active_experts([]) == {}


def test_adapters_and_quantization():
    assert parse_adapters(["math=a/b", "code-2=c=d"]) == {"math": "a/b", "code-2": "c=d"}
    assert parse_adapters([]) == parse_quantization(None) == {}
    assert parse_quantization('{"quant_method": "torchao"}') == {"quant_method": "torchao"}
