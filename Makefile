# Each target makes .venv and installs into it, if that was not done since the requirements changed.
PYTHON ?= python3
VENV := .venv/bin
READY := .venv/ready
CONSTRAINTS := constraints$(shell $(PYTHON) -c "import sys; print('-3.10' * (sys.version_info < (3, 11)))").txt
IN_ORDER := -m pytest --dist loadfile --no-loadscope-reorder # of the arguments, which have the longest files first
UNIT := OMP_NUM_THREADS=1 $(VENV)/python $(IN_ORDER) -n 2
RANKS := OMP_WAIT_POLICY=PASSIVE $(VENV)/python $(IN_ORDER) -n 4 # ranks wait more than they compute

LONG_UNIT := fuzz.py advice.py denoise.py memory.py training.py gpu_check.py stages.py safety.py many_ranks.py predictor.py
UNITS := $(addprefix tests/unit/test_,$(LONG_UNIT) variants.py tiny_model.py other_device.py) tests/unit
LONG_RANKS := nodes.py parity.py survival.py lockstep.py failures.py family_axes.py commands.py launch.py doubles.py
LONG_NOTEBOOKS := $(addprefix tests/notebooks/test_,other_pipelines.py predicting.py notebooks.py planning.py)
WITH_RANKS := $(LONG_NOTEBOOKS) $(addprefix tests/distributed/test_,$(LONG_RANKS) warm_starts.py expert_ranks.py generate.py)
WITH_RANKS += tests/browser tests/notebooks tests/distributed

ESSENTIAL := $(addprefix tests/distributed/test_,parity.py launch.py failures.py warm_starts.py)

WELCOME := --LabApp.default_url=/lab/tree/notebooks/README.md --LabApp.app_settings_dir="$(CURDIR)/launch/jupyterlab"

.PHONY: report documents figures panel-picture test test-all lab lint benchmark gpu-check

report: $(READY) ## execute the notebooks and render HTML into figures/reports
	$(VENV)/python -m launch report

documents: $(READY) ## the experiments of the user's documents, published figures beside (4 minutes); DRY=1: the plan
	$(VENV)/python -m launch documents $(if $(DRY),--dry-run)

figures: $(READY) ## the same, and replace the pictures in figures/ that the README shows
	$(VENV)/python -m launch report --update-figures

panel-picture: $(READY) ## renew figures/panel.png, which shows the panel where there is no kernel; needs Chromium
	$(VENV)/python -m tests.browser.panel_picture

test: $(READY) ## what shows that a change is right, in minutes: tests without ranks, exactness, launching, failures
	$(UNIT) -m "not slow" $(UNITS)
	$(RANKS) -m "not slow" $(ESSENTIAL)

test-all: $(READY) ## everything, as CI runs it
	$(UNIT) $(UNITS)
	$(RANKS) $(WITH_RANKS)

lab: $(READY) ## open the workbook; JUPYTER_OPTS="--no-browser --port=8890": options of JupyterLab
	$(VENV)/jupyter lab --allow-root $(WELCOME) $(JUPYTER_OPTS)

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

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	touch $(READY)
