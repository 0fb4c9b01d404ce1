"""Corefile to unbound: what is honoured, and that nothing is dropped in silence."""

import pytest

from cni_hostport.nodecache import coreparse, unbound, unboundconf


def host(**more: object) -> unboundconf.Host:
    def read(path: str) -> tuple[str, ...]:
        if path == "/missing":
            raise FileNotFoundError(2, "No such file or directory")
        return ("192.0.2.53", "169.254.20.10")

    defaults: dict[str, object] = {
        "control_socket": "/run/c",
        "directory": "/run",
        "own_addresses": frozenset({"169.254.20.10"}),
        "port": 53,
        "threads": 2,
        "read_servers": read,
    }
    return unboundconf.Host(**{**defaults, **more})  # type: ignore[arg-type]


def translate(text: str) -> unbound.Translation:
    return unbound.translate(coreparse.parse(text, {}), host())


def zone(found: unbound.Translation, name: str) -> list[str]:
    for block in found.text.split("forward-zone:\n")[1:]:
        lines = [line.strip() for line in block.splitlines()]
        if lines[0] == f'name: "{name}"':
            return lines[1:]
    raise AssertionError(f"no zone {name} in {found.text}")


ADDON = """cluster.local:53 {
    errors
    cache {
        success 9984 30
        denial 9984 5
    }
    reload
    loop
    bind 169.254.20.10 10.0.0.10
    forward . 10.96.0.3 {
        force_tcp
    }
    prometheus :9253
    health 169.254.20.10:8080
}
in-addr.arpa:53 ip6.arpa:53 {
    cache 30
    bind 169.254.20.10 10.0.0.10
    forward . 10.96.0.3 {
        force_tcp
    }
}
.:53 {
    errors
    cache 30
    bind 169.254.20.10 10.0.0.10
    forward . /etc/resolv.conf
    prometheus :9253
}
"""


def test_the_addons_corefile() -> None:
    found = translate(ADDON)
    assert zone(found, "cluster.local.") == [
        "forward-tcp-upstream: yes",
        "forward-addr: 10.96.0.3@53",
    ]
    assert zone(found, "ip6.arpa.") == zone(found, "in-addr.arpa.") == zone(found, "cluster.local.")
    assert zone(found, ".") == ["forward-addr: 192.0.2.53@53"]
    for line in (
        "interface: 169.254.20.10@53",
        "interface: 10.0.0.10@53",
        "cache-max-ttl: 30",
        "cache-max-negative-ttl: 5",
        "control-interface: /run/c",
    ):
        assert f"    {line}\n" in found.text
    assert found.files == ("/etc/resolv.conf",)
    # The resolv.conf names the cache itself: that server is left out, and said so.
    assert len(found.notes) == 1 and "would loop" in found.notes[0]


def test_endpoints_are_the_agents() -> None:
    found = unbound.endpoints(coreparse.parse(ADDON, {}))
    assert found == unbound.Endpoints(("169.254.20.10:8080",), (":9253",))
    assert unbound.endpoints(coreparse.parse(".:53 {\n health\n}", {})).health == (":8080",)


@pytest.mark.parametrize(
    "directive",
    [
        "rewrite name a b",
        "template ANY AAAA",
        "whoami",
        "import snippet",
        "cache 30 example.org",
        "forward . 1.1.1.1 {\n policy random\n }",
        "forward . 1.1.1.1 {\n except a.example\n }",
        "cache {\n disable denial\n }",
        "hosts /etc/hosts",
        "forward . name.example",
        "forward . /missing",
        "bind 1.1.1.1 {\n except 2.2.2.2\n }",
    ],
)
def test_what_cannot_be_translated_is_named_with_its_line(directive: str) -> None:
    found = translate(f".:53 {{\n    {directive}\n    forward . 9.9.9.9\n}}\n")
    name = directive.rsplit("{", maxsplit=1)[-1].split(maxsplit=1)[0]
    assert any(note.startswith(("line 2", "line 3")) and name in note for note in found.notes), (
        found
    )


def test_zones_and_servers() -> None:
    found = translate(
        "a.example:53, b.example {\n forward . 1.1.1.1:5353 [2001:db8::1]:54 2001:db8::2 dns://9.9.9.9\n}\n"
        "10.1.0.0/16 {\n forward . 1.1.1.1\n}\n172.16.0.0/12 {\n forward . 1.1.1.1\n}\n"
        "dot.example {\n forward . tls://9.9.9.9 {\n tls_servername dns.quad9.net\n }\n}\n"
    )
    assert zone(found, "a.example.") == zone(found, "b.example.") == [
        "forward-addr: 1.1.1.1@5353",
        "forward-addr: 2001:db8::1@54",
        "forward-addr: 2001:db8::2@53",
        "forward-addr: 9.9.9.9@53",
    ]  # fmt: skip
    assert zone(found, "1.10.in-addr.arpa.")
    assert zone(found, "16.172.in-addr.arpa.") and zone(found, "31.172.in-addr.arpa.")
    assert zone(found, "dot.example.") == [
        "forward-tls-upstream: yes",
        "forward-addr: 9.9.9.9@853#dns.quad9.net",
    ]
    # No block for the root: CoreDNS refuses the rest, and so must unbound.
    assert '    local-zone: "." refuse\n' in found.text
    assert '    local-zone: "a.example." transparent\n' in found.text


def test_cache_options() -> None:
    found = translate(
        ".:53 {\n cache {\n success 100 60\n prefetch 10\n serve_stale 2h verify\n }\n"
        " dns64 {\n prefix 64:ff9b::/96\n }\n bufsize 1400\n log\n forward . 127.0.0.53\n}\n"
    )
    for line in (
        "cache-max-ttl: 60",
        "prefetch: yes",
        "serve-expired: yes",
        "serve-expired-ttl: 7200",
        "serve-expired-client-timeout: 1800",
        'module-config: "dns64 iterator"',
        "edns-buffer-size: 1400",
        "log-queries: yes",
        "do-not-query-localhost: no",
    ):
        assert f"    {line}\n" in found.text
    assert found.notes == ()


def test_hosts_entries() -> None:
    found = translate(
        ".:53 {\n hosts {\n 10.1.1.1 a.example b.example\n fallthrough\n }\n forward . 1.1.1.1\n}\n"
    )
    assert 'local-data: "a.example. A 10.1.1.1"' in found.text
    assert found.notes == ()


def test_parser_words_quotes_comments_environment() -> None:
    (block,) = coreparse.parse(
        '# head\n.:{$PORT} {  # tail\n  log "a \\"b\\" {" x\n'
        '  errors {\n    consolidate 5m "x y"\n  }\n}\n',
        {"PORT": "5353"},
    )
    assert block.keys == (".:5353",)
    assert block.directives[0].args == ('a "b" {', "x")
    assert block.directives[1].body[0].args == ("5m", "x y")
    assert block.directives[1].line == 4


@pytest.mark.parametrize("text", [".:53", ".:53 {\n errors\n", "{\n}\n", '.:53 {\n log "x\n}\n'])
def test_parser_errors_name_the_line(text: str) -> None:
    with pytest.raises(coreparse.CorefileError, match=r"line [12]"):
        coreparse.parse(text, {})


def test_parser_accepts_braces_on_the_line() -> None:
    blocks = coreparse.parse("a.b c.d,\ne.f {\n errors }\n. {\n}\n", {})
    assert [b.keys for b in blocks] == [("a.b", "c.d", "e.f"), (".",)]


@pytest.mark.parametrize(
    ("key", "want"),
    [
        (".:53", "."),
        ("cluster.local:53", "cluster.local"),
        ("dns://a.b:53", "a.b"),
        ("10.0.0.0/8", "."),
    ],
)
def test_zone_of(key: str, want: str) -> None:
    assert coreparse.zone_of(key) == want


def test_resolv_conf_and_statistics() -> None:
    text = "# nameserver 1.1.1.1\nnameserver 2.2.2.2 x\nsearch a\nnameserver\tfd00::1\nnameserver\n"
    assert unboundconf.resolv_servers(text) == ("2.2.2.2", "fd00::1")
    assert unboundconf.statistics("total.num.queries=5\nx\nbad=word\n") == {
        "total.num.queries": 5.0
    }
