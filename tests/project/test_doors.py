"""Single doors: what reaches out of the process is in one file each, so that it can be found and replaced."""

from __future__ import annotations

import ast

import pytest

PROCESSES = {"subprocess", "multiprocessing", "pty"}
STARTERS = {"fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp"}

MUTABLE_MAKERS = {
    "list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "count", "local",
    "Lock", "RLock", "Condition", "Event", "Semaphore", "Queue", "SimpleQueue",
    "WeakSet", "WeakKeyDictionary", "WeakValueDictionary",
}  # fmt: skip
MUTATORS = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "add", "discard", "update", "setdefault",
    "appendleft", "popleft",
}  # fmt: skip
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


@pytest.mark.parametrize(
    ("libraries", "allowed"),
    [
        ({"mpi4py"}, ("hvdlite/comm/mpi.py", "hvdlite/bench/peers.py")),  # there MPI is a peer to be measured
        ({"ctypes"}, ("hvdlite/comm/peer_memory.py", "launch/runner.py")),  # the latter stands alone
        (PROCESSES, ("launch/process.py", "launch/supervise.py", "launch/guard.py")),
    ],
    ids=["mpi4py", "ctypes", "processes"],
)
def test_a_library_has_one_importer(root, sources, libraries, allowed):
    assert all((root / door).exists() for door in allowed)
    wrong = [
        f"{source.at(node)}: imports {name}"
        for source in sources
        for node, name in source.imports()
        if name.split(".")[0] in libraries and not source.name.startswith(allowed)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (
            {"environ", "environb", "getenv", "putenv", "unsetenv"},
            ("hvdlite/config.py", "launch/process.py", "launch/runner.py"),
        ),
        (STARTERS, ("launch/process.py", "launch/runner.py")),
    ],
    ids=["environment", "processes"],
)
def test_a_function_of_os_has_one_user(root, sources, names, allowed):
    assert all((root / door).exists() for door in allowed)

    def is_of_os(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.value.id == "os" and node.attr in names
        return isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)

    wrong = [
        f"{source.at(node)}: uses os.{sorted(names)[0]} or the like"
        for source in sources
        if not source.name.startswith(allowed)
        for node in ast.walk(source.tree)
        if is_of_os(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_listens_on_the_network(sources):
    wrong = [
        source.at(node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "listen"
    ]
    assert not wrong, "\n".join(wrong)


def test_mutable_module_state_lives_in_the_runtime(sources):
    wrong = [problem for source in sources if source.name != "hvdlite/runtime.py" for problem in mutable_state(source)]
    assert not wrong, "\n".join(wrong)


def mutable_state(source) -> list[str]:
    """Return where a module keeps state: by heuristics, for Python cannot tell.

    A container in capitals is a constant as long as nothing in its module changes it.
    """
    problems = [
        f"{source.at(node)}: global {', '.join(node.names)}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    constants = set()
    for name, value, node in module_bindings(source.tree):
        if not is_mutable(value) or name.startswith("__"):
            continue
        if name.isupper() and isinstance(value, CONTAINERS):
            constants.add(name)
        else:
            problems.append(f"{source.at(node)}: {name} is mutable module state")
    problems += [f"{source.at(node)}: a constant is changed" for node in changes(source.tree, constants)]
    return problems


def module_bindings(tree: ast.Module):
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value, node


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in MUTABLE_MAKERS
    return isinstance(value, CONTAINERS)


def changes(tree: ast.Module, names: set[str]):
    """Yield where functions change one of `names`. What stands outside of them builds the constant at import."""

    def is_one(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Subscript):
            changed = isinstance(node.ctx, ast.Store | ast.Del) and is_one(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.attr in MUTATORS and is_one(node.func.value)
        else:
            changed = False
        if changed:
            yield node


@pytest.mark.parametrize(
    "code",
    [
        "cache = {}",
        "seen: list[int] = []",
        "lock = threading.Lock()",
        "LOCK = Lock()",
        "n = 0\ndef f():\n    global n\n    n += 1",
        "TABLE = {}\ndef f():\n    TABLE['a'] = 1",
        "NAMES = []\ndef f():\n    NAMES.append(1)",
    ],
)
def test_the_heuristic_sees_state(code):
    assert mutable_state(_Text(code))


@pytest.mark.parametrize(
    "code",
    ["TABLE = {'a': 1}", "TABLE = {}\nTABLE['a'] = 1", "_NAMES = ('a',)", "__all__ = ['f']", "def f():\n    x = []"],
)
def test_the_heuristic_passes_constants(code):
    assert not mutable_state(_Text(code))


class _Text:
    """Code that stands in for a source file."""

    def __init__(self, code: str) -> None:
        self.tree = ast.parse(code)

    def at(self, node: ast.AST) -> str:
        return f"line {getattr(node, 'lineno', 1)}"
