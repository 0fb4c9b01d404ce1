"""``status``: filters, order, words, widths; the helper is a stand-in."""

import json
import os
from pathlib import Path

import jsonschema
import pytest

from cni_hostport.cli import client, outsiders, status, statusview, terminal
from cni_hostport.netfilter.ctmsg import Endpoint
from tests.unit.cli_cases import document, mapping

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/status.schema.json").read_text())
DOCS = Path(__file__).parents[3] / "docs/status-json.md"


@pytest.fixture
def helper(monkeypatch):
    """A function that says what the helper answers."""
    monkeypatch.setattr(outsiders, "count_connections", lambda _document: None)
    monkeypatch.delenv("COLUMNS", raising=False)

    def answer(given):
        if isinstance(given, Exception):

            def refuse(*_):
                raise given

            monkeypatch.setattr(client, "document", refuse)
        else:
            monkeypatch.setattr(client, "document", lambda *_: json.loads(json.dumps(given)))

    return answer


def run(capsys, *argv):
    code = status.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def ports(out):
    return [line.split()[1] for line in out.split("HOST")[1].splitlines()[1:]]


def test_table(helper, capsys):
    helper(document(mapping(443), mapping(80, hostIP="192.0.2.1", pod="", namespace="")))
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "cni-hostport 0.1.0, helper pid 812, up 1h2m, IPv4 nftables, IPv6 nftables"
    assert lines[1] == ""
    assert lines[2].split() == list(statusview.COLUMNS)
    assert lines[3].split()[:5] == ["192.0.2.1", "80", "tcp", "-", "abcdef012345"]
    assert lines[4].split()[:4] == ["*", "443", "tcp", "shop/web"]
    assert lines[4].split()[-2:] == ["-", "podnet"]


def test_names_of_others_are_no_commands_for_the_terminal(helper, capsys, monkeypatch):
    evil = "we\nb\x1b[2J\u202e"
    helper(document(mapping(80, pod=evil, network=evil)))
    row = {"address": "::", "port": 80, "protocol": "tcp", "state": "listens", "pid": 7}
    monkeypatch.setattr(outsiders, "same_namespace", lambda _document: True)
    monkeypatch.setattr(outsiders, "others", lambda *_: [{**row, "process": evil}])
    code, out, err = run(capsys, "--port", "80")
    assert (code, err) == (0, "")
    assert out.replace("\n", "").isprintable()
    assert out.count("we\\nb\\x1b[2J") == 3
    entry = {"namespace": evil, "pod": evil, "containerID": "c", "network": evil}
    assert client.who(entry).isprintable()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), ["80", "81", "82", "83"]),
        (("--port", "81"), ["81"]),
        (("--pod", "shop/b"), ["81"]),
        (("--network", "blue"), ["82"]),
        (("--protocol", "udp"), ["83"]),
        (("--sort", "pod"), ["83", "81", "82", "80"]),
        (("--sort", "network"), ["82", "80", "81", "83"]),
        (("--sort", "held"), ["82", "80", "81", "83"]),
        (("--sort", "connections"), ["83", "82", "80", "81"]),
    ],
    ids=" ".join,
)
def test_filters_and_order(helper, capsys, monkeypatch, argv, expected):
    monkeypatch.setattr(outsiders, "same_namespace", lambda _document: False)
    helper(
        document(
            mapping(83, pod="a", protocol="udp", connections=9),
            mapping(80, pod="z"),
            mapping(81, pod="b"),
            mapping(82, pod="c", network="blue", held="waiting", connections=1),
        )
    )
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert ports(out) == expected


def test_nothing_to_show(helper, capsys):
    helper(document())
    assert run(capsys)[1].splitlines()[-1] == "no host ports"


def test_header_tells_what_needs_attention(helper, capsys):
    given = document(queue=2, repairs={"count": 3, "lastTime": 0.0, "last": "nftables: 2 missing"})
    given["helper"]["problem"] = "nft is not installed"
    given["warnings"] = ["portmap has rules here"]
    given["nodeCache"] = {
        "link": "nodelocaldns",
        "addresses": ["169.254.20.10"],
        "port": 53,
        "engine": "unbound",
        "agent": True,
        "rules": True,
        "fallbacks": 0,
    }
    jsonschema.validate(given, SCHEMA)
    helper(given)
    out = run(capsys)[1]
    assert "repairs: 3, last " in out
    assert "nftables: 2 missing" in out
    assert "queued DELs: 2" in out
    assert "warning: portmap has rules here" in out
    assert "PROBLEM: nft is not installed" in out
    assert "node-cache: 169.254.20.10, engine unbound, rules present, fallbacks 0" in out


def test_a_narrow_terminal_gets_no_longer_lines(helper, capsys, monkeypatch):
    helper(document(mapping(pod="a-pod-with-a-name-of-some-length-7d9f8b6c5-x2x4z")))
    wide = run(capsys)[1]
    assert "a-pod-with-a-name-of-some-length-7d9f8b6c5-x2x4z" in wide
    for columns in (100, 80, 60, 40, 20):
        monkeypatch.setenv("COLUMNS", str(columns))
        table = run(capsys)[1].split("\n\n")[1].splitlines()
        assert max(map(len, table)) <= columns
        assert "8080" in table[1]
    assert run(capsys, "--wide")[1].split("\n\n")[1].splitlines()[1].count("abcdef0123456789") == 4


def test_colours_only_on_a_terminal_that_wants_them(helper, capsys, monkeypatch):
    helper(document(mapping(held="waiting")))
    assert "\x1b" not in run(capsys)[1]
    monkeypatch.setattr(terminal, "interactive", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[33m" in run(capsys)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(capsys)[1]
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run(capsys)[1]


def test_json_is_the_document(helper, capsys):
    given = document(mapping(80), mapping(81))
    helper(given)
    code, out, _ = run(capsys, "--json")
    assert code == 0
    assert json.loads(out) == given
    jsonschema.validate(json.loads(out), SCHEMA)
    assert [
        m["hostPort"] for m in json.loads(run(capsys, "--json", "--pod", "x")[1])["mappings"]
    ] == []


def test_the_documented_example_obeys_the_schema():
    blocks = DOCS.read_text().split("```json\n")[1:]
    example = json.loads(blocks[0].split("```")[0])
    jsonschema.validate(example, SCHEMA)
    others = json.loads("{" + blocks[1].split("```")[0] + "}")
    jsonschema.validate({**example, **others}, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**example, "surprise": 1}, SCHEMA)


def test_no_helper(helper, capsys, monkeypatch):
    helper(client.NoHelper("no helper answers in /run/x; it is started by the first plugin call"))
    code, out, err = run(capsys)
    assert (code, out) == (3, "")
    assert "started by the first plugin call" in err
    row = {"address": "::", "port": 80, "protocol": "tcp", "state": "listens", "pid": 7}
    monkeypatch.setattr(outsiders, "others", lambda _port: [{**row, "process": "nginx"}])
    code, out, _ = run(capsys, "--port", "80")
    assert (code, out) == (3, "process nginx (pid 7) listens on [::]:80/tcp\n")


@pytest.mark.parametrize("bad", ["0", "65536", "http", "-1", "", "٨"])
def test_a_port_that_is_none_is_a_usage_error(bad, capsys):
    with pytest.raises(SystemExit) as ended:
        status.main(["--port", bad])
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_connections_belong_to_one_mapping():
    v4, v6 = outsiders._endpoint(6, "10.0.0.2:80"), outsiders._endpoint(6, "[fd00::2]:80")
    assert v6 == Endpoint(6, v6.address, 80)
    node, second = (
        outsiders._endpoint(6, "192.0.2.1:8080"),
        outsiders._endpoint(6, "192.0.2.5:8080"),
    )
    other = outsiders._endpoint(6, "192.0.2.1:8081")
    flows = outsiders._by_port(
        outsiders.Translations({(node, v4): 3, (second, v4): 2, (other, v4): 7, (node, v6): 1})
    )
    both = ["10.0.0.2:80", "[fd00::2]:80"]
    assert outsiders._of(mapping(8080, targets=both), flows) == 6
    assert outsiders._of(mapping(8080, targets=both, hostIP="192.0.2.5"), flows) == 2
    assert outsiders._of(mapping(8080, targets=both, hostIP="0.0.0.0"), flows) == 6
    assert outsiders._of(mapping(8081, targets=both), flows) == 7
    assert outsiders._of(mapping(8080, targets=both, protocol="udp"), flows) == 0
    assert outsiders._of(mapping(8082, targets=[]), flows) == 0


def test_watch_survives_an_upgrade(helper, capsys, monkeypatch):
    answers = [document(mapping(80)), client.NoHelper("away"), document(mapping(81))]

    def pause(_seconds):
        if not answers:
            raise KeyboardInterrupt
        helper(answers.pop(0))

    helper(answers.pop(0))
    monkeypatch.setattr(status.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        status.main(["--watch"])
    out = capsys.readouterr().out
    assert "  80  " in out
    assert "away" in out
    assert "  81  " in out
    assert os.environ.get("COLUMNS") is None
