"""Addresses and token files: what is taken, and what each mistake is told."""

import pytest

from opd.errors import UserError
from opd.teachers.client.addresses import check_addresses, read_token

FIELD = "teachers.maths.url"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8400", "https://gpu7.example.org", "http://[::1]:80", "http://h:1/maths"])
def test_addresses(url):
    check_addresses((url,), FIELD)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("localhost:80", "must begin with http://"),
        ("ftp://x", "must begin with http://"),
        ("HTTP//x", "must begin with http://"),
        ("http://", "names no host"),
        ("http://:80", "names no host"),
        ("http://x/path?y", "leave out what begins with"),
        ("http://x#y", "leave out what begins with"),
        ("http://x:port", "is no address"),
        ("http://x:99999", "is no address"),
        ("http://[::1", "is no address"),
        ("http://a b", "characters that no address has"),
        ("http://a\nb", "characters that no address has"),
        ("http://ä.de", "characters that no address has"),
    ],
)
def test_no_addresses(url, text):
    with pytest.raises(UserError, match=f"^{FIELD}: .*{text}") as info:
        check_addresses(("http://127.0.0.1:1", url), FIELD)
    assert "\n" not in str(info.value)


def test_a_password_is_not_repeated():
    with pytest.raises(UserError, match="user name or password") as info:
        check_addresses(("http://me:hush@x",), FIELD)
    assert "hush" not in str(info.value)


def test_none_and_twice():
    with pytest.raises(UserError, match="has no address"):
        check_addresses((), FIELD)
    with pytest.raises(UserError, match="http://a is given twice"):
        check_addresses(("http://a", "http://b", "http://a"), FIELD)


def test_token(tmp_path):
    path = tmp_path / "token"
    path.write_text("  s3cret-+/=\n")
    assert read_token(str(path), "teachers.t.token_file") == "s3cret-+/="


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"hush one", "more than one word"),
        (b"hush\nx: y", "more than one word"),
        (b"hush\x00", "more than one word"),
        ("hüsh".encode(), "more than one word"),
        (b"hush\xff", "more than one word"),
    ],
)
def test_no_token(tmp_path, content, text):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^teachers.t.token_file: .*{text}") as info:
        read_token(str(path), "teachers.t.token_file")
    assert "hush" not in str(info.value).replace(str(path), "")


def test_an_unreadable_token(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match=r"teachers\.t\.token_file: .* cannot be read"):
            read_token(str(path), "teachers.t.token_file")
