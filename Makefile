# make demo          train a small private model and print its epsilon
# make test          everything CI runs: style, fast tests, lowest versions, heavy tests, TPU programs
# make lint, format  check, or repair, the style
# make bench         measure against plain Keras: time, memory, roofline (about an hour and a half)
# make bench-peers   measure against other libraries (also in environments of their own; an hour)
# make bench-tpu     compile private steps for TPUs, without a TPU (1 GB to download; an hour)
# make clean         remove everything that make created
#
# Needs python3 (3.10 to 3.13) and make; the rest goes into .venv. Options:
#   PYTHON=python3.12   the interpreter
#   TF=tensorflow       the TensorFlow build: tensorflow, cpu, gpu or tpu (an extra of setup.py)
#   WORKERS=2           processes that run the fast tests
#   BENCH="--repeats=1 --resume"   flags for the measurements of `make bench` and `make bench-peers`
#   PYTHON311=...       the Python 3.11 that the other libraries and the TPU compiler need
#   TPU="--models=cnn"  flags for `make bench-tpu`
#   LOWEST_TESTS=...    what `make test` also runs with the lowest versions that setup.py allows

PYTHON ?= python3
# tensorflow-cpu has no wheels for ARM; there, plain tensorflow is the build for the CPU.
TF ?= $(if $(filter aarch64 arm64,$(shell uname -m)),tensorflow,cpu)
WORKERS ?= 2
PYTHON311 ?= $(shell $(PYTHON) -c 'import sys; print(\
	sys.executable if sys.version_info[:2] == (3, 11) else "python3.11")')
# What an older TensorFlow, Keras, NumPy or dp-accounting can change; all of tests/ takes too long.
LOWEST_TESTS ?= tests/conformance/test_lin.py tests/conformance/test_same.py tests/optimizers \
	tests/accounting tests/auditing tests/test_keras_private.py tests/test_requirements.py \
	tests/test_training.py tests/test_validation.py

ifeq ($(filter tensorflow cpu gpu tpu,$(TF)),)
$(error TF=$(TF) is no build of TensorFlow: set TF to tensorflow, cpu, gpu or tpu)
endif

VENV := .venv
LOWEST := .venvs/lowest
PACKAGE_FILES := setup.py pyproject.toml keras_dp/version.py

export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Settings of the caller's shell that would test something else than this tree.
export KERAS_BACKEND := tensorflow
unexport TF_USE_LEGACY_KERAS PYTHONPATH PYTHONHOME

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-fast test-lowest test-slow test-tpu lint format bench bench-peers \
	bench-peers-install bench-tpu bench-tpu-install build-file clean

demo: $(VENV)/demo.installed
	$(VENV)/bin/python -m train_scripts.demo --output_dir=output/demo

test: lint test-fast test-lowest test-slow test-tpu

test-fast: $(VENV)/dev.installed
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile

test-lowest: $(LOWEST)/dev.installed
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(LOWEST_TESTS)

test-slow: $(VENV)/dev.installed
	$(VENV)/bin/python -m pytest -m slow -n $(WORKERS)

test-tpu: bench-tpu-install
	$(VENV)/bin/python -m pytest -m tpu tests/benchmarks

lint: $(VENV)/dev.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/dev.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# One file of results: the commands add to it, and so does the next `make bench BENCH=--resume`.
bench: $(VENV)/dev.installed
	$(if $(findstring --resume,$(BENCH)),,rm -f output/bench/results.jsonl)
	$(VENV)/bin/python -m benchmarks.run --resume --jit_compile=false,true $(BENCH)
	$(VENV)/bin/python -m benchmarks.run --resume --microbatches --steps=6 $(BENCH)
	$(VENV)/bin/python -m benchmarks.run --resume --backends=vectorized,loop --repeats=1 $(BENCH)
	$(VENV)/bin/python -m benchmarks.memory $(BENCH)
	$(VENV)/bin/python -m benchmarks.roofline

bench-peers-install: $(VENV)/dev.installed
	$(VENV)/bin/python -m benchmarks.peers.run --install_only --python=$(PYTHON311)

bench-peers: $(VENV)/dev.installed
	$(VENV)/bin/python -m benchmarks.peers.run --python=$(PYTHON311) $(BENCH)

bench-tpu-install: $(VENV)/dev.installed
	$(VENV)/bin/python -m benchmarks.tpu.run --install_only --python=$(PYTHON311)

# What is in output/tpu/results.jsonl already is not compiled again.
bench-tpu: $(VENV)/dev.installed
	$(VENV)/bin/python -m benchmarks.tpu.run --python=$(PYTHON311) $(TPU)
	$(VENV)/bin/python -m benchmarks.tpu.run --python=$(PYTHON311) --cost
	$(VENV)/bin/python -m benchmarks.tpu.cost

build-file: $(VENV)/dev.installed
	$(VENV)/bin/python -m tools.build_file

clean:
	rm -rf .venv .venvs output build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The name of the stamp holds the build of TensorFlow: two builds overwrite each other, so another
# one starts from an empty environment.
$(VENV)/$(TF).created $(LOWEST)/$(TF).created: %/$(TF).created:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit(\
	"keras_dp needs Python 3.10 to 3.13, and $(PYTHON) is %d.%d: set PYTHON=." % v)'
	@echo "Creating $*"
	@rm -rf $*
	@$(PYTHON) -m venv $*
	@$*/bin/python -m pip install --quiet --quiet --upgrade pip
	@touch $@

$(VENV)/demo.installed $(VENV)/dev.installed: $(VENV)/%.installed: \
		$(PACKAGE_FILES) $(VENV)/$(TF).created
	@echo "Installing keras_dp[$(TF),$*] into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet --quiet --editable ".[$(TF),$*]"
	@touch $@

$(LOWEST)/dev.installed: $(LOWEST)/%.installed: \
		$(PACKAGE_FILES) constraints-lowest.txt $(LOWEST)/$(TF).created
	@echo "Installing keras_dp[$(TF),$*] into $(LOWEST), with the lowest versions of setup.py"
	@$(LOWEST)/bin/python -m pip install --quiet --quiet --constraint constraints-lowest.txt \
		--editable ".[$(TF),$*]"
	@touch $@
