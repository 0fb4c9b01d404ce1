"""Environment, standard input, version and verb: which mistake is reported, and how."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cni_cases import ENV, MAPPING, PREV, assert_error, config, env, parse, refused

from cni_hostport import cni
from cni_hostport.errors import HostPortError, PortInUse


def fails(
    code: int, *texts: str, stdin: Any = None, same_netns: bool = False, **given: Any
) -> None:
    """Assert the code of parse_call itself."""
    data = stdin if isinstance(stdin, bytes) else json.dumps(stdin or config()).encode()
    with pytest.raises(HostPortError) as caught:
        cni.parse_call(env(given.pop("command", "ADD"), **given), data, same_netns)
    assert_error(caught.value, code, *texts)


def test_what_a_call_holds() -> None:
    document = config(MAPPING, vendor={"x": 1})
    call = parse(document, CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=web-0")
    assert call.command == "ADD"
    assert call.identity is not None
    assert (call.identity.network, call.identity.container_id) == ("net1", "ctr-1")
    assert call.identity.ifname == "eth0"
    assert call.netns == ENV["CNI_NETNS"]
    assert call.cni_version == "1.1.0"
    assert call.config == document
    assert call.prev_result == PREV
    assert call.args["K8S_POD_NAME"] == "web-0"


@pytest.mark.parametrize("command", ["GC", "STATUS"])
def test_verbs_about_no_attachment(command: str) -> None:
    call = parse(config(drop_=("prevResult",)), command)
    assert call.identity is None
    assert call.network == "net1"


def test_version_and_bare_calls_do_not_crash() -> None:
    assert cni.parse_call({"CNI_COMMAND": "VERSION"}, b"{{{").command == "VERSION"
    for empty in ({}, {"CNI_COMMAND": ""}):
        with pytest.raises(HostPortError) as caught:
            cni.parse_call(empty, b"")
        assert_error(caught.value, 4, "[CNI_COMMAND]")


# --- environment ---------------------------------------------------------------------------------

REQUIRED = ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH")


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("command", ["ADD", "CHECK", "DEL"])
@pytest.mark.parametrize("name", REQUIRED)
def test_missing_and_empty_are_the_same(command: str, name: str, value: str | None) -> None:
    if (command, name) == ("DEL", "CNI_NETNS"):
        assert parse(config(), command, **{name: value}).netns == ""
    else:
        fails(4, f"[{name}]", command=command, **{name: value})


def test_all_missing_ones_are_named_in_order() -> None:
    fails(4, "[CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH]", **dict.fromkeys(REQUIRED))


def test_a_malformed_value_comes_before_a_missing_one() -> None:
    fails(4, "CNI_CONTAINERID", "a%b", CNI_CONTAINERID="a%b", CNI_NETNS=None)
    fails(4, "CNI_IFNAME", "a/b", CNI_CONTAINERID=None, CNI_IFNAME="a/b")


def test_the_environment_comes_before_stdin() -> None:
    fails(4, "CNI_IFNAME", stdin=b"{", CNI_IFNAME="a/b")


@pytest.mark.parametrize(
    "value",
    [
        "-a",
        ".a",
        "_a",
        "a/b",
        "a b",
        "a\n",
        "\n",
        "ä",
        "a\0",
        "a\udcff",
        "some-%%id",
        "a;b",
        "a\u200b",
    ],
)
def test_bad_container_ids(value: str) -> None:
    for command in ("ADD", "DEL", "CHECK"):
        fails(4, "CNI_CONTAINERID", command=command, CNI_CONTAINERID=value)


@pytest.mark.parametrize(
    "value", ["a" * 64, "default-" + "0" * 64, "cnitool-" + "1" * 20, "x" * 300, "A.b_c-", "7"]
)
def test_container_ids_of_real_runtimes(value: str) -> None:
    """P18: nothing of an ID's length reaches a file name; the key has 16 characters."""
    call = parse(config(), CNI_CONTAINERID=value)
    assert call.identity is not None
    assert call.identity.container_id == value
    assert len(call.identity.key) == 16


BAD_NAMES = ["a" * 16, ".", "..", "a/b", "a:b", "a b", "a\tb", "a\n", "a\xa0b", "é" * 8, "a\udcff"]


@pytest.mark.parametrize("value", BAD_NAMES)
def test_bad_interface_names(value: str) -> None:
    fails(4, "CNI_IFNAME", CNI_IFNAME=value)
    for command in ("GC", "STATUS"):
        assert parse(config(), command, CNI_IFNAME=value, CNI_CONTAINERID="%").command == command


@pytest.mark.parametrize("value", ["a" * 15, "...", "é" * 7 + "1", "%d", 'a"b', "eth0.100", "a@b"])
def test_odd_interface_names(value: str) -> None:
    assert parse(config(), CNI_IFNAME=value).identity.ifname == value  # type: ignore[union-attr]


def test_a_netns_path_that_is_no_text() -> None:
    fails(4, "CNI_NETNS", CNI_NETNS="/run/\udcff")
    assert parse(config(), "DEL", CNI_NETNS="/run/\udcff").command == "DEL"


def test_unknown_commands() -> None:
    for command in ("add", "GET", "NOPE", "VERSION ", "ADD\n"):
        fails(4, "unknown CNI_COMMAND", command=command)
    fails(6, command="NOPE", stdin=b"{")
    fails(7, command="NOPE", stdin=b"{}")
    fails(4, command="NOPE", stdin=config(cniVersion="9.9.9"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("some;extra;args", {}),
        ("A=1;B=2", {"A": "1", "B": "2"}),
        (";;A=1;", {"A": "1"}),
        ("A=b=c", {"A": "b=c"}),
        ("A=1;A=2", {"A": "2"}),
        ("A=", {"A": ""}),
        ("=x", {}),
        ("K8S_POD_NAME=\udcff", {"K8S_POD_NAME": "\ufffd"}),
        ("K8S_POD_NAME=\ud800ä", {"K8S_POD_NAME": "\ufffdä"}),
    ],
)
def test_args_are_read_leniently(text: str, wanted: dict[str, str]) -> None:
    assert dict(parse(config(), CNI_ARGS=text).args) == wanted


# --- standard input ------------------------------------------------------------------------------

NOT_JSON = [
    b"",
    b" \n",
    b"{",
    b"[]",
    b'"x"',
    b"5",
    b"true",
    b"{} x",
    b'\xef\xbb\xbf{"name":"n"}',
    b'{"name":"n","x":NaN}',
    b'{"name":"n","x":Infinity}',
    b'{"name":"n","x":-Infinity}',
    b'{"name":"n","x":1e999}',
    b'{"name":"n","x":01}',
    b"{'name':'n'}",
    b'{"name":"n",}',
    b'{"name":"a\tb"}',
    b'{"name":"n","x":' + b"1" * 5000 + b"}",
    b'{"name":"n","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"name":"n","x":' + b'{"a":' * 100_000,
    b'{"name":"n","x":' + b"[" * 500 + b"]" * 500 + b"}",
    '{"name":"n"}'.encode("utf-16"),
]


@pytest.mark.parametrize("data", NOT_JSON, ids=range(len(NOT_JSON)))
@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
def test_not_json(command: str, data: bytes) -> None:
    fails(6, command=command, stdin=data)


def test_too_long() -> None:
    data = json.dumps(config()).encode().ljust(cni.STDIN_LIMIT)
    assert parse(data).command == "ADD"
    fails(5, "longer than", stdin=data + b" ")


def test_nesting_below_the_limit_passes_through() -> None:
    deep = json.loads("[" * 390 + "]" * 390)
    document = config(prevResult={**PREV, "deep": deep})
    assert json.loads(cni.result_bytes(parse(document)))["deep"] == deep


def test_many_brackets_are_not_depth() -> None:
    assert parse(config(x=[[] for _ in range(5000)])).command == "ADD"


@pytest.mark.parametrize(
    ("name", "code"),
    [(None, 7), ("", 7), (5, 6), (True, 6), ([], 6), ({}, 6)]
    + [(bad, 7) for bad in ("te%%st", "a/b", "-a", ".a", "a b", "a\n", "ä", "a\0b", "a\ud800")],
)
def test_bad_network_names(name: Any, code: int) -> None:
    for command in ("ADD", "DEL", "GC"):
        fails(code, "name", command=command, stdin=config(name=name))
    fails(7, "name", stdin=config(drop_=("name",)))


def test_null_is_an_object_without_a_name() -> None:
    fails(7, "missing network name", stdin=b"null")


def test_keys_as_go_reads_them() -> None:
    data = b'{"CNIVersion":"1.1.0","NAME":"a%","name":"n","PREVRESULT":{"cniversion":"1.1.0"}}'
    call = parse(data)
    assert (call.network, call.cni_version) == ("n", "1.1.0")
    assert json.loads(cni.result_bytes(call)) == {"cniVersion": "1.1.0"}
    assert parse(b'{"name":"a%","name":"n"}', "DEL").network == "n"
    assert parse(b'{"name":"n","NaMe":"m"}', "DEL").network == "m"


def test_bytes_that_are_no_text() -> None:
    data = json.dumps(config(x="?")).encode().replace(b'"?"', b'"\xff"')
    assert parse(data).config["x"] == "\ufffd"
    fails(7, "name", stdin=b'{"name":"n\xff"}')


def test_half_surrogates_become_replacement_characters() -> None:
    data = (
        b'{"cniVersion":"1.1.0","name":"n","prevResult":{"\\ud800":["\\uDFFF","\\ud83d\\ude00"]}}'
    )
    call = parse(data)
    assert call.prev_result == {"\ufffd": ["\ufffd", "😀"]}
    assert json.loads(cni.result_bytes(call))["\ufffd"] == ["\ufffd", "😀"]


# --- version -------------------------------------------------------------------------------------

BAD_VERSIONS = ["9.8.7", "1.2.0", "0.5.0", "1.0", "v1.0.0", " 1.0.0", "abc", "0.-42.0", "1.0.0.0"]


@pytest.mark.parametrize("version", [*BAD_VERSIONS, "1.0.0\n", "1_0.0.0", "\u0661.0.0"])
def test_bad_versions_of_add_and_del(version: str) -> None:
    for command in ("ADD", "DEL"):
        fails(1, command=command, stdin=config(cniVersion=version))


@pytest.mark.parametrize(
    ("version", "code", "text"),
    [
        ("abc", 6, "not a version"),
        ("v1.0.0", 6, "not a version"),
        (" 1.1.0", 6, "not a version"),
        ("1.1.0\n", 6, "not a version"),
        ("1_0.0.0", 6, "not a version"),
        ("\u0661.0.0", 6, "not a version"),
        ("1.0.0.0", 6, "not a version"),
        ("9" * 5000, 6, "not a version"),
        ("1..0", 6, "not a version"),
        ("9.8.7", 1, "plugin version does not allow"),
        ("1.2.0", 1, "plugin version does not allow"),
        ("1.1.1", 1, "plugin version does not allow"),
        ("1.1", 1, "incompatible"),
        ("+1.1.0", 1, "incompatible"),
        ("0.-42.0", 1, "config version does not allow"),
        ("0.3.1", 1, "config version does not allow"),
        (None, 1, "config version does not allow"),
        ("", 1, "config version does not allow"),
    ],
)
@pytest.mark.parametrize("command", ["CHECK", "GC", "STATUS"])
def test_bad_versions_of_the_younger_verbs(
    command: str, version: str | None, code: int, text: str
) -> None:
    fails(code, text, command=command, stdin=config(cniVersion=version))


@pytest.mark.parametrize("version", [1, 1.0, True, [], {}])
@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
def test_a_version_that_is_no_string(command: str, version: Any) -> None:
    fails(6, "cniVersion", command=command, stdin=config(cniVersion=version))


@pytest.mark.parametrize("version", cni.SUPPORTED_VERSIONS)
def test_since_when_a_verb_exists(version: str) -> None:
    document = config(cniVersion=version, prevResult={})
    for command, since in (("CHECK", 4), ("GC", 6), ("STATUS", 6)):
        if cni.SUPPORTED_VERSIONS.index(version) >= since:
            assert parse(document, command).cni_version == version
        else:
            fails(1, command=command, stdin=document)
    for command in ("ADD", "DEL"):
        assert parse(document, command).cni_version == version


@pytest.mark.parametrize("version", [None, ""])
def test_no_version_is_the_oldest(version: str | None) -> None:
    assert parse(config(cniVersion=version), "DEL").cni_version == "0.1.0"
    assert parse(b'{"name":"n"}', "DEL").cni_version == "0.1.0"


# --- verbs ---------------------------------------------------------------------------------------


def test_the_plugins_own_namespace() -> None:
    for command in ("ADD", "DEL"):
        fails(8, "CNI_NETNS", command=command, same_netns=True)
        fails(8, command=command, same_netns=True, CNI_NETNS_OVERRIDE="yes")
        for override in ("1", "true", "tRuE"):
            data = json.dumps(config()).encode()
            given = env(command, CNI_NETNS_OVERRIDE=override)
            assert cni.parse_call(given, data, same_netns=True).command == command
    for command in ("CHECK", "GC", "STATUS"):
        assert cni.parse_call(env(command), json.dumps(config()).encode(), True).command == command


def test_not_chained() -> None:
    for absent in (config(prevResult=None), config(drop_=("prevResult",))):
        for command in ("ADD", "CHECK"):
            fails(7, "must be called as chained plugin", command=command, stdin=absent)
        for command in ("DEL", "GC", "STATUS"):
            assert parse(absent, command).prev_result is None


@pytest.mark.parametrize("junk", ["x", 5, [], True, {"cniVersion": "0.1.0"}, {"ips": "x"}])
def test_del_needs_nothing_but_the_identity(junk: Any) -> None:
    """P8: no runtimeConfig, no prevResult, or junk for both."""
    call = parse(config(prevResult=junk, runtimeConfig=junk, backend=7), "DEL", CNI_NETNS=None)
    assert call.identity is not None
    assert parse(config(drop_=("prevResult",)), "DEL").identity is not None


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, False),
        ({"runtimeConfig": None}, False),
        ({"runtimeConfig": {}}, False),
        ({"runtimeConfig": {"portMappings": []}}, False),
        ({"runtimeConfig": {"portMappings": [{"hostPort": 0, "containerPort": 1}]}}, False),
        ({"runtimeConfig": {"portMappings": [MAPPING]}}, True),
        ({"portMappings": [MAPPING]}, True),
        ({"runtimeConfig": {"portMappings": None}}, True),
        ({"runtimeConfig": {"portMappings": ["junk"]}}, True),
        ({"runtimeConfig": "junk"}, True),
    ],
)
def test_wants_mappings(keys: dict[str, Any], wanted: bool) -> None:
    for command in ("ADD", "DEL", "CHECK"):
        assert cni.wants_mappings(parse(config(**keys), command)) is wanted


NEW, OLD = "cni.dev/valid-attachments", "cni.dev/attachments"
A = {"containerID": "a", "ifname": "eth0"}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, None),
        ({NEW: None}, frozenset()),
        ({NEW: []}, frozenset()),
        ({NEW: [A, A]}, frozenset({("a", "eth0")})),
        ({OLD: [A]}, frozenset({("a", "eth0")})),
        ({OLD: None}, frozenset()),
        ({NEW: [], OLD: [A]}, frozenset()),
        ({NEW: None, OLD: [A]}, frozenset()),
        ({NEW: [{"CONTAINERID": "b", "ifName": "net1", "x": 1}]}, frozenset({("b", "net1")})),
    ],
)
def test_gc_list(keys: dict[str, Any], wanted: Any) -> None:
    assert cni.gc_of(parse(config(**keys), "GC")) == wanted


@pytest.mark.parametrize("key", [NEW, OLD])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", '"x" is not a list'),
        ({}, "is not a list"),
        (0, "0 is not a list"),
        (False, "false is not a list"),
        (["a"], '[0]: "a" is not an object'),
        ([A, None], "[1]: null is not an object"),
        ([{"ifname": "eth0"}], "[0].containerID: null"),
        ([{"containerID": "a"}], "[0].ifname: null"),
        ([{"containerID": 5, "ifname": "eth0"}], "[0].containerID: 5"),
        ([{"containerID": "a", "ifname": ""}], '[0].ifname: ""'),
    ],
)
def test_gc_list_that_is_none(key: str, value: Any, text: str) -> None:
    call = parse(config(**{key: value}), "GC")
    with pytest.raises(HostPortError) as caught:
        cni.gc_of(call)
    assert_error(caught.value, 7, key, text)


# --- answers -------------------------------------------------------------------------------------


def test_an_error_as_json() -> None:
    error = PortInUse("0.0.0.0:80/tcp is in use", "by pod a/b")
    data = cni.error_bytes(error, "1.0.0")
    assert data.endswith(b"}\n")
    assert json.loads(data) == {
        "cniVersion": "1.0.0",
        "code": 101,
        "msg": "0.0.0.0:80/tcp is in use",
        "details": "by pod a/b",
    }
    assert "details" not in json.loads(cni.error_bytes(PortInUse("x"), "1.0.0"))


def test_a_foreign_error_is_one_short_line() -> None:
    error = ValueError("a\nTraceback\x1b[31m\udcff" + "x" * 100_000)
    printed = json.loads(cni.error_bytes(error, "1.0.0"))
    assert printed["code"] == 999
    assert printed["details"].startswith(r"ValueError: a\nTraceback\x1b[31m\udcff")
    assert len(printed["details"]) < 5000


def test_no_error_has_the_words_that_swallow_a_del() -> None:
    """P20: go-cni takes a DEL error with these words for a success."""
    error = PortInUse("table NOT FOUND", "[Errno 2] No such file or directory: 'nft'")
    text = cni.error_bytes(error, "1.0.0").decode().lower()
    assert "not found" not in text
    assert "no such file or directory" not in text


def test_values_in_errors_are_short_and_printable() -> None:
    long = "x" * 10_000 + "\n"
    error = refused(config(backend=long), 7, "backend", "(10001 characters)")
    assert len(str(error)) < 400
    fails(4, CNI_CONTAINERID="\n" * 9999)
    error = refused(config(backend="\x1b]0;\u202e\n"), 7, r"\x1b]0;\u202e\n")
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("stdin", "wanted"),
    [
        (b'{"cniVersion":"0.4.0"}', "0.4.0"),
        (b'{"CNIVERSION":"0.4.0","name":5}', "0.4.0"),
        (b"{}", "0.1.0"),
        (b"null", "0.1.0"),
        (b'{"cniVersion":"9.9.9"}', "1.1.0"),
        (b'{"cniVersion":7}', "1.1.0"),
        (b"", "1.1.0"),
        (b"{{{", "1.1.0"),
        (b"\xff\xfe", "1.1.0"),
        (b"[" * 100_000, "1.1.0"),
    ],
)
def test_version_of_an_answer(stdin: bytes, wanted: str) -> None:
    assert cni.cni_version_of(stdin) == wanted
