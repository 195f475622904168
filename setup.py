"""The part of the packaging that pyproject.toml cannot say: the mapped folders, and the CUDA build.

kernels/weightonly_build/target.py explains WEIGHTONLY_CUDA=auto|on|off and WEIGHTONLY_ARCHS=80,90a.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "kernels"))
from weightonly_build import cpu, library, target  # noqa: E402  (found through the line above)

DECISION = target.decide_here()
MAPPED = ("heuristics", "bench")  # top-level folders that are installed below weightonly


class PlatformDistribution(Distribution):
    """A wheel with kernels in it serves one platform and one Python."""

    def has_ext_modules(self) -> bool:
        return DECISION.cuda or cpu.find_compiler() is not None


class BuildPy(build_py):
    """Starts from an empty folder: build/lib would bring modules and kernels of earlier builds along."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "weightonly", ignore_errors=True)
        super().run()


class BuildKernels(Command):
    """Builds the kernels into weightonly/ (build/ keeps the objects), and copies them into a wheel."""

    description = "build the kernels and the build metadata"
    user_options: list[tuple[str, str, str]] = []  # noqa: RUF012  (setuptools' own form)
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        if DECISION.cuda or self.editable_mode:
            library.build_in_tree(DECISION)
        else:
            cpu.build()
        if self.editable_mode:
            return
        for source, copy in self.copied().items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
        if not DECISION.cuda:
            print(f"weightonly: no CUDA kernels are built ({DECISION.reason}); WEIGHTONLY_CUDA=on builds them")
            metadata = Path(str(self.build_lib)) / library.METADATA.relative_to(ROOT)
            library.write_metadata(metadata, DECISION)

    def copied(self) -> dict[Path, Path]:
        """Built file -> its place in the wheel."""
        sources = [library.LIBRARY, library.MODULE, library.KERNELS_RECORD] if DECISION.cuda else []
        sources += [cpu.LIBRARY] if cpu.LIBRARY.is_file() else []
        return {source: Path(str(self.build_lib)) / source.relative_to(ROOT) for source in sources}

    # setuptools asks a build step for these to make an editable install.
    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return [str(copy) for copy in self.copied().values()]

    def get_output_mapping(self) -> dict[str, str]:
        return {str(copy): str(source) for source, copy in self.copied().items()}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]  # noqa: RUF012  (setuptools' own form)


def packages() -> list[str]:
    mapped = find_packages(include=[pattern for name in MAPPED for pattern in (name, f"{name}.*")])
    return find_packages(include=["weightonly", "weightonly.*"]) + [f"weightonly.{name}" for name in mapped]


setup(
    packages=packages(),
    package_dir={f"weightonly.{name}": name for name in MAPPED},
    package_data={"weightonly": ["py.typed", "*.pyi"]},
    include_package_data=False,
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_py": BuildPy, "build_kernels": BuildKernels},
)
