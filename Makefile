# make demo | test | test-gpu | test-vllm | test-sglang | lint | docs | screenshots | kernels | binding | wheel | clean. Each sets up what it needs, once; later runs are quick.
PYTHON ?= python3# the interpreter that the environment is made from, and that `make binding` compiles for
VENV ?= .venv
PY := $(VENV)/bin/python
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null)
TORCH ?= $(if $(HAS_GPU),torch>=2.4,torch==2.13.0)# where the interpreter brings none of its own
CPP_SOURCES = $(shell find cutlass_ext kernels tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')
HASHED := --require-hashes --only-binary=:all: -r kernels/weightonly_build/requirements.txt
BUILD = PYTHONPATH=kernels $(PY) -m weightonly_build
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-gpu test-vllm test-sglang lint docs screenshots mypy kernels binding wheel clean

demo: $(VENV)/demo.stamp
	@$(BUILD) requirements | xargs -r $(PY) -m pip install --quiet
	$(BUILD) auto
	$(PY) examples/encoder.py

# More processes would wait for each other: the kernels of CPUs take all cores.
CPU_TEST_PROCESSES ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))

test: $(VENV)/test.stamp
	@$(BUILD) requirements | xargs -r $(PY) -m pip install --quiet
	$(BUILD) auto
	$(PY) -m pytest -n $(CPU_TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

# The tests of mark gpu alone. Their time is that of the CPU, which makes what they compare: many processes share the GPU.
TEST_PROCESSES ?= $(shell cores=$$(nproc); echo $$((cores < 5 ? 1 : cores < 16 ? cores - 4 : 12)))
test-gpu: $(VENV)/test.stamp
	@$(BUILD) requirements | xargs -r $(PY) -m pip install --quiet
	$(BUILD) auto
	OMP_NUM_THREADS=1 $(PY) -m pytest -m gpu -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

# The plug-in in vLLM's own layers, on the CPU, with each of VLLM_VERSIONS: 4 GB in .venv-vllm. vLLM's wheel comes without
# its CUDA libraries, which layers on the CPU do not need, and beside the PyTorch of tests/vllm/requirements.txt.
VLLM_VERSIONS ?= 0.33.0 0.32.0 0.29.0
test-vllm: .venv-vllm/made.stamp
	@for version in $(VLLM_VERSIONS); do \
	  .venv-vllm/bin/pip install --quiet --no-deps "vllm==$$version" && echo "vLLM $$version" && \
	  VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR .venv-vllm/bin/python -m pytest $(PYTEST_ARGS) tests/vllm \
	  || exit 1; \
	done

.venv-vllm/made.stamp: tests/vllm/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet -r tests/vllm/requirements.txt
	WEIGHTONLY_CUDA=off .venv-vllm/bin/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# The plug-in in SGLang's own linear layers, on the CPU: 2 GB in .venv-sglang.
SGLANG_VERSION ?= 0.5.23
test-sglang: .venv-sglang/made.stamp
	.venv-sglang/bin/pip install --quiet --no-deps "sglang==$(SGLANG_VERSION)"
	.venv-sglang/bin/python -m pytest $(PYTEST_ARGS) tests/sglang

.venv-sglang/made.stamp: tests/vllm/requirements.txt tests/sglang/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet -r tests/vllm/requirements.txt
	.venv-sglang/bin/pip install --quiet --no-deps -r tests/sglang/requirements.txt
	WEIGHTONLY_CUDA=off .venv-sglang/bin/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

lint: $(VENV)/dev.stamp mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)

# The site of docs/, in build/site. A broken link is an error.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# Pictures of every page in build/screenshots, as a phone and a desk show it. What is wider than the page is an error.
screenshots: docs $(VENV)/screenshots.stamp
	$(PY) -m tools.screenshots

# mypy does not know the mapped folders of setup.py: build/mypy holds the package as it is installed.
mypy: $(VENV)/dev.stamp
	rm -rf build/mypy && mkdir -p build/mypy/weightonly
	ln -s $(abspath $(filter-out %/lib %/__pycache__,$(wildcard weightonly/*)) heuristics bench) build/mypy/weightonly/
	$(VENV)/bin/mypy -p weightonly
	$(VENV)/bin/mypy setup.py kernels
	$(VENV)/bin/mypy examples tests tools

# Every CUDA kernel for WEIGHTONLY_ARCHS (80,90a), on a machine that needs nvcc and no GPU.
kernels: $(VENV)/made.stamp
	$(BUILD) kernels

# The pybind11 module alone, for $(PYTHON), against the kernels library in weightonly/lib: one library serves every Python.
binding:
	PYTHONPATH=kernels $(PYTHON) -m weightonly_build binding

# Two wheels in dist/, built with packages whose hashes are pinned: of the kernels, and of the package with its module
# for Python 3.10 to 3.14, whose interpreters are on PATH or in WEIGHTONLY_PYTHONS. Needs nvcc and no GPU.
wheel: $(VENV)/made.stamp
	$(PY) -m pip install --quiet $(HASHED) -r kernels/weightonly_build/wheel_requirements.txt
	$(BUILD) wheels

clean:
	rm -rf build weightonly/lib weightonly/_C*.so weightonly/_build.json weightonly.egg-info

$(VENV)/made.stamp:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# A PyTorch that works in the interpreter (and sees the GPU, where there is one) is used as it is.
TORCH_WORKS = import torch; assert torch.ones(2).sum() == 2 and ($(if $(HAS_GPU),torch.cuda.is_available(),True))
SITE = import sysconfig; print(sysconfig.get_path("purelib"))
$(VENV)/torch.stamp: $(VENV)/made.stamp
	@if $(PYTHON) -c '$(TORCH_WORKS)' 2>/dev/null; then \
	  $(PYTHON) -c '$(SITE)' >"$$($(PY) -c '$(SITE)')/interpreter.pth"; \
	  echo "using the PyTorch of $(PYTHON)"; \
	else \
	  echo "installing $(TORCH)"; \
	  $(PY) -m pip install --quiet '$(TORCH)'; \
	fi
	@touch $@

# The package itself is installed from the checkout without kernels; `$(BUILD) auto` brings them up to date each time.
$(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml setup.py
	$(PY) -m pip install --quiet $(HASHED)
	WEIGHTONLY_CUDA=off $(PY) -m pip install --quiet --no-build-isolation --editable '.[$*]'
	@touch $@
