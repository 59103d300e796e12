# make help lists what there is. Everything runs in .venv, which `make setup` makes.
PYTHON ?=
VENV := .venv/bin
SETUP := .venv/.setup-done

# Every process that a test starts would compile trtx's sources anew, and pytest those of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo fmt check unit test proof test-gpu test-trtllm bench-streaming bench-gpu kernels goldens reference docs lock clean

help:     ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(SETUP) ## environment and installation, nothing else

$(SETUP): pyproject.toml requirements.lock tools/setup
	@echo "setting up .venv (some minutes the first time)"
	@tools/setup $(PYTHON)
	@touch $@

demo: $(SETUP) ## serve a small model twice, agg and disagg, sweep both, write a report
	$(VENV)/trtx bench --sweep sweeps/demo.yaml -o runs

fmt: $(SETUP) ## format the sources
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

check: $(SETUP) ## lint, types
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/mypy trtx benchmarks tools/training

unit: $(SETUP) ## the loop of a day's work: one minute, no server, no aiperf, no page
	$(VENV)/python -m pytest -q --forks 2 --hypothesis-profile quick \
	  -m "not proof and not gpu and not slow" tests/unit

# Four forks on two cores, as many tests wait for processes.
test: $(SETUP) ## the tests, without the long ones and those for GPUs
	$(VENV)/python -m pytest -q --forks 4 -m "not proof and not gpu"

proof: $(SETUP) ## the long ones: random kills, soaks, and every example of the property tests
	$(VENV)/python -m pytest -q -m proof
	$(VENV)/python -m pytest -q --forks 2 --hypothesis-profile full -m "hypothesis and not proof and not gpu"

test-gpu: $(SETUP) ## the tests that need a GPU
	$(VENV)/python -m pytest -q -m gpu

test-trtllm: $(SETUP) ## what CI runs with the stand-in, with the TensorRT-LLM that is installed
	$(VENV)/python -m pytest -q -m trtllm tests/trtllm --trtllm installed

bench-streaming: $(SETUP) ## what streaming costs, beside upstream's way
	$(VENV)/python benchmarks/streaming.py

bench-gpu: $(SETUP) ## GPU figures again, in sections that are resumed; ARGS="--peer vllm=DIR" for vLLM beside them
	$(VENV)/python benchmarks/bench_gpu.py $(ARGS)

kernels: $(SETUP) ## registers, local memory and a hash of the PTX of each Triton kernel for sm_90; needs triton, no GPU
	@$(VENV)/python benchmarks/kernel_code.py $(ARGS)

goldens: $(SETUP) ## rewrite the files that trtx makes of the golden run, and fail: look at the difference
	TRTX_WRITE_GOLDEN=1 $(VENV)/python -m pytest -q tests/unit/report/test_golden.py tests/unit/test_licences.py

reference: $(SETUP) ## rewrite the tables of docs/ that follow from the code
	$(VENV)/python tools/reference.py

docs: .venv-docs/.done ## build the site of docs/ into site/; a warning or a broken link fails
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "site/index.html"

.venv-docs/.done: docs/requirements.txt $(SETUP)
	@$(VENV)/python -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

lock: $(SETUP) ## rewrite requirements.lock
	tools/lock

clean: ## remove the environment and the caches, keep runs/
	rm -rf .venv .venv-docs site build *.egg-info .pytest_cache .mypy_cache .ruff_cache
