"""The house rules: where files lie, who imports whom, and what no product file may contain."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("quant", "speculators", "data", "train")
PRODUCT = sorted(p for folder in (*FOLDERS, "scripts") for p in (ROOT / folder).rglob("*.py"))
MAY_IMPORT = {
    "quant": {"quant"},
    "speculators": {"speculators", "quant"},
    "data": {"data", "quant"},
    "train": {"train", "quant", "speculators", "data"},
    "scripts": set(FOLDERS),
}
LONGEST_FILE = 350
HEAVY = {"transformers", "accelerate", "deepspeed", "peft"}
MEETS_MODELS = (
    "quant/loading.py",
    "quant/target.py",
    "quant/attention/kv_cache.py",
    "quant/attention/layer_kinds.py",
    "quant/attention/packed.py",
)
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LOAD = ("torch", "load")
# Libraries that a script in train/ or scripts/ would hide, because Python puts a script's folder first on its path.
LIBRARIES = {
    "accelerate",
    "compressed_tensors",
    "datasets",
    "deepspeed",
    "evaluate",
    "gguf",
    "hypothesis",
    "huggingface_hub",
    "matplotlib",
    "numpy",
    "packaging",
    "pandas",
    "peft",
    "psutil",
    "pytest",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "speculators",
    "tensorboard",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
    "tyro",
    "vllm",
    "wandb",
    "yaml",
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) of every import statement, wherever it stands; relative ones as ``.``."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." if node.level else str(node.module)
            yield from ((module, alias.name) for alias in node.names)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("bitdraft", *parts)).removesuffix(".__init__")


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """The project's own modules that a file imports: ``from bitdraft.a import b`` may mean the module ``a.b``."""
    found = set()
    for module, name in imported(path):
        if module.split(".")[0] == "bitdraft":
            inner = f"{module}.{name}"
            found.add(inner if inner in known else module)
    return found


def test_there_is_product_code_to_check() -> None:
    assert {p.relative_to(ROOT).parts[0] for p in PRODUCT} == {*FOLDERS, "scripts"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_package_is_made_of_relative_links(folder: str) -> None:
    link = ROOT / "src" / "bitdraft" / folder
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (ROOT / folder).resolve()


def test_the_package_holds_nothing_else() -> None:
    names = {p.name for p in (ROOT / "src" / "bitdraft").iterdir() if p.name != "__pycache__"}
    assert names == {"__init__.py", "py.typed", *FOLDERS}


def test_imports_point_downwards() -> None:
    wrong = []
    for path in PRODUCT:
        where = path.relative_to(ROOT)
        for module, name in imported(path):
            parts = module.split(".")
            if module == ".":
                wrong.append(f"{where}: relative import of {name}; write it from bitdraft")
            elif parts[0] in {*FOLDERS, "scripts", "tests"}:
                wrong.append(f"{where}: bare import of {module}; write bitdraft.{module}")
            elif parts == ["bitdraft"]:
                wrong.append(f"{where}: imports {name} from the package; import the module that defines it")
            elif parts[0] == "bitdraft" and parts[1] not in MAY_IMPORT[where.parts[0]]:
                wrong.append(f"{where}: must not import {module}")
    assert wrong == []


def test_modules_import_each_other_without_circles() -> None:
    known = {module_name(p) for p in PRODUCT}
    graph = {module_name(p): imported_modules(p, known) for p in PRODUCT}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")
    assert known <= set(order)


def test_heavy_libraries_stay_where_they_belong() -> None:
    wrong = []
    for path in PRODUCT:
        where = path.relative_to(ROOT)
        allowed = set()
        if where.parts[0] in ("data", "speculators", "train") or where.as_posix() in MEETS_MODELS:
            allowed.add("transformers")
        if where.parts[0] == "train":
            allowed |= {"accelerate", "deepspeed", "peft"}
        libraries = {module.split(".")[0] for module, _ in imported(path)}
        wrong += [f"{where}: {name}" for name in sorted((libraries & HEAVY) - allowed)]
    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in PRODUCT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    }
    assert readers == {"train/environment.py"}


@pytest.mark.parametrize("folder", ["train", "scripts"])
def test_no_script_folder_hides_a_library(folder: str) -> None:
    names = {p.stem for p in (ROOT / folder).iterdir() if p.suffix == ".py" or p.is_dir()}
    assert not names & (set(sys.stdlib_module_names) | LIBRARIES)


def test_files_have_a_name_and_a_size_that_say_one_idea() -> None:
    assert not {p.name for p in PRODUCT} & {"utils.py", "common.py", "helpers.py", "misc.py"}
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in PRODUCT}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_modules_begin_with_a_docstring_and_init_files_hold_nothing_else() -> None:
    assert [p for p in PRODUCT if not ast.get_docstring(tree(p))] == []
    packages = [p for p in PRODUCT if p.name == "__init__.py"]
    assert {p.parent.name for p in packages} >= set(FOLDERS)
    assert [p for p in packages if len(tree(p).body) != 1] == []


def test_no_file_runs_what_it_reads() -> None:
    """Pickles run code when they are read, and a model's folder may hold code of its own."""
    wrong = []
    for path in PRODUCT:
        names = [f"imports {m}" for m, name in imported(path) if m.split(".")[0] in PICKLES or (m, name) == LOAD]
        wrong += [f"{path.relative_to(ROOT)}: {what}" for what in [*names, *trusting(tree(path))]]
    assert wrong == []


def trusting(module: ast.Module) -> Iterator[str]:
    """Places that unpickle, or that run a model's own code without being asked to."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield "torch.load"
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            if ast.unparse(node.value) == "True":
                yield f"{node.arg}=True"
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "trust_remote_code":
            if node.value is not None and ast.unparse(node.value) != "False":
                yield "an option trust_remote_code that is not off"
        elif isinstance(node, ast.arguments):
            yield from trusting_defaults(node)


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path)",
        "f(trust_remote_code=True)",
        "def f(trust_remote_code=True): ...",
        "def f(*, a, trust_remote_code: bool = True): ...",
        "class C:\n    trust_remote_code: bool = True",
    ],
)
def test_the_search_for_trust_finds_it(text: str) -> None:
    assert list(trusting(ast.parse(text)))


def trusting_defaults(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if argument.arg == "trust_remote_code" and default is not None and ast.unparse(default) != "False":
            yield "a parameter trust_remote_code that is not off"
