"""Imports point down (docs/design/overview.md). The table is the rule; a new module needs a line in it."""

from __future__ import annotations

# Lowest first. A module imports from lower layers and from its own unit (a tuple is one unit), nothing else.
# fmt: off
LAYERS: list[list[str | tuple[str, ...]]] = [
    [("errors", "dtypes", "config", "topology", "_version")],
    ["comm", ("kernels", "halves"), "buffers", "gpu", "messages", "observe.log"],
    ["negotiation", "fusion", "collectives", "tuning.search", "observe.instrument"],
    ["engine", "tuning.tuner", "observe.timeline", "observe.metrics"],
    [(
        "",  # hvdlite/__init__.py
        "api", "arrays", "exits", "lifecycle", "lowlevel", "objects", "process_set", "queries", "runtime",
        "elastic", "testing", "bench",
    )],
]
# fmt: on
NEUTRAL = {"observe", "tuning"}  # packages over several layers; their __init__ holds nothing

# Not part of the tower: they see a narrow door of it.
DOORS = {
    "launch": {"errors", "config", "_version", "comm.mpi_env"},  # the last is pure
    "torch": {"", "lowlevel"},
    "tensorflow": {"", "lowlevel"},
    "keras": {"", "lowlevel", "tensorflow"},
}

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


def test_imports_point_down(sources):
    modules = {source.module for source in sources}
    wrong = []
    for source in sources:
        here = place(short(source.module))
        if here is None:
            continue
        for node, name in imported_modules(source, modules):
            there = place(name)
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
        for node, name in imported_modules(source, modules):
            if name not in DOORS[part] and name.split(".")[0] != part:
                wrong.append(f"{source.at(node)}: imports {name or 'hvdlite'}")
    assert not wrong, "\n".join(wrong)


def test_the_core_knows_no_framework(sources):
    wrong = [
        f"{source.at(node)}: imports {name}"
        for source in sources
        for node, name in source.imports()
        if name.split(".")[0] in FRAMEWORKS and short(source.module).split(".")[0] not in {*DOORS, "bench"}
    ]
    assert not wrong, "\n".join(wrong)
