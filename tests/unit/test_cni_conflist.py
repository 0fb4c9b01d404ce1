"""Conflists as text: only the one word changes, whatever else somebody wrote."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_hostport import cni_conflist
from cni_hostport.cni_conflist import NotAConflist

ODD = """\
{\r
\t"name" : "pods",  "cniVersion":"1.0.0",
   "vendor": {"type": "portmap", "n": 1.50e+3, "big": 12345678901234567890123, "k": [ ] },
  "plugins":[ {"type":"bridge","ipam":{"type":"portmap"}},
    { "snat" : true,
      "type"  :   "port\\u006dap" , "type2":"portmap",
      "capabilities":{"portMappings":true}, "z": null, "a": "\\u00e9\\ud83d\\ude00 é" }
  ] }

"""


def test_the_one_word_and_nothing_else():
    after = cni_conflist.retype(ODD, "portmap", "cni-hostport")
    assert after == ODD.replace('"port\\u006dap"', '"cni-hostport"')
    assert cni_conflist.retype(after, "cni-hostport", "portmap") == ODD.replace("\\u006d", "m")
    assert cni_conflist.retype(after, "portmap", "x") == after


def test_what_is_read():
    found = cni_conflist.read(ODD)
    assert (found.name, found.version) == ("pods", "1.0.0")
    assert [(p.type, p.line) for p in found.plugins] == [("bridge", 4), ("portmap", 6)]
    assert found.of_type("portmap")[0].options["capabilities"] == {"portMappings": True}


def test_a_single_plugin():
    text = '{"cniVersion":"0.3.1","name":"n","type":"portmap"}'
    assert cni_conflist.retype(text, "portmap", "x") == text.replace("portmap", "x")


def test_of_duplicate_keys_the_last_counts():
    text = '{"plugins":[{"type":"portmap","type":"bridge"},{"type":"a","type":"portmap"}]}'
    changed = cni_conflist.retype(text, "portmap", "X")
    assert changed == '{"plugins":[{"type":"portmap","type":"bridge"},{"type":"a","type":"X"}]}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "5", "{}", "[" * 9999, '{"plugins":{}}', '{"plugins":[1]}'),
        *('{"plugins":[{}]}', '{"plugins":[{"type":5}]}'),
    ],
)
def test_what_is_no_conflist(text):
    with pytest.raises(NotAConflist):
        cni_conflist.read(text)


WORDS = st.text(string.printable + "é\u2028😀", max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


@given(
    st.lists(st.tuples(st.sampled_from(["bridge", "portmap", "tuning"]), JSON), max_size=4),
    st.dictionaries(WORDS, JSON, max_size=3),
    st.sampled_from([None, 0, 1, 4, "\t"]),
    st.booleans(),
)
def test_any_conflist_comes_back(plugins, extra, indent, ascii_only):
    content = extra | {"plugins": [{"x": v, "type": t, "y": [v]} for t, v in plugins]}
    text = json.dumps(content, indent=indent, ensure_ascii=ascii_only)
    after = cni_conflist.retype(text, "portmap", "cni-hostport")
    wanted = extra | {
        "plugins": [
            {"x": v, "type": "cni-hostport" if t == "portmap" else t, "y": [v]} for t, v in plugins
        ]
    }
    assert json.dumps(json.loads(after)) == json.dumps(wanted)
    assert cni_conflist.retype(after, "cni-hostport", "portmap") == text
