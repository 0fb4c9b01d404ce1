"""The executable against the CNI contract: recorded answers, and the same sort of call in bulk."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.chain import Json, Reply
from lab.contract import (
    MISSING,
    VERBS,
    VERSIONS,
    Caller,
    conf,
    env_of,
    expected_environment,
    expected_version,
    failed,
    ports,
    result_of,
    succeeded,
)
from lab.stage import TYPE, Backend, Stage, mapping

RECORDS: list[Json] = json.loads(
    (Path(__file__).parents[1] / "data" / "cni_calls.json").read_text()
)


@pytest.fixture(scope="module")
def call(backend: Backend) -> Iterator[Caller]:
    """One node and its helper for calls that leave nothing behind."""
    stage = Stage(backend)
    yield Caller(stage)
    assert stage.records() == {}, "a test left an attachment"
    assert len(stage.node.helpers()) <= 1
    stage.close()


# -- recorded answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=[r["name"] for r in RECORDS])
def test_recorded_answer(call: Caller, record: Json) -> None:
    env = record["env"]
    reply = call(env, record["stdin"].encode(record["stdin_encoding"]))
    wanted = record["stdout_docs"][-1] if record["stdout_docs"] else None
    if record["rc"]:
        # 999 is the reference's word for a bad prevResult; 6 and 7 say more.
        failed(reply, *((6, 7) if wanted["code"] == 999 else (wanted["code"],)))
        assert reply.stderr == b""
        return
    succeeded(reply, silent=wanted is None)
    if not env.get("CNI_COMMAND"):
        first, last = reply.stderr.decode().splitlines()
        assert TYPE in first
        assert last == record["stderr"].splitlines()[-1]
        return
    assert reply.stderr == b""
    if wanted is not None:
        assert same(reply.json, wanted), (reply.json, wanted)
    if env["CNI_COMMAND"] == "ADD":
        succeeded(call({**env, "CNI_COMMAND": "DEL"}, record["stdin"].encode()))


def same(got: Any, like: Any) -> bool:
    """Equal, but for keys that the reference drops, its empty dns, and its spelling of IPv6."""
    if isinstance(like, dict):
        return all(
            (key == "dns" and not value and key not in got) or same(got.get(key, MISSING), value)
            for key, value in like.items()
        )
    if isinstance(like, list):
        return len(got) == len(like) and all(map(same, got, like))
    if isinstance(like, str) and ":" in like and isinstance(got, str):
        return got.lower().replace(":0::", "::") == like.lower()
    return bool(got == like)


# -- environment ----------------------------------------------------------------------------------

CONTAINER = ("ctr-1", None, "", "-a", "a/b", "abc\n", "ä", "x" * 300)
NETNS = ("/does/not/exist", None, "", "relative", "/etc/hostname")
LINK = ("eth0", None, "", "a" * 16, "a b", "..", "é" * 7 + "x")
CNI_PATH = ("/opt/cni/bin", None, "")
BODY: dict[str, tuple[Any, int]] = {
    "good": (None, 0),
    "no JSON": (b"{", 6),
    "nothing": (b"", 6),
    "list": (b"[]", 6),
    "null": (b"null", 7),
    "no name": (MISSING, 7),
    "bad name": ("a b", 7),
    "name of another type": (5, 6),
}


def body_for(verb: str, kind: str, version: Any) -> bytes:
    spoilt = BODY[kind][0]
    if isinstance(spoilt, bytes):
        return spoilt
    changed = {} if spoilt is None else {"name": spoilt}
    return json.dumps(conf(verb, cniVersion=version, **changed)).encode()


@pytest.mark.parametrize("verb", [*VERBS, "NOPE", "get"])
def test_every_mistake_with_every_other_in_the_librarys_order(call: Caller, verb: str) -> None:
    """Each single mistake, and a sample of all that can be combined."""
    noise = random.Random(verb)
    fields: list[tuple[Any, ...]] = [CONTAINER, NETNS, LINK, CNI_PATH, tuple(BODY), (0, 1, 2, 3)]
    single = [
        tuple(option if i == j else values[0] for j, values in enumerate(fields))
        for i, options in enumerate(fields)
        for option in options
    ]
    mixed = noise.sample(list(itertools.product(*fields)), 15)
    versions = ("1.1.0", "9.9.9", "abc", 7)
    calls, wanted = [], []
    for container, netns, link, path, body, number in single + mixed:
        env = env_of(
            verb, CNI_CONTAINERID=container, CNI_NETNS=netns, CNI_IFNAME=link, CNI_PATH=path
        )
        version = versions[number]
        calls.append((env, body_for(verb, body, version)))
        want = expected_environment(env) or BODY[body][1]
        if not want:
            want = expected_version(verb, version) if verb in VERBS else 4
        wanted.append(want)
    for told in zip(calls, wanted, call.together(calls), strict=True):
        _, want, reply = told
        assert (reply.status == 0) == (want == 0), told
        if want:
            assert failed(reply, want), told
        else:
            succeeded(reply, silent=verb != "ADD")


def test_all_missing_variables_are_named_together_and_in_order(call: Caller) -> None:
    nothing = dict.fromkeys(("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"))
    words = "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"
    for verb in ("ADD", "CHECK"):
        failed(call.verb(verb, **nothing), 4, names=words)
    failed(call.verb("DEL", **nothing), 4, names="CNI_CONTAINERID,CNI_IFNAME,CNI_PATH")


ARGS = [
    *("some;extra;args", ";;;", "=", "K8S_POD_NAME", "K8S_POD_NAME=a=b=c", "A=1\nB=2", "\t "),
    *('K8S_POD_NAME=";}\nflush ruleset\n#', "K8S_POD_NAMESPACE=ä;K8S_POD_NAME=\udcff\udcfe"),
    *("K8S_POD_NAME=" + "x" * 100_000, "IgnoreUnknown=0;X=y", "K8S_POD_NAME=$(reboot)`id`"),
]


@pytest.mark.parametrize("text", ARGS, ids=range(len(ARGS)))
def test_no_cni_args_are_a_mistake_or_reach_a_rule(call: Caller, text: str) -> None:
    rules = call.stage.node.ruleset()
    document = conf(**ports(mapping(8080, 80)))
    succeeded(call.verb("ADD", document, CNI_ARGS=text), silent=False)
    succeeded(call.verb("CHECK", document, CNI_ARGS=text))
    reply = call.stage.node.run(call.binary, "status", "--json")
    assert len(json.loads(reply.stdout)["mappings"]) == 1
    refused = call.verb("ADD", document, CNI_CONTAINERID="other")
    failed(refused, 101, names="8080")
    assert len(refused.stdout) < 20_000
    succeeded(call.verb("DEL", document, CNI_ARGS=text))
    assert "flush" not in rules


IDS = [
    *("0" * 64, "default-" + "a" * 64, "cnitool-" + "1" * 20, "x" * 300, "A", "7.", "a_-.b"),
    "b" * 4000,
]


@pytest.mark.parametrize("name", IDS, ids=[i[:20] for i in IDS])
def test_ids_of_any_length_are_kept_apart(call: Caller, name: str) -> None:
    """P18: the last character decides, and nothing of the length reaches a file name."""
    mine, other = conf(name=name, **ports(mapping(8080, 80))), name + "z"
    theirs = conf(name=name, **ports(mapping(8081, 80)))
    succeeded(call.verb("ADD", mine, CNI_CONTAINERID=name), silent=False)
    succeeded(call.verb("ADD", theirs, CNI_CONTAINERID=other), silent=False)
    reply = call.verb("ADD", mine, CNI_CONTAINERID="third")
    failed(reply, 101, names=name[:12])
    succeeded(call.verb("CHECK", mine, CNI_CONTAINERID=name))
    succeeded(call.verb("DEL", mine, CNI_CONTAINERID=name))
    failed(call.verb("CHECK", mine, CNI_CONTAINERID=name), 3)
    succeeded(call.verb("CHECK", theirs, CNI_CONTAINERID=other))
    succeeded(call.verb("DEL", theirs, CNI_CONTAINERID=other))


@pytest.mark.parametrize("link", ["a" * 15, "...", "é" * 7 + "x", "%d", 'a"b', "$x", "ⅷ" * 5])
def test_odd_interface_names_are_whole_attachments(call: Caller, link: str) -> None:
    document = conf(**ports(mapping(8080, 80)))
    document["prevResult"]["interfaces"][1]["name"] = link
    succeeded(call.verb("ADD", document, CNI_IFNAME=link), silent=False)
    succeeded(call.verb("CHECK", document, CNI_IFNAME=link))
    succeeded(call.verb("DEL", document, CNI_IFNAME=link))


@pytest.mark.parametrize(
    ("override", "allowed"),
    [("1", True), ("true", True), ("TRUE", True), ("tRuE", True)]
    + [(value, False) for value in (None, "", "0", "yes", "2", "false", "1 ", "t")],
)
def test_the_plugins_own_namespace(call: Caller, override: str | None, allowed: bool) -> None:
    env = {"CNI_NETNS": "/proc/self/ns/net", "CNI_NETNS_OVERRIDE": override}
    for verb in ("ADD", "DEL"):
        reply = call.verb(verb, **env)
        if allowed:
            succeeded(reply, silent=verb == "DEL")
        else:
            failed(reply, 8, names="CNI_NETNS")
    succeeded(call.verb("CHECK", **env))
    for verb in ("GC", "STATUS"):
        succeeded(call.verb(verb, conf(verb), **env))


# -- versions -------------------------------------------------------------------------------------

ODD_VERSIONS: list[Any] = [
    *(MISSING, None, "", *VERSIONS, "1.2.0", "9.8.7", "0.5.0", "0.3.2", "0.0.0", "0.1", "1.0"),
    *("1.1", "2", "1", "v1.0.0", "V1.1.0", " 1.0.0", "1.0.0 ", "1.0.0\n", "abc", "0.-42.0"),
    *("1.0.0.0", "1.0.0-rc1", "1.0.0+x", "+1.0.0", "01.0.0", "1..0", ".", "1.0.", "१.०.०"),
    *(1, 1.1, True, False, [], {}, ["1.0.0"], "1,0,0", "latest", "x" * 5000),
]


@pytest.mark.parametrize("verb", VERBS)
def test_versions(call: Caller, verb: str) -> None:
    calls = []
    for version in ODD_VERSIONS:
        document = conf(verb, cniVersion=version)
        if verb in ("ADD", "CHECK"):
            plain = version if version in VERSIONS else "0.1.0"
            document["prevResult"] = result_of(plain, named=False)
        calls.append((env_of(verb), document))
    for version, reply in zip(ODD_VERSIONS, call.together(calls), strict=True):
        want = expected_version(verb, version)
        assert (reply.status == 0) == (want == 0), (version, reply)
        if want:
            failed(reply, want)
        else:
            succeeded(reply, silent=verb != "ADD")


def test_version_reads_no_stdin_and_looks_at_nothing_else(call: Caller) -> None:
    for env in ({}, env_of("VERSION", CNI_CONTAINERID="%%", CNI_IFNAME="a/b", CNI_NETNS="dummy")):
        process = call.start({**env, "CNI_COMMAND": "VERSION"})
        assert process.stdout is not None
        assert process.stdin is not None
        begin = time.monotonic()
        answer = json.loads(process.stdout.read())  # stdin is open and will never end
        assert time.monotonic() - begin < 2
        assert process.wait(timeout=2) == 0
        process.stdin.close()
        assert answer == {"cniVersion": "1.1.0", "supportedVersions": list(VERSIONS)}


def test_an_error_speaks_the_callers_version(call: Caller) -> None:
    for version in VERSIONS:
        document = conf(version=version, **ports(mapping(70000, 80)))
        assert failed(call.verb("ADD", document), 7, names="70000")["cniVersion"] == version
    assert failed(call.verb("ADD", conf(cniVersion="9.9.9")), 1)["cniVersion"] == "1.1.0"


# -- results --------------------------------------------------------------------------------------


def added(call: Caller, document: Json) -> Json:
    """What ADD printed; the attachment is taken back."""
    reply = call.verb("ADD", document)
    succeeded(reply, silent=False)
    assert reply.stdout.endswith(b"\n")
    assert reply.stdout.count(b"\n") == 1
    succeeded(call.verb("DEL", document))
    return reply.json


@pytest.mark.parametrize("with_ports", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_result_is_passed_on(call: Caller, version: str, named: bool, with_ports: bool) -> None:
    previous = result_of(version, named=named)
    extra = ports(mapping(8080, 80)) if with_ports else {}
    document = conf(version=version, prevResult=previous, **extra)
    assert added(call, document) == {**previous, "cniVersion": version}


KEPT: dict[str, Json] = {
    "unknown keys": {"vendor": {"a": [1, None, {"b": False}]}, "x.y/z": "ä€😀", "": 0},
    "no interface index": {"ips": [{"address": "10.1.0.5/16"}]},
    "index 0": {
        "interfaces": [{"name": "eth0", "sandbox": "/n"}],
        "ips": [{"address": "10.1.0.5/16", "interface": 0}],
    },
    "index -1": {"ips": [{"address": "10.1.0.5/16", "interface": -1}]},
    "index beyond the end": {"ips": [{"address": "10.1.0.5/16", "interface": 99}]},
    "1.1.0's own fields": {
        "interfaces": [
            {"name": "h", "mtu": 1500, "socketPath": "/s", "pciID": "0000:00:1f.6", "new": {}},
            {"name": "eth0", "mac": "", "sandbox": "/n", "mtu": 0},
        ],
        "routes": [
            {"dst": "::/0", "gw": "::1", "mtu": 1, "advmss": 2, "priority": 0, "table": 5}
            | {"scope": 0}
        ],
    },
    "falsy values": {"routes": [], "dns": {}, "zero": 0, "no": False, "null": None, "text": ""},
    "spelling": {"ips": [{"address": "2001:DB8:0::5/64", "interface": 1, "gateway": "0:0::1"}]},
    "numbers": {"big": 12345678901234567890123, "float": 1.5, "exponent": 1e3, "neg": -0.5},
    "two of one family": {
        "ips": [{"address": "10.1.0.5/16", "interface": 1}, {"address": "10.2.0.5/16"}]
    },
}


@pytest.mark.parametrize("kind", KEPT)
def test_nothing_of_a_result_is_lost(call: Caller, kind: str) -> None:
    previous = {**result_of("1.1.0"), **KEPT[kind]}
    assert added(call, conf(prevResult=previous)) == previous
    assert added(call, conf(prevResult=previous, **ports(mapping(8080, 80)))) == previous


@pytest.mark.parametrize(
    ("version", "own"),
    [
        *(("1.0.0", "1.1.0"), ("1.1.0", "1.0.0"), ("0.3.1", "0.4.0"), ("0.4.0", "0.3.0")),
        *(("0.2.0", "0.1.0"), ("0.1.0", "0.2.0")),
    ],
)
def test_a_result_of_a_sister_version_is_rewritten(call: Caller, version: str, own: str) -> None:
    document = conf(version=version, prevResult=result_of(own))
    assert added(call, document) == {**result_of(own), "cniVersion": version}


BAD_RESULTS: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "a string": "x",
    "a list": [],
    "a number": 5,
    "an older shape": result_of("0.4.0"),
    "an address without a length": {**result_of("1.1.0"), "ips": [{"address": "10.1.0.5"}]},
    "an address of no family": {**result_of("1.1.0"), "ips": [{"address": "10.1.0.999/16"}]},
    "ips that are no list": {**result_of("1.1.0"), "ips": {"address": "10.1.0.5/16"}},
    "an index that is text": {
        **result_of("1.1.0"),
        "ips": [{"address": "10.1.0.5/16", "interface": "1"}],
    },
    "an unknown version": {**result_of("1.1.0"), "cniVersion": "7.0.0"},
}


@pytest.mark.parametrize("kind", BAD_RESULTS)
def test_a_bad_result_is_refused(call: Caller, kind: str) -> None:
    document = conf(prevResult=BAD_RESULTS[kind], **ports(mapping(8080, 80)))
    failed(call.verb("ADD", document), 6, 7)
    failed(call.verb("CHECK", document), 3, 6, 7)
    succeeded(call.verb("DEL", document))


# -- JSON as a Go program reads it ----------------------------------------------------------------

PREVIOUS = json.dumps(result_of("1.1.0"))
GO: dict[str, tuple[str | bytes, int]] = {
    "keys in any case": (
        '{"CNIVERSION":"1.1.0","Name":"n","TYPE":"x","PrevResult":@,"RUNTIMECONFIG":'
        '{"PORTMAPPINGS":[{"HOSTPORT":8080,"containerport":80,"PROTOCOL":"TCP","HostIp":""}]}}',
        0,
    ),
    "the last of a key counts": (
        '{"name":"a b","cniVersion":"x","name":"n","cniVersion":"1.1.0","prevResult":@}',
        0,
    ),
    "a spelling that comes later counts": (
        '{"name":"n","cniVersion":"1.1.0","prevResult":@,"NAME":"a b"}',
        7,
    ),
    "escapes": (
        r'{"\u006eame":"\u006e","cni\u0056ersion":"1.1.0","prevResult":@}',
        0,
    ),
    "bytes that are no text": (
        b'{"name":"n","cniVersion":"1.1.0","x":"\xff\xfe","prevResult":' + PREVIOUS.encode() + b"}",
        0,
    ),
    "a name with such bytes": (b'{"name":"n\xff","cniVersion":"1.1.0"}', 7),
    "half a surrogate pair": (
        r'{"name":"n","cniVersion":"1.1.0","prevResult":{"a":"\ud800"}}',
        0,
    ),
    "space around it": (' \r\n\t{"name":"n","cniVersion":"1.1.0","prevResult":{}} \n\n', 0),
    "a second document": ('{"name":"n","cniVersion":"1.1.0","prevResult":{}}{}', 6),
    "a NUL behind it": ('{"name":"n","cniVersion":"1.1.0","prevResult":{}}\0', 6),
    "NaN": ('{"name":"n","cniVersion":"1.1.0","prevResult":{"a":NaN}}', 6),
    "Infinity": ('{"name":"n","cniVersion":"1.1.0","prevResult":{"a":-Infinity}}', 6),
    "a number beyond a double": ('{"name":"n","cniVersion":"1.1.0","prevResult":{"a":1e999}}', 6),
    "a byte order mark": (b'\xef\xbb\xbf{"name":"n","cniVersion":"1.1.0","prevResult":{}}', 6),
    "UTF-16": ('{"name":"n"}'.encode("utf-16"), 6),
    "a leading zero": ('{"name":"n","cniVersion":"1.1.0","x":01}', 6),
    "a trailing comma": ('{"name":"n","cniVersion":"1.1.0",}', 6),
    "a comment": ('{"name":"n"/*c*/,"cniVersion":"1.1.0"}', 6),
    "single quotes": ("{'name':'n'}", 6),
    "a line end in a string": ('{"name":"n","cniVersion":"1.1.0","x":"a\nb"}', 6),
    "an unknown escape": (r'{"name":"n","cniVersion":"1.1.0","x":"\q"}', 6),
    "true": ("true", 6),
    "a string": ('"x"', 6),
    "null": ("null", 7),
    "an empty object": ("{}", 7),
    "a list as name": ('{"name":["n"],"cniVersion":"1.1.0"}', 6),
    "null as name": ('{"name":null,"cniVersion":"1.1.0"}', 7),
    "a name with a line end": ('{"name":"n\\n","cniVersion":"1.1.0"}', 7),
}


@pytest.mark.parametrize("kind", GO)
def test_json_is_read_as_go_reads_it(call: Caller, kind: str) -> None:
    text, code = GO[kind]
    if isinstance(text, str):
        text = text.replace("@", PREVIOUS)
    reply = call(env_of("ADD"), text)
    if code:
        failed(reply, code)
    else:
        succeeded(reply, silent=False)
        assert reply.json["cniVersion"] == "1.1.0"
        succeeded(call(env_of("DEL"), text))


def test_a_megabyte_of_configuration(call: Caller) -> None:
    """P14: and sixteen of them; one byte more is an error in words, not a hang."""
    document = conf(**ports(mapping(8080, 80)))
    for size in (1 << 20, 8 << 20):
        assert added(call, {**document, "x": "y" * size}) == document["prevResult"]
    text = json.dumps(document).encode().ljust((16 << 20) + 1)
    failed(call(env_of("ADD"), text), 5)


# -- mappings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""},
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"hostport": 8080, "containerport": 80, "PROTOCOL": "TCP", "hostIp": None},
        {"hostPort": 8080, "containerPort": 80, "hostIP": ""},
        {"hostPort": 8080, "containerPort": 80, "protocol": ""},
        {"hostPort": 8080, "containerPort": 80, "protocol": None, "vendor": {}},
    ],
    ids=range(6),
)
def test_p1_spellings_are_one_mapping(call: Caller, entry: Json) -> None:
    document = conf(**ports(entry))
    plain = conf(**ports(mapping(8080, 80)))
    succeeded(call.verb("ADD", document), silent=False)
    rules = call.stage.node.ruleset()
    succeeded(call.verb("CHECK", plain))
    succeeded(call.verb("ADD", plain), silent=False)
    assert call.stage.node.ruleset() == rules
    succeeded(call.verb("DEL", plain))


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [
        ("", "", True),
        (None, "0.0.0.0", True),
        ("", "::", True),
        ("0.0.0.0", "::", False),
        ("127.0.0.1", "0.0.0.0", True),
        ("192.0.2.1", "192.0.2.5", False),
        ("192.0.2.1", "", True),
        ("::", "2001:db8:1::1", True),
        ("0.0.0.0", "2001:db8:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8:1::1", "2001:DB8:1:0::1", True),
        ("127.0.0.1", "::1", False),
    ],
)
def test_p2_host_addresses(call: Caller, first: str | None, second: str, clash: bool) -> None:
    one = conf(**ports(mapping(8080, 80, "tcp", first)))
    two = conf(**ports(mapping(8080, 80, "tcp", second)))
    succeeded(call.verb("ADD", one), silent=False)
    reply = call.verb("ADD", two, CNI_CONTAINERID="ctr-2")
    if clash:
        failed(reply, 101, names="ctr-1")
        assert "8080" in reply.text
        assert "net1" in reply.text
    else:
        succeeded(reply, silent=False)
    for container in ("ctr-1", "ctr-2"):
        succeeded(call.verb("DEL", one, CNI_CONTAINERID=container))


@pytest.mark.parametrize("protocol", ["tcp", "TCP", "Udp", "sctp", "SCTP"])
def test_p3_protocols(call: Caller, protocol: str) -> None:
    document = conf(**ports(mapping(8080, 80, protocol)))
    succeeded(call.verb("ADD", document), silent=False)
    refused = call.verb("ADD", document, CNI_CONTAINERID="ctr-2")
    failed(refused, 101, names=protocol.lower())
    succeeded(call.verb("DEL", document))


@pytest.mark.parametrize("field", ["hostPort", "containerPort"])
@pytest.mark.parametrize("value", [-1, 65536, 1 << 64, "8080", 80.0, 8.08e3, True, [], {}, "x"])
def test_p4_no_port(call: Caller, field: str, value: Any) -> None:
    document = conf(**ports(mapping(8081, 80), {**mapping(8080, 80), field: value}))
    failed(call.verb("ADD", document), 7, names=field)


def test_p4_port_zero(call: Caller) -> None:
    document = conf(**ports(mapping(0, 80)))
    assert added(call, document) == document["prevResult"]
    failed(call.verb("ADD", conf(**ports(mapping(8080, 0)))), 7, names="containerPort")


NO_PORTS: dict[str, Json] = {
    "an empty list": {"runtimeConfig": {"portMappings": []}},
    "no list": {"runtimeConfig": {}},
    "no runtimeConfig": {},
    "null for runtimeConfig": {"runtimeConfig": None},
    "other capabilities": {"runtimeConfig": {"ips": ["10.0.0.1/8"], "mac": "x"}},
    "args": {"args": {"cni": {"labels": [{"key": "a", "value": "b"}]}}},
    "what libcni leaves in": {"capabilities": {"portMappings": True}, "args": None, "dns": {}},
}


@pytest.mark.parametrize("kind", NO_PORTS)
def test_p5_no_ports_is_no_work(call: Caller, kind: str) -> None:
    document = conf(**NO_PORTS[kind])
    before = call.stage.snapshot()
    reply = call.verb("ADD", document)
    succeeded(reply, silent=False)
    assert reply.json == document["prevResult"]
    assert call.stage.snapshot() == before
    succeeded(call.verb("CHECK", document))
    succeeded(call.verb("DEL", document))


@pytest.mark.parametrize("value", [None, {}, "80", 80, True, [None], ["80"], [[]], [{}]])
def test_p6_no_list_of_mappings(call: Caller, value: Any) -> None:
    failed(call.verb("ADD", conf(runtimeConfig={"portMappings": value})), 7, names="portMappings")


def test_p7_host_links_first_and_addresses_without_a_link(call: Caller) -> None:
    previous: Json = {
        "interfaces": [{"name": "eth0"}, {"name": "eth0", "sandbox": "/n"}],
        "ips": [
            {"address": "10.9.9.9/24", "interface": 0},
            {"address": "10.1.0.5/16", "interface": 1},
            {"address": "2001:db8:9::5/64"},
            {"address": "10.8.8.8/24", "interface": 1},
        ],
    }
    document = conf(prevResult=previous, **ports(mapping(8080, 80)))
    succeeded(call.verb("ADD", document), silent=False)
    rules = call.stage.node.ruleset() + call.stage.node.output("iptables-legacy-save")
    assert "10.1.0.5" in rules
    assert "2001:db8:9::5" in rules
    assert "10.9.9.9" not in rules
    assert "10.8.8.8" not in rules
    succeeded(call.verb("DEL", document))


def test_p9_a_failed_add_leaves_nothing(call: Caller) -> None:
    owner = conf(**ports(mapping(8080, 80)))
    succeeded(call.verb("ADD", owner), silent=False)
    before = call.stage.snapshot()
    wanted = conf(**ports(mapping(8081, 80), mapping(8082, 80, "udp"), mapping(8080, 80)))
    failed(call.verb("ADD", wanted, CNI_CONTAINERID="ctr-2"), 101, names="8080")
    assert call.stage.snapshot() == before
    succeeded(call.verb("DEL", wanted, CNI_CONTAINERID="ctr-2"))
    succeeded(call.verb("DEL", owner))
    succeeded(call.verb("ADD", wanted, CNI_CONTAINERID="ctr-2"), silent=False)
    succeeded(call.verb("DEL", wanted, CNI_CONTAINERID="ctr-2"))


def test_p10_check(call: Caller) -> None:
    document = conf(**ports(mapping(8080, 80)))
    failed(call.verb("CHECK", document), 3)
    succeeded(call.verb("ADD", document), silent=False)
    for _ in range(2):
        succeeded(call.verb("CHECK", document))
    for previous in (MISSING, None):
        without = conf(prevResult=previous, **ports(mapping(8080, 80)))
        failed(call.verb("CHECK", without), 6, 7)
    failed(call.verb("CHECK", conf(**ports(mapping(8080, 81)))), 103, names="mappings")
    moved = json.loads(json.dumps(document).replace("10.1.0.5", "10.1.0.6"))
    failed(call.verb("CHECK", moved), 103, names="10.1.0.5")
    for version in ("0.4.0", "1.0.0"):
        succeeded(call.verb("CHECK", conf(version=version, **ports(mapping(8080, 80)))))
    succeeded(call.verb("DEL", document))
    failed(call.verb("CHECK", document), 3)


def test_p13_many_at_once(call: Caller) -> None:
    def begin(number: int, port: int) -> Any:
        process = call.start(env_of("ADD", CNI_CONTAINERID=f"many-{number}"))
        assert process.stdin is not None
        document = call.document(conf(**ports(mapping(port, 80), mapping(port, 80, "udp"))))
        process.stdin.write(json.dumps(document).encode())
        process.stdin.close()
        process.stdin = None
        return process

    def outcomes(processes: list[Any]) -> list[Reply]:
        ends = [(p.communicate(timeout=40), p.returncode) for p in processes]
        return [Reply(status, out, err, 0) for (out, err), status in ends]

    for reply in outcomes([begin(i, 9000 + i) for i in range(50)]):
        succeeded(reply, silent=False)
    losers = [r for r in outcomes([begin(100 + i, 9500) for i in range(20)]) if r.status]
    assert len(losers) == 19
    for reply in losers:
        failed(reply, 101, names="9500")
    gc = conf("GC", **{"cni.dev/valid-attachments": []})
    succeeded(call.verb("GC", gc))


def test_p19_calls_of_the_library_for_an_old_configuration(call: Caller) -> None:
    """0.3.1: no prevResult on DEL; every variable is there, empty where there is nothing."""
    document = conf(version="0.3.1", **ports(mapping(8080, 80)))
    succeeded(call.verb("ADD", document, CNI_ARGS=""), silent=False)
    poor = {key: value for key, value in document.items() if key != "prevResult"}
    succeeded(call.verb("DEL", poor, CNI_ARGS="", CNI_NETNS=""))
    empty = dict.fromkeys(("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"), "")
    for verb in ("GC", "STATUS"):
        succeeded(call.verb(verb, conf(verb), **empty))


def test_p20_no_error_of_del_reads_like_a_success(call: Caller) -> None:
    """``failed`` looks for the words that runtimes take for "already gone"."""
    words = "not found: no such file or directory"
    failed(call.verb("DEL", conf("DEL", name=words)), 7)
    failed(call.verb("DEL", conf("DEL", cniVersion=words)), 1)
    failed(call.verb("DEL", CNI_CONTAINERID=words), 4)
    failed(call(env_of("DEL"), '{"name": not found'), 6)
