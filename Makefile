# make demo | test | lint | kernels | binding | clean. Each sets up what it needs, once; later runs are quick.
PYTHON ?= python3# the interpreter that the environment is made from, and that `make binding` compiles for
VENV ?= .venv
PY := $(VENV)/bin/python
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null)
TORCH ?= $(if $(HAS_GPU),torch>=2.4,torch==2.13.0)# where the interpreter brings none of its own
CPP_SOURCES = $(wildcard $(addprefix kernels/*.,h cuh cu cpp) $(addprefix cutlass_ext/*.,h cuh) tests/*.cpp)
BUILD = PYTHONPATH=kernels $(PY) -m weightonly_build
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint mypy kernels binding clean

demo: $(VENV)/demo.stamp
	@$(BUILD) requirements | xargs -r $(PY) -m pip install --quiet
	$(BUILD) auto
	$(PY) examples/encoder.py

test: $(VENV)/test.stamp
	@$(BUILD) requirements | xargs -r $(PY) -m pip install --quiet
	$(BUILD) auto
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/dev.stamp mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)

# mypy does not know the mapped folders of setup.py: build/mypy holds the package as it is installed.
mypy: $(VENV)/dev.stamp
	rm -rf build/mypy && mkdir -p build/mypy/weightonly
	ln -s $(abspath $(filter-out %/lib %/__pycache__,$(wildcard weightonly/*)) heuristics bench) build/mypy/weightonly/
	$(VENV)/bin/mypy -p weightonly
	$(VENV)/bin/mypy setup.py kernels
	$(VENV)/bin/mypy examples tests

# Every CUDA kernel for WEIGHTONLY_ARCHS (80,90a), on a machine that needs nvcc and no GPU.
kernels: $(VENV)/made.stamp
	$(BUILD) kernels

# The pybind11 module alone, for $(PYTHON), against the kernels library in weightonly/lib: one library serves every Python.
binding:
	PYTHONPATH=kernels $(PYTHON) -m weightonly_build binding

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
	$(PY) -m pip install --quiet 'setuptools>=70.1' 'pybind11>=2.12'
	WEIGHTONLY_CUDA=off $(PY) -m pip install --quiet --no-build-isolation --editable '.[$*]'
	@touch $@
