"""Imports point down (docs/design/overview.md). The table is the rule; a new module needs a line in it."""

from __future__ import annotations

import re

# Lowest first. A module imports from lower layers and from its own unit (a tuple is one unit), nothing else.
# fmt: off
LAYERS: list[list[str | tuple[str, ...]]] = [
    [("affinity", "errors", "dtypes", "config", "topology", "_version")],
    ["comm", ("kernels", "halves"), "buffers", "messages", "observe.log"],
    [
        "negotiation", "fusion", "collectives", ("tuning.search", "tuning.store"),
        ("observe.instrument", "observe.metrics", "observe.timeline", "observe.trace", "observe.trace_file"),
    ],
    ["engine", "tuning.tuner"],
    [(
        "",  # hvdlite/__init__.py
        "api", "arrays", "arrival", "at_once", "basics", "elastic", "exits", "lifecycle", "lowlevel", "objects",
        "process_set", "queries", "running", "runtime", "shared", "starting", "testing",
    )],
]
# fmt: on
NEUTRAL = {"observe", "tuning"}  # packages over several layers; their __init__ holds nothing

# Not part of the tower: they see a narrow door of it.
DOORS = {
    "launch": {"errors", "config", "_version", "affinity", "comm.mpi_env", "as_horovod"},  # the last three are pure
    "as_horovod": {"", "lowlevel", "config", "elastic"},
    "torch": {"", "lowlevel", "elastic"},
    "tensorflow": {"", "lowlevel", "elastic"},
    "tensorflow.keras": {"keras", "keras.callbacks", "keras.elastic"},
    # It stands on the adapter of the framework that Keras runs on.
    "keras": {"", "lowlevel", "elastic", "tensorflow", "tensorflow.gradients", "tensorflow.local", "torch"},
    # It measures what users call; the schedules are pure, and its model runs the very ones that hvdlite runs.
    "bench": {"", "lowlevel", "torch", "config", "collectives.schedules", "launch.cli"},
}

# The one way out of the tower: hvdlite.run() starts jobs. Imported when it is called.
OUTWARD = {"running": {"launch.function"}}

FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "jax"}


def short(module: str) -> str:
    """Return a name without the leading `hvdlite.`; "" for `hvdlite` itself."""
    return module.removeprefix("hvdlite").removeprefix(".")


def place(name: str) -> tuple[int, tuple[str, ...]] | None:
    """Return the layer and the unit of a module, by its longest prefix in the table."""
    for prefix in (name.rsplit(".", n)[0] for n in range(name.count(".") + 1)):
        for layer, units in enumerate(LAYERS):
            for unit in units:
                members = (unit,) if isinstance(unit, str) else unit
                if prefix in members:
                    return layer, members
    return None


def imported_modules(source, modules):
    """Yield (node, short name) of the modules of ours that a file imports."""
    for node, name in source.imports():
        if name != "hvdlite" and not name.startswith("hvdlite."):
            continue
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]  # the last part is a class or a function
        yield node, short(name)


def test_every_module_has_a_place(sources):
    names = {short(source.module) for source in sources}
    lost = sorted(name for name in names - NEUTRAL if name.split(".")[0] not in DOORS and place(name) is None)
    assert not lost, "add them to the table of this file and of docs/design/overview.md"


def test_the_table_names_only_modules_that_exist(sources):
    names = {short(source.module) for source in sources}
    members = {name for units in LAYERS for unit in units for name in ((unit,) if isinstance(unit, str) else unit)}
    assert not (members | NEUTRAL | set(DOORS) | {name for seen in DOORS.values() for name in seen}) - names


def test_the_page_on_the_design_names_only_modules_that_exist(root, sources):
    page = (root / "docs/design/overview.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| [0-5] \|", line)]
    named = {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row)}
    known = {name for source in sources for name in (source.module, short(source.module))}
    assert len(rows) == len(LAYERS) + 1
    assert not named - known
    paths = set(re.findall(r"`?((?:hvdlite|launch|adapters|comm|tests)/[a-z_./]*)", page))
    assert not [path for path in paths if not ((root / path).exists() or (root / "hvdlite" / path).exists())]


def test_imports_point_down(sources):
    modules = {source.module for source in sources}
    wrong = []
    for source in sources:
        here = place(short(source.module))
        if here is None:
            continue
        for node, name in imported_modules(source, modules):
            there = place(name)
            if name in OUTWARD.get(short(source.module), ()):
                continue
            if there is None or not (there[0] < here[0] or there[1] == here[1]):
                wrong.append(f"{source.at(node)}: layer {here[0]} imports {name or 'hvdlite'}")
    assert not wrong, "\n".join(wrong)


def test_launcher_and_adapters_use_their_door_only(sources):
    modules = {source.module for source in sources}
    wrong = []
    for source in sources:
        part = short(source.module).split(".")[0]
        if part not in DOORS:
            continue
        nested = next((door for door in DOORS if "." in door and f"{short(source.module)}.".startswith(f"{door}.")), "")
        seen = DOORS[part] | DOORS.get(nested, set())
        for node, name in imported_modules(source, modules):
            if name not in seen and name.split(".")[0] != part:
                wrong.append(f"{source.at(node)}: imports {name or 'hvdlite'}")
    assert not wrong, "\n".join(wrong)


def test_the_core_knows_no_framework(sources):
    wrong = [
        f"{source.at(node)}: imports {name}"
        for source in sources
        for node, name in source.imports()
        if name.split(".")[0] in FRAMEWORKS and short(source.module).split(".")[0] not in DOORS
    ]
    assert not wrong, "\n".join(wrong)
