"""A run as people read it: tables in Markdown, a plot, and the machine it ran on."""

import gzip
import os
import platform
import re
import subprocess
from pathlib import Path

from bench import plugins

VERBS = ("ADD", "CHECK", "DEL")
COLOURS = {
    "ours": "#1f77b4",
    "launcher": "#17becf",
    "portmap-nft": "#d62728",
    "portmap-iptables": "#ff7f0e",
    "portmap-legacy": "#8c564b",
    "ours-iptables": "#2ca02c",
}


def _first_line(*argv, env=None):
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=20, env=env, check=False
        )
    except OSError:
        return "absent"
    return next(iter((done.stdout + done.stderr).strip().splitlines()), "")


def machine():
    """What a reader has to know to compare: hardware, kernel, versions, load at the start."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) / 1048576
    system = re.search(r'PRETTY_NAME="(.*)"', Path("/etc/os-release").read_text())
    found = {
        "system": system[1] if system else "?",
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "CPU": cpu[1] if cpu else platform.machine(),
        "memory": f"{memory:.0f} GiB",
        "load at the start": Path("/proc/loadavg").read_text().split()[0],
        "Python": platform.python_version(),
        "nft": _first_line("nft", "--version"),
        "iptables": _first_line("iptables", "--version"),
        "cni-hostport": _first_line(str(plugins.BUNDLE / "cni-hostport"), "version"),
    }
    for name, path in (("1.1", plugins.DEBIAN_PORTMAP), ("1.9", plugins.NEWER_PORTMAP)):
        if path.exists():
            found[f"portmap {name}"] = _packaged(path)
    return found


def _packaged(path):
    """Debian's version of a plugin; the executables themselves do not know theirs."""
    doc = path.parents[2] / "share/doc/containernetworking-plugins"
    for file in sorted(doc.glob("changelog.Debian*.gz")):
        with gzip.open(file, "rt") as text:
            found = re.match(r"\S+ \((.*?)\)", text.readline())
            if found:
                return f"Debian's containernetworking-plugins {found[1]}"
    return "version unknown"


def calls_table(figures, prefix, peers):
    """Wall and CPU of each verb, one row a plugin; ours with the helper's CPU added."""
    lines = ["| | " + " | ".join(f"{v} wall ms | {v} CPU ms" for v in VERBS) + " |"]
    lines.append("|---" + "|---:" * (2 * len(VERBS)) + "|")
    for plugin in peers:
        cells = []
        for verb in VERBS:
            found = figures.get(f"{prefix}/{plugin.name}/{verb}")
            if found is None:
                cells += ["–", "–"]
            else:
                cells += [f"{found['wall']:.2f}", f"{found['cpu'] + found['helper']:.2f}"]
        if any(c != "–" for c in cells):
            lines.append(f"| {plugin.title} | " + " | ".join(cells) + " |")
    return lines


def budget_table(rows):
    """Every promise with its figure."""
    lines = ["| what | measured | budget | |", "|---|---:|---:|---|"]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        unit = f" {row.unit}" if row.unit else ""
        verdict = "holds" if row.holds else "**does not hold**"
        limit = f"{row.limit:g}"
        lines.append(f"| {row.what} | {row.figure:.3g}{unit} | {sign} {limit}{unit} | {verdict} |")
    return lines


def connections_table(figures, peers):
    """New connections a second; the ratio is the median of the turns' own."""
    sizes = sorted({int(k.split("/")[1]) for k in figures if k.startswith("connections/")})
    if not sizes:
        return []
    columns = [(s, p) for s in sizes for p in ("first", "last")]
    lines = ["", "## New connections a second through the data path", ""]
    lines.append("| | the only one | " + " | ".join(f"{p} of {s:,}" for s, p in columns) + " |")
    lines.append("|---" + "|---:" * (1 + len(columns)) + "|")
    for plugin in peers:
        if f"connections/{sizes[0]}/{plugin.name}/one" not in figures:
            continue
        ones = [figures.get(f"connections/{s}/{plugin.name}/one") for s in sizes]
        known = [one for one in ones if one]
        cells = [f"{sum(known) / len(known):,.0f}"]
        for size, place in columns:
            rate = figures.get(f"connections/{size}/{plugin.name}/{place}")
            ratio = figures.get(f"turns/{size}/{plugin.name}/{place}")
            cells.append(f"{rate:,.0f} ({ratio:.2f} x)" if rate and ratio else "–")
        lines.append(f"| {plugin.title} | " + " | ".join(cells) + " |")
    return lines


def bursts_table(figures, peers):
    """A hundred at once."""
    if not any(k.startswith("burst/") for k in figures):
        return []
    lines = ["", "## 100 at once", ""]
    lines.append("| | ADD wall ms | ADD CPU ms | DEL wall ms | DEL CPU ms | one port, winners |")
    lines.append("|---|---:|---:|---:|---:|---:|")
    for plugin in peers:
        cells = []
        for verb in ("ADD", "DEL"):
            turns = figures.get(f"burst/{plugin.name}/{verb}")
            if turns:
                middle = sorted(turns, key=lambda t: t["wall"])[len(turns) // 2]
                cells += [f"{middle['wall']:.0f}", f"{middle['cpu'] + middle['helper']:.0f}"]
        same = figures.get(f"burst/{plugin.name}/same")
        if plugin is plugins.OURS and (floor := figures.get("burst/python/ADD")):
            middle = sorted(floor, key=lambda t: t["wall"])[len(floor) // 2]
            rest = f"{middle['wall']:.0f} | {middle['cpu']:.0f} | – | – | – |"
            lines.append(f"| Python that starts and does nothing | {rest}")
        if cells and same:
            winners = "–".join(map(str, sorted({100 - t["failed"] for t in same})))
            lines.append(f"| {plugin.title} | " + " | ".join([*cells, winners]) + " |")
    return lines


def text(figures, rows, peers, absent, about):
    """The whole report."""
    lines = ["# Results of one run", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [f"- not measured: {reason}" for reason in absent]
    lines += ["", "Medians of calls that took turns. CPU is the call's with all its children;"]
    lines += ["ours has the helper's CPU added. Compare ratios, not milliseconds.", ""]
    lines += ["## Budgets", "", *budget_table(rows)]
    for others in (0, 100, 1000, 10000):
        table = calls_table(figures, f"others/{others}", peers)
        if len(table) > 2:
            lines += ["", f"## One TCP mapping, {others:,} others on the node", "", *table]
    for count in (1, 20):
        for stack in ("single", "dual"):
            table = calls_table(figures, f"shape/{count}/{stack}", peers)
            if len(table) > 2:
                lines += ["", f"## {count} mapping(s), {stack} stack", "", *table]
    lines += bursts_table(figures, peers)
    lines += connections_table(figures, peers)
    return "\n".join(lines) + "\n"
