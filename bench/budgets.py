"""What the project promises of its speed, each as a ratio or a limit, and whether it holds.

Every row is (what, figure, limit, how it is written); a figure that this run does not have
gives no row. ``best`` of nothing: medians only.
"""

from dataclasses import dataclass

PORTMAPS = ("portmap-nft", "portmap-iptables")
TITLES = {"portmap-nft": "portmap nftables", "portmap-iptables": "portmap iptables"}


@dataclass(frozen=True)
class Row:
    """One promise. ``at_least``: the figure must not be smaller than the limit."""

    what: str
    figure: float
    limit: float
    unit: str = "x"
    at_least: bool = False

    @property
    def holds(self):
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


class Rows:
    """Collects rows from the figures of a run."""

    def __init__(self, figures):
        self.figures = figures
        self.rows = []

    def median(self, *key, of="wall"):
        """A figure of one key; for bursts the median over turns. None where there is none."""
        found = self.figures.get("/".join(map(str, key)))
        if isinstance(found, list):
            values = sorted(one[of] for one in found)
            return values[len(values) // 2]
        return found.get(of) if isinstance(found, dict) else found

    def ratio(self, what, limit, mine, theirs, at_least=False, of="wall"):
        """A row for the ratio of two keys."""
        a, b = self.median(*mine, of=of), self.median(*theirs, of=of)
        if a is not None and b:
            self.rows.append(Row(what, a / b, limit, "x", at_least))

    def value(self, what, limit, figure, unit, at_least=False):
        """A row for a plain figure."""
        if figure is not None:
            self.rows.append(Row(what, figure, limit, unit, at_least))


def judge(figures):
    """Every row that these figures allow."""
    rows = Rows(figures)
    _start(rows)
    _calls(rows)
    _flat(rows)
    _bursts(rows)
    _helper(rows)
    _connections(rows)
    return rows.rows


def _start(rows):
    python = ("start", "python")
    for verb in ("VERSION", "ADD", "DEL"):
        what = f"CPU of a plugin call ({verb}) / start of Python that does nothing"
        rows.ratio(what, 1.15, ("start", f"ours/{verb}"), python, of="cpu")


def _calls(rows):
    for who, limits in (("ours", (0.4, 0.2)), ("launcher", (0.08, 0.04))):
        name = "" if who == "ours" else ", launcher"
        for peer in PORTMAPS if who == "ours" else PORTMAPS[:1]:
            for verb, limit in zip(("ADD", "DEL"), limits, strict=True):
                mine, theirs = ("others", 0, who, verb), ("others", 0, peer, verb)
                rows.ratio(f"{verb}{name} / {TITLES[peer]}", limit, mine, theirs)
    mine, theirs = ("others", 1000, "ours", "DEL"), ("others", 1000, "portmap-nft", "DEL")
    rows.ratio("DEL at 1,000 others / portmap nftables", 0.07, mine, theirs)


def _flat(rows):
    for many in (100, 1000, 10000):
        for who in ("ours", "launcher"):
            for verb in ("ADD", "CHECK", "DEL"):
                mine, none = ("flat", many, who, verb), ("flat", many, f"empty-{who}", verb)
                name = verb if who == "ours" else f"{verb}, launcher,"
                rows.ratio(f"{name} at {many:,} others / with none", 1.2, mine, none)
    mine = ("shape", 20, "dual", "ours", "ADD")
    rows.ratio(
        "ADD of 20 mappings dual stack / of one", 1.3, mine, ("shape", 1, "single", "ours", "ADD")
    )


def _bursts(rows):
    for who, limit in (("ours", 0.25), ("launcher", 0.05)):
        name = "" if who == "ours" else ", launcher"
        for peer in PORTMAPS if who == "ours" else PORTMAPS[:1]:
            mine, theirs = ("burst", who, "ADD"), ("burst", peer, "ADD")
            rows.ratio(f"100 ADDs at once{name} / {TITLES[peer]}", limit, mine, theirs)
        for verb, what in (("ADD", "failed of 100 ADDs at once"), ("DEL", "failed of 100 DELs")):
            failed = rows.median("burst", who, verb, of="failed")
            rows.value(f"{what}{name}", 0, failed, "")
        failed = rows.median("burst", who, "same", of="failed")
        if failed is not None:
            rows.value(f"winners of one port asked 100 times{name}", 1, 100 - failed, "")


def _helper(rows):
    figures = rows.figures
    size = max((int(k.split("/")[1]) for k in figures if k.startswith("repair/")), default=0)
    rows.value("helper's memory, idle", 48, figures.get("memory/idle"), "MiB")
    rows.value(f"helper's memory, {size:,} mappings", 70, figures.get(f"memory/{size}"), "MiB")
    before, after = figures.get("memory/before pairs"), figures.get("memory/after pairs")
    if before and after:
        rows.value("memory after 10,000 ADD/DEL pairs / before", 1.05, after / before, "x")
    rows.value("helper's CPU, idle", 0.2, figures.get("idle/cpu"), "% of a core")
    at_size = figures.get(f"idle/cpu at {size}")
    rows.value(f"helper's CPU, idle with {size:,} mappings", 0.2, at_size, "% of a core")
    rows.value("repair after nft flush ruleset", 0.25, figures.get("repair/1"), "s")
    rows.value(f"repair of {size:,} mappings", 1.0, figures.get(f"repair/{size}"), "s")
    if figures.get("memory/after repair") and figures.get(f"memory/{size}"):
        grown = figures["memory/after repair"] / figures[f"memory/{size}"]
        rows.value("memory after that repair / before", 1.1, grown, "x")
    for key, value in figures.items():
        if key.startswith("start/") and isinstance(value, float):
            few = int(key.split("/")[1])
            rows.value(
                f"first answer of a helper started with {few:,} attachments", 2.0, value, "s"
            )


def _connections(rows):
    sizes = {int(k.split("/")[1]) for k in rows.figures if k.startswith("connections/")}
    for size in sorted(sizes - {1}):
        for place in ("first", "last"):
            what = f"new connections/s, {place} of {size:,} mappings / the only one"
            rows.value(what, 0.95, rows.median("turns", size, "ours", place), "x", at_least=True)
