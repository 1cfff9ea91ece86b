"""Writes the Bazel file BUILD from the Python files of the repository.

    python -m tools.build_file            rewrite BUILD
    python -m tools.build_file --check    fail if BUILD is out of date

Each module is a py_library that has the module's import name (`keras_dp.noise`). Each program, a
module with an `if __name__ == "__main__"` block, is in addition a py_binary named by its path
(`train_scripts/demo`), and each tests/**/test_*.py is a py_test named by its path.

The dependencies of a target are the modules that its file imports, at the top or inside a
function, and the packages that Python loads on the way to them. Importing keras_dp.noise from a
test runs keras_dp/__init__.py first, so that test depends on both. Inside a package its own
__init__.py is already being loaded and is no dependency. Bazel allows no cycles: an import inside
a function is left out where it would close one, since whoever calls that function has loaded the
other module already.
"""

import argparse
import ast
import dataclasses
import difflib
import pathlib
import re
import sys

FOLDERS = ("benchmarks", "keras_dp", "models", "tests", "tools", "train_scripts")
RUNNER = "tools/pytest_runner.py"
LOCK = "requirements_bazel.txt"

# Distributions that have another name than the module they install.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "dp_accounting": "dp-accounting",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
}

# Modules that only the reference programs import, each in an environment of its own: they cannot be
# installed next to the TensorFlow that keras_dp needs, so Bazel builds those programs only on
# request (tag "manual"), and without these dependencies.
SEPARATE_ENVIRONMENTS = {
    "fastDP",
    "flax",
    "jax",
    "jax_privacy",
    "jaxlib",
    "opacus",
    "optax",
    "tensorflow_addons",
    "tensorflow_privacy",
    "tf_keras",
    "torch",
    "torchvision",
}

HEADER = '''\
"""Bazel targets: one py_library a module, one py_binary a program, one py_test a test file.

Written by `python -m tools.build_file`; do not edit by hand.
"""

load("@pip//:requirements.bzl", "requirement")
load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])

licenses(["notice"])

exports_files(["LICENSE"])

filegroup(
    name = "test_data",
    testonly = True,
    srcs = ["pytest.ini"] + glob(
        ["tests/**"],
        exclude = [
            "tests/**/*.py",
            "**/__pycache__/**",
        ],
    ),
)
'''


@dataclasses.dataclass
class Module:
    """One Python file.

    Attributes:
      path: path from the repository root, with slashes.
      name: name under which it is imported.
      source: its text.
      imports: names of the repository's modules it depends on.
      deferred: names of those it only imports inside functions.
      requirements: names of the distributions it depends on.
      separate: whether it needs an environment of its own.
    """

    path: str
    name: str
    source: str
    imports: set = dataclasses.field(default_factory=set)
    deferred: set = dataclasses.field(default_factory=set)
    requirements: set = dataclasses.field(default_factory=set)
    separate: bool = False

    @property
    def is_test(self):
        """Whether pytest collects the file."""
        return self.path.startswith("tests/") and pathlib.Path(self.path).match("test_*.py")

    @property
    def is_program(self):
        """Whether the file can be run."""
        return not self.is_test and re.search(r'^if __name__ == "__main__":', self.source, re.M)

    @property
    def packages(self):
        """Names of the packages around the module, and its own if it is a package."""
        parts = self.name.split(".")
        names = {".".join(parts[:end]) for end in range(1, len(parts))}
        return names | {self.name} if self.path.endswith("/__init__.py") else names


def read_modules(root):
    """Reads every Python file of the repository and resolves its imports.

    Args:
      root: path of the repository.

    Returns:
      dict from a module's import name to its `Module`, sorted by path.

    Raises:
      ValueError: a file imports something that is neither in the repository, nor in the standard
        library, nor in the lock file.
    """
    modules = {}
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    for path in paths:
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(relative.as_posix(), name, source)
    locked = locked_distributions(root)
    for module in modules.values():
        _resolve_imports(module, modules, locked)
    for module in modules.values():
        for name in sorted(module.deferred):
            if not _reaches(name, module.name, modules):
                module.imports.add(name)
    return modules


def _reaches(start, end, modules):
    """Whether a module depends on another one, directly or through others."""
    seen, waiting = set(), {start}
    while waiting - seen:
        seen.add(name := min(waiting - seen))
        waiting |= modules[name].imports
    return end in seen


def locked_distributions(root):
    """Normalised names of the distributions that the lock file pins."""
    text = (root / LOCK).read_text(encoding="utf-8")
    return {_normalised(name) for name in re.findall(r"^([\w.-]+)(?:\[.*\])?==", text, re.M)}


def _normalised(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _resolve_imports(module, modules, locked):
    loaded, deferred = set(), set()
    for name, in_function in _imported_names(module):
        internal = _longest_known(name, modules)
        if internal:
            on_the_way = {package for package in modules[internal].packages if package in modules}
            (deferred if in_function else loaded).update({internal} | on_the_way)
            continue
        top = name.split(".")[0]
        if top in SEPARATE_ENVIRONMENTS:
            module.separate = True
        elif top not in sys.stdlib_module_names:
            distribution = DISTRIBUTIONS.get(top, top)
            if _normalised(distribution) not in locked:
                raise ValueError(
                    f"{module.path} imports {name}, which is neither a module of this repository "
                    f"nor in {LOCK}: add it to an extra in setup.py and rebuild the lock, or to "
                    "SEPARATE_ENVIRONMENTS or DISTRIBUTIONS in tools/build_file.py."
                )
            module.requirements.add(distribution)
    module.imports = loaded - module.packages - {module.name}
    module.deferred = deferred - module.packages - {module.name} - loaded
    if module.is_test:
        module.imports |= {
            name for name in modules if name.endswith("conftest") and _above(name, module.name)
        }
        module.requirements.add("pytest")


def _above(conftest, name):
    return name.startswith(conftest.removesuffix("conftest"))


def _imported_names(module):
    """Yields everything the file imports, `from a import b` as a.b, and whether in a function."""
    waiting = [(ast.parse(module.source), False)]
    while waiting:
        node, in_function = waiting.pop()
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        waiting += [(child, in_function) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, in_function
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = module.path.endswith("/__init__.py")
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield f"{base}.{alias.name}", in_function


def _longest_known(name, modules):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in modules:
            return ".".join(parts[:end])
    return None


def render(modules):
    """The text of BUILD for the given modules."""
    text = [HEADER]
    for module in modules.values():
        if module.path == RUNNER:
            continue
        if module.is_test:
            text.append(_rule("py_test", _test_attributes(module)))
            continue
        text.append(_rule("py_library", _library_attributes(module)))
        if module.is_program:
            text.append(_rule("py_binary", _binary_attributes(module)))
    return "\n".join(text)


def _library_attributes(module):
    attributes = {"name": module.name}
    if module.path.startswith("tests/"):
        attributes["testonly"] = True
    attributes["srcs"] = [module.path]
    if module.path == "keras_dp/__init__.py":
        attributes["data"] = ["keras_dp/py.typed"]
    if module.separate:
        attributes["tags"] = ["manual"]
    attributes["deps"] = _dependencies(module)
    return attributes


def _binary_attributes(module):
    attributes = {"name": module.path.removesuffix(".py"), "srcs": [module.path]}
    attributes["main"] = module.path
    if module.separate:
        attributes["tags"] = ["manual"]
    attributes["deps"] = [f'":{module.name}"']
    return attributes


def _test_attributes(module):
    attributes = {"name": module.path.removesuffix(".py")}
    attributes["size"] = "enormous" if "mark.slow" in module.source else "large"
    attributes["srcs"] = [module.path, RUNNER]
    attributes["args"] = [module.path]
    attributes["data"] = [":test_data"]
    attributes["main"] = RUNNER
    # A test that looks outside tests/ reads the source tree, which a sandbox does not have and
    # whose changes Bazel does not see.
    if ".parents[" in module.source:
        attributes["tags"] = ["external", "local"]
    if "mark.tpu" in module.source:  # needs the environment that `make bench-tpu-install` makes
        attributes["tags"] = ["external", "local", "manual"]
    attributes["deps"] = _dependencies(module)
    return attributes


def _dependencies(module):
    internal = [f'":{name}"' for name in sorted(module.imports)]
    return internal + [f'requirement("{name}")' for name in sorted(module.requirements)]


def _rule(kind, attributes):
    lines = [f"{kind}("]
    for key, value in attributes.items():
        if isinstance(value, str):
            value = f'"{value}"'
        elif isinstance(value, list):
            value = _list(value if key == "deps" else [f'"{item}"' for item in value])
        if value != "[]":
            lines.append(f"    {key} = {value},")
    return "\n".join([*lines, ")", ""])


def _list(items):
    if len(items) < 2:
        return f"[{', '.join(items)}]"
    return "\n".join(["[", *(f"        {item}," for item in items), "    ]"])


def main(argv=None):
    """Writes or checks BUILD; the exit code says whether it was up to date."""
    parser = argparse.ArgumentParser(description="Write BUILD from the Python files.")
    parser.add_argument("--check", action="store_true", help="only compare, and show the changes")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parents[1])
    options = parser.parse_args(argv)
    path = options.root / "BUILD"
    wanted = render(read_modules(options.root))
    if not options.check:
        path.write_text(wanted, encoding="utf-8")
        return 0
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = difflib.unified_diff(
        found.splitlines(), wanted.splitlines(), "BUILD", "BUILD as it should be", lineterm=""
    )
    print("\n".join(diff))
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())
