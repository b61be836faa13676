# Each target makes .venv and installs into it, if that was not done since the requirements changed.
PYTHON ?= python3
VENV := .venv/bin
READY := .venv/ready
IN_ORDER := -m pytest --dist loadfile --no-loadscope-reorder # of the arguments, which have the longest files first
UNIT := OMP_NUM_THREADS=1 $(VENV)/python $(IN_ORDER) -n 2
RANKS := OMP_WAIT_POLICY=PASSIVE $(VENV)/python $(IN_ORDER) -n 4 # ranks wait more than they compute

LONG_UNIT := advice.py fuzz.py memory.py safety.py denoise.py gpu_check.py stages.py predictor.py many_ranks.py variants.py
UNITS := $(addprefix tests/unit/test_,$(LONG_UNIT) tiny_model.py other_device.py training.py) tests/unit
LONG_RANKS := parity.py survival.py nodes.py lockstep.py failures.py doubles.py launch.py warm_starts.py peers.py
LONG_NOTEBOOKS := $(addprefix tests/notebooks/test_,other_pipelines.py predicting.py notebooks.py planning.py)
WITH_RANKS := $(LONG_NOTEBOOKS) tests/notebooks $(addprefix tests/distributed/test_,$(LONG_RANKS)) tests/browser tests/distributed

ESSENTIAL := $(addprefix tests/distributed/test_,parity.py launch.py failures.py warm_starts.py)

.PHONY: report figures test test-all lab lint benchmark gpu-check

report: $(READY) ## execute the notebooks and render HTML into figures/reports
	$(VENV)/python -m launch report

figures: $(READY) ## the same, and replace the pictures in figures/ that the README shows
	$(VENV)/python -m launch report --update-figures

test: $(READY) ## what shows that a change is right, in minutes: tests without ranks, exactness, launching, failures
	$(UNIT) -m "not slow" $(UNITS)
	$(RANKS) -m "not slow" $(ESSENTIAL)

test-all: $(READY) ## everything, as CI runs it
	$(UNIT) $(UNITS)
	$(RANKS) $(WITH_RANKS)

lab: $(READY) ## open the workbook; JUPYTER_OPTS="--no-browser --port=8890": options of JupyterLab
	$(VENV)/jupyter lab --allow-root $(JUPYTER_OPTS) notebooks

lint: $(READY) ## ruff (notebooks included) and mypy
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

benchmark: $(READY) ## step pipeline and splitting one forward pass against the machine's limit, predictions (55 minutes)
	$(VENV)/python -m tests.benchmarks.step_pipeline
	$(VENV)/python -m tests.benchmarks.one_rank
	$(VENV)/python -m tests.benchmarks.latency
	$(VENV)/python -m tests.benchmarks.planner
	$(VENV)/python -m tests.benchmarks.predictions runs/predictions.png

gpu-check: $(READY) ## peak memory on the CUDA devices here, measured, predicted, published; peers (minutes); DRY=1: the plan
	$(VENV)/python -m tests.gpu.check $(if $(DRY),--dry)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)
