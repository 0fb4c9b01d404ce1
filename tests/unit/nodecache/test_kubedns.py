"""The kube-dns ConfigMap against upstream's vectors (facts b3, b4, b5)."""

import hashlib
import json

import pytest

from cni_hostport.nodecache import kubedns


def config(
    stubs: dict[str, list[str]] | None = None, ups: list[str] | None = None
) -> kubedns.KubeDNSConfig:
    files = {}
    if stubs is not None:
        files["stubDomains"] = json.dumps(stubs)
    if ups is not None:
        files["upstreamNameservers"] = json.dumps(ups)
    return kubedns.parse(files)


V6 = "2001:db8::2"


@pytest.mark.parametrize(
    ("stubs", "ups"),
    [
        ({}, None),
        ({"foo.com": ["1.2.3.4"]}, None),
        ({"foo.com": ["1.2.3.4:32564"]}, None),
        ({"foo.com": ["ns.foo.com"]}, None),
        ({"foo.com": ["ns.foo.com"], "bar.com": ["1.2.3.4"]}, None),
        (
            {
                "acme.local": [V6],
                "google.local": ["google-public-dns-a.google.com"],
                "widget.local": [f"[{V6}]:10053", V6],
            },
            None,
        ),
        (None, []),
        (None, ["1.2.3.4"]),
        (None, ["1.2.3.4", "8.8.4.4", "8.8.8.8"]),
        (None, ["1.2.3.4:53"]),
        (None, [f"[{V6}]:10053", V6]),
    ],
)
def test_valid(stubs: dict[str, list[str]] | None, ups: list[str] | None) -> None:
    kubedns.validate(config(stubs, ups))


@pytest.mark.parametrize(
    ("stubs", "ups"),
    [
        ({"": ["1.2.3.4"]}, None),
        ({"$$$$": ["1.2.3.4"]}, None),
        ({"Foo.com": ["1.2.3.4"]}, None),
        ({"foo.com.": ["1.2.3.4"]}, None),
        ({"foo": ["$$$$"]}, None),
        ({"foo.com": ["1.2.3.4:65564"]}, None),
        (None, ["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"]),
        (None, ["1.1.1.1:abc"]),
        (None, ["1.1.1.1:"]),
        (None, ["1.1.1.1:123456789"]),
        (None, ["dns.example"]),
    ],
)
def test_invalid(stubs: dict[str, list[str]] | None, ups: list[str] | None) -> None:
    with pytest.raises(kubedns.ConfigError):
        kubedns.validate(config(stubs, ups))


@pytest.mark.parametrize(
    ("stubs", "ups", "good"),
    [
        ({}, [], True),
        ({"": ["1.1.1.1"]}, ["1.1.1.1", "2.2.2.2"], True),
        (
            {"a.local": [f"[{V6}]:53", "dns://1.1.1.1", "tls://9.9.9.9:853", "fe80::1%eth0"]},
            [],
            True,
        ),
        ({"a.local": ["/exists"]}, [], True),
        ({"a.local": ["cluster.local"]}, [], False),
        ({}, ["1.1.1.1", "cluster.local"], False),
        ({"a.local": []}, [], False),
        ({}, ["1.1.1.1:0"], False),
    ],
)
def test_forwardable(stubs: dict[str, list[str]], ups: list[str], good: bool) -> None:
    if good:
        kubedns.validate_forwardable(config(stubs, ups), lambda path: path == "/exists")
    else:
        with pytest.raises(kubedns.ConfigError):
            kubedns.validate_forwardable(config(stubs, ups), lambda path: path == "/exists")


@pytest.mark.parametrize(
    "files",
    [
        {"stubDomains": "{"},
        {"stubDomains": "[]"},
        {"stubDomains": '{"a": "1.1.1.1"}'},
        {"stubDomains": '{"a": [1]}'},
        {"stubDomains": '{"a": []} x'},
        {"stubDomains": '{"a": NaN}'},
        {"upstreamNameservers": '{"a": 1}'},
        {"upstreamNameservers": "[" * 100000},
        {"federations": "a.b=c.d"},
    ],
)
def test_bad_json_is_named(files: dict[str, str]) -> None:
    with pytest.raises(kubedns.ConfigError, match=next(iter(files))):
        kubedns.parse(files)


def test_null_and_absent_are_empty() -> None:
    empty = kubedns.KubeDNSConfig()
    assert kubedns.parse({}) == empty
    assert kubedns.parse({"stubDomains": "null", "upstreamNameservers": " "}) == empty
    assert kubedns.parse({"federations": "abc=d.e.f"}) == empty


def test_stub_domains_are_sorted() -> None:
    found = config({"z.local": ["1.1.1.1"], "a.local": ["1.1.1.1"]})
    assert [name for name, _ in found.stub_domains] == ["a.local", "z.local"]


def test_version_of_a_folder() -> None:
    assert kubedns.version_of({}) == ""
    want = hashlib.sha256(b"file2\0data2\0file3\0data3\0").hexdigest()
    assert kubedns.version_of({"file3": "data3", "file2": "data2"}) == want


def test_unknown_keys() -> None:
    assert kubedns.unknown_keys({"Corefile": "x", "stubDomains": "{}"}) == ("Corefile",)
